# Holds 272.
"""Segments that advance to another version in place, on the simulated driver: `PARTYWALL_LIBCUDA` names it."""

import ctypes
import os
import threading

import numpy as np
import pytest

import partywall as pw

from . import driver

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")


def put(domain, number):
    """Commits the next version of `w`, which consists of this number."""
    tensors = {"x": np.full(1000, number, "float32"), "y": np.full((2, 3), number, "int64")}
    return domain.put("w", tensors, device="cuda")


def shown(segment):
    """Returns the number of which the segment consists."""
    numbers = {*np.frombuffer(segment["x"].tobytes(), "float32"), *np.frombuffer(segment["y"].tobytes(), "int64")}
    assert len(numbers) == 1
    return numbers.pop()


def test_segment_shows_the_next_version_at_its_addresses(domain):
    with put(domain, 1), domain.open("w") as segment:
        tensor = segment["x"]
        addresses = {name: segment[name].data_ptr for name in segment}
        assert segment.advance() == segment.advance(timeout=0.01) == 1
        with put(domain, 2):
            assert shown(segment) == 1
            assert segment.advance() == segment.version == 2
            assert shown(segment) == 2 and tensor.tobytes() == segment["x"].tobytes()
            assert {name: segment[name].data_ptr for name in segment} == addresses
            assert pw._native.read_only_at(tensor.data_ptr) == ("x", "w@2")
            assert "w@2" in repr(segment) and tensor.readonly
            assert segment.advance(version=1) == 1 and shown(segment) == 1
            assert segment.advance() == 2 and shown(segment) == 2
        # The name has ended with its committer's segment.
        assert segment.advance() == 2 and shown(segment) == 2
        assert domain.holders("w") == {1: [os.getpid()], 2: [os.getpid()]}
    assert not domain.exists("w")


def test_tensors_keep_the_segment_through_an_advance(domain):
    with put(domain, 1):
        segment = domain.open("w")
        tensor = segment["x"]
        segment.close()
        with pytest.raises(pw.Closed):
            segment.advance()
        with domain.open("w") as segment, put(domain, 2):
            later = segment["x"]
            segment.advance()
        for kept, number in (tensor, 1), (later, 2):
            assert np.frombuffer(kept.tobytes(), "float32").tolist() == [number] * 1000
        assert domain.holders("w")[2] == [os.getpid()]


def test_work_of_other_streams_is_not_awaited_on_request(domain):
    with put(domain, 1), domain.open("w") as segment, put(domain, 2):
        driver.use()
        gate = driver.Gate()
        # Without the streams it would wait for the gate.
        assert segment.advance(2, streams=[2]) == 2 and shown(segment) == 2
        assert not driver.is_done(gate.stream)
        waits = threading.Thread(target=segment.advance, kwargs={"version": 1})
        waits.start()
        gate.open()
        waits.join()
        assert shown(segment) == 1


def test_tensors_are_exported_while_an_advance_waits(child, socket):
    worker = child(
        f"sys.path.insert(0, {os.path.dirname(driver.__file__)!r})\n"
        """
import threading, time
import driver
driver.use()
with pw.connect(socket=sys.argv[1]) as d, d.put("w", np.ones(9), device="cuda"), d.open("w") as segment:
    tensor = segment["data"]
    d.put("w", np.zeros(9), device="cuda", kept=True).close()
    gate = driver.Gate()
    advance = threading.Thread(target=segment.advance)
    advance.start()
    while not d.holders("w").get(2):
        time.sleep(0)
    # It opens the version, and then waits for the gate, which this thread opens.
    for _ in range(100):
        time.sleep(0.001)
        tensor.__dlpack__(), tensor.__cuda_array_interface__
    gate.open()
    advance.join()
    say(segment.version)
""",
        socket,
    )
    assert worker.says() == "2"
    assert worker.end() == 0


