//! Files of samples: MCAP (<https://mcap.dev/spec>), each message a safetensors file of one tensor.
//! `docs/topic-files.md` describes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::{self, BufWriter, ErrorKind as IoErrorKind, Read},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use mcap::{
    McapError, WriteOptions, Writer,
    records::{MessageHeader, Record},
    sans_io::linear_reader::{LinearReadEvent, LinearReader, LinearReaderOptions},
};
use partywall::{
    Error, ErrorKind, Sample, Topic,
    files::{Message, TensorInfo, safetensors_header, safetensors_message},
};

use super::bytes_of;
use crate::failure::Failure;

/// Writes a file of samples.
pub(super) struct Recording {
    path: PathBuf,
    writer: Writer<BufWriter<File>>,
    channel: u16,
    /// The buffer of the next message.
    message: Vec<u8>,
    flushed: Instant,
}

impl Recording {
    /// Creates a file. Only `force` replaces an existing one.
    pub(super) fn create(path: &Path, topic: &Topic, force: bool) -> Result<Self, Failure> {
        // Other commands write to standard output for `-`.
        if path == Path::new("-") {
            return Err(Failure::new(
                ErrorKind::Usage,
                "cannot record to standard output",
                "name a file; ./- is a file of this name",
            ));
        }
        // Unless `force`, `create_new` outranks the options before it.
        let file = OpenOptions::new().write(true).create(true).truncate(true).create_new(!force).open(path);
        let file = file.map_err(|error| match error.kind() {
            IoErrorKind::AlreadyExists => Failure::new(
                ErrorKind::Refused,
                format!("{} already exists", path.display()),
                "name another file, or replace it with --force",
            ),
            _ => failed(path, "cannot be created", &error),
        })?;
        // Complete chunks are written, so the file is readable up to the last one even if this process is killed.
        let options = WriteOptions::new().compression(None).chunk_size(Some(CHUNK)).disable_seeking(true);
        let options = options.library(format!("partywall {}", partywall::VERSION));
        let begin = || {
            let mut writer = options.create(BufWriter::new(file))?;
            let channel = writer.add_channel(0, topic.name(), ENCODING, &facts(topic))?;
            Ok((writer, channel))
        };
        let (writer, channel) = begin().map_err(|error| not_written(path, &error))?;
        Ok(Self { path: path.to_owned(), writer, channel, message: Vec::new(), flushed: Instant::now() })
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
        let header = MessageHeader {
            channel_id: self.channel,
            // The format has only 32 bits for the sequence number; the metadata has all 64.
            sequence: sample.sequence() as u32,
            log_time: time,
            publish_time: time,
        };
        let written = self.writer.write_to_known_channel(&header, &self.message);
        written.map_err(|error| not_written(&self.path, &error))?;
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
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        let finished = self.writer.finish().map(drop);
        finished.map_err(|error| not_written(&self.path, &error))
    }
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

/// Reads a file of samples from its beginning.
pub(super) struct Playback {
    path: PathBuf,
    file: File,
    reader: LinearReader,
    /// The channels whose messages are samples, by number: the topic of each and its metadata.
    channels: BTreeMap<u16, (String, BTreeMap<String, String>)>,
    /// True if any record of the file was valid.
    is_mcap: bool,
}

/// The next item of a file.
pub(super) enum Next {
    /// A sample of the channel with this topic.
    Sample { channel: u16, log_time: u64, message: Vec<u8> },
    /// The end of the file, which may be incomplete.
    End { cut_off: bool },
}

impl Playback {
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = opened.map_err(|error| failed(path, "cannot be opened", &error))?;
        if !metadata.is_file() {
            let what = format!("{} is not a regular file", path.display());
            return Err(Failure::new(ErrorKind::Refused, what, "name an MCAP file"));
        }
        // A record is never longer than the file, so a damaged length causes no larger allocation.
        let limit = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        let options = LinearReaderOptions::default().with_prevalidate_chunk_crcs(true).with_record_length_limit(limit);
        let reader = LinearReader::new_with_options(options);
        Ok(Self { path: path.to_owned(), file, reader, channels: BTreeMap::new(), is_mcap: false })
    }

