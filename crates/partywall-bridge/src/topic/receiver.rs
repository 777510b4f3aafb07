//! The receiving host's side of a stream.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use super::{
    KEEPALIVE, PIECE_BYTES, RETRY, Time, earliest,
    wire::{
        Acknowledgement, Cursor, EndReason, FromOrigin, FromReceiver, Instance, Join, Resume, SampleHead, SampleKind,
        StreamId, StreamPolicy, ToOrigin, ToReceiver, TopicInfo, Window,
    },
};

/// Receives the samples of one topic of one host, and publishes them in a topic here.
#[derive(Debug)]
pub(crate) struct Receiver<P> {
    us: Instance,
    options: ReceiverOptions,
    origin: Option<OriginHost>,
    phase: Phase,
    /// The number of the latest stream.
    number: u64,
    /// The latest ring, and the first position there of which it is not known what became of it.
    resume: Option<Resume>,
    /// The sample that is being written or published. It may outlive its stream by the end of its publishing.
    current: Option<CurrentSample>,
    /// Loans that are asked for, and no longer needed.
    unwanted: BTreeSet<LoanId>,
    next_loan: u64,
    /// The publisher is to be closed once no loan is left.
    closing: bool,
    /// The origin has offered the topic while there was a stream, or an attempt. If that ends, it may be of a former
    /// topic of this name.
    was_offered: bool,
    /// Pieces that have arrived before they can be written, in order.
    pending: VecDeque<PendingPiece<P>>,
    pending_bytes: u64,
    /// Samples that are missed and not yet skipped by the publisher.
    unskipped: u64,
    counts: ReceiverCounts,
}

/// What a [`Receiver`] asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceiverOptions {
    pub(crate) policy: StreamPolicy,
    /// Samples from before the first join; `None` for the topic's own number.
    pub(crate) history: Option<u32>,
    /// Bounds what waits here. The origin may allow less.
    pub(crate) window: Window,
    /// How long the origin may be silent, although its host is reachable, before the stream is given up.
    pub(crate) timeout: Duration,
}

/// The current instance of the origin's host.
#[derive(Debug, Clone, Copy)]
struct OriginHost {
    instance: Instance,
    is_reachable: bool,
}

#[derive(Debug)]
enum Phase {
    /// There is no stream until the host appears.
    Away,
    Joining {
        retry_at: Time,
    },
    Streaming(InStream),
    /// The stream is over. The next phase begins when the last sample is published, since only then it is known from
    /// where to resume.
    Settling(NextPhase),
    Ended(StreamEnd),
}

#[derive(Debug, Clone, Copy)]
enum NextPhase {
    Join,
    /// Join later.
    Retry(EndReason),
    End(StreamEnd),
}

/// Why there is no stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The origin has ended it. Begins anew if it [offers](ReceiverEvent::Offered) the topic again.
    Origin(EndReason),
    /// The origin has broken the protocol, in this way.
    Violation(&'static str),
    /// This side has left.
    Left,
}

#[derive(Debug)]
struct InStream {
    serial: u64,
    /// The first sample that is not settled.
    first: u64,
    /// The next piece that is accepted.
    arrived: Cursor,
    /// The sample of `arrived`, once its first piece is there.
    arriving: Option<SampleHead>,
    /// No sample has an earlier position.
    least_position: u64,
    /// The topic has no publisher at its origin.
    is_idle: bool,
    /// Written and published since the latest acknowledgement.
    unsaid_bytes: u64,
    unsaid_samples: u32,
    /// When lost pieces were asked for again, and which.
    asked_again: Option<(Cursor, Time)>,
    heard: Time,
    ask_at: Time,
}

