//! Imports of topics: carries out the effects of a [`Receiver`] for each topic of each host that is imported.
//!
//! The topic here has the name that it has at its origin. It is created like that one, in host memory, unless it exists.
//! All of a stream happens on one thread. Nothing there waits for long: a loan that is not there yet, and a sample that
//! subscribers here do not let in, are tried again. The credit that is missing meanwhile holds back the origin.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use partywall::{
    DType, Domain, Error, Filled, Loan, Place, Publisher, Topic, check_name,
    error::{Busy, InvalidArgument, NotFound},
};
use partywall_cli::{Failure, Output};
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::{Wait, bytes::ZBytes};

use super::{
    exchange::{OwnPublishers, TopicOptions, WINDOW_BYTES, instance_of, key_to_origin, own_instance, put, to_wire},
    inbox::Inbox,
    receiver::{LoanId, Payload, Receiver, ReceiverCounts, ReceiverEffect, ReceiverEvent, ReceiverOptions, StreamEnd},
    wire::{Message, SampleHead, ToOrigin, ToReceiver, TopicInfo},
};
use crate::{
    Bridge,
    hosts::{ANSWER, HostEvent},
    message::{ExportedName, decode},
};

/// All imports of a bridge.
#[derive(Debug)]
pub(super) struct TopicImports {
    bridge: Arc<Bridge>,
    options: TopicOptions,
    own: OwnPublishers,
    output: Output,
    streams: Mutex<HashMap<(String, String), SharedInbox>>,
}

type SharedInbox = Arc<Inbox<Arrival>>;

/// What arrives for a stream. Messages are decoded by its thread.
#[derive(Debug)]
enum Arrival {
    Event(ReceiverEvent<ZBytes>),
    Message(zenoh::sample::Sample),
}

/// Why the imports look again at what a host exports.
#[derive(Debug)]
enum Look {
    Host(HostEvent),
    Names { host: String, instance: String },
}

/// A topic of a host.
#[derive(Debug)]
struct TopicImport {
    imports: Arc<TopicImports>,
    host: String,
    name: String,
    start: Instant,
    receiver: Receiver<ZBytes>,
    like: TopicInfo,
    topic: Option<Topic>,
    publisher: Option<Publisher>,
    loans: HashMap<LoanId, Loan>,
    asked: VecDeque<(LoanId, SampleHead)>,
    publishing: Option<(LoanId, Filled)>,
    has_left: bool,
}

impl Payload for ZBytes {
    fn bytes(&self) -> u64 {
        self.len() as u64
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
        let imports =
            Arc::new(Self { bridge: bridge.clone(), options, own: own.clone(), output, streams: Mutex::default() });
        if bridge.imports.is_empty() {
            return Ok(imports);
        }
        let us = own_instance(&bridge.link).0;
        let listening = |error| Failure::system("listening to other hosts", error);
        let arriving = imports.clone();
        let subscriber = bridge.link.session().declare_subscriber(bridge.link.key(format_args!("data/{us:032x}/**")));
        subscriber.callback(move |sample| arriving.arrived(sample)).background().wait().map_err(listening)?;
        let (send, looks) = mpsc::channel();
        let names = send.clone();
        let subscriber = bridge.link.session().declare_subscriber(bridge.link.key("names/*/*"));
        let subscriber = subscriber.callback(move |sample| {
            // `pw1/R/names/H/I`
            let mut parts = sample.key_expr().as_str().split('/').skip(3).map(str::to_owned);
            if let (Some(host), Some(instance)) = (parts.next(), parts.next()) {
                let _ = names.send(Look::Names { host, instance });
            }
        });
        subscriber.background().wait().map_err(listening)?;
        let events = bridge.hosts.events();
        let failed = |error| Failure::system("starting a thread", error);
        spawn("partywall-import-hosts", move || events.into_iter().try_for_each(|event| send.send(Look::Host(event))))
            .map_err(failed)?;
        let looking = imports.clone();
        spawn("partywall-imports", move || looks.into_iter().for_each(|look| looking.look(look))).map_err(failed)?;
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
            let bytes = sample.payload().len() as u64;
            inbox.offer(Arrival::Message(sample), bytes);
        }
    }

    fn look(self: &Arc<Self>, look: Look) {
        match look {
            Look::Host(HostEvent::Found { host, instance, .. }) => {
                let Some(number) = instance_of(&instance) else { return };
                self.tell(&host, &ReceiverEvent::HostUp(number));
                self.find(&host, &instance);
            }
            Look::Host(HostEvent::Lost { host, instance }) => {
                let Some(instance) = instance_of(&instance) else { return };
                self.tell(&host, &ReceiverEvent::HostLost(instance));
            }
            Look::Host(HostEvent::Twin { .. }) => {}
            Look::Names { host, instance } => self.find(&host, &instance),
        }
    }

    fn tell(&self, host: &str, event: &ReceiverEvent<ZBytes>) {
        for (_, inbox) in self.streams.lock().ignore_poison().iter().filter(|((of, _), _)| of == host) {
            inbox.push(Arrival::Event(event.clone()));
        }
    }

    /// Begins to import what a host exports and is not imported yet.
    fn find(self: &Arc<Self>, host: &str, instance: &str) {
        let Bridge { link, imports: wanted, .. } = &*self.bridge;
        let output = self.output;
        let patterns: Vec<_> = wanted.iter().filter(|import| import.host == host).collect();
        let Some(number) = instance_of(instance).filter(|_| !patterns.is_empty()) else { return };
        let asked = link.ask(&link.key(format_args!("names/{host}/{instance}")), ANSWER, MAX_NAMES);
        let names: Vec<ExportedName> = match asked.and_then(|bytes| decode(&bytes)) {
            Ok(names) => names,
            // It says so when it has a new name, or comes back.
            Err(error) => return output.note(format!("//{host} {error}")),
        };
        for ExportedName { name, kind, .. } in names {
            let is_wanted = patterns.iter().any(|import| import.pattern.matches(&name));
            if kind != TOPIC || !is_wanted || check_name(&name).is_err() {
                continue;
            }
            let mut streams = self.streams.lock().ignore_poison();
            let count = streams.len();
            let of = (host.to_owned(), name);
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
    }
}

