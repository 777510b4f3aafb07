//! A renderer: draws one tile of each frame, by kernels on a GPU, by the CPU, or by Vulkan.

use std::borrow::Cow;

use partywall::cuda::Event;

use super::{
    objects::Header,
    raster::Camera,
    rasteriser::{Drawing, Rasteriser},
    shaders::{Shaders, failed},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let number = player.job.tile;
    let device = player.job.device(number)?;
    let mesh = objects::committed_mesh(&domain, device)?;
    let scenes = objects::open(&domain, objects::SCENE, device)?;
    let tiles = objects::open(&domain, objects::TILES, device)?;
    let publisher = tiles.publisher()?;
    let tile = player.job.tiles()[number as usize];
    let mut painter = match (player.job.brush, mesh.gpu()) {
        (Brush::Vulkan, _) => {
            let shaders = Shaders::new(&domain, &scenes, &tiles, tile).map_err(failed)?;
            Painter::Shaders(Box::new(shaders))
        }
        (Brush::Cuda, Some(gpu)) => Painter::Device(Device::new(&domain, gpu, &scenes, player.job.size, tile)?),
        _ => Painter::Cpu {
            indices: objects::tensor(&mesh, "indices")?,
            colours: objects::tensor(&mesh, "colours")?,
            raster: Raster::default(),
        },
    };
    // In `--live` a renderer that is late goes on with the latest scene.
    let policy = if player.job.live { Policy::Latest } else { Policy::Block };
    let scenes = scenes.subscribe(policy).history(IN_FLIGHT).join()?;
    player.say(Report::Ready)?;
    while let Some(sample) = player.next(&scenes)? {
        let header = Header::of(&sample, 12)?;
        if !player.job.live && header.frame < player.job.unwritten {
            continue;
        }
        player.begin();
        let camera: Camera = std::array::from_fn(|word| header.more[word].cast_signed());
        let look = player.job.look(number, header.frame);
        let size = player.job.size;
        let mut loan = publisher.loan(DType::U32, &tile.size.shape(), TIMEOUT)?;
        // A scene that a killed geometry had not finished comes again. Kernels find that out on their stream.
        let waits = !matches!(painter, Painter::Device(_));
        if waits && objects::valid(sample.wait(TIMEOUT).and_then(|()| sample.check()))?.is_none() {
            continue;
        }
        let time = match &mut painter {
            Painter::Cpu { indices, colours, raster } => {
                let mut time = Duration::ZERO;
                objects::fill(&mut loan, |pixels| {
                    let vertices = objects::elements(&sample)?;
                    let scene = Scene { indices, colours, vertices: &vertices, camera: &camera };
                    let start = Instant::now();
                    raster.draw(&scene, size, tile, look, pixels);
                    time = start.elapsed();
                    Ok(())
                })?;
                time
            }
            Painter::Shaders(shaders) => {
                let start = Instant::now();
                shaders.draw(&sample, &mut loan, &camera, size, tile, look).map_err(failed)?;
                start.elapsed()
            }
            Painter::Device(device) => {
                let vertices = sample.device_on(device.kernels.stream());
                let Some(vertices) = objects::valid(vertices)? else { continue };
                device.draw(&mesh, vertices.as_slice(), &loan, &camera, look)?
            }
        };
        player.middle_of(header.frame)?;
        let nanos = u32::try_from(time.as_nanos()).unwrap_or(u32::MAX);
        Header { more: vec![number, std::process::id(), nanos], ..header }.write(&mut loan)?;
        loan.rests_on(&sample)?;
        kernels::publish(painter.kernels(), loan)?;
        kernels::release(painter.kernels(), sample)?;
        player.end();
    }
    if number > 0 {
        // Another renderer reports the step.
        return player.say(Report::Done);
    }
    player.finish(
        "Scenes into tiles",
        "A renderer reads mesh and vertices in place, and draws into a block of its own. Its arithmetic is that of \
         integers, so that every machine draws the same pixels. The number of the frame is in the fourth byte of each \
         pixel: the writer finds a tile that is torn.",
        |step| {
            let step = step.value("tile", format!("{} x {} pixels", tile.size.width, tile.size.height));
            step.value("drawn by", painter.name())
        },
    )
}

/// What draws a tile.
enum Painter<'a> {
    Cpu { indices: Cow<'a, [u32]>, colours: Cow<'a, [u32]>, raster: Raster },
    Shaders(Box<Shaders>),
    Device(Device),
}

