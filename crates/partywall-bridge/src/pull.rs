//! `partywall pull`: the segment of another host becomes a version here.
//!
//! A version of another host is a file of its [content](crate::content), read piece by piece as `put` reads files. So
//! progress, places, claims and the one commit at the end are those of `put`. Each piece is proved against the root
//! before it is given away, so it may come from any host with the same content. Each piece is asked of the host with the
//! fewest pieces under way, so slow ones hold up little. A host that sends a wrong piece is not asked again, one that
//! sends nothing for a while only if there is no other. All is over once no piece has come from any for the time-out.
//!
//! What is pulled is in memory that nobody else sees before the commit. If this process is killed, nothing is left.

use std::{
    collections::VecDeque,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant},
};

use blake3::Hash;
use partywall::files::{FileProblem, FileReader, StoredFile};
use partywall_os::{lock::IgnorePoison, thread::spawn};
use zenoh::bytes::ZBytes;

use crate::{
    content::{is_piece, piece_range},
    hosts::Hosts,
    link::{CANCELLED_AFTER, Link, Question},
    manifest::{MAX_MANIFEST, Manifest},
    message::{PIECE_BYTES, Proof, Refusal, Unanswered, decode},
    name::RemoteName,
};

/// The content of a version of another host, and the hosts to ask for it.
pub(crate) struct RemoteContent {
    link: Link,
    hosts: Hosts,
    /// The name and version that are pulled.
    name: RemoteName,
    root: Hash,
    length: u64,
    sources: Mutex<Vec<ContentSource>>,
    /// For how long no piece may come.
    timeout: Duration,
    progressed_at: Mutex<Instant>,
    /// The pieces that a reader asks for ahead.
    window: usize,
    /// For the threads that ask sources whether they have the content.
    own: Weak<Self>,
}

/// A host that may have the content.
#[derive(Debug)]
struct ContentSource {
    host: String,
    state: SourceState,
    /// Pieces that were asked of it and have not come.
    in_flight: usize,
    /// When the last one came, or the first one was asked for.
    progressed_at: Instant,
    /// Until then it is asked only if there is no other.
    aside_until: Instant,
    aside_for: Duration,
    /// How often it has said that it has the content and then had not, since its last piece.
    denials: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SourceState {
    /// It has not said yet that it has the content.
    Unasked,
    /// A thread asks it.
    Asking,
    /// This instance of it has the content.
    Ready(String),
    /// It is not asked again, for this reason.
    Refused(String),
}

/// Reads pieces, of which several are under way.
struct PieceReader<'a> {
    content: &'a RemoteContent,
    is_cancelled: &'a dyn Fn() -> bool,
    /// Where the next byte is read.
    at: u64,
    end: u64,
    /// The first piece that was not asked for.
    ahead: u64,
    /// The pieces from `at` on that were asked for, in order.
    asked: VecDeque<AskedPiece<'a>>,
    /// The piece at `at`, proved.
    piece: Option<(u64, ZBytes)>,
}

struct AskedPiece<'a> {
    content: &'a RemoteContent,
    piece: u64,
    host: String,
    question: Question,
}

impl Drop for AskedPiece<'_> {
    fn drop(&mut self) {
        self.content.change(&self.host, |source| source.in_flight -= 1);
    }
}

impl ContentSource {
    fn new(host: String) -> Self {
        let now = Instant::now();
        let (state, aside_for) = (SourceState::Unasked, Duration::ZERO);
        Self { host, state, in_flight: 0, progressed_at: now, aside_until: now, aside_for, denials: 0 }
    }

    /// Prefers other sources for a while: at least for so long, and for longer each time.
    fn put_aside(&mut self, least: Duration) {
        if !self.is_aside() {
            self.aside_for = least.max(self.aside_for * 2).min(LONGEST);
            self.aside_until = Instant::now() + self.aside_for;
        }
    }

