//! The spans of `tracing`, for programs that show where time goes.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use partywall::{DType, Place, Policy, Task};
use tracing::{
    Event, Metadata, Subscriber,
    span::{Attributes, Id, Record},
    subscriber::with_default,
};

use super::{
    TIMEOUT,
    world::{World, alone},
};

/// Keeps the names of Partywall's spans in the order in which they are entered.
#[derive(Default, Clone)]
struct Names {
    last: Arc<AtomicU64>,
    made: Arc<Mutex<Vec<(u64, &'static str)>>>,
    entered: Arc<Mutex<Vec<&'static str>>>,
}

impl Subscriber for Names {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("partywall")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.made.lock().unwrap().push((id, span.metadata().name()));
        Id::from_u64(id)
    }

    fn enter(&self, span: &Id) {
        let made = self.made.lock().unwrap();
        let (_, name) = made.iter().find(|(id, _)| *id == span.into_u64()).unwrap();
        self.entered.lock().unwrap().push(name);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn public_operations_have_spans() {
    // Other threads have no subscriber. A span that one of them makes first counts as unwanted for the whole process.
    alone(|| {
        let world = World::new();
        let domain = world.connect();
        let topic = domain.topic("frames").dtype(DType::U8).shape(&[1]).place(Place::Host).create().unwrap();
        let (publisher, subscriber) = (topic.publisher().unwrap(), topic.subscribe(Policy::Block).join().unwrap());
        let writer = domain.timeline_writer("steps").unwrap();
        let queue = domain.queue("work").tasks(1).place(Place::Host).create().unwrap();
        let weights = domain.create("weights", Place::Host).tensor("w", DType::U8, &[1]).kept(true);
        drop(weights.allocate().unwrap().commit().unwrap());
        let names = Names::default();
        with_default(names.clone(), || {
            drop(domain.opener("weights").open().unwrap());
            publisher.loan(DType::U8, &[1], TIMEOUT).unwrap().filled().publish(TIMEOUT).unwrap();
            drop(subscriber.recv(TIMEOUT).unwrap());
            writer.signal(1).unwrap();
            writer.timeline().wait(1, TIMEOUT).unwrap();
            let ticket = queue.submit(Task::new("count"), TIMEOUT).unwrap();
            queue.claim(TIMEOUT).unwrap().complete().unwrap();
            ticket.wait(TIMEOUT).unwrap();
        });
        let entered = names.entered.lock().unwrap();
        assert_eq!(*entered, ["open", "publish", "receive", "wait", "submit", "claim"]);
    });
}
