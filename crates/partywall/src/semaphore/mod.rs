//! Semaphores: a limited number of permits shared by processes.

#[cfg(feature = "tokio")]
mod future;
mod permit;

use std::sync::Arc;

use partywall_shm::{semaphore as shm, slots::HeldSlot};

pub use self::permit::Permit;
use crate::{
    adaptive_spin::AdaptiveSpin,
    domain::{Domain, LeaseGuard},
    error::{Error, InvalidArgument, Result},
    slots,
    wait::Wait,
};

/// The most permits that a semaphore can have.
pub const MAX_PERMITS: u32 = shm::MAX_PERMITS;

/// A named number of permits. Processes of a domain hold at most that many permits at a time.
///
/// The users of a semaphore agree on what a permit stands for: a part of a GPU's memory, a turn at a link. Permits are
/// acquired and released in shared memory, without the broker: about a tenth of a microsecond while a permit is free.
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
/// Waiting threads are served in the order in which they came. A thread that was already acquiring when a waiter queued
/// itself may overtake that waiter once; threads that come later never do. Up to 1024 threads wait in this order;
/// further ones retry periodically, behind the others.
///
/// # Deaths
///
/// The permits of a killed process are free for others within a second of the proof of its death, and its place in the
/// queue passes to the next waiter. A stopped process keeps its permits. If it waits, its turn passes to the next
/// waiter after 1 s, and it queues again when it continues. When the broker is gone, permits are acquired and released
/// as before, but waits end with [`Unreachable::Gone`](crate::error::Unreachable::Gone), because no process would free
/// the permits of dead ones.
///
/// The semaphore ends with the last handle and the last permit. May be used from any thread.
#[derive(Debug)]
pub struct Semaphore {
    open: Arc<OpenSemaphore>,
    spin: AdaptiveSpin,
}

/// An open semaphore. Permits own it too, because giving the lease back frees them.
#[derive(Debug)]
struct OpenSemaphore {
    name: String,
    memory: Arc<shm::Semaphore>,
    /// `None` once this is dropped.
    keep: Option<Arc<LeaseGuard>>,
    domain: Domain,
}

impl Domain {
    /// Opens a semaphore with `maximum` permits. Creates it, with all permits free, if it does not exist.
    ///
    /// # Errors
    /// [`Mismatch::Maximum`](crate::error::Mismatch::Maximum) if it has another number of permits,
    /// [`InvalidArgument::Maximum`] unless it is 1 to [`MAX_PERMITS`]; [`InvalidArgument::Name`],
    /// [`LimitReached::Broker`](crate::error::LimitReached::Broker); those of every call.
    pub fn semaphore(&self, name: &str, maximum: u32) -> Result<Semaphore> {
        self.semaphore_options(name, maximum).open()
    }

    /// Begins to open a semaphore with options.
    pub fn semaphore_options(&self, name: &str, maximum: u32) -> SemaphoreOptions {
        SemaphoreOptions { domain: self.clone(), name: name.to_owned(), maximum, shared: false }
    }
}

/// Options to open a semaphore; see [`Domain::semaphore_options`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until open()"]
pub struct SemaphoreOptions {
    domain: Domain,
    name: String,
    maximum: u32,
    shared: bool,
}

impl SemaphoreOptions {
    /// Lets processes of other users open the semaphore, if this call creates it and the broker admits them. All that
    /// have it open can write its memory, so each of their users can break this semaphore for all; and nothing else.
    pub fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Opens it as [`Domain::semaphore`] does.
    ///
    /// # Errors
    /// As there.
    pub fn open(&self) -> Result<Semaphore> {
        let Self { domain, name, shared, .. } = self;
        let maximum = self.maximum;
        if !(1..=MAX_PERMITS).contains(&maximum) {
            return Err(InvalidArgument::Maximum { name: name.to_owned(), asked: maximum }.into());
        }
        let (lease, fd) = domain.open_semaphore(name, maximum, *shared)?;
        // Dropping it gives the lease back if the mapping fails.
        let keep = Some(Arc::new(domain.keep(lease)));
        let mapped = shm::Semaphore::map(fd);
        let memory = mapped.map_err(|source| Error::io(format!("mapping semaphore {name:?}"), source))?;
        let open = OpenSemaphore { name: name.to_owned(), memory: Arc::new(memory), keep, domain: domain.clone() };
        Ok(Semaphore { open: Arc::new(open), spin: AdaptiveSpin::on_memory() })
    }
}

impl Semaphore {
    /// Takes a permit, waiting for one if none is free. A waiter keeps its place in the queue until the wait is over.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, Result};
    /// # fn acquire(domain: &Domain) -> Result<()> {
    /// let seats = domain.semaphore("encoder", 2)?; // two processes encode at a time
    /// let permit = seats.acquire(Duration::from_secs(60))?;
    /// // … encode …
    /// drop(permit); // a killed process gives its permits back, too
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says. With the feature `tokio`, `acquire_async` blocks none.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; [`Unreachable::Gone`](crate::error::Unreachable::Gone) when it has to
    /// wait; [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn acquire<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Permit> {
        let OpenSemaphore { name, memory, domain, .. } = &*self.open;
        let what = || format!("cannot acquire a permit of semaphore {name:?}: none was given back");
        let live = || domain.link().require_broker();
        slots::take(&**memory, domain, &self.spin, wait.into(), live, what).map(|held| self.permit(held))
    }

    /// Takes a permit if one is free and no thread waits for it.
    ///
    /// # Errors
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn try_acquire(&self) -> Result<Option<Permit>> {
        let OpenSemaphore { memory, domain, .. } = &*self.open;
        Ok(slots::try_take(&**memory, domain)?.map(|held| self.permit(held)))
    }

    /// Returns how many permits are free at the moment.
    pub fn available(&self) -> u32 {
        self.open.memory.audit().free
    }

    /// Returns how many threads, of all processes, wait at the moment.
    pub fn waiting(&self) -> u32 {
        self.open.memory.audit().waiting
    }

    /// Returns the number of permits.
    pub fn maximum(&self) -> u32 {
        self.open.memory.count()
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// Returns the domain.
    pub fn domain(&self) -> &Domain {
        &self.open.domain
    }

    fn permit(&self, held: HeldSlot) -> Permit {
        Permit::new(self.open.clone(), held)
    }
}

impl Drop for OpenSemaphore {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            keep.release();
        }
    }
}