    /// Notes that it has sent a piece, or is another instance.
    fn begin_anew(&mut self) {
        self.progressed_at = Instant::now();
        self.aside_until = self.progressed_at;
        self.aside_for = Duration::ZERO;
        self.denials = 0;
    }

    fn is_aside(&self) -> bool {
        Instant::now() < self.aside_until
    }

    fn is_refused(&self) -> bool {
        matches!(self.state, SourceState::Refused(_))
    }
}

impl RemoteContent {
    /// Describes the content that a manifest of the first of `hosts` names. The others may have it, too.
    pub(crate) fn new(
        (link, hosts): (Link, Hosts),
        name: RemoteName,
        manifest: &Manifest,
        sources: Vec<String>,
        threads: usize,
        timeout: Duration,
    ) -> Arc<Self> {
        let window = (IN_FLIGHT * sources.len()).div_ceil(threads.max(1));
        let sources = sources.into_iter().map(ContentSource::new).collect();
        Arc::new_cyclic(|own| Self {
            link,
            hosts,
            name,
            root: Hash::from_bytes(manifest.root),
            length: manifest.length,
            sources: Mutex::new(sources),
            timeout,
            progressed_at: Mutex::new(Instant::now()),
            window,
            own: own.clone(),
        })
    }

    /// Returns what the content is called in errors.
    pub(crate) fn path(&self) -> PathBuf {
        self.name.to_string().into()
    }

