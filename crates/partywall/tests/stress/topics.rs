//! Topics whose processes are killed and stopped while they join and leave, publish, receive and hold, and create the
//! topic.

use std::{
    collections::{BTreeMap, VecDeque},
    io::BufRead,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use partywall::{
    DType, Domain, Error, Policy, Publisher, Sample, Subscriber, Topic, TopicOptions,
    error::{Busy, Gone, InvalidData, LimitReached, TopicLimit},
};
use partywall_harness::{device, place};

use super::{
    Dice, WATCHDOG, eventually,
    place::{Actor, Place, linger, say},
    rounds,
};

const BYTES: u64 = 512;
/// The maximum numbers of publishers and subscribers at a time.
const PUBLISHERS: u32 = 3;
const SUBSCRIBERS: u32 = 4;
const HELD: u32 = 2;
const DEPTH: u32 = 4;
const LOANS: u32 = 3;
const BLOCKS: u32 = DEPTH + LOANS * PUBLISHERS + SUBSCRIBERS * HELD;

pub(crate) fn play(words: &[&str]) {
    let domain = Domain::options().start(false).connect().unwrap();
    match words[0] {
        "churning" => {
            let topic = domain.topic("frames").timeout(WATCHDOG).open().unwrap();
            let mut dice = Dice(words[1].parse().unwrap());
            say("ready");
            loop {
                visit(&topic, &mut dice);
            }
        }
        "making" => {
            let topic = frames(&domain).open_or_create().unwrap();
            let publisher = topic.publisher().unwrap();
            publish(&topic, &publisher, WATCHDOG).unwrap();
            say("ready");
            linger();
        }
        "publishing" => {
            let topic = domain.topic("frames").timeout(WATCHDOG).open().unwrap();
            let publisher = topic.publisher().unwrap();
            say("ready");
            loop {
                publish(&topic, &publisher, WATCHDOG).unwrap();
            }
        }
        "coming" => come_and_go(&domain),
        "full" => publish_with_full_hands(&domain),
        other => panic!("{other}"),
    }
}

fn frames(domain: &Domain) -> TopicOptions {
    let options = domain.topic("frames").place(place()).max_bytes(BYTES).depth(DEPTH).held(HELD).loans(LOANS);
    options.publishers(PUBLISHERS).subscribers(SUBSCRIBERS).timeout(WATCHDOG)
}

/// A sample whose words all name its publisher and its number.
fn publish(topic: &Topic, publisher: &Publisher, timeout: Duration) -> Result<u64, Error> {
    let mut loan = publisher.loan(DType::U64, &[BYTES / 8], timeout)?;
    let mark = publisher.id() << 32 | publisher.published();
    loan.header(&mark.to_le_bytes())?;
    let published = if device() != "cuda" {
        loan.as_mut_slice::<u64>()?.fill(mark);
        loan.filled().publish(timeout)
    } else {
        let gpu = topic.gpu().unwrap();
        loan.device()?.copy_from_host(gpu.stream(), &mark.to_le_bytes().repeat(BYTES as usize / 8))?;
        loan.filled().publish_on(gpu.stream(), timeout)
    };
    published.map(|published| published.sequence).map_err(|unpublished| unpublished.error)
}

/// One subscriber, and the samples that it has seen of each publisher.
struct Reader {
    subscriber: Subscriber,
    policy: Policy,
    seen: BTreeMap<u64, u64>,
    next: Option<u64>,
}

impl Reader {
    fn join(topic: &Topic, policy: Policy, history: u32) -> Result<Self, Error> {
        let subscriber = topic.subscribe(policy).history(history).join()?;
        Ok(Self { subscriber, policy, seen: BTreeMap::new(), next: None })
    }

    /// No sample is torn, received twice or out of order; a blocking subscriber misses nothing.
    fn receive(&mut self, timeout: Duration) -> Option<Sample> {
        let sample = match self.subscriber.recv(timeout) {
            Ok(sample) => sample,
            Err(Error::Timeout { .. } | Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Held, .. })) => {
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        check(&sample);
        if let Some(next) = self.next {
            assert_eq!(sample.position(), next + sample.missed());
        }
        assert!(self.policy != Policy::Block || sample.missed() == 0);
        self.next = Some(sample.position() + 1);
        let last = self.seen.insert(sample.publisher(), sample.sequence());
        assert!(last.is_none_or(|last| last < sample.sequence()));
        if self.policy == Policy::Block
            && let Some(last) = last
        {
            assert_eq!(sample.sequence(), last + 1);
        }
        Some(sample)
    }
}

/// Checks that the sample is whole, unless its publisher died before its GPU had completed it.
fn check(sample: &Sample) {
    let mark = sample.publisher() << 32 | sample.sequence();
    assert_eq!(sample.header(), mark.to_le_bytes());
    let words = match read(sample).and_then(|words| sample.check().map(|()| words)) {
        Err(Error::InvalidData(InvalidData::SampleFailed { .. })) if device() != "host" => return,
        read => read.unwrap(),
    };
    assert_eq!(words, [mark; BYTES as usize / 8], "it is torn");
}

fn read(sample: &Sample) -> Result<Vec<u64>, Error> {
    if device() != "cuda" {
        return Ok(sample.as_slice::<u64>()?.to_vec());
    }
    let gpu = sample.gpu().unwrap();
    let mut bytes = vec![0; BYTES as usize];
    sample.device_on(gpu.stream())?.copy_to_host(gpu.stream(), &mut bytes)?;
    Ok(bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect())
}

/// Joins, calls all operations of topics, and leaves.
fn visit(topic: &Topic, dice: &mut Dice) {
    let publisher = match topic.publisher() {
        Ok(publisher) => Some(publisher),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Publishers, .. })) => None,
        Err(error) => panic!("{error}"),
    };
    let policy = [Policy::Block, Policy::DropOldest, Policy::Latest][dice.below(3) as usize];
    let mut reader = match Reader::join(topic, policy, dice.below(6) as u32) {
        Ok(reader) => Some(reader),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Subscribers, .. })) => None,
        Err(error) => panic!("{error}"),
    };
    let mut held = Vec::new();
    for _ in 0..dice.below(30) {
        let timeout = Duration::from_micros(dice.below(2) * dice.below(500));
        if let Some(publisher) = &publisher {
            match publish(topic, publisher, timeout) {
                Ok(_) | Err(Error::Busy(Busy::TopicFull { .. }) | Error::Timeout { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        if let Some(reader) = &mut reader {
            held.extend(reader.receive(timeout));
        }
        held.iter().for_each(check);
        if dice.below(2) == 0 && !held.is_empty() {
            drop(held.swap_remove(dice.below(held.len() as u64) as usize));
        }
    }
    if dice.below(2) == 0 {
        drop(reader);
        held.iter().for_each(check);
    }
}

/// Checks that no publisher or subscriber is left, and that no block is lost.
fn is_at_rest(topic: &Topic) -> bool {
    let stats = topic.stats();
    (stats.held, stats.read) == (0, 0)
        && stats.free + stats.in_ring == BLOCKS
        && stats.publishers.is_empty()
        && stats.subscribers.is_empty()
}

/// Returns a domain with the topic, and this many processes that join and leave.
fn stage(place: &Place, count: usize) -> (Domain, Topic, Vec<Actor>) {
    let domain = place.connect();
    let topic = frames(&domain).create().unwrap();
    let actors = (0..count).map(|i| place.play(&format!("topic churning {i}"))).collect();
    (domain, topic, actors)
}

/// Publishers and subscribers of every kind are killed at any moment. A blocking subscriber receives everything that is
/// published meanwhile, and in the end all blocks are free.
#[test]
fn publishers_and_subscribers_killed_at_any_moment_take_nothing_along() {
    let place = Place::new();
    let (_domain, topic, mut victims) = stage(&place, 2);
    let done = AtomicBool::new(false);
    let kills = rounds(60);
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| {
            // There may briefly be no room.
            let mut reader = None;
            eventually("room", || {
                reader = Reader::join(&topic, Policy::Block, 0).ok();
                reader.is_some()
            });
            let mut reader = reader.unwrap();
            let mut received = 0;
            while !done.load(Ordering::Relaxed) {
                received += u64::from(reader.receive(Duration::from_millis(1)).is_some());
            }
            received
        });
        let mut dice = Dice(3);
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(dice.below(20_000)));
            let victim = dice.below(2) as usize;
            victims[victim].kill();
            victims[victim] = place.play(&format!("topic churning {}", 100 + kill));
        }
        drop(victims);
        // At least one process has to publish.
        let publisher = {
            let mut publisher = None;
            eventually("a place", || {
                publisher = topic.publisher().ok();
                publisher.is_some()
            });
            publisher.unwrap()
        };
        publish(&topic, &publisher, WATCHDOG).unwrap();
        done.store(true, Ordering::Relaxed);
        let received = survivor.join().unwrap();
        eprintln!("{kills} kills, {received} samples received by the survivor");
    });
    eventually("all that the dead had comes back", || is_at_rest(&topic));
}

