//! CUDA graphs whose memory operations take their word and value anew at each launch.
//!
//! A graph repeats what was captured, its memory operations included: with the same words and values at each launch.
//! [`CurrentStream::capture_wait_u64`] and [`CurrentStream::capture_write_u64`] therefore return the [`WordNode`] that
//! they add, and [`WordNode::set_u64`] gives it another word and value before a launch. Launches that are already
//! enqueued keep theirs (driver documentation of `cuGraphExecBatchMemOpNodeSetParams`).
#![allow(unsafe_code)] // driver calls

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use crate::abi::{
    BATCH_MEM_OP_WAIT_64, BATCH_MEM_OP_WRITE_64, BatchMemOp, BatchMemOpNodeParams, Handle,
    STREAM_CAPTURE_MODE_THREAD_LOCAL, STREAM_CAPTURE_STATUS_ACTIVE, STREAM_CAPTURE_STATUS_NONE,
    STREAM_SET_CAPTURE_DEPENDENCIES, STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT,
};
use crate::memop::first_word;
use crate::{AccessError, Context, CuResult, CudaError, CurrentStream, DeviceSlice, Stream, StreamRef};

/// The driver's handle of a graph (`CUgraph`, `cudaGraph_t`) as a number, the form in which frameworks pass it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawGraph(pub u64);

/// The driver's handle of an instantiated graph (`CUgraphExec`, `cudaGraphExec_t`) as a number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawGraphExec(pub u64);

impl fmt::Debug for RawGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawGraph({:#x})", self.0)
    }
}

impl fmt::Debug for RawGraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawGraphExec({:#x})", self.0)
    }
}

/// A graph that this crate captured, and its instantiation. Dropping it does not wait for launches. `Send`, but not
/// `Sync`, because the driver wants one thread at a time to use a graph.
#[derive(Debug)]
pub struct Graph {
    exec: RawGraphExec,
    // Destroyed after what was instantiated from it.
    graph: OwnedGraph,
    capture: u64,
    _not_sync: PhantomData<Cell<()>>,
}

/// A graph whose capture has ended. Dropping it destroys it.
#[derive(Debug)]
struct OwnedGraph {
    context: Context,
    raw: RawGraph,
}

/// A borrowed graph with its instantiation: of the caller's framework, or of a [`Graph`]. Stays on its thread.
#[derive(Clone, Copy, Debug)]
pub struct GraphRef<'a> {
    context: &'a Context,
    graph: RawGraph,
    exec: RawGraphExec,
    /// The capture of its nodes, if it is known.
    capture: Option<u64>,
    _not_send: PhantomData<*mut ()>,
}

/// A memory operation in a graph: it waits for a word of 8 bytes, or writes one.
///
/// It is a place in the graph, which owns it; dropping it changes nothing.
#[derive(Debug)]
pub struct WordNode {
    context: Context,
    graph: RawGraph,
    /// The capture that made it, because the driver may reuse the handle of a graph that was destroyed.
    capture: u64,
    node: Handle,
    kind: WordOperation,
}

/// The capture that a stream is in.
struct CaptureInfo {
    /// No other capture of the process ever has it.
    id: u64,
    graph: Handle,
    /// The nodes that the next one depends on: the driver's array, valid until the next call for the stream.
    dependencies: *const Handle,
    count: usize,
}

#[derive(Clone, Copy, Debug)]
enum WordOperation {
    Wait,
    Write,
}

