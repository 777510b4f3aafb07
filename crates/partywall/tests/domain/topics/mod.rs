//! Topics: samples that several processes publish and receive, and what becomes of them when one of those goes.

mod ages;
mod ends;
mod memory;

use std::{
    io::BufRead,
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use partywall::{
    DType, Domain, Error, Loan, Place, Policy, Published, Publisher, Sample, Subscriber, Topic, TopicOptions, Wait,
    error::{Busy, Denied, Gone, InvalidArgument, LimitReached, Mismatch, NotFound, TopicLimit},
    info::Named,
};
use partywall_harness::{device, linger, place};
use rustix::event::{PollFd, PollFlags, poll};

use super::{
    TIMEOUT,
    world::{World, eventually},
};

const SHORT: Duration = Duration::from_millis(20);

/// The roles of processes that are killed, stopped or evicted.
#[allow(clippy::print_stdout)] // it is how a role talks to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    let topic = domain.topic("frames").timeout(TIMEOUT).open().unwrap();
    match role {
        "topic publisher" => {
            let publisher = topic.publisher().unwrap();
            publish(&publisher, 7);
            let _half = publisher.loan(DType::U32, &[4], TIMEOUT).unwrap();
            linger();
        }
        "topic reader" | "topic latest reader" => {
            let policy = if role == "topic reader" { Policy::Block } else { Policy::Latest };
            let subscriber = topic.subscriber(policy).unwrap();
            println!("subscribed");
            let receive = |_| {
                let sample = subscriber.recv(TIMEOUT).unwrap();
                println!("received");
                sample
            };
            let held: Vec<_> = (0..2).map(receive).collect();
            let _ = std::io::stdin().lock().read_line(&mut String::new());
            let error = subscriber.recv(TIMEOUT).map(|sample| value(&sample)).unwrap_err();
            println!("error {error}");
            println!("still {:?}", held.iter().map(value).collect::<Vec<_>>());
            linger();
        }
        _ => panic!("{role}"),
    }
}

fn frames(domain: &Domain) -> TopicOptions {
    domain.topic("frames").max_bytes(1000).depth(4).publishers(2).subscribers(3).held(2).place(place())
}

/// Writes the elements of a loan, wherever it is.
fn write(loan: &mut Loan, value: u32) {
    loan.write(&value.to_ne_bytes().repeat(loan.len() as usize / 4)).unwrap();
}

/// Returns the value that all elements of a sample have.
fn value(sample: &Sample) -> u32 {
    let mut bytes = vec![0; sample.len() as usize];
    sample.wait(TIMEOUT).unwrap();
    sample.read_at(0, &mut bytes).unwrap();
    let value = bytes[..4].try_into().map(u32::from_ne_bytes).unwrap();
    assert_eq!(bytes, value.to_ne_bytes().repeat(bytes.len() / 4));
    value
}

fn filled(publisher: &Publisher, value: u32) -> partywall::Filled {
    let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
    write(&mut loan, value);
    loan.filled()
}

fn publish(publisher: &Publisher, value: u32) -> Published {
    filled(publisher, value).publish(TIMEOUT).unwrap()
}

fn receive(subscriber: &Subscriber) -> u32 {
    value(&subscriber.recv(TIMEOUT).unwrap())
}

/// Waits until every block is free, in the ring, or the reserve of a publisher.
fn unused(topic: &Topic) {
    eventually("all blocks are back", || {
        let stats = topic.stats();
        let is_reserve = stats.held as usize <= stats.publishers.len();
        is_reserve && stats.read == 0 && stats.free + stats.held + stats.in_ring == 4 + 2 * 2 + 3 * 2
    });
}

