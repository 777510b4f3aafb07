//! Topics whose processes join and leave again and again, whose broker is killed, and that threads share.

use std::{collections::BTreeMap, io::BufRead, time::Duration};

use partywall::{
    DType, Domain, Error, Policy, Publisher, Sample, Subscriber, Topic, TopicOptions,
    error::{InvalidData, LimitReached, TopicLimit},
};
use partywall_harness::{device, place};

use super::{
    WATCHDOG, eventually,
    place::{Place, say},
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

/// Checks that no publisher or subscriber is left, and that no block is lost.
fn is_at_rest(topic: &Topic) -> bool {
    let stats = topic.stats();
    (stats.held, stats.read) == (0, 0)
        && stats.free + stats.in_ring == BLOCKS
        && stats.publishers.is_empty()
        && stats.subscribers.is_empty()
}

/// Opening and closing, joining and leaving, publishing and receiving leave nothing behind, here or at the broker.
#[test]
fn closed_handles_leave_nothing_behind() {
    let mut place = Place::new();
    let domain = place.connect();
    let kept = frames(&domain).create().unwrap();
    let publisher = kept.publisher().unwrap();
    let mut guest = place.play("topic");
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
pub(crate) fn come_and_go() {
    let domain = Domain::options().start(false).connect().unwrap();
    say("ready");
    while std::io::stdin().lock().read_line(&mut String::new()).unwrap() > 0 {
        for turn in 0..rounds(50) {
            let topic = frames(&domain).open().unwrap();
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
