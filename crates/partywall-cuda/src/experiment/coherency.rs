//! Words that kernels of two processes poll and change, with each kind of load and store that CUDA has.
//!
//! The source of the kernels is `kernels/lab.cu`. They spin, unlike all others of this crate, and each ends after a
//! limit.

use std::time::Duration;

use super::launch;
use crate::{AccessError, Context, CudaError, DeviceBuffer, DeviceSlice, Function, StreamRef};

/// Bytes of the memory that two processes use for an experiment. All bytes are 0 before it.
pub const WORDS_BYTES: u64 = PAIRS_DATA + 2 * PAIRS * LINE;

/// The threads for which an operation is ordered: those of a block, of a GPU, or of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `cta`
    Block = 0,
    /// `gpu`
    Gpu = 1,
    /// `sys`
    System = 2,
}

/// How a word is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// `*p` in a loop, as the compiler translates it: once.
    Compiled,
    /// `ld.weak`: what `*p` becomes where the compiler does load.
    Weak,
    /// `ld.volatile`
    Volatile,
    /// `ld.relaxed`
    Relaxed(Scope),
    /// `ld.acquire`
    Acquire(Scope),
}

/// How a word is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// `st.weak`
    Weak,
    /// `st.volatile`
    Volatile,
    /// `st.relaxed`
    Relaxed(Scope),
    /// `st.release`
    Release(Scope),
}

/// How data and then a flag are stored, and how the flag and then the data are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// Plain data and a plain flag.
    Weak,
    /// A volatile flag and plain data.
    VolatileFlag,
    /// Volatile data and a volatile flag.
    Volatile,
    /// Relaxed data and a relaxed flag, at GPU scope.
    Relaxed,
    /// As `Fence(Gpu)`, without the reader's fence.
    WriterFence,
    /// A volatile flag and plain data, with a fence between them on both sides.
    Fence(Scope),
    /// A flag that is released and acquired, and plain data.
    ReleaseAcquire(Scope),
}

/// The result of a poll. Times are nanoseconds of the GPU's clock, which all processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollReport {
    /// How often the kernel loaded the word.
    pub looks: u64,
    /// When the kernel saw the value, if it did.
    pub seen: Option<u64>,
    /// How long the kernel polled without seeing the value.
    pub vain: Duration,
}

/// The result of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreReport {
    /// When the kernel stored the value.
    pub at: u64,
    /// When the kernel, while it still ran, saw the answer of the poll, if it did.
    pub answered: Option<u64>,
}

/// The result of two kernels that alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnsReport {
    /// The number of turns.
    pub taken: u64,
    /// The time from the end of the first turn to the end of the last one.
    pub time: Duration,
}

/// The result of reading flags and data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairsReport {
    /// How often a flag and its data were read.
    pub looks: u64,
    /// How often a flag had changed since the previous read.
    pub changes: u64,
    /// How often the data was older than the flag.
    pub old: u64,
    /// The most steps by which the data was older.
    pub worst: u64,
}

/// The kernels, in one context, for one experiment at a time.
#[derive(Debug)]
pub struct Coherency {
    poll: Function,
    poll_compiled: Function,
    store: Function,
    turns: Function,
    write_pairs: Function,
    read_pairs: Function,
    result: DeviceBuffer,
}

/// A running poll.
#[derive(Debug)]
pub struct Polling<'a> {
    kernels: &'a mut Coherency,
    stream: StreamRef<'a>,
}