/// Publishers are killed at any moment, or evicted, each once its successor has joined; in the end the last one. A
/// subscriber that ends when the topic is idle ends then, not before, and has received everything.
#[test]
fn subscriber_until_idle_receives_all_samples_of_killed_publishers() {
    let place = Place::new();
    let domain = place.connect();
    let mut dice = Dice(23);
    for _ in 0..rounds(5) {
        let topic = frames(&domain).create().unwrap();
        let subscriber = topic.subscribe(Policy::Block).until_idle(true).join().unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let next = |next, sample: Result<Sample, Error>| {
                    let sample = sample.unwrap();
                    assert_eq!((sample.position(), sample.missed()), (next, 0));
                    next + 1
                };
                subscriber.iter().fold(0, next)
            });
            let mut current = place.play("topic publishing");
            for _ in 0..6 {
                std::thread::sleep(Duration::from_micros(dice.below(5_000)));
                eventually("there is room for one", || topic.stats().publishers.len() < PUBLISHERS as usize);
                let successor = place.play("topic publishing");
                if dice.below(3) == 0 {
                    domain.evict(current.pid(), true).unwrap();
                }
                current.kill();
                current = successor;
            }
            assert!(!reading.is_finished(), "there was a publisher all the time");
            current.kill();
            eventually("it ends with the last publisher", || reading.is_finished());
            assert_eq!(reading.join().unwrap(), topic.stats().published);
        });
        assert!(matches!(subscriber.try_recv(), Err(Error::Gone(Gone::TopicIdle { .. }))));
        drop(subscriber);
        eventually("all that the dead had comes back", || is_at_rest(&topic));
        drop(topic);
        eventually("it goes with the last", || domain.names().unwrap().is_empty());
    }
}

