//! The other processes of a benchmark, which follow orders. [`play`] is the role of most of them: it creates the shared
//! objects.

use std::collections::BTreeMap;

use partywall_measure::Failure as Sampled;

use super::{
    clocked, failed, microseconds, ping_pong,
    subjects::{
        ordering::{self, deaths, semaphore},
        peer_table, pools, queues,
        sharing::{across, attach, chain, fanout, group::Meeting, handoff},
    },
};
use crate::prelude::*;

/// The name of the role that [`Order`]s are for.
pub(super) const ROLE: &str = "peer";

/// Hands over to another process of the same role.
pub(super) const PAIR: &str = "pair";

/// Takes permits and gives them back.
pub(super) const WORKER: &str = "worker";

/// Takes blocks and gives them back.
pub(super) const ALLOCATOR: &str = "allocator";

/// Completes the tasks of a queue.
pub(super) const TASK_WORKER: &str = "task-worker";

/// Opens and reads a segment each time that it is asked to.
pub(super) const READER: &str = "reader";

/// Holds something of each kind until it is killed.
pub(super) const HOLDER: &str = "holder";

/// Has a stream wait for the processes that are killed.
pub(super) const BYSTANDER: &str = "bystander";

/// Starts peers as labs start their roles. It is no lab and is not listed as one.
pub(crate) static LAB: Lab = Lab {
    name: "bench",
    title: "what sharing costs",
    about: Some("The other processes of `partywall bench`"),
    on_host: true,
    broker: true,
    roles: &[
        Role::hidden(ROLE, play),
        Role::hidden(PAIR, |session| ordering::play(session).map_err(failed)),
        Role::hidden(WORKER, |session| semaphore::work(session).map_err(failed)),
        Role::hidden(ALLOCATOR, |session| pools::allocate(session).map_err(failed)),
        Role::hidden(TASK_WORKER, |session| queues::work(session).map_err(failed)),
        Role::hidden(READER, |session| peer_table::read(session).map_err(failed)),
        Role::hidden(HOLDER, |session| deaths::hold(session).map_err(failed)),
        Role::hidden(BYSTANDER, |session| deaths::stand_by(session).map_err(failed)),
    ],
    observer: Role::hidden("bench", |_| {
        Err(Failure::new(ErrorKind::Usage, "`bench` is no lab", "run `partywall bench`"))
    }),
    ..Lab::DEFAULT
};

/// An order to a peer, which answers when it is done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Commits a segment that contains a chain.
    Commit { name: String, bytes: u64, mutable: bool },
    /// Commits a segment that a kernel has filled.
    Fill { name: String, bytes: u64 },
    /// Allocates memory from the driver, with a chain in it or filled by a kernel; answers with the handle for other
    /// processes.
    Legacy { bytes: u64, chain: bool },
    /// Frees all memory allocated by [`Legacy`](Self::Legacy).
    Free,
    /// Opens a segment once more and keeps it; answers with the bytes of host memory that are private to this process.
    Open { name: String, bytes: u64 },
    /// Opens memory of another GPU in each way; answers with the reason for each that was refused.
    Across(across::Offer),
    /// Copies the next `bytes` bytes from the other GPU's memory; answers with GB/s.
    CopyAcross { way: across::Way, bytes: u64 },
    /// Has a kernel read the next `bytes` bytes of the other GPU's memory, or of its own if `way` is `None`; answers
    /// with GB/s.
    ReadAcross { way: Option<across::Way>, bytes: u64 },
    /// Creates a context on the GPU, if there is one; answers whether it is under MPS.
    UseGpu,
    /// Prepares hand-offs with another process; a file of shared words and a socket follow.
    Meet { way: handoff::Way, meeting: Meeting },
    /// Prepares hand-offs to several processes; a file of shared words follows.
    FanOut { way: fanout::Way, meeting: Meeting },
    /// Commits a segment that kernels write and that outlives the process.
    CommitKept { name: String, place: String, tensors: u64, bytes: u64 },
    /// Connects many times to the broker at a socket, and keeps the connections; answers with the microseconds of each.
    Connect { socket: PathBuf, count: usize },
    /// Answers requests on a socket that follows, until the other end is closed.
    Echo { request: usize, reply: usize },
    /// Hands over `turns` times, there and back, as prepared for a meeting; answers with the time that it took.
    HandOff { name: String, turns: u64 },
}

