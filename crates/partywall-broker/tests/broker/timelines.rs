// Holds 17.
//! Timelines: how waits end when the writer dies, leaves, is abandoned, or stores invalid values.

use std::time::Duration;

use partywall_os::map::SharedMap;
use partywall_shm::timeline::{CELL_BYTES, CELLS, Cell, MAX_VALUE, Progress, Slab, cell_offset};
use partywall_wire::{
    Answer, Call, Handle, LeaseId, Limit, MemberId, MemberState, ObjectDetail, ObjectInfo, ObjectKind, OpenedTimeline,
    Refusal, Request, TimelineEnding, TimelineInfo, Whom, frame, limits::MAX_MESSAGE,
};

use crate::{
    common::{Client, TestBroker, called, eventually, full, shake_hands},
    roles::{self, Orphan, SAYS},
};

/// A member that uses timelines.
pub(crate) struct User {
    pub(crate) client: Client,
}

/// An opened timeline.
pub(crate) struct Opened {
    pub(crate) answer: OpenedTimeline,
    slab: Slab,
}

impl User {
    pub(crate) fn join(socket: &std::path::Path) -> Self {
        Self { client: Client::join(socket) }
    }

    pub(crate) fn open(&mut self, name: &str, writer: bool) -> Result<Opened, Refusal> {
        self.ask(Call::OpenTimeline { name: called(name), writer, shared: false })
    }

    fn follow(&mut self, opened: &Opened) -> Opened {
        self.ask(Call::FollowTimeline { lease: opened.answer.lease }).unwrap()
    }

    fn ask(&mut self, call: Call) -> Result<Opened, Refusal> {
        let (outcome, fds) = self.client.ask_with(call, &[]);
        let answer = match outcome? {
            Answer::Timeline(opened) => opened,
            other => panic!("{other:?}"),
        };
        let [slab] = &fds[..] else { panic!("{fds:?}") };
        Ok(Opened { answer, slab: Slab::map(slab).unwrap() })
    }

    fn release(&mut self, opened: &Opened) {
        assert_eq!(self.client.ask(Call::Release { lease: opened.answer.lease }), Ok(Answer::Done));
    }

    fn abandon(&mut self, name: &str) -> Result<Answer, Refusal> {
        self.client.ask(Call::AbandonTimeline { name: called(name) })
    }

