//! The reader: its kernels poll for the stores of the writer's kernels, with every kind of load. Reports which beliefs
//! are refuted.

use partywall::cuda::experiment::PairsReport;

use super::{shared::Shared, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let writer = session.partner();
    let mode = run(session, writer)?;
    match mode {
        Mode::Mps if session.reporter().reports_all() => {
            let pipes = ("CUDA_MPS_PIPE_DIRECTORY", device::NO_DAEMON);
            let mut again = session.spawn_on("again", session.place, &[pipes])?;
            again.hear::<()>()?;
            again.end();
            Ok(())
        }
        Mode::Mps => Ok(()),
        Mode::TimeSliced | Mode::Simulated => session.report(without_mps(mode)),
    }
}

/// Repeats the experiments with a second writer, for a reader that is a client of MPS. This process is not a client of
/// MPS.
pub(super) fn play_again(session: &mut Session) -> Result<(), Failure> {
    let writer = session.spawn("writer")?;
    run(session, writer)?;
    session.parent().say(())
}

/// How the kernels of two processes share one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    TimeSliced,
    Mps,
    Simulated,
}

impl Mode {
    fn of(gpu: &Gpu) -> Result<Self, Failure> {
        Ok(match device::under_mps(gpu)? {
            _ if gpu.context().driver().is_simulated() => Self::Simulated,
            true => Self::Mps,
            false => Self::TimeSliced,
        })
    }

    /// Returns the id of a step.
    fn id(self, id: &str) -> String {
        if self == Self::Mps { format!("mps-{id}") } else { id.to_owned() }
    }

    fn title(self, title: &str) -> String {
        match self {
            Self::TimeSliced => format!("{title}, time-sliced"),
            Self::Mps => format!("{title}, under MPS"),
            Self::Simulated => title.to_owned(),
        }
    }
}

fn without_mps(mode: Mode) -> Step {
    let step = Step::new(
        "mps",
        "The same for clients of an MPS server",
        "Without MPS the GPU runs the processes in time slices, and in a slice no kernel of another process runs. \
         Wrong code may therefore seem to work. Under MPS kernels of several processes run at the same time, like \
         those of one process.",
    );
    step.untried(
        &[],
        match mode {
            Mode::Simulated => "the simulation has no MPS",
            _ => "no MPS daemon answers here: start one with `nvidia-cuda-mps-control -d`, then start this lab again",
        },
    )
}

/// Runs all experiments, and ends the writer.
fn run(session: &Session, mut writer: Peer) -> Result<Mode, Failure> {
    let gpu = session.gpu();
    let mode = Mode::of(&gpu)?;
    let bytes = writer.hear()?;
    let descriptors = [writer.take_fd()?, writer.take_fd()?];
    let shared = Shared::take(&gpu, bytes, &descriptors)?;
    let mut reader = Reader { shared, writer, mode, value: 0 };
    session.report(reader.compiled()?)?;
    for memory in [Memory::Gpu, Memory::Host] {
        for experiment in [Reader::loads, Reader::stores, Reader::turns, Reader::handovers] {
            session.report(experiment(&mut reader, memory)?)?;
        }
    }
    reader.writer.end();
    Ok(mode)
}

struct Reader<'a> {
    shared: Shared<'a>,
    writer: Peer,
    mode: Mode,
    /// The last value that was polled for. Each poll uses a new value.
    value: u64,
}

/// The results of several tries of one load or store.
#[derive(Debug, Default)]
struct Tries {
    looks: u64,
    /// Time from the store until a poll saw it, for each try that succeeded.
    after: Vec<Duration>,
    /// Time from the store until its kernel saw the answer.
    answered: Vec<Duration>,
    /// Duration of each try that saw nothing.
    vain: Vec<Duration>,
}

