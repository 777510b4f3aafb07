// Holds 19.
//! Semaphores: which permits are returned, when, and to which waiters.

use std::{os::fd::OwnedFd, time::Duration};

use partywall_harness::Actor;
use partywall_os::map::SharedMap;
use partywall_shm::{
    semaphore::Semaphore,
    slots::{Attempt, HeldSlot, Polled},
};
use partywall_wire::{
    Answer, Call, Change, LeaseId, Limit, MemberId, MemberState, ObjectDetail, ObjectInfo, ObjectKind, Refusal,
    SemaphoreInfo, limits::MAX_PERMITS,
};

use crate::{
    common::{Client, TestBroker, called, eventually, full},
    roles::{self, Orphan, SAYS},
};

/// A member with a semaphore open.
pub(crate) struct User {
    pub(crate) client: Client,
    pub(crate) lease: LeaseId,
    pub(crate) semaphore: Semaphore,
    memory: OwnedFd,
}

impl User {
    pub(crate) fn open(socket: &std::path::Path, name: &str, maximum: u32) -> Self {
        let mut client = Client::join(socket);
        let (lease, memory) = open(&mut client, name, maximum).unwrap();
        Self { client, lease: LeaseId(lease), semaphore: Semaphore::map(&memory).unwrap(), memory }
    }

    pub(crate) fn row(&self) -> u16 {
        self.client.welcome.row
    }

