//! Topics on the simulated driver, and their failures.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, Gpu, Place, Policy, Publisher, Topic, TopicOptions,
    cuda::{Access, DeviceSlice, Stream},
    error::{Busy, Gone, InvalidArgument},
    info::Whom,
};

use super::world::{TIMEOUT, World, eventually, gpu, next_order, say, simulated};

fn frames(domain: &Domain, name: &str) -> TopicOptions {
    let place = Place::Gpu(gpu(domain).uuid());
    domain.topic(name).max_bytes(4096).depth(2).publishers(2).subscribers(2).held(2).place(place)
}

fn publish_on(gpu: &Gpu, publisher: &Publisher) -> u64 {
    let loan = publisher.loan(DType::U32, &[1024], TIMEOUT).unwrap();
    gpu.kernels().unwrap().enqueue_fill(gpu.stream(), loan.device().unwrap().as_slice()).unwrap();
    loan.filled().publish_on(gpu.stream(), TIMEOUT).unwrap().position
}

fn goes_round(gpu: &Gpu, topic: &Topic, publisher: &Publisher) {
    let subscriber = topic.subscriber(Policy::Latest).unwrap();
    let position = publish_on(gpu, publisher);
    let sample = subscriber.recv(TIMEOUT).unwrap();
    assert_eq!(sample.position(), position);
    let range = sample.device_on(gpu.stream()).unwrap();
    assert!(gpu.kernels().unwrap().verify(gpu.stream(), range.as_slice(), 1).unwrap().is_none());
    sample.wait(TIMEOUT).unwrap();
    sample.check().unwrap();
    // If it were dropped, it would keep the subscriber's place until another thread has waited for the GPU.
    sample.release().unwrap();
}

#[test]
fn topics_of_one_name_do_not_disturb_each_other() {
    simulated("topics::topics_of_one_name_do_not_disturb_each_other", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let old = frames(&domain, "frames").create().unwrap();
        let publisher = old.publisher().unwrap();
        goes_round(&gpu, &old, &publisher);
        domain.remove("frames").unwrap();
        let new = frames(&domain, "frames").create().unwrap();
        let other = new.publisher().unwrap();
        for _ in 0..3 {
            goes_round(&gpu, &old, &publisher);
            goes_round(&gpu, &new, &other);
        }
    });
}

// Holds 200.
#[test]
fn age_of_a_sample_on_a_stream_counts_from_its_publication() {
    simulated("topics::age_of_a_sample_on_a_stream_counts_from_its_publication", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let publisher = topic.publisher().unwrap();
        let subscriber = topic.subscribe(Policy::Block).measure_ages(true).join().unwrap();
        // Loaded before a stream waits.
        gpu.kernels().unwrap();
        let gate = domain.timeline_writer("gate").unwrap();
        domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
        publish_on(&gpu, &publisher);
        let published = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        // The age is known before the stream has written the sample.
        let sample = subscriber.recv(TIMEOUT).unwrap();
        let passed = published.elapsed();
        let ages = subscriber.stats().ages;
        assert!(ages.count == 1 && ages.max >= 20_000_000, "{ages:?}");
        gate.signal(1).unwrap();
        sample.wait(TIMEOUT).unwrap();
        assert!(sample.age().unwrap() >= passed && subscriber.stats().ages == ages);
        sample.release().unwrap();
    });
}

#[test]
fn subscriber_forgets_gone_publishers() {
    simulated("topics::subscriber_forgets_gone_publishers", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let subscriber = topic.subscriber(Policy::Block).unwrap();
        // Loaded before any stream waits.
        gpu.kernels().unwrap();
        let gate = domain.timeline_writer("gate").unwrap();
        let waiting = domain.timeline("gate").unwrap();
        for turn in 1..=5 {
            let publisher = topic.publisher().unwrap();
            // A receiver then has to ask which timeline completes the sample.
            waiting.wait_on(gpu.stream(), turn).unwrap();
            publish_on(&gpu, &publisher);
            let sample = subscriber.recv(TIMEOUT).unwrap();
            assert!(matches!(sample.check(), Err(Error::Busy(Busy::NotReady { .. }))));
            gate.signal(turn).unwrap();
            sample.wait(TIMEOUT).unwrap();
            sample.release().unwrap();
            drop(publisher);
            eventually("its port is free", || topic.stats().publishers.is_empty());
        }
        let of_publishers = || domain.objects().unwrap().iter().filter(|row| row.name().contains("publisher-")).count();
        eventually("only the last one is still known", || of_publishers() <= 1);
    });
}

