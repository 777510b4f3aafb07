"""Ranks of MPI relax a grid together, and read each other's boundary rows in place: no halo is copied.

    mpirun -n 4 python mpi_halo.py                   # GPUs with torch; without a GPU host memory and NumPy
    mpirun -n 4 python mpi_halo.py --device host     # `--device` is `cuda`, `host` or `auto`

With `cuda`, rank n uses GPU n of those that it sees, or all ranks use the only one. It needs mpi4py and an MPI; where
none is installed, `pip install mpi4py mpich` brings both. Without mpirun it runs as one rank.

Each rank has a band of rows, and keeps two grids of it: the one that it reads, and the one that it writes. A timeline
of each rank counts its steps. A rank takes a step when its neighbours have done the one before: then their rows are
complete, and they no longer read the rows that it overwrites. MPI itself only starts the ranks and collects the result.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import partywall as pw

try:
    from mpi4py import MPI
except ImportError as error:
    sys.exit(f"this example needs MPI ({error}): install mpi4py and an MPI, for example by `pip install mpi4py mpich`")

ROWS = 64
"""Rows of each rank."""
COLUMNS = 256
STEPS = 200
TIMEOUT = 60


def run(domain: pw.Domain, ranks: Any, job: str, device: str, stack: ExitStack) -> None:
    rank, last = ranks.rank, ranks.size - 1
    on_host = device == "host"
    with domain.create(f"{job}/{rank}", (2, ROWS, COLUMNS), "float64", device, mutable=True) as build:
        mine = array(build.tensor)
        mine[:] = 0
        band = stack.enter_context(build.commit())
    done = stack.enter_context(domain.timeline(f"{job}/{rank}/done", writer=True))
    others = [other for other in (rank - 1, rank + 1) if 0 <= other <= last]
    neighbours = [stack.enter_context(domain.timeline(f"{job}/{other}/done")) for other in others]
    # The upper edge of the whole grid is hot, and the other edges are cold.
    hot, cold = mine[0, 0] + 1, mine[0, 0] + 0
    above = [hot, hot] if rank == 0 else edge(domain, f"{job}/{rank - 1}", -1, device)
    below = [cold, cold] if rank == last else edge(domain, f"{job}/{rank + 1}", 0, device)
    waits: list[Callable[[int], Any]] = [each.wait if on_host else each.wait_on for each in neighbours]
    signal = done.signal if on_host else done.signal_on
    # Runs each kernel before a stream waits: after that, CUDA could block the first launch. Step 1 overwrites the
    # result.
    relax(mine[0], mine[1], hot, cold)
    ranks.Barrier()
    begin = time.perf_counter()
    for step in range(1, STEPS + 1):
        old, new = (step - 1) % 2, step % 2
        for wait in waits:
            wait(step - 1)
        relax(mine[old], mine[new], above[old], below[old])
        signal(step)
    done.wait(STEPS, TIMEOUT)
    took = (time.perf_counter() - begin) / STEPS * 1e6
    for neighbour in neighbours:
        # If the other rank had died, the stream would have gone on with garbage.
        neighbour.check()
    found = ranks.gather(np.asarray(mine[STEPS % 2] if on_host else mine[STEPS % 2].cpu()))
    if rank == 0:
        same = bool((np.concatenate(found) == alone(ROWS * ranks.size)).all())
        print(f"ranks: {ranks.size}, steps: {STEPS}, {took:.0f} us each ({band.place})")
        print(f"the grid is that of one process: {same}")
    # Other ranks read this one's rows until all are here.
    ranks.Barrier()


def edge(domain: pw.Domain, name: str, row: int, device: str) -> list[Any]:
    """Returns a row of both grids of another rank, in place."""
    # On another GPU they are read through the link between the two.
    where: dict[str, Any] = {} if device == "host" else {"device": device, "allow_peer": True}
    with domain.open(name, TIMEOUT, **where) as band:
        grids = array(band.tensor)
    return [grids[0, row], grids[1, row]]


def relax(old: Any, new: Any, above: Any, below: Any) -> None:
    """Sets each element to the mean of its four neighbours, in existing memory. The first and last column stay."""
    inner = slice(1, -1)
    new[1:-1, inner] = old[:-2, inner]
    new[0, inner] = above[inner]
    new[-1, inner] = old[-2, inner]
    new[:-1, inner] += old[1:, inner]
    new[-1, inner] += below[inner]
    new[:, inner] += old[:, :-2]
    new[:, inner] += old[:, 2:]
    new[:, inner] *= 0.25


def alone(rows: int) -> Any:
    """The same by one process, with NumPy."""
    grids = np.zeros((2, rows, COLUMNS))
    for step in range(1, STEPS + 1):
        relax(grids[(step - 1) % 2], grids[step % 2], np.ones(COLUMNS), np.zeros(COLUMNS))
    return grids[STEPS % 2]


def array(tensor: pw.Tensor) -> Any:
    if tensor.device == "host":
        return np.asarray(tensor)
    import torch

    return torch.from_dlpack(tensor)


def chosen(device: str, rank: int) -> str:
    """Returns the device of a rank."""
    if device == "host":
        return device
    try:
        import torch
    except ImportError:
        gpus = 0
    else:
        gpus = torch.cuda.device_count()
    if gpus == 0:
        if device == "auto":
            return "host"
        sys.exit("torch finds no GPU, or is not installed: use --device host")
    torch.cuda.set_device(rank % gpus)
    return f"cuda:{rank % gpus}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "host", "auto"], default="auto")
    given = parser.parse_args()
    ranks = MPI.COMM_WORLD
    if ranks.Split_type(MPI.COMM_TYPE_SHARED).size < ranks.size:
        sys.exit("memory is shared within one machine: between machines, ranks have to send their rows by MPI")
    # If there is no broker, the first rank that connects starts one.
    with pw.connect() as domain, ExitStack() as stack:
        # Two jobs at a time have names of their own.
        job = ranks.bcast(f"examples/halo/{domain.token}")
        run(domain, ranks, job, chosen(given.device, ranks.rank), stack)


if __name__ == "__main__":
    main()
