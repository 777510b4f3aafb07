"""Batches for a trainer: how many a second worker processes decode and the GPU receives.

    data_loader.py topic DECODER WORKERS SOCKET    through a topic of Partywall in pinned memory
    data_loader.py loader DECODER WORKERS SOCKET   through partywall.torch.DataLoader
    data_loader.py torch DECODER WORKERS           through torch's DataLoader with pin_memory=True

A batch has 256 MiB. DECODER is `memcpy` or `jpeg`, which needs Pillow, or `small` for batches of 1 MiB. The trainer
copies each batch into one of two buffers on the GPU, by a stream of its own. With four workers, eight batches at most
are decoded or in work before it. Without a GPU the loaders still run, and the buffers are in host memory.
"""

import functools
import io
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import peer

NAME = "benches/loader"
DEPTH = 4
BUFFERED = 8


class Memcpy:
    """Decodes nothing: the images are ready, and are copied into the batch."""

    images, shape, batches = 256, (1 << 20,), 24

    def __init__(self) -> None:
        self._image = np.arange(self.shape[0]).astype("uint8")

    def decode(self) -> np.ndarray[Any, Any]:
        return self._image


class Small(Memcpy):
    """As `Memcpy`, in batches of 1 MiB."""

    images, shape, batches = 16, (1 << 16,), 400


class Jpeg:
    """Decodes photographs in colour, by Pillow."""

    images, shape, batches = 341, (512, 512, 3), 8

    def __init__(self) -> None:
        from PIL import Image

        rows, columns = np.mgrid[: self.shape[0], : self.shape[1]]
        image = np.stack([rows // 2, columns // 2, (rows * columns) // 1024], axis=-1).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(image).save(file, "jpeg", quality=90)
        self._file = file.getvalue()

    def decode(self) -> np.ndarray[Any, Any]:
        from PIL import Image

        return np.array(Image.open(io.BytesIO(self._file)))


@functools.cache
def decoder_named(name: str) -> Memcpy | Jpeg:
    decoders: dict[str, type[Memcpy] | type[Jpeg]] = {"memcpy": Memcpy, "small": Small, "jpeg": Jpeg}
    return decoders[name]()


def main() -> None:
    system, name, workers, *arguments = sys.argv[1:]
    decoder = decoder_named(name)
    with ExitStack() as stack:
        systems: dict[str, Callable[..., Callable[[Any], None]]] = {
            "topic": of_topic,
            "loader": of_loader,
            "torch": of_torch,
        }
        serve(decoder, systems[system](stack, name, int(workers), *arguments))


def serve(decoder: Memcpy | Jpeg, copy_next: Callable[[Any], None]) -> None:
    """Measures batches a second. `copy_next` copies the next batch into a buffer, on the current stream."""
    import torch

    on_gpu = torch.cuda.is_available()
    stream = torch.cuda.Stream() if on_gpu else None
    shape = decoder.images, *decoder.shape
    buffers = [torch.empty(shape, dtype=torch.uint8, device="cuda" if on_gpu else "cpu") for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers] if on_gpu else []
    total = decoder.images * int(decoder.decode().sum(dtype="int64"))

    def take(batches: int) -> None:
        with torch.cuda.stream(stream) if on_gpu else nullcontext():
            for number in range(batches):
                turn = number % len(buffers)
                if copied:
                    copied[turn].synchronize()
                copy_next(buffers[turn])
                if copied:
                    copied[turn].record()
        if stream is not None:
            stream.synchronize()

    def sample() -> float:
        # Those that were decoded while nobody asked for them.
        take(BUFFERED)
        start = time.perf_counter()
        take(decoder.batches)
        elapsed = time.perf_counter() - start
        for buffer in buffers:
            if (found := int(buffer.sum(dtype=torch.int64))) != total:
                raise ValueError(f"the bytes of a batch sum up to {found} instead of {total}")
        return decoder.batches / elapsed

    peer.serve(sample)


def of_topic(stack: ExitStack, name: str, workers: int, socket: str) -> Callable[[Any], None]:
    import torch

    import partywall as pw

    decoder = decoder_named(name)
    domain = stack.enter_context(pw.connect(socket=socket, start=False))
    topic = stack.enter_context(
        domain.topic(
            f"{NAME}/{name}",
            shape=(decoder.images, *decoder.shape),
            dtype="uint8",
            depth=DEPTH,
            publishers=workers,
            loans=1,
            subscribers=1,
            device="pinned",
        )
    )
    subscriber = stack.enter_context(topic.subscriber(order="stream", until="idle"))
    for _ in range(workers):
        worker = multiprocessing.get_context("spawn").Process(target=topic_worker, args=(socket, name), daemon=True)
        worker.start()
        stack.callback(worker.terminate)

    def copy_next(buffer: Any) -> None:
        batch = subscriber.recv()
        buffer.copy_(torch.from_dlpack(batch))
        batch.release_on()

    return copy_next


def topic_worker(socket: str, name: str) -> None:
    import partywall as pw

    decoder = decoder_named(name)
    shape = decoder.images, *decoder.shape
    with pw.connect(socket=socket, start=False) as domain, domain.topic(f"{NAME}/{name}") as topic:
        with topic.publisher() as publisher:
            while True:
                with publisher.loan(shape) as out:
                    for image in np.asarray(out):
                        image[:] = decoder.decode()


class Images:
    """A dataset without end, as torch's workers use it. They collate images straight into shared memory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, _: int) -> Any:
        import torch

        return torch.from_numpy(decoder_named(self._name).decode())


def of_torch(_: ExitStack, name: str, workers: int) -> Callable[[Any], None]:
    from torch.utils.data import DataLoader

    return of_any(DataLoader, name, workers)


def of_loader(stack: ExitStack, name: str, workers: int, socket: str) -> Callable[[Any], None]:
    import partywall as pw
    import partywall.torch

    domain = stack.enter_context(pw.connect(socket=socket, start=False))
    return of_any(functools.partial(partywall.torch.DataLoader, domain=domain), name, workers)


def of_any(kind: Callable[..., Any], name: str, workers: int) -> Callable[[Any], None]:
    loader = kind(
        Images(name),
        batch_size=decoder_named(name).images,
        num_workers=workers,
        prefetch_factor=BUFFERED // workers,
        pin_memory=True,
        multiprocessing_context="spawn",
    )
    batches = iter(loader)

    def copy_next(buffer: Any) -> None:
        buffer.copy_(next(batches), non_blocking=True)

    return copy_next


if __name__ == "__main__":
    main()
