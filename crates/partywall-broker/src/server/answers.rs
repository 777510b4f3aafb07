//! Completes the registry's answers: with numbers in control memory, and with what only the server knows.
//!
//! Any member may have written the numbers. They are shown and nothing depends on them.

use std::collections::BTreeMap;

use partywall_wire::{self as wire, Answer, Kill, MemberId};

mod control;
mod member;
mod object;
#[cfg(test)]
mod tests;

use crate::{
    registry::{Registry, Unread},
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

/// What answers are completed from.
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

/// Adds to an answer what the registry does not know.
pub(super) fn complete(answer: &mut Answer, unread: Unread, sources: Sources<'_>) {
    let Sources { about, control, members, registry } = sources;
    match (answer, unread) {
        (Answer::Info(info), Unread::Version { slots, holders, rows, attached }) => {
            if let Some(slots) = control.slot_table(slots) {
                info.control = control::info(slots, attached, &rows, control);
                read_holders(&mut info.holders, &holders, slots);
            }
        }
        (Answer::Names { names, .. }, Unread::Names(slots)) => {
            for (name, slots) in names.iter_mut().zip(slots) {
                name.usage = slots.and_then(|slots| control.slot_table(slots)).and_then(control::usage);
            }
        }
        (Answer::Members { members, .. }, Unread::Members(at)) => member::read(members, at, control, registry),
        (Answer::Objects { objects, .. }, Unread::Objects(at)) => {
            objects.iter_mut().zip(at).for_each(|(info, at)| object::read(info, at, control));
        }
        (Answer::Object(detail), Unread::Object(at, rows)) => object::read_detail(detail, at, &rows, control),
        (Answer::Evicted(evicted), _) => {
            for evicted in evicted.iter_mut().filter(|evicted| evicted.kill != Kill::NotAsked) {
                evicted.kill = members.killed(MemberId(evicted.member));
            }
        }
        (Answer::Status(counts), _) => **counts = status(std::mem::take(counts), about),
        _ => {}
    }
}

fn read_holders(holders: &mut [wire::HolderInfo], rows: &[u16], slots: &SlotTable) {
    let (blocks, tasks, waiters) = (slots.holders(), slots.workers(), slots.waiters());
    let of = |counts: &BTreeMap<u16, u32>, row: &u16| counts.get(row).copied().unwrap_or(0);
    for (holder, row) in holders.iter_mut().zip(rows) {
        holder.blocks = of(&blocks, row);
        holder.tasks = of(&tasks, row);
        holder.waiting = of(&waiters, row);
    }
}

/// Adds what the server knows of itself.
fn status(counts: Box<wire::StatusInfo>, about: &About) -> wire::StatusInfo {
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
        ..*counts
    }
}
