"""Waits for samples, blocks and subscribers of a topic: by threads, event loops and descriptors."""

import asyncio
import select
import signal
import threading
import time

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually


# Holds 205.
def test_publisher_waits_for_subscribers(frames):
    with frames.publisher() as publisher:
        publisher.wait_for_subscribers(0)
        with pytest.raises(TimeoutError, match="cannot wait for subscribers of topic .*: 0 of 1 joined within"):
            publisher.wait_for_subscribers(timeout=0.01)

        def send_to_both():
            publisher.wait_for_subscribers(2, timeout=WATCHDOG)
            publisher.send(np.full((2, 3), 7, np.int32))

        sender = threading.Thread(target=send_to_both)
        sender.start()
        with frames.subscriber() as one, frames.subscriber("latest") as other:
            sender.join()
            assert [int(np.asarray(each.recv(timeout=WATCHDOG))[0, 0]) for each in (one, other)] == [7, 7]
        with pytest.raises(pw.LimitReached):
            publisher.wait_for_subscribers(1000)
    with pytest.raises(pw.Closed):
        publisher.wait_for_subscribers()


def test_waits_end(frames):
    subscriber = frames.subscriber()
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match='no sample of topic "frames" was published'):
            subscriber.recv(timeout)
    with pytest.raises(ValueError, match="timeout"):
        subscriber.recv(-1)
    received, raised = [], []

    def iterate() -> None:
        received.extend(sample.sequence for sample in subscriber)

    def wait() -> None:
        try:
            subscriber.recv()
        except pw.Closed as error:
            raised.append(error)

    threads = [threading.Thread(target=wait), threading.Thread(target=iterate)]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    subscriber.close()
    for thread in threads:
        thread.join(WATCHDOG)
    assert (len(raised), received) == (1, [])
    with pytest.raises(pw.Closed):
        subscriber.try_recv()
    assert list(subscriber) == []


# Holds 251.
def test_ctrl_c_ends_a_wait(frames, child, socket):
    waiter = child(
        """
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    subscriber, publisher = frames.subscriber(), frames.publisher()
    try:
        say("ready")
        subscriber.recv()
    except KeyboardInterrupt:
        say("received nothing")
    try:
        for n in range(100):
            publisher.send(np.array(n))
    except KeyboardInterrupt:
        say("sent", publisher.published)
    say(subscriber.recv(0).sequence, publisher.send(np.array(4), timeout=0), frames.stats().held)
    told()
""",
        socket,
    )
    assert waiter.says() == "ready"
    time.sleep(0.05)
    waiter.process.send_signal(signal.SIGINT)
    assert waiter.says() == "received nothing"
    eventually(lambda: frames.stats().published == 4)
    time.sleep(0.05)
    waiter.process.send_signal(signal.SIGINT)
    assert waiter.says() == "sent 4"
    # The block that is held is the publisher's reserve.
    assert waiter.says() == "0 4 1"


def test_event_loops(frames):
    async def go() -> None:
        publisher, subscriber = frames.publisher(), frames.subscriber()
        with pytest.raises(pw.TimeoutError, match="within"):
            await subscriber.recv_async(0.01)
        got = []

        async def read() -> None:
            async for sample in subscriber:
                got.append(int(np.asarray(sample)))

        readers = [asyncio.create_task(read()) for _ in range(2)]
        for n in range(100):
            while True:
                try:
                    publisher.send(np.array(n), timeout=0)
                    break
                except pw.TopicFull:
                    await asyncio.sleep(0.001)
        while len(got) < 100:
            await asyncio.sleep(0.001)
        assert sorted(got) == list(range(100))
        waits = asyncio.create_task(subscriber.recv_async())
        await asyncio.sleep(0.01)
        waits.cancel()
        subscriber.close()
        await asyncio.gather(*readers)
        with pytest.raises(pw.Closed):
            await subscriber.recv_async()
        with pytest.raises(asyncio.CancelledError):
            await waits
        publisher.close()

    asyncio.run(asyncio.wait_for(go(), WATCHDOG))


