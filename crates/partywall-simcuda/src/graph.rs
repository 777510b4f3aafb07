//! Graphs: the work that captures record, and that launches repeat.
//!
//! A launch does the work of all nodes one after the other, in the order in which they were added. That is one of the
//! orders that the vendor's driver may choose, because a node is added after those that it depends on.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::context::Ctx;
use crate::entry::{entry_points, store};
use crate::memop::{BatchOperation, Operation, decode};
use crate::queue::{Runner, SharedWork, Ticket};
use crate::{context, entry, ledger, stream};

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
pub struct BatchNode {
    pub(crate) context: Handle,
    pub(crate) count: u32,
    pub(crate) operations: *const BatchOperation,
    pub(crate) flags: u32,
}

#[derive(Clone)]
struct Node {
    handle: Handle,
    /// The nodes that it is done after.
    dependencies: Vec<Handle>,
    action: NodeAction,
}

#[derive(Clone)]
enum NodeAction {
    Work(SharedWork),
    Operations { context: Handle, operations: Vec<Operation> },
}

/// An instantiated graph: its own copy of the nodes.
struct Exec {
    graph: Handle,
    nodes: Vec<Node>,
    /// The end of the last launch. Launches of one executable graph never overlap (vendor's documentation).
    last: Option<Ticket>,
}

struct Graphs {
    graphs: BTreeMap<Handle, Vec<Node>>,
    executable: BTreeMap<Handle, Exec>,
}

static GRAPHS: Mutex<Graphs> = Mutex::new(Graphs { graphs: BTreeMap::new(), executable: BTreeMap::new() });

impl Node {
    fn run(&self, runner: &mut Runner) -> Result<(), Code> {
        runner.pause();
        runner.context().check()?;
        match &self.action {
            NodeAction::Work(work) => work(runner),
            NodeAction::Operations { operations, .. } => {
                operations.iter().try_for_each(|operation| operation.run(runner))
            }
        }
    }
}

impl NodeAction {
    /// Reads the operations of a node of memory operations, and checks their addresses.
    ///
    /// # Safety
    /// `node` is null or points to the parameters of such a node.
    unsafe fn read(node: *const BatchNode) -> Result<Self, Code> {
        if node.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so it points to parameters, by the caller's promise.
        let BatchNode { context, count, operations, flags } = unsafe { node.read() };
        let owner: Arc<Ctx> = context::live(context)?;
        // SAFETY: the parameters contain an array of this length, by the caller's promise.
        let operations = unsafe { decode(count, operations, flags) }?;
        operations.iter().try_for_each(|operation| operation.check(&owner))?;
        Ok(Self::Operations { context, operations })
    }

    /// Returns whether `new` may replace it: addresses, values and comparisons may change.
    fn admits(&self, new: &Self) -> bool {
        match (self, new) {
            (
                Self::Operations { context, operations },
                Self::Operations { context: new_context, operations: new_operations },
            ) => {
                context == new_context
                    && operations.len() == new_operations.len()
                    && operations.iter().zip(new_operations).all(|(old, new)| old.is_like(*new))
            }
            _ => false,
        }
    }
}

/// Returns a new graph, for a capture.
pub(crate) fn begin() -> Handle {
    let handle = entry::new_handle();
    lock().graphs.insert(handle, Vec::new());
    handle
}

/// Adds work that was captured behind these nodes, and returns its node.
pub(crate) fn record(graph: Handle, dependencies: Vec<Handle>, work: SharedWork) -> Result<Handle, Code> {
    add(graph, dependencies, NodeAction::Work(work))
}

/// Returns whether the graph has all these nodes.
pub(crate) fn has_nodes(graph: Handle, nodes: &[Handle]) -> bool {
    let graphs = lock();
    let own = graphs.graphs.get(&graph).map_or(&[][..], Vec::as_slice);
    nodes.iter().all(|node| own.iter().any(|known| known.handle == *node))
}

/// Destroys the graph of a capture that was invalidated.
pub(crate) fn discard(graph: Handle) {
    lock().graphs.remove(&graph);
}

