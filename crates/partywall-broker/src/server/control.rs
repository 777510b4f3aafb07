//! Control memory: created by the broker and shared with members.
//!
//! Every member can write every byte of the control memory that it has. Every loop here therefore terminates for any
//! bytes, and no value read is trusted: it is only shown to people or passed on as a number. Whether tasks name an
//! attachment decides whether it ends: a member that breaks the rules can end it early, and its tasks then name
//! nothing.
//!
//! Memory that a request needs is created before the registry is asked, so that an effect cannot fail. What a pool,
//! topic or queue needs depends on the request alone; the memory is dropped if the registry refuses. Whether a timeline
//! needs a slab, or a semaphore its file, depends on the registry's state (`Registry::control_needed`).
//!
//! A member's row is its mark in semaphores, pools, topics and queues, so a row gets its next member only when nothing
//! is marked with it. Taking a dead member's permits and blocks back means reading every slot. 65,536 slots take about
//! a millisecond, so the work goes on in further turns of the loop. Until it is done the row gets no member, and the
//! registry closes nothing.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    sync::Arc,
};

use partywall_os::{Errno, memfd};
use partywall_shm::{
    members::{self, Members, TimelineWait},
    pool::Pool,
    queue::{self, InUse, Pools, Queue, Reason},
    semaphore::Semaphore,
    slots::{MAX_WAITERS, SlotAudit},
    timeline::{Cell, LateStore, Slab, TimelineEnding},
    topic::{self, TimelineCell, Topic},
};
use partywall_wire as wire;
use serde::{Deserialize, Serialize};

use crate::{
    StartError,
    page::lack,
    registry::{
        ControlNeeded, FdId, Registry,
        types::{BlockControl, CellAt, ControlMemory},
    },
    server::{
        fds::{FdStore, no_fds},
        ids::IdMap,
        reclaimer::Donated,
    },
};

/// All mapped control memory.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// The rows of each user's members.
    rows: BTreeMap<u32, UserRows>,
    slabs: IdMap<FdId, Slab>,
    tables: IdMap<FdId, SlotTable>,
    /// For each ended cell: the highest value that was stored after the end and undone.
    undone: BTreeMap<CellAt, u64>,
    /// Pending steps for departed members.
    clearing: VecDeque<Clearing>,
    /// Number of slots that these steps have read in this turn of the loop.
    slots_read: u32,
}

/// The memory of the rows of one user's members. Row numbers are the same in all of them, and each has room for all
/// rows: only used pages take memory. A user gets its own memory alone, and so writes no heartbeats of others and reads
/// no traces.
#[derive(Debug)]
struct UserRows {
    members: Members,
    fd: Arc<Donated>,
}

/// A mapped table that records which member holds which permits or blocks.
#[derive(Debug)]
pub(super) enum SlotTable {
    Semaphore(Semaphore),
    Pool(Pool),
    Topic(Box<Topic>, Pool),
    Queue(Box<MappedQueue>),
}

/// A queue with its pools.
#[derive(Debug)]
pub(super) struct MappedQueue {
    pub(super) queue: Queue,
    pub(super) inputs: Pool,
    pub(super) outputs: Pool,
}

impl MappedQueue {
    fn pools(&self) -> Pools<'_> {
        Pools { inputs: &self.inputs, outputs: &self.outputs }
    }
}

/// A step for a departed member, done in bounded turns.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Clearing {
    /// Detach the row from a topic or queue.
    Detach { object: FdId, row: u16, ending: TimelineEnding },
    /// Return the row's slots in these tables.
    Row { row: u16, tables: Vec<FdId> },
}

