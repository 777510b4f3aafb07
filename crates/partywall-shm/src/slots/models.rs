// Holds 19, 20, 178.
//! Slots under the model checker.
#![allow(clippy::unwrap_used, reason = "a model fails by panicking, as tests do")]

use loom::{
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
};

use super::{
    core::{Line, SlotsHeader},
    word::{Slot, SlotWord, WaiterEntry, WaiterPosition},
    *,
};

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

impl Slots {
    /// Creates free slots for a model, with room for this many waiters.
    pub(crate) fn new(slots: usize, waiters: usize) -> Self {
        let zero = || AtomicU64::new(0);
        let line = || Line(zero(), std::array::from_fn(|_| zero()));
        let header = SlotsHeader {
            tickets: zero(),
            look: AtomicU32::new(0),
            zero_32: AtomicU32::new(0),
            zero_64: std::array::from_fn(|_| zero()),
            head: line(),
            tail: line(),
        };
        Self {
            header: vec![header],
            slots: (0..slots).map(|_| Slot::new()).collect(),
            ring: (0..waiters).map(|_| WaiterEntry::new()).collect(),
            granted: Mutex::default(),
        }
    }
}

struct World {
    slots: Slots,
    /// The number of threads that have a permit.
    inside: AtomicU32,
    /// Data that only the permit protects.
    data: AtomicU32,
}

impl World {
    fn new(permits: usize, waiters: usize) -> Arc<Self> {
        Arc::new(Self { slots: Slots::new(permits, waiters), inside: AtomicU32::new(0), data: AtomicU32::new(0) })
    }

    /// Sleeps until it has a permit.
    fn acquire(&self, row: u16) -> Option<HeldSlot> {
        match self.slots.take(row) {
            Attempt::Held(held) => Some(held),
            Attempt::Waiting(mut waiter) => loop {
                match waiter.poll() {
                    Polled::Held(held) => break Some(held),
                    Polled::Waiting => waiter.sleep(crate::MAX_SLEEP),
                    Polled::Lost => break self.acquire(row),
                }
            },
            Attempt::Crowded => panic!("there is room for all"),
        }
    }

    /// Accesses the protected data, and frees the permit.
    fn use_alone(&self, held: &HeldSlot) {
        let seen = self.data.load(Ordering::Relaxed);
        self.data.store(seen + 1, Ordering::Relaxed);
        self.slots.free(held).unwrap();
    }

    fn acquire_and_use(&self, row: u16) {
        let held = self.acquire(row).unwrap();
        self.use_alone(&held);
    }

    fn idle(&self) {
        let audit = self.slots.audit();
        assert_eq!(audit, SlotAudit { free: self.slots.slots.len() as u32, ..SlotAudit::default() });
    }
}

/// Runs `others` in threads, and `ours` here.
fn together(world: &Arc<World>, others: impl IntoIterator<Item = fn(&World)>, ours: impl FnOnce(&World)) {
    let others: Vec<_> = others
        .into_iter()
        .map(|other| {
            let world = world.clone();
            thread::spawn(move || other(&world))
        })
        .collect();
    ours(world);
    for other in others {
        other.join().unwrap();
    }
}

#[test]
fn single_permit_has_one_holder_and_is_passed_on() {
    check(3, || {
        let world = World::new(1, 2);
        together(&world, [(|world| world.acquire_and_use(1)) as fn(&World)], |world| world.acquire_and_use(2));
        assert_eq!(world.data.load(Ordering::Relaxed), 2);
        world.idle();
    });
}

#[test]
fn two_waiters_are_both_served() {
    check(2, || {
        let world = World::new(2, 2);
        let held = [(); 2].map(|()| world.acquire(1).unwrap());
        fn get(world: &World) {
            std::mem::forget(world.acquire(2).unwrap());
        }
        together(&world, [get as fn(&World), get], |world| {
            for held in held {
                world.slots.free(&held).unwrap();
            }
        });
        assert_eq!(world.slots.audit(), SlotAudit { held: 2, ..SlotAudit::default() });
    });
}

