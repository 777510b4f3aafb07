"""The floor of sending a tensor, written by hand: microseconds until a tensor is copied to memory that two processes
share, the other process has summed it, and the sum is back.

    raw_tensor.py fresh|same PLACE ORDER

A `fresh` tensor is created and filled each time. PLACE and ORDER are as for `ours_topics.py`. The memory is shared
once, in advance: on a GPU by torch.multiprocessing. The rest is only what the work needs: the copy, and words in shared
memory on which the processes sleep by the futex system call. With the order `host` the sender waits for its copy before
it wakes the receiver. With `stream` its stream writes another word, and the receiver's stream waits for that word, by
the driver's memory operations. Both use ctypes. There is one buffer, which is never given back and not protected
against the death of a process.
"""

import ctypes
import mmap
import platform
import sys
import tempfile
from typing import Any

import round_trip

PAGE = 4096
THERE, BACK, WRITTEN, SUM = 0, 64, 128, 192
"""The offsets of words in the first page, each in its own cache line: the number of sent tensors, of answers, and of
copies that a stream has made; and the sum. A tensor in host memory follows the page."""

FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
WAIT, WAKE = 0, 1


class Words:
    """The words as hosts access them."""

    def __init__(self, block: mmap.mmap) -> None:
        self._counts = {word: ctypes.c_uint32.from_buffer(block, word) for word in (THERE, BACK)}
        self.sum = ctypes.c_double.from_buffer(block, SUM)
        self._syscall = ctypes.CDLL(None).syscall

    def wake(self, word: int, count: int) -> None:
        """Sets a word to `count`, and wakes the processes that sleep on it."""
        self._counts[word].value = count
        self._futex(word, WAKE, 1)

    def sleep(self, word: int, count: int) -> None:
        """Sleeps until a word is `count`."""
        while (seen := self._counts[word].value) != count:
            self._futex(word, WAIT, seen)

    def _futex(self, word: int, operation: int, value: int) -> None:
        self._syscall(FUTEX, ctypes.byref(self._counts[word]), operation, ctypes.c_uint32(value), None, None, 0)


class Streams:
    """The word that streams write and wait for. Each call uses the current stream."""

    def __init__(self, block: mmap.mmap) -> None:
        import torch

        self._torch = torch
        self._driver = ctypes.CDLL("libcuda.so.1")
        page = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(block)))
        portable, mapped = 1, 2
        self._call("cuMemHostRegister_v2", page, ctypes.c_size_t(PAGE), portable | mapped)
        address = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), page, 0)
        self._written = ctypes.c_uint64(address.value + WRITTEN)

    def write(self, count: int) -> None:
        """Has the stream write how many copies it has made."""
        self._call("cuStreamWriteValue64_v2", self._current(), self._written, ctypes.c_uint64(count), 0)

    def wait(self, count: int) -> None:
        """Has the stream wait until `count` copies are made."""
        at_least = 0
        self._call("cuStreamWaitValue64_v2", self._current(), self._written, ctypes.c_uint64(count), at_least)

    def _current(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._torch.cuda.current_stream().cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: error {code}")


def main() -> None:
    how, place, order = sys.argv[1:]
    memory = round_trip.memory(place)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(PAGE + 4 * round_trip.ELEMENTS)
        block = mmap.mmap(file.fileno(), 0)
        words, streams = Words(block), Streams(block) if order == "stream" else None
        shared = tensor_in(block) if place == "host" else memory.full(0)
        other = round_trip.start(answer, file.name, place, order)
        if place != "host":
            other.send(shared)
        other.recv()
        count = 0

        def there_and_back(same: Any, value: int) -> float:
            nonlocal count
            count += 1
            memory.copy(shared, memory.full(value) if same is None else same)
            if streams is None:
                memory.finish()
            else:
                streams.write(count)
            words.wake(THERE, count)
            words.sleep(BACK, count)
            return words.sum.value

        round_trip.serve(how == "fresh", memory, there_and_back)


def answer(pipe: Any, path: str, place: str, order: str) -> None:
    """Runs in the other process: answers each tensor with its sum."""
    memory = round_trip.memory(place)
    with open(path, "r+b") as file:
        block = mmap.mmap(file.fileno(), 0)
    words, streams = Words(block), Streams(block) if order == "stream" else None
    shared = tensor_in(block) if place == "host" else pipe.recv()
    pipe.send("ready")
    count = 0
    while True:
        count += 1
        words.sleep(THERE, count)
        if streams is not None:
            streams.wait(count)
        words.sum.value = memory.total(shared)
        words.wake(BACK, count)


def tensor_in(block: mmap.mmap) -> Any:
    """Returns a tensor in host memory."""
    import numpy

    return numpy.frombuffer(block, numpy.float32, round_trip.ELEMENTS, PAGE)


if __name__ == "__main__":
    main()
