//! Members in answers.

use std::collections::BTreeMap;

use partywall_shm::members;
use partywall_wire::{self as wire, MemberState};

use crate::{
    registry::{
        FdId, Registry,
        effect::{MemberAt, RowOwner},
        types::{LeaseId, MemberId},
    },
    server::control::Control,
};

/// Milliseconds after which a heartbeat is late. One is due every 250 ms.
const LATE: u64 = 2000;

/// Maximum number of slots that one listing reads, which takes a few milliseconds.
const COUNTED: u32 = 1 << 20;

/// Adds what is in control memory to a listing of members.
pub(super) fn read(infos: &mut [wire::MemberInfo], at: Vec<MemberAt>, control: &Control, registry: &Registry) {
    let now = members::now();
    let mut slots = SlotCounts { control, left: COUNTED, counted: BTreeMap::new() };
    infos.iter_mut().zip(at).for_each(|(info, at)| read_one(info, at, now, &mut slots, registry));
}

fn read_one(info: &mut wire::MemberInfo, at: MemberAt, now: u64, slots: &mut SlotCounts<'_>, registry: &Registry) {
    let Some(row) = at.row else { return };
    let uid = info.uid;
    let is_connected = matches!(info.state, MemberState::Alive | MemberState::LostContext | MemberState::Evicted);
    if is_connected {
        info.quiet = slots.control.heartbeat(uid, row).map(|beat| now.saturating_sub(beat));
        info.state = state_by(info.state, info.quiet);
        info.waits.extend(slots.control.wait(uid, row).and_then(|wait| {
            let (name, by) = registry.timeline_of(MemberId(info.member), LeaseId(wait.lease))?;
            Some(wire::WaitInfo {
                on: wire::Awaited::Timeline,
                name: name.to_string(),
                target: Some(wait.value),
                by,
                ms: Some(now.saturating_sub(wait.since)),
            })
        }));
    }
    info.permits = slots.of(row, &at.semaphores, |counts| &counts.held);
    info.blocks = slots.of(row, &at.pools, |counts| &counts.held);
    info.tasks = slots.of(row, &at.pools, |counts| &counts.tasks);
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
struct SlotCounts<'a> {
    control: &'a Control,
    /// Slots that may still be read.
    left: u32,
    counted: BTreeMap<FdId, Option<RowCounts>>,
}

/// What each row has in one table.
struct RowCounts {
    /// Its permits or blocks.
    held: BTreeMap<u16, u32>,
    /// The tasks that it works on.
    tasks: BTreeMap<u16, u32>,
}

impl SlotCounts<'_> {
    fn of(&mut self, row: u16, tables: &[FdId], what: fn(&RowCounts) -> &BTreeMap<u16, u32>) -> Option<u32> {
        tables.iter().try_fold(0_u32, |sum, table| {
            let counted = self.counted.entry(*table).or_insert_with(|| {
                self.left = self.left.checked_sub(self.control.slots(*table))?;
                Some(RowCounts { held: self.control.holders(*table), tasks: self.control.workers(*table) })
            });
            Some(sum.saturating_add(what(counted.as_ref()?).get(&row).copied().unwrap_or(0)))
        })
    }
}