    /// Asks a source for a piece, without waiting for it. Waits until a source is there.
    fn ask(&self, piece: u64, begun: Instant, is_cancelled: &dyn Fn() -> bool) -> Result<AskedPiece<'_>, FileProblem> {
        loop {
            if is_cancelled() {
                return Err(FileProblem::Cancelled);
            }
            if let Some((host, instance)) = self.choose()? {
                let root = self.root.to_hex();
                let key = self.link.key(format_args!("piece/{host}/{instance}/{root}/{piece}"));
                let question = self.link.question(&key, LONGEST, PIECE_BYTES);
                return Ok(AskedPiece { content: self, piece, host, question });
            }
            if self.is_stalled(begun) {
                return Err(self.silent());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Returns whether no piece has come for the time-out, of which a thread has waited all since `begun`.
    fn is_stalled(&self, begun: Instant) -> bool {
        self.progressed_at.lock().ignore_poison().max(begun).elapsed() >= self.timeout
    }

    /// Returns a source that has the content, and its instance, and counts a piece for it. None if none is known to have
    /// it now. Those that have not said whether they have it are asked by threads of their own.
    fn choose(&self) -> Result<Option<(String, String)>, FileProblem> {
        let there: Vec<_> = self.hosts.views().into_iter().filter(|host| host.unreachable_ms.is_none()).collect();
        let instance = |host: &str| there.iter().find(|view| view.host == host).map(|view| &view.instance);
        let mut sources = self.sources.lock().ignore_poison();
        if sources.iter().all(ContentSource::is_refused) {
            return Err(self.refused(&sources));
        }
        for source in sources.iter_mut() {
            let Some(now) = instance(&source.host) else { continue };
            if matches!(&source.state, SourceState::Ready(ready) if ready != now) {
                source.state = SourceState::Unasked;
                source.begin_anew();
            }
            // One that was silent is asked again after a while.
            if source.state == SourceState::Unasked && !source.is_aside() {
                self.prepare(source, now);
            }
        }
        let is_ready = |source: &&mut ContentSource| match &source.state {
            SourceState::Ready(ready) => instance(&source.host) == Some(ready),
            _ => false,
        };
        let ready = sources.iter_mut().filter(is_ready);
        let Some(source) = ready.min_by_key(|source| (source.is_aside(), source.in_flight)) else { return Ok(None) };
        if source.in_flight == 0 {
            source.progressed_at = Instant::now();
        }
        source.in_flight += 1;
        Ok(instance(&source.host).map(|instance| (source.host.clone(), instance.clone())))
    }

    /// Lets a thread ask a source whether it has the content.
    fn prepare(&self, source: &mut ContentSource, instance: &str) {
        let Some(content) = self.own.upgrade() else { return };
        let (host, instance) = (source.host.clone(), instance.to_owned());
        if spawn("partywall-source", move || content.ask_source(&host, &instance)).is_ok() {
            source.state = SourceState::Asking;
        }
    }

    fn ask_source(&self, host: &str, instance: &str) {
        let key = match host == self.name.host {
            true => manifest_key(&self.link, instance, &self.name),
            false => self.link.key(format_args!("content/{host}/{instance}/{}", self.root.to_hex())),
        };
        let asked = self.link.ask(&key, self.timeout, MAX_MANIFEST).and_then(|bytes| Manifest::read(&bytes));
        self.change(host, |source| {
            source.state = match asked {
                Ok((manifest, _)) if manifest.root == *self.root.as_bytes() && manifest.length == self.length => {
                    SourceState::Ready(instance.to_owned())
                }
                Ok(_) => SourceState::Refused("has another content under this name and version by now".into()),
                Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) => {
                    source.put_aside(RETRY);
                    SourceState::Unasked
                }
                Err(error) => SourceState::Refused(error.to_string()),
            };
        });
    }

    /// Waits for a piece and proves it. None if another source is to be asked.
    fn receive(
        &self,
        asked: &AskedPiece<'_>,
        begun: Instant,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<ZBytes>, FileProblem> {
        let AskedPiece { piece, host, question, .. } = asked;
        let answer = loop {
            match question.poll(CANCELLED_AFTER.min(self.timeout / 2)) {
                _ if is_cancelled() => return Err(FileProblem::Cancelled),
                Some(answer) => break answer,
                None if self.gives_up(host) => return Ok(None),
                None if self.is_stalled(begun) => return Err(self.silent()),
                None => {}
            }
        };
        let (bytes, proof) = match answer {
            Ok(answer) => answer,
            Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) => {
                self.change(host, |source| source.put_aside(RETRY));
                if self.is_stalled(begun) {
                    return Err(self.silent());
                }
                std::thread::sleep(RETRY);
                return Ok(None);
            }
            Err(Unanswered::Refused(Refusal::NoContent)) => {
                self.change(host, |source| {
                    // Of several pieces that were under way, the first one says it.
                    if matches!(source.state, SourceState::Ready(_)) {
                        source.denials += 1;
                        source.state = match source.denials {
                            // It has closed the version, and opens it when it is asked.
                            ..MOST_DENIALS => SourceState::Unasked,
                            _ => {
                                SourceState::Refused("says that it has the content, and has none of its pieces".into())
                            }
                        };
                    }
                });
                return Ok(None);
            }
            Err(error) => {
                self.change(host, |source| source.state = SourceState::Refused(error.to_string()));
                return Ok(None);
            }
        };
        let parts: Vec<&[u8]> = bytes.slices().collect();
        let proof = decode::<Proof>(&proof.to_bytes());
        let is_right =
            proof.is_ok_and(|Proof(path)| is_piece(self.root, self.length, *piece, parts.iter().copied(), &path));
        if !is_right {
            let why = format!("sent a wrong piece {piece}: it does not belong to the content {}", self.root);
            self.change(host, |source| source.state = SourceState::Refused(why));
            return Ok(None);
        }
        *self.progressed_at.lock().ignore_poison() = Instant::now();
        self.change(host, ContentSource::begin_anew);
        Ok(Some(bytes))
    }

    /// Returns whether a source has sent nothing for a while although another one may do better, and pauses it.
    fn gives_up(&self, host: &str) -> bool {
        let mut sources = self.sources.lock().ignore_poison();
        let is_ready = |source: &ContentSource| matches!(source.state, SourceState::Ready(_));
        let is_better = |source: &ContentSource| source.host != host && is_ready(source) && !source.is_aside();
        if !sources.iter().any(is_better) {
            return false;
        }
        let Some(source) = sources.iter_mut().find(|source| source.host == host) else { return false };
        let is_silent = source.progressed_at.elapsed() >= PATIENCE.min(self.timeout / 2);
        if is_silent {
            source.put_aside(PATIENCE);
        }
        is_silent
    }

    fn change(&self, host: &str, change: impl FnOnce(&mut ContentSource)) {
        let mut sources = self.sources.lock().ignore_poison();
        // What several threads find out at once is said once.
        if let Some(source) = sources.iter_mut().find(|source| source.host == host) {
            let refused = source.is_refused().then(|| source.state.clone());
            change(source);
            source.state = refused.unwrap_or_else(|| source.state.clone());
        }
    }

    /// Returns the problem that no source is left.
    fn refused(&self, sources: &[ContentSource]) -> FileProblem {
        let why = sources.iter().map(|source| match &source.state {
            SourceState::Refused(why) => format!("//{} {why}", source.host),
            _ => format!("//{} does not answer", source.host),
        });
        let what = format!("cannot be pulled: {}", why.collect::<Vec<_>>().join("; "));
        FileProblem::Remote { what, advice: "pull it again, or from another host" }
    }

    /// Returns the problem that no piece has come for the time-out.
    fn silent(&self) -> FileProblem {
        let views = self.hosts.views();
        let sources = self.sources.lock().ignore_poison();
        let why = sources.iter().map(|source| {
            let view = views.iter().find(|view| view.host == source.host);
            match (&source.state, view.and_then(|view| view.unreachable_ms)) {
                (SourceState::Refused(why), _) => format!("//{} {why}", source.host),
                (_, Some(ms)) => format!("//{} is unreachable for {:.1} s", source.host, ms as f64 / 1e3),
                (_, None) => format!("//{} does not answer", source.host),
            }
        });
        let why = why.collect::<Vec<_>>().join("; ");
        let what = format!("cannot be pulled: no piece has come for {} s: {why}", self.timeout.as_secs_f64());
        FileProblem::Remote {
            what,
            advice: "see whether the host runs (`partywall hosts`), or give --also or a longer --timeout",
        }
    }
}

/// Returns the key at which a host answers with the manifest of a name.
pub(crate) fn manifest_key(link: &Link, instance: &str, name: &RemoteName) -> String {
    let RemoteName { host, name, version } = name;
    link.key(format_args!("manifest/{host}/{instance}/{}/{name}", version.unwrap_or(0)))
}

impl StoredFile for RemoteContent {
    fn length(&self) -> u64 {
        self.length
    }

