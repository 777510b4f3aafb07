//! The origin's side of a stream.

use std::{collections::VecDeque, time::Duration};

use super::{
    RETRY, Time, earliest,
    wire::{
        Acknowledgement, Bounded, Cursor, EndReason, FromOrigin, FromReceiver, Instance, Join, MAX_BATCH, Resume,
        RingId, SampleHead, SampleKind, StreamId, ToOrigin, ToReceiver, TopicInfo, Window,
    },
};

/// Sends the samples of one topic to one host. It has at most one stream at a time.
#[derive(Debug)]
pub(crate) struct Sender {
    us: Instance,
    /// What this side allows a receiver, whatever that asks for.
    most: Window,
    timeout: Duration,
    host: Option<ReceivingHost>,
    stream: Option<OutStream>,
    /// The end of the latest stream, of which its receiver may have to be notified again.
    ended: Option<(StreamId, FromOrigin)>,
}

/// The current instance of the receiving host.
#[derive(Debug)]
struct ReceivingHost {
    instance: Instance,
    lost_at: Option<Time>,
}

#[derive(Debug)]
struct OutStream {
    id: StreamId,
    window: Window,
    /// The ring, once the executor has joined it, and where the stream begins there.
    ring: Option<(Resume, TopicInfo)>,
    /// Where the receiver goes on, until the first sample is taken. Then it is the ring that counts what is missed.
    resume: Option<Resume>,
    /// Samples that were missed before the next one.
    missed: u64,
    /// Samples that are not published at the receiver, in order.
    held: VecDeque<SampleHead>,
    /// The number of the first one.
    first: u64,
    /// Of the latest acknowledgement.
    serial: u64,
    written: Cursor,
    /// The next piece to send. Never before `first`.
    sent: Cursor,
    /// The first piece that was never sent: no acknowledgement goes beyond.
    frontier: Cursor,
    /// Bytes between `written` and `sent`.
    in_flight: u64,
    /// Bytes of all held samples from `written` on.
    unwritten: u64,
    /// When something was heard of the receiver, or the first held sample was taken.
    heard: Time,
    probe_at: Time,
    /// Samples that were missed at the end of a topic that is over: what is held is sent, and nothing more taken.
    over: Option<u64>,
}

/// The input of a [`Sender`].
#[derive(Debug, Clone)]
pub(crate) enum SenderEvent {
    /// The receiving host is there, for the first time or again.
    HostUp(Instance),
    /// It is unreachable.
    HostLost(Instance),
    /// The receiver sent a message.
    Message(ToOrigin),
    /// The executor has joined the topic's ring for a stream, which gives it this sample first.
    Subscribed { stream: StreamId, ring: RingId, position: u64, topic: TopicInfo },
    /// It could not.
    Refused { stream: StreamId, reason: EndReason },
    /// Samples were taken from the ring, no more than there was [credit](Sender::credit) for. Their `missed` is what
    /// the ring counts.
    Taken(Vec<SampleHead>),
    /// A sample was taken that does not cross, because this bridge has published it.
    Skipped { position: u64, missed: u64 },
    /// The topic is over. As many samples were missed since the last one that was taken.
    TopicOver { missed: u64 },
    /// The bridge stops, or no longer exports the topic.
    Stop(EndReason),
    /// Time has passed: at the latest at the [deadline](Sender::deadline).
    Tick,
}

/// The output of a [`Sender`], to be carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SenderEffect {
    /// Join the topic's ring, then report [`SenderEvent::Subscribed`] or [`SenderEvent::Refused`]. With
    /// [`Resume`], begin as early as the ring allows.
    Subscribe {
        stream: StreamId,
        join: Join,
    },
    /// Leave the ring.
    Unsubscribe {
        stream: StreamId,
    },
    /// Keep one of the samples that were just taken, under this number. Without this effect it is not needed.
    Keep {
        /// Which of [`SenderEvent::Taken`].
        taken: usize,
        number: u64,
    },
    /// Let go of a sample.
    Release {
        number: u64,
    },
    Send(ToReceiver),
    /// Send a message with these parts of kept samples, one after another.
    SendPieces {
        pieces: Vec<SentPiece>,
        message: ToReceiver,
    },
}

