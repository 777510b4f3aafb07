//! The journal: what a broker knows, in memory that outlives its process.
//!
//! The journal consists of two memfds, of which one is current. The current file begins with a snapshot, and records
//! follow. Each is a frame: its length, a checksum, its bytes.
//!
//! | a kill | leaves |
//! |---|---|
//! | while a record is written | a frame whose checksum is wrong: the record does not exist |
//! | after it | a committed record |
//! | while a snapshot is written into the other file | the current file, which stays current |
//! | after it | a snapshot with a higher number, which makes the other file current |
//!
//! Memory is allocated before a record needs it, so a full machine refuses a request and does not end the broker. Some
//! is kept for what must not be refused: members give back what they hold, and die. Behind the last frame all bytes are
//! zero.

use std::{
    ops::Range,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

use partywall_os::Errno;
use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create},
    io::{pread, pwrite, retry_on_intr},
};
use serde::{Serialize, de::DeserializeOwned};

/// The two files, and the place of the next record.
#[derive(Debug)]
pub(crate) struct Journal {
    files: [OwnedFd; 2],
    current: usize,
    /// The number of the current file's snapshot; 0 if there is none.
    snapshot: u64,
    /// Length of the snapshot's frame.
    snapshot_bytes: u64,
    /// Bytes of records before which no other snapshot is tried, after one has failed.
    retry_at: u64,
    /// Where the next frame begins.
    end: u64,
    /// Bytes of the current file that have memory.
    allocated: u64,
    /// Bytes that are kept beside [`HEADROOM`] for records of what members give back.
    kept: u64,
    /// The next frame, while it is prepared. Kept to reuse its memory.
    frame: Vec<u8>,
}

/// What a journal contains.
#[derive(Debug)]
pub(crate) struct Contents {
    bytes: Vec<u8>,
    /// The snapshot, then the records.
    frames: Vec<Range<usize>>,
}

impl Contents {
    /// Returns the encoding of the snapshot.
    pub(crate) fn snapshot(&self) -> &[u8] {
        let frame = self.frames.first().and_then(|frame| self.bytes.get(frame.start + NUMBER..frame.end));
        frame.unwrap_or_default()
    }

    /// Decodes the records, in the order in which they were written.
    pub(crate) fn records<T: DeserializeOwned>(&self) -> impl Iterator<Item = Result<T, postcard::Error>> {
        let frames = self.frames.iter().skip(1);
        frames.map(|frame| postcard::from_bytes(self.bytes.get(frame.clone()).unwrap_or_default()))
    }
}

impl Journal {
    /// Creates an empty journal.
    pub(crate) fn create() -> Result<Self, Errno> {
        let file = || memfd_create("partywall:journal", MemfdFlags::CLOEXEC);
        Ok(Self::of([file()?, file()?]))
    }

    /// Returns the journal in these files, to be read.
    pub(crate) fn of(files: [OwnedFd; 2]) -> Self {
        Self {
            files,
            current: 0,
            snapshot: 0,
            snapshot_bytes: 0,
            retry_at: 0,
            end: 0,
            allocated: 0,
            kept: 0,
            frame: Vec::new(),
        }
    }

    /// Returns the numbers of the files.
    pub(crate) fn numbers(&self) -> [RawFd; 2] {
        self.files.each_ref().map(AsRawFd::as_raw_fd)
    }

    /// Reads what an earlier process has written. The next record goes behind it. Returns `None` if there is nothing.
    pub(crate) fn read(&mut self) -> Result<Option<Contents>, Errno> {
        let mut newest: Option<(u64, usize, Contents)> = None;
        for (index, file) in self.files.iter().enumerate() {
            let contents = read_file(file)?;
            let Some(first) = contents.frames.first() else { continue };
            let number = contents.bytes.get(first.start..first.start + NUMBER);
            let number = number.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
            if newest.as_ref().is_none_or(|(newest, ..)| number > *newest) {
                newest = Some((number, index, contents));
            }
        }
        let Some((number, index, contents)) = newest else { return Ok(None) };
        self.snapshot = number;
        self.current = index;
        self.snapshot_bytes = contents.frames.first().map_or(0, |frame| frame.end as u64);
        self.end = contents.frames.last().map_or(0, |frame| frame.end as u64);
        self.allocated = contents.bytes.len() as u64;
        // A frame that a kill cut off may lie behind the last one.
        let file = &self.files[index];
        ftruncate(file, self.end)?;
        ftruncate(file, self.allocated)?;
        // Without the memory, the next record has to allocate it.
        if allocate(file, self.end, self.allocated - self.end).is_err() {
            self.allocated = self.end;
        }
        Ok(Some(contents))
    }

    /// Sets how many bytes [`Journal::reserve`] and [`Journal::begin`] leave free for records of what members give
    /// back.
    pub(crate) fn keep(&mut self, bytes: u64) {
        self.kept = bytes;
    }