#[test]
fn resources_of_a_stream_may_contain_its_publisher() {
    simulated("topics::resources_of_a_stream_may_contain_its_publisher", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let gate = domain.timeline_writer("gate").unwrap();
        domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
        let publisher = Arc::new(topic.publisher().unwrap());
        let mut loan = publisher.loan(DType::U32, &[1024], TIMEOUT).unwrap();
        loan.keep(publisher.clone());
        loan.filled().publish_on(gpu.stream(), TIMEOUT).unwrap();
        drop(publisher);
        assert_eq!(topic.stats().publishers.len(), 1);
        gate.signal(1).unwrap();
        eventually("its port is free", || topic.stats().publishers.is_empty());
    });
}

/// A resource of a stream that calls a function when it is dropped.
struct Used(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Used {
    fn until(then: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(then)))
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

/// Publishes a sample that a stream completes and that uses these resources.
fn publish_using(gpu: &Gpu, publisher: &Publisher, all: impl IntoIterator<Item = Used>) {
    let mut loan = publisher.loan(DType::U32, &[1024], TIMEOUT).unwrap();
    all.into_iter().for_each(|used| loan.keep(used));
    loan.filled().publish_on(gpu.stream(), TIMEOUT).unwrap();
}

// Holds 199.
#[test]
fn resources_of_a_stream_may_wait_for_the_service_thread_when_dropped() {
    simulated("topics::resources_of_a_stream_may_wait_for_the_service_thread_when_dropped", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let publisher = topic.publisher().unwrap();
        let (sender, receiver) = mpsc::channel();
        let asking = domain.clone();
        let used = Used::until(move || {
            sender.send("begins").unwrap();
            // The event shows that the service thread runs.
            let opened = asking.open("later", TIMEOUT);
            sender.send(if opened.is_ok() { "opened" } else { "late" }).unwrap();
        });
        publish_using(&gpu, &publisher, [used]);
        assert_eq!(receiver.recv_timeout(TIMEOUT), Ok("begins"));
        let build = domain.create("later", Place::Host).tensor("x", DType::U8, &[1]).allocate().unwrap();
        let _segment = build.commit().unwrap();
        assert_eq!(receiver.recv_timeout(TIMEOUT * 2), Ok("opened"));
    });
}

// Holds 199.
#[test]
fn resources_of_a_stream_may_end_their_connection() {
    simulated("topics::resources_of_a_stream_may_end_their_connection", |world| {
        let other = world.connect();
        let gate = other.timeline_writer("gate").unwrap();
        let (sender, receiver) = mpsc::channel();
        {
            let domain = world.connect();
            let gpu = gpu(&domain);
            let topic = frames(&domain, "frames").create().unwrap();
            domain.timeline("gate").unwrap().wait_on(gpu.stream(), 1).unwrap();
            let publisher = topic.publisher().unwrap();
            let used = Used::until(move || {
                drop((domain, topic));
                sender.send(()).unwrap();
            });
            publish_using(&gpu, &publisher, [used]);
        }
        assert_eq!(other.members().unwrap().len(), 2);
        gate.signal(1).unwrap();
        assert_eq!(receiver.recv_timeout(TIMEOUT), Ok(()));
        eventually("the connection is closed", || other.members().unwrap().len() == 1);
    });
}