    fn inspect(&mut self, name: &str) -> (TimelineInfo, Vec<u32>) {
        match self.client.ask(Call::InspectObject { kind: ObjectKind::Timeline, name: called(name) }) {
            Ok(Answer::Object(detail)) => match *detail {
                ObjectDetail { info: ObjectInfo::Timeline(info), holders } => {
                    (info, holders.iter().map(|held| held.holder.pid).collect())
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }
}

impl Opened {
    pub(crate) fn cell(&self) -> &Cell {
        self.slab.cell(self.answer.cell).unwrap()
    }

    /// Sleeps until the timeline has reached `v` or has ended.
    pub(crate) fn wait(&self, v: u64) -> Progress {
        loop {
            let key = self.cell().prepare();
            match self.cell().progress(v) {
                Progress::Pending | Progress::Announced => self.cell().sleep(key, Duration::from_millis(100)),
                progress => return progress,
            }
        }
    }

    fn ending(&self) -> Option<TimelineEnding> {
        self.cell().ending()
    }

    /// Stores a value as a stream does.
    fn store(&self, value: u64) {
        word(self.slab.memory(), self.answer.cell, 0, value);
    }

    fn load(&self) -> u64 {
        self.slab.memory().slice::<u64>(cell_offset(self.answer.cell), 1).unwrap().get(0)
    }
}

fn word(slab: &SharedMap, cell: u32, place: usize, value: u64) {
    slab.slice::<u64>(cell_offset(cell), 8).unwrap().set(place, value);
}

/// Returns the value that the end of a timeline stores after `last`.
fn poison(last: u64) -> u64 {
    last + (1 << 62) + 1
}

// Holds 168.
#[test]
fn waits_for_a_killed_writer_end_and_the_next_writer_continues() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let first = reader.open("t", false).unwrap();
    for incarnation in 1..4_u32 {
        let start = u64::from(incarnation - 1) * 3;
        let mut writer = roles::start("writer", &broker.socket);
        assert_eq!(writer.expect(SAYS), format!("{start}"), "where the one before it ended");
        let opened = reader.follow(&first);
        assert_eq!((opened.answer.incarnation, opened.answer.writer), (incarnation, false));
        for v in 1..=3 {
            writer.proceed();
            assert_eq!(opened.wait(start + v), Progress::Reached);
        }
        let sleeper = std::thread::spawn({
            let slab = opened.slab.clone();
            let opened = Opened { answer: opened.answer, slab };
            move || opened.wait(start + 4)
        });
        writer.kill();
        assert_eq!(sleeper.join().unwrap(), Progress::Ended(TimelineEnding::OwnerDied));
        assert_eq!((opened.wait(start + 3), opened.cell().value()), (Progress::Reached, start + 3));
        assert_eq!(opened.load(), poison(start + 3), "streams go on");
    }
    let followed = reader.follow(&first);
    assert_eq!(followed.answer.incarnation, 3, "there is no further writer");
    let (info, holders) = reader.inspect("t");
    assert_eq!((info.value, info.writer, info.ending), (9, None, Some(TimelineEnding::OwnerDied)));
    assert_eq!((info.leases, holders), (1, vec![std::process::id()]));
}

// Holds 168.
#[test]
fn writer_killed_anywhere_leaves_a_usable_timeline() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut highest = 0;
    for round in 0..20_u64 {
        let mut writer = roles::start("signaller", &broker.socket);
        let start: u64 = writer.expect(SAYS).parse().unwrap();
        assert!(start >= highest, "{highest} had been signalled before, the next writer starts at {start}");
        let present = reader.follow(&opened);
        std::thread::sleep(Duration::from_micros(round * 37 % 500));
        highest = present.cell().value();
        writer.kill();
        assert_eq!(present.wait(MAX_VALUE), Progress::Ended(TimelineEnding::OwnerDied));
        assert!(present.cell().value() >= highest);
        highest = present.cell().value();
        assert_eq!(present.load(), poison(highest));
    }
}

#[test]
fn killed_waiter_does_not_affect_the_writer() {
    let broker = TestBroker::start();
    let mut writer = User::join(&broker.socket);
    let opened = writer.open("t", true).unwrap();
    let mut waiter = roles::start("waiter", &broker.socket);
    waiter.expect(SAYS);
    assert_eq!(writer.inspect("t").0.leases, 2);
    waiter.kill();
    opened.cell().signal(1).unwrap();
    eventually("its lease is taken back", || writer.inspect("t").0.leases == 1);
    opened.cell().signal(2).unwrap();
    assert_eq!((opened.cell().value(), opened.ending()), (2, None));
}

#[test]
fn closing_or_leaving_ends_the_waits_at_once() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut writer = User::join(&broker.socket);
    let mine = writer.open("t", true).unwrap();
    mine.cell().signal(7).unwrap();
    let sleeper = std::thread::spawn({
        let opened = Opened { answer: opened.answer, slab: opened.slab.clone() };
        move || opened.wait(8)
    });
    writer.release(&mine);
    assert_eq!(sleeper.join().unwrap(), Progress::Ended(TimelineEnding::Closed));
    assert_eq!((opened.wait(7), mine.cell().signal(8).is_err()), (Progress::Reached, true));

    let again = writer.open("t", true).unwrap();
    assert_eq!((again.cell().value(), again.answer.incarnation), (7, 2));
    assert_eq!(writer.client.ask(Call::Bye), Ok(Answer::Done));
    assert_eq!(again.wait(8), Progress::Ended(TimelineEnding::Closed));
    assert_eq!(reader.inspect("t").1, [std::process::id()]);
}

