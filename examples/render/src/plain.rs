//! The same pipeline without the library, for comparison.
//!
//! | pipeline | memory | order |
//! |---|---|---|
//! | one process | `cuMemAlloc` | events of its streams; one thread enqueues everything |
//! | driver | one allocation of `cuMemCreate`, by its descriptor | words of that memory, which streams write and wait for |
//! | textbook | one allocation of `cuMemAlloc`, by its legacy handle | interprocess events, and words of host memory that hosts write after a synchronisation for each frame |
//!
//! They have the same kernels and as many frames in flight. Nobody checks who is dead: a killed process stops them for
//! ever.

use std::ops::Range;

use partywall::cuda::{Event, IpcEvent, IpcEventHandle, round_up};

use super::{
    rasteriser::{Checks, Drawing, Picture, Rasteriser},
    words::Words,
    *,
};

/// A pipeline of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Design {
    Driver,
    Textbook,
}

/// What a pipeline has done.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Done {
    nanos: u64,
    /// The sum of each frame, and whether one was torn.
    sums: Vec<u64>,
    torn: bool,
}

/// The task of a process.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    job: Job,
    design: Design,
    stage: Stage,
    /// Bytes of vertices, indices and colours.
    mesh: [u64; 3],
    /// Of the textbook's memory.
    handle: Vec<u8>,
}

/// A stage of the pipeline. Stages are numbered in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    Geometry,
    Renderer(u32),
    Compositor,
    Writer,
}

impl Done {
    pub(super) fn rate(&self) -> f64 {
        self.sums.len() as f64 / Duration::from_nanos(self.nanos.max(1)).as_secs_f64()
    }

    /// Returns whether there are frames, and all are the same as those of the lab.
    pub(super) fn is_right(&self, frames: &[Written]) -> bool {
        !self.torn && !self.sums.is_empty() && self.sums.iter().zip(frames).all(|(sum, frame)| *sum == frame.hash)
    }
}

impl Stage {
    fn all(renderers: u32) -> Vec<Self> {
        let renderers = (0..renderers).map(Self::Renderer);
        [Self::Geometry].into_iter().chain(renderers).chain([Self::Compositor, Self::Writer]).collect()
    }

    fn number(self, renderers: u32) -> usize {
        let renderers = renderers as usize;
        match self {
            Self::Geometry => 0,
            Self::Renderer(number) => 1 + number as usize,
            Self::Compositor => 1 + renderers,
            Self::Writer => 2 + renderers,
        }
    }

    /// Returns the numbers of the stages whose results it needs.
    fn inputs(self, renderers: u32) -> Range<usize> {
        let renderers = renderers as usize;
        match self {
            Self::Geometry => 0..0,
            Self::Renderer(_) => 0..1,
            Self::Compositor => 1..1 + renderers,
            Self::Writer => 1 + renderers..2 + renderers,
        }
    }
}

/// Where everything is in one allocation: the mesh, the results of each stage for each frame in flight, and a word for
/// each stage.
struct Layout {
    ranges: Vec<[u64; 2]>,
    /// How many stages have results.
    results: usize,
}

impl Layout {
    fn new(job: &Job, mesh: [u64; 3]) -> Self {
        let tiles = job.tiles();
        let tiles = tiles.iter().map(|tile| tile.size.pixels() as u64 * 4);
        let slot: Vec<u64> = [mesh[0]].into_iter().chain(tiles).chain([job.size.pixels() as u64 * 4]).collect();
        let words = (slot.len() as u64 + 1) * WORD;
        let sizes = mesh.into_iter().chain((0..SLOTS).flat_map(|_| slot.clone())).chain([words]);
        let mut start = 0;
        let place = |bytes: u64| {
            let range = [start, bytes];
            start += bytes.next_multiple_of(256);
            range
        };
        Self { ranges: sizes.map(place).collect(), results: slot.len() }
    }

    fn bytes(&self) -> u64 {
        self.ranges.last().map_or(0, |[start, bytes]| start + bytes)
    }