// Holds 22.
#[test]
fn samples_are_written_once_and_read_in_place_by_all() {
    let world = World::new();
    let one = world.connect();
    let other = world.connect();
    let ours = frames(&one).create().unwrap();
    let theirs = other.topic("frames").open().unwrap();
    assert_eq!((theirs.max_bytes(), theirs.depth(), theirs.held(), theirs.place()), (1000, 4, 2, place()));
    let publishers = [ours.publisher().unwrap(), theirs.publisher().unwrap()];
    let subscribers = [ours.subscriber(Policy::Block).unwrap(), theirs.subscriber(Policy::DropOldest).unwrap()];
    assert!(subscribers[0].try_recv().unwrap().is_none());
    assert!(matches!(subscribers[1].recv(SHORT), Err(Error::Timeout { .. })));
    for round in 0..20 {
        let publisher = &publishers[round % 2];
        let mut loan = publisher.loan(DType::U32, &[2, 5], TIMEOUT).unwrap();
        assert_eq!((loan.dtype(), loan.shape(), loan.len(), loan.is_empty()), (DType::U32, &[2, 5][..], 40, false));
        write(&mut loan, round as u32);
        loan.header(&[round as u8; 256]).unwrap();
        let Published { sequence, position, .. } = loan.filled().publish(TIMEOUT).unwrap();
        assert_eq!((sequence, position), (round as u64 / 2, round as u64));
        for subscriber in &subscribers {
            let sample = subscriber.recv(TIMEOUT).unwrap();
            assert_eq!((sample.dtype(), sample.shape(), sample.len()), (DType::U32, &[2, 5][..], 40));
            assert_eq!((value(&sample), sample.header()), (round as u32, vec![round as u8; 256]));
            assert_eq!((sample.publisher(), sample.sequence()), (publisher.id(), sequence));
            assert_eq!((sample.position(), sample.missed(), sample.topic()), (position, 0, "frames"));
            sample.wait(Duration::ZERO).unwrap();
            sample.check().unwrap();
            sample.release().unwrap();
        }
    }
    let stats = ours.stats();
    assert_eq!((stats.published, stats.publishers.len(), stats.subscribers.len()), (20, 2, 2));
    assert_eq!((subscribers[0].stats().received, subscribers[1].stats().lag), (20, 0));
    drop((publishers, subscribers));
    unused(&theirs);
    assert!(theirs.stats().publishers.is_empty() && theirs.stats().subscribers.is_empty());
}

#[test]
fn skipped_numbers_show_as_a_gap_and_are_not_published() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 0);
    publisher.skip(3).unwrap();
    assert!(matches!(publisher.skip(u64::MAX), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    assert_eq!(publish(&publisher, 1).sequence, 4);
    let subscriber = topic.subscribe(Policy::Block).history(1).join().unwrap();
    assert_eq!(subscriber.next_position(), 1);
    let sample = subscriber.recv(TIMEOUT).unwrap();
    // It joined after the gap.
    assert_eq!((sample.position(), sample.sequence(), sample.missed()), (1, 4, 0));
    assert_eq!((subscriber.next_position(), publisher.published()), (2, 2));
    drop(sample);
    // What it misses in the ring has gaps, too, and each publisher its own.
    let latest = topic.subscriber(Policy::Latest).unwrap();
    let other = topic.publisher().unwrap();
    publisher.skip(2).unwrap();
    publish(&publisher, 2);
    other.skip(5).unwrap();
    publish(&other, 3);
    publish(&publisher, 4);
    let missed = [(); 3].map(|()| subscriber.recv(TIMEOUT).unwrap().missed());
    assert_eq!(missed, [2, 5, 0]);
    assert_eq!((latest.recv(TIMEOUT).unwrap().missed(), latest.stats().dropped), (9, 9));
    // Those that are not followed by a sample are shown with another publisher's.
    publisher.skip(3).unwrap();
    publish(&other, 5);
    assert_eq!(subscriber.recv(TIMEOUT).unwrap().missed(), 3);
    drop(other);
    drop(publisher);
    // The numbers of the next one begin anew.
    assert_eq!(publish(&topic.publisher().unwrap(), 2).sequence, 0);
}

#[test]
fn sample_is_written_in_parts() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut loan = publisher.loan(DType::U8, &[5], TIMEOUT).unwrap();
    loan.write_at(2, b"llo").unwrap();
    loan.write_at(0, b"he").unwrap();
    loan.write_at(5, b"").unwrap();
    for (offset, bytes) in [(3, &b"abc"[..]), (6, b""), (u64::MAX, b"a")] {
        let refused = loan.write_at(offset, bytes);
        assert!(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    }
    loan.filled().publish(TIMEOUT).unwrap();
    let mut bytes = [0; 5];
    subscriber.recv(TIMEOUT).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
}

#[test]
fn sample_may_have_no_elements() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    for (dtype, shape, bytes) in [(DType::F64, &[3, 0][..], 0), (DType::U32, &[][..], 4)] {
        let mut loan = publisher.loan(dtype, shape, TIMEOUT).unwrap();
        assert_eq!((loan.len(), loan.is_empty()), (bytes, bytes == 0));
        if bytes > 0 {
            write(&mut loan, 7);
        } else if device() == "host" {
            assert_eq!(loan.as_mut_slice::<f64>().unwrap(), [0.0; 0]);
        }
        loan.header(b"all there is").unwrap();
        loan.filled().publish(TIMEOUT).unwrap();
        let sample = subscriber.recv(TIMEOUT).unwrap();
        assert_eq!((sample.dtype(), sample.shape(), sample.len()), (dtype, shape, bytes));
        assert_eq!(sample.header(), b"all there is");
        match bytes {
            0 => assert_eq!(sample.as_slice::<f64>().unwrap(), [0.0; 0]),
            _ => assert_eq!(value(&sample), 7),
        }
    }
}