impl Graph {
    /// Captures what `record` enqueues on the stream that it gets, and instantiates it. Nothing runs yet.
    ///
    /// The stream is a new one, which ends with the call. Meanwhile this thread cannot allocate, free or map memory,
    /// nor load modules: such a call would invalidate the capture.
    ///
    /// # Errors
    /// That of `record`; `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` after a call that no capture admits; the driver's
    /// errors.
    pub fn capture<E: From<CudaError>>(
        context: &Context,
        record: impl FnOnce(StreamRef<'_>) -> Result<(), E>,
    ) -> Result<Self, E> {
        let stream = Stream::new(context)?;
        let captured = Captured::begin(&stream)?;
        record(stream.as_ref())?;
        Ok(captured.end()?)
    }

    /// Returns the graph as the calls take it.
    #[must_use]
    pub fn as_ref(&self) -> GraphRef<'_> {
        // SAFETY: instantiated from this graph in `Captured::end`; both live as long as `self`, which no other thread
        // can borrow meanwhile. Nodes of an earlier graph are refused, because they are of another capture.
        let graph = unsafe { GraphRef::borrow(&self.graph.context, self.graph.raw, self.exec) };
        GraphRef { capture: Some(self.capture), ..graph }
    }

    /// Enqueues the work of the graph on a stream. Launches of one graph run one after the other.
    ///
    /// # Errors
    /// The driver's error; errors of the work itself appear at a later call.
    ///
    /// # Safety
    /// The memory that the captured work uses is still there, until this launch is done.
    pub unsafe fn launch(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        let context = &self.graph.context;
        let _guard = context.guard()?;
        // SAFETY: graph and stream are live, a context is current, and the memory is there, by the caller's promise.
        unsafe { context.driver().graph_launch(self.exec.handle(), stream.handle()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.graph.context.release(|driver| {
            // SAFETY: instantiated once, destroyed once.
            unsafe { driver.graph_exec_destroy(self.exec.handle()) }
        });
    }
}

impl OwnedGraph {
    fn instantiate(&self) -> Result<RawGraphExec, CudaError> {
        let _guard = self.context.guard()?;
        let mut exec = 0;
        // SAFETY: the graph is live, and its capture has ended; the pointer is to a live handle; a context is current.
        unsafe { self.context.driver().graph_instantiate(&mut exec, self.raw.handle(), 0) }?;
        Ok(RawGraphExec(exec as u64))
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: ended once, destroyed once.
            unsafe { driver.graph_destroy(self.raw.handle()) }
        });
    }
}

/// A capture that has begun. Dropping it ends the capture.
struct Captured<'a> {
    stream: &'a Stream,
    id: u64,
    ended: bool,
}

impl<'a> Captured<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, CudaError> {
        let stream_ref = stream.as_ref();
        let current = stream_ref.current()?;
        // SAFETY: the stream is live, and its context current.
        unsafe { current.driver().stream_begin_capture(current.handle(), STREAM_CAPTURE_MODE_THREAD_LOCAL) }?;
        let mut captured = Self { stream, id: 0, ended: false };
        let invalidated = || CudaError::new("cuStreamBeginCapture", CuResult::STREAM_CAPTURE_INVALIDATED);
        captured.id = current.capture_info()?.ok_or_else(invalidated)?.id;
        Ok(captured)
    }

    fn end(mut self) -> Result<Graph, CudaError> {
        let graph = self.end_capture()?;
        Ok(Graph { exec: graph.instantiate()?, graph, capture: self.id, _not_sync: PhantomData })
    }

    fn end_capture(&mut self) -> Result<OwnedGraph, CudaError> {
        self.ended = true;
        let stream = self.stream.as_ref();
        let current = stream.current()?;
        let mut graph = 0;
        // SAFETY: the stream is live, and its context current; the pointer is to a live handle.
        unsafe { current.driver().stream_end_capture(current.handle(), &mut graph) }?;
        Ok(OwnedGraph { context: stream.context().clone(), raw: RawGraph(graph as u64) })
    }
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        if !self.ended {
            drop(self.end_capture());
        }
    }
}

