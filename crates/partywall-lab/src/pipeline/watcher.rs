//! The watcher: starts the stages, kills one and restarts it, and counts the results.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    // Temporary files are in the broker's directory, which is deleted with the broker.
    let directory = session.broker().directory().to_owned();
    let scratch = |name: &str| {
        let folder = directory.join(name);
        fs::create_dir_all(&folder)
            .map_err(|error| unexpected(format!("cannot create a folder for files: {error}")))?;
        Ok::<_, Failure>(folder)
    };
    let images = match order.images {
        Some(folder) => folder,
        None => {
            let folder = scratch("images")?;
            files::paint(&folder)?;
            folder
        }
    };
    let out = order.out.map_or_else(|| scratch("results"), Ok)?;
    fs::create_dir_all(&out).map_err(|error| {
        let what = format!("cannot create the folder {}: {error}", out.display());
        Failure::new(partywall::ErrorKind::Refused, what, "pass a writable folder with --out, or leave the option out")
    })?;
    let files = files::list(&images)?;
    let sizes = files.iter().map(|file| files::size(file)).collect::<Result<Vec<_>, _>>()?;
    let largest = |width| sizes.iter().map(|size| size.at_most(width).bytes()).max().unwrap_or(1);
    let frames = create(session, FRAMES, largest(u32::MAX))?;
    let results = create(session, RESULTS, largest(order.width))?;
    let Order { frames: count, width, radius, kill, .. } = order;
    let job = Job { files, out, frames: count, width, radius, unwritten: 0 };
    let mut watcher = Watcher { session, job, kill, written: Vec::new() };
    let killed = watcher.play()?;
    drop((frames, results));
    session.report(match killed {
        Some(killed) => watcher.gap(&killed),
        None => Step::new("killed", "A stage is killed in the middle, and restarted", "The others continue meanwhile.")
            .untried(&[AGAIN, FALLS], "nothing was killed: --kill STAGE does it"),
    })?;
    session.report(watcher.count(kill.is_some()))?;
    session.report(watcher.compare()?)?;
    if session.place == Place::Host {
        let why = "On a GPU the filter's kernels compute what the CPU has computed here.";
        let step = Step::new("kernels", "The same pixels by kernels", why);
        session.report(step.untried(&[PIXELS], device::NEEDS_A_GPU))?;
    }
    Ok(())
}

struct Watcher<'a> {
    session: &'a Session,
    job: Job,
    kill: Option<Stage>,
    /// The frames in order of arrival, with their times.
    written: Vec<(u64, Instant)>,
}

/// A stage that was killed.
struct Killed {
    stage: Stage,
    pid: u32,
    successor: u32,
    moment: Instant,
}

