"""Timelines between processes, threads and tasks."""

import asyncio
import gc
import os
import pickle
import re
import select
import signal
import threading
import warnings

import pytest

import partywall as pw

from ..conftest import WATCHDOG, fork

WRITER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t", writer=True) as t:
    say(t.value)
    while line := told():
        t.signal(int(line))
        say(t.value)
"""


def test_a_value_is_signalled_in_one_process_and_waited_for_in_others(domain, child):
    with domain.timeline("t") as t:
        assert (t.name, t.value, t.announced, t.ending, t.is_writer) == ("t", 0, 0, None, False)
        writer = child(WRITER, domain.socket)
        reader = child(
            """
            with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t") as t:
                for value in (1, 5):
                    t.wait(value, 60)
                    say(value, t.value)
            """,
            domain.socket,
        )
        assert writer.says() == "0"
        writer.tell("1")
        assert reader.says() == "1 1"
        t.wait(1, 60)
        writer.tell("7")
        assert reader.says() == "5 7"
        t.wait_announced(7, 60)
        t.wait(2)
        assert (t.value, t.announced) == (7, 7)
        t.check()
        with pytest.raises(TimeoutError, match='value 8 of timeline "t" was not reached within 10 ms'):
            t.wait(8, 0.01)
        writer.tell()
        assert writer.end() == 0
        with pytest.raises(pw.WriterClosed, match="its writer closed it") as raised:
            t.wait(8, 60)
        assert isinstance(raised.value, pw.TimelineEnded) and raised.value.anchor == "timeline-closed"
        assert t.ending == "closed"


def test_a_killed_writer_ends_the_waits_and_the_next_one_goes_on(domain, child):
    writer = child(WRITER, domain.socket)
    assert writer.says() == "0"
    writer.tell("3")
    assert writer.says() == "3"
    with domain.timeline("t") as t:
        ended = []

        def wait() -> None:
            try:
                t.wait(4)
            except pw.WriterDied as error:
                ended.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        writer.kill()
        for thread in threads:
            thread.join(WATCHDOG)
        assert [(type(error), error.anchor) for error in ended] == [(pw.WriterDied, "writer-died")] * 3
        assert isinstance(ended[0], pw.OwnerDied) and isinstance(ended[0], ConnectionError)
        # Signalled values stay valid.
        t.wait(3, 0)
        t.check()
        assert (t.value, t.ending) == (3, "owner_died")
        assert not t.follow()
        with domain.timeline("t", writer=True) as anew:
            assert anew.value == 3
            assert t.follow()
            anew.signal(4)
            t.wait(4, 0)
            t.check()


def test_one_process_signals_and_only_larger_values(domain):
    with domain.timeline("t", writer=True) as writer, domain.timeline("t") as t:
        assert writer.is_writer
        with pytest.raises(FileExistsError) as raised:
            domain.timeline("t", writer=True)
        assert isinstance(raised.value, pw.WriterExists) and f"pid {os.getpid()}" in str(raised.value)
        with pytest.raises(PermissionError, match="writer=True") as raised:
            t.signal(1)
        assert isinstance(raised.value, pw.NotWriter)
        writer.signal(5)
        small, large = "greater than 5", "2^61"
        for bad, why in [(5, small), (3, small), ((1 << 61) + 1, large), ((1 << 64) - 1, large)]:
            with pytest.raises(ValueError, match=f"is not a valid next value .*{re.escape(why)}") as raised:
                writer.signal(bad)
            assert isinstance(raised.value, pw.BadValue)
        for bad in (-1, 1 << 64):
            with pytest.raises(pw.BadValue, match=rf"values of a timeline are 0 to 2\^61, not {bad}"):
                writer.signal(bad)
        with pytest.raises(TypeError):
            writer.signal(5.5)
        with pytest.raises(pw.BadValue):
            t.wait((1 << 61) + 1)
        writer.signal(1 << 61)
        t.wait(1 << 61, 0)
        with pytest.raises(ValueError, match="timeout"):
            t.wait(1, -1)
    with pytest.raises(ValueError, match="name"):
        domain.timeline("no/../name")


def test_any_process_abandons_it(domain):
    with domain.timeline("t", writer=True) as writer, domain.timeline("t") as t:
        writer.signal(1)
        t.abandon()
        for fail in (lambda: t.wait(2), lambda: writer.signal(2)):
            with pytest.raises(pw.Abandoned):
                fail()
        assert t.ending == "abandoned"


def test_closed_semaphore_is_an_error_and_ends_its_waits(domain):
    t = domain.timeline("t")
    failed = []

    def wait() -> None:
        try:
            t.wait(1)
        except pw.Closed as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert repr(t) == "<partywall.Timeline t: at 0 of 0>"
    t.close()
    t.close()
    thread.join(WATCHDOG)
    assert len(failed) == 1 and t.closed
    for use in (lambda: t.value, t.check, t.follow, lambda: t.wait(0), lambda: t.event(1)):
        with pytest.raises(pw.Closed, match="this timeline is closed"):
            use()
    assert repr(t) == "<partywall.Timeline t: closed>"


def test_a_repr_says_where_it_is(domain):
    with domain.timeline("t", writer=True) as t:
        t.signal(3)
        assert repr(t) == "<partywall.Timeline t: writer, at 3 of 3>"
        t.abandon()
        assert repr(t) == "<partywall.Timeline t: writer, at 3 of 3, abandoned>"
        with t.event(3) as event:
            assert repr(event) == "<partywall.TimelineEvent of 3>"
        assert repr(event) == "<partywall.TimelineEvent of 3: closed>"
        with pytest.raises(TypeError, match="send the name"):
            pickle.dumps(t)


def test_objects_left_open_warn(domain):
    opened = [domain.timeline("t"), domain.timeline("t", writer=True)]
    opened.append(opened[0].event(1))
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Timeline") as warned:
        del opened
        gc.collect()
    assert len(warned) == 3
    # It has what it warns of.
    del warned
    assert pw._native.flush(WATCHDOG)
    domain.timeline("t", writer=True).close()


def test_a_descriptor_is_readable_once_the_value_is_reached(domain):
    with domain.timeline("t", writer=True) as writer, domain.timeline("t") as t:
        with t.event(1) as one, t.event(2) as two:
            assert select.select([one, two], [], [], 0) == ([], [], [])
            assert not one.check()
            writer.signal(1)
            assert select.select([one, two], [], [], WATCHDOG) == ([one], [], [])
            assert one.check() and not two.check()
            writer.close()
            assert select.select([two], [], [], WATCHDOG) == ([two], [], [])
            with pytest.raises(pw.WriterClosed):
                two.check()
        with t.event(1) as reached:
            assert select.select([reached], [], [], WATCHDOG) == ([reached], [], []) and reached.check()
        one.close()
        for use in (one.check, one.fileno):
            with pytest.raises(pw.Closed, match="this event is closed"):
                use()


# Holds 249.
def test_tasks_wait_beside_each_other(domain):
    async def main() -> None:
        with domain.timeline("t", writer=True) as writer, domain.timeline("t") as t:
            order = []

            async def wait(value: int) -> None:
                await t.wait_async(value, WATCHDOG)
                order.append(value)

            tasks = [asyncio.create_task(wait(value)) for value in (3, 1, 2, 2)]
            cancelled = asyncio.create_task(t.wait_async(9))
            await asyncio.sleep(0)
            for value in (1, 2, 3):
                writer.signal(value)
                await t.wait_async(value)
                while len(order) < (0, 1, 3, 4)[value]:
                    await asyncio.sleep(0)
            assert order == [1, 2, 2, 3]
            await asyncio.gather(*tasks)
            await t.wait_async(3, 0)
            with pytest.raises(TimeoutError, match='value 4 of timeline "t" was not reached') as raised:
                await t.wait_async(4, 0.01)
            assert isinstance(raised.value, pw.TimeoutError) and raised.value.anchor == "timeout"
            with pytest.raises(ValueError, match="timeout"):
                await t.wait_async(4, -1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            # The timeout of an outer block raises the error of that block.
            with pytest.raises(TimeoutError) as raised:
                async with asyncio.timeout(0.01):
                    await t.wait_async(4, WATCHDOG)
            assert not isinstance(raised.value, pw.Error)
            ended = [asyncio.create_task(t.wait_async(5)) for _ in range(3)]
            await asyncio.sleep(0)
            writer.close()
            for task in ended:
                with pytest.raises(pw.WriterClosed):
                    await task

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert pw._native.flush(WATCHDOG)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_awaiting_task_gets_an_error_when_the_writer_is_killed(domain, child):
    async def main() -> None:
        with domain.timeline("t") as t:
            waiting = asyncio.create_task(t.wait_async(4, WATCHDOG))
            await asyncio.sleep(0)
            writer.kill()
            with pytest.raises(pw.WriterDied):
                await waiting

    writer = child(WRITER, domain.socket)
    assert writer.says() == "0"
    asyncio.run(main())


def test_a_broker_that_is_gone_ends_the_waits(domain):
    with domain.timeline("t") as t:
        failed = []

        def wait() -> None:
            try:
                t.wait(1)
            except pw.TimelineLost as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        domain._native.stop_broker(True)
        thread.join(WATCHDOG)
        assert isinstance(failed[0], pw.BrokerGone) and isinstance(failed[0], pw.TimelineEnded)
        with pytest.raises(pw.BrokerGone):
            domain.semaphore("s", 1)


COMPILED = "<string>"
"""The file of the innermost frame while a compiled method waits: that of its caller."""

WAITS = {
    "a value": ("t.wait(1)", COMPILED),
    "a promise": ("t.wait_announced(1)", COMPILED),
    "a value, for a time": ("t.wait(1, 3600)", COMPILED),
    "a permit": ("s.acquire()", COMPILED),
    "a permit, with": ("s.__enter__()", "_semaphore.py"),
    "an event": ("d.watch().next()", COMPILED),
    "a task": ("asyncio.run(t.wait_async(1))", "selectors.py"),
}


# Holds 30.
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(socket, child, wait):
    call, file = WAITS[wait]
    waiter = child(
        f"""
        import asyncio, signal, warnings
        warnings.simplefilter("ignore", ResourceWarning)
        begun = False
        def handle(_, frame):
            if begun and frame.f_code.co_filename.endswith({file!r}):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handle)
        with pw.connect(socket=sys.argv[1]) as d, d.timeline("t") as t, d.semaphore("s", 1).acquire():
            s = d.semaphore("s", 1)
            say("waiting")
            try:
                begun = True
                {call}
            except KeyboardInterrupt:
                say("interrupted", s.waiting)
        """,
        socket,
    )
    assert waiter.says() == "waiting"
    assert waiter.interrupt() == "interrupted 0"
    assert waiter.end() == 0


def test_error_in_a_forked_child_says_to_connect_again(domain):
    writer, t, s = domain.timeline("t", writer=True), domain.timeline("t"), domain.semaphore("s", 2)
    permit, watch, event = s.acquire(), domain.watch(), t.event(1)
    uses = [
        lambda: t.wait(1, 0),
        lambda: t.event(1),
        t.follow,
        lambda: writer.signal(1),
        lambda: s.acquire(0),
        s.try_acquire,
        permit.release,
        lambda: watch.next(0),
        domain.ps,
    ]
    pid = fork()
    if pid == 0:
        wrong = 0
        try:
            for number, use in enumerate(uses):
                try:
                    use()
                    wrong |= 1 << number
                except pw.Forked:
                    pass
            for thing in (event, watch, permit, s, t, writer):
                getattr(thing, "close", int)()
        except BaseException:
            wrong |= 1 << 30
        finally:
            print(f"{wrong:b}", flush=True) if wrong else None
            os._exit(wrong != 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The child's end has not changed the parent's objects.
    writer.signal(1)
    t.wait(1, 0)
    assert s.available == 1 and permit.held
    permit.release()
    for thing in (event, watch, s, t, writer):
        thing.close()


def test_threads_share_a_handle(domain):
    with domain.timeline("t", writer=True) as writer, domain.timeline("t") as t:
        reached = []

        def wait(value: int) -> None:
            t.wait(value, WATCHDOG)
            reached.append(value)

        threads = [threading.Thread(target=wait, args=(value,)) for value in range(1, 9)]
        for thread in threads:
            thread.start()
        for value in range(1, 9):
            writer.signal(value)
        for thread in threads:
            thread.join(WATCHDOG)
        assert sorted(reached) == list(range(1, 9))
