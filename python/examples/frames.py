"""A topic between languages: `frames.py publish 300` in one terminal and `frames.py subscribe` in another, in any order;
or the same roles of examples/c/frames.cpp and crates/partywall/examples/frames.rs. Number `n` of the frames is filled
with `n`. Frames are copied, so that they may be on any device, which is the last argument: `host` (the default),
`cuda:0`, `auto`.
"""

import sys

import numpy as np

import partywall as pw

SHAPE = (48, 64)


def publish(frames: pw.Topic, count: int) -> None:
    with frames.publisher() as publisher:
        publisher.wait_for_subscribers(timeout=60)
        for number in range(count):
            publisher.send(np.full(SHAPE, number % 256, np.uint8))


def subscribe(frames: pw.Topic) -> None:
    received = right = 0
    with frames.subscriber(until="idle") as subscriber:
        for sample in subscriber:
            right += sample.tobytes() == bytes([received % 256]) * 48 * 64
            received += 1
    print(f"{received} frames, {right} of them right")


def main() -> None:
    role, *arguments = sys.argv[1:]
    count = int(arguments.pop(0)) if role == "publish" else 0
    device = arguments[0] if arguments else "host"
    with pw.connect() as d, d.topic("examples/frames", shape=SHAPE, dtype="uint8", device=device) as frames:
        if role == "publish":
            publish(frames, count)
        else:
            subscribe(frames)


if __name__ == "__main__":
    main()
