"""Segments that grow, and names that are removed."""

import concurrent.futures
import signal
import time

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG


def rows(domain: pw.Domain, count: int = 2) -> pw.Segment:
    """Commits a mutable segment with the rows of a log."""
    with domain.create("log", (count, 4), "int32", device="host", mutable=True, reserve=1 << 20) as build:
        np.from_dlpack(build)[:] = 1
        return build.commit()


def test_a_mutable_segment_grows_where_it_lies(domain):
    with rows(domain) as log, domain.open("log") as reader:
        before, address = np.from_dlpack(log), log.tensor.data_ptr
        assert log.reserved == 1 << 20 and reader.reserved == 1 << 20
        old, nbytes = log.tensor, log.nbytes
        log.grow(1000)
        assert (log.shape, old.shape, before.shape) == ((1000, 4), (2, 4), (2, 4))
        assert log.tensor.data_ptr == address and log.nbytes > nbytes
        np.from_dlpack(log)[2:] = 2
        before[0] = 7
        assert reader.shape == (2, 4) and np.from_dlpack(reader)[0, 0] == 7
        assert reader.refresh() and not reader.refresh()
        assert reader.shape == (1000, 4) and np.from_dlpack(reader).sum() == 4 * 7 + 4 + 998 * 8
        # Of the tensor as it was.
        assert old.tobytes() == np.array([[7] * 4, [1] * 4], "int32").tobytes()
        old.write(np.zeros((2, 4), "int32"))
        assert np.from_dlpack(reader)[:3].sum() == 8


def test_tensors_are_added_with_room_for_more(domain):
    with rows(domain) as log:
        log.grow(tensors={"second": (10, "float64"), "third": ((2, 2), np.int16)}, spare=1 << 16)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in log.items()} == {
            "data": ((2, 4), "int32"),
            "second": ((10,), "float64"),
            "third": ((2, 2), "int16"),
        }
        nbytes = log.nbytes
        # The last tensor grows, and there is room for it.
        log.grow(100)
        assert log["third"].shape == (100, 2) and log.nbytes == nbytes
        with pytest.raises(TypeError, match="3 tensors"):
            log.tensor
        with domain.open("log") as reader:
            assert list(reader) == ["data", "second", "third"]


def test_impossible_growths_are_refused_and_change_nothing(domain):
    with rows(domain) as log, domain.open("log", write=True) as other, domain.put("frozen", b"abc") as frozen:
        with pytest.raises(pw.CannotGrow, match="only the process that committed it|committed"):
            other.grow(10)
        with pytest.raises(pw.CannotGrow, match="not mutable"):
            frozen.grow(10)
        with pytest.raises(pw.CannotGrow, match="reserve"):
            log.grow(1 << 30)
        with pytest.raises(ValueError):
            log.grow(1)
        for wrong in (-1, 1 << 63):
            with pytest.raises(ValueError, match="number of bytes or elements"):
                log.grow(wrong)
            with pytest.raises(ValueError, match="number of bytes or elements"):
                log.grow(spare=wrong)
        with pytest.raises(ValueError):
            log.grow(tensors={"data": (1, "int8")})
        assert frozen.reserved == 0 and not frozen.refresh() and not other.refresh()
        assert log.shape == (2, 4)
    with pytest.raises(pw.Closed):
        log.grow(10)


def test_a_wait_for_a_growth_gets_it_and_its_end(domain):
    log = rows(domain)
    with domain.open("log") as reader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeoutError, match="did not grow"):
            reader.wait_growth(0.01)
        waiting = pool.submit(reader.wait_growth)
        log.grow(3)
        waiting.result(WATCHDOG)
        assert reader.shape == (3, 4)
        waiting = pool.submit(reader.wait_growth)
        log.close()
        with pytest.raises(pw.CannotGrow):
            waiting.result(WATCHDOG)


def test_a_wait_for_a_withdrawal_ends_with_the_name(domain):
    with domain.put("x", b"1", kept=True) as put, domain.open("x") as reader:
        with pytest.raises(TimeoutError, match="was not withdrawn"):
            reader.wait_withdrawn(0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.wait_withdrawn)
            # A newer version does not count as a withdrawal.
            with domain.put("x", b"2", kept=True):
                assert not waiting.done()
            domain.rm("x")
            waiting.result(WATCHDOG)
        put.close()


def test_a_wait_ends_when_its_segment_is_closed(domain):
    with domain.put("x", b"1", kept=True), concurrent.futures.ThreadPoolExecutor(2) as pool:
        reader = domain.open("x")
        waiting = pool.submit(reader.wait_withdrawn)
        while not waiting.running():
            time.sleep(0.01)
        reader.close()
        with pytest.raises(pw.Closed):
            waiting.result(WATCHDOG)
    domain.rm("x")


# Holds 30.
@pytest.mark.parametrize("wait", ["wait_growth", "wait_withdrawn"])
def test_ctrl_c_ends_a_wait_of_a_segment(socket, child, wait):
    with pw.connect(socket=socket) as domain, rows(domain):
        waiter = child(
            f"""
            with pw.connect(socket=sys.argv[1]) as d, d.open("log") as log:
                try:
                    say("waiting")
                    log.{wait}()
                except KeyboardInterrupt:
                    say("interrupted")
            """,
            socket,
        )
        assert waiter.says() == "waiting"
        # Most likely sent during the wait; if it is sent before, the wait does not begin.
        time.sleep(0.2)
        waiter.process.send_signal(signal.SIGINT)
        assert waiter.says() == "interrupted"
        assert waiter.end() == 0
