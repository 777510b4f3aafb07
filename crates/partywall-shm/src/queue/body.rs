//! The description of a task, and the records of its attempts.
//!
//! | offset | field | written by |
//! |---|---|---|
//! | 0 | length of the kind `u8`, inputs `u8`, length of the arguments `u16`, most attempts `u8`, flags `u8`, row of the submitter `u16` | the submitter; the broker, one flag |
//! | 8 | when it was submitted, in ms of `CLOCK_MONOTONIC` 0–39; the attempt before the last retry 40–47; generation 48–63 | the submitter; a member that retries it |
//! | 16 | lease: attempt 8, generation 16, end 40 bits in ms; see `claim` | the worker, any member that finds no lease |
//! | 24 | value of the submitter's timeline that completes the inputs | the submitter |
//! | 32 | cell of that timeline | the submitter |
//! | 40 | lane 40–47, the cell's incarnation + 1; 0: the inputs are complete | the submitter |
//! | 48 | the output that is asked for: 72 bytes; see `contents` | the submitter |
//! | 120 | records of the attempts: 4 of 112 bytes, attempt `a` at `a` modulo 4 | see below |
//! | 568 | kind: 32 bytes | the submitter |
//! | 600 | inputs: 8 of 88 bytes; see below | the submitter |
//! | 1304 | text of the last failure: 128 bytes, the first one its length | the worker that says so |
//! | 1432 | arguments: 512 bytes | the submitter |
//!
//! The submitter writes its words while the slot is *writing*. No process writes them later, except for one flag and
//! the attempt before the last retry. A process other than the submitter and the worker uses what it has read only if
//! the slot's word is unchanged afterwards.
//!
//! | flag | | |
//! |---|---|---|
//! | 1 | the task ends with its submitter | the submitter |
//! | 2 | the submitter has gone, and its stream had written the inputs | the broker |
//! | 4 | the submitter has gone, and the inputs are never complete | the broker |
//!
//! | input | first word | second word | at 16 |
//! |---|---|---|---|
//! | part of a block | index 0–15, generation of the block 16–61, 0 in bit 63 | offset 0–46 | 72 bytes; see `contents` |
//! | part of an attached segment | number of the attachment 0–31, 1 in bit 63 | the same | the same |
//!
//! No more than 2⁴⁷ bytes can be mapped into a process.
//!
//! | record | offset | | |
//! |---|---|---|---|
//! | state | 0 | bits 0–1: 0 none, 1 open, 2 drained, 3 open for its inputs alone; reason 2–4, attempt 5–12, row 13–28, generation 29–63 | the member that ends the attempt; the worker |
//! | output | 8 | 1 + index 17, generation of the block 46 bits; 0: none | the worker; the reader of the result, while the record is open |
//! | value | 16 | of the worker's timeline that completes the output | the worker |
//! | cell | 24 | of that timeline | the worker |
//! | incarnation | 32 | as at 40; of that timeline | the worker |
//! | contents | 40 | of the output: 72 bytes; see `contents` | the worker |
//!
//! A record is **open** while an attempt that is over may still read the inputs or write its own output: the attempt
//! was fenced, or its worker has views of the blocks. The record is opened before the task is taken back. The slot can
//! therefore not go to another task meanwhile, and a worker that does not know yet that it is fenced may still write
//! the other words of its record. A record is **drained** once the worker's streams are done and its views are gone, or
//! the worker is proved dead.
//!
//! The attempts of a task are numbered from 1, and no number is used twice, so a record and the word of a slot
//! identify one attempt of the task. A retry therefore does not reset the number. It writes which attempt was the last
//! one before it (see `Queue::retry`), and the attempts that the task may have are counted from there.

use std::fmt;

use super::{
    Row,
    contents::{Contents, ContentsWords},
    word::TaskWord,
};
use crate::{
    slots::HeldSlot,
    sync::{self, AtomicU64, Ordering, Stale, fence},
    topic::TimelineCell,
};

