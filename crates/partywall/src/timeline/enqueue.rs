//! Operations that timelines enqueue on streams, and the addresses that kernels poll.

use std::sync::Arc;

use partywall_cuda::{AccessError, Context, CudaError, CurrentStream, StreamRef};
use partywall_shm::timeline::Progress;

use super::Timeline;
use crate::{
    completion::Fence,
    domain::{Domain, LeaseGuard, MappedSlab, PrivateWord, TrackWaits, Word},
    error::{DeviceFault, Error, InvalidArgument, Result, Unreachable},
    gpu::{Gpu, failed_call},
};

/// See [`Timeline::wait_on`].
pub(super) fn wait(timeline: &Timeline, stream: StreamRef<'_>, v: u64) -> Result<()> {
    let Timeline { at, domain, .. } = timeline;
    let Some((word, keep)) = begin(timeline, v)? else { return Ok(()) };
    let work = Work { domain, stream, what: &|| format!("waiting on a stream for timeline {:?}", at.name) };
    work.run(|stream| {
        let slab = work.ready(word.slab)?;
        let track = domain.stream_waits().track(stream.id()?);
        let mut waits = track.lock();
        work.mark_if_due(stream, &mut waits)?;
        // Noted before it is enqueued: if the enqueuing fails, the only cost is a lease that is kept too long.
        waits.wait(&keep, &word.cell, v);
        stream.enqueue_wait_u64(slab.word(&word.cell)?, v)?;
        word.note_wait(v);
        Ok(())
    })
}

/// Returns the word that a stream has to wait for, with its lease; `None` if `v` is already reached.
pub(super) fn begin(timeline: &Timeline, v: u64) -> Result<Option<(Arc<Word>, Arc<LeaseGuard>)>> {
    let Timeline { at, domain, .. } = timeline;
    domain.link().require_ours()?;
    at.check_value(v)?;
    let (word, keep) = at.now();
    match word.progress(v) {
        // Acquire: work that is enqueued from now on happens after the work that the value stands for.
        Progress::Reached => {
            word.note_wait(v);
            Ok(None)
        }
        Progress::Ended(ending) => Err(at.ended(&word, ending, v)),
        Progress::Pending | Progress::Announced if domain.timeline_memory().launches_block() => {
            Err(DeviceFault::LaunchBlocking { name: at.name.clone() }.into())
        }
        Progress::Pending | Progress::Announced => Ok(Some((word, keep))),
    }
}

/// See [`Timeline::device_ptr`].
pub(super) fn device_ptr(timeline: &Timeline, gpu: &Gpu) -> Result<u64> {
    let domain = &timeline.domain;
    domain.link().require_ours()?;
    domain.health().check()?;
    let (word, keep) = timeline.at.now();
    let slab = match domain.timeline_memory().slab(word.slab) {
        Some(slab) => slab,
        None => prepare(domain, gpu.context(), word.slab)?,
    };
    // A kernel may poll at any time, for any value.
    domain.stream_waits().keep_for_good(&keep);
    word.note_polled();
    Ok(slab.word(&word.cell)?.device_ptr())
}

impl Domain {
    /// Returns a fence that `stream` reaches once all work that is on it now is done. The stream then writes a private
    /// word.
    ///
    /// `what` is for errors: "giving a permit to a stream". Even after an error the stream may write the word, so that
    /// word is not used again.
    pub(crate) fn fence_on(&self, stream: StreamRef<'_>, what: impl Fn() -> String) -> Result<Fence> {
        self.link().require_ours()?;
        let work = Work { domain: self, stream, what: &what };
        work.run(|stream| {
            let (word, slab) = work.take_private()?;
            stream.enqueue_write_u64(slab.word(&word.cell)?, word.target)?;
            Ok(Fence::PrivateWord(word))
        })
    }
}

/// An operation to enqueue on a stream.
pub(super) struct Work<'a> {
    pub(super) domain: &'a Domain,
    pub(super) stream: StreamRef<'a>,
    /// For errors: "signalling timeline x on a stream".
    pub(super) what: &'a dyn Fn() -> String,
}

/// Why an operation could not be enqueued.
pub(super) enum NotEnqueued {
    /// The driver or the stream refuses it.
    Access(AccessError),
    Error(Error),
}