#[derive(Debug)]
struct CurrentSample {
    number: u64,
    head: SampleHead,
    state: SampleState,
    /// Pieces that are written, or dropped.
    done: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SampleState {
    Borrowing(LoanId),
    Writing(LoanId),
    /// Its pieces are dropped.
    Discarding,
    Publishing(LoanId),
}

#[derive(Debug)]
struct PendingPiece<P> {
    number: u64,
    /// Of the first piece.
    head: Option<SampleHead>,
    bytes: u64,
    payload: P,
}

/// A loan in the topic here. Each has its own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LoanId(pub(crate) u64);

/// What has become of the samples of the origin's ring since the first join.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReceiverCounts {
    pub(crate) published: u64,
    /// Lost in the ring, in a stream that ended, or for want of a loan here.
    pub(crate) missed: u64,
    /// Failed at the origin. Not among the missed ones.
    pub(crate) failed: u64,
}

/// The bytes of a message.
pub(crate) trait Payload {
    fn bytes(&self) -> u64;

    /// Returns a part, which is within these bytes.
    fn part(&self, offset: u64, bytes: u64) -> Self;
}

/// The input of a [`Receiver`].
#[derive(Debug, Clone)]
pub(crate) enum ReceiverEvent<P> {
    /// The origin's host is there, for the first time or again.
    HostUp(Instance),
    /// It is unreachable.
    HostLost(Instance),
    /// The origin sent a message; only pieces have a payload.
    Message(ToReceiver, Option<P>),
    /// There is the loan that was asked for.
    Borrowed(LoanId),
    /// There will be none: the sample is missed.
    NotBorrowed(LoanId),
    Published(LoanId),
    /// The topic did not take the sample: it is missed.
    NotPublished(LoanId),
    /// The origin exports the topic again.
    Offered,
    /// The import ends.
    Stop,
    /// Time has passed: at the latest at the [deadline](Receiver::deadline).
    Tick,
}

/// The output of a [`Receiver`], to be carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReceiverEffect<P> {
    Send(ToOrigin),
    /// The stream exists. Open the topic here for the loans to come, or create it like this one.
    Open(TopicInfo),
    /// Join the topic here, if that has not happened: as long as there is a publisher at the origin, there is one here.
    OpenPublisher,
    /// Get a loan for a sample, then report [`ReceiverEvent::Borrowed`] or [`ReceiverEvent::NotBorrowed`]. Opens the
    /// publisher if it is closed. A stream that blocks may wait for the loan as long as the topic here has none.
    Borrow {
        loan: LoanId,
        sample: SampleHead,
    },
    Write {
        loan: LoanId,
        offset: u64,
        payload: P,
    },
    /// Skip as many sequence numbers, publish, then report [`ReceiverEvent::Published`] or
    /// [`ReceiverEvent::NotPublished`]. The numbers are skipped whatever becomes of the sample.
    Publish {
        loan: LoanId,
        skip: u64,
    },
    /// Give a loan back unpublished.
    GiveBack {
        loan: LoanId,
    },
    /// Leave the topic here, which is idle then as at its origin: nobody may wait for publishers that are not there. No
    /// loan exists.
    ClosePublisher,
    /// There is no stream any more, and no attempt to get one for a while at least.
    Ended(StreamEnd),
}

type Effects<P> = Vec<ReceiverEffect<P>>;

impl<P: Payload> Receiver<P> {
    /// Creates the receiver of the bridge `us`. `number` is at least that of each earlier stream between this topic's
    /// origin and this bridge.
    pub(crate) fn new(us: Instance, number: u64, options: ReceiverOptions) -> Self {
        Self {
            us,
            options,
            origin: None,
            phase: Phase::Away,
            number,
            resume: None,
            current: None,
            unwanted: BTreeSet::new(),
            next_loan: 0,
            closing: false,
            was_offered: false,
            pending: VecDeque::new(),
            pending_bytes: 0,
            unskipped: 0,
            counts: ReceiverCounts::default(),
        }
    }

