"""Streams of other libraries, as the driver's handles."""

import sys
from typing import Any


def handle(stream: Any, device: int) -> int | None:
    """The handle of a stream: of an integer, of whatever has `__cuda_stream__`, of a stream of torch, cupy or numba.

    Of `None` it is torch's current stream on GPU `device`, else cupy's, if one of them is loaded and has used a GPU;
    else `None`, which is the legacy default stream.
    """
    if stream is None:
        return _current(device)
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise TypeError(f"{stream!r} is no CUDA stream: give an integer, or something with __cuda_stream__")


def _current(device: int) -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(device).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.get_current_stream(device).ptr)
    return None
