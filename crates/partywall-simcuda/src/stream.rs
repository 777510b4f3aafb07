//! Streams: their handles, the default streams, and which stream waits for which.
//!
//! Work on the legacy default stream is ordered after all work that is on the blocking streams of its context when it
//! is enqueued, and vice versa (vendor's documentation, "Stream synchronization behavior").

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::context::{self, Ctx};
use crate::entry::{entry_points, store};
use crate::queue::{Queue, SharedWork, Ticket, Work};
use crate::{entry, ledger};

/// The capture that a stream is in.
pub(crate) struct Capture {
    pub(crate) mode: u32,
    pub(crate) thread: ThreadId,
    pub(crate) invalidated: bool,
    pub(crate) graph: Handle,
    /// The nodes that the next one depends on. `cuStreamGetCaptureInfo` gives this array to the caller.
    pub(crate) dependencies: Vec<Handle>,
}

pub(crate) struct Stream {
    /// A number that no other stream of the process has.
    id: u64,
    queue: Arc<Queue>,
    kind: StreamKind,
    priority: c_int,
    capture: Mutex<Option<Capture>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Legacy,
    Blocking,
    NonBlocking,
}

struct Streams {
    by_handle: BTreeMap<Handle, Arc<Stream>>,
    /// All streams whose queue may hold work, including default streams, and destroyed streams until they are done.
    live: Vec<Arc<Stream>>,
}

static STREAMS: Mutex<Streams> = Mutex::new(Streams { by_handle: BTreeMap::new(), live: Vec::new() });

/// The per-thread default streams of one thread, one for each context. They end with the thread.
#[derive(Default)]
struct OfThread(Vec<Arc<Stream>>);

thread_local! {
    static OF_THREAD: RefCell<OfThread> = RefCell::default();
}

impl Stream {
    pub(crate) fn context(&self) -> &Arc<Ctx> {
        self.queue.context()
    }

    pub(crate) fn kind(&self) -> StreamKind {
        self.kind
    }

    /// Enqueues work behind the work that it is ordered after.
    pub(crate) fn enqueue(&self, work: SharedWork) -> Ticket {
        // Locked until the work is in the queue, so that two streams cannot each be ordered after the other.
        let mut streams = lock();
        let before = streams.before(self);
        let work: Work = Box::new(move |runner| {
            before.iter().for_each(Ticket::wait);
            runner.context().check()?;
            work(runner)
        });
        self.queue.enqueue(work)
    }

