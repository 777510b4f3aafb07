# Holds 244.
"""Exceptions that another thread sets, as debuggers and test frameworks do, end a wait. So does closing the object."""

import asyncio
import ctypes
import gc
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


def loan(publisher: pw.Publisher) -> None:
    with publisher.loan((1,), "uint8"):
        """Its end waits for the subscriber."""


def tasks(d: pw.Domain) -> pw.Queue:
    queue = d.queue("tasks", tasks=1, inputs=(1, 8), device="host")
    queue.submit("work")
    return queue


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
    "loan": (full, lambda d, ends: loan(ends[0])),
    "descriptors": (lambda d: None, lambda d, _: d.descriptors("never", None)),
    "queue": (lambda d: None, lambda d, _: d.queue("never", timeout=WATCHDOG * 9)),
    "claim": (tasks, lambda d, queue: [queue.claim(), queue.claim()]),
    "claims": (tasks, lambda d, queue: [task.fail("") for task in queue.claims()]),
    "claim_all": (tasks, lambda d, queue: [queue.claim(), queue.claim_all(2)]),
    "submit": (tasks, lambda d, queue: queue.submit("more")),
    "result": (tasks, lambda d, queue: queue.ticket(queue.tasks()[0].task).result()),
    "outcome of a task": (tasks, lambda d, queue: queue.ticket(queue.tasks()[0].task).exception()),
    "withdrawal of a queue": (tasks, lambda d, queue: queue.wait_withdrawn()),
    "announcement": (lambda d: d.timeline("line"), lambda d, line: line.wait_announced(1)),
    "newer version": (growing, lambda d, log: log._newer(7, None)),
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


def closed_by(domain: pw.Domain, made: object) -> object:
    """Returns the object whose wait it is."""
    if isinstance(made, tuple):
        return made[0]
    return made if hasattr(made, "close") else domain


# Holds 245.
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_an_object_ends_a_wait_of_another_thread(domain, wait):
    prepare, block = WAITS[wait]
    made, ended = prepare(domain), []
    thing = closed_by(domain, made)
    if wait in ("sample", "loop"):
        thing = made[1]
    elif wait == "open_or_build":
        thing = domain

    def run() -> None:
        try:
            ended.append(block(domain, made))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # It most likely waits by now; if it does not, it finds the object closed.
    time.sleep(0.2)
    assert not ended
    thing.close()
    thread.join(WATCHDOG)
    assert ended and (isinstance(ended[0], pw.Closed) or wait in ("loop",) and len(ended[0]) == 1), ended
    del made, thing, ended[:]
    gc.collect()


async def received(ends: tuple[pw.Publisher, pw.Subscriber]) -> None:
    (await ends[1].recv_async()).close()
    await ends[1].recv_async()


# Each with the objects that it needs, the one that is closed, and the wait.
ASYNC_WAITS: dict[str, tuple[Callable[[pw.Domain], object], Callable[[object], object], Callable[[object], object]]] = {
    "ticket": (tasks, lambda queue: queue, lambda queue: waited(queue.ticket(queue.tasks()[0].task))),
    "timeline": (lambda d: d.timeline("line"), lambda line: line, lambda line: line.wait_async(1)),
    "semaphore": (
        lambda d: (d.semaphore("s", 1), d.semaphore("s", 1).acquire()),
        lambda held: held[0],
        lambda held: held[0].acquire_async(),
    ),
    "sample": (full, lambda ends: ends[1], received),
}


async def waited(ticket: pw.Ticket) -> pw.TaskResult:
    return await ticket


# Holds 245.
@pytest.mark.parametrize("wait", ASYNC_WAITS)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_an_object_ends_a_wait_in_an_event_loop(domain, wait):
    prepare, closed, begin = ASYNC_WAITS[wait]
    made = prepare(domain)

    async def run() -> None:
        waiting = asyncio.ensure_future(begin(made))
        # It most likely waits by now; if it does not, it finds the object closed.
        await asyncio.sleep(0.1)
        assert not waiting.done()
        closed(made).close()
        with pytest.raises(pw.Closed):
            await asyncio.wait_for(waiting, WATCHDOG)

    asyncio.run(run())
    del made
    gc.collect()


