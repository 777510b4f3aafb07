//! How slots are taken, waited for, handed on and given back.
//!
//! What holds: the slot words say whose each slot is, and so nobody has what another has. The entries say
//! who waits, and their positions in which order. `head`, `tail` and `look` are hints: a wrong one costs time.
//!
//! 1. Who finds nobody waiting takes a free slot. Who does not begins to wait: he takes the entry at `tail`, advances
//!    `tail`, and serves. So does everybody who has freed a slot.
//! 2. To serve is to look, behind a fence, for the first who waits and for a free slot, to set the slot aside for him
//!    (*handed*), to tell him (*granted*), and to begin again, until there is no such pair. He makes it his (*held*) and
//!    leaves the entry.
//! 3. Anybody may serve, and who meets a slot that is handed completes that: tells him who waits, or takes the slot
//!    if he waits no more.
//! 4. A waiter who sleeps looks again after [`MAX_SLEEP`], at all entries, whatever the hints say.
//! 5. A slot that was granted is not held before its waiter has taken it. Who does not for [`OVERDUE`](super::OVERDUE),
//!    because he is stopped, loses it to the next ([`Core::revoke`]); if he goes on he begins to wait anew.
//!
//! If a process is killed or stopped between any two steps:
//! * its slot was freed, nobody was served: a waiter does within [`MAX_SLEEP`], or who comes next;
//! * a slot was handed, its waiter not told: rule 3;
//! * the waiter was told, and not woken: he wakes within [`MAX_SLEEP`];
//! * the waiter was told, and is stopped: rule 5;
//! * it had begun to wait, and `tail` was not advanced: the next who comes advances it;
//! * its slot was held, its entry not left: that entry is passed over, for ever if it is stopped for ever;
//! * a slot was offered, or accepted, or published: each of these is one change, and before it, or behind it, whole;
//! * what it held or offered is the broker's to take back once it is proved dead ([`Core::recover`]), and stays with it until then.
//!
//! Overtaking: whoever found nobody waiting just before somebody began to may still take the next free slot, and does
//! it once; who comes later looks and waits. So as many overtake a waiter as were acquiring at that moment, unless he
//! loses his turn by rule 5.

use std::{fmt, time::Duration};

use super::word::{Entry, EntryWord, Place, Position, Row, Slot, SlotWord, State};
use crate::{
    MAX_SLEEP,
    crash::point,
    sync::{AtomicU32, AtomicU64, Ordering, fence},
};

/// The first bytes.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) layout: AtomicU64,
    pub(super) maximum: AtomicU32,
    pub(super) ring: AtomicU32,
    pub(super) zero: [AtomicU64; 5],
    /// Added to for each slot that is taken.
    pub(super) tickets: AtomicU64,
    /// Where a free slot may be.
    pub(super) look: AtomicU32,
    pub(super) zero_32: AtomicU32,
    pub(super) zero_64: [AtomicU64; 6],
    /// The position of the first who may wait.
    pub(super) head: Line,
    /// The position of the next who will.
    pub(super) tail: Line,
}

/// A word with a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(super) AtomicU64, pub(super) [AtomicU64; 7]);

/// A slot that is held. Lost, until its holder dies, if it is not given back.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Held {
    slot: u32,
    word: SlotWord,
}

impl Held {
    /// Which one it is.
    pub fn index(&self) -> u32 {
        self.slot
    }

    /// Another number each time that a slot is taken, of all slots, and of those that are made later under the same name.
    pub fn generation(&self) -> u64 {
        self.word.ticket()
    }

    pub(crate) fn word(&self) -> SlotWord {
        self.word
    }
}

/// What became of an attempt to get a slot.
#[derive(Debug)]
pub enum Attempt<'a> {
    /// There was one.
    Held(Held),
    /// It is waited for.
    Waiting(Waiter<'a>),
    /// There is none, and nobody else can begin to wait: as many as there is room for do. To be tried again.
    Crowded,
}

