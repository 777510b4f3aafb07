//! What the watcher has found: the frames, the death of a process, and the viewers that came and went.

use std::collections::hash_map::Entry;

use super::{alone::Whole, times::rounded, *};

/// A viewer that came and went while frames were written.
pub(super) struct Visit {
    pub(super) pid: u32,
    /// How many frames were written when it came and when it went.
    pub(super) came: u64,
    pub(super) went: u64,
    /// How many frames it has seen. `None` if it was killed.
    pub(super) seen: Option<u64>,
}

/// The death of a stage.
pub(super) struct Death {
    pub(super) role: &'static str,
    /// The tile of a renderer.
    pub(super) tile: Option<u32>,
    pub(super) pid: u32,
    pub(super) new_pid: Option<u32>,
    pub(super) at: Moment,
    /// When its successor is started.
    pub(super) restart: Instant,
    /// Frames that a viewer has seen since, before its successor was started. Only with `--live`.
    pub(super) viewed: u64,
    /// Whether its absence was seen: for a renderer in a grey tile, for a writer by a viewer.
    pub(super) is_seen: bool,
}

/// What a death cost.
pub(super) struct Killed {
    death: Death,
    frame: u64,
    gap: Duration,
    /// Frames written after it.
    after: usize,
    /// Frames with a grey tile.
    stale: usize,
    /// After what time a killed renderer's tile was grey. `None` if it never was.
    grey: Option<Duration>,
    /// Of a killed renderer: how many scenes the slowest other one drew before its successor was back.
    others: Option<u32>,
}

impl Death {
    /// Returns the death of a process at this moment. Its successor is started after a pause.
    pub(super) fn now(role: &'static str, tile: Option<u32>, pid: u32, pause: Duration) -> Self {
        let restart = Instant::now() + pause;
        Self { role, tile, pid, new_pid: None, at: Moment::now(), restart, viewed: 0, is_seen: false }
    }

    /// Returns whether its successor should be started: in `--live` once the absence could be seen.
    pub(super) fn is_due(&self, is_live: bool) -> bool {
        let now = Instant::now();
        let can_be_seen = is_live && matches!(self.role, "renderer" | "writer");
        now >= self.restart && (!can_be_seen || self.is_seen || now >= self.restart + LONGEST_PAUSE)
    }

    /// Returns whether the tile of a killed renderer is grey in a frame that was written since. On a busy machine it
    /// may have been late before.
    pub(super) fn is_seen_in(&self, frame: &Written) -> bool {
        frame.at > self.at && self.tile.is_some_and(|tile| frame.late >> tile & 1 == 1)
    }

    pub(super) fn describe(self, job: &Job, frames: &[Written]) -> Killed {
        let before = frames.iter().filter(|frame| frame.at <= self.at).count();
        let after = &frames[before..];
        let grey = after.iter().find(|frame| self.is_seen_in(frame)).map(|frame| frame.at.since(self.at));
        let gap = match self.tile.filter(|_| job.live) {
            // The time until its tile was drawn again.
            Some(tile) => {
                let back = after.iter().find(|frame| self.is_back_in(frame, tile)).or(frames.last());
                back.map_or(Duration::ZERO, |frame| frame.at.since(self.at))
            }
            None => {
                let around = frames[before.saturating_sub(1)..].windows(2);
                around.map(|pair| pair[1].at.since(pair[0].at)).max().unwrap_or_default()
            }
        };
        Killed {
            frame: job.frames / 3,
            gap,
            after: after.len(),
            stale: frames.iter().filter(|frame| frame.late > 0).count(),
            grey,
            others: self.tile.map(|tile| self.scenes_of_others(after, tile)),
            death: self,
        }
    }

    /// Returns whether its successor has drawn the tile of a frame.
    fn is_back_in(&self, frame: &Written, tile: u32) -> bool {
        frame.tiles.get(tile as usize).is_some_and(|drawn| Some(drawn.pid) == self.new_pid)
    }

    /// Returns how many scenes each tile but one advanced at least, until the successor had drawn that one.
    fn scenes_of_others(&self, frames: &[Written], tile: u32) -> u32 {
        let back = frames.iter().find(|frame| self.is_back_in(frame, tile)).or(frames.last());
        let Some((first, last)) = frames.first().zip(back) else { return 0 };
        let pairs = (0..).zip(first.tiles.iter().zip(&last.tiles)).filter(|(number, _)| *number != tile);
        pairs.map(|(_, (first, last))| last.frame.saturating_sub(first.frame)).min().unwrap_or_default()
    }
}