#[test]
fn two_permits_are_two_at_a_time() {
    check(2, || {
        let world = World::new(2, 2);
        fn visit(world: &World) {
            let held = world.acquire(1).unwrap();
            assert!(world.inside.fetch_add(1, Ordering::Relaxed) < 2);
            world.inside.fetch_sub(1, Ordering::Relaxed);
            world.slots.free(&held).unwrap();
        }
        together(&world, [visit as fn(&World), visit], visit);
        world.idle();
    });
}

#[test]
fn permit_granted_to_a_cancelling_waiter_is_not_lost() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        fn give_up(world: &World) {
            if let Some(held) = match world.slots.take(2) {
                Attempt::Held(held) => Some(held),
                Attempt::Waiting(waiter) => waiter.cancel(),
                Attempt::Crowded => None,
            } {
                world.use_alone(&held);
            }
        }
        together(&world, [give_up as fn(&World), |world| world.acquire_and_use(3)], |world| world.use_alone(&held));
        world.idle();
    });
}

#[test]
fn blocks_of_the_dead_go_to_waiters() {
    check(3, || {
        let world = World::new(1, 2);
        let dead = world.acquire(1).unwrap();
        together(&world, [(|world| world.acquire_and_use(2)) as fn(&World)], |world| {
            assert_eq!(world.slots.recover(|row| row == 1), 1);
        });
        assert!(world.slots.free(&dead).is_err(), "it is not its holder's any more");
        world.idle();
    });
}

/// A waiter died. The slot that it was handed, and its position, are passed on, whatever other members were about to do.
#[test]
fn dead_waiter_does_not_block_others() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(2).unwrap();
        let Attempt::Waiting(dead) = world.slots.take(1) else { panic!("there was one permit") };
        std::mem::forget(dead);
        let others: [fn(&World); 2] = [
            |world| world.acquire_and_use(3),
            |world| {
                world.slots.recover(|row| row == 1);
            },
        ];
        together(&world, others, |world| world.use_alone(&held));
        world.idle();
    });
}

/// A serving member was killed after it had handed the permit. The next member notifies the waiter, or hands the permit
/// to another one.
#[test]
fn handed_permit_without_a_grant_is_not_lost() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let Attempt::Waiting(mut waiter) = world.slots.take(2) else { panic!("there was one permit") };
        // Row 1 releases and dies in the middle of serving.
        let killed = |held: HeldSlot| {
            world.slots.slots[0].free(world.slots.slots[0].load()).unwrap();
            let first = WaiterPosition::of(0, 2);
            world.slots.slots[0].take(world.slots.slots[0].load(), SlotWord::handed(2, first.tag(2))).unwrap();
            std::mem::forget(held);
        };
        killed(held);
        together(
            &world,
            [(|world| world.acquire_and_use(3)) as fn(&World), |world| world.slots.serve_all()],
            |world| {
                loop {
                    match waiter.poll() {
                        Polled::Held(held) => break world.use_alone(&held),
                        Polled::Waiting => waiter.sleep(crate::MAX_SLEEP),
                        Polled::Lost => panic!("it waits"),
                    }
                }
            },
        );
        assert_eq!(world.data.load(Ordering::Relaxed), 2);
        world.idle();
    });
}

/// A granted permit is revoked from a stopped waiter just as the waiter continues.
#[test]
fn a_permit_revoked_as_it_is_taken_goes_to_it_or_the_next() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let Attempt::Waiting(mut waiter) = world.slots.take(2) else { panic!("there was one permit") };
        world.slots.free(&held).unwrap();
        let others: [fn(&World); 2] = [
            |world| world.acquire_and_use(3),
            |world| {
                if let Some(granted) = world.slots.first_granted() {
                    world.slots.revoke(granted);
                }
            },
        ];
        together(&world, others, |world| match waiter.poll() {
            Polled::Held(held) => world.use_alone(&held),
            Polled::Lost => world.acquire_and_use(2),
            Polled::Waiting => panic!("it was granted"),
        });
        assert_eq!(world.data.load(Ordering::Relaxed), 2);
        world.idle();
    });
}

