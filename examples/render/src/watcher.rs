//! The watcher: starts the roles, kills one and restarts it, and keeps the movie.

use super::{
    alone::{baselines, described},
    outcome::{Count, Death, Killed, Visit, killed_step, visits_step},
    sink::Sink,
    times::{latency, latency_json, rounded, tiles_json, tiles_step},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    let mesh = Mesh::load(&order.scene)?;
    let output = order.out.clone().unwrap_or(Output::Nothing);
    let movie = Sink::open(&output, order.force)?;
    let job = job(&order, output, session.place)?;
    let topics = objects::create_topics(session, &job, (mesh.vertices.len() / raster::VERTEX) as u64)?;
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
    session.report(killed_step(order.kill, killed.as_ref(), &count, &job))?;
    session.report(visits_step(&visits, &count))?;
    session.report(count.step(&job, time))?;
    session.report(count.compared(&job))?;
    if job.brush != Brush::Cuda {
        let step = Step::new(
            "kernels",
            "The same pixels by kernels",
            "Kernels compute what has been computed without them here.",
        );
        session.report(step.untried(&[PIXELS], "no kernel has drawn: --device cuda draws by kernels"))?;
    }
    session.report(tiles_step(&job, &frames))?;
    session.report(latency(&frames))?;
    let rate = frames.len() as f64 / time.as_secs_f64();
    let baselines = baselines(session, &job, &mesh, &frames, order.kill, rate)?;
    session.result(count.to_json());
    session.result(json!({
        "frames_per_second": rounded(rate),
        "baselines": baselines,
        "pipeline": described(session, &job, &mesh)?,
        "tiles": tiles_json(&job, &frames),
        "latency_us": latency_json(&frames),
        "killed": killed.iter().map(Killed::to_json).collect::<Vec<_>>(),
        "viewers": visits.iter().map(Visit::to_json).collect::<Vec<_>>(),
    }));
    Ok(())
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
        shaders::require(place).map_err(shaders::failed)?;
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
    order.devices.iter().map(|choice| Ok(partywall_lab::open_gpu(*choice)?.uuid().to_string())).collect()
}

/// Returns a source that means the same in a process that runs elsewhere.
fn absolute(source: &Source) -> Result<Source, Failure> {
    let Source::File(path) = source else { return Ok(source.clone()) };
    Ok(Source::File(std::path::absolute(path).doing(&format!("finding {}", path.display()))?))
}

/// A process of the pipeline.
struct Stage {
    role: &'static str,
    tile: u32,
    peer: Peer,
}

impl Victim {
    /// Returns the place of the victim among the stages: geometry, compositor, writer, viewer, renderers. The broker is
    /// none.
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
        // Before the geometry starts: few frames may be written by the time that this process runs again.
        let start = Moment::now();
        self.stages[GEOMETRY].peer.say(())?;
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
        self.killed = Some(Death::now(role, is_renderer.then_some(*tile), pid, pause));
        Ok(())
    }

    /// Lets a viewer come or go, if it is time: the first one comes at a third of the frames and leaves at half of
    /// them, then the second one comes, and is killed at two thirds. Returns whether one did.
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
        self.killed = Some(Death { new_pid: Some(0), ..Death::now("broker", None, pid, Duration::ZERO) });
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

/// Frames a second with `--live`, and of a movie that was not paced.
const LIVE_RATE: u32 = 30;
const MOVIE_RATE: u32 = 25;

/// How long the tile of a killed renderer stays without its successor in `--live`.
const PAUSE: Duration = Duration::from_millis(600);

/// How long to wait at least for a report, while a successor is due.
const SHORTEST_WAIT: Duration = Duration::from_millis(5);