    /// Returns the topic of a channel and its metadata.
    pub(super) fn channel(&self, number: u16) -> Option<&(String, BTreeMap<String, String>)> {
        self.channels.get(&number)
    }

    /// Returns the recorded topics that were read so far.
    pub(super) fn topics(&self) -> BTreeSet<&str> {
        self.channels.values().map(|(topic, _)| topic.as_str()).collect()
    }

    /// Returns the next message of a channel of samples.
    pub(super) fn next(&mut self) -> Result<Next, Failure> {
        loop {
            let record = match self.reader.next_event() {
                None => return Ok(Next::End { cut_off: false }),
                Some(Ok(LinearReadEvent::ReadRequest(bytes))) => {
                    let read = loop {
                        match self.file.read(self.reader.insert(bytes)) {
                            Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                            read => break read,
                        }
                    };
                    self.reader.notify_read(read.map_err(|error| failed(&self.path, "cannot be read", &error))?);
                    continue;
                }
                Some(Ok(LinearReadEvent::Record { data, opcode })) => mcap::parse_record(opcode, data),
                Some(Err(error)) => Err(error),
            };
            match record {
                Ok(Record::Channel(channel)) if channel.message_encoding == ENCODING => {
                    self.channels.insert(channel.id, (channel.topic, channel.metadata));
                }
                Ok(Record::Message { header, data }) if self.channels.contains_key(&header.channel_id) => {
                    let channel = header.channel_id;
                    let log_time = header.log_time;
                    let message = data.into_owned();
                    return Ok(Next::Sample { channel, log_time, message });
                }
                Ok(_) => {}
                // A record that is longer than the file cannot be complete.
                Err(McapError::UnexpectedEof | McapError::RecordTooLarge { .. } | McapError::ChunkTooLarge(_))
                    if self.is_mcap =>
                {
                    return Ok(Next::End { cut_off: true });
                }
                Err(McapError::BadMagic | McapError::UnexpectedEof) => {
                    let what = format!("{} is not an MCAP file", self.path.display());
                    let advice = "name a file that `partywall topic record` wrote";
                    return Err(Failure::new(ErrorKind::Refused, what, advice));
                }
                Err(McapError::UnsupportedCompression(name)) => {
                    let what = format!("{} is compressed ({name}), which is not supported", self.path.display());
                    let advice = "rewrite it without compression: mcap compress --compression none";
                    return Err(Failure::new(ErrorKind::Refused, what, advice));
                }
                Err(error) => {
                    let what = format!("{} is damaged: {error}", self.path.display());
                    return Err(Failure::new(ErrorKind::Refused, what, "run `mcap recover` to save its readable part"));
                }
            }
            self.is_mcap = true;
        }
    }
}

/// Returns a message and the user's header. Errors name the message by `name`.
pub(super) fn decode<'a>(name: &Path, message: &'a [u8]) -> Result<(Message<'a>, Vec<u8>), Failure> {
    let message = safetensors_message(message).map_err(|problem| Error::from(problem.of(name)))?;
    let header = message.metadata.iter().find(|(key, _)| key == "header").map_or("", |(_, value)| value);
    let header = unhex(header).ok_or_else(|| {
        let what = format!("{} is damaged: its header is not hexadecimal text", name.display());
        Failure::new(ErrorKind::Refused, what, "check the program that wrote the file")
    })?;
    Ok((message, header))
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

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<_> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let pairs = digits.chunks(2).map(|pair| Some((pair.first()? * 16 + pair.get(1)?) as u8));
    pairs.collect()
}

fn not_written(path: &Path, error: &McapError) -> Failure {
    match error {
        McapError::Io(error) => failed(path, "cannot be written", error),
        error => Failure::new(ErrorKind::Refused, format!("{} cannot be written: {error}", path.display()), ""),
    }
}

fn failed(path: &Path, what: &str, error: &io::Error) -> Failure {
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
const ENCODING: &str = "safetensors";

/// The name of the tensor in a message.
const TENSOR: &str = "data";

/// The size in bytes at which a chunk is written.
const CHUNK: u64 = 4 << 20;

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
