"""Allocations of torch on the GPU: by its own caching allocator, or in a pool of Partywall.

    torch_allocation.py torch
    torch_allocation.py pool SOCKET

A request names what to measure:

    cached   microseconds to create and drop a tensor of 1 MiB whose memory torch has cached: the mean of a thousand
    fresh    milliseconds to create 100 tensors of 8 to 64 MiB, none of whose memory torch has
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import partywall as pw
import peer
import torch

MIB = 1 << 20
CACHED = 1000
FRESH = 100
SIZE = 8 << 30
"""Bytes of the pool: more than the fresh tensors need."""


def main() -> None:
    way, *arguments = sys.argv[1:]
    peer.read(torch.ones(1, dtype=torch.uint8, device="cuda"))
    if way == "torch":
        serve(contextlib.nullcontext)
        return
    with pw.connect(socket=arguments[0], start=False) as domain:
        serve(lambda: domain.torch_pool("bench", size=SIZE))


def serve(pool: Callable[[], Any]) -> None:
    lasting = pool()

    def cached() -> float:
        with lasting:
            create(MIB)
            start = time.perf_counter()
            for _ in range(CACHED):
                create(MIB)
            return (time.perf_counter() - start) * 1e6 / CACHED

    def fresh() -> float:
        torch.cuda.synchronize()
        with pool():
            elapsed, tensors = peer.milliseconds(lambda: [create((8 + 8 * (i % 8)) * MIB) for i in range(FRESH)])
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
        return elapsed

    samples = {"cached": cached, "fresh": fresh}
    peer.serve(lambda what: samples[what]())


def create(nbytes: int) -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    main()
