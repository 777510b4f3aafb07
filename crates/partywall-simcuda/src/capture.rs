//! Stream capture, as far as calls outside a graph observe it: which streams are captured, which calls that forbids, and
//! how a forbidden call invalidates the capture. Captured work is dropped, and the graph cannot be launched.

use std::cell::Cell;
use std::sync::{Arc, MutexGuard};
use std::thread::{self, ThreadId};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::entry::{entry_points, store};
use crate::stream::{self, Stream, StreamKind};
use crate::{context, ledger, state};

/// The capture that a stream is in.
pub(crate) struct Capture {
    mode: u32,
    thread: ThreadId,
    invalidated: bool,
}

thread_local! {
    /// The mode of this thread, which `cuThreadExchangeStreamCaptureMode` exchanges.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Checks a call that is "potentially unsafe" during a capture: one that allocates, frees, maps, or waits for the context.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` if a capture of this thread, or a global one of another, forbids it in this thread's
/// mode; those captures are invalidated.
pub(crate) fn unsafe_call() -> Result<(), Code> {
    let mode = MODE.get();
    let mut forbidden = false;
    for stream in stream::all() {
        if let Some(capture) = lock(&stream).as_mut() {
            let own = capture.thread == thread::current().id();
            if mode != RELAXED && capture.mode != RELAXED && (own || mode == GLOBAL && capture.mode == GLOBAL) {
                capture.invalidated = true;
                forbidden = true;
            }
        }
    }
    if forbidden { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Checks a call that waits for the stream or queries its work.
pub(crate) fn forbid_on(stream: &Stream) -> Result<(), Code> {
    match lock(stream).as_mut() {
        Some(capture) => {
            capture.invalidated = true;
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    }
}

/// Returns whether work for the stream goes into a graph.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED`; `STREAM_CAPTURE_IMPLICIT` for the legacy stream while one that it waits for is
/// captured.
pub(crate) fn takes(stream: &Stream) -> Result<bool, Code> {
    if stream.kind() == StreamKind::Legacy {
        let captured = implicitly_captured(stream);
        for stream in &captured {
            if let Some(capture) = lock(stream).as_mut() {
                capture.invalidated = true;
            }
        }
        return if captured.is_empty() { Ok(false) } else { Err(Code::STREAM_CAPTURE_IMPLICIT) };
    }
    match lock(stream).as_ref() {
        Some(capture) if capture.invalidated => Err(Code::STREAM_CAPTURE_INVALIDATED),
        capture => Ok(capture.is_some()),
    }
}

/// Returns the captured streams that the legacy stream is ordered after.
fn implicitly_captured(legacy: &Stream) -> Vec<Arc<Stream>> {
    let captured = |stream: &Arc<Stream>| stream.kind() == StreamKind::Blocking && lock(stream).is_some();
    stream::all_of(legacy.context()).into_iter().filter(captured).collect()
}

fn lock(stream: &Stream) -> MutexGuard<'_, Option<Capture>> {
    stream.capture.lock().ignore_poison()
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
        let mut capture = lock(&stream);
        if capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        *capture = Some(Capture { mode, thread: thread::current().id(), invalidated: false });
        Ok(())
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let stream = stream::find(stream)?;
        let mut current = lock(&stream);
        let capture = current.as_ref().ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let invalidated = capture.invalidated;
        *current = None;
        if invalidated {
            store(graph, 0)?;
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let handle = state::new_handle();
        store(graph, handle)?;
        ledger::record(LEDGER, handle as u64, 0);
        Ok(())
    }
    fn cuGraphDestroy(graph: Handle) {
        context::current()?;
        ledger::remove(LEDGER, graph as u64);
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
        store(status, match lock(&stream).as_ref() {
            None => 0,
            Some(Capture { invalidated: false, .. }) => 1,
            Some(_) => 2,
        })
    }
}

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

const LEDGER: &str = "graph";
