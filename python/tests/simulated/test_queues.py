"""Tasks on the simulated GPU: inputs and outputs that streams write."""

import os
import pickle
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import partywall as pw

from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

NUMBERS = np.arange(1024, dtype=np.uint32)


@pytest.fixture
def queue(domain):
    driver.use()
    with domain.queue("work", tasks=4, inputs=(2, 4096), outputs=(2, 4096)) as opened:
        yield opened


def test_inputs_and_output_are_on_the_gpu(queue):
    assert queue.place.startswith("GPU-")
    ticket = queue.submit("copy", [NUMBERS], output=4096)
    for task in queue.claims(0):
        task.wait_inputs(60)
        (numbers,) = task.inputs
        assert numbers.__dlpack_device__() == task.output.__dlpack_device__() == (2, 0)
        assert numbers.tobytes() == NUMBERS.tobytes()
        with pytest.raises(BufferError):
            np.asarray(numbers)
        with pytest.raises(pw.Error):
            numbers.tensor().write(np.zeros(4096, dtype=np.uint8))
        task.output.tensor(dtype="uint32").write(NUMBERS * 2)
    with ticket.result(60) as result:
        assert result.tobytes() == (NUMBERS * 2).tobytes()


@pytest.mark.parametrize("device", ["host", None])
def test_part_of_a_segment_is_where_the_segment_is(domain, device):
    driver.use()
    with (
        domain.queue("work", tasks=4, outputs=(2, 4096), device=device) as queue,
        domain.put("weights", {"w": NUMBERS}, device="cuda:0") as weights,
    ):
        attached = queue.attach(weights)
        ticket = queue.submit("copy", [attached["w"]], output=4096)
        with queue.claim(0) as task:
            (part,) = task.inputs
            assert part.__dlpack_device__() == (2, 0)
            assert part.__cuda_array_interface__["data"][1], "read-only"
            task.output.tensor().write(np.frombuffer(part.tobytes(), dtype=np.uint8))
            del part
        with ticket.result(60) as result:
            assert result.tobytes() == NUMBERS.tobytes()
        queue.detach(attached, timeout=60)


def test_task_is_submitted_and_completed_in_the_order_of_streams(queue):
    gate = driver.Gate()
    block = queue.inputs.alloc(0)
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    ticket = queue.submit("copy", [block], output=4096, stream=gate.stream)
    task = queue.claim(0)
    with pytest.raises(pw.TimeoutError):
        task.wait_inputs(0)
    task.wait_inputs_on(gate.stream)
    source, to = (part.__cuda_array_interface__["data"][0] for part in (task.inputs[0], task.output))
    driver.copy(to, source, 4096, gate.stream)
    task.complete_on(gate.stream)
    assert (task.closed, ticket.status) == (True, "enqueued")
    with pytest.raises(pw.TimeoutError):
        ticket.result(0)
    gate.open()
    with ticket.result(60) as result:
        assert result.tobytes() == bytes([7]) * 4096


def test_task_is_not_completed_before_its_inputs(queue):
    gate = driver.Gate()
    block = queue.inputs.alloc(0)
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    ticket = queue.submit("copy", [block], stream=gate.stream)
    with pytest.raises(pw.InputsNotReady):
        queue.claim(0).complete()
    gate.open()
    with queue.claim(60) as task:
        task.wait_inputs(60)
    assert ticket.result(60).attempt == 2


def in_flight(queue):
    """A task whose input a stream has not written yet, and the gate of that stream."""
    gate = driver.Gate()
    block = queue.inputs.alloc(0)
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    ticket = queue.submit("copy", [block], output=4096, stream=gate.stream)
    return gate, ticket


@pytest.mark.parametrize("takes", ["tensor", "bytes"])
def test_stream_that_takes_an_input_by_dlpack_waits_for_it(queue, takes):
    gate, ticket = in_flight(queue)
    reader, other = driver.Gate(), driver.Gate()
    reader.open()
    other.open()
    task = queue.claim(0)
    numbers = task.inputs[0].tensor(dtype="uint32") if takes == "tensor" else task.inputs[0]
    numbers.__dlpack__(stream=-1)
    task.output.__dlpack__(stream=other.stream)
    kept = numbers.__dlpack__(stream=reader.stream)
    driver.wait(other.stream)
    assert not driver.is_done(reader.stream)
    source, to = (part.__cuda_array_interface__["data"][0] for part in (task.inputs[0], task.output))
    driver.copy(to, source, 4096, reader.stream)
    task.complete_on(reader.stream)
    gate.open()
    with ticket.result(60) as result:
        assert result.tobytes() == bytes([7]) * 4096
    del kept


