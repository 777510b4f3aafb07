//! Semaphores: at most so many at a time.

mod permit;

use std::sync::Arc;

use partywall_shm::semaphore::{self as shm, Held};

pub use self::permit::{Permit, Unreleased};
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::{Domain, LeaseGuard},
    error::{Error, InvalidArgument, Result},
    slots,
    wait::Wait,
};

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = shm::MAX_PERMITS;

/// A named number of permits: no more than so many are held at a time, by whatever processes.
///
/// A permit is for whatever its users agree on: a slice of a GPU's memory, a turn at a link, a seat at a table. Acquiring and
/// giving back are decided in shared memory, without the broker: about a tenth of a microsecond while a permit is free.
///
/// ```
/// use std::time::Duration;
///
/// # let directory = tempfile::tempdir()?;
/// # let socket = directory.path().join("sockets/doc.sock");
/// # let broker = partywall_broker::Broker::bind(partywall_broker::Config::new(&socket, "doc", partywall::VERSION))?;
/// # let stop = broker.stop_handle()?;
/// # let broker = std::thread::spawn(move || broker.run());
/// # let domain = partywall::Domain::options().socket(&socket).connect()?;
/// // Every process that uses the GPU for a large job opens the same two permits. `domain` is `Domain::connect()?`.
/// let jobs = domain.semaphore("gpu0/large-jobs", 2)?;
/// let permit = jobs.acquire(Duration::from_secs(10))?; // waits while two others have one
/// assert_eq!(jobs.available(), 1);
///
/// let second = jobs.try_acquire()?.expect("one is free");
/// assert!(jobs.try_acquire()?.is_none());
///
/// permit.release()?; // as dropping it does; `release_on(stream)` gives it back behind the work of a stream
/// assert_eq!(jobs.available(), 1);
/// # drop((second, jobs, domain));
/// # stop.stop();
/// # broker.join().expect("the broker does not panic")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
/// are acquired and given back as before, but waits end with [`Unreachable::Gone`](crate::error::Unreachable::Gone): nobody would bring back the permits of
/// the dead.
///
/// The semaphore goes with the last handle and the last permit. May be used from any thread.
#[derive(Debug)]
pub struct Semaphore {
    open: Arc<Open>,
    spin: AdaptiveSpin,
}

/// An open semaphore. Permits have it, too: a lease that goes back takes the permits along.
#[derive(Debug)]
struct Open {
    name: String,
    memory: Arc<shm::Semaphore>,
    /// `None` once this is dropped.
    keep: Option<Arc<LeaseGuard>>,
    domain: Domain,
}

impl Domain {
    /// Opens a semaphore with `maximum` permits. If there is none of this name it is made, with all of them free.
    ///
    /// # Errors
    /// [`Mismatch::Maximum`](crate::error::Mismatch::Maximum) if it has another number of them, [`InvalidArgument::Maximum`] unless it is 1 to [`MAX_PERMITS`];
    /// [`InvalidArgument::Name`], [`LimitReached::Broker`](crate::error::LimitReached::Broker); those of every call.
    pub fn semaphore(&self, name: &str, maximum: u32) -> Result<Semaphore> {
        if !(1..=MAX_PERMITS).contains(&maximum) {
            return Err(InvalidArgument::Maximum { name: name.to_owned(), asked: maximum }.into());
        }
        let (lease, fd) = self.open_semaphore(name, maximum)?;
        // Goes back if what follows fails.
        let keep = Some(Arc::new(self.keep(lease)));
        let mapped = shm::Semaphore::map(fd);
        let memory = mapped.map_err(|source| Error::System { what: format!("mapping semaphore {name:?}"), source })?;
        let open = Open { name: name.to_owned(), memory: Arc::new(memory), keep, domain: self.clone() };
        Ok(Semaphore { open: Arc::new(open), spin: AdaptiveSpin::on_memory() })
    }
}

impl Semaphore {
    /// Takes a permit, and waits for one. A waiter keeps its place in the queue until the wait is over.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Result};
    /// # fn acquire(domain: &Domain) -> Result<()> {
    /// let seats = domain.semaphore("encoder", 2)?; // two processes encode at a time
    /// let permit = seats.acquire(Duration::from_secs(60))?;
    /// // … encode …
    /// drop(permit); // also given back if this process is killed
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to wait; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn acquire<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Permit> {
        let Open { name, memory, domain, .. } = &*self.open;
        let what = || format!("cannot acquire a permit of semaphore {name:?}: none was given back");
        slots::take(&**memory, domain, &self.spin, wait.into(), what).map(|held| self.permit(held))
    }

    /// Takes a permit if one is free and nobody waits for it.
    ///
    /// # Errors
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn try_acquire(&self) -> Result<Option<Permit>> {
        let Open { memory, domain, .. } = &*self.open;
        Ok(slots::try_take(&**memory, domain)?.map(|held| self.permit(held)))
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
        self.open.memory.count()
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// The domain.
    pub fn domain(&self) -> &Domain {
        &self.open.domain
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
