//! Exports of topics: carries out the effects of a [`Sender`] for each topic and host that imports it.
//!
//! A stream has two threads. One takes samples from the ring while there is credit, the other one handles messages and
//! deadlines. Both apply events under one lock, under which the effects are carried out, so these keep their order.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use bytes::Bytes;
use partywall::{
    Error, Place, Sample, Subscriber, Topic, check_name,
    error::{Gone, InvalidData, NotFound},
};
use partywall_cli::Failure;
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::{Wait, bytes::ZBytes};

use super::{
    exchange::{OwnPublishers, TopicOptions, WINDOW_BYTES, from_wire, instance_of, key_to_receiver, own_instance, put},
    inbox::Inbox,
    sender::{Sender, SenderEffect, SenderEvent},
    wire::{
        Bounded, EndReason, FromOrigin, FromReceiver, Instance, Join, Message, RingId, SampleHead, StreamId, Text,
        ToOrigin, ToReceiver, TopicInfo, Window,
    },
};
use crate::{Bridge, hosts::HostEvent};

/// All exports of a bridge.
#[derive(Debug)]
pub(super) struct TopicExports {
    bridge: Arc<Bridge>,
    options: TopicOptions,
    own: OwnPublishers,
    /// The broker, whose rings have nothing to do with those of another one.
    broker: u64,
    hosts: Mutex<HashMap<Instance, String>>,
    streams: Mutex<HashMap<(String, String), Arc<TopicExport>>>,
}

/// A topic and a host that imports it.
#[derive(Debug)]
struct TopicExport {
    exports: Arc<TopicExports>,
    host: String,
    name: String,
    start: Instant,
    inbox: Inbox<SenderEvent>,
    state: Mutex<ExportState>,
    /// Notified when there may be credit, or the stream is over.
    changed: Condvar,
}

#[derive(Debug)]
struct ExportState {
    sender: Sender,
    ring: Option<JoinedRing>,
    kept: HashMap<u64, KeptSample>,
}

#[derive(Debug)]
struct JoinedRing {
    stream: StreamId,
    subscriber: Arc<Subscriber>,
}

/// A sample that is not acknowledged.
#[derive(Debug, Clone)]
enum KeptSample {
    /// A copy of a small one, so that it takes no hold.
    Copied(Bytes),
    InPlace(Arc<Sample>),
    Failed,
}

/// Bytes of a sample in host memory, which it keeps.
struct SampleBytes {
    sample: Arc<Sample>,
    range: Range<usize>,
}

impl TopicExports {
    /// Begins to export topics.
    ///
    /// # Errors
    /// If the session has ended, no thread can be started, or the broker does not answer.
    pub(super) fn start(
        bridge: &Arc<Bridge>,
        options: TopicOptions,
        own: &OwnPublishers,
    ) -> Result<Arc<Self>, Failure> {
        let broker = bridge.domain.watch("*")?.point().instance;
        let exports = Arc::new(Self {
            bridge: bridge.clone(),
            options,
            own: own.clone(),
            broker,
            hosts: Mutex::default(),
            streams: Mutex::default(),
        });
        let us = own_instance(&bridge.link).0;
        // What is lost here is asked for again.
        let (send, messages) = mpsc::sync_channel(MAX_WAITING);
        let subscriber = bridge.link.session().declare_subscriber(bridge.link.key(format_args!("credit/{us:032x}/**")));
        let subscriber = subscriber.callback(move |sample| drop(send.try_send(sample)));
        subscriber.background().wait().map_err(|error| Failure::system("listening to other hosts", error))?;
        let events = bridge.hosts.events();
        let watching = exports.clone();
        let failed = |error| Failure::system("starting a thread", error);
        spawn("partywall-export-hosts", move || events.into_iter().for_each(|event| watching.host_event(event)))
            .map_err(failed)?;
        let reading = exports.clone();
        spawn("partywall-exports", move || messages.into_iter().for_each(|message| reading.message(&message)))
            .map_err(failed)?;
        Ok(exports)
    }

    /// Ends all streams.
    pub(super) fn stop(&self) {
        for export in self.streams.lock().ignore_poison().values() {
            export.inbox.push(SenderEvent::Stop(EndReason::Stopped));
        }
    }

    /// Returns whether there is no stream.
    pub(super) fn have_ended(&self) -> bool {
        let streams = self.streams.lock().ignore_poison();
        streams.values().all(|export| export.state.try_lock().is_ok_and(|state| state.sender.stream().is_none()))
    }

