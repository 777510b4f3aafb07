//! The watcher: starts the roles, kills one and restarts it, keeps the movie, and counts the frames.

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
};

use serde_json::{Map, Value, json};

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    refuse_broker(order.kill)?;
    let mesh = Mesh::load(&order.scene)?;
    let output = order.out.clone().unwrap_or(Output::Nothing);
    let movie = Sink::open(&output)?;
    let job = job(&order, output, session.place)?;
    let topics = objects::Topics::create(session, &job, (mesh.vertices.len() / raster::VERTEX) as u64)?;
    let geometry = session.partner();
    let mut watcher = Watcher {
        session,
        job,
        victim: order.kill.map(|kill| kill.place(order.renderers)),
        stages: Vec::new(),
        movie,
        frames: Vec::new(),
        twice: 0,
        killed: None,
    };
    let time = watcher.run(geometry)?;
    let Watcher { session, job, movie, frames, twice, killed, .. } = watcher;
    drop(topics);
    movie.finish()?;
    let count = Count::new(&job, &frames, twice, &mesh);
    let killed = killed.map(|killed| killed.describe(&job, &frames));
    session.report(killed_step(killed.as_ref(), &count))?;
    session.report(count.step(&job, time))?;
    session.report(count.compared(&job))?;
    if job.brush == Brush::Cpu {
        let step =
            Step::new("kernels", "The same pixels by kernels", "Kernels compute what the CPU has computed here.");
        session.report(step.untried(Some(PIXELS), "the CPU has drawn: --device cuda draws by kernels"))?;
    }
    session.report(latency(&frames))?;
    session.report(alone(&job, &mesh, frames.len() as f64 / time.as_secs_f64()))?;
    let mut result = count.to_json();
    result.insert("frames_per_second".into(), json!(rounded(frames.len() as f64 / time.as_secs_f64())));
    result.insert("latency_us".into(), latency_json(&frames));
    result.insert("killed".into(), killed.iter().map(Killed::to_json).collect());
    session.reporter().result(result);
    let not_killed = order.kill.filter(|_| killed.is_none());
    if count.is_right() && not_killed.is_none() {
        return Ok(());
    }
    session.reporter().conclude(CLAIMS);
    Err(not_killed.map_or(Failure::Reported(ErrorKind::CheckFailed), |kill| {
        let role = kill.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        Failure::new(
            ErrorKind::CheckFailed,
            format!("the {role} was not killed: it has not finished {} frames", job.frames / 3),
            "render more frames: --frames",
        )
    }))
}

fn refuse_broker(kill: Option<Victim>) -> Result<(), Failure> {
    if kill != Some(Victim::Broker) {
        return Ok(());
    }
    Err(Failure::new(
        ErrorKind::Usage,
        "cannot kill the broker of this lab: the timeline of written frames ends with its broker, and a domain cannot be \
         taken over by another broker",
        "kill another role; `partywall lab crash` shows the death of a broker",
    ))
}

fn job(order: &Order, output: Output, place: Place) -> Result<Job, Failure> {
    let brush = order.renderer.unwrap_or(if place == Place::Host { Brush::Cpu } else { Brush::Cuda });
    if brush == Brush::Cuda && place == Place::Host {
        return Err(Failure::new(
            ErrorKind::Usage,
            "cannot draw by kernels in host memory",
            "put the memory on a GPU with --device cuda, or draw with --renderer cpu",
        ));
    }
    let frames = u64::from(order.frames);
    let rate = order.fps.or(order.live.then_some(LIVE_RATE));
    Ok(Job {
        source: absolute(&order.scene)?,
        size: order.size,
        frames,
        renderers: order.renderers,
        tile: 0,
        brush,
        rate,
        live: order.live,
        output,
        fps: rate.unwrap_or(MOVIE_RATE),
        unwritten: 0,
        compared: if order.live { Vec::new() } else { vec![0, frames / 2, frames - 1] },
        strike: None,
    })
}

