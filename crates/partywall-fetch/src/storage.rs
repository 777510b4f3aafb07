//! Files on a server, as plans read them: in ranges, again if need be, and compared.

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::{Buf, Bytes};
use partywall::files::{FileProblem, FileReader, Storage, StoredFile};
use partywall_cli::{Output, fetch::Request};
use tokio::time::{sleep, timeout};

use crate::{
    bucket::Bucket,
    transport::{Body, LEAST, Passing, REPORT, Trouble, Worker, Workers},
    web::Web,
};

/// A server that has files.
#[derive(Debug)]
pub(crate) enum Site {
    Web(Web),
    Bucket(Bucket),
}

/// An answer to a request for a range.
pub(crate) struct Answer {
    /// Where in the file the body begins.
    pub(crate) start: u64,
    /// The length of the file, if the server says it.
    pub(crate) length: Option<u64>,
    /// The file's ETag, else when it was written.
    pub(crate) tag: Option<String>,
    /// Whether the server gives ranges. Otherwise the body is the whole file.
    pub(crate) ranged: bool,
    pub(crate) body: Body,
}

/// The files of a server, for one `put`.
#[derive(Debug)]
pub(crate) struct Remote(Arc<Shared>);

struct Shared {
    site: Site,
    workers: Workers,
    /// How often a request is made again without progress between.
    retries: u32,
    output: Output,
    /// Whether the server has answered: a server that never has is an error at once.
    has_answered: AtomicBool,
}

/// A file, as its first answer described it.
struct RemoteFile {
    shared: Arc<Shared>,
    path: PathBuf,
    length: u64,
    tag: Option<String>,
    /// Whether several threads read ranges of it: the server has ranges, and the tag tells states of the file apart.
    divided: bool,
    /// The first bytes, in which most headers are.
    head: Vec<u8>,
}

/// Reads a range of a file.
struct RangeReader<'a> {
    file: &'a RemoteFile,
    is_cancelled: &'a dyn Fn() -> bool,
    /// Only `Drop` takes it.
    worker: Option<Worker>,
    at: u64,
    end: u64,
    body: Option<Answer>,
    /// Bytes of the body that lie at `at`.
    chunk: Bytes,
}

/// Counts the requests that have failed, and the bytes that came between, until those are [`LEAST`].
#[derive(Default)]
struct Attempts {
    failed: u32,
    bytes: usize,
}

impl Answer {
    /// Returns the answer of a server that has no byte in the range.
    pub(crate) fn empty(length: Option<u64>, tag: Option<String>) -> Self {
        Self { start: 0, length, tag, ranged: true, body: Body::new(tokio_stream::empty()) }
    }
}

impl Remote {
    /// Returns the files of a site. Sends nothing.
    ///
    /// # Errors
    /// If what the environment says about a bucket does not fit together.
    pub(crate) fn new(site: Site, workers: Workers, request: &Request) -> Result<Self, FileProblem> {
        let Request { retries, output, .. } = *request;
        let shared = Shared { site, workers, retries, output, has_answered: AtomicBool::new(false) };
        shared.workers.give_back(shared.worker()?);
        Ok(Self(Arc::new(shared)))
    }
}

impl Storage for Remote {
    fn folder(&self, path: &Path) -> Result<Option<Vec<PathBuf>>, FileProblem> {
        self.0.ask(path, async |worker| self.0.folder(worker, path).await)
    }

    fn open(&self, path: &Path) -> Result<Arc<dyn StoredFile>, FileProblem> {
        self.0.ask(path, async |worker| Ok(Arc::new(RemoteFile::open(&self.0, worker, path).await?) as _))
    }
}

impl Shared {
    /// Takes a worker with what the site needs.
    fn worker(&self) -> Result<Worker, FileProblem> {
        let mut worker = self.workers.take()?;
        match &self.site {
            Site::Web(_) => {}
            Site::Bucket(bucket) => bucket.prepare(&mut worker, self.workers.rules())?,
        }
        Ok(worker)
    }