    fn reader<'a>(&'a self, is_cancelled: &'a dyn Fn() -> bool) -> Result<Box<dyn FileReader + 'a>, FileProblem> {
        let asked = VecDeque::new();
        Ok(Box::new(PieceReader { content: self, is_cancelled, at: 0, end: 0, ahead: 0, asked, piece: None }))
    }

    fn check(&self) -> Result<(), FileProblem> {
        // Each piece was proved.
        Ok(())
    }
}

impl PieceReader<'_> {
    /// Asks ahead.
    fn fill_window(&mut self) -> Result<(), FileProblem> {
        while self.asked.len() < self.content.window.max(1) && self.ahead * (PIECE_BYTES as u64) < self.end {
            self.asked.push_back(self.content.ask(self.ahead, Instant::now(), self.is_cancelled)?);
            self.ahead += 1;
        }
        Ok(())
    }

    /// Returns the piece at `at`, proved.
    fn current(&mut self) -> Result<(u64, &ZBytes), FileProblem> {
        let piece = self.at / PIECE_BYTES as u64;
        if self.piece.as_ref().is_none_or(|(of, _)| *of != piece) {
            self.fill_window()?;
            let begun = Instant::now();
            let mut asked = match self.asked.pop_front() {
                Some(asked) => asked,
                None => self.content.ask(piece, begun, self.is_cancelled)?,
            };
            let bytes = loop {
                match self.content.receive(&asked, begun, self.is_cancelled)? {
                    Some(bytes) => break bytes,
                    None => asked = self.content.ask(piece, begun, self.is_cancelled)?,
                }
            };
            self.piece = Some((piece, bytes));
            // The next answers are under way while this piece is copied.
            self.fill_window()?;
        }
        match &self.piece {
            Some((piece, bytes)) => Ok((*piece, bytes)),
            None => unreachable!("it was set above"),
        }
    }
}

