"""Samples from publishers to subscribers, in host memory."""

import asyncio
import pickle
import time

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG
from .conftest import SENDER


def test_samples_go_from_a_process_to_others(frames, child, socket):
    with frames.subscriber() as first, frames.subscriber() as second:
        sender = child(SENDER, socket)
        assert sender.says() == "ready"
        assert first.try_recv() is None
        for n in range(10):
            sender.tell("send")
            for subscriber in (first, second):
                with subscriber.recv(WATCHDOG) as sample:
                    assert np.asarray(sample).tolist() == [[n] * 3] * 2
                    assert (sample.header, sample.sequence, sample.position, sample.missed) == (b"n%d" % n, n, n, 0)
                    assert (sample.shape, sample.dtype, sample.topic, sample.ready) == ((2, 3), "int32", "frames", True)
                    sample.check()
        stats = first.stats()
        assert stats == pw.SubscriberStats(received=10, dropped=0, lag=0, held=0, ages=stats.ages)
        assert stats.ages.count == 10 and 0 < stats.ages.p50 <= stats.ages.p99 <= stats.ages.max < WATCHDOG
        publishers = {first.id, second.id, sample.publisher}
        assert len(publishers) == 3


def test_ages_count_from_the_publication_of_each_sample(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        assert subscriber.stats().ages == pw.Ages(count=0, p50=0, p99=0, max=0)
        start = time.monotonic()
        for _ in range(3):
            publisher.send(b"x")
        time.sleep(0.02)
        for _ in range(3):
            subscriber.recv(0)
        ages = subscriber.stats().ages
        assert ages.count == 3 and 0.02 <= ages.p50 <= ages.p99 <= ages.max <= time.monotonic() - start


def test_the_age_of_a_sample_counts_from_its_publication(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        start = time.monotonic()
        publisher.send(b"x")
        time.sleep(0.02)
        with subscriber.recv(0) as sample:
            first, second = sample.age, sample.age
            assert 0.02 <= first <= second <= time.monotonic() - start
        with pytest.raises(pw.Closed):
            _ = sample.age


def test_a_sample_without_a_stamp_has_no_age(domain, frames):
    with (
        domain.topic("frames", stamps=False) as silent,
        silent.publisher() as publisher,
        frames.subscriber() as subscriber,
    ):
        publisher.send(b"x")
        with subscriber.recv(0) as sample:
            assert sample.age is None
        assert subscriber.stats().ages.count == 0


def test_a_sample_is_read_in_place_and_only_read(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        assert publisher.send(np.arange(4, dtype=np.float64)) == 0
        assert publisher.send(b"bytes") == 1
        assert publisher.send(np.arange(9).reshape(3, 3).T, header=b"T") == publisher.published - 1 == 2
        numbers, text, turned = (subscriber.recv(0) for _ in range(3))
        for array in (np.asarray(numbers), np.from_dlpack(numbers), np.asarray(memoryview(numbers.tensor))):
            assert array.tolist() == [0, 1, 2, 3] and not array.flags.writeable
        assert text.tobytes() == b"bytes"
        assert np.asarray(turned).tolist() == np.arange(9).reshape(3, 3).T.tolist()
        with pytest.raises(pw.ReadOnly, match="frames"):
            numbers.tensor.write(np.zeros(4))
        with pytest.raises(AttributeError, match="host memory"):
            _ = numbers.__cuda_array_interface__
        with pytest.raises(TypeError, match="this process's own"):
            pickle.dumps(numbers)
        publisher.send(np.float32(3))
        scalar = subscriber.recv(0)
        assert np.asarray(scalar).shape == ()
        publisher.send(np.zeros((0, 2), np.int8))
        with pytest.raises(pw.TooManyHeld) as raised:
            subscriber.recv(0)
        assert raised.value.anchor == "too-many-held"
        numbers.close()
        del array
        assert np.asarray(subscriber.recv(0)).shape == (0, 2)


def test_loop_until_idle_ends_with_the_last_publisher(frames):
    with frames.subscriber(until="idle") as subscriber:
        with pytest.raises(pw.TimeoutError):
            subscriber.recv(0.01)
        with frames.publisher() as publisher:
            publisher.send(np.zeros(1))
            publisher.send(np.ones(1))
        assert [float(np.asarray(sample)[0]) for sample in subscriber] == [0, 1]
        with pytest.raises(pw.TopicIdle) as raised:
            subscriber.recv()
        assert raised.value.anchor == "topic-idle"
        with pytest.raises(pw.TopicIdle):
            subscriber.try_recv()

    async def read():
        with frames.subscriber(history=1, until="idle") as subscriber:
            return [sample.position async for sample in subscriber]

    assert asyncio.run(asyncio.wait_for(read(), 60)) == [1]

    async def read_to_the_end():
        publisher = frames.publisher()
        with frames.subscriber(until="idle") as subscriber:
            reading = asyncio.create_task(collect(subscriber))
            publisher.send(np.zeros(1))
            while subscriber.stats().received == 0:
                await asyncio.sleep(0.001)
            # The task waits for the next one.
            publisher.close()
            return await reading

    async def collect(subscriber):
        return [sample.sequence async for sample in subscriber]

    assert asyncio.run(asyncio.wait_for(read_to_the_end(), 60)) == [0]
    with pytest.raises(ValueError, match="until='idle'"):
        frames.subscriber(until="done")


def test_a_publisher_has_as_many_loans_as_was_agreed(domain):
    with domain.topic("one", max_bytes=8, loans=1, device="host") as topic, topic.publisher() as publisher:
        assert topic.loans == 1
        with domain.topic("one", loans=1) as again:
            assert again.loans == 1
        with publisher.loan((8,), "uint8"), pytest.raises(pw.TooManyLoans) as raised:
            publisher.send(np.zeros(8, np.uint8))
        assert raised.value.anchor == "too-many-loans"
        publisher.send(np.zeros(8, np.uint8))
        with pytest.raises(pw.WrongTopic, match="at most 1 loans, not 2"):
            domain.topic("one", loans=2)


# Holds 251.
def test_arrays_keep_their_sample(frames):
    with frames.publisher() as publisher, frames.subscriber("latest") as subscriber:
        publisher.send(np.full(100, 7, np.uint8))
        sample = subscriber.recv()
        array = np.asarray(sample)
        sample.close()
        assert sample.closed and repr(sample) == "<partywall.Sample 0 of frames: uint8[100], released>"
        for use in (lambda: sample.tensor, lambda: sample.header, sample.check, sample.wait, lambda: sample.ready):
            with pytest.raises(pw.Closed):
                use()
        for n in range(100):
            publisher.send(np.full(100, n, np.uint8))
        assert subscriber.stats().held == 1
        subscriber.close()
        publisher.close()
        frames.close()
        assert array.tolist() == [7] * 100


# Holds 251.
def test_dropping_a_sample_makes_room_at_once(domain):
    with domain.topic("one", max_bytes=8, held=1, device="host") as topic:
        publisher, subscriber = topic.publisher(), topic.subscriber()
        for n in range(1000):
            publisher.send(np.array(n))
            # The former sample is released, and no thread has to notice that first.
            assert int(np.asarray(subscriber.recv(0))) == n
        publisher.close()
        subscriber.close()


def test_a_loan_is_filled_in_place_and_published_at_the_end_of_its_block(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        with publisher.loan((2, 3), "float32", header=b"first") as out:
            assert repr(out) == "<partywall.Loan of frames: float32[2, 3]>"
            array = np.asarray(out)
            array[:] = 1
            np.from_dlpack(out)[1] = 2
            assert out.header == b"first" and out.tobytes() == array.tobytes()
            out.header = b"second"
            assert subscriber.try_recv() is None
        assert out.closed and publisher.published == 1
        sample = subscriber.recv()
        assert (np.asarray(sample).tolist(), sample.header) == ([[1] * 3, [2] * 3], b"second")
        for use in (lambda: out.tensor, out.publish, lambda: np.asarray(out)):
            with pytest.raises(pw.Closed):
                use()
        assert frames.stats().held == 1, "the publisher's reserve"
        with pytest.raises(ZeroDivisionError), publisher.loan(4, "uint8") as out:
            out.write(np.arange(4, dtype=np.uint8))
            assert frames.stats().held == 1
            _ = 1 / 0
        assert out.closed and subscriber.try_recv() is None and frames.stats().held == 0
        loan = publisher.loan(4, "uint8")
        assert loan.publish() == 1
        with loan:
            pass
        assert publisher.published == 2
        with pytest.raises(pw.BadTensor, match="256"), publisher.loan(1, "uint8") as out:
            out.header = bytes(257)
        with pytest.raises(pw.BlockTooSmall):
            publisher.loan(1001, "uint8")
        with pytest.raises(pw.BadTensor, match="8 dimensions"):
            publisher.loan((1,) * 9, "uint8")
        with pytest.raises(TypeError, match="the dtype is missing"):
            publisher.loan(1)
        assert frames.stats().held == 0


def test_derived_samples_rest_on_their_inputs(domain, frames):
    with domain.topic("half", shape=3, dtype="float32", device="host") as half, half.publisher() as publisher:
        source, subscriber, reader = frames.publisher(), frames.subscriber(), half.subscriber()
        source.send(np.array([2, 4, 6], np.float32))
        with subscriber.recv() as sample, publisher.loan(3) as out:
            np.divide(sample, 2, out=np.asarray(out))
            out.rests_on(sample)
        result = reader.recv()
        assert np.asarray(result).tolist() == [1, 2, 3]
        result.check()
        for wrong in (np.zeros(3), np.zeros(2, np.float32)):
            with pytest.raises(pw.WrongSample, match=r"float32 \[3\], not of") as raised:
                publisher.send(wrong)
            assert raised.value.anchor == "wrong-sample"
        for opened in (source, subscriber, reader):
            opened.close()


@pytest.mark.parametrize(("policy", "left"), [("drop-oldest", 6), ("latest", 9)])
def test_a_subscriber_that_may_miss_samples_keeps_no_publisher_waiting(frames, policy, left):
    with frames.publisher() as publisher, frames.subscriber(policy) as subscriber:
        for n in range(10):
            publisher.send(np.array(n), timeout=0)
        assert subscriber.stats().lag > 0
        first = subscriber.recv(0)
        assert first.sequence == first.missed == subscriber.stats().dropped == left
        rest = iter(subscriber.try_recv, None)
        assert [(sample.sequence, sample.missed) for sample in rest] == [(n, 0) for n in range(first.sequence + 1, 10)]


def test_queue_and_history(frames):
    with frames.publisher() as publisher:
        for n in range(10):
            publisher.send(np.array(n))
        with frames.subscriber(history=2) as late:
            assert [late.recv(0).sequence for _ in range(2)] == [8, 9]
            assert late.try_recv() is None
        with frames.subscriber("drop-oldest", queue=2) as short:
            for n in range(4):
                publisher.send(np.array(n))
            assert short.recv(0).sequence == 12


def test_topic_has_its_options_and_refuses_others(domain, frames):
    assert (frames.name, frames.max_bytes, frames.dtype, frames.depth, frames.held) == ("frames", 1000, None, 4, 4)
    assert (frames.place, frames.version) == ("host", 1)
    room = "samples of any dtype and shape, up to 1000 bytes on host"
    assert repr(frames) == f"<partywall.Topic frames: {room}, 0 publishers, 0 subscribers>"
    again = domain.topic("frames", max_bytes=1000, device="host")
    assert again.version == frames.version
    again.close()
    again.close()
    assert again.closed and repr(again) == "<partywall.Topic frames: closed>"
    with pytest.raises(pw.Closed):
        again.publisher()
    wrong = (
        ({"max_bytes": 999}, "samples of at most 1000 bytes"),
        ({"max_bytes": 1000, "dtype": "float32"}, "of any dtype and shape, not of float32"),
        ({"max_bytes": 1000, "publishers": 5}, "room for 4 publishers"),
        ({"max_bytes": 1000, "depth": 5}, "keeps 4 samples"),
    )
    for arguments, why in wrong:
        with pytest.raises(ValueError, match=why) as raised:
            domain.topic("frames", device="host", **arguments)
        assert isinstance(raised.value, pw.WrongTopic) and raised.value.anchor == "wrong-topic"
    bad = [{"max_bytes": 0}, {"max_bytes": 1, "depth": 0}, {"max_bytes": 1, "held": 1 << 31}, {"max_bytes": 1 << 62}]
    for arguments in bad:
        with pytest.raises(pw.WrongTopic) as raised:
            domain.topic("x", device="host", **arguments)
        assert raised.value.anchor == "bad-topic"
    with pytest.raises(pw.WrongTopic) as raised:
        domain.topic("x", max_bytes=1, blocks=15, device="host")
    assert raised.value.anchor == "pool-too-small"
    for arguments in (
        {"shape": 3},
        {"shape": (None, 3), "dtype": "int32"},
        {"shape": 3, "max_bytes": 8, "dtype": "int32"},
        {"shape": (1,) * 9, "max_bytes": 8},
    ):
        with pytest.raises(pw.WrongTopic) as raised:
            domain.topic("x", device="host", **arguments)
        assert raised.value.anchor == "bad-topic"
    with pytest.raises(pw.WrongTopic, match=f"a depth of 1 to 4096, not {(1 << 32) - 1}"):
        domain.topic("x", max_bytes=1, depth=(1 << 32) - 1, device="host")
    for depth in (-1, 1 << 32):
        with pytest.raises(ValueError, match=f"numbers of a topic are 0 to 4,294,967,295, not {depth}"):
            domain.topic("x", max_bytes=1, depth=depth, device="host")
    with domain.topic("images", shape=(480, 640, 3), dtype=np.uint8, device="host") as images:
        assert (images.max_bytes, images.dtype, images.shape) == (921_600, "uint8", (480, 640, 3))
        room = "samples of uint8 [480, 640, 3], up to 921600 bytes on host"
        assert repr(images).startswith(f"<partywall.Topic images: {room}")
        with pytest.raises(pw.WrongTopic, match=r"of uint8 \[480, 640, 3\], not of uint8 \[480, 640\]"):
            domain.topic("images", shape=(480, 640), dtype="uint8", device="host")
    with pytest.raises(pw.WrongTopic, match="does not fill a number of whole bytes below 2⁶⁴"):
        domain.topic("huge", shape=(1 << 61,), dtype="float64", device="host")
    with domain.topic("strips", shape=(None, 2), dtype="uint8", max_bytes=6, device="host") as strips:
        assert strips.shape == (None, 2)
        with strips.publisher() as publisher, strips.subscriber() as subscriber:
            for rows in (3, 0):
                publisher.send(np.zeros((rows, 2), np.uint8))
                assert subscriber.recv().shape == (rows, 2)
            with pytest.raises(pw.WrongSample, match=r"uint8 \[any, 2\], not of uint8 \[2, 3\]"):
                publisher.send(np.zeros((2, 3), np.uint8))
    with pytest.raises(pw.NameNotFound):
        domain.topic("x")
    with pytest.raises(pw.TimeoutError):
        domain.topic("x", timeout=0.01)
    refused = pytest.raises(pw.WrongTopic, match="is a segment")
    with domain.put("weights", np.zeros(1), device="host"), refused as raised:
        domain.topic("weights")
    assert raised.value.anchor == "not-a-topic"
    for wrong in ({"policy": "all"}, {"order": "gpu"}, {"order": "stream"}):
        with pytest.raises(ValueError):
            frames.subscriber(**wrong)


def test_limit_on_participants_is_an_error(domain):
    with domain.topic("small", max_bytes=1, publishers=1, subscribers=1, device="host") as small:
        with small.publisher() as publisher, small.subscriber() as subscriber:
            assert repr(publisher) == f"<partywall.Publisher {publisher.id} of small: 0 published>"
            assert repr(subscriber).endswith("of small: 0 received, 0 behind, 0 held>")
            for join, anchor in ((small.publisher, "too-many-publishers"), (small.subscriber, "too-many-subscribers")):
                with pytest.raises(pw.LimitReached) as raised:
                    join()
                assert raised.value.anchor == anchor
        for closed in (publisher, subscriber):
            closed.close()
            assert repr(closed).endswith("of small: closed>")
        with pytest.raises(pw.Closed):
            publisher.send(b"x")
        with small.publisher(), small.subscriber():
            assert small.stats() == pw.TopicStats(
                published=0, free=8, held=0, in_ring=0, read=0, publishers=1, subscribers=1
            )


def test_topics_are_pickled_as_segments_are(domain, frames, child, socket):
    reader = child(
        """
import pickle
with pw.connect(socket=sys.argv[1], start=False) as d:
    with pickle.loads(bytes.fromhex(told())) as frames, frames.publisher() as publisher:
        publisher.send(b"sent")
    try:
        pickle.loads(bytes.fromhex(told()))
    except pw.VersionNotFound as error:
        say(error)
""",
        socket,
    )
    with frames.subscriber() as subscriber:
        reader.tell(pickle.dumps(frames).hex())
        assert subscriber.recv(WATCHDOG).tobytes() == b"sent"
        for own in (subscriber, frames.publisher()):
            with pytest.raises(TypeError, match="send the topic"):
                pickle.dumps(own)
        own.close()
    with domain.topic("again", max_bytes=1, device="host") as former:
        domain.rm("again")
        with domain.topic("again", max_bytes=1, device="host"):
            reader.tell(pickle.dumps(former).hex())
            assert reader.says().startswith("topic 'again' now has version 2, but version 1 was sent")


def test_a_header_that_is_too_long_keeps_no_loan(frames):
    with frames.publisher() as publisher:
        errors = []
        for _ in range(3):
            # An error that is kept keeps what its calls had.
            with pytest.raises(pw.BadTensor) as error:
                publisher.loan((8,), "uint8", header=bytes(257))
            errors.append(error)
        assert frames.stats().held == 0