impl Killed {
    pub(super) fn to_json(&self) -> Value {
        let Self { death: Death { role, pid, new_pid, viewed, .. }, frame, gap, grey, others, .. } = self;
        let ms = |time: Duration| rounded(time.as_secs_f64() * 1000.0);
        json!({
            "role": role, "pid": pid, "new_pid": new_pid, "frame": frame, "gap_ms": ms(*gap),
            "viewed_meanwhile": viewed, "grey_after_ms": grey.map(ms), "others_drew_meanwhile": others,
        })
    }
}

pub(super) fn killed_step(wanted: Option<Victim>, killed: Option<&Killed>, count: &Count, job: &Job) -> Step {
    let title = "A process is killed in the middle of a frame, and restarted";
    let why = if killed.is_some_and(|killed| killed.death.role == "broker") {
        "Samples do not pass through the broker, so no process waits for it. Its supervisor starts the next one, which \
         continues with the journal and with the memory that is still open."
    } else {
        "What it had not published does not exist for others. The broker proves the death (100 ms), and no process \
               waits for it any more. Its successor asks the topics for what they keep, and draws again what was not \
               written."
    };
    let step = Step::new("killed", title, why);
    let killed = match (killed, wanted) {
        (Some(killed), _) => killed,
        (None, None) => return step.untried(&[FALLS, LOST, TORN], "nothing was killed: --kill ROLE does it"),
        (None, Some(victim)) => {
            let role = victim.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let frames = job.frames / 3;
            let why = format!(
                "the {role} was not killed: it has not finished {frames} frames; render more frames with --frames"
            );
            return step.leaves_open(&[FALLS, LOST, TORN]).judge(false, "", why);
        }
    };
    let Death { role, pid, new_pid, viewed, .. } = &killed.death;
    let new_pid = new_pid.unwrap_or_default();
    let step = step
        .value("killed", format!("{role} {pid}, after {} frames; succeeded by {new_pid}", killed.frame))
        .value("frames after that", killed.after.to_string())
        .value("frames with a grey tile", killed.stale.to_string())
        .value("its tile was grey after", killed.grey.map_or("never".to_owned(), millis))
        .value("frames that a viewer saw meanwhile, with --live", viewed.to_string())
        .value("longest gap", millis(killed.gap))
        .says(LOST, count.missing > 0)
        .says(TORN, count.torn > 0);
    if killed.after == 0 && count.missing == 0 {
        // The broker may die when no more frames are to come.
        return step.untried(&[FALLS], "all frames were written by then: --frames renders more");
    }
    step.says(FALLS, killed.after == 0).judge(killed.after > 0, "the pipeline continues", "the pipeline has stopped")
}

impl Visit {
    pub(super) fn to_json(&self) -> Value {
        let Self { pid, came, went, seen, .. } = self;
        json!({ "pid": pid, "came": came, "went": went, "killed": seen.is_none(), "seen": seen })
    }
}

pub(super) fn visits_step(visits: &[Visit], count: &Count) -> Step {
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
pub(super) struct Count {
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
    pub(super) fn new(job: &Job, frames: &[Written], twice: u64, mesh: &Mesh) -> Self {
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

    pub(super) fn to_json(&self) -> Value {
        let Self { frames, missing, twice, torn, tainted, .. } = self;
        json!({ "frames": frames, "missing": missing, "twice": twice, "torn": torn, "tainted": tainted })
    }

    pub(super) fn step(&self, job: &Job, time: Duration) -> Step {
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

    pub(super) fn compared(&self, job: &Job) -> Step {
        let step = Step::new(
            "compare",
            "Frames, compared with those that this process draws alone, and with those of the same scene",
            "This process draws three frames. The mesh is back after 120 frames, and each frame is compared with the one \
             before. Coverage, depth and light are integers, so that tiles of several processes fit together to the bit.",
        );
        if job.live {
            let why = "with --live the tiles of a frame may be of different scenes";
            return step.untried(&[TILES, PIXELS], why);
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

/// How much longer a successor waits until the absence was seen.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
