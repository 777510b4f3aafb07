//! The words of timelines as one connection has them: the slabs that it has mapped, and where a GPU finds them.
//!
//! A slab is registered with CUDA before any stream of the connection can wait for a word: with the first call that
//! takes a stream, or, after that, when it is mapped. Behind a wait, whatever the driver synchronises for would hold the
//! caller up.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use partywall_cuda::{Context, DeviceSlice, HostRegistration, memop};
use partywall_shm::timeline::{CELLS, Cell, Ending, MAX_VALUE, Progress, Slab, cell_offset};
use partywall_wire::OpenedTimeline;

use crate::{
    error::{Error, LimitReached, Result, Unreachable},
    gpu::cuda_error,
};

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Words {
    slabs: RwLock<Slabs>,
    /// Held by the one who registers, who may wait for the driver.
    registering: Mutex<()>,
    /// Words that somebody has, for ending their waits when the broker is gone.
    open: Mutex<Vec<Weak<Word>>>,
    private: Private,
    /// There is no broker for us any more.
    gone: Arc<AtomicBool>,
    launches_block: OnceLock<bool>,
}

#[derive(Debug, Default)]
struct Slabs {
    /// By their numbers.
    mapped: Vec<Arc<MappedSlab>>,
    /// The context that registers them, for all contexts of the process; `None` before the first call with a stream.
    context: Option<Context>,
}

/// A slab in this process.
#[derive(Debug)]
pub(crate) struct MappedSlab {
    slab: Slab,
    registration: OnceLock<HostRegistration>,
}

/// A cell, wherever it is needed. It keeps the memory mapped, and nothing else: any thread may drop it.
#[derive(Debug, Clone)]
pub(crate) struct CellPlace {
    slab: Slab,
    index: u32,
}

/// One incarnation of a timeline as one handle has it.
#[derive(Debug)]
pub(crate) struct Word {
    pub(crate) place: CellPlace,
    /// The number of its slab.
    pub(crate) slab: u32,
    pub(crate) incarnation: u32,
    /// The highest value that was waited for in any way.
    waited: AtomicU64,
    /// Kernels were told where it is, which wait for whatever they like.
    polled: AtomicBool,
    /// There is no broker for us any more, who would end the word if its writer died.
    gone: Arc<AtomicBool>,
}

/// Words that no other process has: for waits with a time limit, and for learning that a stream has come to a point.
///
/// The value of such a word only grows, too. A stream that still waits for what its last user wanted therefore goes on
/// with the next one's at the latest, and nobody has to know when it did.
#[derive(Debug, Default)]
struct Private {
    slabs: Mutex<Vec<Arc<MappedSlab>>>,
    free: Arc<Mutex<Vec<Free>>>,
}

#[derive(Debug)]
struct Free {
    slab: usize,
    index: u32,
}

/// A private word, for one use: `target` is stored in it, once. Any thread may drop it.
#[derive(Debug)]
pub(crate) struct PrivateWord {
    pub(crate) place: CellPlace,
    pub(crate) target: u64,
    slab: usize,
    free: Arc<Mutex<Vec<Free>>>,
}

impl Words {
    /// How many slabs are mapped, to be said when a timeline is opened.
    pub(crate) fn mapped(&self) -> u32 {
        // The broker has no more than `MAX_SLABS`.
        u32::try_from(self.read().mapped.len()).unwrap_or(u32::MAX)
    }

    /// Takes in the word of a timeline that was opened while `known` slabs were mapped, with the slabs that came along.
    pub(crate) fn take_in(&self, opened: &OpenedTimeline, known: u32, fds: Vec<OwnedFd>) -> Result<Arc<Word>> {
        let (slab, context) = {
            let mut slabs = self.slabs.write().unwrap_or_else(PoisonError::into_inner);
            for (number, fd) in (known as usize..).zip(fds) {
                // Another thread may have brought it meanwhile.
                if number == slabs.mapped.len() {
                    let slab =
                        Slab::map(fd).map_err(|source| Error::System { what: "mapping timelines".into(), source })?;
                    slabs.mapped.push(Arc::new(MappedSlab::new(slab)));
                }
            }
            let slab = slabs.mapped.get(opened.slab as usize).cloned();
            (
                slab.ok_or_else(|| {
                    Error::LimitReached(LimitReached::FileDescriptors("the memory of a timeline".into()))
                })?,
                slabs.context.clone(),
            )
        };
        if let Some(context) = context {
            let _turn = lock(&self.registering);
            slab.register(&context)?;
        }
        let place = slab.place(opened.cell);
        let place = place.ok_or_else(|| {
            Error::Unreachable(Unreachable::Protocol(format!("it gave cell {} of a slab", opened.cell)))
        })?;
        let OpenedTimeline { slab, incarnation, .. } = *opened;
        let waited = AtomicU64::new(0);
        let polled = AtomicBool::new(false);
        let gone = self.gone.clone();
        let word = Arc::new(Word { place, slab, incarnation, waited, polled, gone });
        let mut open = lock(&self.open);
        if open.len() == open.capacity() {
            // Only when the list would grow, and then by as many as there are: to look at all of them for each timeline
            // that is opened takes far longer than to open it, if a process has thousands.
            open.retain(|word| word.strong_count() > 0);
            let kept = open.len();
            open.reserve(kept + 1);
        }
        open.push(Arc::downgrade(&word));
        Ok(word)
    }

