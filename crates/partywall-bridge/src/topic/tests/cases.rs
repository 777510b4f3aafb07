use std::time::Duration;

use super::world::{RingEntry, World, WorldOptions};
use crate::topic::{
    KEEPALIVE, PIECE_BYTES,
    receiver::{Payload, ReceiverEvent, StreamEnd},
    sender::{BATCH_BYTES, SenderEvent},
    wire::{EndReason, FromOrigin, FromReceiver, SampleKind, StreamPolicy, Window},
};

const TIMEOUT: Duration = Duration::from_secs(10);

fn world(policy: StreamPolicy, window: Window) -> World {
    let mut world = World::new(WorldOptions { policy, window, timeout: TIMEOUT, hostile: false });
    world.settle();
    world
}

fn blocking() -> World {
    world(StreamPolicy::Block, Window { samples: 2, bytes: 4 * PIECE_BYTES })
}

fn sample(bytes: u64) -> RingEntry {
    RingEntry { bytes, failed: false, own: false }
}

/// Returns how many samples there are between the first one and those that cannot be published any more.
fn publish_until_full(world: &mut World) -> usize {
    let before = world.ring.len();
    loop {
        let published = world.ring.len();
        world.publish(sample(1));
        while world.take() {}
        if world.ring.len() == published {
            return published - before;
        }
    }
}

#[test]
fn sample_that_exceeds_the_window_crosses() {
    let mut world = world(StreamPolicy::Block, Window { samples: 4, bytes: 32 * PIECE_BYTES });
    world.publish(sample(100_000_000));
    world.take();
    // A window of it is on its way, and nothing is taken behind it.
    assert_eq!(world.down.len(), 32);
    world.publish(sample(1));
    assert!(!world.take());
    world.settle();
    assert_eq!(world.local.len(), 2);
}

#[test]
fn samples_without_credit_stay_in_the_ring_and_are_dropped_there() {
    let mut world = world(StreamPolicy::Latest, Window { samples: 1, bytes: PIECE_BYTES });
    for _ in 0..10 {
        world.publish(sample(1));
        world.take();
    }
    world.settle();
    let positions: Vec<u64> = world.local.iter().map(|sample| sample.position).collect();
    assert_eq!(positions, [0, 9]);
    assert_eq!(world.local[1].sequence, 9);
    assert_eq!(world.counts().missed, 8);
}

#[test]
fn publishers_are_free_once_the_timeout_is_over() {
    let mut world = blocking();
    world.disconnect();
    assert_eq!(publish_until_full(&mut world), 4);
    world.pass(TIMEOUT - Duration::from_millis(1));
    assert_eq!(publish_until_full(&mut world), 0);
    world.pass(Duration::from_millis(1));
    assert!(world.sender.stream().is_none());
    for _ in 0..10 {
        world.publish(sample(1));
    }
    assert_eq!(world.ring.len(), 14);
    world.settle();
    // What the ring still keeps crosses; the rest is counted.
    assert_eq!((world.counts().published, world.counts().missed), (3, 11));
    assert_eq!(world.local[0].sequence, 11);
}

#[test]
fn silent_receiver_is_detached_as_well() {
    let mut world = blocking();
    world.open = (false, true);
    assert_eq!(publish_until_full(&mut world), 6);
    for _ in 0..10 {
        world.pass(Duration::from_secs(1));
    }
    assert!(world.sender.stream().is_none());
    world.settle();
    assert_eq!(world.counts().published + world.counts().missed, 6);
}

#[test]
fn slow_receiver_is_waited_for() {
    let mut world = blocking();
    assert_eq!(publish_until_full(&mut world), 6);
    // It answers, and its topic has no loan.
    for _ in 0..100 {
        while world.deliver_down(0, false) || world.deliver_up(0, false) {}
        world.pass(Duration::from_secs(1));
    }
    assert!(world.sender.stream().is_some());
    world.settle();
    assert_eq!(world.counts().published, 6);
}

#[test]
fn half_a_sample_gives_its_loan_back_and_is_sent_again() {
    let mut world = blocking();
    world.publish(sample(3 * PIECE_BYTES));
    world.take();
    world.deliver_down(0, false);
    world.grant(true);
    world.deliver_down(0, false);
    assert_eq!(world.loans(), 1);
    world.down.clear();
    world.disconnect();
    assert_eq!(world.loans(), 0);
    assert!(!world.publisher_is_open());
    world.settle();
    assert_eq!((world.local.len(), world.counts().missed), (1, 0));
}

