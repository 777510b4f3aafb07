//! The watcher: starts the roles, kills one and restarts it, keeps the movie, and counts the frames.

use std::{
    collections::hash_map::Entry,
    fs::File,
    io::{Read, Write},
    path::Path,
};

use serde_json::{Map, Value, json};

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    let mesh = Mesh::load(&order.scene)?;
    let output = order.out.clone().unwrap_or(Output::Nothing);
    let movie = Sink::open(&output)?;
    let job = job(&order, output, session.place)?;
    let topics = objects::Topics::create(session, &job, (mesh.vertices.len() / raster::VERTEX) as u64)?;
    let geometry = session.partner();
    let mut watcher = Watcher {
        session,
        job,
        victim: order.kill.and_then(|kill| kill.place(order.renderers)),
        kills_broker: order.kill == Some(Victim::Broker),
        stages: Vec::new(),
        movie,
        frames: Vec::new(),
        twice: 0,
        written: Instant::now(),
        killed: None,
        visitors: Vec::new(),
        visits: Vec::new(),
    };
    let time = watcher.run(geometry)?;
    let Watcher { session, job, movie, frames, twice, killed, visits, .. } = watcher;
    drop(topics);
    movie.finish()?;
    let count = Count::new(&job, &frames, twice, &mesh);
    let killed = killed.map(|killed| killed.describe(&job, &frames));
    session.report(killed_step(killed.as_ref(), &count))?;
    session.report(visits_step(&visits, &count))?;
    session.report(count.step(&job, time))?;
    session.report(count.compared(&job))?;
    if job.brush != Brush::Cuda {
        let step = Step::new(
            "kernels",
            "The same pixels by kernels",
            "Kernels compute what has been computed without them here.",
        );
        session.report(step.untried(Some(PIXELS), "no kernel has drawn: --device cuda draws by kernels"))?;
    }
    session.report(tiles_step(&job, &frames))?;
    session.report(latency(&frames))?;
    let rate = frames.len() as f64 / time.as_secs_f64();
    let baselines = baselines(session, &job, &mesh, &frames, order.kill, rate)?;
    let mut result = count.to_json();
    result.insert("frames_per_second".into(), json!(rounded(rate)));
    result.insert("baselines".into(), baselines.into());
    result.insert("pipeline".into(), described(session, &job, &mesh)?);
    result.insert("tiles".into(), tiles_json(&job, &frames));
    result.insert("latency_us".into(), latency_json(&frames));
    result.insert("killed".into(), killed.iter().map(Killed::to_json).collect());
    result.insert("viewers".into(), visits.iter().map(Visit::to_json).collect());
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

fn job(order: &Order, output: Output, place: Place) -> Result<Job, Failure> {
    let brush = order.renderer.unwrap_or(if place == Place::Host { Brush::Cpu } else { Brush::Cuda });
    if brush == Brush::Cuda && place == Place::Host {
        return Err(Failure::new(
            ErrorKind::Usage,
            "cannot draw by kernels in host memory",
            "put the memory on a GPU with --device cuda, or draw with --renderer cpu",
        ));
    }
    if brush == Brush::Vulkan {
        shaders::require(place)?;
    }
    let devices = devices(order, brush)?;
    let frames = u64::from(order.frames);
    let rate = order.fps.or(order.live.then_some(LIVE_RATE));
    Ok(Job {
        source: absolute(&order.scene)?,
        size: order.size,
        frames,
        renderers: order.renderers,
        tile: 0,
        brush,
        devices,
        rate,
        live: order.live,
        output,
        fps: rate.unwrap_or(MOVIE_RATE),
        unwritten: 0,
        joins_late: false,
        strike: None,
    })
}