// Holds 169.
#[test]
fn timeline_has_one_writer() {
    let broker = TestBroker::start();
    let mut one = User::join(&broker.socket);
    let mut two = User::join(&broker.socket);
    one.open("t", true).unwrap();
    let pid = std::process::id();
    assert_eq!(two.open("t", true).err(), Some(Refusal::WriterExists { name: called("t"), pid }));
    assert!(!two.open("t", false).unwrap().answer.writer);
    assert!(two.open("u", true).unwrap().answer.writer);
}

#[test]
fn child_that_holds_the_writers_connection_may_keep_writing() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut parent = roles::start("forked writer", &broker.socket);
    let member: u64 = parent.expect(SAYS).parse().unwrap();
    let child = Orphan::of(&parent.expect(SAYS));
    parent.kill();
    let held = Some(MemberState::HeldByChild);
    eventually("the child is noticed", || reader.client.state_of(MemberId(member)) == held);
    assert_eq!(opened.ending(), None, "nothing is proved");
    // An operator need not wait for the child.
    assert_eq!(reader.abandon("t"), Ok(Answer::Done));
    assert_eq!(opened.wait(9), Progress::Ended(TimelineEnding::Abandoned));

    let next = reader.open("t", true).unwrap();
    assert_eq!((next.cell().value(), next.answer.incarnation), (1, 2));
    opened.store(5);
    eventually("what it stores is undone", || opened.load() == poison(1));
    child.kill();
    eventually("both are gone", || reader.client.state_of(MemberId(member)).is_none());
    assert_eq!((opened.ending(), next.ending()), (Some(TimelineEnding::Abandoned), None));
}

#[test]
fn writer_held_by_a_child_dies_with_the_child() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut parent = roles::start("forked writer", &broker.socket);
    parent.expect(SAYS);
    let child = Orphan::of(&parent.expect(SAYS));
    parent.kill();
    child.kill();
    assert_eq!(opened.wait(9), Progress::Ended(TimelineEnding::OwnerDied));
}

// Holds 173.
#[test]
fn stores_of_a_stream_after_the_end_are_undone_until_the_last() {
    let broker = TestBroker::start();
    let mut writer = User::join(&broker.socket);
    let opened = writer.open("t", true).unwrap();
    opened.cell().signal(2).unwrap();
    opened.cell().announce(4);
    let mut operator = User::join(&broker.socket);
    assert_eq!(operator.abandon("t"), Ok(Answer::Done));
    assert_eq!(opened.load(), poison(2));
    for v in 3..=4 {
        opened.store(v);
        eventually("the store is undone", || opened.load() == poison(2));
    }
    assert_eq!((opened.cell().value(), opened.wait(3)), (2, Progress::Ended(TimelineEnding::Abandoned)));
}

#[test]
fn cell_is_reused_when_its_streams_have_stored_all_promised_values() {
    // One slab, so that cells are reused immediately.
    let broker = TestBroker::with(|config| config.limits.fds = Some(1));
    let mut user = User::join(&broker.socket);
    let mut reader = User::join(&broker.socket);
    let others: Vec<_> = (0..CELLS - 1).map(|i| user.open(&format!("{i}"), false).unwrap()).collect();
    let owing = user.open("t", true).unwrap();
    owing.cell().announce(2);
    assert_eq!(reader.abandon("t"), Ok(Answer::Done));
    user.release(&owing);
    assert!(matches!(user.open("more", false).err(), Some(Refusal::Limit { limit: Limit::Fds, .. })));
    owing.store(1);
    eventually("it is undone", || owing.load() == poison(0));
    assert!(user.open("more", false).is_err());
    owing.store(2);
    eventually("the cell is reused", || user.open("more", false).is_ok());
    assert_eq!((owing.load(), owing.ending(), others.len()), (0, None, CELLS as usize - 1));
}

