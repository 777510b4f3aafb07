//! The page that a supervisor shares with its workers: signs of life, deaths in a row, the request that is being
//! handled, and why a worker cannot serve, which the supervisor reports where it was started.

use std::{
    fmt, io,
    os::fd::{OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall_os::{
    Errno,
    map::{SharedArray, SharedMap},
    memfd::Draft,
};

use crate::StartError;

/// A page that the supervisor shares with its workers. Each word has one writer at a time, and none guards other
/// memory, so all accesses are relaxed: the next process sees them because fork(2) and waitpid(2) order them. Another
/// program finds the same words ([`STATE_VERSION`](crate::replacement::STATE_VERSION)).
#[derive(Debug, Clone)]
pub(crate) struct Page {
    words: Arc<SharedArray<AtomicU64>>,
    pub(crate) file: Arc<OwnedFd>,
}

/// The words of the page.
#[derive(Debug, Clone, Copy)]
enum Word {
    /// Whether a worker serves.
    Ready,
    /// Turns of the worker's loop.
    Turns,
    /// Deaths in a row of workers that had neither answered a request nor served for a moment. Both processes set it to
    /// 0; only the supervisor counts, while no worker runs.
    Deaths,
    Restarts,
    /// How the last worker died: a signal, or 256 plus a code.
    LastDeath,
    /// The request that the worker handles: the member, or 0.
    Member,
    Request,
    /// The request that was handled at the last death.
    FormerMember,
    FormerRequest,
    /// Whether the domain ends.
    Ending,
    /// Whether something happened that the journal has no record of.
    Unrecorded,
    /// Workers that were started.
    Workers,
    /// The number of the program's file that the last worker has handed over to, plus one; 0 if it died.
    Program,
    /// Why that program was not executed, as an errno; `ECANCELED` if its worker ended before it served.
    Refused,
    /// Workers that could not be started, or could not continue, since one last served.
    Lacks,
    /// Bytes of the text from word [`REASON`] on: why the worker cannot serve.
    ReasonBytes,
}

impl Page {
    pub(crate) fn create() -> Result<Self, Errno> {
        let file = Draft::create("partywall:supervisor", PAGE_BYTES as u64)?.share()?;
        Ok(Self { words: Self::map(&file)?, file: Arc::new(file) })
    }

    /// Maps the page of a former program. Gives the file back if that fails.
    pub(crate) fn open(file: OwnedFd) -> Result<Self, (OwnedFd, Errno)> {
        match Self::map(&file) {
            Ok(words) => Ok(Self { words, file: Arc::new(file) }),
            Err(errno) => Err((file, errno)),
        }
    }

    fn map(file: &OwnedFd) -> Result<Arc<SharedArray<AtomicU64>>, Errno> {
        let map = Arc::new(SharedMap::writable(file)?);
        map.array(0, PAGE_BYTES / size_of::<AtomicU64>()).map(Arc::new).ok_or(Errno::INVAL)
    }

    fn load(&self, word: Word) -> u64 {
        self.words[word as usize].load(Ordering::Relaxed)
    }

    fn store(&self, word: Word, value: u64) {
        self.words[word as usize].store(value, Ordering::Relaxed);
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.load(Word::Ready) != 0
    }

    pub(crate) fn set_ready(&self) {
        self.store(Word::Ready, 1);
    }

    /// Notes that no worker of this program has served.
    pub(crate) fn clear_ready(&self) {
        self.store(Word::Ready, 0);
    }

    /// Notes that a worker is about to be started.
    pub(crate) fn add_worker(&self) {
        self.store(Word::Workers, self.load(Word::Workers) + 1);
        self.store(Word::ReasonBytes, 0);
    }

    /// Notes why the worker cannot serve, for the supervisor, which has the terminal or the starter.
    pub(crate) fn set_reason(&self, error: &impl std::fmt::Display) {
        let text = error.to_string();
        let bytes = &text.as_bytes()[..text.len().min(REASON_BYTES)];
        for (word, chunk) in self.words[REASON..].iter().zip(bytes.chunks(size_of::<u64>())) {
            let mut padded = [0; size_of::<u64>()];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(padded), Ordering::Relaxed);
        }
        // Last: a worker that is killed before it has given no reason.
        self.store(Word::ReasonBytes, bytes.len() as u64);
    }

    /// Returns what the last worker said, if it said why it cannot serve.
    pub(crate) fn reason(&self) -> Option<String> {
        let len = usize::try_from(self.load(Word::ReasonBytes)).unwrap_or(0).min(REASON_BYTES);
        let words = self.words[REASON..].iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let bytes: Vec<u8> = words.flatten().take(len).collect();
        (len > 0).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn former_workers(&self) -> u64 {
        self.load(Word::Workers).saturating_sub(1)
    }

    /// Notes that a worker has lacked something.
    pub(crate) fn add_lack(&self) {
        self.store(Word::Lacks, self.load(Word::Lacks) + 1);
    }

    /// Returns how many workers have lacked something since one last served, and counts anew.
    pub(crate) fn take_lacks(&self) -> u64 {
        let lacks = self.load(Word::Lacks);
        self.store(Word::Lacks, 0);
        lacks
    }

    /// Notes the file of the program that the worker hands over to.
    pub(crate) fn set_program(&self, number: RawFd) {
        self.store(Word::Program, u64::try_from(number).map_or(0, |number| number + 1));
    }

    pub(crate) fn program(&self) -> Option<RawFd> {
        self.load(Word::Program).checked_sub(1).and_then(|number| RawFd::try_from(number).ok())
    }

    pub(crate) fn clear_program(&self) {
        self.store(Word::Program, 0);
    }

    pub(crate) fn set_refused(&self, errno: Errno) {
        self.store(Word::Refused, u64::from(errno.raw_os_error().unsigned_abs()));
    }

    /// Returns whether the former worker has handed over, or else why the program that it handed over to does not
    /// serve.
    pub(crate) fn take_handover(&self) -> Option<Result<(), Errno>> {
        let refused = i32::try_from(self.load(Word::Refused)).unwrap_or_default();
        let handed_over = self.program().is_some();
        self.store(Word::Refused, 0);
        self.clear_program();
        match refused {
            0 => handed_over.then_some(Ok(())),
            errno => Some(Err(Errno::from_raw_os_error(errno))),
        }
    }

    pub(crate) fn turns(&self) -> u64 {
        self.load(Word::Turns)
    }

    /// Notes that the worker's loop turns.
    pub(crate) fn turn(&self) {
        self.store(Word::Turns, self.turns().wrapping_add(1));
    }

    /// Records a death, and returns how many there were in a row.
    pub(crate) fn add_death(&self, death: Death) -> u64 {
        let code = match death {
            Death::Signal(signal) => u64::from(signal.unsigned_abs()),
            Death::Code(code) => 256 + u64::from(code.unsigned_abs()),
        };
        self.store(Word::LastDeath, code);
        self.store(Word::Restarts, self.load(Word::Restarts) + 1);
        let deaths = self.load(Word::Deaths) + 1;
        self.store(Word::Deaths, deaths);
        deaths
    }

    pub(crate) fn restarts(&self) -> (u64, Option<Death>) {
        let restarts = self.load(Word::Restarts);
        let death = match self.load(Word::LastDeath) {
            code @ 256.. => Death::Code(i32::try_from(code - 256).unwrap_or_default()),
            signal => Death::Signal(i32::try_from(signal).unwrap_or_default()),
        };
        (restarts, (restarts > 0).then_some(death))
    }

    /// Notes which request the worker handles.
    pub(crate) fn begin_request(&self, member: u64, request: u64) {
        self.store(Word::Request, request);
        self.store(Word::Member, member);
    }

    pub(crate) fn end_request(&self) {
        self.store(Word::Member, 0);
    }

    /// Notes that the worker serves: its death is no part of a row.
    pub(crate) fn forget_deaths(&self) {
        self.store(Word::Deaths, 0);
    }

    /// Returns the request that was handled at the last two deaths, if it was the same, and remembers the last one.
    pub(crate) fn twice_fatal(&self) -> Option<(u64, u64)> {
        let last = (self.load(Word::Member), self.load(Word::Request));
        let former = (self.load(Word::FormerMember), self.load(Word::FormerRequest));
        // First: if this worker is killed before it has stored the rest, one death does not count as two.
        self.store(Word::Member, 0);
        self.store(Word::FormerMember, last.0);
        self.store(Word::FormerRequest, last.1);
        (last.0 != 0 && last == former).then_some(last)
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.load(Word::Ending) != 0
    }

    pub(crate) fn set_ending(&self) {
        self.store(Word::Ending, 1);
    }

    pub(crate) fn is_unrecorded(&self) -> bool {
        self.load(Word::Unrecorded) != 0
    }

    pub(crate) fn set_unrecorded(&self, is_unrecorded: bool) {
        self.store(Word::Unrecorded, u64::from(is_unrecorded));
    }
}

/// Bytes of the page.
const PAGE_BYTES: usize = 4096;

/// The word of the page at which the reason begins, and its longest text.
const REASON: usize = 64;
const REASON_BYTES: usize = PAGE_BYTES - REASON * size_of::<u64>();

/// Why a broker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// A member asked for it.
    Stopped,
    /// A [`StopHandle`](crate::StopHandle) was used.
    Signalled,
    /// It had neither members nor names for [`Config::idle_exit`](crate::Config::idle_exit).
    Idle,
    /// Another program continues for it. Everything is still open, and the socket's file exists.
    HandedOver,
}

/// Waiting for events failed, so the broker cannot continue.
#[derive(Debug, thiserror::Error)]
#[error("waiting for events: {0}")]
pub struct RunError(#[source] pub(crate) io::Error);

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// By a signal.
    Signal(i32),
    /// By itself, with an exit code that stands for nothing.
    Code(i32),
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Self::Code(code) => write!(f, "exited with code {code}"),
        }
    }
}