/// One process at a time is stopped, as publisher or reader, with all its blocks. Only processes that wait for it are
/// delayed.
#[test]
fn publishers_and_subscribers_stopped_at_any_moment_block_no_other() {
    let place = Place::new();
    let (_domain, topic, mut actors) = stage(&place, 2);
    let mut dice = Dice(5);
    for round in 0..rounds(30) {
        std::thread::sleep(Duration::from_micros(dice.below(5_000)));
        let stopped = dice.below(2) as usize;
        actors[stopped].stop();
        // A blocking subscriber that is stopped delays the publishers for as long as it is stopped; that is promised.
        let is_waited_for = topic.stats().subscribers.iter().any(|state| state.queue.is_none());
        if !is_waited_for {
            visit_in_time(&topic);
        }
        // One process is never continued.
        if round % 10 == 5 {
            actors[stopped].kill();
            actors[stopped] = place.play(&format!("topic churning {}", 1000 + round));
        } else {
            actors[stopped].resume();
        }
    }
    drop(actors);
    eventually("all that the dead had comes back", || is_at_rest(&topic));
}

/// Publishes some samples, if there are time and room.
fn visit_in_time(topic: &Topic) {
    let Ok(publisher) = topic.publisher() else { return };
    for _ in 0..20 {
        match publish(topic, &publisher, WATCHDOG) {
            Ok(_) => {}
            Err(error) => panic!("{error}: {:?}", topic.stats()),
        }
    }
}

