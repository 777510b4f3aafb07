"""Code that all round trips of tensors share: one process fills 4 MiB of float32, another sums them and answers with
the sum. The clock stops when the answer arrives. The tensor is released after the answer.

A *fresh* tensor is created and filled each time; the *same* tensor is used each time and never changes.
"""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import peer

ELEMENTS = 1 << 20

LARGEST = 8
"""Elements are 1 to this value, so that a float32 represents every partial sum exactly."""


class Memory(Protocol):
    """The place of tensors, and the library that allocates them."""

    def full(self, value: int) -> Any:
        """Returns a new tensor."""

    def fill(self, loan: Any, value: int) -> None:
        """Fills memory of a loan."""

    def take(self, sample: Any) -> Any:
        """Returns a tensor of a sample's memory."""

    def copy(self, to: Any, tensor: Any) -> None:
        """Copies a tensor; on a GPU, on the current stream."""

    def finish(self) -> None:
        """Waits for the work on the current stream."""

    def total(self, tensor: Any) -> float:
        """Waits for the sum of the elements, and returns it."""


class Host:
    """Host memory of NumPy."""

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy

    def full(self, value: int) -> Any:
        return self._numpy.full(ELEMENTS, value, self._numpy.float32)

    def fill(self, loan: Any, value: int) -> None:
        self._numpy.asarray(loan)[:] = value

    def take(self, sample: Any) -> Any:
        return self._numpy.asarray(sample)

    def copy(self, to: Any, tensor: Any) -> None:
        to[:] = tensor

    def finish(self) -> None:
        pass

    def total(self, tensor: Any) -> float:
        return float(tensor.sum())


class Cuda:
    """Memory of torch on the first GPU. Kernels and memory are ready before anything waits for another process."""

    def __init__(self) -> None:
        import torch
        import torch.multiprocessing  # has pickles name its memory

        self._torch = torch
        self._total = torch.zeros((), device="cuda")
        warm = self.full(1)
        warm.copy_(warm.clone().fill_(2))
        assert self.total(warm) == 2 * ELEMENTS

    def full(self, value: int) -> Any:
        return self._torch.full((ELEMENTS,), float(value), device="cuda")

    def fill(self, loan: Any, value: int) -> None:
        self._torch.from_dlpack(loan).fill_(value)

    def take(self, sample: Any) -> Any:
        return self._torch.from_dlpack(sample)

    def copy(self, to: Any, tensor: Any) -> None:
        to.copy_(tensor)

    def finish(self) -> None:
        self._torch.cuda.current_stream().synchronize()

    def total(self, tensor: Any) -> float:
        self._torch.sum(tensor, 0, out=self._total)
        return float(self._total.item())


def memory(place: str) -> Memory:
    """Returns the memory of `host`, or of the GPU: `time-sliced`, or under `MPS`. Fails if the GPU is shared
    otherwise."""
    if place == "host":
        return Host()
    cuda = Cuda()
    shared = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
    if driver.cuDeviceGetAttribute(ctypes.byref(shared), 133, 0) != 0:
        raise RuntimeError("the driver does not say whether this is a client of an MPS server")
    if bool(shared.value) != (place == "MPS"):
        raise RuntimeError(f"the GPU is not shared as it should be, {place}")
    return cuda


def start(other: Callable[..., None], *arguments: Any) -> Any:
    """Starts the other process. Its first argument is the end of a pipe, on which it reports that it is ready.

    Each of the two processes is killed when the other ends, because it could wait for the other for ever.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=_run, args=(other, theirs, *arguments), daemon=True).start()
    theirs.close()
    return ours


def _run(other: Callable[..., None], *arguments: Any) -> None:
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    try:
        other(*arguments)
    except EOFError:
        pass  # The first process has ended.
    except BaseException:
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGTERM)


def serve(fresh: bool, memory: Memory, there_and_back: Callable[[Any, int], float]) -> None:
    """Takes samples: microseconds until the other process has summed a tensor.

    `there_and_back` receives the tensor, or `None` if it must create it, and the value of its elements.
    """
    same = None if fresh else memory.full(1)
    count = 0

    def sample() -> float:
        nonlocal count
        count += 1
        value = count % LARGEST + 1 if fresh else 1
        start = time.perf_counter()
        total = there_and_back(same, value)
        elapsed = time.perf_counter() - start
        if total != value * ELEMENTS:
            raise ValueError(f"round trip {count}: the sum is {total} instead of {value * ELEMENTS}")
        return elapsed * 1e6

    peer.serve(sample)