    fn at<'a>(&self, memory: DeviceSlice<'a>, place: usize) -> Result<DeviceSlice<'a>, Failure> {
        let [start, bytes] = self.ranges[place];
        memory.slice(start, bytes).doing("dividing memory")
    }

    /// Returns the result of a stage for a frame.
    fn result<'a>(&self, memory: DeviceSlice<'a>, stage: usize, frame: u64) -> Result<DeviceSlice<'a>, Failure> {
        self.at(memory, MESH + (frame % SLOTS) as usize * self.results + stage)
    }

    /// Returns the word of a stage: how many frames it has finished.
    fn word<'a>(&self, memory: DeviceSlice<'a>, stage: usize) -> Result<DeviceSlice<'a>, Failure> {
        let words = self.at(memory, self.ranges.len() - 1)?;
        words.slice(stage as u64 * WORD, WORD).doing("dividing memory")
    }

    /// Writes the mesh, and clears the words.
    fn fill(&self, gpu: &Gpu, memory: DeviceSlice<'_>, mesh: &Mesh) -> Result<(), Failure> {
        let words = self.at(memory, self.ranges.len() - 1)?;
        gpu.stream().enqueue_set(words, 0).doing("clearing words")?;
        let parts: [&[u8]; MESH] = [
            bytemuck::cast_slice(&mesh.vertices),
            bytemuck::cast_slice(&mesh.indices),
            bytemuck::cast_slice(&mesh.colours),
        ];
        for (place, part) in parts.into_iter().enumerate() {
            gpu.stream().copy_from_host(self.at(memory, place)?, part).doing("writing the mesh")?;
        }
        Ok(())
    }
}

fn mesh_bytes(mesh: &Mesh) -> [u64; 3] {
    [mesh.vertices.len(), mesh.indices.len(), mesh.colours.len()].map(|words| words as u64 * 4)
}

/// A stage with its stream and kernels.
struct Worker<'a> {
    job: &'a Job,
    layout: &'a Layout,
    memory: DeviceSlice<'a>,
    stage: Stage,
    stream: Stream,
    rasteriser: Rasteriser,
    /// Corners and fragments of a renderer.
    scratch: Option<[DeviceBuffer; 2]>,
    /// Of the writer.
    checks: Option<Checks>,
    done: Done,
}

impl<'a> Worker<'a> {
    fn new(
        gpu: &Gpu,
        job: &'a Job,
        layout: &'a Layout,
        memory: DeviceSlice<'a>,
        stage: Stage,
    ) -> Result<Self, Failure> {
        let context = gpu.context();
        let buffer = |bytes| DeviceBuffer::new(context, bytes).doing("allocating");
        let scratch = match stage {
            Stage::Renderer(number) => {
                let vertices = layout.at(memory, VERTICES)?.len() / (4 * raster::VERTEX as u64);
                let pixels = job.tiles()[number as usize].size.pixels() as u64;
                Some([buffer(vertices * Rasteriser::CORNER_BYTES)?, buffer(pixels * Rasteriser::FRAGMENT_BYTES)?])
            }
            _ => None,
        };
        let checks = (stage == Stage::Writer).then(|| Checks::new(context, IN_FLIGHT as usize));
        Ok(Self {
            job,
            layout,
            memory,
            stage,
            stream: Stream::new(context).doing("creating a stream")?,
            rasteriser: Rasteriser::load(context).doing("loading kernels")?,
            scratch,
            checks: checks.transpose().doing("loading kernels")?,
            done: Done::default(),
        })
    }

    fn number(&self) -> usize {
        self.stage.number(self.job.renderers)
    }

    fn inputs(&self) -> Range<usize> {
        self.stage.inputs(self.job.renderers)
    }

