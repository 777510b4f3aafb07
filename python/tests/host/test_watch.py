"""Events and members of a domain."""

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG


def test_names_come_and_go(domain, child):
    with domain.watch("models/*") as watch, domain.watch() as everything:
        assert watch.pattern == "models/*" and watch.point.endswith("-0")
        start = watch.point
        before = time.time() - 1
        domain.put("other", b"x").close()
        with domain.put("models/a", np.zeros(9)) as put, domain.timeline("models/t"):
            events = [watch.next(WATCHDOG) for _ in range(3)]
            assert events[1].nbytes == put.nbytes
        told = [(event.event, event.named, event.name, event.version, event.pid) for event in events]
        pid = os.getpid()
        assert told == [
            ("created", "segment", "models/a", None, pid),
            ("committed", "segment", "models/a", 1, pid),
            ("created", "timeline", "models/t", None, pid),
        ]
        assert before < events[0].at < time.time() + 1
        assert watch.point == events[-1].point
        events += [watch.next(WATCHDOG) for _ in range(3)]
        assert {(event.event, event.name) for event in events[3:]} == {
            ("withdrawn", "models/t"),
            ("withdrawn", "models/a"),
            ("reclaimed", "models/a"),
        }
        with pytest.raises(TimeoutError, match="an event of a name like"):
            watch.next(0.01)
        # From a point on, in whatever process, it is told again.
        again = child(
            """
            with pw.connect(socket=sys.argv[1], start=False) as d, d.watch("models/*", after=sys.argv[2]) as watch:
                for event, _ in zip(watch, range(6)):
                    say(event.event, event.name)
            """,
            domain.socket,
            start,
        )
        assert [again.says() for _ in range(6)] == [f"{event.event} {event.name}" for event in events]
        assert next(everything).name == "other"


def test_points_and_patterns_are_checked(domain):
    with pytest.raises(ValueError, match="no point to resume from"):
        domain.watch(after="yesterday")
    with pytest.raises(ValueError, match="is not a pattern") as raised:
        domain.watch("[a]")
    assert isinstance(raised.value, pw.BadPattern)
    with domain.watch(after="00000000000000ab-7") as watch:
        missed = watch.next(WATCHDOG)
        # The point is of another broker, so the number of missed events is unknown.
        assert (missed.event, missed.name, missed.missed) == ("missed", None, None)


def test_a_watch_is_closed_during_a_wait(domain):
    watch, failed = domain.watch(), []

    def wait() -> None:
        try:
            watch.next()
        except pw.Closed as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert repr(watch).startswith("<partywall.Watch of *: at ")
    with pytest.raises(TypeError, match="send its point"):
        pickle.dumps(watch)
    watch.close()
    watch.close()
    thread.join(WATCHDOG)
    assert len(failed) == 1 and repr(watch) == "<partywall.Watch of *: closed>"
    with pytest.raises(pw.Closed):
        _ = watch.point
    left = domain.watch("left")
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Watch of left"):
        del left


HOLDER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x"), d.timeline("t", writer=True), d.semaphore("s", 3):
    say("ready")
    told()
    try:
        d.ls()
    except pw.Evicted as error:
        say(error.anchor, isinstance(error, ConnectionError))
"""


def test_ps_lists_members_and_what_they_hold(domain, child):
    with (
        domain.put("x", np.zeros(1 << 16)) as put,
        domain.pool("p", blocks=3, block_bytes=9, device="host") as pool,
        pool.alloc(),
        pool.alloc(),
    ):
        holder = child(HOLDER, domain.socket)
        assert holder.says() == "ready"
        ours, theirs = domain.ps()
        assert (ours.blocks, theirs.blocks) == (2, 0)
        assert (ours.pid, ours.member, ours.uid) == (os.getpid(), domain._native.member, os.getuid())
        assert theirs.pid == holder.process.pid and "python" in theirs.command
        assert (theirs.state, theirs.doubt, theirs.simulated) == ("alive", None, ours.simulated)
        assert (theirs.nbytes, theirs.leases, theirs.timelines, theirs.permits) == (put.nbytes, 3, 1, 1)
        assert ours.since <= theirs.since <= time.time() + 1
        assert theirs.quiet is None or theirs.quiet >= 0
        holder.tell()
        assert holder.end() == 0


WAITER = """
import threading

with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t") as t:
    def open_later():
        d.open("later", 60).close()

    thread = threading.Thread(target=open_later)
    thread.start()
    say("ready")
    try:
        t.wait(7, 60)
    except pw.Abandoned:
        thread.join()
"""


# Holds 318.
def test_ps_lists_what_members_wait_for(domain, child):
    with domain.timeline("t") as t:
        holder = child(WAITER, domain.socket)
        assert holder.says() == "ready"
        pid = holder.process.pid

        def waits():
            return [wait for member in domain.ps() if member.pid == pid for wait in member.waits]

        end = time.monotonic() + WATCHDOG
        # On a busy machine the wait for the timeline may be missing between two of its slices.
        while len(found := waits()) < 2:
            assert time.monotonic() < end, "it does not wait"
            time.sleep(0.01)
        name, line = found
        assert name == pw.MemberWait("commit", "later", None, None, None)
        assert (line.on, line.name, line.target, line.by) == ("timeline", "t", 7, None) and line.seconds > 0
        t.abandon()
        domain.put("later", np.zeros(1), kept=True)
        assert holder.end() == 0


def test_evicted_process_can_open_nothing(domain, child):
    with domain.put("x", np.zeros(9)) as put, domain.timeline("t") as t:
        holder = child(HOLDER, domain.socket)
        assert holder.says() == "ready"
        pid = holder.process.pid
        [evicted] = domain.evict(pid)
        assert (evicted.pid, evicted.nbytes, evicted.kill, evicted.errno) == (pid, put.nbytes, "not_asked", None)
        with pytest.raises(pw.WriterEvicted):
            t.wait(1, WATCHDOG)
        assert [member.state for member in domain.ps() if member.pid == pid] == ["evicted"]
        holder.tell()
        assert holder.says() == "evicted True"


def test_evict_kills_on_request(domain, child):
    with domain.put("x", np.zeros(9)):
        holder = child(HOLDER, domain.socket)
        assert holder.says() == "ready"
        [evicted] = domain.evict(holder.process.pid, kill=True)
        assert evicted.kill == "sent"
        assert holder.end() == -signal.SIGKILL
        watchdog = time.monotonic() + WATCHDOG
        while len(domain.ps()) > 1:
            assert time.monotonic() < watchdog
            time.sleep(0.01)


def test_evicting_oneself_or_a_stranger_is_refused(domain):
    with pytest.raises(ValueError, match="cannot evict itself") as raised:
        domain.evict(os.getpid())
    assert isinstance(raised.value, pw.NotYourself)
    with pytest.raises(LookupError, match="no member has pid 1") as raised:
        domain.evict(1)
    assert isinstance(raised.value, pw.NoSuchMember) and raised.value.anchor == "no-such-member"
