//! A history in which every promise is kept, and each damage that the checker must find in it.

use super::*;

/// A message, task or number of a member.
const fn of(member: u64, number: u64) -> u64 {
    member << 32 | number
}

const WRITER: u32 = 1;
const READER: u32 = 2;
const WATCHER: u32 = 3;
const PUBLISHER: u32 = 4;
const SUBSCRIBER: u32 = 5;
const VIEWER: u32 = 6;
const SUBMITTER: u32 = 7;
const HOLDER: u32 = 8;
const TAKER: u32 = 9;
const BUILDER: u32 = 10;
const EVICTED: u32 = 11;
const KILLED: u32 = 12;
const MEMBERS: u32 = 12;

/// Returns a whole history. Each record is a moment later than the one before.
fn history() -> Vec<Record> {
    let moment = Moment::at;
    let text = String::from;
    let (first, second, third) = (of(4, 1), of(4, 2), of(4, 3));
    let failed = of(12, 1);
    let mut all = vec![(0, What::Plan { seed: 1, seconds: 1 })];
    all.extend((1..=MEMBERS).map(|member| (member, What::Started { role: text("any") })));
    all.extend([
        (WATCHER, What::Watching),
        (WRITER, What::Writing { number: 7 }),
        (WRITER, What::Committed { number: 7, version: 1, began: moment(14) }),
        (WATCHER, What::Saw { version: 1 }),
        (WRITER, What::Writing { number: 8 }),
        (READER, What::Read { number: 7, version: 1, whole: true, began: moment(17) }),
        (WRITER, What::Committed { number: 8, version: 2, began: moment(18) }),
        (WATCHER, What::Saw { version: 2 }),
        (READER, What::Read { number: 8, version: 2, whole: true, began: moment(20) }),
        // The topic.
        (SUBSCRIBER, What::Subscribed),
        (VIEWER, What::Joined),
        (PUBLISHER, What::Publishing { message: first }),
        (PUBLISHER, What::Published { message: first }),
        (PUBLISHER, What::Publishing { message: second }),
        (PUBLISHER, What::Published { message: second }),
        (PUBLISHER, What::Publishing { message: third }),
        (PUBLISHER, What::Published { message: third }),
        (KILLED, What::Publishing { message: failed }),
        (SUBSCRIBER, What::Got { message: first, whole: true, failed: false }),
        (SUBSCRIBER, What::Got { message: second, whole: true, failed: false }),
        (SUBSCRIBER, What::Got { message: third, whole: true, failed: false }),
        (SUBSCRIBER, What::Got { message: failed, whole: false, failed: true }),
        (VIEWER, What::Viewed { message: first, position: 0, missed: 0, whole: true, failed: false }),
        (VIEWER, What::Viewed { message: third, position: 2, missed: 1, whole: true, failed: false }),
        (SUBSCRIBER, What::Idle),
        // The queue.
        (SUBMITTER, What::Submitting { task: of(7, 1) }),
        (SUBMITTER, What::Submitted { task: of(7, 1) }),
        // A holder is stopped, and another member gets the permit.
        (HOLDER, What::Acquired),
        (HOLDER, What::Stopped { until: Some(Progress::Acquired) }),
        (TAKER, What::Acquired),
        (HOLDER, What::Continued),
        (SUBMITTER, What::Result { task: of(7, 1), right: true }),
        (HOLDER, What::Releasing),
        (TAKER, What::Releasing),
        // A block goes from hand to hand.
        (HOLDER, What::Took { block: 1 }),
        (HOLDER, What::Giving { block: 1, whole: true }),
        (HOLDER, What::Offered { block: 1, generation: 5, mark: 9 }),
        (TAKER, What::Took { block: 1 }),
        (TAKER, What::Accepted { block: 1, generation: 5, mark: 9 }),
        (TAKER, What::Giving { block: 1, whole: true }),
        // A name is built and opened.
        (BUILDER, What::Claimed),
        (BUILDER, What::Ending { number: of(10, 1) }),
        (EVICTED, What::Opened { number: of(10, 1), whole: true }),
        (EVICTED, What::Claimed),
        (EVICTED, What::Evicted),
        (BUILDER, What::Claimed),
        (EVICTED, What::Failed { call: text("commit"), why: text("it is evicted") }),
        (EVICTED, What::Killed),
        (BUILDER, What::Ending { number: of(10, 2) }),
        // A call lacks memory.
        (READER, What::Limited { of: Resource::Memory }),
        (READER, What::Lacked { call: text("open"), of: Resource::Memory, began: moment(63) }),
        (READER, What::Lifted { of: Resource::Memory }),
        // A builder lacks a descriptor. Another one builds before it has said so.
        (BUILDER, What::Limited { of: Resource::Descriptors }),
        (BUILDER, What::Claimed),
        (READER, What::Claimed),
        (BUILDER, What::Lacked { call: text("allocate"), of: Resource::Descriptors, began: moment(67) }),
        (BUILDER, What::Lifted { of: Resource::Descriptors }),
        (READER, What::Ending { number: of(2, 1) }),
        (KILLED, What::Killed),
    ]);
    all.extend((1..EVICTED).map(|member| (member, What::Left)));
    all.push((0, What::Counted { of: text("permits"), least: 2, most: 2, found: 2 }));
    all.push((0, What::End { kills: 2 }));
    let record = |(at, (member, what))| Record { at: moment(at), member, what };
    (0..).zip(all).map(record).collect()
}

