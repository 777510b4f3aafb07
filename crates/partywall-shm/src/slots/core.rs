//! The protocol of slots: taking, waiting, handing over and freeing.
//!
//! Only the slot words determine which row has a slot, so no two rows have the same slot. The entries of the ring
//! determine which rows wait, and their positions the order. `head`, `tail` and `look` are hints: a wrong hint only
//! costs time.
//!
//! 1. A member that finds no waiter takes a free slot. Otherwise it begins to wait: it takes the entry at `tail`,
//!    advances `tail`, and serves. Every member that has freed a slot serves, too.
//! 2. A member that serves searches, behind a fence, for the first waiter and for a free slot. It hands the slot to the
//!    waiter (*handed*), notifies the waiter (*granted*), and repeats this until there is no such pair. The waiter
//!    takes the slot (*held*) and leaves the entry.
//! 3. Any member may serve. A member that finds a handed slot completes that step: it notifies the waiter, or takes the
//!    slot if the waiter has left.
//! 4. A sleeping waiter checks all entries again after [`MAX_SLEEP`], independently of the hints.
//! 5. A granted slot is not held before its waiter has taken it. If the waiter is stopped and does not take it for
//!    [`OVERDUE`], the next waiter gets the slot ([`Slots::revoke_overdue`]). The former waiter begins to wait again
//!    when it continues.
//!
//! If a process is killed or stopped between any two steps:
//! * its slot was freed, and no waiter served: a waiter serves within [`MAX_SLEEP`], or the next member that comes;
//! * a slot was handed, and its waiter not notified: rule 3;
//! * a waiter was granted a slot, and not woken: it wakes within [`MAX_SLEEP`];
//! * a waiter was granted a slot, and is stopped: rule 5;
//! * it had begun to wait, and `tail` was not advanced: the next waiter advances it;
//! * its slot was held, and its entry not left: the entry is skipped for as long as the process is stopped;
//! * a slot was offered, accepted or published: each of these is a single change, which is complete or has not begun;
//! * the slots that it held or offered stay its own until it is proved dead; then the broker takes them back
//!   ([`Slots::recover`]).
//!
//! Overtaking: a member that found no waiter just before one began to wait may still take the next free slot, once. A
//! later member sees the waiter and waits. Therefore at most as many members overtake a waiter as were taking slots at
//! that moment, unless it loses its turn by rule 5.

use std::time::{Duration, Instant};

use partywall_os::lock::IgnorePoison;

use super::{
    OVERDUE, Slots,
    word::{Slot, SlotState, SlotWord, WaiterEntry, WaiterPosition, WaiterState, WaiterWord},
};
use crate::{
    MAX_SLEEP,
    crash::point,
    members::Row,
    sync::{AtomicU32, AtomicU64, Ordering, Stale, fence, fence_behind_change},
};

/// What comes before the slots; see the module's documentation.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SlotsHeader {
    pub(super) tickets: AtomicU64,
    pub(super) look: AtomicU32,
    pub(super) zero_32: AtomicU32,
    pub(super) zero_64: [AtomicU64; 6],
    pub(super) head: Line,
    pub(super) tail: Line,
}

/// A word in its own cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(super) AtomicU64, pub(super) [AtomicU64; 7]);

/// A held slot. If it is not freed, it is lost until its holder dies.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct HeldSlot {
    slot: u32,
    word: SlotWord,
}

impl HeldSlot {
    /// Returns the slot's number.
    pub fn index(&self) -> u32 {
        self.slot
    }

    /// Returns the slot's generation: a number that is different each time any slot is taken, even in slots that are
    /// created later under the same name.
    pub fn generation(&self) -> u64 {
        self.word.ticket()
    }

    pub(crate) fn word(&self) -> SlotWord {
        self.word
    }
}

/// The outcome of an attempt to take a slot.
#[derive(Debug)]
pub enum Attempt<'a> {
    /// There was a free slot.
    Held(HeldSlot),
    /// No slot was free, and the caller waits for one.
    Waiting(Waiter<'a>),
    /// No slot was free, and the ring of waiters is full. Try again.
    Crowded,
}

