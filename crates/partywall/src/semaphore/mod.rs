//! Semaphores: at most so many at a time.

mod permit;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use partywall_shm::semaphore::{self as shm, Attempt, Held, Polled, Waiter};
use partywall_wire::Call;

pub use self::permit::{Permit, Unreleased};
use crate::{
    attention::Attention,
    domain::{Domain, Keep},
    error::{Error, Result},
};

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = shm::MAX_PERMITS;

/// A named number of permits: no more than so many are held at a time, by whatever processes.
///
/// A permit is for whatever its users agree on: a slice of a GPU's memory, a turn at a link, a seat at a table. Acquiring and
/// giving back are decided in shared memory, without the broker: about a tenth of a microsecond while a permit is free.
///
/// # Order
///
/// Who finds no permit waits, and those who wait are served in the order in which they came. Who tried at the very moment
/// when somebody began to wait, and had found nobody waiting yet, may still take a permit before him, once: as many overtake
/// a waiter as were acquiring at that moment, and nobody who came later. Up to 1024 threads can wait in that order; more
/// than that try again and again, behind the others.
///
/// # Deaths
///
/// The permits of a process that is killed are free for others within a second of its death's proof, and what it waited
/// for goes to the next. One that is stopped keeps what it holds; what it waits for goes to the next 1 s after its turn
/// has come, and it begins to wait anew when it goes on. When the broker is gone, permits
/// are acquired and given back as before, but waits end with [`Error::BrokerGone`]: nobody would bring back the permits of
/// the dead.
///
/// The semaphore goes with the last handle and the last permit. May be used from any thread.
#[derive(Debug)]
pub struct Semaphore {
    open: Arc<Open>,
    attention: Attention,
}

/// An open semaphore. Permits have it, too: a lease that goes back takes the permits along.
#[derive(Debug)]
struct Open {
    name: String,
    memory: Arc<shm::Semaphore>,
    /// `None` once this is dropped.
    keep: Option<Arc<Keep>>,
    domain: Domain,
}

impl Domain {
    /// Opens a semaphore with `maximum` permits. If there is none of this name it is made, with all of them free.
    ///
    /// # Errors
    /// [`Error::WrongMaximum`] if it has another number of them, [`Error::BadMaximum`] unless it is 1 to [`MAX_PERMITS`];
    /// [`Error::BadName`], [`Error::LimitReached`]; those of every call.
    pub fn semaphore(&self, name: &str, maximum: u32) -> Result<Semaphore> {
        if !(1..=MAX_PERMITS).contains(&maximum) {
            return Err(Error::BadMaximum { name: name.to_owned(), asked: maximum });
        }
        let (lease, fd) = self.open_semaphore(name, maximum)?;
        // Goes back if what follows fails.
        let keep = Some(Arc::new(self.keep(lease)));
        let mapped = shm::Semaphore::map(fd);
        let memory = mapped.map_err(|source| Error::System { what: format!("mapping semaphore {name:?}"), source })?;
        let open = Open { name: name.to_owned(), memory: Arc::new(memory), keep, domain: self.clone() };
        Ok(Semaphore { open: Arc::new(open), attention: Attention::new() })
    }
}

impl Semaphore {
    /// Takes a permit, and waits for one up to `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::BrokerGone`] when it has to wait; [`Error::Forked`].
    pub fn acquire(&self, timeout: Duration) -> Result<Permit> {
        self.acquire_unless(timeout, || false)?.ok_or_else(|| self.late(timeout))
    }

    /// As [`acquire`](Self::acquire), but gives up when `stop` says so: then it is `None`. While it waits `stop` is asked
    /// every 100 ms at least, and the place among those who wait is kept.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_unless(&self, timeout: Duration, mut stop: impl FnMut() -> bool) -> Result<Option<Permit>> {
        let Open { memory, domain, .. } = &*self.open;
        let link = domain.link();
        link.require_ours()?;
        if let Some(held) = memory.try_acquire(link.row()) {
            return Ok(Some(self.permit(held)));
        }
        let (start, mut stopped) = (Instant::now(), false);
        loop {
            match memory.acquire(link.row()) {
                Attempt::Held(held) => return Ok(Some(self.permit(held))),
                Attempt::Waiting(waiter) => {
                    let is_stopped = || {
                        stopped = stop();
                        stopped
                    };
                    if let Some(held) = self.wait(waiter, start, timeout, is_stopped)? {
                        return Ok(Some(self.permit(held)));
                    }
                }
                Attempt::Crowded => {
                    link.require_broker()?;
                    std::thread::sleep(CROWDED.min(timeout.saturating_sub(start.elapsed())));
                    stopped = stop();
                }
            }
            let is_late = start.elapsed() >= timeout;
            if is_late || stopped {
                memory.look_after_granted();
                return if stopped { Ok(None) } else { Err(self.late(timeout)) };
            }
        }
    }

    /// Takes a permit if one is free and nobody waits for it.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn try_acquire(&self) -> Result<Option<Permit>> {
        let link = self.open.domain.link();
        link.require_ours()?;
        let held = self.open.memory.try_acquire(link.row());
        if held.is_none() {
            self.open.memory.look_after_granted();
        }
        Ok(held.map(|held| self.permit(held)))
    }

    /// How many permits are free at the moment.
    pub fn available(&self) -> u32 {
        self.open.memory.audit().free
    }

    /// How many threads, of whatever processes, wait at the moment.
    pub fn waiting(&self) -> u32 {
        self.open.memory.audit().waiting
    }

    /// How many permits there are.
    pub fn maximum(&self) -> u32 {
        self.open.memory.maximum()
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        &self.open.domain
    }

    /// Waits for a turn until `timeout` after `start`. Nothing if the time is over, it is stopped, or the turn was lost.
    fn wait(
        &self,
        mut waiter: Waiter<'_>,
        start: Instant,
        timeout: Duration,
        mut is_stopped: impl FnMut() -> bool,
    ) -> Result<Option<Held>> {
        let mut now = self.attention.look(start, timeout, || !waiter.is_waiting());
        loop {
            match waiter.poll() {
                Polled::Held(held) => return Ok(Some(held)),
                Polled::Waiting => {}
                // This process was stopped for a while, or the broker took the permit back: then it knows why.
                Polled::Lost => return self.open.domain.link().call(Call::Ping).map(|_| None),
            }
            let left = timeout.saturating_sub(now.take().unwrap_or_else(Instant::now) - start);
            if left.is_zero() || is_stopped() {
                return Ok(waiter.cancel());
            }
            if let Err(gone) = self.open.domain.link().require_broker() {
                return waiter.cancel().map(Some).ok_or(gone);
            }
            waiter.sleep(left);
            self.open.memory.look_after_granted();
        }
    }

    fn late(&self, after: Duration) -> Error {
        Error::Timeout { what: format!("a permit of semaphore {:?}", self.open.name), after }
    }

    fn permit(&self, held: Held) -> Permit {
        Permit::new(self.open.clone(), held)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            keep.release();
        }
    }
}

/// How long to wait where there is no room among those who wait.
const CROWDED: Duration = Duration::from_millis(1);
