//! Memory and messages shared with a process that is already running, in all ways that the machine has: a table, with
//! the ratio of each to Partywall. Those in Python stand beside Partywall from Python.

use std::{
    cell::{Cell, RefCell},
    ffi::OsStr,
};

use partywall::{DType, DeviceUuid, Domain, Place, Segment};
use partywall_measure::{Case, Comparison, Failure, Plan, Unit};
use serde::{Deserialize, Serialize};

use crate::{
    bench::{
        Bench,
        board::now,
        clocked, microseconds,
        model_file::{AVAILABLE, meminfo},
        peer,
        program::Program,
        python::{MESSAGES, Programs, TABLE},
        size,
    },
    broker::Broker,
    lab::Session,
    peer::Peer,
};

/// Bytes that are shared, and how many samples are taken of that.
const SIZES: &[(u64, usize)] = &[(4 << 10, 200), (1 << 20, 200), (64 << 20, 20), (1 << 30, 5)];

/// The same for memory of another GPU: the whole table has to end within four minutes.
const SIZES_OF_ANOTHER_GPU: &[(u64, usize)] = &[(4 << 10, 100), (1 << 20, 100), (64 << 20, 10)];

/// Bytes of a message, and samples.
const MESSAGE_SIZES: [(u64, usize); 4] = [(8, 1_000), (4 << 10, 1_000), (1 << 20, 200), (64 << 20, 5)];

/// How many times the memory of one way has to be free.
const WAYS: u64 = 8;

/// What is asked, by the name that the program has for it.
#[derive(Clone, Copy, PartialEq)]
enum Question {
    Share,
    Open,
    /// Copy into memory of the reader's GPU.
    Copy,
}

/// A way of sharing memory: what `table.py` calls it, and what reports do.
type Way = (&'static str, &'static str);

const FROM_PYTHON: &str = "Partywall, from Python";
const FROM_RUST: &str = "Partywall, from Rust";

const GPU_FLOOR: Way = ("fds", "VMM file descriptors by hand");
const GPU_RIVALS: &[Way] = &[
    ("legacy", "cuIpcGetMemHandle by hand"),
    ("cupy", "CuPy's ipcGetMemHandle"),
    ("cuda.core", "cuda.core's IPC buffers"),
    ("torch", "torch.multiprocessing"),
];

/// Where memory is, and who shares it.
struct Setting {
    memory: &'static str,
    place: Place,
    /// The GPU of the reader, if it is not the memory's: its number for programs in Python, and its UUID.
    reader: Option<(&'static str, DeviceUuid)>,
    ours: &'static str,
    floor: Way,
    rivals: &'static [Way],
    questions: &'static [Question],
    sizes: &'static [(u64, usize)],
    /// Bytes.
    free: u64,
}

pub(super) fn host(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let setting = Setting {
        memory: "host memory",
        place: Place::Host,
        reader: None,
        ours: "partywall",
        floor: ("memfd", "memfd by hand"),
        rivals: &[("shared_memory", "multiprocessing.shared_memory")],
        questions: &[Question::Share, Question::Open],
        sizes: SIZES,
        free: meminfo(AVAILABLE).unwrap_or(u64::MAX),
    };
    memory(bench, broker, &setting)?;
    messages(bench, broker)
}

pub(super) fn gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let uuid = bench.gpu()?;
    let setting = Setting {
        memory: "GPU memory",
        place: Place::Gpu(uuid),
        reader: None,
        ours: "partywall-gpu",
        floor: GPU_FLOOR,
        rivals: GPU_RIVALS,
        questions: &[Question::Share, Question::Open],
        sizes: SIZES,
        free: broker.connect()?.gpu(uuid)?.context().memory_info()?.free,
    };
    memory(bench, broker, &setting)
}

/// Memory of the first GPU, used by a process on the second.
pub(super) fn another_gpu(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let devices = partywall::gpu::devices()?;
    let [owner, reader, ..] = devices.as_slice() else {
        bench.note("peer_table_gpus: skipped: this process sees one GPU");
        return Ok(());
    };
    let owner = owner.uuid()?;
    let setting = Setting {
        memory: "memory of another GPU",
        place: Place::Gpu(owner),
        reader: Some(("1", reader.uuid()?)),
        ours: "partywall-gpu",
        floor: GPU_FLOOR,
        rivals: GPU_RIVALS,
        questions: &[Question::Share, Question::Open, Question::Copy],
        sizes: SIZES_OF_ANOTHER_GPU,
        free: broker.connect()?.gpu(owner)?.context().memory_info()?.free,
    };
    memory(bench, broker, &setting)
}