    /// Makes everything ready for streams of `context` to wait for words. To be called when [`Words::slab`] finds nothing.
    pub(crate) fn prepare(&self, context: &Context) -> Result<()> {
        let _turn = lock(&self.registering);
        let known = self.read().context.clone();
        let context = match known {
            Some(known) => known,
            None => {
                self.make_private(context, Some(PROBE))?;
                // Who maps a slab from now on registers it; who did before has it in the list below.
                self.slabs.write().unwrap_or_else(PoisonError::into_inner).context = Some(context.clone());
                context.clone()
            }
        };
        let mapped = self.read().mapped.clone();
        mapped.iter().try_for_each(|slab| slab.register(&context))
    }

    /// Makes private words. With `probe`, it is tried out on one whether streams write words and wait for them here.
    fn make_private(&self, context: &Context, probe: Option<Duration>) -> Result<()> {
        let system = |source| Error::System { what: "making words for streams to wait for".into(), source };
        let slab = MappedSlab::new(Slab::create().and_then(Slab::map).map_err(system)?);
        let mut registration = slab.registered(context)?;
        if let Some(limit) = probe {
            let probed = memop::probe_registered_word(registration, cell_offset(0), limit);
            registration = probed.map_err(|error| cuda_error(PROBING)(error.into_refusal()))?;
        }
        let _ = slab.registration.set(registration);
        let number = {
            let mut slabs = lock(&self.private.slabs);
            slabs.push(Arc::new(slab));
            slabs.len() - 1
        };
        lock(&self.private.free).extend((0..CELLS).map(|index| Free { slab: number, index }));
        Ok(())
    }

    /// The slab with this number, if streams can use its words already.
    pub(crate) fn slab(&self, number: u32) -> Option<Arc<MappedSlab>> {
        let slabs = self.read();
        slabs.mapped.get(number as usize).filter(|slab| slab.registration.get().is_some()).cloned()
    }

