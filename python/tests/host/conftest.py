"""A topic for tests, and programs that use it."""

import pytest

SENDER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames, frames.publisher() as publisher:
    say("ready")
    while told():
        publisher.send(np.full((2, 3), publisher.published, np.int32), b"n%d" % publisher.published)
        say("sent")
"""

READER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    subscriber = frames.subscriber(sys.argv[2])
    say("ready")
    told()
    for sample in subscriber:
        say(sample.sequence, sample.missed)
        told()
"""


@pytest.fixture
def frames(domain):
    with domain.topic("frames", max_bytes=1000, publishers=4, held=4, device="host") as opened:
        yield opened
