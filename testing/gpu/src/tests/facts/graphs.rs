//! CUDA graphs with memory operations whose values change between launches.

use partywall::cuda::CuResult;

use super::{BYTES, INVALID, OK, query_twice};
use crate::raw::{
    Address, CAPTURE_RELAXED, GEQ, Handle, MemoryNode, MemoryOperation, SET_DEPENDENCIES, WAIT_64, WRITE_64,
};
use crate::tests::stage::Check;

/// A graph of a fill and one memory operation behind it.
struct Captured<'a> {
    check: &'a Check,
    context: Handle,
    graph: Handle,
    node: Handle,
    executable: Handle,
}

impl<'a> Captured<'a> {
    fn new(check: &'a Check, stream: Handle, memory: Address, operation: MemoryOperation) -> Result<Self, String> {
        let cuda = &check.cuda;
        let mut context = 0;
        cuda.ctx_get_current(&mut context).ok()?;
        let (mut status, mut id, mut graph, mut count) = (0, 0, 0, 0);
        let mut dependencies = std::ptr::null();
        cuda.stream_begin_capture(stream, CAPTURE_RELAXED).ok()?;
        cuda.memset_d8_async(memory, 1, BYTES, stream).ok()?;
        let info =
            cuda.stream_get_capture_info(stream, &mut status, &mut id, &mut graph, &mut dependencies, 0, &mut count);
        check.answers("the state of the capture", info, OK);
        check.same("status and nodes before the next one", (status, count), (1, 1));
        let mut node = 0;
        let parameters = MemoryNode { context, count: 1, operations: &operation, flags: 0 };
        let added = cuda.graph_add_batch_mem_op_node(&mut node, graph, dependencies, count, &parameters);
        check.answers("adding a node", added, OK);
        let moved = cuda.stream_update_capture_dependencies(stream, &node, 0, 1, SET_DEPENDENCIES);
        check.answers("what comes next depends on it", moved, OK);
        cuda.stream_end_capture(stream, &mut graph).ok()?;
        let mut executable = 0;
        check.answers("instantiating", cuda.graph_instantiate(&mut executable, graph, 0), OK);
        Ok(Self { check, context, graph, node, executable })
    }

    fn set(&self, operation: MemoryOperation) -> crate::raw::Answer {
        let parameters = MemoryNode { context: self.context, count: 1, operations: &operation, flags: 0 };
        self.check.cuda.graph_exec_batch_mem_op_node_set_params(self.executable, self.node, &parameters)
    }

    fn launch(&self, stream: Handle) -> Result<(), String> {
        self.check.cuda.graph_launch(self.executable, stream).ok()
    }

    fn end(self) -> Result<(), String> {
        self.check.cuda.graph_exec_destroy(self.executable).ok()?;
        self.check.cuda.graph_destroy(self.graph).ok()
    }
}

fn wait(address: Address, value: u64) -> MemoryOperation {
    MemoryOperation { operation: WAIT_64, address, value, flags: GEQ, rest: [0; 2] }
}

fn write(address: Address, value: u64) -> MemoryOperation {
    MemoryOperation { operation: WRITE_64, address, value, flags: 0, rest: [0; 2] }
}

pub(super) fn memory_operations_of_a_graph_repeat_their_values(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let memory = check.alloc(BYTES)?;
    let (words, word) = check.words()?;
    let captured = Captured::new(check, stream, memory, write(word, 5))?;
    check.cuda.stream_synchronize(stream).ok()?;
    check.same("what is captured is not done", words.load(0), 0);
    for _ in 0..2 {
        words.store(0, 0);
        captured.launch(stream)?;
        check.cuda.stream_synchronize(stream).ok()?;
        check.same("each launch writes the value of the capture", words.load(0), 5);
    }
    captured.end()
}