    /// Whether `CUDA_LAUNCH_BLOCKING` makes the driver wait for whatever is enqueued.
    pub(crate) fn launches_block(&self) -> bool {
        *self.launches_block.get_or_init(|| {
            std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| !value.is_empty() && value != "0")
        })
    }

    /// A private word. To be called after [`Words::prepare`].
    pub(crate) fn take_private(&self) -> Result<PrivateWord> {
        loop {
            let free = lock(&self.private.free).pop();
            if let Some(Free { slab, index }) = free {
                // What is free is in one of the slabs.
                let Some(place) = lock(&self.private.slabs).get(slab).and_then(|slab| slab.place(index)) else {
                    continue;
                };
                let target = place.cell().value() + 1;
                return Ok(PrivateWord { place, target, slab, free: self.private.free.clone() });
            }
            let _turn = lock(&self.registering);
            let context = self.read().context.clone();
            let context = context
                .ok_or_else(|| Error::Unreachable(Unreachable::Refused("no GPU has been told of any word".into())))?;
            if lock(&self.private.free).is_empty() {
                self.make_private(&context, None)?;
            }
        }
    }

    /// The slab in which streams find a private word.
    pub(crate) fn private_slab(&self, word: &PrivateWord) -> Option<Arc<MappedSlab>> {
        lock(&self.private.slabs).get(word.slab).cloned()
    }

    /// Whether a GPU has ever been told of a word.
    pub(crate) fn are_registered(&self) -> bool {
        self.read().context.is_some()
    }

    /// Gives back what the driver has been given. It waits for what the process runs. Nobody has a word any more.
    pub(crate) fn unregister(&self) {
        let slabs = std::mem::take(&mut *self.slabs.write().unwrap_or_else(PoisonError::into_inner));
        let private = std::mem::take(&mut *lock(&self.private.slabs));
        lock(&self.private.free).clear();
        drop((slabs, private));
    }

    /// There is no broker for us any more: our hosts' waits end.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// The cells of all words that somebody has.
    pub(crate) fn places(&self) -> Vec<CellPlace> {
        lock(&self.open).iter().filter_map(Weak::upgrade).map(|word| word.place.clone()).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Slabs> {
        self.slabs.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MappedSlab {
    fn new(slab: Slab) -> Self {
        Self { slab, registration: OnceLock::new() }
    }

    fn place(&self, index: u32) -> Option<CellPlace> {
        self.slab.cell(index).is_some().then(|| CellPlace { slab: self.slab.clone(), index })
    }

    fn register(&self, context: &Context) -> Result<()> {
        if self.registration.get().is_none() {
            // Registrations are made by turns.
            let _ = self.registration.set(self.registered(context)?);
        }
        Ok(())
    }

    fn registered(&self, context: &Context) -> Result<HostRegistration> {
        let registered = HostRegistration::shared(context, self.slab.memory().clone());
        registered.map_err(cuda_error("registering the words of timelines with the GPU"))
    }

    /// The word of a cell, as streams take it.
    ///
    /// # Errors
    /// Before [`Words::prepare`] no stream can have it.
    pub(crate) fn word(&self, place: &CellPlace) -> Result<DeviceSlice<'_>> {
        let offset = cell_offset(place.index) as u64;
        let word = self.registration.get().and_then(|all| all.slice(offset, size_of::<u64>() as u64).ok());
        word.ok_or_else(|| Error::Unreachable(Unreachable::Refused("a GPU was not told of this word".into())))
    }
}

impl CellPlace {
    pub(crate) fn cell(&self) -> &Cell {
        // Made by `MappedSlab::place` alone, and a slab has as many cells as it had.
        self.slab.cell(self.index).expect("a place is in its slab")
    }

    /// Its number in its slab.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Whether nobody knows yet if `v` will be reached.
    pub(crate) fn is_undecided(&self, v: u64) -> bool {
        matches!(self.cell().progress(v), Progress::Pending | Progress::Announced)
    }
}

impl PrivateWord {
    /// Whether its value has been stored.
    pub(crate) fn is_reached(&self) -> bool {
        self.place.cell().progress(self.target) == Progress::Reached
    }

    /// Stores its value, by the host, and gives it back.
    pub(crate) fn store(self) {
        // It is refused where the value is there already.
        let _ = self.place.cell().signal(self.target);
        self.give_back();
    }

    /// Gives it back when its value has been stored. What is not given back is never used again.
    pub(crate) fn give_back(self) {
        if self.target < MAX_VALUE {
            lock(&self.free).push(Free { slab: self.slab, index: self.place.index });
        }
    }

    /// The same word for the next use, by the same stream.
    pub(crate) fn next(self) -> Self {
        Self { target: self.target + 1, ..self }
    }
}

#[cfg(test)]
impl CellPlace {
    /// One that only this process has.
    fn of_tests() -> Self {
        Self { slab: Slab::create().and_then(Slab::map).expect("a memfd can be had"), index: 0 }
    }
}

#[cfg(test)]
impl PrivateWord {
    /// One that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        Self { place: CellPlace::of_tests(), target: 1, slab: 0, free: Arc::default() }
    }
}

#[cfg(test)]
impl Word {
    /// One that only hosts write.
    pub(crate) fn of_hosts() -> Self {
        let waited = AtomicU64::new(0);
        let polled = AtomicBool::new(false);
        Self { place: CellPlace::of_tests(), slab: 0, incarnation: 0, waited, polled, gone: Arc::default() }
    }
}

impl Word {
    pub(crate) fn cell(&self) -> &Cell {
        self.place.cell()
    }

    /// How far it is on the way to `v`.
    pub(crate) fn progress(&self, v: u64) -> Progress {
        match self.cell().progress(v) {
            Progress::Pending | Progress::Announced if self.gone.load(Ordering::Acquire) => {
                Progress::Ended(Ending::BrokerGone)
            }
            progress => progress,
        }
    }

    /// Why no further value will come, as far as we shall know.
    pub(crate) fn ending(&self) -> Option<Ending> {
        let gone = || self.gone.load(Ordering::Acquire).then_some(Ending::BrokerGone);
        self.cell().ending().or_else(gone)
    }

    /// Notes that `v` was waited for.
    pub(crate) fn note_wait(&self, v: u64) {
        self.waited.fetch_max(v, Ordering::AcqRel);
    }

    /// The highest value that was waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.load(Ordering::Acquire)
    }

    /// Notes that kernels are told where it is.
    pub(crate) fn note_polled(&self) {
        self.polled.store(true, Ordering::Release);
    }

    /// Whether kernels were told where it is.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.load(Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done behind these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const PROBING: &str = "trying whether streams of this GPU wait for words";

/// How long that may take.
const PROBE: Duration = Duration::from_secs(10);