    /// Locks the capture that the stream is in.
    pub(crate) fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        self.capture.lock().ignore_poison()
    }

    /// Checks a call that waits for the stream or queries its work.
    fn check_not_captured(&self) -> Result<(), Code> {
        match self.capture().as_mut() {
            Some(capture) => {
                capture.invalidated = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// Waits for all work on the stream, and for the work that it is ordered after.
    pub(crate) fn synchronize(&self) -> Result<(), Code> {
        self.points().iter().for_each(Ticket::wait);
        self.context().check()
    }

    fn is_done(&self) -> Result<bool, Code> {
        let done = self.points().iter().all(Ticket::is_reached);
        self.context().check()?;
        Ok(done)
    }

    fn points(&self) -> Vec<Ticket> {
        let mut points = lock().before(self);
        points.push(self.queue.tail());
        points
    }
}

impl Streams {
    fn start(&mut self, context: &Arc<Ctx>, kind: StreamKind, priority: c_int) -> Arc<Stream> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let stream = Arc::new(Stream { id, queue: Queue::start(context), kind, priority, capture: Mutex::default() });
        self.live.push(stream.clone());
        stream
    }

    /// Returns the points on other streams that new work of `stream` is ordered after.
    fn before(&mut self, stream: &Stream) -> Vec<Ticket> {
        let others = match stream.kind {
            StreamKind::Legacy => StreamKind::Blocking,
            StreamKind::Blocking => StreamKind::Legacy,
            StreamKind::NonBlocking => return Vec::new(),
        };
        self.of(stream.context()).filter(|other| other.kind == others).map(|other| other.queue.tail()).collect()
    }

    fn of(&mut self, context: &Ctx) -> impl Iterator<Item = &Arc<Stream>> {
        self.live.retain(|stream| !stream.queue.is_finished());
        self.live.iter().filter(move |stream| ptr::eq(&raw const **stream.context(), context))
    }
}

impl Drop for OfThread {
    fn drop(&mut self) {
        for stream in &self.0 {
            stream.queue.close();
        }
    }
}

/// Returns the stream of a handle, or the default stream that it stands for in the current context.
pub(crate) fn find(handle: Handle) -> Result<Arc<Stream>, Code> {
    let context = context::current()?;
    let mut streams = lock();
    match handle {
        NULL | LEGACY => {
            if let Some(stream) = streams.of(&context).find(|stream| stream.kind == StreamKind::Legacy) {
                return Ok(stream.clone());
            }
            Ok(streams.start(&context, StreamKind::Legacy, 0))
        }
        PER_THREAD => OF_THREAD.with_borrow_mut(|OfThread(own)| {
            if let Some(stream) = own.iter().find(|stream| Arc::ptr_eq(stream.context(), &context)) {
                return Ok(stream.clone());
            }
            let stream = streams.start(&context, StreamKind::Blocking, 0);
            own.push(stream.clone());
            Ok(stream)
        }),
        _ => streams.by_handle.get(&handle).cloned().ok_or(Code::INVALID_HANDLE),
    }
}

/// Returns the streams of a context that may hold work, or capture.
pub(crate) fn all_of(context: &Ctx) -> Vec<Arc<Stream>> {
    lock().of(context).cloned().collect()
}

/// Returns the streams of all contexts that may hold work, or capture.
pub(crate) fn all() -> Vec<Arc<Stream>> {
    lock().live.clone()
}

/// Returns the points after all pending work on the streams of the context.
pub(crate) fn pending(context: &Ctx) -> Vec<Ticket> {
    lock().of(context).map(|stream| stream.queue.tail()).filter(|point| !point.is_reached()).collect()
}

/// Waits for all work that was enqueued in the context. Do not call it with a table locked.
///
/// # Errors
/// The fault, if there is one.
pub(crate) fn synchronize(context: &Ctx) -> Result<(), Code> {
    pending(context).iter().for_each(Ticket::wait);
    context.check()
}

/// Ends the streams of a context that is destroyed.
pub(crate) fn end_context(context: &Ctx) {
    let mut streams = lock();
    streams.of(context).for_each(|stream| stream.queue.close());
    streams.by_handle.retain(|_, stream| !ptr::eq(&raw const **stream.context(), context));
}

fn lock() -> MutexGuard<'static, Streams> {
    STREAMS.lock().ignore_poison()
}

fn create(stream: *mut Handle, flags: u32, priority: c_int) -> Result<(), Code> {
    let context = context::current()?;
    let kind = match flags {
        0 => StreamKind::Blocking,
        NON_BLOCKING => StreamKind::NonBlocking,
        _ => return Err(Code::INVALID_VALUE),
    };
    let handle = entry::new_handle();
    store(stream, handle)?;
    let mut streams = lock();
    let made = streams.start(&context, kind, priority.clamp(GREATEST_PRIORITY, 0));
    streams.by_handle.insert(handle, made);
    ledger::record(LEDGER, handle as u64, 0);
    Ok(())
}

entry_points! {
    fn cuStreamCreate(stream: *mut Handle, flags: u32) { create(stream, flags, 0) }
    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: u32, priority: c_int) { create(stream, flags, priority) }
    fn cuStreamDestroy_v2(stream: Handle) {
        context::current()?;
        let destroyed = lock().by_handle.remove(&stream).ok_or(Code::INVALID_HANDLE)?;
        destroyed.queue.close();
        ledger::remove(LEDGER, stream as u64);
        Ok(())
    }
    fn cuStreamSynchronize(stream: Handle) {
        let stream = find(stream)?;
        stream.check_not_captured()?;
        stream.synchronize()
    }
    fn cuStreamQuery(stream: Handle) {
        let stream = find(stream)?;
        stream.check_not_captured()?;
        if stream.is_done()? { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuStreamGetFlags(stream: Handle, flags: *mut u32) {
        store(flags, if find(stream)?.kind == StreamKind::NonBlocking { NON_BLOCKING } else { 0 })
    }
    fn cuStreamGetPriority(stream: Handle, priority: *mut c_int) { store(priority, find(stream)?.priority) }
    fn cuStreamGetId(stream: Handle, id: *mut u64) { store(id, find(stream)?.id) }
    fn cuStreamGetCtx(stream: Handle, context: *mut Handle) { store(context, find(stream)?.context().handle) }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        context::current()?;
        if !least.is_null() {
            store(least, 0)?;
        }
        if greatest.is_null() { Ok(()) } else { store(greatest, GREATEST_PRIORITY) }
    }
}

const NULL: Handle = 0;
const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

const NON_BLOCKING: u32 = 1;
/// As on an H200: 0 is the least.
const GREATEST_PRIORITY: c_int = -5;

const LEDGER: &str = "stream";
