"""Three stages in three processes: one makes frames, one transforms them, one uses them, in order. No frame is lost.

    python pipeline.py                   # on a GPU with torch; without a GPU it uses host memory and NumPy
    python pipeline.py --device host     # `--device` is `cuda`, `cuda:N`, `host` or `auto`

The stages share a queue of eight places. A frame has its place from when it is submitted until its result is taken, so
a slow last stage makes the first one wait. The middle stage is killed twice: the queue gives the frame that it had to
its successor.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

import numpy as np

import partywall as pw

NAME = "examples/pipeline"
FRAMES = 64
SHAPE = (480, 640)
NBYTES = SHAPE[0] * SHAPE[1] * 4
PLACES = 8
KILLS = (FRAMES // 4, FRAMES // 2)
"""Before which frames the middle stage is killed."""
TIMEOUT = 60


def produce(queue: pw.Queue) -> None:
    """Makes frames, filled with their numbers. Prints the ticket of each, by which the last stage finds it."""
    waited = 0.0
    for number in range(FRAMES):
        block = queue.inputs.alloc(TIMEOUT)
        array(block.tensor(SHAPE, "float32"))[:] = number
        begin = time.perf_counter()
        ticket = queue.submit("double", [block], output=NBYTES, timeout=TIMEOUT)
        waited += time.perf_counter() - begin
        print(ticket.task, flush=True)
    print(f"the first stage has waited {waited:.2f} s for the last one", file=sys.stderr)


def transform(queue: pw.Queue) -> None:
    """Doubles each frame, until it is killed or there was none for a minute."""
    for task in queue.claims(TIMEOUT):
        frame, doubled = (array(each.tensor(SHAPE, "float32")) for each in (task.inputs[0], task.output))
        doubled[:] = frame
        doubled *= 2
        if queue.place != "host":
            # Completes the task when the stream gets here. The end of the loop's body would do so at once.
            task.complete_on()


def consume(queue: pw.Queue, device: str) -> None:
    """Starts the other stages, and uses the frames."""
    transformer, right = start("transform", device), 0
    with start("produce", device, stdout=subprocess.PIPE) as producer:
        assert producer.stdout is not None
        for number, ticket in enumerate(producer.stdout):
            if number in KILLS:
                transformer.kill()
                transformer.wait()
                transformer = start("transform", device)
                print(f"the middle stage was killed before frame {number}", flush=True)
            # The end of `with` frees the block; the slot is free once the result is taken.
            with queue.ticket(ticket.strip()).result(TIMEOUT) as result:
                right += bool((array(result.tensor(SHAPE, "float32")) == 2 * number).all())
            time.sleep(0.01)  # Stands in for slow work.
    transformer.kill()
    transformer.wait()
    print(f"{right} of {FRAMES} frames in order, as they should be ({queue.place})")


def start(stage: str, device: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, __file__, stage, "--device", device], text=True, **options)


def array(tensor: pw.Tensor) -> Any:
    if tensor.device == "host":
        return np.asarray(tensor)
    import torch

    return torch.from_dlpack(tensor)


def chosen(device: str) -> str:
    """Returns the device for `auto`: a GPU if torch finds one."""
    if device != "auto":
        return device
    try:
        import torch
    except ImportError:
        return "host"
    return "cuda" if torch.cuda.is_available() else "host"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=["produce", "transform", "consume"], default="consume")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = chosen(given.device)
    with (
        pw.connect() as domain,
        # One more input: the first stage makes a frame while it waits for a place.
        domain.queue(NAME, tasks=PLACES, inputs=(PLACES + 1, NBYTES), outputs=(PLACES, NBYTES), device=device) as queue,
    ):
        if given.stage == "consume":
            consume(queue, device)
        else:
            {"produce": produce, "transform": transform}[given.stage](queue)


if __name__ == "__main__":
    main()
