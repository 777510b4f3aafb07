"""Four processes decode batches into pinned memory, and a trainer copies each to its GPU while they decode the next.

    python loader.py                   # on a GPU with torch; elsewhere it says what is missing and uses host memory
    python loader.py --device host

The workers decode into blocks of a topic, and a stream of the trainer copies the blocks: no other copy is made. The
workers are started with `spawn`, because a forked child of a process that has initialised CUDA cannot use the driver.
"""

import argparse
import functools
import importlib.util
import math
import multiprocessing
import time
import zlib
from typing import Any

import numpy as np

import partywall as pw

NAME = "examples/loader"
WORKERS = 4
IMAGES = 64
"""Images in a batch."""
IMAGE = (256, 256, 3)
TIMEOUT = 60


@functools.cache
def read(number: int) -> bytes:
    """Stands in for reading a file. Returns an encoded image, in which every byte is `number`."""
    return zlib.compress(bytes([number]) * math.prod(IMAGE))


def decode(file: bytes, image: np.ndarray[Any, Any]) -> None:
    """Stands in for a decoder of images. Writes the decoded image into the memory of the batch."""
    image[:] = np.frombuffer(zlib.decompress(file), "uint8").reshape(IMAGE)


def work(socket: str, worker: int, batches: int, joined: Any) -> None:
    """Runs in a process of its own: decodes every fourth batch."""
    with pw.connect(socket=socket, start=False) as domain, domain.topic(NAME) as topic, topic.publisher() as publisher:
        # A worker that left before the others have joined would leave the topic idle.
        joined.wait(TIMEOUT)
        for batch in range(worker, batches, WORKERS):
            # The end of `with` publishes the batch. While the trainer is too far behind, the next loan waits.
            with publisher.loan((IMAGES, *IMAGE), header=batch.to_bytes(4)) as out:
                for place, image in enumerate(np.asarray(out)):
                    decode(read((batch + place) % 256), image)


def train_on_gpu(subscriber: pw.Subscriber, batches: int) -> dict[int, int]:
    """Sums up each batch on the GPU. Returns the sums by the numbers of the batches."""
    import torch

    copies = torch.cuda.Stream()
    # One buffer is filled while kernels read the other.
    buffers = [torch.empty((IMAGES, *IMAGE), dtype=torch.uint8, device="cuda") for _ in range(2)]
    used = [torch.cuda.Event() for _ in buffers]
    sums = {}
    for number in range(batches):
        turn = number % len(buffers)
        # Keeps the trainer at most two batches ahead of its GPU: a subscriber holds no more samples than that.
        used[turn].synchronize()
        sample = subscriber.recv(TIMEOUT, stream=copies)
        batch = int.from_bytes(sample.header)
        with torch.cuda.stream(copies):
            buffers[turn].copy_(torch.from_dlpack(sample))
        # The block is free for a worker when the copy is done.
        sample.release_on(copies)
        torch.cuda.current_stream().wait_stream(copies)
        sums[batch] = buffers[turn].sum(dtype=torch.int64)
        used[turn].record()
    return {batch: int(total) for batch, total in sums.items()}


def train_on_host(subscriber: pw.Subscriber, batches: int) -> dict[int, int]:
    """As `train_on_gpu`, by the CPU in place."""
    sums = {}
    for _ in range(batches):
        with subscriber.recv(TIMEOUT) as sample:
            sums[int.from_bytes(sample.header)] = int(np.asarray(sample).sum(dtype="int64"))
    return sums


def expected(batch: int) -> int:
    return sum((batch + place) % 256 for place in range(IMAGES)) * math.prod(IMAGE)


def missing() -> str | None:
    """Returns what is missing for a trainer on a GPU."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch finds no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["pinned", "host"], default="pinned", help="where the batches are")
    parser.add_argument("--batches", type=int, default=64)
    given = parser.parse_args()
    if given.device == "pinned" and (what := missing()):
        print(f"{what}: the batches are in host memory, and the CPU uses them")
        given.device = "host"
    options = {"publishers": WORKERS, "loans": 1, "subscribers": 1, "device": given.device}
    spawn = multiprocessing.get_context("spawn")
    with (
        pw.connect() as domain,
        domain.topic(NAME, shape=(IMAGES, *IMAGE), dtype="uint8", **options) as topic,
        # Joins before the workers start, so that it misses no batch. If they all die, `recv` raises `TopicIdle`.
        topic.subscriber(until="idle") as subscriber,
    ):
        joined = spawn.Barrier(WORKERS)
        arguments = [(domain.socket, worker, given.batches, joined) for worker in range(WORKERS)]
        workers = [spawn.Process(target=work, args=each, daemon=True) for each in arguments]
        for worker in workers:
            worker.start()
        start = time.perf_counter()
        sums = (train_on_host if given.device == "host" else train_on_gpu)(subscriber, given.batches)
        took = time.perf_counter() - start
        right = sum(total == expected(batch) for batch, total in sums.items())
        rate = given.batches / took
        print(f"{right} of {given.batches} batches as they were decoded, {rate:.1f} a second ({topic.place})")
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