impl SlotTable {
    /// Frees all slots of a row. Returns their number.
    fn recover(&self, row: u16) -> u32 {
        // Only in a topic or queue may a block have no holder. Elsewhere a slot without a holder is invalid, and would
        // be lost if it were not freed here.
        let is_lost = |other| other == row || other == members::NOBODY;
        match self {
            Self::Semaphore(semaphore) => semaphore.recover(is_lost),
            Self::Pool(pool) => pool.recover(is_lost),
            Self::Topic(topic, pool) => topic.recover(pool, |other| other == row),
            Self::Queue(mapped) => mapped.queue.recover(mapped.pools(), |other| other == row),
        }
    }

    /// Counts the tasks of a queue that each row works on.
    pub(super) fn workers(&self) -> BTreeMap<u16, u32> {
        match self {
            Self::Queue(mapped) => mapped.queue.workers(),
            _ => BTreeMap::new(),
        }
    }

    /// Counts the permits or blocks of each row that has any.
    pub(super) fn holders(&self) -> BTreeMap<u16, u32> {
        let mut holders = match self {
            Self::Semaphore(semaphore) => by_row(semaphore.holders()),
            Self::Pool(pool) => by_row(pool.holders()),
            Self::Topic(topic, pool) => {
                let subscribers = topic.subscribers();
                by_row(pool.holders().into_iter().chain(subscribers.iter().map(|reader| (reader.row, reader.held))))
            }
            Self::Queue(mapped) => by_row(mapped.inputs.holders().into_iter().chain(mapped.outputs.holders())),
        };
        holders.retain(|_, slots| *slots > 0);
        holders
    }

    /// Counts the threads of each row that wait for a permit or block.
    pub(super) fn waiters(&self) -> BTreeMap<u16, u32> {
        match self {
            Self::Semaphore(semaphore) => by_row(semaphore.waiters()),
            Self::Pool(pool) | Self::Topic(_, pool) => by_row(pool.waiters()),
            Self::Queue(mapped) => by_row(mapped.inputs.waiters().into_iter().chain(mapped.outputs.waiters())),
        }
    }

    /// Returns the number of slots that such a step reads.
    fn slots(&self) -> u32 {
        match self {
            Self::Semaphore(semaphore) => semaphore.count(),
            Self::Pool(pool) | Self::Topic(_, pool) => pool.count(),
            Self::Queue(mapped) => mapped.inputs.count() + mapped.outputs.count() + mapped.queue.limits().tasks,
        }
    }
}

/// Sums counts by row.
fn by_row(counts: impl IntoIterator<Item = (u16, u32)>) -> BTreeMap<u16, u32> {
    let mut sums = BTreeMap::new();
    for (row, count) in counts {
        *sums.entry(row).or_default() += count;
    }
    sums
}

/// The state of a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) value: u64,
    pub(super) announced: u64,
    pub(super) ending: Option<TimelineEnding>,
}

impl Control {
    /// Creates the rows of a user's members, unless they exist. Returns the number of their descriptor if they are new.
    pub(super) fn provide_rows(&mut self, uid: u32, store: &FdStore) -> Result<Option<RawFd>, Errno> {
        if let Some(rows) = self.rows.get(&uid) {
            rows.members.repair();
            return Ok(None);
        }
        let fd = Members::create(members::MAX_ROWS).map_err(errno)?;
        let members = Members::map(&fd).map_err(errno)?;
        let fd = Arc::new(store.adopt(fd));
        let number = fd.number();
        self.rows.insert(uid, UserRows { members, fd });
        Ok(number)
    }

    /// Sets the heartbeat of a row whose member joins or resumes. The member then counts as alive until its own first
    /// heartbeat is due.
    pub(super) fn begin_row(&self, uid: u32, row: u16) {
        if let Some(rows) = self.rows.get(&uid) {
            rows.members.beat(row, members::now());
        }
    }

    /// Returns the last heartbeat of a user's member in a row, in milliseconds, as [`members::now`] counts.
    pub(super) fn heartbeat(&self, uid: u32, row: u16) -> Option<u64> {
        self.rows.get(&uid)?.members.heartbeat(row)
    }

