//! Plans of reading tensors from files, made from the headers alone, before memory is allocated.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    fmt,
    fs::{self, File, FileType, Metadata, OpenOptions},
    io::{self, Read, Write},
    ops::Range,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use partywall_shm::{DType, TableBuilder};
use rustix::fs::{MemfdFlags, OFlags, memfd_create};

use crate::{
    BUFFER_BYTES, SINGLE_TENSOR,
    error::{FileError, FileProblem},
    npy,
    safetensors::{self, Header},
    shards::{Folder, Index, has_suffix, is_index, is_safetensors},
    tensor::{Order, TensorInfo},
    write::check_size,
};

/// The tensors of one or more files, and the places of their bytes.
///
/// Keeps no file open, except the bytes that [`Plan::from_reader`] has read. [`Plan::copy_to`] detects files that have
/// changed since.
pub struct Plan {
    pub(crate) sources: Vec<Source>,
    tensors: Vec<TensorInfo>,
    /// The offset of each tensor in its file. Starts and ends ascend within a file.
    pub(crate) starts: Vec<u64>,
    metadata: Vec<(String, String)>,
}

/// A file, and a range of its tensors that follow each other without gaps.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Bytes,
    pub(crate) tensors: Range<usize>,
}

/// The location of the bytes of a file.
pub(crate) enum Bytes {
    /// A file at its path, if it still has this stamp.
    File(Stamp),
    /// A stream that was read to its end into a file without a name.
    Spool(File),
}