impl TopicImport {
    fn new(imports: &Arc<TopicImports>, (host, name): &(String, String)) -> Self {
        let options = imports.options;
        let TopicOptions { policy, history, timeout } = options;
        let asks = ReceiverOptions { policy: to_wire(policy), history, window: options.window(), timeout };
        Self {
            imports: imports.clone(),
            host: host.clone(),
            name: name.clone(),
            start: Instant::now(),
            receiver: Receiver::new(own_instance(&imports.bridge.link), 0, asks),
            like: TopicInfo::default(),
            topic: None,
            publisher: None,
            loans: HashMap::new(),
            asked: VecDeque::new(),
            publishing: None,
            has_left: false,
        }
    }

    /// Runs until the bridge stops.
    fn run(mut self, inbox: &Inbox<Arrival>) {
        while !self.has_left {
            let waits = !self.asked.is_empty() || self.publishing.is_some();
            let deadline = match waits {
                true => Some(Instant::now() + AGAIN),
                false => self.receiver.deadline().map(|deadline| self.start + deadline),
            };
            let mut next = inbox.pop(deadline);
            // All that is there, so that one acknowledgement is enough for it.
            let mut effects = Vec::new();
            while let Some(arrival) = next {
                if let Some(event) = decoded(arrival) {
                    self.receiver.apply(event, self.start.elapsed(), &mut effects);
                }
                next = inbox.pop(Some(self.start));
            }
            self.receiver.apply(ReceiverEvent::Tick, self.start.elapsed(), &mut effects);
            self.carry_out(effects);
            while let Some(event) = self.try_again() {
                let mut effects = Vec::new();
                self.receiver.apply(event, self.start.elapsed(), &mut effects);
                self.carry_out(effects);
            }
        }
        let Self { imports, host, name, .. } = self;
        imports.streams.lock().ignore_poison().remove(&(host, name));
    }

