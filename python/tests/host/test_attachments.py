"""Segments that queues hold, and tasks that name parts of them."""

import pickle

import numpy as np
import pytest

import partywall as pw

WORKER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    for task in queue.claims():
        numbers = [np.asarray(item.tensor(dtype="float32")) for item in task.inputs]
        np.asarray(task.output.tensor(dtype="float32"))[0] = sum(array.sum() for array in numbers)
"""

ATTACHER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    segment = d.put("weights", {"w": np.arange(4, dtype="float32")})
    queue.submit("sum", [queue.attach(segment)["w"]], output=4)
    say("attached")
    told()
"""


@pytest.fixture
def queue(domain):
    with domain.queue("work", tasks=4, inputs=(4, 16), outputs=(4, 16), device="host") as opened:
        yield opened


@pytest.fixture
def weights(domain):
    tensors = {"ones": np.ones(4, dtype=np.float32), "counted": np.arange(3, dtype=np.float32)}
    with domain.put("weights", tensors, kept=True) as segment:
        yield segment


def tens():
    return np.full(4, 10, dtype=np.float32)


def total(ticket):
    with ticket.result(timeout=60) as result:
        return np.asarray(result.tensor(dtype="float32"))[0]


def test_worker_of_another_process_reads_parts_in_place(queue, weights, child, socket):
    attached = queue.attach(weights)
    assert (attached.name, attached.version, attached.nbytes) == ("weights", 1, weights.nbytes)
    child(WORKER, socket)
    assert total(queue.submit("sum", [attached["ones"]], output=4)) == 4
    task = pw.Task("sum", [attached["ones"], tens(), attached["counted"]], output=4)
    assert [total(ticket) for ticket in queue.submit_all([task, task])] == [47, 47]
    assert total(queue.submit("sum", [attached["ones"], attached[:8]], output=4)) == 6
    assert queue.stats().attached == 1


def test_segment_outlives_the_process_that_attached_it(queue, domain, child, socket):
    attacher = child(ATTACHER, socket)
    assert attacher.says() == "attached"
    attacher.kill()
    task = queue.claim(timeout=60)
    numbers = np.asarray(task.inputs[0].tensor(dtype="float32"))
    assert numbers.tolist() == [0, 1, 2, 3]
    assert task.inputs[0].nbytes == 16 and not numbers.flags.writeable
    assert task.inputs[0].tobytes() == numbers.tobytes()
    task.complete()
    with domain.put("again", tens()):
        queue.detach(queue.attach("again"))
    with pytest.raises(pw.TimeoutError):
        queue.claim(timeout=0)
    # The segment stays mapped for arrays of a task that is over.
    assert numbers.tolist() == [0, 1, 2, 3]


def test_segment_is_detached_once_no_task_names_it(queue, weights):
    attached = queue.attach("weights@1")
    ticket = queue.submit("sum", [attached["ones"]], output=4)
    with pytest.raises(pw.SegmentInUse, match="1 task names it"):
        queue.detach(attached, timeout=0)
    with queue.claim(timeout=0) as task:
        array = np.asarray(task.inputs[0].tensor(dtype="float32"))
        np.asarray(task.output.tensor(dtype="float32"))[0] = array.sum()
    assert total(ticket) == 4
    # An array of a task that is over keeps what it shows.
    with pytest.raises(pw.SegmentInUse):
        queue.detach(attached, timeout=0)
    assert array.tolist() == [1, 1, 1, 1]
    del array
    queue.detach(attached)
    with pytest.raises(pw.NotAttached):
        queue.detach(attached, timeout=0)
    part = attached["ones"]
    with pytest.raises(pw.NotAttached):
        queue.submit("sum", [tens(), part], output=4)
    assert queue.stats().free_inputs == 4
    with pytest.raises(pw.TimeoutError):
        queue.claim(timeout=0)


def test_values_that_are_not_parts_are_refused(queue, weights, domain):
    attached = queue.attach(weights)
    assert attached[-4:].nbytes == 4 and attached[:].nbytes == attached.nbytes
    with pytest.raises(pw.TensorNotFound):
        attached["none"]
    with pytest.raises(pw.BadTensor):
        attached[4:4]
    with pytest.raises(ValueError, match="no gaps"):
        attached[::2]
    with pytest.raises(TypeError, match="name of a tensor"):
        attached[0]
    with pytest.raises(pw.NameNotFound):
        queue.attach("nothing")
    with domain.queue("other", device="host", tasks=1) as other, pytest.raises(pw.WrongQueue):
        other.submit("sum", [attached["ones"]])
    with pytest.raises(TypeError, match="this process's own"):
        pickle.dumps(attached)
    assert "weights@1" in repr(attached) and "16 bytes" in repr(attached["ones"])
