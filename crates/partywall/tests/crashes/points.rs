//! Checks that tests pass all crash points. Tests report the points that they pass to [`assert_passed`].

use std::{collections::BTreeSet, fs, path::Path};

pub(crate) const SLOT_TAKEN: &[&str] = &["slots: slot held, holder not notified", "slots: slot freed, nobody served"];
pub(crate) const SLOT_WAITED_FOR: &[&str] = &[
    "slots: entry waiting, tail not advanced",
    "slots: turn has come, slot not taken",
    "slots: slot held, entry not left",
];
pub(crate) const SLOT_GIVEN_UP: &[&str] = &["slots: waits no more, nobody notified"];
pub(crate) const SLOT_HANDED: &[&str] = &[
    "slots: slot freed, nobody served",
    "slots: slot handed, waiter not notified",
    "slots: entry granted, waiter not woken",
];
pub(crate) const SLOT_REVOKED: &[&str] = &["slots: slot revoked, nobody served"];
pub(crate) const SLOT_OFFERED: &[&str] = &["slots: slot offered, holder not notified"];
pub(crate) const SLOT_ACCEPTED: &[&str] = &["slots: slot accepted, holder not notified"];
pub(crate) const SLOTS_RECOVERED: &[&str] =
    &["slots: entries of the dead left, slots not freed", "slots: those of the dead freed, nobody served"];

pub(crate) const SIGNALLING: &[&str] = &[
    "timeline: value stored, not announced",
    "timeline: signalled, nobody notified",
    "eventcount: mark cleared, not counted",
    "eventcount: counted, nobody woken",
];
pub(crate) const PROMISING: &[&str] = &["timeline: announced, nobody notified"];
pub(crate) const CLOSING: &[&str] = &["timeline: closing stored, nobody notified"];
pub(crate) const ENDING: &[&str] = &[
    "timeline: ending stored, value not poisoned",
    "timeline: value poisoned, last not stored",
    "timeline: ended, nobody notified",
];
pub(crate) const SLEEPING: &[&str] = &["eventcount: marked as a sleeper, not asleep"];

pub(crate) const PUBLISHING: &[&str] = &[
    "topic: blocks found unused, not freed",
    "topic: described, not in the ring",
    "topic: space found, entry not filled",
    "topic: in the ring, tail not moved",
    "topic: in the ring, block still held",
    "topic: published, nobody notified",
];
pub(crate) const NOTIFYING: &[&str] = &["eventcount: mark cleared, not counted", "eventcount: counted, nobody woken"];
pub(crate) const RETIRING: &[&str] = &["topic: retired, nobody notified"];
pub(crate) const TAKING_A_PORT: &[&str] = &["topic: number taken, port not", "topic: port taken, words not set"];
pub(crate) const JOINING_TO_PUBLISH: &[&str] =
    &["topic: publisher's words set, port not open", "topic: publisher detached, nobody notified"];
pub(crate) const SUBSCRIBING: &[&str] = &[
    "topic: subscriber's words set, port not open",
    "topic: subscriber's port open, not counted",
    "topic: subscriber counted, cursor not final",
    "topic: subscriber joined, not notified",
    "topic: subscriber detached, nobody notified",
    "topic: subscriber's port free, nobody notified",
];
pub(crate) const RECEIVING: &[&str] = &[
    "eventcount: marked as a sleeper, not asleep",
    "topic: hold written, not known to be seen",
    "topic: sample held, nobody notified",
    "topic: age counted, not in its bucket",
    "topic: sample released, nobody notified",
];
pub(crate) const MAKING_SPACE: &[&str] = &["topic: cursor moved, hold not known to be seen"];
pub(crate) const OVERTAKEN: &[&str] = &["topic: hold given up, nobody notified"];
pub(crate) const TOPIC_RECOVERED: &[&str] = &[
    "topic: detached, samples not settled",
    "topic: detached, nobody notified",
    "topic: holds of the dead cleared, port not free",
    "topic: ports of the dead free, blocks not taken",
    "topic: blocks of the dead taken, not free",
];

pub(crate) const SUBMITTING: &[&str] = &[
    "queue: slot taken, tail not moved",
    "queue: tail moved, slot not checked",
    "queue: described, not pending",
    "queue: attachments seen, not pending",
    "queue: pending, blocks still held",
    "queue: pending, nobody notified",
    "queue: slot given back, nobody notified",
];
pub(crate) const LATE: &[&str] = &["queue: no late task found, count not moved"];
pub(crate) const CLAIMING: &[&str] = &["queue: claimed, no lease", "queue: head moved, slot not checked again"];
pub(crate) const WAKING: &[&str] = &["queue: woken, other workers not marked"];
pub(crate) const COMPLETING: &[&str] = &[
    "queue: attempt recorded, no result yet",
    "queue: done, block still held",
    "queue: inputs free, slot not",
    "queue: done, nobody notified",
];
pub(crate) const QUEUEING: &[&str] = &["queue: output named, not enqueued", "queue: enqueued, nobody notified"];
pub(crate) const FAILING: &[&str] = &[
    "queue: failure recorded, task still claimed",
    "queue: attempt taken back, nobody notified",
    "queue: attempt drained, slot not checked",
];
pub(crate) const TAKING: &[&str] = &[
    "queue: result taken, block not",
    "slots: slot taken over, holder not notified",
    "queue: output free, slot not draining",
    "queue: slot free, nobody notified",
    "queue: over, nobody notified",
];
pub(crate) const VIEWING: &[&str] = &["queue: output left, slot not checked"];
pub(crate) const TAKING_VIEWED: &[&str] =
    &["queue: viewed output taken, not named", "queue: viewed output given back, worker not looked at"];