/// The most bytes of a task's kind.
pub const MAX_KIND: usize = 32;

/// The most inputs of a task.
pub const MAX_INPUTS: usize = 8;

/// Offsets and lengths of parts are less than this.
pub const MAX_PART: u64 = 1 << 47;

/// The most bytes of a task's arguments.
pub const MAX_ARGUMENTS: usize = 512;

/// The most bytes of a reason that are kept, with the mark of one that was cut.
pub const MAX_REASON: usize = 127;

/// Attempts of one task whose ends may be outstanding.
pub const RECORDS: usize = if cfg!(loom) { 2 } else { 4 };

/// See the head of this file.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Body {
    head: AtomicU64,
    origin: AtomicU64,
    pub(super) lease: AtomicU64,
    value: AtomicU64,
    cell: AtomicU64,
    incarnation: AtomicU64,
    output: ContentsWords,
    records: [Record; RECORDS],
    kind: [AtomicU64; KIND_WORDS],
    inputs: [InputWords; INPUTS],
    text: [AtomicU64; TEXT_WORDS],
    arguments: [AtomicU64; ARGUMENT_WORDS],
}

/// The record of an attempt.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Record {
    state: AtomicU64,
    output: AtomicU64,
    value: AtomicU64,
    cell: AtomicU64,
    incarnation: AtomicU64,
    contents: ContentsWords,
}

/// An input.
#[derive(Debug)]
#[repr(C)]
struct InputWords {
    source: AtomicU64,
    offset: AtomicU64,
    contents: ContentsWords,
}

/// A block of a pool, of a certain generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId {
    /// Its index in its pool.
    pub index: u32,
    /// Its generation.
    pub generation: u64,
}

/// A part of a segment that is attached to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedPart {
    /// The number of the attachment.
    pub attachment: u32,
    /// Where the part begins, in bytes.
    pub offset: u64,
    /// What it contains.
    pub contents: Contents,
}

/// An input of a task that is to be submitted.
#[derive(Debug, Clone, Copy)]
pub enum NewInput<'a> {
    /// A part of a block of the pool of inputs: the block, where the part begins, and what it contains.
    Block(&'a HeldSlot, u64, Contents),
    /// A part of an attached segment.
    Part(AttachedPart),
}

/// What an input is a part of.
enum Source {
    Block(BlockId),
    Attachment(u32),
}

/// The output of an attempt that ends with a result.
#[derive(Debug, Clone, Copy)]
pub struct NewOutput<'a> {
    /// The block.
    pub held: &'a HeldSlot,
    /// What it contains.
    pub contents: Contents,
}

impl NewOutput<'_> {
    pub(super) fn block(&self) -> BlockId {
        BlockId { index: self.held.index(), generation: self.held.generation() }
    }
}

/// An input of a task as it was read. Whether there is such a block or part is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// A part of a block of the pool of inputs: the block, where the part begins, and what it contains.
    Block(BlockId, u64, Contents),
    /// A part of an attached segment.
    Part(AttachedPart),
}

/// The timeline value that completes what a stream writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPoint {
    /// Which of the member's timelines it is: streams that signal at the same time have one each.
    pub lane: u8,
    /// The cell of the timeline.
    pub cell: TimelineCell,
    /// The value.
    pub value: u64,
}

/// What a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewTask<'a> {
    /// The kind of work, at most [`MAX_KIND`] bytes.
    pub kind: &'a [u8],
    /// The inline arguments, at most [`MAX_ARGUMENTS`] bytes.
    pub arguments: &'a [u8],
    /// What completes the inputs, if a stream still writes them.
    pub ready: Option<StreamPoint>,
    /// The output, if there is one.
    pub output: Option<Contents>,
    /// How often the task may be attempted, at least once.
    pub max_attempts: u8,
    /// Whether the task ends with its submitter.
    pub cancel: bool,
    /// When it is submitted: [`members::now`](crate::members::now).
    pub now: u64,
}