// Holds 199.
#[test]
fn resources_of_a_stream_may_panic_when_dropped() {
    simulated("topics::resources_of_a_stream_may_panic_when_dropped", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let publisher = topic.publisher().unwrap();
        let (sender, receiver) = mpsc::channel();
        for turn in 0..3 {
            let panics = || Used::until(|| panic!("as it is meant"));
            let sender = sender.clone();
            let sends = Used::until(move || sender.send(turn).unwrap());
            publish_using(&gpu, &publisher, [panics(), sends, panics()]);
            assert_eq!(receiver.recv_timeout(TIMEOUT), Ok(turn));
        }
    });
}

#[test]
fn evicted_publisher_learns_it_from_its_in_flight_samples() {
    simulated("topics::evicted_publisher_learns_it_from_its_in_flight_samples", |world| {
        let domain = world.connect();
        let other = world.connect();
        let gpu = gpu(&domain);
        let publisher = frames(&domain, "frames").create().unwrap().publisher().unwrap();
        publish_on(&gpu, &publisher);
        let filled = publisher.loan(DType::U32, &[1024], TIMEOUT).unwrap().filled();
        other.evict(Whom::Member(domain.member()), false).unwrap();
        let refused = filled.publish_on(gpu.stream(), TIMEOUT).unwrap_err();
        assert!(matches!(refused.error, Error::Gone(Gone::Evicted { .. })), "{:?}", refused.error);
    });
}

#[test]
fn longest_topic_name_has_room_for_its_publishers() {
    simulated("topics::longest_topic_name_has_room_for_its_publishers", |world| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let too_long = frames(&domain, &"x".repeat(201));
        assert!(matches!(too_long.create(), Err(Error::InvalidArgument(InvalidArgument::Options { .. }))));
        assert!(matches!(too_long.open_or_create(), Err(Error::InvalidArgument(InvalidArgument::Options { .. }))));
        let topic = frames(&domain, &"x".repeat(200)).create().unwrap();
        let publisher = topic.publisher().unwrap();
        goes_round(&gpu, &topic, &publisher);
    });
}

/// Another process, which receives a sample, lets its GPU read it, loses its context, and drops the sample.
pub(crate) fn play() {
    let domain = Domain::options().start(false).connect().unwrap();
    let gpu = gpu(&domain);
    let [stream, other] = [(); 2].map(|()| Stream::new(gpu.context()).unwrap());
    gpu.kernels().unwrap();
    let topic = domain.topic("frames").open().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    say("ready");
    let mut sample = None;
    while let Some(order) = next_order() {
        match order.as_str() {
            "read" => {
                let received = subscriber.recv(TIMEOUT).unwrap();
                received.device_on(stream.as_ref()).unwrap();
                sample = Some(received);
            }
            "fault" => {
                // SAFETY: in the first pages there is never any memory, which is what it is about.
                #[allow(unsafe_code)]
                let nowhere = unsafe { DeviceSlice::from_raw(4096, 4, Access::ReadWrite) };
                gpu.kernels().unwrap().enqueue_fill(other.as_ref(), nowhere).unwrap();
                eventually("the loss is found", || other.synchronize().is_err());
            }
            "drop" => drop(sample.take()),
            other => panic!("{other}"),
        }
        say("done");
    }
}

fn read(topic: &Topic) -> u32 {
    topic.stats().read
}

#[test]
fn sample_dropped_with_a_lost_context_stays_held() {
    let test = "topics::sample_dropped_with_a_lost_context_stays_held";
    simulated(test, |world: &World| {
        let domain = world.connect();
        let gpu = gpu(&domain);
        let topic = frames(&domain, "frames").create().unwrap();
        let publisher = topic.publisher().unwrap();
        let mut reader = world.play("topic");
        publish_on(&gpu, &publisher);
        reader.request("read");
        gpu.stream().synchronize().unwrap();
        // Removes the sample from the ring.
        for _ in 0..2 {
            publish_on(&gpu, &publisher);
        }
        eventually("only the reader has it", || read(&topic) == 1);
        reader.request("fault");
        reader.request("drop");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(read(&topic), 1, "its GPU may still read it");
        reader.kill();
        eventually("it is back", || read(&topic) == 0);
    });
}
