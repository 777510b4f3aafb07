//! What is said of members.

use std::collections::BTreeMap;

use partywall_shm::members;
use partywall_wire as wire;

use crate::{
    registry::{
        FdId, MemberId,
        effect::{Doubt, MemberRow, MemberState, Parted},
        types::Whom,
    },
    rim::control::Control,
};

/// Milliseconds after which a heartbeat, which comes every 250, is late.
const LATE: u64 = 2000;

/// Slots of semaphores that one listing looks at: a few milliseconds.
const COUNTED: u32 = 1 << 20;

pub(super) fn rows(rows: &[MemberRow], control: &Control) -> Vec<wire::MemberInfo> {
    let (now, mut permits) = (members::now(), Permits { control, slots: COUNTED, counted: BTreeMap::new() });
    rows.iter().map(|row| self::row(row, now, &mut permits)).collect()
}

fn row(row: &MemberRow, now: u64, permits: &mut Permits<'_>) -> wire::MemberInfo {
    let quiet = row.row.and_then(|row| permits.control.heartbeat(row)).map(|beat| now.saturating_sub(beat));
    let quiet =
        quiet.filter(|_| matches!(row.state, MemberState::Alive | MemberState::LostContext | MemberState::Evicted));
    let is_hung = row.state == MemberState::Alive && quiet.is_some_and(|quiet| quiet > LATE);
    wire::MemberInfo {
        member: row.member.0,
        pid: row.pid,
        uid: row.uid,
        command: row.command.to_string(),
        state: if is_hung { wire::MemberState::Hung } else { state(row.state) },
        doubt: row.doubt.map(|doubt| match doubt {
            Doubt::Mps => wire::Doubt::Mps,
            Doubt::NoPidfd => wire::Doubt::NoPidfd,
        }),
        quiet,
        leases: row.leases,
        timelines: row.timelines,
        permits: permits.of(row),
        bytes: row.bytes,
        since: row.since,
        simulated: row.simulated,
    }
}

/// Counts the permits of members. Each semaphore is looked through once for all of them, and not more than a bounded
/// number of slots: a member chooses how many there are.
struct Permits<'a> {
    control: &'a Control,
    /// Slots that may still be looked at.
    slots: u32,
    counted: BTreeMap<FdId, Option<BTreeMap<u16, u32>>>,
}

impl Permits<'_> {
    fn of(&mut self, row: &MemberRow) -> Option<u32> {
        let Some(holder) = row.row else { return Some(0) };
        row.semaphores.iter().try_fold(0_u32, |sum, semaphore| {
            let counted = self.counted.entry(*semaphore).or_insert_with(|| {
                self.slots = self.slots.checked_sub(self.control.slots(*semaphore))?;
                Some(self.control.permits_by_row(*semaphore))
            });
            Some(sum.saturating_add(counted.as_ref()?.get(&holder).copied().unwrap_or(0)))
        })
    }
}

pub(super) fn state(state: MemberState) -> wire::MemberState {
    match state {
        MemberState::Alive => wire::MemberState::Alive,
        MemberState::LostContext => wire::MemberState::LostContext,
        MemberState::Suspect => wire::MemberState::Suspect,
        MemberState::Evicted => wire::MemberState::Evicted,
        MemberState::HeldByChild => wire::MemberState::HeldByChild,
        MemberState::Unproven => wire::MemberState::Unproven,
        MemberState::Dead => wire::MemberState::Dead,
    }
}

/// Before a signal is sent, if one is.
pub(super) fn evicted(parted: &Parted) -> wire::Evicted {
    let Parted { member, pid, command, leases, bytes } = parted;
    wire::Evicted {
        member: member.0,
        pid: *pid,
        command: command.to_string(),
        leases: *leases,
        bytes: *bytes,
        kill: wire::Kill::NotAsked,
    }
}

pub(super) fn freed(parted: &Parted) -> wire::Freed {
    let Parted { member, pid, command, leases, bytes } = parted;
    wire::Freed { member: member.0, pid: *pid, command: command.to_string(), leases: *leases, bytes: *bytes }
}

pub(super) fn whom(whom: wire::Whom) -> Whom {
    match whom {
        wire::Whom::Pid(pid) => Whom::Pid(pid),
        wire::Whom::Member(member) => Whom::Member(MemberId(member)),
    }
}

pub(super) fn whom_of(whom: Whom) -> wire::Whom {
    match whom {
        Whom::Pid(pid) => wire::Whom::Pid(pid),
        Whom::Member(member) => wire::Whom::Member(member.0),
    }
}