/// The description of a task as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskDescription {
    /// The kind of work.
    pub kind: Vec<u8>,
    /// The inline arguments.
    pub arguments: Vec<u8>,
    /// The inputs.
    pub inputs: Vec<Input>,
    /// What completes the inputs, if a stream wrote them.
    pub ready: Option<StreamPoint>,
    /// The output, if there is one.
    pub output: Option<Contents>,
    /// The number of the last attempt that the task may have.
    pub max_attempts: u8,
    /// Whether the task ends with its submitter.
    pub cancel: bool,
    /// The row of the submitter.
    pub submitter: Row,
    /// When it was submitted.
    pub submitted: u64,
}

/// Why an attempt ended without a result. The numbers are those in the record of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Its worker said so.
    Failed = 0,
    /// Its worker died.
    Died = 1,
    /// Its lease ended.
    Lease = 2,
    /// Its worker's GPU context is broken, or the broker evicted the worker.
    Detached = 3,
    /// Its worker gave it up without a reason.
    Dropped = 4,
    /// The submitter died before its stream had written the inputs.
    Inputs = 5,
}

const REASONS: [Reason; 6] =
    [Reason::Failed, Reason::Died, Reason::Lease, Reason::Detached, Reason::Dropped, Reason::Inputs];

/// Says why an attempt had no result.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Failed => "its worker failed it",
            Self::Died => "its worker died",
            Self::Lease => "its lease ended",
            Self::Detached => "its worker was evicted, or lost its GPU context",
            Self::Dropped => "its worker gave it up",
            Self::Inputs => "its submitter died before the inputs were complete",
        })
    }
}

/// The state of a record as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RecordWord(u64);

impl RecordWord {
    /// An attempt that is over, and may still use its blocks; `None`: it has a result.
    pub(super) fn open(reason: Option<Reason>, attempt: TaskWord) -> Self {
        Self::new(OPEN, reason, attempt)
    }

    /// An attempt with a result that may still read the inputs.
    pub(super) fn reading(attempt: TaskWord) -> Self {
        Self::new(READING, None, attempt)
    }

    /// An attempt that uses nothing any more; `None`: it has a result.
    pub(super) fn drained(reason: Option<Reason>, attempt: TaskWord) -> Self {
        Self::new(DRAINED, reason, attempt)
    }

    fn new(state: u64, reason: Option<Reason>, attempt: TaskWord) -> Self {
        let reason = reason.map_or(COMPLETED, |reason| reason as u64);
        let attempts = u64::from(attempt.attempts());
        let row = u64::from(attempt.row());
        Self(state | reason << REASON | attempts << ATTEMPT | row << ROW | attempt.generation() << GENERATION)
    }

    pub(super) fn is_of(self, generation: u64) -> bool {
        self.0 & STATE != 0 && self.0 >> GENERATION == generation
    }

    pub(super) fn is_of_attempt(self, word: TaskWord) -> bool {
        self.is_of(word.generation()) && self.attempt() == word.attempts()
    }

    pub(super) fn is_open(self) -> bool {
        matches!(self.0 & STATE, OPEN | READING)
    }

    /// Returns whether the attempt may still use its output.
    pub(super) fn uses_output(self) -> bool {
        self.0 & STATE == OPEN
    }

    pub(super) fn attempt(self) -> u8 {
        (self.0 >> ATTEMPT) as u8
    }

    pub(super) fn row(self) -> Row {
        (self.0 >> ROW) as Row
    }

    /// Returns why the attempt has no result, unless it has one.
    pub(super) fn reason(self) -> Option<Reason> {
        match self.0 >> REASON & 7 {
            COMPLETED => None,
            number => {
                let named = REASONS.into_iter().find(|reason| *reason as u64 == number);
                // Only a process that breaks the rules writes another number.
                Some(named.unwrap_or(Reason::Detached))
            }
        }
    }
}

/// When a task was submitted and retried, as it was seen. A process that was stopped before it changes the word does
/// not change that of a later task, because the word has the generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskOrigin(u64);

