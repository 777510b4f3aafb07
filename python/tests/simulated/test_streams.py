"""Calls that wait for a GPU's streams, and the ends of such waits."""

import os
import sys
import threading
import types
from functools import partial
from pathlib import Path

import pytest

import partywall as pw
from partywall import _streams

from ..conftest import WATCHDOG
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

SIZE = 1 << 16


def in_a_thread(work):
    """Runs work in a thread; the work should wait for a gate."""
    done = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    return thread, done


def test_torch_says_its_current_stream_by_dlpacks_c_interface(monkeypatch):
    library = driver.Library(0x1234)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True), Tensor=library.Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert _streams.handle(None, 0) == 0x1234


@pytest.mark.parametrize("device", ["cuda", "host"])
def test_a_copy_comes_after_what_the_sources_stream_has(domain, device):
    driver.use()
    source, gate = driver.allocate(SIZE), driver.Gate()
    driver.fill(source, 7, SIZE, gate.stream)
    tensor = driver.DeviceBytes(source, [SIZE])

    def put() -> bytes:
        with domain.put("x", tensor, device, stream=gate.stream) as put:
            return put.tobytes(stream=gate.stream)

    thread, done = in_a_thread(put)
    gate.open()
    thread.join(WATCHDOG)
    assert done == [bytes([7]) * SIZE]
    assert tensor.streams == [gate.stream] and tensor.released == 1


def test_a_write_and_a_read_come_after_what_the_stream_has(domain):
    driver.use()
    gate = driver.Gate()
    with domain.create("x", SIZE, "uint8") as build:
        driver.fill(build.tensor.data_ptr, 7, SIZE, gate.stream)
        thread, done = in_a_thread(lambda: (build.tobytes(gate.stream), build.write(bytes(SIZE), gate.stream)))
        gate.open()
        thread.join(WATCHDOG)
        assert done == [(bytes([7]) * SIZE, None)]
        assert build.tobytes() == bytes(SIZE)


@pytest.mark.parametrize("ends", ["commit", "publish"])
def test_named_memory_is_finished(domain, ends):
    driver.use()
    gate = driver.Gate()
    if ends == "commit":
        build = domain.create("x", SIZE, "uint8")
        driver.fill(build.tensor.data_ptr, 7, SIZE, gate.stream)
        thread, done = in_a_thread(build.commit)
    else:
        source = driver.allocate(SIZE)
        driver.fill(source, 7, SIZE, gate.stream)
        tensor = driver.DeviceBytes(source, [SIZE])
        thread, done = in_a_thread(lambda: domain.publish("x", tensor))
    gate.open()
    thread.join(WATCHDOG)
    [segment] = done
    with segment, domain.open("x") as opened:
        assert opened.tobytes() == bytes([7]) * SIZE


def test_published_memory_is_held_until_the_name_is_withdrawn(domain):
    driver.use()
    tensor = driver.DeviceBytes(driver.allocate(SIZE), [SIZE])
    published = domain.publish("x", {"whole": tensor, "again": tensor})
    assert (published.kind, published["whole"].data_ptr) == ("legacy", published["again"].data_ptr)
    view = published["whole"]
    published.close()
    # Another reference still uses it.
    assert tensor.released == 0 and [name.name for name in domain.ls()] == ["x"]
    del view
    assert pw._native.flush(WATCHDOG)
    assert tensor.released == 2 and domain.ls() == []


def test_published_strides_are_those_of_the_tensor(domain):
    driver.use()
    address = driver.allocate(SIZE)
    driver.fill(address, 3, SIZE, 0)
    with domain.publish("x", driver.DeviceBytes(address, [4, 5], [100, 2])) as published:
        assert published.tensor.strides == (100, 2)
        assert published.__cuda_array_interface__["strides"] == (100, 2)
    with pytest.raises(pw.BadSource, match="backwards"):
        domain.publish("x", driver.DeviceBytes(address + 100, [4], [-1]))
    with pytest.raises(pw.BadSource, match="its shape is invalid"):
        domain.publish("x", driver.DeviceBytes(address, [1 << 40, 1 << 40]))
    with pytest.raises(ValueError, match="lies outside|beyond|outside"):
        domain.publish("x", driver.DeviceBytes(address, [SIZE * 64]))