def test_a_descriptor_is_readable_while_there_is_something(frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        fd = subscriber.fileno()
        assert fd == subscriber.fileno()
        assert select.select([subscriber], [], [], 0.01)[0] == []
        for n in range(3):
            publisher.send(np.array(n))
            assert select.select([subscriber], [], [], WATCHDOG)[0] == [subscriber]
            sample = subscriber.try_recv()
            assert sample is not None and sample.sequence == n
            while subscriber.try_recv() is not None:
                pass


def test_the_end_of_the_broker_ends_waits(frames, domain):
    publisher, subscriber = frames.publisher(), frames.subscriber()
    publisher.send(b"1")
    domain._native.stop_broker(True)
    assert subscriber.recv(WATCHDOG).tobytes() == b"1"
    for wait in (lambda: subscriber.recv(WATCHDOG), lambda: asyncio.run(subscriber.recv_async(WATCHDOG))):
        with pytest.raises(pw.BrokerGone):
            wait()
    publisher.close()
    subscriber.close()


def test_more_threads_than_a_publisher_has_loans_send_by_turns(frames):
    rounds, names = 50, 6
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        failed = []

        def send(name: int) -> None:
            try:
                for number in range(rounds):
                    publisher.send(np.array([name, number], np.uint8))
            except pw.Error as error:
                failed.append(error)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(names)]
        for thread in threads:
            thread.start()
        received = []
        for _ in range(rounds * names):
            with subscriber.recv(WATCHDOG) as sample:
                received.append(tuple(sample.tobytes()))
        for thread in threads:
            thread.join(WATCHDOG)
        assert failed == []
        assert sorted(received) == [(name, number) for name in range(names) for number in range(rounds)]
        # Only the end of the process can end this wait.
        with publisher.loan((8,), "uint8"), publisher.loan((8,), "uint8"), pytest.raises(pw.TooManyLoans):
            publisher.send(b"one more")


def test_sending_threads_do_not_wait_for_loans_that_never_come_back(frames):
    threads = 12
    together, outcomes = threading.Barrier(threads), []

    def send() -> None:
        together.wait()
        try:
            publisher.send(b"one more")
        except pw.TooManyLoans as error:
            outcomes.append(error)

    with frames.publisher() as publisher, publisher.loan((8,), "uint8"), publisher.loan((8,), "uint8"):
        for _ in range(10):
            senders = [threading.Thread(target=send, daemon=True) for _ in range(threads)]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(WATCHDOG)
            assert not any(sender.is_alive() for sender in senders)
    assert len(outcomes) == 10 * threads


# Holds 202.
def test_descriptor_is_readable_while_there_is_something_to_receive(domain):
    frames = domain.topic("frames", max_bytes=8, device="host", held=2)
    publisher, subscriber = frames.publisher(), frames.subscriber(until="idle")
    other = subscriber._event()

    def readable(wait=0.0):
        assert len(ready := select.select([subscriber, other], [], [], wait)[0]) in (0, 2)
        return bool(ready)

    def taken_in_a_loop():
        return next(iter(subscriber))

    def taken_in_an_event_loop():
        return asyncio.run(subscriber.recv_async(WATCHDOG))

    assert not readable()
    for take in (subscriber.recv, subscriber.try_recv, taken_in_a_loop, taken_in_an_event_loop):
        for _ in range(2):
            publisher.send(b"x")
        eventually(lambda: readable(0.01))
        take().close()
        assert readable(), "there is another"
        take().close()
        assert not readable()
        # Nor does the thread that polls say otherwise later.
        assert not readable(0.02)
    publisher.send(b"x")
    sample = subscriber.recv()
    assert not readable()
    subscriber._give_up(sample)
    assert readable(), "it was put back"
    with subscriber.try_recv() as again:
        assert again.sequence == 8 and not readable()
    publisher.send(b"x")
    publisher.send(b"x")
    held = [subscriber.recv(), subscriber.recv()]
    publisher.send(b"x")
    eventually(lambda: readable(0.01))
    with pytest.raises(pw.TooManyHeld):
        subscriber.try_recv()
    assert readable(), "the call raises"
    for sample in held:
        sample.close()
    subscriber.recv().close()
    publisher.close()
    eventually(lambda: readable(0.01))
    with pytest.raises(pw.TopicIdle):
        subscriber.try_recv()
    other.close()
    subscriber.close()
    frames.close()
