//! zenoh without Partywall: a process that puts messages, and one on the other host that copies them into its memory.

use std::{
    env,
    process::Command,
    sync::{
        Mutex,
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use bytes::Bytes;
use partywall_harness::{Actor, hosts::Switch, next_order, say};
use partywall_measure::Failure;
use partywall_os::clock::monotonic_ns;
use zenoh::{Config, Wait, qos::CongestionControl};

/// How sessions are set up and messages sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Settings {
    /// As a bridge does it.
    Bridge,
    /// As zenoh does it if nothing is said. It drops what does not fit.
    Default,
}

/// The two processes.
pub(super) struct Peers {
    sender: Actor,
    receiver: Actor,
    bytes: usize,
}

impl Peers {
    pub(super) fn new(switch: &Switch, settings: Settings, bytes: usize) -> Self {
        let port = if settings == Settings::Bridge { 7500 } else { 7501 };
        let endpoint = format!("tcp/{}:{port}", switch.hosts()[1].address());
        let start = |host: usize, role: &str| {
            let mut command = Command::new(env::current_exe().unwrap());
            command.env(ROLE, role).env(ENDPOINT, &endpoint).env(BYTES, bytes.to_string());
            command.env(SETTINGS, format!("{settings:?}"));
            let mut actor = switch.hosts()[host].run(|| Actor::spawn(&mut command));
            actor.expect("ready");
            actor
        };
        let receiver = start(1, "receiver");
        let sender = start(0, "sender");
        Self { sender, receiver, bytes }
    }

    /// Returns the nanoseconds from the first put until the last of `count` messages was received.
    pub(super) fn send(&mut self, count: usize) -> Result<u64, Failure> {
        let (began, ended, received) = self.exchange(count);
        match received == count {
            true => Ok(ended - began),
            false => Err(format!("{received} of {count} messages of {} bytes arrived", self.bytes).into()),
        }
    }

    /// Returns how many of `count` messages arrive.
    pub(super) fn arriving(&mut self, count: usize) -> usize {
        self.exchange(count).2
    }

    fn exchange(&mut self, count: usize) -> (u64, u64, usize) {
        self.receiver.request(&count.to_string());
        let began = self.sender.request(&count.to_string());
        let answer = self.receiver.expect("received");
        let (ended, received) = answer.split_once(' ').unwrap();
        (began.parse().unwrap(), ended.parse().unwrap(), received.parse().unwrap())
    }
}

/// Plays the sender or the receiver, until standard input ends.
pub(super) fn play(role: &str) -> Result<(), Failure> {
    let is_bridge = env::var(SETTINGS)? == format!("{:?}", Settings::Bridge);
    let bytes: usize = env::var(BYTES)?.parse()?;
    let mut config = Config::default();
    let endpoint = format!("[\"{}\"]", env::var(ENDPOINT)?);
    let mut settings = vec![
        ("mode", "\"peer\""),
        ("scouting/multicast/enabled", "false"),
        ("listen/endpoints", if role == "receiver" { &endpoint } else { "[]" }),
        ("connect/endpoints", if role == "sender" { &endpoint } else { "[]" }),
    ];
    if is_bridge {
        settings.extend([
            ("scouting/gossip/enabled", "false"),
            ("transport/link/tx/lease", "4000"),
            ("transport/link/tx/queue/congestion_control/block/wait_before_close", "60000000"),
            ("transport/link/rx/buffer_size", "1048576"),
        ]);
    }
    for (key, value) in settings {
        config.insert_json5(key, value)?;
    }
    let session = zenoh::open(config).wait()?;
    if role == "sender" {
        let publisher = session.declare_publisher("bench");
        let publisher =
            if is_bridge { publisher.congestion_control(CongestionControl::Block) } else { publisher }.wait()?;
        let payload = Bytes::from(vec![1; bytes]);
        while !publisher.matching_status().wait()?.matching() {
            std::thread::sleep(Duration::from_millis(10));
        }
        say("ready");
        while let Some(order) = next_order() {
            let began = monotonic_ns();
            for _ in 0..order.parse::<usize>()? {
                publisher.put(payload.clone()).wait()?;
            }
            say(&format!("done {began}"));
        }
        return Ok(());
    }
    let (send, arrivals) = mpsc::channel();
    // Zenoh calls from one thread at a time.
    let memory = Mutex::new(vec![0; bytes]);
    let receiving = session.declare_subscriber("bench").callback(move |sample| {
        let mut memory = memory.lock().unwrap();
        let mut at = 0;
        for part in sample.payload().slices() {
            memory[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        let _ = send.send(monotonic_ns());
    });
    let _receiving = receiving.wait()?;
    say("ready");
    while let Some(order) = next_order() {
        say("done");
        let count: usize = order.parse()?;
        let (mut last, mut received) = (0, 0);
        while received < count {
            match arrivals.recv_timeout(SILENCE) {
                Ok(at) => last = at,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
            received += 1;
        }
        say(&format!("received {last} {received}"));
    }
    Ok(())
}

/// After this time without a message, what is missing is lost.
const SILENCE: Duration = Duration::from_secs(3);

/// The environment variables of the processes.
pub(super) const ROLE: &str = "PARTYWALL_BENCH_ROLE";
const ENDPOINT: &str = "PARTYWALL_BENCH_ENDPOINT";
const BYTES: &str = "PARTYWALL_BENCH_BYTES";
const SETTINGS: &str = "PARTYWALL_BENCH_SETTINGS";
