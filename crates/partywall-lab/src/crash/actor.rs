//! The waiter and the actors: each carries out the observer's commands until it is killed.

use std::process;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::*;
use crate::device::{Gate, ends};

/// Plays the waiter or an actor.
pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let domain = session.domain().clone();
    let device = session.gpu_if_any()?.map(|gpu| Device::new(&domain, gpu)).transpose()?;
    let mut actor = Actor { domain, device, writer: None, input: None, keep: Vec::new() };
    while let Some(command) = session.parent().next()? {
        match command {
            Command::Serve { scene } => session.parent().say(actor.serve(&scene)?)?,
            Command::Await { scene, value } => actor.wait(session, &scene, value)?,
            Command::Poll => session.parent().say(actor.poll()?)?,
            Command::Fault => session.parent().say(actor.fault()?)?,
            Command::Abort => {
                // Without a core file the process ends immediately and releases what it holds.
                let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
                process::abort();
            }
            command => {
                match command {
                    Command::AwaitEvent { handle } => actor.wait_for_event(handle)?,
                    Command::Use { scene } => actor.hold(&scene)?,
                    Command::FirstStage => actor.first_stage()?,
                    Command::SecondStage => actor.second_stage()?,
                    _ => session.report(actor.describe_second_stage()?)?,
                }
                session.parent().say(())?;
            }
        }
    }
    Ok(())
}

struct Actor {
    domain: Domain,
    /// `None` in host memory.
    device: Option<Device>,
    writer: Option<TimelineWriter>,
    input: Option<Timeline>,
    /// Kept until the process ends normally.
    keep: Vec<Box<dyn Any>>,
}

/// What an actor uses on a GPU.
struct Device {
    gpu: Arc<Gpu>,
    /// The stream of its work for others.
    stream: Stream,
    /// Stays closed while this process is of use.
    never: Gate,
}

impl Device {
    fn new(domain: &Domain, gpu: Arc<Gpu>) -> Result<Self, Failure> {
        // Loaded before any stream waits.
        gpu.kernels()?;
        let never = Gate::new(&gpu)?;
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        broker::prepare(domain, &stream);
        Ok(Self { gpu, stream, never })
    }
}

impl Actor {
    /// Returns the GPU for a command that needs one.
    fn device(&self) -> Result<&Device, Failure> {
        self.device.as_ref().ok_or_else(|| unexpected("a process in host memory got a command for a GPU"))
    }

    /// Shares memory of each kind, and signals 1. On a GPU also promises 2 and records an event, both behind work that
    /// does not end.
    fn serve(&mut self, scene: &str) -> Result<Served, Failure> {
        let gpu = self.device.as_ref().map(|device| &*device.gpu);
        for (name, kept) in [(KEPT, true), (OWNED, false)] {
            self.keep.push(Box::new(make(&self.domain, gpu, &of(scene, name), kept)?));
        }
        let writer = self.writer.insert(self.domain.timeline_writer(&of(scene, LINE))?);
        let Some(device) = &self.device else {
            writer.signal(1)?;
            return Ok(Err("host memory has no events".into()));
        };
        let draft = self.domain.create(&of(scene, "draft"), Place::Gpu(device.gpu.uuid()));
        self.keep.push(Box::new(draft.tensor(TENSOR, DType::U8, &[MUCH]).allocate()?));
        let stream = device.stream.as_ref();
        writer.signal_on(stream, 1)?;
        device.stream.synchronize().doing("signalling")?;
        let event = IpcEvent::create(&device.gpu).and_then(|event| Ok((event.export()?.0.to_vec(), event)));
        device.never.hold(device.stream.as_ref())?;
        let event = event.and_then(|event| event.1.record(stream).map(|()| event));
        writer.signal_on(stream, 2)?;
        let event = event.map(|(handle, event)| {
            self.keep.push(Box::new(event));
            handle
        });
        Ok(event.map_err(|error| error.to_string()))
    }

    /// Waits on the host and on a stream, if there is one, and reports how both waits ended.
    fn wait(&self, session: &mut Session, scene: &str, value: u64) -> Result<(), Failure> {
        let timeline = self.domain.timeline(&of(scene, LINE))?;
        let stream = self.device.as_ref().map(|device| Stream::new(device.gpu.context()).doing("creating a stream"));
        let stream = stream.transpose()?;
        stream.iter().try_for_each(|stream| timeline.wait_on(stream.as_ref(), value))?;
        session.parent().say(())?;
        let began = Moment::now();
        let (host, host_at, stream_at) = thread::scope(|scope| {
            let streams = stream
                .as_ref()
                .map(|stream| scope.spawn(|| ends(stream.as_ref(), TIMEOUT).map(|done| done.then(Moment::now))));
            let host = timeline.wait(value, TIMEOUT);
            (host, Moment::now(), streams.map(|streams| streams.join()))
        });
        let stream_at = stream_at.map_or(Ok(None), |joined| joined.unwrap_or(Ok(None)))?;
        if stream.is_some() && stream_at.is_none() {
            // Otherwise dropping the stream would wait, too.
            timeline.abandon()?;
        }
        let woken = Woken {
            host: ending(&host),
            host_at,
            stream_at,
            check: ending(&timeline.check()),
            reached: timeline.value(),
        };
        session.report(match stream {
            Some(_) => describe(scene, value, began, &woken),
            None => describe_on_host(scene, value, began, &woken),
        })?;
        session.parent().say(woken)
    }

    fn wait_for_event(&mut self, handle: Vec<u8>) -> Result<(), Failure> {
        let handle = <[u8; 64]>::try_from(handle).unwrap_or([0; 64]);
        let Device { gpu, stream, .. } = self.device()?;
        let event = IpcEvent::open(gpu, &IpcEventHandle(handle))?;
        event.wait(stream.as_ref())?;
        self.keep.push(Box::new(event));
        Ok(())
    }

