//! Opening a version.

#[cfg(feature = "tokio")]
mod future;

use std::{
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use partywall_cuda::{CuResult, DeviceUuid};
use partywall_shm::Table;
use partywall_wire::{
    Access as WireAccess, Answer, Call, Kind as WireKind, LeaseId, LegacyHandle, MemberState, Named, Opened,
    Place as WirePlace, Table as WireTable,
};

use super::{Claim, Facts, Granted, Segment, named};
use crate::{
    domain::{Domain, answered, check_name, split_version, unexpected},
    error::{DeviceFault, Error, Gone, LimitReached, Mismatch, Result, Unreachable},
    info::{self, TableBytes},
    kind::{self, Attach},
    place::Access,
    wait::Wait,
};

/// How long to wait for the proof of a publisher's death, which takes the broker's settle time, usually 100 ms.
const PROOF: Duration = Duration::from_secs(1);

/// How long to wait for the check of a GPU, which starts CUDA in a process.
const CHECK: Duration = Duration::from_secs(3);

/// How often to ask whether the check still runs. If it finds a loss, the wait ends at once.
const ASK: Duration = Duration::from_millis(50);

impl Domain {
    /// Opens the latest version of `name`, or `NAME@V`, for reading. Waits for a version that does not exist yet.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::Domain;
    /// # let domain = Domain::connect()?;
    /// let weights = domain.open("weights", Duration::from_secs(60))?; // waits for the first commit
    /// let w: &[f32] = weights.tensor("w")?.as_slice()?; // host memory, read in place
    /// println!("{}@{}: {} elements", weights.name(), weights.version(), w.len());
    /// # Ok::<(), partywall::Error>(())
    /// ```
    ///
    /// Blocks the thread for as long as `wait` says, and up to 10 s more while the broker is stopped. With the feature
    /// `tokio`, `open_async` blocks none.
    ///
    /// # Errors
    /// [`NotFound::Name`](crate::error::NotFound::Name) if it does not exist and the timeout is zero, [`Error::Timeout`]
    /// if it is not committed in time; instead of both, for legacy memory that has existed, [`Gone::OwnerDied`] or
    /// [`Gone::Withdrawn`]; [`Mismatch::Object`] for a pool or topic;
    /// [`NotFound::Version`](crate::error::NotFound::Version) for a version that is gone; the kind's own errors of
    /// mapping it.
    pub fn open<'w>(&self, name: &str, wait: impl Into<Wait<'w>>) -> Result<Segment> {
        self.opener(name).open_within(wait.into())
    }

    /// Returns options to open a version for writing, or on another device than its own.
    pub fn opener(&self, name: &str) -> OpenOptions {
        OpenOptions::new(self.clone(), name)
    }

    /// Opens the latest version of `name`, or makes the caller its builder if the name does not exist. While another
    /// process builds it, waits for the commit; if that process dies or gives up, one waiter becomes the builder.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{DType, Domain, OpenOrBuild, Place, Result, Segment};
    /// # fn weights(domain: &Domain) -> Result<Segment> {
    /// match domain.open_or_build("weights", Duration::from_secs(60))? {
    ///     OpenOrBuild::Opened(segment) => Ok(segment),
    ///     // This process is the only one that loads; the others wait for its commit.
    ///     OpenOrBuild::Build(claim) => {
    ///         let mut build = claim.create(Place::Host).kept(true).tensor("w", DType::F32, &[1024]).allocate()?;
    ///         build.as_mut_slice::<f32>("w")?.fill(0.5);
    ///         build.commit() // kept: the name stays when this process ends
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`]; the kind's own errors of mapping it.
    pub fn open_or_build<'w>(&self, name: &str, wait: impl Into<Wait<'w>>) -> Result<OpenOrBuild> {
        let link = self.link();
        let checked = check_name(name)?;
        let call = || Call::OpenOrBuild { name: checked.clone() };
        let waiting = wait.into().begin();
        match link.call_waiting(call, &waiting)? {
            Some((Answer::Build { claim }, _)) => Ok(OpenOrBuild::Build(Claim::new(self.clone(), name, claim))),
            Some((Answer::Opened(opened), fds)) => {
                OpenOptions::new(self.clone(), name).attach_segment(opened, fds).map(OpenOrBuild::Opened)
            }
            Some((other, _)) => Err(unexpected(&other)),
            None => Err(waiting.error(format!("cannot open {name:?}: its builder did not commit it"))),
        }
    }
}

/// Options to open a version; see [`Domain::opener`].
#[derive(Debug, Clone)]
#[must_use = "options do nothing until open()"]
pub struct OpenOptions {
    domain: Domain,
    name: String,
    version: Option<u64>,
    timeout: Duration,
    write: bool,
    device: Option<DeviceUuid>,
    allow_peer: bool,
    access: Option<Access>,
    reserve: Option<u64>,
}

impl OpenOptions {
    pub(crate) fn new(domain: Domain, name: &str) -> Self {
        let name = name.to_owned();
        Self {
            domain,
            name,
            version: None,
            timeout: Duration::ZERO,
            write: false,
            device: None,
            allow_peer: false,
            access: None,
            reserve: None,
        }
    }

    /// Opens this version instead of the latest. `NAME@V` means the same.
    pub fn version(mut self, version: u64) -> Self {
        self.version = Some(version);
        self
    }

    /// Sets how long to wait for a name or version that does not exist yet. By default [`open`](Self::open) does not
    /// wait.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Opens the version for reading and writing, which must be `mutable`.
    pub fn read_write(mut self) -> Self {
        self.write = true;
        self
    }

    /// Sets the GPU on which this process uses the memory. The default is the GPU that has the memory, or the first GPU
    /// that this process sees if that one is hidden.
    pub fn device(mut self, device: DeviceUuid) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets whether memory of another GPU than the reader's may be mapped. Every access then crosses the link between
    /// them.
    pub fn allow_peer(mut self, allow: bool) -> Self {
        self.allow_peer = allow;
        self
    }

    /// Sets what has access to memory at [`Place::Pinned`](crate::Place::Pinned) from the start; other memory ignores
    /// it. By default the GPU if [`device`](Self::device) names one, else the CPU. The other gets access on first use,
    /// in place: running work is not disturbed.
    ///
    /// A GPU that is not named is the one that this domain opened first, else the one whose context is current on the
    /// calling thread, else the first; every GPU reaches such memory without [`allow_peer`](Self::allow_peer).
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets how many bytes the version may grow to in this process, if that is less than the committer has reserved.
    /// The present length always has room.
    pub fn reserve(mut self, bytes: u64) -> Self {
        self.reserve = Some(bytes);
        self
    }

    /// Opens the version.
    ///
    /// # Errors
    /// - [`NotFound::Name`](crate::error::NotFound::Name) without a timeout, [`Error::Timeout`] with one;
    ///   [`NotFound::Version`](crate::error::NotFound::Version);
    /// - [`Mismatch::Object`] for a pool or topic; [`Denied::ReadOnly`](crate::error::Denied::ReadOnly);
    /// - [`InvalidData::Table`](crate::error::InvalidData::Table) if the table is damaged;
    /// - [`DeviceFault::Remote`], [`DeviceFault::DeviceLost`]; those of mapping the memory.
    pub fn open(&self) -> Result<Segment> {
        let _span = tracing::trace_span!("open", name = self.name.as_str()).entered();
        self.open_within(self.timeout.into())
    }

    pub(crate) fn open_within(&self, wait: Wait<'_>) -> Result<Segment> {
        let (name, version) = split_version(&self.name)?;
        let access = if self.write { WireAccess::Write } else { WireAccess::Read };
        let (answer, fds) = self.domain.ask_to_open(&name, self.version.or(version), access, wait)?;
        self.attach_segment(answered!(answer, Answer::Opened(opened) => opened)?, fds)
    }

    /// Maps a granted segment, and refuses a pool or topic. If that fails, gives the lease back.
    pub(crate) fn attach_segment(&self, opened: Opened, fds: Vec<OwnedFd>) -> Result<Segment> {
        let is = opened.facts.named();
        let wanted = Named::Segment;
        if is == wanted {
            return self.attach(opened, fds);
        }
        give_back(&self.domain, opened.lease);
        Err(Mismatch::Object { name: opened.name.into(), is, wanted }.into())
    }

    /// Maps a granted segment, pool or topic. If that fails, gives the lease back.
    pub(crate) fn attach(&self, opened: Opened, fds: Vec<OwnedFd>) -> Result<Segment> {
        let lease = opened.lease;
        let name = opened.name.clone();
        let version = opened.version;
        let place = opened.facts.place;
        let is_legacy = opened.facts.kind == WireKind::Legacy;
        let mapped = self.map(opened, fds).map_err(|error| match error {
            Error::DeviceFault(DeviceFault::Cuda { ref source, .. }) if is_legacy && is_void(source.code) => {
                self.reason(&name, version, lease).unwrap_or(error)
            }
            Error::DeviceFault(DeviceFault::Cuda { .. }) if place.needs_driver() && !is_legacy => {
                self.loss(place, &name, version, lease).unwrap_or(error)
            }
            error => error,
        });
        mapped.inspect_err(|_| give_back(&self.domain, lease))
    }

    /// Returns why the driver cannot open published memory whose publisher may just have ended or dropped it. Waits
    /// until the broker knows. `None` if the publisher seems to be alive.
    fn reason(&self, name: &str, version: u64, lease: LeaseId) -> Option<Error> {
        let waiting = Wait::from(PROOF).begin();
        let answer = self.domain.link().call_waiting(|| Call::AwaitWithdrawal { lease }, &waiting);
        if matches!(answer, Ok(Some((Answer::Withdrawn { .. }, _)))) {
            return self.domain.ask_to_open(name, Some(version), WireAccess::Read, Duration::ZERO.into()).err();
        }
        let pid = self.domain.inspect(&format!("{name}@{version}")).ok()?.version.committer;
        let publisher = self.domain.members().ok()?.into_iter().find(|member| member.pid == pid)?;
        let gone = publisher.state != MemberState::Alive;
        gone.then(|| Error::Gone(Gone::OwnerDied { name: name.to_owned(), pid, ago: Duration::ZERO }))
    }

    /// Returns the error that a version is lost with the memory of its place, if the broker finds that while this
    /// waits.
    fn loss(&self, place: WirePlace, name: &str, version: u64, lease: LeaseId) -> Option<Error> {
        let link = self.domain.link();
        let until = Instant::now() + CHECK;
        loop {
            let runs = matches!(link.call(Call::CheckMemory { place }).ok()?, Answer::MemoryCheck { runs: true });
            let waiting = Wait::from(if runs { ASK } else { Duration::ZERO }).begin();
            if link.call_waiting(|| Call::AwaitWithdrawal { lease }, &waiting).ok()?.is_some() {
                let again = self.domain.ask_to_open(name, Some(version), WireAccess::Read, Duration::ZERO.into());
                // It may have been withdrawn for another reason.
                return again.err().filter(|error| matches!(error, Error::DeviceFault(DeviceFault::DeviceLost { .. })));
            }
            if !runs || Instant::now() >= until {
                return None;
            }
        }
    }

    fn map(&self, mut opened: Opened, fds: Vec<OwnedFd>) -> Result<Segment> {
        let ReceivedMemory { table, fds, handles, control } = ReceivedMemory::sort(&mut opened, fds)?;
        let Opened { lease, name, version, facts: chosen, uid, chunks, growths, .. } = opened;
        let fd_numbers = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let kind = kind::by_wire(chosen.kind)?;
        let reserved = chosen.reserved;
        let memory = kind.attach(Attach {
            name: &name,
            place: chosen.place.into(),
            chunks: chunks.iter().copied().zip(fds).collect(),
            handles: chunks.iter().copied().zip(handles).collect(),
            mutable: chosen.mutable,
            // Memory that may grow must not have a reservation of 0.
            reserve: self.reserve.map_or(reserved, |reserve| reserve.clamp(reserved.min(1), reserved)),
            write: self.write,
            device: self.device,
            allow_peer: self.allow_peer,
            access: self.access.unwrap_or(if self.device.is_some() { Access::Gpu } else { Access::Cpu }),
            // By the broker's number: in a user namespace this process has another number for its user.
            is_own: uid == self.domain.uid(),
            gpus: self.domain.gpus()?,
        });
        let memory = memory.map_err(|e| named(e, &name))?;
        let facts = Facts { name: name.into(), version, chosen, uid, writable: self.write, fd_numbers };
        let domain = self.domain.clone();
        Ok(Granted { domain, lease, kind, memory, facts, chunks, table, growths, control }.into())
    }
}

/// The memory of a granted version, sorted by use.
pub(crate) struct ReceivedMemory {
    pub(crate) table: Table<TableBytes>,
    /// One for each chunk, unless there are handles.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) handles: Vec<LegacyHandle>,
    /// The control memory of a pool, then of its topic or queue.
    pub(crate) control: Vec<OwnedFd>,
}

impl ReceivedMemory {
    /// Sorts the file descriptors that came with an answer, and takes table and handles out of the answer.
    pub(crate) fn sort(opened: &mut Opened, mut fds: Vec<OwnedFd>) -> Result<Self> {
        let Opened { name, facts, chunks, .. } = &*opened;
        let handles = opened.handles.len();
        if handles > 0 && handles != chunks.len() {
            return Err(
                Unreachable::Protocol(format!("{name:?} has {} chunks, but {handles} handles", chunks.len())).into()
            );
        }
        let chunk_fds = chunks.len() - handles;
        let control_fds = facts.control.map_or(0, |control| control.fds());
        if fds.len() < chunk_fds + control_fds {
            return Err(LimitReached::FileDescriptors(format!("the chunks of {name:?}")).into());
        }
        let control = fds.split_off(fds.len() - control_fds);
        let ranges = info::ranges(facts.reserved, chunks)?;
        let table = std::mem::replace(&mut opened.table, WireTable::Inline(Vec::new()));
        let table = info::table(&opened.name, table, fds.drain(chunk_fds..).next(), &ranges)?;
        Ok(Self { table, fds, handles: std::mem::take(&mut opened.handles), control })
    }
}

/// Gives back the lease of a version that could not be used.
pub(crate) fn give_back(domain: &Domain, lease: LeaseId) {
    if let Err(error) = domain.link().call(Call::Release { lease }) {
        tracing::debug!(%error, "a lease could not be given back");
    }
}

/// Returns whether the code means that a driver handle is invalid, as it is after its process died or freed the memory.
fn is_void(code: CuResult) -> bool {
    matches!(code, CuResult::INVALID_HANDLE | CuResult::MAP_FAILED | CuResult::INVALID_CONTEXT)
}

/// The outcome of [`Domain::open_or_build`].
#[derive(Debug)]
pub enum OpenOrBuild {
    /// Another process has committed the version.
    Opened(Segment),
    /// The caller must build the version; the other callers wait until the claim is fulfilled or dropped.
    Build(Claim),
}
