//! A registry that contains something of everything.

use partywall_wire::Deadline;

use super::*;
use crate::registry::types::Then;

/// Returns the same registry each time, and the records of the events that have led to it.
pub(crate) fn sample() -> (Registry, Vec<u8>) {
    let (mut w, [owner, reader, waiter, dead, evicted]) = Watched::with_members();
    w.ask(dead, Call::UsesGpu { mps: Some("/tmp/mps".into()) }).1.unwrap();
    w.commit(owner, "kept", true);
    w.commit(owner, "kept", true);
    let growing = w.commit_call("growing", true, true);
    let lease = match w.ask(owner, growing).1 {
        Ok(Answer::Committed { lease, .. }) => lease,
        other => panic!("{other:?}"),
    };
    w.grow(owner, lease, 0, &[5]).0.unwrap();
    w.opened(reader, "kept");
    w.opened(dead, "kept");
    w.open(waiter, "later", None, true).unwrap();
    w.claim(reader, "built");
    let memory = w.memory_of(Kind::Legacy, &[10], true, false, Lifetime::Owned);
    w.ask(owner, Asked::from(commit(called("legacy"), memory))).1.unwrap();
    for (name, shape) in [("pool", control(2, None)), ("topic", control(4, Some(1))), ("queue", queue())] {
        let memory = w.memory(&[10], false, true, Lifetime::Shared);
        let memory = w.with_control(&memory, shape);
        w.ask(owner, Asked::from(commit(called(name), memory))).1.unwrap();
    }
    let queue = w.opened(reader, "queue").lease;
    let segment = w.opened(reader, "kept").lease;
    w.ask(reader, Call::Attach { queue, segment }).1.unwrap();
    w.timeline(owner, "line", true);
    w.timeline(reader, "line", false);
    w.semaphore(owner, "permits", 3);
    w.ask(waiter, Call::Watch { pattern: "none".into(), after: point(0) }).1.unwrap();
    w.commit(evicted, "gone", false);
    w.ask(owner, Call::Evict { whom: Whom::Member(evicted.0), kill: false }).1.unwrap();
    let deadline = Some(Deadline { after: 1000, then: Then::Stale });
    w.ask(owner, Call::Remove { name: called("kept"), deadline }).1.unwrap();
    let memory = w.memory_of(Kind::Vmm, &[10], false, false, Lifetime::Kept);
    let chunk = memory.chunks[0].fd.unwrap();
    w.ask(owner, Asked::from(commit(called("lost"), memory))).1.unwrap();
    w.apply(Event::DeviceLost { place: GPU, chunks: vec![chunk] });
    w.apply(Event::Suspected { member: reader });
    w.apply(Event::Died { member: dead });
    (w.registry, w.recorded)
}