# Holds 273.
def test_advance_is_refused_during_a_capture(domain):
    with put(domain, 1), domain.open("w") as segment, put(domain, 2):
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        driver.use()
        driver.call("cuStreamCreate", ctypes.byref(stream), 1)
        driver.call("cuStreamBeginCapture_v2", stream, 0)
        for options in {}, {"streams": []}:
            with pytest.raises(pw.Captured, match='advancing "w"'):
                segment.advance(stream.value, **options)
        with pytest.raises(pw.Captured):
            segment.advance(2, streams=[stream.value])
        assert segment.version == 1
        # The capture was not invalidated.
        driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        driver.call("cuGraphDestroy", graph)
        assert shown(segment) == 1
        assert segment.advance(stream.value) == 2 and shown(segment) == 2
        driver.call("cuStreamDestroy_v2", stream)


# Holds 273.
def test_another_layout_is_refused_and_named(domain):
    with put(domain, 1), domain.open("w") as segment, domain.put("w", np.zeros(3), device="cuda"):
        with pytest.raises(pw.LayoutChanged, match='version 2 of "w" .* than version 1: x: missing') as refused:
            segment.advance()
        assert refused.value.anchor == "layout-changed" and isinstance(refused.value, ValueError)
        assert segment.version == 1 and shown(segment) == 1
        assert domain.holders("w") == {1: [os.getpid()], 2: [os.getpid()]}


def test_threads_that_wait_do_not_prevent_an_advance(domain):
    with put(domain, 1), domain.open("w") as segment, put(domain, 2) as second:
        # Before and after the advance: until the name ends.
        waits = threading.Thread(target=segment.wait_withdrawn)
        waits.start()
        for round in range(3):
            assert segment.advance(version=1 + round % 2) == 1 + round % 2
        assert segment.advance() == 2
        second.close()
        waits.join()


def test_memory_that_is_lost_says_so(child, socket):
    worker = child(
        """
        with pw.connect(socket=sys.argv[1]) as d:
            with d.put("w", np.ones(9), device="cuda"), d.open("w") as segment, d.put("w", np.zeros(9), device="cuda"):
                for _ in range(2):
                    try:
                        segment.advance()
                    except pw.CudaError as error:
                        say(error.cuda_error, error.anchor)
                try:
                    segment["data"]
                except pw.CudaError as error:
                    say(error.anchor)
                with d.open("w") as again:
                    say(again.version)
        """,
        socket,
        # Two of the commits, two of the opens, then that of the new memory and that of the former.
        SIMCUDA_FAULTS="cuMemMap:5=2,cuMemMap:6=2",
    )
    assert [worker.says() for _ in range(4)] == ["2 not-mapped", "2 not-mapped", "not-mapped", "2"]
    assert worker.end() == 0


# Holds 387.
def test_domain_suspends_what_has_tensors_and_brings_it_back(domain):
    with put(domain, 1):
        segment = domain.open("w")
        pinned = domain.put("p", np.arange(4, dtype="int32"), device="pinned")
        tensor, array = segment["y"], np.asarray(pinned)
        addresses = tensor.data_ptr, array.__array_interface__["data"]
        # Only a tensor is left of it.
        segment.close()
        domain.suspend()
        domain.suspend()
        with pytest.raises(pw.Suspended, match="w@1 is suspended"):
            tensor.tobytes()
        with pytest.raises(pw.Suspended, match="p@1 is suspended"):
            pinned.tobytes()
        assert domain.holders("w") == {1: [os.getpid()]}
        domain.resume()
        domain.resume()
        assert (tensor.data_ptr, array.__array_interface__["data"]) == addresses
        assert set(np.frombuffer(tensor.tobytes(), "int64")) == {1} and array.tolist() == [0, 1, 2, 3]
        pinned.close()


def test_other_shared_memory_refuses_a_suspension_and_nothing_is_suspended(domain):
    with put(domain, 1) as segment, domain.pool("pool", blocks=2, block_bytes=64, device="cuda") as pool:
        with pytest.raises(pw.StillShared, match="1 allocation"):
            domain.suspend()
        with pw.connect(socket=domain.socket) as other, other.open("w"), pytest.raises(pw.StillShared):
            domain.suspend()
        assert shown(segment) == 1
        pool.close()
        domain.suspend()
        domain.resume()
        assert shown(segment) == 1
