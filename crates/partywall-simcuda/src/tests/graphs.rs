//! Graphs of captured work and of memory operations.

use std::ffi::c_void;
use std::ptr;

use super::{SharedWords, answer, begin, context_handle, device_memory, is_done, must, never, new_stream, synchronize};
use crate::abi::{Code, DevicePtr, Handle};
use crate::functions::*;
use crate::graph::BatchNode;
use crate::memop::BatchOperation;

/// Captures one operation on a word behind a fill of `memory` with 7, and returns the graph and the operation's node.
fn capture(stream: Handle, memory: DevicePtr, operation: &BatchOperation) -> (Handle, Handle) {
    let (mut status, mut graph, mut count, mut node) = (0, 0, 0, 0);
    let mut dependencies: *const Handle = ptr::null();
    // Relaxed, because a global capture forbids calls of other tests.
    must!(cuStreamBeginCapture_v2(stream, 2));
    must!(cuMemsetD8Async(memory, 7, 1, stream));
    let (unused, edges) = (ptr::null_mut(), ptr::null_mut());
    must!(cuStreamGetCaptureInfo_v3(stream, &mut status, unused, &mut graph, &mut dependencies, edges, &mut count));
    assert_eq!((status, count), (1, 1));
    let parameters = parameters(operation);
    must!(cuGraphAddBatchMemOpNode(&mut node, graph, dependencies, count, &parameters));
    must!(cuStreamUpdateCaptureDependencies_v2(stream, &node, ptr::null::<c_void>(), 1, 1));
    must!(cuStreamEndCapture(stream, &mut graph));
    (graph, node)
}

fn parameters(operation: &BatchOperation) -> BatchNode {
    BatchNode { context: context_handle(), count: 1, operations: operation, flags: 0 }
}

fn instantiate(graph: Handle) -> Handle {
    let mut executable = 0;
    must!(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    executable
}

fn wait(address: DevicePtr, value: u64) -> BatchOperation {
    BatchOperation { operation: 4, address, value, flags: 0, rest: [0; 2] }
}

fn write(address: DevicePtr, value: u64) -> BatchOperation {
    BatchOperation { operation: 5, ..wait(address, value) }
}

#[test]
fn launches_repeat_what_was_captured() {
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    let memory = device_memory(1);
    let mut found = [0_u8];
    let (graph, _) = capture(stream, memory, &write(words.device, 5));
    synchronize(stream);
    assert_eq!(words.word(0).load(std::sync::atomic::Ordering::Acquire), 0, "what is captured is not done");
    let executable = instantiate(graph);
    for _ in 0..2 {
        must!(cuMemsetD8Async(memory, 1, 1, stream));
        words.store(0, 0);
        must!(cuGraphLaunch(executable, stream));
        must!(cuMemcpyDtoHAsync_v2(found.as_mut_ptr().cast(), memory, 1, stream));
        synchronize(stream);
        assert_eq!((found[0], words.word(0).load(std::sync::atomic::Ordering::Acquire)), (7, 5));
    }
    must!(cuGraphExecDestroy(executable));
    assert_eq!(answer!(cuGraphLaunch(executable, stream)), Code::INVALID_VALUE);
    must!(cuGraphDestroy(graph));
}

#[test]
fn new_parameters_count_for_later_launches_alone() {
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    let (graph, node) = capture(stream, device_memory(1), &wait(words.device, 1));
    let executable = instantiate(graph);
    let set = |operation: &BatchOperation| {
        answer!(cuGraphExecBatchMemOpNodeSetParams(executable, node, &parameters(operation)))
    };
    must!(cuGraphLaunch(executable, stream));
    // Address and value may change. The launch that is under way keeps its own.
    assert_eq!(set(&wait(words.device + 8, 3)), Code::SUCCESS);
    must!(cuGraphLaunch(executable, stream));
    words.store(1, 3);
    never(|| is_done(stream));
    words.store(1, 2);
    words.store(0, 1);
    never(|| is_done(stream));
    words.store(1, 3);
    synchronize(stream);
    // The graph itself keeps what was captured.
    words.store(0, 0);
    let second = instantiate(graph);
    must!(cuGraphLaunch(second, stream));
    never(|| is_done(stream));
    words.store(0, 1);
    synchronize(stream);

    assert_eq!(set(&write(words.device, 1)), Code::INVALID_VALUE, "another operation");
    assert_eq!(set(&wait(8, 1)), Code::INVALID_VALUE, "no memory");
    must!(cuGraphDestroy(graph));
    assert_eq!(set(&wait(words.device, 1)), Code::INVALID_VALUE, "the node is gone");
    must!(cuGraphLaunch(executable, stream));
    synchronize(stream);
}

#[test]
fn launches_of_one_graph_never_overlap() {
    begin();
    let first = new_stream();
    let second = new_stream();
    let words = SharedWords::new(4096);
    let (graph, node) = capture(first, device_memory(1), &wait(words.device, 1));
    let executable = instantiate(graph);
    must!(cuGraphLaunch(executable, first));
    must!(cuGraphExecBatchMemOpNodeSetParams(executable, node, &parameters(&wait(words.device, 0))));
    must!(cuGraphLaunch(executable, second));
    never(|| is_done(second));
    words.store(0, 1);
    synchronize(second);
}

#[test]
fn nodes_name_what_they_depend_on() {
    begin();
    let stream = new_stream();
    let words = SharedWords::new(4096);
    let (graph, node) = capture(stream, device_memory(1), &wait(words.device, 1));
    let dependencies = |node, room| {
        let mut found = vec![9; room];
        let mut count = room;
        must!(cuGraphNodeGetDependencies_v2(node, found.as_mut_ptr(), ptr::null_mut(), &mut count));
        (count, found)
    };
    let mut count = 0;
    must!(cuGraphNodeGetDependencies_v2(node, ptr::null_mut(), ptr::null_mut(), &mut count));
    assert_eq!(count, 1);
    let (count, fill) = dependencies(node, 2);
    assert_eq!((count, fill[1]), (1, 0));
    assert_eq!(dependencies(fill[0], 1), (0, vec![0]));
    let without_room = answer!(cuGraphNodeGetDependencies_v2(fill[0], &mut 0, ptr::null_mut(), &mut 0));
    assert_eq!(without_room, Code::INVALID_VALUE);
    let mut last = 0;
    must!(cuGraphAddBatchMemOpNode(
        &mut last,
        graph,
        [fill[0], node].as_ptr(),
        2,
        &parameters(&write(words.device, 1))
    ));
    assert_eq!(dependencies(last, 2), (2, vec![fill[0], node]));
    assert_eq!(dependencies(last, 1), (1, vec![fill[0]]));
    must!(cuGraphDestroy(graph));
    let gone = answer!(cuGraphNodeGetDependencies_v2(node, ptr::null_mut(), ptr::null_mut(), &mut 0));
    assert_eq!(gone, Code::INVALID_VALUE);
}
