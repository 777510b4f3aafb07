//! The time until others get the resources of a killed process, which held one resource of each kind.
//!
//! The time is counted from two moments: from the kill, and from the end of the process (when its pidfd is readable).
//! The broker counts a process as dead one settle time after its end; these numbers include the settle time.

use std::{
    thread,
    time::{Duration, Instant},
};

use partywall::{DType, DeviceUuid, Domain, Error, Place, TimelineEnding, cuda::Stream, error::Gone};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit};
use partywall_os::{
    process,
    socket::{self, Ready},
};
use rustix::process::Signal;

use crate::{
    bench::{Bench, milliseconds, peer},
    broker::Broker,
    lab::Session,
    peer::Peer,
    prelude::TIMEOUT,
};

/// Measures deaths of processes without a GPU.
pub(crate) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let kills = bench.fewer(100);
    measure(bench, broker, None, kills)
}

/// Measures deaths of processes with a waiting stream, also until a stream of another process that waited for them
/// continues.
pub(crate) fn on_gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let kills = bench.fewer(20);
    measure(bench, broker, Some(bench.gpu()?), kills)
}

fn measure(bench: &Bench<'_>, broker: &Broker, gpu: Option<DeviceUuid>, kills: usize) -> Result<(), Failure> {
    let mut scene = Scene::new(bench, broker, gpu)?;
    let deaths = (0..kills).map(|number| scene.kill(number)).collect::<Result<Vec<_>, Failure>>()?;
    let victim = if gpu.is_some() { "with a stream that waits" } else { "without a GPU" };
    let case = |what: &str| Case::new(what, Unit::Milliseconds).parameter("victim", victim);
    let plan = Plan::new(kills).warm_up(0);
    let gone = taken(deaths.iter().map(|death| death.gone));
    bench.run(Comparison::new(case("kill to its end"), gone), plan)?;
    for (index, what) in HOLDINGS.iter().enumerate().take(if gpu.is_some() { 4 } else { 3 }) {
        let freed = || deaths.iter().filter_map(move |death| death.freed.get(index).copied());
        let since_end = || deaths.iter().zip(freed()).map(|(death, freed)| freed.saturating_sub(death.gone));
        let comparison = Comparison::new(case(&format!("end to {what}")), taken(since_end()))
            .rival(case(&format!("kill to {what}")), taken(freed()));
        bench.run(comparison, plan)?;
        // A goal applies to the median, but the promise applies to each death.
        let late = since_end().filter(|time| *time > Duration::from_secs(1)).count();
        if late > 0 {
            bench.note(format!("{late} of {kills} deaths {victim}: more than 1 s to {what}"));
        }
    }
    Ok(())
}

fn taken<'a>(durations: impl Iterator<Item = Duration> + 'a) -> Sampler<'a> {
    let mut durations = durations;
    Box::new(move || durations.next().map(milliseconds).ok_or_else(|| "a death is missing".into()))
}

/// What others get after a death, in the order of [`Death::freed`].
const HOLDINGS: [&str; 4] = [
    "its permit in another's hands",
    "the end of a wait for its timeline",
    "the end of its lease",
    "the end of a stream's wait for its timeline",
];

/// The times of one death, counted from the kill.
struct Death {
    gone: Duration,
    freed: Vec<Duration>,
}

struct Scene<'a> {
    bench: &'a Bench<'a>,
    broker: &'a Broker,
    domain: Domain,
    gpu: Option<DeviceUuid>,
    /// The process whose stream waits for the timelines of the killed processes.
    bystander: Option<Peer>,
}

impl<'a> Scene<'a> {
    fn new(bench: &'a Bench<'a>, broker: &'a Broker, gpu: Option<DeviceUuid>) -> Result<Self, Failure> {
        let start = |gpu: DeviceUuid| {
            let bystander = bench.start(broker, peer::BYSTANDER)?;
            bystander.say(gpu.to_string())?;
            Ok::<_, Failure>(bystander)
        };
        Ok(Self { bench, broker, domain: broker.connect()?, gpu, bystander: gpu.map(start).transpose()? })
    }