/// The words, wherever they are.
#[derive(Clone, Copy)]
pub(crate) struct Core<'a> {
    pub(super) header: &'a Header,
    pub(super) slots: &'a [Slot],
    pub(super) ring: &'a [Entry],
}

impl fmt::Debug for Core<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

impl<'a> Core<'a> {
    /// Takes a slot if one is free and nobody waits.
    pub(crate) fn try_acquire(self, row: Row) -> Option<Held> {
        if self.somebody_waits() { None } else { self.take_for(row) }
    }

    /// Takes a slot, or begins to wait for one.
    pub(crate) fn acquire(self, row: Row) -> Attempt<'a> {
        if let Some(held) = self.try_acquire(row) {
            return Attempt::Held(held);
        }
        let Some((position, waiting)) = self.begin_to_wait(row) else { return Attempt::Crowded };
        self.serve();
        Attempt::Waiting(Waiter { core: self, row, position, waiting, over: false })
    }

    /// Gives a slot back. `false` if it is not held any more: the broker took it back.
    pub(crate) fn release(self, held: &Held) -> bool {
        self.free(held.slot, held.word)
    }

    /// What the word of slot `index` says, if there is one.
    pub(crate) fn seen(self, index: u32) -> Option<SlotWord> {
        self.slots.get(index as usize).map(Slot::load)
    }

    /// Frees a slot that was seen in use, and serves. `false` if it is no longer as it was seen.
    pub(crate) fn free(self, index: u32, seen: SlotWord) -> bool {
        self.free_all([(index, seen)]) == 1
    }

    /// The same for several slots. Returns how many it has freed.
    pub(crate) fn free_all(self, all: impl IntoIterator<Item = (u32, SlotWord)>) -> u32 {
        let mut freed = 0;
        for (index, seen) in all {
            if self.slots.get(index as usize).is_some_and(|slot| slot.free(seen)) {
                freed += 1;
                self.set_look(index);
                point("slots: slot freed, nobody served");
            }
        }
        if freed != 0 {
            self.serve();
        }
        freed
    }

    /// Lets whoever knows index and generation have what is held.
    pub(crate) fn offer(self, held: &Held) -> bool {
        let offered = self.slots.get(held.slot as usize).is_some_and(|slot| slot.offer(held.word));
        point("slots: slot offered, holder not notified");
        offered
    }

    /// Takes what is offered with this generation.
    pub(crate) fn accept(self, row: Row, index: u32, generation: u64) -> Option<Held> {
        let slot = self.slots.get(index as usize)?;
        let seen = slot.load();
        if !matches!(seen.state(), State::Offered(_)) || seen.ticket() != generation {
            return None;
        }
        let word = SlotWord::held(row, self.ticket());
        let accepted = slot.accept(seen, word);
        point("slots: slot accepted, holder not notified");
        accepted.then_some(Held { slot: index, word })
    }

    /// Makes a slot that was seen held nobody's. Returns the word that says so, or `None` if it is no longer as it was seen.
    pub(crate) fn publish(self, index: u32, seen: SlotWord) -> Option<SlotWord> {
        self.slots.get(index as usize)?.publish(seen)
    }

    /// Whether somebody waits for a slot, by the hints.
    pub(crate) fn somebody_waits(self) -> bool {
        self.first_waiting().is_some()
    }

    /// Hands free slots to those who wait, in their order, as the hints have it.
    fn serve(self) {
        self.serve_as(Self::first_waiting);
    }

    /// The same, and believes no hint.
    pub(crate) fn serve_all(self) {
        self.serve_as(Self::oldest_waiting);
    }

    /// Gives everything of the rows that are `dead` to others, and what is in no state that anybody may make. Returns how
    /// many slots that were. Those that they held, and of which `publish` says so by index and word, become nobody's.
    pub(crate) fn recover(self, dead: impl Fn(Row) -> bool, publish: impl Fn(usize, SlotWord) -> bool) -> u32 {
        // The entries first, so that nothing more is handed to those rows.
        for entry in self.ring {
            for _ in 0..MOST_ATTEMPTS {
                let seen = entry.load();
                let lost = match seen.place(seen.lap()) {
                    Place::Waiting(row) | Place::Granted(row, _) => dead(row),
                    Place::Invalid => true,
                    Place::Occupied | Place::Open | Place::Done => false,
                };
                if !lost || entry.finish(seen) {
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
                    State::Held(row) | State::Offered(row) | State::Handed(row, _) => dead(row),
                    State::Invalid => true,
                    State::Free => false,
                };
                if !lost {
                    break;
                }
                if matches!(state, State::Held(_)) && publish(index, seen) {
                    if slot.publish(seen).is_some() {
                        break;
                    }
                } else if slot.free(seen) {
                    slots += 1;
                    break;
                }
            }
        }
        point("slots: those of the dead freed, nobody served");
        self.serve_all();
        slots
    }

    /// A slot that was granted and that its waiter has not taken yet.
    pub(crate) fn first_granted(self) -> Option<(usize, SlotWord)> {
        self.slots.iter().enumerate().find_map(|(index, slot)| {
            let seen = slot.load();
            let State::Handed(row, tag) = seen.state() else { return None };
            let position = Position::of_tag(tag, self.ring.len());
            let place = self.ring[position.index].load().place(position.lap);
            (place == Place::Granted(row, index as u16)).then_some((index, seen))
        })
    }

    /// Whether a slot is as it was seen.
    pub(super) fn is(self, (index, seen): (usize, SlotWord)) -> bool {
        self.slots[index].load() == seen
    }

    /// Gives a slot that was granted, and not taken, to the next.
    pub(crate) fn revoke(self, (index, seen): (usize, SlotWord)) {
        if self.slots[index].free(seen) {
            point("slots: slot revoked, nobody served");
            self.serve_all();
        }
    }

    /// A position, and the entry there.
    fn at(self, count: u64) -> (Position, &'a Entry) {
        let position = Position::of(count, self.ring.len());
        (position, &self.ring[position.index])
    }

    /// Where a free slot may be.
    fn look(self) -> usize {
        // A model need not try that hint, too: it is right wherever the search begins.
        let look = if cfg!(loom) { 0 } else { self.header.look.load(Ordering::Relaxed) as usize };
        if look < self.slots.len() { look } else { 0 }
    }

    /// The slot that would be taken next, if there is one.
    pub(crate) fn next_free(self) -> Option<u32> {
        let start = self.look();
        let slots = || self.slots.iter().enumerate();
        let mut all = slots().skip(start).chain(slots().take(start));
        all.find(|(_, slot)| slot.load().state() == State::Free).map(|(index, _)| index as u32)
    }

    fn set_look(self, slot: u32) {
        if !cfg!(loom) {
            self.header.look.store(slot, Ordering::Relaxed);
        }
    }

    fn ticket(self) -> u64 {
        self.header.tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn take_for(self, row: Row) -> Option<Held> {
        let word = SlotWord::held(row, self.ticket());
        let slot = self.take(word)?;
        point("slots: slot held, holder not notified");
        Some(Held { slot, word })
    }

    /// Makes a slot that nobody has the one of `taken`.
    fn take(self, taken: SlotWord) -> Option<u32> {
        let start = self.look();
        let slots = || self.slots.iter().enumerate();
        for (index, slot) in slots().skip(start).chain(slots().take(start)) {
            for _ in 0..MOST_ATTEMPTS {
                let seen = slot.load();
                let usable = match seen.state() {
                    State::Free => true,
                    State::Held(_) | State::Offered(_) | State::Invalid => false,
                    State::Handed(row, tag) => {
                        match self.complete(index, row, Position::of_tag(tag, self.ring.len())) {
                            Some(nobodys) => nobodys,
                            None => continue,
                        }
                    }
                };
                if !usable {
                    break;
                }
                if slot.take(seen, taken) {
                    self.set_look((index + 1) as u32);
                    return Some(index as u32);
                }
                // Somebody else did, or gave it back: nobody else may be left to hand it to who waits, so look again.
            }
        }
        None
    }

    /// Tells the waiter at `position` that the slot `slot` was handed to him, if nobody has. Returns whether the slot
    /// is nobody's because he waits no more, or `None` if that changed meanwhile.
    fn complete(self, slot: usize, row: Row, position: Position) -> Option<bool> {
        let entry = &self.ring[position.index];
        let seen = entry.load();
        match seen.place(position.lap) {
            Place::Waiting(waiter) if waiter == row => entry.grant(seen, slot as u16).then_some(false),
            Place::Granted(waiter, granted) => Some((waiter, usize::from(granted)) != (row, slot)),
            _ => Some(true),
        }
    }

    /// Takes the next entry. `None` if all are taken.
    fn begin_to_wait(self, row: Row) -> Option<(Position, EntryWord)> {
        let mut tail = self.header.tail.0.load(Ordering::Acquire);
        for _ in 0..2 * self.ring.len() + MOST_ATTEMPTS {
            let (position, entry) = self.at(tail);
            let seen = entry.load();
            let waiting = EntryWord::waiting(row, position.lap);
            let place = seen.place(position.lap);
            // One who was granted a slot and is stopped before he leaves the entry is passed over; not those who wait.
            if place == Place::Occupied && self.is_crowded(tail) {
                return None;
            }
            let begun = place == Place::Open && entry.wait(seen, waiting);
            if begun {
                point("slots: entry waiting, tail not advanced");
            }
            // Whoever was at this position, it is taken.
            let tail_now = self.advance(&self.header.tail, tail);
            if begun {
                return Some((position, waiting));
            }
            tail = tail_now;
        }
        None
    }

    /// Whether the ring is as long as the distance between who waits first and `tail`.
    fn is_crowded(self, tail: u64) -> bool {
        self.first_waiting();
        tail.wrapping_sub(self.header.head.0.load(Ordering::Acquire)) >= self.ring.len() as u64
    }

    /// Advances a hint past `count`, unless somebody has; returns what it is.
    fn advance(self, hint: &Line, count: u64) -> u64 {
        let next = count.wrapping_add(1);
        hint.0.compare_exchange(count, next, Ordering::AcqRel, Ordering::Acquire).map_or_else(|now| now, |_| next)
    }

    /// The first who waits, by the hints, which are advanced on the way.
    fn first_waiting(self) -> Option<(Position, EntryWord)> {
        let tail = self.header.tail.0.load(Ordering::Acquire);
        let mut head = self.header.head.0.load(Ordering::Acquire);
        for _ in 0..self.ring.len() {
            if tail.wrapping_sub(head) as i64 <= 0 {
                return None;
            }
            let (position, entry) = self.at(head);
            let seen = entry.load();
            match seen.place(position.lap) {
                Place::Waiting(_) => return Some((position, seen)),
                Place::Open => return None,
                Place::Occupied | Place::Granted(..) | Place::Done | Place::Invalid => {
                    head = self.advance(&self.header.head, head);
                }
            }
        }
        None
    }

    /// Who has waited longest, by the entries alone.
    fn oldest_waiting(self) -> Option<(Position, EntryWord)> {
        let mut oldest: Option<(Position, EntryWord)> = None;
        for (index, entry) in self.ring.iter().enumerate() {
            let seen = entry.load();
            let waits = matches!(seen.place(seen.lap()), Place::Waiting(_));
            // Of one lap, the first in the ring came first.
            if waits && oldest.is_none_or(|(_, oldest)| seen.is_before(oldest)) {
                oldest = Some((Position { index, lap: seen.lap() }, seen));
            }
        }
        oldest
    }

    fn serve_as(self, first: impl Fn(Self) -> Option<(Position, EntryWord)>) {
        // No more than may wait; more only if somebody plays with the words.
        for _ in 0..2 * self.ring.len() {
            // Pairs with itself. Before it somebody has freed a slot, or begun to wait, and behind it he looks for who waits,
            // or for a slot. If two do so at once, one of them sees what the other did.
            fence(Ordering::SeqCst);
            let Some((position, waiting)) = first(self) else { return };
            let Place::Waiting(row) = waiting.place(position.lap) else { return };
            let handed = SlotWord::handed(row, position.tag(self.ring.len()));
            let Some(slot) = self.take(handed) else { return };
            point("slots: slot handed, waiter not notified");
            if !self.ring[position.index].grant(waiting, slot as u16) {
                // He waits no more, or somebody else told him, of this one or of another.
                if self.complete(slot as usize, row, position) == Some(true) {
                    self.slots[slot as usize].free(handed);
                }
            }
        }
    }
}

