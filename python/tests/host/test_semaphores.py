"""Permits that processes, threads and tasks exchange."""

import asyncio
import contextlib
import gc
import pickle
import threading
import warnings

import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually

HOLDER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.semaphore("s", 1) as s:
    say("has it")
    told()
"""


@pytest.fixture
def semaphore(domain):
    opened = domain.semaphore("s", 1)
    yield opened
    opened.close()


def test_no_more_permits_are_held_than_there_are(domain, child):
    s = domain.semaphore("s", 2)
    assert (s.name, s.maximum, s.available, s.waiting) == ("s", 2, 2, 0)
    other = domain.semaphore("s", 2)
    with s.acquire() as one, other.acquire(0) as two:
        assert s.available == 0 and one.held and two.held
        assert s.try_acquire() is None
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError, match='a permit of semaphore "s": none was given back'):
                s.acquire(timeout)
        two.release()
        again = s.try_acquire()
        assert again is not None
        again.release()
    assert not one.held and s.available == 2
    with s, s:
        assert other.available == 0
    assert other.available == 2
    s.close()
    other.close()


def test_a_permit_is_given_back_once(semaphore):
    permit = semaphore.acquire()
    assert repr(permit) == "<partywall.Permit of s: held>"
    permit.release()
    assert repr(permit) == "<partywall.Permit of s: given back>"
    with pytest.raises(RuntimeError, match="is not held") as raised:
        permit.release()
    assert isinstance(raised.value, pw.NotHeld) and raised.value.anchor == "not-held"
    # A release inside the block counts.
    with semaphore.acquire() as permit:
        permit.release()
    assert semaphore.available == 1


def test_it_is_given_back_when_the_body_fails(semaphore):
    for enter in (lambda: semaphore, semaphore.acquire):
        with pytest.raises(ZeroDivisionError), enter():
            assert semaphore.available == 0
            _ = 1 / 0
        assert semaphore.available == 1


def test_numbers_of_permits(domain, semaphore):
    with pytest.raises(ValueError, match="has 1 permits, not 2") as raised:
        domain.semaphore("s", 2)
    assert isinstance(raised.value, pw.WrongMaximum) and raised.value.anchor == "wrong-maximum"
    for bad in (0, 65_537):
        with pytest.raises(pw.WrongMaximum, match="1 to 65536"):
            domain.semaphore("x", bad)
    for bad in (-1, 1 << 32):
        with pytest.raises(ValueError, match="65,536"):
            domain.semaphore("x", bad)
    with contextlib.closing(domain.semaphore("x", 65_536)) as many:
        assert many.available == 65_536


def test_objects_left_open_warn(domain):
    opened = domain.semaphore("s", 1)
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Permit of s: held>"):
        opened.acquire()
        gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert opened.available == 1
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Semaphore s: 1 of 1 free, 0 waiting>"):
        del opened
        gc.collect()


def test_closed_semaphore_is_an_error_and_ends_its_waits(domain, semaphore):
    other, failed = domain.semaphore("s", 1), []

    def wait() -> None:
        try:
            other.acquire()
        except pw.Closed as error:
            failed.append(error)

    with semaphore.acquire():
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: semaphore.waiting == 1)
        other.close()
        other.close()
        thread.join(WATCHDOG)
        assert len(failed) == 1 and semaphore.waiting == 0
    for use in (other.acquire, other.try_acquire, lambda: other.available, lambda: other.waiting):
        with pytest.raises(pw.Closed, match="this semaphore is closed"):
            use()
    assert repr(other) == "<partywall.Semaphore s: closed>"
    with semaphore.acquire() as permit:
        for thing in (semaphore, permit):
            with pytest.raises(TypeError):
                pickle.dumps(thing)


def test_a_permit_outlives_its_handle_and_its_connection(socket):
    with pw.connect(socket=socket) as domain, pw.connect(socket=socket) as other:
        s = domain.semaphore("s", 1)
        permit = s.acquire()
        s.close()
        domain.close()
        with_other = other.semaphore("s", 1)
        assert with_other.try_acquire() is None
        permit.release()
        with_other.acquire(WATCHDOG).release()
        with_other.close()


def test_the_permits_of_the_dead_come_back(semaphore, child):
    for _ in range(2):
        holder = child(HOLDER, semaphore._domain.socket)
        assert holder.says() == "has it"
        assert semaphore.try_acquire() is None
        holder.kill()
        semaphore.acquire(WATCHDOG).release()


# Holds 244.
def test_waiters_are_served_in_order_however_long_it_takes(semaphore):
    order = []

    def wait(number: int) -> None:
        with semaphore.acquire(WATCHDOG):
            order.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
    with semaphore.acquire():
        for number, thread in enumerate(threads, 1):
            thread.start()
            eventually(lambda number=number: semaphore.waiting == number)
        # Waiters check for signals repeatedly, and keep their place in the order.
        threads[0].join(0.3)
    for thread in threads:
        thread.join(WATCHDOG)
    assert order == list(range(5))


# Holds 249.
def test_tasks_have_permits(domain):
    async def main() -> None:
        with_two = domain.semaphore("two", 2)
        inside = most = 0

        async def work() -> None:
            nonlocal inside, most
            async with with_two:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work() for _ in range(10)))
        assert most == 2 and with_two.available == 2
        with await with_two.acquire_async(), await with_two.acquire_async(0):
            with pytest.raises(TimeoutError) as raised:
                await with_two.acquire_async(0.01)
            assert isinstance(raised.value, pw.TimeoutError)
            cancelled = asyncio.create_task(with_two.acquire_async())
            while with_two.waiting == 0:
                await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            while with_two.waiting != 0:
                await asyncio.sleep(0)
            closing = asyncio.create_task(with_two.acquire_async())
            while with_two.waiting == 0:
                await asyncio.sleep(0)
            with_two.close()
            with pytest.raises(pw.Closed):
                await closing

    asyncio.run(main())


def test_a_loop_that_ends_leaves_no_waiter_and_no_permit(semaphore):
    async def leave() -> None:
        waiting = asyncio.create_task(semaphore.acquire_async())
        while semaphore.waiting == 0:
            await asyncio.sleep(0)
        # The end of the loop cancels the task.
        del waiting

    with semaphore.acquire():
        asyncio.run(leave())
        eventually(lambda: semaphore.waiting == 0)
    with semaphore.acquire(WATCHDOG):
        pass


@pytest.mark.parametrize("when", ["before the permit is delivered", "after the permit is delivered"])
def test_a_permit_of_a_cancelled_task_is_given_back(semaphore, when):
    async def main() -> None:
        held = semaphore.acquire()
        waiting = asyncio.create_task(semaphore.acquire_async())
        while semaphore.waiting == 0:
            await asyncio.sleep(0)
        held.release()
        # Without a step of the loop, which does not see the permit before.
        eventually(lambda: all(thread.name != "partywall-acquire" for thread in threading.enumerate()))
        assert semaphore.available == 0
        if when.startswith("before"):
            waiting.cancel()
        else:
            asyncio.get_running_loop().call_soon(waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while semaphore.available == 0:
            await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not warned
