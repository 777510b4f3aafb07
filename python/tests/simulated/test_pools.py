# Holds 250.
"""Blocks on the simulated GPU: when they come back."""


import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")


@pytest.fixture
def frames(domain):
    driver.use()
    with domain.pool("frames", blocks=1, block_bytes=4096) as opened:
        yield opened


def test_another_process_takes_a_block_that_was_sent(frames):
    assert frames.place.startswith("GPU-")
    block = frames.alloc()
    assert block.__dlpack_device__() == (2, 0)
    interface = block.tensor((4, 4), "float32").__cuda_array_interface__
    assert (interface["shape"], interface["typestr"]) == ((4, 4), "<f4")
    assert interface["data"] == (block.tensor().data_ptr, False)
    block.tensor((2,), "int32").write(np.array([1, 2], dtype=np.int32))
    assert block.tensor((2,), "int32").tobytes() == np.array([1, 2], dtype=np.int32).tobytes()
    block.zero(1)
    assert block.tobytes() == bytes(4096)
    with pytest.raises(BufferError):
        np.asarray(block)
    block.release()


def test_a_block_comes_back_when_its_stream_is_done(frames):
    gate, block = driver.Gate(), frames.alloc()
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    block.release_on(gate.stream)
    assert not block.held
    with pytest.raises(TimeoutError):
        frames.alloc(0.05)
    gate.open()
    with frames.alloc(WATCHDOG) as block:
        assert block.tobytes() == b"\7" * 4096


def test_arrays_of_a_pinned_pool_keep_their_block_until_the_gpu_is_done(domain, frames):
    with domain.pool("batches", blocks=1, block_bytes=4096, device="host") as batches:
        batches.pin()
        batches.pin("cuda:0")
        gate, block = driver.Gate(), batches.alloc()
        array = np.asarray(block)
        block.release()
        del array
        with pytest.raises(TimeoutError):
            batches.alloc(0.05)
        gate.open()
        batches.alloc(WATCHDOG).release()
        with pytest.raises(ValueError, match="memory is pinned for a GPU"):
            batches.pin("host")
    with pytest.raises(pw.WrongKind, match="frames"):
        frames.pin()


def test_a_forgotten_block_comes_back_when_the_gpu_is_done(frames):
    gate, block = driver.Gate(), frames.alloc()
    taken = pw._native.Source(block.tensor(), 1)
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    block.release_on(gate.stream)
    del taken
    assert frames.stats().held == 1
    gate.open()
    eventually(lambda: frames.stats().free == 1)
    with frames.alloc() as block:
        assert block.tobytes() == b"\7" * 4096


def test_a_released_block_waits_for_the_gpu(frames):
    gate, block = driver.Gate(), frames.alloc()
    driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
    gate.open()
    block.release()
    assert frames.stats().free == 1


def test_a_zeroed_block_has_nothing_of_its_last_holder(domain):
    driver.use()
    with domain.pool("zeroed", blocks=1, block_bytes=4096, zeroed=True) as pool:
        gate, block = driver.Gate(), pool.alloc()
        driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)
        block.release_on(gate.stream)
        gate.open()
        for take in (lambda: pool.alloc(WATCHDOG), pool.try_alloc):
            with take() as block:
                assert block.tobytes() == bytes(4096)
                driver.fill(block.tensor().data_ptr, 7, 4096, gate.stream)


def test_a_stream_of_a_host_pool(domain):
    driver.use()
    gate = driver.Gate()
    with domain.pool("host", blocks=1, block_bytes=10, device="host") as pool:
        pool.alloc().release_on(gate.stream, device="cuda")
        assert pool.stats().held == 1
        assert pool.try_alloc() is None
        gate.open()
        eventually(lambda: pool.stats().free == 1)


def test_pool_is_on_the_gpu_that_was_named(domain, frames):
    with domain.pool("frames", device="cuda:0") as again:
        assert again.place == frames.place
    with pytest.raises(pw.WrongPool, match="not on host"):
        domain.pool("frames", blocks=1, block_bytes=4096, device="host")
