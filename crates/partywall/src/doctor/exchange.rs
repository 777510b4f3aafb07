//! Passes memory to another process over a Unix socket, as the broker does, and receives what that process saw.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::Stdio,
    time::{Duration, Instant},
};

use partywall_cuda::kernels::expected;
use partywall_os::{
    process,
    socket::{self, Ready},
};
use serde::{Deserialize, Serialize};

use super::{Doctor, Probe, runner};

/// The timeout for the other process: shorter than that of a probe, so that the probe can still report it.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The most bytes of a message or an answer.
const MAX: usize = 4096;

/// The message to the other process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Parcel {
    /// Bytes of memory, all with the test pattern.
    pub(super) bytes: u64,
    /// The GPU that has the memory.
    pub(super) gpu: String,
    /// The driver's handle of the memory, if it is not sent as a file descriptor.
    pub(super) handle: Vec<u8>,
}

/// Starts a process that runs `probe`, sends it the parcel and the memory's file descriptor, and returns its
/// observation.
pub(super) fn hand_over(
    doctor: &Doctor,
    probe: Probe,
    parcel: &Parcel,
    memory: Option<BorrowedFd<'_>>,
) -> Result<String, String> {
    let system = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let (ours, theirs) = socket::pair().map_err(|errno| system("making a pair of sockets")(errno.into()))?;
    let mut command = doctor.command(probe);
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = process::spawn(&mut command).map_err(system("starting another process"))?;
    // The command keeps the other end of the socket open, too, which would hide the child's death.
    drop(command);

    let deadline = Instant::now() + TIMEOUT;
    let answer = send(&ours, parcel, memory).and_then(|()| receive(&ours, deadline).map(|(answer, _)| answer));
    let ended = runner::wait(&mut child, deadline);
    match answer {
        Ok(answer) => serde_json::from_slice(&answer).unwrap_or_else(|_| {
            let ended =
                ended.ok().flatten().map_or_else(|| "was killed".to_owned(), |status| format!("ended with {status}"));
            Err(format!("the other process gave no answer and {ended}"))
        }),
        Err(error) => Err(format!("the other process: {error}")),
    }
}

/// Runs the other process: receives the parcel, examines the memory, answers.
pub(super) fn answer(examine: fn(&Parcel, Option<OwnedFd>) -> Result<String, String>) {
    let stdin = io::stdin();
    let answer = take(stdin.as_fd()).and_then(|(parcel, memory)| examine(&parcel, memory));
    let bytes = serde_json::to_vec(&answer).unwrap_or_default();
    // If the probe has ended, the answer is not needed.
    let _ = socket::send(stdin.as_fd(), &bytes, &[]);
}

/// Checks that memory has the test pattern. The error names the first wrong word.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
    for (index, found) in words.enumerate() {
        let expected = expected(index as u64);
        if found != expected {
            return Err(format!("word {index} is {found:#010x}, not {expected:#010x}"));
        }
    }
    Ok(())
}

fn send(socket: &OwnedFd, parcel: &Parcel, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = serde_json::to_vec(parcel)?;
    // A message this small is sent as a whole if the buffer is empty.
    let sent = socket::send(socket, &bytes, memory.as_slice())?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn take(socket: BorrowedFd<'_>) -> Result<(Parcel, Option<OwnedFd>), String> {
    let (bytes, fds) = receive(socket, Instant::now() + TIMEOUT).map_err(|error| error.to_string())?;
    let parcel = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    Ok((parcel, fds.into_iter().next()))
}

/// Reads one message, which arrives in one read because it was sent in one piece. Returns nothing if the other end was
/// closed.
fn receive(socket: impl AsFd, deadline: Instant) -> io::Result<(Vec<u8>, VecDeque<OwnedFd>)> {
    if !socket::wait(&socket, Ready::Read, Some(deadline))? {
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {} s", TIMEOUT.as_secs())));
    }
    let mut buffer = vec![0; MAX];
    let mut fds = VecDeque::new();
    let received = socket::recv(&socket, &mut buffer, &mut fds)?;
    buffer.truncate(received.bytes);
    Ok((buffer, fds))
}
