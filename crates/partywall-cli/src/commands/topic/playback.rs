//! Reads files of samples. No number in a file is believed before the file has shown that it has so many bytes, so a
//! damaged file costs no more memory than it has bytes. A file may have more bytes than this process may have memory,
//! even without using its disk; what does not fit is an error.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use partywall::{
    Error, ErrorKind,
    files::{self, FileError, FileProblem, Plan, safetensors_message},
};

use super::{
    file::{ENCODING, failed, unhex},
    mcap::{Fields, MAGIC, op},
};
use crate::failure::Failure;

/// Reads a file of samples from its beginning.
pub(super) struct Playback {
    path: PathBuf,
    file: File,
    /// The bytes of the file when it was opened.
    length: u64,
    /// Where the next record of the file begins.
    offset: u64,
    /// The records of the current chunk, or a record outside of chunks.
    records: Vec<u8>,
    /// Where the next of them begins.
    at: usize,
    /// Where the data of the last sample is in them.
    message: Range<usize>,
    channels: Channels,
}

/// The channels whose messages are samples, by number.
#[derive(Default)]
struct Channels(BTreeMap<u16, Channel>);

/// A recorded topic.
pub(super) struct Channel {
    /// Its name.
    pub(super) topic: String,
    /// What the recorder wrote about it.
    pub(super) metadata: BTreeMap<String, String>,
}

/// The next item of a file.
pub(super) enum Next {
    /// A sample of this channel, whose data is [`Playback::message`].
    Sample { channel: u16, log_time: u64 },
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
        let length = metadata.len();
        let playback = Self {
            path: path.to_owned(),
            file,
            length,
            offset: MAGIC.len() as u64,
            records: Vec::new(),
            at: 0,
            message: 0..0,
            channels: Channels::default(),
        };
        if playback.has_magic(0)? { Ok(playback) } else { Err(playback.is_no_mcap()) }
    }

    /// Returns the bytes of the file.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the channel with this number.
    pub(super) fn channel(&self, number: u16) -> Option<&Channel> {
        self.channels.0.get(&number)
    }

    /// Returns the recorded topics that were read so far.
    pub(super) fn topics(&self) -> BTreeSet<&str> {
        self.channels.0.values().map(|channel| channel.topic.as_str()).collect()
    }

    /// Returns the data of the last sample.
    pub(super) fn message(&self) -> &[u8] {
        &self.records[self.message.clone()]
    }

    /// Returns the next message of a channel of samples.
    pub(super) fn next(&mut self) -> Result<Next, Failure> {
        loop {
            while self.at < self.records.len() {
                let Some((opcode, data, rest)) = record(&self.records[self.at..]) else {
                    return Err(damaged(&self.path, "a record is longer than its chunk"));
                };
                self.at = self.records.len() - rest.len();
                let accepted = self.channels.accept(opcode, data).map_err(|why| damaged(&self.path, why))?;
                if let Some(Message { channel, log_time, data }) = accepted {
                    // A message ends with its data.
                    self.message = self.at - data.len()..self.at;
                    return Ok(Next::Sample { channel, log_time });
                }
            }
            if let Some(cut_off) = self.read()? {
                return Ok(Next::End { cut_off });
            }
        }
    }

    /// Reads the records of the next chunk, or the next channel or message outside of chunks. At the end of the file it
    /// returns whether the file is incomplete.
    fn read(&mut self) -> Result<Option<bool>, Failure> {
        loop {
            let start = self.offset;
            let mut head = [0; RECORD_HEAD];
            if self.length - start < head.len() as u64 {
                return Ok(Some(true));
            }
            self.read_at(&mut head, start)?;
            let [opcode, length @ ..] = head;
            let bytes = u64::from_le_bytes(length).saturating_add(head.len() as u64);
            // A record that is longer than the file cannot be complete.
            let Some(end) = start.checked_add(bytes).filter(|end| *end <= self.length) else { return Ok(Some(true)) };
            match opcode {
                op::CHUNK | op::CHANNEL | op::MESSAGE => {}
                op::FOOTER => return Ok(Some(!self.has_magic(end)?)),
                _ => {
                    self.offset = end;
                    continue;
                }
            }
            let mut records = std::mem::take(&mut self.records);
            records.clear();
            let room = records.try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX));
            room.map_err(|_| Error::from(FileProblem::Memory { bytes }.of(&self.path)))?;
            records.resize(bytes as usize, 0);
            self.read_at(&mut records, start)?;
            self.offset = end;
            self.at = 0;
            if opcode == op::CHUNK {
                let within = chunk(&self.path, &records[RECORD_HEAD..])?;
                self.at = RECORD_HEAD + within.start;
                records.truncate(RECORD_HEAD + within.end);
            }
            self.records = records;
            return Ok(None);
        }
    }

    /// Returns whether the file has the magic number at `offset`.
    fn has_magic(&self, offset: u64) -> Result<bool, Failure> {
        let mut found = [0; MAGIC.len()];
        if self.length - offset < found.len() as u64 {
            return Ok(false);
        }
        self.read_at(&mut found, offset)?;
        Ok(found == *MAGIC)
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> Result<(), Failure> {
        self.file.read_exact_at(out, offset).map_err(|error| failed(&self.path, "cannot be read", &error))
    }

    fn is_no_mcap(&self) -> Failure {
        // As for files of models.
        if let Err(error @ FileError { problem: FileProblem::LfsPointer, .. }) = Plan::from_path(&self.path) {
            return Error::from(error).into();
        }
        let what = format!("{} is not an MCAP file", self.path.display());
        Failure::new(ErrorKind::Refused, what, "name a file that `partywall topic record` wrote")
    }
}