impl<'a> GraphRef<'a> {
    /// Returns a graph of the caller's framework.
    ///
    /// # Safety
    /// `exec` was instantiated from `graph`. Neither is destroyed, nor used or changed by another thread, while the
    /// result is used. Nodes that are used with the result and whose graph has the handle `graph` are of this graph,
    /// not of an earlier one that was destroyed.
    #[must_use]
    pub const unsafe fn borrow(context: &'a Context, graph: RawGraph, exec: RawGraphExec) -> Self {
        Self { context, graph, exec, capture: None, _not_send: PhantomData }
    }

    /// Returns the nodes that `node`, which is of this graph, depends on. A context is current.
    fn dependencies(self, node: Handle) -> Result<Vec<Handle>, CudaError> {
        let ask = |found: *mut Handle, count: &mut usize| {
            let driver = self.context.driver();
            // SAFETY:
            // - The graph is live and used by this thread alone, by the promise of `borrow`.
            // - The node is of the graph: the only caller passes one that it has checked, and those that the driver
            //   named.
            // - `found` is null or has room for `count` nodes.
            unsafe { driver.graph_node_get_dependencies(node, found, std::ptr::null_mut(), count) }
        };
        let mut count = 0;
        ask(std::ptr::null_mut(), &mut count)?;
        let mut found = vec![0; count];
        // The driver refuses to fill no room.
        if count > 0 {
            ask(found.as_mut_ptr(), &mut count)?;
        }
        Ok(found)
    }
}

impl CurrentStream<'_> {
    /// Adds a wait to the graph that the stream is captured into, behind what is captured now: until the first 8 bytes
    /// of `word`, aligned to 8, are at least `value`, by the comparison of [`memop`](crate::memop).
    ///
    /// No other thread uses the stream meanwhile: the work of two threads would have no order in the graph.
    ///
    /// # Errors
    /// [`AccessError::NotCapturing`]; the range is too short or misaligned; `CUDA_ERROR_LOSSY_QUERY` behind a kernel
    /// that was launched with programmatic dependencies; `CUDA_ERROR_NOT_SUPPORTED`; `CUDA_ERROR_NOT_FOUND` from a
    /// driver older than CUDA 12.3.
    pub fn capture_wait_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<WordNode, AccessError> {
        self.capture_operation(WordOperation::Wait, word, value)
    }

    /// Adds a write to the graph that the stream is captured into, behind what is captured now: of `value`, to the
    /// first 8 bytes of `word`, aligned to 8.
    ///
    /// # Errors
    /// As [`capture_wait_u64`](Self::capture_wait_u64); the range is read-only.
    pub fn capture_write_u64(&self, word: DeviceSlice<'_>, value: u64) -> Result<WordNode, AccessError> {
        self.capture_operation(WordOperation::Write, word, value)
    }

    fn capture_operation(
        &self,
        kind: WordOperation,
        word: DeviceSlice<'_>,
        value: u64,
    ) -> Result<WordNode, AccessError> {
        let driver = self.driver();
        let mut operation = kind.on(word, value)?;
        let CaptureInfo { id, graph, dependencies, count } = self.capture_info()?.ok_or(AccessError::NotCapturing)?;
        let mut node = 0;
        let parameters = BatchMemOpNodeParams::of(self.context().as_raw(), &mut operation);
        // SAFETY:
        // - The graph is being captured, and the driver's array of nodes is valid until the next call for the stream.
        //   The proof is weak: it rests on the caller, whose other threads are not to use the stream meanwhile.
        // - The parameters are live, and the driver copies them.
        unsafe { driver.graph_add_batch_mem_op_node(&mut node, graph, dependencies, count, &parameters) }?;
        // SAFETY: the stream is live; the array is the one node, which was added to the stream's graph a moment ago.
        unsafe {
            driver.stream_update_capture_dependencies(
                self.handle(),
                &node,
                std::ptr::null(),
                1,
                STREAM_SET_CAPTURE_DEPENDENCIES,
            )
        }?;
        Ok(WordNode { context: self.context().clone(), graph: RawGraph(graph as u64), capture: id, node, kind })
    }

    /// Returns what the driver says of the capture that the stream is in; `None` if there is none, or an invalidated
    /// one, whose graph may be gone.
    fn capture_info(&self) -> Result<Option<CaptureInfo>, CudaError> {
        let mut status = STREAM_CAPTURE_STATUS_NONE;
        let mut info = CaptureInfo { id: 0, graph: 0, dependencies: std::ptr::null(), count: 0 };
        // SAFETY: the stream is live, and its context current; the pointers are to live values, or null where they may
        // be.
        unsafe {
            self.driver().stream_get_capture_info(
                self.handle(),
                &mut status,
                &mut info.id,
                &mut info.graph,
                &mut info.dependencies,
                std::ptr::null_mut(),
                &mut info.count,
            )
        }?;
        Ok((status == STREAM_CAPTURE_STATUS_ACTIVE).then_some(info))
    }
}

