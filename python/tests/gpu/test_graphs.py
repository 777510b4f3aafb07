# Holds 18.
"""Timelines in CUDA graphs of torch, between two processes.

Every kernel has run once, and all memory is allocated, before a stream waits: behind a wait either could block.
"""

import os

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

COUNT = 1 << 16
"""The number of shared elements."""
TURNS = 1000

OTHER = """
import torch
with (
    pw.connect(socket=sys.argv[1], start=False) as d,
    d.open("x", timeout=60, write=True) as x,
    d.timeline("ping") as ping,
    d.timeline("pong", writer=True) as pong,
):
    shared = torch.from_dlpack(x)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    turn = torch.ones((), dtype=torch.int64, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    def work():
        # The other process has added one for its turn.
        bad.add_(shared.ne(turn).sum())
        shared.add_(1)
        turn.add_(2)
    with torch.cuda.stream(stream):
        work()
        bad.zero_(), turn.fill_(1)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            wait = ping.capture_wait() if {nodes} else None
            work()
            signal = pong.capture_signal() if {nodes} else None
        graph.instantiate()
        say("ready")
        told()
        for v in range(1, {turns} + 1):
            if {nodes}:
                pw.launch(graph, {{wait: v, signal: v}})
            else:
                ping.wait_on(v)
                graph.replay()
                pong.signal_on(v)
        stream.synchronize()
        say(int(bad))
    told()
"""


@pytest.mark.parametrize("nodes", [True, False], ids=["nodes", "around"])
def test_two_processes_replay_graphs(domain, child, nodes):
    with (
        domain.create("x", COUNT, "int64", device="cuda", mutable=True) as build,
        build.commit() as x,
        domain.timeline("ping", writer=True) as ping,
        domain.timeline("pong") as pong,
    ):
        shared = torch.from_dlpack(x)
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        turn = torch.zeros((), dtype=torch.int64, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()

        def work() -> None:
            bad.add_(shared.ne(turn).sum())
            shared.add_(1)
            turn.add_(2)

        other = child(OTHER.format(nodes=nodes, turns=TURNS), domain.socket)
        # Its kernels have run once, and changed the data.
        assert other.says() == "ready"
        with torch.cuda.stream(stream):
            work()
            bad.zero_(), turn.zero_(), shared.zero_()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                wait = pong.capture_wait() if nodes else None
                work()
                signal = ping.capture_signal() if nodes else None
            graph.instantiate()
            other.tell()
            for v in range(1, TURNS + 1):
                if nodes:
                    pw.launch(graph, {wait: v - 1, signal: v})
                else:
                    pong.wait_on(v - 1)
                    graph.replay()
                    ping.signal_on(v)
            pong.wait(TURNS, WATCHDOG)
            stream.synchronize()
            assert int(bad) == 0
        assert other.says() == "0"
        pong.check()
        other.tell()
        assert other.end() == 0


def test_a_graph_of_torch_without_its_nodes_is_refused(domain):
    with domain.timeline("t", writer=True) as t:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        x = torch.zeros(1, device="cuda").add_(1)
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            signal = t.capture_signal()
            x.add_(1)
        with pytest.raises(pw.BadGraph, match="does not show its nodes"):
            pw.launch(graph, {signal: 1}, stream)
        # By itself it signals nothing.
        graph.replay()
        torch.cuda.synchronize()
        assert t.value == 0
