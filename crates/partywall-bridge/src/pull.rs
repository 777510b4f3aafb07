//! `partywall pull`: the segment of another host becomes a version here.
//!
//! A version of another host is a file of its [content](crate::content), read piece by piece as `put` reads files. So
//! progress, places, claims and the one commit at the end are those of `put`. Each piece is proved against the root
//! before it is given away, so it may come from any host with the same content. A host that sends a wrong piece is not
//! asked again; one that is unreachable is asked again once it is there, until no piece has come for the time-out.
//!
//! What is pulled is in memory that nobody else sees before the commit. If this process is killed, nothing is left.

use std::{
    collections::VecDeque,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use blake3::Hash;
use partywall::files::{FileProblem, FileReader, StoredFile};
use partywall_os::lock::IgnorePoison;
use zenoh::bytes::ZBytes;

use crate::{
    content::{is_piece, piece_range},
    hosts::Hosts,
    link::{Link, PIECE_BYTES, Question, Refusal, Unanswered, decode},
    manifest::{MAX_MANIFEST, Manifest},
    name::RemoteName,
    serve::Proof,
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
    /// Held while a source is asked whether it has the content, so that one thread asks for all.
    preparing: Mutex<()>,
    /// For how long no piece may come.
    timeout: Duration,
    progressed_at: Mutex<Instant>,
    /// The pieces that a reader asks for ahead.
    window: usize,
    /// Spreads the pieces over the sources.
    next: AtomicUsize,
}

/// A host that may have the content.
#[derive(Debug)]
struct ContentSource {
    host: String,
    state: SourceState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SourceState {
    /// It has not said yet that it has the content.
    Unasked,
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
    asked: VecDeque<AskedPiece>,
    /// The piece at `at`, proved.
    piece: Option<(u64, ZBytes)>,
}

struct AskedPiece {
    piece: u64,
    host: String,
    question: Question,
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
        let sources = sources.into_iter().map(|host| ContentSource { host, state: SourceState::Unasked }).collect();
        Arc::new(Self {
            link,
            hosts,
            name,
            root: Hash::from_bytes(manifest.root),
            length: manifest.length,
            sources: Mutex::new(sources),
            preparing: Mutex::new(()),
            timeout,
            progressed_at: Mutex::new(Instant::now()),
            window,
            next: AtomicUsize::new(0),
        })
    }

    /// Returns what the content is called in errors.
    pub(crate) fn path(&self) -> PathBuf {
        self.name.to_string().into()
    }

    /// Asks a source for a piece, without waiting for it. Waits until a source is there.
    fn ask(&self, piece: u64, is_cancelled: &dyn Fn() -> bool) -> Result<AskedPiece, FileProblem> {
        let begun = Instant::now();
        loop {
            if is_cancelled() {
                return Err(FileProblem::Cancelled);
            }
            if let Some((host, instance)) = self.choose()? {
                let root = self.root.to_hex();
                let key = self.link.key(format_args!("piece/{host}/{instance}/{root}/{piece}"));
                let question = self.link.question(&key, PIECE_WAIT.min(self.timeout), PIECE_BYTES);
                return Ok(AskedPiece { piece, host, question });
            }
            if begun.elapsed() >= self.timeout && self.is_stalled() {
                return Err(self.silent());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Returns whether no piece has come for the time-out.
    fn is_stalled(&self) -> bool {
        self.progressed_at.lock().ignore_poison().elapsed() >= self.timeout
    }

    /// Returns a source that has the content, and its instance. None if all that may have it are unreachable now.
    fn choose(&self) -> Result<Option<(String, String)>, FileProblem> {
        let there: Vec<_> = self.hosts.views().into_iter().filter(|host| host.unreachable_ms.is_none()).collect();
        let instance = |host: &str| there.iter().find(|view| view.host == host).map(|view| view.instance.clone());
        let (ready, unasked) = {
            let mut sources = self.sources.lock().ignore_poison();
            let mut ready = Vec::new();
            let mut unasked = Vec::new();
            let mut is_any = false;
            for source in sources.iter_mut().filter(|source| !matches!(source.state, SourceState::Refused(_))) {
                is_any = true;
                let Some(now) = instance(&source.host) else { continue };
                if source.state == SourceState::Ready(now.clone()) {
                    ready.push((source.host.clone(), now));
                } else {
                    // It was started anew.
                    source.state = SourceState::Unasked;
                    unasked.push((source.host.clone(), now));
                }
            }
            if !is_any {
                return Err(self.refused(&sources));
            }
            (ready, unasked)
        };
        // One thread asks all that are new, and the others use what is ready meanwhile.
        let preparing =
            if ready.is_empty() { Some(self.preparing.lock().ignore_poison()) } else { self.preparing.try_lock().ok() };
        if preparing.is_some() {
            for (host, instance) in unasked {
                self.prepare(&host, &instance);
            }
        }
        drop(preparing);
        let sources = self.sources.lock().ignore_poison();
        let ready: Vec<_> = sources
            .iter()
            .filter_map(|source| match &source.state {
                SourceState::Ready(instance) => Some((source.host.clone(), instance.clone())),
                _ => None,
            })
            .filter(|(host, ready)| instance(host).is_some_and(|now| now == *ready))
            .collect();
        if ready.is_empty() {
            return Ok(None);
        }
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Some(ready[next % ready.len()].clone()))
    }

    /// Asks a source whether it has the content.
    fn prepare(&self, host: &str, instance: &str) {
        {
            let sources = self.sources.lock().ignore_poison();
            if sources.iter().any(|source| source.host == host && source.state != SourceState::Unasked) {
                return;
            }
        }
        let root = self.root.to_hex();
        let key = match host == self.name.host {
            true => manifest_key(&self.link, instance, &self.name),
            false => self.link.key(format_args!("content/{host}/{instance}/{root}")),
        };
        let asked = self.link.ask(&key, self.timeout, MAX_MANIFEST).and_then(|bytes| Manifest::read(&bytes));
        let state = match asked {
            Ok((manifest, _)) if manifest.root == *self.root.as_bytes() && manifest.length == self.length => {
                SourceState::Ready(instance.to_owned())
            }
            Ok(_) => SourceState::Refused("has another content under this name and version by now".into()),
            Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) => return,
            Err(error) => SourceState::Refused(error.to_string()),
        };
        self.set_state(host, state);
    }

    /// Waits for a piece and proves it. None if another source is to be asked.
    fn receive(&self, asked: AskedPiece, is_cancelled: &dyn Fn() -> bool) -> Result<Option<ZBytes>, FileProblem> {
        let AskedPiece { piece, host, question } = asked;
        let (bytes, proof) = match question.single(is_cancelled) {
            Ok(answer) => answer,
            Err(_) if is_cancelled() => return Err(FileProblem::Cancelled),
            Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) if self.is_stalled() => {
                return Err(self.silent());
            }
            Err(Unanswered::Silent | Unanswered::Refused(Refusal::Busy)) => {
                std::thread::sleep(RETRY);
                return Ok(None);
            }
            Err(Unanswered::Refused(Refusal::NoContent)) => {
                // It has closed the version, or was started anew.
                self.set_state(&host, SourceState::Unasked);
                return Ok(None);
            }
            Err(error) => {
                self.set_state(&host, SourceState::Refused(error.to_string()));
                return Ok(None);
            }
        };
        let parts: Vec<&[u8]> = bytes.slices().collect();
        let proof = decode::<Proof>(&proof.to_bytes());
        let is_right =
            proof.is_ok_and(|Proof(path)| is_piece(self.root, self.length, piece, parts.iter().copied(), &path));
        if !is_right {
            let why = format!("sent a wrong piece {piece}: it does not belong to the content {}", self.root);
            self.set_state(&host, SourceState::Refused(why));
            return Ok(None);
        }
        *self.progressed_at.lock().ignore_poison() = Instant::now();
        Ok(Some(bytes))
    }

    fn set_state(&self, host: &str, state: SourceState) {
        let mut sources = self.sources.lock().ignore_poison();
        if let Some(source) = sources.iter_mut().find(|source| source.host == host) {
            // What several threads find out at once is said once.
            if !matches!(source.state, SourceState::Refused(_)) {
                source.state = state;
            }
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
            self.asked.push_back(self.content.ask(self.ahead, self.is_cancelled)?);
            self.ahead += 1;
        }
        Ok(())
    }

    /// Returns the piece at `at`, proved.
    fn current(&mut self) -> Result<(u64, &ZBytes), FileProblem> {
        let piece = self.at / PIECE_BYTES as u64;
        if self.piece.as_ref().is_none_or(|(of, _)| *of != piece) {
            self.fill_window()?;
            let mut asked = match self.asked.pop_front() {
                Some(asked) => asked,
                None => self.content.ask(piece, self.is_cancelled)?,
            };
            let bytes = loop {
                match self.content.receive(asked, self.is_cancelled)? {
                    Some(bytes) => break bytes,
                    None => asked = self.content.ask(piece, self.is_cancelled)?,
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

/// How long one piece may take before another source is asked: eight pieces at one Mbit/s.
const PIECE_WAIT: Duration = Duration::from_secs(70);

/// How long to wait before a source that was silent or busy is asked again.
const RETRY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use partywall::{DType, TableBuilder, info::Table};
    use zenoh::{Wait, liveliness::LivelinessToken, query::Query};

    use super::*;
    use crate::{
        content::ContentTree,
        hosts::announce,
        link::{Endpoints, answer, encode, refuse, reply},
    };

    /// What a host of a test does with the question for a piece.
    type Reaction = fn(&Query, u64, &[u8], &ContentTree);

    /// A host without a domain.
    struct Peer {
        endpoint: String,
        _token: LivelinessToken,
        link: Link,
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

    fn peer(name: &str, bytes: &[u8], react: Reaction) -> Peer {
        let endpoints = Endpoints { listen: vec!["127.0.0.1:0".into()], ..Endpoints::default() }.check().unwrap();
        let link = Link::open("test", &endpoints).unwrap();
        let own = |what: &str| link.key(format_args!("{what}/{name}/{}/**", link.instance()));
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
        let token = announce(&link, name, &endpoints.listen, Instant::now()).unwrap();
        Peer { endpoint: endpoints.listen[0].clone(), _token: token, link }
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

    // Holds 447.
    #[test]
    fn silent_source_ends_the_pull_after_the_time_out() {
        let bytes = content();
        let silent = peer("silent", &bytes, |_, _, _, _| ());
        let ended = what(pull(&bytes, &[("silent", &silent)], Duration::from_millis(300)).unwrap_err());
        assert!(ended.contains("no piece has come for 0.3 s"), "{ended}");
        let gone = peer("gone", &bytes, |_, _, _, _| ());
        let link = gone.link.clone();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            link.session().close().wait().unwrap();
        });
        let ended = what(pull(&bytes, &[("gone", &gone)], Duration::from_secs(1)).unwrap_err());
        closing.join().unwrap();
        assert!(ended.contains("//gone is unreachable"), "{ended}");
    }
}
