//! The control memory of timelines as one connection has it: the slabs that are mapped, and where a GPU finds them.
//!
//! A slab is registered with CUDA before any stream of the connection can wait for a word in it: with the first call that
//! takes a stream, or, after that, when it is mapped. Behind a wait, a call on which the driver synchronises would hold
//! the caller up.
//!
//! | file | contains |
//! |---|---|
//! | this one | which slabs there are, and their registration |
//! | `slab` | a mapped slab, and the cells in it |
//! | `word` | a timeline's word, as a handle has it |
//! | `private` | words that no other process has |

mod private;
mod slab;
mod word;

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, OnceLock, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall_cuda::{Context, memop};
use partywall_os::lock::IgnorePoison;
use partywall_shm::timeline::{Slab, cell_offset};
use partywall_wire::OpenedTimeline;

use self::private::PrivateWords;
pub(crate) use self::{
    private::PrivateWord,
    slab::{CellPlace, MappedSlab},
    word::Word,
};
use crate::{
    error::{Error, LimitReached, Result, Unreachable},
    gpu::cuda_error,
};

/// The control memory of timelines.
#[derive(Debug, Default)]
pub(crate) struct TimelineMemory {
    slabs: RwLock<Slabs>,
    /// Held by the thread that registers, which may wait for the driver.
    registering: Mutex<()>,
    /// Words that handles have, for ending their waits when the broker is gone.
    open: Mutex<Vec<Weak<Word>>>,
    private: PrivateWords,
    /// This connection has no broker any more.
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

impl TimelineMemory {
    /// How many slabs are mapped, to be said when a timeline is opened.
    pub(crate) fn mapped(&self) -> u32 {
        // The broker has no more than `MAX_SLABS`.
        u32::try_from(self.slabs.read().ignore_poison().mapped.len()).unwrap_or(u32::MAX)
    }

    /// Takes in the word of a timeline that was opened while `known` slabs were mapped, with the slabs that came along.
    pub(crate) fn take_in(&self, opened: &OpenedTimeline, known: u32, fds: Vec<OwnedFd>) -> Result<Arc<Word>> {
        let (slab, context) = {
            let mut slabs = self.slabs.write().ignore_poison();
            for (number, fd) in (known as usize..).zip(fds) {
                // Another thread may have brought it meanwhile.
                if number == slabs.mapped.len() {
                    let slab =
                        Slab::map(fd).map_err(|source| Error::System { what: "mapping timelines".into(), source })?;
                    slabs.mapped.push(Arc::new(MappedSlab::new(slab)));
                }
            }
            let slab = slabs.mapped.get(opened.slab as usize).cloned();
            let missing = || Error::LimitReached(LimitReached::FileDescriptors("the memory of a timeline".into()));
            (slab.ok_or_else(missing)?, slabs.context.clone())
        };
        if let Some(context) = context {
            let _turn = self.registering.lock().ignore_poison();
            slab.register(&context)?;
        }
        let OpenedTimeline { slab: number, incarnation, cell, .. } = *opened;
        let outside = || Unreachable::protocol(format!("it gave cell {cell} of a slab"));
        let place = slab.place(cell).ok_or_else(outside)?;
        let word = Arc::new(Word::new(place, number, incarnation, self.gone.clone()));
        let mut open = self.open.lock().ignore_poison();
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

    /// Makes everything ready for streams of `context` to wait for words. To be called when [`slab`](Self::slab) finds
    /// nothing.
    pub(crate) fn prepare(&self, context: &Context) -> Result<()> {
        let _turn = self.registering.lock().ignore_poison();
        let known = self.slabs.read().ignore_poison().context.clone();
        let context = match known {
            Some(known) => known,
            None => {
                self.make_private(context, Some(PROBE))?;
                // A slab that is mapped from now on is registered then; one that was mapped before is in the list below.
                self.slabs.write().ignore_poison().context = Some(context.clone());
                context.clone()
            }
        };
        let mapped = self.slabs.read().ignore_poison().mapped.clone();
        mapped.iter().try_for_each(|slab| slab.register(&context))
    }

    /// Makes private words. With `probe`, tries on one of them whether streams write words and wait for them here.
    fn make_private(&self, context: &Context, probe: Option<Duration>) -> Result<()> {
        let system = |source| Error::System { what: "making words for streams to wait for".into(), source };
        let slab = MappedSlab::new(Slab::create().and_then(Slab::map).map_err(system)?);
        slab.register_checked(context, |registration| {
            let Some(limit) = probe else { return Ok(registration) };
            memop::probe_registered_word(registration, cell_offset(0), limit)
                .map_err(|error| cuda_error(PROBING)(error.into_refusal()))
        })?;
        self.private.add(slab);
        Ok(())
    }

    /// The slab with this number, if streams can use its words already.
    pub(crate) fn slab(&self, number: u32) -> Option<Arc<MappedSlab>> {
        let slabs = self.slabs.read().ignore_poison();
        slabs.mapped.get(number as usize).filter(|slab| slab.is_registered()).cloned()
    }

    /// Whether `CUDA_LAUNCH_BLOCKING` makes the driver wait for whatever is enqueued.
    pub(crate) fn launches_block(&self) -> bool {
        *self.launches_block.get_or_init(|| {
            std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| !value.is_empty() && value != "0")
        })
    }

    /// Takes a private word. To be called after [`prepare`](Self::prepare).
    pub(crate) fn take_private(&self) -> Result<PrivateWord> {
        loop {
            if let Some(word) = self.private.take() {
                return Ok(word);
            }
            let _turn = self.registering.lock().ignore_poison();
            let context = self.slabs.read().ignore_poison().context.clone();
            let unknown = || Error::Unreachable(Unreachable::Refused("no GPU has been told of any word".into()));
            let context = context.ok_or_else(unknown)?;
            if self.private.is_empty() {
                self.make_private(&context, None)?;
            }
        }
    }

    /// The slab in which streams find a private word.
    pub(crate) fn private_slab(&self, word: &PrivateWord) -> Option<Arc<MappedSlab>> {
        self.private.slab(word)
    }

    /// Whether a GPU has ever been told of a word.
    pub(crate) fn is_registered(&self) -> bool {
        self.slabs.read().ignore_poison().context.is_some()
    }

    /// Gives back what the driver has been given. It waits for what the process runs. No handle has a word any more.
    pub(crate) fn unregister(&self) {
        let slabs = std::mem::take(&mut *self.slabs.write().ignore_poison());
        self.private.unregister();
        drop(slabs);
    }

    /// This connection has no broker any more: waits of this process's hosts end.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// The cells of all words that handles have.
    pub(crate) fn places(&self) -> Vec<CellPlace> {
        self.open.lock().ignore_poison().iter().filter_map(Weak::upgrade).map(|word| word.place.clone()).collect()
    }
}

const PROBING: &str = "trying whether streams of this GPU wait for words";

/// How long that may take.
const PROBE: Duration = Duration::from_secs(10);
