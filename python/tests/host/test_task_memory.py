# Holds 250.
"""Arrays of a task that outlive it keep its blocks: no other task writes or shows what they show."""

import gc
import os

import numpy as np
import pytest

import partywall as pw
from partywall import _native

from ..conftest import WATCHDOG, fork

TIMEOUT = 10


@pytest.fixture
def queue(domain):
    with domain.queue("work", tasks=8, inputs=(2, 64), outputs=(2, 64), device="host") as opened:
        yield opened


def end_by_completing(task):
    task.complete()


def end_by_failing(task):
    task.fail("no")


def end_by_closing(task):
    task.close()


def view(tensor, how):
    """Returns a writable array that keeps nothing but what the protocol keeps."""
    if how == "buffer":
        return np.frombuffer(memoryview(tensor), dtype=np.uint8)
    return np.from_dlpack(tensor) if how == "dlpack" else np.asarray(tensor)


VIEWS = ["buffer", "dlpack", "array"]


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("end", [end_by_completing, end_by_failing, end_by_closing])
def test_write_through_an_array_of_a_task_that_is_over_reaches_no_other_task(queue, end, how):
    first = queue.submit("x", output=64, max_attempts=1)
    task = queue.claim(TIMEOUT)
    stale = view(task.output.tensor((64,), "uint8"), how)
    stale[:] = 1
    end(task)
    if end is end_by_completing:
        with first.result(TIMEOUT) as result:
            assert result.tobytes() == bytes([1] * 64)
    del task
    for _ in range(4):
        ticket = queue.submit("y", output=64)
        with queue.claim(TIMEOUT) as task:
            np.asarray(task.output.tensor((64,), "uint8"))[:] = 3
            stale[:] = 9
        with ticket.result(TIMEOUT) as result:
            assert result.tobytes() == bytes([3] * 64)
    assert queue.stats().free_outputs == 1
    del stale
    assert queue.stats().free_outputs == 2


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("end", [end_by_completing, end_by_failing, end_by_closing])
def test_array_of_an_input_shows_its_task_for_as_long_as_it_lives(queue, end, how):
    queue.submit("x", [np.full(64, 1, np.uint8)], max_attempts=1)
    task = queue.claim(TIMEOUT)
    stale = view(task.inputs[0].tensor((64,), "uint8"), how)
    end(task)
    (over,) = queue.tasks() or [None]
    if over is not None:
        queue.purge(over.task)
    else:
        queue.ticket(task.task).result(TIMEOUT).release()
    del task
    for number in range(2, 6):
        ticket = queue.submit("y", [np.full(64, number, np.uint8)])
        queue.claim(TIMEOUT).complete()
        ticket.result(TIMEOUT).release()
        assert stale.tolist() == [1] * 64
    stats = queue.stats()
    assert (stats.free_inputs, stats.free) == (1, 7)
    del stale
    stats = queue.stats()
    assert (stats.free_inputs, stats.free) == (2, 8)


def test_array_of_a_lost_attempt_writes_into_no_later_one(domain):
    with domain.queue("work", tasks=8, inputs=(2, 64), outputs=(2, 64), lease=0.2, device="host") as queue:
        ticket = queue.submit("x", output=64)
        lost = queue.claim(TIMEOUT)
        stale = np.asarray(lost.output)
        again = queue.claim(TIMEOUT)
        assert again.attempt == 2
        np.asarray(again.output)[:] = 2
        stale[:] = 9
        again.complete()
        with pytest.raises(pw.ClaimLost):
            lost.complete()
        with ticket.result(TIMEOUT) as result:
            assert result.tobytes() == bytes([2] * 64)
        del lost, again
        assert queue.stats().free_outputs == 1
        del stale
        assert queue.stats().free_outputs == 2


def test_result_and_an_array_of_the_worker_keep_the_block_until_both_are_gone(queue):
    ticket = queue.submit("x", output=64)
    task = queue.claim(TIMEOUT)
    stale = np.asarray(task.output)
    task.complete()
    result = ticket.result(TIMEOUT)
    del stale
    assert queue.stats().free_outputs == 1, "the result keeps it"
    result.release()
    assert queue.stats().free_outputs == 2
    # An array of the result does, too.
    ticket = queue.submit("x", output=64)
    task = queue.claim(TIMEOUT)
    stale = np.asarray(task.output)
    task.complete()
    with ticket.result(TIMEOUT) as result:
        taken = np.asarray(result)
    del result
    assert queue.stats().free_outputs == 1
    stale[:] = 7
    del stale
    assert taken.tolist() == [7] * 64
    assert queue.stats().free_outputs == 1
    del taken
    gc.collect()
    assert _native.flush(TIMEOUT)
    assert queue.stats().free_outputs == 2


def test_arrays_of_all_tasks_of_a_loop_keep_their_blocks(queue):
    tickets = [queue.submit("x", [np.full(64, number, np.uint8)], output=64) for number in range(2)]
    kept = []
    for number, task in enumerate(queue.claims(timeout=0)):
        kept.append((np.asarray(task.inputs[0]), np.asarray(task.output)))
        kept[-1][1][:] = number
    del task
    assert [int(array[0]) for array, _ in kept] == [0, 1]
    for number, ticket in enumerate(tickets):
        with ticket.result(TIMEOUT) as result:
            assert result.tobytes() == bytes([number] * 64)
    assert (queue.stats().free_inputs, queue.stats().free_outputs) == (0, 0)
    with pytest.raises(pw.TimeoutError):
        queue.submit("x", [np.zeros(64, np.uint8)], timeout=0)
    kept.clear()
    assert (queue.stats().free_inputs, queue.stats().free_outputs) == (2, 2)