/// Returns a source that means the same in a process that runs elsewhere.
fn absolute(source: &Source) -> Result<Source, Failure> {
    let Source::File(path) = source else { return Ok(source.clone()) };
    let system = |source| Error::System { what: format!("finding {}", path.display()), source };
    Ok(Source::File(std::path::absolute(path).map_err(system)?))
}

/// Where the parts of a movie go. The watcher is never killed, so what it writes ends with a whole frame.
struct Sink {
    file: Option<Box<dyn Write>>,
    /// The name while it is written, and the name afterwards.
    paths: Option<[PathBuf; 2]>,
    end: &'static [u8],
}

impl Sink {
    fn open(output: &Output) -> Result<Self, Failure> {
        let end = if matches!(output, Output::Gif(_)) { movie::END_OF_GIF } else { &[] };
        match output {
            Output::Nothing => Ok(Self { file: None, paths: None, end }),
            Output::Stream => Ok(Self { file: Some(Box::new(std::io::stdout())), paths: None, end }),
            Output::Folder(folder) => {
                // What is written now can be renamed later.
                let probe = folder.join(".partywall-render");
                let tried = fs::create_dir_all(folder)
                    .and_then(|()| fs::write(&probe, ""))
                    .and_then(|()| fs::remove_file(&probe));
                tried.map_err(|error| unwritable(folder, &error))?;
                Ok(Self { file: None, paths: None, end })
            }
            Output::Gif(path) | Output::Y4m(path) => {
                let part = path.with_added_extension("part");
                let file = File::create(&part).map_err(|error| unwritable(path, &error))?;
                Ok(Self { file: Some(Box::new(file)), paths: Some([part, path.clone()]), end })
            }
        }
    }

    /// Appends a part that the writer has sent.
    fn append(&mut self, part: std::os::fd::OwnedFd) -> Result<(), Failure> {
        let mut bytes = Vec::new();
        let mut part = File::from(part);
        let read = std::io::Seek::rewind(&mut part).and_then(|()| part.read_to_end(&mut bytes));
        read.map_err(|error| unexpected(&format!("a part of the movie cannot be read: {error}")))?;
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let path = self.paths.as_ref().map_or(Path::new("standard output"), |[_, path]| path);
        file.write_all(bytes).and_then(|()| file.flush()).map_err(|error| unwritable(path, &error))
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.write(self.end)?;
        self.file = None;
        let Some([part, path]) = &self.paths else { return Ok(()) };
        fs::rename(part, path).map_err(|error| unwritable(path, &error))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some([part, _]) = &self.paths {
            // Nothing is left of a movie without an end. A finished one has another name by now.
            let _ = fs::remove_file(part);
        }
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    let what = format!("cannot write {}: {error}", path.display());
    Failure::new(ErrorKind::Refused, what, "pass a folder or file that you may write with --out")
}

/// Writes a file atomically: it is complete or absent.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let part = path.with_added_extension("part");
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).map_err(|error| unwritable(path, &error))
}

/// A process of the pipeline.
struct Stage {
    role: &'static str,
    tile: u32,
    peer: Peer,
}

impl Victim {
    /// Returns the place of the victim among the stages: geometry, compositor, writer, viewer, renderers.
    fn place(self, renderers: u32) -> usize {
        match self {
            Self::Geometry => 0,
            Self::Compositor => 1,
            Self::Writer => WRITER,
            Self::Renderer | Self::Broker => RENDERERS + renderers as usize - 1,
        }
    }
}

const WRITER: usize = 2;
const RENDERERS: usize = 4;

/// A frame that was written, and when the watcher heard of it.
struct Arrived {
    written: Written,
    at: Moment,
}

struct Watcher<'a> {
    session: &'a mut Session,
    job: Job,
    /// The stage that is killed.
    victim: Option<usize>,
    stages: Vec<Stage>,
    movie: Sink,
    /// In the order of their arrival.
    frames: Vec<Arrived>,
    /// Frames that arrived again.
    twice: u64,
    killed: Option<Death>,
}

