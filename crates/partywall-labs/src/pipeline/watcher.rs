//! The watcher: starts the stages, kills one and starts it again, counts what arrives.

use std::{fs, time::Instant};

use partywall::Place;

use super::{
    AGAIN, Arguments, BELIEFS, Done, FALLS, FRAMES, Hello, LAB, Meet, PIXELS, RESULTS, Stage, TITLE, Written, create,
    files::{self, Picture},
    pixels::{blur, resize},
    unexpected,
};
use crate::{
    Context,
    broker::{self, Broker},
    clock::millis,
    failure::Failure,
    peer::Peer,
    step::Step,
    teller::Teller,
};

/// Plays the role.
pub(super) fn run(context: &Context, arguments: &Arguments, place: Place, teller: &mut Teller) -> Result<(), Failure> {
    teller.header_at(TITLE, place)?;
    let broker = Broker::start(context, LAB)?;
    // What is deleted lies beside the broker's socket, and goes with it.
    let scratch = |name: &str| {
        let folder = broker.directory().join(name);
        fs::create_dir_all(&folder).map(|()| folder).map_err(|error| unexpected(&format!("no room for files: {error}")))
    };
    let images = match &arguments.images {
        Some(folder) => folder.clone(),
        None => {
            let folder = scratch("images")?;
            files::paint(&folder)?;
            folder
        }
    };
    let out = match &arguments.out {
        Some(folder) => folder.clone(),
        None => scratch("results")?,
    };
    fs::create_dir_all(&out).map_err(|error| {
        let what = format!("{} cannot be made a folder: {error}", out.display());
        Failure::new(partywall::ErrorKind::Refused, what, "give --out a folder that can be written, or leave it out")
    })?;
    let files = files::list(&images)?;
    let sizes = files.iter().map(|file| files::size(file)).collect::<Result<Vec<_>, _>>()?;
    let largest = |width| sizes.iter().map(|size| size.at_most(width).bytes()).max().unwrap_or(1);
    let domain = broker::connect(broker.socket())?;
    let frames = create(&domain, FRAMES, largest(u32::MAX), place)?;
    let results = create(&domain, RESULTS, largest(arguments.width), place)?;
    let meet = Meet {
        socket: broker.socket().to_owned(),
        files,
        out,
        frames: arguments.frames,
        width: arguments.width,
        radius: arguments.radius,
        unwritten: 0,
    };
    let mut watcher = Watcher { meet, place, kill: arguments.kill, written: Vec::new() };
    let killed = watcher.play(teller)?;
    drop((frames, results));
    teller.tell(match killed {
        Some(killed) => watcher.gap(&killed),
        None => {
            Step::new("killed", "A stage is killed in the middle, and started again", "The others go on meanwhile.")
                .leaves_open(AGAIN)
                .untried(Some(FALLS), "nothing was killed: --kill STAGE does it")
        }
    });
    teller.tell(watcher.count(arguments.kill.is_some()));
    teller.tell(watcher.compare()?);
    if place == Place::Host {
        let why = "The filter's kernels then make what the CPU has made here.";
        let step = Step::new("kernels", "The same pixels by kernels", why);
        teller.tell(step.untried(Some(PIXELS), "it needs a GPU: --device cuda"));
    }
    teller.conclude(&BELIEFS);
    Ok(())
}

struct Watcher {
    meet: Meet,
    place: Place,
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

impl Watcher {
    /// From the first frame to the last, and what the stages say of it.
    fn play(&mut self, teller: &mut Teller) -> Result<Option<Killed>, Failure> {
        let mut stages = Vec::new();
        for stage in Stage::ALL {
            stages.push(self.start(stage, teller)?);
        }
        let mut killed = None;
        while self.meet.unwritten < self.meet.frames {
            let Written { frame } = match stages[Stage::Encode as usize].0.hear(teller) {
                Ok(written) => written,
                // It has waited in vain for one that has failed before, which says why.
                Err(failure) => {
                    let others = stages.iter_mut().take(Stage::Encode as usize);
                    let reason = others.map(|(peer, _)| peer.hear::<Done>(teller)).find_map(Result::err);
                    return Err(reason.unwrap_or(failure));
                }
            };
            self.written.push((frame, Instant::now()));
            self.meet.unwritten = self.meet.unwritten.max(frame + 1);
            let middle = frame >= self.meet.frames / 2 && self.meet.unwritten < self.meet.frames;
            if let Some(stage) = self.kill.take_if(|_| middle) {
                let (peer, pid) = &mut stages[stage as usize];
                let pid = *pid;
                let moment = Instant::now();
                peer.kill();
                stages[stage as usize] = self.start(stage, teller)?;
                killed = Some(Killed { stage, pid, successor: stages[stage as usize].1, moment });
            }
        }
        for (mut peer, _) in stages {
            let Done = peer.hear(teller)?;
            peer.end();
        }
        Ok(killed)
    }

    fn start(&self, stage: Stage, teller: &mut Teller) -> Result<(Peer, u32), Failure> {
        let mut peer = Peer::spawn(LAB, stage.name(), &self.place.to_string())?;
        peer.say(&self.meet, &[])?;
        let Hello { pid } = peer.hear(teller)?;
        Ok((peer, pid))
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
        let lost = self.meet.frames - frames.len() as u64;
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
        .value("frames", format!("{} of {}, {lost} lost, {twice} written twice", frames.len(), self.meet.frames))
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
        let source = self.meet.file(self.meet.frames - 1);
        let picture = files::decode(source)?;
        let size = picture.size.at_most(self.meet.width);
        let mut small = vec![0; size.bytes() as usize];
        resize(&picture.pixels, picture.size, &mut small, size);
        let mut pixels = small.clone();
        blur(&small, &mut pixels, size, self.meet.radius);
        let path = self.meet.out.join(source.file_name().unwrap_or_default());
        let found = fs::read(&path).map_err(|error| unexpected(&format!("{}: {error}", path.display())))?;
        let same = found == files::encode(&path, Picture { size, pixels })?;
        let step = Step::new(
            "compare",
            "One result, beside what this process makes of the same file by its CPU",
            "All is integer arithmetic, in kernels and on the CPU: the mean of whole numbers, rounded.",
        )
        .value("file", source.file_name().unwrap_or_default().display().to_string())
        .value("size", format!("{} x {} pixels", size.width, size.height));
        let step = if self.place == Place::Host { step } else { step.says(PIXELS, !same) };
        Ok(step.judge(same, "the same bytes", "other bytes"))
    }
}

/// Frames that may be lost with a stage.
const MOST_LOST: u64 = 3;