fn memory(bench: &Bench<'_>, broker: &Broker, setting: &Setting) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    // All of them prepare themselves at the same time: that takes seconds with torch.
    let spawn = |arguments: &[&dyn AsRef<OsStr>]| {
        let reader = setting.reader.iter().map(|(number, _)| number as &dyn AsRef<OsStr>);
        programs.spawn(TABLE, &arguments.iter().copied().chain(reader).collect::<Vec<_>>())
    };
    let mut ours = spawn(&[&setting.ours, &broker.socket()])?;
    let (floor, floor_name) = setting.floor;
    let floor = spawn(&[&floor]);
    let spawned: Vec<_> = setting.rivals.iter().map(|(way, name)| (*name, spawn(&[way]))).collect();
    ours.await_ready()?;
    let mut floor = Programs::await_rival(bench, floor);
    let mut rivals = Vec::new();
    for (name, rival) in spawned {
        rivals.extend(Programs::await_rival(bench, rival).map(|rival| (name, rival)));
    }
    let rust = Rust::start(bench, broker, setting)?;
    for &(bytes, samples) in setting.sizes {
        if setting.free < WAYS * bytes {
            let lack = format!("only {} bytes of {} are free", setting.free, setting.memory);
            bench.note(format!("peer_table: no {}, because {lack}", size(bytes)));
            continue;
        }
        for &question in setting.questions {
            let what = format!("{} {bytes}", question.word());
            // A way that cannot have this size ends, and is left out from here on.
            if floor.as_mut().is_some_and(|floor| !can_measure(bench, floor, &what)) {
                floor = None;
            }
            rivals.retain_mut(|(_, rival)| can_measure(bench, rival, &what));
            let plan = plan(bench, samples);
            let case = |name: &str| {
                Case::new(name, Unit::Microseconds)
                    .parameter("of", question.title(setting.memory))
                    .parameter("bytes", bytes)
            };
            let comparison = Comparison::new(case(FROM_PYTHON), ours.sampler_of(&what, plan.block));
            // The library has no call that copies from GPU to GPU: a copy is the driver's, in either language.
            let comparison = match question {
                Question::Share => comparison.rival(case(FROM_RUST), Box::new(|| rust.share(bytes))),
                Question::Open => comparison.rival(case(FROM_RUST), Box::new(|| rust.open(bytes))),
                Question::Copy => comparison,
            };
            let comparison = match &mut floor {
                Some(floor) => comparison.floor(case(floor_name), floor.sampler_of(&what, plan.block)),
                None => comparison,
            };
            let comparison = rivals.iter_mut().fold(comparison, |comparison, (name, rival)| {
                comparison.rival(case(name), rival.sampler_of(&what, plan.block))
            });
            bench.run(comparison, plan)?;
        }
    }
    Ok(())
}

/// Small blocks spread what other work does to the machine over all ways.
fn plan(bench: &Bench<'_>, samples: usize) -> Plan {
    let samples = bench.fewer(samples);
    let block = samples.div_ceil(10);
    Plan::new(samples).warm_up(block).block(block)
}

/// Returns whether a program can take a sample of this, which does not count; if not, the report says why.
fn can_measure(bench: &Bench<'_>, program: &mut Program, what: &str) -> bool {
    let sampled = program.sampler_of(what, 1)();
    sampled.inspect_err(|failure| bench.leave_out(failure)).is_ok()
}

impl Question {
    fn word(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Open => "open",
            Self::Copy => "copy",
        }
    }

    fn title(self, memory: &str) -> String {
        match self {
            Self::Share => format!("sharing {memory}, until its first byte is read"),
            Self::Open => format!("opening and closing {memory} that is shared"),
            Self::Copy => format!("copying {memory} into own memory"),
        }
    }
}

/// Partywall from Rust: this process has the memory, and another one reads it.
struct Rust {
    domain: Domain,
    place: Place,
    reader: RefCell<Peer>,
    /// What stays shared from one sample to the next, and its bytes.
    kept: RefCell<Option<(u64, Segment)>>,
    /// What each byte was written last.
    value: Cell<u8>,
}

const NAME: &str = "table/rust";
const TENSOR: &str = "data";