#[test]
fn sample_that_is_being_published_is_not_sent_again() {
    let mut world = blocking();
    world.publish(sample(1));
    world.take();
    world.deliver_down(0, false);
    world.grant(true);
    world.disconnect();
    assert!(world.publisher_is_open());
    world.finish(true);
    assert!(!world.publisher_is_open());
    world.settle();
    assert_eq!(world.local.len(), 1);
}

#[test]
fn lost_piece_is_asked_for_before_the_receiver_notices_the_silence() {
    let mut world = blocking();
    world.publish(sample(1));
    world.take();
    world.down.clear();
    world.pass(Duration::from_secs(1));
    assert!(matches!(world.down[0].0.body, FromOrigin::Probe { .. }));
    while world.deliver_down(0, false) || world.deliver_up(0, false) || world.grant(true) || world.finish(true) {}
    assert_eq!(world.local.len(), 1);
}

#[test]
fn origin_learns_of_a_receiver_that_left_in_silence() {
    let mut world = blocking();
    world.receiver_event(ReceiverEvent::Stop);
    world.up.clear();
    world.publish(sample(1));
    world.take();
    while world.deliver_down(0, false) || world.deliver_up(0, false) {}
    assert!(world.sender.stream().is_none());
}

#[test]
fn receiver_learns_of_an_end_that_was_lost() {
    let mut world = blocking();
    world.stop_export();
    world.down.clear();
    world.pass(Duration::from_secs(5));
    while world.deliver_down(0, false) || world.deliver_up(0, false) {}
    assert_eq!(world.end, Some(StreamEnd::Origin(EndReason::NotExported)));
}

#[test]
fn receiver_begins_anew_if_a_reachable_origin_is_silent() {
    let mut world = blocking();
    let before = world.receiver.stream().unwrap();
    world.open = (true, false);
    for _ in 0..15 {
        world.pass(Duration::from_secs(1));
    }
    assert_eq!(world.receiver.stream().unwrap().number, before.number + 1);
}

// Holds 456.
#[test]
fn origin_that_ignores_the_credit_fills_no_memory() {
    let window = Window { samples: 2, bytes: 2 * PIECE_BYTES };
    let mut world = World::new(WorldOptions { policy: StreamPolicy::Block, window, timeout: TIMEOUT, hostile: true });
    let FromReceiver::Join(join) = &mut world.up[0].body else { panic!("it has not joined") };
    join.window = Window { samples: 64, bytes: u64::MAX };
    while world.deliver_up(0, false) || world.deliver_down(0, false) {}
    for _ in 0..3 {
        world.publish(sample(10 * PIECE_BYTES));
        world.take();
    }
    assert_eq!(world.down.len(), 30);
    // The world checks what waits after each.
    while world.deliver_down(0, false) {}
    assert_eq!(world.receiver.pending_bytes(), 2 * PIECE_BYTES);
    world.settle();
    assert_eq!(world.counts().published, 3);
}

#[test]
fn topic_without_room_is_asked_for_again() {
    let mut world = blocking();
    world.sender_event(SenderEvent::Stop(EndReason::Full), Vec::new());
    world.deliver_down(0, false);
    assert_eq!(world.end, Some(StreamEnd::Origin(EndReason::Full)));
    assert!(world.up.is_empty() && !world.publisher_is_open());
    world.publish(sample(1));
    world.pass(KEEPALIVE);
    world.settle();
    assert_eq!((world.local.len(), world.counts().missed), (1, 0));
}

/// A topic that is created again is offered before its export notices that the former one is over.
#[test]
fn topic_that_was_offered_is_joined_after_the_end_of_the_former_one() {
    let mut world = blocking();
    world.offer();
    world.end_topic();
    world.settle();
    assert_eq!((world.end, world.joins), (None, 2));
    world.end_topic();
    world.settle();
    assert_eq!((world.end, world.joins), (Some(StreamEnd::Origin(EndReason::TopicOver)), 2));
}

#[test]
fn samples_missed_before_a_skipped_one_are_counted_once() {
    let mut world = world(StreamPolicy::Latest, Window { samples: 4, bytes: PIECE_BYTES });
    world.publish(sample(1));
    world.publish(RingEntry { own: true, ..sample(1) });
    assert!(world.take());
    assert!(world.down.is_empty());
    for _ in 0..2 {
        world.publish(sample(1));
        assert!(world.take());
    }
    world.settle();
    assert_eq!((world.counts().published, world.counts().missed), (2, 1));
}

