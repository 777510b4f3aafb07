# Holds 78.
"""Pools of torch whose tensors are published in place, on a real GPU."""

import gc
import os
import threading
import time

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
shared = pytest.importorskip("partywall.torch")

MIB = 1 << 20


def used() -> int:
    """Returns the bytes that the driver counts as used on the GPU."""
    free, total = torch.cuda.mem_get_info()
    return total - free


READER = """
import torch
with pw.connect(socket=sys.argv[1]) as d:
    opened = d.open(sys.argv[2])
    say(opened.kind)
    while told():
        say(*(float(torch.from_dlpack(tensor).float().sum()) for tensor in opened.values()))
    opened.close()
say("closed")
told()
"""


def ask(reader) -> str:
    reader.tell("read")
    return reader.says()


def test_model_that_moves_into_a_pool_is_published_in_place(socket, domain, child):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    # Loads the kernels, which are memory, too.
    torch.ones(1, device="cuda")
    before = used()
    with domain.torch_pool("weights", size=512 * MIB) as pool:
        model.to("cuda")
    assert all(shared.is_shareable(parameter) for parameter in model.parameters())
    assert not shared.is_shareable(torch.ones(1, device="cuda"))
    reserved = pool.nbytes
    assert 160 * MIB <= reserved <= 256 * MIB
    with domain.publish("model", {name: tensor.detach() for name, tensor in model.named_parameters()}) as published:
        assert published.kind == "live" and pool.nbytes == reserved and used() - before <= reserved + 64 * MIB
        reader = child(READER, socket, "model")
        assert reader.says() == "live"
        assert ask(reader) == " ".join(["1048576.0"] * 40)
        with torch.no_grad():
            model[39].weight.fill_(2)
        torch.cuda.synchronize()
        assert ask(reader).endswith(" 2097152.0"), "nothing was copied"
        reader.tell()
        assert reader.says() == "closed"


def test_memory_is_not_used_for_other_tensors_while_it_is_read(socket, domain, child):
    with domain.torch_pool("weights", size=256 * MIB) as pool:
        tensor = torch.ones(MIB, device="cuda")
    address = tensor.data_ptr()
    published = domain.publish("x", tensor)
    reader = child(READER, socket, "x")
    assert reader.says() == "live"
    del tensor
    published.close()
    assert not domain.exists("x")
    with pool:
        others = [torch.full((MIB,), 2.0, device="cuda") for _ in range(8)]
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert ask(reader) == "1048576.0"
    reader.kill()
    end = time.monotonic() + WATCHDOG
    while True:
        with pool:
            # torch asks the pool for 20 MiB at a time, which takes a chunk of 32 MiB: these and the others need five.
            probes = [torch.empty(MIB, device="cuda") for _ in range(16)]
        if address in [probe.data_ptr() for probe in probes]:
            break
        del probes
        assert time.monotonic() < end, "the memory is not used again"
        time.sleep(0.05)