/// The death of a stage.
struct Death {
    role: &'static str,
    /// The tile of a renderer.
    tile: Option<u32>,
    pid: u32,
    new_pid: Option<u32>,
    at: Moment,
    /// When its successor is started.
    restart: Instant,
}

impl Watcher<'_> {
    /// Runs all roles until the last frame is written. Returns the time from the first frame to the last.
    fn run(&mut self, geometry: Peer) -> Result<Duration, Failure> {
        self.stages.push(Stage { role: "geometry", tile: 0, peer: geometry });
        for role in ["compositor", "writer", "viewer"] {
            self.stages.push(Stage { role, tile: 0, peer: self.session.enlist(role)? });
        }
        for tile in 0..self.job.renderers {
            // One of them may be in a terminal.
            let peer = if tile == 0 { self.session.enlist("renderer") } else { self.session.spawn("renderer") };
            self.stages.push(Stage { role: "renderer", tile, peer: peer? });
        }
        if let Some(victim) = self.victim.map(|victim| &self.stages[victim]).filter(|victim| !victim.peer.is_child()) {
            return Err(Failure::new(
                ErrorKind::Usage,
                format!("cannot kill the {}: it runs in a terminal of its own", victim.role),
                "end it, so that the watcher starts this role itself",
            ));
        }
        // The mesh is committed when the geometry is ready.
        for stage in 0..self.stages.len() {
            self.send_job(stage, self.victim == Some(stage))?;
        }
        let start = Moment::now();
        while self.job.unwritten < self.job.frames {
            self.hear()?;
            self.restart()?;
        }
        let time = self.frames.last().map_or(Duration::ZERO, |last| last.at.since(start));
        for stage in &self.stages {
            stage.peer.say(())?;
        }
        for mut stage in self.stages.drain(..) {
            while !matches!(stage.peer.hear()?, Report::Done) {}
            stage.peer.end();
        }
        Ok(time)
    }

    fn send_job(&mut self, stage: usize, strikes: bool) -> Result<(), Failure> {
        let strike = strikes.then_some(self.job.frames / 3);
        let stage = &mut self.stages[stage];
        let job = Job { tile: stage.tile, strike, ..self.job.clone() };
        match stage.peer.ask(job)? {
            Report::Ready => Ok(()),
            _ => Err(unexpected("a role works before it is ready")),
        }
    }

    /// Waits for the next reports.
    fn hear(&mut self) -> Result<(), Failure> {
        let peers: Vec<&Peer> = self.stages.iter().map(|stage| &stage.peer).collect();
        let limit = match &self.killed {
            Some(Death { new_pid: None, restart, .. }) => restart.saturating_duration_since(Instant::now()),
            _ => TIMEOUT,
        };
        let ready = Peer::wait_any(&peers, limit)?;
        if ready.is_empty() && limit == TIMEOUT {
            return Err(unexpected("no frame was written for 20 s"));
        }
        for stage in ready {
            if self.is_dead(stage) {
                continue;
            }
            match self.stages[stage].peer.hear()? {
                Report::Written(written) => self.take(written)?,
                Report::Struck => self.kill(stage)?,
                Report::Ready | Report::Done => return Err(unexpected("a role reports out of turn")),
            }
        }
        Ok(())
    }

    fn is_dead(&self, stage: usize) -> bool {
        self.victim == Some(stage) && self.killed.as_ref().is_some_and(|death| death.new_pid.is_none())
    }

    /// Takes a frame from the writer, which goes on then.
    fn take(&mut self, written: Written) -> Result<(), Failure> {
        let part = written.has_part.then(|| self.stages[WRITER].peer.take_fd()).transpose()?;
        if written.frame != self.job.unwritten {
            self.twice += 1;
        } else {
            if let Some(part) = part {
                self.movie.append(part)?;
            }
            self.job.unwritten += 1;
            self.frames.push(Arrived { written, at: Moment::now() });
        }
        self.stages[WRITER].peer.say(())
    }

    fn kill(&mut self, stage: usize) -> Result<(), Failure> {
        let Stage { role, tile, peer } = &mut self.stages[stage];
        let pid = peer.pid;
        peer.kill();
        let is_renderer = *role == "renderer";
        // In `--live` its absence should be seen.
        let pause = if self.job.live { PAUSE } else { Duration::ZERO };
        self.killed = Some(Death {
            role,
            tile: is_renderer.then_some(*tile),
            pid,
            new_pid: None,
            at: Moment::now(),
            restart: Instant::now() + pause,
        });
        Ok(())
    }

    /// Starts the successor of a killed stage when it is time.
    fn restart(&mut self) -> Result<(), Failure> {
        let due = |death: &Death| death.new_pid.is_none() && Instant::now() >= death.restart;
        let Some(victim) = self.victim.filter(|_| self.killed.as_ref().is_some_and(due)) else { return Ok(()) };
        self.stages[victim].peer = self.session.spawn(self.stages[victim].role)?;
        self.send_job(victim, false)?;
        let pid = self.stages[victim].peer.pid;
        if let Some(death) = &mut self.killed {
            death.new_pid = Some(pid);
        }
        Ok(())
    }
}