/// One who waits for a slot. When it is dropped it waits no more, and a slot that it was given goes on to the next.
#[derive(Debug)]
pub struct Waiter<'a> {
    core: Core<'a>,
    row: Row,
    position: Position,
    waiting: EntryWord,
    over: bool,
}

/// How far a waiter is.
#[derive(Debug, PartialEq, Eq)]
pub enum Polled {
    /// Its turn has not come.
    Waiting,
    /// It has a slot.
    Held(Held),
    /// It has lost its turn, because it did not look for too long, or because the broker took it for dead. To be tried
    /// again.
    Lost,
}

impl Waiter<'_> {
    /// Looks whether it has a slot. After another answer than [`Polled::Waiting`] it waits no more.
    pub fn poll(&mut self) -> Polled {
        if self.over {
            return Polled::Lost;
        }
        if self.is_waiting() {
            return Polled::Waiting;
        }
        self.over = true;
        let entry = &self.core.ring[self.position.index];
        let seen = entry.load();
        let Place::Granted(_, slot) = seen.place(self.position.lap) else { return Polled::Lost };
        let handed = SlotWord::handed(self.row, self.position.tag(self.core.ring.len()));
        let word = SlotWord::held(self.row, self.core.ticket());
        point("slots: turn has come, slot not taken");
        let kept = self.core.slots.get(usize::from(slot)).is_some_and(|slot| slot.keep(handed, word));
        point("slots: slot held, entry not left");
        entry.finish(seen);
        if kept { Polled::Held(Held { slot: slot.into(), word }) } else { Polled::Lost }
    }

    /// Whether its turn has not come. Cheaper than [`Waiter::poll`], which has to follow when it has.
    pub fn is_waiting(&self) -> bool {
        !self.over && self.core.ring[self.position.index].load() == self.waiting
    }

    /// Sleeps until its turn may have come; not longer than `limit` and [`MAX_SLEEP`].
    pub fn sleep(&self, limit: Duration) {
        let woken = self.core.ring[self.position.index].sleep(self.waiting, limit.min(MAX_SLEEP));
        if !woken {
            // Whoever had to serve us may have been killed or stopped.
            self.core.serve_all();
        }
    }

    /// Waits no more, unless its turn has come after all.
    pub fn cancel(mut self) -> Option<Held> {
        self.stop()
    }

    fn stop(&mut self) -> Option<Held> {
        if !self.over && self.core.ring[self.position.index].finish(self.waiting) {
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
            self.core.release(&held);
        }
    }
}

/// How often a word is tried that others change. Each failure is another's success, so that who reaches this meets one
/// who does nothing else; he goes on without.
const MOST_ATTEMPTS: usize = 64;

#[cfg(not(loom))]
mod layout {
    #![allow(unsafe_code)]

    use super::Header;

    const _: () = assert!(size_of::<Header>() == 256);

    // SAFETY: `repr(C)`, its fields are atomics and arrays and structs of them, and lie without gaps: their sizes add
    // up to that of the whole.
    unsafe impl partywall_os::map::Atomics for Header {}
}
