"""Two processes and two buffers: one process fills a buffer while the other uses the buffer filled before.

    python double_buffer.py                   # on a GPU with torch: streams wait for each other, and no host does
    python double_buffer.py --device host     # in host memory with NumPy: hosts wait. Without a GPU it is the default

Two timelines count the rounds, so that neither process overtakes the other: `filled` reaches n when the n-th contents
are complete, and `used` reaches n when they may be overwritten.
"""

import argparse
import subprocess
import sys
from typing import Any

import numpy as np

import partywall as pw

NAME = "examples/double_buffer"
COUNT = 1 << 20
ROUNDS = 100


def produce(domain: pw.Domain, device: str) -> None:
    with (
        domain.create_many(NAME, {"0": (COUNT, "int64"), "1": (COUNT, "int64")}, device, mutable=True) as build,
        build.commit() as buffers,
        domain.timeline(NAME + "/filled", writer=True) as filled,
        domain.timeline(NAME + "/used") as used,
    ):
        arrays = views(buffers)
        on_host = buffers.place == "host"
        wait, signal = (used.wait, filled.signal) if on_host else (used.wait_on, filled.signal_on)
        consumer = subprocess.Popen([sys.executable, __file__, "consume"])
        for n in range(1, ROUNDS + 1):
            wait(max(n - 2, 0))
            arrays[n % 2][:] = n
            signal(n)
        # If the consumer dies, the wait ends too.
        used.wait(ROUNDS)
        assert consumer.wait() == 0


def consume(domain: pw.Domain) -> None:
    with (
        domain.open(NAME, timeout=60, write=True) as buffers,
        domain.timeline(NAME + "/filled") as filled,
        domain.timeline(NAME + "/used", writer=True) as used,
    ):
        arrays = views(buffers)
        # If the producer fails, the sums are invalid, and waiters of `used` learn it.
        used.rests_on(filled)
        on_host = buffers.place == "host"
        wait, signal = (filled.wait, used.signal) if on_host else (filled.wait_on, used.signal_on)
        # Runs each kernel once and allocates memory before a stream waits: after that, CUDA could block these calls.
        sums = [arrays[0].sum() for _ in range(ROUNDS + 1)]
        for n in range(1, ROUNDS + 1):
            wait(n)
            sums[n] = arrays[n % 2].sum()
            signal(n)
        total = sum(int(each) for each in sums[1:])
        filled.check()
        print(f"the sum of {ROUNDS} contents is {total}, as it should be: {total == COUNT * sum(range(ROUNDS + 1))}")


def views(buffers: pw.Segment) -> list[Any]:
    if buffers.place == "host":
        return [np.asarray(buffers[name]) for name in buffers]
    import torch

    return [torch.from_dlpack(buffers[name]) for name in buffers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["produce", "consume"], default="produce")
    parser.add_argument("--device", choices=["auto", "cuda", "host"], default="auto")
    given = parser.parse_args()
    with pw.connect() as domain:
        produce(domain, given.device) if given.role == "produce" else consume(domain)


if __name__ == "__main__":
    main()