// Holds 23.
#[test]
fn each_subscriber_is_as_reliable_as_it_wants_to_be() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let [strict, lossy, latest] =
        [Policy::Block, Policy::DropOldest, Policy::Latest].map(|policy| topic.subscriber(policy).unwrap());
    for value in 0..4 {
        publish(&publisher, value);
    }
    let unpublished = filled(&publisher, 4).publish(SHORT).unwrap_err();
    assert!(matches!(&unpublished.error, Error::Busy(Busy::TopicFull { pid, after, .. })
        if pid.is_none_or(|pid| pid == std::process::id()) && *after >= SHORT));
    assert_eq!(receive(&strict), 0);
    assert_eq!(unpublished.value.publish(Duration::ZERO).unwrap().position, 4);
    assert_eq!((1..5).map(|_| receive(&strict)).collect::<Vec<_>>(), [1, 2, 3, 4]);
    for value in 5..9 {
        publish(&publisher, value);
    }
    let sample = latest.recv(TIMEOUT).unwrap();
    assert_eq!((value(&sample), sample.missed()), (8, 8));
    let sample = lossy.recv(TIMEOUT).unwrap();
    assert_eq!((value(&sample), sample.missed(), lossy.stats().dropped), (5, 5, 5));
    assert_eq!(lossy.iter().take(3).map(|sample| value(&sample.unwrap())).collect::<Vec<_>>(), [6, 7, 8]);
    // A strict subscriber that leaves no longer blocks the publisher.
    assert!(filled(&publisher, 9).publish(SHORT).is_err());
    drop(strict);
    assert_eq!(publish(&publisher, 9).position, 9);
    // A late subscriber gets the history that it asks for.
    let late = topic.subscribe(Policy::DropOldest).history(2).queue(3).join().unwrap();
    assert_eq!((receive(&late), receive(&late)), (8, 9));
}

// Holds 205.
#[test]
fn publisher_waits_for_its_subscribers() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    publisher.wait_for_subscribers(0, Duration::ZERO).unwrap();
    let error = publisher.wait_for_subscribers(1, SHORT).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(error.to_string().starts_with("cannot wait for subscribers of topic \"frames\": 0 of 1 joined"), "{error}");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            publisher.wait_for_subscribers(2, TIMEOUT).unwrap();
            publish(&publisher, 7);
        });
        // One of each policy counts, and both get the first sample.
        let subscribers = [Policy::Latest, Policy::Block].map(|policy| topic.subscriber(policy).unwrap());
        waiting.join().unwrap();
        for subscriber in &subscribers {
            let sample = subscriber.recv(TIMEOUT).unwrap();
            assert_eq!((value(&sample), sample.missed()), (7, 0));
        }
    });
    let too_many = publisher.wait_for_subscribers(4, TIMEOUT).unwrap_err();
    let limit = LimitReached::Topic { topic: "frames".into(), limit: TopicLimit::Subscribers, most: 3 };
    assert_eq!(too_many.to_string(), limit.to_string());
    let gone = publisher.wait_for_subscribers(1, SHORT).unwrap_err();
    assert!(matches!(gone, Error::Timeout { .. }), "subscribers that have left do not count: {gone}");
}

#[test]
fn waiting_subscriber_is_woken() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| (0..100).map(|_| receive(&subscriber)).collect::<Vec<_>>());
        (0..100).for_each(|value| _ = publish(&publisher, value));
        assert_eq!(reader.join().unwrap(), (0..100).collect::<Vec<_>>());
    });
    let cancelled = subscriber.recv(Wait::from(TIMEOUT).cancelled_by(&|| true));
    assert!(matches!(cancelled, Err(Error::Cancelled { .. })));
}

