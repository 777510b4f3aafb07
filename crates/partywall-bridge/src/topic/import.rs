//! Imports of topics: carries out the effects of a [`Receiver`] for each topic of each host that is imported.
//!
//! The topic here has the name that it has at its origin. It is created like that one, in the place of `--device`, unless
//! it exists.
//! All of a stream happens on one thread. Nothing there waits for long: a loan that is not there yet, and a sample that
//! subscribers here do not let in, are tried again. The credit that is missing meanwhile holds back the origin.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, Filled, Language, Loan, Place, Publisher, Topic, check_name,
    error::{Busy, InvalidArgument, NotFound},
};
use partywall_cli::{Failure, Output};
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::{Wait, bytes::ZBytes};

use super::{
    exchange::{OwnPublishers, TopicOptions, WINDOW_BYTES, instance_of, key_to_origin, own_instance, put_now, to_wire},
    inbox::Inbox,
    receiver::{LoanId, Payload, Receiver, ReceiverCounts, ReceiverEffect, ReceiverEvent, ReceiverOptions, StreamEnd},
    wire::{Message, SampleHead, ToOrigin, ToReceiver, TopicInfo},
};
use crate::{
    Bridge,
    hosts::{ANSWER, HostEvent},
    message::{ExportedName, HostView, decode},
};

/// All imports of a bridge.
#[derive(Debug)]
pub(super) struct TopicImports {
    bridge: Arc<Bridge>,
    options: TopicOptions,
    own: OwnPublishers,
    output: Output,
    streams: Mutex<HashMap<(String, String), SharedInbox>>,
    /// The number of the next import: its streams have greater ones than those of imports before it.
    numbers: AtomicU64,
}

type SharedInbox = Arc<Inbox<Arrival>>;

/// What arrives for a stream. Messages are decoded by its thread.
#[derive(Debug)]
enum Arrival {
    Event(ReceiverEvent<Piece>),
    Message(zenoh::sample::Sample),
}

/// A host that may export something new.
#[derive(Debug)]
struct Exporter {
    host: String,
    instance: String,
}

/// A topic of a host.
#[derive(Debug)]
struct TopicImport {
    imports: Arc<TopicImports>,
    host: String,
    name: String,
    start: Instant,
    receiver: Receiver<Piece>,
    like: TopicInfo,
    topic: Option<Topic>,
    publisher: Option<Publisher>,
    loans: HashMap<LoanId, Loan>,
    asked: VecDeque<(LoanId, SampleHead)>,
    publishing: Option<(LoanId, Filled)>,
    /// Why the latest sample was not published, or there is no stream, so that a reason is said once.
    noted: Option<String>,
    /// When it was last found that processes here find the topic by its name.
    checked: Instant,
}

/// A part of the bytes of a message, which it shares.
#[derive(Debug, Clone)]
struct Piece {
    all: ZBytes,
    range: Range<usize>,
}

impl Payload for Piece {
    fn bytes(&self) -> u64 {
        self.range.len() as u64
    }

    fn part(&self, offset: u64, bytes: u64) -> Self {
        let start = self.range.start + offset as usize;
        Self { all: self.all.clone(), range: start..start + bytes as usize }
    }
}

impl Piece {
    /// Returns the bytes, in as many parts as they have come in.
    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.all.slices().filter_map(move |slice| {
            let from = self.range.start.clamp(start, start + slice.len()) - start;
            let to = self.range.end.clamp(start, start + slice.len()) - start;
            start += slice.len();
            slice.get(from..to).filter(|part| !part.is_empty())
        })
    }
}

