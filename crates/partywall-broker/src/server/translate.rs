//! Conversion between the wire's types and the registry's.

use std::sync::Arc;

use partywall_shm::DType;
use partywall_wire::{
    self as wire, Answer, Kill, Refusal,
    limits::{MAX_BLOCKS, MAX_DEADLINE, MAX_PERMITS},
};

mod control;
mod member;
mod object;
#[cfg(test)]
mod tests;
mod watch;

use crate::{
    registry::{
        self, Call, Outcome, Registry,
        effect::{Counts, Departed, Holder, HoldingQueue, Info, NameRow, Opened, VersionRow},
        event,
        types::{Kind, Lifetime, Memory, Place, Table},
    },
    server::{
        control::{Control, SlotTable, queue_shape, topic_shape},
        fds::{Expected, FdStore},
        membership::{Membership, presentable},
        reclaimer::Donated,
        runner::Runner,
    },
};

/// Facts about the broker that the registry does not know.
#[derive(Debug)]
pub(super) struct About {
    pub(super) pid: u32,
    pub(super) uid: u32,
    /// The process that restarts the broker, while it lives, and how often it has.
    pub(super) supervisor: Option<u32>,
    pub(super) restarts: u64,
    pub(super) version: String,
    pub(super) instance: u64,
    pub(super) started_at: u64,
    pub(super) log: Option<String>,
    pub(super) limits: Vec<(wire::Limit, u64)>,
    /// The highest number that a NUMA node of the machine may have.
    pub(super) highest_node: u32,
    /// The seats of the broker's own user, and those of each other user.
    pub(super) seats: [u64; 2],
}