impl Record {
    pub(super) fn load(&self) -> RecordWord {
        // Pairs with `change`: a member that sees an attempt drained sees that its worker is done.
        RecordWord(self.state.load(Ordering::Acquire))
    }

    pub(super) fn change(&self, from: RecordWord, to: RecordWord) -> Result<(), Stale> {
        sync::change(&self.state, from.0, to.0)
    }

    /// Records that the attempt does not use its output any more.
    pub(super) fn leave_output(&self, seen: RecordWord) -> Result<(), Stale> {
        self.change(seen, RecordWord(seen.0 & !STATE | READING))
    }

    /// Records that the attempt reads nothing any more.
    pub(super) fn drain(&self, seen: RecordWord) -> Result<(), Stale> {
        self.change(seen, RecordWord(seen.0 & !STATE | DRAINED))
    }

    /// Names the output of the attempt, and what completes it.
    pub(super) fn set_output(&self, output: Option<NewOutput<'_>>, point: Option<StreamPoint>) {
        // Pairs with the fence in `Queue::output`: a member that sees these stores sees that the former attempt is
        // over.
        fence(Ordering::Release);
        // The change of the slot's word that shows these stores orders them.
        self.output.store(output.map_or(0, |output| output_word(output.block())), Ordering::Relaxed);
        self.contents.write(output.as_ref().map(|output| &output.contents));
        set_point(point, &self.value, &self.cell, &self.incarnation);
    }

    /// Names the output as the reader of the result holds it. The change of the slot's word orders it.
    pub(super) fn name(&self, output: BlockId) {
        self.output.store(output_word(output), Ordering::Relaxed);
    }

    pub(super) fn output(&self) -> Option<BlockId> {
        let word = self.output.load(Ordering::Relaxed);
        let index = (word as u32 & ((1 << BLOCK_GENERATION) - 1)).checked_sub(1)?;
        Some(BlockId { index, generation: word >> BLOCK_GENERATION })
    }

    pub(super) fn contents(&self) -> Option<Contents> {
        self.contents.read()
    }

    pub(super) fn point(&self) -> Option<StreamPoint> {
        point(&self.value, &self.cell, &self.incarnation)
    }
}

fn output_word(block: BlockId) -> u64 {
    u64::from(block.index + 1) | block.generation << BLOCK_GENERATION
}

fn set_point(point: Option<StreamPoint>, value: &AtomicU64, cell: &AtomicU64, incarnation: &AtomicU64) {
    let Some(point) = point else { return incarnation.store(0, Ordering::Relaxed) };
    value.store(point.value, Ordering::Relaxed);
    cell.store(u64::from(point.cell.slab) << SLAB | u64::from(point.cell.cell), Ordering::Relaxed);
    incarnation.store(u64::from(point.lane) << LANE | (u64::from(point.cell.incarnation) + 1), Ordering::Relaxed);
}

fn point(value: &AtomicU64, cell: &AtomicU64, incarnation: &AtomicU64) -> Option<StreamPoint> {
    let incarnation = incarnation.load(Ordering::Relaxed);
    let lane = (incarnation >> LANE) as u8;
    let incarnation = incarnation.checked_sub(1)? as u32;
    let cell = cell.load(Ordering::Relaxed);
    let cell = TimelineCell { slab: (cell >> SLAB) as u32, cell: cell as u32, incarnation };
    Some(StreamPoint { lane, cell, value: value.load(Ordering::Relaxed) })
}

impl TaskOrigin {
    fn new(slot: TaskWord, submitted: u64) -> Self {
        Self(submitted & SUBMITTED | slot.generation() << ORIGIN_GENERATION)
    }

    /// When the task was submitted.
    fn submitted(self) -> u64 {
        self.0 & SUBMITTED
    }

    /// The last attempt before the last retry; 0: the task was not retried.
    fn before(self) -> u8 {
        (self.0 >> BEFORE) as u8
    }

    fn retried(self, before: u8) -> Self {
        Self(self.0 & !(0xff << BEFORE) | u64::from(before) << BEFORE)
    }
}

