//! Events: points in streams for which other streams, other processes and the host can wait.
//!
//! All users of an event share its state: the number of the last record, and the numbers of the reached records. If the
//! process of a record's stream is killed, the record is never reached, and no other process can mark it as reached.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use partywall_os::lock::IgnorePoison;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::abi::{Code, Handle, IpcHandle};
use crate::context::{self, Ctx};
use crate::entry::{entry_points, store};
use crate::{device, entry, ipc, ledger, queue, stream};

pub(crate) struct Event {
    context: Arc<Ctx>,
    flags: u32,
    /// True if another process created it.
    opened: bool,
    /// The handle that other processes open.
    exported: Mutex<Option<IpcHandle>>,
    points: Arc<Points>,
    /// When the last record was reached, with its number.
    time: Mutex<Option<(u64, Instant)>>,
}

/// The shared part of an event.
struct Points {
    words: NonNull<Words>,
    /// The file of an event between processes; the words of any other event are on the heap.
    file: Option<OwnedFd>,
}

/// The shared words. In a new file they are all zero, which means that nothing is recorded.
#[repr(C)]
struct Words {
    /// The number of the last record; 0 if there is none.
    recorded: AtomicU64,
    /// Record `n` stores `n` in `reached[n % RECORDS]` when its stream reaches it. A higher number there belongs to a
    /// later record; no test has a queue so long that this could be wrong.
    reached: [AtomicU64; RECORDS],
}

/// One record of an event; number 0 stands for none, which counts as reached.
pub(crate) struct Record {
    points: Arc<Points>,
    number: u64,
}

static EVENTS: Mutex<BTreeMap<Handle, Arc<Event>>> = Mutex::new(BTreeMap::new());

// SAFETY: atomics in memory that stays until the value is dropped.
unsafe impl Send for Points {}
// SAFETY: as for `Send`.
unsafe impl Sync for Points {}

impl Points {
    fn private() -> Self {
        let words = Words { recorded: AtomicU64::new(0), reached: [const { AtomicU64::new(0) }; RECORDS] };
        Self { words: NonNull::from(Box::leak(Box::new(words))), file: None }
    }

    /// Creates the words of an event between processes, in a new file.
    fn shared() -> Result<Self, Code> {
        let file =
            rustix::fs::memfd_create("simcuda-event", MemfdFlags::CLOEXEC).map_err(|_| Code::OPERATING_SYSTEM)?;
        rustix::fs::ftruncate(&file, size_of::<Words>() as u64).map_err(|_| Code::OPERATING_SYSTEM)?;
        Self::open(file)
    }

    /// Maps the words of an event from the file of the process that created it.
    fn open(file: OwnedFd) -> Result<Self, Code> {
        let stat = rustix::fs::fstat(&file).map_err(|_| Code::MAP_FAILED)?;
        if stat.st_size != size_of::<Words>() as i64 {
            return Err(Code::INVALID_VALUE);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size_of::<Words>(), access, MapFlags::SHARED, &file, 0) };
        let words = map.ok().and_then(|map| NonNull::new(map.cast())).ok_or(Code::MAP_FAILED)?;
        Ok(Self { words, file: Some(file) })
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped or allocated by the constructors, of this size, until the value is dropped; only atomics.
        unsafe { self.words.as_ref() }
    }

    fn reach(&self, number: u64) {
        self.words().reached[number as usize % RECORDS].fetch_max(number, Ordering::AcqRel);
    }
}

impl Drop for Points {
    fn drop(&mut self) {
        if self.file.is_some() {
            // SAFETY: mapped by `open` with this size; no reference to it is left.
            let unmapped = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), size_of::<Words>()) };
            unmapped.expect("a mapping of ours can be unmapped");
        } else {
            // SAFETY: leaked from a box by `private`.
            drop(unsafe { Box::from_raw(self.words.as_ptr()) });
        }
    }
}

impl Record {
    pub(crate) fn is_reached(&self) -> bool {
        self.points.words().reached[self.number as usize % RECORDS].load(Ordering::Acquire) >= self.number
    }
}

impl Event {
    fn new(context: Arc<Ctx>, flags: u32, opened: bool, points: Points) -> Self {
        Self { context, flags, opened, exported: Mutex::default(), points: Arc::new(points), time: Mutex::default() }
    }

    /// Returns what another process opens.
    fn export(&self) -> Result<IpcHandle, Code> {
        let file = self.points.file.as_ref().filter(|_| !self.opened).ok_or(Code::INVALID_HANDLE)?;
        let mut exported = lock(&self.exported);
        if let Some(handle) = *exported {
            return Ok(handle);
        }
        let mut payload = [0; 32];
        payload[8] = ipc::EVENT;
        payload[9] = device::all()[self.context.device].physical;
        payload[16..24].copy_from_slice(&dev_shm());
        let handle = ipc::serve(file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?, payload)?;
        *exported = Some(handle);
        Ok(handle)
    }

