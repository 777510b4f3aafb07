// Holds 35.
//! Attempts to break a domain with kills, stops, false messages, floods and exhausted resources, at every reachable
//! point. Random kills under load are the subject of `partywall lab chaos`.
//!
//! The checks are deterministic; the moments of the kills are not. Each test takes seconds. `PARTYWALL_STRESS=100`
//! makes tests with rounds a hundred times as long.
#![allow(clippy::unwrap_used)] // tests, their helpers included

mod broker_loss;
mod forks;
mod imposter;
mod kills;
mod peers;
mod place;
mod queues;
mod scarcity;
mod semaphores;
mod stops;
mod threads;
mod topics;
mod wire;

use std::time::{Duration, Instant};

use partywall_harness::{WATCHDOG, eventually};

/// Returns `n`, multiplied as the environment demands.
fn rounds(n: usize) -> usize {
    n * std::env::var("PARTYWALL_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// Returns the result of `work`. If `work` hangs, the test fails instead of hanging.
fn within<T: Send + 'static>(limit: Duration, what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let start = Instant::now();
    std::thread::spawn(move || sender.send(work()));
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(error) => panic!("{what}: {error} after {:?}", start.elapsed()),
    }
}

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Runs the other processes that tests start. It is no test itself; see [`place::Place::play`].
#[test]
fn role() {
    let Ok(role) = std::env::var(place::ROLE) else { return };
    let words: Vec<_> = role.split(' ').collect();
    match words[0] {
        "broker" => place::serve(&words[1..]),
        "fragment" => kills::fragment(&words[1..]),
        "stopped" => stops::play(&words[1..]),
        "load" => broker_loss::load(),
        "follower" => broker_loss::follower(),
        "starter" => broker_loss::starter(&words[1..]),
        "fork" => forks::play(&words[1..]),
        "victim" => imposter::victim(),
        "guest" => peers::guest(),
        "queue" => queues::play(),
        "semaphore" => semaphores::play(&words[1..]),
        "poor" => scarcity::play(&words[1..]),
        "topic" => topics::come_and_go(),
        other => panic!("no role is called {other:?}"),
    }
}
