//! A connection to a domain.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    ops::Deref,
    path::PathBuf,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use partywall::{
    Access, Builder, Error, OpenOrBuild, Place, Put, Then, WhenSome,
    error::{Gone, NotFound},
    info::Lifetime,
    kind_name,
    mps::{self, MpsDaemon},
    near::did_you_mean,
};
use partywall_os::thread::spawn_scoped;
use pyo3::{exceptions::PyValueError, inspect::PyStaticExpr, intern, prelude::*, type_hint_identifier};

use crate::{
    arguments::{Name, Needs, named_place, place},
    build::{Build, Claim, Placed},
    errors::Raise,
    handle::Closable,
    heap::Heap,
    members::{Evicted, Member},
    owner, reaper,
    segment::Segment,
    source::{self, Source},
    value::value,
    wait,
};

/// Seconds that a suspension gives to releases that have begun before.
const FLUSH: f64 = 10.0;

/// A connection to a domain.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct Domain {
    inner: Closable<partywall::Domain>,
    #[pyo3(get)]
    socket: OsString,
}

/// A connection: a `partywall.Domain`.
pub(crate) struct Connection<'py>(Bound<'py, Domain>);

/// An existing segment, or the right to build it.
#[derive(IntoPyObject)]
pub(crate) enum Opened {
    Segment(Segment),
    Claim(Claim),
}

value! {
    /// A listed name.
    Listed, "partywall._domain", "Name", {
        name: String, version: u64, kind: &'static str, place: String, nbytes: u64, tensors: u64, mutable: bool,
        kept: bool, uid: u32, shared: bool,
    }
}

impl Domain {
    /// Returns the connection, unless it is closed.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<partywall::Domain> {
        self.inner.get(py)
    }

    /// Waits in slices, until the domain is closed.
    pub(crate) fn in_slices<R: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        attempt: impl Fn(Duration) -> partywall::Result<R> + Sync,
    ) -> PyResult<R> {
        self.inner.in_slices(py, timeout, attempt)
    }
}

impl Deref for Connection<'_> {
    type Target = Domain;

    fn deref(&self) -> &Domain {
        self.0.get()
    }
}

impl<'py> FromPyObject<'_, 'py> for Connection<'py> {
    type Error = PyErr;

    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("partywall._domain", "Domain");

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(object.getattr(intern!(object.py(), "_native"))?.cast_into()?))
    }
}

#[pymethods]
impl Domain {
    /// Makes ready that this process becomes a client of the domain's MPS daemon. Returns the variable to set and its
    /// value, or `None` if it is set.
    #[staticmethod]
    fn join_mps(
        py: Python<'_>,
        domain: Option<Name>,
        socket: Option<PathBuf>,
        start: bool,
        program: Option<PathBuf>,
    ) -> PyResult<Option<(&'static str, PathBuf)>> {
        let options = options(domain.map(|name| name.0.to_string()), socket);
        let join = move || {
            let daemon = MpsDaemon::of(&options.location()?);
            daemon.when_some(program, MpsDaemon::program).join(start)
        };
        // Starting a daemon takes a while.
        let pipes = wait::on_helper_thread(py, join)?.or_raise(py)?;
        Ok(pipes.map(|pipes| (mps::PIPES, pipes)))
    }

    /// Connects, to the domain's own socket unless another is given.
    #[staticmethod]
    #[pyo3(signature = (domain, socket, *, start, program, mps))]
    fn connect(
        py: Python<'_>,
        domain: Option<Name>,
        socket: Option<PathBuf>,
        start: bool,
        program: Option<PathBuf>,
        mps: bool,
    ) -> PyResult<Self> {
        let options = options(domain.map(|name| name.0.to_string()), socket).start(start).mps(mps);
        let options = options.when_some(program, partywall::DomainOptions::program);
        // Starting a broker takes a while.
        let inner = wait::on_helper_thread(py, move || options.connect())?.or_raise(py)?;
        let socket = inner.socket().as_os_str().to_owned();
        Ok(Self { inner: Closable::new("domain", inner), socket })
    }