impl TopicImports {
    /// Begins to import topics.
    ///
    /// # Errors
    /// If the session has ended, or no thread can be started.
    pub(super) fn start(
        bridge: &Arc<Bridge>,
        options: TopicOptions,
        own: &OwnPublishers,
        output: Output,
    ) -> Result<Arc<Self>, Failure> {
        let (streams, numbers) = (Mutex::default(), AtomicU64::new(0));
        let imports = Arc::new(Self { bridge: bridge.clone(), options, own: own.clone(), output, streams, numbers });
        if bridge.imports.is_empty() {
            return Ok(imports);
        }
        let us = own_instance(&bridge.link).0;
        let listening = |error| Failure::system("listening to other hosts", error);
        let arriving = imports.clone();
        let subscriber = bridge.link.session().declare_subscriber(bridge.link.key(format_args!("data/{us:032x}/**")));
        subscriber.callback(move |sample| arriving.arrived(sample)).background().wait().map_err(listening)?;
        let (send, exporters) = mpsc::channel();
        let names = send.clone();
        let subscriber = bridge.link.session().declare_subscriber(bridge.link.key("names/*/*"));
        let subscriber = subscriber.callback(move |sample| {
            // `pw1/R/names/H/I`
            let mut parts = sample.key_expr().as_str().split('/').skip(3).map(str::to_owned);
            if let (Some(host), Some(instance)) = (parts.next(), parts.next()) {
                let _ = names.send(Exporter { host, instance });
            }
        });
        subscriber.background().wait().map_err(listening)?;
        let events = bridge.hosts.events();
        let failed = |error| Failure::system("starting a thread", error);
        let watching = imports.clone();
        spawn("partywall-import-hosts", move || events.into_iter().for_each(|event| watching.host_event(event, &send)))
            .map_err(failed)?;
        let finding = imports.clone();
        spawn("partywall-imports", move || finding.find_all(&exporters)).map_err(failed)?;
        Ok(imports)
    }

    /// Ends all streams.
    pub(super) fn stop(&self) {
        for inbox in self.streams.lock().ignore_poison().values() {
            inbox.push(Arrival::Event(ReceiverEvent::Stop));
        }
    }

    /// Returns whether there is no stream.
    pub(super) fn have_ended(&self) -> bool {
        self.streams.lock().ignore_poison().is_empty()
    }

    /// Hands a message to its stream. Runs in zenoh's thread.
    fn arrived(&self, sample: zenoh::sample::Sample) {
        // `pw1/R/data/J/H/I/NAME`
        let mut parts = sample.key_expr().as_str().splitn(7, '/').skip(4);
        let (Some(host), Some(name)) = (parts.next(), parts.nth(1)) else { return };
        let inbox = self.streams.lock().ignore_poison().get(&(host.to_owned(), name.to_owned())).cloned();
        if let Some(inbox) = inbox {
            let bytes = sample.payload().len() + sample.attachment().map_or(0, ZBytes::len);
            inbox.offer(Arrival::Message(sample), bytes as u64);
        }
    }

    fn host_event(&self, event: HostEvent, exporters: &mpsc::Sender<Exporter>) {
        match event {
            HostEvent::Found { host, instance, .. } => {
                let Some(number) = instance_of(&instance) else { return };
                self.notify(&host, &ReceiverEvent::HostUp(number));
                let _ = exporters.send(Exporter { host, instance });
            }
            HostEvent::Lost { host, instance } => {
                let Some(instance) = instance_of(&instance) else { return };
                self.notify(&host, &ReceiverEvent::HostLost(instance));
            }
            HostEvent::Twin { .. } => {}
        }
    }

    fn notify(&self, host: &str, event: &ReceiverEvent<Piece>) {
        for (_, inbox) in self.streams.lock().ignore_poison().iter().filter(|((of, _), _)| of == host) {
            inbox.push(Arrival::Event(event.clone()));
        }
    }