impl Work<'_> {
    /// Enqueues the operation, with the stream's context current.
    ///
    /// A wait or a signal costs three driver calls besides its own. No answer can be cached:
    /// - whether the stream's context is current on this thread: other code of the process may change it at any time.
    ///   If it is not current, two more calls change it and change it back;
    /// - whether the stream is being captured: the driver would silently put the operation into the graph;
    /// - which stream it is, for callers of [`CurrentStream::id`]: the driver reuses the handle of a destroyed stream.
    pub(super) fn run<T>(&self, enqueue: impl FnOnce(&CurrentStream<'_>) -> Result<T, NotEnqueued>) -> Result<T> {
        self.domain.health().check()?;
        let run = || {
            let stream = self.stream.current()?;
            if stream.is_capturing()? {
                return Err(AccessError::Capturing.into());
            }
            enqueue(&stream)
        };
        run().map_err(|refusal| self.error(refusal))
    }

    /// Returns the error of a refused operation.
    pub(super) fn error(&self, refusal: NotEnqueued) -> Error {
        match refusal {
            NotEnqueued::Error(error) => error,
            NotEnqueued::Access(AccessError::Driver(source)) => {
                self.note(&source);
                failed_call(&(self.what)(), source)
            }
            NotEnqueued::Access(AccessError::Capturing) => {
                Error::DeviceFault(DeviceFault::Captured { what: (self.what)() })
            }
            NotEnqueued::Access(other @ (AccessError::NotCapturing | AccessError::OtherGraph)) => {
                InvalidArgument::Graph { what: (self.what)(), why: other.to_string() }.into()
            }
            NotEnqueued::Access(other) => InvalidArgument::range((self.what)(), other.to_string()),
        }
    }

    /// Makes the stream write a private word behind its waits, if it has waited often since it last wrote one.
    pub(super) fn mark_if_due(&self, stream: &CurrentStream<'_>, waits: &mut TrackWaits) -> Result<(), NotEnqueued> {
        if waits.need_a_mark() {
            let mark = match waits.take_mark() {
                Some(mark) => mark,
                None => self.domain.timeline_memory().take_private()?,
            };
            stream.enqueue_write_u64(self.private(&mark)?.word(&mark.cell)?, mark.target)?;
            waits.mark(&mark.cell, mark.target);
            waits.keep_mark(mark.next());
        }
        Ok(())
    }

    /// Returns the slab with this number, after making its words usable on the stream.
    pub(super) fn ready(&self, slab: u32) -> Result<Arc<MappedSlab>> {
        match self.domain.timeline_memory().slab(slab) {
            Some(slab) => Ok(slab),
            None => prepare(self.domain, self.stream.context(), slab),
        }
    }

    /// Makes private words usable on the stream.
    pub(super) fn prepare_private(&self) -> Result<()> {
        let memory = self.domain.timeline_memory();
        if memory.is_registered() { Ok(()) } else { memory.prepare(self.stream.context()) }
    }

    /// Returns a private word that can be used on the stream, and its slab.
    pub(super) fn take_private(&self) -> Result<(PrivateWord, Arc<MappedSlab>)> {
        self.prepare_private()?;
        let word = self.domain.timeline_memory().take_private()?;
        let slab = self.private(&word)?;
        Ok((word, slab))
    }

    fn private(&self, word: &PrivateWord) -> Result<Arc<MappedSlab>> {
        self.domain.timeline_memory().private_slab(word).ok_or_else(unknown_word)
    }

    /// Notes that a driver call has failed, which may mean that the context is lost.
    fn note(&self, error: &CudaError) {
        if error.is_sticky()
            && let Ok(gpu) = self.stream.context().device().uuid()
        {
            self.domain.health().note(gpu, error);
        }
    }
}

impl From<AccessError> for NotEnqueued {
    fn from(error: AccessError) -> Self {
        Self::Access(error)
    }
}

impl From<CudaError> for NotEnqueued {
    fn from(error: CudaError) -> Self {
        Self::Access(error.into())
    }
}

impl From<Error> for NotEnqueued {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Prepares everything that the driver might block on once a stream waits.
fn prepare(domain: &Domain, context: &Context, slab: u32) -> Result<Arc<MappedSlab>> {
    domain.timeline_memory().prepare(context)?;
    domain.timeline_memory().slab(slab).ok_or_else(unknown_word)
}

fn unknown_word() -> Error {
    Unreachable::protocol("it gave a timeline that is nowhere")
}
