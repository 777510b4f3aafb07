//! Writing tensors to a file or a stream.

use std::{
    io::Write,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    draft::{Draft, is_in_place},
    error::{FileError, FileProblem, SinkError},
    format::Format,
    local::check_size,
    npy, safetensors,
    storage::BUFFER_BYTES,
    tensor::TensorInfo,
};

/// A source of tensors.
pub trait Content {
    /// Returns the tensors, in their given order.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// Returns the metadata.
    fn metadata(&self) -> Vec<(String, String)>;

    /// Copies the bytes at `offset` of a tensor, given by its index in [`Content::tensors`], to `out`.
    ///
    /// # Errors
    /// Ends the writing as [`FileProblem::Content`].
    fn read(&self, tensor: usize, offset: u64, out: &mut [u8]) -> Result<(), SinkError>;
}

/// Writes tensors to a stream: all of them, or the one that `selection` names. Returns how many bytes were written.
///
/// `progress` is called with the number of bytes written since its last call. `cancel` ends the writing within one
/// buffer's time.
///
/// # Errors
/// [`FileError`], before anything is written if `format` cannot hold the tensors; [`FileProblem::ClosedPipe`] if the
/// reader is gone. Errors name the stream `-`.
pub fn write_to(
    content: &dyn Content,
    selection: Option<&str>,
    format: Format,
    out: &mut dyn Write,
    progress: &dyn Fn(u64),
    cancel: &AtomicBool,
) -> Result<u64, FileError> {
    WriteJob::new(Path::new("-"), content, selection, format)?.run(out, progress, cancel)
}

/// Writes tensors to a file, in the format of its suffix: all of them, or the one that `selection` names. Returns how
/// many bytes were written. Only `replace` replaces an existing file.
///
/// The file appears under its name when it is complete. After an error, an existing file is unchanged and nothing else
/// is left. Pipes, devices and open files are written directly. [`Draft`] says what a kill leaves.
///
/// # Errors
/// As [`write_to`]; also [`FileProblem::Exists`], [`FileProblem::Full`], [`FileProblem::IsFolder`] and
/// [`FileProblem::Write`].
pub fn write_to_path(
    content: &dyn Content,
    selection: Option<&str>,
    path: &Path,
    replace: bool,
    progress: &dyn Fn(u64),
    cancel: &AtomicBool,
) -> Result<u64, FileError> {
    let failed = |error| FileProblem::write(error).of(path);
    let job = WriteJob::new(path, content, selection, Format::from_path(path))?;
    if !is_in_place(path) {
        check_size(job.bytes()).map_err(|problem| problem.of(path))?;
    }
    let mut draft = Draft::create(path, replace).map_err(failed)?;
    let written = job.run(&mut draft, progress, cancel)?;
    draft.publish().map_err(failed)?;
    Ok(written)
}

/// The contents of a file to write.
struct WriteJob<'a> {
    path: &'a Path,
    content: &'a dyn Content,
    header: Vec<u8>,
    /// The tensors whose bytes follow the header, each with its index in the content.
    tensors: Vec<(usize, TensorInfo)>,
}

impl<'a> WriteJob<'a> {
    fn new(
        path: &'a Path,
        content: &'a dyn Content,
        selection: Option<&str>,
        format: Format,
    ) -> Result<Self, FileError> {
        let mut tensors: Vec<_> = content.tensors().into_iter().enumerate().collect();
        if let Some(name) = selection {
            tensors.retain(|(_, tensor)| tensor.name == name);
            if tensors.is_empty() {
                return Err(FileProblem::NoSuchTensor { tensor: name.to_owned() }.of(path));
            }
        }
        if format == Format::SafeTensors {
            let all: Vec<_> = tensors.iter().map(|(_, tensor)| tensor).collect();
            let (header, order) = safetensors::header(&all, &content.metadata()).map_err(|problem| problem.of(path))?;
            let tensors = order.into_iter().map(|i| tensors[i].clone()).collect();
            return Ok(Self { path, content, header, tensors });
        }
        let [(_, tensor)] = &tensors[..] else {
            let first = tensors.first().map(|(_, tensor)| tensor.name.clone());
            return Err(FileProblem::NotOneTensor { count: tensors.len(), first }.of(path));
        };
        let header = if format == Format::Npy { npy::header(tensor) } else { Ok(Vec::new()) };
        let header = header.map_err(|problem| problem.of(path))?;
        Ok(Self { path, content, header, tensors })
    }

    /// Returns the length of the file.
    fn bytes(&self) -> u64 {
        self.tensors.iter().fold(self.header.len() as u64, |sum, (_, tensor)| sum.saturating_add(tensor.bytes))
    }

    /// Writes the file, small tensors together.
    fn run(&self, out: &mut dyn Write, progress: &dyn Fn(u64), cancel: &AtomicBool) -> Result<u64, FileError> {
        let mut out = Output { path: self.path, out, progress, cancel, written: 0 };
        out.write(&self.header)?;
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut filled = 0;
        for (index, tensor) in &self.tensors {
            let mut offset = 0;
            while offset < tensor.bytes {
                if filled == buffer.len() {
                    out.write(&buffer)?;
                    filled = 0;
                }
                let len = (tensor.bytes - offset).min((buffer.len() - filled) as u64) as usize;
                let read = self.content.read(*index, offset, &mut buffer[filled..filled + len]);
                read.map_err(|source| FileProblem::Content { tensor: tensor.name.clone(), source }.of(self.path))?;
                offset += len as u64;
                filled += len;
            }
        }
        out.write(&buffer[..filled])?;
        out.out.flush().map_err(|e| FileProblem::write(e).of(self.path))?;
        Ok(out.written)
    }
}

struct Output<'a> {
    path: &'a Path,
    out: &'a mut dyn Write,
    progress: &'a dyn Fn(u64),
    cancel: &'a AtomicBool,
    written: u64,
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(FileProblem::Cancelled.of(self.path));
        }
        self.out.write_all(bytes).map_err(|e| FileProblem::write(e).of(self.path))?;
        self.written += bytes.len() as u64;
        (self.progress)(bytes.len() as u64);
        Ok(())
    }
}
