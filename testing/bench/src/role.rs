//! The roles that this program plays when it has started itself as another process.
//!
//! Every role ends when its standard input ends, so that no role outlives a benchmark that was killed.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, Read, Write},
    path::Path,
    process::Command,
};

use partywall::{DType, DeviceChoice, gpu};
use partywall_measure::Failure;

use crate::{
    bench::{clocked, microseconds},
    broker::connect,
    mps, ping_pong,
    subjects::{
        hostile,
        ordering::{deaths, pair, semaphore},
        peer_table, pools, queues,
    },
};

/// Answers a [`ping_pong::PingPong`]: `REQUEST-BYTES REPLY-BYTES`, with the socket as standard input.
pub(crate) const ECHO: &str = "echo";

/// Connects many times, prints the microseconds of each connection, and keeps them open: `SOCKET COUNT`.
pub(crate) const MEMBERS: &str = "members";

/// Commits a segment that a GPU writes and that outlives the process: `SOCKET NAME PLACE TENSORS BYTES-OF-EACH`.
pub(crate) const GPU_SEGMENT: &str = "gpu-segment";

/// Hands over to another process of the same role: `SOCKET first|second [GPU-UUID BYTES-OF-A-LONG-KERNEL]`. Its
/// standard input is a line, as that of all following roles.
pub(crate) const PAIR: &str = "pair";

/// Takes permits and gives them back: `SOCKET WORKERS PERMITS`.
pub(crate) const WORKER: &str = "worker";

/// Takes blocks and gives them back: `SOCKET WORKERS`.
pub(crate) const ALLOCATOR: &str = "allocator";

/// Completes the tasks of a queue, with the square root of the argument as the output: `SOCKET NAME`.
pub(crate) const TASK_WORKER: &str = "task-worker";

/// Opens and reads a segment each time that it is asked to: `SOCKET NAME`.
pub(crate) const READER: &str = "reader";

/// Holds something of each kind until it is killed: `SOCKET SEGMENT [GPU-UUID]`.
pub(crate) const HOLDER: &str = "holder";

/// Has a stream wait for the processes that are killed: `SOCKET GPU-UUID`.
pub(crate) const BYSTANDER: &str = "bystander";

/// Keeps an MPS daemon running: `DIRECTORY`.
pub(crate) const MPS: &str = "mps";

/// Measures calls beside a client that misbehaves: `WAY`, or `nobody`.
pub(crate) const BESIDE: &str = "beside";

/// Misbehaves until it is killed: `WAY SOCKET`.
pub(crate) const HOSTILE: &str = "hostile";

pub(crate) const FLAG: &str = "--role";

/// Returns the command that starts a role of this program, which may have been removed since.
pub(crate) fn again(role: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args([FLAG, role]);
    command
}

/// Returns the command that starts a role.
pub(crate) fn command<I: AsRef<OsStr>>(role: &str, arguments: impl IntoIterator<Item = I>) -> Result<Command, Failure> {
    let mut command = Command::new(env::current_exe()?);
    command.args([FLAG, role]).args(arguments);
    Ok(command)
}

/// Plays the role that the arguments name, or returns `None` if they name none.
pub(crate) fn play() -> Option<Result<(), Failure>> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != FLAG {
        return None;
    }
    let role = arguments.next().unwrap_or_default();
    let arguments: Vec<_> = arguments.collect();
    Some(match (role.to_str(), arguments.as_slice()) {
        (Some(ECHO), [request, reply]) => echo(request, reply),
        (Some(MEMBERS), [socket, count]) => members(socket.as_ref(), count),
        (Some(GPU_SEGMENT), [socket, name, place, tensors, bytes]) => {
            gpu_segment(socket.as_ref(), name, place, tensors, bytes)
        }
        (Some(PAIR), [socket, side]) => text(side).and_then(|side| pair::play(socket.as_ref(), side, None)),
        (Some(PAIR), [socket, side, gpu, large]) => {
            text(side).and_then(|side| pair::play(socket.as_ref(), side, Some((parse(gpu)?, parse(large)?))))
        }
        (Some(WORKER), [socket, workers, permits]) => {
            parse(workers).and_then(|workers| semaphore::work(socket.as_ref(), workers, parse(permits)?))
        }
        (Some(ALLOCATOR), [socket, workers]) => {
            parse(workers).and_then(|workers| pools::allocate(socket.as_ref(), workers))
        }
        (Some(TASK_WORKER), [socket, name]) => text(name).and_then(|name| queues::work(socket.as_ref(), name)),
        (Some(READER), [socket, name]) => text(name).and_then(|name| peer_table::read(socket.as_ref(), name, None)),
        (Some(READER), [socket, name, gpu]) => {
            text(name).and_then(|name| peer_table::read(socket.as_ref(), name, Some(parse(gpu)?)))
        }
        (Some(HOLDER), [socket, segment]) => text(segment).and_then(|name| deaths::hold(socket.as_ref(), name, None)),
        (Some(HOLDER), [socket, segment, gpu]) => {
            text(segment).and_then(|name| deaths::hold(socket.as_ref(), name, Some(parse(gpu)?)))
        }
        (Some(BYSTANDER), [socket, gpu]) => parse(gpu).and_then(|gpu| deaths::stand_by(socket.as_ref(), gpu)),
        (Some(MPS), [directory]) => mps::keep(directory.into()),
        (Some(BESIDE), [way]) => text(way).and_then(hostile::beside),
        (Some(HOSTILE), [way, socket]) => text(way).and_then(|way| hostile::misbehave(way, socket.as_ref())),
        _ => Err(format!("unknown role {}", role.display()).into()),
    })
}

fn echo(request: &OsString, reply: &OsString) -> Result<(), Failure> {
    ping_pong::answer(parse(request)?, parse(reply)?)
}

fn members(socket: &Path, count: &OsString) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let mut domains = Vec::new();
    for _ in 0..parse(count)? {
        let (elapsed, domain) = clocked(|| connect(socket))?;
        writeln!(out, "{}", microseconds(elapsed))?;
        domains.push(domain);
    }
    drop(out);
    rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn gpu_segment(
    socket: &Path,
    name: &OsString,
    place: &OsString,
    tensors: &OsString,
    bytes: &OsString,
) -> Result<(), Failure> {
    let domain = connect(socket)?;
    let name = text(name)?;
    let (place, _) = gpu::resolve(parse::<DeviceChoice>(place)?)?;
    let tensors: usize = parse(tensors)?;
    let bytes: u64 = parse(bytes)?;
    let tensor = |index: usize| format!("tensor.{index}");
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

fn text(argument: &OsString) -> Result<&str, Failure> {
    argument.to_str().ok_or_else(|| format!("{} is not text", argument.display()).into())
}

fn parse<T: std::str::FromStr>(argument: &OsString) -> Result<T, Failure>
where
    Failure: From<T::Err>,
{
    Ok(text(argument)?.parse::<T>()?)
}
