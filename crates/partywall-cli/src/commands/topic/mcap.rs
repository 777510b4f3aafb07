//! The part of MCAP (<https://mcap.dev/spec>) that files of samples use: records, chunks without compression, and the
//! index at the end of a file.
//!
//! The tests hold it against the format's own library, which would bring fifteen crates into the program.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    mem,
};

use crc32fast::Hasher;

/// The bytes that a file begins and ends with.
pub(super) const MAGIC: &[u8; 8] = b"\x89MCAP0\r\n";

/// The kinds of records.
pub(super) mod op {
    pub(in super::super) const HEADER: u8 = 0x01;
    pub(in super::super) const FOOTER: u8 = 0x02;
    pub(in super::super) const CHANNEL: u8 = 0x04;
    pub(in super::super) const MESSAGE: u8 = 0x05;
    pub(in super::super) const CHUNK: u8 = 0x06;
    pub(in super::super) const MESSAGE_INDEX: u8 = 0x07;
    pub(in super::super) const CHUNK_INDEX: u8 = 0x08;
    pub(in super::super) const STATISTICS: u8 = 0x0b;
    pub(in super::super) const SUMMARY_OFFSET: u8 = 0x0e;
    pub(in super::super) const DATA_END: u8 = 0x0f;
}

/// Writes a file of one channel.
///
/// Messages are collected in a chunk. Only complete chunks are written, so the file can be read up to the last one even
/// if this process is killed.
pub(super) struct Writer<W> {
    to: W,
    /// The number of bytes that were written.
    at: u64,
    /// The checksum of those bytes.
    sum: Hasher,
    /// True after a write has failed. The file may then end in the middle of a record, so nothing may follow.
    has_failed: bool,
    /// The record of the channel.
    channel: Vec<u8>,
    /// The records of the chunk that is not written yet.
    chunk: Vec<u8>,
    /// Of each message in that chunk: its time, and where its record begins in the chunk.
    entries: Vec<u8>,
    times: Times,
    /// The records that describe the written chunks.
    index: Vec<u8>,
    chunks: u32,
    messages: u64,
    all_times: Times,
}

/// The times of the first and of the last message, or 0 if there is none.
#[derive(Default)]
struct Times(Option<(u64, u64)>);

impl Times {
    fn add(&mut self, time: u64) {
        let (first, last) = self.0.unwrap_or((time, time));
        self.0 = Some((first.min(time), last.max(time)));
    }

    fn bytes(&self) -> [u8; 16] {
        let (first, last) = self.0.unwrap_or_default();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..].copy_from_slice(&last.to_le_bytes());
        bytes
    }
}

impl<W: Write> Writer<W> {
    /// Begins a file by `library` with a channel of messages without a schema.
    pub(super) fn new(
        to: W,
        library: &str,
        topic: &str,
        encoding: &str,
        metadata: &BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let pairs: Vec<_> = metadata.iter().flat_map(|(key, value)| [text(key), text(value)].concat()).collect();
        let no_schema = 0_u16.to_le_bytes();
        let channel = [&CHANNEL.to_le_bytes()[..], &no_schema, &text(topic), &text(encoding), &sized(&pairs)];
        let channel = record(op::CHANNEL, &channel);
        let mut writer = Self {
            to,
            at: 0,
            sum: Hasher::new(),
            has_failed: false,
            chunk: channel.clone(),
            channel,
            entries: Vec::new(),
            times: Times::default(),
            index: Vec::new(),
            chunks: 0,
            messages: 0,
            all_times: Times::default(),
        };
        writer.write(MAGIC)?;
        writer.write(&record(op::HEADER, &[&text(""), &text(library)]))?;
        Ok(writer)
    }

