//! The observer (the role `witness`): starts and ends the others, and says what is left.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let domain = session.domain().clone();
    let gpu = domain.gpu(session.gpu().uuid())?;
    gpu.kernels()?;
    let waiter = session.partner();
    let obstacle = device::streams_cannot_wait(&gpu);
    let mut observer = Observer { session, domain, gpu, waiter };
    if let Some(why) = obstacle {
        let step = Step::new(
            "waits",
            "Waiting for those who die",
            "Timelines order streams by words of memory that these wait for. Nothing of this lab works without.",
        );
        let step = CLAIMS.iter().fold(step, |step, claim| step.leaves_open(*claim));
        observer.session.tell(step.untried(None, why))?;
    } else {
        scenes::server(&mut observer)?;
        scenes::client(&mut observer)?;
        chain::run(&mut observer)?;
        // Last, because nothing that has a name is left behind it.
        scenes::broker(&mut observer)?;
    }
    observer.waiter.end();
    Ok(())
}

/// What every scene needs.
pub(super) struct Observer<'a> {
    pub(super) session: &'a mut Session,
    pub(super) domain: Domain,
    pub(super) gpu: Arc<Gpu>,
    pub(super) waiter: Peer,
}

impl Observer<'_> {
    /// Starts a process that does one thing.
    pub(super) fn start(&self) -> Result<Peer, Failure> {
        self.session.spawn("actor")
    }
}