/// The ring has two entries, and three members wait one after the other, so laps repeat.
#[test]
fn entries_are_used_again() {
    check(2, || {
        let world = World::new(1, 2);
        together(
            &world,
            [(|world| {
                world.acquire_and_use(1);
                world.acquire_and_use(1);
            }) as fn(&World)],
            |world| {
                world.acquire_and_use(2);
                world.acquire_and_use(2);
            },
        );
        assert_eq!(world.data.load(Ordering::Relaxed), 4);
        world.idle();
    });
}

/// Two members accept an offered block while the offering member dies. One of them gets the block or it is free, and
/// only one process at a time writes it.
// Holds 183.
#[test]
fn an_offered_block_is_accepted_once_or_comes_back() {
    check(3, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        world.data.store(1, Ordering::Relaxed);
        let generation = held.generation();
        world.slots.offer(&held).unwrap();
        assert!(world.slots.free(&held).is_err(), "it is not its holder's any more");
        let accept = move |world: &World, row| {
            if let Some(held) = world.slots.accept(row, 0, generation) {
                world.use_alone(&held);
            }
        };
        let other = world.clone();
        let other = thread::spawn(move || accept(&other, 2));
        let broker = world.clone();
        let broker = thread::spawn(move || broker.slots.recover(|row| row == 1));
        accept(&world, 3);
        other.join().unwrap();
        let taken = world.data.load(Ordering::Relaxed) - 1;
        assert_eq!(taken + broker.join().unwrap(), 1);
        world.idle();
    });
}

/// A member that accepts a block sees what the offering member has written.
#[test]
fn an_offered_block_is_complete() {
    check(3, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let generation = held.generation();
        let giver = world.clone();
        let giver = thread::spawn(move || {
            giver.data.store(1, Ordering::Relaxed);
            giver.slots.offer(&held).unwrap();
        });
        let taken = world.slots.accept(2, 0, generation);
        if let Some(held) = &taken {
            assert_eq!(world.data.load(Ordering::Relaxed), 1);
            world.slots.free(held).unwrap();
        }
        giver.join().unwrap();
        assert_eq!(world.slots.audit().free, u32::from(taken.is_some()));
    });
}

/// The offering member dies while a member waits for a block. Either the member that accepts and frees the block or the
/// broker serves the waiter.
#[test]
fn an_offered_block_reaches_a_waiter() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let generation = held.generation();
        world.slots.offer(&held).unwrap();
        let broker: fn(&World) = |world| {
            world.slots.recover(|row| row == 1);
        };
        together(&world, [broker, |world| world.acquire_and_use(2)], |world| {
            if let Some(held) = world.slots.accept(3, 0, generation) {
                world.use_alone(&held);
            }
        });
        world.idle();
    });
}

/// Two members prove that a published block is unused: one of them frees it, and the waiter gets it.
#[test]
fn a_published_block_is_freed_once_and_reaches_a_waiter() {
    check(2, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let seen = world.slots.publish(0, held.word()).unwrap();
        assert_eq!(world.slots.publish(0, held.word()), Err(Stale), "it is published");
        assert_eq!(world.slots.recover(|row| row == 1), 0, "no member holds it");
        let freed = world.clone();
        let freed = thread::spawn(move || freed.slots.free_seen(0, seen));
        let waiter = world.clone();
        let waiter = thread::spawn(move || waiter.acquire_and_use(2));
        let ours = world.slots.free_seen(0, seen);
        assert!(freed.join().unwrap() != ours);
        waiter.join().unwrap();
        world.idle();
    });
}

/// The broker recovers the blocks of a dead publisher while another member completes the publication.
#[test]
fn published_samples_of_the_dead_are_published() {
    check(3, || {
        let world = World::new(1, 2);
        let held = world.acquire(1).unwrap();
        let completed = world.clone();
        let seen = held.word();
        let completed = thread::spawn(move || completed.slots.publish(0, seen).is_ok());
        world.slots.recover_or_publish(|row| row == 1, |_, word| word == seen);
        completed.join().unwrap();
        assert_eq!(world.slots.audit(), SlotAudit { published: 1, ..SlotAudit::default() });
    });
}
