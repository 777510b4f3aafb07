//! Checks requests before the registry decides them.
//!
//! All that a member sends is hostile. When its message is decoded, names become valid or the request is refused. Here
//! the rest is checked that can be wrong by itself: numbers out of range, values that contradict each other,
//! descriptors that are not what the message says. What the registry gets beside the call ([`Received`]) comes from
//! here alone. Whether ids are the member's, and what its user may do, the registry decides.

use partywall_shm::DType;
use partywall_wire::{
    self as wire, Call, Refusal,
    limits::{MAX_BLOCKS, MAX_DEADLINE, MAX_PERMITS},
};

use crate::{
    registry::{
        Received,
        types::{Kind, Lifetime, Place},
    },
    server::{
        control::{Control, not_created, queue_shape, topic_shape},
        fds::{Expected, FdStore},
        membership::presentable,
        reclaimer::Donated,
    },
};

/// Checks a request. The file descriptors of a commit or growth are checked, and stored only if the request is
/// well-formed. The control memory of a pool, topic or queue is created. Text that others will read is made presentable.
///
/// Only members on the simulated driver may donate its memory, which is not GPU memory. `highest` is the highest number
/// that a NUMA node of the machine may have.
pub(super) fn check(
    call: &mut Call,
    fds: Vec<Donated>,
    control: &mut Control,
    store: &mut FdStore,
    simulated: bool,
    highest: u32,
) -> Result<Received, Refusal> {
    if !fds.is_empty() && !matches!(call, Call::Commit(_) | Call::Grow(_)) {
        return Err(Refusal::invalid("this request carries no file descriptors"));
    }
    match call {
        Call::Commit(commit) => {
            check_place(commit.facts.place, simulated, highest)?;
            return check_commit(commit, fds, control, store, simulated);
        }
        Call::Grow(grow) => {
            let expected = Expected { kind: grow.kind, mutable: true, simulated };
            let fds = store.take(&grow.chunks, &grow.table, fds, expected)?;
            return Ok(Received { fds, ..Received::default() });
        }
        Call::Open(wire::Open { version: Some(0), .. }) | Call::Inspect { version: Some(0), .. } => {
            return Err(Refusal::invalid("versions count from 1"));
        }
        Call::Remove { deadline: Some(wire::Deadline { after, .. }), .. } if *after > MAX_DEADLINE => {
            return Err(Refusal::invalid(format!("a deadline is at most {MAX_DEADLINE} ms away, not {after} ms")));
        }
        Call::UsesGpu { mps: Some(pipes) } => *pipes = presentable(pipes),
        Call::CheckBytes { place, .. } => check_place(*place, simulated, highest)?,
        Call::OpenSemaphore { maximum: 0, .. } => {
            return Err(Refusal::invalid("a semaphore has at least one permit"));
        }
        Call::OpenSemaphore { maximum, .. } if *maximum > MAX_PERMITS => {
            return Err(Refusal::invalid(format!("a semaphore has at most {MAX_PERMITS} permits, not {maximum}")));
        }
        _ => {}
    }
    Ok(Received::default())
}

/// Refuses a NUMA node that the machine does not have. A member that loses its context has all nodes with pinned memory
/// checked, so a member must not be able to invent nodes.
fn check_place(place: Place, simulated: bool, highest: u32) -> Result<(), Refusal> {
    let highest = if simulated { highest.max(SIMULATED_NODE) } else { highest };
    match place {
        Place::Pinned(node) if node > highest => Err(Refusal::NoSuchNode { node, highest }),
        _ => Ok(()),
    }
}