fn violations(records: &[Record]) -> Vec<String> {
    check(records).into_iter().flat_map(|check| check.violations).collect()
}

#[test]
fn promises_that_were_kept_are_no_violations() {
    assert_eq!(violations(&history()), [""; 0]);
}

/// A change of a record; `None` leaves it out.
type Damage<'a> = &'a dyn Fn(&Record) -> Option<Vec<Record>>;

/// Which record is damaged, how, and what the checker says.
type Case<'a> = (fn(&What) -> bool, Damage<'a>, &'a str);

/// Damages the first record that fits.
#[track_caller]
fn damaged(fits: fn(&What) -> bool, damage: Damage<'_>) -> Vec<String> {
    let mut records = history();
    let index = records.iter().position(|record| fits(&record.what)).unwrap();
    let with = damage(&records[index]).unwrap_or_default();
    records.splice(index..=index, with);
    violations(&records)
}

macro_rules! fits {
    ($pattern:pat) => {
        |what: &What| matches!(what, $pattern)
    };
}

// Holds 10.
#[test]
fn every_broken_promise_is_found() {
    let lost: Damage<'_> = &|_| None;
    let twice: Damage<'_> = &|record| Some(vec![record.clone(), record.clone()]);
    let instead = |what: What| move |record: &Record| Some(vec![Record { what: what.clone(), ..record.clone() }]);
    let second = of(4, 2);
    let cases: &[Case<'_>] = &[
        (fits!(What::Writing { .. }), lost, "nobody wrote the number 7"),
        (
            fits!(What::Read { version: 1, .. }),
            &instead(What::Read { number: 7, version: 1, whole: false, began: Moment::at(17) }),
            "reader 2 read a mix",
        ),
        (
            fits!(What::Read { version: 2, .. }),
            &instead(What::Read { number: 7, version: 1, whole: true, began: Moment::at(20) }),
            "got version 1 after 2 was committed",
        ),
        (
            fits!(What::Read { version: 2, .. }),
            &instead(What::Read { number: 7, version: 2, whole: true, began: Moment::at(20) }),
            "version 2 is 8 and 7",
        ),
        (fits!(What::Saw { .. }), lost, "watcher 3 did not see version 1"),
        (fits!(What::Saw { .. }), twice, "watcher 3 saw versions twice"),
        (fits!(What::Got { .. }), lost, "subscriber 5 lost message 0x400000001"),
        (fits!(What::Got { .. }), twice, "got message 0x400000001 after 0x400000001"),
        (fits!(What::Got { message: 0x4_0000_0002, .. }), lost, "lost a message before 0x400000003"),
        (fits!(What::Publishing { .. }), lost, "got message 0x400000001, which nobody published"),
        (
            fits!(What::Got { message: 0x4_0000_0002, .. }),
            &instead(What::Got { message: second, whole: false, failed: false }),
            "subscriber 5 got a mix",
        ),
        // Its publisher lives.
        (
            fits!(What::Got { message: 0x4_0000_0002, .. }),
            &instead(What::Got { message: second, whole: false, failed: true }),
            "subscriber 5 got a mix",
        ),
        (fits!(What::Idle), lost, "was not told that the last publisher had left"),
        (
            fits!(What::Subscribed),
            &|record| Some(vec![record.clone(), Record { what: What::Idle, ..record.clone() }]),
            "was told that the topic is idle before message 0x400000001",
        ),
        (fits!(What::Viewed { .. }), twice, "viewer 6 missed 0 before position 0"),
        (fits!(What::Viewed { .. }), twice, "viewer 6 got message 0x400000001 twice"),
        (
            fits!(What::Viewed { .. }),
            &instead(What::Viewed { message: of(4, 1), position: 0, missed: 0, whole: false, failed: false }),
            "viewer 6 held a mix",
        ),
        (
            fits!(What::Viewed { .. }),
            &instead(What::Viewed { message: of(4, 9), position: 0, missed: 0, whole: true, failed: false }),
            "viewer 6 got message 0x400000009, which nobody published",
        ),
        (fits!(What::Result { .. }), lost, "task 0x700000001 of submitter 7 is lost"),
        (fits!(What::Result { .. }), twice, "task 0x700000001 has two results"),
        (
            fits!(What::Result { .. }),
            &instead(What::Result { task: of(7, 1), right: false }),
            "the result of task 0x700000001 is wrong",
        ),
        (fits!(What::Submitting { .. }), lost, "nobody submitted task 0x700000001"),
        (
            fits!(What::Acquired),
            &|record| Some((1..=3).map(|member| Record { member, ..record.clone() }).collect()),
            "3 members had one of 2 permits",
        ),
        (fits!(What::Took { .. }), twice, "members 8 and 8 had block 1"),
        (
            fits!(What::Giving { .. }),
            &instead(What::Giving { block: 1, whole: false }),
            "block 1 changed while member 8 had it",
        ),
        (fits!(What::Claimed), twice, "members 10 and 10 built the same name"),
        (fits!(What::Evicted), lost, "members 11 and 10 built the same name"),
        (fits!(What::Evicted), lost, "`commit` of member 11 failed"),
        (fits!(What::Lacked { of: Resource::Descriptors, .. }), lost, "members 10 and 2 built the same name"),
        (
            fits!(What::Opened { .. }),
            &instead(What::Opened { number: of(10, 1), whole: false }),
            "member 11 opened 42949672961, which nobody built",
        ),
        (fits!(What::Ending { .. }), lost, "member 11 opened 42949672961, which nobody built"),
        (fits!(What::Offered { .. }), lost, "member 9 accepted block 1 with 0x9, which nobody offered"),
        (
            fits!(What::Accepted { .. }),
            &instead(What::Accepted { block: 1, generation: 5, mark: 8 }),
            "member 9 accepted block 1 with 0x8, which nobody offered",
        ),
        (fits!(What::Accepted { .. }), twice, "block 1 was accepted twice"),
        (
            fits!(What::Stopped { .. }),
            &instead(What::Stopped { until: Some(Progress::Took) }),
            "no other member Took while member 8 was stopped",
        ),
        (
            fits!(What::Limited { .. }),
            &|record| Some(vec![Record { what: What::Late { call: "open".into(), ms: 9000 }, ..record.clone() }]),
            "`open` of member 2 took 9000 ms",
        ),
        (fits!(What::Limited { .. }), lost, "`open` of member 2 had no Memory, which it was not left without"),
        (fits!(What::Left), lost, "member 1 did not come to its end"),
        (fits!(What::Killed), lost, "member 11 did not come to its end"),
        (fits!(What::Killed), lost, "1 of 2 kills are in the history"),
        (
            fits!(What::Counted { .. }),
            &instead(What::Counted { of: "permits".into(), least: 2, most: 2, found: 1 }),
            "permits: 1, not 2 to 2",
        ),
        (fits!(What::Counted { .. }), lost, "nothing was counted at the end"),
    ];
    for (fits, damage, said) in cases {
        let found = damaged(*fits, *damage);
        assert!(found.iter().any(|violation| violation.contains(said)), "{said}: {found:?}");
    }
}
