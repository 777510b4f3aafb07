//! Waits and signals that are nodes of CUDA graphs.
//!
//! A node is a placeholder for a wait or a signal, without a timeline and a value of its own. It is idle between
//! launches: a wait passes, a signal writes a private word that no thread reads. [`GraphLaunch::run`] does for each
//! launch what `wait_on` and `signal_on` do for a stream:
//!
//! 1. It checks all values, and locks the writers, in one order for all threads.
//! 2. It gives the nodes their words and values.
//! 3. It has the caller launch the graph. The launch is the caller's function, because torch does more in `replay` than
//!    launch.
//! 4. It records the waits, announces the values, and makes the nodes idle again. The launch that is enqueued keeps its
//!    values.
//!
//! A kill between any two steps leaves what a kill between the steps of a plain signal leaves, because the words are
//! the same.
//!
//! The alternative was to leave the last values in the graph. A launch without [`GraphLaunch`] would then set a
//! timeline back, overwrite the poison of one that has ended, or wait for a cell that has become another timeline's.
//! Being idle costs one more driver call for each node and launch (not measured).
//!
//! The signals of a launch do not prove that its waits were passed, because they may stand beside the waits in the
//! graph. A later signal of the stream does.

use std::sync::Arc;

use partywall_cuda::{DeviceSlice, GraphRef, StreamId, StreamRef, WordNode};
use partywall_shm::timeline::{MAX_VALUE, Progress};

use super::{
    Timeline, TimelineWriter,
    enqueue::{self, NotEnqueued, Work},
    writer::SignalGuard,
};
use crate::{
    domain::{CellRef, Domain, LeaseGuard, MappedSlab, Word},
    error::{Error, InvalidArgument, Result},
    recorder::{Action, timeline_object},
};

/// A wait in a CUDA graph, from [`Domain::capture_wait`]. Each launch says for which timeline and value it waits
/// ([`GraphLaunch::wait`]); in a launch that does not, the wait passes.
///
/// Keep it as long as the graph may be launched, and drop it with the graph: it keeps the memory that the node uses.
#[derive(Debug)]
pub struct GraphWait(Node);

/// A signal in a CUDA graph, from [`Domain::capture_signal`]. Each launch says which timeline it signals, and which
/// value ([`GraphLaunch::signal`]); in a launch that does not, nothing is signalled.
///
/// Keep it as long as the graph may be launched, and drop it with the graph: it keeps the memory that the node uses.
#[derive(Debug)]
pub struct GraphSignal(Node);

#[derive(Debug)]
struct Node {
    operation: WordNode,
    /// The word and value of the operation between launches.
    idle: CellRef,
    idle_value: u64,
    slab: Arc<MappedSlab>,
}

impl Domain {
    /// Adds a wait to the CUDA graph that `stream` is being captured into, behind the work captured so far. A launch of
    /// the graph then waits there ([`GraphLaunch`]).
    ///
    /// No other thread may use the stream during the call. In a connection's first call with a stream, this prepares
    /// the driver, which takes milliseconds.
    ///
    /// # Errors
    /// [`InvalidArgument::Graph`] if `stream` is not being captured;
    /// [`DeviceFault::Cuda`](crate::error::DeviceFault::Cuda), also from a driver older than CUDA 12.3;
    /// [`DeviceFault::ContextLost`](crate::error::DeviceFault::ContextLost),
    /// [`Unreachable::Forked`](crate::error::Unreachable::Forked).
    pub fn capture_wait(&self, stream: StreamRef<'_>) -> Result<GraphWait> {
        // Every word is at least 0, poison included.
        Node::capture(self, stream, "capturing a wait for timelines", 0, |stream, word, value| {
            stream.current()?.capture_wait_u64(word, value)
        })
        .map(GraphWait)
    }

    /// Adds a signal to the CUDA graph that `stream` is being captured into, behind the work captured so far. A launch
    /// of the graph then signals there, after that work ([`GraphLaunch`]). No other thread may use the stream during
    /// the call.
    ///
    /// # Errors
    /// As [`capture_wait`](Self::capture_wait).
    pub fn capture_signal(&self, stream: StreamRef<'_>) -> Result<GraphSignal> {
        // The word may have had another use: no value may make a stream wait that has yet to see that one.
        Node::capture(self, stream, "capturing a signal of timelines", MAX_VALUE, |stream, word, value| {
            stream.current()?.capture_write_u64(word, value)
        })
        .map(GraphSignal)
    }
}