def test_stream_that_waits_for_the_inputs_is_named_to_consumers(queue):
    gate, ticket = in_flight(queue)
    task = queue.claim(0)
    assert task.inputs[0].__cuda_array_interface__["stream"] is None
    task.wait_inputs_on(gate.stream)
    assert task.inputs[0].__cuda_array_interface__["stream"] == gate.stream
    assert task.output.__cuda_array_interface__["stream"] is None
    gate.open()
    task.wait_inputs(60)
    task.complete()
    ticket.result(60).release()


def test_copy_of_an_input_waits_for_it_and_obeys_signals(queue):
    gate, ticket = in_flight(queue)
    task = queue.claim(0)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        task.inputs[0].tobytes()
    timer.join()
    gate.open()
    assert task.inputs[0].tobytes() == bytes([7]) * 4096
    task.complete()
    ticket.result(60).release()


def test_output_stays_writable_if_completing_it_on_a_stream_is_refused(domain):
    driver.use()
    with domain.queue("leased", tasks=1, outputs=(2, 4096), lease=0.05) as queue:
        ticket = queue.submit("slow", output=4096)
        slow = queue.claim(0)
        kept = slow.output.tensor(dtype="uint32")
        again = queue.claim(10)
        gate = driver.Gate()
        gate.open()
        with pytest.raises(pw.ClaimLost):
            slow.complete_on(gate.stream)
        assert not slow.closed and not kept.readonly
        kept.write(NUMBERS)
        slow.close()
        assert kept.readonly
        again.output.tensor(dtype="uint32").write(NUMBERS * 2)
        again.complete()
        with ticket.result(60) as result:
            assert result.tobytes() == (NUMBERS * 2).tobytes()


def enqueued(queue):
    """A task that a stream is still to complete: what lets that go on, and the ticket. The output's bytes will be 7."""
    gate = driver.Gate()
    ticket = queue.submit("fill", output=4096)
    task = queue.claim(0)
    driver.fill(task.output.__cuda_array_interface__["data"][0], 7, 4096, gate.stream)
    task.complete_on(gate.stream)
    return gate, ticket


def opened():
    """A stream that is not held up."""
    gate = driver.Gate()
    gate.open()
    return gate.stream


# Holds 215.
def test_result_is_read_in_the_order_of_streams_and_taken_afterwards(queue):
    gate, ticket = enqueued(queue)
    reader = opened()
    result = ticket.wait_on(reader, timeout=60)
    assert (result.task, result.nbytes, result.attempt) == (ticket.task, 4096, 1)
    assert result.__dlpack_device__() == (2, 0)
    array = result.__cuda_array_interface__
    assert (array["stream"], array["data"][1]) == (reader, True)
    copy = driver.allocate(4096)
    driver.copy(copy, array["data"][0], 4096, reader)
    with pytest.raises(pw.TimeoutError):
        result.take(0)
    assert ticket.status == "enqueued" and not driver.is_done(reader)
    gate.open()
    with result.take(60) as taken:
        assert (taken.nbytes, taken.attempt) == (4096, 1)
        assert taken.__cuda_array_interface__["data"][0] == array["data"][0]
        assert taken.tobytes() == driver.read(copy, 4096, reader) == bytes([7]) * 4096
    assert ticket.status == "gone"


@pytest.mark.parametrize("takes", ["tensor", "bytes"])
def test_stream_that_takes_an_enqueued_output_by_dlpack_waits_for_it(queue, takes):
    gate, ticket = enqueued(queue)
    first, second = opened(), opened()
    result = ticket.wait_on(first, timeout=60)
    output = result.tensor(dtype="uint32") if takes == "tensor" else result
    kept = [output.__dlpack__(stream=-1)]
    driver.wait(second)
    kept.append(output.__dlpack__(stream=second))
    assert not driver.is_done(second)
    gate.open()
    driver.wait(second)
    del kept, output
    result.take(60).release()


def test_copy_of_an_enqueued_output_obeys_signals(queue):
    gate, ticket = enqueued(queue)
    result = ticket.wait_on(opened(), timeout=60)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        result.tobytes(opened())
    timer.join()
    gate.open()
    assert result.tobytes(opened()) == bytes([7]) * 4096
    result.take(60).release()


def test_tensor_made_before_the_take_keeps_the_output_block(queue):
    gate, ticket = enqueued(queue)
    result = ticket.wait_on(opened(), timeout=60)
    tensor = result.tensor(dtype="uint32")
    assert tensor.readonly
    for source in (np.zeros(1024, dtype="uint32"), driver.DeviceBytes(driver.allocate(4096), [4096])):
        to = tensor if isinstance(source, np.ndarray) else result.tensor()
        with pytest.raises(pw.ReadOnly):
            to.write(source)
    del to
    gate.open()
    taken = result.take(60)
    assert not tensor.readonly
    taken.release()
    assert queue.stats().free_outputs == 1, "the tensor has it"
    tensor.write(NUMBERS)
    assert tensor.tobytes() == NUMBERS.tobytes()
    del tensor
    # Waits until both output blocks are free.
    tickets = [queue.submit("fill", output=4096) for _ in range(2)]
    for task in [queue.claim(60), queue.claim(60)]:
        task.complete()
    for ticket in tickets:
        ticket.result(60).release()