impl Coherency {
    /// Loads the kernels.
    ///
    /// # Errors
    /// As for [`Kernels::load`](crate::Kernels::load).
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = super::lab_module(context)?;
        Ok(Self {
            poll: module.function(c"pw_poll")?,
            poll_compiled: module.function(c"pw_poll_compiled")?,
            store: module.function(c"pw_store")?,
            turns: module.function(c"pw_turns")?,
            write_pairs: module.function(c"pw_write_pairs")?,
            read_pairs: module.function(c"pw_read_pairs")?,
            result: DeviceBuffer::new(context, RESULT_BYTES as u64)?,
        })
    }

    /// Launches a kernel that polls the word in `words` until it is `value`, or for `limit`. It writes `value` to the
    /// word `started` first. [`Load::Compiled`] cannot look at a clock: it makes a number of rounds.
    ///
    /// # Errors
    /// `words` is shorter than [`WORDS_BYTES`], `started` is not one word, or one of them is read-only; the driver
    /// refuses.
    pub fn poll<'a>(
        &'a mut self,
        stream: StreamRef<'a>,
        words: DeviceSlice<'a>,
        started: DeviceSlice<'a>,
        load: Load,
        value: u64,
        limit: Duration,
    ) -> Result<Polling<'a>, AccessError> {
        started.require_writable()?;
        started.elements(8)?;
        let word = place(words, WORD)?;
        let answer = place(words, ANSWER)?;
        let started = started.slice(0, 8)?.device_ptr();
        let result = self.clear(stream)?;
        match load.code() {
            Some(how) => {
                let parameters = [word, value, started, answer, how.into(), nanoseconds(limit), result];
                // SAFETY: the parameters are those of `pw_poll`; it writes to `started`, the answer's word and the
                // result, which were checked.
                unsafe { launch(&self.poll, stream, ONE_THREAD, parameters) }?;
            }
            None => {
                let parameters = [word, value, started, answer, COMPILED_ROUNDS, result];
                // SAFETY: as above, for `pw_poll_compiled`.
                unsafe { launch(&self.poll_compiled, stream, ONE_THREAD, parameters) }?;
            }
        }
        Ok(Polling { kernels: self, stream })
    }

    /// Runs a kernel that stores `value` to the word in `words` and continues until a poll has answered, at most for
    /// `limit`. Waits for it.
    ///
    /// # Errors
    /// As [`poll`](Self::poll), and the error of the stream's work.
    pub fn store(
        &mut self,
        stream: StreamRef<'_>,
        words: DeviceSlice<'_>,
        store: Store,
        value: u64,
        limit: Duration,
    ) -> Result<StoreReport, AccessError> {
        let word = place(words, WORD)?;
        let answer = place(words, ANSWER)?;
        let result = self.clear(stream)?;
        let parameters = [word, value, answer, store.code().into(), nanoseconds(limit), result];
        // SAFETY: the parameters are those of `pw_store`; it writes to the word and the result, which were checked.
        unsafe { launch(&self.store, stream, ONE_THREAD, parameters) }?;
        let [_, at, answered, ..] = self.outcome(stream)?;
        Ok(StoreReport { at, answered: (answered != 0).then_some(answered) })
    }

    /// Runs a kernel that takes turns with a kernel of the other process. One of the two has to pass `follows`. Waits
    /// for it, at most for `limit`.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn take_turns(
        &mut self,
        stream: StreamRef<'_>,
        words: DeviceSlice<'_>,
        follows: bool,
        turns: u64,
        limit: Duration,
    ) -> Result<TurnsReport, AccessError> {
        let leader = place(words, LEADER)?;
        let follower = place(words, FOLLOWER)?;
        let (mine, theirs) = if follows { (follower, leader) } else { (leader, follower) };
        let result = self.clear(stream)?;
        let parameters = [mine, theirs, turns, follows.into(), nanoseconds(limit), result];
        // SAFETY: the parameters are those of `pw_turns`; it writes to one of the words and the result.
        unsafe { launch(&self.turns, stream, ONE_THREAD, parameters) }?;
        let [taken, first, end, ..] = self.outcome(stream)?;
        Ok(TurnsReport { taken, time: Duration::from_nanos(end.saturating_sub(first)) })
    }

    /// Runs a kernel whose threads write data and then a flag, repeatedly for `limit`. Waits for it.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn write_pairs(
        &mut self,
        stream: StreamRef<'_>,
        words: DeviceSlice<'_>,
        handover: Handover,
        limit: Duration,
    ) -> Result<(), AccessError> {
        let parameters = pairs(words, handover, limit)?;
        // SAFETY: the parameters are those of `pw_write_pairs`, which stays below the number of pairs, inside the
        // words.
        unsafe { launch(&self.write_pairs, stream, A_THREAD_A_PAIR, parameters) }?;
        Ok(stream.synchronize()?)
    }

    /// Runs a kernel whose threads read a flag and then its data, repeatedly for `limit`. Waits for it.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn read_pairs(
        &mut self,
        stream: StreamRef<'_>,
        words: DeviceSlice<'_>,
        handover: Handover,
        limit: Duration,
    ) -> Result<PairsReport, AccessError> {
        let result = self.clear(stream)?;
        let [data, flags, stride, count, how, limit] = pairs(words, handover, limit)?;
        let parameters = [data, flags, stride, count, how, limit, result];
        // SAFETY: as above, for `pw_read_pairs`, which writes its result besides.
        unsafe { launch(&self.read_pairs, stream, A_THREAD_A_PAIR, parameters) }?;
        let [looks, changes, old, worst, ..] = self.outcome(stream)?;
        Ok(PairsReport { looks, changes, old, worst })
    }

    /// Sets the result to zero, and returns its address.
    fn clear(&self, stream: StreamRef<'_>) -> Result<u64, AccessError> {
        stream.enqueue_set(self.result.as_slice(), 0)?;
        Ok(self.result.as_slice().device_ptr())
    }

    fn outcome(&self, stream: StreamRef<'_>) -> Result<[u64; RESULTS], AccessError> {
        let mut bytes = [0; RESULT_BYTES];
        stream.copy_to_host(&mut bytes, self.result.as_slice())?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|index| u64::from_ne_bytes(words[index])))
    }
}

