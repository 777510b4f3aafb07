//! Handles of 64 bytes that any process of the machine can turn into a descriptor, for as long as the exporter lives.
//!
//! The exporter serves descriptors over an abstract socket whose name is in the handle. The socket ends with the
//! process, as a handle of the driver does. The bytes of a handle: magic (8), process id (4), zero (4), name of the
//! server (8), number of the descriptor (8), payload of the exporter (32).

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use partywall_os::lock::IgnorePoison;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recv, recvmsg, send,
    sendmsg, socket_with,
};

use crate::abi::{Code, IpcHandle};
use crate::threads;

/// The exporter's description of the descriptor; byte 8 is the kind of object.
pub(crate) type Payload = [u8; 32];
pub(crate) const MEMORY: u8 = 1;
pub(crate) const EVENT: u8 = 2;

impl IpcHandle {
    /// # Errors
    /// `INVALID_VALUE`: no handle of the simulation.
    fn parts(&self) -> Result<Parts, Code> {
        let word = |at: usize| u64::from_ne_bytes(self.0[at..at + 8].try_into().expect("eight bytes"));
        if self.0[..8] != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        let payload = self.0[32..].try_into().expect("the rest of 64 bytes");
        Ok(Parts { process: word(8) as u32, server: word(16), number: word(24), payload })
    }
}

struct Parts {
    process: u32,
    server: u64,
    number: u64,
    payload: Payload,
}

/// Creates a handle of a descriptor. It can be opened until [`withdraw`] or the end of the process.
///
/// # Errors
/// `OPERATING_SYSTEM`: no socket.
pub(crate) fn serve(descriptor: OwnedFd, payload: Payload) -> Result<IpcHandle, Code> {
    static NAME: OnceLock<Result<u64, Code>> = OnceLock::new();
    let server = (*NAME.get_or_init(start))?;
    let mut served = served();
    served.last += 1;
    let number = served.last;
    served.descriptors.insert(number, descriptor);
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
    bytes[16..24].copy_from_slice(&server.to_ne_bytes());
    bytes[24..32].copy_from_slice(&number.to_ne_bytes());
    bytes[32..].copy_from_slice(&payload);
    Ok(IpcHandle(bytes))
}

/// Ends new opens of a handle that this process made.
pub(crate) fn withdraw(handle: &IpcHandle) {
    if let Ok(parts) = handle.parts() {
        served().descriptors.remove(&parts.number);
    }
}

/// Returns the descriptor of another process's handle, and that process's description of it.
///
/// # Errors
/// `INVALID_VALUE`: the bytes are not a handle. `INVALID_CONTEXT`: the handle was created in this process.
/// `INVALID_HANDLE`: the exporter has ended or has withdrawn the handle.
pub(crate) fn fetch(handle: &IpcHandle) -> Result<(OwnedFd, Payload), Code> {
    let parts = handle.parts()?;
    if parts.process == std::process::id() {
        return Err(Code::INVALID_CONTEXT);
    }
    let descriptor = ask(parts.server, parts.number).map_err(|_| Code::INVALID_HANDLE)?;
    Ok((descriptor.ok_or(Code::INVALID_HANDLE)?, parts.payload))
}

/// The descriptors that this process serves.
struct Served {
    descriptors: BTreeMap<u64, OwnedFd>,
    last: u64,
}

fn served() -> MutexGuard<'static, Served> {
    static SERVED: Mutex<Served> = Mutex::new(Served { descriptors: BTreeMap::new(), last: 0 });
    SERVED.lock().ignore_poison()
}

/// Starts the serving thread, and returns the name of its socket.
fn start() -> Result<u64, Code> {
    let (name, listener) = open_listener().map_err(|_| Code::OPERATING_SYSTEM)?;
    threads::spawn("simcuda-ipc", move || {
        loop {
            // The client may have disconnected meanwhile; that is not an error of the server.
            let _ = accept_with(&listener, SocketFlags::CLOEXEC).map_err(io::Error::from).and_then(|it| answer(&it));
        }
    });
    Ok(name)
}

/// Returns a socket under a name that no other process of the machine uses.
fn open_listener() -> io::Result<(u64, OwnedFd)> {
    let mut name = [0; 8];
    rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
    let name = u64::from_ne_bytes(name);
    let listener = new_socket()?;
    bind(&listener, &address(name)?)?;
    listen(&listener, 64)?;
    Ok((name, listener))
}

/// Answers a client: one byte with the requested descriptor, or only the byte if there is none.
fn answer(client: &OwnedFd) -> io::Result<()> {
    set_timeouts(client)?;
    let mut number = [0; 8];
    let (_, received) = recv(client, &mut number, RecvFlags::empty())?;
    let served = served();
    let descriptor = served.descriptors.get(&u64::from_ne_bytes(number)).filter(|_| received == number.len());
    let descriptor = descriptor.map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(descriptor) = &descriptor {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    sendmsg(client, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Requests a descriptor from the server of that name. It is an error if there is no such server.
fn ask(server: u64, number: u64) -> io::Result<Option<OwnedFd>> {
    let client = new_socket()?;
    // A forked child keeps its dead parent's socket, which then has no server.
    set_timeouts(&client)?;
    connect(&client, &address(server)?)?;
    send(&client, &number.to_ne_bytes(), SendFlags::NOSIGNAL)?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(&client, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn set_timeouts(socket: &OwnedFd) -> io::Result<()> {
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, which, Some(TIMEOUT))?;
    }
    Ok(())
}

fn address(server: u64) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(format!("simcuda-{server:016x}").as_bytes())?)
}

const MAGIC: [u8; 8] = *b"simcuda1";
/// Far longer than a process needs that is not stopped.
const TIMEOUT: Duration = Duration::from_secs(10);