#[test]
fn messages_of_an_old_instance_are_dropped() {
    let mut world = blocking();
    world.publish(sample(1));
    world.take();
    while world.deliver_down(0, false) || world.grant(true) || world.finish(true) {}
    let late = std::mem::take(&mut world.up);
    assert!(matches!(late[0].body, FromReceiver::Acknowledge(_)));
    world.kill_receiver();
    world.publish(sample(1));
    while world.deliver_up(0, false) || world.deliver_down(0, false) || world.take() {}
    let stream = world.sender.stream();
    let held = world.kept();
    world.up = late;
    while world.deliver_up(0, false) {}
    assert_eq!((world.sender.stream(), world.kept()), (stream, held));
    assert!(world.down.is_empty());
}

fn samples_of_messages(world: &World) -> Vec<usize> {
    let samples = |body: &FromOrigin| match body {
        FromOrigin::First { samples, .. } => samples.len(),
        _ => 0,
    };
    world.down.iter().map(|(message, _)| samples(&message.body)).collect()
}

#[test]
fn small_samples_share_a_message() {
    let mut world = world(StreamPolicy::DropOldest, Window { samples: 8, bytes: 4 * PIECE_BYTES });
    for bytes in [BATCH_BYTES - 1, 1, 1, PIECE_BYTES + 1] {
        world.publish(sample(bytes));
    }
    world.take_up_to(4);
    // As many as fit; the large one has a second piece.
    assert_eq!(samples_of_messages(&world), [2, 1, 1, 0]);
    world.settle();
    assert_eq!(world.local.len(), 4);
}

#[test]
fn lost_message_of_several_samples_is_sent_again() {
    let mut world = world(StreamPolicy::DropOldest, Window { samples: 8, bytes: 4 * PIECE_BYTES });
    (0..3).for_each(|_| world.publish(sample(1)));
    world.take_up_to(3);
    world.down.clear();
    world.publish(sample(1));
    world.take();
    world.deliver_down(0, false);
    world.deliver_up(0, false);
    // All that came too early, together.
    assert_eq!(samples_of_messages(&world), [4]);
    // Twice, and in part known.
    world.deliver_down(0, true);
    world.settle();
    assert_eq!((world.local.len(), world.counts().missed), (4, 0));
}

// Holds 455.
#[test]
fn topic_here_is_idle_once_that_of_the_origin_is() {
    let mut world = blocking();
    assert!(world.publisher_is_open());
    world.publish(sample(1));
    world.set_publisher(false);
    assert!(world.take() && world.take());
    // Both are lost.
    world.down.clear();
    world.pass(Duration::from_secs(1));
    while world.deliver_down(0, false) || world.deliver_up(0, false) {}
    // Not before its sample is published.
    assert!(world.publisher_is_open());
    world.settle();
    assert!(!world.publisher_is_open() && world.local.len() == 1);
    // A publisher joins, and publishes nothing yet.
    world.set_publisher(true);
    world.settle();
    assert!(world.publisher_is_open());
}

// Holds 455.
#[test]
fn topic_here_is_idle_while_its_origin_is_unreachable() {
    let mut world = blocking();
    for has_publisher in [true, false] {
        world.set_publisher(has_publisher);
        world.settle();
        world.disconnect();
        assert!(!world.publisher_is_open());
        world.connect();
        assert_eq!(world.publisher_is_open(), has_publisher);
    }
}

#[test]
fn failed_sample_is_counted_and_not_sent() {
    let mut world = blocking();
    world.publish(RingEntry { bytes: 5 * PIECE_BYTES, failed: true, own: false });
    world.publish(sample(1));
    world.take();
    let (message, payload) = &world.down[0];
    assert!(matches!(&message.body, FromOrigin::First { samples, .. } if samples[0].kind == SampleKind::Failed));
    assert_eq!(payload.as_ref().map(Payload::bytes), Some(0));
    world.settle();
    assert_eq!((world.counts().failed, world.counts().missed), (1, 0));
    assert_eq!(world.local[0].sequence, 1);
}

#[test]
fn refused_stream_is_not_asked_for_again() {
    let mut world = blocking();
    world.stop_export();
    world.settle();
    assert_eq!(world.end, Some(StreamEnd::Origin(EndReason::NotExported)));
    for _ in 0..10 {
        world.pass(Duration::from_secs(10));
        assert!(world.up.is_empty() && world.down.is_empty());
    }
    world.offer();
    world.publish(sample(1));
    world.settle();
    assert_eq!(world.local.len(), 1);
}
