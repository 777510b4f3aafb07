//! Why a file cannot be read or written: each variant names the file, and the tensor if it is about one.

use std::{
    io,
    path::{Path, PathBuf},
};

use partywall_os::Errno;
use partywall_shm::{DType, TableError};

/// What a [`Sink`](super::Sink) or a [`Content`](super::Content) reports.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Why a file could not be read or written. After a failed read, the sink may contain a part of the bytes. After a failed
/// write, an existing file of the name is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be opened or examined.
    #[error("{} cannot be opened: {source}", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Reading failed.
    #[error("{} cannot be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The file is a pipe, a socket or a device.
    #[error("{} is {kind}, not a regular file", file.display())]
    NotRegular {
        /// The file.
        file: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// The folder has neither an index nor a file that ends in `.safetensors`.
    #[error("the folder {} contains no .safetensors file", folder.display())]
    NoShards {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder has two indexes, so that its tensors are ambiguous.
    #[error("the folder {} contains two indexes, {} and {}", folder.display(), first.display(), second.display())]
    TwoIndexes {
        /// The folder.
        folder: PathBuf,
        /// The name of one.
        first: PathBuf,
        /// The name of another.
        second: PathBuf,
    },
    /// The file is a pointer of Git LFS to a file that was not downloaded.
    #[error("{} is not the file itself but a Git LFS pointer to it", file.display())]
    LfsPointer {
        /// The file.
        file: PathBuf,
    },
    /// The header declares a length above the limit.
    #[error("{} begins with a header of {bytes} bytes; at most {limit} are allowed", file.display())]
    HeaderTooLarge {
        /// The file.
        file: PathBuf,
        /// What it says.
        bytes: u64,
        /// What the format or this library allows.
        limit: u64,
    },
    /// The file ends before its header or its last tensor does.
    #[error("{} is truncated: it has {found} bytes and must have {expected}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Bytes that its header asks for, as far as that is known.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file has bytes after its last tensor.
    #[error("{} has {found} bytes but its tensors end at {expected}", file.display())]
    TrailingBytes {
        /// The file.
        file: PathBuf,
        /// Where the last tensor ends.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The header or the index is damaged or false.
    #[error("{} is damaged: {source}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: SinkError,
    },
    /// The index names a shard outside its own folder.
    #[error("{} names the shard {shard:?}, which may lie outside its folder", index.display())]
    OutsideFolder {
        /// The index.
        index: PathBuf,
        /// The shard as it stands there.
        shard: String,
    },
    /// The index names a shard that does not exist.
    #[error("{} is missing: {} wants tensor {tensor:?} from it", shard.display(), index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The shard.
        shard: PathBuf,
        /// A tensor that should be in it.
        tensor: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The tensor is not in the shard that the index names.
    #[error("{} does not contain tensor {tensor:?}, which {} wants from it", shard.display(), index.display())]
    MissingTensor {
        /// The index.
        index: PathBuf,
        /// The shard.
        shard: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tensor is in a shard, but not in the index.
    #[error("{} contains tensor {tensor:?}, which {} does not know", shard.display(), index.display())]
    ForeignTensor {
        /// The index.
        index: PathBuf,
        /// The shard.
        shard: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tensor is in two shards.
    #[error("tensor {tensor:?} is in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// A shard that has it.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
    },
    /// The elements have a type that tensors cannot have.
    #[error("{} contains elements of type {dtype}: {why}", file.display())]
    UnsupportedElements {
        /// The file.
        file: PathBuf,
        /// The type as it stands in the file.
        dtype: String,
        /// Why not.
        why: &'static str,
    },
    /// The tensors or the metadata do not fit into a tensor table.
    #[error("{} cannot become a segment: {source}", file.display())]
    Table {
        /// The file.
        file: PathBuf,
        /// The rule.
        source: TableError,
    },
    /// The stream has more bytes than the limit.
    #[error("{} has more than {limit} bytes", file.display())]
    TooLong {
        /// The stream.
        file: PathBuf,
        /// The limit that was given.
        limit: u64,
    },
    /// The file was written, replaced or removed while it was read.
    #[error("{} has changed while it was read: {why}", file.display())]
    Changed {
        /// The file.
        file: PathBuf,
        /// The difference.
        why: String,
    },
    /// The target of the copy could not be written.
    #[error("{} cannot be copied: {source}", file.display())]
    Sink {
        /// The file that was being read.
        file: PathBuf,
        /// What the sink says.
        source: SinkError,
    },
    /// The caller cancelled the operation.
    #[error("stopped before {} was complete", file.display())]
    Cancelled {
        /// The file.
        file: PathBuf,
    },
    /// No tensor has this name.
    #[error("there is no tensor {tensor:?} to write to {}", file.display())]
    NoSuchTensor {
        /// The file that was to be written.
        file: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// The format holds one tensor, and there are several, or none.
    #[error("{} can hold one tensor, and there are {count}{}", file.display(), example(first))]
    NotOneTensor {
        /// The file that was to be written.
        file: PathBuf,
        /// How many there are.
        count: usize,
        /// The name of the first.
        first: Option<String>,
    },
    /// The format has no such elements.
    #[error("{} cannot hold tensor {tensor:?}: {format} has no {dtype}", file.display())]
    FormatLacksElements {
        /// The file that was to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type of its elements.
        dtype: DType,
        /// The format.
        format: super::Format,
    },
    /// The format has no such order of elements.
    #[error("{} cannot hold tensor {tensor:?}: {format} has no strides {strides:?} for shape {shape:?}", file.display())]
    FormatLacksStrides {
        /// The file that was to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Elements along each dimension.
        shape: Vec<u64>,
        /// Elements from one index to the next.
        strides: Vec<u64>,
        /// The format.
        format: super::Format,
    },
    /// The format keeps this name for itself.
    #[error("{} cannot hold tensor {tensor:?}: {format} keeps this name for itself", file.display())]
    ReservedName {
        /// The file that was to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The format.
        format: super::Format,
    },
    /// The memory could not be read.
    #[error("tensor {tensor:?} cannot be read for {}: {source}", file.display())]
    Content {
        /// The file that was to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the content says.
        source: SinkError,
    },
    /// The target is a folder.
    #[error("{} is a folder", file.display())]
    IsFolder {
        /// The folder.
        file: PathBuf,
    },
    /// The file system, or the user's share of it, is full.
    #[error("there is no space for {}: {source}", file.display())]
    Full {
        /// The file that was to be written.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The file would exceed the limit on the size of files.
    #[error("{} reaches the file size limit", file.display())]
    SizeLimit {
        /// The file that was to be written.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The reader of the pipe has gone away.
    #[error("the reader of {} has closed it", file.display())]
    ClosedPipe {
        /// The pipe.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Writing failed.
    #[error("{} cannot be written: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl FileError {
    /// Returns whether the process or the machine cannot open another file.
    pub fn lacks_files(&self) -> bool {
        let errno = match self {
            Self::Open { source, .. } | Self::Read { source, .. } | Self::Write { source, .. } => source.raw_os_error(),
            _ => None,
        };
        [Errno::MFILE, Errno::NFILE].iter().any(|lack| errno == Some(lack.raw_os_error()))
    }

    /// Returns what to do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Open { .. } | Self::Write { .. } => "check the path and its permissions",
            Self::Read { .. } => "check the disk, then copy or download the file again",
            Self::NotRegular { .. } => "name a regular file, or use - and redirect it to standard input",
            Self::NoShards { .. } => "name a folder with .safetensors files, or a single file",
            Self::TwoIndexes { .. } => "name the index instead of the folder",
            Self::LfsPointer { .. } => "download it with `git lfs pull`",
            Self::HeaderTooLarge { .. } => "check that the file is what its suffix says, and download it again",
            Self::Truncated { .. } | Self::TrailingBytes { .. } | Self::Malformed { .. } => {
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
            Self::Table { .. } => "rename, reshape or split what is named here",
            Self::TooLong { .. } => "raise the limit, or write the stream to a file and name that",
            Self::Changed { .. } => "wait until nobody writes the file, then try again",
            Self::Sink { .. } | Self::Content { .. } => "see the cause",
            Self::Cancelled { .. } => "start again when you want it",
            Self::NoSuchTensor { .. } => "list the tensors with `partywall show NAME`",
            Self::NotOneTensor { .. } => {
                "name one with NAME:TENSOR, or write to a file that ends in .safetensors to get all"
            }
            Self::FormatLacksElements { format: super::Format::SafeTensors, .. } => {
                "write it to a file that ends in .npy, or to one of another suffix for its plain bytes"
            }
            Self::FormatLacksElements { .. } => {
                "write it to a file that ends in .safetensors, or to one of another suffix for its plain bytes"
            }
            Self::FormatLacksStrides { format: super::Format::SafeTensors, .. } => {
                "make it contiguous before it is put, or name it with NAME:TENSOR and write it to a file that ends in .npy"
            }
            Self::FormatLacksStrides { .. } => {
                "make it contiguous before it is put, or write it to a file of another suffix for its plain bytes"
            }
            Self::ReservedName { .. } => "name it with NAME:TENSOR and write it to a file of another suffix",
            Self::IsFolder { .. } => "name a file in it",
            Self::Full { .. } => "free some space, or write to another file system",
            Self::SizeLimit { .. } => "raise the limit in the shell that starts this (`ulimit -f unlimited`)",
            Self::ClosedPipe { .. } => "nothing, if the reader had enough",
        }
    }

    /// Returns the error for a failed write to `file`.
    pub(crate) fn from_write(file: &Path, source: io::Error) -> Self {
        let file = file.to_owned();
        match source.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe { file, source },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { file, source },
            io::ErrorKind::FileTooLarge => Self::SizeLimit { file, source },
            io::ErrorKind::IsADirectory => Self::IsFolder { file },
            _ => Self::Write { file, source },
        }
    }

    /// Returns the error that `file` is damaged.
    pub(crate) fn malformed(file: &Path, why: impl Into<SinkError>) -> Self {
        Self::Malformed { file: file.to_owned(), source: why.into() }
    }
}

fn example(name: &Option<String>) -> String {
    name.as_ref().map_or_else(String::new, |name| format!(" (the first is {name:?})"))
}