#[test]
fn panic_of_a_waiting_publisher_leaks_no_block() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let _subscriber = topic.subscriber(Policy::Block).unwrap();
    for value in 0..4 {
        publish(&publisher, value);
    }
    let filled = filled(&publisher, 4);
    let asked = AtomicU32::new(0);
    let cancel = || {
        assert!(asked.fetch_add(1, Ordering::Relaxed) < 2, "it is asked whether to stop");
        false
    };
    let wait = || filled.publish(Wait::from(TIMEOUT).cancelled_by(&cancel));
    assert!(catch_unwind(AssertUnwindSafe(wait)).is_err());
    assert_eq!(topic.stats().publishers[0].blocked, None);
    eventually("its block is free", || topic.stats().held == 0);
}

#[test]
fn threads_sharing_a_publisher_have_their_own_timeouts() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    for value in 0..4 {
        publish(&publisher, value);
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| publish(&publisher, 4).sequence);
        eventually("it waits", || topic.stats().publishers[0].blocked.is_some());
        let full = filled(&publisher, 5).publish(Duration::ZERO).unwrap_err();
        assert!(
            matches!(full.error, Error::Busy(Busy::TopicFull { pid: None, .. })),
            "it would have waited for the broker"
        );
        assert!(!waiting.is_finished() && publisher.published() == 4);
        (0..5).for_each(|value| assert_eq!(receive(&subscriber), value));
        assert_eq!(waiting.join().unwrap(), 4);
    });
}

// Holds 202.
#[test]
fn subscriber_event_wakes_an_event_loop() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let event = subscriber.event().unwrap();
    let is_readable = |wait: bool| {
        let timeout = if wait { TIMEOUT } else { SHORT };
        let timeout =
            rustix::event::Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let fd = event.as_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
    };
    assert!(!is_readable(false));
    for value in 0..3 {
        publish(&publisher, value);
        assert!(is_readable(true) && is_readable(true), "it stays so");
        assert_eq!(receive(&subscriber), value);
        assert!(!is_readable(false), "it is not once the sample is received, nor is it set again");
    }
    publish(&publisher, 3);
    publish(&publisher, 4);
    assert!(is_readable(true));
    drop(subscriber.try_recv().unwrap().unwrap());
    assert!(is_readable(false), "there is another");
    drop(subscriber.iter().next());
    assert!(!is_readable(false));
    // Samples that the owner has received but not handed out count, too.
    subscriber.set_pending(true);
    assert!(is_readable(false));
    subscriber.set_pending(false);
    assert!(!is_readable(false));
    subscriber.detach();
    assert!(is_readable(true) && subscriber.try_recv().is_err());
}

// Holds 193.
#[test]
fn subscriber_until_idle_ends_with_the_last_publisher() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let until_idle = |policy| topic.subscribe(policy).until_idle(true);
    let subscriber = until_idle(Policy::Block).join().unwrap();
    assert!(subscriber.try_recv().unwrap().is_none(), "it waits for the first publisher");
    let own = topic.publisher().unwrap();
    subscriber.set_until_idle(true, &[own.id()]);
    assert!(subscriber.try_recv().unwrap().is_none(), "it still does");
    drop(own);
    assert!(matches!(subscriber.recv(SHORT), Err(Error::Timeout { .. })));
    let [first, second] = [(); 2].map(|()| topic.publisher().unwrap());
    publish(&first, 1);
    let event = subscriber.event().unwrap();
    thread::scope(|scope| {
        let reading = scope.spawn(|| subscriber.iter().map(|sample| value(&sample.unwrap())).collect::<Vec<_>>());
        drop(first);
        let loan = filled(&second, 2);
        // It leaves with its last loan.
        drop(second);
        loan.publish(TIMEOUT).unwrap();
        assert_eq!(reading.join().unwrap(), [1, 2]);
    });
    let mut polled = [PollFd::new(&event, PollFlags::IN)];
    assert_eq!(poll(&mut polled, None).unwrap(), 1, "an event loop learns of the end");
    assert!(matches!(subscriber.recv(Duration::MAX), Err(Error::Gone(Gone::TopicIdle { topic })) if topic == "frames"));
    assert!(matches!(subscriber.try_recv(), Err(Error::Gone(Gone::TopicIdle { .. }))));
    // A late subscriber receives what is left, and ends.
    let late = until_idle(Policy::DropOldest).history(1).join().unwrap();
    assert_eq!(late.iter().map(|sample| value(&sample.unwrap())).collect::<Vec<_>>(), [2]);
    // With another publisher the topic is no longer idle.
    let third = topic.publisher().unwrap();
    assert!(subscriber.try_recv().unwrap().is_none());
    publish(&third, 3);
    assert_eq!(receive(&subscriber), 3);
    drop(third);
    assert!(subscriber.iter().next().is_none());
    // It may stop that, and begin again: as if some publishers were not there.
    subscriber.set_until_idle(false, &[]);
    assert!(matches!(subscriber.recv(SHORT), Err(Error::Timeout { .. })));
    let own = topic.publisher().unwrap();
    subscriber.set_until_idle(true, &[own.id()]);
    assert!(subscriber.iter().next().is_none());
    subscriber.set_until_idle(true, &[]);
    assert!(subscriber.try_recv().unwrap().is_none());
    drop(own);
    // The others wait as ever.
    let patient = topic.subscriber(Policy::Block).unwrap();
    assert!(matches!(patient.recv(SHORT), Err(Error::Timeout { .. })));
}

