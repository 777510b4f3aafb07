//! The observer: starts and kills the others, and reports what is left.

use super::{scenes::How, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let Some(gpu) = session.gpu_if_any()? else { return super::host::observe(session) };
    let domain = session.domain().clone();
    gpu.kernels()?;
    let waiter = session.partner();
    let obstacle = device::streams_cannot_wait(&gpu);
    let mut observer = Observer { session, domain, gpu, waiter };
    if let Some(why) = obstacle {
        let step = Step::new(
            "waits",
            "Waiting for processes that die",
            "Streams wait for timelines by stream memory operations. Without them no part of this lab works.",
        );
        observer.session.report(step.untried(BELIEFS, why))?;
    } else {
        for how in How::ALL {
            let step = scenes::server(&mut observer, how)?;
            observer.session.report(step)?;
        }
        for how in How::ALL {
            let step = scenes::client(observer.session, &observer.domain, Some(&observer.gpu), how)?;
            observer.session.report(step)?;
        }
        chain::run(&mut observer)?;
        // Last, because no name exists any more after it.
        scenes::broker(&mut observer)?;
    }
    observer.waiter.end();
    Ok(())
}

/// The state that every scene uses.
pub(super) struct Observer<'a> {
    pub(super) session: &'a mut Session,
    pub(super) domain: Domain,
    pub(super) gpu: Arc<Gpu>,
    pub(super) waiter: Peer,
}