# Holds 245.
def test_ticket_of_a_closed_queue_can_be_awaited(domain):
    queue = tasks(domain)
    ticket = queue.ticket(queue.tasks()[0].task)
    with domain.queue("tasks") as worker:
        queue.close()

        async def run() -> None:
            waiting = asyncio.ensure_future(waited(ticket))
            await asyncio.sleep(0.1)
            worker.claim(WATCHDOG).complete()
            (await asyncio.wait_for(waiting, WATCHDOG)).release()

        asyncio.run(run())


def test_ticket_of_a_closed_queue_can_be_waited_for(domain):
    queue = tasks(domain)
    ticket = queue.ticket(queue.tasks()[0].task)
    with domain.queue("tasks") as worker:
        queue.close()
        with pytest.raises(TimeoutError):
            ticket.result(0.01)
        worker.claim(WATCHDOG).complete()
    ticket.result(WATCHDOG).release()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_loan_of_a_closed_publisher_can_be_published(domain):
    publisher, subscriber = full(domain)
    with publisher.loan((1,), "uint8") as out:
        publisher.close()
        subscriber.recv(WATCHDOG).close()
        assert not out.closed
    with subscriber.recv(WATCHDOG) as sample:
        assert sample.sequence == 1
    subscriber.close()
    gc.collect()


NAN = float("nan")


@pytest.mark.parametrize("wait", sorted(TIMED := {
    "open": lambda d: d.open("x", NAN),
    "descriptors": lambda d: d.descriptors("x", NAN),
    "open_or_build": lambda d: d.open_or_build("x", print, timeout=NAN),
    "pool": lambda d: d.pool("x", timeout=NAN),
    "topic": lambda d: d.topic("x", timeout=NAN),
    "queue": lambda d: d.queue("x", timeout=NAN),
    "remove": lambda d: d.rm("x", deadline=NAN),
    "semaphore": lambda d: d.semaphore("s", 1).acquire(NAN),
    "semaphore in an event loop": lambda d: asyncio.run(d.semaphore("s", 1).acquire_async(NAN)),
    "timeline": lambda d: d.timeline("t").wait(1, NAN),
    "announcement": lambda d: d.timeline("t").wait_announced(1, NAN),
    "timeline in an event loop": lambda d: asyncio.run(d.timeline("t").wait_async(1, NAN)),
    "lease": lambda d: d.queue("q", tasks=1, lease=NAN),
    "submit": lambda d: tasks(d).submit("x", timeout=NAN),
    "submit an array": lambda d: tasks(d).submit("x", [b"x"], timeout=NAN),
    "submit_all": lambda d: tasks(d).submit_all([pw.Task("x", [b"x"])], timeout=NAN),
    "claim": lambda d: tasks(d).claim(NAN),
    "claim_all": lambda d: tasks(d).claim_all(1, NAN),
    "claims": lambda d: next(iter(tasks(d).claims(NAN))),
    "result": lambda d: (queue := tasks(d)).ticket(queue.tasks()[0].task).result(NAN),
    "exception": lambda d: (queue := tasks(d)).ticket(queue.tasks()[0].task).exception(NAN),
    "extend": lambda d: tasks(d).claim(0).extend(NAN),
    "inputs": lambda d: tasks(d).claim(0).wait_inputs(NAN),
    "subscribers": lambda d: full(d)[0].wait_for_subscribers(timeout=NAN),
    "sample": lambda d: full(d)[1].recv(NAN),
    "sample in an event loop": lambda d: asyncio.run(full(d)[1].recv_async(NAN)),
    "send": lambda d: full(d)[0].send(b"x", timeout=NAN),
    "loan": lambda d: full(d)[0].loan((1,), "uint8", timeout=NAN),
    "growth": lambda d: growing(d).wait_growth(NAN),
    "withdrawal": lambda d: growing(d).wait_withdrawn(NAN),
    "event": lambda d: d.watch("x").next(NAN),
    "flush": lambda d: pw._native.flush(NAN),
}))
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_nan_is_no_timeout(domain, wait):
    with pytest.raises(ValueError, match="nan|NaN"):
        TIMED[wait](domain)
    gc.collect()


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
