//! Answers questions of other hosts: about this one, and about exported segments, which are names, manifests and pieces.
//!
//! A callback of zenoh only puts a question into a queue; threads of ours answer. There are more of these as more
//! questions wait, so that a peer whose link is congested holds up its own answers.
//!
//! A version is hashed when it is first asked for. It stays open while it is asked for, and some time after that, so
//! that a puller whose link was cut for a moment finds it again, even if the name has a newer version by then. Its
//! hashes are remembered for longer.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Condvar, Mutex, Weak},
    time::{Duration, Instant},
};

use blake3::Hash;
use bytes::Bytes;
use partywall::{
    Error, Place, Segment, WatchEvent, check_name,
    error::NotFound,
    files::default_threads,
    info::{Change, Kind, Named, SegmentInfo},
};
use partywall_cli::Failure;
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::{Wait, bytes::ZBytes, query::Query};

use crate::{
    Bridge,
    commands::metadata,
    content::{ContentTree, Span, piece_range, spans},
    link::{CONGESTION, URGENT, answer, refuse, reply},
    manifest::Manifest,
    message::{Asked, ExportedName, HostInfo, Proof, Refusal, encode},
};

/// The answers of a bridge.
#[derive(Debug)]
pub(crate) struct Exports {
    bridge: Arc<Bridge>,
    questions: Mutex<Questions>,
    asked: Condvar,
    contents: Mutex<Contents>,
    /// Held while a version is hashed. Its pullers ask again.
    hashing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Questions {
    waiting: VecDeque<Query>,
    threads: usize,
    idle: usize,
}

#[derive(Debug, Default)]
struct Contents {
    open: Vec<OpenContent>,
    /// The hashes of versions, the last one hashed at the end.
    trees: VecDeque<((String, u64), Arc<ContentTree>)>,
}

#[derive(Debug)]
struct OpenContent {
    content: Arc<Content>,
    asked_at: Instant,
}

/// A version that is served.
#[derive(Debug)]
struct Content {
    segment: Segment,
    spans: Vec<Span>,
    length: u64,
    tree: Arc<ContentTree>,
}

/// Bytes of a version in host memory, which lives at least as long.
struct Slice {
    content: Arc<Content>,
    span: usize,
    range: Range<usize>,
}

impl Exports {
    /// Begins to answer.
    ///
    /// # Errors
    /// If the session has ended, or no thread can be started.
    pub(crate) fn start(bridge: &Arc<Bridge>) -> Result<Arc<Self>, Failure> {
        let exports = Arc::new(Self {
            bridge: bridge.clone(),
            questions: Mutex::default(),
            asked: Condvar::new(),
            contents: Mutex::default(),
            hashing: Mutex::new(()),
        });
        for (what, rest) in
            [("host", ""), ("view", ""), ("names", ""), ("manifest", "/**"), ("content", "/*"), ("piece", "/*/*")]
        {
            let key = bridge.own_key(what, rest);
            // The session, which the exports hold, must not hold them.
            let asked = Arc::downgrade(&exports);
            let queryable = bridge.link.session().declare_queryable(key);
            let queryable = queryable.callback(move |query| Self::enqueue(&asked, query));
            queryable.background().wait().map_err(|error| Failure::system("answering other hosts", error))?;
        }
        let notified = exports.clone();
        let started = spawn("partywall-names", move || notified.notify());
        started.map_err(|error| Failure::system("starting a thread", error))?;
        Ok(exports)
    }

    fn enqueue(exports: &Weak<Self>, query: Query) {
        let Some(exports) = exports.upgrade() else { return };
        let mut questions = exports.questions.lock().ignore_poison();
        if questions.waiting.len() >= MAX_WAITING {
            drop(questions);
            return refuse(&query, &Refusal::Busy);
        }
        questions.waiting.push_back(query);
        if questions.idle < questions.waiting.len() && questions.threads < MAX_THREADS {
            let worker = exports.clone();
            // Without a new thread the existing ones answer later.
            let started = spawn("partywall-export", move || worker.work()).is_ok();
            questions.threads += usize::from(started);
        }
        exports.asked.notify_one();
    }