/// There are as many blocks as were promised, and not one more.
// Holds 196.
#[test]
fn promised_blocks_stay_reserved_for_their_publisher() {
    let world = World::new();
    let topic = frames(&world.connect()).loans(3).create().unwrap();
    assert_eq!((topic.loans(), world.connect().topic("frames").loans(3).open().unwrap().loans()), (3, 3));
    let [greedy, modest] = [(); 2].map(|()| topic.publisher().unwrap());
    let loan = |publisher: &Publisher| publisher.loan(DType::U32, &[1], TIMEOUT);
    let too_many = |outcome| {
        matches!(outcome, Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Loans, most: 3, .. })))
    };
    let mut loans: Vec<_> = (0..3).map(|_| loan(&greedy).unwrap()).collect();
    // Waiting would not help; what is filled is still its own.
    assert!(too_many(loan(&greedy).map(drop)) && too_many(greedy.try_loan(DType::U32, &[1]).map(drop)));
    let filled = loans.pop().unwrap().filled();
    assert!(too_many(loan(&greedy).map(drop)));
    // The other one goes on, although all keep what they may.
    let keepers = [(); 3].map(|()| topic.subscriber(Policy::Latest).unwrap());
    let mut kept = Vec::new();
    for value in 0..20 {
        publish(&modest, value);
        // Each another one.
        if value < 6 {
            kept.push(keepers[value as usize % 3].recv(TIMEOUT).unwrap());
        }
    }
    let others = [(); 3].map(|()| modest.try_loan(DType::U32, &[1]).unwrap().unwrap());
    assert!(too_many(loan(&modest).map(drop)));
    assert_eq!(topic.stats().free, 0, "every publisher holds its maximum");
    drop((others, kept));
    // A loan that was published or dropped no longer counts.
    filled.publish(TIMEOUT).unwrap();
    loans.push(loan(&greedy).unwrap());
    assert!(too_many(loan(&greedy).map(drop)));
    drop(loans.pop());
    loan(&greedy).unwrap().filled().publish(TIMEOUT).unwrap();
    // A sample that is not published in time still counts as a loan.
    drop((loans, keepers));
    let blocking = topic.subscriber(Policy::Block).unwrap();
    for value in 0..4 {
        publish(&greedy, value);
    }
    let filled = || loan(&greedy).unwrap().filled();
    let refused = [(); 3].map(|()| filled().publish(Duration::ZERO).unwrap_err());
    assert!(refused.iter().all(|unpublished| matches!(unpublished.error, Error::Busy(Busy::TopicFull { .. }))));
    assert!(too_many(loan(&greedy).map(drop)));
    drop((refused, blocking));
    publish(&greedy, 4);
}

/// Two threads that loan at the same time exceed the limit together, and one of them gets the loan.
#[test]
fn last_loan_goes_to_one_thread() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let _first = publisher.loan(DType::U32, &[1], TIMEOUT).unwrap();
    // A barrier, or yielding alone, lets the threads go one after the other.
    let arrived = AtomicU32::new(0);
    let together = |all| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while (0..10_000).all(|_| arrived.load(Ordering::SeqCst) < all) {
            thread::yield_now();
        }
    };
    let try_it = || {
        let tried = (0..5000).map(|round| {
            together(4 * round + 2);
            let loan = publisher.try_loan(DType::U32, &[1]);
            together(4 * round + 4);
            loan.is_ok_and(|loan| loan.is_some())
        });
        tried.collect::<Vec<_>>()
    };
    let [one, other] = thread::scope(|scope| [(); 2].map(|()| scope.spawn(try_it)).map(|it| it.join().unwrap()));
    assert!(one.iter().zip(other).all(|(one, other)| *one != other));
}

