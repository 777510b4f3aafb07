"""Blocks that processes and threads exchange."""

import gc
import math
import pickle
import threading

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually

TAKER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.pool("frames") as frames:
    say(frames.blocks, frames.block_bytes)
    block = frames.accept(told())
    say(block.nbytes, int(np.asarray(block)[-1]), block.tensor((2, 2), "int32").shape)
    told()
    block.release()
    say("released")
    told()
"""

SCRIBBLER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.pool("frames") as frames:
    block = frames.alloc()
    np.asarray(block)[:] = 7
    say("written")
    told()
"""

HOLDER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.pool("frames") as frames:
    kept = frames.alloc()
    say(frames.alloc().offer())
    told()
"""


@pytest.fixture
def frames(domain):
    with domain.pool("frames", blocks=2, block_bytes=1000, device="host") as opened:
        yield opened


def test_a_block_is_written_once_and_read_elsewhere_in_place(frames, child, socket):
    taker = child(TAKER, socket)
    assert taker.says() == "2 1000"
    with frames.alloc() as block:
        assert (block.pool, block.nbytes, block.held, frames.stats().held) == ("frames", 1000, True, 1)
        np.asarray(block)[:] = 7
        reference = block.offer()
        assert not block.held
    assert frames.stats() == pw.PoolStats(blocks=2, free=1, held=0, offered=1, waiting=0)
    taker.tell(str(reference))
    assert taker.says() == "1000 7 (2, 2)"
    with pytest.raises(pw.StaleBlock, match="is no longer offered") as raised:
        frames.accept(reference)
    assert raised.value.anchor == "stale-block"
    taker.tell()
    assert taker.says() == "released"
    assert frames.stats().free == 2


def test_a_reference_is_pickled_and_its_giver_takes_it_back(domain, frames):
    reference = frames.alloc().offer()
    assert str(reference) == f"frames@{frames.version}#{reference.index}.{reference.generation}"
    again = pickle.loads(pickle.dumps(reference))
    assert again == reference and isinstance(again, pw.BlockRef)
    with domain.pool("others", blocks=1, block_bytes=1, device="host") as others, pytest.raises(pw.WrongPool):
        others.accept(reference)
    with frames.accept(again) as block:
        assert block.index == reference.index and block.generation != reference.generation
    with pytest.raises(pw.BadName, match="NAME@VERSION#INDEX.GENERATION"):
        frames.accept("nonsense")
    for what in (frames, frames.alloc()):
        with pytest.raises(TypeError, match="send"):
            pickle.dumps(what)
        if isinstance(what, pw.Block):
            what.release()


def test_blocks_as_arrays_of_all_sorts(frames):
    block = frames.alloc(0)
    whole = np.asarray(block)
    assert (whole.dtype, whole.shape, whole.flags.writeable) == (np.uint8, (1000,), True)
    block.tensor((2, 3), "float32").write(np.arange(6, dtype=np.float32).reshape(2, 3))
    part = np.from_dlpack(block.tensor((2, 3), np.float32))
    assert part.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert memoryview(block.tensor(dtype="float64")).shape == (125,)
    assert block.tobytes()[:24] == part.tobytes() == whole[:24].tobytes()
    assert block.tensor(3).shape == (3,)
    with pytest.raises(pw.BlockTooSmall, match="1000 bytes, but 1004 are needed"):
        block.tensor(251, "int32")
    with pytest.raises(pw.BlockTooSmall):
        block.tensor((1 << 62, 1 << 62))
    block.zero()
    assert not whole.any()
    with pytest.raises(AttributeError, match="host memory"):
        _ = block.__cuda_array_interface__
    del whole, part
    block.release()


# Holds 250.
def test_arrays_keep_their_block(frames):
    block = frames.alloc()
    array = np.asarray(block)
    with pytest.raises(BufferError, match="still used") as raised:
        block.offer()
    assert isinstance(raised.value, pw.StillUsed) and raised.value.anchor == "still-used" and block.held
    array[:] = 3
    block.release()
    assert not block.held and frames.stats().held == 1
    other = frames.alloc()
    assert frames.try_alloc() is None
    assert array.tolist() == [3] * 1000
    frames.close()
    assert array.tolist() == [3] * 1000, "and their pool"
    del array
    other.release()


def test_a_block_is_given_back_once(frames):
    block = frames.alloc()
    assert repr(block) == "<partywall.Block 0 of frames: 1000 bytes, held>"
    block.release()
    assert repr(block) == "<partywall.Block 0 of frames: 1000 bytes, given back>"
    for use in (block.release, block.offer, block.zero, block.tensor, lambda: np.asarray(block), block.release_on):
        with pytest.raises(pw.NotHeld, match="is not held") as raised:
            use()
        assert raised.value.anchor == "block-not-held"
    with pytest.raises(ZeroDivisionError), frames.alloc() as block:
        _ = 1 / 0
    assert not block.held and frames.stats().free == 2


def test_forgotten_objects_come_back_with_a_warning(frames):
    block = frames.alloc()
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Block"):
        del block
        gc.collect()
    eventually(lambda: frames.stats().free == 2)


def test_pool_has_its_options_and_refuses_others(domain, frames):
    assert repr(frames) == "<partywall.Pool frames: 2 blocks of 1000 bytes on host, 2 free>"
    again = domain.pool("frames", blocks=2, block_bytes=1000, device="host")
    assert (again.name, again.version, again.blocks, again.block_bytes, again.place) == (
        "frames", frames.version, 2, 1000, "host",
    )  # fmt: skip
    again.close()
    assert repr(again) == "<partywall.Pool frames: closed>"
    with pytest.raises(pw.Closed):
        again.alloc()
    with domain.pool("frames", device="host") as again:
        assert again.blocks == 2
    for numbers, why in (((3, 1000), "has 2 blocks, not 3"), ((2, 999), "1000 bytes each, not 999")):
        with pytest.raises(ValueError, match=why) as raised:
            domain.pool("frames", blocks=numbers[0], block_bytes=numbers[1], device="host")
        assert isinstance(raised.value, pw.WrongPool) and raised.value.anchor == "wrong-pool"
    for blocks, block_bytes in ((0, 1), (65_537, 1), (1, 0), (1, None), (None, 1), ((1 << 32) - 1, 1), (2, 1 << 62)):
        with pytest.raises(pw.WrongPool, match="cannot create pool") as raised:
            domain.pool("x", blocks=blocks, block_bytes=block_bytes, device="host")
        assert raised.value.anchor == "bad-pool"
    for blocks in (-1, 1 << 32):
        with pytest.raises(ValueError, match="65,536"):
            domain.pool("x", blocks=blocks, block_bytes=1, device="host")
    with pytest.raises(TypeError):
        domain.pool("x", blocks=1.5, block_bytes=1)
    with pytest.raises(pw.NameNotFound):
        domain.pool("x")
    with pytest.raises(pw.TimeoutError):
        domain.pool("x", timeout=0.01)
    refused = pytest.raises(pw.WrongPool, match="is a segment, not a pool")
    with domain.put("weights", np.zeros(1), device="host"), refused:
        domain.pool("weights")


def test_a_zeroed_block_has_no_data_of_earlier_holders(domain, child, socket):
    with domain.pool("frames", blocks=1, block_bytes=1000, zeroed=True, device="host") as frames:
        assert frames.zeroed
        for take in (frames.alloc, frames.try_alloc):
            with take() as block:
                assert block.tobytes() == bytes(1000)
                np.asarray(block)[:] = 7
        block = frames.alloc()
        np.asarray(block)[:] = 7
        block = frames.accept(block.offer())
        assert block.tobytes() == b"\7" * 1000
        block.release()
        scribbler = child(SCRIBBLER, socket)
        assert scribbler.says() == "written"
        scribbler.kill()
        with frames.alloc(WATCHDOG) as block:
            assert block.tobytes() == bytes(1000)
        with pytest.raises(pw.WrongPool, match="are zeroed"):
            domain.pool("frames", zeroed=False)


def test_blocks_are_zeroed_on_request_only(domain, frames):
    assert not frames.zeroed
    with pytest.raises(pw.WrongPool, match="are not zeroed"):
        domain.pool("frames", zeroed=True)
    for expected in (0, 7):
        with domain.pool("one", blocks=1, block_bytes=10, device="host", kept=True) as pool, pool.alloc() as block:
            assert block.tobytes()[0] == expected
            np.asarray(block)[:] = 7


def test_a_waiter_gets_a_block_when_one_comes_back(frames):
    blocks = [frames.alloc(), frames.alloc()]
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match='a block of pool "frames": none became free'):
            frames.alloc(timeout)
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(frames.alloc(math.inf)))
    waiter.start()
    eventually(lambda: frames.stats().waiting == 1)
    blocks.pop().release()
    waiter.join(WATCHDOG)
    for block in blocks + taken:
        block.release()


def test_closing_ends_the_waits(domain, frames):
    blocks = [frames.alloc(), frames.alloc()]
    other, raised = domain.pool("frames"), []

    def wait() -> None:
        try:
            other.alloc()
        except pw.Closed as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: frames.stats().waiting == 1)
    other.close()
    waiter.join(WATCHDOG)
    assert len(raised) == 1
    for block in blocks:
        block.release()


def test_blocks_of_the_dead_come_back(frames, child, socket):
    holder = child(HOLDER, socket)
    offered = holder.says()
    assert frames.stats().free == 0
    holder.kill()
    with frames.alloc(WATCHDOG), frames.alloc(WATCHDOG):
        pass
    with pytest.raises(pw.StaleBlock):
        frames.accept(offered)
