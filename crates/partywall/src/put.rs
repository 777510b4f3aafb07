//! From a model file to a name, in one step.

use std::{
    fmt,
    io::Read,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use partywall_shm::TableBuilder;

use crate::{
    domain::{self, Domain},
    error::{Denied, Error, NotFound, Result},
    files::{FileError, FileProblem, Plan, default_threads},
    place::Place,
    segment::{CommitOptions, Segment, commit_setters},
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

/// Options to put files; see [`Domain::put`]. The version becomes visible once it is complete and the files have not changed
/// meanwhile. After an error nothing is left.
#[derive(Clone)]
#[must_use = "nothing is put until path(), stream() or plan()"]
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

    /// Sets a flag that ends the copy with [`FileProblem::Cancelled`], within one buffer's time.
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

    /// Puts the bytes of a stream, which is read to its end: at most `limit` bytes. They are in memory twice for a moment,
    /// because the length of a segment must be known before it is filled.
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
        let mut table = TableBuilder::new();
        plan.add_to(&mut table)?;
        let builder = self.domain.create(&self.name, self.place).table(table);
        let mut build = builder.commit_options(self.commit).allocate()?;
        plan.copy_to(&build.uploader(), self.threads, self.progress, self.cancel).map_err(unwrap)?;
        if self.cancel.load(Ordering::Relaxed) {
            // Set after the last byte was copied: still early enough to leave nothing.
            return Err(FileProblem::Cancelled.of(&self.name).into());
        }
        build.commit()
    }

    /// Checks the name, and with [`if_absent`](Self::if_absent) that it does not exist, before any file is read.
    ///
    /// # Errors
    /// [`InvalidArgument::Name`](crate::error::InvalidArgument::Name), [`Denied::NameExists`]; those of every call.
    pub fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        if !self.commit.if_absent {
            return Ok(());
        }
        match self.domain.inspect(&self.name) {
            Ok(found) if found.is_latest => {
                Err(Denied::NameExists { name: found.name, version: found.version.version }.into())
            }
            // Removed, but still held by readers.
            Ok(_) | Err(Error::NotFound(NotFound::Name { .. })) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Checks a name: letters, digits and `._-/`, at most 255 bytes, no empty part, no `.` or `..`.
///
/// Every call checks its names; this function is for checks before the first call.
///
/// # Errors
/// [`InvalidArgument::Name`](crate::error::InvalidArgument::Name) says which rule is broken.
pub fn check_name(name: &str) -> Result<()> {
    domain::check_name(name)
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