def test_enqueued_result_and_its_tensors_outlive_the_queue(domain, queue):
    gate, ticket = enqueued(queue)
    result = ticket.wait_on(opened(), timeout=60)
    tensor = result.tensor()
    queue.close()
    gate.open()
    assert tensor.tobytes(opened()) == bytes([7]) * 4096
    with result.take(60) as taken:
        assert taken.tobytes() == bytes([7]) * 4096
    del result, ticket, taken
    assert tensor.tobytes() == bytes([7]) * 4096


def test_enqueued_result_that_is_dropped_leaves_the_result(queue):
    gate, ticket = enqueued(queue)
    tensor = ticket.wait_on(opened(), timeout=60).tensor()
    gate.open()
    with ticket.result(60) as taken:
        assert taken.tobytes() == bytes([7]) * 4096
    with pytest.raises(pw.TaskGone):
        tensor.tobytes(opened())
    with pytest.raises(pw.TaskGone):
        tensor.__dlpack__(stream=opened())


def test_wait_for_a_worker_ends_at_its_timeout_and_by_signals(queue):
    ticket = queue.submit("fill", output=4096)
    with pytest.raises(pw.TimeoutError, match="is pending: it was not done"):
        ticket.wait_on(opened(), timeout=0)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait_on(opened())
    timer.join()
    ticket.cancel()
    with pytest.raises(pw.TaskGone):
        ticket.wait_on(opened(), timeout=60)


STANDING = """
sys.path.insert(0, sys.argv[2])
from python.tests.simulated import driver
driver.use()
gate = driver.Gate()
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    queue.claim(60).complete_on(gate.stream)
    say("completed")
    told()
"""


# Holds 215.
def test_attempt_of_a_worker_killed_with_its_stream_standing_has_failed(queue, child, socket):
    ticket = queue.submit("fill", output=4096)
    worker = child(STANDING, socket, str(Path(__file__).parents[3]))
    assert worker.says() == "completed"
    reader = opened()
    failed = ticket.wait_on(reader, timeout=60)
    tensor = failed.tensor()
    worker.kill()
    driver.wait(reader)
    for _ in range(2):
        with pytest.raises(pw.AttemptFailed, match="attempt 1 of task work@1.* has no result") as raised:
            failed.take(60)
    assert isinstance(raised.value, ConnectionError) and raised.value.anchor == "attempt-without-result"
    for read in (tensor.tobytes, failed.tobytes, lambda stream: tensor.__dlpack__(stream=stream)):
        with pytest.raises(pw.AttemptFailed):
            read(reader)
    task = queue.claim(60)
    driver.fill(task.output.__cuda_array_interface__["data"][0], 8, 4096, reader)
    task.complete_on(reader)
    again = ticket.wait_on(reader, timeout=60)
    assert again.attempt == 2
    with pytest.raises(pw.AttemptFailed):
        failed.take(60)
    with again.take(60) as taken:
        assert taken.tobytes() == bytes([8]) * 4096


def test_bad_input_of_enqueued_results(domain, queue):
    with domain.queue("on-host", tasks=1, outputs=(1, 16), device="host") as on_host:
        ticket = on_host.submit("fill", output=16)
        with pytest.raises(ValueError, match=r"waited for by hosts: result\(\)"):
            ticket.wait_on(opened(), timeout=0)
        ticket.cancel()
    gate, ticket = enqueued(queue)
    for wrong in ("stream", 1.5, object()):
        with pytest.raises(TypeError, match="is not a CUDA stream"):
            ticket.wait_on(wrong, timeout=0)
    with pytest.raises(ValueError, match="timeout"):
        ticket.wait_on(opened(), timeout=-1)
    result = ticket.wait_on(opened(), timeout=60)
    with pytest.raises(pw.BlockTooSmall):
        result.tensor(4097)
    with pytest.raises(TypeError, match="send its task"):
        pickle.dumps(result)
    with pytest.raises(BufferError):
        np.asarray(result)
    gate.open()
    result.take(60).release()
    with pytest.raises(pw.TaskGone):
        result.take(60)
    with pytest.raises(pw.TaskGone):
        result.tensor()
    empty = queue.submit("nothing")
    queue.claim(0).complete_on(opened())
    result = empty.wait_on(opened(), timeout=60)
    with pytest.raises(TypeError, match="without room for an output"):
        result.tensor()
    with result.take(60) as taken:
        assert (taken.output, taken.nbytes) == (None, 0)