    /// Makes room for records of this many bytes together, beside what is kept for others.
    ///
    /// # Errors
    /// As fallocate(2). The journal is unchanged.
    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<(), Errno> {
        let needed = self.end.saturating_add(bytes).saturating_add(HEADROOM).saturating_add(self.kept);
        if needed > self.allocated {
            let more = needed.saturating_sub(self.allocated).next_multiple_of(STEP);
            allocate(&self.files[self.current], self.allocated, more)?;
            self.allocated += more;
        }
        Ok(())
    }

    /// Prepares a record without writing it. At most one record is prepared. If no more memory can be allocated, the
    /// record takes what was kept.
    pub(crate) fn prepare(&mut self, record: &impl Serialize) -> Result<(), Errno> {
        encode(&mut self.frame, &[], record)?;
        let bytes = self.frame.len() as u64;
        let reserved = self.reserve(bytes);
        if self.end + bytes <= self.allocated { Ok(()) } else { reserved }
    }

    /// Commits the prepared record.
    pub(crate) fn commit(&mut self) -> Result<(), Errno> {
        let frame = std::mem::take(&mut self.frame);
        let written = write_at(&self.files[self.current], &frame, self.end);
        self.end += frame.len() as u64;
        self.frame = frame;
        written
    }

    /// Writes a record and commits it.
    pub(crate) fn append(&mut self, record: &impl Serialize) -> Result<(), Errno> {
        self.prepare(record)?;
        self.commit()
    }

    /// Returns whether no snapshot was ever written.
    pub(crate) fn is_empty(&self) -> bool {
        self.snapshot == 0
    }

    /// Returns whether the records take so much memory that a new snapshot is worth its time: a restarted worker
    /// repeats each record, which takes several times as long as reading the same bytes of a snapshot.
    pub(crate) fn is_long(&self) -> bool {
        self.end - self.snapshot_bytes > self.retry_at.max(MIN_RECORDS).max(self.snapshot_bytes / 2)
    }

    /// Begins the journal anew with a snapshot. If this fails, the journal goes on as it was.
    pub(crate) fn begin(&mut self, snapshot: &impl Serialize) -> Result<(), Errno> {
        let number = self.snapshot + 1;
        self.retry_at = self.end - self.snapshot_bytes + MIN_RECORDS;
        encode(&mut self.frame, &number.to_le_bytes(), snapshot)?;
        let other = 1 - self.current;
        let file = &self.files[other];
        let bytes = self.frame.len() as u64;
        let allocated = (bytes + HEADROOM + self.kept).next_multiple_of(STEP);
        ftruncate(file, 0)?;
        allocate(file, 0, allocated)?;
        write_at(file, &self.frame, 0)?;
        // Its memory is not needed any more. If this fails, the next snapshot truncates the file.
        let _ = ftruncate(&self.files[self.current], 0);
        self.current = other;
        self.snapshot = number;
        self.snapshot_bytes = bytes;
        self.retry_at = 0;
        self.end = bytes;
        self.allocated = allocated;
        // A snapshot may be large, and a record is small.
        self.frame = Vec::new();
        Ok(())
    }
}

/// Encodes a frame whose bytes are `prefix` and `value`.
fn encode(frame: &mut Vec<u8>, prefix: &[u8], value: &impl Serialize) -> Result<(), Errno> {
    let mut bytes = std::mem::take(frame);
    bytes.clear();
    bytes.extend_from_slice(&[0; HEADER]);
    bytes.extend_from_slice(prefix);
    // Fails only for values of an unknown length, which no record contains.
    let mut bytes = postcard::to_extend(value, bytes).map_err(|_| Errno::INVAL)?;
    let length = u32::try_from(bytes.len() - HEADER).map_err(|_| Errno::FBIG)?.to_le_bytes();
    bytes[..4].copy_from_slice(&length);
    let sum = checksum(&bytes[..4], &bytes[HEADER..]);
    bytes[4..HEADER].copy_from_slice(&sum);
    *frame = bytes;
    Ok(())
}

fn checksum(length: &[u8], bytes: &[u8]) -> [u8; 4] {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(length);
    hasher.update(bytes);
    hasher.finalize().to_le_bytes()
}

/// Reads all frames up to the first that is incomplete.
fn read_file(file: &OwnedFd) -> Result<Contents, Errno> {
    let length = rustix::fs::fstat(file)?.st_size;
    let mut bytes = vec![0; usize::try_from(length).map_err(|_| Errno::FBIG)?];
    let mut filled = 0;
    while filled < bytes.len() {
        match retry_on_intr(|| pread(file, &mut bytes[filled..], filled as u64))? {
            0 => return Err(Errno::IO),
            read => filled += read,
        }
    }
    let mut frames = Vec::new();
    let mut at = 0;
    while let Some(frame) = frame_at(&bytes, at) {
        at = frame.end;
        frames.push(frame);
    }
    Ok(Contents { bytes, frames })
}

/// Returns the bytes of the frame that begins at `at`, if it is complete.
fn frame_at(bytes: &[u8], at: usize) -> Option<Range<usize>> {
    let header = bytes.get(at..at + HEADER)?;
    let length = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
    let start = at + HEADER;
    let frame = start..start.checked_add(length)?;
    let body = bytes.get(frame.clone())?;
    (length > 0 && checksum(&header[..4], body) == header[4..]).then_some(frame)
}