/// A part of a kept sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SentPiece {
    pub(crate) number: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

type Effects = Vec<SenderEffect>;

impl Sender {
    /// Creates the sender of the bridge `us`. `most` bounds what it holds, apart from the size of one sample. After
    /// `timeout` without a word of a receiver it detaches.
    pub(crate) fn new(us: Instance, most: Window, timeout: Duration) -> Self {
        Self { us, most, timeout, host: None, stream: None, ended: None }
    }

    /// Applies an event, and appends its effects to `out`.
    pub(crate) fn apply(&mut self, event: SenderEvent, now: Time, out: &mut Effects) {
        match event {
            SenderEvent::HostUp(instance) => self.host_up(instance, now, out),
            SenderEvent::HostLost(instance) => {
                if let Some(host) = self.host.as_mut().filter(|host| host.instance == instance) {
                    host.lost_at.get_or_insert(now);
                }
            }
            SenderEvent::Message(message) => self.message(message, now, out),
            SenderEvent::Subscribed { stream, ring, position, topic } => {
                self.subscribed(stream, (Resume { ring, position }, topic), now, out);
            }
            SenderEvent::Refused { stream, reason } => {
                if self.is_current(stream) {
                    self.end(reason, 0, out);
                }
            }
            SenderEvent::Taken(samples) => self.taken(samples, now, out),
            SenderEvent::Skipped { position, missed } => {
                if let Some(stream) = &mut self.stream
                    && let Some(missed) = stream.missed_before(position, position + 1, missed)
                {
                    stream.missed = missed;
                }
            }
            SenderEvent::TopicOver { missed } => {
                if let Some(stream) = &mut self.stream {
                    stream.over = Some(stream.missed.saturating_add(missed));
                    self.end_if_over(out);
                }
            }
            SenderEvent::Stop(reason) => self.end(reason, 0, out),
            SenderEvent::Tick => self.tick(now, out),
        }
    }

    /// Returns what may be taken from the ring: as many samples, and another one as long as those taken have fewer
    /// bytes. `None` if nothing may.
    pub(crate) fn credit(&self) -> Option<Window> {
        self.host.as_ref().filter(|host| host.lost_at.is_none())?;
        let stream = self.stream.as_ref().filter(|stream| stream.ring.is_some() && stream.over.is_none())?;
        let samples = stream.window.samples.saturating_sub(stream.held.len() as u32);
        let bytes = stream.window.bytes.saturating_sub(stream.unwritten);
        (samples > 0 && bytes > 0).then_some(Window { samples, bytes })
    }