    /// The number of this connection among the domain's members.
    #[getter]
    fn member(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.member())
    }

    /// Allocates the next version of a name. With `chunk_bytes`, allocates each chunk, which is no larger than that or
    /// one tensor, when a tensor of it is first taken.
    #[pyo3(signature = (
        name, device, access, tensors, metadata, *,
        mutable = false, reserve = None, kept = false, shared = false, if_absent = false, chunk_bytes = None,
        owner = None, until_unused = false,
    ))]
    fn create(
        &self,
        py: Python<'_>,
        name: Name,
        device: &str,
        access: Option<Needs>,
        tensors: Vec<Placed>,
        metadata: Vec<(String, String)>,
        mutable: bool,
        reserve: Option<u64>,
        kept: bool,
        shared: bool,
        if_absent: bool,
        chunk_bytes: Option<u64>,
        owner: Option<u64>,
        until_unused: bool,
    ) -> PyResult<Build> {
        let domain = self.get(py)?;
        Build::allocate(py, &name.0, device, access, tensors, metadata, |place| {
            let builder = domain.create(&name.0, place).mutable(mutable).kept(kept).shared(shared).if_absent(if_absent);
            builder
                .until_unused(until_unused)
                .when_some(chunk_bytes, |builder, bytes| builder.chunk_bytes(bytes).on_demand(true))
                .when_some(owner, Builder::owner)
                .when_some(reserve, Builder::reserve)
        })
    }

    /// Opens a version of a name. All arguments are positional: matching them by name takes longer than the rest of the
    /// call into Rust.
    fn open(
        &self,
        py: Python<'_>,
        name: Name,
        version: Option<u64>,
        timeout: Option<f64>,
        write: bool,
        device: Option<&str>,
        allow_peer: bool,
        access: Option<Needs>,
    ) -> PyResult<Segment> {
        let timeout = wait::timeout(timeout)?;
        let opener = self.get(py)?.opener(&name.0).allow_peer(allow_peer);
        let opener = opener.when_some(version, |opener, version| opener.version(version));
        let mut opener = opener.when_some(access, |opener, Needs(access)| opener.access(access));
        if write {
            opener = opener.read_write();
        }
        match named_place(py, device)? {
            Some(Place::Gpu(uuid)) => opener = opener.device(uuid),
            Some(Place::Host | Place::Pinned(_)) => {
                return Err(PyValueError::new_err("a segment is opened on a GPU, or where it is"));
            }
            None => {}
        }
        let segment = self.in_slices(py, timeout, |slice| opener.clone().timeout(slice).open())?;
        Ok(Segment::opened(segment))
    }

    /// Suspends all segments of this process.
    #[staticmethod]
    fn suspend(py: Python<'_>) -> PyResult<()> {
        // What was dropped before is gone then.
        reaper::flush(py, Some(FLUSH))?;
        let suspended = wait::on_helper_thread(py, owner::suspend);
        if suspended.is_err() {
            // A signal has ended the wait, but not the suspension. This comes after it.
            py.detach(owner::resume).or_raise(py)?;
        }
        suspended?.or_raise(py)
    }

    /// Resumes all segments of this process.
    #[staticmethod]
    fn resume(py: Python<'_>) -> PyResult<()> {
        py.detach(owner::resume).or_raise(py)
    }

    /// Opens the latest version of a name, or makes the caller its builder.
    fn open_or_build(&self, py: Python<'_>, name: Name, timeout: Option<f64>) -> PyResult<Opened> {
        let domain = self.get(py)?;
        let timeout = wait::timeout(timeout)?;
        Ok(match self.in_slices(py, timeout, |slice| domain.open_or_build(&name.0, slice))? {
            OpenOrBuild::Opened(segment) => Opened::Segment(Segment::opened(segment)),
            OpenOrBuild::Build(claim) => Opened::Claim(Claim::new(claim)),
        })
    }

    /// Creates a heap, from which an allocator of another library takes at most `limit` bytes of a GPU.
    fn heap(&self, py: Python<'_>, name: Name, limit: u64, device: &str) -> PyResult<Heap> {
        Heap::create(py, &self.get(py)?, &name.0, place(py, device)?, limit)
    }

    /// Publishes memory on a GPU in place: as kind `live` if it is in heaps, else as kind `legacy`.
    #[pyo3(signature = (
        name, tensors, metadata, *,
        mutable = false, kept = false, shared = false, if_absent = false, until_unused = false,
    ))]
    fn publish(
        &self,
        py: Python<'_>,
        name: Name,
        tensors: Vec<(String, Bound<'_, Source>)>,
        metadata: Vec<(String, String)>,
        mutable: bool,
        kept: bool,
        shared: bool,
        if_absent: bool,
        until_unused: bool,
    ) -> PyResult<Segment> {
        let domain = self.get(py)?;
        let publication = domain.publish(&name.0).mutable(mutable).kept(kept).until_unused(until_unused);
        let mut publication = publication.shared(shared).if_absent(if_absent);
        for (key, value) in &metadata {
            publication = publication.metadata(key, value);
        }
        let tensors: Vec<_> = tensors.iter().map(|(name, source)| (name.clone(), source.get().clone())).collect();
        // The commit would wait, too, but a signal ends this wait.
        source::prepare(py, &tensors)?;
        let segment = py.detach(|| source::publish(publication, tensors)?.commit());
        segment.or_raise(py).map(Segment::committed)
    }

    /// Puts a file, or a folder of shards. Ctrl-C ends the call, and leaves nothing behind.
    #[pyo3(signature = (
        path, name, device, access, *, mutable = false, kept = false, shared = false, if_absent = false, owner = None,
    ))]
    fn put_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        name: Name,
        device: &str,
        access: Option<Needs>,
        mutable: bool,
        kept: bool,
        shared: bool,
        if_absent: bool,
        owner: Option<u64>,
    ) -> PyResult<Segment> {
        let domain = self.get(py)?;
        let place = place(py, device)?;
        let cancel = AtomicBool::new(false);
        let (done, mut outcome) = mpsc::channel();
        let received = py.detach(|| {
            std::thread::scope(|scope| {
                let run = || {
                    let put = domain.put(&name.0, place).mutable(mutable).kept(kept).shared(shared);
                    let put = put.if_absent(if_absent).cancel(&cancel).when_some(owner, Put::owner);
                    let segment = put.path(&path).and_then(|segment| {
                        allow_gpu(&segment, access)?;
                        Ok(segment)
                    });
                    // After a signal the receiver is gone.
                    let _ = done.send(segment);
                };
                if let Err(source) = spawn_scoped(scope, "partywall-put", run) {
                    return Err(Error::starting("a thread that copies", source));
                }
                let received = Python::attach(|py| wait::receive(py, &mut outcome, Duration::MAX));
                cancel.store(true, Ordering::Relaxed);
                Ok(received)
            })
        });
        let received = received.or_raise(py)??;
        let segment = received.map_err(|_| PyValueError::new_err("the thread that copies has panicked"))?;
        segment.or_raise(py).map(Segment::committed)
    }

    /// Returns whether a name has a latest version; for `NAME@V`, whether that is the latest.
    fn exists(&self, py: Python<'_>, name: Name) -> PyResult<bool> {
        let domain = self.get(py)?;
        match py.detach(|| domain.inspect(&name.0)) {
            Ok(info) => Ok(info.is_latest),
            Err(
                Error::NotFound(NotFound::Name { .. } | NotFound::Version { .. })
                | Error::Gone(Gone::OwnerDied { .. } | Gone::Withdrawn { .. }),
            ) => Ok(false),
            Err(error) => Err(error).or_raise(py),
        }
    }

    /// For each version of a name the pids of the processes that have it open, in order.
    fn holders(&self, py: Python<'_>, name: Name) -> PyResult<BTreeMap<u64, Vec<u32>>> {
        let domain = self.get(py)?;
        let holders = py.detach(|| {
            let mut holders = BTreeMap::new();
            let info = domain.inspect(&name.0)?;
            for version in info.versions.iter().map(|version| version.version) {
                match domain.inspect(&format!("{}@{version}", info.name)) {
                    Ok(info) => {
                        // A process with several connections is several members.
                        let pids: BTreeSet<_> = info.holders.iter().map(|holder| holder.pid).collect();
                        holders.insert(version, pids.into_iter().collect());
                    }
                    // It has ended meanwhile.
                    Err(Error::NotFound(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(holders)
        });
        holders.or_raise(py)
    }

    /// Lists all names that have a latest version, in order.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<Listed>> {
        let domain = self.get(py)?;
        let names = py.detach(|| domain.names()).or_raise(py)?;
        let row = |info: partywall::info::NameInfo| {
            let latest = info.latest?;
            Some(Listed {
                name: info.name,
                version: latest.version,
                kind: kind_name(latest.kind),
                place: Place::from(latest.place).to_string(),
                nbytes: latest.bytes,
                tensors: latest.tensors,
                mutable: latest.mutable,
                kept: latest.lifetime == Lifetime::Kept,
                uid: latest.uid,
                shared: latest.shared,
            })
        };
        Ok(names.into_iter().filter_map(row).collect())
    }

    /// Removes a name, with a deadline for its readers if one is given. Returns the version that was the latest, and
    /// the bytes that stay until their holders drop them.
    fn remove(&self, py: Python<'_>, name: Name, deadline: Option<f64>, then: &str) -> PyResult<(u64, u64)> {
        let domain = self.get(py)?;
        let all = [Then::Wait, Then::Stale, Then::Evict];
        let then = all.into_iter().find(|known| known.name() == then).ok_or_else(|| {
            let meant = did_you_mean(all.map(Then::name), then);
            PyValueError::new_err(format!("then is \"wait\", \"stale\" or \"evict\", not {then:?}{meant}"))
        })?;
        let deadline = deadline.map(|seconds| {
            let bad = |_| PyValueError::new_err(format!("a deadline is a number of seconds from 0, not {seconds}"));
            Duration::try_from_secs_f64(seconds).map_err(bad)
        });
        let removed = match deadline.transpose()? {
            None => py.detach(|| domain.remove(&name.0)),
            Some(deadline) => py.detach(|| domain.withdraw(&name.0, deadline, then)),
        };
        let removed = removed.or_raise(py)?;
        Ok((removed.version, removed.bytes_kept))
    }

    /// Lists all members, in the order in which they joined.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<Member>> {
        let domain = self.get(py)?;
        let members = py.detach(|| domain.members()).or_raise(py)?;
        Ok(members.into_iter().map(Member::from).collect())
    }

    /// Evicts all members with a pid: they lose everything but the memory that they hold. Kills the process if
    /// requested.
    fn evict(&self, py: Python<'_>, pid: u32, kill: bool) -> PyResult<Vec<Evicted>> {
        let domain = self.get(py)?;
        let evicted = py.detach(|| domain.evict(pid, kill)).or_raise(py)?;
        Ok(evicted.into_iter().map(Evicted::from).collect())
    }

    /// Ends the broker.
    fn stop_broker(&self, py: Python<'_>, force: bool) -> PyResult<()> {
        let domain = self.get(py)?;
        py.detach(|| domain.stop_broker(force)).or_raise(py)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Whether `close` was called, or the broker is known to be gone for good. Asks nobody.
    #[getter]
    fn ended(&self) -> bool {
        self.inner.lock().as_ref().is_none_or(|inner| inner.is_gone())
    }

    /// Removes the names that go with the connection, and ends the connection once no build or segment of it is in use.
    /// Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let inner = self.inner.lock().take();
        py.detach(|| inner.map(end));
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.lock().take() {
            reaper::later(move || end(inner));
        }
    }
}

/// Gives a GPU access to a file that the CPU has put, if it is in pinned memory and was put for a GPU.
fn allow_gpu(segment: &partywall::Segment, access: Option<Needs>) -> partywall::Result<()> {
    let (Place::Pinned(_), Some(Needs(Access::Gpu | Access::Both))) = (segment.place(), access) else { return Ok(()) };
    let tensors = segment.tensors();
    tensors.iter().filter(|tensor| tensor.bytes() > 0).try_for_each(|tensor| tensor.device().map(drop))
}

/// Removes the names of a connection and ends it. Builds and segments may keep the connection longer.
fn end(domain: partywall::Domain) {
    // In a forked child the names belong to the parent. Without a broker there are none.
    _ = domain.withdraw_names();
}

/// Returns options to connect to a domain.
pub(crate) fn options(domain: Option<String>, socket: Option<PathBuf>) -> partywall::DomainOptions {
    let options = partywall::Domain::options().when_some(domain, partywall::DomainOptions::domain);
    options.when_some(socket, partywall::DomainOptions::socket)
}