    /// Enqueues the work of a frame. The writer waits for its oldest check if all are under way.
    fn enqueue(&mut self, frame: u64) -> Result<(), Failure> {
        if let Some(before) = frame.checked_sub(IN_FLIGHT.into()) {
            self.finish(before)?;
        }
        let stream = self.stream.as_ref();
        let at = |place| self.layout.at(self.memory, place);
        let result = |stage| self.layout.result(self.memory, stage, frame);
        let Size { width, height } = self.job.size;
        let tiles = self.job.tiles();
        match self.stage {
            Stage::Geometry => {
                let matrix = mesh::rotation(frame);
                self.rasteriser.enqueue_turn(stream, at(VERTICES)?, &matrix, result(0)?).doing(LAUNCHING)
            }
            Stage::Renderer(number) => {
                let Some([corners, fragments]) = &self.scratch else { return Ok(()) };
                let look = self.job.look(number, frame);
                let drawing = Drawing {
                    indices: at(INDICES)?,
                    colours: at(COLOURS)?,
                    vertices: result(0)?,
                    camera: &mesh::CAMERA,
                    size: [width, height],
                    tile: tiles[number as usize].sides(),
                    tint: look.tint,
                    tag: look.tag,
                    corners: corners.as_slice(),
                    fragments: fragments.as_slice(),
                    pixels: result(self.number())?,
                };
                self.rasteriser.enqueue(stream, &drawing).doing(LAUNCHING)
            }
            Stage::Compositor => tiles.iter().zip(self.inputs()).try_for_each(|(tile, input)| {
                let [pixels, picture] = [result(input)?, result(self.number())?];
                self.rasteriser.enqueue_place(stream, pixels, tile.sides(), picture, [width, height]).doing(LAUNCHING)
            }),
            Stage::Writer => {
                let picture = Picture {
                    pixels: result(self.number() - 1)?,
                    size: [width, height],
                    tiles: Tile::grid(self.job.renderers),
                    tags: [frame as u8; 16],
                };
                let place = (frame % u64::from(IN_FLIGHT)) as usize;
                let Some(checks) = &mut self.checks else { return Ok(()) };
                checks.enqueue(self.stream.as_ref(), &picture, place).doing(LAUNCHING)
            }
        }
    }

    /// Waits for the check of a frame, if this is the writer.
    fn finish(&mut self, frame: u64) -> Result<(), Failure> {
        let Some(checks) = &mut self.checks else { return Ok(()) };
        let found = checks.finish((frame % u64::from(IN_FLIGHT)) as usize).doing("checking a frame")?;
        self.done.sums.push(found.sum);
        self.done.torn |= found.torn > 0;
        Ok(())
    }

    /// Waits for the last checks, and returns what was done since `start`.
    fn finish_all(&mut self, frames: u64, start: Instant) -> Result<Done, Failure> {
        (frames.saturating_sub(IN_FLIGHT.into())..frames).try_for_each(|frame| self.finish(frame))?;
        self.stream.synchronize().doing("waiting for the last frame")?;
        Ok(Done { nanos: start.elapsed().as_nanos() as u64, ..std::mem::take(&mut self.done) })
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        // Its kernels use its buffers.
        let _ = self.stream.synchronize();
    }
}

/// Runs the pipeline in this process alone, for two seconds at most.
pub(super) fn alone(gpu: &Gpu, job: &Job, mesh: &Mesh) -> Result<Done, Failure> {
    let layout = Layout::new(job, mesh_bytes(mesh));
    let memory = DeviceBuffer::new(gpu.context(), layout.bytes()).doing("allocating")?;
    layout.fill(gpu, memory.as_slice(), mesh)?;
    let stages = Stage::all(job.renderers);
    let workers = stages.iter().map(|stage| Worker::new(gpu, job, &layout, memory.as_slice(), *stage));
    let mut workers: Vec<Worker<'_>> = workers.collect::<Result<_, _>>()?;
    let event = |_| Event::new(gpu.context()).doing("creating an event");
    // One for each stage and frame in flight.
    let events: Vec<Event> = (0..stages.len() * SLOTS as usize).map(event).collect::<Result<_, _>>()?;
    let start = Instant::now();
    let mut frame = 0;
    while frame < job.frames && start.elapsed() < LONGEST {
        let first = (frame % SLOTS) as usize * stages.len();
        for worker in &mut workers {
            let waits = &events[first..][worker.inputs()];
            waits.iter().try_for_each(|event| event.enqueue_wait(worker.stream.as_ref())).doing(WAITING)?;
            // The writer waits on the host for the frame whose memory the next one has.
            worker.enqueue(frame)?;
            events[first + worker.number()].record(worker.stream.as_ref()).doing(WAITING)?;
        }
        frame += 1;
    }
    let Some(writer) = workers.last_mut() else { return Err(unexpected("a pipeline has no writer")) };
    writer.finish_all(frame, start)
}