    /// Applies an event, and appends its effects to `out`.
    pub(crate) fn apply(&mut self, event: ReceiverEvent<P>, now: Time, out: &mut Effects<P>) {
        match event {
            ReceiverEvent::HostUp(instance) => self.host_up(instance, now, out),
            ReceiverEvent::HostLost(instance) => self.host_lost(instance, out),
            ReceiverEvent::Message(message, payload) => self.message(message, payload, now, out),
            ReceiverEvent::Borrowed(loan) => self.borrowed(loan, true, out),
            ReceiverEvent::NotBorrowed(loan) => self.borrowed(loan, false, out),
            ReceiverEvent::Published(loan) => self.published(loan, true, now, out),
            ReceiverEvent::NotPublished(loan) => self.published(loan, false, now, out),
            ReceiverEvent::Offered => match self.phase {
                Phase::Ended(StreamEnd::Origin(_)) => self.enter(NextPhase::Join, now, out),
                Phase::Ended(_) => {}
                _ => self.was_offered = true,
            },
            ReceiverEvent::Stop => {
                self.leave(out);
                self.closing = true;
                self.stop(NextPhase::End(StreamEnd::Left), now, out);
            }
            ReceiverEvent::Tick => self.tick(now, out),
        }
        self.pump(out);
        self.acknowledge_if_due(out);
        self.close_if_idle(out);
    }

