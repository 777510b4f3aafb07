//! `partywall trace`: writes what the processes of a domain publish, receive, release, signal and wait for, as a file for
//! <https://ui.perfetto.dev>.
//!
//! With `--json` it prints an object with `out` (the file), `events`, `arrows` (between events), `processes`, `lost` (events
//! that were not read in time) and `seconds`.

mod chrome;

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{BufWriter, ErrorKind as IoErrorKind, Write},
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use clap::Args;
use partywall::{Domain, ErrorKind, Pattern, TraceEvent, Tracer};
use serde_json::json;

use crate::{Context, failure::Failure, signals, text};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Trace only topics and timelines whose names match; `*` stands for any characters, also `/`, and `?` for one
    #[arg(value_name = "NAME", value_parser = Pattern::new)]
    names: Vec<Pattern>,
    /// How long to trace; Ctrl-C ends it earlier
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = text::parse_seconds)]
    seconds: Duration,
    /// The file, in Chrome's format for traces
    #[arg(long, value_name = "FILE", default_value = "trace.json")]
    out: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// How many events to keep; later ones count as lost
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000_000)]
    max_events: usize,
}

/// Returns the command lines of the domain's processes.
fn command_lines(domain: &Domain) -> Result<BTreeMap<u32, String>, Failure> {
    Ok(domain.members()?.into_iter().map(|member| (member.pid, member.command)).collect())
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let stop = signals::cancel_flag()?;
    let domain = context.options().start(false).operator(true).connect()?;
    // Asked before the first event: a process may record one and be gone at the next reading.
    let mut commands = command_lines(&domain)?;
    let file = create(arguments)?;
    let mut tracer = domain.trace();
    let start = Instant::now();
    let output = context.output();
    output.note(format!("tracing the domain at {}; Ctrl-C ends it", domain.socket().display()));
    let mut events: Vec<TraceEvent> = Vec::new();
    let mut left_out = 0_u64;
    loop {
        let is_over = start.elapsed() >= arguments.seconds || stop.load(Ordering::Relaxed);
        let read = tracer.read()?;
        // Asked while the processes are still there.
        if read.iter().any(|event| !commands.contains_key(&event.pid)) {
            commands.extend(command_lines(&domain)?);
            for event in &read {
                commands.entry(event.pid).or_default();
            }
        }
        for event in read {
            if events.len() < arguments.max_events {
                events.push(event);
            } else {
                left_out += 1;
            }
        }
        if is_over {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    let took = start.elapsed().as_secs_f64();
    let lost = tracer.lost() + left_out;
    events.retain(|event| is_wanted(&tracer, &arguments.names, event));
    let name = |object| tracer.name(object).map_or_else(|| format!("{object:016x}"), |(_, name)| name.to_owned());
    let trace = chrome::Trace::new(events, name, &commands, lost);
    let failed = |error: std::io::Error| Failure::system(&format!("writing {}", arguments.out.display()), error);
    let mut out = BufWriter::new(file);
    trace.write(&mut out).and_then(|()| out.flush()).map_err(failed)?;
    let out = arguments.out.display();
    let processes = trace.pids().len();
    output.value(&json!({
        "out": arguments.out,
        "events": trace.events(),
        "arrows": trace.arrows(),
        "processes": processes,
        "lost": lost,
        "seconds": took,
    }));
    let what = text::count(trace.events() as u64, "event");
    let of = if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") };
    output.line(format!("{what} of {of} in {took:.1} s are in {out}, {lost} lost; open it at https://ui.perfetto.dev"));
    Ok(())
}

/// Creates the file before anything is traced, so that a wrong name costs no time.
fn create(arguments: &Arguments) -> Result<File, Failure> {
    let path = &arguments.out;
    let mut options = OpenOptions::new();
    options.write(true);
    if arguments.force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    options.open(path).map_err(|error| match error.kind() {
        IoErrorKind::AlreadyExists => Failure::new(
            ErrorKind::Refused,
            format!("{} already exists", path.display()),
            "name another file with --out, or add --force to replace this one",
        ),
        _ => Failure::system(&format!("creating {}", path.display()), error)
            .with_advice("name a file in a folder that you may write to with --out"),
    })
}

fn is_wanted(tracer: &Tracer, names: &[Pattern], event: &TraceEvent) -> bool {
    names.is_empty()
        || tracer.name(event.object).is_some_and(|(_, name)| names.iter().any(|pattern| pattern.matches(name)))
}

/// The pause between readings. A process that records less than 800,000 events a second loses none meanwhile.
const PAUSE: Duration = Duration::from_millis(5);