# Holds 252.
def test_tensor_of_a_gpu_without_memory_is_refused(domain):
    driver.use()
    library = driver.Library(1)
    with domain.create("build", SIZE, "uint8", device="cuda") as build:
        for given in (driver.DeviceBytes(0, [SIZE]), library.Tensor(0, [SIZE])):
            for take in (partial(domain.put, "x"), partial(domain.publish, "x"), build.write):
                with pytest.raises(pw.BadSource, match="it has no memory; give"):
                    take(given)
    assert library.given > 0 and pw._native.flush(WATCHDOG)
    assert domain.ls() == []


WAITS = {
    "commit": "build.commit()",
    "close a build": "build.close()",
    "close a segment": "segment.close()",
    "publish": "d.publish('published', driver.DeviceBytes(driver.allocate(64), [64]))",
    "put": "d.put('y', driver.DeviceBytes(driver.allocate(64), [64]), stream=gate.stream)",
    "put into host memory": "d.put('y', driver.DeviceBytes(driver.allocate(64), [64]), 'host', stream=gate.stream)",
    "read": "segment.tobytes(gate.stream)",
    "write": "build.write(bytes(9), gate.stream)",
    "unpin": "pin.close()",
    "signal": "timeline.signal_on(1, gate.stream), timeline.signal(2)",
}


# Holds 30.
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_for_the_gpu(socket, child, wait):
    waiter = child(
        f"""
        import os, signal, threading
        sys.path.insert(0, {os.path.dirname(driver.__file__)!r})
        import driver
        with pw.connect(socket=sys.argv[1]) as d:
            build, segment = d.create("x", 9, "uint8"), d.put("z", b"123456789", "cuda")
            host, timeline = d.put("host", b"123"), d.timeline("t", writer=True)
            pin = host.pin()
            # No work can use memory of which no tensor was requested, so closing does not wait for it.
            tensors = build.tensor, segment.tensor
            del tensors
            driver.use()
            gate = driver.Gate()
            # Signals as a terminal sends them, until one finds the wait.
            over = threading.Event()
            def interrupt():
                while not over.wait(0.05):
                    os.kill(os.getpid(), signal.SIGINT)
            thread = threading.Thread(target=interrupt)
            def handle(_, frame):
                # One interruption: a signal that was sent meanwhile must not end what comes after the wait.
                if over.is_set():
                    return
                # Two of them wait without a frame of the package.
                if {wait.split()[0]!r} in ("unpin", "signal") or frame.f_code.co_filename.find("partywall/_") > 0:
                    over.set()
                    raise KeyboardInterrupt
            signal.signal(signal.SIGINT, handle)
            thread.start()
            try:
                {WAITS[wait]}
                say("not interrupted")
            except KeyboardInterrupt:
                over.set()
                say("interrupted")
            thread.join()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gate.open()
            # The interrupted call can be repeated, and leaves nothing behind.
            build.close() if build.closed else build.commit().close()
            segment.close()
            pin.close()
            host.close()
            timeline.close()
            say(pw._native.flush(60), d.ls())
        """,
        socket,
    )
    assert waiter.says() == "interrupted"
    assert waiter.says() == "True []"
    assert waiter.end() == 0


def test_waits_for_the_gpu_make_no_thread_each(domain):
    def is_waiting(task):
        try:
            return task.joinpath("comm").read_text().strip() == "partywall-wait"
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has ended since it was listed

    def threads():
        return sum(map(is_waiting, Path("/proc/self/task").iterdir()))

    with domain.put("x", b"123", "cuda"):
        domain.open("x").close()
        before = threads()
        for _ in range(20):
            domain.open("x").close()
    assert threads() == before > 0
