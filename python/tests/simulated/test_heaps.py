"""Memory for torch's and cupy's allocators, on the simulated GPU: their callbacks, as the libraries call them."""

import ctypes
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import partywall as pw
from partywall import _native

from .. import stand_ins
from ..conftest import WATCHDOG
from . import driver

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")

MIB = 1 << 20


def functions(allocate: str, free: str) -> stand_ins.TorchAllocator:
    """Returns the functions that torch finds in the compiled module."""
    return stand_ins.TorchAllocator(_native.__file__, allocate, free)


@pytest.fixture(autouse=True)
def context():
    driver.use()


def heap(domain, size=64 * MIB):
    made = domain._native.heap("test", size, "cuda:0")
    return made, made.torch_allocator(functions)


def publish(domain, address, name="ours", **options):
    driver.fill(address, 7, 4096, 0)
    return domain.publish(name, driver.DeviceBytes(address, [4096]), **options)


READER = """
with pw.connect(socket=sys.argv[1]) as d, d.open("ours") as opened:
    say(opened.kind, set(opened.tobytes()))
    told()
    say(set(opened.tobytes()))
"""


# Holds 73.
def test_tensors_in_a_pool_are_published_in_place(socket, domain, child):
    pool, callbacks = heap(domain)
    address = callbacks.allocate(2 * MIB)
    with publish(domain, address + MIB) as published:
        assert published.kind == "live" and [row.kind for row in domain.ls()] == ["live"]
        reader = child(READER, socket)
        assert reader.says() == "live {7}"
        driver.fill(address + MIB, 8, 4096, 0)
        driver.wait(0)
        reader.tell()
        assert reader.says() == "{8}"
        assert reader.end() == 0
    callbacks.free(address)
    assert pool.nbytes == 0


# Holds 73.
def test_show_says_what_such_memory_promises(socket, domain):
    _, callbacks = heap(domain)
    with publish(domain, callbacks.allocate(2 * MIB)):
        shown = subprocess.run(
            [pw._program.PROGRAM, "--socket", socket, "show", "ours"],
            capture_output=True,
            text=True,
            timeout=WATCHDOG,
            check=True,
        )
        assert "live" in shown.stdout and "read-only by convention; outlives its publisher" in shown.stdout
        assert "readers can also reach other memory in the same allocations" in shown.stdout


# Holds 75.
def test_tensor_is_held_until_its_last_reader_has_closed(socket, domain, child):
    _, callbacks = heap(domain)
    address = callbacks.allocate(2 * MIB)
    tensor = driver.DeviceBytes(address, [4096])
    driver.fill(address, 7, 4096, 0)
    published = domain.publish("ours", tensor)
    reader = child(READER, socket)
    assert reader.says() == "live {7}"
    published.close()
    assert pw._native.flush(WATCHDOG)
    assert not domain.exists("ours") and tensor.released == 0
    reader.kill()
    done = threading.Event()
    while not tensor.released:
        done.wait(0.01)


KEEPER = """
import ctypes, os
from partywall import _native
from tests.simulated import driver
from tests.simulated.test_heaps import functions
driver.use()
d = pw.connect(socket=sys.argv[1])
heap = d._native.heap("test", 64 << 20, "cuda:0")
address = heap.torch_allocator(functions).allocate(2 << 20)
driver.fill(address, 7, 4096, 0)
d.publish("ours", driver.DeviceBytes(address, [4096]), kept=True)
say("ready")
told()
"""


# Holds 74.
def test_kept_pool_memory_outlives_its_killed_publisher(socket, domain, child):
    publisher = child(KEEPER, socket, PYTHONPATH="python")
    assert publisher.says() == "ready"
    publisher.kill()
    with domain.open("ours") as opened:
        assert set(opened.tobytes()) == {7}
    with pytest.raises(pw.CannotKeep):
        domain.publish("other", driver.DeviceBytes(driver.allocate(4096), [4096]), kept=True)


# Holds 77.
def test_callbacks_work_after_the_domain_is_closed_and_without_the_pool(socket):
    domain = pw.connect(socket=socket)
    pool, callbacks = heap(domain)
    first = callbacks.allocate(2 * MIB)
    domain.close()
    second = callbacks.allocate(2 * MIB)
    assert first and second and pool.nbytes == 32 * MIB
    del pool, domain
    gc.collect()
    assert callbacks.allocate(2 * MIB) == 0, "its pool is gone"
    freeing = threading.Thread(target=lambda: [callbacks.free(address) for address in (first, second)])
    freeing.start()
    freeing.join()
    assert not _native.Heap.contains(first)
    callbacks.free(first)
    callbacks.free(0)


# Holds 77.
def test_refused_allocation_returns_null_and_says_why(domain):
    pool, callbacks = heap(domain, 4 * MIB)
    assert callbacks.allocate(3 * MIB)
    assert pool.take_refusal() is None
    assert callbacks.allocate(2 * MIB) == 0
    refusal = pool.take_refusal()
    assert '"test"' in refusal and "limit of 4 MiB" in refusal and "size=" in refusal
    assert pool.take_refusal() is None
    assert callbacks.allocate(MIB, device=1) == 0
    assert "cuda:0" in pool.take_refusal()
    with pytest.raises(pw.OutOfMemory) as raised:
        pool.allocate(2 * MIB)
    assert raised.value.anchor == "heap-is-full"
    with pytest.raises(ValueError, match="a pool is on a GPU"):
        domain._native.heap("test", MIB, "host")