/// What a death cost.
struct Killed {
    role: &'static str,
    pid: u32,
    new_pid: u32,
    frame: u64,
    gap: Duration,
    /// Frames written after it.
    after: usize,
    /// Frames with a grey tile.
    stale: usize,
}

impl Death {
    fn describe(self, job: &Job, frames: &[Arrived]) -> Killed {
        let new_pid = self.new_pid.unwrap_or_default();
        let before = frames.iter().filter(|frame| frame.at <= self.at).count();
        let gap = match self.tile.filter(|_| job.live) {
            // The time until its tile was drawn again.
            Some(tile) => {
                let is_back =
                    |frame: &&Arrived| frame.written.tiles.get(tile as usize).is_some_and(|drawn| drawn.pid == new_pid);
                let back = frames[before..].iter().find(is_back).or(frames.last());
                back.map_or(Duration::ZERO, |frame| frame.at.since(self.at))
            }
            None => {
                let around = frames[before.saturating_sub(1)..].windows(2);
                around.map(|pair| pair[1].at.since(pair[0].at)).max().unwrap_or_default()
            }
        };
        Killed {
            role: self.role,
            pid: self.pid,
            new_pid,
            frame: job.frames / 3,
            gap,
            after: frames.len() - before,
            stale: frames.iter().filter(|frame| frame.written.stale > 0).count(),
        }
    }
}

impl Killed {
    fn to_json(&self) -> Value {
        let Self { role, pid, new_pid, frame, gap, .. } = self;
        json!({ "role": role, "pid": pid, "new_pid": new_pid, "frame": frame, "gap_ms": rounded(gap.as_secs_f64() * 1000.0) })
    }
}

fn killed_step(killed: Option<&Killed>, count: &Count) -> Step {
    let title = "A process is killed in the middle of a frame, and restarted";
    let why = "What it had not published does not exist for others. The broker proves the death (100 ms), and no process \
               waits for it any more. Its successor asks the topics for what they keep, and draws again what was not \
               written.";
    let step = Step::new("killed", title, why);
    let Some(killed) = killed else {
        return [FALLS, LOST, TORN]
            .into_iter()
            .fold(step, |step, claim| step.untried(Some(claim), "nothing was killed: --kill ROLE does it"));
    };
    step.value(
        "killed",
        format!("{} {}, after {} frames; succeeded by {}", killed.role, killed.pid, killed.frame, killed.new_pid),
    )
    .value("frames after that", killed.after.to_string())
    .value("frames with a grey tile", killed.stale.to_string())
    .value("longest gap", millis(killed.gap))
    .says(FALLS, killed.after == 0)
    .says(LOST, count.missing > 0)
    .says(TORN, count.torn > 0)
    .judge(killed.after > 0, "the pipeline continues", "the pipeline has stopped")
}