impl Painter<'_> {
    fn kernels(&self) -> Option<&Kernels> {
        match self {
            Self::Device(device) => Some(&device.kernels),
            _ => None,
        }
    }

    /// Returns what draws: a GPU by its UUID.
    fn name(&self) -> String {
        match self {
            Self::Cpu { .. } => "the CPU".to_owned(),
            Self::Shaders(_) => "Vulkan".to_owned(),
            Self::Device(device) => device.gpu.to_string(),
        }
    }
}

/// The resources of the kernels.
struct Device {
    gpu: DeviceUuid,
    size: Size,
    tile: Tile,
    /// Before the buffers: dropping it waits for its stream.
    kernels: Kernels,
    corners: DeviceBuffer,
    fragments: DeviceBuffer,
    /// The time of the kernels.
    clock: Clock,
}

/// Measures how long the kernels of a tile take, by events around them. No host waits for the events.
struct Clock {
    pairs: Vec<[Event; 2]>,
    /// How many tiles were measured or are being measured, and how many of them are finished.
    begun: usize,
    finished: usize,
    /// The time of the last finished tile.
    last: Duration,
}

impl Clock {
    fn new(gpu: &Gpu) -> Result<Self, Failure> {
        let event = || Event::new(gpu.context()).doing("creating an event");
        let pairs = (0..=IN_FLIGHT).map(|_| Ok::<_, Failure>([event()?, event()?])).collect::<Result<_, _>>()?;
        Ok(Self { pairs, begun: 0, finished: 0, last: Duration::ZERO })
    }

    /// Enqueues work and measures it, unless as many measurements as there are pairs of events are under way.
    fn measure(&mut self, stream: StreamRef<'_>, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        if self.begun - self.finished == self.pairs.len() {
            return work();
        }
        let [start, end] = &self.pairs[self.begun % self.pairs.len()];
        start.record(stream).doing("recording an event")?;
        work()?;
        end.record(stream).doing("recording an event")?;
        self.begun += 1;
        Ok(())
    }

    /// Returns the time of the last tile whose kernels have ended, or zero.
    fn last(&mut self) -> Result<Duration, Failure> {
        while self.finished < self.begun {
            let [start, end] = &self.pairs[self.finished % self.pairs.len()];
            match end.elapsed_since(start) {
                Err(error) if error.code == CuResult::NOT_READY => break,
                time => self.last = time.doing("measuring kernels")?,
            }
            self.finished += 1;
        }
        Ok(self.last)
    }
}

impl Device {
    fn new(domain: &Domain, gpu: &Gpu, scenes: &Topic, size: Size, tile: Tile) -> Result<Self, Failure> {
        let buffer = |bytes| DeviceBuffer::new(gpu.context(), bytes).doing("allocating");
        let vertices = scenes.max_bytes() / (4 * raster::VERTEX as u64);
        Ok(Self {
            gpu: gpu.uuid(),
            size,
            tile,
            kernels: Kernels::new(domain, gpu)?,
            corners: buffer(vertices * Rasteriser::CORNER_BYTES)?,
            fragments: buffer(tile.size.pixels() as u64 * Rasteriser::FRAGMENT_BYTES)?,
            clock: Clock::new(gpu)?,
        })
    }

    /// Enqueues the kernels of one tile. Returns the time of the last tile that the GPU has finished: that of this one
    /// is not known before its header is published.
    fn draw(
        &mut self,
        mesh: &Segment,
        vertices: DeviceSlice<'_>,
        loan: &Loan,
        camera: &Camera,
        look: Look,
    ) -> Result<Duration, Failure> {
        let time = self.clock.last()?;
        let drawing = Drawing {
            indices: mesh.tensor("indices")?.device()?.as_slice(),
            colours: mesh.tensor("colours")?.device()?.as_slice(),
            vertices,
            camera,
            size: [self.size.width, self.size.height],
            tile: self.tile.sides(),
            tint: look.tint,
            tag: look.tag,
            corners: self.corners.as_slice(),
            fragments: self.fragments.as_slice(),
            pixels: loan.device()?.as_slice(),
        };
        let Self { kernels, clock, .. } = self;
        let launch = || kernels.rasteriser.enqueue(kernels.stream(), &drawing).doing("launching a kernel");
        clock.measure(kernels.stream(), launch)?;
        Ok(time)
    }
}