# Holds 77.
def test_pools_have_slots_of_their_own(domain):
    gc.collect()
    pools = [heap(domain, 2 * MIB) for _ in range(16)]
    addresses = [callbacks.allocate(MIB) for _, callbacks in pools]
    assert all(addresses) and len({callbacks.names for _, callbacks in pools}) == 16
    assert [pool.nbytes for pool, _ in pools] == [2 * MIB] * 16
    with pytest.raises(pw.LimitReached) as raised:
        heap(domain)
    assert raised.value.anchor == "too-many-torch-pools"
    # The exception keeps this function's variables.
    del raised
    freed = pools.pop()[1]
    gc.collect()
    _, again = heap(domain)
    assert again is freed, "torch keeps using the functions of a slot"
    for address in addresses:
        freed.free(address)


THREADS = """
import ctypes
from partywall import _native
from tests.simulated import driver
from tests.simulated.test_heaps import functions
driver.use()
d = pw.connect(socket=sys.argv[1])
heap = d._native.heap("test", 64 << 20, "cuda:0")
callbacks = heap.torch_allocator(functions)
address = callbacks.allocate(2 << 20)
# Calls through PyDLL keep the GIL, also while this thread waits for another one.
system, library = ctypes.PyDLL(None), ctypes.PyDLL(_native.__file__)
for name, argument in zip(callbacks.names, (1 << 20, address)):
    thread = ctypes.c_ulong()
    system.pthread_create(ctypes.byref(thread), None, getattr(library, name), ctypes.c_void_p(argument))
    system.pthread_join(thread, None)
say(_native.Heap.contains(address))
"""


# Holds 77.
def test_callbacks_wait_for_no_gil(socket, child):
    threads = child(THREADS, socket, PYTHONPATH="python")
    assert threads.says() == "False"
    assert threads.end() == 0


FORKER = """
import os
from tests.simulated import driver
from tests.simulated.test_heaps import functions
driver.use()
d = pw.connect(socket=sys.argv[1])
heap = d._native.heap("test", 64 << 20, "cuda:0")
callbacks = heap.torch_allocator(functions)
address = callbacks.allocate(2 << 20)
child = os.fork()
if child == 0:
    callbacks.free(address)
    os._exit(callbacks.allocate(2 << 20) != 0)
say(os.waitpid(child, 0)[1], pw._native.Heap.contains(address))
"""


# Holds 77.
def test_forked_child_neither_allocates_nor_frees(socket, child):
    forker = child(FORKER, socket, PYTHONPATH="python")
    assert forker.says() == "0 True"
    assert forker.end() == 0


EXITER = """
from tests.simulated import driver
from tests.simulated.test_heaps import functions
driver.use()
d = pw.connect(socket=sys.argv[1])
heap = d._native.heap("test", 64 << 20, "cuda:0")
callbacks = heap.torch_allocator(functions)
class Tensor:
    def __init__(self):
        self.address = callbacks.allocate(2 << 20)
    def __del__(self, free=callbacks.free):
        free(self.address)
alive = Tensor()
alive.itself = alive
published = d.publish("ours", driver.DeviceBytes(alive.address, [4096]))
say("ready")
"""


# Holds 77.
def test_blocks_are_freed_at_the_end_of_the_interpreter(socket, child):
    exiter = child(EXITER, socket, PYTHONPATH="python")
    assert exiter.says() == "ready"
    assert exiter.end() == 0


# Holds 78.
def test_pool_of_torch_routes_its_tensors_and_explains_a_refusal(domain, monkeypatch):
    torch = stand_ins.torch_pools(monkeypatch)
    with domain.torch_pool("weights", size=4 * MIB) as pool:
        address = torch.allocate(2 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as raised, pool:
        torch.allocate(3 * MIB)
    assert "weights" in "".join(raised.value.__notes__)
    assert (pool.nbytes, pool.size, pool.name) == (4 * MIB, 4 * MIB, "weights")
    assert str(pool.device) == "cuda:0" and "4194304 of 4194304" in repr(pool)
    assert torch.active == []
    from partywall.torch import _pool

    assert _pool.is_shareable(torch.Tensor(address)) and not _pool.is_shareable(torch.Tensor(1))
    with publish(domain, address) as published:
        assert published.kind == "live"
    pool.functions.free(address)
    assert pool.nbytes == 0


# Holds 79.
def test_pool_of_cupy_caches_retries_and_raises_as_cupy(domain, monkeypatch):
    cupy = stand_ins.cupy_pools(monkeypatch)
    with domain.cupy_pool("frames", size=4 * MIB) as pool:
        array = cupy.allocate(2 * MIB)
        assert pool.nbytes == 4 * MIB
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as raised:
            cupy.allocate(3 * MIB)
        assert raised.value.status == 2 and isinstance(raised.value.__cause__, pw.OutOfMemory)
        cupy.device = 1
        with pytest.raises(ValueError, match="pool 'frames' is on cuda:0"):
            cupy.allocate(MIB)
        cupy.device = 0
    assert cupy.thread.allocator is None
    with publish(domain, array.ptr) as published:
        assert published.kind == "live"
        assert set(np.frombuffer(published.tobytes(), "uint8")) == {7}
    del array
    assert pool.nbytes == 0 and "frames" in repr(pool)


def test_threads_leave_a_pool_of_cupy_each_to_its_own_allocator(domain, monkeypatch):
    cupy = stand_ins.cupy_pools(monkeypatch)
    pool = domain.cupy_pool("frames", size=4 * MIB)
    entered, leave, others = threading.Event(), threading.Event(), []

    def use():
        with cupy.cuda.using_allocator("another"):
            with pool:
                entered.set()
                leave.wait()
            others.append(cupy.thread.allocator)

    thread = threading.Thread(target=use)
    with pool:
        thread.start()
        entered.wait()
    left = cupy.thread.allocator
    leave.set()
    thread.join()
    assert left is None and others == ["another"]
