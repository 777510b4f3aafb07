//! The three stages. Each finds its first frame itself: the one after the newest frame that it, or its killed
//! predecessor, has published.

use partywall::cuda::experiment::{Image, Images};

use super::*;

/// Plays a stage. It reports when it is ready and when it has finished. The encoder also reports each frame that it has
/// written.
pub(super) fn play(stage: Stage, session: &mut Session) -> Result<(), Failure> {
    let job: Job = session.parent().hear()?;
    let open = |name| session.domain().topic(name).timeout(TIMEOUT).open();
    let times = match stage {
        Stage::Decode => {
            let frames = open(FRAMES)?;
            session.parent().say(())?;
            decode(&job, &frames)?
        }
        Stage::Filter => {
            let frames = open(FRAMES)?;
            let results = open(RESULTS)?;
            let gpu = match results.place().gpu() {
                None => None,
                Some(uuid) => Some(session.domain().gpu(uuid)?),
            };
            let filter = Filter::new(&job, gpu.as_deref(), results.max_bytes())?;
            session.parent().say(())?;
            filter.run(&frames, &results)?
        }
        Stage::Encode => {
            let results = open(RESULTS)?;
            session.parent().say(())?;
            encode(&job, &results, session.parent())?
        }
    };
    session.report(describe(stage, &times))?;
    session.parent().say(())
}

fn decode(job: &Job, frames: &Topic) -> Result<Vec<Duration>, Failure> {
    let publisher = frames.publisher()?;
    let mut times = Vec::new();
    for frame in next_frame(frames)?..job.frames {
        let start = Instant::now();
        let picture = files::decode(job.file(frame))?;
        let mut loan = loan(&publisher, frame, picture.size)?;
        loan.write(&picture.pixels)?;
        times.push(start.elapsed());
        await_listener(frames)?;
        loan.filled().publish(TIMEOUT).map_err(|refused| refused.error)?;
    }
    Ok(times)
}

/// Turns frames into results.
struct Filter<'a> {
    job: &'a Job,
    device: Option<Device>,
}

/// The resources of the kernels.
struct Device {
    stream: Stream,
    images: Images,
    /// A frame that is shrunk and not yet blurred.
    small: DeviceBuffer,
}

impl Device {
    fn new(gpu: &Gpu, most: u64) -> Result<Self, CudaError> {
        let context = gpu.context();
        let small = DeviceBuffer::new(context, most)?;
        Ok(Self { stream: Stream::new(context)?, images: Images::load(context)?, small })
    }
}

impl<'a> Filter<'a> {
    fn new(job: &'a Job, gpu: Option<&Gpu>, most: u64) -> Result<Self, Failure> {
        let device = gpu.map(|gpu| Device::new(gpu, most)).transpose().doing("loading kernels")?;
        Ok(Self { job, device })
    }

    fn run(&self, frames: &Topic, results: &Topic) -> Result<Vec<Duration>, Failure> {
        let publisher = results.publisher()?;
        let mut times = Vec::new();
        let first = next_frame(results)?;
        let subscriber = subscribe(frames)?;
        let mut done = first;
        while done < self.job.frames {
            let sample = subscriber.recv(TIMEOUT)?;
            let frame = frame_of(&sample)?;
            done = frame + 1;
            if frame < first {
                continue;
            }
            let start = Instant::now();
            let size = size_of(&sample)?;
            let loan = loan(&publisher, frame, size.at_most(self.job.width))?;
            await_listener(results)?;
            match &self.device {
                None => self.on_host(sample, size, loan)?,
                Some(device) => self.on_device(device, sample, size, loan)?,
            }
            times.push(start.elapsed());
        }
        if let Some(device) = &self.device {
            device.stream.synchronize().doing("running kernels")?;
        }
        Ok(times)
    }