pub(super) fn new_values_of_a_graph_count_for_later_launches_alone(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let memory = check.alloc(BYTES)?;
    let (words, word) = check.words()?;
    let captured = Captured::new(check, stream, memory, wait(word, 1))?;
    captured.launch(stream)?;
    check.answers("another word and value", captured.set(wait(word + 8, 3)), OK);
    words.store(1, 3);
    check.answers("a launch keeps its own", query_twice(check, stream)?, CuResult::NOT_READY);
    words.store(1, 2);
    words.store(0, 1);
    check.cuda.stream_synchronize(stream).ok()?;
    captured.launch(stream)?;
    check.answers("the next launch has the new ones", query_twice(check, stream)?, CuResult::NOT_READY);
    // While that launch waits.
    check.answers("the values before once more", captured.set(wait(word, 1)), OK);
    check.answers("and the launch still waits", query_twice(check, stream)?, CuResult::NOT_READY);
    words.store(1, 3);
    check.cuda.stream_synchronize(stream).ok()?;
    captured.launch(stream)?;
    check.cuda.stream_synchronize(stream).ok()?;
    // As a timeline whose writer was killed.
    words.store(0, 0);
    captured.launch(stream)?;
    check.answers("a word that went back", query_twice(check, stream)?, CuResult::NOT_READY);
    words.store(0, (1 << 62) + 1);
    check.answers("poison ends the wait", check.cuda.stream_synchronize(stream), OK);
    captured.end()
}

pub(super) fn launches_of_one_graph_run_one_after_the_other(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let other = check.stream()?;
    let memory = check.alloc(BYTES)?;
    let (words, word) = check.words()?;
    let captured = Captured::new(check, stream, memory, wait(word, 1))?;
    captured.launch(stream)?;
    check.answers("no more waiting", captured.set(wait(word, 0)), OK);
    captured.launch(other)?;
    check.answers("another stream's launch comes later", query_twice(check, other)?, CuResult::NOT_READY);
    words.store(0, 1);
    check.cuda.stream_synchronize(other).ok()?;
    captured.end()
}

pub(super) fn a_memory_operation_of_a_graph_cannot_become_another(check: &Check) -> Result<(), String> {
    check.start()?;
    let stream = check.stream()?;
    let memory = check.alloc(BYTES)?;
    let (words, word) = check.words()?;
    let captured = Captured::new(check, stream, memory, wait(word, 1))?;
    check.answers("a wait as a write", captured.set(write(word, 1)), INVALID);
    words.store(0, 1);
    captured.launch(stream)?;
    check.cuda.stream_synchronize(stream).ok()?;
    captured.end()
}

pub(super) fn a_graph_says_what_its_nodes_depend_on(check: &Check) -> Result<(), String> {
    check.start()?;
    let cuda = &check.cuda;
    let stream = check.stream()?;
    let memory = check.alloc(BYTES)?;
    let (_words, word) = check.words()?;
    let captured = Captured::new(check, stream, memory, wait(word, 1))?;
    let dependencies = |node| -> Result<Vec<Handle>, String> {
        let mut count = 0;
        cuda.graph_node_get_dependencies(node, std::ptr::null_mut(), 0, &mut count).ok()?;
        let mut found = vec![0; count];
        if count == 0 {
            return Ok(found);
        }
        cuda.graph_node_get_dependencies(node, found.as_mut_ptr(), 0, &mut count).ok()?;
        check.same("the number of nodes again", count, found.len());
        Ok(found)
    };
    let fill = dependencies(captured.node)?;
    check.same("nodes before the wait", fill.len(), 1);
    check.same("nodes before the fill", dependencies(fill[0])?, Vec::new());
    let without_room = cuda.graph_node_get_dependencies(fill[0], &mut 0, 0, &mut 0);
    check.answers("nodes before the fill, without room for them", without_room, INVALID);
    // Beside the wait, and behind both.
    let operation = write(word, 1);
    let parameters = MemoryNode { context: captured.context, count: 1, operations: &operation, flags: 0 };
    let add = |before: &[Handle]| {
        let mut node = 0;
        let added =
            cuda.graph_add_batch_mem_op_node(&mut node, captured.graph, before.as_ptr(), before.len(), &parameters);
        added.ok().map(|()| node)
    };
    let beside = add(&fill)?;
    check.same("nodes before the one beside the wait", dependencies(beside)?, fill);
    let mut found = dependencies(add(&[captured.node, beside])?)?;
    found.sort_unstable();
    let mut both = vec![captured.node, beside];
    both.sort_unstable();
    check.same("nodes before the one behind both", found, both);
    captured.end()
}