/// Returns the UUIDs of the GPUs that draw.
fn devices(order: &Order, brush: Brush) -> Result<Vec<String>, Failure> {
    if !order.devices.is_empty() && brush != Brush::Cuda {
        return Err(Failure::new(
            ErrorKind::Usage,
            "cannot choose GPUs with --devices: nothing is drawn by kernels",
            "put the memory on a GPU with --device cuda, and draw with --renderer cuda; or leave out --devices",
        ));
    }
    // Opened here, so that a missing one is reported once and before a process starts.
    order.devices.iter().map(|choice| Ok(device::open(*choice)?.uuid().to_string())).collect()
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
    /// Returns the place of the victim among the stages: geometry, compositor, writer, viewer, renderers. The broker is none.
    fn place(self, renderers: u32) -> Option<usize> {
        match self {
            Self::Geometry => Some(GEOMETRY),
            Self::Compositor => Some(1),
            Self::Writer => Some(WRITER),
            Self::Renderer => Some(RENDERERS + renderers as usize - 1),
            Self::Broker => None,
        }
    }
}

fn await_ready(peer: &mut Peer) -> Result<(), Failure> {
    match peer.hear()? {
        Report::Ready => Ok(()),
        _ => Err(unexpected("a role works before it is ready")),
    }
}

const GEOMETRY: usize = 0;
const WRITER: usize = 2;
const RENDERERS: usize = 4;

struct Watcher<'a> {
    session: &'a mut Session,
    job: Job,
    /// The stage that is killed.
    victim: Option<usize>,
    /// Whether the broker is killed.
    kills_broker: bool,
    stages: Vec<Stage>,
    movie: Sink,
    /// In the order of their arrival.
    frames: Vec<Written>,
    /// Frames that arrived again.
    twice: u64,
    /// When the last frame arrived.
    written: Instant,
    killed: Option<Death>,
    /// Viewers that have not come, or have not gone yet.
    visitors: Vec<Peer>,
    visits: Vec<Visit>,
}

