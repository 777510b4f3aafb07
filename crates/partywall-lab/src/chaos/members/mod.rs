//! The members: each repeats one operation until it is killed or asked to end.

use partywall::error::{Busy, DeviceFault, LimitReached};

use super::*;

/// Fills memory that this process holds with one word. The result is that of a call. In pinned memory the CPU and the
/// GPU take turns.
macro_rules! filled {
    ($memory:expr, $device:ident, $place:expr, $word:expr) => {
        (|| -> Result<(), Failure> {
            let memory = &mut $memory;
            if $place == Place::Host || $place.is_cpu_reachable() && $word % 2 == 0 {
                memory.as_mut_slice::<u64>()?.fill($word);
            } else {
                let range = memory.$device()?;
                range.copy_from_host(range.gpu().stream(), &$word.to_le_bytes().repeat(WORDS as usize))?;
            }
            Ok(())
        })()
    };
}

/// Returns the word that fills memory, or `None` if its words differ, or if the CPU and the GPU read different words in
/// pinned memory.
macro_rules! word {
    ($memory:expr, $place:expr, $range:expr) => {{
        let by_cpu = match $place.is_cpu_reachable() {
            true => Some(same($memory.as_slice::<u64>()?.iter().copied())),
            false => None,
        };
        let by_gpu = match $place {
            Place::Host => None,
            _ => {
                let range = $range;
                let bytes = device::bytes_of(range.gpu(), range.as_slice()).doing("reading memory")?;
                Some(same(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))))
            }
        };
        match (by_cpu, by_gpu) {
            (Some(one), Some(other)) if one != other => None,
            (one, other) => one.or(other).flatten(),
        }
    }};
}

mod queues;
mod segments;
mod slots;
mod topics;

pub(super) use self::{
    queues::{submitter, worker},
    segments::{builder, reader, watcher, writer},
    slots::{holder, maker, taker},
    topics::{publisher, subscriber, viewer},
};

/// Returns what the process lacked.
fn lacked(error: &Error) -> Option<Resource> {
    match error {
        Error::LimitReached(LimitReached::FileDescriptors(_)) => Some(Resource::Descriptors),
        Error::LimitReached(LimitReached::SystemMemory { .. } | LimitReached::Memory { place: Place::Host, .. }) => {
            Some(Resource::Memory)
        }
        // Memory of a simulated GPU is a file.
        Error::DeviceFault(DeviceFault::Cuda { source, .. }) if source.code == CuResult::OPERATING_SYSTEM => {
            Some(Resource::Descriptors)
        }
        _ => None,
    }
}

fn same(mut words: impl Iterator<Item = u64>) -> Option<u64> {
    let first = words.next()?;
    words.all(|word| word == first).then_some(first)
}

pub(super) struct Member<'a> {
    session: &'a mut Session,
    history: History,
    /// Returns the next number, which no other member uses.
    next: u64,
    /// Decides which of several operations comes next.
    dice: SplitMix,
    /// The GPU that uses the memory, if any.
    gpu: Option<Arc<Gpu>>,
}

/// Plays a member, until the observer asks it to end. The driver is ready before a member begins that uses the memory
/// of the lab: it could not say that it lacks something while it starts.
pub(super) fn play(
    session: &mut Session,
    uses_memory: bool,
    act: fn(&mut Member<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let job: Job = session.parent().hear()?;
    let history = History::open(&job)?;
    let used = if uses_memory { device::that_uses(session.place)? } else { None };
    let gpu = used.map(|uuid| session.domain().gpu(uuid)).transpose()?;
    let (next, dice) = (u64::from(job.number) << 32, SplitMix::new(job.number.into()));
    let mut member = Member { session, history, next, dice, gpu };
    act(&mut member)?;
    member.history.add(What::Left)
}

impl Member<'_> {
    fn domain(&self) -> &Domain {
        self.session.domain()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the next pseudorandom number below this limit.
    fn below(&mut self, limit: u64) -> u64 {
        self.dice.below(limit)
    }

    /// Tells the observer that this member has opened its object.
    fn begins(&mut self) -> Result<(), Failure> {
        self.session.parent().say(())
    }

    /// Makes a call again until this process has what the call needs.
    fn insist<T, E: Into<Failure>>(&self, name: &str, mut call: impl FnMut() -> Result<T, E>) -> Result<T, Failure> {
        loop {
            if let Some(value) = self.call(name, &mut call)? {
                return Ok(value);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Makes a call. Returns `None` if it timed out, which other members may cause, or if this process lacks what the
    /// call needs, which the observer may cause.
    fn call<T, E: Into<Failure>>(&self, name: &str, call: impl FnOnce() -> Result<T, E>) -> Result<Option<T>, Failure> {
        let start = Instant::now();
        let began = Moment::now();
        let answer = call().map_err(Into::into);
        let took = start.elapsed();
        if took > LATE {
            self.history.add(What::Late { call: name.into(), ms: took.as_millis() as u64 })?;
        }
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(failure) => {
                match failure.error.as_deref() {
                    Some(Error::Timeout { .. } | Error::Busy(Busy::TopicFull { .. })) => return Ok(None),
                    Some(error) => {
                        if let Some(of) = lacked(error) {
                            self.history.add(What::Lacked { call: name.into(), of, began })?;
                            return Ok(None);
                        }
                    }
                    None => {}
                }
                self.history.add(What::Failed { call: name.into(), why: history::shortened(&failure.message) })?;
                Err(failure)
            }
        }
    }

    /// Rests a little. Returns false once the observer has asked the member to end.
    fn goes_on(&mut self) -> Result<bool, Failure> {
        thread::sleep(PAUSE);
        Ok(!self.session.parent().has_spoken()? || self.session.parent().next::<()>()?.is_some())
    }

    /// Returns whether the observer has asked the member to end, without a rest.
    fn ends(&mut self) -> Result<bool, Failure> {
        Ok(self.session.parent().has_spoken()? && self.session.parent().next::<()>()?.is_none())
    }

    /// Joins a topic. A place is free again once the death of its last holder is proved. Returns `None` if the member
    /// must end before it has one.
    fn join<T>(&mut self, name: &str, join: impl Fn() -> partywall::Result<T>) -> Result<Option<T>, Failure> {
        let began = Instant::now();
        loop {
            match join() {
                Err(Error::LimitReached(_)) if began.elapsed() < TIMEOUT => {
                    if !self.goes_on()? {
                        return Ok(None);
                    }
                }
                joined => return self.call(name, || joined),
            }
        }
    }
}

/// How long a member rests between two operations, and holds a permit or a block. With less, more operations leave
/// fewer processors for new members, and so for kills.
const PAUSE: Duration = Duration::from_millis(10);

/// A wait that often ends as what it waits for comes.
const SHORT: Duration = Duration::from_micros(300);

/// How long a submitter waits for its last results, and a subscriber for the end of the topic.
const ENDS: Duration = Duration::from_secs(8);

/// The time after which a call counts as late: far longer than the waits of [`LIMIT`], and than any wait for a permit
/// or a block, which each come back soon. On a slow machine, its process may have been stopped meanwhile.
const LATE: Duration = Duration::from_secs(7);
