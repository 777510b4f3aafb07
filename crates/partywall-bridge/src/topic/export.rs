//! Exports of topics: carries out the effects of a [`Sender`] for each topic and host that imports it.
//!
//! A stream has three threads. One takes samples from the ring while there is credit and sends them, the second handles
//! messages and deadlines, and the third sends what the second has for the link. The first two apply events under one
//! lock, under which the effects are carried out, so these keep their order; messages are put into the [`Outbox`] then.
//! A link that is full holds up its sender, and for long if the other host has stopped. No thread sends under the lock,
//! so the second one detaches from the topic in time.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    time::{Duration, Instant},
};

use bytes::Bytes;
use partywall::{
    Domain, Error, Sample, Subscriber, Topic, check_name,
    error::{Gone, NotFound},
    info::{Lifetime, TopicShape},
};
use partywall_cli::Failure;
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::{Wait, bytes::ZBytes};

use super::{
    exchange::{
        OwnPublishers, TopicOptions, WINDOW_BYTES, from_wire, instance_of, key_to_receiver, own_instance, put, put_now,
    },
    inbox::Inbox,
    sender::{Sender, SenderEffect, SenderEvent, SentPiece},
    wire::{
        Bounded, EndReason, FromOrigin, FromReceiver, Instance, Join, MAX_BATCH, Message, RingId, SampleHead,
        SampleKind, StreamId, Text, ToOrigin, ToReceiver, TopicInfo, Window,
    },
};
use crate::{Bridge, hosts::HostEvent};

/// All exports of a bridge.
#[derive(Debug)]
pub(super) struct TopicExports {
    bridge: Arc<Bridge>,
    options: TopicOptions,
    own: OwnPublishers,
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
    outbox: Outbox,
    state: Mutex<ExportState>,
    /// Notified when there may be credit, or the stream is over.
    changed: Condvar,
}

/// Messages for the link.
#[derive(Debug, Default)]
struct Outbox {
    waiting: Mutex<Waiting>,
    /// Notified when there is a message for the sending thread, or nothing more to send.
    filled: Condvar,
    /// Held by the thread that sends, so that messages keep their order.
    sending: Mutex<()>,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<(ToReceiver, ZBytes)>,
    is_closed: bool,
}

#[derive(Debug)]
struct ExportState {
    sender: Sender,
    ring: Option<JoinedRing>,
    kept: HashMap<u64, KeptSample>,
    /// The samples that were kept in place. Messages in the outbox have them for longer.
    in_place: Vec<Weak<Sample>>,
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
    /// It has no bytes to send.
    Empty,
}

/// Samples that were taken from the ring and are not handed over yet.
#[derive(Debug, Default)]
struct Taken {
    items: Vec<(SampleHead, KeptSample)>,
    /// The position of the next sample.
    next: u64,
    /// The receiver has learned that the topic is idle.
    is_idle: bool,
}

/// What may be taken from the ring.
#[derive(Debug)]
struct Credit {
    window: Window,
    /// The samples that the subscriber may hold.
    in_place: usize,
}

/// Bytes of a sample in main memory, which it keeps.
struct SampleBytes {
    sample: Arc<Sample>,
    range: Range<usize>,
}

