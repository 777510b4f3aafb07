# Holds 251.
"""Samples that torch writes and reads in two processes, in the order of hosts and of streams."""

import gc
import os
import time

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

LONG = 2_000_000_000
"""Clock cycles of a kernel that is still running when whatever follows it is enqueued: about a second."""
BYTES = 4 << 20

READER = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    own = torch.zeros(frames.max_bytes, dtype=torch.uint8, device="cuda")
    totals = torch.zeros(3, dtype=torch.int64, device="cuda")
    torch.sum(own, 0, dtype=torch.int64, out=totals[0])
    torch.cuda.synchronize()
    subscriber = frames.subscriber(order=sys.argv[2])
    say("ready")
    samples = []
    for n in range(3):
        sample = subscriber.recv(60)
        torch.sum(torch.from_dlpack(sample), 0, dtype=torch.int64, out=totals[n])
        samples.append(sample)
    say("enqueued")
    say(*totals.tolist())
    for sample in samples:
        sample.check()
    say("valid")
    told()
"""


@pytest.fixture
def frames(domain):
    """A topic; the kernels have run once on similar memory."""
    with domain.topic("frames", max_bytes=BYTES, depth=8, publishers=4, held=4) as topic:
        torch.cuda._sleep(1)
        torch.zeros(BYTES, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        yield topic
        torch.cuda.synchronize()


@pytest.mark.parametrize("order", ["host", "stream"])
@pytest.mark.parametrize("how", ["send", "loan"])
def test_samples_are_read_after_they_are_written(frames, child, socket, order, how):
    with frames.publisher() as publisher:
        reader = child(READER, socket, order)
        assert reader.says() == "ready"
        for n in range(1, 4):
            torch.cuda._sleep(LONG // 4)
            if how == "send":
                publisher.send(torch.full((BYTES,), n, dtype=torch.uint8, device="cuda"))
            else:
                with publisher.loan(BYTES, torch.uint8) as out:
                    torch.from_dlpack(out).fill_(n)
        assert not torch.cuda.current_stream().query(), "no process has waited for it"
        assert reader.says() == "enqueued"
        assert reader.says() == f"{BYTES} {2 * BYTES} {3 * BYTES}"
        assert reader.says() == "valid"


@pytest.mark.parametrize("how", ["release_on", "drop"])
def test_a_sample_comes_back_when_the_gpu_is_done_with_it(frames, how):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        publisher.send(torch.full((BYTES,), 7, dtype=torch.uint8, device="cuda"))
        sample, total = subscriber.recv(WATCHDOG), torch.zeros(1, dtype=torch.int64, device="cuda")
        image = torch.from_dlpack(sample)
        torch.cuda._sleep(LONG)
        torch.sum(image, 0, keepdim=True, dtype=torch.int64, out=total)
        done = torch.cuda.Event()
        done.record()
        del image
        gc.collect()
        sample.release_on() if how == "release_on" else sample.close()
        assert subscriber.stats().held == 1 or done.query()
        watchdog = time.monotonic() + WATCHDOG
        while subscriber.stats().held:
            assert time.monotonic() < watchdog
        assert done.query(), "it was still to be read"
        assert total.item() == 7 * BYTES


def test_a_tensor_that_is_sent_may_be_dropped_and_written_again(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        tensor = torch.full((BYTES,), 1, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(LONG // 4)
        publisher.send(tensor)
        tensor.fill_(2)
        publisher.send(tensor)
        del tensor
        torch.full((BYTES,), 3, dtype=torch.uint8, device="cuda")
        for n in (1, 2):
            with subscriber.recv(WATCHDOG) as sample:
                assert int(torch.from_dlpack(sample).sum(dtype=torch.int64)) == n * BYTES
