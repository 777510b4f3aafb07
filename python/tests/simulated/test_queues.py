"""Tasks on the simulated GPU: inputs and outputs that streams write."""

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
