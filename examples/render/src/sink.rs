//! Where the parts of a movie go.

use std::{
    fs::File,
    io::{self, Read, Write},
};

use partywall::files::{Draft, write_file};

use super::*;

/// Where the parts of a movie go. A movie without an end leaves nothing.
pub(super) struct Sink {
    to: To,
    end: &'static [u8],
}

enum To {
    Nothing,
    Stream,
    File { draft: Draft, path: PathBuf },
}

impl Sink {
    pub(super) fn open(output: &Output, force: bool) -> Result<Self, Failure> {
        let end = if matches!(output, Output::Gif(_)) { movie::END_OF_GIF } else { &[] };
        match output {
            Output::Nothing => Ok(Self { to: To::Nothing, end }),
            Output::Stream => Ok(Self { to: To::Stream, end }),
            Output::Folder(folder) => {
                let entries = fs::read_dir(folder).into_iter().flatten().flatten();
                let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
                if let Some(frame) = names.into_iter().find(|name| movie::is_frame(name)) {
                    return Err(taken(&folder.join(frame), "name another folder with --out, or remove the frames"));
                }
                let tried = fs::create_dir_all(folder).and_then(|()| Draft::create(&folder.join("frame"), true));
                tried.map_err(|error| unwritable(folder, &error))?;
                Ok(Self { to: To::Nothing, end })
            }
            Output::Gif(path) | Output::Y4m(path) => {
                let draft = Draft::create(path, force).map_err(|error| unwritable(path, &error))?;
                Ok(Self { to: To::File { draft, path: path.clone() }, end })
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
        let (file, path): (&mut dyn Write, &Path) = match &mut self.to {
            To::Nothing => return Ok(()),
            To::Stream => (&mut io::stdout(), Path::new("standard output")),
            To::File { draft, path } => (draft, path),
        };
        file.write_all(bytes).and_then(|()| file.flush()).map_err(|error| unwritable(path, &error))
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        self.write(self.end)?;
        let To::File { draft, path } = self.to else { return Ok(()) };
        draft.publish().map(drop).map_err(|error| unwritable(&path, &error))
    }
}

/// Returns the refusal of a movie or frame that is there, which would be replaced, or lie among the new ones.
fn taken(path: &Path, advice: &str) -> Failure {
    Failure::new(ErrorKind::Refused, format!("{} already exists", path.display()), advice)
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::AlreadyExists {
        return taken(path, "name another file with --out, or add --force to replace this one");
    }
    let what = format!("cannot write {}: {error}", path.display());
    Failure::new(ErrorKind::Refused, what, "pass a folder or file that you may write with --out")
}

/// Writes a file atomically: it is complete or absent.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_file(path, bytes, true).map_err(|error| unwritable(path, &error))
}
