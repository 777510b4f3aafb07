//! Learning that a stream has come to a point, without touching it again.

use partywall_cuda::StreamRef;
use partywall_shm::timeline::Progress;

use super::streams::Work;
use crate::{
    backoff::Backoff,
    domain::{Domain, Look},
    error::Result,
};

/// What became of the work that something was to be done behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behind {
    /// It is done.
    Done,
    /// Nobody will know: the context is lost, or the connection ends.
    Unknown,
}

impl Domain {
    /// Has the service thread do `then` when everything that is on the stream now is done. The stream writes a private
    /// word behind it, for which the service thread looks, with pauses of up to 1 ms.
    ///
    /// `then` must not wait, as any [chore](crate::domain::Chores). `what` is for errors, after which it is not done:
    /// "giving back a permit behind a stream's work".
    pub(crate) fn behind(
        &self,
        stream: StreamRef<'_>,
        what: impl Fn() -> String,
        then: impl FnOnce(Behind) + Send + 'static,
    ) -> Result<()> {
        self.link().require_ours()?;
        let work = Work { domain: self, stream, what: &what };
        let word = work.run(|stream| {
            let (word, slab) = work.take_private()?;
            // If it is refused, the word may or may not be written, and is not used again.
            stream.enqueue_write_u64(slab.word(&word.place)?, word.target)?;
            Ok(word)
        })?;
        let (lost, mut backoff) = (self.health().lost(), Backoff::new());
        let mut then = Some((then, word));
        self.chores().add(backoff.next(), move |look| {
            let (_, word) = then.as_ref()?;
            let done = word.place.cell().progress(word.target) == Progress::Reached;
            if !done && lost.get().is_none() && look == Look::InTurn {
                return Some(backoff.next());
            }
            let (then, word) = then.take()?;
            if done {
                word.give_back();
            }
            then(if done { Behind::Done } else { Behind::Unknown });
            None
        });
        Ok(())
    }
}