impl FileReader for PieceReader<'_> {
    fn begin(&mut self, range: Range<u64>) -> Result<(), FileProblem> {
        self.asked.clear();
        self.at = range.start;
        self.end = range.end;
        self.ahead = range.start / PIECE_BYTES as u64;
        self.fill_window()
    }

    fn read_exact(&mut self, mut out: &mut [u8]) -> Result<(), FileProblem> {
        while !out.is_empty() {
            let at = self.at;
            let length = self.content.length;
            let (piece, bytes) = self.current()?;
            let range =
                piece_range(length, piece).ok_or_else(|| FileProblem::Changed { why: "it is shorter".into() })?;
            let len = (range.end - at).min(out.len() as u64) as usize;
            let (part, rest) = out.split_at_mut(len);
            let mut reader = bytes.reader();
            let read = reader.seek(SeekFrom::Start(at - range.start)).and_then(|_| reader.read_exact(part));
            read.map_err(FileProblem::Read)?;
            self.at += len as u64;
            out = rest;
        }
        Ok(())
    }
}

/// The pieces of a source that are under way.
const IN_FLIGHT: usize = 8;

/// After this time without a piece a source is paused, if there is another: two pieces at one Mbit/s.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often a source may say that it has the content, and then refuse a piece of it.
const MOST_DENIALS: u32 = 5;

/// For zenoh, which is to give up no question that is still waited for, and the longest pause of a source.
const LONGEST: Duration = Duration::from_secs(3600);