/// Publishes forever, and always uses all the blocks that it is promised.
fn publish_with_full_hands(domain: &Domain) {
    let topic = domain.topic("frames").open().unwrap();
    let publisher = topic.publisher().unwrap();
    say("ready");
    loop {
        // The other blocks are filled when the next sample is published.
        let _others: Vec<_> = (1..LOANS).map(|_| publisher.loan(DType::U8, &[1], WATCHDOG).unwrap()).collect();
        publish(&topic, &publisher, WATCHDOG).unwrap();
    }
}

/// All publishers but one are stopped for ever, at any moment, in a topic with as few blocks as it needs. Its only
/// subscriber blocks, and holds as many samples as it may. The last publisher continues.
#[test]
fn all_publishers_but_one_stopped_at_once_leave_enough_for_the_last() {
    let place = Place::new();
    let domain = place.connect();
    let mut dice = Dice(17);
    for _ in 0..rounds(5) {
        let topic = frames(&domain).create().unwrap();
        let publisher = topic.publisher().unwrap();
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It reads no sample, because the sample of a stopped publisher may never be complete.
                let mut held = VecDeque::new();
                while !done.load(Ordering::Relaxed) {
                    if held.len() == HELD as usize {
                        held.pop_front();
                    }
                    held.extend(subscriber.recv(Duration::from_millis(1)));
                    assert!(held.iter().all(|sample| sample.missed() == 0));
                }
            });
            let others: Vec<_> = (1..PUBLISHERS).map(|_| place.play("topic full")).collect();
            std::thread::sleep(Duration::from_micros(dice.below(20_000)));
            others.iter().for_each(Actor::stop);
            let published = (0..1000).try_for_each(|_| publish(&topic, &publisher, WATCHDOG).map(drop));
            done.store(true, Ordering::Relaxed);
            assert!(published.is_ok(), "{published:?}: {:?}", topic.stats());
        });
        drop((subscriber, publisher));
        eventually("all that the dead had comes back", || is_at_rest(&topic));
        drop(topic);
        eventually("it goes with the last", || domain.names().unwrap().is_empty());
    }
}

/// Creators are killed in the first milliseconds: another process can always create the topic under that name.
#[test]
fn topic_maker_killed_at_any_moment_leaves_a_usable_name() {
    let place = Place::new();
    let domain = place.connect();
    let mut dice = Dice(7);
    for _ in 0..rounds(30) {
        let mut makers: Vec<_> = (0..2).map(|_| place.start("topic making")).collect();
        std::thread::sleep(Duration::from_micros(dice.below(30_000)));
        makers[0].kill();
        makers[1].expect("ready");
        let topic = frames(&domain).open_or_create().unwrap();
        eventually("the dead one has gone", || topic.stats().publishers.len() == 1);
        drop(makers);
        eventually("what the dead had comes back", || is_at_rest(&topic));
        drop(topic);
        eventually("it goes with the last", || domain.names().unwrap().is_empty());
    }
}

/// Opening and closing, joining and leaving, publishing and receiving leave nothing behind, here or at the broker.
#[test]
fn closed_handles_leave_nothing_behind() {
    let mut place = Place::new();
    let domain = place.connect();
    let kept = frames(&domain).create().unwrap();
    let publisher = kept.publisher().unwrap();
    let mut guest = place.play("topic coming and going");
    let mut first = None;
    for _ in 0..3 {
        guest.proceed();
        guest.expect("gone");
        eventually("all leases are back", || domain.status().unwrap().leases <= 1 + kept_for_streams());
        let broker = place.broker();
        first.get_or_insert_with(|| [&guest, &*broker].map(|actor| (actor.open_files_at_rest(), actor.memory())));
    }
    drop(publisher);
    eventually("no process is left", || is_at_rest(&kept));
    let broker = place.broker();
    for (actor, (files, memory)) in [&guest, &*broker].into_iter().zip(first.unwrap()) {
        actor.await_files(files);
        let now = actor.memory();
        assert!(now < memory + 2048, "{now} KiB, {memory} after the first round");
    }
}

/// Returns how many timelines the guest may still have open: those that its stream has waited for, as long as it
/// enqueues nothing behind them that would show that it has passed them.
fn kept_for_streams() -> u64 {
    if device() == "cuda" { 9 } else { 0 }
}