pub(crate) const CANCELLING: &[&str] = &["queue: output free, slot not draining", "queue: inputs free, slot not"];
pub(crate) const RETRYING: &[&str] =
    &["queue: more attempts allowed, dead letter not pending", "queue: dead letter pending, nobody notified"];
pub(crate) const TENDING: &[&str] =
    &["queue: attempt recorded as open, not taken back", "queue: attempt taken back, nobody notified"];
pub(crate) const QUEUE_RECOVERED: &[&str] = &[
    "queue: detached, nobody notified",
    "queue: slots of the dead free, blocks not taken",
    "queue: blocks of the dead taken, not free",
];

pub(crate) const SERVING: &[&str] = &[
    "broker: control memory created, request not decided",
    "broker: decided, not recorded",
    "broker: recorded, effects not carried out",
    "broker: effect not carried out",
    "broker: recorded beside the registry",
    "broker: detached, not recorded",
];
pub(crate) const GUARDING: &[&str] = &["broker: late store seen, not recorded"];
pub(crate) const CONTINUING: &[&str] = &[
    "broker: former state read, rest still open",
    "broker: rest closed but memory, members not restored",
    "broker: members restored, effects not repeated",
    "broker: state collected, no snapshot",
];

pub(crate) const HANDING_OVER: &[&str] = &[
    "broker: check prepared, not started",
    "broker: check started, not answered",
    "broker: snapshot for another program written, request not answered",
    "broker: replacement answered, not noted",
    "broker: replacement noted, not handed over",
];
pub(crate) const EXECUTING: &[&str] =
    &["supervisor: worker has handed over, nothing executed", "supervisor: handover read, nothing taken"];

pub(crate) const RECORDING: &[&str] = &["trace: number taken, entry not", "trace: entry half written"];

const PASSED: &[&[&str]] = &[
    SERVING,
    GUARDING,
    CONTINUING,
    HANDING_OVER,
    EXECUTING,
    RECORDING,
    SLOT_TAKEN,
    SLOT_WAITED_FOR,
    SLOT_GIVEN_UP,
    SLOT_HANDED,
    SLOT_REVOKED,
    SLOT_OFFERED,
    SLOT_ACCEPTED,
    SLOTS_RECOVERED,
    SIGNALLING,
    PROMISING,
    CLOSING,
    ENDING,
    SLEEPING,
    PUBLISHING,
    NOTIFYING,
    RETIRING,
    TAKING_A_PORT,
    JOINING_TO_PUBLISH,
    SUBSCRIBING,
    RECEIVING,
    MAKING_SPACE,
    OVERTAKEN,
    TOPIC_RECOVERED,
    SUBMITTING,
    LATE,
    CLAIMING,
    WAKING,
    COMPLETING,
    QUEUEING,
    FAILING,
    TAKING,
    VIEWING,
    TAKING_VIEWED,
    CANCELLING,
    RETRYING,
    TENDING,
    QUEUE_RECOVERED,
];

/// Checks that a test has passed these points.
pub(crate) fn assert_passed(points: &BTreeSet<String>, expected: &[&[&str]]) {
    let missed: Vec<_> = expected.concat().into_iter().filter(|point| !points.contains(*point)).collect();
    assert!(missed.is_empty(), "{missed:?} are not among {points:?}");
}

#[test]
fn each_point_is_passed_by_a_test() {
    let mut there = BTreeSet::new();
    for sources in ["../partywall-shm/src", "../partywall-broker/src"] {
        collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(sources), &mut there);
    }
    assert!(there.contains("topic: described, not in the ring"), "they are not found: {there:?}");
    let passed: BTreeSet<_> = PASSED.concat().into_iter().map(str::to_owned).collect();
    assert_eq!(there, passed, "those of the code, and those that tests pass");
}

/// Adds the names of all points in the sources below a folder.
fn collect(folder: &Path, points: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, points);
        } else {
            let text = fs::read_to_string(&path).unwrap();
            let names = text.split("point(").skip(1).filter_map(|call| call.trim_start().strip_prefix('"'));
            points.extend(names.filter_map(|name| name.split_once('"')).map(|(name, _)| name.to_owned()));
        }
    }
}
