//! The formats of files, which the suffixes of their names choose.

use std::{fmt, path::Path};

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// The bytes of one tensor as they lie in memory, and nothing else.
    Raw,
    /// One tensor with its type and shape.
    Npy,
    /// Tensors with their names, and metadata: the same file as the safetensors library writes.
    SafeTensors,
}

impl Format {
    /// Returns the format of the suffix of `path`: `.npy`, `.safetensors`, or [`Format::Raw`] for any other.
    pub fn from_path(path: &Path) -> Self {
        if has_suffix(path, ".npy") {
            Self::Npy
        } else if is_safetensors(path) {
            Self::SafeTensors
        } else {
            Self::Raw
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Raw => "raw bytes",
            Self::Npy => ".npy",
            Self::SafeTensors => ".safetensors",
        })
    }
}

/// Returns whether the name is that of a safetensors file.
pub(crate) fn is_safetensors(path: &Path) -> bool {
    has_suffix(path, ".safetensors")
}

/// Returns whether the name ends in `suffix`, ignoring case.
pub(crate) fn has_suffix(path: &Path, suffix: &str) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.len() >= suffix.len() && name[name.len() - suffix.len()..].eq_ignore_ascii_case(suffix.as_bytes())
}
