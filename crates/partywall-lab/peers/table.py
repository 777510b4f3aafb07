"""Ways to share memory with another process that is already running.

    table.py WAY [SOCKET] [READER]

READER is the GPU on which the other process uses memory of the first GPU, by default the first, too.

Each request names a question and a size. Samples are microseconds:

    share BYTES   from when the data is in memory until the other process has read its first byte: the handle or name is made, sent
                  and opened
    open BYTES    to open and close in the other process what was shared before
    copy BYTES    to copy all of it into memory of the other process's GPU, once it is open

Every byte is checked after the clock has stopped. All ways send through one Unix socket, of `multiprocessing.Pipe`. A
way on a GPU reads the first byte by the driver's `cuMemcpyDtoH`. The clock is the same in all processes.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import peer
import round_trip
import table_cuda
import table_host


class Way(Protocol):
    """One way, in either of the two processes."""

    def make(self, size: int, value: int) -> Any:
        """Memory that can be shared, every byte of which is `value`."""

    def send(self, memory: Any, pipe: Any) -> Any:
        """Makes a handle or name of the memory, sends it, and returns what `drop` frees."""

    def drop(self, sent: Any) -> None:
        """Frees the memory. The other process does not use it any more."""

    def receive(self, pipe: Any) -> Any:
        """Receives a handle or name."""

    def open(self, handle: Any) -> Any:
        """Makes the memory readable."""

    def first(self, opened: Any) -> int:
        """The first byte."""

    def whole(self, opened: Any) -> Any:
        """All bytes, as an array in host memory."""

    def copy(self, opened: Any) -> None:
        """Copies all bytes into memory of this process's own GPU; for ways on a GPU."""

    def copied(self) -> Any:
        """What `copy` has copied last, as an array in host memory."""

    def close(self, opened: Any) -> None:
        """Ends what `open` began."""

    def forget(self, handle: Any) -> None:
        """Ends what `receive` began."""


WAYS: dict[str, Callable[..., Any]] = {
    "partywall": table_host.Partywall,
    "shared_memory": table_host.SharedMemory,
    "memfd": table_host.Memfd,
    "partywall-gpu": table_cuda.Partywall,
    "torch": table_cuda.Torch,
    "cuda.core": table_cuda.CudaCore,
    "cupy": table_cuda.Cupy,
    "legacy": table_cuda.Legacy,
    "fds": table_cuda.FileDescriptors,
}

VALUES = 250
"""Bytes are 1 to this: memory that was never written has none of them."""


def main() -> None:
    name, *arguments = sys.argv[1:]
    pipe = round_trip.start(answer, name, arguments)
    way: Way = WAYS[name](pipe, True, *arguments)
    pipe.recv()
    count, kept = 0, Kept(way, pipe)

    def sample(question: str = "share", size: str = "4096") -> float:
        nonlocal count
        count += 1
        value = count % VALUES + 1
        if question != "share":
            kept.share(int(size), value)
            return asked(pipe, question)
        kept.drop()
        memory = way.make(int(size), value)
        asked(pipe, "share", value)
        start = time.perf_counter()
        sent = way.send(memory, pipe)
        elapsed: float = pipe.recv() - start
        way.drop(sent)
        return elapsed * 1e6

    peer.serve(sample)
    kept.drop()


def asked(pipe: Any, *request: Any) -> float:
    """The other process's answer."""
    pipe.send(request)
    return float(pipe.recv())


class Kept:
    """Memory that stays shared from one sample to the next."""

    def __init__(self, way: Way, pipe: Any) -> None:
        self._way, self._pipe = way, pipe
        self._size, self._sent = 0, None

    def share(self, size: int, value: int) -> None:
        if size == self._size:
            return
        self.drop()
        memory = self._way.make(size, value)
        asked(self._pipe, "keep", value)
        self._size, self._sent = size, self._way.send(memory, self._pipe)
        self._pipe.recv()

    def drop(self) -> None:
        if self._size:
            asked(self._pipe, "forget")
            self._way.drop(self._sent)
        self._size, self._sent = 0, None


def answer(pipe: Any, name: str, arguments: list[str]) -> None:
    """The other process."""
    way: Way = WAYS[name](pipe, False, *arguments)
    pipe.send("ready")
    kept, value = None, 0

    def check(found: Any) -> None:
        if found.min() != value or found.max() != value:
            raise ValueError(f"{name}: the bytes are {found.min()} to {found.max()} instead of {value}")

    while True:
        what, *values = pipe.recv()
        if what == "open":
            start = time.perf_counter()
            way.close(way.open(kept))
            elapsed = time.perf_counter() - start
            opened = way.open(kept)
            check(way.whole(opened))
            way.close(opened)
            pipe.send(elapsed * 1e6)
        elif what == "copy":
            opened = way.open(kept)
            way.copy(opened)  # The first access to another GPU's memory takes longer.
            start = time.perf_counter()
            way.copy(opened)
            elapsed = time.perf_counter() - start
            check(way.copied())
            way.close(opened)
            pipe.send(elapsed * 1e6)
        elif what == "forget":
            way.forget(kept)
            pipe.send(0)
        else:
            [value] = values
            pipe.send(0)
            handle = way.receive(pipe)
            opened = way.open(handle)
            first = way.first(opened)
            now = time.perf_counter()
            assert first == value, f"{name}: the first byte is {first} instead of {value}"
            check(way.whole(opened))
            way.close(opened)
            if what == "keep":
                kept = handle
            else:
                way.forget(handle)
            del opened, handle
            pipe.send(now)


if __name__ == "__main__":
    main()
