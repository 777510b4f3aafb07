"""What the programs here have in common: each takes samples when it is asked to.

A program prepares itself, says `ready`, and then takes as many samples as each line of its standard input asks for.
Standard output has samples and nothing else, one a line. The program ends when its input does.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# What libraries print is no sample.
_replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def serve(sample: Callable[[], float]) -> None:
    """Takes samples, in whatever unit, until nobody asks for more."""
    _say("ready")
    for line in sys.stdin:
        _say("\n".join(str(sample()) for _ in range(int(line))))


def _say(text: str) -> None:
    print(text, file=_replies, flush=True)


def milliseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long `work` takes, and what it returns: whatever becomes of that later is not counted."""
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1e3, result


TOUCHED = 8
"""How many tensors of a model are summed up."""

PAGE = 4096


def touch(model: Mapping[str, Any]) -> dict[str, int]:
    """Sums of some of a model's tensors, spread over it, by their names. They are there when this returns."""
    import torch

    names = list(model)[:: max(1, len(model) // TOUCHED)][:TOUCHED]
    return {name: int(model[name].view(torch.int16).sum(dtype=torch.int64)) for name in names}


def check(model: Mapping[str, Any]) -> None:
    """That the sums are those of the file: each page begins with its number and with the tensor's, which is in its name."""
    for name, found in touch(model).items():
        index, pages = int(name.split(".")[1]), model[name].nbytes // PAGE
        right = pages * (pages - 1) // 2 + index * pages
        if found != right:
            raise ValueError(f"the elements of {name} sum up to {found} instead of {right}")


EXPORTS = 5
"""How many tensors are exported, one after the other."""

READS = 4
"""How often the same export is read."""

EXPORTED = 256 << 20
"""Bytes of each."""

SETTLE = 3.0
"""Seconds that memory has to come back, for whatever frees it behind our back."""


def stranded(export: Callable[[], None], collect: Callable[[], None]) -> int:
    """Bytes of the GPU that are missing when `export` has let go of all that it made, as the driver counts them."""
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
    """Its sum, as proof that it could be read."""
    import torch

    return int(tensor.sum(dtype=torch.int64))