impl Reader<'_> {
    /// Polls in a loop whose load a compiler may hoist.
    fn compiled(&mut self) -> Result<Step, Failure> {
        let tries = self.tries(Memory::Gpu, Load::Compiled, PLAIN_STORE, TRIAL)?;
        let step = Step::new(
            &self.mode.id("loop"),
            self.mode.title("A loop over a plain variable"),
            "for (…) { if (*word == value) break; work = …; } The language lets the compiler assume that no other \
             thread changes *word meanwhile. It loads the word once, before the loop, as the PTX shows. Caches play no \
             part in this, so no other GPU or mode helps.",
        );
        let seen = tries.after.len() as u64;
        Ok(step
            .value("seen", format!("{seen} of {TRIES}"))
            .value("rounds of the loop", grouped(tries.looks))
            .value("each try that saw nothing", spread(&tries.vain))
            .says(LOOP, seen == TRIES)
            .judge(seen < TRIES, "it does not see the store", "it saw the store"))
    }

    /// Returns a step of an experiment that is made in both memories.
    fn step(&self, memory: Memory, id: &str, title: &str, why: &str) -> Step {
        let id = match memory {
            Memory::Gpu => id.to_owned(),
            Memory::Host => format!("{id}-host"),
        };
        Step::new(&self.mode.id(&id), self.mode.title(title), why)
    }

    /// Polls by every load.
    fn loads(&mut self, memory: Memory) -> Result<Step, Failure> {
        let mut step = self.step(
            memory,
            "loads",
            &format!("A word of {memory}, polled by each load"),
            "A plain load may be answered by the cache of the multiprocessor, which is not notified of changes. \
             ld.volatile and ld.relaxed of GPU or system scope read the memory that all share. cta is the scope of a \
             block and promises nothing between kernels. The PTX manual defines these rules for the threads of one \
             program only. That they hold between processes is observed here, not promised.",
        );
        let mut missed = Vec::new();
        let mut all = true;
        for (name, load, must) in LOADS {
            let tries = self.tries(memory, load, PLAIN_STORE, if must { TIMEOUT } else { TRIAL })?;
            let seen = tries.after.len() as u64 == TRIES;
            all &= seen;
            if must && !seen {
                missed.push(name);
            }
            step = step.value(name, tries.text());
        }
        Ok(step.says(EVERY_LOAD, all).judge(
            missed.is_empty(),
            if all {
                "every load saw the store"
            } else {
                "loads of GPU and system scope saw every store; others did not"
            },
            format!("missed by {}", missed.join(", ")),
        ))
    }

    /// Polls for every store.
    fn stores(&mut self, memory: Memory) -> Result<Step, Failure> {
        let mut step = self.step(
            memory,
            "stores",
            &format!("Each store to {memory}, polled for"),
            "Every store reaches the memory that all share. Its scope affects only the order. The storing kernel keeps running until it sees an answer, so no store became visible only because the kernel ended.",
        );
        let mut missed = Vec::new();
        let mut answered = Vec::new();
        for (index, (name, _)) in STORES.iter().enumerate() {
            let mut tries = self.tries(memory, SURE_LOAD, index, TIMEOUT)?;
            if tries.after.len() as u64 != TRIES {
                missed.push(*name);
            }
            step = step.value(*name, tries.text());
            answered.append(&mut tries.answered);
        }
        let all = answered.len() as u64 == TRIES * STORES.len() as u64;
        Ok(step.value("answer seen by the kernel", spread(&answered)).says(KERNEL_END, !all).judge(
            missed.is_empty(),
            "every store was seen while its kernel ran",
            format!("{} missed", missed.join(", ")),
        ))
    }

    /// Runs two kernels that wait for each other.
    fn turns(&mut self, memory: Memory) -> Result<Step, Failure> {
        self.shared.clear(memory)?;
        self.writer.say(Command::Turns { memory })?;
        let gpu = self.shared.gpu;
        let (kernels, words, _) = self.shared.parts(memory)?;
        let turns = kernels.take_turns(gpu.stream(), words, false, TURNS, TIMEOUT);
        self.writer.hear::<()>()?;
        let turns = turns.doing("polling shared memory")?;
        let hops = 2 * turns.taken.saturating_sub(1).max(1);
        let hop = turns.time / u32::try_from(hops).unwrap_or(u32::MAX);
        let step = self.step(
            memory,
            "turns",
            &format!("Two kernels that wait for each other, in {memory}"),
            "Each kernel stores a number and polls for the other's answer. A polling kernel uses its whole time slice, \
             and the other kernel cannot answer before the slice ends: two milliseconds per hand-over. A stream that \
             waits by a memory operation, and a waiting host, leave the GPU to others.",
        )
        .value("turns", format!("{} of {TURNS}", turns.taken))
        .value("from one kernel to the other", short(hop));
        let side_by_side = hop < A_SLICE;
        let step = match self.mode {
            Mode::Simulated => step.leaves_open(&[SIDE_BY_SIDE]),
            Mode::TimeSliced | Mode::Mps => step.says(SIDE_BY_SIDE, side_by_side),
        };
        Ok(step.judge(
            turns.taken == TURNS,
            match (self.mode, side_by_side) {
                (Mode::Simulated, _) => "they wait for each other; the times are those of a CPU",
                (_, true) => "they run at the same time",
                (_, false) => "they do not run at the same time: each waits for the other's time slice to end",
            },
            "they did not finish within the limit",
        ))
    }

    /// Reads flags and data while both are written.
    fn handovers(&mut self, memory: Memory) -> Result<Step, Failure> {
        let mut step = self.step(
            memory,
            "order",
            &format!("Data and then a flag, in {memory}"),
            "128 threads write pairs, 128 threads of the other process read them, flag first. Data that is older than \
             its flag is an error. Its causes are a load that the compiler has moved, old data in the reader's cache, \
             or reordered stores. If no such error is seen, that proves nothing: without an order it may still happen, \
             for example under MPS.",
        );
        let mut wrong = Vec::new();
        let mut broken = Vec::new();
        for (index, (name, handover, must)) in HANDOVERS.iter().enumerate() {
            let read = self.pairs(memory, index)?;
            step = step.value(*name, pairs_text(&read));
            if read.old > 0 {
                broken.push(*name);
                wrong.extend(must.then_some(*name));
            }
            for (belief, about) in [
                (IN_ORDER, !must),
                (VOLATILE, matches!(handover, Handover::VolatileFlag | Handover::Volatile)),
                (WRITER_FENCE, *handover == Handover::WriterFence),
                (BLOCK, matches!(handover, Handover::Fence(Scope::Block) | Handover::ReleaseAcquire(Scope::Block))),
            ] {
                if about {
                    step = if read.old > 0 { step.says(belief, false) } else { step.leaves_open(&[belief]) };
                }
            }
        }
        let finding = if broken.is_empty() {
            "no old data was seen with a new flag".to_owned()
        } else {
            format!("old data with a new flag: {}", broken.join("; "))
        };
        Ok(step.says(SCOPED, wrong.is_empty()).judge(
            wrong.is_empty(),
            finding,
            format!("old data in spite of an order: {}", wrong.join("; ")),
        ))
    }

    /// Polls several times with `load` for the store with this index.
    fn tries(&mut self, memory: Memory, load: Load, how: usize, limit: Duration) -> Result<Tries, Failure> {
        let mut tries = Tries::default();
        for _ in 0..TRIES {
            self.value += 1;
            let value = self.value;
            let gpu = self.shared.gpu;
            let starts = self.shared.starts();
            let (kernels, words, started) = self.shared.parts(memory)?;
            let what = "polling shared memory";
            let polling = kernels.poll(gpu.stream(), words, started, load, value, limit).doing(what)?;
            let runs = starts.wait(value, TIMEOUT)?;
            if runs {
                self.writer.say(Command::Store { memory, how, value, limit })?;
            }
            let polled = polling.finish().doing(what)?;
            if !runs {
                return Err(Failure::new(
                    ErrorKind::Device,
                    format!("a kernel did not start within {} s", TIMEOUT.as_secs()),
                    "check with `nvidia-smi` what else runs on this GPU, then start the lab again",
                ));
            }
            let stored: Stored = self.writer.hear()?;
            tries.looks += polled.looks;
            let since = |time: u64| Duration::from_nanos(time.saturating_sub(stored.at));
            tries.after.extend(polled.seen.map(since));
            tries.answered.extend(stored.answered.map(since));
            tries.vain.extend(polled.seen.is_none().then_some(polled.vain));
        }
        Ok(tries)
    }

    /// Reads pairs while the writer writes them, by the method with this index.
    fn pairs(&mut self, memory: Memory, how: usize) -> Result<PairsReport, Failure> {
        self.shared.clear(memory)?;
        self.writer.say(Command::Pairs { memory, how })?;
        let gpu = self.shared.gpu;
        let (kernels, words, _) = self.shared.parts(memory)?;
        let read = kernels.read_pairs(gpu.stream(), words, HANDOVERS[how].1, RACE);
        self.writer.hear::<()>()?;
        read.doing("reading shared memory")
    }
}

impl Tries {
    fn text(&self) -> String {
        let seen = self.after.len() as u64;
        let looks = grouped(self.looks / TRIES);
        match seen {
            0 => format!("never seen, {looks} looks in {} each", spread(&self.vain)),
            TRIES => format!("seen after {}, {looks} looks", spread(&self.after)),
            _ => format!("{seen} of {TRIES} seen, after {}, {looks} looks", spread(&self.after)),
        }
    }
}

fn pairs_text(read: &PairsReport) -> String {
    let old = match read.old {
        0 => "none with old data".to_owned(),
        old => format!("old data {} times, by up to {} steps", grouped(old), grouped(read.worst)),
    };
    format!("{} looks, {} new flags, {old}", grouped(read.looks), grouped(read.changes))
}

/// A hand-over between time-sliced kernels takes longer than this, and any other hand-over less.
const A_SLICE: Duration = Duration::from_micros(500);