    fn host_event(&self, event: HostEvent) {
        let (host, event) = match event {
            HostEvent::Found { host, instance, .. } => {
                let Some(instance) = instance_of(&instance) else { return };
                let mut hosts = self.hosts.lock().ignore_poison();
                hosts.retain(|_, known| *known != host);
                hosts.insert(instance, host.clone());
                (host, SenderEvent::HostUp(instance))
            }
            HostEvent::Lost { host, instance } => {
                let Some(instance) = instance_of(&instance) else { return };
                (host, SenderEvent::HostLost(instance))
            }
            HostEvent::Twin { .. } => return,
        };
        for (_, export) in self.streams.lock().ignore_poison().iter().filter(|((of, _), _)| *of == host) {
            export.inbox.push(event.clone());
        }
    }

    fn message(self: &Arc<Self>, sample: &zenoh::sample::Sample) {
        // `pw1/R/credit/I/J/NAME`
        let mut parts = sample.key_expr().as_str().splitn(6, '/').skip(4);
        let (Some(receiver), Some(name)) = (parts.next(), parts.next()) else { return };
        let Some(message) = sample.attachment().and_then(|head| ToOrigin::decode(&head.to_bytes()).ok()) else {
            return;
        };
        // Hosts may be allowed to write under their own keys only, so nobody speaks for another one.
        if instance_of(receiver) != Some(message.stream.receiver) {
            return;
        }
        let Some(host) = self.hosts.lock().ignore_poison().get(&message.stream.receiver).cloned() else { return };
        let mut streams = self.streams.lock().ignore_poison();
        let of = (host, name.to_owned());
        if let Some(export) = streams.get(&of) {
            export.inbox.offer(SenderEvent::Message(message), 0);
            return;
        }
        let reason = match message.body {
            FromReceiver::Leave => return,
            FromReceiver::Acknowledge(_) => EndReason::Unknown,
            FromReceiver::Join(_) if check_name(name).is_err() || !self.bridge.exports(name) => EndReason::NotExported,
            FromReceiver::Join(_) if streams.len() >= MAX_EXPORTS => EndReason::Full,
            FromReceiver::Join(_) => match TopicExport::start(self, &of, message.stream.receiver) {
                Some(export) => {
                    export.inbox.offer(SenderEvent::Message(message), 0);
                    streams.insert(of, export);
                    return;
                }
                None => EndReason::Full,
            },
        };
        drop(streams);
        let (_, name) = of;
        self.say(&ToReceiver { stream: message.stream, body: FromOrigin::End { reason, missed: 0 } }, &name);
    }

    fn say(&self, message: &ToReceiver, name: &str) {
        let Bridge { link, host, .. } = &*self.bridge;
        put(link, &key_to_receiver(link, message, host, name), message, ZBytes::new());
    }
}

impl TopicExport {
    fn start(exports: &Arc<TopicExports>, (host, name): &(String, String), instance: Instance) -> Option<Arc<Self>> {
        let us = own_instance(&exports.bridge.link);
        let most = Window { samples: MAX_HELD_SAMPLES, bytes: WINDOW_BYTES };
        let sender = Sender::new(us, most, exports.options.timeout);
        let export = Arc::new(Self {
            exports: exports.clone(),
            host: host.clone(),
            name: name.clone(),
            start: Instant::now(),
            inbox: Inbox::new(INBOX_BYTES),
            state: Mutex::new(ExportState { sender, ring: None, kept: HashMap::new() }),
            changed: Condvar::new(),
        });
        export.inbox.push(SenderEvent::HostUp(instance));
        let running = export.clone();
        spawn("partywall-export", move || running.run()).ok().map(|_| export)
    }

    /// Handles messages and deadlines, until there has been no stream for a while.
    fn run(self: &Arc<Self>) {
        let mut idle_since = Instant::now();
        loop {
            let deadline = {
                let state = self.state.lock().ignore_poison();
                if state.sender.stream().is_some() {
                    idle_since = Instant::now();
                }
                state.sender.deadline().map_or(idle_since + IDLE, |deadline| self.start + deadline)
            };
            let event = self.inbox.pop(Some(deadline)).unwrap_or(SenderEvent::Tick);
            self.apply(&mut self.state.lock().ignore_poison(), event, None);
            if idle_since.elapsed() >= IDLE {
                let mut streams = self.exports.streams.lock().ignore_poison();
                // Under the lock under which messages are distributed: none is lost.
                if self.inbox.close_if_empty() {
                    streams.remove(&(self.host.clone(), self.name.clone()));
                    return;
                }
            }
        }
    }

