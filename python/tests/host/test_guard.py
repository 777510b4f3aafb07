# Holds 270.
"""The guard against writes to read-only memory: what it knows, and what it stops in torch, if that is installed."""

import gc
import random

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG
from .test_errors import assert_quoted


def found(tensor, offset: int = 0):
    return pw._native.read_only_at(tensor.data_ptr + offset)


def test_addresses_of_frozen_tensors_are_known_by_name(domain):
    domain.put("w", {"a": np.zeros(100), "b": np.zeros(7, "uint8"), "empty": np.zeros(0)}, device="host")
    with domain.open("w") as opened:
        a, b = opened["a"], opened["b"]
        assert found(a) == found(a, 799) == ("a", "w@1")
        assert found(b, 6) == ("b", "w@1") and found(b, 7) is None
        address = a.data_ptr
        view = np.asarray(a)
    del a, b
    # The memory stays for as long as an array uses it.
    assert pw._native.read_only_at(address) == ("a", "w@1") and not view.any()
    del view
    gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert pw._native.read_only_at(address) is None and pw._native.read_only_at(0) is None


def test_memory_that_may_be_written_is_not_found(domain):
    with domain.create("w", 100, "uint8", device="host", mutable=True) as build:
        assert found(build.tensor) is None
        build.commit()
    with domain.open("w") as reader, domain.open("w", write=True) as writer:
        assert found(reader.tensor) == ("data", "w@1") and found(writer.tensor) is None


def test_a_longer_tensor_at_the_same_address_counts_from_then_on(domain):
    with domain.create("w", 8, "uint8", device="host", mutable=True, reserve=1 << 20) as build:
        writer = build.commit()
    with writer, domain.open("w") as reader:
        assert found(reader.tensor, 7) == ("data", "w@1") and found(reader.tensor, 8) is None
        writer.grow(100)
        assert reader.refresh()
        first = reader.tensor
        assert found(first, 99) == ("data", "w@1") and found(first, 100) is None


def test_builds_are_found_from_their_commit_on(domain):
    with domain.create("w", 100, "uint8", device="host") as build:
        tensor = build.tensor
        assert found(tensor) is None
        with build.commit():
            assert found(tensor) == ("data", "w@1")


def test_many_tensors_are_known_and_forgotten(domain):
    names = [f"t{index}" for index in range(3000)]
    with domain.put("w", {name: np.zeros(3) for name in names}, device="host") as put:
        for _ in range(3):
            with domain.open("w") as opened:
                assert [found(tensor, 8) for tensor in opened.values()] == [(name, "w@1") for name in names]
        assert all(found(tensor) == (name, "w@1") for name, tensor in put.items())


def test_tensors_at_addresses_of_ended_ones_are_known_throughout(domain):
    page, dice, opened = 4096, random.Random(0), {}
    for name in "abcdefghijkl":
        pages = [dice.randint(1, 20) for _ in range(dice.randint(1, 5))]
        domain.put(name, {f"t{index}": np.zeros(page * n, "uint8") for index, n in enumerate(pages)}, device="host")
    # The kernel gives addresses of segments that have ended to those that are opened next.
    for name in dice.choices("abcdefghijkl", k=100):
        if name in opened:
            opened.pop(name).close()
            continue
        opened[name] = domain.open(name)
        for tensor_name, tensor in opened[name].items():
            known = {found(tensor, offset) for offset in range(0, tensor.nbytes, page)}
            assert known == {(tensor_name, f"{name}@1")}
    for segment in opened.values():
        segment.close()


def test_samples_and_inputs_are_known_after_the_first_question(domain):
    pw._native.read_only_at(0)
    with domain.topic("frames", max_bytes=64, device="host") as topic:
        with topic.subscriber() as subscriber, topic.publisher() as publisher:
            publisher.send(np.ones(8))
            with subscriber.recv(WATCHDOG) as sample:
                name, segment = found(sample.tensor)
                assert name.startswith("frames ") and segment is None
    with domain.queue("work", tasks=2, inputs=(2, 64), outputs=(2, 64), device="host") as queue:
        queue.submit("sum", [np.ones(8)], output=8)
        with queue.claim(WATCHDOG) as task:
            assert found(task.inputs[0].tensor(dtype="float64")) == ("input 0", None)
            assert found(task.output.tensor(dtype="float64")) is None


