//! The addresses of tensors that other libraries may have, to find out whose memory a library is about to write.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use partywall_os::per_process::PerProcess;
use pyo3::prelude::*;

use crate::owner::Owner;

/// Tensors by the address of their first element. None of them lies inside another one of the same owner.
#[derive(Default)]
struct Ranges {
    tensors: BTreeMap<usize, Range>,
    /// The number of tensors at which those that have ended are removed.
    full: usize,
}

struct Range {
    bytes: u64,
    name: String,
    /// Alive for as long as the addresses are mapped.
    owner: Weak<Owner>,
}

/// Below this number of tensors, those that have ended stay.
const FEW: usize = 1024;

static RANGES: PerProcess<Ranges> = PerProcess::new();

/// True from the first question on. Samples and blocks are not noted before, because many are received a second.
static ASKED: AtomicBool = AtomicBool::new(false);

/// Notes a tensor of a segment or build, whose address is handed out.
pub(crate) fn note(owner: &Arc<Owner>, name: &str, address: usize, bytes: u64) {
    if bytes == 0 {
        return;
    }
    let mut ranges = RANGES.lock();
    if ranges.tensors.len() >= ranges.full {
        ranges.tensors.retain(|_, range| range.owner.strong_count() > 0);
        ranges.full = (2 * ranges.tensors.len()).max(FEW);
    }
    let owner = Arc::downgrade(owner);
    // No tensor may lie inside another one: the tensor with an address is the last that begins at or below it.
    let before = ranges.tensors.range(..=address).next_back();
    if before
        .is_some_and(|(start, range)| range.owner.ptr_eq(&owner) && end(*start, range.bytes) >= end(address, bytes))
    {
        return;
    }
    let starting = ranges.tensors.range(address..address.saturating_add(bytes as usize));
    // A tensor that has ended may have been longer, and would hide the rest of this one.
    let hidden: Vec<_> = starting
        .filter(|(start, range)| range.owner.strong_count() == 0 || end(**start, range.bytes) <= end(address, bytes))
        .map(|(start, _)| *start)
        .collect();
    hidden.iter().for_each(|start| drop(ranges.tensors.remove(start)));
    ranges.tensors.insert(address, Range { bytes, name: name.to_owned(), owner });
}

/// Notes a tensor of a sample, block or part of a task, if anything has asked for tensors before.
pub(crate) fn note_if_asked(owner: &Arc<Owner>, name: &str, address: usize, bytes: u64) {
    if ASKED.load(Ordering::Relaxed) {
        note(owner, name, address, bytes);
    }
}

/// Returns the name of the tensor that has this address and that this process must not write, and its segment as
/// `NAME@V`; `None` if there is none. Knows tensors of segments always, and those of samples and tasks from the first
/// call on.
#[pyfunction]
pub(crate) fn read_only_at(py: Python<'_>, address: usize) -> Option<(String, Option<String>)> {
    py.detach(|| {
        ASKED.store(true, Ordering::Relaxed);
        let (name, owner) = found(address)?;
        if owner.is_writable() {
            return None;
        }
        let segment = owner.segment().map(|segment| format!("{}@{}", segment.name(), segment.version()));
        Some((name, segment))
    })
}

fn found(address: usize) -> Option<(String, Arc<Owner>)> {
    let ranges = RANGES.lock();
    let (start, range) = ranges.tensors.range(..=address).next_back()?;
    if address as u64 >= end(*start, range.bytes) {
        return None;
    }
    Some((range.name.clone(), range.owner.upgrade()?))
}

fn end(start: usize, bytes: u64) -> u64 {
    start as u64 + bytes
}