def test_limit_is_torchs_out_of_memory_error_with_the_reason(domain):
    with pytest.raises(torch.OutOfMemoryError) as raised, domain.torch_pool("small", size=64 * MIB) as pool:
        torch.empty(65 * MIB, dtype=torch.uint8, device="cuda")
    assert '"small"' in raised.value.__notes__[0] and "64 MiB" in raised.value.__notes__[0]
    with pool:
        assert shared.is_shareable(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")), "it goes on"


def test_memory_returns_once_pool_and_tensors_are_gone(domain):
    torch.cuda.synchronize()
    before = used()
    pool = domain.torch_pool("weights", size=1024 * MIB)
    with pool:
        tensors = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
    assert used() - before >= 500 * MIB
    del tensors[1:]
    torch.cuda.empty_cache()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert shared.is_shareable(tensors[0]), "the pool is gone, and the tensor stays"
    tensors[0].fill_(1)
    assert int(tensors[0].sum(dtype=torch.int64)) == 100 * MIB
    del tensors
    torch.cuda.empty_cache()
    assert used() - before <= 64 * MIB


def test_several_pools_and_threads_stay_apart(domain):
    pools = [domain.torch_pool(f"pool{number}", size=256 * MIB) for number in range(3)]
    found: dict[int, bool] = {}

    def other_thread() -> None:
        found[-1] = shared.is_shareable(torch.ones(8 * MIB, device="cuda"))

    for number, pool in enumerate(pools):
        with pool:
            tensor = torch.full((4 * MIB,), float(number), device="cuda")
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
        assert shared.is_shareable(tensor) and not found[-1]
        pools[number] = (pool, tensor)
    assert [pool.nbytes for pool, _ in pools] == [32 * MIB] * 3
    assert [float(tensor[0]) for _, tensor in pools] == [0.0, 1.0, 2.0]


def test_tensors_used_on_other_streams_stay_whole(domain):
    pool = domain.torch_pool("weights", size=512 * MIB)
    stream = torch.cuda.Stream()
    for round in range(20):
        with pool:
            tensor = torch.full((8 * MIB,), float(round), device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            total = tensor.sum(dtype=torch.float64)
        tensor.record_stream(stream)
        del tensor
        with pool:
            torch.full((8 * MIB,), -1.0, device="cuda")
        stream.synchronize()
        assert float(total) == round * 8 * MIB


@pytest.mark.parametrize("shares", [False, True])
def test_graphs_use_tensors_of_a_pool(domain, shares):
    pool = domain.torch_pool("weights", size=512 * MIB)
    with pool:
        weight = torch.ones(1024, 1024, device="cuda")
    given = torch.ones(1024, 1024, device="cuda")
    (given @ weight).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id if shares else None):
        result = given @ weight
    graph.replay()
    assert float(result[0, 0]) == 1024.0 and shared.is_shareable(result) == shares
    with domain.publish("weight", weight):
        weight.fill_(2)
        graph.replay()
        assert float(result[0, 0]) == 2048.0


PUBLISHER = """
import torch
d = pw.connect(socket=sys.argv[1])
with d.torch_pool("weights", size=256 << 20):
    tensor = torch.ones(1 << 20, device="cuda")
d.publish("owned", tensor)
d.publish("kept", tensor, kept=True)
say("ready")
told()
"""


def test_publication_outlives_its_killed_publisher(socket, domain, child):
    publisher = child(PUBLISHER, socket)
    assert publisher.says() == "ready"
    opened = domain.open("owned")
    publisher.kill()
    assert opened.wait_withdrawn(WATCHDOG) is None
    assert float(torch.from_dlpack(opened).sum()) == 1048576.0
    with domain.open("kept") as kept:
        assert float(torch.from_dlpack(kept).sum()) == 1048576.0
    opened.close()


EXITER = """
import torch
d = pw.connect(socket=sys.argv[1])
pool = d.torch_pool("weights", size=256 << 20)
with pool:
    tensor = torch.ones(1 << 20, device="cuda")
published = d.publish("x", tensor)
if sys.argv[2] == "closed":
    d.close()
say("ready")
"""


@pytest.mark.parametrize("domain_is", ["open", "closed"])
def test_process_ends_with_tensors_of_a_pool(socket, child, domain_is):
    exiter = child(EXITER, socket, domain_is)
    assert exiter.says() == "ready"
    assert exiter.end() == 0


# Holds 79.
def test_arrays_of_cupy_are_published_in_place(socket, domain, child):
    cupy = pytest.importorskip("cupy")
    with domain.cupy_pool("frames", size=64 * MIB) as pool:
        array = cupy.ones(MIB, dtype="float32")
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(65 * MIB, dtype="uint8")
    assert pool.nbytes == 32 * MIB
    with domain.publish("frames", array) as published:
        assert published.kind == "live"
        reader = child(READER, socket, "frames")
        assert reader.says() == "live"
        assert ask(reader) == "1048576.0"
        reader.tell()
        assert reader.says() == "closed"
    del array
    pool.free_all_blocks()
    assert pool.nbytes == 0