    /// Answers questions until none has come for a while. Closes versions that nobody asks for any more.
    fn work(&self) {
        let mut questions = self.questions.lock().ignore_poison();
        loop {
            if let Some(query) = questions.waiting.pop_front() {
                drop(questions);
                self.respond(&query);
                // Not only where nobody asks: a follower asks for ever, for one version after the other.
                self.close_unasked();
                questions = self.questions.lock().ignore_poison();
                continue;
            }
            questions.idle += 1;
            let (woken, timeout) =
                self.asked.wait_timeout(questions, KEPT_OPEN).unwrap_or_else(std::sync::PoisonError::into_inner);
            questions = woken;
            questions.idle -= 1;
            if timeout.timed_out() && questions.waiting.is_empty() {
                drop(questions);
                let is_any_open = self.close_unasked();
                questions = self.questions.lock().ignore_poison();
                // The last one stays as long as it has a version to close.
                if questions.waiting.is_empty() && (questions.threads > 1 || !is_any_open) {
                    questions.threads -= 1;
                    return;
                }
            }
        }
    }

    /// Closes versions that were not asked for in a while. Returns whether any are open.
    fn close_unasked(&self) -> bool {
        let mut contents = self.contents.lock().ignore_poison();
        let is_asked = |open: &mut OpenContent| open.asked_at.elapsed() < KEPT_OPEN;
        let closed: Vec<_> = contents.open.extract_if(.., |open| !is_asked(open)).collect();
        let is_any_open = !contents.open.is_empty();
        // Unmapping takes time.
        drop(contents);
        drop(closed);
        is_any_open
    }

    fn respond(&self, query: &Query) {
        let done = match Asked::parse(query.key_expr().as_str()) {
            Some(Asked::Host) => {
                let Bridge { endpoints, start, .. } = &*self.bridge;
                let (release, uptime_ms) = (partywall::VERSION.to_owned(), start.elapsed().as_millis() as u64);
                let _ = answer(query, &HostInfo { release, endpoints: endpoints.clone(), uptime_ms });
                Ok(())
            }
            Some(Asked::View) => {
                let _ = answer(query, &self.bridge.hosts.views());
                Ok(())
            }
            Some(Asked::Names) => self.names().map(|names| drop(answer(query, &names))),
            Some(Asked::Manifest { name, version }) => {
                self.manifest(name, version).map(|manifest| drop(answer(query, &manifest)))
            }
            Some(Asked::Content(root)) => self.manifest_of_content(root).map(|manifest| drop(answer(query, &manifest))),
            Some(Asked::Piece { root, piece }) => self.piece(query, root, piece),
            None => Err(Refusal::NoName),
        };
        if let Err(refusal) = done {
            refuse(query, &refusal);
        }
    }

    /// Returns all exported names that can cross.
    fn names(&self) -> Result<Vec<ExportedName>, Refusal> {
        let names = self.bridge.domain.names().map_err(unreadable)?;
        let exported = names.into_iter().filter(|name| self.bridge.exports(&name.name));
        let row = |name: partywall::info::NameInfo| {
            let latest = name.latest?;
            let kind = Named::of(latest.control.as_ref()).name().to_owned();
            let place = Place::from(latest.place).to_string();
            let (version, bytes, tensors) = (latest.version, latest.bytes, latest.tensors);
            Some(ExportedName { name: name.name, kind, version, place, bytes, tensors })
        };
        Ok(exported.filter_map(row).collect())
    }

    /// Returns the manifest of a version; 0 is the latest.
    fn manifest(&self, name: &str, version: u64) -> Result<Manifest, Refusal> {
        if check_name(name).is_err() || !self.bridge.exports(name) {
            return Err(Refusal::NoName);
        }
        let info = self.frozen(name, version)?;
        let content = self.open(&info)?;
        Ok(Self::manifest_of(&info, &content))
    }

    fn manifest_of(info: &SegmentInfo, content: &Content) -> Manifest {
        let place = Place::from(info.version.place).to_string();
        let root = *content.tree.root().as_bytes();
        Manifest::new((info.name.clone(), info.version.version, place), root, info.chunks.clone(), &info.table)
    }