/// Ends a worker that lacks something to continue with, so that its supervisor starts another one. It drops nothing:
/// that would close what the next worker continues with.
pub(crate) fn lack(error: &StartError) -> ! {
    tracing::error!(%error, "cannot continue yet; the supervisor tries again");
    std::process::exit(LACKS)
}

/// The exit code of a worker that could not continue because the kernel lacked something, such as memory or a thread.
pub(crate) const LACKS: i32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_of_a_worker_is_read_whole_and_ends_with_the_next_worker() {
        let page = Page::create().unwrap();
        assert_eq!(page.reason(), None);
        for reason in ["short", "eight by", "of more than one word: File too large"] {
            page.set_reason(&reason);
            assert_eq!(page.reason().as_deref(), Some(reason));
        }
        page.set_reason(&"x".repeat(2 * PAGE_BYTES));
        assert_eq!(page.reason().map(|reason| reason.len()), Some(REASON_BYTES));
        assert_eq!((page.restarts(), page.former_workers(), page.turns()), ((0, None), 0, 0));
        page.add_worker();
        assert_eq!(page.reason(), None);
    }

    #[test]
    fn deaths_are_counted_in_a_row() {
        let page = Page::create().unwrap();
        let death = Death::Signal(9);
        assert_eq!((page.add_death(death), page.add_death(death)), (1, 2));
        page.forget_deaths();
        assert_eq!((page.add_death(death), page.restarts()), (1, (3, Some(death))));
    }
}
