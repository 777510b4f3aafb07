"""Updates of a model's weights: a trainer makes a new version, and worker processes use it in place of the one before.

    weight_updates.py partywall DEVICE WORKERS TENSORS NBYTES SOCKET   a version of a name
    weight_updates.py tensors DEVICE WORKERS TENSORS NBYTES            torch.multiprocessing, one handle for each tensor
    weight_updates.py bucket DEVICE WORKERS TENSORS NBYTES             torch.multiprocessing, one tensor for all

DEVICE is `cuda` or `host`. Each tensor has NBYTES. All ways do the same: the trainer's own weights go on changing, so
it copies them into a version, and no worker copies that. A worker that has a version drops the one before. It measures

    step       milliseconds from when the weights have changed until all workers have read some of the new version
    peak       bytes that several updates need at most, beyond what is used without a version
    stranded   bytes that are missing when the versions of several updates were dropped
"""

import gc
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
import peer

NAME = "benches/updates"
POLL = 0.002
"""Seconds between two polls of the used memory."""
SETTLE = 1.0
"""Seconds before the free memory is taken as that without a version."""
UPDATES = 3
"""How many updates are observed together."""


class Partywall:
    """A version of a name. On the host it needs no torch."""

    def __init__(self, device: str, socket: str) -> None:
        import partywall as pw

        self._on_host = device == "host"
        self._domain = pw.connect(socket=socket, start=False)

    def publish(self, weights: Sequence[Any]) -> Any:
        """Makes a version, in the trainer, and returns the message that workers need."""
        return self._domain.put(NAME, {str(index): weight for index, weight in enumerate(weights)}).version

    def take(self, message: Any) -> Any:
        """Returns the tensors of a version, in a worker."""
        with self._domain.open(NAME, version=message) as segment:
            if self._on_host:
                return [np.asarray(tensor) for tensor in segment.values()]
            import torch

            return [torch.from_dlpack(tensor) for tensor in segment.values()]

    def drop(self) -> None:
        """Drops the last version, in the trainer."""
        if NAME in self._domain:
            self._domain.rm(NAME)


class Tensors:
    """torch.multiprocessing: each tensor is copied, and sent by a handle of its own."""

    def __init__(self, device: str) -> None:
        self._held: Any = None

    def publish(self, weights: Sequence[Any]) -> Any:
        self._held = [weight.clone() for weight in weights]
        return self._held

    def take(self, message: Any) -> Any:
        return message

    def drop(self) -> None:
        self._held = None


class Bucket(Tensors):
    """torch.multiprocessing: all tensors are copied into one, which is sent by its handle."""

    def publish(self, weights: Sequence[Any]) -> Any:
        import torch

        self._held = torch.cat(list(weights)), [len(weight) for weight in weights]
        return self._held

    def take(self, message: Any) -> Any:
        bucket, sizes = message
        return bucket.split(sizes)


WAYS = {"partywall": Partywall, "tensors": Tensors, "bucket": Bucket}