    /// Takes a permit, and waits for it without a limit.
    pub(crate) fn acquire(&self) -> HeldSlot {
        loop {
            match self.semaphore.take(self.row()) {
                Attempt::Held(held) => return held,
                Attempt::Waiting(mut waiter) => loop {
                    match waiter.poll() {
                        Polled::Waiting => waiter.sleep(Duration::from_millis(100)),
                        Polled::Held(held) => return held,
                        Polled::Lost => break,
                    }
                },
                Attempt::Crowded => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn inspect(&mut self, name: &str) -> (SemaphoreInfo, Vec<(u32, u32)>) {
        match self.client.ask(Call::InspectObject { kind: ObjectKind::Semaphore, name: called(name) }) {
            Ok(Answer::Object(detail)) => match *detail {
                ObjectDetail { info: ObjectInfo::Semaphore(info), holders } => {
                    (info, holders.iter().map(|held| (held.holder.pid, held.permits)).collect())
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }
}

fn open(client: &mut Client, name: &str, maximum: u32) -> Result<(u64, OwnedFd), Refusal> {
    let (outcome, mut fds) = client.ask_with(Call::OpenSemaphore { name: called(name), maximum, shared: false }, &[]);
    match outcome? {
        Answer::Semaphore { lease, maximum: has } => {
            assert_eq!((has, fds.len()), (maximum, 1));
            Ok((lease.0, fds.remove(0)))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn permits_of_a_killed_process_go_to_waiters() {
    let broker = TestBroker::start();
    let mut watcher = User::open(&broker.socket, "s", 3);
    let mut holder = roles::start("permit holder", &broker.socket);
    let pid = holder.pid();
    holder.expect(SAYS);
    let (info, holders) = watcher.inspect("s");
    assert_eq!((info.held, info.maximum, info.leases), (3, 3, 2));
    assert_eq!(holders, [(std::process::id(), 0), (pid, 3)]);
    let mut waiting = roles::start("acquirer once", &broker.socket);
    eventually("it waits", || watcher.inspect("s").0.waiting == 1);
    holder.kill();
    assert_eq!(waiting.expect(SAYS), "held");
    let (info, holders) = watcher.inspect("s");
    assert_eq!((info.held, info.waiting), (1, 0));
    assert_eq!(holders, [(std::process::id(), 0), (waiting.pid(), 1)]);
    waiting.kill();
    eventually("all are free", || watcher.semaphore.audit().is_idle());
}

#[test]
fn killed_waiter_is_skipped() {
    let broker = TestBroker::start();
    let mut watcher = User::open(&broker.socket, "s", 1);
    let held = watcher.acquire();
    let mut first = roles::start("acquirer once", &broker.socket);
    eventually("the first waits", || watcher.inspect("s").0.waiting == 1);
    let mut second = roles::start("acquirer once", &broker.socket);
    eventually("the second waits", || watcher.inspect("s").0.waiting == 2);
    first.kill();
    eventually("the first is gone", || watcher.inspect("s").0.waiting == 1);
    watcher.semaphore.free(&held).unwrap();
    assert_eq!(second.expect(SAYS), "held");
}

#[test]
fn no_permit_is_lost_by_repeated_kills() {
    let broker = TestBroker::start();
    let mut watcher = User::open(&broker.socket, "s", 4);
    for round in 0..10_u64 {
        let mut acquirers: Vec<_> = (0..3).map(|_| roles::start("acquirer", &broker.socket)).collect();
        acquirers.iter_mut().for_each(|acquirer| assert_eq!(acquirer.expect(SAYS), "ready"));
        std::thread::sleep(Duration::from_micros(round * 311 % 3000));
        acquirers.iter_mut().for_each(Actor::kill);
        eventually("they are gone", || watcher.inspect("s").0.leases == 1);
        assert!(watcher.semaphore.audit().is_idle(), "{:?}", watcher.semaphore.audit());
    }
}

#[test]
fn permits_stay_while_a_child_holds_the_connection() {
    let broker = TestBroker::start();
    let mut watcher = User::open(&broker.socket, "s", 3);
    let mut parent = roles::start("forked permit holder", &broker.socket);
    let member: u64 = parent.expect(SAYS).parse().unwrap();
    let child = Orphan::of(&parent.expect(SAYS));
    parent.kill();
    let held = Some(MemberState::HeldByChild);
    eventually("the child is noticed", || watcher.client.state_of(MemberId(member)) == held);
    assert_eq!(watcher.semaphore.audit().held, 1, "its kernels may run on");
    child.kill();
    eventually("it is given back", || watcher.semaphore.audit().is_idle());
}

#[test]
fn permits_return_with_a_holders_last_lease() {
    let broker = TestBroker::start();
    let watcher = User::open(&broker.socket, "s", 3);
    let mut user = User::open(&broker.socket, "s", 3);
    let (second, _) = open(&mut user.client, "s", 3).unwrap();
    let held = user.acquire();
    let release = |user: &mut User, lease| user.client.ask(Call::Release { lease });
    assert_eq!(release(&mut user, LeaseId(second)), Ok(Answer::Done));
    assert_eq!(watcher.semaphore.audit().held, 1);
    let lease = user.lease;
    assert_eq!(release(&mut user, lease), Ok(Answer::Done));
    user.client.ask(Call::Ping).unwrap();
    assert!(watcher.semaphore.audit().is_idle());
    assert!(user.semaphore.free(&held).is_err(), "no member holds it");

    let mut leaver = User::open(&broker.socket, "s", 3);
    let _held = leaver.acquire();
    assert_eq!(leaver.client.ask(Call::Bye), Ok(Answer::Done));
    eventually("it has left", || watcher.semaphore.audit().is_idle());
}

#[test]
fn memory_and_row_are_reused_only_when_all_permits_are_back() {
    let broker = TestBroker::start();
    let mut watcher = broker.client();
    let mut leaver = broker.client();
    let row = leaver.welcome.row;
    let mut watch = |after| match watcher.ask(Call::Watch { pattern: "gone".into(), after }) {
        Ok(Answer::Happened(happened)) => happened,
        other => panic!("{other:?}"),
    };
    leaver.commit("gone", b"x", false);
    let point = watch(None).next;
    // Returning the permits of one semaphore takes a turn of the broker's loop.
    let mut opener = broker.client();
    let semaphores = (0..8).map(|i| {
        let (_, memory) = open(&mut opener, &format!("{i}"), MAX_PERMITS).unwrap();
        open(&mut leaver, &format!("{i}"), MAX_PERMITS).unwrap();
        Semaphore::map(memory).unwrap()
    });
    let semaphores: Vec<_> = semaphores.collect();
    for semaphore in &semaphores {
        let Attempt::Held(_held) = semaphore.take(row) else { panic!("there are permits") };
    }
    assert_eq!(leaver.ask(Call::Bye), Ok(Answer::Done));
    let are_back = || semaphores.iter().all(|semaphore| semaphore.audit().is_idle());
    let mut others = Vec::new();
    let mut is_free = false;
    eventually("the row is reused, and the memory freed", || {
        is_free |= watch(Some(point)).events.iter().any(|event| matches!(event.change, Change::Reclaimed { .. }));
        assert!(!is_free || are_back());
        others.push(broker.client());
        let is_taken = others.iter().any(|other| other.welcome.row == row);
        assert!(!is_taken || are_back());
        is_taken && is_free
    });
}

#[test]
fn first_open_sets_the_number_of_permits() {
    let broker = TestBroker::start();
    let mut one = User::open(&broker.socket, "s", 3);
    let mut two = broker.client();
    let wrong = Refusal::WrongMaximum { name: called("s"), maximum: 3, asked: 4 };
    assert_eq!(open(&mut two, "s", 4).err(), Some(wrong));
    let (_, memory) = open(&mut two, "s", 3).unwrap();
    assert_eq!(Semaphore::map(memory).unwrap().count(), 3);
    for bad in [0, MAX_PERMITS + 1, u32::MAX] {
        assert!(matches!(open(&mut two, "t", bad), Err(Refusal::Invalid { .. })), "{bad}");
    }
    assert!(open(&mut two, "t", MAX_PERMITS).is_ok());
    assert_eq!(one.client.status().semaphores, 2);
    two.ask(Call::Bye).unwrap();
    let lease = one.lease;
    one.client.ask(Call::Release { lease }).unwrap();
    assert_eq!((one.client.status().semaphores, one.client.status().fds), (0, 0));
    assert!(open(&mut one.client, "s", 5).is_ok(), "it ended with its last lease");
}

#[test]
fn semaphores_are_bounded() {
    let broker = TestBroker::with(|config| config.limits.semaphores = 2);
    let mut client = broker.client();
    open(&mut client, "a", 1).unwrap();
    open(&mut client, "b", 1).unwrap();
    assert_eq!(open(&mut client, "c", 1).err(), Some(full(Limit::Semaphores, 2, 2)));
    open(&mut client, "a", 1).unwrap();

    let broker = TestBroker::with(|config| config.limits.bytes = 100);
    let mut client = broker.client();
    assert!(matches!(open(&mut client, "a", 1), Err(Refusal::Limit { limit: Limit::Bytes, .. })));
    assert_eq!(client.status().fds, 0);
}

// Holds 158.
#[test]
fn broker_survives_any_bytes_in_its_memory() {
    let broker = TestBroker::start();
    let mut watcher = User::open(&broker.socket, "s", 40);
    let memory = SharedMap::writable(&watcher.memory).unwrap();
    let words = memory.slice::<u64>(0, memory.len() / 8).unwrap();
    let mut seed = 7_u64;
    for round in 0..30 {
        let mut other = broker.client();
        let (lease, _) = open(&mut other, "s", 40).unwrap();
        for at in 0..words.len() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // All words at random, or with one bit flipped.
            words.set(at, if round % 2 == 0 { seed } else { words.get(at) ^ 1 << (seed >> 58) });
        }
        watcher.inspect("s");
        watcher.client.ask(Call::Objects { after: None }).unwrap();
        other.ask(Call::Release { lease: LeaseId(lease) }).unwrap();
        other.ask(Call::Bye).unwrap();
    }
    assert_eq!(watcher.client.ask(Call::Ping), Ok(Answer::Done));
}
