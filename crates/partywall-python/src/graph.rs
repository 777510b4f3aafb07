//! Waits and signals in CUDA graphs of other libraries.
#![allow(unsafe_code)] // a graph on another library's word

use std::sync::Arc;

use partywall::{
    Error, GraphLaunch, GraphSignal, GraphWait, TimelineWriter,
    cuda::{GraphRef, RawGraph, RawGraphExec},
};
use pyo3::prelude::*;

use crate::{
    errors::Raise,
    stream::Stream,
    timeline::{Role, Timeline},
};

/// A wait for a timeline, or a signal of it, in a CUDA graph.
#[pyclass(frozen, module = "partywall._native")]
pub(crate) struct GraphNode {
    timeline: Py<Timeline>,
    operation: Operation,
}

/// Never dropped: the graph uses the memory that it keeps, and Python may drop both in any order.
enum Operation {
    Wait(&'static GraphWait),
    Signal(&'static GraphSignal),
}

#[pymethods]
impl GraphNode {
    /// Whether it signals; otherwise it waits.
    #[getter]
    fn is_signal(&self) -> bool {
        matches!(self.operation, Operation::Signal(_))
    }
}

/// Adds a wait, or a signal, to the graph that a stream is being captured into.
#[pyfunction]
pub(crate) fn capture(
    py: Python<'_>,
    timeline: Py<Timeline>,
    signal: bool,
    device: &str,
    stream: Option<u64>,
) -> PyResult<GraphNode> {
    let domain = if signal {
        timeline.get().writer(py)?.timeline().domain().clone()
    } else {
        timeline.get().role(py)?.domain().clone()
    };
    let stream = Stream::find(py, &domain, device, stream)?;
    let operation: partywall::Result<_> = py.detach(|| {
        let stream = stream.borrow();
        Ok(if signal {
            Operation::Signal(Box::leak(Box::new(domain.capture_signal(stream)?)))
        } else {
            Operation::Wait(Box::leak(Box::new(domain.capture_wait(stream)?)))
        })
    });
    Ok(GraphNode { timeline, operation: operation.or_raise(py)? })
}

/// What a node does in a launch.
enum Action {
    Wait(&'static GraphWait, Role),
    Signal(&'static GraphSignal, Arc<TimelineWriter>),
}

/// Why there was no launch.
enum Failure {
    Library(Error),
    Raised(PyErr),
}

impl From<Error> for Failure {
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
    values: Vec<(Py<GraphNode>, u64)>,
    replay: Py<PyAny>,
    device: &str,
    stream: Option<u64>,
) -> PyResult<()> {
    let act = |(node, v): &(Py<GraphNode>, u64)| {
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
    let stream = Stream::find(py, domain, device, stream)?;
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
        launch.run(|| Python::attach(|py| replay.call0(py).map(drop)).map_err(Failure::Raised))
    });
    match launched {
        Ok(()) => {}
        Err(Failure::Library(error)) => Err(error).or_raise(py)?,
        Err(Failure::Raised(error)) => return Err(error),
    }
    for (node, _) in values.iter().filter(|(node, _)| node.get().is_signal()) {
        node.get().timeline.get().signalled_on(stream.id());
    }
    Ok(())
}