    /// Returns when [`SenderEvent::Tick`] is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let stream = self.stream.as_ref()?;
        if let Some(lost_at) = self.host.as_ref().and_then(|host| host.lost_at) {
            return Some(lost_at + self.timeout);
        }
        let waits = !stream.held.is_empty();
        earliest([waits.then_some(stream.probe_at), waits.then(|| stream.heard + self.timeout)])
    }

    /// Returns the stream that exists.
    pub(crate) fn stream(&self) -> Option<StreamId> {
        self.stream.as_ref().map(|stream| stream.id)
    }

    fn host_up(&mut self, instance: Instance, now: Time, out: &mut Effects) {
        let is_same = self.host.as_ref().is_some_and(|host| host.instance == instance);
        self.host = Some(ReceivingHost { instance, lost_at: None });
        if !is_same {
            // Nobody is there any more who could be notified.
            self.close(out);
            self.ended = None;
        } else if let Some(stream) = &mut self.stream {
            stream.heard = now;
            stream.probe(now, out);
        }
    }

    fn message(&mut self, message: ToOrigin, now: Time, out: &mut Effects) {
        let ToOrigin { stream: id, body } = message;
        let host = self.host.as_ref().map(|host| host.instance);
        // Of another instance than the current one: late, or of an impostor.
        if id.origin != self.us || Some(id.receiver) != host {
            return;
        }
        if !self.is_current(id) {
            match body {
                FromReceiver::Join(join) if self.is_new(id) => self.join(id, join, now, out),
                // Late, unless it has not heard how its stream ended.
                FromReceiver::Join(_) if !self.has_ended(id) => {}
                FromReceiver::Leave => {}
                _ => self.deny(id, out),
            }
            return;
        }
        let Some(stream) = &mut self.stream else { return };
        stream.heard = now;
        match body {
            FromReceiver::Join(_) => stream.confirm(out),
            FromReceiver::Acknowledge(acknowledgement) => match stream.acknowledge(acknowledgement, now, out) {
                Ok(()) => self.end_if_over(out),
                Err(OutOfRange) => self.end(EndReason::Violation, 0, out),
            },
            FromReceiver::Leave => {
                self.close(out);
                self.ended = Some((id, FromOrigin::End { reason: EndReason::Unknown, missed: 0 }));
            }
        }
    }

    /// Returns whether a stream is newer than all that were here.
    fn is_new(&self, id: StreamId) -> bool {
        let latest = self.stream().or(self.ended.as_ref().map(|(ended, _)| *ended));
        latest.is_none_or(|latest| latest.number < id.number)
    }

    fn join(&mut self, id: StreamId, join: Join, now: Time, out: &mut Effects) {
        self.close(out);
        let window = join.window.within(self.most);
        self.stream = Some(OutStream::new(id, window, join.resume, now));
        out.push(SenderEffect::Subscribe { stream: id, join });
    }

    /// Answers a message of a stream that does not exist.
    fn deny(&self, id: StreamId, out: &mut Effects) {
        let unknown = FromOrigin::End { reason: EndReason::Unknown, missed: 0 };
        let end = self.ended.as_ref().filter(|_| self.has_ended(id)).map_or(unknown, |(_, end)| end.clone());
        out.push(SenderEffect::Send(ToReceiver { stream: id, body: end }));
    }

    fn subscribed(&mut self, id: StreamId, ring: (Resume, TopicInfo), now: Time, out: &mut Effects) {
        let Some(stream) = self.stream.as_mut().filter(|stream| stream.id == id) else {
            // Its `Unsubscribe` came while it was under way, and was for nothing then.
            out.push(SenderEffect::Unsubscribe { stream: id });
            return;
        };
        stream.resume = stream.resume.filter(|resume| resume.ring == ring.0.ring);
        stream.ring = Some(ring);
        stream.heard = now;
        stream.confirm(out);
    }

    fn taken(&mut self, samples: Vec<SampleHead>, now: Time, out: &mut Effects) {
        let Some(stream) = &mut self.stream else { return };
        for (taken, mut sample) in samples.into_iter().enumerate() {
            let missed = stream.missed_before(sample.position, sample.next_position(), sample.missed);
            // The receiver has it, from an earlier stream.
            let Some(missed) = missed else { continue };
            stream.missed = 0;
            stream.resume = None;
            sample.missed = missed;
            if sample.kind != SampleKind::Whole {
                sample.bytes = 0;
            }
            if stream.held.is_empty() {
                stream.heard = now;
                stream.probe_at = now + RETRY;
            }
            stream.unwritten = stream.unwritten.saturating_add(sample.bytes);
            out.push(SenderEffect::Keep { taken, number: stream.end() });
            stream.held.push_back(sample);
        }
        stream.send(out);
    }

    fn tick(&mut self, now: Time, out: &mut Effects) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let lost_at = self.host.as_ref().and_then(|host| host.lost_at);
        let Some(stream) = &mut self.stream else { return };
        // A silent receiver is as good as an unreachable one.
        let since = lost_at.unwrap_or(stream.heard);
        if now >= since + self.timeout {
            self.end(EndReason::Detached, 0, out);
        } else {
            stream.probe(now, out);
        }
    }

    fn end_if_over(&mut self, out: &mut Effects) {
        if let Some(stream) = &self.stream
            && stream.held.is_empty()
            && let Some(missed) = stream.over
        {
            self.end(EndReason::TopicOver, missed, out);
        }
    }

    /// Ends the stream, and tells its receiver.
    fn end(&mut self, reason: EndReason, missed: u64, out: &mut Effects) {
        if let Some(id) = self.close(out) {
            let end = FromOrigin::End { reason, missed };
            out.push(SenderEffect::Send(ToReceiver { stream: id, body: end.clone() }));
            self.ended = Some((id, end));
        }
    }

    /// Lets go of everything of the stream.
    fn close(&mut self, out: &mut Effects) -> Option<StreamId> {
        let stream = self.stream.take()?;
        out.extend((stream.first..stream.end()).map(|number| SenderEffect::Release { number }));
        out.push(SenderEffect::Unsubscribe { stream: stream.id });
        Some(stream.id)
    }

    fn has_ended(&self, id: StreamId) -> bool {
        self.ended.as_ref().is_some_and(|(ended, _)| *ended == id)
    }

    fn is_current(&self, id: StreamId) -> bool {
        self.stream() == Some(id)
    }
}