/// Runs the pipeline by processes.
pub(super) fn together(session: &Session, gpu: &Gpu, job: &Job, mesh: &Mesh, design: Design) -> Result<Done, Failure> {
    let layout = Layout::new(job, mesh_bytes(mesh));
    let context = gpu.context();
    let granularity = PhysicalMemory::granularity(context).doing(SHARING)?;
    let bytes = round_up(layout.bytes(), granularity).ok_or_else(|| unexpected("the frames are too large"))?;
    let (buffer, mapping);
    let (memory, handle, descriptor) = match design {
        Design::Driver => {
            let memory = PhysicalMemory::create(context, bytes).doing(SHARING)?;
            let descriptor = memory.export().doing(SHARING)?;
            mapping = Mapping::new(memory, Access::ReadWrite).doing(SHARING)?;
            (mapping.as_slice(), Vec::new(), Some(descriptor))
        }
        Design::Textbook => {
            buffer = DeviceBuffer::new(context, bytes).doing(SHARING)?;
            let memory = buffer.as_slice();
            (memory, IpcMemoryHandle::of(context, memory.device_ptr()).doing(SHARING)?.0.to_vec(), None)
        }
    };
    layout.fill(gpu, memory, mesh)?;
    let job = Job { frames: job.frames.min(MOST_FRAMES), ..job.clone() };
    let stages = Stage::all(job.renderers);
    let mut peers = Vec::new();
    for stage in &stages {
        let peer = session.spawn("plain")?;
        let task = Task { job: job.clone(), design, stage: *stage, mesh: mesh_bytes(mesh), handle: handle.clone() };
        let fds: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        peer.say_with(task, &fds)?;
        peers.push(peer);
    }
    if design == Design::Textbook {
        let words = Words::create(stages.len()).doing(SHARING_WORDS)?;
        let handles: Vec<Vec<u8>> = peers.iter_mut().map(Peer::hear).collect::<Result<_, _>>()?;
        peers.iter().try_for_each(|peer| peer.say_with(&handles, &[words.as_fd()]))?;
    }
    peers.iter_mut().try_for_each(Peer::hear::<()>)?;
    peers.iter().rev().try_for_each(|peer| peer.say(()))?;
    let done: Vec<Done> = peers.iter_mut().map(Peer::hear).collect::<Result<_, _>>()?;
    peers.into_iter().for_each(Peer::end);
    done.into_iter().last().ok_or_else(|| unexpected("a pipeline has no writer"))
}

