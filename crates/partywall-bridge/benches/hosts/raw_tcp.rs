//! One TCP connection between two hosts, which is kept: what the same bytes take without anything.
#![allow(unsafe_code, reason = "fresh memory of a file is mapped, which no safe wrapper does")]

use std::{
    fs::File,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ptr, slice, thread,
};

use partywall_harness::hosts::Switch;
use partywall_measure::Failure;
use partywall_os::clock::monotonic_ns;
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// A connection from the first host to the second.
pub(super) struct Connection {
    from: TcpStream,
    to: TcpStream,
    /// What is sent, and where it is received.
    sent: Vec<u8>,
    received: Vec<u8>,
}

impl Connection {
    pub(super) fn new(switch: &Switch, bytes: usize) -> Result<Self, Failure> {
        let [a, b] = [0, 1].map(|host| &switch.hosts()[host]);
        let address = SocketAddr::from((b.address(), 0));
        let listener = b.run(|| TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let from = a.run(|| TcpStream::connect(address))?;
        let to = listener.accept()?.0;
        from.set_nodelay(true)?;
        Ok(Self { from, to, sent: vec![1; bytes], received: vec![0; bytes] })
    }

    /// Returns the nanoseconds from the first byte sent until the last of `count` messages was received.
    pub(super) fn send(&mut self, count: usize) -> Result<u64, Failure> {
        let Self { from, to, sent, received } = self;
        thread::scope(|scope| {
            let sending = scope.spawn(|| -> std::io::Result<u64> {
                let began = monotonic_ns();
                (0..count).try_for_each(|_| from.write_all(sent))?;
                Ok(began)
            });
            (0..count).try_for_each(|_| to.read_exact(received))?;
            let ended = monotonic_ns();
            Ok(ended - sending.join().unwrap()?)
        })
    }

    /// As [`send`](Self::send), of one message into memory of a file that nobody has touched.
    pub(super) fn send_into_fresh_file(&mut self) -> Result<u64, Failure> {
        let Self { from, to, sent, .. } = self;
        thread::scope(|scope| {
            let began = monotonic_ns();
            let sending = scope.spawn(|| from.write_all(sent));
            let file = File::from(memfd_create("bench", MemfdFlags::CLOEXEC)?);
            ftruncate(&file, sent.len() as u64)?;
            // SAFETY: a new mapping, at an address that the kernel chooses, of a file that has this length.
            let start = unsafe {
                mmap(ptr::null_mut(), sent.len(), ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?
            };
            // SAFETY: the mapping is this long, zeroed, and known to nobody else, as the file is.
            let fresh = unsafe { slice::from_raw_parts_mut(start.cast::<u8>(), sent.len()) };
            let read = to.read_exact(fresh);
            let ended = monotonic_ns();
            // SAFETY: nothing uses the slice from here on.
            unsafe { munmap(start, sent.len())? };
            read?;
            sending.join().unwrap()?;
            Ok(ended - began)
        })
    }
}