class Trainer:
    """The process that has the weights, and its workers."""

    def __init__(self, arguments: list[str]) -> None:
        way, self._device, workers, tensors, nbytes, *more = arguments
        self._weights = zeros(way, self._device, int(tensors), int(nbytes) // 4)
        self._way = WAYS[way](self._device, *more)
        self._version = 0
        # torch adds the pickles of its tensors to those of multiprocessing, when it is imported.
        context = get_context("spawn")
        self._workers = []
        for _ in range(int(workers)):
            # Each end is in one process, so that a worker ends with the trainer, however that ends.
            ours, theirs = context.Pipe()
            context.Process(target=work, args=(theirs, arguments), daemon=True).start()
            theirs.close()
            self._workers.append(ours)
        self._await("ready")
        # The first use of a library may allocate memory that it never frees.
        self.step()

    def step(self) -> float:
        """Updates the weights once, and returns the milliseconds that it took."""
        self._version += 1
        for weight in self._weights:
            weight += 1
        synchronize(self._device)
        begin = time.perf_counter()
        message = self._way.publish(self._weights)
        for worker in self._workers:
            worker.send(("use", self._version, message))
        del message
        self._await("used")
        elapsed = time.perf_counter() - begin
        self._order("check")
        collect(self._device)
        return elapsed * 1e3

    def peak(self) -> int:
        """Returns how many bytes updates need at most, beyond what is used without a version."""
        self._drop()
        before = least = self._settled()
        stop = threading.Event()

        def watch() -> None:
            nonlocal least
            while not stop.wait(POLL):
                least = min(least, free(self._device))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(UPDATES):
                self.step()
        finally:
            stop.set()
            watcher.join()
        return before - least

    def stranded(self) -> int:
        """Returns how many bytes are missing after updates, when all versions were dropped."""
        self._drop()
        before = self._settled()
        for _ in range(UPDATES):
            self.step()
        self._drop()
        return before - self._settled(before)

    def _drop(self) -> None:
        """Drops all versions."""
        self._order("drop")
        self._way.drop()

    def _order(self, what: str) -> None:
        for worker in self._workers:
            worker.send((what, self._version, None))
        self._await(what)

    def _await(self, expected: str) -> None:
        for worker in self._workers:
            if (said := worker.recv()) != expected:
                raise ValueError(f"a worker failed: {said}")

    def _settled(self, expected: int | None = None) -> int:
        """Returns the free bytes once threads and the broker have freed what was dropped: after a while, or when as
        many are free as `expected`."""
        most = free(self._device, cached=False)
        deadline = time.monotonic() + (SETTLE if expected is None else peer.SETTLE)
        while time.monotonic() < deadline and (expected is None or most < expected):
            time.sleep(0.05)
            collect(self._device)
            most = max(most, free(self._device, cached=False))
        return most


def work(trainer: Any, arguments: list[str]) -> None:
    """Runs in a worker: uses what the trainer sends, until the trainer ends."""
    way, device, *_ = arguments
    try:
        # Starts CUDA and loads the kernel.
        zeros(way, device, 1, 1).pop().sum()
        taker = WAYS[way](device, *arguments[5:])
        tensors: Sequence[Any] = []
        trainer.send("ready")
        while True:
            what, version, message = trainer.recv()
            if what == "use":
                # The ones before are dropped when these are there: no moment without weights.
                tensors = taker.take(message)
                del message
                check(tensors[:: max(1, len(tensors) // peer.TOUCHED)], version)
                trainer.send("used")
            elif what == "check":
                check(tensors, version)
                trainer.send(what)
            else:
                tensors = []
                collect(device)
                trainer.send(what)
    except EOFError:
        return
    except Exception as error:
        trainer.send(repr(error))
        raise


def check(tensors: Sequence[Any], version: int) -> None:
    """Raises unless each element is the version."""
    sums = [tensor.sum() for tensor in tensors]
    for index, (tensor, total) in enumerate(zip(tensors, sums, strict=True)):
        if int(total) != version * len(tensor):
            raise ValueError(f"tensor {index} of version {version} sums up to {int(total)}")


def zeros(way: str, device: str, tensors: int, elements: int) -> list[Any]:
    if way == "partywall" and device == "host":
        return [np.zeros(elements, "int32") for _ in range(tensors)]
    import torch

    where = "cpu" if device == "host" else device
    return [torch.zeros(elements, dtype=torch.int32, device=where) for _ in range(tensors)]


def synchronize(device: str) -> None:
    if device != "host":
        import torch

        torch.cuda.synchronize()


def collect(device: str) -> None:
    """Has torch take back what other processes have dropped, as frameworks do after an update."""
    gc.collect()
    if device != "host":
        import torch

        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def free(device: str, cached: bool = True) -> int:
    """Returns the free bytes of the GPU; on the host, minus the bytes of shared memory of all processes.

    Memory that torch keeps for later counts as used, unless `cached` is false: then torch gives it back first.
    """
    if device != "host":
        import torch

        if not cached:
            torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
    with open("/proc/meminfo") as file:
        [kibibytes] = [line.split()[1] for line in file if line.startswith("Shmem:")]
    return -int(kibibytes) << 10


def main() -> None:
    trainer = Trainer(sys.argv[1:])
    peer.serve(lambda what="step": {"step": trainer.step, "peak": trainer.peak, "stranded": trainer.stranded}[what]())


if __name__ == "__main__":
    main()
