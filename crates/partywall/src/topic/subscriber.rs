//! Subscribers: they receive samples.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use partywall_os::lock::IgnorePoison;
use partywall_shm::{
    members,
    topic::{Ahead, HeldSample, PortId, Received, SubscriberHandle},
};
use partywall_wire::Ages;

use super::{
    OpenTopic, Sample, TopicControl,
    event::{Signal, SubscriberEvent},
};
use crate::{
    adaptive_spin::AdaptiveSpin,
    backoff::Backoff,
    error::{Error, Gone, Result, TopicLimit},
    recorder::Action,
    timeline::OpenLanes,
    wait::Wait,
};

/// What happens to samples that a subscriber does not receive in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Publishers wait for the subscriber, so it misses nothing.
    Block,
    /// A subscriber that falls too far behind misses the oldest samples. No publisher waits for it.
    DropOldest,
    /// The subscriber receives the latest sample and misses earlier ones. No publisher waits for it.
    Latest,
}

/// Receives the samples of a topic.
///
/// Dropping a subscriber detaches it from the topic, and no publisher waits for it any longer. Samples that it has
/// received stay valid until they are dropped, and keep its port in the topic until then. May be used from any thread;
/// each sample is received once.
#[derive(Debug)]
#[must_use = "a subscriber that is dropped leaves the topic"]
pub struct Subscriber {
    pub(super) shared: Arc<SubscriberShared>,
    spin: AdaptiveSpin,
}

/// The state that a subscriber and its samples share.
pub(super) struct SubscriberShared {
    pub(super) port: Arc<SubscriberPort>,
    pub(super) timelines: OpenLanes<u64>,
    /// Last: the connection may end with it.
    pub(super) open: Arc<OpenTopic>,
}

/// A subscriber's port. It is free for others once none of its samples is held. Nothing here has a connection.
pub(super) struct SubscriberPort {
    pub(super) control: Arc<TopicControl>,
    id: PortId,
    handle: Mutex<SubscriberHandle>,
    /// A position before which all samples were received, for polls without the lock.
    next: AtomicU64,
    /// One of its holds stays until the broker takes it back.
    lost: AtomicBool,
    /// What event loops wait for, while there is an event.
    signal: Mutex<Weak<Signal>>,
    /// True once there was an event.
    was_watched: AtomicBool,
    /// True while the owner of the subscriber has samples of its own to hand out.
    is_pending: AtomicBool,
    /// If receiving ends once the topic is idle, the publishers that do not count.
    until_idle: Mutex<Option<Vec<u64>>>,
    /// True if it measures ages without being asked.
    measures_ages: bool,
}

/// Options to join a topic as a subscriber; see [`Topic::subscribe`](super::Topic::subscribe).
#[derive(Debug, Clone)]
#[must_use = "options do nothing until join()"]
pub struct SubscriberOptions {
    open: Arc<OpenTopic>,
    policy: Policy,
    history: Option<u32>,
    queue: Option<u32>,
    until_idle: bool,
    measure_ages: bool,
}

/// Counts of a subscriber's samples. While it receives, they are not a consistent snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriberStats {
    /// Samples received.
    pub received: u64,
    /// Samples missed.
    pub dropped: u64,
    /// Published samples that it has not received yet.
    pub lag: u64,
    /// Samples held.
    pub held: u32,
    /// The ages of the samples that it received while ages were [measured](SubscriberOptions::measure_ages).
    pub ages: Ages,
}

impl SubscriberOptions {
    pub(super) fn new(open: Arc<OpenTopic>, policy: Policy) -> Self {
        Self { open, policy, history: None, queue: None, until_idle: false, measure_ages: false }
    }

    /// Sets how many samples published before it joined the subscriber receives. The default is the topic's setting;
    /// the maximum is what the ring is sure to keep, one less than its depth.
    pub fn history(mut self, samples: u32) -> Self {
        self.history = Some(samples);
        self
    }