    fn kill(&mut self, number: usize) -> Result<Death, Failure> {
        let memory = format!("memory.{number}");
        let builder = self.domain.create(&memory, Place::Host).kept(true).tensor("data", DType::U8, &[4096]);
        builder.allocate()?.commit()?.release()?;
        let mut holder = self.bench.start(self.broker, peer::HOLDER)?;
        holder.ask::<()>((&memory, self.gpu.map(|gpu| gpu.to_string())))?;
        // The process has not been waited for, so no other process can have its pid.
        let pidfd = process::pidfd(holder.pid)?;
        // From now on only the lease of the process keeps the memory.
        self.domain.remove(&memory)?;
        if let Some(bystander) = &mut self.bystander {
            bystander.ask::<()>(())?;
        }
        let semaphore = self.domain.semaphore(PERMIT, 1)?;
        let timeline = self.domain.timeline(WORD)?;
        let domain = &self.domain;
        let bystander = &mut self.bystander;
        let killed = Instant::now();
        thread::scope(|scope| {
            let permit = scope.spawn(|| {
                let permit = semaphore.acquire(TIMEOUT)?;
                let freed = killed.elapsed();
                permit.release()?;
                Ok::<_, Failure>(freed)
            });
            let word = scope.spawn(|| match timeline.wait(timeline.value() + 1, TIMEOUT) {
                Err(Error::Gone(Gone::Timeline { ending: TimelineEnding::OwnerDied, .. })) => Ok(killed.elapsed()),
                Err(other) => Err(other.into()),
                Ok(()) => Err("a value was signalled that nobody signals".into()),
            });
            let lease = scope.spawn(|| {
                while domain.status()?.versions > 0 {
                    if killed.elapsed() > TIMEOUT {
                        return Err("the lease of a killed process stays".into());
                    }
                    thread::sleep(Duration::from_micros(500));
                }
                Ok::<_, Failure>(killed.elapsed())
            });
            process::kill(&pidfd, Signal::KILL)?;
            let gone = socket::wait(&pidfd, Ready::Read, Some(killed + TIMEOUT))?;
            let gone = gone.then(|| killed.elapsed()).ok_or("a killed process does not end")?;
            // A stream continues only after the end of the process that it waits for.
            let stream = bystander.as_mut().map(|bystander| {
                bystander.hear::<()>()?;
                Ok::<_, Failure>(killed.elapsed())
            });
            let freed = [permit, word, lease].map(|thread| thread.join().map_err(|_| "a thread panicked")?);
            Ok(Death { gone, freed: freed.into_iter().chain(stream).collect::<Result<_, Failure>>()? })
        })
    }
}

const PERMIT: &str = "permit";
const WORD: &str = "word";
/// A timeline that no process signals.
const NEVER: &str = "never";

/// The role of the process that is killed: takes one resource of each kind, and stays.
pub(crate) fn hold(session: &mut Session) -> Result<(), Failure> {
    let (memory, gpu): (String, Option<String>) = session.parent().hear()?;
    let domain = session.domain().clone();
    let semaphore = domain.semaphore(PERMIT, 1)?;
    let writer = domain.timeline_writer(WORD)?;
    let _lease = domain.opener(&memory).open()?;
    let _permit = semaphore.acquire(TIMEOUT)?;
    let at = writer.timeline().value() + 1;
    writer.signal(at)?;
    if let Some(gpu) = gpu {
        let stream = Stream::new(domain.gpu(gpu.parse()?)?.context())?;
        domain.timeline(NEVER)?.wait_on(stream.as_ref(), 1)?;
        // A promise that is never kept.
        writer.signal_on(stream.as_ref(), at + 1)?;
    }
    session.parent().say(())?;
    session.parent().next::<()>()?;
    Ok(())
}

/// The role of the process whose stream waits for values that killed processes no longer signal.
pub(crate) fn stand_by(session: &mut Session) -> Result<(), Failure> {
    let gpu: String = session.parent().hear()?;
    let domain = session.domain().clone();
    let gpu = domain.gpu(gpu.parse()?)?;
    let stream = Stream::new(gpu.context())?;
    while session.parent().next::<()>()?.is_some() {
        let timeline = domain.timeline(WORD)?;
        timeline.wait_on(stream.as_ref(), timeline.value() + 1)?;
        session.parent().say(())?;
        while !stream.as_ref().is_done()? {
            thread::sleep(Duration::from_micros(200));
        }
        if timeline.check().is_ok() {
            return Err("a stream continued, but its timeline reports no death".into());
        }
        session.parent().say(())?;
    }
    Ok(())
}
