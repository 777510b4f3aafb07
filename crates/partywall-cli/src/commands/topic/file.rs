//! Writes files of samples: MCAP (<https://mcap.dev/spec>), each message a safetensors file of one tensor.
//! `docs/topic-files.md` describes them.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, ErrorKind as IoErrorKind, Write},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use partywall::{
    Error, ErrorKind, Sample, Topic,
    files::{Draft, TensorInfo, safetensors_header},
};

use super::{bytes_of, mcap::Writer, stdout::Stdout};
use crate::failure::Failure;

/// Writes a file of samples.
pub(super) struct Recording {
    path: PathBuf,
    writer: Writer<BufWriter<Box<dyn Write>>>,
    /// The buffer of the next message.
    message: Vec<u8>,
    flushed: Instant,
}

impl Recording {
    /// Creates a file, or writes to standard output for `-`. Only `force` replaces an existing file. A reader of
    /// standard output that has gone sets `stop`.
    pub(super) fn create(path: &Path, topic: &Topic, force: bool, stop: &Arc<AtomicBool>) -> Result<Self, Failure> {
        let file: Box<dyn Write> =
            if path == Path::new("-") { Box::new(Stdout::new(stop)) } else { Box::new(create(path, force)?) };
        let library = format!("partywall {}", partywall::VERSION);
        let writer = Writer::new(BufWriter::new(file), &library, topic.name(), ENCODING, &facts(topic));
        let writer = writer.map_err(|error| not_written(path, &error))?;
        Ok(Self { path: path.to_owned(), writer, message: Vec::new(), flushed: Instant::now() })
    }

    /// Adds a sample, received now. The inner error concerns the sample, which is then not in the file.
    pub(super) fn add(&mut self, sample: &Sample) -> Result<Result<(), Error>, Failure> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let Some(tensor) = TensorInfo::contiguous(TENSOR, sample.dtype(), sample.shape().to_vec()) else {
            let why = format!("sample {} has an impossible shape: {:?}", sample.position(), sample.shape());
            return Err(Failure::new(ErrorKind::Refused, why, "check its publisher"));
        };
        let metadata = [
            ("header", hex(&sample.header())),
            ("publisher", sample.publisher().to_string()),
            ("sequence", sample.sequence().to_string()),
            ("position", sample.position().to_string()),
            ("missed", sample.missed().to_string()),
        ];
        let metadata: Vec<_> = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        self.message = safetensors_header(&tensor, &metadata).map_err(|problem| {
            let advice =
                "publish such samples as another type, for example complex128 as float64 with one more dimension";
            Failure::new(ErrorKind::Refused, problem.of(&self.path).to_string(), advice)
        })?;
        if let Err(error) = bytes_of(sample, u64::MAX, &mut self.message) {
            return Ok(Err(error));
        }
        // The format has only 32 bits for the sequence number; the metadata has all 64.
        let added = self.writer.add(sample.sequence() as u32, time, &self.message);
        added.map_err(|error| not_written(&self.path, &error))?;
        self.flush_if_due()?;
        Ok(Ok(()))
    }

    /// Writes the added samples regularly. A killed process loses the samples since the last write.
    pub(super) fn flush_if_due(&mut self) -> Result<(), Failure> {
        if self.flushed.elapsed() < FLUSH {
            return Ok(());
        }
        self.flushed = Instant::now();
        self.writer.flush().map_err(|error| not_written(&self.path, &error))
    }

    /// Ends the file with its index.
    pub(super) fn finish(self) -> Result<(), Failure> {
        self.writer.finish().map_err(|error| not_written(&self.path, &error))
    }
}

/// Creates a file. Only `force` replaces an existing one.
fn create(path: &Path, force: bool) -> Result<File, Failure> {
    // The file has its name from the beginning: it can be read after a kill, up to the last complete chunk.
    let file = Draft::create(path, force).and_then(Draft::publish);
    file.map_err(|error| match error.kind() {
        IoErrorKind::AlreadyExists => Failure::new(
            ErrorKind::Refused,
            format!("{} already exists", path.display()),
            "name another file, or replace it with --force",
        ),
        _ => failed(path, "cannot be created", &error),
    })
}