    /// Sets how many samples the subscriber may be behind, with [`Policy::DropOldest`]. The default and maximum is the
    /// number that the ring keeps.
    pub fn queue(mut self, samples: u32) -> Self {
        self.queue = Some(samples);
        self
    }

    /// Sets whether receiving ends once the topic is idle: its last publisher has left, or that publisher's death is
    /// proved, and the subscriber has received every sample due to it. Then [`recv`](Subscriber::recv) and
    /// [`try_recv`](Subscriber::try_recv) return [`Gone::TopicIdle`], and iteration ends. The default is false: a
    /// subscriber waits for further publishers.
    ///
    /// A topic that has never had a publisher is not idle, so a subscriber that has joined waits for the first one. A
    /// subscriber that joins after the last publisher has left receives the [history](Self::history) that it asks for,
    /// and ends; [`wait_for_subscribers`](super::Publisher::wait_for_subscribers) keeps a publisher from starting too
    /// early. A dropped publisher leaves with its last loan.
    ///
    /// ```no_run
    /// # use partywall::{Domain, Policy};
    /// # let frames = Domain::connect()?.topic("frames").open()?;
    /// let subscriber = frames.subscribe(Policy::Block).until_idle(true).join()?;
    /// for sample in &subscriber {
    ///     println!("{}", sample?.position());
    /// }
    /// // All publishers have left.
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn until_idle(mut self, until_idle: bool) -> Self {
        self.until_idle = until_idle;
        self
    }

    /// Sets whether the subscriber measures the [age](Sample::age) of each sample when it receives it, from the first
    /// sample on. The default is false: it measures on request, for a minute after each call of [`Subscriber::stats`]
    /// or [`Topic::stats`](super::Topic::stats) for its topic in any process, and after each `partywall show` or
    /// request for metrics. Measuring reads the clock once for each sample: 20 to 30 ns.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Policy};
    /// # let frames = Domain::connect()?.topic("frames").open()?;
    /// let subscriber = frames.subscribe(Policy::Block).until_idle(true).measure_ages(true).join()?;
    /// for sample in &subscriber {
    ///     drop(sample?);
    /// }
    /// let ages = subscriber.stats().ages;
    /// println!("{:?}, at most {:?}", Duration::from_nanos(ages.p50), Duration::from_nanos(ages.max));
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn measure_ages(mut self, measure_ages: bool) -> Self {
        self.measure_ages = measure_ages;
        self
    }

    /// Joins the topic as a subscriber.
    ///
    /// # Errors
    /// [`TopicLimit::Subscribers`]; [`Gone::Evicted`]; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn join(&self) -> Result<Subscriber> {
        let open = &self.open;
        let link = open.domain().link();
        link.require_ours()?;
        open.blocks.check()?;
        let depth = open.shape.depth;
        let queue = match self.policy {
            Policy::Block => None,
            Policy::DropOldest => Some(self.queue.unwrap_or(depth).clamp(1, depth)),
            Policy::Latest => Some(1),
        };
        let history = self.history.unwrap_or(open.shape.history);
        let Some(handle) = open.control.topic.join_as_subscriber(link.row(), queue, history) else {
            // An evicted process finds no free port either.
            open.domain().ping()?;
            return Err(open.at_limit(TopicLimit::Subscribers));
        };
        let control = open.control.clone();
        let id = handle.port();
        let next = AtomicU64::new(handle.next());
        let lost = AtomicBool::new(false);
        let until_idle = Mutex::new(self.until_idle.then(Vec::new));
        let measures_ages = self.measure_ages;
        let handle = Mutex::new(handle);
        let signal = Mutex::default();
        let was_watched = AtomicBool::new(false);
        let is_pending = AtomicBool::new(false);
        let port = SubscriberPort {
            control,
            id,
            handle,
            next,
            lost,
            signal,
            was_watched,
            is_pending,
            until_idle,
            measures_ages,
        };
        let port = Arc::new(port);
        let shared = SubscriberShared { open: open.clone(), port, timelines: OpenLanes::default() };
        Ok(Subscriber { shared: Arc::new(shared), spin: AdaptiveSpin::on_memory() })
    }
}

