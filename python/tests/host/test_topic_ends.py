"""Topics whose processes are killed, evicted or forked, or forget what they have open."""

import gc
import threading

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually
from .conftest import READER, SENDER


def test_a_full_topic_names_the_process_that_does_not_read(frames, child, socket):
    reader = child(READER, socket, "block")
    assert reader.says() == "ready"
    with frames.publisher() as publisher:
        for n in range(4):
            publisher.send(np.array(n))
        with pytest.raises(TimeoutError, match=f"pid {reader.process.pid}") as raised:
            publisher.send(np.array(4), timeout=0.01)
        assert isinstance(raised.value, pw.TopicFull) and raised.value.anchor == "topic-full"
        with pytest.raises(pw.TopicFull), publisher.loan(1, "int64", timeout=0.01) as out:
            np.asarray(out)[:] = 4
        assert frames.stats().held == 0, "it went back"
        sent = []
        sender = threading.Thread(target=lambda: sent.append(publisher.send(np.array(4))))
        sender.start()
        reader.tell()
        assert reader.says() == "0 0"
        reader.tell()
        sender.join(WATCHDOG)
        assert sent == [4]


def test_a_killed_subscriber_blocks_no_other(frames, child, socket):
    reader = child(READER, socket, "block")
    assert reader.says() == "ready"
    with frames.publisher() as publisher:
        for n in range(4):
            publisher.send(np.array(n))
        threading.Timer(0.05, reader.kill).start()
        for n in range(10):
            assert publisher.send(np.array(n), timeout=WATCHDOG) == n + 4
    eventually(lambda: frames.stats().subscribers == 0)


def test_a_killed_publisher_is_replaced(frames, child, socket):
    with frames.subscriber() as subscriber:
        for n in range(3):
            sender = child(SENDER, socket)
            assert sender.says() == "ready"
            sender.tell("send")
            assert sender.says() == "sent"
            sender.kill()
            sample = subscriber.recv(WATCHDOG)
            assert (sample.sequence, sample.position) == (0, n)
            sample.check()


def test_evicted_process_gets_an_error(frames, child, socket, domain):
    reader = child(
        """
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    subscriber = frames.subscriber()
    say("ready")
    told()
    try:
        subscriber.recv()
    except pw.Evicted:
        say("evicted")
""",
        socket,
    )
    assert reader.says() == "ready"
    domain.evict(reader.process.pid)
    reader.tell()
    assert reader.says() == "evicted"


def test_forked_child_gets_an_error(frames, child, socket):
    forker = child(
        """
import os, warnings
warnings.simplefilter("ignore")
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    publisher, subscriber = frames.publisher(), frames.subscriber()
    publisher.send(b"1")
    publisher.send(b"2")
    sample = subscriber.recv()
    if os.fork() == 0:
        told = []
        receive = (subscriber.recv, subscriber.try_recv)
        for use in (frames.publisher, frames.subscriber, lambda: publisher.send(b"3"), *receive):
            try:
                use()
            except pw.Forked:
                told.append("forked")
        del sample
        say(*told)
        os._exit(0)
    os.wait()
    say(sample.tobytes(), subscriber.recv(0).tobytes(), publisher.send(b"3"))
""",
        socket,
    )
    assert forker.says() == "forked forked forked forked forked"
    assert forker.says() == "b'1' b'2' 2"


def test_forgotten_objects_warn_and_come_back(frames):
    for make in (frames.publisher, frames.subscriber):
        opened = make()
        with pytest.warns(ResourceWarning, match="unclosed <partywall"):
            del opened
            gc.collect()
    eventually(lambda: (frames.stats().publishers, frames.stats().subscribers) == (0, 0))
    with frames.publisher() as publisher:
        loan = publisher.loan(1, "uint8")
        array = np.asarray(loan)
        with pytest.warns(ResourceWarning, match="unclosed <partywall.Loan"):
            del loan
            gc.collect()
        assert frames.stats().held == 1, "arrays keep it"
        del array
        eventually(lambda: frames.stats().held == 0)


def test_forgotten_objects_are_released_at_once_if_no_thread_starts(frames, child, socket):
    forgetful = child(
        """
import os, resource, warnings
warnings.simplefilter("ignore")
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames:
    publisher, subscriber = frames.publisher(), frames.subscriber()
    publisher.send(b"1")
    # The subscriber's last user is then a sample of its own.
    subscriber._give_up(subscriber.recv())
    with open("/proc/self/statm") as sizes:
        pages = int(sizes.read().split()[0])
    # Too little for a thread's stack.
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**19, resource.RLIM_INFINITY))
    del subscriber
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    threads = []
    for task in os.listdir("/proc/self/task"):
        try:
            threads.append(open(f"/proc/self/task/{task}/comm").read().strip())
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended since it was listed
    say("partywall-reaper" in threads, frames.stats().subscribers)
    publisher.close()
""",
        socket,
        GLIBC_TUNABLES="glibc.pthread.stack_cache_size=0",
    )
    assert forgetful.says() == "False 0"


# Holds 204.
def test_publisher_of_a_removed_topic_is_told(domain, socket):
    frames = domain.topic("frames", max_bytes=8, device="host")
    publisher, subscriber = frames.publisher(), frames.subscriber()
    publisher.check()
    domain.rm("frames")
    with pytest.raises(pw.NameNotFound, match="was removed by"):
        publisher.check()
    publisher.send(b"x", timeout=WATCHDOG)
    subscriber.recv(WATCHDOG).close()
    with domain.topic("frames", max_bytes=8, device="host"):
        with pytest.raises(pw.VersionNotFound):
            publisher.check()
    publisher.close()
    with pytest.raises(pw.Closed):
        publisher.check()
    subscriber.close()
    frames.close()