    /// Returns the manifest of an exported version that has this root: one that was asked for before, or one that was
    /// pulled itself and whose metadata says so.
    fn manifest_of_content(&self, root: Hash) -> Result<Manifest, Refusal> {
        let known = {
            let contents = self.contents.lock().ignore_poison();
            let known = contents.trees.iter().find(|(_, tree)| tree.root() == root);
            known.map(|((name, version), _)| (name.clone(), *version))
        };
        let known = known.filter(|(name, _)| self.bridge.exports(name));
        if let Some(info) = known.and_then(|(name, version)| self.frozen(&name, version).ok()) {
            let content = self.open(&info)?;
            return Ok(Self::manifest_of(&info, &content));
        }
        for name in self.bridge.domain.names().map_err(unreadable)? {
            if name.latest.is_none_or(|latest| latest.control.is_some()) || !self.bridge.exports(&name.name) {
                continue;
            }
            let Ok(info) = self.frozen(&name.name, 0) else { continue };
            if metadata(&info, ROOT).is_some_and(|found| found == root.to_hex().as_str()) {
                let content = self.open(&info)?;
                if content.tree.root() == root {
                    return Ok(Self::manifest_of(&info, &content));
                }
            }
        }
        Err(Refusal::NoContent)
    }

    /// Finds a version, and refuses what is no segment, or one whose bytes may change.
    fn frozen(&self, name: &str, version: u64) -> Result<SegmentInfo, Refusal> {
        let address = if version == 0 { name.to_owned() } else { format!("{name}@{version}") };
        let info = self.bridge.domain.inspect(&address).map_err(|error| match error {
            Error::NotFound(NotFound::Name { is, .. }) => match is.first() {
                Some(is) => Refusal::Kind(is.name().into()),
                None => Refusal::NoName,
            },
            Error::NotFound(NotFound::Version { latest, .. }) => latest.map_or(Refusal::NoName, Refusal::NoVersion),
            error => unreadable(error),
        })?;
        if !info.is_latest && version == 0 {
            // Removed, but still held by readers.
            return Err(Refusal::NoName);
        }
        let of = &info.version;
        match Named::of(of.control.as_ref()) {
            Named::Segment => {}
            other => return Err(Refusal::Kind(other.name().into())),
        }
        if of.mutable {
            return Err(Refusal::NotFrozen("mutable".into()));
        }
        if of.kind == Kind::Legacy {
            return Err(Refusal::NotFrozen("legacy".into()));
        }
        Ok(info)
    }

    /// Opens a version and hashes it, unless both is done.
    fn open(&self, info: &SegmentInfo) -> Result<Arc<Content>, Refusal> {
        let is_it = |content: &Content| {
            content.segment.name() == info.name && content.segment.version() == info.version.version
        };
        if let Some(content) = self.opened(is_it) {
            return Ok(content);
        }
        // Others do not wait for it: pieces of other versions need the threads.
        let Ok(_hashing) = self.hashing.try_lock() else { return Err(Refusal::Busy) };
        if let Some(content) = self.opened(is_it) {
            return Ok(content);
        }
        let version = info.version.version;
        let segment = self.bridge.domain.opener(&info.name).version(version).open().map_err(unreadable)?;
        let (spans, length) = spans(&info.table);
        let known = (info.name.clone(), version);
        let tree = {
            let contents = self.contents.lock().ignore_poison();
            contents.trees.iter().find(|(of, _)| *of == known).map(|(_, tree)| tree.clone())
        };
        let tree = match tree {
            Some(tree) => tree,
            None => {
                let read = |range, out: &mut [u8]| read(&segment, &spans, range, out);
                let tree = ContentTree::new(length, default_threads(), read).map_err(unreadable)?;
                Arc::new(tree)
            }
        };
        let content = Arc::new(Content { segment, spans, length, tree: tree.clone() });
        let mut contents = self.contents.lock().ignore_poison();
        contents.trees.retain(|(of, _)| *of != known);
        contents.trees.push_back((known, tree));
        if contents.trees.len() > MAX_TREES {
            contents.trees.pop_front();
        }
        contents.open.push(OpenContent { content: content.clone(), asked_at: Instant::now() });
        Ok(content)
    }

    /// Returns an open content, which was asked for now.
    fn opened(&self, is_it: impl Fn(&Content) -> bool) -> Option<Arc<Content>> {
        let mut contents = self.contents.lock().ignore_poison();
        let open = contents.open.iter_mut().find(|open| is_it(&open.content))?;
        open.asked_at = Instant::now();
        Some(open.content.clone())
    }

