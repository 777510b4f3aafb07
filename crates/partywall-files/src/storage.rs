//! Where files are: the file system, or a server.
//!
//! A plan reads the headers of files and copies their bytes through these traits, so that all formats and all checks are
//! the same wherever a file is.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::error::FileProblem;

/// A place that has files. Names of files in errors and the suffixes that choose a format are those of their paths.
pub trait Storage {
    /// Returns the paths of the files that are directly in the folder `path`, in any order; `None` if `path` is no
    /// folder.
    ///
    /// # Errors
    /// If the place cannot be asked, or has nothing at `path`.
    fn folder(&self, path: &Path) -> Result<Option<Vec<PathBuf>>, FileProblem>;

    /// Opens a file.
    ///
    /// # Errors
    /// [`FileProblem::Open`] with [`NotFound`](std::io::ErrorKind::NotFound) if there is none; the storage's own.
    fn open(&self, path: &Path) -> Result<Arc<dyn StoredFile>, FileProblem>;
}

/// A file in a [`Storage`], in the state in which it was opened.
pub trait StoredFile: Send + Sync {
    /// Returns its length in bytes.
    fn length(&self) -> u64;

    /// Returns a reader for the calling thread. A read ends soon after `is_cancelled` returns true.
    ///
    /// # Errors
    /// [`FileProblem::Changed`] if the file is not the one that was opened; the storage's own.
    fn reader<'a>(&'a self, is_cancelled: &'a dyn Fn() -> bool) -> Result<Box<dyn FileReader + 'a>, FileProblem>;

    /// Fails if the file has changed since it was opened.
    ///
    /// # Errors
    /// [`FileProblem::Changed`]; the storage's own.
    fn check(&self) -> Result<(), FileProblem>;

    /// Returns how many of `bytes` bytes a thread should read in a row, if `threads` threads read them.
    fn run_bytes(&self, _bytes: u64, _threads: usize) -> u64 {
        ITEM_BYTES
    }
}

/// Reads a [`StoredFile`].
pub trait FileReader {
    /// Announces that the bytes of `range` are read next, in order and at most once.
    ///
    /// # Errors
    /// Those of the storage.
    fn begin(&mut self, range: Range<u64>) -> Result<(), FileProblem>;

    /// Fills `out` with the next bytes of the range.
    ///
    /// # Errors
    /// [`FileProblem::Changed`] if the file ends before, because its length was known; [`FileProblem::Read`];
    /// [`FileProblem::Cancelled`]; the storage's own.
    fn read_exact(&mut self, out: &mut [u8]) -> Result<(), FileProblem>;
}

/// For readers that nothing cancels.
pub(crate) fn never() -> bool {
    false
}

/// Fills `out` from `offset`.
pub(crate) fn read_exact_at(reader: &mut dyn FileReader, out: &mut [u8], offset: u64) -> Result<(), FileProblem> {
    reader.begin(offset..offset + out.len() as u64)?;
    reader.read_exact(out)
}

/// Reads `bytes` bytes into memory of their own. A file may have more than fits there, even without using its disk.
pub(crate) fn read_vec_at(reader: &mut dyn FileReader, bytes: u64, offset: u64) -> Result<Vec<u8>, FileProblem> {
    let mut read = Vec::new();
    read.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(|_| FileProblem::Memory { bytes })?;
    read.resize(bytes as usize, 0);
    read_exact_at(reader, &mut read, offset)?;
    Ok(read)
}

/// The ideal size of a [`Lane`](crate::Lane)'s buffers: small enough to stay in the cache between reading and copying, large enough that
/// the calls do not matter. From 256 KiB to 4 MiB no difference was found.
pub const BUFFER_BYTES: usize = 1 << 20;

/// Bytes of a file that one thread reads in a row, if the file does not say otherwise.
const ITEM_BYTES: u64 = 8 << 20;