fn check_commit(
    commit: &wire::Commit,
    fds: Vec<Donated>,
    control: &mut Control,
    store: &mut FdStore,
    simulated: bool,
) -> Result<Received, Refusal> {
    let facts = commit.facts;
    if let Some(control) = &facts.control {
        check_control(control, commit)?;
    }
    let kind = facts.kind;
    match (kind, facts.place) {
        (Kind::Host, Place::Host)
        | (Kind::Vmm | Kind::Legacy | Kind::Live, Place::Gpu(_))
        | (Kind::Pinned, Place::Pinned(_)) => {}
        (Kind::Host, _) => return Err(Refusal::invalid("memory of kind host is in main memory")),
        (Kind::Pinned, _) => return Err(Refusal::invalid("memory of kind pinned is on a NUMA node")),
        _ => return Err(Refusal::invalid("memory of this kind is on a GPU")),
    }
    let ends_with_publisher = match facts.lifetime {
        Lifetime::Owned => true,
        Lifetime::Shared => facts.control.is_none(),
        Lifetime::Kept => false,
    };
    if kind == Kind::Legacy && (!ends_with_publisher || facts.reserved > 0) {
        return Err(Refusal::invalid("legacy memory ends with its publisher and cannot grow"));
    }
    if kind == Kind::Live && facts.reserved > 0 {
        return Err(Refusal::invalid("memory of an allocator cannot grow"));
    }
    let is_owned_segment = facts.lifetime == Lifetime::Owned && facts.control.is_none() && kind != Kind::Legacy;
    if commit.owner.is_some() && !is_owned_segment {
        return Err(Refusal::invalid(
            "only the name of an owned segment can end with another member, and not legacy memory's",
        ));
    }
    if !facts.mutable && facts.reserved > 0 {
        return Err(Refusal::invalid("frozen memory cannot grow"));
    }
    if facts.shared && facts.mutable && facts.control.is_none() {
        return Err(Refusal::invalid("a mutable segment cannot be shared: its readers could write it"));
    }
    let handles = if kind == Kind::Legacy { commit.chunks.len() } else { 0 };
    if commit.handles.len() != handles {
        return Err(Refusal::invalid(format!("{handles} handles are needed, {} arrived", commit.handles.len())));
    }
    let expected = Expected { kind, mutable: facts.mutable, simulated };
    let fds = store.take(&commit.chunks, &commit.table, fds, expected)?;
    let blocks = facts.control.map(|shape| control.provide_blocks(shape, store)).transpose();
    let blocks = blocks.map_err(|error| {
        store.close(&fds);
        not_created(error)
    })?;
    Ok(Received { fds, blocks, ..Received::default() })
}

/// Refuses a pool, topic or queue with an invalid shape.
fn check_control(control: &wire::Control, commit: &wire::Commit) -> Result<(), Refusal> {
    if !commit.facts.mutable || commit.facts.reserved > 0 {
        return Err(Refusal::invalid("a pool is mutable and does not grow"));
    }
    if !(1..=MAX_BLOCKS).contains(&control.blocks) || control.block_bytes == 0 {
        let wire::Control { blocks, block_bytes, .. } = control;
        return Err(Refusal::invalid(format!(
            "a pool has 1 to {MAX_BLOCKS} blocks of at least one byte, not {blocks} of {block_bytes}"
        )));
    }
    let is_possible = |topic: wire::TopicShape| {
        let is_dtype = topic.dtype.is_none_or(|code| DType::from_code(code).is_some());
        let fits = topic_shape(control).is_some_and(|shape| shape.is_possible());
        is_dtype && fits && topic.history <= topic.depth && !control.zeroed
    };
    if !control.topic.is_none_or(is_possible) {
        return Err(Refusal::invalid(format!("the shape of the topic is invalid: {control:?}")));
    }
    let is_possible = |queue: wire::QueueShape| {
        let fits = queue_shape(control).is_some_and(|shape| shape.is_possible());
        let has_outputs = (1..=MAX_BLOCKS).contains(&queue.outputs) && queue.output_bytes > 0;
        fits && has_outputs && !control.zeroed && control.topic.is_none()
    };
    if !control.queue.is_none_or(is_possible) {
        return Err(Refusal::invalid(format!("the shape of the queue is invalid: {control:?}")));
    }
    let bytes = commit.chunks.first().copied().unwrap_or(0);
    match control.data_bytes() {
        Some(needed) if needed <= bytes => Ok(()),
        _ => Err(Refusal::invalid(format!("the blocks do not fit into the first chunk, which has {bytes} bytes"))),
    }
}

/// The highest node of the simulated driver, on any machine.
const SIMULATED_NODE: u32 = 1;
