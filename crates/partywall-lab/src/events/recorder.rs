//! The recorder: creates the memory, and fills it with slow kernels.

use partywall::cuda::experiment::Delay;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let granularity = PhysicalMemory::granularity(gpu.context()).doing("asking for the granularity")?;
    let memory = PhysicalMemory::create(gpu.context(), granularity).doing("creating memory")?;
    let descriptor = memory.export().doing("exporting memory")?;
    let mapping = Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?;
    let recorder = Recorder::new(&gpu, &mapping, session.domain())?;
    session.report(recorder.describe()?)?;
    let events = [text(IpcEvent::create(&gpu)), text(IpcEvent::create(&gpu))];
    let handle = |event: &Result<IpcEvent, String>| text(event.as_ref().map_err(Clone::clone)?.export());
    let handles = events.iter().map(|event| handle(event).map(|handle| handle.0.to_vec()));
    let offer = Offer { bytes: granularity, events: handles.collect() };
    let waiter = session.parent();
    waiter.say_with(offer, &[descriptor.as_fd()])?;
    drop(descriptor);

    let mut ended = Moment::now();
    while let Some(command) = waiter.next()? {
        match command {
            Command::Finish => waiter.say(ended)?,
            Command::Work(behind) => {
                recorder.work()?;
                let stream = recorder.stream.as_ref();
                let enqueued = match behind {
                    Behind::Event(index) => match &events[index % events.len()] {
                        Ok(event) => text(event.record(stream)),
                        Err(why) => Err(why.clone()),
                    },
                    Behind::Signal(value) => text(recorder.timeline.signal_on(stream, value)),
                    Behind::SignalAndWake(value) => text(recorder.timeline.signal_on_and_wake(stream, value)),
                };
                waiter.say(enqueued)?;
                recorder.stream.synchronize().doing("running a slow kernel")?;
                ended = Moment::now();
            }
        }
    }
    recorder.timeline.close();
    Ok(())
}

/// The resources of the work, loaded before any process waits.
struct Recorder<'a> {
    gpu: &'a Gpu,
    mapping: &'a Mapping,
    timeline: TimelineWriter,
    stream: Stream,
    delay: Delay,
}

impl<'a> Recorder<'a> {
    fn new(gpu: &'a Gpu, mapping: &'a Mapping, domain: &Domain) -> Result<Self, Failure> {
        gpu.kernels()?;
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        broker::prepare(domain, &stream);
        Ok(Self {
            gpu,
            mapping,
            timeline: domain.timeline_writer(TIMELINE)?,
            stream,
            delay: Delay::load(gpu.context()).doing("loading kernels")?,
        })
    }

    /// Enqueues a slow kernel, and behind it a kernel that fills the memory.
    fn work(&self) -> Result<(), Failure> {
        let stream = self.stream.as_ref();
        self.delay.enqueue(stream, SLOW).doing("launching a slow kernel")?;
        let fill = self.gpu.kernels()?.enqueue_fill(stream, self.mapping.as_slice());
        fill.doing("filling memory by a kernel")
    }

    /// Describes the work, and measures how long it takes here.
    fn describe(&self) -> Result<Step, Failure> {
        let began = Moment::now();
        self.work()?;
        let enqueued = Moment::now();
        self.stream.synchronize().doing("running a slow kernel")?;
        let took = Moment::now().since(began);
        Ok(Step::new(
            "work",
            "The slow work that the other process will wait for",
            "A slow kernel, and behind it a kernel that fills memory of both processes. Launching returns immediately, \
             and a process that reads the memory now gets the old contents.",
        )
        .value("memory", format!("{} at {:#x}", bytes(self.mapping.len()), self.mapping.device_ptr()))
        .value("launching both kernels", short(enqueued.since(began)))
        .value("until the memory is filled", millis(took))
        .judge(took >= SLOW / 2, "slow enough to be waited for", "too fast to be waited for"))
    }
}

/// Returns a result as a message: errors as their text.
fn text<T>(result: partywall::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}
