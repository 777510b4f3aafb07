//! The control memory of timelines in one connection: the mapped slabs, and their registration with GPUs.
//!
//! A process maps the slabs of its own user's timelines, and the slab of each shared timeline that it opens. A slab
//! that streams can use stays mapped until the connection ends, because they may wait for its words. Any other is
//! unmapped, some time after its last word was dropped.
//!
//! A slab is registered with CUDA before any stream of the connection can wait for a word in it: with the first call
//! that takes a stream, or when a later slab is mapped. Behind a wait, a call that makes the driver synchronise would
//! block the caller.
//!
//! | file | contains |
//! |---|---|
//! | this one | the slabs and their registration |
//! | `slab` | a mapped slab, and the cells in it |
//! | `word` | a timeline's word, as used by a handle |
//! | `private` | words that no other process uses |

mod private;
mod slab;
mod word;

use std::{
    collections::BTreeMap,
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
    slab::{CellRef, MappedSlab},
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
    /// Held by the thread that registers memory, which may wait for the driver.
    registering: Mutex<()>,
    /// The words of all handles, so that their waits can be ended when the broker is gone.
    open: Mutex<Vec<Weak<Word>>>,
    private: PrivateWords,
    /// The word that nodes of graphs use in launches that give them no value. It is never given back.
    idle: OnceLock<PrivateWord>,
    /// This connection has no broker any more.
    gone: Arc<AtomicBool>,
    launches_block: OnceLock<bool>,
}

#[derive(Debug, Default)]
struct Slabs {
    /// The slabs, by number.
    mapped: BTreeMap<u32, Arc<MappedSlab>>,
    /// The number of slabs at which unused ones are looked for next.
    limit: usize,
    /// The context that registers them, for all contexts of the process; `None` before the first call with a stream.
    context: Option<Context>,
}

impl TimelineMemory {
    /// Maps the slab that came with an opened timeline, unless it is mapped, and returns the timeline's word.
    pub(crate) fn take_in(&self, opened: &OpenedTimeline, fd: Option<OwnedFd>) -> Result<Arc<Word>> {
        let (slab, context) = {
            let mut slabs = self.slabs.write().ignore_poison();
            let slab = match (slabs.mapped.get(&opened.slab), fd) {
                (Some(slab), _) => slab.clone(),
                (None, Some(fd)) => {
                    let slab = Slab::map(fd).map_err(|source| Error::io("mapping timelines", source))?;
                    let slab = Arc::new(MappedSlab::new(slab));
                    slabs.insert(opened.slab, slab.clone());
                    slab
                }
                (None, None) => {
                    return Err(LimitReached::FileDescriptors("the memory of a timeline".into()).into());
                }
            };
            (slab, slabs.context.clone())
        };
        if let Some(context) = context {
            let _turn = self.registering.lock().ignore_poison();
            slab.register(&context)?;
        }
        let OpenedTimeline { slab: number, incarnation, cell, .. } = *opened;
        let outside = || Unreachable::protocol(format!("it gave cell {cell} of a slab"));
        let cell = slab.cell(cell).ok_or_else(outside)?;
        let word = Arc::new(Word::new(cell, number, incarnation, self.gone.clone()));
        let mut open = self.open.lock().ignore_poison();
        if open.len() == open.capacity() {
            // Only when the list would grow, because with thousands of timelines checking all words at each open would
            // take far longer than the open.
            open.retain(|word| word.strong_count() > 0);
            let kept = open.len();
            open.reserve(kept + 1);
        }
        open.push(Arc::downgrade(&word));
        Ok(word)
    }

    /// Prepares waits of streams of `context` for words. Call this when [`slab`](Self::slab) returns `None`.
    pub(crate) fn prepare(&self, context: &Context) -> Result<()> {
        let _turn = self.registering.lock().ignore_poison();
        let known = self.slabs.read().ignore_poison().context.clone();
        let context = match known {
            Some(known) => known,
            None => {
                self.make_private(context, Some(PROBE))?;
                // A slab that is mapped later is registered when it is mapped; the list below contains all earlier
                // ones.
                self.slabs.write().ignore_poison().context = Some(context.clone());
                context.clone()
            }
        };
        let mapped = self.slabs.read().ignore_poison().mapped.clone();
        mapped.values().try_for_each(|slab| slab.register(&context))
    }