impl Polling<'_> {
    /// Waits for the end of the poll.
    ///
    /// # Errors
    /// The error of the stream's work.
    pub fn finish(self) -> Result<PollReport, AccessError> {
        let [looks, began, seen, end, ..] = self.kernels.outcome(self.stream)?;
        Ok(PollReport {
            looks,
            seen: (seen != 0).then_some(seen),
            vain: Duration::from_nanos(if seen == 0 { end.saturating_sub(began) } else { 0 }),
        })
    }
}

impl Load {
    /// The number of a load in `pw_poll`; `None` for the load that has a kernel of its own.
    fn code(self) -> Option<u32> {
        Some(match self {
            Self::Compiled => return None,
            Self::Weak => 0,
            Self::Volatile => 1,
            Self::Relaxed(scope) => 2 + scope as u32,
            Self::Acquire(scope) => 5 + scope as u32,
        })
    }
}

impl Store {
    /// The number of a store in `pw_store`.
    fn code(self) -> u32 {
        match self {
            Self::Weak => 0,
            Self::Volatile => 1,
            Self::Relaxed(scope) => 2 + scope as u32,
            Self::Release(scope) => 5 + scope as u32,
        }
    }
}

impl Handover {
    /// The number of a combination in `pw_write_pairs` and `pw_read_pairs`.
    fn code(self) -> u32 {
        match self {
            Self::Weak => 0,
            Self::VolatileFlag => 1,
            Self::Volatile => 2,
            Self::Relaxed => 3,
            Self::WriterFence => 4,
            Self::Fence(scope) => 5 + scope as u32,
            Self::ReleaseAcquire(scope) => 8 + scope as u32,
        }
    }
}

/// Returns the parameters of both kernels of pairs: data, flags, distance between two of them, their number, the
/// combination, the limit.
fn pairs(words: DeviceSlice<'_>, handover: Handover, limit: Duration) -> Result<[u64; 6], AccessError> {
    let data = place(words, PAIRS_DATA)?;
    Ok([data, data + PAIRS * LINE, LINE / 8, PAIRS, handover.code().into(), nanoseconds(limit)])
}

/// Returns the address of a place in the words, after a check of their length.
fn place(words: DeviceSlice<'_>, offset: u64) -> Result<u64, AccessError> {
    words.require_writable()?;
    let words = words.slice(0, WORDS_BYTES)?;
    words.elements(8)?;
    Ok(words.device_ptr() + offset)
}

fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes between two words: each has a cache line of its own in every cache.
const LINE: u64 = 128;
const WORD: u64 = 0;
const ANSWER: u64 = LINE;
const LEADER: u64 = 2 * LINE;
const FOLLOWER: u64 = 3 * LINE;
/// The number of data words, each on a cache line. The flags follow them.
const PAIRS_DATA: u64 = 4 * LINE;
const PAIRS: u64 = 128;

const ONE_THREAD: [u32; 2] = [1, 1];
/// The numbers of blocks and threads: several of each.
const A_THREAD_A_PAIR: [u32; 2] = [4, 32];

/// A few tens of milliseconds of multiplications.
const COMPILED_ROUNDS: u64 = 1 << 22;

/// Words of the result. No kernel writes more.
const RESULTS: usize = 8;
const RESULT_BYTES: usize = RESULTS * 8;

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../../kernels/lab.cu");
    const SCOPES: [(Scope, &str); 3] = [(Scope::Block, "Block"), (Scope::Gpu, "Gpu"), (Scope::System, "System")];

    #[track_caller]
    fn assert_case(code: u32, line: &str) {
        let line = format!("        case {code}: {line}");
        assert!(SOURCE.lines().any(|other| other.starts_with(&line)), "{line}");
    }

    #[test]
    fn codes_match_the_kernels() {
        let poll = |load: Load, name: &str| assert_case(load.code().unwrap(), &format!("return pw_poll_by<{name}>("));
        let store = |store: Store, name: &str| assert_case(store.code(), &format!("{name}::store("));
        let pairs = |handover: Handover, writer: &str, reader: &str| {
            assert_case(handover.code(), &format!("return pw_write_by<{writer}>("));
            assert_case(handover.code(), &format!("return pw_read_by<{reader}>("));
        };
        poll(Load::Weak, "LoadWeak");
        poll(Load::Volatile, "LoadVolatile");
        store(Store::Weak, "StoreWeak");
        store(Store::Volatile, "StoreVolatile");
        pairs(Handover::Weak, "StoreWeak, NoFence, StoreWeak", "LoadWeak, NoFence, LoadWeak");
        pairs(Handover::VolatileFlag, "StoreWeak, NoFence, StoreVolatile", "LoadVolatile, NoFence, LoadWeak");
        pairs(Handover::Volatile, "StoreVolatile, NoFence, StoreVolatile", "LoadVolatile, NoFence, LoadVolatile");
        pairs(
            Handover::Relaxed,
            "StoreRelaxedGpu, NoFence, StoreRelaxedGpu",
            "LoadRelaxedGpu, NoFence, LoadRelaxedGpu",
        );
        pairs(Handover::WriterFence, "StoreWeak, FenceGpu, StoreVolatile", "LoadVolatile, NoFence, LoadWeak");
        for (scope, name) in SCOPES {
            poll(Load::Relaxed(scope), &format!("LoadRelaxed{name}"));
            poll(Load::Acquire(scope), &format!("LoadAcquire{name}"));
            store(Store::Relaxed(scope), &format!("StoreRelaxed{name}"));
            store(Store::Release(scope), &format!("StoreRelease{name}"));
            let writer = format!("StoreWeak, Fence{name}, StoreVolatile");
            let reader = format!("LoadVolatile, Fence{name}, LoadWeak");
            pairs(Handover::Fence(scope), &writer, &reader);
            let writer = format!("StoreWeak, NoFence, StoreRelease{name}");
            let reader = format!("LoadAcquire{name}, NoFence, LoadWeak");
            pairs(Handover::ReleaseAcquire(scope), &writer, &reader);
        }
    }

    #[test]
    fn compiler_hoists_a_plain_load() {
        let ptx = super::super::LAB_PTX.to_str().unwrap();
        let (_, rest) = ptx.split_once(".entry pw_poll_compiled(").unwrap();
        let (body, _) = rest.split_once("\n}\n").unwrap();
        let (before, _) = body.split_once("mul.lo.s64").unwrap();
        let (before, _) = before.rsplit_once("$L__").unwrap();
        assert_eq!([before, body].map(|text| text.matches("ld.global.u64").count()), [1, 1], "before the loop: {body}");
    }
}