/// The outcome of the frames.
struct Count {
    frames: u64,
    missing: u64,
    twice: u64,
    torn: u64,
    tainted: u64,
    /// How many frames were compared, and how many of them differ from those that this process draws.
    compared: u64,
    different: u64,
}

impl Count {
    fn new(job: &Job, frames: &[Arrived], twice: u64, mesh: &Mesh) -> Self {
        let written = |frame: &Arrived| Some((frame.written.frame, frame.written.hash?));
        let compared: Vec<(u64, u64)> = frames.iter().filter_map(written).collect();
        let mut whole = Whole::new(job, mesh, 1);
        let differs = |(frame, hash): &&(u64, u64)| raster::hash(whole.draw(*frame)) != *hash;
        Self {
            frames: frames.len() as u64,
            missing: job.frames - frames.len() as u64,
            twice,
            torn: frames.iter().filter(|frame| frame.written.torn).count() as u64,
            tainted: frames.iter().map(|frame| frame.written.tainted).max().unwrap_or_default(),
            compared: compared.len() as u64,
            different: compared.iter().filter(differs).count() as u64,
        }
    }

    fn is_right(&self) -> bool {
        self.missing == 0 && self.twice == 0 && self.torn == 0 && self.different == 0
    }

    fn to_json(&self) -> Map<String, Value> {
        let Self { frames, missing, twice, torn, tainted, .. } = self;
        let counts = [("frames", frames), ("missing", missing), ("twice", twice), ("torn", torn), ("tainted", tainted)];
        counts.into_iter().map(|(name, count)| (name.to_owned(), (*count).into())).collect()
    }

    fn step(&self, job: &Job, time: Duration) -> Step {
        let Self { frames, missing, twice, torn, .. } = self;
        let Size { width, height } = job.size;
        Step::new(
            "frames",
            format!("{} frames of {width} x {height} pixels by {} renderers", job.frames, job.renderers),
            "Each process works on another frame than its neighbours. A frame that is not written is in each topic still, \
             so a successor finds it.",
        )
        .value("written", format!("{frames}, {missing} missing, {twice} twice, {torn} torn"))
        .value("resting on a killed process, and drawn again", self.tainted.to_string())
        .value("frames a second", format!("{:.1}", *frames as f64 / time.as_secs_f64()))
        .judge(*missing == 0 && *twice == 0 && *torn == 0, "every frame once, and whole", "frames are missing, twice or torn")
    }

    fn compared(&self, job: &Job) -> Step {
        let step = Step::new(
            "compare",
            "Three frames, compared with what this process draws alone",
            "Coverage, depth and light are integers, so that tiles of several processes fit together to the bit.",
        );
        if job.live {
            let why = "with --live the tiles of a frame may be of different scenes";
            return step.untried(Some(TILES), why).untried(Some(PIXELS), why);
        }
        let step = match job.brush {
            Brush::Cuda => step.says(PIXELS, self.different > 0),
            Brush::Cpu => step,
        };
        step.value("frames", format!("{} equal, {} different", self.compared - self.different, self.different))
            .says(TILES, self.different > 0)
            .judge(self.different == 0 && self.compared > 0, "the same pixels", "different pixels")
    }
}

/// One process that draws whole pictures with threads, a tile each.
struct Whole<'a> {
    mesh: &'a Mesh,
    size: Size,
    tiles: Vec<Tile>,
    rasters: Vec<(Raster, Vec<u32>)>,
    vertices: Vec<i32>,
    pixels: Vec<u32>,
}

