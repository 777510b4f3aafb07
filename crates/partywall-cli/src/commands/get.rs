//! `partywall get`. With `--json`: `name`, `version`, `tensor` (or null), `file`, `format` (`raw`, `npy`,
//! `safetensors`), `bytes` (of the file), `seconds`, `bytes_per_second`. With `-` or `/dev/stdout`, standard output
//! carries the tensor and nothing else, so `--json` is refused there.

use std::{
    io::IsTerminal,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use partywall::{
    Address, Error, ErrorKind, Segment, bytes,
    files::{self, FileError, FileProblem, Format},
};
use serde_json::json;

use crate::{Context, failure::Failure, output::is_standard_output, progress, signals, text::parse_seconds};

/// The arguments of the command.
#[derive(Debug, Args)]
#[command(after_help = ADDRESSES)]
pub(crate) struct Arguments {
    /// The segment, its version (the latest by default), and a tensor in it
    #[arg(value_name = "NAME[:TENSOR][@V]")]
    address: String,
    /// The file: .npy and .safetensors by suffix, else raw bytes; or `-` for standard output
    #[arg(value_name = "FILE|-")]
    file: PathBuf,
    /// What to write to standard output [default: raw]
    #[arg(long)]
    format: Option<Shape>,
    /// Wait this long for a name that does not exist yet
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    wait: Option<Duration>,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

const ADDRESSES: &str = "\
NAME@V:TENSOR means the same as NAME:TENSOR@V. A name ends at the first `:` or `@`; a tensor's name may contain both.
If the latest version has a tensor that is really named TENSOR@V, that one is meant; NAME@V:TENSOR is never ambiguous.";

/// The format of a file, named by its suffix.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Shape {
    /// The bytes of one tensor
    Raw,
    /// One tensor with its type and shape
    Npy,
    /// All tensors, or one
    Safetensors,
}

impl From<Shape> for Format {
    fn from(shape: Shape) -> Self {
        match shape {
            Shape::Raw => Self::Raw,
            Shape::Npy => Self::Npy,
            Shape::Safetensors => Self::SafeTensors,
        }
    }
}

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    let address: Address = arguments.address.parse()?;
    let stream = arguments.file == Path::new("-") || is_standard_output(&arguments.file);
    let in_place = stream || files::is_in_place(&arguments.file);
    let usage = |message: &str, advice: &str| Err(Failure::new(ErrorKind::Usage, message, advice));
    if stream && context.output().is_json() {
        return usage("--json cannot be used: standard output carries the tensor", "leave out --json, or name a file");
    }
    if !stream && arguments.format.is_some() {
        return usage("--format is for standard output", "a file's suffix says its format: .npy, .safetensors, or raw");
    }
    if stream && std::io::stdout().is_terminal() {
        let advice = format!("name a file, or use a pipe: partywall get {} - | xxd | head", arguments.address);
        return usage("standard output is a terminal, and a tensor's bytes would garble it", &advice);
    }
    if !in_place && !arguments.force && std::fs::metadata(&arguments.file).is_ok_and(|file| file.is_file()) {
        let message = format!("{} already exists", arguments.file.display());
        return Err(Failure::new(ErrorKind::Refused, message, "name another file, or add --force to replace this one"));
    }
    let wait = arguments.wait.unwrap_or_default();
    // A process that waits for a name may be the first one in the domain, so it starts a broker.
    let domain = context.options().start(!wait.is_zero()).connect()?;
    let (segment, tensor) = domain.open_address(&address, wait)?;
    let tensor = tensor.as_deref();
    // Bytes in a stream cannot be taken back, so signals end the process directly.
    let cancel = if in_place { Arc::default() } else { signals::cancel_flag()? };
    let start = Instant::now();
    let written = if stream {
        let format = arguments.format.map_or(Format::Raw, Format::from);
        segment.write_to(tensor, format, &mut std::io::stdout().lock(), &|_| (), &cancel)
    } else {
        let progress = progress::of_bytes(context.output(), &arguments.address, expected(&segment, tensor));
        segment.write_to_path(tensor, &arguments.file, arguments.force, &|bytes| progress.inc(bytes), &cancel)
    };
    let written = match written {
        Ok(_) if stream => return Ok(()),
        Ok(written) => written,
        // A reader that has closed the pipe (`| head`) is not a failure.
        Err(Error::File(FileError { problem: FileProblem::ClosedPipe(_), .. })) if in_place => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let took = start.elapsed().as_secs_f64();
    let rate = written as f64 / took.max(1e-9);
    let what = tensor.map_or_else(String::new, |tensor| format!(":{tensor}"));
    context.output().line(format!(
        "{}@{}{what} → {}: {} in {took:.2} s ({:.2} GB/s)",
        segment.name(),
        segment.version(),
        arguments.file.display(),
        bytes(written),
        rate / 1e9
    ));
    context.output().value(&json!({
        "name": segment.name(),
        "version": segment.version(),
        "tensor": tensor,
        "file": arguments.file,
        "format": match Format::from_path(&arguments.file) {
            Format::Npy => "npy",
            Format::SafeTensors => "safetensors",
            _ => "raw",
        },
        "bytes": written,
        "seconds": took,
        "bytes_per_second": rate,
    }));
    Ok(())
}

/// Returns the approximate size of the file in bytes.
fn expected(segment: &Segment, tensor: Option<&str>) -> u64 {
    match tensor {
        Some(tensor) => segment.tensor(tensor).map_or(0, |tensor| tensor.bytes()),
        None => segment.tensors().iter().map(|tensor| tensor.bytes()).sum(),
    }
}