/// Returns the metadata of the topic, from which a topic like it can be created.
fn facts(topic: &Topic) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("max_bytes".to_owned(), topic.max_bytes().to_string()),
        ("depth".to_owned(), topic.depth().to_string()),
        ("place".to_owned(), topic.place().to_string()),
    ]);
    facts.extend(topic.dtype().map(|dtype| ("dtype".to_owned(), dtype.name().to_owned())));
    facts.extend(topic.shape().map(|shape| ("shape".to_owned(), shape_text(shape))));
    facts
}

/// Returns the shape of samples as text: `any,640,3`.
fn shape_text(shape: &[Option<u64>]) -> String {
    let extent = |extent: &Option<u64>| extent.map_or_else(|| ANY.to_owned(), |extent| extent.to_string());
    shape.iter().map(extent).collect::<Vec<_>>().join(",")
}

/// Parses a text that [`shape_text`] returns.
pub(super) fn parse_shape(text: &str) -> Result<Vec<Option<u64>>, String> {
    let extent = |text: &str| match text.trim() {
        ANY => Ok(None),
        number => number.parse().map(Some).map_err(|_| format!("{number:?} is neither a length nor `{ANY}`")),
    };
    // The shape of a single number has no dimensions.
    if text.trim().is_empty() { Ok(Vec::new()) } else { text.split(',').map(extent).collect() }
}

/// Returns bytes as pairs of hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the bytes that [`hex`] was given.
pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<_> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let pairs = digits.chunks(2).map(|pair| Some((pair.first()? * 16 + pair.get(1)?) as u8));
    pairs.collect()
}

fn not_written(path: &Path, error: &io::Error) -> Failure {
    failed(path, "cannot be written", error)
}

/// Returns the failure of a call about a file.
pub(super) fn failed(path: &Path, what: &str, error: &io::Error) -> Failure {
    let kind = if error.kind() == IoErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Refused };
    let advice = match error.kind() {
        IoErrorKind::NotFound => "check the path",
        IoErrorKind::StorageFull | IoErrorKind::QuotaExceeded => {
            "make room; the file holds the samples recorded until then"
        }
        IoErrorKind::FileTooLarge => {
            let what = format!("{} reaches the file size limit", path.display());
            let advice = "raise it (`ulimit -f unlimited`); the file holds the samples recorded until then";
            return Failure::new(kind, what, advice);
        }
        _ => "check the system error",
    };
    Failure::new(kind, format!("{} {what}: {error}", path.display()), advice)
}

/// A dimension that may have any length.
const ANY: &str = "any";

/// The encoding of messages.
pub(super) const ENCODING: &str = "safetensors";

/// The name of the tensor in a message.
const TENSOR: &str = "data";

/// How often an incomplete chunk is written.
const FLUSH: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_lengths_with_commas() {
        for shape in [&[][..], &[None], &[Some(480), None, Some(3)]] {
            assert_eq!(parse_shape(&shape_text(shape)).unwrap(), shape);
        }
        assert_eq!(parse_shape("4, any").unwrap(), [Some(4), None]);
        for bad in ["4,", "-1", "4x3", "*"] {
            assert!(parse_shape(bad).unwrap_err().contains("`any`"), "{bad}");
        }
    }

    #[test]
    fn headers_are_hexadecimal_text() {
        assert_eq!(hex(&[0, 0xab, 0xff]), "00abff");
        assert_eq!(unhex("00abff"), Some(vec![0, 0xab, 0xff]));
        assert_eq!(unhex(""), Some(Vec::new()));
        for bad in ["0", "0g", "ä1", "+1"] {
            assert_eq!(unhex(bad), None, "{bad}");
        }
    }
}
