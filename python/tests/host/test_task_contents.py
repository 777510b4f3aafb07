# Holds 218.
"""Inputs and outputs of tasks have the length, the type and the shape that they were submitted with."""

import numpy as np
import pytest

import partywall as pw

TIMEOUT = 10


@pytest.fixture
def queue(domain):
    with domain.queue("work", tasks=4, inputs=(2, 4096), outputs=(1, 4096), device="host") as opened:
        yield opened


def work(queue, ends=lambda task, roots: None):
    """As the worker in the documentation."""
    for task in queue.claims(timeout=0):
        numbers = np.asarray(task.inputs[0].tensor(dtype="float32"))
        roots = np.asarray(task.output.tensor(dtype="float32"))
        assert (numbers.size, roots.size) == (task.inputs[0].nbytes // 4, task.output.nbytes // 4)
        np.sqrt(numbers, out=roots)
        ends(task, roots)
        del numbers, roots


def test_input_is_what_was_submitted_and_not_its_block(queue):
    for length in [1024, 4, 1, 0, 7]:
        numbers = np.arange(length, dtype="float32")
        tickets = [
            queue.submit("sqrt", [numbers], output=(numbers.shape, numbers.dtype)),
            queue.submit_all([pw.Task("sqrt", [numbers], output=(length, "float32"))])[0],
        ]
        work_one = queue.claims(timeout=0)
        for ticket in tickets:
            task = next(work_one)
            (given,) = task.inputs
            assert (given.nbytes, given.dtype, given.shape) == (numbers.nbytes, "float32", (length,))
            assert given.tobytes() == numbers.tobytes()
            assert np.asarray(given.tensor()).tolist() == np.asarray(given).tolist() == numbers.tolist()
            assert (task.output.nbytes, task.output.dtype, task.output.shape) == (4 * length, "float32", (length,))
            np.sqrt(np.asarray(given), out=np.asarray(task.output))
            task.complete()
            with ticket.result(TIMEOUT) as result:
                assert (result.nbytes, result.dtype, result.shape) == (4 * length, "float32", (length,))
                assert np.asarray(result).tolist() == np.sqrt(numbers).tolist()
                assert np.from_dlpack(result).dtype == np.float32
                assert result.output.nbytes == 4 * length


def test_worker_of_the_documentation_takes_any_length(queue):
    for length in [1024, 4, 1]:
        numbers = np.arange(length, dtype="float32")
        ticket = queue.submit("sqrt", [numbers], output=numbers.nbytes)
        work(queue)
        with ticket.result(TIMEOUT) as result:
            assert result.shape == (4 * length,), "bytes were asked for"
            assert np.asarray(result.tensor(dtype="float32")).tolist() == np.sqrt(numbers).tolist()


def test_shape_and_type_of_several_dimensions_arrive(queue):
    scalar = np.array(7, dtype="int64")
    matrix = np.arange(6, dtype="int16").reshape(2, 3)
    ticket = queue.submit("x", [scalar, matrix], output=((3, 2), "float64"))
    with queue.claim(TIMEOUT) as task:
        first, second = task.inputs
        assert (first.dtype, first.shape, np.asarray(first).item()) == ("int64", (), 7)
        assert np.asarray(second).tolist() == matrix.tolist()
        assert np.asarray(second.tensor((3, 2))).shape == (3, 2)
        assert np.asarray(second.tensor(dtype="uint8")).shape == (12,)
        np.asarray(task.output)[:] = 2.5
    with ticket.result(TIMEOUT) as result:
        assert np.asarray(result).tolist() == [[2.5, 2.5]] * 3


def test_part_of_a_block_is_an_input(queue):
    block = queue.inputs.alloc(0)
    np.asarray(block)[:] = np.arange(4096) % 256
    ticket = queue.submit("x", [block.part(3)])
    assert not block.held
    with queue.claim(TIMEOUT) as task:
        assert task.inputs[0].tobytes() == bytes([0, 1, 2])
    ticket.result(TIMEOUT).release()
    block = queue.inputs.alloc(0)
    np.asarray(block.tensor(dtype="float32"))[4:8] = [1, 2, 3, 4]
    ticket = queue.submit("x", [block.part((2, 2), "float32", offset=16)])
    with queue.claim(TIMEOUT) as task:
        assert np.asarray(task.inputs[0]).tolist() == [[1, 2], [3, 4]]
    ticket.result(TIMEOUT).release()


def test_part_that_the_block_does_not_have_is_refused_and_the_block_stays(queue):
    block = queue.inputs.alloc(0)
    with pytest.raises(pw.BlockTooSmall, match="4096"):
        queue.submit("x", [block.part(1025, "float32")])
    with pytest.raises(pw.BlockTooSmall):
        queue.submit("x", [block.part(1, offset=4096)])
    with pytest.raises(pw.BadTensor):
        queue.submit("x", [block.part(1, offset=4097)])
    assert (block.held, block.nbytes, block.tensor().nbytes) == (True, 4096, 4096)
    block.release()
    assert queue.stats().free_inputs == 2


def test_part_that_begins_where_its_type_cannot_is_refused(queue):
    with queue.inputs.alloc(0) as block:
        with pytest.raises(pw.BadTensor, match="byte 3") as refused:
            block.part((2,), "float32", offset=3)
        assert "multiple of 4" in refused.value.advice
        assert block.part((2,), "complex64", offset=4).offset == 4


def test_block_that_is_two_inputs_is_refused_and_stays(queue):
    block = queue.inputs.alloc(0)
    with pytest.raises(pw.BadTask, match="one input only"):
        queue.submit("x", [block.part(3), block.part(3, offset=8)])
    with pytest.raises(pw.BadTask, match="one input only"):
        queue.submit_all([pw.Task("x", [block]), pw.Task("y", [block])])
    assert block.held
    block.release()
    assert queue.stats().free_inputs == 2


def test_more_of_a_task_than_it_has_is_refused_with_its_name(queue):
    ticket = queue.submit("x", [np.zeros(2, np.uint8)], output=4)
    task = queue.claim(TIMEOUT)
    with pytest.raises(pw.BlockTooSmall, match="^input 0 of a task of queue .* has 2 bytes, but 3 are needed"):
        task.inputs[0].tensor(3)
    told = "^output of a task of queue .* has 4 bytes, but 5 are needed"
    with pytest.raises(pw.BlockTooSmall, match=told) as refused:
        task.complete(shape=5)
    assert "submit the task with more" in refused.value.advice
    task.complete()
    with ticket.result(TIMEOUT) as result:
        with pytest.raises(pw.BlockTooSmall, match="^output of a task of queue .* has 4 bytes, but 5 are needed"):
            result.tensor(5)


# Holds 221.
def test_block_of_a_result_has_its_type_and_shape_and_is_not_offered(queue):
    ticket = queue.submit("x", output=((2, 3), "float32"))
    with queue.claim(TIMEOUT) as task:
        np.asarray(task.output)[:] = 1.5
    with ticket.result(TIMEOUT) as result:
        with pytest.raises(pw.WrongKind, match="cannot be offered"):
            result.output.offer()
        assert result.output.held
        assert np.asarray(result.output).tolist() == [[1.5] * 3] * 2
        assert np.asarray(result.output.tensor(dtype="uint8")).shape == (24,)
    assert queue.stats().free_outputs == 1


def test_worker_that_writes_beyond_the_output_gets_an_error(queue):
    queue.submit("x", output=(4, "float32"))
    task = queue.claim(TIMEOUT)
    with pytest.raises(pw.BlockTooSmall, match="16"):
        task.output.tensor(5)
    with pytest.raises((ValueError, pw.Error)):
        task.output.tensor().write(np.zeros(5, "float32"))
    with pytest.raises(pw.BlockTooSmall, match="16"):
        task.complete(5)
    assert not task.closed, "the task is still the worker's"
    task.complete()


def test_worker_says_that_it_wrote_less(queue):
    ticket = queue.submit("x", output=(4, "float32"))
    task = queue.claim(TIMEOUT)
    np.asarray(task.output)[:2] = [1, 2]
    task.complete(2)
    with ticket.result(TIMEOUT) as result:
        assert (result.nbytes, result.dtype, result.shape) == (8, "float32", (2,))
        assert np.asarray(result).tolist() == [1, 2]
    ticket = queue.submit("x", output=64)
    queue.claim(TIMEOUT).complete((1, 3), "int16")
    with ticket.result(TIMEOUT) as result:
        assert (result.nbytes, result.dtype, result.shape) == (6, "int16", (1, 3))
    ticket = queue.submit("x", output=64)
    queue.claim(TIMEOUT).complete(0)
    with ticket.result(TIMEOUT) as result:
        assert (result.nbytes, result.tobytes()) == (0, b"")


def test_later_attempt_has_the_output_that_was_asked_for(queue):
    ticket = queue.submit("x", [np.ones(3)], output=(4, "float32"))
    queue.claim(TIMEOUT).fail("no")
    task = queue.claim(TIMEOUT)
    assert (task.attempt, task.output.shape, task.inputs[0].shape) == (2, (4,), (3,))
    task.complete()
    ticket.result(TIMEOUT).release()


def test_tensor_of_an_attached_segment_brings_type_and_shape(domain, queue):
    weights = np.arange(6, dtype="float32").reshape(2, 3)
    with domain.put("weights", {"w": weights}) as segment:
        attached = queue.attach(segment)
        ticket = queue.submit("x", [attached["w"], attached[4:12]])
        with queue.claim(TIMEOUT) as task:
            whole, part = task.inputs
            assert (whole.dtype, whole.shape) == ("float32", (2, 3))
            assert np.asarray(whole).tolist() == weights.tolist()
            assert (part.dtype, part.shape) == ("uint8", (8,))
        ticket.result(TIMEOUT).release()
    for wrong in [("x",), (1, "float32", 2), (-1, "float32"), (4, "float3")]:
        with pytest.raises((TypeError, ValueError, pw.Error)):
            queue.submit("x", output=wrong, timeout=0)
    assert queue.stats().pending == 0