/// Hands over a number of times and returns how long that took.
type Exchange = Box<dyn FnMut(u64) -> Result<Duration, partywall_measure::Failure>>;

/// A handle of the driver. Serde does not support arrays of its length.
pub(super) type Handle = Vec<u8>;

fn play(session: &mut Session) -> Result<(), Failure> {
    let mut made: BTreeMap<String, Segment> = BTreeMap::new();
    let mut allocated: Vec<DeviceBuffer> = Vec::new();
    let mut opened: Vec<Segment> = Vec::new();
    let mut exchanges: BTreeMap<String, Exchange> = BTreeMap::new();
    let mut contexts: Vec<Arc<Gpu>> = Vec::new();
    let mut reader: Option<across::Reader> = None;
    let mut connections: Vec<Domain> = Vec::new();
    while let Some(order) = session.parent().next()? {
        match order {
            Order::Commit { name, bytes, mutable } => {
                let segment = commit(session, &name, bytes, mutable)?;
                made.insert(name, segment);
                session.parent().say(())?;
            }
            Order::Fill { name, bytes } => {
                let segment = fill(session, &name, bytes)?;
                made.insert(name, segment);
                session.parent().say(())?;
            }
            Order::Legacy { bytes, chain } => {
                let (memory, handle) = legacy(session, bytes, chain)?;
                allocated.push(memory);
                session.parent().say(handle.0.to_vec())?;
            }
            Order::Free => {
                made.clear();
                allocated.clear();
                reader = None;
                session.parent().say(())?;
            }
            Order::Open { name, bytes } => {
                let segment = session.domain().opener(&name).open()?;
                attach::check(&segment, bytes).map_err(failed)?;
                opened.push(segment);
                session.parent().say(private_memory())?;
            }
            Order::Across(offer) => {
                let opened = across::Reader::new(session, &offer)?;
                session.parent().say(opened.refusals()?)?;
                reader = Some(opened);
            }
            Order::CopyAcross { way, bytes } => {
                let reader = reader.as_ref().ok_or_else(|| unexpected("nothing to copy from"))?;
                session.parent().say(reader.copy(way, bytes).map_err(failed)?)?;
            }
            Order::ReadAcross { way, bytes } => {
                let reader = reader.as_ref().ok_or_else(|| unexpected("nothing to read"))?;
                session.parent().say(reader.read(way, bytes).map_err(failed)?)?;
            }
            Order::UseGpu => {
                contexts.extend(session.gpu_if_any()?);
                let under_mps = contexts.last().is_some_and(|gpu| device::under_mps(gpu).unwrap_or(false));
                session.parent().say(under_mps)?;
            }
            Order::Meet { way, meeting } => {
                let files: [OwnedFd; 2] = [session.parent().take_fd()?, session.parent().take_fd()?];
                let mut ends = handoff::Ends::new(session.domain(), session.place, way, &meeting, files)?;
                exchanges.insert(meeting.name, Box::new(move |turns| ends.exchange(turns)));
                session.parent().say(())?;
            }
            Order::FanOut { way, meeting } => {
                let words = session.parent().take_fd()?;
                let mut ends = fanout::Ends::new(session.domain(), way, &meeting, words)?;
                exchanges.insert(meeting.name, Box::new(move |turns| ends.exchange(turns)));
                session.parent().say(())?;
            }
            Order::CommitKept { name, place, tensors, bytes } => {
                commit_kept(session.domain(), &name, &place, tensors, bytes).map_err(failed)?;
                session.parent().say(())?;
            }
            Order::Connect { socket, count } => {
                let mut times = Vec::with_capacity(count);
                for _ in 0..count {
                    let (elapsed, domain) = clocked(|| broker::connect(&socket)).map_err(failed)?;
                    times.push(microseconds(elapsed));
                    connections.push(domain);
                }
                session.parent().say(times)?;
            }
            Order::Echo { request, reply } => {
                let socket = session.parent().take_fd()?;
                ping_pong::answer(socket, request, reply).map_err(failed)?;
            }
            Order::HandOff { name, turns } => {
                let exchange = exchanges.get_mut(&name).ok_or_else(|| unexpected("nothing to hand over by"))?;
                session.parent().say(exchange(turns).map_err(failed)?)?;
            }
        }
    }
    Ok(())
}