impl Channels {
    /// Takes a record. Returns the message in it, if that is a sample, or why the record is damaged.
    fn accept<'a>(&mut self, opcode: u8, data: &'a [u8]) -> Result<Option<Message<'a>>, &'static str> {
        match opcode {
            op::CHANNEL => {
                let (number, encoding, channel) =
                    channel(Fields(data)).ok_or("a channel has a text that is not UTF-8 or longer than its record")?;
                if encoding == ENCODING {
                    self.0.insert(number, channel);
                }
                Ok(None)
            }
            op::MESSAGE => {
                let message = message(Fields(data)).ok_or("a message is too short")?;
                Ok(self.0.contains_key(&message.channel).then_some(message))
            }
            _ => Ok(None),
        }
    }
}

/// Returns the bytes of the largest sample of a recorded topic, as far as the file can be read. Ctrl-C ends the search.
pub(super) fn largest(path: &Path, topic: &str, stop: &AtomicBool) -> Result<u64, Failure> {
    let mut playback = Playback::open(path)?;
    let mut largest = 0;
    // Playing the file reports what is wrong with it.
    while let Ok(Next::Sample { channel, .. }) = playback.next() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let is_meant = playback.channel(channel).is_some_and(|channel| channel.topic == topic);
        if is_meant && let Ok((message, _)) = decode(path, playback.message()) {
            largest = largest.max(message.bytes.len() as u64);
        }
    }
    Ok(largest)
}

/// Returns a message and the user's header. Errors name the message by `name`.
pub(super) fn decode<'a>(name: &Path, message: &'a [u8]) -> Result<(files::Message<'a>, Vec<u8>), Failure> {
    let message = safetensors_message(message).map_err(|problem| Error::from(problem.of(name)))?;
    let header = message.metadata.iter().find(|(key, _)| key == "header").map_or("", |(_, value)| value);
    let header = unhex(header).ok_or_else(|| {
        let what = format!("{} is damaged: its header is not hexadecimal text", name.display());
        Failure::new(ErrorKind::Refused, what, "check the program that wrote the file")
    })?;
    Ok((message, header))
}

/// Returns where the records of a chunk are, if they are not compressed and as they were written.
fn chunk(path: &Path, data: &[u8]) -> Result<Range<usize>, Failure> {
    let parse = || {
        let mut fields = Fields(data);
        let _start_time = fields.u64()?;
        let _end_time = fields.u64()?;
        let _uncompressed = fields.u64()?;
        let sum = fields.u32()?;
        let compression = fields.text()?;
        let length = fields.u64()?;
        fields.bytes(length)?;
        let end = data.len() - fields.0.len();
        Some((sum, compression, end - length as usize..end))
    };
    let (sum, compression, records) = parse().ok_or_else(|| damaged(path, "a chunk is longer than its record"))?;
    if !compression.is_empty() {
        let what = format!("{} is compressed ({compression}), which is not supported", path.display());
        let advice = "rewrite it without compression: mcap compress --compression none";
        return Err(Failure::new(ErrorKind::Refused, what, advice));
    }
    // A writer without sums writes 0.
    if sum != 0 && sum != crc32fast::hash(&data[records.clone()]) {
        return Err(damaged(path, "a chunk differs from its checksum"));
    }
    Ok(records)
}

/// Returns the first record, its kind, and what follows it.
fn record(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (opcode, rest) = bytes.split_first()?;
    let mut fields = Fields(rest);
    let length = fields.u64()?;
    let data = fields.bytes(length)?;
    Some((*opcode, data, fields.0))
}

