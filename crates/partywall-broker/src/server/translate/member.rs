//! Members in answers.

use std::collections::BTreeMap;

use partywall_shm::members;
use partywall_wire::{self as wire, MemberState};

use crate::{
    registry::{
        FdId, Registry,
        effect::{Departed, MemberRow, RowOwner},
        types::LeaseId,
    },
    server::control::Control,
};

/// Milliseconds after which a heartbeat is late. One is due every 250 ms.
const LATE: u64 = 2000;

/// Maximum number of slots that one listing reads, which takes a few milliseconds.
const COUNTED: u32 = 1 << 20;

pub(super) fn rows(rows: &[MemberRow], control: &Control, registry: &Registry) -> Vec<wire::MemberInfo> {
    let now = members::now();
    let mut slots = Slots { control, left: COUNTED, counted: BTreeMap::new() };
    rows.iter().map(|row| self::row(row, now, &mut slots, registry)).collect()
}

fn row(row: &MemberRow, now: u64, slots: &mut Slots<'_>, registry: &Registry) -> wire::MemberInfo {
    let is_connected = matches!(row.state, MemberState::Alive | MemberState::LostContext | MemberState::Evicted);
    let number = row.row.filter(|_| is_connected);
    let quiet = number.and_then(|number| slots.control.heartbeat(row.uid, number)).map(|beat| now.saturating_sub(beat));
    let names = row.waits.iter().map(|wait| wire::WaitInfo {
        on: wait.on,
        name: wait.name.to_string(),
        target: wait.version,
        by: wait.by,
        ms: None,
    });
    let timeline = number.and_then(|number| slots.control.wait(row.uid, number)).and_then(|wait| {
        let (name, by) = registry.timeline_of(row.member, LeaseId(wait.lease))?;
        Some(wire::WaitInfo {
            on: wire::Awaited::Timeline,
            name: name.to_string(),
            target: Some(wait.value),
            by,
            ms: Some(now.saturating_sub(wait.since)),
        })
    });
    wire::MemberInfo {
        member: row.member.0,
        pid: row.pid,
        uid: row.uid,
        command: row.command.to_string(),
        state: state_by(row.state, quiet),
        doubt: row.doubt,
        mps: row.mps.as_deref().map(str::to_owned),
        quiet,
        leases: row.leases,
        timelines: row.timelines,
        permits: slots.of(row, &row.semaphores, |counts| &counts.held),
        blocks: slots.of(row, &row.pools, |counts| &counts.held),
        tasks: slots.of(row, &row.pools, |counts| &counts.tasks),
        bytes: row.bytes,
        since: row.since,
        waits: names.chain(timeline).collect(),
        simulated: row.simulated,
    }
}

/// Returns the state of a member, taking its heartbeat into account.
pub(super) fn state_in(row: u16, owner: RowOwner, control: &Control) -> MemberState {
    let RowOwner { uid, state, .. } = owner;
    state_by(state, control.heartbeat(uid, row).map(|beat| members::now().saturating_sub(beat)))
}

fn state_by(state: MemberState, quiet: Option<u64>) -> MemberState {
    let is_hung = state == MemberState::Alive && quiet.is_some_and(|quiet| quiet > LATE);
    if is_hung { MemberState::Hung } else { state }
}

/// Counts the permits, blocks and tasks of members. Each semaphore, pool and queue is read once for all members. The
/// number of slots is bounded, because members choose how many exist.
struct Slots<'a> {
    control: &'a Control,
    /// Slots that may still be read.
    left: u32,
    counted: BTreeMap<FdId, Option<Counts>>,
}

/// What each row has in one table.
struct Counts {
    /// Its permits or blocks.
    held: BTreeMap<u16, u32>,
    /// The tasks that it works on.
    tasks: BTreeMap<u16, u32>,
}

impl Slots<'_> {
    fn of(&mut self, row: &MemberRow, tables: &[FdId], what: fn(&Counts) -> &BTreeMap<u16, u32>) -> Option<u32> {
        let Some(holder) = row.row else { return Some(0) };
        tables.iter().try_fold(0_u32, |sum, table| {
            let counted = self.counted.entry(*table).or_insert_with(|| {
                self.left = self.left.checked_sub(self.control.slots(*table))?;
                Some(Counts { held: self.control.holders(*table), tasks: self.control.workers(*table) })
            });
            Some(sum.saturating_add(what(counted.as_ref()?).get(&holder).copied().unwrap_or(0)))
        })
    }
}

pub(super) fn evicted(departed: &Departed, kill: wire::Kill) -> wire::Evicted {
    let Departed { member, pid, command, leases, bytes } = departed;
    wire::Evicted { member: member.0, pid: *pid, command: command.to_string(), leases: *leases, bytes: *bytes, kill }
}

pub(super) fn freed(departed: &Departed) -> wire::Freed {
    let Departed { member, pid, command, leases, bytes } = departed;
    wire::Freed { member: member.0, pid: *pid, command: command.to_string(), leases: *leases, bytes: *bytes }
}