    fn poll(&self) -> Result<StreamDone, Failure> {
        Ok(self.device()?.stream.as_ref().is_done().map_err(|error| error.to_string()))
    }

    /// Holds the resources of a client: a lease, a mapping, and on a GPU a stream that waits for the server.
    fn hold(&mut self, scene: &str) -> Result<(), Failure> {
        self.keep.push(Box::new(self.domain.open(&of(scene, OWNED), TIMEOUT)?));
        if let Some(device) = &self.device {
            let timeline = self.domain.timeline(&of(scene, LINE))?;
            timeline.wait_on(device.stream.as_ref(), 1)?;
            self.keep.push(Box::new(timeline));
        }
        Ok(())
    }

    fn first_stage(&mut self) -> Result<(), Failure> {
        let batch = self.domain.opener(BATCH).read_write().timeout(TIMEOUT).open()?;
        let writer = self.domain.timeline_writer(FIRST)?;
        let device = self.device()?;
        device.never.hold(device.stream.as_ref())?;
        let range = batch.tensor(TENSOR)?.device()?;
        let fill = device.gpu.kernels()?.enqueue_fill(device.stream.as_ref(), range.as_slice());
        fill.doing("filling memory by a kernel")?;
        writer.signal_on(device.stream.as_ref(), 1)?;
        self.keep.push(Box::new(batch));
        self.writer = Some(writer);
        Ok(())
    }

    fn second_stage(&mut self) -> Result<(), Failure> {
        let batch = self.domain.opener(BATCH).read_write().timeout(TIMEOUT).open()?;
        let input = self.domain.timeline(FIRST)?;
        let resting = self.domain.timeline_writer(RESTING)?;
        let careless = self.domain.timeline_writer(CARELESS)?;
        resting.rests_on(&input);
        let Device { gpu, stream, .. } = self.device()?;
        let stream = stream.as_ref();
        input.wait_on(stream, 1)?;
        let range = batch.tensor(TENSOR)?.device()?;
        let double = gpu.kernels()?.enqueue_double(stream, range.as_slice());
        double.doing("doubling by a kernel")?;
        resting.signal_on(stream, 1)?;
        careless.signal_on(stream, 1)?;
        self.keep.push(Box::new((batch, careless)));
        self.input = Some(input);
        self.writer = Some(resting);
        Ok(())
    }

    /// Describes what the second stage observes when its input has ended.
    fn describe_second_stage(&self) -> Result<Step, Failure> {
        let went_on = ends(self.device()?.stream.as_ref(), TIMEOUT)?;
        let input = self.input.as_ref().map_or_else(|| "nothing".into(), |input| ending(&input.check()));
        let signal = self.writer.as_ref().map_or_else(|| "nothing".into(), |writer| ending(&writer.signal(2)));
        let detected = went_on && input == "OwnerDied" && signal == "Tainted";
        Ok(Step::new(
            "second-stage",
            "The chain's second stage, after the first one was killed",
            "Its stream waited for the first stage. The wait ended because that stage is dead, and the next kernel ran \
             on whatever data was there. A GPU reports no such error, so the host has to check. The library checks \
             where rests_on declares a dependency.",
        )
        .value("its stream", if went_on { "continued, and doubled the batch" } else { "waits" })
        .value("check of its input", input)
        .value("its next signal", signal)
        .judge(detected, "check reports it, and its next signal is refused", "check did not report it"))
    }

    /// Breaks the CUDA context of this process.
    fn fault(&self) -> Result<Faulted, Failure> {
        let gpu = &self.device()?.gpu;
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        experiment::fault(gpu.kernels()?, stream.as_ref()).doing("launching a kernel")?;
        // The context is broken once the driver reports it.
        let _ = ends(stream.as_ref(), TIMEOUT);
        let at = Moment::now();
        let own_call = match &self.writer {
            Some(writer) => ending(&writer.signal_on(stream.as_ref(), 3)),
            None => {
                let more = self.domain.create("client/more", Place::Gpu(gpu.uuid()));
                ending(&more.tensor(TENSOR, DType::U8, &[1]).allocate())
            }
        };
        Ok(Faulted { at, own_call })
    }
}

fn describe(scene: &str, value: u64, began: Moment, woken: &Woken) -> Step {
    let Woken { host, host_at, stream_at, check, reached } = woken;
    let stream =
        stream_at.map_or_else(|| "still waits".into(), |at| format!("continued after {}", millis(at.since(began))));
    Step::new(
        &format!("woken-{scene}"),
        format!("Waiting for {value} on the host and on a stream: {scene}"),
        "The end of a wait does not make the data valid. The host gets an error; a stream cannot get one, so its host \
         calls check before it trusts what the stream did.",
    )
    .value("the host", format!("{host}, after {}", millis(host_at.since(began))))
    .value("the stream", stream)
    .value("check afterwards", check)
    .value("signalled value", reached.to_string())
    .judge(stream_at.is_some() && host != "Timeout", "both waits ended", "a wait did not end")
}

fn describe_on_host(scene: &str, value: u64, began: Moment, woken: &Woken) -> Step {
    let Woken { host, host_at, reached, .. } = woken;
    Step::new(
        &format!("woken-{scene}"),
        format!("Waiting for {value}: {scene}"),
        "The end of a wait does not make the data valid: the wait returns an error.",
    )
    .value("the wait", format!("{host}, after {}", millis(host_at.since(began))))
    .value("signalled value", reached.to_string())
    .judge(
        host != "no error" && host != "Timeout",
        "the wait ended with an error",
        "the wait did not end as expected",
    )
}
