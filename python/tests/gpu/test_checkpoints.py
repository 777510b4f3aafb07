# Holds 387.
"""A process that suspends its segments is checkpointed by the driver, restored, and goes on."""

import ctypes
import os

import pytest

import partywall as pw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

COUNT = 1 << 20

SUSPENDED = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d:
    frozen, mutable, pinned = d.open("frozen"), d.open("mutable", write=True), d.open("pinned", device="cuda")
    own = d.put("own", torch.full((1024,), 5, device="cuda"), kept=True)
    tensors = [torch.from_dlpack(segment) for segment in (frozen, mutable, pinned, own)]
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        total.add_(tensors[0].sum())
        stream.synchronize()
        total.zero_()
        with torch.cuda.graph(graph, stream=stream):
            total.add_(tensors[0].sum())
    torch.cuda.synchronize()
    addresses = [tensor.data_ptr() for tensor in tensors]
    say("open")
    told()
    d.suspend()
    say("suspended")
    told()
    d.resume()
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    graph.replay()
    tensors[1].add_(1)
    torch.cuda.synchronize()
    say(int(total), *(int(tensor[3]) for tensor in tensors))
    told()
"""


def checkpoint(pid: int) -> None:
    """Has the driver checkpoint a process and restore it."""
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuCheckpointProcessLock"):
        pytest.skip("this driver takes no checkpoints")
    assert driver.cuInit(0) == 0
    for step in ("Lock", "Checkpoint", "Restore", "Unlock"):
        timeout = (ctypes.c_uint64 * 8)(10_000) if step == "Lock" else None
        assert getattr(driver, f"cuCheckpointProcess{step}")(pid, timeout) == 0, step


def test_suspended_process_is_restored_and_shares_again(domain, child):
    ones = torch.ones(COUNT, dtype=torch.int64, device="cuda")
    with (
        domain.put("frozen", ones),
        domain.put("mutable", 2 * ones, mutable=True) as mutable,
        domain.put("pinned", 3 * ones.cpu(), device="pinned"),
    ):
        shared = torch.from_dlpack(mutable)
        other = child(SUSPENDED, domain.socket)
        assert other.says() == "open"
        other.tell()
        assert other.says() == "suspended"
        checkpoint(other.process.pid)
        shared.add_(10)
        torch.cuda.synchronize()
        other.tell()
        # The graph finds the weights where they were; what was written meanwhile is there, and its writes are seen.
        assert other.says() == f"{COUNT} 1 13 3 5"
        assert int(shared[3]) == 13
        with domain.open("own") as own:
            assert torch.equal(torch.from_dlpack(own).cpu(), torch.full((1024,), 5.0))
        other.tell()
        assert other.end() == 0
