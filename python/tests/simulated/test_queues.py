"""Tasks on the simulated GPU: inputs and outputs that streams write."""

import os
import signal
import threading

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
        with ticket.result(60) as result:
            assert result.tobytes() == NUMBERS.tobytes()
        queue.detach(attached, timeout=60)


def test_task_is_submitted_and_completed_in_the_order_of_streams(queue):
    gate = driver.Gate()
    block = queue.inputs.alloc(0)
    driver.fill(block.__cuda_array_interface__["data"][0], 7, 4096, gate.stream)
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
    driver.fill(block.__cuda_array_interface__["data"][0], 7, 4096, gate.stream)
    ticket = queue.submit("copy", [block], stream=gate.stream)
    with pytest.raises(pw.InputsNotReady):
        queue.claim(0).complete()
    gate.open()
    with queue.claim(60) as task:
        task.wait_inputs(60)
    assert ticket.result(60).attempt == 2


def in_flight(queue):
    """A task whose input a stream is still to write, and what lets that go on."""
    gate = driver.Gate()
    block = queue.inputs.alloc(0)
    driver.fill(block.__cuda_array_interface__["data"][0], 7, 4096, gate.stream)
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