impl NewInput<'_> {
    /// Returns whether the words of an input have room for it.
    pub(super) fn is_possible(&self) -> bool {
        let (offset, contents) = self.span();
        offset < MAX_PART && contents.bytes() < MAX_PART
    }

    pub(super) fn block(&self) -> Option<&HeldSlot> {
        if let Self::Block(block, ..) = self { Some(block) } else { None }
    }

    fn span(&self) -> (u64, &Contents) {
        match self {
            Self::Block(_, offset, contents) => (*offset, contents),
            Self::Part(part) => (part.offset, &part.contents),
        }
    }

    pub(super) fn part(&self) -> Option<AttachedPart> {
        if let Self::Part(part) = self { Some(*part) } else { None }
    }

    fn source(&self) -> u64 {
        match self {
            Self::Block(held, ..) => u64::from(held.index()) | held.generation() << INPUT_GENERATION,
            Self::Part(part) => PART | u64::from(part.attachment),
        }
    }
}

impl InputWords {
    fn write(&self, input: &NewInput<'_>) {
        let (offset, contents) = input.span();
        self.source.store(input.source(), Ordering::Relaxed);
        self.offset.store(offset, Ordering::Relaxed);
        self.contents.write(Some(contents));
    }

    fn source(&self) -> Source {
        let source = self.source.load(Ordering::Relaxed);
        match source & PART {
            0 => Source::Block(BlockId { index: u32::from(source as u16), generation: source >> INPUT_GENERATION }),
            _ => Source::Attachment(source as u32),
        }
    }

    fn read(&self) -> Input {
        let offset = self.offset.load(Ordering::Relaxed) & (MAX_PART - 1);
        // A process that breaks the rules may leave it out.
        let contents = self.contents.read().unwrap_or_else(|| Contents::of_bytes(0));
        match self.source() {
            Source::Block(block) => Input::Block(block, offset, contents),
            Source::Attachment(attachment) => Input::Part(AttachedPart { attachment, offset, contents }),
        }
    }
}

/// For the submitter, while the slot is its own.
impl Body {
    pub(super) fn write(&self, slot: TaskWord, task: &NewTask<'_>, inputs: &[NewInput<'_>]) {
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        // Pairs with the fence in `is_still`.
        fence(Ordering::Release);
        // The change of the slot's word to *pending* orders these stores.
        let cancel = if task.cancel { CANCEL } else { 0 };
        let head = task.kind.len() as u64
            | (inputs.len() as u64) << INPUT_COUNT
            | (task.arguments.len() as u64) << ARGUMENT_BYTES
            | u64::from(task.max_attempts) << ATTEMPTS
            | cancel
            | u64::from(slot.row()) << SUBMITTER;
        set(&self.head, head);
        self.output.write(task.output.as_ref());
        set(&self.origin, TaskOrigin::new(slot, task.now).0);
        set_point(task.ready, &self.value, &self.cell, &self.incarnation);
        write_bytes(&self.kind, task.kind);
        write_bytes(&self.arguments, task.arguments);
        for (words, input) in self.inputs.iter().zip(inputs) {
            words.write(input);
        }
    }
}

/// For all.
impl Body {
    pub(super) fn record(&self, attempt: u8) -> &Record {
        &self.records[usize::from(attempt) % RECORDS]
    }

    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(super) fn has_output(&self) -> bool {
        self.output.is_there()
    }

    pub(super) fn origin(&self) -> TaskOrigin {
        TaskOrigin(self.origin.load(Ordering::Relaxed))
    }

    /// Lets a task have all its attempts once more, after the attempt `before`.
    pub(super) fn allow_more(&self, seen: TaskOrigin, before: u8) -> Result<(), Stale> {
        sync::change(&self.origin, seen.0, seen.retried(before).0)
    }

    /// Returns the number of the last attempt that the task may have.
    pub(super) fn last_attempt(&self) -> u8 {
        let most = (self.head.load(Ordering::Relaxed) >> ATTEMPTS) as u8;
        self.origin().before().saturating_add(most)
    }