/// Plays a stage of a pipeline of processes.
pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let task: Task = session.parent().hear()?;
    let gpu = session.gpu_if_any()?.ok_or_else(|| unexpected("a pipeline of the driver needs a GPU"))?;
    let context = gpu.context();
    let layout = Layout::new(&task.job, task.mesh);
    let (mapping, opened);
    let memory = match task.design {
        Design::Driver => {
            let descriptor = session.parent().take_fd()?;
            let bytes = round_up(layout.bytes(), PhysicalMemory::granularity(context).doing(SHARING)?);
            let bytes = bytes.ok_or_else(|| unexpected("the frames are too large"))?;
            let memory = PhysicalMemory::import(context, descriptor.as_fd(), bytes).doing(SHARING)?;
            mapping = Mapping::new(memory, Access::ReadWrite).doing(SHARING)?;
            mapping.as_slice()
        }
        Design::Textbook => {
            let handle = IpcMemoryHandle(bytes_of_handle(&task.handle)?);
            opened = IpcMapping::open(context, handle, layout.bytes(), Access::ReadWrite).doing(SHARING)?;
            opened.as_slice()
        }
    };
    let mut worker = Worker::new(&gpu, &task.job, &layout, memory, task.stage)?;
    let mut hosts = match task.design {
        Design::Driver => None,
        Design::Textbook => Some(Hosts::new(session, &gpu)?),
    };
    session.parent().say(())?;
    session.parent().hear::<()>()?;
    let start = Instant::now();
    let writer = Stage::Writer.number(task.job.renderers);
    for frame in 0..task.job.frames {
        let mut inputs: Vec<(usize, u64)> = worker.inputs().map(|input| (input, frame + 1)).collect();
        if task.stage == Stage::Geometry && frame >= IN_FLIGHT.into() {
            inputs.push((writer, frame + 1 - u64::from(IN_FLIGHT)));
        }
        for (input, value) in inputs {
            match &hosts {
                None => worker.stream.as_ref().enqueue_wait_u64(layout.word(memory, input)?, value).doing(WAITING)?,
                Some(hosts) => hosts.await_stage(&worker.stream, input, value)?,
            }
        }
        worker.enqueue(frame)?;
        let own = worker.number();
        match &mut hosts {
            None => worker.stream.as_ref().enqueue_write_u64(layout.word(memory, own)?, frame + 1).doing(WAITING)?,
            Some(hosts) => hosts.finish(&worker.stream, own, frame + 1)?,
        }
    }
    session.finish(worker.finish_all(task.job.frames, start)?)
}

/// The order of the textbook.
struct Hosts {
    words: Words,
    /// The event of this process, which others have opened.
    event: IpcEvent,
    /// Those of all stages; `None` for this one.
    events: Vec<Option<IpcEvent>>,
}

impl Hosts {
    fn new(session: &mut Session, gpu: &Gpu) -> Result<Self, Failure> {
        let event = IpcEvent::new(gpu.context()).doing(SHARING)?;
        let own = event.export().doing(SHARING)?.0.to_vec();
        let handles: Vec<Vec<u8>> = session.parent().ask(own.clone())?;
        let words = Words::open(&session.parent().take_fd()?, handles.len()).doing(SHARING_WORDS)?;
        let open = |handle: &Vec<u8>| {
            if *handle == own {
                return Ok(None);
            }
            IpcEvent::open(gpu.context(), &IpcEventHandle(bytes_of_handle(handle)?)).doing(SHARING).map(Some)
        };
        Ok(Self { words, event, events: handles.iter().map(open).collect::<Result<_, Failure>>()? })
    }

    /// Waits until the host of a stage has finished so many frames.
    fn await_stage(&self, stream: &Stream, stage: usize, frames: u64) -> Result<(), Failure> {
        let deadline = Instant::now() + TIMEOUT;
        while self.words.get(stage) < frames {
            if Instant::now() > deadline {
                return Err(unexpected("a stage of the textbook's pipeline does not continue"));
            }
            thread::yield_now();
        }
        match &self.events[stage] {
            Some(event) => event.enqueue_wait(stream.as_ref()).doing(WAITING),
            None => Ok(()),
        }
    }

    fn finish(&mut self, stream: &Stream, stage: usize, frames: u64) -> Result<(), Failure> {
        self.event.record(stream.as_ref()).doing(WAITING)?;
        stream.as_ref().context().synchronize().doing(WAITING)?;
        self.words.set(stage, frames);
        Ok(())
    }
}

fn bytes_of_handle(handle: &[u8]) -> Result<[u8; 64], Failure> {
    handle.try_into().map_err(|_| unexpected("a handle has another length"))
}

const VERTICES: usize = 0;
const INDICES: usize = 1;
const COLOURS: usize = 2;

/// The parts of the mesh.
const MESH: usize = 3;

/// Frames in flight, and one in the making.
const SLOTS: u64 = IN_FLIGHT as u64 + 1;

const WORD: u64 = 8;

const MOST_FRAMES: u64 = 600;

/// How long one process draws alone.
const LONGEST: Duration = Duration::from_secs(2);

const LAUNCHING: &str = "launching a kernel";
const WAITING: &str = "ordering streams";
const SHARING: &str = "sharing memory";
const SHARING_WORDS: &str = "sharing words of the textbook's pipeline";