fn add(graph: Handle, dependencies: Vec<Handle>, action: NodeAction) -> Result<Handle, Code> {
    let handle = entry::new_handle();
    lock().graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.push(Node { handle, dependencies, action });
    Ok(handle)
}

fn lock() -> MutexGuard<'static, Graphs> {
    GRAPHS.lock().ignore_poison()
}

/// Reads an array of handles.
///
/// # Safety
/// `handles` points to `count` handles, or `count` is 0.
pub(crate) unsafe fn handles(handles: *const Handle, count: usize) -> Result<Vec<Handle>, Code> {
    if count > 0 && handles.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    Ok((0..count).map(|index| unsafe { handles.add(index).read() }).collect())
}

entry_points! {
    fn cuGraphAddBatchMemOpNode(
        node: *mut Handle, graph: Handle, dependencies: *const Handle, count: usize, parameters: *const BatchNode,
    ) {
        context::current()?;
        // SAFETY: the caller passes an array of this length.
        let dependencies = unsafe { handles(dependencies, count) }?;
        if !has_nodes(graph, &dependencies) {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller passes parameters of such a node.
        store(node, add(graph, dependencies, unsafe { NodeAction::read(parameters) }?)?)
    }
    fn cuGraphDestroy(graph: Handle) {
        context::current()?;
        lock().graphs.remove(&graph).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(GRAPH, graph as u64);
        Ok(())
    }
    fn cuGraphExecBatchMemOpNodeSetParams(executable: Handle, node: Handle, parameters: *const BatchNode) {
        context::current()?;
        // SAFETY: the caller passes parameters of such a node.
        let new = unsafe { NodeAction::read(parameters) }?;
        let mut graphs = lock();
        let Graphs { graphs, executable: all } = &mut *graphs;
        let executable = all.get_mut(&executable).ok_or(Code::INVALID_VALUE)?;
        // The vendor's driver would follow a pointer into the graph.
        if !graphs.contains_key(&executable.graph) {
            return Err(Code::INVALID_VALUE);
        }
        let known = executable.nodes.iter_mut().find(|known| known.handle == node && known.action.admits(&new));
        known.ok_or(Code::INVALID_VALUE)?.action = new;
        Ok(())
    }
    fn cuGraphExecDestroy(executable: Handle) {
        context::current()?;
        lock().executable.remove(&executable).ok_or(Code::INVALID_VALUE)?;
        ledger::remove(EXECUTABLE, executable as u64);
        Ok(())
    }
    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) {
        context::current()?;
        let mut graphs = lock();
        let nodes = graphs.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?.clone();
        let handle = entry::new_handle();
        store(executable, handle)?;
        graphs.executable.insert(handle, Exec { graph, nodes, last: None });
        ledger::record(EXECUTABLE, handle as u64, 0);
        Ok(())
    }
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        let (nodes, last) = {
            let graphs = lock();
            let Exec { nodes, last, .. } = graphs.executable.get(&executable).ok_or(Code::INVALID_VALUE)?;
            (nodes.clone(), last.clone())
        };
        let end = stream.submit(move |runner| {
            last.iter().for_each(Ticket::wait);
            nodes.iter().try_for_each(|node| node.run(runner))
        })?;
        if let Some(launched) = lock().executable.get_mut(&executable) {
            launched.last = end;
        }
        Ok(())
    }
    fn cuGraphNodeGetDependencies_v2(node: Handle, found: *mut Handle, _edges: *mut c_void, count: *mut usize) {
        context::current()?;
        let graphs = lock();
        let known = graphs.graphs.values().flatten().find(|known| known.handle == node).ok_or(Code::INVALID_VALUE)?;
        let all = &known.dependencies;
        if found.is_null() {
            return store(count, all.len());
        }
        if count.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null; the caller passes a pointer to the length of its array.
        let room = unsafe { count.read() };
        if room == 0 {
            return Err(Code::INVALID_VALUE);
        }
        for index in 0..room {
            // SAFETY: the caller passes an array of this length.
            unsafe { found.add(index).write(all.get(index).copied().unwrap_or_default()) };
        }
        store(count, room.min(all.len()))
    }
}

/// The kind of graphs in the ledger.
pub(crate) const GRAPH: &str = "graph";

const EXECUTABLE: &str = "executable graph";
