//! Several safetensors files that are one set of tensors.

use std::{
    collections::HashMap,
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    error::{FileError, FileProblem},
    format::{has_suffix, is_safetensors},
    json::Members,
    storage::{FileReader, read_vec_at},
};

/// An index: the shard of each tensor.
#[derive(Debug)]
pub(crate) struct Index {
    path: PathBuf,
    shards: Vec<PathBuf>,
    /// Maps each tensor to the index of its shard in `shards`.
    wanted: HashMap<String, usize>,
}

/// An index as its file has it, without what is not needed.
#[derive(Deserialize)]
struct IndexFile {
    weight_map: Members<String>,
}

/// The contents of a folder.
#[derive(Debug)]
pub(crate) enum Folder {
    /// The index of the folder.
    Index(PathBuf),
    /// All shards of a folder without an index, sorted by name.
    Shards(Vec<PathBuf>),
}

impl Index {
    /// Reads the index at `path`, which has `length` bytes.
    pub(crate) fn read(path: &Path, reader: &mut dyn FileReader, length: u64) -> Result<Self, FileProblem> {
        if length > MAX_INDEX {
            return Err(FileProblem::HeaderTooLarge { bytes: length, limit: MAX_INDEX });
        }
        Self::parse(path, &read_vec_at(reader, length, 0)?)
    }

    /// Returns the shards in the order of their names.
    pub(crate) fn shards(&self) -> &[PathBuf] {
        &self.shards
    }

    /// Returns the error for a shard that cannot be opened.
    pub(crate) fn shard_error(&self, shard: usize, error: FileError) -> FileError {
        let problem = match error.problem {
            FileProblem::Open(source) if source.kind() == std::io::ErrorKind::NotFound => FileProblem::MissingShard {
                index: self.path.clone(),
                tensor: self.first(|_, from| from == shard).unwrap_or_default(),
                source,
            },
            other => other,
        };
        problem.of(error.file)
    }

    /// Returns whether the tensor of this shard is not meant, because the index names another shard for it.
    pub(crate) fn is_elsewhere(&self, shard: usize, tensor: &str) -> bool {
        self.wanted.get(tensor).is_some_and(|wanted| *wanted != shard)
    }

    /// Compares the index with the shards, of which tensors that are elsewhere are left out. `found` maps each tensor
    /// to the index of its shard.
    pub(crate) fn check(&self, found: &HashMap<&str, usize>) -> Result<(), FileError> {
        let missing = self.first(|tensor, from| found.get(tensor) != Some(&from));
        if let Some(tensor) = missing {
            let shard = &self.shards[self.wanted[&tensor]];
            return Err(FileProblem::MissingTensor { index: self.path.clone(), tensor }.of(shard));
        }
        let foreign = found.iter().filter(|(tensor, _)| !self.wanted.contains_key(**tensor)).min();
        match foreign {
            None => Ok(()),
            Some((tensor, shard)) => {
                let index = self.path.clone();
                let tensor = (*tensor).to_owned();
                Err(FileProblem::ForeignTensor { index, tensor }.of(&self.shards[*shard]))
            }
        }
    }

    fn parse(path: &Path, json: &[u8]) -> Result<Self, FileProblem> {
        let index: IndexFile = serde_json::from_slice(json).map_err(FileProblem::malformed)?;
        let Members(names) = index.weight_map;
        let mut shards: Vec<&str> = names.iter().map(|(_, shard)| shard.as_str()).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in &shards {
            let inside =
                Path::new(shard).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
            if shard.is_empty() || shard.contains('\0') || !inside {
                return Err(FileProblem::OutsideFolder { shard: (*shard).to_owned() });
            }
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let places: HashMap<&str, usize> = shards.iter().enumerate().map(|(place, shard)| (*shard, place)).collect();
        Ok(Self {
            path: path.to_owned(),
            shards: shards.iter().map(|shard| folder.join(shard)).collect(),
            wanted: names.iter().map(|(tensor, shard)| (tensor.clone(), places[shard.as_str()])).collect(),
        })
    }

    /// Returns the first tensor by name for which `wanted` holds.
    fn first(&self, wanted: impl Fn(&str, usize) -> bool) -> Option<String> {
        self.wanted.iter().filter(|(tensor, from)| wanted(tensor, **from)).map(|(tensor, _)| tensor).min().cloned()
    }
}

impl Folder {
    /// Sorts the files of a folder. Ignores files other than shards and indexes, and hidden ones: macOS puts a `._NAME`
    /// with the attributes of a file beside it, where the file system cannot hold them.
    pub(crate) fn of(folder: &Path, files: Vec<PathBuf>) -> Result<Self, FileError> {
        let mut shards = Vec::new();
        let mut index = None;
        for path in files {
            if is_hidden(&path) {
                continue;
            }
            if is_index(&path) {
                if let Some(first) = index.replace(path.clone()) {
                    let name = |path: &Path| path.file_name().unwrap_or_default().into();
                    let first = name(&first);
                    let second = name(&path);
                    return Err(FileProblem::TwoIndexes { first, second }.of(folder));
                }
            } else if is_safetensors(&path) {
                shards.push(path);
            }
        }
        shards.sort_unstable();
        match index {
            Some(index) => Ok(Self::Index(index)),
            None if shards.is_empty() => Err(FileProblem::NoShards.of(folder)),
            None => Ok(Self::Shards(shards)),
        }
    }
}

/// Returns whether the name is that of an index.
pub(crate) fn is_index(path: &Path) -> bool {
    has_suffix(path, ".safetensors.index.json")
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().unwrap_or_default().as_encoded_bytes().starts_with(b".")
}

/// The longest index that is read: as long as a safetensors header.
const MAX_INDEX: u64 = 100_000_000;