    /// Adds a message, which is written when its chunk is full.
    pub(super) fn add(&mut self, sequence: u32, time: u64, data: &[u8]) -> io::Result<()> {
        if self.chunk.len() > CHUNK {
            self.write_chunk()?;
        }
        self.times.add(time);
        self.all_times.add(time);
        self.messages += 1;
        self.entries.extend(time.to_le_bytes());
        self.entries.extend((self.chunk.len() as u64).to_le_bytes());
        let [channel, sequence, time] = [&CHANNEL.to_le_bytes()[..], &sequence.to_le_bytes(), &time.to_le_bytes()];
        extend(&mut self.chunk, op::MESSAGE, &[channel, sequence, time, time, data]);
        Ok(())
    }

    /// Writes the messages that were added.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.write_chunk()?;
        self.to.flush()
    }

    /// Ends the file with its index.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.write_chunk()?;
        let sum = self.sum.clone().finalize();
        self.write(&record(op::DATA_END, &[&sum.to_le_bytes()]))?;
        let groups = [
            (op::CHANNEL, mem::take(&mut self.channel)),
            (op::STATISTICS, self.statistics()),
            (op::CHUNK_INDEX, mem::take(&mut self.index)),
        ];
        let start = self.at;
        self.sum = Hasher::new();
        let mut offsets = Vec::new();
        for (opcode, records) in groups.iter().filter(|(_, records)| !records.is_empty()) {
            let (begin, length) = (self.at.to_le_bytes(), (records.len() as u64).to_le_bytes());
            extend(&mut offsets, op::SUMMARY_OFFSET, &[&[*opcode], &begin, &length]);
            self.write(records)?;
        }
        let offsets_start = self.at;
        self.write(&offsets)?;
        // The checksum covers the footer as far as the checksum itself.
        let footer = record(op::FOOTER, &[&start.to_le_bytes(), &offsets_start.to_le_bytes(), &[0; 4]]);
        self.write(&footer[..footer.len() - 4])?;
        let sum = self.sum.clone().finalize();
        self.write(&sum.to_le_bytes())?;
        self.write(MAGIC)?;
        self.to.flush()
    }

    /// Writes the chunk, if there is anything in it, and the index of its messages.
    fn write_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = mem::take(&mut self.chunk);
        let entries = mem::take(&mut self.entries);
        let times = mem::take(&mut self.times).bytes();
        let size = (chunk.len() as u64).to_le_bytes();
        let sum = crc32fast::hash(&chunk).to_le_bytes();
        let compression = text("");
        let start = self.at;
        let mut head = record(op::CHUNK, &[&times, &size, &sum, &compression, &size]);
        let length = (head.len() - HEAD + chunk.len()) as u64;
        head[1..HEAD].copy_from_slice(&length.to_le_bytes());
        self.write(&head)?;
        self.write(&chunk)?;
        let end = self.at;
        let mut offsets = Vec::new();
        if !entries.is_empty() {
            offsets = [&CHANNEL.to_le_bytes()[..], &end.to_le_bytes()].concat();
            self.write(&record(op::MESSAGE_INDEX, &[&CHANNEL.to_le_bytes(), &sized(&entries)]))?;
        }
        let [start, length, index] = [start, end - start, self.at - end].map(u64::to_le_bytes);
        let described = [&times[..], &start, &length, &sized(&offsets), &index, &compression, &size, &size];
        extend(&mut self.index, op::CHUNK_INDEX, &described);
        self.chunks += 1;
        Ok(())
    }

    fn statistics(&self) -> Vec<u8> {
        let counts = match self.messages {
            0 => Vec::new(),
            messages => [&CHANNEL.to_le_bytes()[..], &messages.to_le_bytes()].concat(),
        };
        // Schemas, channels, attachments, pieces of metadata.
        let others = [&0_u16.to_le_bytes()[..], &1_u32.to_le_bytes(), &0_u64.to_le_bytes()].concat();
        let [messages, chunks] = [&self.messages.to_le_bytes()[..], &self.chunks.to_le_bytes()];
        record(op::STATISTICS, &[messages, &others, chunks, &self.all_times.bytes(), &sized(&counts)])
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.has_failed {
            return Err(io::Error::other("an earlier write failed"));
        }
        self.to.write_all(bytes).inspect_err(|_| self.has_failed = true)?;
        self.at += bytes.len() as u64;
        self.sum.update(bytes);
        Ok(())
    }
}

