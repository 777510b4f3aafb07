"""Streams of other libraries, as the driver's handles."""

import sys
from typing import Any

from partywall import _native


def handle(stream: Any, device: int) -> int | None:
    """Returns the driver's handle of a stream.

    A stream is an integer, an object with `__cuda_stream__`, or a stream of torch, cupy or numba. `None` means torch's
    current stream on GPU `device` if torch has used a GPU, else cupy's if cupy is loaded, else the legacy default
    stream, for which this returns `None`.
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
    raise TypeError(f"{stream!r} is not a CUDA stream: give an integer, or an object with __cuda_stream__")


def place(stream: Any, device: Any) -> tuple[str, int | None]:
    """Returns Partywall's name of a stream's GPU, and the stream's handle.

    If neither argument names the GPU, it is the current one of torch or cupy, or the first one.
    """
    name = f"cuda:{_ordinal(stream)}" if device is None else str(device)
    if stream is not None:
        return name, handle(stream, 0)
    if not name.startswith("cuda"):
        raise ValueError(f"the stream of {name} is missing: give a stream, or name the GPU as cuda:N")
    return name, _current(int(name.removeprefix("cuda").removeprefix(":") or 0))


def _ordinal(stream: Any) -> int:
    # Streams of torch and cupy know their GPU.
    for attribute in ("device_index", "device_id"):
        ordinal = getattr(stream, attribute, None)
        if isinstance(ordinal, int) and ordinal >= 0:
            return ordinal
    torch = getattr(sys.modules.get("torch"), "cuda", None)
    if torch is not None and getattr(torch, "is_initialized", bool)():
        return int(torch.current_device())
    runtime = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "runtime", None)
    current = getattr(runtime, "getDevice", None)
    return 0 if current is None else int(current())


def _current(device: int) -> int | None:
    # A library that another thread is still importing has no work on a stream yet.
    torch = sys.modules.get("torch")
    of_torch = getattr(torch, "cuda", None)
    if of_torch is not None and getattr(of_torch, "is_initialized", bool)():
        # `current_stream` creates an object, which alone takes twice as long as this whole function (measured).
        known = _native.work_stream(getattr(torch, "Tensor", None), device)
        return int(of_torch.current_stream(device).cuda_stream) if known is None else known
    cupy = getattr(sys.modules.get("cupy"), "cuda", None)
    current = getattr(cupy, "get_current_stream", None)
    return None if current is None else int(current(device).ptr)