    /// Asks until there is an answer, or an error that remains.
    fn ask<T>(&self, path: &Path, ask: impl AsyncFn(&Worker) -> Result<T, Trouble>) -> Result<T, FileProblem> {
        let worker = self.worker()?;
        let answer = worker.runtime.block_on(async {
            let mut attempts = Attempts::default();
            loop {
                match ask(&worker).await {
                    Ok(answer) => return Ok(answer),
                    Err(trouble) => attempts.wait(self, path, trouble).await?,
                }
            }
        });
        self.workers.give_back(worker);
        answer
    }

    async fn folder(&self, worker: &Worker, path: &Path) -> Result<Option<Vec<PathBuf>>, Trouble> {
        match &self.site {
            Site::Web(web) => web.folder(worker, self.workers.rules(), path).await,
            Site::Bucket(bucket) => bucket.folder(worker, path).await,
        }
    }

    async fn get(&self, worker: &Worker, path: &Path, range: Range<u64>, tag: Option<&str>) -> Result<Answer, Trouble> {
        let answer = match &self.site {
            Site::Web(web) => web.get(worker, self.workers.rules(), path, range).await,
            Site::Bucket(bucket) => bucket.get(worker, path, range, tag).await,
        }?;
        self.has_answered.store(true, Ordering::Relaxed);
        Ok(answer)
    }
}

impl RemoteFile {
    /// Asks for the beginning of a file, whose answer describes the file.
    async fn open(shared: &Arc<Shared>, worker: &Worker, path: &Path) -> Result<Self, Trouble> {
        let mut answer = shared.get(worker, path, 0..HEAD_BYTES, None).await?;
        let Some(length) = answer.length else {
            let what = "cannot be read: the server does not say how long it is".to_owned();
            let advice = "download it to a file and put that, or pass it on: `curl URL | partywall put - NAME`";
            return Err(FileProblem::Remote { what, advice }.into());
        };
        if answer.start != 0 {
            return Err(wrong_range(0, answer.start).into());
        }
        let wanted = length.min(HEAD_BYTES) as usize;
        let mut head = Vec::with_capacity(wanted);
        while head.len() < wanted {
            let Some(bytes) = answer.body.next(shared.workers.rules().timeout).await? else {
                return Err(cut(head.len() as u64).into());
            };
            head.extend_from_slice(&bytes[..bytes.len().min(wanted - head.len())]);
        }
        let Answer { tag, ranged, .. } = answer;
        let weakness = match &tag {
            None => Some("neither ETag nor date"),
            Some(tag) if tag.starts_with("W/") => Some("only a weak ETag"),
            Some(_) => None,
        };
        if let Some(weakness) = weakness.filter(|_| length > HEAD_BYTES) {
            let path = path.display();
            let note = format!(
                "{path}: the server sends {weakness}, so a change while it is read may not be noticed; reading it by one \
                 connection"
            );
            shared.output.note(note);
        }
        let divided = ranged && weakness.is_none();
        Ok(Self { shared: shared.clone(), path: path.to_owned(), length, tag, divided, head })
    }

    /// Asks for a range, and compares the answer with the first one.
    async fn request(&self, worker: &Worker, range: Range<u64>) -> Result<Answer, Trouble> {
        let Self { shared, path, length, tag, .. } = self;
        let at = range.start;
        let answer = shared.get(worker, path, range, tag.as_deref()).await;
        let answer = answer.map_err(|trouble| match trouble {
            Trouble::Final(FileProblem::Open(source)) if source.kind() == io::ErrorKind::NotFound => {
                changed("it is gone")
            }
            trouble => trouble,
        })?;
        if answer.length.is_some_and(|now| now != *length) {
            let now = answer.length.unwrap_or_default();
            return Err(changed(format!("it had {length} bytes and has {now}")));
        }
        if answer.tag != *tag {
            let text = |tag: &Option<String>| tag.clone().unwrap_or_else(|| "missing".to_owned());
            return Err(changed(format!("its ETag or date was {} and is {}", text(tag), text(&answer.tag))));
        }
        if answer.ranged && answer.start != at {
            return Err(wrong_range(at, answer.start).into());
        }
        Ok(answer)
    }
}