/// Converts a request for the registry. The file descriptors of a commit or growth are checked, and stored only if the
/// request is well-formed. The control memory of a pool, topic or queue is created.
///
/// Only members on the simulated driver may donate its memory, which is not GPU memory.
pub(super) fn call(
    call: wire::Call,
    fds: Vec<Donated>,
    runner: &mut Runner,
    simulated: bool,
    about: &About,
) -> Result<Call, Refusal> {
    if !fds.is_empty() && !matches!(call, wire::Call::Commit(_) | wire::Call::Grow(_)) {
        return Err(Refusal::invalid("this request carries no file descriptors"));
    }
    Ok(match call {
        wire::Call::Ping => Call::Ping,
        wire::Call::Commit(commit) => {
            check_place(commit.place, simulated, about.highest_node)?;
            Call::Commit(self::commit(commit, fds, runner, simulated)?)
        }
        wire::Call::Open(open) => Call::Open(event::Open {
            name: open.name,
            version: version(open.version)?,
            access: open.access,
            wait: open.wait,
        }),
        wire::Call::OpenOrBuild { name } => Call::OpenOrBuild { name },
        wire::Call::AbandonBuild { claim } => Call::AbandonBuild { claim },
        wire::Call::Cancel { ticket } => Call::Cancel { ticket },
        wire::Call::GiveUp { request } => Call::GiveUp { request },
        wire::Call::Release { lease } => Call::Release { lease },
        wire::Call::LeaveName { lease } => Call::LeaveName { lease },
        wire::Call::WithdrawNames => Call::WithdrawNames,
        wire::Call::AwaitWithdrawal { lease } => Call::AwaitWithdrawal { lease },
        wire::Call::Grow(grow) => Call::Grow(self::grow(grow, fds, &mut runner.store, simulated)?),
        wire::Call::Refresh { lease, growths, chunks } => Call::Refresh { lease, growths, chunks },
        wire::Call::AwaitGrowth { lease, growths } => Call::AwaitGrowth { lease, growths },
        wire::Call::Remove { deadline: Some(wire::Deadline { after, .. }), .. } if after > MAX_DEADLINE => {
            return Err(Refusal::invalid(format!("a deadline is at most {MAX_DEADLINE} ms away, not {after} ms")));
        }
        wire::Call::Remove { name, deadline } => Call::Remove { name, deadline },
        wire::Call::Inspect { name, version } => Call::Inspect { name, version: self::version(version)? },
        // The point to continue from may be any text; it need not be a name.
        wire::Call::List { after } => Call::List { after },
        wire::Call::Members { after } => Call::Members { after },
        wire::Call::Watch { pattern, after } => Call::Watch(watch::watch(pattern, after, about.instance)?),
        wire::Call::UsesGpu { mps } => Call::UsesGpu { mps: mps.map(|pipes| presentable(&pipes).into()) },
        wire::Call::ContextLost { .. } => Call::ContextLost,
        wire::Call::CheckBytes { place, bytes } => {
            check_place(place, simulated, about.highest_node)?;
            Call::CheckBytes { place, bytes }
        }
        wire::Call::Evict { whom, kill } => Call::Evict { whom, kill },
        wire::Call::FreeUnproven { pid } => Call::FreeUnproven { pid },
        wire::Call::OpenTimeline { name, writer, shared } => {
            Call::OpenTimeline(event::OpenTimeline { name, writer, shared, slab: None })
        }
        wire::Call::FollowTimeline { lease } => Call::FollowTimeline { lease },
        wire::Call::AbandonTimeline { name } => Call::AbandonTimeline { name },
        wire::Call::OpenSemaphore { maximum: 0, .. } => {
            return Err(Refusal::invalid("a semaphore has at least one permit"));
        }
        wire::Call::OpenSemaphore { maximum, .. } if maximum > MAX_PERMITS => {
            return Err(Refusal::invalid(format!("a semaphore has at most {MAX_PERMITS} permits, not {maximum}")));
        }
        wire::Call::OpenSemaphore { name, maximum, shared } => {
            Call::OpenSemaphore(event::OpenSemaphore { name, maximum, shared, memory: None })
        }
        wire::Call::Attach { queue, segment } => Call::Attach { queue, segment },
        wire::Call::DetachSegment { queue, attachment } => {
            Call::DetachSegment(event::DetachSegment { queue, attachment, in_use: None })
        }
        wire::Call::OpenAttached { queue, attachment } => Call::OpenAttached { queue, attachment },
        wire::Call::Objects { after } => Call::Objects { after },
        wire::Call::InspectObject { kind, name } => Call::InspectObject { kind, name },
        wire::Call::Status => Call::Status,
        wire::Call::Stop { force } => Call::Stop { force },
        wire::Call::Bye => Call::Leave,
        _ => return Err(Refusal::invalid("this broker does not know the request")),
    })
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

fn commit(
    commit: wire::Commit,
    fds: Vec<Donated>,
    runner: &mut Runner,
    simulated: bool,
) -> Result<event::Commit, Refusal> {
    if let Some(control) = &commit.control {
        check_control(control, &commit)?;
    }
    let name = commit.name;
    let kind = commit.kind;
    match (kind, commit.place) {
        (Kind::Host, Place::Host)
        | (Kind::Vmm | Kind::Legacy | Kind::Live, Place::Gpu(_))
        | (Kind::Pinned, Place::Pinned(_)) => {}
        (Kind::Host, _) => return Err(Refusal::invalid("memory of kind host is in main memory")),
        (Kind::Pinned, _) => return Err(Refusal::invalid("memory of kind pinned is on a NUMA node")),
        _ => return Err(Refusal::invalid("memory of this kind is on a GPU")),
    }
    let ends_with_publisher = match commit.lifetime {
        Lifetime::Owned => true,
        Lifetime::Shared => commit.control.is_none(),
        Lifetime::Kept => false,
    };
    if kind == Kind::Legacy && (!ends_with_publisher || commit.reserved > 0) {
        return Err(Refusal::invalid("legacy memory ends with its publisher and cannot grow"));
    }
    if kind == Kind::Live && commit.reserved > 0 {
        return Err(Refusal::invalid("memory of an allocator cannot grow"));
    }
    let is_owned_segment = commit.lifetime == Lifetime::Owned && commit.control.is_none() && kind != Kind::Legacy;
    if commit.owner.is_some() && !is_owned_segment {
        return Err(Refusal::invalid(
            "only the name of an owned segment can end with another member, and not legacy memory's",
        ));
    }
    if !commit.mutable && commit.reserved > 0 {
        return Err(Refusal::invalid("frozen memory cannot grow"));
    }
    if commit.shared && commit.mutable && commit.control.is_none() {
        return Err(Refusal::invalid("a mutable segment cannot be shared: its readers could write it"));
    }
    let handles = if kind == Kind::Legacy { commit.chunks.len() } else { 0 };
    if commit.handles.len() != handles {
        return Err(Refusal::invalid(format!("{handles} handles are needed, {} arrived", commit.handles.len())));
    }
    let expected = Expected { kind, mutable: commit.mutable, simulated };
    let (chunks, table) = runner.store.take(commit.chunks, commit.table, fds, expected)?;
    let mut memory = Memory {
        kind,
        place: commit.place,
        chunks,
        handles: commit.handles,
        table,
        tensors: commit.tensors,
        mutable: commit.mutable,
        reserved: commit.reserved,
        lifetime: commit.lifetime,
        control: None,
    };
    if let Some(shape) = commit.control {
        match runner.provide_blocks(shape) {
            Ok(control) => memory.control = Some(control),
            Err(refusal) => {
                runner.close(&memory.fds());
                return Err(refusal);
            }
        }
    }
    let wire::Commit { claim, owner, if_absent, shared, .. } = commit;
    Ok(event::Commit { name, memory: Arc::new(memory), if_absent, owner, claim, shared })
}

/// Refuses a pool, topic or queue with an invalid shape.
fn check_control(control: &wire::Control, commit: &wire::Commit) -> Result<(), Refusal> {
    if !commit.mutable || commit.reserved > 0 {
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

fn grow(grow: wire::Grow, fds: Vec<Donated>, store: &mut FdStore, simulated: bool) -> Result<event::Growth, Refusal> {
    let wire::Grow { lease, growths, kind, chunks, table, tensors } = grow;
    let expected = Expected { kind, mutable: true, simulated };
    let (chunks, table) = store.take(chunks, table, fds, expected)?;
    Ok(event::Growth { lease, growths, kind, chunks, table, tensors })
}

fn version(version: Option<u64>) -> Result<Option<u64>, Refusal> {
    if version == Some(0) { Err(Refusal::invalid("versions count from 1")) } else { Ok(version) }
}

/// Converts the result of a request for the wire.
pub(super) fn outcome(outcome: Outcome, sources: Sources<'_>) -> Result<Answer, Refusal> {
    outcome.map(|granted| answer(granted, sources))
}

/// What answers are made of, besides the result of the registry.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    pub(super) about: &'a About,
    /// The values of timelines and semaphores, and the waits of members.
    pub(super) control: &'a Control,
    /// The processes of members, and the results of killing evicted ones.
    pub(super) members: &'a Membership,
    /// The timelines that members wait for.
    pub(super) registry: &'a Registry,
}

fn answer(granted: registry::Answer, Sources { about, control, members, registry }: Sources<'_>) -> Answer {
    match granted {
        registry::Answer::Done => Answer::Done,
        registry::Answer::Pending => Answer::Pending,
        registry::Answer::Committed { version, lease } => Answer::Committed { version, lease },
        registry::Answer::Opened(opened) => Answer::Opened(self::opened(&opened)),
        registry::Answer::Build { claim } => Answer::Build { claim },
        registry::Answer::Grown { growths, chunks, memory } => Answer::Grown(wire::Grown {
            growths,
            chunks: self::chunks(&memory).split_off(chunks),
            table: table(&memory.table),
        }),
        registry::Answer::Withdrawn { notice } => Answer::Withdrawn { notice },
        registry::Answer::Removed { version, bytes_kept, holders, queues, notice } => Answer::Removed {
            version,
            bytes_kept,
            holders: holders.iter().map(holder).collect(),
            queues: queues.iter().map(holding_queue).collect(),
            notice,
        },
        registry::Answer::Info(info) => Answer::Info(Box::new(self::info(&info, control))),
        registry::Answer::Names { names, more } => {
            Answer::Names { names: names.iter().map(|row| name_row(row, control)).collect(), more }
        }
        registry::Answer::Members { members, more } => {
            Answer::Members { members: member::rows(&members, control, registry), more }
        }
        registry::Answer::Happened(happened) => Answer::Happened(watch::happened(&happened, about.instance)),
        registry::Answer::Evicted { members: evicted, killed } => {
            let kill = |departed: &Departed| if killed { members.killed(departed.member) } else { Kill::NotAsked };
            Answer::Evicted(evicted.iter().map(|departed| member::evicted(departed, kill(departed))).collect())
        }
        registry::Answer::Freed { members, more } => {
            Answer::Freed { members: members.iter().map(member::freed).collect(), more }
        }
        registry::Answer::Timeline(opened) => Answer::Timeline(object::opened(opened)),
        registry::Answer::Semaphore { lease, maximum } => Answer::Semaphore { lease, maximum },
        registry::Answer::Attached { attachment } => Answer::Attached { attachment },
        registry::Answer::Objects { objects, more } => {
            Answer::Objects { objects: objects.iter().map(|row| object::row(row, control)).collect(), more }
        }
        registry::Answer::Object(detail) => {
            let (row, holders) = &*detail;
            Answer::Object(Box::new(object::detail(row, holders, control)))
        }
        registry::Answer::Status(counts) => Answer::Status(Box::new(status(&counts, about))),
    }
}

fn opened(opened: &Opened) -> wire::Opened {
    let memory = &opened.memory;
    wire::Opened {
        lease: opened.lease,
        name: opened.name.clone(),
        version: opened.version,
        kind: memory.kind,
        place: memory.place,
        chunks: chunks(memory),
        handles: memory.handles.clone(),
        table: table(&memory.table),
        mutable: memory.mutable,
        reserved: memory.reserved,
        growths: opened.growths,
        lifetime: memory.lifetime,
        control: memory.control.map(|control| control.shape),
        uid: opened.uid,
        shared: opened.shared,
    }
}

fn info(info: &Info, control: &Control) -> wire::SegmentInfo {
    let slots = info.memory.control.and_then(|words| control.slot_table(words.slot_table()));
    let blocks = slots.map(SlotTable::holders).unwrap_or_default();
    let tasks = slots.map(SlotTable::workers).unwrap_or_default();
    let waiters = slots.map(SlotTable::waiters).unwrap_or_default();
    let holder = |holder: &Holder| wire::HolderInfo {
        blocks: blocks.get(&holder.row).copied().unwrap_or(0),
        tasks: tasks.get(&holder.row).copied().unwrap_or(0),
        waiting: waiters.get(&holder.row).copied().unwrap_or(0),
        ..self::holder(holder)
    };
    wire::SegmentInfo {
        name: info.name.to_string(),
        version: version_row(&info.version),
        chunks: chunks(&info.memory),
        table: table(&info.memory.table),
        is_latest: info.is_latest,
        versions: info.versions.iter().map(version_row).collect(),
        holders: info.holders.iter().map(holder).collect(),
        queues: info.queues.iter().map(holding_queue).collect(),
        builder: info.builder,
        control: slots.and_then(|slots| control::info(slots, info, control)),
    }
}

fn status(counts: &Counts, about: &About) -> wire::StatusInfo {
    wire::StatusInfo {
        pid: about.pid,
        supervisor: about.supervisor,
        uid: about.uid,
        restarts: about.restarts,
        version: about.version.clone(),
        instance: about.instance,
        started_at: about.started_at,
        log: about.log.clone(),
        simulated: counts.simulated,
        members: counts.members,
        names: counts.names,
        versions: counts.versions,
        timelines: counts.timelines,
        semaphores: counts.semaphores,
        leases: counts.leases,
        unproven: counts.unproven,
        unproven_bytes: counts.unproven_bytes,
        deaths: counts.deaths,
        unproven_deaths: counts.unproven_deaths,
        fds: counts.fds,
        bytes: counts.bytes.clone(),
        largest: counts.largest.iter().map(|(name, at, bytes)| (name.to_string(), *at, *bytes)).collect(),
        limits: about.limits.clone(),
        users: counts.users.clone(),
        seats: about.seats,
    }
}

fn name_row(row: &NameRow, control: &Control) -> wire::NameInfo {
    let words = row.latest.as_ref().and_then(|latest| latest.control);
    let slots = words.and_then(|words| control.slot_table(words.slot_table()));
    wire::NameInfo {
        name: row.name.to_string(),
        latest: row.latest.as_ref().map(version_row),
        usage: slots.and_then(control::usage),
        older: row.older,
        older_bytes: row.older_bytes,
        notice: row.notice,
        lost: row.lost,
    }
}

fn version_row(row: &VersionRow) -> wire::VersionInfo {
    wire::VersionInfo {
        version: row.version,
        kind: row.kind,
        place: row.place,
        bytes: row.bytes,
        tensors: row.tensors,
        mutable: row.mutable,
        reserved: row.reserved,
        growths: row.growths,
        lifetime: row.lifetime,
        control: row.control.map(|control| control.shape),
        committer: row.committer,
        owner: row.owner,
        uid: row.uid,
        shared: row.shared,
        leases: row.leases,
        notice: row.notice,
        lost: row.lost,
        committed_at: row.committed_at,
    }
}

fn holder(holder: &Holder) -> wire::HolderInfo {
    wire::HolderInfo {
        pid: holder.pid,
        command: holder.command.to_string(),
        leases: holder.leases,
        blocks: 0,
        tasks: 0,
        waiting: 0,
        unproven: holder.unproven,
    }
}

fn holding_queue(queue: &HoldingQueue) -> wire::QueueHolder {
    wire::QueueHolder { name: queue.name.to_string(), version: queue.version, attachment: queue.attachment }
}

fn chunks(memory: &Memory) -> wire::ChunkBytes {
    memory.chunks.iter().map(|chunk| chunk.bytes).collect()
}

fn table(table: &Table) -> wire::Table {
    match table {
        Table::Inline(bytes) => wire::Table::Inline(bytes.to_vec()),
        Table::Fd { bytes, .. } => wire::Table::Fd { bytes: *bytes },
    }
}

/// The highest node of the simulated driver, on any machine.
const SIMULATED_NODE: u32 = 1;