    /// Answers with a piece and its proof.
    fn piece(&self, query: &Query, root: Hash, piece: u64) -> Result<(), Refusal> {
        // If it is closed by now, the puller asks for the manifest again.
        let content = self.opened(|content| content.tree.root() == root).ok_or(Refusal::NoContent)?;
        if content.segment.check().is_err() {
            self.contents.lock().ignore_poison().open.retain(|open| !Arc::ptr_eq(&open.content, &content));
            return Err(Refusal::Withdrawn);
        }
        let range = piece_range(content.length, piece).ok_or(Refusal::NoContent)?;
        let proof = encode(&Proof(content.tree.path(piece)));
        let bytes = Content::payload(&content, range).map_err(unreadable)?;
        // That the puller is gone is nothing to act on.
        let _ = reply(query, bytes, &proof);
        Ok(())
    }

    /// Tells other hosts of new versions.
    fn notify(&self) {
        let Ok(mut watch) = self.bridge.domain.watch("*") else { return };
        let key = self.bridge.own_key("names", "");
        // Ends with the broker, as the bridge does.
        while let Ok(event) = watch.next(Duration::MAX) {
            let name = match event {
                Some(WatchEvent::Name(event)) if matches!(event.change, Change::Committed { .. }) => event.name,
                Some(WatchEvent::Name(event)) if matches!(event.change, Change::DeadlineSet { .. }) => {
                    // A holder may be evicted at the deadline. Pullers get the answer that the version is gone.
                    self.contents.lock().ignore_poison().open.retain(|open| open.content.segment.name() != event.name);
                    continue;
                }
                // Some are lost: everybody looks at everything again.
                Some(WatchEvent::Missed { .. }) => String::new(),
                _ => continue,
            };
            if name.is_empty() || self.bridge.exports(&name) {
                let put = self.bridge.link.session().put(&key, encode(&name));
                let _ = put.congestion_control(CONGESTION).priority(URGENT).wait();
            }
        }
    }
}

impl Content {
    /// Returns the bytes of a range: in host memory without a copy, if they are of one tensor.
    fn payload(content: &Arc<Self>, range: Range<u64>) -> partywall::Result<ZBytes> {
        let span = content.spans.partition_point(|span| span.start + span.bytes <= range.start);
        if content.segment.place() == Place::Host
            && let Some(of) = content.spans.get(span).filter(|of| of.start + of.bytes >= range.end)
        {
            let range = (range.start - of.start) as usize..(range.end - of.start) as usize;
            content.segment.tensor(&of.tensor)?.as_bytes()?;
            return Ok(Bytes::from_owner(Slice { content: content.clone(), span, range }).into());
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        read(&content.segment, &content.spans, range, &mut bytes)?;
        Ok(bytes.into())
    }
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        let span = &self.content.spans[self.span];
        let tensor = self.content.segment.tensor(&span.tensor);
        // Empty only after a withdrawal between the check and now: the puller refuses it by its length.
        let bytes = tensor.and_then(|tensor| tensor.as_bytes()).unwrap_or_default();
        bytes.get(self.range.clone()).unwrap_or_default()
    }
}

/// Fills `out` with the bytes of a range of a segment's content.
fn read(segment: &Segment, spans: &[Span], range: Range<u64>, out: &mut [u8]) -> partywall::Result<()> {
    let mut at = range.start;
    let mut rest = out;
    let first = spans.partition_point(|span| span.start + span.bytes <= at);
    for span in &spans[first..] {
        if rest.is_empty() {
            break;
        }
        let offset = at - span.start;
        let len = (span.bytes - offset).min(rest.len() as u64);
        let (part, after) = rest.split_at_mut(len as usize);
        segment.tensor(&span.tensor)?.read_at(offset, part)?;
        at += len;
        rest = after;
    }
    Ok(())
}

fn unreadable(error: Error) -> Refusal {
    Refusal::Unreadable(error.to_string())
}

/// The key of a replica's metadata that names the root of its content.
pub(crate) const ROOT: &str = "root";

/// How long a version stays open after the last question about it.
const KEPT_OPEN: Duration = Duration::from_secs(30);

/// The questions that may wait.
const MAX_WAITING: usize = 1024;

/// The threads that answer.
const MAX_THREADS: usize = 128;

/// The versions whose hashes are remembered.
const MAX_TREES: usize = 64;