impl StoredFile for RemoteFile {
    fn length(&self) -> u64 {
        self.length
    }

    fn reader<'a>(&'a self, is_cancelled: &'a dyn Fn() -> bool) -> Result<Box<dyn FileReader + 'a>, FileProblem> {
        let worker = Some(self.shared.worker()?);
        let reader = RangeReader { file: self, is_cancelled, worker, at: 0, end: 0, body: None, chunk: Bytes::new() };
        Ok(Box::new(reader))
    }

    /// Each answer was compared with the first. A file that the first one held whole had no other.
    fn check(&self) -> Result<(), FileProblem> {
        if self.length == 0 || self.length > self.head.len() as u64 {
            return Ok(());
        }
        self.shared.ask(&self.path, async |worker| self.request(worker, 0..1).await.map(drop))
    }

    fn run_bytes(&self, bytes: u64, threads: usize) -> u64 {
        if self.divided { (bytes / threads.max(1) as u64).clamp(MIN_RUN_BYTES, MAX_RUN_BYTES) } else { bytes.max(1) }
    }
}

impl FileReader for RangeReader<'_> {
    fn begin(&mut self, range: Range<u64>) -> Result<(), FileProblem> {
        self.at = range.start;
        self.end = range.end;
        self.body = None;
        self.chunk.clear();
        Ok(())
    }

    fn read_exact(&mut self, out: &mut [u8]) -> Result<(), FileProblem> {
        let worker = self.worker.take().expect("only `Drop` keeps the worker");
        let is_cancelled = self.is_cancelled;
        let filled = worker.runtime.block_on(async {
            let mut filling = pin!(self.fill(&worker, out));
            loop {
                match timeout(POLL, &mut filling).await {
                    Ok(filled) => return filled,
                    Err(_) if is_cancelled() => return Err(FileProblem::Cancelled),
                    Err(_) => {}
                }
            }
        });
        self.worker = Some(worker);
        filled
    }
}

impl RangeReader<'_> {
    /// Fills `out`, by as many requests as that takes.
    async fn fill(&mut self, worker: &Worker, out: &mut [u8]) -> Result<(), FileProblem> {
        let mut attempts = Attempts::default();
        let mut filled = 0;
        while filled < out.len() {
            let len = self.chunk.len().min(out.len() - filled);
            if len > 0 {
                out[filled..filled + len].copy_from_slice(&self.chunk[..len]);
                self.chunk.advance(len);
                self.at += len as u64;
                filled += len;
                attempts.bring(len);
            } else if let Err(trouble) = self.more(worker).await {
                self.body = None;
                attempts.wait(&self.file.shared, &self.file.path, trouble).await?;
            }
        }
        if self.at == self.end
            && let Some(mut answer) = self.body.take_if(|answer| answer.ranged)
        {
            // Only a connection whose answer was read to its end can be used again.
            let _ = timeout(POLL, answer.body.next(POLL)).await;
        }
        Ok(())
    }

    /// Gets the bytes at `at`, as many as come at once.
    async fn more(&mut self, worker: &Worker) -> Result<(), Trouble> {
        let head = &self.file.head;
        if self.at < head.len() as u64 {
            let end = self.end.min(head.len() as u64);
            self.chunk = Bytes::copy_from_slice(&head[self.at as usize..end as usize]);
            return Ok(());
        }
        let mut answer = match self.body.take() {
            Some(answer) => answer,
            None => self.file.request(worker, self.at..self.end).await?,
        };
        let mut bytes =
            answer.body.next(self.file.shared.workers.rules().timeout).await?.ok_or_else(|| cut(self.at))?;
        // Of a server without ranges the bytes before `at` are of no use.
        let skipped = bytes.len().min(usize::try_from(self.at - answer.start).unwrap_or(usize::MAX));
        bytes.advance(skipped);
        bytes.truncate(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        answer.start += (skipped + bytes.len()) as u64;
        self.chunk = bytes;
        self.body = Some(answer);
        Ok(())
    }
}

