"""Forked children: what belongs to the parent stays so, and a child ends as it wants."""

import os
import threading

import pytest

import partywall as pw

from ..conftest import WATCHDOG, fork


def full_topic(d):
    topic = d.topic("frames", max_bytes=8, device="host")
    publisher, subscriber = topic.publisher(), topic.subscriber()
    publisher.send(b"x")
    return topic, publisher, subscriber


def tasks(d):
    queue = d.queue("tasks", tasks=2, outputs=(2, 8), device="host")
    queue.submit("work", output=8)
    return queue


def result(d):
    queue = tasks(d)
    ticket = queue.ticket(queue.tasks()[0].task)
    queue.claim().complete()
    return ticket.result()


# Each is entered by a `with`.
OBJECTS = {
    "domain": lambda d: pw.connect(socket=d.socket),
    "build": lambda d: d.create("x", 4, "uint8", device="host"),
    "segment": lambda d: d.create("x", 4, "uint8", device="host").commit(),
    "descriptors": lambda d: (d.create("x", 4, "uint8", device="host").commit(), d.descriptors("x"))[1],
    "pool": lambda d: d.pool("p", blocks=1, block_bytes=8, device="host"),
    "block": lambda d: d.pool("p", blocks=1, block_bytes=8, device="host").alloc(),
    "topic": lambda d: full_topic(d)[0],
    "publisher": lambda d: full_topic(d)[1],
    "loan": lambda d: full_topic(d)[1].loan((1,), "uint8"),
    "subscriber": lambda d: full_topic(d)[2],
    "sample": lambda d: full_topic(d)[2].recv(),
    "queue": lambda d: d.queue("tasks", tasks=1, device="host"),
    "task": lambda d: tasks(d).claim(),
    "result": result,
    "timeline": lambda d: d.timeline("t"),
    "writer": lambda d: d.timeline("t", writer=True),
    "event": lambda d: d.timeline("t").event(1),
    "semaphore": lambda d: d.semaphore("s", 1),
    "permit": lambda d: d.semaphore("s", 1).acquire(),
    "watch": lambda d: d.watch("x"),
}


# Holds 255.
@pytest.mark.parametrize("ends", ["leaves", "raises", "exits"])
@pytest.mark.parametrize("thing", OBJECTS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_forked_child_that_leaves_a_with_keeps_its_exit_code(domain, thing, ends):
    pid = None
    code = 1
    try:
        with OBJECTS[thing](domain):
            pid = fork()
            if pid == 0 and ends == "raises":
                raise LookupError
            if pid == 0 and ends == "exits":
                raise SystemExit(7)
        code = 7
    except LookupError:
        code = 7
    except SystemExit as end:
        code = end.code
    finally:
        if pid == 0:
            os._exit(code)
    watchdog = threading.Timer(WATCHDOG, os.kill, (pid, 9))
    watchdog.start()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    watchdog.cancel()
    assert domain.ps(), "the parent goes on"


def test_closing_a_block_in_a_forked_child_does_nothing(domain):
    with domain.pool("p", blocks=1, block_bytes=8, device="host") as pool, pool.alloc() as block:
        pid = fork()
        if pid == 0:
            try:
                block.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pool.try_alloc() is None, "it is the parent's"
