//! `partywall-relay SEED NAMESPACE NAMESPACE`: a line between two hosts of [`partywall_harness::hosts`]. It has a TUN
//! device in each network namespace, named by a path, and passes packets from one to the other.
//!
//! Each line on standard input says what happens from then on: the delay and the jitter in microseconds, the losses in a
//! million packets, and whether packets pass in each direction, 1 or 0. It answers `set`. It ends with standard input.
#![allow(unsafe_code, reason = "making a TUN device is a control call that no safe wrapper knows")]
#![allow(clippy::unwrap_used, reason = "it belongs to tests, and fails by panicking")]

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    env,
    fs::{File, OpenOptions},
    io::{self, BufRead, Read, Write},
    os::fd::AsFd,
    sync::mpsc::{Receiver, TryRecvError, channel},
    thread,
    time::{Duration, Instant},
};

use partywall_harness::say;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_setfl},
    ioctl::{Opcode, Setter, ioctl, opcode},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

/// `struct ifreq`, of which the call reads the name and the flags (netdevice(7)).
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

/// `TUNSETIFF`, `IFF_TUN` and `IFF_NO_PI` of `linux/if_tun.h`.
const SET_INTERFACE: Opcode = opcode::write::<i32>(b'T', 202);
const PACKETS_WITHOUT_HEADER: i16 = 0x1001;

/// The most bytes that are under way; what comes then is lost, as in a router.
const CAPACITY: usize = 64 << 20;

#[derive(Clone, Copy)]
struct Condition {
    delay: Duration,
    jitter: Duration,
    lost_in_a_million: u64,
    is_open: [bool; 2],
}

/// A packet on its way. The first in order is the last to arrive, because the heap gives the greatest.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    arrives: Reverse<(Instant, u64)>,
    to: usize,
    bytes: Vec<u8>,
}

fn main() {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [seed, first, second] = &arguments[..] else { panic!("usage: partywall-relay SEED NAMESPACE NAMESPACE") };
    let mut state: u64 = seed.parse().unwrap();
    let mut devices = [first, second].map(|namespace| device(namespace));
    let conditions = conditions();
    say("ready");
    let mut condition =
        Condition { delay: Duration::ZERO, jitter: Duration::ZERO, lost_in_a_million: 0, is_open: [true; 2] };
    let mut under_way = BinaryHeap::new();
    let (mut bytes_under_way, mut number) = (0, 0);
    let mut buffer = vec![0; 1 << 16];
    loop {
        loop {
            match conditions.try_recv() {
                Ok(new) => {
                    condition = new;
                    say("set");
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        for (from, device) in devices.iter_mut().enumerate() {
            while let Some(length) = read(device, &mut buffer) {
                let lost = random(&mut state) % 1_000_000 < condition.lost_in_a_million;
                let jitter = random(&mut state) % (condition.jitter.as_micros() as u64 + 1);
                if lost || !condition.is_open[from] || bytes_under_way + length > CAPACITY {
                    continue;
                }
                let arrives = Instant::now() + condition.delay + Duration::from_micros(jitter);
                number += 1;
                bytes_under_way += length;
                let arrives = Reverse((arrives, number));
                under_way.push(Packet { arrives, to: 1 - from, bytes: buffer[..length].to_vec() });
            }
        }
        let now = Instant::now();
        while let Some(packet) = under_way.peek()
            && packet.arrives.0.0 <= now
        {
            let packet = under_way.pop().unwrap();
            bytes_under_way -= packet.bytes.len();
            // A device that is down, or full, loses it.
            let _ = devices[packet.to].write(&packet.bytes);
        }
        let next = under_way.peek().map(|packet| packet.arrives.0.0.saturating_duration_since(now));
        let wait = next.unwrap_or(CONTROL).min(CONTROL);
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        let [first, second] = &devices;
        let mut ready = [first, second].map(|device| PollFd::new(device, PollFlags::IN));
        poll(&mut ready, Some(&wait)).unwrap();
    }
}

/// How often it looks for a new condition.
const CONTROL: Duration = Duration::from_millis(5);

/// Makes the device `line` in a namespace.
fn device(namespace: &str) -> File {
    let namespace = File::open(namespace).unwrap();
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    let device = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut name = [0; 16];
    name[..4].copy_from_slice(b"line");
    let request = InterfaceRequest { name, flags: PACKETS_WITHOUT_HEADER, rest: [0; 22] };
    // SAFETY: the call reads a `struct ifreq`, which `InterfaceRequest` is in size and layout, and keeps no pointer.
    unsafe { ioctl(&device, Setter::<SET_INTERFACE, _>::new(request)) }.unwrap();
    fcntl_setfl(&device, OFlags::NONBLOCK | OFlags::RDWR).unwrap();
    device
}

/// Reads a packet, if there is one.
fn read(device: &mut File, buffer: &mut [u8]) -> Option<usize> {
    match device.read(buffer) {
        Ok(length) => Some(length),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        // The device is down.
        Err(_) => None,
    }
}

/// Reads conditions from standard input.
fn conditions() -> Receiver<Condition> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let numbers: Vec<u64> = line.unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
            let [delay, jitter, lost_in_a_million, there, back] = numbers[..] else { panic!("five numbers") };
            let [delay, jitter] = [delay, jitter].map(Duration::from_micros);
            let condition = Condition { delay, jitter, lost_in_a_million, is_open: [there == 1, back == 1] };
            if sender.send(condition).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The next of a sequence of random numbers (splitmix64).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
