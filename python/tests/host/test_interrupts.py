"""Exceptions that another thread sets, as debuggers and test frameworks do, end a wait."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

import partywall as pw

from ..conftest import WATCHDOG


class Stop(Exception):
    """The exception that another thread sets."""


def growing(d: pw.Domain) -> object:
    return d.create("log", 1, "uint8", device="host", mutable=True, reserve=1 << 20).commit()


def full(d: pw.Domain) -> tuple[pw.Publisher, pw.Subscriber]:
    topic = d.topic("frames", max_bytes=8, depth=1, device="host")
    publisher, subscriber = topic.publisher(), topic.subscriber()
    publisher.send(b"1")
    return publisher, subscriber


# Each with the objects that it needs, and the wait.
WAITS: dict[str, tuple[Callable[[pw.Domain], object], Callable[[pw.Domain, object], object]]] = {
    "open": (lambda d: None, lambda d, _: d.open("never", None)),
    "open_or_build": (lambda d: d._native.open_or_build("taken", 0.0), lambda d, _: d.open_or_build("taken", print)),
    "pool": (lambda d: None, lambda d, _: d.pool("never", timeout=WATCHDOG * 9)),
    "topic": (lambda d: None, lambda d, _: d.topic("never", timeout=WATCHDOG * 9)),
    "timeline": (lambda d: d.timeline("line"), lambda d, line: line.wait(1)),
    "semaphore": (lambda d: (d.semaphore("s", 1), d.semaphore("s", 1).acquire()), lambda d, held: held[0].acquire()),
    "block": (
        lambda d: (pool := d.pool("p", blocks=1, block_bytes=8, device="host"), pool.alloc()),
        lambda d, held: held[0].alloc(),
    ),
    "sample": (full, lambda d, ends: [ends[1].recv(), ends[1].recv()]),
    "loop": (full, lambda d, ends: list(ends[1])),
    "send": (full, lambda d, ends: ends[0].send(b"2")),
    "growth": (growing, lambda d, log: log.wait_growth()),
    "withdrawal": (growing, lambda d, log: log.wait_withdrawn()),
    "withdrawal of a pool": (
        lambda d: d.pool("p", blocks=1, block_bytes=8, device="host"),
        lambda d, pool: pool.wait_withdrawn(),
    ),
    "event": (lambda d: d.watch("never"), lambda d, watch: watch.next()),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_of_another_thread_ends_a_wait(domain, wait):
    prepare, block = WAITS[wait]
    made, waiting, ended = prepare(domain), threading.Event(), []

    def run() -> None:
        try:
            waiting.set()
            block(domain, made)
        except Stop:
            ended.append(Stop)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert waiting.wait(WATCHDOG)
    # Most likely set during the wait; if it is set before, the wait ends immediately.
    time.sleep(0.2)
    assert thread.is_alive()
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop)) == 1
    thread.join(WATCHDOG)
    if thread.is_alive():
        domain.close()
        pytest.fail("the exception was not seen")
    assert ended == [Stop]


def test_a_waiter_that_is_looked_after_keeps_its_place(domain):
    semaphore = domain.semaphore("s", 1)
    held, order = semaphore.acquire(), []

    def take(number: int) -> None:
        with semaphore.acquire():
            order.append(number)

    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=take, args=(number,)))
        threads[-1].start()
        while semaphore.waiting <= number:
            time.sleep(0.001)
    # Several times as long as a waiter sleeps before it runs Python code.
    time.sleep(0.35)
    held.release()
    for thread in threads:
        thread.join(WATCHDOG)
    assert order == [0, 1, 2]
    semaphore.close()
