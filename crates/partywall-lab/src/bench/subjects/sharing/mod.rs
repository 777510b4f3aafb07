//! What sharing costs, compared with private memory in the same run.
//!
//! | module | measures |
//! |---|---|
//! | `memory` | latency of dependent loads and writes, and bandwidth of reads, in own and in shared memory |
//! | `copies` | copies into and out of shared memory |
//! | `handoff` | how long one process takes to notify another, in each available way |
//! | `relay` | the same between streams of two processes |
//! | `blocks` | hand-offs by blocks of a pool, of hosts and of streams |
//! | `fanout` | how long one process takes to notify several |
//! | `group` | groups of processes, and how they share a GPU |
//! | `overhead` | the memory that another process or another mapping costs |
//! | `attach` | opening and closing by size, how often one segment can be opened |
//! | `alloc` | blocks of a pool beside allocations |
//!
//! Another process, a *peer*, creates the shared objects and follows the orders of this one. Every case is checked: the
//! bytes that were read, copied or handed over are the bytes that the peer has written.

pub(crate) mod across;
pub(crate) mod alloc;
pub(crate) mod attach;
mod blocks;
pub(crate) mod chain;
pub(crate) mod copies;
pub(crate) mod fanout;
pub(crate) mod group;
pub(crate) mod handoff;
pub(crate) mod memory;
mod overhead;
mod relay;

use std::fmt::Display;

use partywall_measure::Case;

use crate::{
    bench::{Bench, available_memory, failed, peer, samplers, turns},
    broker::Broker,
    prelude::*,
};
use partywall_measure::{Comparison, Unit};

/// The place of the memory, and what a subject needs there.
pub(crate) struct Setting<'a> {
    bench: &'a Bench<'a>,
    place: Place,
    /// `None` in host memory.
    gpu: Option<Arc<Gpu>>,
    /// How many bytes a subject may allocate at once in the chosen place.
    room: u64,
    /// How many bytes of host memory it may allocate beside its memory on a GPU.
    host_room: u64,
    domain: Domain,
    /// The last field, so that the connection is dropped before its broker.
    broker: Broker,
}

impl<'a> Setting<'a> {
    pub(crate) fn new(bench: &'a Bench<'a>) -> Result<Self, Failure> {
        let broker = bench.broker("bench")?;
        let domain = broker.connect()?;
        let gpu = match bench.place.gpu() {
            Some(uuid) => Some(domain.gpu(uuid)?),
            None => None,
        };
        let free = match &gpu {
            Some(gpu) => gpu.context().memory_info().doing("asking for the free memory")?.free,
            None => available_memory(),
        };
        let host_room = available_memory() / 4;
        Ok(Self { bench, place: bench.place, gpu, room: free / 4, host_room, domain, broker })
    }

    /// Starts another process.
    fn peer(&self) -> Result<Peer, Failure> {
        self.peer_on(self.place, &[])
    }

    /// Starts another process with memory at another place, and with environment variables.
    fn peer_on(&self, place: Place, environment: &[(&str, &str)]) -> Result<Peer, Failure> {
        self.bench.start_on(&self.broker, peer::ROLE, place, environment)
    }

    /// Returns the sizes that a subject varies. It has `copies` buffers of a size at once, and on a GPU `host_copies`
    /// more on the host. Sizes that do not fit are noted.
    fn sizes(&self, what: &str, copies: u64, host_copies: u64) -> Vec<u64> {
        let most = if self.gpu.is_some() { LARGEST } else { 256 << 20 };
        let steps = (0..).map(|step| 4096 << (4 * step)).take_while(|size| *size < most);
        self.that_fit(what, steps.chain([most]), copies, host_copies)
    }

