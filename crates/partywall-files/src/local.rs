//! Files of the file system, and streams that were read to their end.

use std::{
    fs::{self, File, FileType, Metadata, OpenOptions},
    io,
    num::NonZeroU64,
    ops::Range,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use partywall_os::{Errno, process::file_size_limit};
use rustix::fs::{Advice, OFlags, fadvise};

use crate::{
    error::FileProblem,
    storage::{FileReader, Storage, StoredFile},
};

/// The file system.
pub(crate) struct LocalFiles;

/// A file at its path, if it still has this stamp.
struct LocalFile {
    path: PathBuf,
    stamp: Stamp,
}

/// A stream that was read to its end into a file without a name.
pub(crate) struct Spool {
    file: File,
    length: u64,
}

/// Identifies the state of a file. A change of equal length within the same tick of the file system's clock (up to 10
/// ms before Linux 6.13) is not detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

/// Reads an open file by positioned reads.
struct LocalReader {
    file: File,
    at: u64,
}

impl Spool {
    pub(crate) fn new(file: File, length: u64) -> Self {
        Self { file, length }
    }
}

impl Storage for LocalFiles {
    fn folder(&self, path: &Path) -> Result<Option<Vec<PathBuf>>, FileProblem> {
        if !fs::metadata(path).map_err(FileProblem::Open)?.is_dir() {
            return Ok(None);
        }
        let entries = fs::read_dir(path).map_err(FileProblem::Open)?;
        entries.map(|entry| Ok(Some(entry.map_err(FileProblem::Open)?.path()))).collect()
    }

    fn open(&self, path: &Path) -> Result<Arc<dyn StoredFile>, FileProblem> {
        let (file, stamp) = open(path)?;
        // Files of /proc report a length of 0.
        match file.read_at(&mut [0], stamp.length).map_err(FileProblem::Read)? {
            0 => Ok(Arc::new(LocalFile { path: path.to_owned(), stamp })),
            _ => Err(FileProblem::changed("it has more bytes than it says")),
        }
    }
}

impl StoredFile for LocalFile {
    fn length(&self) -> u64 {
        self.stamp.length
    }

    fn reader<'a>(&'a self, _: &'a dyn Fn() -> bool) -> Result<Box<dyn FileReader + 'a>, FileProblem> {
        let (file, now) = open(&self.path).map_err(gone)?;
        self.stamp.check(now)?;
        Ok(Box::new(LocalReader { file, at: 0 }))
    }

    fn check(&self) -> Result<(), FileProblem> {
        let now = fs::metadata(&self.path).map_err(FileProblem::Open).map_err(gone)?;
        self.stamp.check(Stamp::of(&now))
    }
}

impl StoredFile for Spool {
    fn length(&self) -> u64 {
        self.length
    }

    fn reader<'a>(&'a self, _: &'a dyn Fn() -> bool) -> Result<Box<dyn FileReader + 'a>, FileProblem> {
        let file = self.file.try_clone().map_err(FileProblem::Open)?;
        Ok(Box::new(LocalReader { file, at: 0 }))
    }

    fn check(&self) -> Result<(), FileProblem> {
        Ok(())
    }
}

impl FileReader for LocalReader {
    fn begin(&mut self, range: Range<u64>) -> Result<(), FileProblem> {
        // The threads jump from item to item, which looks random to the kernel.
        let _ = fadvise(&self.file, range.start, NonZeroU64::new(range.end - range.start), Advice::WillNeed);
        self.at = range.start;
        Ok(())
    }

    fn read_exact(&mut self, out: &mut [u8]) -> Result<(), FileProblem> {
        self.file.read_exact_at(out, self.at).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => FileProblem::changed("it became shorter"),
            _ => FileProblem::Read(source),
        })?;
        self.at += out.len() as u64;
        Ok(())
    }
}

impl Stamp {
    fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        }
    }

    fn check(&self, now: Self) -> Result<(), FileProblem> {
        if (self.device, self.inode) != (now.device, now.inode) {
            return Err(FileProblem::changed("another file has taken its place"));
        }
        if self.length != now.length {
            return Err(FileProblem::changed(format!("it had {} bytes and has {}", self.length, now.length)));
        }
        if self.modified != now.modified { Err(FileProblem::changed("it was written")) } else { Ok(()) }
    }
}

/// Turns a missing file into a changed one: it existed when the plan was made.
fn gone(problem: FileProblem) -> FileProblem {
    match problem {
        FileProblem::Open(source) if source.kind() == io::ErrorKind::NotFound => FileProblem::changed("it is gone"),
        problem => problem,
    }
}

/// Opens a regular file, and nothing else: opening a pipe would wait for its writer, opening a device may have any
/// effect.
fn open(path: &Path) -> Result<(File, Stamp), FileProblem> {
    regular(fs::metadata(path).map_err(FileProblem::Open)?.file_type())?;
    // Checked again: the path may name another file by now.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(FileProblem::Open)?;
    let found = file.metadata().map_err(FileProblem::Open)?;
    regular(found.file_type())?;
    Ok((file, Stamp::of(&found)))
}

fn regular(found: FileType) -> Result<(), FileProblem> {
    let kind = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(FileProblem::NotRegular { kind })
}

/// Refuses a regular file of this length if it exceeds the limit of the process. The kernel would also send SIGXFSZ,
/// which ends a process that does not ignore it.
pub(crate) fn check_size(bytes: u64) -> Result<(), FileProblem> {
    match file_size_limit() {
        Some(limit) if bytes > limit => Err(FileProblem::SizeLimit(Errno::FBIG.into())),
        _ => Ok(()),
    }
}
