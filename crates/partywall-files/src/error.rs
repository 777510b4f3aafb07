//! Why a file cannot be read or written: the file, and its problem, which names the tensor if it is about one.

use std::{fmt, io, path::PathBuf};

use partywall_os::Errno;
use partywall_shm::{DType, TableError};

use crate::format::Format;

/// The error of a [`Sink`](super::Sink) or a [`Content`](super::Content).
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Why a file could not be read or written. After a failed read, the sink may contain a part of the bytes. After a
/// failed write, an existing file of the name is unchanged.
pub struct FileError {
    /// The file, folder, index or shard; `-` for a stream.
    pub file: PathBuf,
    /// Its problem.
    pub problem: FileProblem,
}

/// The problem of a file. The message continues a sentence that begins with the name of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileProblem {
    /// The file cannot be opened or examined.
    #[error("cannot be opened: {0}")]
    Open(#[source] io::Error),
    /// Reading failed.
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
    /// A part of the file that is read at once does not fit into the memory of this process.
    #[error("cannot be read: {bytes} bytes of it do not fit into the memory of this process")]
    Memory {
        /// The bytes of the part.
        bytes: u64,
    },
    /// The file is a pipe, a socket or a device.
    #[error("is {kind}, not a regular file")]
    NotRegular {
        /// The kind of file.
        kind: &'static str,
    },
    /// The folder has neither an index nor a file that ends in `.safetensors`.
    #[error("contains no .safetensors file")]
    NoShards,
    /// The folder has two indexes, so that its tensors are ambiguous.
    #[error("contains two indexes, {} and {}", first.display(), second.display())]
    TwoIndexes {
        /// The name of one.
        first: PathBuf,
        /// The name of another.
        second: PathBuf,
    },
    /// The file is a pointer of Git LFS to a file that was not downloaded.
    #[error("is not the file itself but a Git LFS pointer to it")]
    LfsPointer,
    /// The header declares a length above the limit.
    #[error("begins with a header of {bytes} bytes; at most {limit} are allowed")]
    HeaderTooLarge {
        /// The declared length.
        bytes: u64,
        /// The limit of the format or of this library.
        limit: u64,
    },
    /// The file ends before its header or its last tensor does.
    #[error("is truncated: it has {found} bytes and must have {expected}")]
    Truncated {
        /// The number of bytes that its header requires, as far as it is known.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file has bytes after its last tensor.
    #[error("has {found} bytes but its tensors end at {expected}")]
    TrailingBytes {
        /// Where the last tensor ends.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The header or the index is damaged or false.
    #[error("is damaged: {0}")]
    Malformed(#[source] SinkError),
    /// The index names a shard outside its own folder.
    #[error("names the shard {shard:?}, which may lie outside its folder")]
    OutsideFolder {
        /// The shard as the index names it.
        shard: String,
    },
    /// The index names a shard that does not exist.
    #[error("is missing: {} wants tensor {tensor:?} from it", index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// A tensor that should be in it.
        tensor: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The tensor is not in the shard that the index names.
    #[error("does not contain tensor {tensor:?}, which {} wants from it", index.display())]
    MissingTensor {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tensor is in a shard, but not in the index.
    #[error("contains tensor {tensor:?}, which {} does not know", index.display())]
    ForeignTensor {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tensor is in two shards.
    #[error("contains tensor {tensor:?}, which is also in {}", first.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// The shard that has it, too.
        first: PathBuf,
    },
    /// The elements have a type that tensors cannot have.
    #[error("contains elements of type {dtype}: {why}")]
    UnsupportedElements {
        /// The type as the file names it.
        dtype: String,
        /// Why tensors cannot have this type.
        why: &'static str,
    },
    /// The elements have a type that this release does not know.
    #[error("contains tensor {tensor:?} of type {dtype:?}, which Partywall {} does not know", env!("CARGO_PKG_VERSION"))]
    UnknownElements {
        /// The tensor.
        tensor: String,
        /// The type as the file names it.
        dtype: String,
    },
    /// The file is of a version of its format that this release does not know.
    #[error("has version {version} of its format, which Partywall {} does not know", env!("CARGO_PKG_VERSION"))]
    UnknownVersion {
        /// The version.
        version: String,
    },
    /// The tensors or the metadata do not fit into a tensor table.
    #[error("cannot become a segment: {0}")]
    Table(#[source] TableError),
    /// The stream has more bytes than the limit.
    #[error("has more than {limit} bytes")]
    TooLong {
        /// The limit that was given.
        limit: u64,
    },
    /// The file was written, replaced or removed while it was read.
    #[error("has changed while it was read: {why}")]
    Changed {
        /// The difference.
        why: String,
    },
    /// The server that has the file refused it, could not be reached, or did not keep to its protocol.
    #[error("{what}")]
    Remote {
        /// What happened.
        what: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// The target of the copy could not be written.
    #[error("cannot be copied: {0}")]
    Sink(#[source] SinkError),
    /// The caller cancelled the operation.
    #[error("is not complete: the caller cancelled the operation")]
    Cancelled,
    /// No tensor has this name.
    #[error("cannot be written: there is no tensor {tensor:?}")]
    NoSuchTensor {
        /// The requested name.
        tensor: String,
    },
    /// The format holds one tensor, and there are several, or none.
    #[error("can hold one tensor, and there are {count}{}", example(first))]
    NotOneTensor {
        /// How many there are.
        count: usize,
        /// The name of the first.
        first: Option<String>,
    },
    /// The format has no such elements.
    #[error("cannot hold tensor {tensor:?}: {format} has no {dtype}")]
    FormatLacksElements {
        /// The tensor.
        tensor: String,
        /// The type of its elements.
        dtype: DType,
        /// The format.
        format: Format,
    },
    /// The format has no such order of elements.
    #[error("cannot hold tensor {tensor:?}: {format} has no strides {strides:?} for shape {shape:?}")]
    FormatLacksStrides {
        /// The tensor.
        tensor: String,
        /// Elements along each dimension.
        shape: Vec<u64>,
        /// Elements from one index to the next.
        strides: Vec<u64>,
        /// The format.
        format: Format,
    },
    /// The format reserves this name.
    #[error("cannot hold tensor {tensor:?}: {format} reserves this name")]
    ReservedName {
        /// The tensor.
        tensor: String,
        /// The format.
        format: Format,
    },
    /// The memory could not be read.
    #[error("cannot be written: tensor {tensor:?} cannot be read: {source}")]
    Content {
        /// The tensor.
        tensor: String,
        /// The content's error.
        source: SinkError,
    },
    /// The target exists, and was not to be replaced.
    #[error("already exists")]
    Exists(#[source] io::Error),
    /// The target is a folder.
    #[error("is a folder")]
    IsFolder,
    /// The file system, or the user's share of it, is full.
    #[error("cannot be written: there is no space: {0}")]
    Full(#[source] io::Error),
    /// The file would exceed the limit on the size of files.
    #[error("reaches the file size limit")]
    SizeLimit(#[source] io::Error),
    /// The reader of the pipe has gone away.
    #[error("was closed by its reader")]
    ClosedPipe(#[source] io::Error),
    /// Writing failed.
    #[error("cannot be written: {0}")]
    Write(#[source] io::Error),
}

impl FileProblem {
    /// Returns whether the process or the machine cannot open another file.
    pub fn lacks_files(&self) -> bool {
        let errno = match self {
            Self::Open(source) | Self::Read(source) | Self::Write(source) => source.raw_os_error(),
            _ => None,
        };
        [Errno::MFILE, Errno::NFILE].iter().any(|lack| errno == Some(lack.raw_os_error()))
    }

    /// Returns what to do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            // The answer of a server, and not an error of the system.
            Self::Open(source) if source.kind() == io::ErrorKind::NotFound && source.get_ref().is_some() => {
                "check the URL, the revision, and whether it is private"
            }
            Self::Open(_) | Self::Write(_) => "check the path and its permissions",
            Self::Memory { .. } => "raise the limit of this process, if there is one (`ulimit -v`), or free memory",
            Self::Read(_) => "check the disk, then copy or download the file again",
            Self::NotRegular { .. } => "name a regular file, or use - and redirect it to standard input",
            Self::NoShards => "name a folder with .safetensors files, or a single file",
            Self::TwoIndexes { .. } => "name the index instead of the folder",
            Self::LfsPointer => "download it with `git lfs pull`",
            Self::HeaderTooLarge { .. } => "check that the file is what its suffix says, and download it again",
            Self::Truncated { .. } | Self::TrailingBytes { .. } | Self::Malformed(_) => {
                "download or write the file again"
            }
            Self::OutsideFolder { .. } => "put all shards beside the index, and name them there without .. and /",
            Self::MissingShard { .. } => "download the missing shard",
            Self::MissingTensor { .. } | Self::ForeignTensor { .. } => {
                "index and shards are of different models or versions: download all of them again"
            }
            Self::DuplicateTensor { .. } => {
                "remove the shard that does not belong there, or name one file instead of the folder"
            }
            Self::UnsupportedElements { .. } => {
                "save it with plain little-endian elements, for example numpy.save(f, a.astype('<f4')), or as .safetensors"
            }
            Self::UnknownElements { .. } => "upgrade Partywall, or save the tensor with elements of another type",
            Self::UnknownVersion { .. } => "upgrade Partywall, or save it in an older version of the format",
            Self::Table(_) => "rename, reshape or split what is named here",
            Self::TooLong { .. } => "raise the limit, or write the stream to a file and name that",
            Self::Changed { .. } => "wait until no process writes the file, then try again",
            Self::Remote { advice, .. } => advice,
            Self::Sink(_) | Self::Content { .. } => "see the cause",
            Self::Cancelled => "start again when you want it",
            Self::NoSuchTensor { .. } => "list the tensors with `partywall show NAME`",
            Self::NotOneTensor { .. } => {
                "name one with NAME:TENSOR, or write to a file that ends in .safetensors to get all"
            }
            Self::FormatLacksElements { format: Format::SafeTensors, .. } => {
                "write it to a file that ends in .npy, or to one of another suffix for its plain bytes"
            }
            Self::FormatLacksElements { .. } => {
                "write it to a file that ends in .safetensors, or to one of another suffix for its plain bytes"
            }
            Self::FormatLacksStrides { format: Format::SafeTensors, .. } => {
                "make it contiguous before it is put, or name it with NAME:TENSOR and write it to a file that ends in .npy"
            }
            Self::FormatLacksStrides { .. } => {
                "make it contiguous before it is put, or write it to a file of another suffix for its plain bytes"
            }
            Self::ReservedName { .. } => "name it with NAME:TENSOR and write it to a file of another suffix",
            Self::Exists(_) => "name another file, or replace this one (`--force` on the command line)",
            Self::IsFolder => "name a file in it",
            Self::Full(_) => "free some space, or write to another file system",
            Self::SizeLimit(_) => "raise the limit in the shell that starts this (`ulimit -f unlimited`)",
            Self::ClosedPipe(_) => "nothing, if the reader had enough",
        }
    }

    /// Returns the error that `file` has this problem.
    pub fn of(self, file: impl Into<PathBuf>) -> FileError {
        FileError { file: file.into(), problem: self }
    }

    /// Returns the problem of a failed write.
    pub(crate) fn write(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe(source),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full(source),
            io::ErrorKind::FileTooLarge => Self::SizeLimit(source),
            io::ErrorKind::AlreadyExists => Self::Exists(source),
            io::ErrorKind::IsADirectory => Self::IsFolder,
            _ => Self::Write(source),
        }
    }

    /// Returns the problem of a damaged file.
    pub(crate) fn malformed(why: impl Into<SinkError>) -> Self {
        Self::Malformed(why.into())
    }

    /// Returns the problem of a file that has changed.
    pub(crate) fn changed(why: impl Into<String>) -> Self {
        Self::Changed { why: why.into() }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file.display(), self.problem)
    }
}

/// The message and the advice, for a `main` that returns the error; `{:#?}` shows the fields.
impl fmt::Debug for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f.debug_struct("FileError").field("file", &self.file).field("problem", &self.problem).finish();
        }
        write!(f, "{self}\n  → {}", self.problem.advice())
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.problem.source()
    }
}

fn example(name: &Option<String>) -> String {
    name.as_ref().map_or_else(String::new, |name| format!(" (the first is {name:?})"))
}