impl Watcher<'_> {
    /// Runs the stages from the first frame to the last.
    fn play(&mut self) -> Result<Option<Killed>, Failure> {
        let mut stages = Vec::new();
        for stage in Stage::ALL {
            stages.push(self.start(stage)?);
        }
        let mut killed = None;
        while self.job.unwritten < self.job.frames {
            let frame: u64 = match stages[Stage::Encode as usize].hear() {
                Ok(written) => written,
                // If an earlier stage has failed, its failure is the cause.
                Err(failure) => {
                    let others = stages.iter_mut().take(Stage::Encode as usize);
                    return Err(others.map(Peer::hear::<()>).find_map(Result::err).unwrap_or(failure));
                }
            };
            self.record(frame);
            let middle = frame >= self.job.frames / 2 && self.job.unwritten < self.job.frames;
            if let Some(stage) = self.kill.take_if(|_| middle) {
                let peer = &mut stages[stage as usize];
                let pid = peer.pid;
                peer.kill();
                if stage == Stage::Encode {
                    // Frames that it reported before its death may be unread.
                    while let Ok(frame) = peer.hear() {
                        self.record(frame);
                    }
                }
                let moment = Instant::now();
                *peer = self.start(stage)?;
                killed = Some(Killed { stage, pid, successor: peer.pid, moment });
            }
        }
        for mut stage in stages {
            stage.hear::<()>()?;
            stage.end();
        }
        Ok(killed)
    }

    fn record(&mut self, frame: u64) {
        self.written.push((frame, Instant::now()));
        self.job.unwritten = self.job.unwritten.max(frame + 1);
    }

    fn start(&self, stage: Stage) -> Result<Peer, Failure> {
        let mut peer = self.session.spawn(stage.name())?;
        peer.ask::<()>(&self.job)?;
        Ok(peer)
    }

    /// Describes the cost of a stage's death.
    fn gap(&self, killed: &Killed) -> Step {
        let Killed { stage, pid, successor, moment } = killed;
        let before = self.written.iter().filter(|(_, at)| at <= moment).count();
        let around = self.written[before.saturating_sub(1)..].windows(2);
        let longest = around.map(|pair| pair[1].1 - pair[0].1).max().unwrap_or_default();
        let after = self.written.len() - before;
        Step::new(
            "killed",
            format!("The stage `{}` is killed in the middle, and restarted", stage.name()),
            "The broker proves the death (100 ms) and detaches the stage from its topics: no process waits for it any \
             more, and its blocks are returned. Its successor finds the newest frame that it had published, and \
             continues after it.",
        )
        .value("killed", format!("process {pid}, succeeded by {successor}"))
        .value("written before, and after", format!("{before} frames, {after} frames"))
        .value("longest time without a frame", millis(longest))
        .says(FALLS, after == 0)
        .judge(after > 0, "the pipeline continues", "the pipeline has stopped")
    }

    /// Counts the results.
    fn count(&self, killed: bool) -> Step {
        let mut frames: Vec<_> = self.written.iter().map(|(frame, _)| *frame).collect();
        frames.sort_unstable();
        frames.dedup();
        let lost = self.job.frames - frames.len() as u64;
        let twice = self.written.len() - frames.len();
        let time = match (self.written.first(), self.written.last()) {
            (Some(first), Some(last)) => (last.1 - first.1).as_secs_f64(),
            _ => 0.0,
        };
        let rate = (self.written.len() - 1) as f64 / time;
        // Frames that a killed stage had received and not yet published are lost, and perhaps frames that left the ring
        // meanwhile.
        let most = if killed { MOST_LOST } else { 0 };
        let right = lost <= most && twice == 0;
        let step = Step::new(
            "frames",
            "What came out of the pipeline",
            "The stages work in parallel, and each waits when the next one is behind. A topic delivers a frame once: a \
             frame that a killed stage was working on is not processed again.",
        )
        .value("frames", format!("{} of {}, {lost} lost, {twice} written twice", frames.len(), self.job.frames))
        .value("frames a second", format!("{rate:.1}"));
        let step = match (killed, lost) {
            (false, _) => step,
            // Perhaps it was not working on any frame.
            (true, 0) => step.leaves_open(&[AGAIN]),
            (true, _) => step.says(AGAIN, false),
        };
        step.judge(
            right,
            "every frame, except those that the killed stage was working on",
            "frames are missing or were written twice",
        )
    }

    /// Compares a result with what the CPU computes here from its file.
    fn compare(&self) -> Result<Step, Failure> {
        let source = self.job.file(self.job.frames - 1);
        let picture = files::decode(source)?;
        let size = picture.size.at_most(self.job.width);
        let mut small = vec![0; size.bytes() as usize];
        resize(&picture.pixels, picture.size, &mut small, size);
        let mut pixels = small.clone();
        blur(&small, &mut pixels, size, self.job.radius);
        let path = self.job.out.join(source.file_name().unwrap_or_default());
        let found = fs::read(&path).map_err(|error| unexpected(format!("{}: {error}", path.display())))?;
        let same = found == files::encode(&path, Picture { size, pixels })?;
        let step = Step::new(
            "compare",
            "One result, compared with what the CPU of this process computes from the same file",
            "Kernels and CPU use the same integer arithmetic: the rounded mean of whole numbers.",
        )
        .value("file", source.file_name().unwrap_or_default().display().to_string())
        .value("size", format!("{} x {} pixels", size.width, size.height));
        let step = if self.session.place == Place::Host { step } else { step.says(PIXELS, !same) };
        Ok(step.judge(same, "the same bytes", "different bytes"))
    }
}

/// Frames that may be lost with a stage.
const MOST_LOST: u64 = 3;
