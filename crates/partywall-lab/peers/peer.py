"""Code that all programs here share: each takes samples on request.

A program prepares itself, says `ready`, and then takes as many samples as each line of its standard input asks for. If
it measures several things, the line goes on with the arguments that name one of them. Standard output has samples and
nothing else, one a line. The program ends when its input does.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# Libraries may print to standard output, which must carry samples only.
_replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def serve(sample: Callable[..., float]) -> None:
    """Takes samples, in any unit, until standard input ends."""
    _say("ready")
    for line in sys.stdin:
        number, *what = line.split()
        _say("\n".join(str(sample(*what)) for _ in range(int(number))))


def _say(text: str) -> None:
    print(text, file=_replies, flush=True)


def milliseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long `work` takes, and its result. Releasing the result later is not counted."""
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


TOUCHED = 8
"""How many tensors of a model are summed."""

PAGE = 4096


def touch(model: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sums of some of a model's tensors, by name. Waits until the sums are computed."""
    import torch

    names = list(model)[:: max(1, len(model) // TOUCHED)][:TOUCHED]
    return {name: int(model[name].view(torch.int16).sum(dtype=torch.int64)) for name in names}


def check(model: Mapping[str, Any]) -> None:
    """Checks that the sums are those of the file: each page begins with its number and the tensor's number."""
    for name, found in touch(model).items():
        index, pages = int(name.split(".")[1]), model[name].nbytes // PAGE
        right = pages * (pages - 1) // 2 + index * pages
        if found != right:
            raise ValueError(f"the elements of {name} sum up to {found} instead of {right}")


EXPORTS = 5
"""How many tensors are exported one after the other."""

READS = 4
"""How often the same export is read."""

EXPORTED = 256 << 20
"""Bytes of each exported tensor."""

SETTLE = 3.0
"""Seconds to wait for memory that a background thread frees."""


def stranded(export: Callable[[], None], collect: Callable[[], None]) -> int:
    """Returns how many bytes of the GPU the driver counts as missing after `export` has released all that it
    created."""
    import torch

    def free() -> int:
        collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    before = free()
    for _ in range(EXPORTS):
        export()
    deadline = time.monotonic() + SETTLE
    while (missing := before - free()) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return missing


def read(tensor: Any) -> int:
    """Returns the tensor's sum, which proves that it could be read."""
    import torch

    return int(tensor.sum(dtype=torch.int64))
