//! The same frames without the library, for comparison.

use serde_json::Map;

use super::{times::rounded, *};

/// One process that draws whole pictures with threads, a tile each.
pub(super) struct Whole<'a> {
    mesh: &'a Mesh,
    size: Size,
    tiles: Vec<Tile>,
    rasters: Vec<(Raster, Vec<u32>)>,
    vertices: Vec<i32>,
    pixels: Vec<u32>,
}

impl<'a> Whole<'a> {
    pub(super) fn new(job: &Job, mesh: &'a Mesh, tiles: u32) -> Self {
        let tiles = Tile::all(job.size, tiles);
        let rasters = tiles.iter().map(|tile| (Raster::default(), vec![0; tile.size.pixels()])).collect();
        let pixels = vec![0; job.size.pixels()];
        Self { mesh, size: job.size, tiles, rasters, vertices: vec![0; mesh.vertices.len()], pixels }
    }

    pub(super) fn draw(&mut self, frame: u64) -> &[u32] {
        mesh::turn(&self.mesh.vertices, frame, &mut self.vertices);
        let Mesh { indices, colours, .. } = self.mesh;
        let scene = Scene { indices, colours, vertices: &self.vertices, camera: &mesh::CAMERA };
        let look = Look { tint: None, tag: frame as u8 };
        thread::scope(|scope| {
            for (tile, (raster, pixels)) in self.tiles.iter().zip(&mut self.rasters) {
                let scene = &scene;
                let size = self.size;
                scope.spawn(move || raster.draw(scene, size, *tile, look, pixels));
            }
        });
        for (tile, (_, drawn)) in self.tiles.iter().zip(&self.rasters) {
            tile.copy(drawn, &mut self.pixels, self.size.width);
        }
        &self.pixels
    }
}

/// Draws the same frames without the library, for comparison. Returns the frames a second.
pub(super) fn baselines(
    session: &Session,
    job: &Job,
    mesh: &Mesh,
    frames: &[Written],
    kills: Option<Victim>,
    rate: f64,
) -> Result<Map<String, Value>, Failure> {
    let gpu = session.gpu_if_any()?.filter(|_| job.brush == Brush::Cuda);
    let mut rates = Map::new();
    let mut measured = |id: &str, step: Step, done: Option<(f64, bool)>| {
        let Some((done, is_right)) = done else {
            let why = "frames were kept, came at a fixed rate, or were drawn by chosen GPUs, or a process was killed";
            return session.report(step.untried(&[], why));
        };
        rates.insert(id.replace('-', "_"), json!(rounded(done)));
        let step = step.value("frames a second", format!("{done:.1}"));
        let step = step.value("the library's, as a part of it", format!("{:.0} %", 100.0 * rate / done));
        session.report(step.judge(is_right, "measured", "its frames differ"))
    };
    let Some(gpu) = gpu else {
        let title = "The same frames by one process with threads";
        let why = "It shares nothing and nothing of it survives a death. Its threads wait for each other after each frame; \
                   the processes do not.";
        let done = job.rate.is_none().then(|| (threads(job, mesh), true));
        measured("one-process", Step::new("one-process", title, why), done)?;
        return Ok(rates);
    };
    let is_comparable =
        job.rate.is_none() && job.output == Output::Nothing && kills.is_none() && job.devices.is_empty();
    let title = "The same kernels by one process, on as many streams";
    let why = "It shares nothing, and nothing of it survives a death. One thread enqueues everything.";
    let judged = |done: plain::Done| (done.rate(), done.is_right(frames));
    let done = is_comparable.then(|| plain::alone(&gpu, job, mesh)).transpose()?;
    measured("one-process", Step::new("one-process", title, why), done.map(judged))?;
    for (id, design, title, why) in [
        (
            "driver",
            plain::Design::Driver,
            "The same kernels by as many processes that call the driver themselves",
            "They share one allocation by its descriptor, and their streams write words in it and wait for them. A killed \
             process stops all others for ever.",
        ),
        (
            "textbook",
            plain::Design::Textbook,
            "The same kernels by as many processes in the textbook's design",
            "Legacy handles, interprocess events, words in shared host memory, and a synchronisation for each frame. A \
             killed process stops all others for ever.",
        ),
    ] {
        let done = is_comparable.then(|| plain::together(session, &gpu, job, mesh, design)).transpose()?;
        measured(id, Step::new(id, title, why), done.map(judged))?;
    }
    Ok(rates)
}

/// Returns what was rendered, for a measurement that is kept.
pub(super) fn described(session: &Session, job: &Job, mesh: &Mesh) -> Result<Value, Failure> {
    let under_mps = session.gpu_if_any()?.map(|gpu| partywall_lab::under_mps(&gpu)).transpose()?;
    let Size { width, height } = job.size;
    let size = format!("{width}x{height}");
    Ok(json!({
        "size": size, "triangles": mesh.colours.len(), "renderers": job.renderers, "devices": job.devices,
        "under_mps": under_mps.unwrap_or(false),
    }))
}

/// Draws frames in this process alone, by a thread for each tile. Returns the frames a second.
fn threads(job: &Job, mesh: &Mesh) -> f64 {
    let mut whole = Whole::new(job, mesh, job.renderers);
    let start = Instant::now();
    let frames = (0..job.frames).take_while(|frame| {
        whole.draw(*frame);
        start.elapsed() < ALONE
    });
    (frames.count() + 1) as f64 / start.elapsed().as_secs_f64()
}

/// How long one process draws alone.
const ALONE: Duration = Duration::from_secs(2);