impl Drop for RangeReader<'_> {
    fn drop(&mut self) {
        // The body belongs to the worker's runtime.
        self.body = None;
        if let Some(worker) = self.worker.take() {
            self.file.shared.workers.give_back(worker);
        }
    }
}

impl Attempts {
    fn bring(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= LEAST {
            *self = Self::default();
        }
    }

    /// Waits before the next request; or returns the error, if no further request would help.
    async fn wait(&mut self, shared: &Shared, path: &Path, trouble: Trouble) -> Result<(), FileProblem> {
        let Passing { why, after, unreached, .. } = match trouble {
            Trouble::Passing(passing) => passing,
            Trouble::Final(problem) => return Err(problem),
        };
        let Self { failed, bytes } = self;
        if unreached && !shared.has_answered.load(Ordering::Relaxed) {
            let advice = "check the name of the host, the network, and HTTPS_PROXY";
            return Err(FileProblem::Remote { what: format!("cannot be read: {why}"), advice });
        }
        if *failed >= shared.retries {
            let requests = match *failed {
                0 => "1 request has".to_owned(),
                failed => format!("{} requests in a row have", failed + 1),
            };
            let brought = if *bytes == 0 { "nothing".to_owned() } else { format!("only {bytes} bytes") };
            let what = format!("cannot be read: {why}; {requests} brought {brought}");
            let advice = "try again later, or with a larger --retries or --timeout";
            return Err(FileProblem::Remote { what, advice });
        }
        let backoff = FIRST_DELAY.saturating_mul(1 << (*failed).min(16)).min(MAX_DELAY).mul_f64(jitter());
        let delay = after.map_or(backoff, |after| after.min(MAX_RETRY_AFTER).max(backoff));
        *failed += 1;
        shared.output.note(format!("{}: {why}; trying again in {:.1} s", path.display(), delay.as_secs_f64()));
        sleep(delay).await;
        Ok(())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("site", &self.site).finish_non_exhaustive()
    }
}

/// Returns whether a tag is a strong ETag, which differs for each state of a file; a weak one and a date need not.
pub(crate) fn is_strong(tag: &str) -> bool {
    tag.starts_with('"')
}

fn changed(why: impl Into<String>) -> Trouble {
    FileProblem::Changed { why: why.into() }.into()
}

fn cut(at: u64) -> Passing {
    Passing::new(format!("the connection was cut at byte {at}"))
}

fn wrong_range(asked: u64, given: u64) -> FileProblem {
    let what = format!("cannot be read: asked for the bytes from {asked} on, the server sent those from {given} on");
    FileProblem::Remote { what, advice: REPORT }
}

/// Returns a factor from 0.5 to 1.5, so that many processes do not ask again at the same time.
fn jitter() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    0.5 + f64::from(now.subsec_micros() % 1000) / 1000.0
}

/// The first bytes of each file that are kept: a safetensors header of 2,000 tensors.
const HEAD_BYTES: u64 = 256 << 10;

/// A range of a thread: long enough that the request does not matter, short enough that the threads end together.
const MIN_RUN_BYTES: u64 = 8 << 20;
const MAX_RUN_BYTES: u64 = 64 << 20;

/// The time before the first further request; it doubles with each one.
const FIRST_DELAY: Duration = Duration::from_millis(500);
const MAX_DELAY: Duration = Duration::from_secs(16);

/// The longest wait that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(120);

/// How often a waiting reader looks whether it was cancelled.
const POLL: Duration = Duration::from_millis(100);
