//! The watcher: starts the stages, kills one and starts it again, counts what arrives.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let order: Order = session.options()?;
    // What is deleted lies beside the broker's socket, and goes with it.
    let directory = session.broker().directory().to_owned();
    let scratch = |name: &str| {
        let folder = directory.join(name);
        fs::create_dir_all(&folder).map(|()| folder).map_err(|error| unexpected(&format!("no room for files: {error}")))
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
        let what = format!("{} cannot be made a folder: {error}", out.display());
        Failure::new(partywall::ErrorKind::Refused, what, "give --out a folder that can be written, or leave it out")
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
    session.tell(match killed {
        Some(killed) => watcher.gap(&killed),
        None => {
            Step::new("killed", "A stage is killed in the middle, and started again", "The others go on meanwhile.")
                .leaves_open(AGAIN)
                .untried(Some(FALLS), "nothing was killed: --kill STAGE does it")
        }
    })?;
    session.tell(watcher.count(kill.is_some()))?;
    session.tell(watcher.compare()?)?;
    if session.place == Place::Host {
        let why = "The filter's kernels then make what the CPU has made here.";
        let step = Step::new("kernels", "The same pixels by kernels", why);
        session.tell(step.untried(Some(PIXELS), "it needs a GPU: --device cuda"))?;
    }
    Ok(())
}

struct Watcher<'a> {
    session: &'a Session,
    job: Job,
    kill: Option<Stage>,
    /// Frames, as they came, and when.
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
    /// From the first frame to the last, and what the stages say of it.
    fn play(&mut self) -> Result<Option<Killed>, Failure> {
        let mut stages = Vec::new();
        for stage in Stage::ALL {
            stages.push(self.start(stage)?);
        }
        let mut killed = None;
        while self.job.unwritten < self.job.frames {
            let frame: u64 = match stages[Stage::Encode as usize].hear() {
                Ok(written) => written,
                // It has waited in vain for one that has failed before, which says why.
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
                    // What it had written and said before its death may not have been read yet.
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

    /// What the death of a stage cost.
    fn gap(&self, killed: &Killed) -> Step {
        let Killed { stage, pid, successor, moment } = killed;
        let before = self.written.iter().filter(|(_, at)| at <= moment).count();
        let around = self.written[before.saturating_sub(1)..].windows(2);
        let longest = around.map(|pair| pair[1].1 - pair[0].1).max().unwrap_or_default();
        let after = self.written.len() - before;
        Step::new(
            "killed",
            format!("The stage `{}` is killed in the middle, and started again", stage.name()),
            "The broker proves the death (100 ms), and the topics no longer count the dead: nobody waits for it any more, and \
             its blocks come back. Its successor looks for the newest frame that it had published, and goes on behind it.",
        )
        .value("killed", format!("process {pid}, succeeded by {successor}"))
        .value("written before, and after", format!("{before} frames, {after} frames"))
        .value("longest time without a frame", millis(longest))
        .says(FALLS, after == 0)
        .judge(after > 0, "the pipeline goes on", "the pipeline has stopped")
    }

    /// What has arrived.
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
        // What a killed stage had taken over and not yet published is gone, and perhaps what had to make room meanwhile.
        let most = if killed { MOST_LOST } else { 0 };
        let right = lost <= most && twice == 0;
        let step = Step::new(
            "frames",
            "What came out of the pipeline",
            "Each stage works while the others do, and waits when the next one is behind. A topic hands a frame over once: \
             what a stage had in its hands when it was killed is not done again by itself.",
        )
        .value("frames", format!("{} of {}, {lost} lost, {twice} written twice", frames.len(), self.job.frames))
        .value("frames a second", format!("{rate:.1}"));
        let step = match (killed, lost) {
            (false, _) => step,
            // Perhaps it had nothing in its hands.
            (true, 0) => step.leaves_open(AGAIN),
            (true, _) => step.says(AGAIN, false),
        };
        step.judge(right, "every frame, but for those in the hands of the dead", "frames are missing, or came twice")
    }

    /// A result beside what the CPU makes of its file here.
    fn compare(&self) -> Result<Step, Failure> {
        let source = self.job.file(self.job.frames - 1);
        let picture = files::decode(source)?;
        let size = picture.size.at_most(self.job.width);
        let mut small = vec![0; size.bytes() as usize];
        resize(&picture.pixels, picture.size, &mut small, size);
        let mut pixels = small.clone();
        blur(&small, &mut pixels, size, self.job.radius);
        let path = self.job.out.join(source.file_name().unwrap_or_default());
        let found = fs::read(&path).map_err(|error| unexpected(&format!("{}: {error}", path.display())))?;
        let same = found == files::encode(&path, Picture { size, pixels })?;
        let step = Step::new(
            "compare",
            "One result, beside what this process makes of the same file by its CPU",
            "All is integer arithmetic, in kernels and on the CPU: the mean of whole numbers, rounded.",
        )
        .value("file", source.file_name().unwrap_or_default().display().to_string())
        .value("size", format!("{} x {} pixels", size.width, size.height));
        let step = if self.session.place == Place::Host { step } else { step.says(PIXELS, !same) };
        Ok(step.judge(same, "the same bytes", "other bytes"))
    }
}

/// Frames that may be lost with a stage.
const MOST_LOST: u64 = 3;
