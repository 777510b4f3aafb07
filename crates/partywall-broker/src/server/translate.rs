//! Completes the registry's answers: with numbers in control memory, and with what only the server knows.

use std::collections::BTreeMap;

use partywall_wire::{self as wire, Answer, Freed, Kill, MemberId, Refusal};

mod control;
mod member;
mod object;
#[cfg(test)]
mod tests;

use crate::{
    registry::{
        self, Outcome, Registry,
        effect::{Info, NameRow, Opened, Row},
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
        registry::Answer::Opened(opened) => Answer::Opened(self::opened(opened)),
        registry::Answer::Build { claim } => Answer::Build { claim },
        registry::Answer::Grown { growths, chunks, memory } => Answer::Grown(wire::Grown {
            growths,
            chunks: memory.chunk_bytes().split_off(chunks),
            table: memory.table.sent(),
        }),
        registry::Answer::Withdrawn { notice } => Answer::Withdrawn { notice },
        registry::Answer::Removed { version, bytes_kept, holders, queues, notice } => {
            Answer::Removed { version, bytes_kept, holders, queues, notice }
        }
        registry::Answer::Info(info) => Answer::Info(Box::new(self::info(*info, control))),
        registry::Answer::Names { names, more } => {
            Answer::Names { names: names.into_iter().map(|row| name(row, control)).collect(), more }
        }
        registry::Answer::Members { members, more } => {
            Answer::Members { members: member::infos(members, control, registry), more }
        }
        registry::Answer::Happened(happened) => Answer::Happened(happened),
        registry::Answer::Evicted { members: evicted, killed } => {
            let kill = |member| if killed { members.killed(MemberId(member)) } else { Kill::NotAsked };
            let evicted = evicted.into_iter().map(|Freed { member, pid, command, leases, bytes }| wire::Evicted {
                member,
                pid,
                command,
                leases,
                bytes,
                kill: kill(member),
            });
            Answer::Evicted(evicted.collect())
        }
        registry::Answer::Freed { members, more } => Answer::Freed { members, more },
        registry::Answer::Timeline(opened) => Answer::Timeline(opened),
        registry::Answer::Semaphore { lease, maximum } => Answer::Semaphore { lease, maximum },
        registry::Answer::Attached { attachment } => Answer::Attached { attachment },
        registry::Answer::Objects { objects, more } => {
            Answer::Objects { objects: objects.into_iter().map(|row| object::info(row, control)).collect(), more }
        }
        registry::Answer::Object(detail) => {
            let (row, holders) = *detail;
            Answer::Object(Box::new(object::detail(row, holders, control)))
        }
        registry::Answer::Status(counts) => Answer::Status(Box::new(status(*counts, about))),
    }
}

fn opened(opened: Opened) -> wire::Opened {
    let Opened { lease, name, version, growths, memory, uid, shared } = opened;
    wire::Opened {
        lease,
        name,
        version,
        kind: memory.kind,
        place: memory.place,
        chunks: memory.chunk_bytes(),
        handles: memory.handles.clone(),
        table: memory.table.sent(),
        mutable: memory.mutable,
        reserved: memory.reserved,
        growths,
        lifetime: memory.lifetime,
        control: memory.control.map(|control| control.shape),
        uid,
        shared,
    }
}

fn info(mut found: Info, control: &Control) -> wire::SegmentInfo {
    let slots = found.slots.and_then(|slots| control.slot_table(slots));
    let blocks = slots.map(SlotTable::holders).unwrap_or_default();
    let tasks = slots.map(SlotTable::workers).unwrap_or_default();
    let waiters = slots.map(SlotTable::waiters).unwrap_or_default();
    let of = |counts: &BTreeMap<u16, u32>, row| counts.get(&row).copied().unwrap_or(0);
    let holders = std::mem::take(&mut found.holders).into_iter().map(|Row { info, at: row }| wire::HolderInfo {
        blocks: of(&blocks, row),
        tasks: of(&tasks, row),
        waiting: of(&waiters, row),
        ..info
    });
    found.info.holders = holders.collect();
    found.info.control = slots.and_then(|slots| control::info(slots, found.attached, &found.rows, control));
    found.info
}

fn name(Row { info, at }: NameRow, control: &Control) -> wire::NameInfo {
    let slots = at.and_then(|slots| control.slot_table(slots));
    wire::NameInfo { usage: slots.and_then(control::usage), ..info }
}

/// Adds what the server knows of itself.
fn status(counts: wire::StatusInfo, about: &About) -> wire::StatusInfo {
    wire::StatusInfo {
        pid: about.pid,
        supervisor: about.supervisor,
        uid: about.uid,
        restarts: about.restarts,
        version: about.version.clone(),
        instance: about.instance,
        started_at: about.started_at,
        log: about.log.clone(),
        limits: about.limits.clone(),
        seats: about.seats,
        ..counts
    }
}