    pub(super) fn ends_with_submitter(&self) -> bool {
        self.head.load(Ordering::Relaxed) & CANCEL != 0
    }

    pub(super) fn submitter(&self) -> Row {
        (self.head.load(Ordering::Relaxed) >> SUBMITTER) as Row
    }

    /// Returns what completes the inputs, unless they are known to be complete.
    pub(super) fn ready(&self) -> Option<StreamPoint> {
        let is_complete = self.head.load(Ordering::Relaxed) & INPUTS_COMPLETE != 0;
        if is_complete { None } else { point(&self.value, &self.cell, &self.incarnation) }
    }

    /// Returns whether the submitter has gone before the inputs were complete.
    pub(super) fn inputs_are_lost(&self) -> bool {
        self.head.load(Ordering::Relaxed) & INPUTS_LOST != 0
    }

    /// Returns the word that contains, among others, the row of the submitter.
    pub(super) fn head(&self) -> u64 {
        self.head.load(Ordering::Relaxed)
    }

    /// Says whether the inputs are complete, now that the submitter has gone. `seen` is the head of the task that is
    /// meant: no other can have it, because the submitter's row belongs to no other member yet.
    pub(super) fn decide_inputs(&self, seen: u64, complete: bool) {
        let decided = seen | if complete { INPUTS_COMPLETE } else { INPUTS_LOST };
        // A failure: the slot has another task. The change of the slot's word would show it.
        let _ = sync::change(&self.head, seen, decided);
    }

    fn inputs(&self) -> impl Iterator<Item = &InputWords> {
        let count = (self.head.load(Ordering::Relaxed) >> INPUT_COUNT) as u8;
        self.inputs.iter().take(count.into())
    }

    /// Returns the blocks among the inputs.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.inputs().filter_map(|input| if let Source::Block(block) = input.source() { Some(block) } else { None })
    }

    /// Returns the attachments of the parts among the inputs.
    pub(super) fn attachments(&self) -> impl Iterator<Item = u32> {
        self.inputs()
            .filter_map(|input| if let Source::Attachment(number) = input.source() { Some(number) } else { None })
    }

    pub(super) fn describe(&self) -> TaskDescription {
        let head = self.head.load(Ordering::Relaxed);
        TaskDescription {
            kind: read_bytes(&self.kind, head as u8 as usize),
            arguments: read_bytes(&self.arguments, (head >> ARGUMENT_BYTES) as u16 as usize),
            inputs: self.inputs().map(InputWords::read).collect(),
            ready: self.ready(),
            output: self.output.read(),
            max_attempts: self.last_attempt(),
            cancel: self.ends_with_submitter(),
            submitter: self.submitter(),
            submitted: self.origin().submitted(),
        }
    }

    /// Keeps the text of a failure. The texts of two workers at once may be mixed, which nothing depends on.
    pub(super) fn set_text(&self, text: &str) {
        let mut bytes = vec![text.len().min(MAX_REASON) as u8];
        if text.len() <= MAX_REASON {
            bytes.extend(text.bytes());
        } else {
            let cut = text.floor_char_boundary(MAX_REASON - CUT.len());
            bytes[0] = (cut + CUT.len()) as u8;
            bytes.extend(text[..cut].bytes().chain(CUT.bytes()));
        }
        write_bytes(&self.text, &bytes);
    }

    pub(super) fn text(&self) -> Vec<u8> {
        let bytes = read_bytes(&self.text, MAX_REASON + 1);
        let len = bytes.first().map_or(0, |len| usize::from(*len)).min(bytes.len().saturating_sub(1));
        bytes.get(1..=len).unwrap_or_default().to_vec()
    }
}

fn write_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
    }
}