/// A viewer that came and went while frames were written.
struct Visit {
    pid: u32,
    /// How many frames were written when it came and when it went.
    came: u64,
    went: u64,
    /// How many frames it has seen. `None` if it was killed.
    seen: Option<u64>,
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
    /// Frames that a viewer has seen since, before its successor was started. Only with `--live`.
    viewed: u64,
    /// Whether its absence was seen: for a renderer in a grey tile, for a writer by a viewer.
    is_seen: bool,
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
        for stage in 0..self.stages.len() {
            self.send_job(stage, self.victim == Some(stage))?;
        }
        for stage in &mut self.stages {
            await_ready(&mut stage.peer)?;
        }
        for _ in 0..2 {
            let mut visitor = self.session.spawn("viewer")?;
            visitor.say(Job { joins_late: true, ..self.job.clone() })?;
            await_ready(&mut visitor)?;
            self.visitors.push(visitor);
        }
        self.stages[GEOMETRY].peer.say(())?;
        let start = Moment::now();
        self.written = Instant::now();
        while self.job.unwritten < self.job.frames {
            self.hear()?;
            self.restart()?;
            self.kill_broker()?;
            self.visit()?;
        }
        while self.visit()? {}
        // The last frame may come before the successor of a killed role is due.
        while self.killed.as_ref().is_some_and(|death| death.new_pid.is_none()) {
            thread::sleep(MOMENT);
            self.restart()?;
        }
        self.name_next_broker()?;
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
        stage.peer.say(Job { tile: stage.tile, strike, ..self.job.clone() })
    }

    /// Waits for the next reports.
    fn hear(&mut self) -> Result<(), Failure> {
        let peers: Vec<&Peer> = self.stages.iter().map(|stage| &stage.peer).collect();
        let limit = match &self.killed {
            Some(Death { new_pid: None, restart, .. }) => {
                restart.saturating_duration_since(Instant::now()).max(SHORTEST_WAIT)
            }
            _ => TIMEOUT,
        };
        let ready = Peer::wait_any(&peers, limit)?;
        if self.written.elapsed() >= TIMEOUT {
            return Err(unexpected("no frame was written for 20 s"));
        }
        for stage in ready {
            if self.is_dead(stage) {
                continue;
            }
            match self.stages[stage].peer.hear()? {
                Report::Written(written) => self.take(written)?,
                Report::Struck => self.kill(stage)?,
                Report::Viewed => {
                    if let Some(death @ Death { new_pid: None, .. }) = &mut self.killed {
                        death.viewed += 1;
                        death.is_seen |= death.role == "writer";
                    }
                }
                Report::Ready | Report::Left(_) | Report::Done => {
                    return Err(unexpected("a role reports out of turn"));
                }
            }
        }
        Ok(())
    }

    fn is_dead(&self, stage: usize) -> bool {
        self.victim == Some(stage) && self.killed.as_ref().is_some_and(|death| death.new_pid.is_none())
    }

    /// Takes a frame from the writer, which waits until its part of the movie is here.
    fn take(&mut self, written: Written) -> Result<(), Failure> {
        self.written = Instant::now();
        if let Some(death) = &mut self.killed {
            death.is_seen |= death.is_seen_in(&written);
        }
        let part = written.has_part.then(|| self.stages[WRITER].peer.take_fd()).transpose()?;
        let has_part = part.is_some();
        if written.frame != self.job.unwritten {
            self.twice += 1;
        } else {
            if let Some(part) = part {
                self.movie.append(part)?;
            }
            self.job.unwritten += 1;
            self.frames.push(written);
        }
        if has_part { self.stages[WRITER].peer.say(()) } else { Ok(()) }
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
            viewed: 0,
            is_seen: false,
        });
        Ok(())
    }

    /// Lets a viewer come or go, if it is time: the first one comes at a third of the frames and leaves at half of them, then
    /// the second one comes, and is killed at two thirds. Returns whether one did.
    fn visit(&mut self) -> Result<bool, Failure> {
        let Job { frames, unwritten, .. } = self.job;
        let is_first = self.visitors.len() == 2;
        let is_here = self.visits.len() + self.visitors.len() > 2;
        let parts = if is_first { [(1, 3), (1, 2)] } else { [(1, 2), (2, 3)] };
        let (dividend, divisor) = parts[usize::from(is_here)];
        let Some(visitor) = self.visitors.first_mut().filter(|_| unwritten >= frames * dividend / divisor) else {
            return Ok(false);
        };
        if !is_here {
            visitor.say(())?;
            await_ready(visitor)?;
            self.visits.push(Visit { pid: visitor.pid, came: unwritten, went: unwritten, seen: None });
            return Ok(true);
        }
        let mut visitor = self.visitors.remove(0);
        let seen = if is_first {
            visitor.say(())?;
            let Report::Left(seen) = visitor.hear()? else { return Err(unexpected("a viewer did not leave")) };
            visitor.end();
            Some(seen)
        } else {
            visitor.kill();
            None
        };
        if let Some(visit) = self.visits.last_mut() {
            visit.went = unwritten;
            visit.seen = seen;
        }
        Ok(true)
    }

    /// Kills the broker when a third of the frames are written.
    fn kill_broker(&mut self) -> Result<(), Failure> {
        if !self.kills_broker || self.killed.is_some() || self.job.unwritten < self.job.frames / 3 {
            return Ok(());
        }
        let domain = self.session.domain().clone();
        let pid = self.session.broker().kill_worker(&domain)?;
        // Its successor is named at the end: no frame waits for it, and asking would.
        let restart = Instant::now();
        let at = Moment::now();
        self.killed =
            Some(Death { role: "broker", tile: None, pid, new_pid: Some(0), at, restart, viewed: 0, is_seen: false });
        Ok(())
    }

    fn name_next_broker(&mut self) -> Result<(), Failure> {
        if let Some(death) = self.killed.as_mut().filter(|_| self.kills_broker) {
            death.new_pid = Some(self.session.domain().status()?.pid);
        }
        Ok(())
    }

    /// Starts the successor of a killed stage when it is time.
    fn restart(&mut self) -> Result<(), Failure> {
        let is_live = self.job.live;
        let due = |death: &Death| death.new_pid.is_none() && death.is_due(is_live);
        let Some(victim) = self.victim.filter(|_| self.killed.as_ref().is_some_and(due)) else { return Ok(()) };
        self.stages[victim].peer = self.session.spawn(self.stages[victim].role)?;
        self.send_job(victim, false)?;
        await_ready(&mut self.stages[victim].peer)?;
        if victim == GEOMETRY {
            self.stages[victim].peer.say(())?;
        }
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
    /// Frames that a viewer saw before its successor was started.
    viewed: u64,
    /// After what time a killed renderer's tile was grey. `None` if it never was.
    grey: Option<Duration>,
    /// Of a killed renderer: how many scenes the slowest other one drew before its successor was back.
    others: Option<u32>,
}

