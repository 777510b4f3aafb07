"""Launches of CUDA graphs with timelines in them."""

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from partywall import _native
from partywall._errors import BadGraph
from partywall._native import GraphNode


def launch(
    graph: Any,
    values: Mapping[GraphNode, SupportsIndex],
    stream: Any = None,
    *,
    replay: Callable[[], object] | None = None,
    device: Any = None,
) -> None:
    """Launches a CUDA graph once, with a value for each node that is to wait or signal. Returns immediately.

    `graph` is a `torch.cuda.CUDAGraph(keep_graph=True)` that was instantiated, or any object with its `raw_cuda_graph`,
    `raw_cuda_graph_exec` and `replay`; a `replay` of your own takes the place of `graph.replay`. It must launch the
    graph on `stream`, once, and must not signal the timelines itself. `stream` and `device` are as for `Timeline`.

    The rules are those of `wait_on` and `signal_on`. If a value is refused, the graph is not launched; a wait that only
    signals behind it in the graph could end raises `BadGraph`. If `replay` raises, no value is promised.

    Several signals of one timeline have growing values in the order in which they were captured.
    """
    for node in values:
        if not isinstance(node, GraphNode):
            raise TypeError(f"values= maps what capture_wait and capture_signal return to numbers, not {node!r}")
    raw_graph, raw_exec = _handles(graph)
    replay = graph.replay if replay is None else replay
    _native.launch(raw_graph, raw_exec, list(values.items()), replay, stream, device)


def _handles(graph: Any) -> tuple[int, int]:
    try:
        return int(graph.raw_cuda_graph()), int(graph.raw_cuda_graph_exec())
    except (AttributeError, RuntimeError) as error:
        # Torch says with a RuntimeError that it keeps no graph, or that there is no instantiation.
        advice = (
            "use torch.cuda.CUDAGraph(keep_graph=True) and call its instantiate() after the capture; "
            "or wait before graph.replay() and signal after it"
        )
        raise BadGraph("launching a graph: the graph does not show its nodes", advice, "bad-graph") from error