    /// Creates private words. With `probe`, checks with one of them whether streams of this GPU can write words and
    /// wait for them.
    fn make_private(&self, context: &Context, probe: Option<Duration>) -> Result<()> {
        let system = |source| Error::io("creating words for streams to wait for", source);
        let slab = MappedSlab::new(Slab::create().and_then(Slab::map).map_err(system)?);
        slab.register_checked(context, |registration| {
            let Some(limit) = probe else { return Ok(registration) };
            memop::probe_registered_word(registration, cell_offset(0), limit)
                .map_err(|error| cuda_error(PROBING)(error.into_refusal()))
        })?;
        self.private.add(slab);
        Ok(())
    }

    /// Returns the slab with this number, if streams can use its words already.
    pub(crate) fn slab(&self, number: u32) -> Option<Arc<MappedSlab>> {
        let slabs = self.slabs.read().ignore_poison();
        slabs.mapped.get(&number).filter(|slab| slab.is_registered()).cloned()
    }

    /// Returns whether `CUDA_LAUNCH_BLOCKING` makes the driver wait for all enqueued work.
    pub(crate) fn launches_block(&self) -> bool {
        *self.launches_block.get_or_init(|| {
            std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|value| !value.is_empty() && value != "0")
        })
    }

    /// Takes a private word. Call [`prepare`](Self::prepare) first.
    pub(crate) fn take_private(&self) -> Result<PrivateWord> {
        loop {
            if let Some(word) = self.private.take() {
                return Ok(word);
            }
            let _turn = self.registering.lock().ignore_poison();
            let context = self.slabs.read().ignore_poison().context.clone();
            let unknown = || Error::Unreachable(Unreachable::Refused("no word is registered with a GPU".into()));
            let context = context.ok_or_else(unknown)?;
            if self.private.is_empty() {
                self.make_private(&context, None)?;
            }
        }
    }

    /// Returns the word of idle nodes of graphs, and its slab. Call [`prepare`](Self::prepare) first.
    pub(crate) fn idle(&self) -> Result<(CellRef, Arc<MappedSlab>)> {
        if self.idle.get().is_none()
            && let Err(unused) = self.idle.set(self.take_private()?)
        {
            unused.give_back();
        }
        let known = self.idle.get().and_then(|word| Some((word.cell.clone(), self.private_slab(word)?)));
        known.ok_or_else(|| Unreachable::Refused("no word is registered with a GPU".into()).into())
    }

    /// Returns the slab of a private word.
    pub(crate) fn private_slab(&self, word: &PrivateWord) -> Option<Arc<MappedSlab>> {
        self.private.slab(word)
    }

    /// Returns whether any word was ever registered with a GPU.
    pub(crate) fn is_registered(&self) -> bool {
        self.slabs.read().ignore_poison().context.is_some()
    }

    /// Unregisters all memory from the driver, which waits for running work of the process. No handle may use a word
    /// any more.
    pub(crate) fn unregister(&self) {
        let slabs = std::mem::take(&mut *self.slabs.write().ignore_poison());
        self.private.unregister();
        drop(slabs);
    }

    /// Records that the broker is gone, which ends the waits of this process's threads.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Returns the cells of all words of handles.
    pub(crate) fn cells(&self) -> Vec<CellRef> {
        self.open.lock().ignore_poison().iter().filter_map(Weak::upgrade).map(|word| word.cell.clone()).collect()
    }
}

impl Slabs {
    fn insert(&mut self, number: u32, slab: Arc<MappedSlab>) {
        if self.mapped.len() >= self.limit {
            self.mapped.retain(|_, slab| !slab.is_unused());
            // So that the check of all slabs is paid for by as many new ones.
            self.limit = (2 * self.mapped.len()).max(MIN_SLABS);
        }
        self.mapped.insert(number, slab);
    }
}

/// Fewer slabs are not worth a check.
const MIN_SLABS: usize = 16;

const PROBING: &str = "trying whether streams of this GPU wait for words";

/// How long the probe may take.
const PROBE: Duration = Duration::from_secs(10);