    fn carry_out(&mut self, effects: Vec<ReceiverEffect<ZBytes>>) {
        for effect in effects {
            match effect {
                ReceiverEffect::Send(message) => self.send(&message),
                ReceiverEffect::Open(like) => self.open(like),
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
    fn try_again(&mut self) -> Option<ReceiverEvent<ZBytes>> {
        if let Some((id, filled)) = self.publishing.take() {
            match filled.publish(AGAIN) {
                Ok(_) => return Some(ReceiverEvent::Published(id)),
                Err(failed) if matches!(failed.error, Error::Busy(Busy::TopicFull { .. }) | Error::Timeout { .. }) => {
                    self.publishing = Some((id, *failed.value));
                }
                Err(failed) => {
                    self.note("publish", &failed.error);
                    // If the topic here was removed, the next sample makes another one.
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

    fn borrow(&mut self, sample: &SampleHead) -> partywall::Result<Option<Loan>> {
        let topic = match &self.topic {
            Some(topic) => topic.clone(),
            None => self.topic.insert(open(&self.imports.bridge.domain, &self.name, &self.like)?).clone(),
        };
        let publisher = match &self.publisher {
            Some(publisher) => publisher,
            None => {
                let publisher = topic.publisher().inspect_err(|_| self.topic = None)?;
                self.imports.own.add(&topic, publisher.id());
                self.publisher.insert(publisher)
            }
        };
        let dtype: DType = sample.dtype.parse().map_err(|_| foreign(&self.name, sample))?;
        let Some(mut loan) = publisher.try_loan(dtype, &sample.shape)? else { return Ok(None) };
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
            match open(&self.imports.bridge.domain, &self.name, &self.like) {
                Ok(topic) => self.topic = Some(topic),
                Err(error) => self.note("publish", &error),
            }
        }
    }

    fn write(&mut self, id: LoanId, offset: u64, payload: &ZBytes) {
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
        let link = &self.imports.bridge.link;
        put(link, &key_to_origin(link, message, &self.name), message, ZBytes::new());
    }

    fn note_end(&mut self, end: StreamEnd) {
        self.has_left |= end == StreamEnd::Left;
        let Self { host, name, .. } = self;
        let why = match end {
            StreamEnd::Origin(reason) => format!("//{host} has ended it: {reason:?}"),
            StreamEnd::Violation(why) => format!("//{host} has broken the protocol: {why}"),
            StreamEnd::Left => return,
        };
        let ReceiverCounts { published, missed, failed } = self.receiver.counts();
        let counts = format!("{published} samples were published here, {missed} missed, and {failed} had failed");
        self.imports.output.note(format!("//{host}/{name} is no longer imported: {why}; {counts}"));
    }

    fn note(&self, action: &str, error: &Error) {
        let Self { host, name, .. } = self;
        self.imports.output.note(format!("cannot {action} a sample of //{host}/{name}: {error}"));
    }
}

/// Reads what a peer sent. What is no message is lost.
fn decoded(arrival: Arrival) -> Option<ReceiverEvent<ZBytes>> {
    match arrival {
        Arrival::Event(event) => Some(event),
        Arrival::Message(sample) => {
            let message = ToReceiver::decode(&sample.attachment()?.to_bytes()).ok()?;
            Some(ReceiverEvent::Message(message, Some(sample.payload().clone())))
        }
    }
}

/// Opens the topic here, or creates it in host memory like the one at its origin.
fn open(domain: &Domain, name: &str, like: &TopicInfo) -> partywall::Result<Topic> {
    match domain.topic(name).open() {
        Err(Error::NotFound(NotFound::Name { .. })) => {}
        opened => return opened,
    }
    let TopicInfo { max_bytes, depth, .. } = *like;
    let bytes = u64::from(depth).saturating_add(OTHER_BLOCKS).saturating_mul(max_bytes);
    if bytes > MAX_TOPIC {
        let why = format!("a topic like it has {bytes} bytes here; create it first if that is right");
        return Err(InvalidArgument::Range { tensor: format!("a sample of {name:?}"), why }.into());
    }
    let mut options = domain.topic(name).max_bytes(max_bytes).depth(depth).place(Place::Host);
    if let Some(dtype) = like.dtype.as_ref().and_then(|dtype| dtype.parse().ok()) {
        options = options.dtype(dtype);
    }
    if let Some(shape) = &like.shape {
        options = options.varying_shape(shape);
    }
    options.open_or_create()
}

/// Writes a piece where it belongs. On a GPU, waits until it is there.
fn write(loan: &mut Loan, mut offset: u64, payload: &ZBytes) -> partywall::Result<()> {
    for part in payload.slices().filter(|part| !part.is_empty()) {
        let end = offset + part.len() as u64;
        match loan.bytes_mut() {
            Ok(bytes) => bytes[offset as usize..end as usize].copy_from_slice(part),
            Err(Error::Mismatch(_)) => {
                let range = loan.device()?.slice(offset, part.len() as u64)?;
                range.copy_from_host(range.gpu().stream(), part)?;
            }
            Err(error) => return Err(error),
        }
        offset = end;
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

/// How long one attempt to publish waits, and the pause between attempts to get a loan.
const AGAIN: Duration = Duration::from_millis(1);

/// What may wait of a stream's messages: its window, the piece that exceeds it, and a small message of each sample.
const INBOX_BYTES: u64 = WINDOW_BYTES + (4 << 20);

/// The most topics that a bridge imports. Each is a publisher and two loans in its topic.
const MAX_IMPORTS: usize = 64;

/// The most that a host may say about its names.
const MAX_NAMES: usize = 1 << 22;

/// The most bytes of a topic that is created because its origin says so.
const MAX_TOPIC: u64 = 16 << 30;

/// Blocks of a topic besides its depth, by the library's own numbers.
const OTHER_BLOCKS: u64 = 12;
