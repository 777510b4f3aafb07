"""Partywall's topics, as users call them: microseconds until a tensor is in another process and its sum is back.

    ours_topics.py send|loan|same SOCKET PLACE ORDER

`send` creates a tensor and sends it, `loan` fills a block in place, `same` sends the same tensor repeatedly and copies
it each time. PLACE is `host`, or how the GPU is shared: `time-sliced` or `MPS`. ORDER is the waiter for a complete
sample: `host` (the default of subscribers) or `stream`. The sum comes back through another topic, in host memory.
"""

import struct
import sys
from typing import Any

import partywall as pw
import round_trip

ANSWER = struct.Struct("d")


def main() -> None:
    how, socket, place, order = sys.argv[1:]
    memory = round_trip.memory(place)
    name = f"{how}/{order}"
    device = "host" if place == "host" else "cuda"
    with pw.connect(socket=socket, start=False) as domain:
        with (
            domain.topic(name, shape=round_trip.ELEMENTS, dtype="float32", publishers=1, subscribers=1, device=device) as there,
            domain.topic(f"{name}/sums", max_bytes=ANSWER.size, publishers=1, subscribers=1, device="host") as back,
            there.publisher() as publisher,
            back.subscriber() as sums,
        ):
            other = round_trip.start(answer, socket, name, place, order)
            other.recv()

            def there_and_back(same: Any, value: int) -> float:
                if how == "loan":
                    with publisher.loan(round_trip.ELEMENTS) as out:
                        memory.fill(out, value)
                else:
                    publisher.send(memory.full(value) if same is None else same)
                with sums.recv() as total:
                    return float(ANSWER.unpack(total.tobytes())[0])

            round_trip.serve(how != "same", memory, there_and_back)


def answer(ready: Any, socket: str, name: str, place: str, order: str) -> None:
    """Runs in the other process: answers each tensor with its sum."""
    memory = round_trip.memory(place)
    with (
        pw.connect(socket=socket, start=False) as domain,
        domain.topic(name) as there,
        domain.topic(f"{name}/sums") as back,
        back.publisher() as sums,
        there.subscriber(order="stream" if order == "stream" else "host") as subscriber,
    ):
        ready.send("ready")
        for sample in subscriber:
            with sample:
                total = memory.total(memory.take(sample))
                if order == "stream":
                    # If a publisher dies, a waiting stream continues, so the sample's validity has to be checked.
                    sample.check()
                sums.send(ANSWER.pack(total))


if __name__ == "__main__":
    main()
