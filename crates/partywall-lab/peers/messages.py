"""Messages between processes: microseconds for one there and the same bytes back.

    messages.py topic BYTES SOCKET   by Partywall's topics, copied into a block and read in place
    messages.py queue BYTES          by SimpleQueue of multiprocessing: pickled, and copied through a pipe
    messages.py pipe BYTES           by a pipe of multiprocessing, as bytes

The other process sends back what it has received. Every byte is checked after the clock has stopped.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import peer
import round_trip

NAMES = ("messages/there", "messages/back")

Send = Callable[[Any], Any]
Receive = Callable[[], Any]
"""A context manager of the message as an array."""


def main() -> None:
    way, size, *arguments = sys.argv[1:]
    queues = [multiprocessing.get_context("spawn").SimpleQueue() for _ in NAMES] if way == "queue" else arguments
    pipe = round_trip.start(answer, way, int(size), queues)
    send, receive = ends(pipe, way, int(size), queues, 0)
    pipe.recv()
    count = 0

    def sample() -> float:
        nonlocal count
        count += 1
        value = count % 250 + 1
        message = np.full(int(size), value, np.uint8)
        start = time.perf_counter()
        send(message)
        with receive() as back:
            elapsed = time.perf_counter() - start
            if back.size != message.size or back.min() != value or back.max() != value:
                raise ValueError(f"the message that came back has {back.size} bytes from {back.min()} to {back.max()}")
        return elapsed * 1e6

    peer.serve(sample)


def answer(pipe: Any, way: str, size: int, arguments: list[Any]) -> None:
    """The other process."""
    send, receive = ends(pipe, way, size, arguments, 1)
    pipe.send("ready")
    while True:
        with receive() as message:
            send(message)


def ends(pipe: Any, way: str, size: int, arguments: list[Any], side: int) -> tuple[Send, Receive]:
    """How a side sends and receives."""
    if way == "topic":
        return topics(size, arguments[0], side)
    if way == "queue":
        there, back = arguments[side], arguments[1 - side]
        return there.put, lambda: given(back.get())
    return pipe.send_bytes, lambda: given(np.frombuffer(pipe.recv_bytes(), np.uint8))


@contextmanager
def given(message: Any) -> Iterator[Any]:
    yield message


def topics(size: int, socket: str, side: int) -> tuple[Send, Receive]:
    import partywall as pw

    domain = pw.connect(socket=socket, start=False)
    both = [domain.topic(f"{name}/{size}", max_bytes=size, publishers=1, subscribers=1, device="host") for name in NAMES]
    publisher, subscriber = both[side].publisher(), both[1 - side].subscriber()

    @contextmanager
    def receive() -> Iterator[Any]:
        with subscriber.recv() as sample:
            yield np.asarray(sample)

    return publisher.send, receive


if __name__ == "__main__":
    main()