SCARCE = {
    "output block": ({"tasks": 8, "inputs": (2, 64), "outputs": (1, 64)}, pw.OutputsFull),
    "input block": ({"tasks": 8, "inputs": (1, 64), "outputs": (2, 64)}, pw.StillUsed),
    "slot": ({"tasks": 1, "inputs": (2, 64), "outputs": (2, 64)}, pw.StillUsed),
}


# Holds 220.
@pytest.mark.parametrize("scarce", SCARCE)
def test_loop_whose_arrays_keep_what_the_next_task_needs_raises(domain, scarce):
    options, error = SCARCE[scarce]
    with domain.queue("narrow", **options, device="host") as queue:
        tickets = [queue.submit("x", [np.full(64, 3, np.uint8)], output=64)]
        if scarce == "output block":
            tickets.append(queue.submit("x", [np.full(64, 3, np.uint8)], output=64))
        with pytest.raises(error, match="arrays of 1 ended task of this process hold them") as raised:
            for task in queue.claims(timeout=WATCHDOG):
                numbers, out = np.asarray(task.inputs[0]), np.asarray(task.output)
                out[:] = numbers * 2
        assert f"no free {scarce}" in str(raised.value) and "`del`" in str(raised.value.advice)
        with tickets[0].result(TIMEOUT) as result:
            assert result.tobytes() == bytes([6] * 64)
        del numbers, out, task, raised
        tickets += [queue.submit("x", [np.full(64, 4, np.uint8)], output=64, timeout=TIMEOUT)]
        for ticket in tickets[1:]:
            with queue.claim(TIMEOUT) as task:
                np.asarray(task.output)[:] = 1
            ticket.result(TIMEOUT).release()


def test_loop_without_variables_needs_one_block_of_each(domain):
    with domain.queue("narrow", tasks=2, inputs=(1, 64), outputs=(1, 64), device="host") as queue:
        numbers, number = np.arange(4, dtype=np.float32), 0
        ticket = queue.submit("sqrt", [numbers], output=(numbers.shape, numbers.dtype))
        for task in queue.claims(timeout=0):
            np.sqrt(task.inputs[0], out=np.asarray(task.output))
            task.complete()
            with ticket.result(TIMEOUT) as result:
                assert np.asarray(result).tolist() == np.sqrt(numbers).tolist()
            if (number := number + 1) < 3:
                ticket = queue.submit("sqrt", [numbers], output=(numbers.shape, numbers.dtype), timeout=TIMEOUT)
        assert number == 3


# Holds 220.
def test_errors_count_the_arrays_that_keep_blocks_and_slots(queue):
    first, second = (queue.submit("x", output=64) for _ in range(2))
    task = queue.claim(TIMEOUT)
    stale = np.asarray(task.output)
    task.complete()
    first.result(TIMEOUT).release()
    queue.claim(TIMEOUT).complete()
    with pytest.raises(pw.TimeoutError, match=r"arrays of tasks of this process that have ended \(1\)"):
        queue.claim(0)
    third = queue.submit("x", output=64)
    told = "1 of 2 hold results .*, and arrays of 1 ended task of this process keep 1"
    with pytest.raises(pw.OutputsFull, match=told):
        queue.claim(0)
    waiting = [queue.submit("x", timeout=0) for _ in range(5)]
    with pytest.raises(pw.QueueFull, match="arrays of 1 ended task of this process keep as many slots"):
        queue.submit("x", timeout=0)
    del stale
    queue.submit("x", timeout=0)
    assert len(waiting) == 5 and third.status == "pending"
    second.result(TIMEOUT).release()


def test_segment_is_detached_once_the_arrays_of_its_parts_are_gone(domain, queue):
    with domain.put("weights", {"w": np.arange(4, dtype=np.uint8)}) as weights:
        attached = queue.attach(weights)
        ticket = queue.submit("x", [attached["w"]])
        task = queue.claim(TIMEOUT)
        stale = np.asarray(task.inputs[0])
        task.complete()
        ticket.result(TIMEOUT).release()
        with pytest.raises(pw.SegmentInUse):
            queue.detach(attached, timeout=0)
        assert stale.tolist() == [0, 1, 2, 3]
        del stale
        queue.detach(attached, timeout=TIMEOUT)


def test_array_outlives_its_queue_and_its_connection(socket):
    domain = pw.connect(socket=socket)
    queue = domain.queue("work", tasks=2, inputs=(1, 64), outputs=(1, 64), device="host")
    queue.submit("x", [np.full(64, 5, np.uint8)], output=64)
    task = queue.claim(TIMEOUT)
    array, output = np.asarray(task.inputs[0]), np.asarray(task.output)
    task.complete()
    del task
    queue.close()
    domain.close()
    assert array.tolist() == [5] * 64
    output[:] = 1


def test_forked_child_gives_no_block_of_its_parent_back(queue):
    ticket = queue.submit("x", output=64)
    task = queue.claim(TIMEOUT)
    stale = np.asarray(task.output)
    task.complete()
    ticket.result(TIMEOUT).release()
    if (child := fork()) == 0:
        del stale, task
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert queue.stats().free_outputs == 1
    del stale
    assert queue.stats().free_outputs == 2