    /// Returns the wait for a timeline of a user's member in a row.
    pub(super) fn wait(&self, uid: u32, row: u16) -> Option<TimelineWait> {
        self.rows.get(&uid)?.members.wait(row)
    }

    /// Returns the memory of the rows of a user's members.
    pub(super) fn rows_fd(&self, uid: u32) -> Option<Arc<Donated>> {
        Some(Arc::clone(&self.rows.get(&uid)?.fd))
    }

    /// Maps the control memory that a former process has left. An object whose memory its members have damaged is not
    /// mapped: it stays broken, as it was.
    pub(super) fn restore(
        rows: BTreeMap<u32, OwnedFd>,
        registry: &Registry,
        store: &FdStore,
        undone: BTreeMap<CellAt, u64>,
    ) -> Self {
        let mut control = Self { undone, ..Self::default() };
        for (uid, fd) in rows {
            let failed = |error| lack(&StartError::errno("map the members' rows")(errno(error)));
            let members = Members::restore(&fd).unwrap_or_else(failed);
            control.rows.insert(uid, UserRows { members, fd: Arc::new(store.adopt(fd)) });
        }
        for slab in registry.objects().cells.slabs() {
            if let Some(mapped) = map(slab, store, |fd| Slab::map(fd)) {
                control.slabs.insert(slab, mapped);
            }
        }
        for memory in registry.objects().semaphore_memory() {
            if let Some(mapped) = map(memory, store, |fd| Semaphore::map(fd)) {
                control.tables.insert(memory, SlotTable::Semaphore(mapped));
            }
        }
        for blocks in registry.block_controls() {
            if let Some(table) = map_blocks(&blocks, store) {
                control.tables.insert(blocks.slot_table(), table);
            }
        }
        control
    }

    /// Returns the numbers of the descriptors of the members' rows, by user.
    pub(super) fn rows_numbers(&self) -> BTreeMap<u32, RawFd> {
        self.rows.iter().filter_map(|(uid, rows)| Some((*uid, rows.fd.number()?))).collect()
    }

    pub(super) fn undone(&self) -> &BTreeMap<CellAt, u64> {
        &self.undone
    }

    pub(super) fn clearing(&self) -> &VecDeque<Clearing> {
        &self.clearing
    }

    /// Continues with the steps that a former process has left.
    pub(super) fn set_clearing(&mut self, clearing: VecDeque<Clearing>) {
        self.clearing = clearing;
    }

    /// Creates and maps control memory that a request needs.
    pub(super) fn provide(&mut self, needed: ControlNeeded, store: &mut FdStore) -> io::Result<ControlMemory> {
        match needed {
            ControlNeeded::Slab => {
                let fd = Slab::create()?;
                let slab = Slab::map(&fd)?;
                let created = keep(fd, store)?;
                self.slabs.insert(created.fd, slab);
                Ok(created)
            }
            ControlNeeded::Semaphore(maximum) => {
                let fd = Semaphore::create(maximum)?;
                let semaphore = Semaphore::map(&fd)?;
                let created = keep(fd, store)?;
                self.tables.insert(created.fd, SlotTable::Semaphore(semaphore));
                Ok(created)
            }
        }
    }

