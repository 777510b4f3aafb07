//! Stream capture: which streams are captured, into which graph, which calls that forbids, and how a forbidden call
//! invalidates the capture. One stream is captured alone: a wait for an event does not make its stream part of a
//! capture.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::thread;

use crate::abi::{Code, Handle};
use crate::entry::{entry_points, store};
use crate::queue::{Runner, SharedWork, Ticket};
use crate::stream::{self, Capture, Stream, StreamKind};
use crate::{graph, ledger};

thread_local! {
    /// The mode of this thread, which `cuThreadExchangeStreamCaptureMode` exchanges.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Checks a call that is "potentially unsafe" during a capture: one that allocates, frees, maps, or waits for the
/// context.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if a capture of this thread, or a global one of another, forbids it in this thread's
/// mode; those captures are invalidated.
pub(crate) fn unsafe_call() -> Result<(), Code> {
    let mode = MODE.get();
    let mut forbidden = false;
    for stream in stream::all() {
        if let Some(capture) = stream.capture().as_mut() {
            let own = capture.thread == thread::current().id();
            if mode != RELAXED && capture.mode != RELAXED && (own || mode == GLOBAL && capture.mode == GLOBAL) {
                capture.invalidated = true;
                forbidden = true;
            }
        }
    }
    if forbidden { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

impl Stream {
    /// Enqueues work and returns its ticket. Work on a captured stream goes into the graph, and there is no ticket.
    pub(crate) fn submit(
        &self,
        work: impl Fn(&mut Runner) -> Result<(), Code> + Send + Sync + 'static,
    ) -> Result<Option<Ticket>, Code> {
        let work: SharedWork = Arc::new(work);
        Ok(if takes(self, &work)? { None } else { Some(self.enqueue(work)) })
    }
}

/// Adds the work to the graph if the stream is captured. Returns whether it is.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED`; `STREAM_CAPTURE_IMPLICIT` for the legacy stream while one that it waits for is
/// captured.
fn takes(stream: &Stream, work: &SharedWork) -> Result<bool, Code> {
    if stream.kind() == StreamKind::Legacy {
        let captured = implicitly_captured(stream);
        for stream in &captured {
            if let Some(capture) = stream.capture().as_mut() {
                capture.invalidated = true;
            }
        }
        return if captured.is_empty() { Ok(false) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) };
    }
    match stream.capture().as_mut() {
        None => Ok(false),
        Some(capture) if capture.invalidated => Err(Code::STREAM_CAPTURE_INVALIDATED),
        Some(capture) => {
            let before = capture.dependencies.clone();
            capture.dependencies = vec![graph::record(capture.graph, before, work.clone())?];
            Ok(true)
        }
    }
}

/// Returns the captured streams that the legacy stream is ordered after.
fn implicitly_captured(legacy: &Stream) -> Vec<Arc<Stream>> {
    let captured = |stream: &Arc<Stream>| stream.kind() == StreamKind::Blocking && stream.capture().is_some();
    stream::all_of(legacy.context()).into_iter().filter(captured).collect()
}

entry_points! {
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        if mode.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null; the caller passes a pointer to its mode.
        let new = unsafe { mode.read() };
        if new > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        store(mode, MODE.replace(new))
    }
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32) {
        let stream = stream::find(stream)?;
        if mode > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        if stream.kind() == StreamKind::Legacy {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut capture = stream.capture();
        if capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let thread = thread::current().id();
        let graph = graph::begin();
        *capture = Some(Capture { mode, thread, invalidated: false, graph, dependencies: Vec::new() });
        Ok(())
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let stream = stream::find(stream)?;
        let mut current = stream.capture();
        let capture = current.as_ref().ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Capture { invalidated, graph: captured, .. } = *capture;
        *current = None;
        if invalidated {
            graph::discard(captured);
            store(graph, 0)?;
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        store(graph, captured)?;
        ledger::record(graph::GRAPH, captured as u64, 0);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3(
        stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle,
        edges: *mut *const c_void, count: *mut usize,
    ) {
        let stream = stream::find(stream)?;
        let current = stream.capture();
        let Some(capture) = current.as_ref() else { return store(status, 0) };
        store(status, if capture.invalidated { 2 } else { 1 })?;
        if !id.is_null() {
            store(id, capture.graph as u64)?;
        }
        if !graph.is_null() {
            store(graph, capture.graph)?;
        }
        if !dependencies.is_null() {
            store(dependencies, capture.dependencies.as_ptr())?;
        }
        if !edges.is_null() {
            store(edges, ptr::null())?;
        }
        if count.is_null() { Ok(()) } else { store(count, capture.dependencies.len()) }
    }
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: Handle, dependencies: *const Handle, _edges: *const c_void, count: usize, flags: u32,
    ) {
        let stream = stream::find(stream)?;
        let mut current = stream.capture();
        let capture = current.as_mut().ok_or(Code::ILLEGAL_STATE)?;
        // SAFETY: the caller passes an array of this length.
        let nodes = unsafe { graph::handles(dependencies, count) }?;
        if flags > SET_DEPENDENCIES || !graph::has_nodes(capture.graph, &nodes) {
            return Err(Code::INVALID_VALUE);
        }
        if flags == SET_DEPENDENCIES {
            capture.dependencies.clear();
        }
        capture.dependencies.extend(nodes);
        Ok(())
    }
    fn cuStreamIsCapturing(stream: Handle, status: *mut u32) {
        let stream = stream::find(stream)?;
        if stream.kind() == StreamKind::Legacy {
            // That the blocking streams' captures stay valid is documented.
            if !implicitly_captured(&stream).is_empty() {
                return Err(Code::STREAM_CAPTURE_IMPLICIT);
            }
        }
        store(status, match stream.capture().as_ref() {
            None => 0,
            Some(Capture { invalidated: false, .. }) => 1,
            Some(_) => 2,
        })
    }
}

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`.
const SET_DEPENDENCIES: u32 = 1;
