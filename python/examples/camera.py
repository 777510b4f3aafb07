"""One process sends frames, another receives them in place. When the receiver is killed, the sender continues.

    python camera.py                   # on a GPU with torch, or without a GPU in host memory with NumPy
    python camera.py --device host     # in host memory at any rate

The viewer receives only the latest frame, and counts the frames that it misses. When it is killed, its blocks return to
the topic, and the next viewer begins with the next frame.
"""

import argparse
import select
import subprocess
import sys
from typing import Any

import numpy as np

import partywall as pw

NAME = "examples/camera"
SHAPE = (480, 640, 3)
SEEN = 20


def send(domain: pw.Domain, device: str) -> None:
    topic = domain.topic(NAME, shape=SHAPE, dtype="uint8", device=device)
    with topic as frames, frames.publisher() as publisher:
        for viewer in ("first", "second"):
            command = [sys.executable, __file__, "view"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                while not select.select([process.stdout], [], [], 0.001)[0]:
                    with publisher.loan(SHAPE, header=b"camera 3", timeout=60) as out:
                        array(out)[:] = publisher.published % 256
                print(f"the {viewer} viewer: {process.stdout.readline().strip()}")
                process.kill()


def view(domain: pw.Domain) -> None:
    right, missed = 0, 0
    with domain.topic(NAME, timeout=60) as frames, frames.subscriber("latest") as subscriber:
        for number, sample in enumerate(subscriber, 1):
            right += bool((array(sample) == sample.sequence % 256).all())
            missed += sample.missed
            if number == SEEN:
                print(f"{number} frames seen, {right} of them as they were sent; {missed} missed", flush=True)


def array(tensor: pw.Loan | pw.Sample) -> Any:
    if tensor.tensor.device == "host":
        return np.asarray(tensor)
    import torch

    return torch.from_dlpack(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["send", "view"], default="send")
    parser.add_argument("--device", choices=["auto", "cuda", "host"], default="auto")
    given = parser.parse_args()
    with pw.connect() as domain:
        send(domain, given.device) if given.role == "send" else view(domain)


if __name__ == "__main__":
    main()