    /// Creates and maps the control memory of a pool, topic or queue.
    ///
    /// If the registry refuses the request later, the memory is closed with the refusal: up to three memfds. Their
    /// length is bounded by the limits on the shape, and only written pages take memory.
    pub(super) fn provide_blocks(&mut self, shape: wire::Control, store: &mut FdStore) -> io::Result<BlockControl> {
        let (pool_fd, pool) = create_pool(shape.blocks)?;
        let (table, outputs, object) = match (topic_shape(&shape), queue_shape(&shape)) {
            (Some(shape), _) => {
                let fd = Topic::create(shape)?;
                (SlotTable::Topic(Box::new(Topic::map(&fd)?), pool), None, Some(fd))
            }
            (None, Some(shape)) => {
                let (outputs_fd, outputs) = create_pool(shape.outputs)?;
                let fd = Queue::create(shape)?;
                let mapped = MappedQueue { queue: Queue::map(&fd)?, inputs: pool, outputs };
                (SlotTable::Queue(Box::new(mapped)), Some(outputs_fd), Some(fd))
            }
            (None, None) => (SlotTable::Pool(pool), None, None),
        };
        let pool = keep(pool_fd, store)?;
        let outputs = outputs.map(|fd| keep(fd, store)).transpose()?;
        let object = object.map(|fd| keep(fd, store)).transpose()?;
        let control = BlockControl { pool, outputs, object };
        self.tables.insert(control.slot_table(), table);
        Ok(control)
    }

    /// Unmaps closed control memory.
    pub(super) fn forget(&mut self, fds: &[FdId]) {
        for fd in fds {
            self.slabs.remove(fd);
            self.tables.remove(fd);
        }
    }

    /// Lets the tasks of a queue name an attachment.
    pub(super) fn attach(&self, object: FdId, attachment: u32) {
        if let Some(queue) = self.queue(object) {
            queue.attach(attachment);
        }
    }

    /// Ends an attachment, unless tasks name it; then returns these.
    pub(super) fn begin_detach(&self, object: FdId, attachment: u32) -> Option<InUse> {
        self.queue(object)?.begin_detach(attachment)
    }

    fn queue(&self, object: FdId) -> Option<&Queue> {
        match self.tables.get(&object) {
            Some(SlotTable::Queue(mapped)) => Some(&mapped.queue),
            _ => None,
        }
    }

    /// Initializes a cell for a new incarnation.
    pub(super) fn start(&mut self, at: CellAt, from: Option<CellAt>, incarnation: u32) {
        self.undone.remove(&at);
        let from = from.and_then(|from| self.cell(from)).map_or(0, Cell::value);
        if let Some(cell) = self.cell(at) {
            cell.start(from, incarnation);
        }
    }

    /// Ends an incarnation and wakes its waiters.
    pub(super) fn end(&self, at: CellAt, ending: TimelineEnding) {
        if let Some(cell) = self.cell(at) {
            cell.end(ending);
        }
    }

    /// Returns a store to a cell after its end. Record its value, then [`undo`](Self::undo) it.
    pub(super) fn late_store(&self, at: CellAt) -> Option<LateStore> {
        self.cell(at)?.late_store()
    }

    /// Undoes a store to a cell after its end.
    pub(super) fn undo(&mut self, at: CellAt, late: LateStore) {
        let value = late.value();
        tracing::debug!(slab = %at.slab, cell = at.index, value, "undoing a store to a timeline that has ended");
        let highest = self.undone.entry(at).or_default();
        *highest = value.max(*highest);
        if let Some(cell) = self.cell(at) {
            cell.undo(late);
        }
    }

    /// Returns whether all promised values of a cell have been stored, before its end or after it.
    pub(super) fn is_complete(&self, at: CellAt) -> bool {
        let undone = self.undone.get(&at).copied().unwrap_or(0);
        self.cell(at).is_none_or(|cell| cell.value().max(undone) >= cell.announced())
    }

    /// Returns whether an incarnation has ended, by any process.
    pub(super) fn has_ended(&self, at: CellAt) -> bool {
        self.cell(at).is_some_and(|cell| cell.ending().is_some())
    }

    /// Reads the state of a cell.
    pub(super) fn standing(&self, at: CellAt) -> Option<Standing> {
        let cell = self.cell(at)?;
        Some(Standing { value: cell.value(), announced: cell.announced(), ending: cell.ending() })
    }

    /// Returns all permits or blocks of a row whose member no longer uses the table.
    pub(super) fn give_back(&self, table: FdId, row: u16, registry: &Registry) {
        self.detach(table, row, TimelineEnding::Closed, registry);
        self.recover(table, row);
    }