impl Death {
    /// Returns whether its successor should be started: in `--live` once the absence could be seen.
    fn is_due(&self, is_live: bool) -> bool {
        let now = Instant::now();
        let can_be_seen = is_live && matches!(self.role, "renderer" | "writer");
        now >= self.restart && (!can_be_seen || self.is_seen || now >= self.restart + LONGEST_PAUSE)
    }

    /// Returns whether the tile of a killed renderer is grey in a frame that was written since. On a busy machine it may
    /// have been late before.
    fn is_seen_in(&self, frame: &Written) -> bool {
        frame.at > self.at && self.tile.is_some_and(|tile| frame.late >> tile & 1 == 1)
    }

    fn describe(self, job: &Job, frames: &[Written]) -> Killed {
        let new_pid = self.new_pid.unwrap_or_default();
        let before = frames.iter().filter(|frame| frame.at <= self.at).count();
        let after = &frames[before..];
        let grey = after.iter().find(|frame| self.is_seen_in(frame)).map(|frame| frame.at.since(self.at));
        let gap = match self.tile.filter(|_| job.live) {
            // The time until its tile was drawn again.
            Some(tile) => {
                let is_back =
                    |frame: &&Written| frame.tiles.get(tile as usize).is_some_and(|drawn| drawn.pid == new_pid);
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
            stale: frames.iter().filter(|frame| frame.late > 0).count(),
            viewed: self.viewed,
            grey,
            others: self.tile.map(|tile| scenes_of_others(after, tile, new_pid)),
        }
    }
}

impl Killed {
    fn to_json(&self) -> Value {
        let Self { role, pid, new_pid, frame, gap, viewed, grey, others, .. } = self;
        let ms = |time: Duration| rounded(time.as_secs_f64() * 1000.0);
        json!({
            "role": role, "pid": pid, "new_pid": new_pid, "frame": frame, "gap_ms": ms(*gap),
            "viewed_meanwhile": viewed, "grey_after_ms": grey.map(ms), "others_drew_meanwhile": others,
        })
    }
}

/// Returns how many scenes each tile but one advanced at least, until the process `new_pid` had drawn that one.
fn scenes_of_others(frames: &[Written], tile: u32, new_pid: u32) -> u32 {
    let is_back = |frame: &&Written| frame.tiles.get(tile as usize).is_some_and(|drawn| drawn.pid == new_pid);
    let Some((first, last)) = frames.first().zip(frames.iter().find(is_back).or(frames.last())) else { return 0 };
    let pairs = (0..).zip(first.tiles.iter().zip(&last.tiles)).filter(|(number, _)| *number != tile);
    pairs.map(|(_, (first, last))| last.frame.saturating_sub(first.frame)).min().unwrap_or_default()
}

fn killed_step(killed: Option<&Killed>, count: &Count) -> Step {
    let title = "A process is killed in the middle of a frame, and restarted";
    let why = if killed.is_some_and(|killed| killed.role == "broker") {
        "Samples do not pass through the broker, so no process waits for it. Its supervisor starts the next one, which \
         continues with the journal and with the memory that is still open."
    } else {
        "What it had not published does not exist for others. The broker proves the death (100 ms), and no process \
               waits for it any more. Its successor asks the topics for what they keep, and draws again what was not \
               written."
    };
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
    .value("its tile was grey after", killed.grey.map_or("never".to_owned(), millis))
    .value("frames that a viewer saw meanwhile, with --live", killed.viewed.to_string())
    .value("longest gap", millis(killed.gap))
    .says(FALLS, killed.after == 0)
    .says(LOST, count.missing > 0)
    .says(TORN, count.torn > 0)
    .judge(killed.after > 0, "the pipeline continues", "the pipeline has stopped")
}

impl Visit {
    fn to_json(&self) -> Value {
        let Self { pid, came, went, seen, .. } = self;
        json!({ "pid": pid, "came": came, "went": went, "killed": seen.is_none(), "seen": seen })
    }
}

fn visits_step(visits: &[Visit], count: &Count) -> Step {
    let step = Step::new(
        "viewers",
        "Viewers that come and go while frames are written",
        "They subscribe with the policy `Latest`, so that no process waits for them, in life or death. Each comes to a topic \
         that is in use, and the place of the killed one is free again once its death is proved.",
    );
    let step = visits.iter().fold(step, |step, Visit { pid, came, went, seen }| {
        let label = if seen.is_some() { "came and left" } else { "came and was killed" };
        let seen = seen.map_or(String::new(), |seen| format!(", {seen} frames seen"));
        step.value(label, format!("{pid}, after {came} and {went} frames{seen}"))
    });
    step.judge(count.missing == 0, "no frame is missing for them", "frames are missing")
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
    fn new(job: &Job, frames: &[Written], twice: u64, mesh: &Mesh) -> Self {
        // With `--live` a frame is of several scenes.
        let drawn = if job.live { Vec::new() } else { vec![0, job.frames / 2, job.frames - 1] };
        let mut whole = Whole::new(job, mesh, 1);
        let mut expected: HashMap<u64, u64> =
            drawn.iter().map(|frame| (frame % mesh::TURN, raster::hash(whole.draw(*frame)))).collect();
        // A frame without an expected picture is what later frames of the same scene are compared with.
        let compared: Vec<bool> = frames
            .iter()
            .filter(|_| !job.live)
            .filter_map(|frame| match expected.entry(frame.frame % mesh::TURN) {
                Entry::Occupied(expected) => Some(*expected.get() == frame.hash),
                Entry::Vacant(place) => {
                    place.insert(frame.hash);
                    None
                }
            })
            .collect();
        Self {
            frames: frames.len() as u64,
            missing: job.frames - frames.len() as u64,
            twice,
            torn: frames.iter().filter(|frame| frame.torn).count() as u64,
            tainted: frames.iter().map(|frame| frame.tainted).max().unwrap_or_default(),
            compared: compared.len() as u64,
            different: compared.iter().filter(|is_equal| !**is_equal).count() as u64,
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
        let [frame, renderer] = [job.frames == 1, job.renderers == 1].map(|one| if one { "" } else { "s" });
        let title =
            format!("{} frame{frame} of {width} x {height} pixels by {} renderer{renderer}", job.frames, job.renderers);
        Step::new(
            "frames",
            title,
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
            "Frames, compared with those that this process draws alone, and with those of the same scene",
            "This process draws three frames. The mesh is back after 120 frames, and each frame is compared with the one \
             before. Coverage, depth and light are integers, so that tiles of several processes fit together to the bit.",
        );
        if job.live {
            let why = "with --live the tiles of a frame may be of different scenes";
            return step.untried(Some(TILES), why).untried(Some(PIXELS), why);
        }
        let step = match job.brush {
            Brush::Cuda => step.says(PIXELS, self.different > 0),
            Brush::Cpu | Brush::Vulkan => step,
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

/// Draws the same frames without the library, for comparison. Returns the frames a second.
fn baselines(
    session: &Session,
    job: &Job,
    mesh: &Mesh,
    frames: &[Written],
    kills: Option<Victim>,
    rate: f64,
) -> Result<Map<String, Value>, Failure> {
    let gpu = session.gpu_if_any()?.filter(|_| job.brush == Brush::Cuda);
    let mut rates = Map::new();
    let mut measured = |id: &str, step: Step, done: Option<f64>, is_right: bool| {
        let Some(done) = done else {
            let why = "frames were kept, came at a fixed rate, or were drawn by chosen GPUs, or a process was killed";
            return session.report(step.untried(None, why));
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
        let done = job.rate.is_none().then(|| threads(job, mesh));
        measured("one-process", Step::new("one-process", title, why), done, true)?;
        return Ok(rates);
    };
    let is_comparable =
        job.rate.is_none() && job.output == Output::Nothing && kills.is_none() && job.devices.is_empty();
    let title = "The same kernels by one process, on as many streams";
    let why = "It shares nothing, and nothing of it survives a death. One thread enqueues everything.";
    let done = is_comparable.then(|| plain::alone(&gpu, job, mesh)).transpose()?;
    let is_right = done.as_ref().is_none_or(|done| done.is_right(frames));
    let step = Step::new("one-process", title, why);
    measured("one-process", step, done.map(|done| done.rate()), is_right)?;
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
        let is_right = done.as_ref().is_none_or(|done| done.is_right(frames));
        measured(id, Step::new(id, title, why), done.map(|done| done.rate()), is_right)?;
    }
    Ok(rates)
}

/// Returns what was rendered, for a measurement that is kept.
fn described(session: &Session, job: &Job, mesh: &Mesh) -> Result<Value, Failure> {
    let under_mps = session.gpu_if_any()?.map(|gpu| device::under_mps(&gpu)).transpose()?;
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

/// Returns how long each tile took, sorted, in the order of the tiles.
fn tile_times(job: &Job, frames: &[Written]) -> Vec<Vec<Duration>> {
    let times = |tile: usize| {
        let drawn = frames.iter().filter_map(|frame| frame.tiles.get(tile)).filter(|drawn| drawn.nanos > 0);
        let mut times: Vec<_> = drawn.map(|drawn| Duration::from_nanos(drawn.nanos.into())).collect();
        times.sort_unstable();
        times
    };
    (0..job.renderers as usize).map(times).collect()
}

fn tiles_step(job: &Job, frames: &[Written]) -> Step {
    let why = match job.brush {
        Brush::Cuda => {
            "The header of a tile has its frame, number and process, and the time of its renderer's kernels, by events around \
             them. A tile is published before its kernels have run, so the time is that of the last finished tile before it."
        }
        Brush::Cpu | Brush::Vulkan => {
            "The header of a tile has its frame, number and process, and the time in which its renderer has drawn it."
        }
    };
    let step = Step::new("tiles", "How long renderers draw a tile", why);
    let times = tile_times(job, frames);
    let step = times.iter().enumerate().fold(step, |step, (tile, times)| {
        let percentiles = [50, 99].map(|percent| short(percentile(times, percent))).join(", ");
        step.value(format!("tile {tile}: p50, p99"), if times.is_empty() { "unknown".to_owned() } else { percentiles })
    });
    step.judge(true, "measured", "")
}

fn tiles_json(job: &Job, frames: &[Written]) -> Value {
    let by = if job.brush == Brush::Cuda { "gpu" } else { "host" };
    let times = tile_times(job, frames).into_iter().enumerate().map(|(tile, times)| {
        let micros = |percent| rounded(percentile(&times, percent).as_secs_f64() * 1e6);
        json!({ "tile": tile, "time_of": by, "samples": times.len(), "p50_us": micros(50), "p99_us": micros(99) })
    });
    times.collect()
}

/// Returns the times from the publication of a scene to its written frame, sorted.
fn latencies(frames: &[Written]) -> Vec<Duration> {
    let mut times: Vec<_> = frames.iter().map(|frame| frame.at.since(frame.published)).collect();
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

fn latency(frames: &[Written]) -> Step {
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

fn latency_json(frames: &[Written]) -> Value {
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

/// How much longer a successor waits until the absence was seen.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long to wait at least for a report, while a successor is due.
const SHORTEST_WAIT: Duration = Duration::from_millis(5);

/// How long one process draws alone.
const ALONE: Duration = Duration::from_secs(2);
