// Holds 377, 379.
//! Many tasks that wait, are cancelled and wait again: nothing is lost, nothing happens twice.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use partywall::{Policy, Task};
use partywall_harness::noise;

use super::{super::world::World, pair, publish, queue, runtimes, soon, topic, value};

/// Random numbers below 256.
struct Dice(std::vec::IntoIter<u8>, u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(Vec::new().into_iter(), seed)
    }

    fn roll(&mut self) -> u8 {
        loop {
            if let Some(number) = self.0.next() {
                return number;
            }
            self.1 = self.1.wrapping_add(1000);
            self.0 = noise(1024, self.1).into_iter();
        }
    }

    /// Runs a future, which is dropped early half of the time.
    async fn attempt<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let choice = self.roll();
        let give_up = async {
            match choice {
                0..64 => tokio::task::yield_now().await,
                64..128 => tokio::time::sleep(Duration::from_millis(1 + u64::from(choice % 3))).await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            done = future => Some(done),
            () = give_up => None,
        }
    }
}

#[test]
fn each_task_of_a_queue_is_done_once() {
    const TASKS: u64 = 300;
    for (seed, runtime) in runtimes().into_iter().enumerate() {
        let world = World::new();
        let connections = [world.connect(), world.connect()];
        let queues = connections.each_ref().map(|domain| Arc::new(queue(domain)));
        let done: Arc<Mutex<BTreeMap<u64, u32>>> = Arc::default();
        runtime.block_on(async {
            let workers: Vec<_> = (0..6)
                .map(|worker| {
                    let (queue, done) = (queues[worker % 2].clone(), done.clone());
                    let mut dice = Dice::new((seed * 100 + worker) as u64);
                    tokio::spawn(async move {
                        loop {
                            let Some(task) = dice.attempt(queue.claim_async()).await else { continue };
                            let task = task.unwrap();
                            if dice.roll() < 32 {
                                continue; // it goes to another worker
                            }
                            let id = u64::from_le_bytes(task.arguments().try_into().unwrap());
                            // Counted first, because the submitter goes on as soon as the task is complete.
                            *done.lock().unwrap().entry(id).or_default() += 1;
                            task.complete().unwrap();
                        }
                    })
                })
                .collect();
            let next = Arc::new(AtomicU64::new(0));
            let submitters: Vec<_> = (0..4)
                .map(|submitter| {
                    let (queue, next) = (queues[submitter % 2].clone(), next.clone());
                    let mut dice = Dice::new((seed * 100 + 50 + submitter) as u64);
                    tokio::spawn(async move {
                        loop {
                            let id = next.fetch_add(1, Ordering::Relaxed);
                            if id >= TASKS {
                                return;
                            }
                            let submit = || {
                                let task = Task::new("echo").arguments(&id.to_le_bytes()).max_attempts(255).output(8);
                                queue.submit_async(task)
                            };
                            let ticket = loop {
                                // A dropped submission has not happened, so it is repeated.
                                if let Some(ticket) = dice.attempt(submit()).await {
                                    break ticket.unwrap();
                                }
                            };
                            while dice.attempt(ticket.wait_async()).await.map(Result::unwrap).is_none() {}
                        }
                    })
                })
                .collect();
            for submitter in submitters {
                soon(submitter).await.unwrap();
            }
            workers.iter().for_each(|worker| worker.abort());
        });
        let expected: BTreeMap<_, _> = (0..TASKS).map(|id| (id, 1)).collect();
        assert_eq!(*done.lock().unwrap(), expected);
    }
}

#[test]
fn each_sample_is_received_once() {
    const SAMPLES: u32 = 1500;
    for (seed, runtime) in runtimes().into_iter().enumerate() {
        let world = World::new();
        let (_, subscriber) = pair(&topic(&world.connect()));
        let subscriber = Arc::new(subscriber);
        let publisher = topic(&world.connect()).publisher().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut dice = Dice::new(seed as u64);
                for value in 0..SAMPLES {
                    if dice.roll() < 16 {
                        std::thread::sleep(Duration::from_micros(u64::from(dice.roll()) * 10));
                    }
                    publish(&publisher, value);
                }
            });
            let mut values = runtime.block_on(async {
                let left = Arc::new(AtomicU64::new(SAMPLES.into()));
                let receivers: Vec<_> = (0..4_u64)
                    .map(|receiver| {
                        let (subscriber, left) = (subscriber.clone(), left.clone());
                        let mut dice = Dice::new(seed as u64 * 100 + 50 + receiver);
                        tokio::spawn(async move {
                            let mut values = Vec::new();
                            while left.load(Ordering::Relaxed) > 0 {
                                let receive = tokio::time::timeout(Duration::from_millis(20), subscriber.recv_async());
                                if let Some(Ok(sample)) = dice.attempt(receive).await {
                                    values.push(value(&sample.unwrap()));
                                    left.fetch_sub(1, Ordering::Relaxed);
                                }
                            }
                            values
                        })
                    })
                    .collect();
                let mut all = Vec::new();
                for receiver in receivers {
                    all.extend(soon(receiver).await.unwrap());
                }
                all
            });
            values.sort_unstable();
            assert!(values.iter().copied().eq(0..SAMPLES), "{values:?}");
        });
    }
}

/// Each side waits for the other, so a lost wake-up would end everything.
#[test]
fn no_wake_up_is_lost() {
    for runtime in runtimes() {
        let world = World::new();
        let domains = [world.connect(), world.connect()];
        let open = |domain: &partywall::Domain, name: &str| {
            domain.topic(name).max_bytes(64).place(partywall_harness::place()).open_or_create().unwrap()
        };
        let [ping, pong] = ["ping", "pong"].map(|name| [open(&domains[0], name), open(&domains[1], name)]);
        let there = ping[0].subscriber(Policy::Block).unwrap();
        let back = pong[1].subscriber(Policy::Block).unwrap();
        let (ping, pong) = (ping[1].publisher().unwrap(), pong[0].publisher().unwrap());
        runtime.block_on(async {
            let echo = tokio::spawn(async move {
                for _ in 0..300 {
                    publish(&pong, value(&there.recv_async().await.unwrap()));
                }
            });
            for round in 0..300 {
                publish(&ping, round);
                assert_eq!(value(&soon(back.recv_async()).await.unwrap()), round);
            }
            soon(echo).await.unwrap();
        });
    }
}
