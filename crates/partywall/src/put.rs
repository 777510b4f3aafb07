//! From a model file to a name, in one step.

use std::{
    fmt,
    io::Read,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use partywall_cuda::DeviceUuid;
use partywall_shm::TableBuilder;
use partywall_wire::Named;

use crate::{
    domain::{self, Domain},
    error::{Denied, Error, NotFound, Result},
    files::{FileError, FileProblem, Plan, default_threads},
    gpu::{Gpu, cuda_error},
    place::Place,
    segment::{Build, Builder, Claim, CommitOptions, Segment, Tensor, commit_setters},
};

impl Domain {
    /// Puts a file, a folder of shards or a stream under `name`, in memory at `place`, as its next version.
    ///
    /// ```no_run
    /// # use partywall::{Domain, Place};
    /// let domain = Domain::connect()?;
    /// let segment = domain.put("llm", Place::Host).kept(true).path("model.safetensors".as_ref())?;
    /// # Ok::<(), partywall::Error>(())
    /// ```
    pub fn put(&self, name: &str, place: Place) -> Put<'_> {
        Put {
            domain: self.clone(),
            name: name.to_owned(),
            place,
            commit: CommitOptions::default(),
            threads: default_threads(),
            progress: &|_| (),
            cancel: &NEVER,
        }
    }
}

/// Options to put files, or the contents of a segment; see [`Domain::put`].
///
/// The version becomes visible once it is complete and the files have not changed meanwhile. After an error nothing is
/// left.
#[derive(Clone)]
#[must_use = "nothing is put until path(), stream(), plan() or segment()"]
pub struct Put<'a> {
    domain: Domain,
    name: String,
    place: Place,
    commit: CommitOptions,
    threads: usize,
    progress: &'a (dyn Fn(u64) + Sync),
    cancel: &'a AtomicBool,
}

impl<'a> Put<'a> {
    commit_setters!();

    /// Gives the name to another member of the same user, as [`Builder::owner`](crate::Builder::owner) does.
    pub fn owner(mut self, member: u64) -> Self {
        self.commit.owner = Some(member);
        self
    }

    /// Sets the number of threads that copy. By default [`default_threads`].
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets a function that each copying thread calls with the number of bytes that it has copied since its last call.
    pub fn progress(mut self, progress: &'a (dyn Fn(u64) + Sync)) -> Self {
        self.progress = progress;
        self
    }

    /// Sets a flag that ends the copy with [`FileProblem::Cancelled`], within one buffer's time. A copy that a GPU does
    /// is finished first.
    pub fn cancel(mut self, cancel: &'a AtomicBool) -> Self {
        self.cancel = cancel;
        self
    }

    /// Puts a file, or the shards of a folder or an index.
    ///
    /// # Errors
    /// [`Error::File`]; [`Denied::NameExists`]; those of [`Builder::allocate`](crate::Builder::allocate) and
    /// [`Build::commit`](crate::Build::commit).
    pub fn path(&self, path: &Path) -> Result<Segment> {
        self.check()?;
        self.plan(&Plan::from_path(path)?)
    }

    /// Puts the bytes of a stream, which is read to its end: at most `limit` bytes. They are in memory twice for a
    /// moment, because the length of a segment must be known before it is filled.
    ///
    /// # Errors
    /// As [`Put::path`].
    pub fn stream(&self, reader: impl Read, limit: u64) -> Result<Segment> {
        self.check()?;
        self.plan(&Plan::from_reader(reader, limit)?)
    }

    /// Puts the tensors of a plan.
    ///
    /// # Errors
    /// As [`Put::path`].
    pub fn plan(&self, plan: &Plan) -> Result<Segment> {
        self.check()?;
        self.fill(self.domain.create(&self.name, self.place), plan)
    }