#[test]
fn eviction_or_lost_context_of_the_writer_ends_waits() {
    let broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut writer = User::join(&broker.socket);
    let mine = writer.open("t", true).unwrap();
    assert_eq!(writer.client.ask(Call::ContextLost { gpu: None }), Ok(Answer::Done));
    assert_eq!(opened.wait(1), Progress::Ended(TimelineEnding::OwnerFaulted));
    assert_eq!(mine.ending(), Some(TimelineEnding::OwnerFaulted));

    let mut other = User::join(&broker.socket);
    let next = other.open("t", true).unwrap();
    let whom = Whom::Member(other.client.welcome.member.0);
    reader.client.ask(Call::Evict { whom, kill: false }).unwrap();
    assert_eq!(next.wait(1), Progress::Ended(TimelineEnding::Evicted));
}

// Holds 158.
#[test]
fn broker_survives_any_bytes_in_control_memory() {
    let broker = TestBroker::start();
    let mut user = User::join(&broker.socket);
    let slab = user.open("first", true).unwrap().slab;
    let garbage =
        [0, 1, MAX_VALUE, MAX_VALUE + 1, 1 << 62, poison(7), poison(MAX_VALUE), 1 << 63, u64::MAX - 1, u64::MAX];
    let mut seed = 1_u64;
    // The header stays intact: mapping refuses memory with another header.
    let words = CELLS as usize * CELL_BYTES / 8;
    let mut scribble = |slab: &SharedMap| {
        for at in 0..words {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let value = garbage.get((seed >> 33) as usize % 14).copied().unwrap_or(seed);
            slab.slice::<u64>(cell_offset(0), words).unwrap().set(at, value);
        }
    };
    for round in 0..50 {
        let name = format!("t{}", round % 7);
        let mut other = User::join(&broker.socket);
        let opened = other.open(&name, true).unwrap();
        scribble(slab.memory());
        let _ = user.open(&name, false).unwrap();
        user.client.ask(Call::Objects { after: None }).unwrap();
        user.inspect(&name);
        match round % 3 {
            0 => drop(user.abandon(&name)),
            1 => other.release(&opened),
            _ => {}
        }
        scribble(slab.memory());
        other.client.ask(Call::Bye).unwrap();
        scribble(slab.memory());
        let next = user.open(&name, true).unwrap();
        assert!(next.cell().value() <= MAX_VALUE);
        user.release(&next);
    }
    assert_eq!(user.client.ask(Call::Ping), Ok(Answer::Done));
}

#[test]
fn timeline_is_refused_when_no_cell_is_left() {
    let broker = TestBroker::with(|config| config.limits.fds = Some(1));
    let mut user = User::join(&broker.socket);
    let opened: Vec<_> = (0..CELLS).map(|i| user.open(&format!("{i}"), false).unwrap()).collect();
    assert_eq!(user.open("more", false).err(), Some(full(Limit::Fds, 1, 1)));
    assert!(user.open("0", true).is_ok(), "it has its cell");
    user.release(&opened[5]);
    let more = user.open("more", true).unwrap();
    assert_eq!((more.answer.cell, more.cell().value(), more.ending()), (opened[5].answer.cell, 0, None));
    assert_eq!(user.client.status().fds, 1);
    assert_eq!(user.client.status().timelines, u64::from(CELLS));
}

#[test]
fn broker_without_fds_refuses_timelines_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pw/test.sock");
    let mut broker = roles::start_broker(&socket, 64);
    broker.expect(SAYS);
    let mut user = User::join(&socket);
    let mut chunks = 0;
    let failed = loop {
        let chunk = partywall_os::memfd::frozen("partywall:test", b"x").unwrap();
        let commit = crate::common::host_commit(&format!("{chunks}"), &[1]);
        match user.client.ask_with(Call::Commit(commit), &[&chunk]).0 {
            Ok(_) => chunks += 1,
            Err(refusal) => break refusal,
        }
    };
    assert!(chunks > 5 && matches!(failed, Refusal::BadFd { .. }), "{failed:?}");
    assert!(matches!(user.open("t", true).err(), Some(Refusal::Limit { limit: Limit::Fds, .. })));
    assert!(matches!(user.client.ask(Call::Remove { name: called("0"), deadline: None }), Ok(Answer::Removed { .. })));
    for lease in 1..=3 {
        user.client.ask(Call::Release { lease: LeaseId(lease) }).unwrap();
    }
    eventually("there is room again", || user.open("t", true).is_ok());
}