/// More threads than the publisher has loans.
#[test]
fn threads_send_in_turns() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let send = || {
        for value in 0..100 {
            publisher.send(DType::U32, &[1], &u32::to_ne_bytes(value), TIMEOUT).unwrap();
        }
    };
    thread::scope(|scope| (0..8).for_each(|_| _ = scope.spawn(send)));
    assert_eq!(publisher.published(), 800);
    let loans = [(); 2].map(|()| publisher.loan(DType::U32, &[1], TIMEOUT).unwrap());
    let refused = publisher.send(DType::U32, &[1], &[0; 4], TIMEOUT);
    assert!(
        matches!(refused, Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Loans, .. }))),
        "no other call of `send` ends the wait"
    );
    drop(loans);
}

// Holds 364.
#[test]
fn bytes_go_in_and_out_wherever_the_samples_are() {
    let world = World::new();
    let topic = frames(&world.connect()).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let published = publisher.send(DType::U8, &[5], b"hello", TIMEOUT).unwrap();
    let sample = subscriber.recv(TIMEOUT).unwrap();
    assert_eq!((sample.position(), sample.dtype(), sample.shape()), (published.position, DType::U8, &[5][..]));
    let mut part = [0; 3];
    sample.read_at(2, &mut part).unwrap();
    assert_eq!(&part, b"llo");
    sample.read_at(5, &mut []).unwrap();
    for offset in [3, 6, u64::MAX] {
        let outside = sample.read_at(offset, &mut part);
        assert!(matches!(outside, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{outside:?}");
    }
    // Neither too few bytes nor too many are published, and the block comes back.
    for bytes in [&b"hell"[..], b"hello!"] {
        let refused = publisher.send(DType::U8, &[5], bytes, TIMEOUT);
        assert!(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), "{refused:?}");
    }
    publisher.send(DType::U8, &[0], &[], TIMEOUT).unwrap();
    assert!(subscriber.recv(TIMEOUT).unwrap().is_empty());
    let sent = publisher.send_with(DType::U8, &[1], TIMEOUT, |loan| {
        loan.header(b"a header")?;
        loan.write(b"x").map(|()| None)
    });
    assert_eq!(sent.unwrap().sequence, 2);
    assert_eq!(subscriber.recv(TIMEOUT).unwrap().header(), b"a header");
    let failed = publisher.send_with(DType::U8, &[1], TIMEOUT, |_| Err(Error::Cancelled { what: "filling".into() }));
    assert!(matches!(failed, Err(Error::Cancelled { .. })), "{failed:?}");
    assert_eq!(publisher.published(), 3);
}

/// The dtype and shape of a topic hold for publishers and for processes that open it.
// Holds 194.
#[test]
fn dtype_and_shape_are_the_type_of_all_samples() {
    let world = World::new();
    let domain = world.connect();
    let images = || domain.topic("images").dtype(DType::U8).shape(&[4, 6, 3]).place(place());
    let strips = || domain.topic("strips").dtype(DType::U8).varying_shape(&[None, Some(6), Some(3)]).place(place());
    let [fixed, varying] = [images().create().unwrap(), strips().max_bytes(72).create().unwrap()];
    assert_eq!(
        (fixed.max_bytes(), fixed.dtype(), fixed.shape()),
        (72, Some(DType::U8), Some(&[4, 6, 3].map(Some)[..]))
    );
    assert_eq!(varying.shape(), Some(&[None, Some(6), Some(3)][..]));
    let tries = |topic: &Topic, dtype, shape: &[u64]| topic.publisher().unwrap().try_loan(dtype, shape).map(drop);
    assert!(tries(&fixed, DType::U8, &[4, 6, 3]).is_ok() && tries(&varying, DType::U8, &[0, 6, 3]).is_ok());
    for (topic, dtype, shape) in [
        (&fixed, DType::U8, &[6, 4, 3][..]),
        (&fixed, DType::U8, &[72]),
        (&fixed, DType::I8, &[4, 6, 3]),
        (&fixed, DType::U8, &[]),
        (&varying, DType::U8, &[4, 6, 4]),
        (&varying, DType::U8, &[6, 3]),
        (&varying, DType::I8, &[4, 6, 3]),
    ] {
        assert!(
            matches!(tries(topic, dtype, shape), Err(Error::Mismatch(Mismatch::Sample { .. }))),
            "{topic:?}: {shape:?}"
        );
    }
    let error = tries(&varying, DType::I8, &[2, 6]).unwrap_err().to_string();
    assert_eq!(error, "topic \"strips\" has samples of uint8 [any, 6, 3], not of int8 [2, 6]");
    assert!(matches!(
        tries(&varying, DType::U8, &[5, 6, 3]),
        Err(Error::Mismatch(Mismatch::BlockSize { has: 72, needed: 90, .. }))
    ));
    // An opener says what it expects, or nothing.
    let open = || domain.topic("images");
    assert!(open().open().is_ok() && open().dtype(DType::U8).open().is_ok() && open().shape(&[4, 6, 3]).open().is_ok());
    assert_eq!(images().open_or_create().unwrap().version(), fixed.version());
    assert_eq!(strips().open().unwrap().shape(), varying.shape());
    for wrong in [
        open().shape(&[4, 6]),
        open().shape(&[6, 4, 3]),
        open().varying_shape(&[None, Some(6), Some(3)]),
        open().dtype(DType::I8),
        images().dtype(DType::I8),
    ] {
        assert!(matches!(wrong.open(), Err(Error::Mismatch(Mismatch::Options { of: Named::Topic, .. }))), "{wrong:?}");
    }
    let error = images().dtype(DType::I8).open_or_create().unwrap_err().to_string();
    let asked = "int8 [4, 6, 3]";
    let has = "uint8 [4, 6, 3]";
    assert_eq!(error, format!("topic \"images\" is not as requested: its samples are of {has}, not of {asked}"));
    // Samples of any size need `max_bytes`, and samples of a fixed size must not have it.
    let other = || domain.topic("other").place(place());
    for bad in [
        other(),
        other().dtype(DType::U8),
        other().shape(&[4]),
        other().dtype(DType::U8).varying_shape(&[None]),
        other().dtype(DType::U8).shape(&[4]).max_bytes(3),
        other().dtype(DType::U8).shape(&[0]),
        other().dtype(DType::U8).shape(&[u64::MAX, 2]),
        other().max_bytes(4).shape(&[1; 9]),
    ] {
        assert!(
            matches!(bad.create(), Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Topic, .. }))),
            "{bad:?}"
        );
    }
}