    /// Returns the event that another process made, on the device of the context.
    fn open(context: Arc<Ctx>, handle: &IpcHandle) -> Result<Self, Code> {
        let (file, payload) = ipc::fetch(handle).map_err(|code| match code {
            // The bytes are no handle (measured).
            Code::INVALID_VALUE => Code::MAP_FAILED,
            // The answer for an event that its maker has destroyed (field reports).
            Code::INVALID_HANDLE => Code::INVALID_VALUE,
            other => other,
        })?;
        if payload[8] != ipc::EVENT || payload[9] != device::all()[context.device].physical {
            return Err(Code::INVALID_VALUE);
        }
        // The driver's file is in `/dev/shm`, and its maker's alone (measured).
        let owner = rustix::fs::fstat(&file).map_err(|_| Code::MAP_FAILED)?.st_uid;
        if payload[16..24] != dev_shm() || owner != rustix::process::geteuid().as_raw() {
            return Err(Code::MAP_FAILED);
        }
        Ok(Self::new(context, INTERPROCESS | DISABLE_TIMING, true, Points::open(file)?))
    }

    /// Returns the last record at the time of the call: what a wait waits for, whatever is recorded later.
    pub(crate) fn last_record(&self) -> Record {
        Record { points: self.points.clone(), number: self.points.words().recorded.load(Ordering::Acquire) }
    }

    fn record(self: &Arc<Self>, stream: Handle) -> Result<(), Code> {
        let stream = stream::find(stream)?;
        if !Arc::ptr_eq(stream.context(), &self.context) {
            return Err(Code::INVALID_HANDLE);
        }
        // Counted before it is enqueued, so that every process that is notified of this record finds it.
        let number = self.points.words().recorded.fetch_add(1, Ordering::AcqRel) + 1;
        let event = self.clone();
        let submitted = stream.submit(move |_| {
            let mut time = lock(&event.time);
            if time.is_none_or(|(latest, _)| latest < number) {
                *time = Some((number, Instant::now()));
            }
            event.points.reach(number);
            Ok(())
        });
        // A record that is not put into a queue is reached immediately.
        if !matches!(submitted, Ok(Some(_))) {
            self.points.reach(number);
        }
        submitted.map(drop)
    }

    fn is_reached(&self) -> Result<bool, Code> {
        let reached = self.last_record().is_reached();
        self.context.check()?;
        Ok(reached)
    }

    /// Returns when the last record was reached.
    fn reached_at(&self) -> Result<Instant, Code> {
        let last = self.last_record();
        if last.number == 0 || self.flags & DISABLE_TIMING != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        let time = *lock(&self.time);
        time.filter(|(number, _)| *number == last.number).map(|(_, at)| at).ok_or(Code::NOT_READY)
    }
}

/// Returns the number of the file system that this process sees as `/dev/shm`; 0 if it sees none.
fn dev_shm() -> [u8; 8] {
    rustix::fs::stat("/dev/shm").map_or(0, |stat| stat.st_dev).to_ne_bytes()
}

/// Returns the event of a handle.
pub(crate) fn find(handle: Handle) -> Result<Arc<Event>, Code> {
    context::current()?;
    lock(&EVENTS).get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
}

fn add(event: Event) -> Handle {
    let handle = entry::new_handle();
    lock(&EVENTS).insert(handle, Arc::new(event));
    ledger::record(LEDGER, handle as u64, 0);
    handle
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

entry_points! {
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) {
        if flags & !EXTERNAL_EVENT != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let stream = stream::find(stream)?;
        let record = find(event)?.last_record();
        stream.submit(move |runner| runner.poll(|| Ok(record.is_reached())))?;
        Ok(())
    }
    fn cuEventCreate(event: *mut Handle, flags: u32) {
        let context = context::current()?;
        let known = flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) == 0;
        // An event between processes keeps no time (vendor's documentation).
        if event.is_null() || !known || flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS {
            return Err(Code::INVALID_VALUE);
        }
        let points = if flags & INTERPROCESS != 0 { Points::shared()? } else { Points::private() };
        store(event, add(Event::new(context, flags, false, points)))
    }
    fn cuEventDestroy_v2(event: Handle) {
        context::current()?;
        let destroyed = lock(&EVENTS).remove(&event).ok_or(Code::INVALID_HANDLE)?;
        if let Some(handle) = *lock(&destroyed.exported) {
            ipc::withdraw(&handle);
        }
        ledger::remove(LEDGER, event as u64);
        Ok(())
    }
    fn cuEventRecord(event: Handle, stream: Handle) { find(event)?.record(stream) }
    fn cuEventQuery(event: Handle) {
        if find(event)?.is_reached()? { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuEventSynchronize(event: Handle) {
        let event = find(event)?;
        let record = event.last_record();
        queue::poll(|| {
            event.context.check()?;
            Ok(record.is_reached())
        })
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let start = find(start)?.reached_at()?;
        let end = find(end)?.reached_at()?;
        let seconds = end.checked_duration_since(start).map_or_else(
            || -(start - end).as_secs_f32(),
            |duration| duration.as_secs_f32(),
        );
        store(milliseconds, seconds * 1e3)
    }
    fn cuIpcGetEventHandle(handle: *mut IpcHandle, event: Handle) { store(handle, find(event)?.export()?) }
    fn cuIpcOpenEventHandle(event: *mut Handle, handle: IpcHandle) {
        let context = context::current()?;
        if event.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        store(event, add(Event::open(context, &handle)?))
    }
}

/// The number of records, chosen so that the words fill a page.
const RECORDS: usize = 511;

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

const LEDGER: &str = "event";
/// `CU_EVENT_WAIT_EXTERNAL`, which says something about graphs only.
const EXTERNAL_EVENT: u32 = 1;