fn commit(session: &Session, name: &str, bytes: u64, mutable: bool) -> Result<Segment, Failure> {
    let builder = session.domain().create(name, session.place).mutable(mutable);
    let mut build = builder.tensor(TENSOR, DType::U64, &[bytes / 8]).allocate()?;
    if session.place == Place::Host {
        chain::fill(build.as_mut_slice(TENSOR)?);
    } else {
        build.write(TENSOR, bytes_of(&chain::new(bytes)))?;
    }
    Ok(build.commit()?)
}

/// Commits `tensors` tensors of `bytes` bytes each.
fn commit_kept(domain: &Domain, name: &str, place: &str, tensors: u64, bytes: u64) -> Result<(), Sampled> {
    let (place, _) = gpu::resolve(place.parse()?)?;
    let tensor = |index: u64| format!("tensor.{index}");
    let builder = domain.create(name, place).kept(true);
    let builder = (0..tensors).fold(builder, |builder, index| builder.tensor(&tensor(index), DType::U8, &[bytes]));
    let build = builder.allocate()?;
    for index in 0..tensors {
        let range = build.device(&tensor(index))?;
        range.gpu().kernels()?.enqueue_fill(range.gpu().stream(), range.as_slice())?;
    }
    // The commit waits for the fills.
    build.commit()?.release()?;
    Ok(())
}

fn fill(session: &Session, name: &str, bytes: u64) -> Result<Segment, Failure> {
    let build = session.domain().create(name, session.place).tensor(TENSOR, DType::U8, &[bytes]).allocate()?;
    let range = build.device(TENSOR)?;
    range.gpu().kernels()?.enqueue_fill(range.gpu().stream(), range.as_slice()).doing("filling memory")?;
    Ok(build.commit()?)
}

fn legacy(session: &Session, bytes: u64, with_chain: bool) -> Result<(DeviceBuffer, IpcMemoryHandle), Failure> {
    let Place::Gpu(uuid) = session.place else { return Err(unexpected("host memory has no such handles")) };
    let gpu = session.domain().gpu(uuid)?;
    let memory = if with_chain { with_words(&gpu, &chain::new(bytes))? } else { filled(&gpu, bytes)? };
    let handle = IpcMemoryHandle::of(gpu.context(), memory.as_slice().device_ptr()).doing("making a handle")?;
    Ok((memory, handle))
}

/// Allocates memory of a GPU with these words.
pub(super) fn with_words(gpu: &Gpu, words: &[u64]) -> Result<DeviceBuffer, Failure> {
    let bytes = bytes_of(words);
    let memory = DeviceBuffer::new(gpu.context(), bytes.len() as u64).doing("allocating memory")?;
    gpu.stream().copy_from_host(memory.as_slice(), bytes).doing("writing memory")?;
    Ok(memory)
}

/// Allocates memory of a GPU that a kernel fills.
pub(super) fn filled(gpu: &Gpu, bytes: u64) -> Result<DeviceBuffer, Failure> {
    let memory = DeviceBuffer::new(gpu.context(), bytes).doing("allocating memory")?;
    gpu.kernels()?.enqueue_fill(gpu.stream(), memory.as_slice()).doing("filling memory")?;
    gpu.stream().synchronize().doing("filling memory")?;
    Ok(memory)
}

/// The bytes of words.
pub(super) fn bytes_of(words: &[u64]) -> &[u8] {
    bytemuck::cast_slice(words)
}

/// Returns the bytes of host memory that no other process shares with this one.
fn private_memory() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let private = text.lines().filter(|line| line.starts_with("Private_"));
    private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>() * 1024
}

/// The one tensor of each segment.
pub(super) const TENSOR: &str = "data";