impl Node {
    fn capture(
        domain: &Domain,
        stream: StreamRef<'_>,
        what: &str,
        idle_value: u64,
        add: impl FnOnce(StreamRef<'_>, DeviceSlice<'_>, u64) -> Result<WordNode, partywall_cuda::AccessError>,
    ) -> Result<Self> {
        domain.link().require_ours()?;
        domain.health().check()?;
        let ordinal = stream.context().device().ordinal();
        let work = Work { domain, stream, what: &|| format!("{what} on cuda:{ordinal}") };
        let capture = || {
            // Otherwise registering memory would invalidate the capture.
            let _relaxed = stream.context().guard_relaxed()?;
            work.prepare_private()?;
            let (idle, slab) = domain.timeline_memory().idle()?;
            let operation = add(stream, slab.word(&idle)?, idle_value)?;
            Ok(Self { operation, idle, idle_value, slab })
        };
        capture().map_err(|refusal: NotEnqueued| work.error(refusal))
    }
}

/// One launch of a CUDA graph: the timelines and values that its nodes wait for and signal.
///
/// ```no_run
/// # use partywall::{Domain, GraphLaunch, TimelineWriter, Timeline, cuda::{Graph, StreamRef}};
/// # fn replay(
/// #     domain: &Domain, frames: &Timeline, results: &TimelineWriter, stream: StreamRef<'_>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// let mut nodes = None;
/// let graph = Graph::capture(stream.context(), |captured| {
///     let wait = domain.capture_wait(captured)?;
///     // … kernels that read a frame and write a result …
///     nodes = Some((wait, domain.capture_signal(captured)?));
///     Ok::<(), Box<dyn std::error::Error>>(())
/// })?;
/// let (wait, signal) = nodes.expect("the capture has succeeded");
/// for v in 1..=1000 {
///     let launch = GraphLaunch::new(graph.as_ref(), stream).wait(&wait, frames, v).signal(&signal, results, v);
///     // SAFETY: the kernels use memory that is kept until the stream is done.
///     launch.run(|| Ok::<(), Box<dyn std::error::Error>>(unsafe { graph.launch(stream) }?))?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// The rules are those of [`Timeline::wait_on`] and [`TimelineWriter::signal_on`]: a value that is reached is not
/// waited for; a wait ends with its timeline, and the launch then continues, so call [`Timeline::check`]; values are
/// announced once the launch is enqueued. Values of a writer that [rests on](TimelineWriter::rests_on) a timeline rest
/// on the waits of the same launch, too.
#[derive(Debug)]
#[must_use = "nothing is launched until run()"]
pub struct GraphLaunch<'a> {
    graph: GraphRef<'a>,
    stream: StreamRef<'a>,
    waits: Vec<(&'a GraphWait, &'a Timeline, u64)>,
    signals: Vec<(&'a GraphSignal, &'a TimelineWriter, u64)>,
}

impl<'a> GraphLaunch<'a> {
    /// Begins a launch of `graph` on `stream`.
    pub fn new(graph: GraphRef<'a>, stream: StreamRef<'a>) -> Self {
        Self { graph, stream, waits: Vec::new(), signals: Vec::new() }
    }

    /// Makes a node wait until `timeline` has reached `v`.
    pub fn wait(mut self, node: &'a GraphWait, timeline: &'a Timeline, v: u64) -> Self {
        self.waits.push((node, timeline, v));
        self
    }

    /// Makes a node signal `v`, once the work that it stands behind in the graph is done.
    ///
    /// Several nodes may signal one timeline: with growing values, in the order in which they stand in the graph.
    pub fn signal(mut self, node: &'a GraphSignal, writer: &'a TimelineWriter, v: u64) -> Self {
        self.signals.push((node, writer, v));
        self
    }

