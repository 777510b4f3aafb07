//! The recorder: makes the memory, and has slow kernels fill it.

use std::os::fd::AsFd;

use partywall::{
    Domain, Gpu, IpcEvent, TimelineWriter, bytes,
    cuda::{Access, Mapping, PhysicalMemory, Stream, StreamRef, experiment::Delay},
};

use super::{Behind, Enqueued, Hello, LAB, Meet, Over, Ready, SLOW, TIMELINE, TITLE, Wish};
use crate::{
    Context, Options, broker,
    clock::{Moment, millis, short},
    device::{self, copy_failed, failed},
    failure::Failure,
    peer::Peer,
    step::Step,
    teller::Teller,
};

/// Plays the role.
pub(super) fn run(context: &Context, options: &Options, teller: &mut Teller) -> Result<(), Failure> {
    if options.on_standard_input {
        let mut peer = Peer::on_standard_input("waiter")?;
        return play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure));
    }
    let gpu = device::open(options.device())?;
    teller.header(TITLE, &gpu).map_err(failed("asking about the GPU"))?;
    let mut peer = Peer::meet(context, LAB, "waiter", teller)?;
    play(options, &mut peer, teller).map_err(|failure| peer.give_up(failure))?;
    teller.remark("The waiter has what it waited for, and says which beliefs held.");
    Ok(())
}

fn play(options: &Options, peer: &mut Peer, teller: &mut Teller) -> Result<(), Failure> {
    let gpu = device::open(options.device())?;
    let granularity = PhysicalMemory::granularity(gpu.context()).map_err(failed("asking for the granularity"))?;
    let memory = PhysicalMemory::create(gpu.context(), granularity).map_err(failed("creating memory"))?;
    let descriptor = memory.export().map_err(failed("exporting memory"))?;
    peer.say(Hello { uuid: gpu.uuid().to_string(), bytes: granularity }, &[descriptor.as_fd()])?;
    drop(descriptor);
    let mapping = Mapping::new(memory, Access::ReadWrite).map_err(failed("mapping memory"))?;

    let Meet { socket } = peer.hear(teller)?;
    let domain = broker::connect(&socket)?;
    let recorder = Recorder::new(&gpu, &mapping, &domain)?;
    peer.tell(teller, recorder.describe()?)?;
    let events = [IpcEvent::create(&gpu), IpcEvent::create(&gpu)];
    let handles = events.iter().map(|event| match event {
        Ok(event) => event.export().map(|handle| handle.0.to_vec()).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    });
    peer.say(Ready { events: handles.collect() }, &[])?;
    let mut ended = Moment::now();
    loop {
        match peer.hear(teller)? {
            Wish::End => break,
            Wish::Finish => peer.say(Over { at: ended }, &[])?,
            Wish::Work(behind) => {
                recorder.work()?;
                let enqueued: Enqueued = match (behind, &events) {
                    (Behind::Event(index), events) => match &events[index % events.len()] {
                        Ok(event) => event.record(recorder.stream.as_ref()).map_err(|error| error.to_string()),
                        Err(error) => Err(error.to_string()),
                    },
                    (Behind::Signal(value), _) => recorder.signal(value, TimelineWriter::signal_on),
                    (Behind::SignalAndWake(value), _) => recorder.signal(value, TimelineWriter::signal_on_and_wake),
                };
                peer.say(enqueued, &[])?;
                recorder.stream.synchronize().map_err(failed("running a slow kernel"))?;
                ended = Moment::now();
            }
        }
    }
    recorder.timeline.close();
    Ok(())
}

/// Everything that the work needs, loaded before anybody waits.
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
        let stream = Stream::new(gpu.context()).map_err(failed("making a stream"))?;
        broker::make_ready(domain, &stream);
        Ok(Self {
            gpu,
            mapping,
            timeline: domain.timeline_writer(TIMELINE)?,
            stream,
            delay: Delay::load(gpu.context()).map_err(failed("loading kernels"))?,
        })
    }

    /// Enqueues a slow kernel, and then one that fills the memory.
    fn work(&self) -> Result<(), Failure> {
        let stream = self.stream.as_ref();
        self.delay.enqueue(stream, SLOW).map_err(failed("launching a slow kernel"))?;
        let fill = self.gpu.kernels()?.enqueue_fill(stream, self.mapping.as_slice());
        fill.map_err(copy_failed("filling memory by a kernel"))
    }

    fn signal(
        &self,
        value: u64,
        by: impl Fn(&TimelineWriter, StreamRef<'_>, u64) -> partywall::Result<()>,
    ) -> Enqueued {
        by(&self.timeline, self.stream.as_ref(), value).map_err(|error| error.to_string())
    }

    /// Tells of the work, and how long it takes here.
    fn describe(&self) -> Result<Step, Failure> {
        let began = Moment::now();
        self.work()?;
        let enqueued = Moment::now();
        self.stream.synchronize().map_err(failed("running a slow kernel"))?;
        let took = Moment::now().since(began);
        Ok(Step::new(
            "work",
            "The slow work that the other process will wait for",
            "A kernel that takes its time, and one behind it that fills memory which both processes have. Launching \
             returns at once; whoever reads the memory now reads what was there before.",
        )
        .value("memory", format!("{} at {:#x}", bytes(self.mapping.len()), self.mapping.device_ptr()))
        .value("launching both kernels", short(enqueued.since(began)))
        .value("until the memory is filled", millis(took))
        .judge(took >= SLOW / 2, "slow enough to be waited for", "it took no time"))
    }
}