/// An acknowledgement of something that was never sent, or that contradicts an earlier one.
struct OutOfRange;

impl OutStream {
    fn new(id: StreamId, window: Window, resume: Option<Resume>, now: Time) -> Self {
        Self {
            id,
            window,
            ring: None,
            resume,
            missed: 0,
            held: VecDeque::new(),
            first: 0,
            serial: 0,
            written: Cursor::default(),
            sent: Cursor::default(),
            frontier: Cursor::default(),
            in_flight: 0,
            unwritten: 0,
            heard: now,
            probe_at: now + RETRY,
            over: None,
        }
    }

    /// Answers the join, once the ring is known.
    fn confirm(&self, out: &mut Effects) {
        if let Some((Resume { ring, position }, topic)) = &self.ring {
            self.say(FromOrigin::Joined { ring: *ring, position: *position, topic: topic.clone() }, out);
        }
    }

    /// Returns how many samples are missed before the one at a position, before which the ring counts `missed`. `None`
    /// for a position that the receiver knows. The next one has at least the position `next`.
    fn missed_before(&mut self, position: u64, next: u64, missed: u64) -> Option<u64> {
        let missed = match &mut self.resume {
            Some(resume) => {
                let missed = position.checked_sub(resume.position)?;
                resume.position = next;
                missed
            }
            None => missed,
        };
        Some(self.missed.saturating_add(missed))
    }

    fn acknowledge(
        &mut self,
        acknowledgement: Acknowledgement,
        now: Time,
        out: &mut Effects,
    ) -> Result<(), OutOfRange> {
        let Acknowledgement { serial, written, arrived, resend, asks } = acknowledgement;
        // Doubled, or overtaken by a later one.
        if serial <= self.serial {
            return Ok(());
        }
        let arrived = self.normal(arrived)?;
        let in_order = self.first <= written.number && written <= arrived && arrived <= self.frontier;
        if !in_order || !self.normal(written).is_ok_and(|written| written <= arrived) {
            return Err(OutOfRange);
        }
        self.serial = serial;
        while self.first < written.number {
            self.held.pop_front();
            out.push(SenderEffect::Release { number: self.first });
            self.first += 1;
        }
        self.written = written;
        // What has arrived need not be sent again, even if that was asked for before.
        if resend || self.sent < arrived {
            self.sent = arrived;
        }
        self.in_flight = self.bytes_between(written, self.sent);
        self.unwritten = self.bytes_between(written, Cursor { number: self.end(), piece: 0 });
        self.probe_at = now + RETRY;
        self.send(out);
        if asks {
            self.probe(now, out);
        }
        Ok(())
    }