    fn recover(&self, table: FdId, row: u16) {
        let Some(mapped) = self.tables.get(&table) else { return };
        let slots = mapped.recover(row);
        if slots > 0 {
            tracing::info!(%table, row, slots, "returned permits or blocks");
        }
    }

    fn detach(&self, object: FdId, row: u16, ending: TimelineEnding, registry: &Registry) {
        let is_gone = |other| other == row;
        let reached = |cell| self.reached(cell, registry);
        match self.tables.get(&object) {
            Some(SlotTable::Topic(topic, _)) => {
                let ports = topic.detach(is_gone, ending, reached);
                if ports > 0 {
                    tracing::info!(topic = %object, row, ports, "detached publishers and subscribers from a topic");
                }
            }
            Some(SlotTable::Queue(mapped)) => {
                let reason = match ending {
                    TimelineEnding::OwnerDied => Reason::Died,
                    TimelineEnding::Closed => Reason::Dropped,
                    _ => Reason::Detached,
                };
                let tasks = mapped.queue.detach(mapped.pools(), is_gone, reason, reached);
                if tasks > 0 {
                    tracing::info!(queue = %object, row, tasks, "returned tasks to a queue, or ended them");
                }
            }
            _ => {}
        }
    }

    /// Returns the value that an incarnation of a timeline reached, unless its cell has been reused.
    fn reached(&self, cell: TimelineCell, registry: &Registry) -> Option<u64> {
        let slab = registry.objects().cells.slab(cell.slab)?;
        let found =
            self.cell(CellAt { slab, index: cell.cell }).filter(|found| found.incarnation() == cell.incarnation);
        found.map(Cell::value)
    }

    /// Schedules the detachment of a row's member from a topic or queue.
    pub(super) fn detach_later(&mut self, object: FdId, row: u16, ending: TimelineEnding) {
        self.clearing.push_back(Clearing::Detach { object, row, ending });
    }

    /// Schedules the return of all permits and blocks of a departed member.
    pub(super) fn clear_row(&mut self, row: u16, tables: Vec<FdId>) {
        self.clearing.push_back(Clearing::Row { row, tables });
    }

    /// Runs scheduled steps, as many as one turn of the loop allows. Returns the detachments that were done, and the
    /// rows that have been cleared.
    pub(super) fn clear(&mut self, registry: &Registry) -> (u32, Vec<u16>) {
        let mut detached = 0;
        let mut cleared = Vec::new();
        while self.slots_read < SLOTS_IN_TURN
            && let Some(clearing) = self.clearing.pop_front()
        {
            match clearing {
                Clearing::Detach { object, row, ending } => {
                    self.slots_read += self.slots(object) + MAX_WAITERS;
                    self.detach(object, row, ending, registry);
                    detached += 1;
                }
                Clearing::Row { row, mut tables } => match tables.pop() {
                    Some(table) => {
                        self.slots_read += self.slots(table) + MAX_WAITERS;
                        self.recover(table, row);
                        self.clearing.push_front(Clearing::Row { row, tables });
                    }
                    None => cleared.push(row),
                },
            }
        }
        (detached, cleared)
    }

    /// Begins another turn of the loop.
    pub(super) fn begin_turn(&mut self) {
        self.slots_read = 0;
    }

    /// Returns whether steps remain.
    pub(super) fn is_clearing(&self) -> bool {
        !self.clearing.is_empty()
    }

    /// Counts the permits of a semaphore by state.
    pub(super) fn permits(&self, semaphore: FdId) -> SlotAudit {
        match self.tables.get(&semaphore) {
            Some(SlotTable::Semaphore(semaphore)) => semaphore.audit(),
            _ => SlotAudit::default(),
        }
    }

    /// Returns the number of permits or blocks of a table, which determines the cost of counting them.
    pub(super) fn slots(&self, table: FdId) -> u32 {
        self.tables.get(&table).map_or(0, SlotTable::slots)
    }

