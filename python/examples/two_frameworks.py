"""One array, three libraries, two processes: torch writes, cupy and jax read, and nothing is copied.

    python two_frameworks.py

Needs a GPU, torch, and cupy or jax. Each library prints the address of the array: the addresses differ between the two
processes, but all libraries of one process see the same address.
"""

import os
import subprocess
import sys
from typing import Any

import partywall as pw

NAME = "examples/two_frameworks"
SHAPE = (4096, 1024)


def write(domain: pw.Domain) -> pw.Segment:
    import torch

    with domain.create(NAME, SHAPE, torch.float32) as build:
        array = torch.from_dlpack(build)
        torch.arange(array.numel(), out=array.view(-1))
        print(f"torch wrote {tuple(array.shape)} at {array.data_ptr():#x}")
        # Waits for torch's kernels, so that their work is complete when another process opens the segment.
        return build.commit()


def read(domain: pw.Domain) -> None:
    # Without this, jax allocates most of the GPU's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with domain.open(NAME, timeout=60) as segment:
        for library in (with_cupy, with_jax):
            try:
                library(segment)
            except ImportError as error:
                print(f"skipped: {error}")


def with_cupy(segment: Any) -> None:
    import cupy

    array = cupy.from_dlpack(segment)
    print(f"cupy reads {array.shape} at {array.data.ptr:#x}: its last element is {float(array[-1, -1]):.0f}")


def with_jax(segment: Any) -> None:
    import jax

    array = jax.dlpack.from_dlpack(segment)
    address = array.unsafe_buffer_pointer()
    print(f"jax reads {array.shape} at {address:#x}: its last element is {float(array[-1, -1]):.0f}")


def main() -> None:
    with pw.connect() as domain:
        if sys.argv[1:] == ["read"]:
            read(domain)
            return
        with write(domain):
            subprocess.run([sys.executable, __file__, "read"], check=True)


if __name__ == "__main__":
    main()
