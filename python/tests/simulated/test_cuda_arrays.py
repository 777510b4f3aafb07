# Holds 258.
"""Arrays that libraries make of `__cuda_array_interface__`, which keep the object that they were made of and no more."""

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

SIZE = 4096


@pytest.fixture(autouse=True)
def used():
    driver.use()


class Array:
    """An array as cupy, numba and torch make it."""

    def __init__(self, owner) -> None:
        self._owner = owner
        self._address = owner.__cuda_array_interface__["data"][0]

    def bytes(self) -> bytes:
        """Returns what is there now."""
        return driver.read(self._address, SIZE, 0)

    def fill(self, byte: int) -> None:
        """Writes all of it."""
        driver.fill(self._address, byte, SIZE, 0)
        driver.wait(0)


def of(byte: int) -> np.ndarray:
    return np.full(SIZE, byte, np.uint8)


def test_array_keeps_its_segment(domain):
    with domain.put("x", of(1), device="cuda") as put, domain.open("x") as opened:
        arrays = [Array(put), Array(opened)]
    del put, opened
    assert [array.bytes() for array in arrays] == [bytes([1]) * SIZE] * 2


def test_array_of_a_build_keeps_the_segment(domain):
    with domain.create("x", (SIZE,), "uint8", device="cuda") as build:
        array = Array(build)
        array.fill(2)
        build.commit().close()
    del build
    assert array.bytes() == bytes([2]) * SIZE


def test_array_keeps_its_block(domain):
    with domain.pool("pool", blocks=1, block_bytes=SIZE, device="cuda") as pool:
        with pool.alloc() as block:
            array = Array(block)
            with pytest.raises(pw.StillUsed):
                block.offer()
        del block
        assert pool.try_alloc() is None
        array.fill(3)
        del array
        eventually(lambda: pool.stats().free == 1)


def test_array_keeps_its_loan_and_sample(domain):
    with (
        domain.topic("frames", max_bytes=SIZE, depth=2, held=1, subscribers=1, device="cuda") as frames,
        frames.publisher() as publisher,
        frames.subscriber() as subscriber,
    ):
        with publisher.loan((SIZE,), "uint8") as out:
            written = Array(out)
            written.fill(4)
        del out
        with subscriber.recv(WATCHDOG) as sample:
            received = Array(sample)
        del sample
        publisher.send(of(5))
        with pytest.raises(pw.TooManyHeld):
            subscriber.try_recv()
        written.fill(6)
        assert received.bytes() == bytes([6]) * SIZE, "the same sample, which nothing else was written into"
        del received
        assert subscriber.recv(WATCHDOG).tobytes() == bytes([5]) * SIZE


def test_array_keeps_what_it_shows_of_a_task(domain):
    with domain.queue("q", tasks=4, inputs=(4, SIZE), outputs=(1, SIZE), device="cuda") as queue:
        first = queue.submit("x", [of(1)], output=SIZE)
        with queue.claim(WATCHDOG) as task:
            read, written = Array(task.inputs[0]), Array(task.output)
            written.fill(7)
        del task
        with first.result(WATCHDOG) as result:
            taken = Array(result)
        del result
        second = queue.submit("x", [of(2)], output=SIZE)
        with pytest.raises(pw.OutputsFull):
            queue.claim(0)
        written.fill(8)
        assert (read.bytes(), taken.bytes()) == (bytes([1]) * SIZE, bytes([8]) * SIZE)
        del written, read, taken
        with queue.claim(WATCHDOG) as task:
            task.output.tensor().write(of(9))
        with second.result(WATCHDOG) as result:
            assert result.tobytes() == bytes([9]) * SIZE
