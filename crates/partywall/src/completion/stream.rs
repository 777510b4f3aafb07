//! Learning that a stream has come to a point, without touching it again.

use partywall_cuda::StreamRef;

use crate::{completion::Completion, domain::Domain, error::Result, timeline::Work};

impl Domain {
    /// Has `then` done when everything that is on the stream now is done. The stream writes a private word behind it, for
    /// which the service thread looks, with pauses of up to 1 ms, and whoever has it [look](crate::completion::Completions::look).
    ///
    /// `then` must not wait, as any [poll task](crate::domain::PollTasks). `what` is for errors, after which it is not done:
    /// "giving back a permit behind a stream's work".
    pub(crate) fn behind(
        &self,
        stream: StreamRef<'_>,
        what: impl Fn() -> String,
        then: impl FnOnce(Completion) + Send + 'static,
    ) -> Result<()> {
        self.link().require_ours()?;
        let work = Work { domain: self, stream, what: &what };
        let word = work.run(|stream| {
            let (word, slab) = work.take_private()?;
            // If it is refused, the word may or may not be written, and is not used again.
            stream.enqueue_write_u64(slab.word(&word.place)?, word.target)?;
            Ok(word)
        })?;
        self.completions().add(self.poll_tasks(), self.health().lost(), word, then);
        Ok(())
    }
}
