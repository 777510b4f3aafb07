# Holds 249.
"""Streams that signal and wait, and give permits back."""

import ctypes
import os
import threading
from types import SimpleNamespace

import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

SIZE = 1 << 12

DRIVER = f"sys.path.insert(0, {os.path.dirname(driver.__file__)!r})\nimport driver\ndriver.use()\n"


def open_gate() -> driver.Gate:
    """Returns a stream without pending work."""
    gate = driver.Gate()
    gate.open()
    return gate


@pytest.fixture
def timeline(domain):
    driver.use()
    with domain.timeline("t") as t:
        yield t


@pytest.fixture
def writer(domain):
    driver.use()
    with domain.timeline("t", writer=True) as t:
        yield t


def test_streams_of_two_processes_come_one_after_the_other(domain, writer, child):
    with domain.create("x", SIZE, "uint8", mutable=True) as build, build.commit() as x:
        reader = child(
            DRIVER
            + """
gate = driver.Gate()
gate.open()
with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x") as x, d.timeline("t") as t:
    assert t.wait_on(1, gate.stream) is None
    say("enqueued", t.value)
    say(set(x.tobytes(gate.stream)))
    t.check()
""",
            domain.socket,
        )
        assert reader.says() == "enqueued 0"
        gate = driver.Gate()
        driver.fill(x.tensor.data_ptr, 7, SIZE, gate.stream)
        writer.signal_on(1, gate.stream)
        assert (writer.value, writer.announced) == (0, 1)
        gate.open()
        assert reader.says() == "{7}"
        assert reader.end() == 0
        assert writer.value == 1


@pytest.mark.parametrize("wake", [False, True])
def test_host_waits_for_what_a_stream_signals(writer, timeline, wake):
    gate = driver.Gate()
    (writer.signal_on_and_wake if wake else writer.signal_on)(3, gate.stream)
    timeline.wait_announced(3, 0)
    with pytest.raises(pw.TimeoutError):
        timeline.wait(3, 0.01)
    gate.open()
    timeline.wait(3, WATCHDOG)
    assert writer.value == 3


def test_stores_of_kernels_are_promised(writer, timeline):
    gate = driver.Gate()
    # Takes the place of a kernel.
    word = ctypes.c_uint64(writer.device_ptr())
    driver.call("cuStreamWriteValue64_v2", ctypes.c_void_p(gate.stream), word, ctypes.c_uint64(3), 0)
    writer.promise_on(3, gate.stream)
    timeline.wait_announced(3, 0)
    assert timeline.value == 0
    gate.open()
    timeline.wait(3, WATCHDOG)


def test_streams_are_accepted_in_every_form(writer, timeline):
    gate = open_gate()
    writer.signal_on(1)
    writer.signal_on(2, 0)
    writer.signal_on(3, gate.stream, device="cuda")
    writer.signal_on(4, SimpleNamespace(__cuda_stream__=lambda: (0, gate.stream)), device="cuda:0")
    writer.signal_on(5, SimpleNamespace(cuda_stream=gate.stream, device_index=0))
    timeline.wait(5, WATCHDOG)
    # A value that is already reached needs no wait.
    timeline.wait_on(5)
    assert timeline.device_ptr() == timeline.device_ptr("cuda:0") != 0
    for call in (timeline.wait_on, writer.signal_on):
        with pytest.raises(TypeError, match="not a CUDA stream"):
            call(6, "stream")
        with pytest.raises(pw.NoDevice):
            call(6, 0, device="cuda:99")
        with pytest.raises(ValueError, match="a stream is a GPU's"):
            call(6, 0, device="host")
        with pytest.raises(ValueError, match="give a stream"):
            call(6, device="GPU-00000000-0000-0000-0000-000000000000")


def test_a_wait_with_a_limit_ends_by_the_value_or_by_the_clock(writer, timeline):
    gate = open_gate()
    late = timeline.wait_on(1, gate.stream, limit=0.05)
    timely = timeline.wait_on(1, gate.stream, limit=WATCHDOG)
    assert isinstance(timely, pw.LimitedWait) and not timely.check()

    def over() -> bool:
        try:
            assert not late.check()
        except pw.TimeoutError as error:
            return 'value 1 of timeline "t"' in str(error)
        return False

    eventually(over)
    writer.signal(1)
    eventually(timely.check)
    assert timeline.wait_on(1, gate.stream, limit=0).check()
    with pytest.raises(ValueError, match="timeout"):
        timeline.wait_on(2, gate.stream, limit=-1)