impl Subscriber {
    /// Receives the next sample, and waits if there is none.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Result, Subscriber};
    /// # fn receive(subscriber: &Subscriber) -> Result<()> {
    /// let sample = subscriber.recv(Duration::from_secs(1))?;
    /// println!("{} {:?}, {} missed", sample.dtype(), sample.shape(), sample.missed());
    /// let values = sample.as_slice::<f32>()?; // in place, as long as `sample` lives
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `recv_async` blocks none.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Gone::TopicIdle`] if it was to [end
    /// then](SubscriberOptions::until_idle); [`TopicLimit::Held`] if it holds as many samples as it may and has dropped
    /// none of them; [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to wait; [`Gone::Evicted`],
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost), [`Gone::Detached`] if the broker has taken
    /// it out of the topic; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn recv<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Sample> {
        let _span = tracing::trace_span!("receive", topic = self.topic()).entered();
        self.recv_within(wait.into())
    }

    fn recv_within(&self, wait: Wait<'_>) -> Result<Sample> {
        if let Some(sample) = self.take()? {
            return Ok(sample);
        }
        let topic = &self.open().control.topic;
        let port = &self.shared.port;
        let waiting = wait.begin();
        let mut now = self.spin.spin(waiting.start(), waiting.timeout(), || port.has_sample());
        // The spin found something: an announcement of sleep would cost the next publisher a system call.
        if now.is_none()
            && let Some(sample) = self.take()?
        {
            return Ok(sample);
        }
        let mut backoff = Backoff::new();
        loop {
            // A sample that is published from now on ends the sleep, and so does a publisher that leaves.
            let seen = topic.prepare_for_sample();
            if let Some(sample) = self.try_recv()? {
                return Ok(sample);
            }
            let Some(left) = waiting.left(now.take().unwrap_or_else(Instant::now)) else {
                return Err(waiting.error(format!("no sample of topic {:?} was published", self.topic())));
            };
            self.open().blocks.require_live()?;
            // There is no room: a GPU that is done with a sample wakes no thread.
            if port.has_sample() {
                std::thread::sleep(backoff.next().min(left));
            } else {
                topic.sleep_for_sample(seen, left);
                // Before the next announcement, whose mark would stay and cost the next publisher a system call.
                if let Some(sample) = self.take()? {
                    return Ok(sample);
                }
            }
        }
    }

    /// Receives the next sample if there is one, and room for it. A dropped sample still takes room while a GPU may
    /// read it, and until it is known whether samples that are made of it are valid.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except the errors of waiting.
    pub fn try_recv(&self) -> Result<Option<Sample>> {
        match self.take()? {
            None if self.shared.port.is_over() => Err(Gone::TopicIdle { topic: self.topic().to_owned() }.into()),
            taken => Ok(taken),
        }
    }

    /// Receives the next sample if there is one, whether or not more will come.
    fn take(&self) -> Result<Option<Sample>> {
        let update = || self.shared.port.update_signal(self.shared.is_full());
        let taken = self.take_next().inspect_err(|_| update())?;
        if taken.is_some() {
            update();
        }
        Ok(taken)
    }

    fn take_next(&self) -> Result<Option<Sample>> {
        let open = self.open();
        let port = &self.shared.port;
        let TopicControl { topic, pool, .. } = &*open.control;
        open.require_ours()?;
        // A polling loop should not take the lock each time.
        match port.peek() {
            Ahead::Nothing => return Ok(None),
            Ahead::Sample(block) => open.blocks.prefetch(block),
            Ahead::Other => {}
        }
        // Checked before receiving: a sample that is dropped meanwhile makes room.
        let is_full = self.shared.is_full();
        let receive = || {
            let mut handle = port.handle();
            let received = topic.receive(pool, &mut handle);
            port.next.store(handle.next(), Ordering::Relaxed);
            if let Received::Sample(taken) = &received {
                if port.measures_ages || topic.ages_are_wanted() {
                    topic.add_age(&handle, taken, members::now_ns());
                }
                open.control.record(Action::Receive, taken.position());
            }
            received
        };
        let mut received = receive();
        if received == Received::Full {
            // Streams may have finished with samples that no poll has found yet. Not under the lock: this runs
            // callbacks.
            open.domain().completions().poll();
            received = receive();
        }
        match received {
            Received::Sample(taken) => Ok(Some(Sample::new(self.shared.clone(), taken))),
            // In a ring that a broken process has damaged, more attempts would not help.
            Received::Empty | Received::Busy => Ok(None),
            Received::Full if is_full => Err(open.at_limit(TopicLimit::Held)),
            // Dropped samples will make room.
            Received::Full => Ok(None),
            Received::Detached => Err(open.detached()),
        }
    }

    /// Detaches the subscriber from the topic now, as dropping it does: no publisher waits for it any longer. Receiving
    /// then returns [`Gone::Detached`].
    pub fn detach(&self) {
        let port = &self.shared.port;
        if port.control.are_ours() {
            port.control.topic.detach_subscriber(port.id);
        }
    }

    /// Returns an iterator over samples as they arrive. Each item is the result of [`recv`](Self::recv) without a
    /// timeout. The iterator only ends with [`until_idle`](SubscriberOptions::until_idle), once the topic is idle.
    pub fn iter(&self) -> Samples<'_> {
        Samples(self)
    }

    /// Returns a file descriptor for event loops. It is readable while [`try_recv`](Self::try_recv) would return a
    /// sample or an error.
    ///
    /// # Errors
    /// [`LimitReached::FileDescriptors`](crate::error::LimitReached::FileDescriptors),
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn event(&self) -> Result<SubscriberEvent> {
        SubscriberEvent::new(&self.shared)
    }

    /// Sets whether receiving ends once the topic is idle, as [`SubscriberOptions::until_idle`] does, from the next call
    /// on. Publishers with the ids `ignored` then count as if they had never been there. For a subscriber that passes
    /// samples on, and has publishers in the same topic.
    pub fn set_until_idle(&self, until_idle: bool, ignored: &[u64]) {
        *self.shared.port.until_idle.lock().ignore_poison() = until_idle.then(|| ignored.to_vec());
    }

    /// Sets whether the subscriber's owner has received samples that it has not handed out. The descriptors of
    /// [`event`](Self::event) are readable meanwhile.
    pub fn set_pending(&self, is_pending: bool) {
        let port = &self.shared.port;
        port.is_pending.store(is_pending, Ordering::Relaxed);
        port.update_signal(self.shared.is_full());
    }

    /// Returns counts of the subscriber's samples, and their ages. Makes the topic's subscribers
    /// [measure ages](SubscriberOptions::measure_ages) for the next minute.
    pub fn stats(&self) -> SubscriberStats {
        self.open().control.ask_for_ages();
        let subscribers = self.open().control.topic.subscribers();
        let ours = subscribers.iter().find(|state| state.id == self.id());
        ours.map_or_else(SubscriberStats::default, |state| SubscriberStats {
            received: state.received,
            dropped: state.dropped,
            lag: state.lag,
            held: state.held,
            ages: state.ages,
        })
    }

    /// Returns the position from which the subscriber goes on: it has received or missed all samples before.
    pub fn next_position(&self) -> u64 {
        self.shared.port.next.load(Ordering::Relaxed)
    }

    /// Returns the subscriber's number, which no other publisher or subscriber of the topic ever has.
    pub fn id(&self) -> u64 {
        self.shared.port.id.id()
    }

    /// Returns the topic's name.
    pub fn topic(&self) -> &str {
        self.open().name()
    }

    fn open(&self) -> &OpenTopic {
        &self.shared.open
    }
}

impl SubscriberShared {
    /// Returns whether the subscriber holds its maximum of samples. Each sample shares this with it. There may be more
    /// holds than samples: a GPU may still read one, or another sample may rest on it.
    pub(super) fn is_full(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > self.open.shape.held as usize
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.detach();
    }
}

impl SubscriberPort {
    /// Leaves the port to the broker, which frees it after this process.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// Releases a sample's hold. Does nothing in a forked child.
    pub(super) fn release(&self, taken: &HeldSample) {
        let TopicControl { topic, pool, .. } = &*self.control;
        if self.control.are_ours() {
            topic.release(pool, taken);
            self.control.record(Action::Release, taken.position());
        }
    }

    /// Returns whether there is a sample to receive, or the broker has detached the subscriber.
    fn has_sample(&self) -> bool {
        self.peek() != Ahead::Nothing
    }

    /// Returns whether receiving has ended because the topic is idle.
    fn is_over(&self) -> bool {
        let ignored = self.until_idle.lock().ignore_poison();
        let next = self.next.load(Ordering::Relaxed);
        ignored.as_ref().is_some_and(|ignored| self.control.topic.is_idle_but_for(next, ignored))
    }

    /// Returns whether an attempt to receive would return a sample or an error, for a subscriber that holds its maximum
    /// of samples or does not.
    pub(super) fn is_ready(&self, is_full: bool) -> bool {
        self.is_pending.load(Ordering::Relaxed) || self.has_next(is_full)
    }

    /// As [`is_ready`](Self::is_ready), without the samples that the subscriber's owner has.
    pub(super) fn has_next(&self, is_full: bool) -> bool {
        match self.peek() {
            Ahead::Nothing => self.is_over(),
            // Without room there is an error, or a dropped sample will make room.
            Ahead::Sample(_) => is_full || self.control.topic.has_room(self.id),
            Ahead::Other => true,
        }
    }

    pub(super) fn signal(&self) -> &Mutex<Weak<Signal>> {
        // Set before the event looks at the ring: a thread that does not see this received its sample before.
        self.was_watched.store(true, Ordering::SeqCst);
        &self.signal
    }

    /// Has the events say what is now true.
    pub(super) fn update_signal(&self, is_full: bool) {
        if self.was_watched.load(Ordering::SeqCst)
            && let Some(signal) = self.signal.lock().ignore_poison().upgrade()
        {
            signal.set(|| self.is_ready(is_full));
        }
    }

    fn peek(&self) -> Ahead {
        // If another thread has received since, this may find what is gone already; receiving finds out.
        self.control.topic.peek(self.id, self.next.load(Ordering::Relaxed))
    }

    fn handle(&self) -> MutexGuard<'_, SubscriberHandle> {
        self.handle.lock().ignore_poison()
    }
}

impl Drop for SubscriberPort {
    fn drop(&mut self) {
        if self.control.are_ours() && !self.lost.load(Ordering::Acquire) {
            self.control.topic.leave_as_subscriber(self.id);
        }
    }
}

/// An iterator over the samples of a [`Subscriber`] as they arrive.
#[derive(Debug)]
pub struct Samples<'a>(&'a Subscriber);

impl Iterator for Samples<'_> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.0.recv(Duration::MAX) {
            Err(Error::Gone(Gone::TopicIdle { .. })) => None,
            received => Some(received),
        }
    }
}

impl<'a> IntoIterator for &'a Subscriber {
    type Item = Result<Sample>;
    type IntoIter = Samples<'a>;

    fn into_iter(self) -> Samples<'a> {
        self.iter()
    }
}

impl fmt::Debug for SubscriberShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubscriberShared").field("topic", &self.open.name()).finish_non_exhaustive()
    }
}
