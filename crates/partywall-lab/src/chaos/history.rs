//! The history: one JSON object a line, appended by every process of the lab.
//!
//! Each line is padded to [`LINE`] bytes, so that it never crosses a page: the kernel copies a page at a time, and a
//! signal ends a write only between two pages. A killed process therefore leaves a whole line, or none.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
};

use super::*;

/// The history file, open for appending, and the member that writes.
#[derive(Debug)]
pub(super) struct History {
    file: File,
    member: u32,
}

/// A line of the history.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) at: Moment,
    /// The process that wrote it, or that it is about. The observer is 0.
    pub(super) member: u32,
    #[serde(flatten)]
    pub(super) what: What,
}

/// What happened. `began` is a moment before the call.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub(super) enum What {
    /// The first line of a run.
    Plan { seed: u64, seconds: u64 },
    /// Written before the member's process is started.
    Started { role: String },
    /// Written before the signal.
    Killed,
    /// As for a member.
    BrokerKilled,
    /// The member gets SIGSTOP. Written before the signal. With `until` it is stopped until another member has shown
    /// this progress.
    Stopped {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Progress>,
    },
    /// It has got SIGCONT.
    Continued,
    /// The member is evicted. Written before the call; it is killed after it.
    Evicted,
    /// The member's connections were shut down.
    SocketsClosed,
    /// Written before the member gets no more of a resource.
    Limited { of: Resource },
    /// Written after the limit has ended.
    Lifted { of: Resource },
    /// The member has ended by itself, and has received everything that it expected.
    Left,
    /// Written before a writer allocates the version with this number.
    Writing { number: u64 },
    /// Its commit has returned this version.
    Committed { number: u64, version: u64, began: Moment },
    /// A reader has opened a version. `whole` is false if a word was of another one.
    Read { number: u64, version: u64, whole: bool, began: Moment },
    /// Written before a publisher publishes the message.
    Publishing { message: u64 },
    /// It was published.
    Published { message: u64 },
    /// A `block` subscriber has joined.
    Subscribed,
    /// It has received a message. `whole` is false if its words differ, or if its publisher has `failed` to complete
    /// it.
    Got {
        message: u64,
        whole: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        failed: bool,
    },
    /// It was told that the topic is idle.
    Idle,
    /// A viewer, a subscriber that may miss messages, has joined. It was not one before, or is no longer.
    Joined,
    /// It gives a message back that it has received, held and read again. `missed` is how many it missed before.
    Viewed {
        message: u64,
        position: u64,
        missed: u64,
        whole: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        failed: bool,
    },
    /// Written before a submitter submits the task.
    Submitting { task: u64 },
    /// It was submitted.
    Submitted { task: u64 },
    /// Its submitter has taken the result.
    Result { task: u64, right: bool },
    /// A holder has a permit.
    Acquired,
    /// Written before it gives the permit back.
    Releasing,
    /// A taker has a block.
    Took { block: u32 },
    /// Written before it gives the block back, or offers it. `whole` is false if another process has written it.
    Giving { block: u32, whole: bool },
    /// It has offered the block, whose words are `mark`. Written before another taker can know that.
    Offered { block: u32, generation: u64, mark: u64 },
    /// It has accepted an offered block, and has read `mark`.
    Accepted { block: u32, generation: u64, mark: u64 },
    /// A builder has the claim to build the owned name.
    Claimed,
    /// Written before it commits the number, or gives the claim back.
    Ending { number: u64 },
    /// A builder has opened what another one had committed.
    Opened { number: u64, whole: bool },
    /// A maker has used what it, or another maker, had created.
    Made,
    /// A watch has begun.
    Watching,
    /// It has reported the commit of a version.
    Saw { version: u64 },
    /// The watch reported a gap.
    Gap,
    /// A call took longer than its timeout allows.
    Late { call: String, ms: u64 },
    /// A call failed although nothing may make it fail.
    Failed { call: String, why: String },
    /// A call failed for want of a resource.
    Lacked { call: String, of: Resource, began: Moment },
    /// The state that was found at the end, and the one that is allowed.
    Counted { of: String, least: u64, most: u64, found: u64 },
    /// The last line of a run.
    End { kills: u64 },
}

/// What a process can be left without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Resource {
    Descriptors,
    Memory,
}

/// What shows that a stopped member does not hold up the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Progress {
    Committed,
    Read,
    Published,
    Result,
    Acquired,
    Took,
}