impl<'a> Whole<'a> {
    fn new(job: &Job, mesh: &'a Mesh, tiles: u32) -> Self {
        let tiles = Tile::all(job.size, tiles);
        let rasters = tiles.iter().map(|tile| (Raster::default(), vec![0; tile.size.pixels()])).collect();
        let pixels = vec![0; job.size.pixels()];
        Self { mesh, size: job.size, tiles, rasters, vertices: vec![0; mesh.vertices.len()], pixels }
    }

    fn draw(&mut self, frame: u64) -> &[u32] {
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
            for (row, drawn) in (tile.y..).zip(drawn.chunks_exact(tile.size.width as usize)) {
                let first = (row * self.size.width + tile.x) as usize;
                self.pixels[first..first + drawn.len()].copy_from_slice(drawn);
            }
        }
        &self.pixels
    }
}

/// Draws the same frames in this process alone, for comparison.
fn alone(job: &Job, mesh: &Mesh, rate: f64) -> Step {
    let step = Step::new(
        "one-process",
        "The same frames by one process with threads",
        "It shares nothing and nothing of it survives a death. Its threads wait for each other after each frame; the \
         processes do not.",
    );
    if job.rate.is_some() {
        return step.untried(None, "the frames above came at a fixed rate");
    }
    let mut whole = Whole::new(job, mesh, job.renderers);
    let start = Instant::now();
    let frames = (0..job.frames).take_while(|frame| {
        whole.draw(*frame);
        start.elapsed() < ALONE
    });
    let alone = (frames.count() + 1) as f64 / start.elapsed().as_secs_f64();
    step.value("frames a second", format!("{alone:.1}"))
        .value("of it with processes", format!("{:.0} %", 100.0 * rate / alone))
        .judge(true, "measured", "")
}

/// Returns the times from the publication of a scene to its written frame, sorted.
fn latencies(frames: &[Arrived]) -> Vec<Duration> {
    let mut times: Vec<_> = frames.iter().map(|frame| frame.at.since(frame.written.published)).collect();
    times.sort_unstable();
    times
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}

/// Returns how many times are below each power of two, in microseconds.
fn histogram(sorted: &[Duration]) -> Vec<(u64, usize)> {
    let mut bins: Vec<(u64, usize)> = Vec::new();
    for time in sorted {
        let below = (time.as_micros() as u64 + 1).next_power_of_two();
        match bins.last_mut() {
            Some((bound, count)) if *bound == below => *count += 1,
            _ => bins.push((below, 1)),
        }
    }
    bins
}

fn latency(frames: &[Arrived]) -> Step {
    let sorted = latencies(frames);
    let bins = histogram(&sorted);
    let bins = bins.iter().map(|(below, count)| format!("{count} below {}", short(Duration::from_micros(*below))));
    Step::new(
        "latency",
        "From the publication of a scene to its written frame",
        "It includes the waits behind the frames before, of which up to seven are in flight.",
    )
    .value("p50, p99", format!("{}, {}", millis(percentile(&sorted, 50)), millis(percentile(&sorted, 99))))
    .value("histogram", bins.collect::<Vec<_>>().join(", "))
    .judge(true, "measured", "")
}

fn latency_json(frames: &[Arrived]) -> Value {
    let sorted = latencies(frames);
    let micros = |percent| percentile(&sorted, percent).as_micros() as u64;
    let bins: Vec<Value> =
        histogram(&sorted).into_iter().map(|(below, count)| json!({ "below": below, "frames": count })).collect();
    json!({ "p50": micros(50), "p99": micros(99), "max": micros(100), "histogram": bins })
}

/// Rounds to one decimal.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Frames a second with `--live`, and of a movie that was not paced.
const LIVE_RATE: u32 = 30;
const MOVIE_RATE: u32 = 25;

/// How long the tile of a killed renderer stays without its successor in `--live`.
const PAUSE: Duration = Duration::from_millis(600);

/// How long one process draws alone.
const ALONE: Duration = Duration::from_secs(2);
