//! The members: each repeats one operation until it is killed or asked to end.

use std::collections::VecDeque;

use partywall::{
    Task, Ticket, WatchEvent,
    error::{Busy, DeviceFault, Gone, LimitReached},
    info::Change,
};

use super::*;
use crate::weights::tensors;

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

/// Returns what the process lacked.
fn lacked(error: &Error) -> Option<Resource> {
    match error {
        Error::LimitReached(LimitReached::FileDescriptors(_)) => Some(Resource::Descriptors),
        Error::LimitReached(LimitReached::SystemMemory { .. }) => Some(Resource::Memory),
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
    let mut member = Member { session, history, next: u64::from(job.number) << 32, gpu };
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

pub(super) fn writer(member: &mut Member<'_>) -> Result<(), Failure> {
    let mut patterns = tensors::Patterns::default();
    member.begins()?;
    while member.goes_on()? {
        let number = member.number();
        commit(member, &mut patterns, number)?;
    }
    Ok(())
}

fn commit(member: &Member<'_>, patterns: &mut tensors::Patterns, number: u64) -> Result<(), Failure> {
    member.history.add(What::Writing { number })?;
    let mut build = match member.call("allocate", || tensors::create(member.session, number, 1).allocate())? {
        Some(build) => build,
        None => return Ok(()),
    };
    if member.call("write", || patterns.write(&mut build, number, tensors::TENSORS))?.is_none() {
        return Ok(());
    }
    let began = Moment::now();
    if let Some(segment) = member.call("commit", || build.commit())? {
        member.history.add(What::Committed { number, version: segment.version(), began })?;
        member.call("release", || segment.release())?;
    }
    Ok(())
}

pub(super) fn reader(member: &mut Member<'_>) -> Result<(), Failure> {
    let mut patterns = tensors::Patterns::default();
    member.begins()?;
    while member.goes_on()? {
        let began = Moment::now();
        let Some(segment) = member.call("open", || member.domain().open(WEIGHTS, LIMIT))? else { continue };
        if let Some((number, whole)) = member.call("check", || patterns.check(&segment))? {
            member.history.add(What::Read { number, version: segment.version(), whole, began })?;
        }
        member.call("release", || segment.release())?;
    }
    Ok(())
}

pub(super) fn publisher(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(topic) = member.call("open", || member.domain().topic(MESSAGES).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let Some(publisher) = member.join("publisher", || topic.publisher())? else { return Ok(()) };
    member.begins()?;
    let mut message = member.number();
    while member.goes_on()? {
        let Some(mut loan) = member.call("loan", || publisher.loan(DType::U64, &[WORDS], LIMIT))? else { continue };
        if member.call("fill", || filled!(loan, device, place, message))?.is_none() {
            continue;
        }
        member.history.add(What::Publishing { message })?;
        let publish = || loan.filled().publish(LIMIT).map_err(|refused| refused.error);
        // A message that was refused is published again.
        if member.call("publish", publish)?.is_some() {
            member.history.add(What::Published { message })?;
            message = member.number();
        }
    }
    Ok(())
}

pub(super) fn subscriber(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(topic) = member.call("open", || member.domain().topic(MESSAGES).timeout(LIMIT).open())? else {
        return Ok(());
    };
    let joined = member.join("subscriber", || topic.subscriber(Policy::Block))?;
    let Some(subscriber) = joined else { return Ok(()) };
    member.history.add(What::Subscribed)?;
    member.begins()?;
    let mut ends = false;
    loop {
        ends = ends || member.ends()?;
        // All publishers have left before the subscribers are asked to end.
        let limit = if ends { Duration::ZERO } else { MOMENT };
        match member.call("recv", || subscriber.recv(limit))? {
            None if ends => break,
            None => {}
            Some(sample) => {
                let read = || -> Result<_, Failure> {
                    Ok(word!(sample, member.session.place, {
                        let gpu = member.gpu.as_ref().ok_or_else(|| unexpected("there is no GPU for a message"))?;
                        sample.device_on(gpu.stream())?
                    }))
                };
                let word = member.insist("read", read)?;
                // Words of two messages are torn, and are no message.
                member.history.add(What::Got { message: word.unwrap_or(0), whole: word.is_some() })?;
                member.call("release", || sample.release())?;
            }
        }
    }
    Ok(())
}

pub(super) fn submitter(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(queue) = member.call("open", || member.domain().queue(TASKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    member.begins()?;
    let mut tickets: VecDeque<(u64, Ticket)> = VecDeque::new();
    let mut ends = Instant::now() + TIMEOUT;
    let mut goes_on = true;
    while goes_on || !tickets.is_empty() {
        if goes_on && !member.goes_on()? {
            goes_on = false;
            ends = Instant::now() + ENDS;
        }
        if goes_on && tickets.len() < 4 {
            let task = member.number();
            let mut input = member.call("alloc", || queue.inputs().alloc(LIMIT))?;
            if let Some(input) = &mut input {
                member.insist("fill", || filled!(*input, device_mut, place, task))?;
            }
            if let Some(input) = input {
                member.history.add(What::Submitting { task })?;
                let order = Task::new("add").input(input).output(WORDS * 8).max_attempts(u8::MAX);
                let submit = || queue.submit(order.cancel_with_submitter(true), LIMIT).map_err(|refused| refused.error);
                if let Some(ticket) = member.call("submit", submit)? {
                    member.history.add(What::Submitted { task })?;
                    tickets.push_back((task, ticket));
                }
            }
        }
        let Some((task, ticket)) = tickets.pop_front() else { continue };
        let Some(result) = member.call("result", || ticket.wait(MOMENT))? else {
            tickets.push_front((task, ticket));
            if !goes_on && Instant::now() > ends {
                break;
            }
            continue;
        };
        let output = result.into_output().ok_or_else(|| unexpected("a result has no output"))?;
        let word = member.insist("read", || -> Result<_, Failure> { Ok(word!(output, place, output.device()?)) })?;
        member.history.add(What::Result { task, right: word == Some(task | DONE) })?;
        member.call("release", || output.release())?;
    }
    Ok(())
}

pub(super) fn worker(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(queue) = member.call("open", || member.domain().queue(TASKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let Some(mut task) = member.call("claim", || queue.claim(MOMENT))? else { continue };
        let input = &task.inputs()[0];
        let word = member.insist("read", || -> Result<_, Failure> { Ok(word!(input, place, input.device()?)) })?;
        let done = word.map_or(0, |word| word | DONE);
        member.insist("fill", || filled!(task.output_mut()?, device_mut, place, done))?;
        match task.complete() {
            // Its submitter was killed.
            Err(Error::Gone(Gone::Claim { .. })) => {}
            completed => drop(member.call("complete", || completed)?),
        }
    }
    Ok(())
}

pub(super) fn holder(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(permits) = member.call("open", || member.domain().semaphore(PERMITS, PERMITS_MOST))? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let Some(permit) = member.call("acquire", || permits.acquire(LIMIT))? else { continue };
        member.history.add(What::Acquired)?;
        thread::sleep(PAUSE);
        member.history.add(What::Releasing)?;
        member.call("release", || permit.release())?;
    }
    Ok(())
}

pub(super) fn taker(member: &mut Member<'_>) -> Result<(), Failure> {
    let place = member.session.place;
    let Some(pool) = member.call("open", || member.domain().pool(BLOCKS).timeout(LIMIT).open())? else {
        return Ok(());
    };
    member.begins()?;
    while member.goes_on()? {
        let mark = member.number();
        let Some(mut block) = member.call("alloc", || pool.alloc(LIMIT))? else { continue };
        member.history.add(What::Took { block: block.index() })?;
        member.insist("fill", || filled!(block, device_mut, place, mark))?;
        thread::sleep(PAUSE);
        let read = || -> Result<_, Failure> { Ok(word!(block, place, block.device()?)) };
        let whole = member.insist("read", read)? == Some(mark);
        member.history.add(What::Giving { block: block.index(), whole })?;
        member.call("release", || block.release())?;
    }
    Ok(())
}

pub(super) fn watcher(member: &mut Member<'_>) -> Result<(), Failure> {
    let Some(mut watch) = member.call("watch", || member.domain().watch(WEIGHTS))? else {
        return Ok(());
    };
    member.history.add(What::Watching)?;
    member.begins()?;
    let mut ends = false;
    loop {
        ends = ends || member.ends()?;
        // All writers have left before the watchers are asked to end.
        let limit = if ends { Duration::ZERO } else { MOMENT };
        match member.call("next", || watch.next(limit))?.flatten() {
            Some(WatchEvent::Name(event)) => {
                if let Change::Committed { version, .. } = event.change {
                    member.history.add(What::Saw { version })?;
                }
            }
            Some(_) => member.history.add(What::Gap)?,
            None if ends => break,
            None => {}
        }
    }
    Ok(())
}

/// How long a member rests between two operations, and holds a permit or a block.
const PAUSE: Duration = Duration::from_millis(2);

/// How long a submitter waits for its last results.
const ENDS: Duration = Duration::from_secs(8);

/// The time after which a call counts as one that did not return within its timeout. On a slow machine, its process may
/// have been stopped meanwhile.
const LATE: Duration = Duration::from_secs(7);