/// What has become of a slot that was seen handed to a waiter.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
enum Handing {
    /// The waiter has been notified of it.
    Complete,
    /// The waiter has left, or has another slot: this one may be taken or freed.
    Void,
    /// The waiter's entry has just changed.
    Changed,
}

/// Operations of the broker.
impl Slots {
    /// Frees the slots that `dead` rows hold or offer, and their positions in the queue, and slots in an invalid state.
    /// Returns the number of slots.
    ///
    /// Published blocks belong to the row [`NOBODY`](crate::members::NOBODY). Without a topic no member may publish, so
    /// the caller counts that row as dead.
    ///
    /// Call this once the rows' processes are proved dead. It terminates for any bytes, and may be repeated.
    pub fn recover(&self, dead: impl Fn(Row) -> bool) -> u32 {
        self.recover_or_publish(dead, |_, _| false)
    }
}

/// Operations of members.
impl Slots {
    /// Returns the number of slots.
    pub fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Takes a slot for a row if one is free and no member waits.
    pub fn try_take(&self, row: Row) -> Option<HeldSlot> {
        if self.has_waiters() { None } else { self.take_for(row) }
    }

    /// Takes a slot for a row, or begins to wait for one.
    pub fn take(&self, row: Row) -> Attempt<'_> {
        if let Some(held) = self.try_take(row) {
            return Attempt::Held(held);
        }
        let Some((position, waiting)) = self.begin_to_wait(row) else { return Attempt::Crowded };
        self.serve();
        Attempt::Waiting(Waiter { slots: self, row, position, waiting, over: false })
    }

    /// Frees a slot.
    ///
    /// # Errors
    /// [`Stale`] if it is no longer held because the broker took it back or it was offered.
    pub fn free(&self, held: &HeldSlot) -> Result<(), Stale> {
        self.free_seen(held.slot, held.word)
    }

    /// Returns the word of slot `index`, if the slot exists.
    pub(crate) fn seen(&self, index: u32) -> Option<SlotWord> {
        self.slots.get(index as usize).map(Slot::load)
    }

    /// Frees a slot that was seen in use, and serves.
    pub(crate) fn free_seen(&self, index: u32, seen: SlotWord) -> Result<(), Stale> {
        if self.free_all([(index, seen)]) == 1 { Ok(()) } else { Err(Stale) }
    }

    /// Frees several slots as [`free_seen`](Self::free_seen) does. Returns the number of freed slots.
    pub(crate) fn free_all(&self, all: impl IntoIterator<Item = (u32, SlotWord)>) -> u32 {
        let mut freed = 0;
        for (index, seen) in all {
            if self.slots.get(index as usize).is_some_and(|slot| slot.free(seen).is_ok()) {
                freed += 1;
                self.set_search_start(index);
                point("slots: slot freed, nobody served");
            }
        }
        if freed != 0 {
            self.serve();
        }
        freed
    }

    /// Offers a slot to any member that knows its index and generation.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn offer(&self, held: &HeldSlot) -> Result<(), Stale> {
        self.slots.get(held.slot as usize).ok_or(Stale)?.offer(held.word)?;
        point("slots: slot offered, holder not notified");
        Ok(())
    }

    /// Takes over a slot that is offered with this generation, and gives it a new one. Returns `None` if it is not
    /// offered.
    pub fn accept(&self, row: Row, index: u32, generation: u64) -> Option<HeldSlot> {
        let slot = self.slots.get(index as usize)?;
        let seen = slot.load();
        if !matches!(seen.state(), SlotState::Offered(_)) || seen.ticket() != generation {
            return None;
        }
        let word = slot.accept(seen, SlotWord::held(row, self.ticket())).ok()?;
        point("slots: slot accepted, holder not notified");
        Some(HeldSlot { slot: index, word })
    }

    /// Takes over a slot that was seen held, for another row, with a new generation.
    pub(crate) fn take_over(&self, row: Row, index: u32, seen: SlotWord) -> Result<HeldSlot, Stale> {
        let word = SlotWord::held(row, self.ticket());
        let word = self.slots.get(index as usize).ok_or(Stale)?.take_over(seen, word)?;
        point("slots: slot taken over, holder not notified");
        Ok(HeldSlot { slot: index, word })
    }

    /// Returns whether a slot is held, offered or published with this generation.
    pub fn is_current(&self, index: u32, generation: u64) -> bool {
        let in_use = |state| matches!(state, SlotState::Held(_) | SlotState::Offered(_));
        self.seen(index).is_some_and(|seen| in_use(seen.state()) && seen.ticket() == generation)
    }

    /// Publishes a slot that was seen held. Returns its new word.
    pub(crate) fn publish(&self, index: u32, seen: SlotWord) -> Result<SlotWord, Stale> {
        self.slots.get(index as usize).ok_or(Stale)?.publish(seen)
    }

    /// Returns whether a member waits for a slot, by the hints.
    pub(crate) fn has_waiters(&self) -> bool {
        self.first_waiting().is_some()
    }

    /// Hands free slots to the waiters in order, using the hints. The caller has just changed the word of a slot or of
    /// an entry.
    fn serve(&self) {
        fence_behind_change();
        self.serve_as(Self::first_waiting);
    }

    /// Returns whether the turn of a waiter has come, or was lost. The waiter has to [poll](Waiter::poll) then.
    pub fn has_come(&self, turn: WaiterTurn) -> bool {
        self.ring[turn.position.index].load() != turn.waiting
    }

    /// Hands free slots to the waiters in order, without the hints. A thread that polls for a [turn](WaiterTurn) calls
    /// this every [`MAX_SLEEP`], because the member that had to serve may have been killed or stopped.
    pub fn serve_all(&self) {
        fence(Ordering::SeqCst);
        self.serve_as(Self::oldest_waiting);
    }

    /// Recovers slots as [`recover`](Self::recover) does, but publishes the held slots for which `publish` returns
    /// true. Returns the number of the other slots.
    pub(crate) fn recover_or_publish(
        &self,
        dead: impl Fn(Row) -> bool,
        publish: impl Fn(usize, SlotWord) -> bool,
    ) -> u32 {
        // The entries are cleared first, so that no slot is handed to those rows any more.
        for entry in self.ring.iter() {
            for _ in 0..MOST_ATTEMPTS {
                let seen = entry.load();
                let lost = match seen.state(seen.lap()) {
                    WaiterState::Waiting(row) | WaiterState::Granted(row, _) => dead(row),
                    WaiterState::Invalid => true,
                    WaiterState::Occupied | WaiterState::Open | WaiterState::Done => false,
                };
                if !lost || entry.finish(seen).is_ok() {
                    break;
                }
            }
        }
        point("slots: entries of the dead left, slots not freed");
        let mut slots = 0;
        for (index, slot) in self.slots.iter().enumerate() {
            for _ in 0..MOST_ATTEMPTS {
                let seen = slot.load();
                let state = seen.state();
                let lost = match state {
                    SlotState::Held(row) | SlotState::Offered(row) | SlotState::Handed(row, _) => dead(row),
                    SlotState::Invalid => true,
                    SlotState::Free => false,
                };
                if !lost {
                    break;
                }
                if matches!(state, SlotState::Held(_)) && publish(index, seen) {
                    if slot.publish(seen).is_ok() {
                        break;
                    }
                } else if slot.free(seen).is_ok() {
                    slots += 1;
                    break;
                }
            }
        }
        point("slots: those of the dead freed, nobody served");
        self.serve_all();
        slots
    }

    /// Takes back a slot that was granted to a waiter and not taken for [`OVERDUE`], and gives it to the next waiter.
    /// Members that find no free slot call this from time to time.
    pub fn revoke_overdue(&self) {
        let mut granted = self.granted.lock().ignore_poison();
        match *granted {
            Some((since, (index, seen))) if self.slots[index].load() == seen => {
                if since.elapsed() >= OVERDUE {
                    self.revoke((index, seen));
                    *granted = None;
                }
            }
            _ => *granted = self.first_granted().map(|seen| (Instant::now(), seen)),
        }
    }

    /// Returns a slot that was granted to a waiter and not taken yet.
    pub(crate) fn first_granted(&self) -> Option<(usize, SlotWord)> {
        self.slots.iter().enumerate().find_map(|(index, slot)| {
            let seen = slot.load();
            let SlotState::Handed(row, tag) = seen.state() else { return None };
            let position = WaiterPosition::of_tag(tag, self.ring.len());
            let state = self.ring[position.index].load().state(position.lap);
            (state == WaiterState::Granted(row, index as u16)).then_some((index, seen))
        })
    }

    /// Gives a granted slot that was not taken to the next waiter.
    pub(crate) fn revoke(&self, (index, seen): (usize, SlotWord)) {
        if self.slots[index].free(seen).is_ok() {
            point("slots: slot revoked, nobody served");
            self.serve_all();
        }
    }

    /// Returns a position and its entry.
    fn at(&self, count: u64) -> (WaiterPosition, &WaiterEntry) {
        let position = WaiterPosition::of(count, self.ring.len());
        (position, &self.ring[position.index])
    }

    /// Returns the index at which the search for a free slot starts.
    fn search_start(&self) -> usize {
        // A model does not need this hint: the search is correct from any start.
        let start = if cfg!(loom) { 0 } else { self.header().look.load(Ordering::Relaxed) as usize };
        if start < self.slots.len() { start } else { 0 }
    }

    /// Returns a free slot that [`try_take`](Self::try_take) is likely to take next.
    pub fn next_free(&self) -> Option<u32> {
        let start = self.search_start();
        let slots = || self.slots.iter().enumerate();
        let mut all = slots().skip(start).chain(slots().take(start));
        all.find(|(_, slot)| slot.load().state() == SlotState::Free).map(|(index, _)| index as u32)
    }

    fn set_search_start(&self, slot: u32) {
        if !cfg!(loom) {
            self.header().look.store(slot, Ordering::Relaxed);
        }
    }

    fn ticket(&self) -> u64 {
        self.header().tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn take_for(&self, row: Row) -> Option<HeldSlot> {
        let word = SlotWord::held(row, self.ticket());
        let slot = self.take_as(word)?;
        point("slots: slot held, holder not notified");
        Some(HeldSlot { slot, word })
    }

    /// Changes the word of a slot without a holder to `taken`.
    fn take_as(&self, taken: SlotWord) -> Option<u32> {
        let start = self.search_start();
        let slots = || self.slots.iter().enumerate();
        for (index, slot) in slots().skip(start).chain(slots().take(start)) {
            for _ in 0..MOST_ATTEMPTS {
                let seen = slot.load();
                let usable = match seen.state() {
                    SlotState::Free => true,
                    SlotState::Held(_) | SlotState::Offered(_) | SlotState::Invalid => false,
                    SlotState::Handed(row, tag) => {
                        match self.complete(index, row, WaiterPosition::of_tag(tag, self.ring.len())) {
                            Handing::Complete => false,
                            Handing::Void => true,
                            Handing::Changed => continue,
                        }
                    }
                };
                if !usable {
                    break;
                }
                if slot.take(seen, taken).is_ok() {
                    self.set_search_start((index + 1) as u32);
                    return Some(index as u32);
                }
                // Another member took the slot, or freed it and relied on this member to hand it to a waiter, so the
                // loop checks again.
            }
        }
        None
    }

    /// Notifies the waiter at `position` that the slot was handed to it, unless another member has done so.
    fn complete(&self, slot: usize, row: Row, position: WaiterPosition) -> Handing {
        let entry = &self.ring[position.index];
        let seen = entry.load();
        match seen.state(position.lap) {
            WaiterState::Waiting(waiter) if waiter == row => {
                entry.grant(seen, slot as u16).map_or(Handing::Changed, |()| Handing::Complete)
            }
            WaiterState::Granted(waiter, granted) if (waiter, usize::from(granted)) == (row, slot) => Handing::Complete,
            _ => Handing::Void,
        }
    }

    /// Takes the next entry. Returns `None` if all are taken.
    fn begin_to_wait(&self, row: Row) -> Option<(WaiterPosition, WaiterWord)> {
        let mut tail = self.header().tail.0.load(Ordering::Acquire);
        for _ in 0..2 * self.ring.len() + MOST_ATTEMPTS {
            let (position, entry) = self.at(tail);
            let seen = entry.load();
            let waiting = WaiterWord::waiting(row, position.lap);
            let state = seen.state(position.lap);
            // Only the entry of a waiter that was granted a slot and is stopped before it leaves the entry is skipped.
            if state == WaiterState::Occupied && self.is_crowded(tail) {
                return None;
            }
            let begun = state == WaiterState::Open && entry.wait(seen, waiting).is_ok();
            if begun {
                point("slots: entry waiting, tail not advanced");
            }
            // This position is taken, by this member or another.
            let tail_now = self.advance(&self.header().tail, tail);
            if begun {
                return Some((position, waiting));
            }
            tail = tail_now;
        }
        None
    }

    /// Returns whether the waiters fill the ring.
    fn is_crowded(&self, tail: u64) -> bool {
        self.first_waiting();
        tail.wrapping_sub(self.header().head.0.load(Ordering::Acquire)) >= self.ring.len() as u64
    }

    /// Advances a hint past `count`, unless another member has. Returns its new value.
    fn advance(&self, hint: &Line, count: u64) -> u64 {
        let next = count.wrapping_add(1);
        hint.0.compare_exchange(count, next, Ordering::AcqRel, Ordering::Acquire).map_or_else(|now| now, |_| next)
    }

    /// Returns the first waiter according to the hints, which it advances.
    fn first_waiting(&self) -> Option<(WaiterPosition, WaiterWord)> {
        let tail = self.header().tail.0.load(Ordering::Acquire);
        let mut head = self.header().head.0.load(Ordering::Acquire);
        for _ in 0..self.ring.len() {
            if tail.wrapping_sub(head) as i64 <= 0 {
                return None;
            }
            let (position, entry) = self.at(head);
            let seen = entry.load();
            match seen.state(position.lap) {
                WaiterState::Waiting(_) => return Some((position, seen)),
                WaiterState::Open => return None,
                WaiterState::Occupied | WaiterState::Granted(..) | WaiterState::Done | WaiterState::Invalid => {
                    head = self.advance(&self.header().head, head);
                }
            }
        }
        None
    }

    /// Returns the waiter that has waited longest, according to the entries alone.
    fn oldest_waiting(&self) -> Option<(WaiterPosition, WaiterWord)> {
        let mut oldest: Option<(WaiterPosition, WaiterWord)> = None;
        for (index, entry) in self.ring.iter().enumerate() {
            let seen = entry.load();
            let waits = matches!(seen.state(seen.lap()), WaiterState::Waiting(_));
            // Within one lap, the first entry in the ring came first.
            if waits && oldest.is_none_or(|(_, oldest)| seen.is_before(oldest)) {
                oldest = Some((WaiterPosition { index, lap: seen.lap() }, seen));
            }
        }
        oldest
    }

    /// Serves, behind a fence that pairs with itself: before it a member has freed a slot or begun to wait, behind it the
    /// member searches for a waiter and a slot. If two members do so at the same time, one of them sees the other's
    /// change.
    fn serve_as(&self, first: impl Fn(&Self) -> Option<(WaiterPosition, WaiterWord)>) {
        // More rounds than possible waiters happen only if a member breaks the rules.
        for _ in 0..2 * self.ring.len() {
            let Some((position, waiting)) = first(self) else { return };
            let WaiterState::Waiting(row) = waiting.state(position.lap) else { return };
            let handed = SlotWord::handed(row, position.tag(self.ring.len()));
            let Some(slot) = self.take_as(handed) else { return };
            point("slots: slot handed, waiter not notified");
            // Stale if the waiter has left, or another member has notified it of this slot or another one.
            if self.ring[position.index].grant(waiting, slot as u16).is_err()
                && self.complete(slot as usize, row, position) == Handing::Void
            {
                // Stale if another member has freed or taken it.
                let _ = self.slots[slot as usize].free(handed);
            }
            fence_behind_change();
        }
    }
}