fn allocate(file: impl AsFd, from: u64, bytes: u64) -> Result<(), Errno> {
    if bytes == 0 { Ok(()) } else { retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), from, bytes)) }
}

fn write_at(file: impl AsFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let written = retry_on_intr(|| pwrite(&file, bytes, at))?;
        bytes = &bytes[written..];
        at += written as u64;
    }
    Ok(())
}

/// Length and checksum.
const HEADER: usize = 8;

/// The number of a snapshot, before its bytes.
const NUMBER: usize = 8;

/// Memory is allocated in steps of this many bytes.
const STEP: u64 = 256 * 1024;

/// Memory that is kept for records of what happens without a request, such as deaths.
const HEADROOM: u64 = 128 * 1024;

/// The least number of bytes of records that a new snapshot replaces.
const MIN_RECORDS: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn records(journal: &mut Journal) -> Option<(u64, Vec<u64>)> {
        let contents = journal.read().unwrap()?;
        Some((postcard::from_bytes(contents.snapshot()).unwrap(), contents.records().map(Result::unwrap).collect()))
    }

    /// Returns the journal as the next process sees it.
    fn reopened(journal: &Journal) -> Journal {
        let file = |index: usize| journal.files[index].try_clone().unwrap();
        Journal::of([file(0), file(1)])
    }

    #[test]
    fn empty_journal_has_no_contents() {
        assert_eq!(records(&mut Journal::create().unwrap()), None);
    }

    #[test]
    fn records_follow_the_last_snapshot() {
        let mut journal = Journal::create().unwrap();
        for snapshot in 1..4_u64 {
            journal.begin(&snapshot).unwrap();
            for record in 10..10 + snapshot {
                journal.append(&record).unwrap();
            }
            let expected = (snapshot, (10..10 + snapshot).collect());
            assert_eq!(records(&mut reopened(&journal)), Some(expected));
        }
        let mut next = reopened(&journal);
        next.read().unwrap();
        next.append(&99_u64).unwrap();
        assert_eq!(records(&mut reopened(&journal)).unwrap().1.last(), Some(&99));
        next.begin(&5_u64).unwrap();
        assert_eq!(records(&mut reopened(&journal)), Some((5, Vec::new())));
    }

    #[test]
    fn record_that_was_cut_off_at_any_byte_does_not_exist() {
        let mut journal = Journal::create().unwrap();
        journal.begin(&1_u64).unwrap();
        journal.append(&[7_u64; 4]).unwrap();
        let start = journal.end;
        journal.append(&[u64::MAX; 4]).unwrap();
        let mut whole = vec![0; usize::try_from(journal.end - start).unwrap()];
        pread(&journal.files[journal.current], &mut whole, start).unwrap();
        for written in 0..whole.len() {
            let mut torn = whole.clone();
            torn[written..].fill(0);
            pwrite(&journal.files[journal.current], &torn, start).unwrap();
            let mut next = reopened(&journal);
            let contents = next.read().unwrap().unwrap();
            let read: Vec<[u64; 4]> = contents.records().map(Result::unwrap).collect();
            assert_eq!(read, [[7; 4]], "{written} bytes");
            // What was cut off leaves no bytes behind that a shorter record would expose.
            next.append(&[8_u64; 4]).unwrap();
            let contents = reopened(&journal).read().unwrap().unwrap();
            assert_eq!(contents.records::<[u64; 4]>().count(), 2);
            pwrite(&journal.files[journal.current], &vec![0; whole.len() + 64], start).unwrap();
        }
    }

    #[test]
    fn snapshot_that_was_cut_off_leaves_the_former_one() {
        let mut journal = Journal::create().unwrap();
        journal.begin(&1_u64).unwrap();
        journal.append(&2_u64).unwrap();
        let other = &journal.files[1 - journal.current];
        let mut frame = Vec::new();
        encode(&mut frame, &9_u64.to_le_bytes(), &3_u64).unwrap();
        for written in 0..frame.len() {
            ftruncate(other, 0).unwrap();
            ftruncate(other, 4096).unwrap();
            write_at(other, &frame[..written], 0).unwrap();
            assert_eq!(records(&mut reopened(&journal)), Some((1, vec![2])), "{written} bytes");
        }
        write_at(other, &frame, 0).unwrap();
        assert_eq!(records(&mut reopened(&journal)), Some((3, Vec::new())));
    }

    #[test]
    fn journal_becomes_long_again_after_each_snapshot() {
        let mut journal = Journal::create().unwrap();
        journal.begin(&[0_u8; 16]).unwrap();
        for _ in 0..3 {
            let mut bytes = 0_u64;
            while !journal.is_long() {
                journal.append(&vec![1_u8; 1000]).unwrap();
                bytes += 1000;
            }
            assert!(bytes > MIN_RECORDS / 2);
            journal.begin(&[0_u8; 16]).unwrap();
        }
    }
}
