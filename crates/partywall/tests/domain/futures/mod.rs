//! Futures: waits that block no thread, and may be dropped at any time.

mod deaths;
mod drops;
mod loads;
mod runtimes;

use std::{
    pin::{Pin, pin},
    sync::{Arc, Condvar, Mutex},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use partywall::{DType, Domain, Policy, Publisher, Queue, Subscriber, Task, Ticket, Topic};
use partywall_harness::place;
use tokio::runtime::{Builder, Runtime};

use super::TIMEOUT;

pub(crate) use deaths::play;

/// Notes that a task was woken.
#[derive(Default)]
struct Bell {
    has_rung: Mutex<bool>,
    rings: Condvar,
}

impl Bell {
    /// Waits until the task is woken, under a watchdog.
    fn wait(&self) {
        let has_rung = self.has_rung.lock().unwrap();
        let (mut has_rung, waited) = self.rings.wait_timeout_while(has_rung, TIMEOUT, |has_rung| !*has_rung).unwrap();
        assert!(!waited.timed_out(), "the task is not woken");
        *has_rung = false;
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.has_rung.lock().unwrap() = true;
        self.rings.notify_all();
    }
}

/// A future that a test polls itself, without an executor.
struct Polled<'f, T> {
    future: Pin<Box<dyn Future<Output = T> + Send + 'f>>,
    bell: Arc<Bell>,
}

impl<'f, T> Polled<'f, T> {
    fn new(future: impl Future<Output = T> + Send + 'f) -> Self {
        Self { future: Box::pin(future), bell: Arc::default() }
    }

    /// Polls the future once, and returns it while it is pending.
    fn pending(mut self) -> Self {
        assert!(self.poll().is_none(), "there is nothing to wait for");
        self
    }

    /// Polls a future several times, also without a reason, so that it gets past its first exchange with the broker.
    fn at_rest(mut self) -> Self {
        for _ in 0..10 {
            assert!(self.poll().is_none(), "there is nothing to wait for");
            std::thread::sleep(Duration::from_millis(1));
        }
        self
    }

    fn poll(&mut self) -> Option<T> {
        let waker = Waker::from(self.bell.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    /// Waits until the task is woken.
    fn woken(self) -> Self {
        self.bell.wait();
        self
    }

    /// Polls until the future is complete, each time that its task is woken.
    fn complete(mut self) -> T {
        loop {
            if let Some(value) = self.poll() {
                return value;
            }
            self.bell.wait();
        }
    }
}

/// Runs a future without any runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => bell.wait(),
        }
    }
}

/// A runtime with one thread, and one with several.
fn runtimes() -> [Runtime; 2] {
    let one = Builder::new_current_thread().enable_time().build().unwrap();
    let several = Builder::new_multi_thread().worker_threads(3).enable_time().build().unwrap();
    [one, several]
}

/// Runs a future under a watchdog.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("the future does not complete")
}

fn topic(domain: &Domain) -> Topic {
    domain.topic("frames").max_bytes(64).depth(4).held(4).place(place()).open_or_create().unwrap()
}

fn pair(topic: &Topic) -> (Publisher, Subscriber) {
    let subscriber = topic.subscribe(Policy::Block).join().unwrap();
    (topic.publisher().unwrap(), subscriber)
}

fn publish(publisher: &Publisher, value: u32) {
    publisher.send(DType::U32, &[1], &value.to_ne_bytes(), TIMEOUT).unwrap();
}

fn value(sample: &partywall::Sample) -> u32 {
    let mut bytes = [0; 4];
    sample.wait(TIMEOUT).unwrap();
    sample.read_at(0, &mut bytes).unwrap();
    u32::from_ne_bytes(bytes)
}

fn queue(domain: &Domain) -> Queue {
    domain.queue("work").tasks(8).inputs(2, 64).outputs(2, 64).place(place()).open_or_create().unwrap()
}

fn submit(queue: &Queue) -> Ticket {
    queue.submit(Task::new("echo"), TIMEOUT).unwrap()
}
