"""A camera on one host, a model on another: a topic crosses, and frames that come too fast are dropped at the camera.

    python far_camera.py               # both hosts on this machine

On two machines, each with a bridge (docs/hosts.md), the one with `--host camera --export 'examples/*'`, the other one
with `--import '//camera/examples/*'`:

    python far_camera.py send
    python far_camera.py view

The topic has the same name on both hosts, and the programs do not know that they are on two. Sequence numbers are the
camera's, so the model sees how many frames it has missed.
"""

import argparse
import sys
import time
from contextlib import ExitStack

import numpy as np
from local_hosts import host, output

import partywall as pw

NAME = "examples/far_camera"
SHAPE = (480, 640, 3)


def send(frames: int) -> None:
    """Sends frames as fast as the topic takes them, once another host imports it."""
    with pw.connect() as domain, domain.topic(NAME, shape=SHAPE, dtype="uint8", device="host") as topic:
        with topic.publisher() as publisher:
            publisher.wait_for_subscribers(1, timeout=60)
            for number in range(frames):
                with publisher.loan(SHAPE, header=b"last" if number == frames - 1 else b"", timeout=60) as out:
                    np.asarray(out)[:] = number % 256
            print(f"{frames} frames sent", flush=True)
            # The topic lasts until the last one has crossed.
            sys.stdin.readline()


def view() -> None:
    """Receives frames until the last one."""
    with pw.connect() as domain, domain.topic(NAME, timeout=60) as topic:
        with topic.subscriber("block", history=1) as subscriber:
            received, right = 0, 0
            for sample in subscriber:
                received += 1
                right += bool((np.asarray(sample) == sample.sequence % 256).all())
                if bytes(sample.header) == b"last":
                    break
                time.sleep(0.01)  # Stands in for a model.
            missed = sample.sequence + 1 - received
            print(f"{received} frames received, {right} of them as they were sent; {missed} missed", flush=True)


def play(frames: int) -> None:
    """Plays both hosts on this machine."""
    with ExitStack() as stack:
        camera = stack.enter_context(host("camera", "--export", "examples/*"))
        model = stack.enter_context(host("model", "--connect", camera.endpoint, "--import", "//camera/examples/*"))
        sending = camera.run(sys.executable, __file__, "send", "--frames", str(frames))
        viewing = model.run(sys.executable, __file__, "view")
        print(output(viewing), end="")
        output(sending)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["send", "view"])
    parser.add_argument("--frames", type=int, default=500)
    given = parser.parse_args()
    match given.role:
        case "send":
            send(given.frames)
        case "view":
            view()
        case None:
            play(given.frames)


if __name__ == "__main__":
    main()