/// Returns a record with these fields.
fn record(opcode: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut record = Vec::new();
    extend(&mut record, opcode, fields);
    record
}

/// Appends a record with these fields.
fn extend(records: &mut Vec<u8>, opcode: u8, fields: &[&[u8]]) {
    let length: usize = fields.iter().map(|field| field.len()).sum();
    records.reserve(HEAD + length);
    records.push(opcode);
    records.extend((length as u64).to_le_bytes());
    fields.iter().for_each(|field| records.extend_from_slice(field));
}

fn text(text: &str) -> Vec<u8> {
    sized(text.as_bytes())
}

/// Returns bytes after their number, which the format limits to 32 bits.
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat()
}

/// The rest of a record. Each method returns `None` if that is too short, and allocates nothing.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn bytes(&mut self, length: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn text(&mut self) -> Option<&'a str> {
        let length = self.u32()?;
        str::from_utf8(self.bytes(length.into())?).ok()
    }
}

/// The number of the channel.
const CHANNEL: u16 = 1;

/// The bytes of a record before its fields: its kind and its length.
const HEAD: usize = 9;

/// The size in bytes at which a chunk is written.
const CHUNK: usize = 4 << 20;

#[cfg(test)]
pub(super) mod tests {
    use std::io::Cursor;

    use mcap::{WriteOptions, records::MessageHeader, write::NoSeek};

    use super::*;

    /// Returns a file of messages by this module and by the format's own library. `None` is a flush.
    pub(in super::super) fn files(messages: &[Option<(u64, usize)>]) -> [Vec<u8>; 2] {
        let metadata = BTreeMap::from([("depth".to_owned(), "4".to_owned()), ("place".to_owned(), "host".to_owned())]);
        let mut ours = Vec::new();
        let mut theirs = Vec::new();
        let mut writer = Writer::new(&mut ours, "us", "camera", "safetensors", &metadata).unwrap();
        let options = WriteOptions::new().compression(None).chunk_size(Some(CHUNK as u64)).disable_seeking(true);
        let mut library = options.library("us").create(NoSeek::new(Cursor::new(&mut theirs))).unwrap();
        let channel_id = library.add_channel(0, "camera", "safetensors", &metadata).unwrap();
        for (sequence, message) in (0..).zip(messages) {
            let Some((time, length)) = *message else {
                writer.flush().unwrap();
                library.flush().unwrap();
                continue;
            };
            let data = vec![sequence as u8; length];
            writer.add(sequence, time, &data).unwrap();
            let header = MessageHeader { channel_id, sequence, log_time: time, publish_time: time };
            library.write_to_known_channel(&header, &data).unwrap();
        }
        writer.finish().unwrap();
        library.finish().unwrap();
        drop(library);
        [ours, theirs]
    }

    #[test]
    fn files_are_the_librarys_byte_for_byte() {
        for messages in [
            &[][..],
            &[Some((7, 3))],
            &[Some((9, 0)), Some((5, 100)), None, None, Some((6, 1))],
            &[None, Some((1, CHUNK)), Some((2, 1)), Some((3, CHUNK + 1)), Some((4, 2)), None],
        ] {
            let [ours, theirs] = files(messages);
            assert!(ours == theirs, "{messages:?}: {} and {} bytes", ours.len(), theirs.len());
        }
    }

    #[test]
    fn nothing_follows_a_write_that_failed() {
        struct Full(usize);
        impl Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                if self.0 == 3 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(bytes.len()) }
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut full = Full(0);
        let mut writer = Writer::new(&mut full, "us", "x", "y", &BTreeMap::new()).unwrap();
        writer.add(0, 1, b"data").unwrap();
        assert_eq!(writer.flush().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(writer.finish().is_err());
        assert_eq!(full.0, 3);
    }
}