/// Returns the number, the encoding and the facts of a channel.
fn channel(mut fields: Fields<'_>) -> Option<(u16, &str, Channel)> {
    let number = fields.u16()?;
    let _schema = fields.u16()?;
    let topic = fields.text()?.to_owned();
    let encoding = fields.text()?;
    let length = fields.u32()?;
    let mut pairs = Fields(fields.bytes(length.into())?);
    let mut metadata = BTreeMap::new();
    while !pairs.0.is_empty() {
        let key = pairs.text()?;
        let value = pairs.text()?;
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Some((number, encoding, Channel { topic, metadata }))
}

/// A message of any channel.
struct Message<'a> {
    channel: u16,
    log_time: u64,
    data: &'a [u8],
}

fn message(mut fields: Fields<'_>) -> Option<Message<'_>> {
    let channel = fields.u16()?;
    let _sequence = fields.u32()?;
    let log_time = fields.u64()?;
    let _publish_time = fields.u64()?;
    Some(Message { channel, log_time, data: fields.0 })
}

fn damaged(path: &Path, why: &str) -> Failure {
    let what = format!("{} is damaged: {why}", path.display());
    Failure::new(ErrorKind::Refused, what, "run `mcap recover` to save its readable part")
}

/// The bytes of a record before its data: its kind and its length.
const RECORD_HEAD: usize = 1 + 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn lengths_beyond_their_record_are_found() {
        let pair = [text("depth"), text("4")].concat();
        let map = [&(pair.len() as u32).to_le_bytes()[..], &pair].concat();
        let whole = [&[7, 0, 1, 0][..], &text("camera"), &text(ENCODING), &map].concat();
        let (number, encoding, found) = channel(Fields(&whole)).unwrap();
        assert_eq!((number, encoding, found.topic.as_str()), (7, ENCODING, "camera"));
        assert_eq!(found.metadata, BTreeMap::from([("depth".to_owned(), "4".to_owned())]));
        for end in 0..whole.len() {
            assert!(channel(Fields(&whole[..end])).is_none(), "{end}");
        }
        // Each length, one after the other, is larger than anything that follows it.
        let lengths = whole.windows(4).enumerate().filter(|(_, length)| length[0] > 0 && length[1..] == [0; 3]);
        let lengths: Vec<_> = lengths.map(|(at, _)| at).filter(|at| *at >= 4).collect();
        assert_eq!(lengths.len(), 5);
        for at in lengths {
            let mut broken = whole.clone();
            broken[at + 3] = 0x7f;
            assert!(channel(Fields(&broken)).is_none(), "{at}");
        }
    }

    #[test]
    fn record_ends_within_its_chunk() {
        let bytes = [&[op::MESSAGE][..], &2_u64.to_le_bytes(), b"abc"].concat();
        assert_eq!(record(&bytes), Some((op::MESSAGE, &b"ab"[..], &b"c"[..])));
        assert_eq!(record(&bytes[..10]), None);
        assert_eq!(record(&[&[op::MESSAGE][..], &u64::MAX.to_le_bytes()].concat()), None);
    }

    #[test]
    fn chunk_is_checked_before_its_records_are_used() {
        let path = Path::new("f");
        let chunk_of = |sum: u32, compression: &str, length: u64| {
            [&[0; 24][..], &sum.to_le_bytes(), &text(compression), &length.to_le_bytes(), b"records"].concat()
        };
        for sum in [crc32fast::hash(b"records"), 0] {
            let data = chunk_of(sum, "", 7);
            assert_eq!(&data[chunk(path, &data).unwrap()], b"records");
        }
        for (data, why) in [
            (chunk_of(1, "", 7), "checksum"),
            (chunk_of(0, "", 8), "longer than its record"),
            (chunk_of(0, "lz4", 7), "compressed (lz4)"),
            (vec![0; 9], "longer than its record"),
        ] {
            assert!(chunk(path, &data).unwrap_err().message.contains(why), "{why}");
        }
    }

    #[test]
    fn file_is_read_as_far_as_it_goes() {
        let [file, _] = crate::commands::topic::mcap::tests::files(&[Some((7, 3)), None, Some((8, 2))]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let mut playback = Playback::open(&path).ok()?;
            let mut times = Vec::new();
            loop {
                match playback.next().unwrap() {
                    Next::Sample { log_time, .. } => times.push(log_time),
                    Next::End { cut_off } => return Some((times, cut_off)),
                }
            }
        };
        assert_eq!(read(&file), Some((vec![7, 8], false)));
        for end in 0..file.len() {
            match read(&file[..end]) {
                None => assert!(end < MAGIC.len()),
                Some((times, cut_off)) => assert!([7, 8].starts_with(&times) && cut_off, "{end}"),
            }
        }
        assert_eq!(read(b"no such file"), None);
    }
}
