"""Blocks that torch fills and reads in two processes: when they return, and what their next holder finds."""

import gc
import os
import time

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

LONG = 2_000_000_000
"""Clock cycles of a kernel that is still running when whatever follows it is enqueued: about a second."""
BYTES = 4 << 20

TAKER = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d, d.pool("frames") as frames, d.timeline("filled") as filled:
    torch.zeros(frames.block_bytes, dtype=torch.uint8, device="cuda").sum().item()
    say("ready")
    block = frames.accept(told())
    image = torch.from_dlpack(block)
    filled.wait_on(1)
    total = image.sum()
    filled.wait(1, 60)
    say(int(total))
    filled.check()
    del image
    block.release_on()
    say("released")
    told()
"""


@pytest.fixture
def frames(domain):
    """A pool of one block; the kernels have run once on similar memory."""
    with domain.pool("frames", blocks=1, block_bytes=BYTES) as pool:
        torch.cuda._sleep(1)
        torch.zeros(BYTES, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        yield pool
        torch.cuda.synchronize()


def test_a_block_is_handed_over_while_a_kernel_is_still_to_fill_it(domain, frames, child, socket):
    with domain.timeline("filled", writer=True) as filled:
        taker = child(TAKER, socket)
        assert taker.says() == "ready"
        block = frames.alloc()
        image = torch.from_dlpack(block)
        torch.cuda._sleep(LONG)
        image.fill_(1)
        filled.signal_on(1)
        del image
        gc.collect()
        taker.tell(str(block.offer()))
        assert taker.says() == str(BYTES)
        assert taker.says() == "released"
        with frames.alloc(WATCHDOG):
            pass


@pytest.mark.parametrize("how", ["release_on", "release", "drop"])
def test_a_block_comes_back_when_the_gpu_is_done_with_it(frames, how):
    block = frames.alloc()
    image = torch.from_dlpack(block)
    torch.cuda._sleep(LONG)
    image.fill_(7)
    done = torch.cuda.Event()
    done.record()
    del image
    gc.collect()
    if how == "release_on":
        block.release_on()
    elif how == "release":
        block.release()
        assert done.query(), "it waits"
    else:
        with pytest.warns(ResourceWarning):
            del block
            gc.collect()
    watchdog = time.monotonic() + WATCHDOG
    while (again := frames.try_alloc()) is None:
        assert time.monotonic() < watchdog
    assert done.query(), "it was still to be written"
    with again:
        view = torch.from_dlpack(again)
        assert int(view.to(torch.int64).sum()) == 7 * BYTES
        del view