#[test]
fn stopped_broker_ends_all_waits() {
    let mut broker = TestBroker::start();
    let mut reader = User::join(&broker.socket);
    let opened = reader.open("t", false).unwrap();
    let mut writer = User::join(&broker.socket);
    let mine = writer.open("t", true).unwrap();
    mine.cell().signal(1).unwrap();
    let stop = reader.client.ask(Call::Stop { force: false });
    assert_eq!(stop, Err(Refusal::InUse { names: 1, members: 1 }));
    broker.stop();
    broker.exit();
    assert_eq!((opened.wait(1), opened.wait(2)), (Progress::Reached, Progress::Ended(TimelineEnding::BrokerGone)));
}

#[test]
fn timeline_ended_by_its_members_takes_a_next_writer() {
    let broker = TestBroker::start();
    let mut user = User::join(&broker.socket);
    let waiter = user.open("t", false).unwrap();
    // Members do this when the broker is silent for too long. Then the broker wakes up.
    waiter.cell().end(TimelineEnding::BrokerGone);
    let mut writer = User::join(&broker.socket);
    let first = writer.open("t", true).unwrap();
    assert_eq!((first.answer.incarnation, first.ending()), (2, None));
    first.cell().signal(3).unwrap();
    first.cell().end(TimelineEnding::BrokerGone);
    let second = writer.open("t", true).unwrap();
    assert_eq!((second.cell().value(), second.answer.incarnation), (3, 3));
    assert_eq!(writer.client.ask(Call::Release { lease: first.answer.lease }), Ok(Answer::Done));
    assert_eq!((second.ending(), waiter.wait(1)), (None, Progress::Ended(TimelineEnding::BrokerGone)));
}

#[test]
fn dead_writers_timeline_does_not_keep_an_idle_broker() {
    let (mut broker, lock) = TestBroker::with_idle_exit(Duration::from_millis(50));
    let mut writer = roles::start("writer", &broker.socket);
    writer.expect(SAYS);
    drop(lock);
    writer.kill();
    assert_eq!(broker.exit(), partywall_broker::Exit::Idle);
}

#[test]
fn open_with_lost_answer_gives_the_same_lease() {
    let broker = TestBroker::start();
    let mut user = User::join(&broker.socket);
    let opened = user.open("t", true).unwrap();
    let id = user.client.last;
    let identity = user.client.identity();
    drop(user);
    let mut client = shake_hands(&broker.socket, Some(identity)).unwrap();
    client.last = id;
    let request = Request { id, call: Call::OpenTimeline { name: called("t"), writer: true, shared: false } };
    client.call.send(&frame::encode(&request, 0, MAX_MESSAGE).unwrap(), &[]);
    let (reply, fds) = client.reply();
    assert_eq!((reply.outcome, fds.len()), (Ok(Answer::Timeline(opened.answer)), 1));
    assert_eq!(opened.ending(), None);
}

#[test]
fn impossible_layouts_are_refused() {
    let broker = TestBroker::start();
    let mut user = User::join(&broker.socket);
    assert!(matches!(
        user.client.ask_about("a b", |name| Call::OpenTimeline { name, writer: false, shared: false }),
        Err(Refusal::BadName { .. })
    ));
    assert!(matches!(user.abandon("x"), Err(Refusal::ObjectNotFound { kind: ObjectKind::Timeline, .. })));
    let (_, lease) = user.client.commit("segment", b"x", true);
    let stale = Some(Refusal::Stale { what: Handle::Lease });
    assert_eq!(user.ask(Call::FollowTimeline { lease }).err(), stale, "it is on a segment");
    let mut other = User::join(&broker.socket);
    let lease = other.open("t", false).unwrap().answer.lease;
    assert_eq!(user.ask(Call::FollowTimeline { lease }).err(), stale, "the lease belongs to another member");
    assert_eq!(user.client.ask(Call::AwaitWithdrawal { lease }).err(), stale);
    assert_eq!(user.client.ask(Call::Release { lease }).err(), stale);
}