    /// Counts the permits or blocks of each row that has any.
    pub(super) fn holders(&self, table: FdId) -> BTreeMap<u16, u32> {
        self.tables.get(&table).map(SlotTable::holders).unwrap_or_default()
    }

    /// Counts the tasks of a queue that each row works on.
    pub(super) fn workers(&self, table: FdId) -> BTreeMap<u16, u32> {
        self.tables.get(&table).map(SlotTable::workers).unwrap_or_default()
    }

    pub(super) fn slot_table(&self, table: FdId) -> Option<&SlotTable> {
        self.tables.get(&table)
    }

    fn cell(&self, at: CellAt) -> Option<&Cell> {
        self.slabs.get(&at.slab)?.cell(at.index)
    }
}

/// Returns the shape of a topic's control memory.
pub(super) fn topic_shape(control: &wire::Control) -> Option<topic::TopicLimits> {
    let wire::TopicShape { depth, publishers, loans, subscribers, held, .. } = control.topic?;
    Some(topic::TopicLimits { blocks: control.blocks, depth, publishers, loans, subscribers, held })
}

/// Returns the shape of a queue's control memory.
pub(super) fn queue_shape(control: &wire::Control) -> Option<queue::QueueLimits> {
    let wire::QueueShape { tasks, outputs, lease, .. } = control.queue?;
    Some(queue::QueueLimits { tasks, inputs: control.blocks, outputs, lease })
}

/// Maps an object that a former process has left; `None` if its memory is damaged. The next worker tries again if there
/// is too little memory for the mapping.
fn map<T>(fd: FdId, store: &FdStore, map: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> Option<T> {
    let held = store.share(&[fd]).pop()?;
    match map(held.fd()?) {
        Ok(mapped) => Some(mapped),
        Err(error) if error.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) => {
            lack(&StartError::errno("map control memory")(Errno::NOMEM))
        }
        Err(error) => {
            tracing::warn!(%fd, %error, "control memory cannot be mapped again");
            None
        }
    }
}

/// Returns the error of the kernel for memory that this broker has created: nothing else can go wrong with it.
/// Returns the refusal of a request whose control memory could not be created.
pub(super) fn not_created(error: io::Error) -> wire::Refusal {
    tracing::warn!(%error, "control memory could not be created");
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => no_fds(),
        errno => wire::Refusal::System {
            what: "creating control memory".into(),
            errno: errno.unwrap_or(Errno::INVAL).raw_os_error(),
        },
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::INVAL)
}

fn map_blocks(blocks: &BlockControl, store: &FdStore) -> Option<SlotTable> {
    let pool = map(blocks.pool.fd, store, |fd| Pool::map(fd))?;
    let Some(object) = blocks.object else { return Some(SlotTable::Pool(pool)) };
    let Some(outputs) = blocks.outputs else {
        return Some(SlotTable::Topic(Box::new(map(object.fd, store, |fd| Topic::map(fd))?), pool));
    };
    let outputs = map(outputs.fd, store, |fd| Pool::map(fd))?;
    let queue = map(object.fd, store, |fd| Queue::map(fd))?;
    Some(SlotTable::Queue(Box::new(MappedQueue { queue, inputs: pool, outputs })))
}

fn keep(fd: OwnedFd, store: &mut FdStore) -> io::Result<ControlMemory> {
    let bytes = memfd::len(&fd)?;
    Ok(store.keep_control(fd, bytes))
}

fn create_pool(blocks: u32) -> io::Result<(OwnedFd, Pool)> {
    let fd = Pool::create(blocks)?;
    let pool = Pool::map(&fd)?;
    Ok((fd, pool))
}

/// Slots that one turn of the loop reads for departed members: about a millisecond.
const SLOTS_IN_TURN: u32 = 1 << 16;
