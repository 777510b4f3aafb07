//! Conversion of the registry's answers for the wire.

use partywall_wire::{self as wire, Answer, Kill, Refusal};

mod control;
mod member;
mod object;
#[cfg(test)]
mod tests;
mod watch;

use crate::{
    registry::{
        self, Outcome, Registry,
        effect::{Counts, Departed, Holder, HoldingQueue, Info, NameRow, Opened, VersionRow},
        types::{Memory, Table},
    },
    server::{
        control::{Control, SlotTable},
        membership::Membership,
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