    /// Gives the nodes their values, calls `launch`, which launches the graph on the stream, once, and promises the
    /// values of the signals. Does not wait for the work. `launch` must not use the writers of this launch.
    ///
    /// If another stream has not stored a promised value yet, waits for that first, for at most 10 s.
    ///
    /// # Errors
    /// Before `launch` is called, so that nothing is launched: those of [`Timeline::wait_on`] and
    /// [`TimelineWriter::signal_on`], among them [`InvalidArgument::Value`] for a value that is not larger than the one
    /// before; [`InvalidArgument::Graph`] for a node of another graph, one that is named twice, or a wait that only
    /// signals behind it in the graph could end. Then the error of `launch`, after which nothing is promised. An error
    /// while the nodes are made idle again comes last: the values are then promised.
    pub fn run<E: From<Error>>(mut self, launch: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let domains = self.waits.iter().map(|(_, timeline, _)| timeline.domain());
        let mut domains = domains.chain(self.signals.iter().map(|(_, writer, _)| writer.timeline().domain()));
        let Some(domain) = domains.next() else { return launch() };
        domains.try_for_each(|other| other.health().check())?;
        self.check_nodes()?;
        let waits = self.waits.iter().map(|(node, timeline, v)| PendingWait::begin(node, timeline, *v));
        let waits: Vec<_> = waits.filter_map(Result::transpose).collect::<Result<_>>()?;
        // In one order, or two launches could each wait for a writer of the other. Values of one writer keep theirs.
        self.signals.sort_by_key(|(_, writer, _)| writer.lock_order());
        let signals: Vec<_> = self.signals.chunk_by(|(_, one, _), (_, other, _)| one.is(other)).collect();
        let turns = signals.iter().map(|group| group[0].1.turn(values(group)));
        let turns = turns.collect::<Result<Vec<_>>>()?;

        let work = Work { domain, stream: self.stream, what: &|| self.what() };
        let mut armed = Armed { graph: self.graph, nodes: Vec::new() };
        let stream = self.arm(&work, &waits, &turns, &mut armed)?;
        let waits = LaunchedWaits { waits, stream };
        let launched = launch();
        if launched.is_ok() {
            waits.waits.iter().for_each(PendingWait::note);
            for (turn, group) in turns.into_iter().zip(&signals) {
                turn.promise(stream, values(group));
            }
        }
        let idle = armed.reset();
        launched?;
        Ok(idle.map_err(|refusal| work.error(refusal))?)
    }

    /// Checks that no node is named twice, because the second value would replace the first.
    fn check_nodes(&self) -> Result<()> {
        let mut nodes: Vec<_> = self.waits.iter().map(|(node, ..)| &raw const node.0).collect();
        nodes.extend(self.signals.iter().map(|(node, ..)| &raw const node.0));
        nodes.sort_unstable();
        if nodes.windows(2).all(|pair| pair[0] != pair[1]) {
            return Ok(());
        }
        let why = "a node is named twice".to_owned();
        Err(InvalidArgument::Graph { what: self.what(), why }.into())
    }