    /// Returns the given sizes that fit, as `sizes` does.
    fn that_fit(&self, what: &str, sizes: impl Iterator<Item = u64>, copies: u64, host_copies: u64) -> Vec<u64> {
        let sizes = sizes.filter(|size| !self.bench.quick || *size <= 1 << 20);
        let needs = match &self.gpu {
            None => vec![("memory", copies, self.room)],
            Some(_) => vec![("GPU's memory", copies, self.room), ("host's memory", host_copies, self.host_room)],
        };
        let mut fit = Vec::new();
        for size in sizes {
            match lacking(size, &needs) {
                None => fit.push(size),
                Some((whose, copies)) => self.bench.note(format!(
                    "{what}: {} is left out: {copies} times as much is more than a quarter of the {whose} that is free",
                    bytes(size)
                )),
            }
        }
        fit
    }

    /// Returns the size of a buffer, a power of two. Samples of small sizes take turns among its parts, so that no
    /// cache contains them. There are `copies` buffers at once, and on a GPU `host_copies` more on the host.
    fn rotated(&self, largest: u64, copies: u64, host_copies: u64) -> u64 {
        let on_host = if self.gpu.is_some() { self.host_room / host_copies.max(1) } else { u64::MAX };
        if self.bench.quick { largest } else { rotation(largest, on_host.min(self.room / copies)) }
    }

    fn note(&self, text: impl Into<String>) {
        self.bench.note(text);
    }

    /// Takes the samples of a comparison, for about a second, and keeps the result.
    fn run(&self, comparison: Comparison<'_>) -> Result<(), Failure> {
        self.bench.run_within(comparison).map_err(failed)
    }

    /// Keeps numbers that were counted once each.
    fn count(&self, case: Case, values: &[f64]) -> Result<(), Failure> {
        self.bench.count(case, values).map_err(failed)
    }
}

/// Measures `run`, and then the memory that sharing takes, once in a run.
pub(crate) fn with_overhead(
    setting: &Setting<'_>,
    run: impl FnOnce(&Setting<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    run(setting)?;
    if setting.bench.overhead.replace(true) { Ok(()) } else { overhead::run(setting) }
}

/// Returns the cases of what is measured at a size in bytes, by their names.
fn cases(unit: Unit, size: u64, of: impl Display) -> impl Fn(&str) -> Case {
    move |name| Case::new(name, unit).parameter("bytes", size).parameter("of", &of)
}

/// The largest size that is measured.
const LARGEST: u64 = 4 << 30;

/// Bytes of a buffer that fits into no cache of a GPU or a processor.
const ROTATED: u64 = 256 << 20;

/// Returns [`ROTATED`], or the largest power of two that fits, but at least `largest`, which is a power of two.
fn rotation(largest: u64, room: u64) -> u64 {
    let fits = room.checked_ilog2().map_or(0, |power| 1 << power);
    ROTATED.min(fits).max(largest)
}

/// Returns the first memory that is too small, and how many times it would have to hold `size`. Each need is a
/// memory, a number of copies, and the free bytes.
fn lacking<'a>(size: u64, needs: &[(&'a str, u64, u64)]) -> Option<(&'a str, u64)> {
    let lacks = |(_, copies, room): &&(&str, u64, u64)| size.saturating_mul(*copies) > *room;
    needs.iter().find(lacks).map(|(whose, copies, _)| (*whose, *copies))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_parts_have_room_and_take_the_largest() {
        assert_eq!(rotation(1 << 20, u64::MAX), ROTATED);
        assert_eq!(rotation(4 << 30, 5 << 30), 4 << 30, "a part is all of it");
        assert_eq!(rotation(1 << 20, 100 << 20), 64 << 20, "a power of two, within the room");
        assert_eq!(rotation(4096, 0), 4096);
    }

    #[test]
    fn size_has_to_fit_into_each_memory() {
        let needs = [("GPU's", 4, 400), ("host's", 5, 300)];
        assert_eq!(lacking(60, &needs), None, "exactly as much as there is");
        assert_eq!(lacking(61, &needs), Some(("host's", 5)));
        assert_eq!(lacking(101, &needs), Some(("GPU's", 4)));
        assert_eq!(lacking(u64::MAX, &[("GPU's", 1, u64::MAX), ("host's", 0, 0)]), None);
    }
}