    fn on_host(&self, sample: Sample, from: Size, mut loan: Loan) -> Result<(), Failure> {
        let size = from.at_most(self.job.width);
        let mut small = vec![0; size.bytes() as usize];
        resize(sample.as_slice::<u8>()?, from, &mut small, size);
        drop(sample);
        blur(&small, loan.as_mut_slice::<u8>()?, size, self.job.radius);
        loan.filled().publish(TIMEOUT).map_err(|refused| refused.error)?;
        Ok(())
    }

    /// Enqueues the work of one frame. No host waits for the GPU here, only the next stage's stream.
    fn on_device(&self, device: &Device, sample: Sample, from: Size, mut loan: Loan) -> Result<(), Failure> {
        let stream = device.stream.as_ref();
        let size = from.at_most(self.job.width);
        let image = |pixels, size: Size| Image { pixels, width: size.width, height: size.height };
        let small = image(device.small.as_slice(), size);
        let enqueued = device.images.enqueue_resize(stream, image(sample.device_on(stream)?.as_slice(), from), small);
        enqueued.doing("launching a kernel")?;
        let blurred = image(loan.device()?.as_slice(), size);
        let enqueued = device.images.enqueue_blur(stream, small, blurred, self.job.radius);
        enqueued.doing("launching a kernel")?;
        loan.rests_on(&sample)?;
        loan.filled().publish_on(stream, TIMEOUT).map_err(|refused| refused.error)?;
        sample.release_on(stream).map_err(|refused| refused.error)?;
        Ok(())
    }
}

fn encode(job: &Job, results: &Topic, watcher: &Peer) -> Result<Vec<Duration>, Failure> {
    let subscriber = subscribe(results)?;
    let mut done = job.unwritten;
    let mut times = Vec::new();
    while done < job.frames {
        let sample = subscriber.recv(TIMEOUT)?;
        let frame = frame_of(&sample)?;
        done = done.max(frame + 1);
        if frame < job.unwritten {
            continue;
        }
        let start = Instant::now();
        let pixels = match device::elements(&sample, "reading a result") {
            // The filter was killed before its kernels had run.
            Err(_) if never_made(&sample) => continue,
            pixels => pixels?.into_owned(),
        };
        let path = job.out.join(job.file(frame).file_name().unwrap_or_default());
        let size = size_of(&sample)?;
        sample.release()?;
        files::write(&path, &files::encode(&path, Picture { size, pixels })?)?;
        times.push(start.elapsed());
        watcher.say(frame)?;
    }
    Ok(times)
}

fn never_made(sample: &Sample) -> bool {
    use partywall::error::InvalidData::{SampleFailed, SampleTainted};
    matches!(sample.check(), Err(Error::InvalidData(SampleFailed { .. } | SampleTainted { .. })))
}

fn loan(publisher: &Publisher, frame: u64, size: Size) -> Result<Loan, Failure> {
    let mut loan = publisher.loan(DType::U8, &size.shape(), TIMEOUT)?;
    loan.header(&frame.to_le_bytes())?;
    Ok(loan)
}

/// Waits until the topic has a subscriber. Otherwise frames that are published while the next stage restarts would be
/// lost. No process waits for a detached subscriber: it is that of a killed stage, whose port is not free yet.
fn await_listener(topic: &Topic) -> Result<bool, Failure> {
    let has_one = || Ok(topic.stats().subscribers.iter().any(|subscriber| !subscriber.detached));
    until(TIMEOUT, Duration::from_millis(1), has_one)
}

fn describe(stage: Stage, times: &[Duration]) -> Step {
    let (title, why) = match stage {
        Stage::Decode => (
            "Files into frames",
            "The decoder writes pixels into a block that it has borrowed from the topic, then publishes the block.",
        ),
        Stage::Filter => (
            "Frames into smaller, blurred ones",
            "The filter reads a frame in place, and writes the result into a block of the second topic. On a GPU it \
             launches two kernels, and no host waits for them.",
        ),
        Stage::Encode => ("Results into files", "The encoder reads the result in place."),
    };
    Step::new(stage.name(), title, why)
        .value("frames", times.len().to_string())
        .value("host time per frame", spread(times))
        .judge(true, "finished", "")
}