/// Opens and closes the topic as often as necessary, each time on request.
fn come_and_go(domain: &Domain) {
    say("ready");
    while std::io::stdin().lock().read_line(&mut String::new()).unwrap() > 0 {
        for turn in 0..rounds(50) {
            let topic = frames(domain).open().unwrap();
            let pool =
                domain.pool("blocks").blocks(4).block_bytes(64).place(partywall::Place::Host).open_or_create().unwrap();
            let block = pool.alloc(Duration::ZERO).unwrap();
            let policy = [Policy::Block, Policy::Latest][turn % 2];
            let mut reader = Reader::join(&topic, policy, 0).unwrap();
            let publisher = topic.publisher().unwrap();
            for _ in 0..10 {
                publish(&topic, &publisher, WATCHDOG).unwrap();
                drop(reader.receive(WATCHDOG).unwrap());
            }
            drop((block, pool, topic));
        }
        say("gone");
    }
}

/// A broker that is killed and started again knows nothing of the topic. Processes that have the topic open continue,
/// beside a new topic of the same name. (Streams do not continue: their timelines end with the broker.)
#[test]
fn topic_in_host_memory_continues_beside_one_of_the_next_broker() {
    let mut place = Place::new();
    let bereft = place.connect();
    let old = frames(&bereft).create().unwrap();
    let mut pairs = vec![(&old, old.publisher().unwrap(), Reader::join(&old, Policy::Block, 0).unwrap())];
    place.broker().kill();
    place.start_broker("");
    let domain = place.connect();
    let new = frames(&domain).create().unwrap();
    pairs.push((&new, new.publisher().unwrap(), Reader::join(&new, Policy::Block, 0).unwrap()));
    for _ in 0..20 {
        for (topic, publisher, reader) in &mut pairs {
            publish(topic, publisher, Duration::ZERO).unwrap();
            eventually("it is received", || reader.receive(Duration::ZERO).is_some());
        }
    }
    drop(pairs);
    eventually("all is back", || is_at_rest(&old) && is_at_rest(&new));
}

/// A publisher or subscriber is evicted at any moment. Nothing is lost once its process has ended.
#[test]
fn publishers_and_subscribers_evicted_at_any_moment_take_nothing_along() {
    let place = Place::new();
    let (domain, topic, mut victims) = stage(&place, 2);
    let mut publisher = None;
    eventually("a place", || {
        publisher = topic.publisher().ok();
        publisher.is_some()
    });
    let publisher = publisher.unwrap();
    let mut dice = Dice(13);
    for round in 0..rounds(20) {
        std::thread::sleep(Duration::from_micros(dice.below(10_000)));
        let victim = dice.below(2) as usize;
        domain.evict(victims[victim].pid(), dice.below(2) == 0).unwrap();
        // No process waits for the evicted one, and it keeps no more blocks than it was promised.
        publish(&topic, &publisher, WATCHDOG).unwrap();
        victims[victim] = place.play(&format!("topic churning {}", 2000 + round));
    }
    drop((victims, publisher));
    eventually("all that the dead had comes back", || is_at_rest(&topic));
}

/// Each sample is received once, whichever threads publish and receive with the same publisher and subscriber.
#[test]
fn threads_share_publishers_and_subscribers() {
    let place = Place::new();
    let domain = place.connect();
    // A loan for each thread, with as many blocks.
    let topic = frames(&domain).publishers(1).loans(LOANS * PUBLISHERS).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let each = rounds(300) as u64;
    let positions = std::sync::Mutex::new(std::collections::BTreeSet::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..each {
                    let loan = publisher.loan(DType::U8, &[1], WATCHDOG).unwrap();
                    loan.filled().publish(WATCHDOG).unwrap();
                }
            });
            scope.spawn(|| {
                while positions.lock().unwrap().len() < 3 * each as usize {
                    match subscriber.recv(Duration::from_millis(1)) {
                        Ok(sample) => assert!(positions.lock().unwrap().insert(sample.position())),
                        // The other threads hold as many samples as allowed.
                        Err(
                            Error::Timeout { .. }
                            | Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Held, .. }),
                        ) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert!(positions.into_inner().unwrap().into_iter().eq(0..3 * each));
    assert_eq!(publisher.published(), 3 * each);
    drop((publisher, subscriber));
    eventually("all is back", || is_at_rest(&topic));
}
