//! Waits and signals in CUDA graphs of other libraries.
#![allow(unsafe_code)] // a graph on another library's word

use std::sync::Arc;

use partywall::{
    Error, GraphLaunch, GraphSignal, GraphWait, TimelineWriter,
    cuda::{GraphRef, RawGraph, RawGraphExec},
};
use pyo3::{inspect::PyStaticExpr, prelude::*, type_hint_identifier};

use crate::{
    arguments::{Optional, Value},
    errors::Raise,
    hint::{Hint, Hinted},
    stream::Stream,
    timeline::{Role, Timeline},
};

/// A wait or a signal in a CUDA graph, from `Timeline.capture_wait` or `Timeline.capture_signal`.
///
/// `partywall.launch` gives it a value at each launch. In a launch that gives it none, a wait passes and a signal does
/// nothing.
#[pyclass(frozen, module = "partywall", weakref)]
pub(crate) struct GraphNode {
    timeline: Py<Timeline>,
    operation: Operation,
}

/// Never dropped: the graph uses the memory that it keeps, and Python may drop both in any order.
enum Operation {
    Wait(&'static GraphWait),
    Signal(&'static GraphSignal),
}

impl GraphNode {
    /// Adds a wait, or a signal, to the graph that a stream is being captured into.
    pub(crate) fn capture(
        timeline: Bound<'_, Timeline>,
        signal: bool,
        stream: Optional<'_, '_>,
        device: Optional<'_, '_>,
    ) -> PyResult<Self> {
        let py = timeline.py();
        let domain = if signal {
            timeline.get().writer(py)?.timeline().domain().clone()
        } else {
            timeline.get().role(py)?.domain().clone()
        };
        let stream = Stream::at(py, &domain, stream, device)?;
        let operation: partywall::Result<_> = py.detach(|| {
            let stream = stream.borrow();
            Ok(if signal {
                Operation::Signal(Box::leak(Box::new(domain.capture_signal(stream)?)))
            } else {
                Operation::Wait(Box::leak(Box::new(domain.capture_wait(stream)?)))
            })
        });
        Ok(Self { operation: operation.or_raise(py)?, timeline: timeline.unbind() })
    }
}

#[pymethods]
impl GraphNode {
    /// The timeline.
    #[getter]
    fn timeline<'py>(&self, py: Python<'py>) -> Hinted<'py, PublicTimeline> {
        Hinted::new(self.timeline.bind(py).clone())
    }

    /// Whether it signals; otherwise it waits.
    #[getter]
    fn is_signal(&self) -> bool {
        matches!(self.operation, Operation::Signal(_))
    }

    fn __repr__(&self) -> String {
        let kind = if self.is_signal() { "signal of" } else { "wait for" };
        format!("<partywall.GraphNode: {kind} {}>", self.timeline.get().name())
    }
}

/// The class of timelines, as type checkers see it.
pub(crate) struct PublicTimeline;

impl Hint for PublicTimeline {
    const TYPE: PyStaticExpr = type_hint_identifier!("partywall._timeline", "Timeline");
}

/// What a node does in a launch.
enum Action {
    Wait(&'static GraphWait, Role),
    Signal(&'static GraphSignal, Arc<TimelineWriter>),
}

/// Why there was no launch.
enum LaunchFailure {
    Library(Error),
    Raised(PyErr),
}

impl From<Error> for LaunchFailure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// Gives nodes their values, and calls `replay` to launch their graph on a stream.
#[pyfunction]
pub(crate) fn launch(
    py: Python<'_>,
    graph: u64,
    exec: u64,
    values: Vec<(Py<GraphNode>, Value)>,
    replay: Py<PyAny>,
    stream: Optional<'_, '_>,
    device: Optional<'_, '_>,
) -> PyResult<()> {
    let act = |(node, Value(v)): &(Py<GraphNode>, Value)| {
        let GraphNode { timeline, operation } = node.get();
        Ok(match operation {
            Operation::Wait(wait) => (Action::Wait(wait, timeline.get().role(py)?), *v),
            Operation::Signal(signal) => (Action::Signal(signal, timeline.get().writer(py)?), *v),
        })
    };
    let actions = values.iter().map(act).collect::<PyResult<Vec<_>>>()?;
    let domain = match actions.first() {
        Some((Action::Wait(_, role), _)) => role.domain(),
        Some((Action::Signal(_, writer), _)) => writer.timeline().domain(),
        None => return replay.call0(py).map(drop),
    };
    let stream = Stream::at(py, domain, stream, device)?;
    for (node, _) in &values {
        let timeline = node.get().timeline.get();
        if node.get().is_signal() {
            let writer = timeline.writer(py)?;
            timeline.take_turns(py, &writer, Some(stream.id()))?;
        }
    }
    let launched = py.detach(|| {
        // SAFETY: the caller's promise: the graph and its instantiation belong together, the caller keeps them
        // meanwhile, and the nodes are of this graph. Another thread that uses the graph meanwhile breaks the rules of
        // its library, too.
        let graph = unsafe { GraphRef::borrow(stream.gpu().context(), RawGraph(graph), RawGraphExec(exec)) };
        let launch = GraphLaunch::new(graph, stream.borrow());
        let launch = actions.iter().fold(launch, |launch, (action, v)| match action {
            Action::Wait(node, role) => launch.wait(node, role, *v),
            Action::Signal(node, writer) => launch.signal(node, writer, *v),
        });
        launch.run(|| Python::attach(|py| replay.call0(py).map(drop)).map_err(LaunchFailure::Raised))
    });
    match launched {
        Ok(()) => {}
        Err(LaunchFailure::Library(error)) => Err(error).or_raise(py)?,
        Err(LaunchFailure::Raised(error)) => return Err(error),
    }
    for (node, _) in values.iter().filter(|(node, _)| node.get().is_signal()) {
        node.get().timeline.get().signalled_on(stream.id());
    }
    Ok(())
}