// Holds 197.
#[test]
fn bad_input_is_refused_each_with_its_error() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).dtype(DType::U32).create().unwrap();
    let open = || domain.topic("frames");
    // Topics.
    assert!(matches!(frames(&domain).create(), Err(Error::Denied(Denied::NameExists { .. }))));
    assert!(matches!(domain.topic("none").open(), Err(Error::NotFound(NotFound::Name { .. }))));
    assert!(matches!(
        open().dtype(DType::F32).open(),
        Err(Error::Mismatch(Mismatch::Options { of: Named::Topic, .. }))
    ));
    assert!(matches!(
        domain.topic("plain").max_bytes(0).create(),
        Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Topic, .. }))
    ));
    assert!(matches!(
        domain.topic("plain").create(),
        Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Topic, .. }))
    ));
    let plain = || domain.topic("plain").max_bytes(10).place(place());
    for bad in [
        plain().depth(0),
        plain().depth(5000),
        plain().history(u32::MAX),
        plain().publishers(0),
        plain().held(257),
        plain().loans(0),
        plain().loans(257),
    ] {
        assert!(
            matches!(bad.create(), Err(Error::InvalidArgument(InvalidArgument::Options { of: Named::Topic, .. }))),
            "{bad:?}"
        );
    }
    assert!(matches!(
        plain().blocks(15).create(),
        Err(Error::InvalidArgument(InvalidArgument::TooFewBlocks { needed: 16, .. }))
    ));
    assert!(matches!(
        plain().loans(3).blocks(17).create(),
        Err(Error::InvalidArgument(InvalidArgument::TooFewBlocks { needed: 18, loans: 3, .. }))
    ));
    let any = plain().open_or_create().unwrap();
    assert_eq!((any.depth(), any.loans(), any.held(), any.dtype(), any.shape()), (4, 2, 2, None, None));
    assert_eq!(any.stats().free, 16, "4 + 2 · 2 + 4 · 2");
    assert!(matches!(
        plain().dtype(DType::U8).open_or_create(),
        Err(Error::Mismatch(Mismatch::Options { of: Named::Topic, .. }))
    ));
    let wrong = [
        open().max_bytes(999),
        open().depth(8),
        open().history(1),
        open().publishers(3),
        open().loans(3),
        open().subscribers(1),
        open().held(1),
        open().blocks(100),
    ];
    for wrong in wrong {
        assert!(matches!(wrong.open(), Err(Error::Mismatch(Mismatch::Options { of: Named::Topic, .. }))), "{wrong:?}");
    }
    let elsewhere = if device() == "host" { Place::Gpu(partywall::DeviceUuid([0; 16])) } else { Place::Host };
    assert!(matches!(open().place(elsewhere).open(), Err(Error::Mismatch(Mismatch::Options { of: Named::Topic, .. }))));
    let pool = domain.pool("pool").blocks(1).block_bytes(1).place(place()).create().unwrap();
    assert!(matches!(
        domain.topic("pool").open(),
        Err(Error::Mismatch(Mismatch::Object { wanted: Named::Topic, is: Named::Pool, .. }))
    ));
    assert!(matches!(
        domain.pool("frames").open(),
        Err(Error::Mismatch(Mismatch::Object { wanted: Named::Pool, is: Named::Topic, .. }))
    ));
    let segment = super::world::commit(&domain, "segment", 1, false);
    assert!(matches!(
        domain.topic("segment").open(),
        Err(Error::Mismatch(Mismatch::Object { wanted: Named::Topic, is: Named::Segment, .. }))
    ));
    drop((segment, pool));
    // Publishers.
    let publisher = topic.publisher().unwrap();
    let loan = |dtype, shape: &[u64]| publisher.try_loan(dtype, shape);
    assert!(matches!(
        loan(DType::U32, &[251]),
        Err(Error::Mismatch(Mismatch::BlockSize { has: 1000, needed: 1004, .. }))
    ));
    let error = loan(DType::U32, &[251]).unwrap_err();
    assert!(error.to_string().contains("a block of topic") && error.advice().contains("max_bytes"), "{error}");
    assert!(matches!(loan(DType::F32, &[1]), Err(Error::Mismatch(Mismatch::Sample { .. }))));
    assert!(matches!(loan(DType::U32, &[1; 9]), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    assert!(matches!(loan(DType::U32, &[u64::MAX, 2]), Err(Error::InvalidArgument(InvalidArgument::Range { .. }))));
    let mut half = loan(DType::U32, &[250]).unwrap().unwrap();
    assert!(matches!(half.header(&[0; 257]), Err(Error::InvalidArgument(InvalidArgument::Header { .. }))));
    if device() == "host" {
        assert!(matches!(half.as_mut_slice::<f32>(), Err(Error::Mismatch(Mismatch::DType { .. }))));
        assert!(matches!(half.device(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
    } else if device() == "cuda" {
        assert!(matches!(half.bytes_mut(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
    }
    let _other = topic.publisher().unwrap();
    assert!(matches!(
        topic.publisher(),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Publishers, most: 2, .. }))
    ));
    let advice = topic.publisher().unwrap_err().advice();
    assert!(advice.contains("publishers(3)"), "the number to raise is named: {advice}");
    // Subscribers.
    let subscribers = [(); 3].map(|()| topic.subscriber(Policy::Latest).unwrap());
    assert!(matches!(
        topic.subscriber(Policy::Block),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Subscribers, most: 3, .. }))
    ));
    let mut held = Vec::new();
    for value in 0..2 {
        publish(&publisher, value);
        held.push(subscribers[0].recv(TIMEOUT).unwrap());
    }
    publish(&publisher, 2);
    assert!(matches!(
        subscribers[0].try_recv(),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Held, most: 2, .. }))
    ));
    if device() == "host" {
        assert!(matches!(held[0].as_slice::<i32>(), Err(Error::Mismatch(Mismatch::DType { .. }))));
    } else if device() == "cuda" {
        assert!(matches!(held[0].bytes(), Err(Error::Mismatch(Mismatch::Kind { .. }))));
    }
    drop(held);
    assert_eq!(receive(&subscribers[0]), 2);
    // Nothing of that has cost a block.
    drop((half, subscribers, publisher));
    unused(&topic);
}

#[test]
fn reserve_of_a_publisher_counts_among_its_loans() {
    let world = World::new();
    let domain = world.connect();
    let topic = frames(&domain).loans(2).blocks(4 + 2 * 2 + 3 * 2).create().unwrap();
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 1);
    assert_eq!(topic.stats().held, 1, "a block is in reserve");
    let loans = [filled(&publisher, 2), filled(&publisher, 3)];
    assert_eq!(topic.stats().held, 2, "the first of them was the reserve");
    let refused = publisher.try_loan(DType::U32, &[1]);
    assert!(matches!(refused, Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Loans, most: 2, .. }))));
    let [first, second] = loans;
    first.publish(TIMEOUT).unwrap();
    second.release().unwrap();
    assert_eq!(topic.stats().held, 1);
    drop(publisher);
    assert_eq!((topic.stats().held, topic.stats().publishers.len()), (0, 0));
    unused(&topic);
}
