"""Tasks whose arrays torch writes and reads in two processes, without a host that waits for the GPU."""

import os

import pytest

import partywall as pw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

NUMBERS = 1 << 20
TASKS = 32

WORKER = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    torch.ones(4, device="cuda").sqrt_().sum().item()
    say("ready")
    for task in queue.claims():
        if sys.argv[2:] == ["hang"]:
            say(task.attempt)
            told()
        if task.kind == "last":
            task.complete()
            break
        numbers = torch.from_dlpack(task.inputs[0].tensor(dtype="float32"))
        torch.sqrt(numbers, out=torch.from_dlpack(task.output.tensor(dtype="float32")))
        task.complete_on()
    say("end")
"""


@pytest.fixture
def queue(domain):
    """A queue on the GPU; the kernels have run once."""
    torch.ones(4, device="cuda").sum().item()
    with domain.queue("work", tasks=64, inputs=(8, NUMBERS * 4), outputs=(8, NUMBERS * 4)) as opened:
        yield opened
        torch.cuda.synchronize()


def test_each_task_of_living_and_killed_workers_is_right_once(queue, child, socket):
    hanging = child(WORKER, socket, "hang")
    assert hanging.says() == "ready"
    tickets = []
    first = queue.submit("sqrt", [torch.full((NUMBERS,), 4.0, device="cuda")], output=NUMBERS * 4)
    assert hanging.says() == "1"
    hanging.kill()
    workers = [child(WORKER, socket) for _ in range(2)]
    assert [worker.says() for worker in workers] == ["ready", "ready"]
    right = 0
    for number in range(TASKS):
        numbers = torch.full((NUMBERS,), float(number**2), device="cuda")
        tickets.append(queue.submit("sqrt", [numbers], output=NUMBERS * 4, timeout=60))
        if len(tickets) == 4 or number == TASKS - 1:
            for index, ticket in enumerate(tickets, number + 1 - len(tickets)):
                with ticket.result(60) as result:
                    roots = torch.from_dlpack(result.tensor(dtype="float32"))
                    right += bool((roots == index).all())
                    del roots
            tickets = []
    with first.result(60) as result:
        assert result.attempt == 2
        assert bool((torch.from_dlpack(result.tensor(dtype="float32")) == 2).all())
    assert right == TASKS
    for _ in workers:
        queue.submit("last")
    assert [worker.says() for worker in workers] == ["end", "end"]


def test_input_is_read_behind_the_kernel_that_writes_it(queue, child, socket):
    worker = child(WORKER, socket)
    assert worker.says() == "ready"
    block = queue.inputs.alloc(0)
    numbers = torch.from_dlpack(block.tensor(dtype="float32"))
    torch.cuda._sleep(1_000_000_000)
    numbers.fill_(9.0)
    del numbers
    ticket = queue.submit("sqrt", [block], output=NUMBERS * 4)
    with ticket.result(60) as result:
        assert bool((torch.from_dlpack(result.tensor(dtype="float32")) == 3).all())


def test_result_is_read_behind_the_kernel_that_computes_it_and_taken_afterwards(queue, child, socket):
    worker = child(WORKER, socket)
    assert worker.says() == "ready"
    ticket = queue.submit("sqrt", [torch.full((NUMBERS,), 9.0, device="cuda")], output=NUMBERS * 4)
    enqueued = ticket.wait_on(timeout=60)
    total = torch.from_dlpack(enqueued.tensor(dtype="float32")).sum()
    with enqueued.take(60) as result:
        assert result.attempt == 1
        assert total.item() == 3 * NUMBERS