    /// Checks that no wait stands before the only signals that could end it. The turns of the writers have begun, so
    /// their values do not change.
    ///
    /// Refuses only waits that would hang: the writer stores a later value only after the values of this launch. Waits
    /// that depend on each other through several timelines or branches hang too, and are not found.
    fn check_waits(&self, waits: &[PendingWait<'a>]) -> Result<()> {
        for PendingWait { node: GraphWait(wait), timeline, v, word, .. } in waits {
            let mut behind = None;
            let mut ends = word.progress(*v) != Progress::Pending;
            for (GraphSignal(signal), writer, signalled) in &self.signals {
                if ends || !writer.word().cell.is(&word.cell) {
                    continue;
                }
                // If the driver does not say where the signal stands, the launch may be sound.
                if signal.operation.is_behind(self.graph, &wait.operation).unwrap_or(false) {
                    behind.get_or_insert(signalled);
                } else {
                    ends = signalled >= v;
                }
            }
            if let Some(signalled) = behind.filter(|_| !ends) {
                let why = format!(
                    "the wait for value {v} of timeline {:?} would never end, because the signal of its value \
                     {signalled} stands behind the wait in the graph",
                    timeline.name()
                );
                return Err(InvalidArgument::Graph { what: self.what(), why }.into());
            }
        }
        Ok(())
    }

    /// Names the launch in errors.
    fn what(&self) -> String {
        let names = self.waits.iter().map(|(_, timeline, _)| timeline.name());
        let names = names.chain(self.signals.iter().map(|(_, writer, _)| writer.timeline().name()));
        format!(
            "launching a graph with timelines {}",
            names.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
        )
    }

    /// Gives the nodes their words and values. Returns the identity of the stream.
    fn arm(
        &self,
        work: &Work<'_>,
        waits: &[PendingWait<'a>],
        turns: &[SignalGuard<'_>],
        armed: &mut Armed<'a>,
    ) -> Result<StreamId> {
        work.run(|stream| {
            let id = stream.id()?;
            self.check_waits(waits)?;
            turns.iter().try_for_each(|turn| turn.follow(id))?;
            for wait in waits {
                let work = Work { domain: wait.timeline.domain(), ..*work };
                let slab = work.ready(wait.word.slab)?;
                work.mark_if_due(stream, &mut work.domain.stream_waits().track(id).lock())?;
                armed.set(&wait.node.0, slab.word(&wait.word.cell)?, wait.v)?;
            }
            for (node, writer, v) in &self.signals {
                let work = Work { domain: writer.timeline().domain(), ..*work };
                let word = writer.word();
                let slab = work.ready(word.slab)?;
                armed.set(&node.0, slab.word(&word.cell)?, *v)?;
            }
            Ok(id)
        })
    }
}

fn values(signals: &[(&GraphSignal, &TimelineWriter, u64)]) -> impl Iterator<Item = u64> {
    signals.iter().map(|(_, _, v)| *v)
}

/// A wait for a value that was not reached yet.
struct PendingWait<'a> {
    node: &'a GraphWait,
    timeline: &'a Timeline,
    v: u64,
    word: Arc<Word>,
    /// Keeps the word the timeline's until the stream's record of waits does.
    keep: Arc<LeaseGuard>,
}

impl<'a> PendingWait<'a> {
    /// Returns `None` if the value is reached, so that the node stays idle.
    fn begin(node: &'a GraphWait, timeline: &'a Timeline, v: u64) -> Result<Option<Self>> {
        Ok(enqueue::begin(timeline, v)?.map(|(word, keep)| Self { node, timeline, v, word, keep }))
    }

    fn note(&self) {
        self.word.note_wait(self.v);
        let recorder = self.timeline.domain().recorder();
        recorder.record(Action::WaitOn, || timeline_object(self.timeline.name()), self.v);
    }
}

/// The waits of a launch. Dropping it keeps their leases until the stream has passed the launch, also if the launch has
/// failed or panicked: the graph may have been enqueued in spite of that.
///
/// The signals of the launch do not show that it was passed, because they may stand beside the waits in the graph. A
/// later signal of the stream does.
struct LaunchedWaits<'a> {
    waits: Vec<PendingWait<'a>>,
    stream: StreamId,
}

impl Drop for LaunchedWaits<'_> {
    fn drop(&mut self) {
        for PendingWait { timeline, word, keep, v, .. } in &self.waits {
            timeline.domain().stream_waits().track(self.stream).lock().wait(keep, &word.cell, *v);
        }
    }
}

/// Nodes that have values for the next launch. Dropping it makes them idle.
struct Armed<'a> {
    graph: GraphRef<'a>,
    nodes: Vec<&'a Node>,
}

impl<'a> Armed<'a> {
    fn set(&mut self, node: &'a Node, word: DeviceSlice<'_>, v: u64) -> Result<(), NotEnqueued> {
        // Noted first, because a call that fails may have had its effect.
        self.nodes.push(node);
        Ok(node.operation.set_u64(self.graph, word, v)?)
    }

    /// Makes all nodes idle, and returns the first error.
    fn reset(&mut self) -> Result<(), NotEnqueued> {
        let rest = |node: &Node| -> Result<(), NotEnqueued> {
            Ok(node.operation.set_u64(self.graph, node.slab.word(&node.idle)?, node.idle_value)?)
        };
        self.nodes.drain(..).map(rest).fold(Ok(()), Result::and)
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        // The error that led here counts.
        let _ = self.reset();
    }
}