impl Rust {
    fn start(bench: &Bench<'_>, broker: &Broker, setting: &Setting) -> Result<Self, Failure> {
        let reader = bench.start(broker, peer::READER)?;
        reader.say((NAME, setting.reader.map(|(_, uuid)| uuid.to_string())))?;
        let domain = broker.connect()?;
        Ok(Self {
            domain,
            place: setting.place,
            reader: RefCell::new(reader),
            kept: RefCell::default(),
            value: Cell::new(1),
        })
    }

    fn share(&self, bytes: u64) -> Result<f64, Failure> {
        self.kept.take();
        let (elapsed, segment) = self.shared(bytes)?;
        segment.release()?;
        Ok(elapsed)
    }

    /// Returns the microseconds until the reader has the first byte, and the segment.
    fn shared(&self, bytes: u64) -> Result<(f64, Segment), Failure> {
        // Always odd: memory that was never written is zero.
        let value = self.value.get().wrapping_add(2);
        self.value.set(value);
        let builder = self.domain.create(NAME, self.place).tensor(TENSOR, DType::U8, &[bytes]);
        let mut build = builder.allocate()?;
        build.write(TENSOR, &vec![value; bytes as usize])?;
        let mut reader = self.reader.borrow_mut();
        let start = now();
        let segment = build.commit()?;
        let end: u64 = reader.ask(ReaderRequest::Read(value))?;
        Ok((end.saturating_sub(start) as f64 / 1e3, segment))
    }

    fn open(&self, bytes: u64) -> Result<f64, Failure> {
        let mut kept = self.kept.borrow_mut();
        if kept.as_ref().is_none_or(|(shared, _)| *shared != bytes) {
            *kept = Some((bytes, self.shared(bytes)?.1));
        }
        Ok(self.reader.borrow_mut().ask(ReaderRequest::Open)?)
    }
}

/// What a reader is asked.
#[derive(Debug, Serialize, Deserialize)]
enum ReaderRequest {
    /// When the first of the bytes, which have this value, was read, in nanoseconds.
    Read(u8),
    /// How long opening and closing takes, in microseconds.
    Open,
}

/// The role of the reader. The memory is used on the GPU that the first message names, by default on its own.
pub(crate) fn read(session: &mut Session) -> Result<(), Failure> {
    let (name, gpu): (String, Option<String>) = session.parent().hear()?;
    let gpu: Option<DeviceUuid> = gpu.map(|gpu| gpu.parse()).transpose()?;
    let domain = session.domain().clone();
    let open = || {
        let opener = domain.opener(&name);
        match gpu {
            Some(gpu) => opener.device(gpu).allow_peer(true).open(),
            None => opener.open(),
        }
    };
    let mut value = 0;
    while let Some(request) = session.parent().next()? {
        match request {
            ReaderRequest::Open => {
                let (elapsed, ()) = clocked(|| open()?.release())?;
                check(&open()?, value)?;
                session.parent().say(microseconds(elapsed))?;
            }
            ReaderRequest::Read(written) => {
                value = written;
                let segment = open()?;
                let mut first = [0];
                segment.tensor(TENSOR)?.read_at(0, &mut first)?;
                let end = now();
                check(&segment, value)?;
                segment.release()?;
                session.parent().say(end)?;
            }
        }
    }
    Ok(())
}

fn check(segment: &Segment, value: u8) -> Result<(), Failure> {
    let bytes = segment.tensor(TENSOR)?.to_vec()?;
    match bytes.iter().find(|byte| **byte != value) {
        Some(other) => Err(format!("a byte is {other} instead of {value}").into()),
        None => Ok(()),
    }
}

const MESSAGE: &str = "a message there and back, both waiting";

/// Measures messages from one Python process to another.
fn messages(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let programs = Programs::unpack(broker)?;
    for (bytes, samples) in MESSAGE_SIZES {
        let text = bytes.to_string();
        let mut ours = programs.start(MESSAGES, &[&"topic", &text, &broker.socket()])?;
        let mut queue = programs.start(MESSAGES, &[&"queue", &text])?;
        let mut pipe = programs.start(MESSAGES, &[&"pipe", &text])?;
        let plan = plan(bench, samples);
        let case = |name: &str| Case::new(name, Unit::Microseconds).parameter("of", MESSAGE).parameter("bytes", bytes);
        let comparison = Comparison::new(case("Partywall's topics, from Python"), ours.sampler(plan.block))
            .rival(case("multiprocessing.SimpleQueue"), queue.sampler(plan.block))
            .rival(case("multiprocessing.Pipe, bytes"), pipe.sampler(plan.block));
        bench.run(comparison, plan)?;
    }
    Ok(())
}