/// Never more than there are words for.
fn read_bytes(words: &[AtomicU64], len: usize) -> Vec<u8> {
    let words = words.iter().take(len.div_ceil(8));
    let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

#[cfg(all(test, loom))]
impl Body {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        let record = || Record {
            state: zero(),
            output: zero(),
            value: zero(),
            cell: zero(),
            incarnation: zero(),
            contents: ContentsWords::new(),
        };
        let input = || InputWords { source: zero(), offset: zero(), contents: ContentsWords::new() };
        Self {
            head: zero(),
            output: ContentsWords::new(),
            origin: zero(),
            lease: zero(),
            value: zero(),
            cell: zero(),
            incarnation: zero(),
            records: std::array::from_fn(|_| record()),
            kind: std::array::from_fn(|_| zero()),
            inputs: std::array::from_fn(|_| input()),
            text: std::array::from_fn(|_| zero()),
            arguments: std::array::from_fn(|_| zero()),
        }
    }
}

shared! {
    Body {
        head, origin, lease, value, cell, incarnation, output, records, kind, inputs, text, arguments
    }
    bits {
        INPUT_COUNT, ARGUMENT_BYTES, ATTEMPTS, CANCEL, INPUTS_COMPLETE, INPUTS_LOST, SUBMITTER,
        BEFORE, ORIGIN_GENERATION, LEASE_GENERATION, UNTIL, SLAB, LANE,
    }
}
shared! {
    Record { state, output, value, cell, incarnation, contents }
    bits {
        OPEN, DRAINED, READING, REASON, COMPLETED, ATTEMPT, ROW, GENERATION, BLOCK_GENERATION, SLAB, LANE,
        Reason::Failed as u64, Reason::Died as u64, Reason::Lease as u64, Reason::Detached as u64,
        Reason::Dropped as u64, Reason::Inputs as u64,
    }
}
shared!(InputWords { source, offset, contents } bits { INPUT_GENERATION, PART });

// The bits of the head: of each number the first one; and flags.
const INPUT_COUNT: u32 = 8;
const ARGUMENT_BYTES: u32 = 16;
const ATTEMPTS: u32 = 32;
const CANCEL: u64 = 1 << 40;
const INPUTS_COMPLETE: u64 = 1 << 41;
const INPUTS_LOST: u64 = 1 << 42;
const SUBMITTER: u32 = 48;
// The bits of a record.
const STATE: u64 = 3;
const OPEN: u64 = 1;
const DRAINED: u64 = 2;
const READING: u64 = 3;
const REASON: u32 = 2;
/// The reason of an attempt that has a result.
const COMPLETED: u64 = 6;
const ATTEMPT: u32 = 5;
const ROW: u32 = 13;
const GENERATION: u32 = 29;
/// The mark at the end of a reason that was cut.
const CUT: &str = "…";
/// The bits of the time at which a task was submitted.
const SUBMITTED: u64 = (1 << BEFORE) - 1;
/// The first bit of the last attempt before the last retry.
const BEFORE: u32 = 40;
/// The first bit of the generation beside these.
const ORIGIN_GENERATION: u32 = 48;
/// The first bit of the generation in a lease.
pub(super) const LEASE_GENERATION: u32 = 8;
/// The first bit of the end of a lease.
pub(super) const UNTIL: u32 = 24;
/// The first bit of the slab of a timeline's cell.
const SLAB: u32 = 32;
/// The first bit of the lane of a timeline.
const LANE: u32 = 40;
/// The first bit of the generation of an output.
const BLOCK_GENERATION: u32 = 17;
/// The first bit of the generation of an input.
const INPUT_GENERATION: u32 = 16;
/// The mark of a part of a segment in its first word.
const PART: u64 = 1 << 63;
// A model does without texts, and has one input.
const KIND_WORDS: usize = if cfg!(loom) { 0 } else { MAX_KIND / 8 };
const INPUTS: usize = if cfg!(loom) { 1 } else { MAX_INPUTS };
const TEXT_WORDS: usize = if cfg!(loom) { 0 } else { (MAX_REASON + 1) / 8 };
const ARGUMENT_WORDS: usize = if cfg!(loom) { 0 } else { MAX_ARGUMENTS / 8 };
