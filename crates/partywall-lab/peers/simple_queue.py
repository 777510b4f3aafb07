"""multiprocessing.SimpleQueue: microseconds until a tensor is in another process and its sum is back.

    simple_queue.py fresh|same PLACE

PLACE is as for `ours_topics.py`. On a GPU the queue is torch.multiprocessing's: torch pickles a tensor as a reference
to its memory. Sending the same tensor more than a thousand times waits for the GPU each time; the benchmark sends
fewer.
"""

import multiprocessing
import sys
from typing import Any

import round_trip


def main() -> None:
    how, place = sys.argv[1:]
    memory = round_trip.memory(place)
    spawn = multiprocessing.get_context("spawn")
    there, back = spawn.SimpleQueue(), spawn.SimpleQueue()
    round_trip.start(answer, there, back, place).recv()

    def there_and_back(same: Any, value: int) -> float:
        # Held until it is read, as torch requires.
        tensor = memory.full(value) if same is None else same
        there.put(tensor)
        return float(back.get())

    round_trip.serve(how == "fresh", memory, there_and_back)


def answer(ready: Any, there: Any, back: Any, place: str) -> None:
    """Runs in the other process: answers each tensor with its sum."""
    memory = round_trip.memory(place)
    ready.send("ready")
    while True:
        tensor = there.get()
        back.put(memory.total(tensor))
        del tensor


if __name__ == "__main__":
    main()