/// Identifies the state of a file. A change of equal length within the same tick of the file system's clock (up to 10
/// ms before Linux 6.13) is not detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Plan {
    /// Reads the headers of a file, or of all shards of a folder or an index.
    ///
    /// A folder with a `*.safetensors.index.json` is read by this index: tensors that are only in the index or only in
    /// its shards are errors; files that it does not name are ignored. Of a tensor that is in several of its shards,
    /// the one in the shard that the index names is meant. A folder without an index is the set of all its
    /// `*.safetensors` that are not hidden. Metadata of all shards is merged; in a conflict, the first shard by name
    /// wins.
    ///
    /// # Errors
    /// [`FileError`]: the file cannot be read, is not a regular file, is damaged or truncated, or shards and index do
    /// not belong together.
    pub fn from_path(path: &Path) -> Result<Self, FileError> {
        let found = fs::metadata(path).map_err(|source| FileProblem::Open(source).of(path))?;
        if found.is_dir() {
            return match Folder::read(path)? {
                Folder::Index(index) => Self::from_index(&index),
                Folder::Shards(shards) => Self::from_shards(&shards, None),
            };
        }
        if is_index(path) {
            return Self::from_index(path);
        }
        if is_safetensors(path) {
            return Self::from_shards(&[path.to_owned()], None);
        }
        let (file, stamp) = open_model(path)?;
        let (tensor, start) = if has_suffix(path, ".npy") {
            npy::read_header(&file, stamp.length).map_err(|problem| problem.of(path))?
        } else {
            // Files of /proc report a length of 0. A file with more bytes than it reports is refused.
            let more = file.read_at(&mut [0], stamp.length);
            match more.map_err(|source| FileProblem::Read(source).of(path))? {
                0 => (raw(path, stamp.length)?, 0),
                _ => return Err(FileProblem::changed("it has more bytes than it says").of(path)),
            }
        };
        Ok(Self::single(path, Bytes::File(stamp), tensor, start))
    }

    /// Reads a stream to its end as raw bytes: one tensor, [`SINGLE_TENSOR`], of `uint8`.
    ///
    /// The length of a segment must be known before it is filled. The stream is therefore kept in a memfd until the
    /// plan is dropped, and its bytes are in memory twice at the end of [`Plan::copy_to`]. To avoid that, write it to a
    /// file first.
    ///
    /// # Errors
    /// [`FileProblem::TooLong`] as soon as there are more than `limit` bytes; [`FileProblem::Read`];
    /// [`FileProblem::Full`], [`FileProblem::SizeLimit`] and [`FileProblem::Write`] if the memfd cannot take them.
    pub fn from_reader(mut reader: impl Read, limit: u64) -> Result<Self, FileError> {
        let path = Path::new("-");
        let spool = memfd_create("partywall:-", MemfdFlags::CLOEXEC);
        let mut spool = File::from(spool.map_err(|e| FileProblem::write(e.into()).of(path))?);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut length = 0_u64;
        loop {
            let read = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(FileProblem::Read(source).of(path)),
            };
            length += read as u64;
            if length > limit {
                return Err(FileProblem::TooLong { limit }.of(path));
            }
            check_size(length).map_err(|problem| problem.of(path))?;
            spool.write_all(&buffer[..read]).map_err(|e| FileProblem::write(e).of(path))?;
        }
        Ok(Self::single(path, Bytes::Spool(spool), raw(path, length)?, 0))
    }

    /// Returns the tensors, in the order of their bytes: shard after shard.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the metadata of the files.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// Returns the number of bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes))
    }

    /// Adds the tensors and the metadata to a table.
    ///
    /// # Errors
    /// [`FileProblem::Table`], for example if a name is too long or taken.
    pub fn add_to(&self, table: &mut TableBuilder) -> Result<(), FileError> {
        for source in &self.sources {
            let failed = |error| FileProblem::Table(error).of(&source.path);
            for tensor in &self.tensors[source.tensors.clone()] {
                table.add_strided(&tensor.name, tensor.dtype, &tensor.shape, &tensor.strides).map_err(failed)?;
            }
        }
        for (key, value) in &self.metadata {
            let failed = |error| FileProblem::Table(error).of(self.first_path());
            table.set_metadata(key, value).map_err(failed)?;
        }
        Ok(())
    }

    /// Reads the bytes of one tensor, given its index in [`Plan::tensors`], into memory of its own.
    ///
    /// # Errors
    /// [`FileProblem::Changed`] if the file has changed since the plan was made; [`FileProblem::Memory`];
    /// [`FileProblem::Read`].
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn read_tensor(&self, index: usize) -> Result<Vec<u8>, FileError> {
        let source = self.sources.iter().find(|source| source.tensors.contains(&index));
        let source = source.expect("the index is in range, and each tensor is in one file");
        let file = source.open()?;
        let bytes = read_vec_at(&file, self.tensors[index].bytes, self.starts[index]);
        let bytes = bytes.map_err(|problem| problem.of(&source.path))?;
        source.check()?;
        Ok(bytes)
    }

    /// Returns the path for an error that is about no particular file.
    fn first_path(&self) -> &Path {
        self.sources.first().map_or(Path::new(""), |source| &source.path)
    }

    fn from_index(path: &Path) -> Result<Self, FileError> {
        let (file, stamp) = open_model(path)?;
        let index = Index::read(path, &file, stamp.length)?;
        Self::from_shards(index.shards(), Some(&index))
    }

    /// Reads the headers of shards. `index` is the index that names them, if there is one.
    fn from_shards(paths: &[PathBuf], index: Option<&Index>) -> Result<Self, FileError> {
        let mut sources = Vec::with_capacity(paths.len());
        let mut tensors = Vec::new();
        let mut starts = Vec::new();
        let mut metadata = Vec::new();
        let mut keys = HashSet::new();
        let mut shard_of = Vec::new();
        for (shard, path) in paths.iter().enumerate() {
            let (file, stamp) = open_model(path).map_err(|error| match index {
                Some(index) => index.shard_error(shard, error),
                None => error,
            })?;
            let header = safetensors::read_header(&file, stamp.length);
            let header: Header = header.map_err(|problem| problem.of(path))?;
            let source = |range| Source { path: path.clone(), bytes: Bytes::File(stamp), tensors: range };
            let mut first = tensors.len();
            let mut is_gap = false;
            for (tensor, start) in header.tensors {
                if index.is_some_and(|index| index.is_elsewhere(shard, &tensor.name)) {
                    is_gap = tensors.len() > first;
                    continue;
                }
                // A source has no gaps between its tensors, so the file is several sources.
                if std::mem::take(&mut is_gap) {
                    sources.push(source(first..tensors.len()));
                    first = tensors.len();
                }
                tensors.push(tensor);
                starts.push(start);
                shard_of.push(shard);
            }
            metadata.extend(header.metadata.into_iter().filter(|(key, _)| keys.insert(key.clone())));
            sources.push(source(first..tensors.len()));
        }
        let plan = Self { sources, tensors, starts, metadata };
        plan.check_names()?;
        if let Some(index) = index {
            let names = plan.tensors.iter().map(|tensor| tensor.name.as_str());
            index.check(&names.zip(shard_of).collect())?;
        }
        Ok(plan)
    }

    fn single(path: &Path, bytes: Bytes, tensor: TensorInfo, start: u64) -> Self {
        let source = Source { path: path.to_owned(), bytes, tensors: 0..1 };
        Self { sources: vec![source], tensors: vec![tensor], starts: vec![start], metadata: Vec::new() }
    }

    /// Refuses a tensor that is in two shards. Within one shard, names differ.
    fn check_names(&self) -> Result<(), FileError> {
        let mut seen = HashMap::with_capacity(self.tensors.len());
        for source in &self.sources {
            for tensor in &self.tensors[source.tensors.clone()] {
                match seen.entry(tensor.name.as_str()) {
                    Entry::Vacant(entry) => drop(entry.insert(&source.path)),
                    Entry::Occupied(entry) => {
                        let first = (*entry.get()).clone();
                        let twice = FileProblem::DuplicateTensor { tensor: tensor.name.clone(), first };
                        return Err(twice.of(&source.path));
                    }
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<_> = self.sources.iter().map(|source| &source.path).collect();
        f.debug_struct("Plan").field("files", &files).field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

impl Source {
    /// Opens the file, if it has not changed.
    pub(crate) fn open(&self) -> Result<File, FileError> {
        match &self.bytes {
            Bytes::Spool(file) => file.try_clone().map_err(|source| FileProblem::Open(source).of(&self.path)),
            Bytes::File(stamp) => {
                let (file, now) = open(&self.path).map_err(|e| self.gone(e))?;
                stamp.check(now).map_err(|problem| problem.of(&self.path))?;
                Ok(file)
            }
        }
    }

    /// Fails if the file has changed.
    pub(crate) fn check(&self) -> Result<(), FileError> {
        let Bytes::File(stamp) = &self.bytes else {
            return Ok(());
        };
        let now = fs::metadata(&self.path).map_err(|source| FileProblem::Open(source).of(&self.path));
        let now = Stamp::of(&now.map_err(|e| self.gone(e))?);
        stamp.check(now).map_err(|problem| problem.of(&self.path))
    }

    /// Turns a missing file into a changed one: it existed when the plan was made.
    fn gone(&self, error: FileError) -> FileError {
        match error.problem {
            FileProblem::Open(source) if source.kind() == io::ErrorKind::NotFound => {
                FileProblem::changed("it is gone").of(error.file)
            }
            problem => problem.of(error.file),
        }
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

/// Fills `out` from `offset`. A file that ends before has changed, because its length was known.
pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> Result<(), FileProblem> {
    file.read_exact_at(out, offset).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => FileProblem::changed("it became shorter"),
        _ => FileProblem::Read(source),
    })
}

/// Reads `bytes` bytes into memory of their own. A file may have more than fits there, even without using its disk.
pub(crate) fn read_vec_at(file: &File, bytes: u64, offset: u64) -> Result<Vec<u8>, FileProblem> {
    let mut read = Vec::new();
    read.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(|_| FileProblem::Memory { bytes })?;
    read.resize(bytes as usize, 0);
    read_exact_at(file, &mut read, offset)?;
    Ok(read)
}

/// Opens a file to read its header. Refuses a pointer of Git LFS in its place.
fn open_model(path: &Path) -> Result<(File, Stamp), FileError> {
    let (file, stamp) = open(path)?;
    let mut beginning = [0; LFS.len()];
    if stamp.length >= LFS.len() as u64 {
        read_exact_at(&file, &mut beginning, 0).map_err(|problem| problem.of(path))?;
    }
    if beginning == *LFS && stamp.length < LFS_LIMIT {
        Err(FileProblem::LfsPointer.of(path))
    } else {
        Ok((file, stamp))
    }
}

/// Opens a regular file, and nothing else: opening a pipe would wait for its writer, opening a device may have any
/// effect.
fn open(path: &Path) -> Result<(File, Stamp), FileError> {
    let failed = |source| FileProblem::Open(source).of(path);
    regular(path, fs::metadata(path).map_err(failed)?.file_type())?;
    // Checked again: the path may name another file by now.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    regular(path, found.file_type())?;
    Ok((file, Stamp::of(&found)))
}

fn regular(path: &Path, found: FileType) -> Result<(), FileError> {
    let kind = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(FileProblem::NotRegular { kind }.of(path))
}

fn raw(path: &Path, length: u64) -> Result<TensorInfo, FileError> {
    TensorInfo::dense(SINGLE_TENSOR, DType::U8, vec![length], Order::C)
        .ok_or_else(|| FileProblem::malformed("it is too large").of(path))
}

/// The beginning of a pointer of Git LFS.
const LFS: &[u8; 40] = b"version https://git-lfs.github.com/spec/";

/// A pointer of Git LFS is shorter than this.
const LFS_LIMIT: u64 = 1024;