/// A waiting member's position in the queue for a slot. Dropping it leaves the queue; a granted slot goes to the next waiter.
#[derive(Debug)]
pub struct Waiter<'a> {
    slots: &'a Slots,
    row: Row,
    position: WaiterPosition,
    waiting: WaiterWord,
    over: bool,
}

/// The turn of a waiter, for a thread that polls for it while the waiter itself does something else.
#[derive(Debug, Clone, Copy)]
pub struct WaiterTurn {
    position: WaiterPosition,
    waiting: WaiterWord,
}

/// The state of a waiter.
#[derive(Debug, PartialEq, Eq)]
pub enum Polled {
    /// Its turn has not come.
    Waiting,
    /// It has a slot.
    Held(HeldSlot),
    /// It has lost its turn, because it was stopped for too long or the broker took it for dead. Try again.
    Lost,
}

impl Waiter<'_> {
    /// Takes the slot if its turn has come. After any result other than [`Polled::Waiting`] it has left the queue.
    pub fn poll(&mut self) -> Polled {
        if self.over {
            return Polled::Lost;
        }
        if self.is_waiting() {
            return Polled::Waiting;
        }
        self.over = true;
        let entry = &self.slots.ring[self.position.index];
        let seen = entry.load();
        let WaiterState::Granted(_, slot) = seen.state(self.position.lap) else { return Polled::Lost };
        let handed = SlotWord::handed(self.row, self.position.tag(self.slots.ring.len()));
        let word = SlotWord::held(self.row, self.slots.ticket());
        point("slots: turn has come, slot not taken");
        let kept = self.slots.slots.get(usize::from(slot)).ok_or(Stale).and_then(|slot| slot.keep(handed, word));
        point("slots: slot held, entry not left");
        // Stale if the broker has taken this process for dead.
        let _ = entry.finish(seen);
        kept.map_or(Polled::Lost, |word| Polled::Held(HeldSlot { slot: slot.into(), word }))
    }

    /// Returns whether its turn has not come. Cheaper than [`Waiter::poll`], which must be called once it returns
    /// false.
    pub fn is_waiting(&self) -> bool {
        !self.over && !self.slots.has_come(self.turn())
    }

    /// Returns the turn, for another thread.
    pub fn turn(&self) -> WaiterTurn {
        WaiterTurn { position: self.position, waiting: self.waiting }
    }

    /// Sleeps until its turn may have come, for at most `limit` and [`MAX_SLEEP`].
    pub fn sleep(&self, limit: Duration) {
        let woken = self.slots.ring[self.position.index].sleep(self.waiting, limit.min(MAX_SLEEP));
        if !woken {
            // The member that had to serve this waiter may have been killed or stopped.
            self.slots.serve_all();
        }
    }

    /// Leaves the queue. Returns the slot if its turn has come meanwhile.
    pub fn cancel(mut self) -> Option<HeldSlot> {
        self.stop()
    }

    fn stop(&mut self) -> Option<HeldSlot> {
        if !self.over && self.slots.ring[self.position.index].finish(self.waiting).is_ok() {
            point("slots: waits no more, nobody notified");
            self.over = true;
        }
        match self.poll() {
            Polled::Held(held) => Some(held),
            Polled::Waiting | Polled::Lost => None,
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.stop() {
            // Stale if the broker has taken this process for dead.
            let _ = self.slots.free(&held);
        }
    }
}

/// Maximum number of attempts to change a word that others change, too. Each failure is another member's success, so
/// only a member that changes the word without pause can exhaust them. The caller then continues without the change.
const MOST_ATTEMPTS: usize = 64;

shared!(SlotsHeader { tickets, look, zero_32, zero_64, head, tail });
shared!(Line { 0, 1 });