    /// Applies an event and those that it leads to. `taken` is the sample of [`SenderEvent::Taken`].
    fn apply(self: &Arc<Self>, state: &mut ExportState, event: SenderEvent, mut taken: Option<KeptSample>) {
        let mut effects = Vec::new();
        let mut next = Some(event);
        while let Some(event) = next.take() {
            state.sender.apply(event, self.start.elapsed(), &mut effects);
            for effect in effects.drain(..) {
                match effect {
                    SenderEffect::Subscribe { stream, join } => next = Some(self.subscribe(state, stream, join)),
                    SenderEffect::Unsubscribe { stream } => {
                        if let Some(ring) = state.ring.take_if(|ring| ring.stream == stream) {
                            // Publishers wait for it no longer, even if its thread has it still.
                            ring.subscriber.detach();
                        }
                    }
                    SenderEffect::Keep { number } => {
                        if let Some(taken) = taken.take() {
                            state.kept.insert(number, taken);
                        }
                    }
                    SenderEffect::Release { number } => drop(state.kept.remove(&number)),
                    SenderEffect::Send(message) => self.exports.say(&message, &self.name),
                    SenderEffect::SendPiece { number, offset, bytes, message } => {
                        let kept = state.kept.get(&number);
                        let Some(payload) = kept.and_then(|kept| kept.payload(offset, bytes)) else {
                            // Its memory is lost, so it can never be sent.
                            next = Some(SenderEvent::Stop(EndReason::Stopped));
                            continue;
                        };
                        let Bridge { link, host, .. } = &*self.exports.bridge;
                        put(link, &key_to_receiver(link, &message, host, &self.name), &message, payload);
                    }
                }
            }
        }
        self.changed.notify_all();
    }

    /// Joins the ring.
    fn subscribe(self: &Arc<Self>, state: &mut ExportState, stream: StreamId, join: Join) -> SenderEvent {
        let refused = |reason| SenderEvent::Refused { stream, reason };
        let topic = match self.exports.bridge.domain.topic(&self.name).open() {
            Ok(topic) => topic,
            Err(Error::NotFound(NotFound::Name { .. }) | Error::Mismatch(_)) => return refused(EndReason::NotExported),
            Err(_) => return refused(EndReason::Full),
        };
        let mut options = topic.subscribe(from_wire(join.policy));
        if self.is_imported() {
            // The ring may contain what an earlier life of this bridge has published, which is no longer told apart.
            options = options.history(0);
        } else if join.resume.is_some() {
            options = options.history(u32::MAX);
        } else if let Some(history) = join.history {
            options = options.history(history);
        }
        let subscriber = match options.join() {
            Ok(subscriber) => Arc::new(subscriber),
            Err(_) => return refused(EndReason::Full),
        };
        let position = subscriber.next_position();
        let ring = RingId(u128::from(self.exports.broker) << 64 | u128::from(topic.version()));
        let shape = topic.shape().and_then(|shape| Bounded::new(shape.to_vec()));
        let dtype = topic.dtype().and_then(|dtype| Text::new(dtype.name()));
        let info = TopicInfo { max_bytes: topic.max_bytes(), depth: topic.depth(), dtype, shape };
        state.ring = Some(JoinedRing { stream, subscriber: subscriber.clone() });
        let export = self.clone();
        match spawn("partywall-export", move || export.take(stream, &topic, &subscriber)) {
            Ok(_) => SenderEvent::Subscribed { stream, ring, position, topic: info },
            Err(_) => {
                state.ring = None;
                refused(EndReason::Full)
            }
        }
    }

    /// Returns whether an import of this bridge publishes in the topic.
    fn is_imported(&self) -> bool {
        self.exports.bridge.imports.iter().any(|import| import.pattern.matches(&self.name))
    }

    /// Takes samples of a stream from the ring while there is credit, until the stream is over.
    fn take(self: &Arc<Self>, stream: StreamId, topic: &Topic, subscriber: &Subscriber) {
        while self.await_credit(stream, topic) {
            let event = match subscriber.recv(LOOK) {
                Ok(sample) if self.exports.own.contains(topic, sample.publisher()) => {
                    SenderEvent::Skipped { position: sample.position(), missed: sample.missed() }
                }
                Ok(sample) => {
                    let Some(failed) = self.await_complete(stream, &sample) else { return };
                    let head = head(&sample, failed);
                    let kept = KeptSample::new(sample, failed);
                    if let Some(mut state) = self.current(stream) {
                        self.apply(&mut state, SenderEvent::Taken(head), Some(kept));
                    }
                    continue;
                }
                Err(Error::Timeout { .. }) if self.exists(topic) => continue,
                Err(Error::Timeout { .. }) => {
                    let missed = topic.stats().published.saturating_sub(subscriber.next_position());
                    SenderEvent::TopicOver { missed }
                }
                // The broker has detached it, or is gone: the bridge ends then, too.
                Err(error) => {
                    let is_over = matches!(error, Error::Gone(Gone::Withdrawn { .. }));
                    if is_over { SenderEvent::TopicOver { missed: 0 } } else { SenderEvent::Stop(EndReason::Stopped) }
                }
            };
            if let Some(mut state) = self.current(stream) {
                self.apply(&mut state, event, None);
            }
        }
    }

