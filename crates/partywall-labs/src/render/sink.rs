//! Where the parts of a movie go.

use std::{
    fs::File,
    io::{Read, Write},
};

use super::*;

/// Where the parts of a movie go. The watcher is never killed, so what it writes ends with a whole frame.
pub(super) struct Sink {
    file: Option<Box<dyn Write>>,
    /// The name while it is written, and the name afterwards.
    paths: Option<[PathBuf; 2]>,
    end: &'static [u8],
}

impl Sink {
    pub(super) fn open(output: &Output, force: bool) -> Result<Self, Failure> {
        let end = if matches!(output, Output::Gif(_)) { movie::END_OF_GIF } else { &[] };
        match output {
            Output::Nothing => Ok(Self { file: None, paths: None, end }),
            Output::Stream => Ok(Self { file: Some(Box::new(std::io::stdout())), paths: None, end }),
            Output::Folder(folder) => {
                let entries = fs::read_dir(folder).into_iter().flatten().flatten();
                let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
                if let Some(frame) = names.into_iter().find(|name| movie::is_frame(name)) {
                    return Err(taken(&folder.join(frame), "name another folder with --out, or remove the frames"));
                }
                // What is written now can be renamed later.
                let probe = folder.join(".partywall-render");
                let tried = fs::create_dir_all(folder)
                    .and_then(|()| fs::write(&probe, ""))
                    .and_then(|()| fs::remove_file(&probe));
                tried.map_err(|error| unwritable(folder, &error))?;
                Ok(Self { file: None, paths: None, end })
            }
            Output::Gif(path) | Output::Y4m(path) => {
                if path.exists() && !force {
                    return Err(taken(path, "name another file with --out, or add --force to replace this one"));
                }
                let part = path.with_added_extension("part");
                let file = File::create_new(&part).map_err(|error| match error.kind() {
                    std::io::ErrorKind::AlreadyExists => taken(
                        &part,
                        "another run writes it: name another file with --out, or remove what a killed run left",
                    ),
                    _ => unwritable(path, &error),
                })?;
                Ok(Self { file: Some(Box::new(file)), paths: Some([part, path.clone()]), end })
            }
        }
    }

    /// Appends a part that the writer has sent.
    pub(super) fn append(&mut self, part: std::os::fd::OwnedFd) -> Result<(), Failure> {
        let mut bytes = Vec::new();
        let mut part = File::from(part);
        let read = std::io::Seek::rewind(&mut part).and_then(|()| part.read_to_end(&mut bytes));
        read.map_err(|error| unexpected(format!("a part of the movie cannot be read: {error}")))?;
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let path = self.paths.as_ref().map_or(Path::new("standard output"), |[_, path]| path);
        file.write_all(bytes).and_then(|()| file.flush()).map_err(|error| unwritable(path, &error))
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        self.write(self.end)?;
        self.file = None;
        let Some([part, path]) = &self.paths else { return Ok(()) };
        fs::rename(part, path).map_err(|error| unwritable(path, &error))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some([part, _]) = &self.paths {
            // Nothing is left of a movie without an end. A finished one has another name by now.
            let _ = fs::remove_file(part);
        }
    }
}

/// Returns the refusal of a movie or frame that is there, which would be replaced, or lie among the new ones.
fn taken(path: &Path, advice: &str) -> Failure {
    Failure::new(ErrorKind::Refused, format!("{} already exists", path.display()), advice)
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    let what = format!("cannot write {}: {error}", path.display());
    Failure::new(ErrorKind::Refused, what, "pass a folder or file that you may write with --out")
}

/// Writes a file atomically: it is complete or absent.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let part = path.with_added_extension("part");
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).map_err(|error| unwritable(path, &error))
}