impl TopicExports {
    /// Begins to export topics.
    ///
    /// # Errors
    /// If the session has ended, or no thread can be started.
    pub(super) fn start(
        bridge: &Arc<Bridge>,
        options: TopicOptions,
        own: &OwnPublishers,
    ) -> Result<Arc<Self>, Failure> {
        let exports = Arc::new(Self {
            bridge: bridge.clone(),
            options,
            own: own.clone(),
            hosts: Mutex::default(),
            streams: Mutex::default(),
        });
        let us = own_instance(&bridge.link).0;
        // What is lost here is asked for again.
        let (send, messages) = mpsc::sync_channel::<zenoh::sample::Sample>(MAX_WAITING);
        let subscriber =
            bridge.link.session().declare_subscriber(bridge.link.key(format_args!("credit/*/{us:032x}/**")));
        let subscriber = subscriber.callback(move |sample| {
            let bytes = sample.payload().len() + sample.attachment().map_or(0, ZBytes::len);
            if bytes <= ToOrigin::MOST {
                let _ = send.try_send(sample);
            }
        });
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
        streams
            .values()
            .all(|export| export.state.lock().ignore_poison().sender.stream().is_none() && export.outbox.is_empty())
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
        // `pw1/R/credit/HOST/I/J/NAME`
        let mut parts = sample.key_expr().as_str().splitn(7, '/').skip(3);
        let (Some(host), Some(receiver), Some(name)) = (parts.next(), parts.nth(1), parts.next()) else { return };
        let Some(message) = sample.attachment().and_then(|head| ToOrigin::decode(&head.to_bytes()).ok()) else {
            return;
        };
        // Hosts may be allowed to write under their own name only, so nobody speaks for another one.
        let is_known = || self.hosts.lock().ignore_poison().get(&message.stream.receiver).is_some_and(|of| of == host);
        if instance_of(receiver) != Some(message.stream.receiver) || !is_known() {
            return;
        }
        let mut streams = self.streams.lock().ignore_poison();
        let of = (host.to_owned(), name.to_owned());
        if let Some(export) = streams.get(&of) {
            export.inbox.offer(SenderEvent::Message(message), 0);
            return;
        }
        let reason = match message.body {
            FromReceiver::Leave => return,
            FromReceiver::Acknowledge(_) => EndReason::Unknown,
            FromReceiver::Join(_) if check_name(name).is_err() || !self.bridge.exports(name) => EndReason::NotExported,
            // Before it has a thread. An error is that of the stream.
            FromReceiver::Join(_) if is_no_topic(&self.bridge.domain, name) => EndReason::NotExported,
            FromReceiver::Join(_) if streams.keys().filter(|(of, _)| of == host).count() >= MAX_EXPORTS => {
                EndReason::Full
            }
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
        let end = ToReceiver { stream: message.stream, body: FromOrigin::End { reason, missed: 0 } };
        let Bridge { link, host, .. } = &*self.bridge;
        // It asks again if this is lost.
        put_now(link, &key_to_receiver(link, &end, host, &name), &end);
    }
}

impl Outbox {
    /// Adds a message. What is beyond a bound is lost, as in the network: streams recover from that.
    fn push(&self, message: ToReceiver, payload: ZBytes) {
        let mut waiting = self.waiting.lock().ignore_poison();
        if waiting.messages.len() < MAX_WAITING {
            waiting.messages.push_back((message, payload));
        }
    }

    /// Drops the messages of a stream that is over, apart from its end.
    fn forget(&self, stream: StreamId) {
        let is_end = |message: &ToReceiver| matches!(message.body, FromOrigin::End { .. });
        let mut waiting = self.waiting.lock().ignore_poison();
        waiting.messages.retain(|(message, _)| message.stream != stream || is_end(message));
    }

    /// Sends what waits. Returns at once while another thread does so, which sends the rest as well.
    fn send(&self, put: impl Fn(&ToReceiver, ZBytes)) {
        while let Ok(sending) = self.sending.try_lock() {
            while let Some((message, payload)) = self.pop() {
                put(&message, payload);
            }
            drop(sending);
            // Another one may have found the lock held, and left a message to this thread.
            if self.waiting.lock().ignore_poison().messages.is_empty() {
                return;
            }
        }
    }

    /// Sends messages until the outbox is closed.
    fn drain(&self, put: impl Fn(&ToReceiver, ZBytes)) {
        loop {
            let mut waiting = self.waiting.lock().ignore_poison();
            while waiting.messages.is_empty() {
                if waiting.is_closed {
                    return;
                }
                waiting = self.filled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            drop(waiting);
            let _sending = self.sending.lock().ignore_poison();
            while let Some((message, payload)) = self.pop() {
                put(&message, payload);
            }
        }
    }

    /// Has the sending thread send what waits.
    fn wake(&self) {
        self.filled.notify_one();
    }

    fn pop(&self) -> Option<(ToReceiver, ZBytes)> {
        self.waiting.lock().ignore_poison().messages.pop_front()
    }

    /// Returns whether everything was sent.
    fn is_empty(&self) -> bool {
        self.sending.try_lock().is_ok() && self.waiting.lock().ignore_poison().messages.is_empty()
    }

    fn close(&self) {
        self.waiting.lock().ignore_poison().is_closed = true;
        self.filled.notify_one();
    }
}

impl ExportState {
    /// Returns how many more samples the subscriber may hold.
    fn in_place_left(&mut self, topic: &Topic) -> usize {
        self.in_place.retain(|sample| sample.strong_count() > 0);
        (topic.held() as usize).saturating_sub(self.in_place.len())
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
            outbox: Outbox::default(),
            state: Mutex::new(ExportState { sender, ring: None, kept: HashMap::new(), in_place: Vec::new() }),
            changed: Condvar::new(),
        });
        export.inbox.push(SenderEvent::HostUp(instance));
        let [running, sending] = [export.clone(), export.clone()];
        spawn("partywall-export-send", move || sending.outbox.drain(|message, payload| sending.put(message, payload)))
            .ok()?;
        let started = spawn("partywall-export", move || running.run()).inspect_err(|_| export.outbox.close());
        started.ok().map(|_| export)
    }