    /// Returns a place in the form in which the end of a sample is the beginning of the next one.
    fn normal(&self, at: Cursor) -> Result<Cursor, OutOfRange> {
        let Cursor { number, piece } = at;
        let pieces = match number.checked_sub(self.first) {
            Some(index) if number < self.end() => self.held[index as usize].pieces(),
            Some(_) if number == self.end() && piece == 0 => return Ok(at),
            _ => return Err(OutOfRange),
        };
        match piece {
            _ if piece < pieces => Ok(at),
            _ if piece == pieces => Ok(Cursor { number: number + 1, piece: 0 }),
            _ => Err(OutOfRange),
        }
    }

    /// Sends as many pieces as the window allows, and small samples together.
    fn send(&mut self, out: &mut Effects) {
        while self.sent.number < self.end() && self.in_flight < self.window.bytes {
            let first = self.sent;
            let mut samples = Vec::new();
            let mut pieces = Vec::new();
            let mut bytes = 0;
            while self.may_send_with(&samples, bytes) {
                let Cursor { number, piece } = self.sent;
                let sample = &self.held[(number - self.first) as usize];
                let piece_bytes = sample.piece_bytes(piece);
                pieces.push(SentPiece { number, offset: piece * super::PIECE_BYTES, bytes: piece_bytes });
                bytes += piece_bytes;
                self.in_flight += piece_bytes;
                self.sent = match piece + 1 {
                    next if next == sample.pieces() => Cursor { number: number + 1, piece: 0 },
                    next => Cursor { number, piece: next },
                };
                if piece > 0 {
                    break;
                }
                samples.push(sample.clone());
            }
            self.frontier = self.frontier.max(self.sent);
            let body = match first.piece {
                // As many as there may be.
                0 => FromOrigin::First { number: first.number, samples: Bounded::new(samples).unwrap_or_default() },
                _ => FromOrigin::Next(first),
            };
            out.push(SenderEffect::SendPieces { pieces, message: ToReceiver { stream: self.id, body } });
        }
    }

    /// Returns whether the next piece may be sent in the message that has these samples already, of `bytes` bytes.
    fn may_send_with(&self, samples: &[SampleHead], bytes: u64) -> bool {
        let Cursor { number, piece } = self.sent;
        let Some(next) = self.held.get((number - self.first) as usize) else { return false };
        samples.is_empty()
            || piece == 0
                && samples.len() < MAX_BATCH
                && bytes + next.piece_bytes(0) <= BATCH_BYTES
                && self.in_flight < self.window.bytes
    }

    fn probe(&mut self, now: Time, out: &mut Effects) {
        self.probe_at = now + RETRY;
        if self.ring.is_some() {
            self.say(FromOrigin::Probe { sent: self.sent }, out);
        }
    }

    fn say(&self, body: FromOrigin, out: &mut Effects) {
        out.push(SenderEffect::Send(ToReceiver { stream: self.id, body }));
    }

    /// Returns the number of the next sample.
    fn end(&self) -> u64 {
        self.first + self.held.len() as u64
    }

    /// Returns the bytes between two places, of which the first one is among the held samples.
    fn bytes_between(&self, from: Cursor, to: Cursor) -> u64 {
        let before = |at: Cursor| {
            let whole = (at.number - self.first) as usize;
            let bytes = self.held.iter().take(whole).map(|sample| sample.bytes);
            let part = self.held.get(whole).map_or(0, |sample| sample.bytes.min(at.piece * super::PIECE_BYTES));
            bytes.fold(part, u64::saturating_add)
        };
        before(to).saturating_sub(before(from))
    }
}

/// The most bytes of a message with several samples: they are copied together.
pub(crate) const BATCH_BYTES: u64 = 32 << 10;
