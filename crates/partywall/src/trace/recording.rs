//! Recording: keeps the events of a domain, and the command lines of its processes, until they are written to a file.

use std::{collections::BTreeMap, thread, time::Duration};

use super::{ChromeTrace, TraceEvent, Tracer};
use crate::domain::Domain;

/// Keeps what the processes of a domain do, from [`Domain::record_trace`] until [`finish`](Self::finish).
///
/// ```no_run
/// # use std::{fs::File, io::BufWriter, time::Duration};
/// # use partywall::Domain;
/// let mut recording = Domain::connect()?.record_trace(1_000_000);
/// for _ in 0..200 {
///     recording.poll();
/// }
/// let trace = recording.finish(|name| name.starts_with("camera"));
/// println!("{} events, {} lost", trace.events(), trace.lost());
/// trace.write(&mut BufWriter::new(File::create("trace.json")?))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Recording {
    tracer: Tracer,
    events: Vec<TraceEvent>,
    max_events: usize,
    left_out: u64,
    /// The command lines of processes; empty for a process that the broker did not know when it was asked. At most
    /// [`MAX_COMMANDS`] and one for each member: a process that breaks the rules may record any number of pids.
    commands: BTreeMap<u32, String>,
}

impl Domain {
    /// Begins to record a trace of at most `max_events` events; later ones count as lost.
    pub fn record_trace(&self, max_events: usize) -> Recording {
        let mut recording = Recording {
            // Asked before the first event: a process may record one and be gone at the next reading.
            commands: command_lines(self),
            tracer: self.trace(),
            events: Vec::new(),
            max_events,
            left_out: 0,
        };
        recording.read();
        recording
    }
}

impl Recording {
    /// Sleeps for 5 ms, and reads what processes have done meanwhile. To be called in a loop: a process that records
    /// less than 800,000 events a second loses none.
    pub fn poll(&mut self) {
        thread::sleep(PAUSE);
        self.read();
    }

    /// Ends the recording. Keeps the events of the topics, queues and timelines for whose names `is_wanted` returns
    /// true. Objects without a name, see [`Tracer::name`], have the name `""` here, and their number in the trace.
    pub fn finish(mut self, is_wanted: impl Fn(&str) -> bool) -> ChromeTrace {
        self.read();
        let Self { tracer, mut events, left_out, commands, .. } = self;
        events.retain(|event| is_wanted(tracer.name(event.object).map_or("", |(_, name)| name)));
        let name = |object| tracer.name(object).map_or_else(|| format!("{object:016x}"), |(_, name)| name.to_owned());
        ChromeTrace::new(events, name, commands, tracer.lost() + left_out)
    }

    fn read(&mut self) {
        let read = self.tracer.read();
        self.learn_commands(&read);
        let room = self.max_events - self.events.len();
        self.left_out += read.len().saturating_sub(room) as u64;
        self.events.extend(read.into_iter().take(room));
    }

    /// Asks for the command lines of new processes, while these are still there.
    fn learn_commands(&mut self, read: &[TraceEvent]) {
        if self.commands.len() < MAX_COMMANDS && read.iter().any(|event| !self.commands.contains_key(&event.pid)) {
            self.commands.extend(command_lines(&self.tracer.domain));
            for event in read.iter().take(MAX_COMMANDS.saturating_sub(self.commands.len())) {
                self.commands.entry(event.pid).or_default();
            }
        }
    }
}

/// Returns the command lines of the domain's processes; none if the broker is gone.
fn command_lines(domain: &Domain) -> BTreeMap<u32, String> {
    let members = domain.members().unwrap_or_default();
    members.into_iter().map(|member| (member.pid, member.command)).collect()
}

/// The pause between two readings.
const PAUSE: Duration = Duration::from_millis(5);

/// How many processes may have a command line. Later ones have none in the trace.
const MAX_COMMANDS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use partywall_harness::World;

    use super::*;
    use crate::trace::Action;

    #[test]
    fn process_that_records_many_pids_does_not_fill_the_memory_of_the_reader() {
        let world = World::new();
        let domain = Domain::options().socket(world.socket()).start(false).connect().unwrap();
        let mut recording = domain.record_trace(1);
        let event = |pid| {
            let action = Action::Signal;
            TraceEvent { since: 0, at: 0, pid, tid: pid, action, object: 0, value: 0, attempt: 0 }
        };
        // Above the pids that the kernel gives out.
        let invented: Vec<_> = (u32::MAX - 2 * MAX_COMMANDS as u32..u32::MAX).map(event).collect();
        recording.learn_commands(&invented);
        assert!((MAX_COMMANDS..=MAX_COMMANDS + 1).contains(&recording.commands.len()));
        assert!(recording.commands.contains_key(&std::process::id()));
    }
}