impl WordNode {
    /// Makes later launches of `graph` use this word and value in place of those before. Launches that are enqueued
    /// keep theirs.
    ///
    /// # Errors
    /// [`AccessError::OtherGraph`]; the range is too short, misaligned, or read-only for a write; the driver's errors.
    pub fn set_u64(&self, graph: GraphRef<'_>, word: DeviceSlice<'_>, value: u64) -> Result<(), AccessError> {
        self.require(graph)?;
        let mut operation = self.kind.on(word, value)?;
        let _guard = self.context.guard()?;
        let parameters = BatchMemOpNodeParams::of(self.context.as_raw(), &mut operation);
        // SAFETY: graph and instantiation are live, used by this thread alone, and belong together and to this node, by
        // the promise of GraphRef; the parameters are live, and the driver copies them.
        unsafe {
            self.context.driver().graph_exec_batch_mem_op_node_set_params(graph.exec.handle(), self.node, &parameters)
        }?;
        Ok(())
    }

    /// Returns whether launches of `graph` do this operation only after `other`: whether a path of dependencies leads
    /// from `other` to this node.
    ///
    /// Costs two calls of the driver for each node before this one.
    ///
    /// # Errors
    /// [`AccessError::OtherGraph`]; the driver's errors, among them `CUDA_ERROR_LOSSY_QUERY` where a node before this
    /// one has programmatic dependencies.
    pub fn is_behind(&self, graph: GraphRef<'_>, other: &Self) -> Result<bool, AccessError> {
        self.require(graph)?;
        other.require(graph)?;
        let _guard = self.context.guard()?;
        let mut open = vec![self.node];
        let mut found = HashSet::new();
        while let Some(node) = open.pop() {
            let before = graph.dependencies(node)?;
            if before.contains(&other.node) {
                return Ok(true);
            }
            open.extend(before.into_iter().filter(|node| found.insert(*node)));
        }
        Ok(false)
    }

    fn require(&self, graph: GraphRef<'_>) -> Result<(), AccessError> {
        if graph.graph != self.graph || graph.capture.is_some_and(|capture| capture != self.capture) {
            return Err(AccessError::OtherGraph);
        }
        Ok(())
    }
}

impl WordOperation {
    fn on(self, word: DeviceSlice<'_>, value: u64) -> Result<BatchMemOp, AccessError> {
        let (operation, flags) = match self {
            Self::Wait => (BATCH_MEM_OP_WAIT_64, STREAM_WAIT_VALUE_GEQ),
            Self::Write => {
                word.require_writable()?;
                (BATCH_MEM_OP_WRITE_64, STREAM_WRITE_VALUE_DEFAULT)
            }
        };
        Ok(BatchMemOp { operation, address: first_word(word, 8)?, value, flags, rest: [0; 2] })
    }
}

impl RawGraph {
    fn handle(self) -> Handle {
        // `usize` has 64 bits on every platform that the driver exists for.
        self.0 as Handle
    }
}

impl RawGraphExec {
    fn handle(self) -> Handle {
        self.0 as Handle
    }
}