    /// Returns whether processes still find the topic by its name.
    fn exists(&self, topic: &Topic) -> bool {
        let name = format!("{}@{}", topic.name(), topic.version());
        self.exports.bridge.domain.inspect(&name).is_ok_and(|info| info.is_latest)
    }

    /// Waits until a sample may be taken. Returns false once the stream is over.
    fn await_credit(&self, stream: StreamId, topic: &Topic) -> bool {
        let mut state = self.state.lock().ignore_poison();
        loop {
            if state.ring.as_ref().is_none_or(|ring| ring.stream != stream) {
                return false;
            }
            let in_place = state.kept.values().filter(|kept| matches!(kept, KeptSample::InPlace(_))).count();
            // The one to be taken counts, too.
            if state.sender.has_credit() && in_place < topic.held() as usize {
                return true;
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until streams have written a sample. Returns whether it has failed, or `None` once the stream is over.
    fn await_complete(&self, stream: StreamId, sample: &Sample) -> Option<bool> {
        loop {
            match sample.wait(LOOK) {
                Ok(()) => return Some(false),
                Err(Error::Timeout { .. }) => drop(self.current(stream)?),
                Err(Error::InvalidData(InvalidData::SampleFailed { .. } | InvalidData::SampleTainted { .. })) => {
                    return Some(true);
                }
                Err(_) => return Some(true),
            }
        }
    }

    fn current(&self, stream: StreamId) -> Option<MutexGuard<'_, ExportState>> {
        let state = self.state.lock().ignore_poison();
        let is_current = state.ring.as_ref().is_some_and(|ring| ring.stream == stream);
        is_current.then_some(state)
    }
}

impl KeptSample {
    fn new(sample: Sample, failed: bool) -> Self {
        if failed {
            return Self::Failed;
        }
        if sample.len() <= COPIED_BYTES {
            let mut bytes = vec![0; sample.len() as usize];
            if sample.read_at(0, &mut bytes).is_ok() {
                return Self::Copied(bytes.into());
            }
        }
        Self::InPlace(Arc::new(sample))
    }

    /// Returns a part of the bytes: in host memory without a copy. `None` if the memory is lost.
    fn payload(&self, offset: u64, bytes: u64) -> Option<ZBytes> {
        let range = offset as usize..(offset + bytes) as usize;
        match self {
            Self::Failed => Some(ZBytes::new()),
            Self::Copied(all) => Some(all.slice(range).into()),
            Self::InPlace(sample) if matches!(sample.place(), Place::Host) && sample.bytes().is_ok() => {
                Some(Bytes::from_owner(SampleBytes { sample: sample.clone(), range }).into())
            }
            Self::InPlace(sample) => {
                let mut part = vec![0; range.len()];
                sample.read_at(offset, &mut part).ok()?;
                Some(part.into())
            }
        }
    }
}

impl AsRef<[u8]> for SampleBytes {
    fn as_ref(&self) -> &[u8] {
        // Readable when this was made, and held since.
        self.sample.bytes().ok().and_then(|bytes| bytes.get(self.range.clone())).unwrap_or_default()
    }
}

fn head(sample: &Sample, failed: bool) -> SampleHead {
    SampleHead {
        position: sample.position(),
        publisher: sample.publisher(),
        sequence: sample.sequence(),
        missed: sample.missed(),
        // Names of types, shapes and headers are within the limits of the protocol, or the sample could not exist.
        dtype: Text::new(sample.dtype().name()).unwrap_or_default(),
        shape: Bounded::new(sample.shape().to_vec()).unwrap_or_default(),
        bytes: sample.len(),
        header: Bounded::new(sample.header()).unwrap_or_default(),
        failed,
    }
}

/// How often a thread looks whether its stream or topic is over.
const LOOK: Duration = Duration::from_millis(500);

/// After this time without a stream the threads of an export end.
const IDLE: Duration = Duration::from_secs(60);

/// Samples of at most this size are copied rather than held.
const COPIED_BYTES: u64 = 64 << 10;

/// The most samples of a stream that are not acknowledged.
const MAX_HELD_SAMPLES: u32 = 256;

/// What may wait of messages of a receiver, which have no payload.
const INBOX_BYTES: u64 = 1 << 20;

/// Messages of all hosts that may wait.
const MAX_WAITING: usize = 4096;

/// The most streams of a bridge.
const MAX_EXPORTS: usize = 1024;