    /// Finds topics until the session ends. A host that does not answer is asked again.
    fn find_all(self: &Arc<Self>, exporters: &mpsc::Receiver<Exporter>) {
        let mut silent: Vec<Exporter> = Vec::new();
        loop {
            let next = match silent.is_empty() {
                true => exporters.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                false => exporters.recv_timeout(ANSWER),
            };
            match next {
                Ok(exporter) => {
                    silent.retain(|known| known.host != exporter.host);
                    silent.extend(self.find(exporter).err());
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let again = std::mem::take(&mut silent);
                    silent.extend(again.into_iter().filter_map(|exporter| self.find(exporter).err()));
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Begins to import what a host exports and is not imported yet. Returns the host if it does not answer.
    fn find(self: &Arc<Self>, exporter: Exporter) -> Result<(), Exporter> {
        let Bridge { link, hosts, imports: wanted, .. } = &*self.bridge;
        let output = self.output;
        let Exporter { host, instance } = &exporter;
        let is_there = |view: &HostView| view.instance == *instance && view.unreachable_ms.is_none();
        let patterns: Vec<_> = wanted.iter().filter(|import| import.host == *host).collect();
        let Some(number) = instance_of(instance).filter(|_| !patterns.is_empty()) else { return Ok(()) };
        // It is asked when it is back.
        if !hosts.views().iter().any(is_there) {
            return Ok(());
        }
        let asked = link.ask(&link.key(format_args!("names/{host}/{instance}")), ANSWER, MAX_NAMES);
        let names: Vec<ExportedName> = match asked.and_then(|bytes| decode(&bytes)) {
            Ok(names) => names,
            Err(error) => {
                output.note(format!("//{host} {error}"));
                return Err(exporter);
            }
        };
        for ExportedName { name, kind, .. } in names {
            let is_wanted = patterns.iter().any(|import| import.pattern.matches(&name));
            // Names that begin with a dot are those of bridges.
            if kind != TOPIC || !is_wanted || check_name(&name).is_err() || name.starts_with('.') {
                continue;
            }
            let mut streams = self.streams.lock().ignore_poison();
            let count = streams.len();
            let of = (host.clone(), name);
            if let Some(inbox) = streams.get(&of) {
                inbox.push(Arrival::Event(ReceiverEvent::Offered));
                continue;
            }
            if count >= MAX_IMPORTS {
                output.note(format!("cannot import //{host}/{}: a bridge has at most {MAX_IMPORTS} imports", of.1));
                continue;
            }
            let inbox = Arc::new(Inbox::new(INBOX_BYTES));
            inbox.push(Arrival::Event(ReceiverEvent::HostUp(number)));
            let import = TopicImport::new(self, &of);
            let reading = inbox.clone();
            match spawn("partywall-import", move || import.run(&reading)) {
                Ok(_) => drop(streams.insert(of, inbox)),
                Err(error) => output.note(format!("cannot import //{host}/{}: {error}", of.1)),
            }
        }
        Ok(())
    }
}

impl TopicImport {
    fn new(imports: &Arc<TopicImports>, (host, name): &(String, String)) -> Self {
        let options = imports.options;
        let TopicOptions { policy, history, timeout, .. } = options;
        let number = imports.numbers.fetch_add(STREAMS_OF_AN_IMPORT, Ordering::Relaxed);
        let asks = ReceiverOptions { policy: to_wire(policy), history, window: options.window(), timeout };
        Self {
            imports: imports.clone(),
            host: host.clone(),
            name: name.clone(),
            start: Instant::now(),
            receiver: Receiver::new(own_instance(&imports.bridge.link), number, asks),
            like: TopicInfo::default(),
            topic: None,
            publisher: None,
            loans: HashMap::new(),
            asked: VecDeque::new(),
            publishing: None,
            noted: None,
            checked: Instant::now(),
        }
    }

    /// Runs until the topic is over, or the bridge stops.
    fn run(mut self, inbox: &Inbox<Arrival>) {
        loop {
            let waits = !self.asked.is_empty() || self.publishing.is_some();
            let deadline = match waits {
                true => Some(Instant::now() + AGAIN),
                false => self.receiver.deadline().map(|deadline| self.start + deadline),
            };
            // What is there, so that one acknowledgement is enough for it.
            let mut effects = Vec::new();
            for count in 0..MOST_AT_ONCE {
                let Some(arrival) = inbox.pop(if count == 0 { deadline } else { Some(self.start) }) else { break };
                if let Some(event) = decoded(arrival) {
                    self.receiver.apply(event, self.start.elapsed(), &mut effects);
                }
            }
            self.receiver.apply(ReceiverEvent::Tick, self.start.elapsed(), &mut effects);
            self.carry_out(effects);
            while let Some(event) = self.try_again() {
                let mut effects = Vec::new();
                self.receiver.apply(event, self.start.elapsed(), &mut effects);
                self.carry_out(effects);
            }
            if self.receiver.is_over() {
                let mut streams = self.imports.streams.lock().ignore_poison();
                // Under the lock under which it would be offered again.
                if inbox.close_if_empty() {
                    streams.remove(&(self.host.clone(), self.name.clone()));
                    return;
                }
            }
        }
    }

    fn carry_out(&mut self, effects: Vec<ReceiverEffect<Piece>>) {
        for effect in effects {
            match effect {
                ReceiverEffect::Send(message) => self.send(&message),
                ReceiverEffect::Open(like) => self.open(like),
                ReceiverEffect::OpenPublisher => {
                    if let Err(error) = self.publisher() {
                        self.note("publish", &error);
                    }
                }
                ReceiverEffect::Borrow { loan, sample } => self.asked.push_back((loan, sample)),
                ReceiverEffect::Write { loan, offset, payload } => self.write(loan, offset, &payload),
                ReceiverEffect::Publish { loan, skip } => self.publish(loan, skip),
                ReceiverEffect::GiveBack { loan } => drop(self.loans.remove(&loan)),
                ReceiverEffect::ClosePublisher => self.publisher = None,
                ReceiverEffect::Ended(end) => self.note_end(end),
            }
        }
    }

    /// Tries what had to wait. Returns what became of it.
    fn try_again(&mut self) -> Option<ReceiverEvent<Piece>> {
        self.leave_removed();
        if let Some((id, filled)) = self.publishing.take() {
            match filled.publish(AGAIN) {
                Ok(_) => {
                    self.noted = None;
                    return Some(ReceiverEvent::Published(id));
                }
                Err(failed) if matches!(failed.error, Error::Busy(Busy::TopicFull { .. }) | Error::Timeout { .. }) => {
                    self.publishing = Some((id, *failed.value));
                }
                Err(failed) => {
                    self.note("publish", &failed.error);
                    // The next sample joins again, or creates another topic.
                    self.publisher = None;
                    self.topic = None;
                    return Some(ReceiverEvent::NotPublished(id));
                }
            }
        }
        let (id, sample) = self.asked.pop_front()?;
        match self.borrow(&sample) {
            Ok(Some(loan)) => {
                self.loans.insert(id, loan);
                Some(ReceiverEvent::Borrowed(id))
            }
            Ok(None) => {
                self.asked.push_front((id, sample));
                None
            }
            Err(error) => {
                self.note("publish", &error);
                Some(ReceiverEvent::NotBorrowed(id))
            }
        }
    }

    /// Returns the publisher here, and joins the topic if there is none.
    fn publisher(&mut self) -> partywall::Result<&Publisher> {
        let publisher = match self.publisher.take() {
            Some(publisher) => publisher,
            None => {
                let topic = match &self.topic {
                    Some(topic) => topic.clone(),
                    None => self.topic.insert(self.open_or_create()?).clone(),
                };
                let own = &self.imports.own;
                let joined = own.ring(&topic).and_then(|ring| Ok((ring, topic.publisher()?)));
                let ((ring, _), publisher) = joined.inspect_err(|_| self.topic = None)?;
                own.of(ring).add(publisher.id());
                publisher
            }
        };
        Ok(self.publisher.insert(publisher))
    }

    /// Leaves a topic that was removed here, before the next sample, for which another one is created. Publishing would
    /// go on, for subscribers that still have it.
    fn leave_removed(&mut self) {
        let is_due = self.publishing.is_none() && self.loans.is_empty() && self.checked.elapsed() >= CHECK;
        if let Some(publisher) = self.publisher.as_ref().filter(|_| is_due && !self.asked.is_empty()) {
            self.checked = Instant::now();
            if publisher.check().is_err() {
                self.publisher = None;
                self.topic = None;
            }
        }
    }

    fn borrow(&mut self, sample: &SampleHead) -> partywall::Result<Option<Loan>> {
        let dtype: DType = sample.dtype.parse().map_err(|_| foreign(&self.name, sample))?;
        let Some(mut loan) = self.publisher()?.try_loan(dtype, &sample.shape)? else { return Ok(None) };
        if loan.len() != sample.bytes {
            return Err(foreign(&self.name, sample));
        }
        loan.header(&sample.header)?;
        Ok(Some(loan))
    }

    /// Opens the topic before the first sample, so that subscribers here find it.
    fn open(&mut self, like: TopicInfo) {
        self.like = like;
        if self.topic.is_none() {
            match self.open_or_create() {
                Ok(topic) => self.topic = Some(topic),
                Err(error) => self.note("publish", &error),
            }
        }
    }

    fn open_or_create(&self) -> partywall::Result<Topic> {
        let TopicImports { bridge, options, .. } = &*self.imports;
        // All imports of this name, and a process of this host.
        let publishers = bridge.imports.iter().filter(|import| import.pattern.matches(&self.name)).count() as u32 + 1;
        let like = TopicInfo { publishers: self.like.publishers.max(publishers), ..self.like.clone() };
        open(&bridge.domain, &self.name, &like, options.place)
    }

    fn write(&mut self, id: LoanId, offset: u64, payload: &Piece) {
        let Some(loan) = self.loans.get_mut(&id) else { return };
        if let Err(error) = write(loan, offset, payload) {
            // It is not published then.
            self.loans.remove(&id);
            self.note("write", &error);
        }
    }

    fn publish(&mut self, id: LoanId, skip: u64) {
        if let Some(publisher) = self.publisher.as_ref().filter(|_| skip > 0) {
            // Beyond all numbers that a topic reaches, a hostile origin's gaps are no longer shown.
            let _ = publisher.skip(skip);
        }
        match self.loans.remove(&id) {
            Some(loan) => self.publishing = Some((id, loan.filled())),
            None => {
                let mut effects = Vec::new();
                self.receiver.apply(ReceiverEvent::NotPublished(id), self.start.elapsed(), &mut effects);
                self.carry_out(effects);
            }
        }
    }

    fn send(&self, message: &ToOrigin) {
        let Bridge { link, host, .. } = &*self.imports.bridge;
        put_now(link, &key_to_origin(link, message, host, &self.name), message);
    }

    fn note_end(&mut self, end: StreamEnd) {
        let Self { host, name, .. } = self;
        let why = match end {
            StreamEnd::Origin(reason) => format!("//{host} has ended it: {reason}"),
            StreamEnd::Violation(why) => format!("//{host} has broken the protocol: {why}"),
            StreamEnd::Left => return,
        };
        let ReceiverCounts { published, missed, failed } = self.receiver.counts();
        let counts = format!("{published} samples were published here, {missed} missed, and {failed} had failed");
        let text = format!("//{host}/{name} is not imported: {why}; {counts}");
        self.note_once(text);
    }

    fn note(&mut self, action: &str, error: &Error) {
        let Self { host, name, .. } = self;
        let advice = error.advice_in(Language::Shell);
        let text = format!("cannot {action} samples of //{host}/{name}: {error}; {advice}");
        self.note_once(text);
    }

    fn note_once(&mut self, text: String) {
        if self.noted.as_ref() != Some(&text) {
            self.imports.output.note(&text);
            self.noted = Some(text);
        }
    }
}

/// Reads what a peer sent. What is no message is lost.
fn decoded(arrival: Arrival) -> Option<ReceiverEvent<Piece>> {
    match arrival {
        Arrival::Event(event) => Some(event),
        Arrival::Message(sample) => {
            let message = ToReceiver::decode(&sample.attachment()?.to_bytes()).ok()?;
            let payload = Piece { all: sample.payload().clone(), range: 0..sample.payload().len() };
            Some(ReceiverEvent::Message(message, Some(payload)))
        }
    }
}

/// Opens the topic here, or creates it like the one at its origin.
fn open(domain: &Domain, name: &str, like: &TopicInfo, place: Place) -> partywall::Result<Topic> {
    match domain.topic(name).open() {
        Err(Error::NotFound(NotFound::Name { .. })) => {}
        opened => return opened,
    }
    let TopicInfo { max_bytes, depth, history, publishers, subscribers, held, .. } = *like;
    let [depth64, publishers64, subscribers64, held64] = [depth, publishers, subscribers, held].map(u64::from);
    let blocks = subscribers64.saturating_mul(held64).saturating_add(depth64 + publishers64 * LOANS);
    let bytes = blocks.saturating_mul(max_bytes);
    if bytes > MAX_TOPIC {
        let why = format!("a topic like it has {bytes} bytes here; create it first if that is right");
        return Err(InvalidArgument::Range { tensor: format!("a sample of {name:?}"), why }.into());
    }
    let options = domain.topic(name).max_bytes(max_bytes).depth(depth).history(history).place(place);
    let mut options = options.publishers(publishers).subscribers(subscribers).held(held);
    if let Some(dtype) = like.dtype.as_ref().and_then(|dtype| dtype.parse().ok()) {
        options = options.dtype(dtype);
    }
    if let Some(shape) = &like.shape {
        options = options.varying_shape(shape);
    }
    options.open_or_create()
}

/// Writes a piece where it belongs, in any place. Returns once it is there.
fn write(loan: &mut Loan, mut offset: u64, payload: &Piece) -> partywall::Result<()> {
    for part in payload.slices() {
        loan.write_at(offset, part)?;
        offset += part.len() as u64;
    }
    Ok(())
}

/// The error of a sample whose numbers contradict each other, or of a type that this release does not know.
fn foreign(topic: &str, sample: &SampleHead) -> Error {
    let SampleHead { dtype, shape, bytes, .. } = sample;
    let why = format!("it is of {} {:?} and has {bytes} bytes", &**dtype, &**shape);
    InvalidArgument::Range { tensor: format!("a sample of {topic:?}"), why }.into()
}

/// What [`ExportedName`] calls a topic.
const TOPIC: &str = "topic";

/// Messages that are read before anything is done with them.
const MOST_AT_ONCE: usize = 64;

/// How long one attempt to publish waits, and the pause between attempts to get a loan.
const AGAIN: Duration = Duration::from_millis(1);

/// How often an import asks whether its topic was removed here, while there are samples.
const CHECK: Duration = Duration::from_millis(500);

/// More streams than an import ever has.
const STREAMS_OF_AN_IMPORT: u64 = 1 << 32;

/// What may wait of a stream's messages: its window, the piece that exceeds it, and a small message of each sample.
const INBOX_BYTES: u64 = WINDOW_BYTES + (4 << 20);

/// The most topics that a bridge imports. Each is a publisher and two loans in its topic.
const MAX_IMPORTS: usize = 64;

/// The most that a host may say about its names.
const MAX_NAMES: usize = 1 << 22;

/// The most bytes of a topic that is created because its origin says so.
const MAX_TOPIC: u64 = 16 << 30;

/// Loans of each publisher of a topic, by the library's own number.
const LOANS: u64 = 2;