@pytest.fixture
def torch():
    """torch, whose own warnings while it is imported are no failures."""
    return pytest.importorskip("torch")


@pytest.fixture
def frozen(domain, torch):
    """Two tensors that are frozen, as torch's."""
    domain.put("w", {"a": torch.ones(4, 4), "b": torch.ones(8)}, device="host")
    with domain.open("w") as opened:
        yield torch.from_dlpack(opened["a"]), torch.from_dlpack(opened["b"])


def set_item(torch, a, b):
    a[1:3, 0] = 7


def step(kind: str):
    def steps(torch, a, b):
        learned = torch.nn.Parameter(b)
        learned.grad = torch.ones(8)
        getattr(torch.optim, kind)([learned], lr=0.1).step()

    return steps


def backward(torch, a, b):
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x * 2

        @staticmethod
        def backward(_, gradient):
            a.add_(1)
            return gradient

    Writes.apply(torch.ones(2, requires_grad=True)).sum().backward()


WRITES = {
    "add_": lambda torch, a, b: a.add_(1),
    "data": lambda torch, a, b: torch.nn.Parameter(a).data.add_(1),
    "out": lambda torch, a, b: torch.add(torch.ones(8), 1, out=b),
    "view": lambda torch, a, b: a.view(-1)[3:].mul_(2),
    "transposed": lambda torch, a, b: a.T.copy_(torch.zeros(4, 4)),
    "index_put_": lambda torch, a, b: a.index_put_((torch.tensor([1]),), torch.tensor(1.0)),
    "item": set_item,
    "foreach": lambda torch, a, b: torch._foreach_mul_([torch.ones(1), b], 2),
    "init": lambda torch, a, b: torch.nn.init.normal_(torch.nn.Parameter(a)),
    "SGD": step("SGD"),
    "AdamW": step("AdamW"),
    "backward": backward,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_before_it_runs(torch, frozen, write):
    from partywall.torch import guard

    a, b = frozen
    message = r'cannot write tensor "[ab]" of w@1 by aten\.\w+\.\w+: this process'
    with pytest.raises(pw.ReadOnly, match=message) as raised, guard():
        WRITES[write](torch, a, b)
    assert_quoted(raised.value)
    assert a.eq(1).all() and b.eq(1).all()


def test_reads_and_writes_elsewhere_go_on(domain, torch, frozen):
    from partywall.torch import guard

    a, b = frozen
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(a, requires_grad=False)
    with guard(), domain.create("n", (4,), "float32", device="host") as build:
        assert model(torch.ones(2, 4)).shape == (2, 4)
        torch.from_dlpack(build).copy_(b[:4]).add_(1)
        a.unsqueeze_(0).squeeze_(0)
        a[:0].zero_()
        torch.empty(3, device="meta").add_(1)
        assert torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (b,)).eq(2).all()


def test_the_variable_guards_all_threads(socket, child, torch):
    code = """
    import threading, torch
    def write(tensor):
        try:
            tensor.add_(1)
        except pw.ReadOnly as error:
            say(type(error).__name__)
    with pw.connect(socket=sys.argv[1]) as d, d.put("w", torch.ones(3), device="host") as put:
        frozen = torch.from_dlpack(put)
        write(frozen)
        thread = threading.Thread(target=write, args=(frozen,))
        thread.start()
        thread.join()
    say("end")
    """
    guarded = child(code, socket, PARTYWALL_TORCH_GUARD="1")
    assert [guarded.says() for _ in range(3)] == ["ReadOnly", "ReadOnly", "end"]
    # Off by default: the write ends the process.
    assert child(code, socket, PARTYWALL_TORCH_GUARD="0").says() == ""