/// How long to wait before a source that was silent or busy is asked again.
const RETRY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use partywall::{DType, TableBuilder, info::Table};
    use zenoh::{Wait, liveliness::LivelinessToken, query::Query};

    use super::*;
    use crate::{
        content::ContentTree,
        hosts::announce,
        link::{Endpoints, answer, refuse, reply},
        message::encode,
    };

    /// What a host of a test does with the question for a piece.
    type Reaction = fn(&Query, u64, &[u8], &ContentTree);

    /// A host without a domain.
    struct Peer {
        endpoint: String,
        token: Option<LivelinessToken>,
        _link: Link,
    }

    fn tree(bytes: &[u8]) -> ContentTree {
        let read = |range: Range<u64>, out: &mut [u8]| {
            out.copy_from_slice(&bytes[range.start as usize..range.end as usize]);
            Ok::<(), ()>(())
        };
        ContentTree::new(bytes.len() as u64, 1, read).unwrap()
    }

    fn manifest(bytes: &[u8]) -> Manifest {
        let mut table = TableBuilder::new();
        table.add("bytes", DType::U8, &[bytes.len() as u64]).unwrap();
        let layout = table.layout(1 << 40, 8).unwrap();
        let table = Table::parse(layout.table, &layout.chunks).unwrap();
        Manifest::new(("x".into(), 1, "host".into()), *tree(bytes).root().as_bytes(), layout.chunks, &table)
    }

    impl Peer {
        fn new(name: &str, declare: impl FnOnce(&Link, &dyn Fn(&str) -> String)) -> Self {
            let endpoints = Endpoints { listen: vec!["127.0.0.1:0".into()], ..Endpoints::default() }.check().unwrap();
            let link = Link::open("test", &endpoints).unwrap();
            declare(&link, &|what| link.key(format_args!("{what}/{name}/{}/**", link.instance())));
            let token = announce(&link, name).unwrap();
            Self { endpoint: endpoints.listen[0].clone(), token: Some(token), _link: link }
        }
    }

    fn peer(name: &str, bytes: &[u8], react: Reaction) -> Peer {
        Peer::new(name, |link, own| {
            for what in ["manifest", "content"] {
                let manifest = manifest(bytes);
                let answers = move |query: Query| answer(&query, &manifest).unwrap();
                link.session().declare_queryable(own(what)).callback(answers).background().wait().unwrap();
            }
            let (bytes, tree) = (bytes.to_vec(), tree(bytes));
            let pieces = move |query: Query| {
                let piece = query.key_expr().as_str().rsplit('/').next().unwrap().parse().unwrap();
                let range = piece_range(bytes.len() as u64, piece).unwrap();
                react(&query, piece, &bytes[range.start as usize..range.end as usize], &tree);
            };
            link.session().declare_queryable(own("piece")).callback(pieces).background().wait().unwrap();
        })
    }

    fn right(query: &Query, piece: u64, bytes: &[u8], tree: &ContentTree) {
        reply(query, bytes, &encode(&Proof(tree.path(piece)))).unwrap();
    }

    /// Reads a content from peers, the first of which is asked by the name.
    fn pull(bytes: &[u8], peers: &[(&str, &Peer)], timeout: Duration) -> Result<Vec<u8>, FileProblem> {
        let connect = peers.iter().map(|(_, peer)| peer.endpoint.clone()).collect();
        let link = Link::open("test", &Endpoints { connect, ..Endpoints::default() }).unwrap();
        let hosts = Hosts::watch(&link, None).unwrap();
        hosts.wait_until(Instant::now() + Duration::from_secs(60), |hosts| hosts.len() == peers.len());
        let name = RemoteName { host: peers[0].0.into(), name: "x".into(), version: Some(1) };
        let sources = peers.iter().map(|(name, _)| (*name).to_owned()).collect();
        let content = RemoteContent::new((link, hosts), name, &manifest(bytes), sources, 1, timeout);
        let mut out = vec![0; bytes.len()];
        let mut reader = content.reader(&|| false)?;
        reader.begin(0..bytes.len() as u64)?;
        for part in out.chunks_mut(300_000) {
            reader.read_exact(part)?;
        }
        Ok(out)
    }

    fn content() -> Vec<u8> {
        (0..(5 << 20) + 7_u32).map(|at| (at >> 8) as u8 ^ at as u8).collect()
    }

    fn what(problem: FileProblem) -> String {
        problem.to_string()
    }

    // Holds 448.
    #[test]
    fn source_that_sends_a_wrong_piece_is_named_and_not_asked_again() {
        let bytes = content();
        let lie: Reaction = |query, piece, bytes, tree| {
            let mut bytes = bytes.to_vec();
            if piece == 3 {
                bytes[17] ^= 1;
            }
            reply(query, bytes, &encode(&Proof(tree.path(piece)))).unwrap();
        };
        let liar = peer("liar", &bytes, lie);
        let good = peer("good", &bytes, right);
        let timeout = Duration::from_secs(60);
        assert!(pull(&bytes, &[("liar", &liar), ("good", &good)], timeout).unwrap() == bytes);
        let alone = what(pull(&bytes, &[("liar", &liar)], timeout).unwrap_err());
        assert!(alone.contains("//liar sent a wrong piece 3"), "{alone}");
    }

    // Holds 448.
    #[test]
    fn pieces_come_from_each_source_that_has_the_content() {
        static OTHER_HAS_SENT: AtomicBool = AtomicBool::new(false);
        let bytes: Vec<u8> = content().repeat(8);
        // It keeps its pieces until the other one has sent some.
        let first = peer("first", &bytes, |query, piece, bytes, tree| {
            let (query, bytes, proof) = (query.clone(), bytes.to_vec(), encode(&Proof(tree.path(piece))));
            std::thread::spawn(move || {
                while !OTHER_HAS_SENT.load(Ordering::Relaxed) {
                    std::thread::sleep(RETRY);
                }
                reply(&query, bytes, &proof).unwrap();
            });
        });
        let second = peer("second", &bytes, |query, piece, bytes, tree| {
            right(query, piece, bytes, tree);
            OTHER_HAS_SENT.store(true, Ordering::Relaxed);
        });
        assert!(pull(&bytes, &[("first", &first), ("second", &second)], Duration::from_secs(6)).unwrap() == bytes);
    }

    // Holds 448.
    #[test]
    fn source_that_withdraws_sends_nonsense_or_changes_is_left() {
        let bytes = content();
        let timeout = Duration::from_secs(60);
        for (react, why) in [
            ((|query, _, _, _| refuse(query, &Refusal::Withdrawn)) as Reaction, "has withdrawn the version"),
            (|query, _, bytes, _| reply(query, bytes, b"\x01").unwrap(), "sent a wrong piece"),
            (|query, _, bytes, _| reply(query, bytes, b"\x07").unwrap(), "sent a wrong piece"),
            (|query, _, _, _| drop(query.reply_err(vec![9_u8; 3]).wait()), "protocol 9"),
        ] {
            let bad = peer("bad", &bytes, react);
            let alone = what(pull(&bytes, &[("bad", &bad)], timeout).unwrap_err());
            assert!(alone.contains(why), "{alone}");
            let good = peer("good", &bytes, right);
            assert!(pull(&bytes, &[("bad", &bad), ("good", &good)], timeout).unwrap() == bytes, "{why}");
        }
        let other = peer("other", b"another content", right);
        let changed = what(pull(&bytes, &[("other", &other)], timeout).unwrap_err());
        assert!(changed.contains("has another content"), "{changed}");
    }

    // Holds 448.
    #[test]
    fn source_that_keeps_or_denies_its_pieces_holds_up_no_other() {
        let bytes = content();
        let timeout = Duration::from_secs(4);
        // Each piece comes in time, and all of them together do not.
        let slow: Reaction = |query, piece, bytes, tree| {
            let (query, bytes, proof) = (query.clone(), bytes.to_vec(), encode(&Proof(tree.path(piece))));
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(800) * (piece as u32 + 1));
                reply(&query, bytes, &proof).unwrap();
            });
        };
        let slow = peer("slow", &bytes, slow);
        assert!(pull(&bytes, &[("slow", &slow)], timeout).unwrap() == bytes);
        let good = peer("good", &bytes, right);
        let deny: Reaction = |query, _, _, _| refuse(query, &Refusal::NoContent);
        let denier = peer("denier", &bytes, deny);
        let alone = what(pull(&bytes, &[("denier", &denier)], timeout).unwrap_err());
        assert!(alone.contains("//denier says that it has the content, and has none of its pieces"), "{alone}");
        for bad in [(|query, _, _, _| std::mem::forget(query.clone())) as Reaction, |_, _, _, _| (), deny] {
            let bad = peer("bad", &bytes, bad);
            assert!(pull(&bytes, &[("bad", &bad), ("good", &good)], timeout).unwrap() == bytes);
        }
        // It does not say whether it has the content.
        let mute = Peer::new("mute", |link, own| {
            let keep = |query: Query| std::mem::forget(query);
            link.session().declare_queryable(own("content")).callback(keep).background().wait().unwrap();
        });
        assert!(pull(&bytes, &[("good", &good), ("mute", &mute)], Duration::from_secs(600)).unwrap() == bytes);
    }

    // Holds 447.
    #[test]
    fn silent_source_ends_the_pull_after_the_time_out() {
        let bytes = content();
        let silent = peer("silent", &bytes, |_, _, _, _| ());
        let ended = what(pull(&bytes, &[("silent", &silent)], Duration::from_millis(300)).unwrap_err());
        assert!(ended.contains("no piece has come for 0.3 s"), "{ended}");
        let mut gone = peer("gone", &bytes, |_, _, _, _| ());
        let token = gone.token.take().unwrap();
        let leaving = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            token.undeclare().wait().unwrap();
        });
        let ended = what(pull(&bytes, &[("gone", &gone)], Duration::from_secs(5)).unwrap_err());
        leaving.join().unwrap();
        assert!(ended.contains("//gone is unreachable"), "{ended}");
    }
}