    /// Returns when [`ReceiverEvent::Tick`] is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.reachable()?;
        match &self.phase {
            Phase::Joining { retry_at } => Some(*retry_at),
            Phase::Streaming(stream) => earliest([Some(stream.ask_at), Some(self.gives_up_at(stream))]),
            _ => None,
        }
    }

    /// Returns what has become of the samples.
    pub(crate) fn counts(&self) -> ReceiverCounts {
        self.counts
    }

    /// Returns the stream that exists, or is asked for.
    pub(crate) fn stream(&self) -> Option<StreamId> {
        match self.phase {
            Phase::Joining { .. } | Phase::Streaming(_) => self.id(),
            _ => None,
        }
    }

    /// Returns whether the topic does not exist at its origin, or this side has left. There is nothing left to do then,
    /// unless the topic is [offered](ReceiverEvent::Offered).
    pub(crate) fn is_over(&self) -> bool {
        let Phase::Ended(end) = self.phase else { return false };
        matches!(end, StreamEnd::Left | StreamEnd::Origin(EndReason::TopicOver | EndReason::NotExported))
    }

    /// Returns the bytes that wait to be written.
    #[cfg(test)]
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.pending_bytes
    }

    /// Returns the first position of the ring of which it is not known what became of it.
    #[cfg(test)]
    pub(crate) fn ring_position(&self) -> Option<u64> {
        self.resume.map(|resume| resume.position)
    }

    fn host_up(&mut self, instance: Instance, now: Time, out: &mut Effects<P>) {
        let is_same = self.origin.is_some_and(|origin| origin.instance == instance);
        let was_left =
            matches!(self.phase, Phase::Ended(StreamEnd::Left) | Phase::Settling(NextPhase::End(StreamEnd::Left)));
        self.origin = Some(OriginHost { instance, is_reachable: true });
        self.closing &= was_left;
        if was_left {
            return;
        }
        if !is_same {
            self.stop(NextPhase::Join, now, out);
            return;
        }
        match &mut self.phase {
            Phase::Joining { .. } => self.join(now, out),
            Phase::Streaming(stream) => {
                stream.heard = now;
                stream.ask_at = now + KEEPALIVE;
                if !stream.is_idle {
                    out.push(ReceiverEffect::OpenPublisher);
                }
                self.acknowledge(true, false, out);
            }
            _ => {}
        }
    }

    fn host_lost(&mut self, instance: Instance, out: &mut Effects<P>) {
        let Some(origin) = self.origin.as_mut().filter(|origin| origin.instance == instance) else { return };
        origin.is_reachable = false;
        self.closing = true;
        self.abandon(out);
        // The sample that was half here is sent again from its start; the one that is being published is not.
        let publishing = self.current.as_ref().map(|current| (current.number + 1, current.head.next_position()));
        let settled = self.resume.map_or(0, |resume| resume.position);
        if let Phase::Streaming(stream) = &mut self.phase {
            let (number, least_position) = publishing.unwrap_or((stream.first, settled));
            stream.arrived = Cursor { number, piece: 0 };
            stream.arriving = None;
            stream.least_position = least_position;
        }
    }

    fn message(&mut self, message: ToReceiver, payload: Option<P>, now: Time, out: &mut Effects<P>) {
        let ToReceiver { stream: id, body } = message;
        let Some(origin) = self.origin else { return };
        // Of another instance than the current one: late, or of an impostor.
        if id.receiver != self.us || id.origin != origin.instance {
            return;
        }
        if self.stream() != Some(id) {
            // Its origin must learn that it is over. An end needs no answer.
            if !matches!(body, FromOrigin::End { .. }) {
                out.push(ReceiverEffect::Send(ToOrigin { stream: id, body: FromReceiver::Leave }));
            }
            return;
        }
        if let FromOrigin::End { reason, missed } = body {
            return self.ended(reason, missed, now, out);
        }
        let Phase::Streaming(stream) = &mut self.phase else {
            // What comes before the answer is asked for again.
            if let FromOrigin::Joined { ring, position, topic } = body {
                out.push(ReceiverEffect::Open(topic));
                self.joined(Resume { ring, position }, now, out);
            }
            return;
        };
        stream.heard = now;
        stream.ask_at = now + KEEPALIVE;
        match (body, payload) {
            (FromOrigin::First { number, samples }, Some(payload)) => {
                self.first_pieces(number, &samples, &payload, now, out);
            }
            (FromOrigin::Next(at), Some(payload)) => self.piece(at, None, payload, now, out),
            (FromOrigin::First { .. } | FromOrigin::Next(_), None) => self.violation("a piece has no bytes", now, out),
            (FromOrigin::Probe { sent }, _) => {
                let lost = stream.arrived < sent;
                self.acknowledge(lost, false, out);
            }
            _ => {}
        }
    }

    fn joined(&mut self, at: Resume, now: Time, out: &mut Effects<P>) {
        let resume = self.resume.filter(|resume| resume.ring == at.ring).unwrap_or(at);
        self.resume = Some(resume);
        self.phase = Phase::Streaming(InStream {
            serial: 0,
            first: 0,
            arrived: Cursor::default(),
            arriving: None,
            least_position: resume.position,
            is_idle: false,
            unsaid_bytes: 0,
            unsaid_samples: 0,
            asked_again: None,
            heard: now,
            ask_at: now + KEEPALIVE,
        });
        out.push(ReceiverEffect::OpenPublisher);
        // Pieces may have come before the answer.
        self.acknowledge(false, true, out);
    }

    fn first_pieces(&mut self, number: u64, samples: &[SampleHead], payload: &P, now: Time, out: &mut Effects<P>) {
        // No more than the largest message may have.
        let due: u64 = samples.iter().map(|head| head.piece_bytes(0)).sum();
        if payload.bytes() != due {
            return self.violation("pieces have another length than they must have", now, out);
        }
        let mut offset = 0;
        for (number, head) in (0..).map(|index| number.saturating_add(index)).zip(samples) {
            let bytes = head.piece_bytes(0);
            self.piece(Cursor { number, piece: 0 }, Some(head.clone()), payload.part(offset, bytes), now, out);
            offset += bytes;
        }
    }

    fn piece(&mut self, at: Cursor, head: Option<SampleHead>, payload: P, now: Time, out: &mut Effects<P>) {
        let Phase::Streaming(stream) = &mut self.phase else { return };
        if at < stream.arrived {
            return;
        }
        if at > stream.arrived {
            // Once for each place: all that is on its way comes too early now.
            if stream.asked_again.is_none_or(|(asked, when)| asked != stream.arrived || now >= when + RETRY) {
                stream.asked_again = Some((stream.arrived, now));
                self.acknowledge(true, false, out);
            }
            return;
        }
        if let Some(head) = &head {
            if let Err(why) = check_head(head, stream.least_position) {
                return self.violation(why, now, out);
            }
            stream.arriving = Some(head.clone());
        }
        let Some(arriving) = stream.arriving.as_ref().filter(|_| head.is_some() == (at.piece == 0)) else {
            return self.violation("a sample begins with another piece than its first", now, out);
        };
        let bytes = arriving.piece_bytes(at.piece);
        if payload.bytes() != bytes {
            return self.violation("a piece has another length than it must have", now, out);
        }
        // An honest origin has no credit for this. The piece has not arrived, so it will be sent again.
        let has_room = self.pending_bytes < self.options.window.bytes
            && (self.pending.len() as u64) < most_pending(self.options.window);
        if !has_room {
            return;
        }
        if at.piece + 1 == arriving.pieces() {
            stream.least_position = arriving.next_position();
            stream.arriving = None;
            stream.arrived = Cursor { number: at.number + 1, piece: 0 };
        } else {
            stream.arrived.piece += 1;
        }
        self.pending_bytes += bytes;
        self.pending.push_back(PendingPiece { number: at.number, head, bytes, payload });
    }

    /// Does with the arrived pieces what can be done.
    fn pump(&mut self, out: &mut Effects<P>) {
        loop {
            let Some(current) = &mut self.current else {
                if !self.begin_sample(out) {
                    return;
                }
                continue;
            };
            let loan = match current.state {
                SampleState::Writing(loan) => Some(loan),
                SampleState::Discarding => None,
                SampleState::Borrowing(_) | SampleState::Publishing(_) => return,
            };
            let Some(piece) = self.pending.pop_front() else { return };
            self.pending_bytes -= piece.bytes;
            let offset = current.done * PIECE_BYTES;
            current.done += 1;
            if let Phase::Streaming(stream) = &mut self.phase {
                stream.unsaid_bytes += piece.bytes;
            }
            if let Some(loan) = loan {
                out.push(ReceiverEffect::Write { loan, offset, payload: piece.payload });
            }
            if current.done < current.head.pieces() {
                continue;
            }
            self.unskipped = self.unskipped.saturating_add(current.head.missed);
            self.counts.missed = self.counts.missed.saturating_add(current.head.missed);
            match loan {
                Some(loan) => {
                    current.state = SampleState::Publishing(loan);
                    let skip = std::mem::take(&mut self.unskipped);
                    out.push(ReceiverEffect::Publish { loan, skip });
                }
                None => self.pass(out),
            }
        }
    }

    /// There is nothing to publish for the current number.
    fn pass(&mut self, out: &mut Effects<P>) {
        let Some(kind) = self.current.as_ref().map(|current| current.head.kind) else { return };
        self.settle(false);
        if kind == SampleKind::Idle {
            self.closing = true;
            if let Phase::Streaming(stream) = &mut self.phase {
                stream.is_idle = true;
            }
            // Before the next sample, for which it is opened again.
            self.close_if_idle(out);
        } else if kind != SampleKind::Whole {
            self.mark_busy();
            if !self.closing {
                out.push(ReceiverEffect::OpenPublisher);
            }
        }
    }

    /// The topic has a publisher at its origin.
    fn mark_busy(&mut self) {
        if let Phase::Streaming(stream) = &mut self.phase {
            stream.is_idle = false;
        }
        // Without the origin there is no publisher here.
        self.closing &= self.reachable().is_none();
    }

    /// Begins with the next sample that has arrived. Returns false if there is none.
    fn begin_sample(&mut self, out: &mut Effects<P>) -> bool {
        let Some(piece) = self.pending.front_mut() else { return false };
        // Samples arrive from their first piece on, and each is taken from here whole.
        let Some(head) = piece.head.take() else { return false };
        let number = piece.number;
        let state = if head.kind != SampleKind::Whole {
            SampleState::Discarding
        } else {
            self.mark_busy();
            let loan = LoanId(self.next_loan);
            self.next_loan += 1;
            out.push(ReceiverEffect::Borrow { loan, sample: head.clone() });
            SampleState::Borrowing(loan)
        };
        self.current = Some(CurrentSample { number, head, state, done: 0 });
        true
    }

    fn borrowed(&mut self, loan: LoanId, is_there: bool, out: &mut Effects<P>) {
        if self.unwanted.remove(&loan) {
            if is_there {
                out.push(ReceiverEffect::GiveBack { loan });
            }
        } else if let Some(current) = &mut self.current
            && current.state == SampleState::Borrowing(loan)
        {
            current.state = if is_there { SampleState::Writing(loan) } else { SampleState::Discarding };
        }
    }

    fn published(&mut self, loan: LoanId, was_taken: bool, now: Time, out: &mut Effects<P>) {
        if self.current.as_ref().is_none_or(|current| current.state != SampleState::Publishing(loan)) {
            return;
        }
        self.settle(was_taken);
        if let Phase::Settling(next) = self.phase {
            self.enter(next, now, out);
        }
    }

    /// The current sample is published, or missed.
    fn settle(&mut self, was_published: bool) {
        let Some(CurrentSample { number, head, .. }) = self.current.take() else { return };
        match (head.kind, was_published) {
            (SampleKind::Whole, true) => self.counts.published += 1,
            (SampleKind::Whole, false) => self.counts.missed = self.counts.missed.saturating_add(1),
            (SampleKind::Failed, _) => self.counts.failed += 1,
            (SampleKind::Idle | SampleKind::Busy, _) => {}
        }
        if head.kind.is_sample() && !was_published {
            self.unskipped = self.unskipped.saturating_add(1);
        }
        // Its ring is still the latest: a stream of another one begins only after this.
        if let Some(resume) = &mut self.resume {
            resume.position = head.next_position();
        }
        if let Phase::Streaming(stream) = &mut self.phase {
            stream.first = number + 1;
            stream.unsaid_samples += 1;
        }
    }

    fn ended(&mut self, reason: EndReason, missed: u64, now: Time, out: &mut Effects<P>) {
        let next = match reason {
            EndReason::Detached | EndReason::Unknown => NextPhase::Join,
            _ if self.was_offered => NextPhase::Join,
            EndReason::Full | EndReason::Stopped => NextPhase::Retry(reason),
            _ => NextPhase::End(StreamEnd::Origin(reason)),
        };
        self.counts.missed = self.counts.missed.saturating_add(missed);
        self.unskipped = self.unskipped.saturating_add(missed);
        if let NextPhase::End(_) | NextPhase::Retry(_) = next {
            self.closing = true;
        }
        self.stop(next, now, out);
    }

    fn violation(&mut self, why: &'static str, now: Time, out: &mut Effects<P>) {
        self.leave(out);
        self.closing = true;
        self.stop(NextPhase::End(StreamEnd::Violation(why)), now, out);
    }

    fn tick(&mut self, now: Time, out: &mut Effects<P>) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match &mut self.phase {
            Phase::Joining { .. } => self.join(now, out),
            Phase::Streaming(stream) => {
                stream.ask_at = now + RETRY;
                if now >= stream.heard + KEEPALIVE + self.options.timeout {
                    self.leave(out);
                    self.stop(NextPhase::Join, now, out);
                } else {
                    self.acknowledge(false, true, out);
                }
            }
            _ => {}
        }
    }

    /// Tells the origin that the stream is over.
    fn leave(&mut self, out: &mut Effects<P>) {
        if let Some(stream) = self.stream() {
            out.push(ReceiverEffect::Send(ToOrigin { stream, body: FromReceiver::Leave }));
        }
    }

    /// Ends the stream here, and begins the next phase as soon as that is possible.
    fn stop(&mut self, next: NextPhase, now: Time, out: &mut Effects<P>) {
        self.abandon(out);
        if self.current.is_some() {
            self.phase = Phase::Settling(next);
        } else {
            self.enter(next, now, out);
        }
    }

    /// Gives up all samples but the one that is being published.
    fn abandon(&mut self, out: &mut Effects<P>) {
        self.pending.clear();
        self.pending_bytes = 0;
        match self.current.as_ref().map(|current| current.state) {
            None | Some(SampleState::Publishing(_)) => return,
            Some(SampleState::Borrowing(loan)) => drop(self.unwanted.insert(loan)),
            Some(SampleState::Writing(loan)) => out.push(ReceiverEffect::GiveBack { loan }),
            Some(SampleState::Discarding) => {}
        }
        self.current = None;
    }

    fn enter(&mut self, next: NextPhase, now: Time, out: &mut Effects<P>) {
        match next {
            NextPhase::Join => {
                self.number += 1;
                self.was_offered = false;
                self.join(now, out);
            }
            NextPhase::Retry(reason) => {
                self.number += 1;
                self.was_offered = false;
                self.phase = Phase::Joining { retry_at: now + KEEPALIVE };
                out.push(ReceiverEffect::Ended(StreamEnd::Origin(reason)));
            }
            NextPhase::End(end) => {
                self.phase = Phase::Ended(end);
                out.push(ReceiverEffect::Ended(end));
            }
        }
    }

    /// Asks for the stream of the latest number.
    fn join(&mut self, now: Time, out: &mut Effects<P>) {
        let Some(stream) = self.id() else {
            self.phase = Phase::Away;
            return;
        };
        self.phase = Phase::Joining { retry_at: now + RETRY };
        let ReceiverOptions { policy, history, window, .. } = self.options;
        let join = Join { policy, history, window, resume: self.resume };
        out.push(ReceiverEffect::Send(ToOrigin { stream, body: FromReceiver::Join(join) }));
    }

    fn acknowledge_if_due(&mut self, out: &mut Effects<P>) {
        let Phase::Streaming(stream) = &self.phase else { return };
        let InStream { unsaid_bytes, unsaid_samples, .. } = *stream;
        if unsaid_bytes == 0 && unsaid_samples == 0 {
            return;
        }
        // While more is to be done, a quarter of the window is worth a message.
        let Window { samples, bytes } = self.options.window;
        if self.pending.is_empty() || unsaid_bytes >= bytes / 4 || unsaid_samples >= samples / 4 {
            self.acknowledge(false, false, out);
        }
    }

    fn acknowledge(&mut self, resend: bool, asks: bool, out: &mut Effects<P>) {
        let is_reachable = self.reachable().is_some();
        let id = self.id();
        let (Phase::Streaming(stream), Some(id), true) = (&mut self.phase, id, is_reachable) else { return };
        let done = self.current.as_ref().map_or(0, |current| current.done);
        let written = Cursor { number: stream.first, piece: done };
        stream.serial += 1;
        stream.unsaid_bytes = 0;
        stream.unsaid_samples = 0;
        let body = Acknowledgement { serial: stream.serial, written, arrived: stream.arrived, resend, asks };
        out.push(ReceiverEffect::Send(ToOrigin { stream: id, body: FromReceiver::Acknowledge(body) }));
    }

    fn close_if_idle(&mut self, out: &mut Effects<P>) {
        if self.closing && self.current.is_none() && self.unwanted.is_empty() {
            self.closing = false;
            out.push(ReceiverEffect::ClosePublisher);
        }
    }

    fn gives_up_at(&self, stream: &InStream) -> Time {
        stream.heard + KEEPALIVE + self.options.timeout
    }

    fn id(&self) -> Option<StreamId> {
        let origin = self.origin?.instance;
        Some(StreamId { origin, receiver: self.us, number: self.number })
    }

    fn reachable(&self) -> Option<Instance> {
        self.origin.filter(|origin| origin.is_reachable).map(|origin| origin.instance)
    }
}

/// Checks a sample's numbers against what came before.
fn check_head(head: &SampleHead, least_position: u64) -> Result<(), &'static str> {
    if head.position < least_position {
        return Err("a sample has an earlier position than the one before it");
    }
    if head.position >= MAX_POSITION {
        return Err("a sample has an impossible position");
    }
    if head.missed > head.position - least_position {
        return Err("a sample has missed more than there was");
    }
    if head.kind != SampleKind::Whole && head.bytes > 0 {
        return Err("something has bytes that is no whole sample");
    }
    Ok(())
}

/// Returns the most pieces that may wait: as many as fill the window, and one small one of each sample.
fn most_pending(window: Window) -> u64 {
    u64::from(window.samples) + window.bytes / PIECE_BYTES + 1
}

/// No ring comes so far. It keeps sums of counts within 64 bits.
const MAX_POSITION: u64 = 1 << 61;