    /// Puts the tensors of a plan under the name of a claim, which the version fulfils. Other processes that wait in
    /// [`Domain::open_or_build`] wait for it.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use partywall::{Domain, OpenOrBuild, Place, Result, Segment, files::Plan};
    /// # fn weights(domain: &Domain) -> Result<Segment> {
    /// match domain.open_or_build("llm", Duration::MAX)? {
    ///     OpenOrBuild::Opened(segment) => Ok(segment),
    ///     OpenOrBuild::Build(claim) => {
    ///         let plan = Plan::from_path("model.safetensors".as_ref())?;
    ///         domain.put("llm", Place::Host).kept(true).claimed(claim, &plan)
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Put::path`]. The claim passes on to another process then.
    pub fn claimed(&self, claim: Claim, plan: &Plan) -> Result<Segment> {
        let put = Self { name: claim.name().to_owned(), ..self.clone() };
        put.check()?;
        put.fill(claim.create(self.place), plan)
    }

    /// Fills a version with the tensors of a plan, and commits it.
    fn fill(&self, builder: Builder, plan: &Plan) -> Result<Segment> {
        let mut table = TableBuilder::new();
        plan.add_to(&mut table)?;
        let mut build = builder.table(table).commit_options(self.commit).allocate()?;
        build.check_room()?;
        plan.copy_to(&build.uploader()?, self.threads, self.progress, self.cancel).map_err(unwrap)?;
        self.commit(build)
    }

    /// Puts the tensors and metadata of a segment, wherever it is: by the GPU where one reaches both places, else
    /// through buffers of this process.
    ///
    /// # Errors
    /// As [`Put::path`].
    pub fn segment(&self, source: &Segment) -> Result<Segment> {
        self.check()?;
        let mut build =
            self.domain.create(&self.name, self.place).like(source).commit_options(self.commit).allocate()?;
        build.check_room()?;
        match copying_gpu(source, self.place) {
            Some(gpu) => {
                self.refuse_cancelled()?;
                let gpu = self.domain.gpu(gpu)?;
                build.copy_from(source, gpu.stream())?;
                let copied = gpu.stream().synchronize();
                copied.map_err(cuda_error(format!("copying {:?} on GPU {}", source.name(), gpu.uuid())))?;
                (self.progress)(source.tensors().iter().map(Tensor::bytes).sum());
            }
            None => build.copy_by_cpu(source, self.threads, self.progress, self.cancel)?,
        }
        self.commit(build)
    }

    /// Checks the name and the options, and with [`if_absent`](Self::if_absent) that the name does not exist, before
    /// any file is read.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`](crate::error::InvalidArgument::Name),
    /// [`InvalidArgument::Options`](crate::error::InvalidArgument::Options), [`Denied::Sharing`],
    /// [`Denied::NameExists`]; those of every call.
    pub fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        self.commit.check(&self.name, true)?;
        if !self.commit.if_absent {
            return Ok(());
        }
        match self.domain.inspect(&self.name) {
            Ok(found) if found.is_latest => {
                let is = Named::of(found.version.control.as_ref());
                Err(Denied::NameExists { name: found.name, version: found.version.version, is }.into())
            }
            // Removed, but still held by readers.
            Ok(_) | Err(Error::NotFound(NotFound::Name { .. })) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Commits a complete build, unless the copy was cancelled after its last byte.
    fn commit(&self, build: Build) -> Result<Segment> {
        self.refuse_cancelled()?;
        build.commit()
    }

    fn refuse_cancelled(&self) -> Result<()> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(FileProblem::Cancelled.of(&self.name).into());
        }
        Ok(())
    }
}

/// Returns the GPU that copies a segment to a place, if one reaches both. Memory of a GPU is reached by the GPU on
/// which this process uses it, which need not be the one that has it.
fn copying_gpu(source: &Segment, to: Place) -> Option<DeviceUuid> {
    let used = source.gpu().map(Gpu::uuid);
    match (source.place(), to) {
        (Place::Gpu(_), Place::Gpu(to)) => used.filter(|used| *used == to),
        (Place::Gpu(_), Place::Pinned(_)) => used,
        (Place::Pinned(_), to) => to.gpu(),
        _ => None,
    }
}

/// Checks a name: letters, digits and `._-/`, at most 255 bytes, no empty part, no `.` or `..`.
///
/// Every call checks its names; this function is for checks before the first call.
///
/// # Errors
/// [`InvalidArgument::Name`](crate::error::InvalidArgument::Name) says which rule is broken.
pub fn check_name(name: &str) -> Result<()> {
    domain::check_name(name).map(drop)
}

impl fmt::Debug for Put<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Put({} on {}, {} threads)", self.name, self.place, self.threads)
    }
}

/// Unwraps an error of this library that a copy has passed on.
pub(crate) fn unwrap(error: FileError) -> Error {
    let FileError { file, problem } = error;
    let problem = match problem {
        FileProblem::Sink(source) => source.downcast().map_err(FileProblem::Sink),
        FileProblem::Content { tensor, source } => {
            source.downcast().map_err(|source| FileProblem::Content { tensor, source })
        }
        other => Err(other),
    };
    match problem {
        Ok(ours) => *ours,
        Err(problem) => problem.of(file).into(),
    }
}

static NEVER: AtomicBool = AtomicBool::new(false);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LimitReached;

    #[test]
    fn library_errors_are_unwrapped() {
        let ours = || Box::new(Error::LimitReached(LimitReached::FileDescriptors("x".into())));
        let sink = FileProblem::Sink(ours()).of("f");
        assert!(matches!(unwrap(sink), Error::LimitReached(LimitReached::FileDescriptors(_))));
        let content = FileProblem::Content { tensor: "t".into(), source: ours() }.of("f");
        assert!(matches!(unwrap(content), Error::LimitReached(LimitReached::FileDescriptors(_))));
        let foreign = FileProblem::Sink("else".into()).of("f");
        assert!(matches!(unwrap(foreign), Error::File(FileError { problem: FileProblem::Sink(_), .. })));
        let other = FileProblem::Cancelled.of("f");
        assert!(matches!(unwrap(other), Error::File(FileError { problem: FileProblem::Cancelled, .. })));
    }
}
