//! Memory of loans that programs use after the loan is over.

use partywall::{
    DType, Error, LoanMemory, Policy, Publisher,
    error::{LimitReached, TopicLimit},
};

use super::{SHORT, TIMEOUT, frames, publish, receive, unused, write};
use crate::world::{World, eventually};

/// Publishes a sample whose block the returned memory keeps.
fn publish_kept(publisher: &Publisher, value: u32) -> LoanMemory {
    let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
    write(&mut loan, value);
    let memory = loan.keep_memory();
    loan.filled().publish(TIMEOUT).unwrap();
    memory
}

// Holds 250.
#[test]
fn block_of_a_loan_is_free_when_its_memory_is_dropped() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let published = publish_kept(&publisher, 1);
    assert_eq!(receive(&subscriber), 1, "it is delivered all the same");
    let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
    let given_back = loan.keep_memory();
    drop(loan);
    for value in 2..100 {
        publish(&publisher, value);
        assert_eq!(receive(&subscriber), value);
    }
    assert_eq!(topic.stats().held, 2, "the two, and no reserve");
    drop(published);
    eventually("a block is back", || topic.stats().held == 1);
    drop(given_back);
    eventually("the other block is back", || topic.stats().held == 0);
    // The last user of the publisher's port.
    let last = publish_kept(&publisher, 100);
    drop(publisher);
    assert_eq!(receive(&subscriber), 100);
    drop((last, subscriber));
    eventually("its port is free", || topic.stats().publishers.is_empty());
    unused(&topic);
}

#[test]
fn memory_that_is_dropped_before_the_end_of_the_loan_keeps_nothing() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
    drop(loan.keep_memory());
    write(&mut loan, 1);
    loan.filled().publish(TIMEOUT).unwrap();
    assert_eq!(topic.stats().held, 1, "the reserve");
    drop(publisher);
    unused(&topic);
}

#[test]
fn memory_of_a_sample_that_is_published_at_the_second_attempt_keeps_its_block() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    for value in 0..4 {
        publish(&publisher, value);
    }
    let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
    write(&mut loan, 4);
    let memory = loan.keep_memory();
    let full = loan.filled().publish(SHORT).unwrap_err();
    assert_eq!(receive(&subscriber), 0);
    full.value.publish(TIMEOUT).unwrap();
    for value in 1..10 {
        assert_eq!(receive(&subscriber), value);
        publish(&publisher, value + 4);
    }
    assert_eq!(topic.stats().held, 2, "it has left the ring, and there is the reserve");
    drop((memory, publisher, subscriber));
    unused(&topic);
}

// Holds 250.
#[test]
fn publisher_whose_memories_keep_all_its_blocks_does_not_wait() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let mut kept: Vec<_> = (0..6).map(|value| publish_kept(&publisher, value)).collect();
    let refused = publisher.loan(DType::U32, &[2, 5], TIMEOUT);
    assert!(matches!(
        refused,
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Viewed, most: 6, .. }))
    ));
    kept.pop();
    // On a GPU the block comes back a little later.
    publish(&publisher, 6);
    drop((kept, publisher));
    unused(&topic);
}