    fn put(&self, message: &ToReceiver, payload: ZBytes) {
        let Bridge { link, host, .. } = &*self.exports.bridge;
        put(link, &key_to_receiver(link, message, host, &self.name), message, payload);
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
            self.apply(&mut self.state.lock().ignore_poison(), event, Vec::new());
            self.outbox.wake();
            if idle_since.elapsed() >= IDLE {
                let mut streams = self.exports.streams.lock().ignore_poison();
                // Under the lock under which messages are distributed: none is lost.
                if self.inbox.close_if_empty() {
                    streams.remove(&(self.host.clone(), self.name.clone()));
                    self.outbox.close();
                    return;
                }
            }
        }
    }

    /// Applies an event and those that it leads to. `taken` are the samples of [`SenderEvent::Taken`].
    fn apply(self: &Arc<Self>, state: &mut ExportState, event: SenderEvent, taken: Vec<KeptSample>) {
        let mut taken: Vec<_> = taken.into_iter().map(Some).collect();
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
                        self.outbox.forget(stream);
                    }
                    SenderEffect::Keep { taken: which, number } => {
                        if let Some(kept) = taken.get_mut(which).and_then(Option::take) {
                            if let KeptSample::InPlace(sample) = &kept {
                                state.in_place.push(Arc::downgrade(sample));
                            }
                            state.kept.insert(number, kept);
                        }
                    }
                    SenderEffect::Release { number } => drop(state.kept.remove(&number)),
                    SenderEffect::Send(message) => self.outbox.push(message, ZBytes::new()),
                    SenderEffect::SendPieces { pieces, message } => {
                        let Some(payload) = payload(&state.kept, &pieces) else {
                            // Its memory is lost, so it can never be sent.
                            next = Some(SenderEvent::Stop(EndReason::Stopped));
                            continue;
                        };
                        self.outbox.push(message, payload);
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
        let Ok((ring, has)) = self.exports.own.ring(&topic) else { return refused(EndReason::NotExported) };
        let shape = topic.shape().and_then(|shape| Bounded::new(shape.to_vec()));
        let dtype = topic.dtype().and_then(|dtype| Text::new(dtype.name()));
        let TopicShape { depth, history, publishers, subscribers, held, .. } = has;
        let max_bytes = topic.max_bytes();
        let info = TopicInfo { max_bytes, depth, history, publishers, subscribers, held, dtype, shape };
        state.ring = Some(JoinedRing { stream, subscriber: subscriber.clone() });
        let export = self.clone();
        match spawn("partywall-export", move || export.take(stream, ring, &topic, &subscriber)) {
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
    fn take(self: &Arc<Self>, stream: StreamId, ring: RingId, topic: &Topic, subscriber: &Subscriber) {
        let mut taken = Taken { next: subscriber.next_position(), ..Taken::default() };
        let own = self.exports.own.of(ring);
        // Whether the wait for samples ends if the topic is idle: not if the receiver knows that.
        let mut until_idle = true;
        while let Some(mut credit) = self.await_credit(stream, topic) {
            until_idle |= !taken.is_idle;
            subscriber.set_until_idle(until_idle, &own.ids());
            let mut received = subscriber.recv(POLL).map(Some);
            // All that is there, so that one message is enough for it.
            while let Ok(Some(sample)) = received {
                if own.contains(sample.publisher()) {
                    if !self.send(stream, &mut taken) {
                        return;
                    }
                    let (position, missed) = taken.pass(sample.position(), 1);
                    self.apply_current(stream, SenderEvent::Skipped { position, missed });
                    received = Ok(None);
                    continue;
                }
                if let Some(failed) = has_failed(sample.wait(Duration::ZERO)) {
                    taken.push(sample, failed, &mut credit.in_place);
                    received = if taken.is_within(&credit) { subscriber.try_recv() } else { Ok(None) };
                    continue;
                }
                // Those before it need not wait for its GPU.
                if !self.send(stream, &mut taken) {
                    return;
                }
                let Some(failed) = self.await_complete(stream, &sample) else { return };
                taken.push(sample, failed, &mut credit.in_place);
                received = Ok(None);
            }
            let event = match received {
                Ok(_) => None,
                Err(Error::Gone(Gone::TopicIdle { .. })) => {
                    if !taken.is_idle {
                        taken.push_change(SampleKind::Idle, subscriber.next_position());
                    }
                    until_idle = false;
                    None
                }
                // A publisher has joined since.
                Err(Error::Timeout { .. }) if taken.is_idle && until_idle => {
                    taken.push_change(SampleKind::Busy, subscriber.next_position());
                    None
                }
                Err(Error::Timeout { .. }) if !self.is_over(topic, taken.is_idle) => {
                    until_idle = true;
                    None
                }
                Err(Error::Timeout { .. }) => {
                    let missed = topic.stats().published.saturating_sub(taken.next);
                    Some(SenderEvent::TopicOver { missed })
                }
                // The broker has detached it, or is gone: the bridge ends then, too.
                Err(error) => Some(match error {
                    Error::Gone(Gone::Withdrawn { .. }) => SenderEvent::TopicOver { missed: 0 },
                    _ => SenderEvent::Stop(EndReason::Stopped),
                }),
            };
            if !self.send(stream, &mut taken) {
                return;
            }
            if let Some(event) = event {
                self.apply_current(stream, event);
            }
        }
    }

    /// Hands over what was taken. Returns false once the stream is over.
    fn send(self: &Arc<Self>, stream: StreamId, taken: &mut Taken) -> bool {
        let Some(mut state) = self.current(stream) else { return false };
        if !taken.items.is_empty() {
            let (heads, kept) = std::mem::take(&mut taken.items).into_iter().unzip();
            self.apply(&mut state, SenderEvent::Taken(heads), kept);
            drop(state);
            // Here, and not on another thread: that would cost each sample the time of a wake-up.
            self.outbox.send(|message, payload| self.put(message, payload));
        }
        true
    }

    fn apply_current(self: &Arc<Self>, stream: StreamId, event: SenderEvent) {
        if let Some(mut state) = self.current(stream) {
            self.apply(&mut state, event, Vec::new());
        }
        self.outbox.wake();
    }

    /// Returns whether the topic is over: processes do not find it by its name any more, or it is idle and would have
    /// ended with the last process that had it open, if this one had not.
    fn is_over(&self, topic: &Topic, is_idle: bool) -> bool {
        let name = format!("{}@{}", topic.name(), topic.version());
        let info = match self.exports.bridge.domain.inspect(&name) {
            Ok(info) => info,
            Err(error) => return matches!(error, Error::NotFound(_)),
        };
        let is_ours = info.queues.is_empty() && info.holders.iter().all(|holder| holder.pid == std::process::id());
        !info.is_latest || is_idle && is_ours && info.version.lifetime == Lifetime::Shared
    }

    /// Waits until samples may be taken. Returns how many, or `None` once the stream is over.
    fn await_credit(&self, stream: StreamId, topic: &Topic) -> Option<Credit> {
        let mut state = self.state.lock().ignore_poison();
        loop {
            state.ring.as_ref().filter(|ring| ring.stream == stream)?;
            let in_place = state.in_place_left(topic);
            if let Some(window) = state.sender.credit().filter(|_| in_place > 0) {
                return Some(Credit { window, in_place });
            }
            state = self.changed.wait_timeout(state, POLL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until streams have written a sample. Returns whether it has failed, or `None` once the stream is over.
    fn await_complete(&self, stream: StreamId, sample: &Sample) -> Option<bool> {
        loop {
            match has_failed(sample.wait(POLL)) {
                Some(failed) => return Some(failed),
                None => drop(self.current(stream)?),
            }
        }
    }

    fn current(&self, stream: StreamId) -> Option<MutexGuard<'_, ExportState>> {
        let state = self.state.lock().ignore_poison();
        let is_current = state.ring.as_ref().is_some_and(|ring| ring.stream == stream);
        is_current.then_some(state)
    }
}

impl Taken {
    /// Adds a sample. `in_place` is how many may be held.
    fn push(&mut self, sample: Sample, failed: bool, in_place: &mut usize) {
        let (_, missed) = self.pass(sample.position(), 1);
        self.is_idle = false;
        let head = head(&sample, failed, missed);
        let kept = KeptSample::new(sample, failed);
        *in_place = in_place.saturating_sub(usize::from(matches!(kept, KeptSample::InPlace(_))));
        self.items.push((head, kept));
    }

    /// Adds that the topic is idle before a position, or that it is no longer.
    fn push_change(&mut self, kind: SampleKind, position: u64) {
        let (position, missed) = self.pass(position, 0);
        self.is_idle = kind == SampleKind::Idle;
        self.items.push((SampleHead::change(kind, position, missed), KeptSample::Empty));
    }

    /// Returns a position, and how many were missed before it. So many samples are there.
    fn pass(&mut self, position: u64, samples: u64) -> (u64, u64) {
        // Not what the subscriber counts: numbers that publishers skip have no position.
        let missed = position.saturating_sub(self.next);
        self.next = position + samples;
        (position, missed)
    }

    /// Returns whether another sample may be taken with these.
    fn is_within(&self, credit: &Credit) -> bool {
        let Window { samples, bytes } = credit.window;
        let has_bytes: u64 = self.items.iter().map(|(head, _)| head.bytes).sum();
        self.items.len() < MAX_BATCH.min(samples as usize) && has_bytes < bytes && credit.in_place > 0
    }
}

impl KeptSample {
    fn new(sample: Sample, failed: bool) -> Self {
        if failed {
            return Self::Empty;
        }
        if sample.len() <= COPIED_BYTES {
            let mut bytes = vec![0; sample.len() as usize];
            if sample.read_at(0, &mut bytes).is_ok() {
                return Self::Copied(bytes.into());
            }
        }
        Self::InPlace(Arc::new(sample))
    }

    /// Returns a part of the bytes: in main memory without a copy. `None` if the memory is lost.
    fn payload(&self, offset: u64, bytes: u64) -> Option<ZBytes> {
        let range = offset as usize..(offset + bytes) as usize;
        match self {
            Self::Empty => Some(ZBytes::new()),
            Self::Copied(all) => Some(all.slice(range).into()),
            Self::InPlace(sample) if sample.place().is_cpu_reachable() && sample.bytes().is_ok() => {
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

/// Returns whether no topic has this name.
fn is_no_topic(domain: &Domain, name: &str) -> bool {
    match domain.inspect(name) {
        Ok(info) => info.version.control.is_none_or(|control| control.topic.is_none()),
        Err(error) => matches!(error, Error::NotFound(_)),
    }
}

/// Returns the bytes of a message. `None` if memory is lost.
fn payload(kept: &HashMap<u64, KeptSample>, pieces: &[SentPiece]) -> Option<ZBytes> {
    let payload = |piece: &SentPiece| kept.get(&piece.number)?.payload(piece.offset, piece.bytes);
    if let [piece] = pieces {
        return payload(piece);
    }
    let mut all = Vec::with_capacity(pieces.iter().map(|piece| piece.bytes as usize).sum());
    for piece in pieces {
        payload(piece)?.slices().for_each(|part| all.extend_from_slice(part));
    }
    Some(all.into())
}

/// Returns whether a sample has failed; `None` if it is not complete.
fn has_failed(waited: partywall::Result<()>) -> Option<bool> {
    match waited {
        Ok(()) => Some(false),
        Err(Error::Timeout { .. }) => None,
        Err(_) => Some(true),
    }
}

fn head(sample: &Sample, failed: bool, missed: u64) -> SampleHead {
    SampleHead {
        kind: if failed { SampleKind::Failed } else { SampleKind::Whole },
        position: sample.position(),
        publisher: sample.publisher(),
        sequence: sample.sequence(),
        missed,
        // Names of types, shapes and headers are within the limits of the protocol, or the sample could not exist.
        dtype: Text::new(sample.dtype().name()).unwrap_or_default(),
        shape: Bounded::new(sample.shape().to_vec()).unwrap_or_default(),
        bytes: sample.len(),
        header: Bounded::new(sample.header()).unwrap_or_default(),
    }
}

/// How often a thread checks whether its stream or topic is over.
const POLL: Duration = Duration::from_millis(500);

/// After this time without a stream the threads of an export end.
const IDLE: Duration = Duration::from_secs(60);

/// Samples of at most this size are copied rather than held.
const COPIED_BYTES: u64 = 64 << 10;

/// The most samples of a stream that are not acknowledged.
const MAX_HELD_SAMPLES: u32 = 256;

/// What may wait of messages of a receiver, which have no payload.
const INBOX_BYTES: u64 = 1 << 20;

/// Messages of all hosts that may wait, and messages of a stream for the link.
const MAX_WAITING: usize = 4096;

/// The most streams to a host.
const MAX_EXPORTS: usize = 256;
