# Holds 176.
"""Timelines in CUDA graphs."""

import ctypes
import os

import pytest

import partywall as pw

from ..conftest import WATCHDOG
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

OTHER = (
    f"sys.path.insert(0, {os.path.dirname(driver.__file__)!r})\nimport driver\ndriver.use()\n"
    """
gate = driver.Gate()
gate.open()
with (
    pw.connect(socket=sys.argv[1], start=False) as d,
    d.timeline("ping") as ping,
    d.timeline("pong", writer=True) as pong,
):
    with driver.Graph(gate.stream) as graph:
        wait, signal = ping.capture_wait(gate.stream), pong.capture_signal(gate.stream)
    say("ready")
    told()
    for v in range(1, 1001):
        pw.launch(graph, {wait: v, signal: v}, gate.stream)
    say("launched")
    told()
"""
)


@pytest.fixture
def stream(domain):
    driver.use()
    gate = driver.Gate()
    gate.open()
    return gate.stream


# Holds 18.
def test_two_processes_replay_graphs(domain, stream, child):
    with domain.timeline("ping", writer=True) as ping, domain.timeline("pong") as pong:
        with driver.Graph(stream) as graph:
            wait, signal = pong.capture_wait(stream), ping.capture_signal(stream)
        assert "signal of ping" in repr(signal) and not wait.is_signal
        other = child(OTHER, domain.socket)
        assert other.says() == "ready"
        other.tell()
        for v in range(1, 1001):
            pw.launch(graph, {wait: v - 1, signal: v}, stream)
        assert ping.announced == 1000
        assert other.says() == "launched"
        pong.wait(1000, WATCHDOG)
        pong.check()
        other.tell()
        assert other.end() == 0


def test_waits_of_a_graph_end_with_a_killed_writer(domain, stream, child):
    with domain.timeline("pong") as pong, domain.timeline("passed", writer=True) as passed:
        with driver.Graph(stream) as graph:
            wait, signal = pong.capture_wait(stream), passed.capture_signal(stream)
        other = child(OTHER, domain.socket)
        assert other.says() == "ready"
        pw.launch(graph, {wait: 1, signal: 1}, stream)
        other.kill()
        passed.wait(1, WATCHDOG)
        with pytest.raises(pw.WriterDied):
            pong.check()
        with pytest.raises(pw.WriterDied):
            pw.launch(graph, {wait: 2, signal: 2}, stream)
        assert passed.announced == 1


# Holds 177.
def test_a_launch_that_waits_for_its_own_later_signal_is_refused(domain, stream):
    with domain.timeline("t", writer=True) as t:
        with driver.Graph(stream) as graph:
            wait, signal = t.capture_wait(stream), t.capture_signal(stream)
        with pytest.raises(pw.BadGraph, match='value 1 of timeline "t" would never end'):
            pw.launch(graph, {wait: 1, signal: 1}, stream)
        assert t.announced == 0
        t.signal(1)
        pw.launch(graph, {wait: 1, signal: 2}, stream)
        t.wait(2, WATCHDOG)


def test_a_refused_launch_launches_nothing(domain, stream):
    with domain.timeline("t", writer=True) as t:
        with pytest.raises(pw.BadGraph) as raised:
            t.capture_signal(stream)
        assert raised.value.anchor == "bad-graph"
        with driver.Graph(stream) as graph:
            signal = t.capture_signal(stream)
            with pytest.raises(pw.Captured):
                pw.launch(graph, {signal: 1}, stream)
        t.signal(3)
        launched = []
        for value in (2, 3):
            with pytest.raises(pw.BadValue):
                pw.launch(graph, {signal: value}, stream, replay=lambda: launched.append(1))
        with pytest.raises(ValueError):
            pw.launch(graph, {signal: -1}, stream)
        with pytest.raises(pw.BadGraph, match="does not show its nodes"):
            pw.launch(object(), {signal: 4}, stream)
        for wrong in (t, 1):
            with pytest.raises(TypeError, match="values= maps what capture_wait and capture_signal return"):
                pw.launch(graph, {wrong: 4}, stream)
        assert not launched
        # An exception of the replay leaves as it is, and nothing is promised.
        with pytest.raises(ZeroDivisionError):
            pw.launch(graph, {signal: 4}, stream, replay=lambda: 1 // 0)
        assert t.announced == 3
        pw.launch(graph, {signal: 4}, stream)
        t.wait(4, WATCHDOG)
        # A launch without values repeats none, also after the end.
        t.signal(5)
        graph.replay()
        driver.wait(stream)
        assert t.value == 5
    with pytest.raises(pw.Closed):
        pw.launch(graph, {signal: 6}, stream)
    graph.replay()
    driver.wait(stream)
