//! A renderer: draws one tile of each frame, by kernels on a GPU or by the CPU.

use std::borrow::Cow;

use partywall::cuda::{
    DeviceBuffer,
    experiment::{Drawing, Rasteriser},
};

use super::{objects::Header, raster::Camera, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let mesh = objects::committed_mesh(&domain)?;
    let scenes = objects::scene(&domain)?;
    let publisher = objects::tiles(&domain)?.publisher()?;
    let number = player.job.tile;
    let tile = player.job.tiles()[number as usize];
    let mut painter = match mesh.gpu().filter(|_| player.job.brush == Brush::Cuda) {
        Some(gpu) => Painter::Device(Device::new(&domain, gpu, &scenes, player.job.size, tile)?),
        None => Painter::Cpu {
            indices: objects::tensor(&mesh, "indices")?,
            colours: objects::tensor(&mesh, "colours")?,
            raster: Raster::default(),
        },
    };
    // In `--live` a renderer that is late goes on with the latest scene.
    let policy = if player.job.live { Policy::Latest } else { Policy::Block };
    let scenes = scenes.subscribe(policy).history(IN_FLIGHT).join()?;
    player.ready()?;
    while let Some(sample) = player.next(&scenes)? {
        let header = Header::of(&sample, 12)?;
        if !player.job.live && header.frame < player.job.unwritten {
            continue;
        }
        player.begin();
        let camera: Camera = std::array::from_fn(|word| header.more[word].cast_signed());
        let look = player.job.look(number, header.frame);
        let size = player.job.size;
        let mut loan = publisher.loan(DType::U32, &[tile.size.height.into(), tile.size.width.into()], TIMEOUT)?;
        match &mut painter {
            Painter::Cpu { indices, colours, raster } => objects::fill(&mut loan, |pixels| {
                let vertices = objects::elements(&sample)?;
                let scene = Scene { indices, colours, vertices: &vertices, camera: &camera };
                raster.draw(&scene, size, tile, look, pixels);
                Ok(())
            })?,
            Painter::Device(device) => device.draw(&mesh, &sample, &loan, &camera, look)?,
        }
        player.middle()?;
        Header { more: vec![number, std::process::id()], ..header }.write(&mut loan)?;
        loan.rests_on(&sample)?;
        match &painter {
            Painter::Cpu { .. } => {
                drop(sample);
                objects::publish(loan)?;
            }
            // No host waits for the GPU here. The tile is drawn when the stream reaches this point.
            Painter::Device(device) => {
                let stream = device.stream.as_ref();
                loan.filled().publish_on(stream, TIMEOUT).map_err(|refused| refused.error)?;
                sample.release_on(stream).map_err(|refused| refused.error)?;
            }
        }
        player.end();
    }
    if let Painter::Device(device) = &painter {
        device.stream.synchronize().doing("drawing")?;
    }
    if number > 0 {
        return player.leave();
    }
    player.finish(
        "Scenes into tiles",
        "A renderer reads mesh and vertices in place, and draws into a block of its own. Its arithmetic is that of \
         integers, so that every machine draws the same pixels. The number of the frame is in the fourth byte of each \
         pixel: the writer finds a tile that is torn.",
        |step| step.value("tile", format!("{} x {} pixels", tile.size.width, tile.size.height)),
    )
}

/// What draws a tile.
enum Painter<'a> {
    Cpu { indices: Cow<'a, [u32]>, colours: Cow<'a, [u32]>, raster: Raster },
    Device(Device),
}

/// The resources of the kernels.
struct Device {
    size: Size,
    tile: Tile,
    stream: Stream,
    rasteriser: Rasteriser,
    corners: DeviceBuffer,
    fragments: DeviceBuffer,
}

impl Device {
    fn new(domain: &Domain, gpu: &Gpu, scenes: &Topic, size: Size, tile: Tile) -> Result<Self, Failure> {
        let stream = Stream::new(gpu.context()).doing("creating a stream")?;
        broker::prepare(domain, &stream);
        let buffer = |bytes| DeviceBuffer::new(gpu.context(), bytes).doing("allocating");
        let vertices = scenes.max_bytes() / (4 * raster::VERTEX as u64);
        Ok(Self {
            size,
            tile,
            stream,
            rasteriser: Rasteriser::load(gpu.context()).doing("loading kernels")?,
            corners: buffer(vertices * Rasteriser::CORNER_BYTES)?,
            fragments: buffer(tile.size.pixels() as u64 * Rasteriser::FRAGMENT_BYTES)?,
        })
    }

    /// Enqueues the kernels of one tile.
    fn draw(&self, mesh: &Segment, sample: &Sample, loan: &Loan, camera: &Camera, look: Look) -> Result<(), Failure> {
        let stream = self.stream.as_ref();
        let tile = self.tile;
        let drawing = Drawing {
            indices: mesh.tensor("indices")?.device()?.as_slice(),
            colours: mesh.tensor("colours")?.device()?.as_slice(),
            vertices: sample.device_on(stream)?.as_slice(),
            camera,
            size: [self.size.width, self.size.height],
            tile: [tile.x, tile.y, tile.size.width, tile.size.height],
            tint: look.tint,
            tag: look.tag,
            corners: self.corners.as_slice(),
            fragments: self.fragments.as_slice(),
            pixels: loan.device()?.as_slice(),
        };
        self.rasteriser.enqueue(stream, &drawing).doing("launching a kernel")
    }
}