impl Progress {
    /// Returns whether another member than `stopped` shows it.
    pub(super) fn is_shown_by(self, record: &Record, stopped: u32) -> bool {
        let shows = match self {
            Self::Committed => matches!(record.what, What::Committed { .. }),
            Self::Read => matches!(record.what, What::Read { .. }),
            Self::Published => matches!(record.what, What::Published { .. }),
            Self::Result => matches!(record.what, What::Result { .. }),
            Self::Acquired => matches!(record.what, What::Acquired),
            Self::Took => matches!(record.what, What::Took { .. }),
        };
        shows && record.member != stopped
    }
}

impl History {
    /// Creates the file.
    pub(super) fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::options().append(true).create_new(true).open(path);
        let failed = |why| {
            let message = format!("cannot create the history {}: {why}", path.display());
            Failure::new(
                ErrorKind::Refused,
                message,
                "name a new file in a folder that you may write to with --history",
            )
        };
        Ok(Self { file: file.map_err(failed)?, member: 0 })
    }

    /// Opens the file of a member's job.
    pub(super) fn open(job: &Job) -> Result<Self, Failure> {
        let file = File::options().append(true).open(&job.history);
        Ok(Self { file: file.map_err(|why| unusable(&job.history, &why))?, member: job.number })
    }

    pub(super) fn add(&self, what: What) -> Result<(), Failure> {
        self.add_about(self.member, what)
    }

    /// Appends a line about another member.
    pub(super) fn add_about(&self, member: u32, what: What) -> Result<(), Failure> {
        self.add_at(Moment::now(), member, what)
    }

    /// Appends a line about a moment before now.
    pub(super) fn add_at(&self, at: Moment, member: u32, what: What) -> Result<(), Failure> {
        let record = Record { at, member, what };
        let mut line = serde_json::to_vec(&record).map_err(|error| unexpected(error.to_string()))?;
        if line.len() >= LINE {
            return Err(unexpected("a line of the history is too long"));
        }
        line.resize(LINE - 1, b' ');
        line.push(b'\n');
        (&self.file).write_all(&line).doing("writing the history")
    }

    /// Returns how many bytes it has.
    pub(super) fn len(&self) -> Result<u64, Failure> {
        Ok(self.file.metadata().doing(READING)?.len())
    }
}

/// Returns the records from this offset on, which is moved behind them.
pub(super) fn read_from(path: &Path, offset: &mut u64) -> Result<Vec<Record>, Failure> {
    let mut file = File::open(path).map_err(|why| unusable(path, &why))?;
    file.seek(SeekFrom::Start(*offset)).doing(READING)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).doing(READING)?;
    let lines = bytes.chunks_exact(LINE);
    *offset += (bytes.len() - lines.remainder().len()) as u64;
    lines.map(|line| serde_json::from_slice(line).map_err(|why| damaged(path, &why.to_string()))).collect()
}

/// Whether a field has its default, and is left out.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Returns the beginning of a text that fits into a line.
pub(super) fn shortened(text: &str) -> String {
    text.chars()
        .map(|c| if c == '"' || c == '\\' { '\'' } else { c })
        .filter(|c| matches!(c, ' '..='~'))
        .take(120)
        .collect()
}

/// Reads a history. Every line must be whole, and the last one must be its end.
pub(super) fn read(path: &Path) -> Result<Vec<Record>, Failure> {
    let file = File::open(path).map_err(|why| unusable(path, &why))?;
    let mut file = BufReader::new(file);
    let mut records: Vec<Record> = Vec::new();
    let mut line = Vec::with_capacity(LINE);
    loop {
        line.clear();
        // Not more, because the file may be anything.
        let read = (&mut file).take(LINE as u64 + 1).read_until(b'\n', &mut line);
        match read.map_err(|why| unusable(path, &why))? {
            0 => break,
            1..=LINE => {}
            _ => return Err(damaged(path, &format!("line {} has more than {LINE} bytes", records.len() + 1))),
        }
        let record = serde_json::from_slice(&line);
        records.push(record.map_err(|why| damaged(path, &format!("line {}: {why}", records.len() + 1)))?);
    }
    match records.last().map(|record| &record.what) {
        Some(What::End { .. }) => Ok(records),
        _ => Err(damaged(path, "its last line is not the end of a run")),
    }
}

fn unusable(path: &Path, why: &std::io::Error) -> Failure {
    let advice = "give a path that can be used; `partywall lab chaos` prints that of its history";
    Failure::new(kind_of(why), format!("cannot use the history {}: {why}", path.display()), advice)
}

fn damaged(path: &Path, why: &str) -> Failure {
    let message = format!("the history {} is damaged: {why}", path.display());
    Failure::new(ErrorKind::CheckFailed, message, "run `partywall lab chaos` again for another history")
}

const READING: &str = "reading the history";

/// Bytes of a line: a power of two below the size of a page.
const LINE: usize = 256;