def test_the_next_signal_waits_for_the_signals_of_the_former_stream(writer):
    first, second = driver.Gate(), open_gate()
    writer.signal_on(1, first.stream)
    thread = threading.Thread(target=lambda: (writer.signal_on(2, second.stream), writer.signal(3)))
    thread.start()
    thread.join(0.05)
    assert (writer.value, writer.announced) == (0, 1)
    first.open()
    thread.join(WATCHDOG)
    assert writer.value == 3


WRITER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("a", writer=True) as a:
    a.signal(1)
    say("ready")
    told()
"""


def test_results_behind_a_dead_writers_wait_are_tainted(domain, writer, timeline, child):
    dead = child(WRITER, domain.socket)
    assert dead.says() == "ready"
    gate = open_gate()
    with domain.timeline("a") as a:
        writer.rests_on(a)
        for value in (1, 2):
            a.wait_on(value, gate.stream)
            writer.signal_on(value, gate.stream)
        timeline.wait(1, WATCHDOG)
        a.check()
        dead.kill()
        # The stream continues, and signals although its input is invalid.
        timeline.wait(2, WATCHDOG)
        with pytest.raises(pw.WriterDied):
            a.check()
        with pytest.raises(pw.Tainted, match="from value 2 on") as raised:
            writer.signal(3)
        assert raised.value.anchor == "tainted"
        with pytest.raises(pw.Tainted):
            timeline.check()


def test_a_lost_context_is_the_writers_end(domain, timeline, child):
    faulty = child(
        DRIVER
        + """
gate = driver.Gate()
gate.open()
with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t", writer=True) as t:
    # Nothing is enqueued, but from now on the context is checked periodically.
    t.wait_on(0, gate.stream)
    try:
        while True:
            t.signal(t.value + 1)
    except pw.ContextLost as error:
        say(error.anchor, isinstance(error, pw.CudaError), error.cuda_error)
    told()
""",
        domain.socket,
        # The process that checks its context.
        SIMCUDA_FAULTS="cuCtxGetLimit:1=719",
    )
    assert faulty.says() == "broken-context True 719"
    # Although the process still lives.
    with pytest.raises(pw.WriterFaulted) as raised:
        timeline.wait(1 << 61, WATCHDOG)
    assert raised.value.anchor == "writer-faulted" and isinstance(raised.value, pw.TimelineEnded)
    assert timeline.ending == "owner_faulted"
    assert "lost_context" in [member.state for member in domain.ps()]


def test_a_permit_goes_back_behind_the_work_of_a_stream(domain):
    driver.use()
    gate, s = driver.Gate(), domain.semaphore("s", 1)
    with s.acquire() as permit:
        with pytest.raises(TypeError):
            permit.release_on("stream")
        assert permit.held
        permit.release_on(gate.stream)
        assert not permit.held
        with pytest.raises(pw.NotHeld):
            permit.release()
    assert s.available == 0
    gate.open()
    s.acquire(WATCHDOG).release()
    s.close()


def test_a_stream_that_is_captured_is_refused(domain, writer, timeline):
    gate, s = open_gate(), domain.semaphore("s", 1)
    stream, graph = ctypes.c_void_p(gate.stream), ctypes.c_void_p()
    driver.call("cuStreamBeginCapture_v2", stream, 0)
    with s.acquire() as permit:
        calls = [writer.signal_on, timeline.wait_on, lambda _, stream: permit.release_on(stream)]
        for call in calls:
            with pytest.raises(pw.Captured) as raised:
                call(1, gate.stream)
            assert raised.value.anchor == "captured"
        # It came back with the error.
        assert permit.held
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    assert s.available == 1
    s.close()


def test_launch_blocking_is_found_before_a_wait(domain, child):
    waiter = child(
        DRIVER
        + """
with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t") as t:
    try:
        t.wait_on(1, 0)
    except pw.LaunchBlocking as error:
        say(error.anchor)
""",
        domain.socket,
        CUDA_LAUNCH_BLOCKING="1",
    )
    assert waiter.says() == "launch-blocking"
    assert waiter.end() == 0
