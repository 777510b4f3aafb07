# Holds 29.
"""Lifetimes: what releases memory, when, and on which thread."""

import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import partywall as pw

from ..conftest import PRELUDE, WATCHDOG, fork

ROUNDS = 100


def together(*works: Callable[[], object]) -> None:
    """Runs all works at the same time. Raises the exception of one that fails."""
    start, failed = threading.Barrier(len(works)), []

    def work(does: Callable[[], object]) -> None:
        start.wait()
        try:
            does()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(does,)) for does in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def use(thing: pw.Segment | pw.Build) -> None:
    """Uses the object in every way until another thread has closed it."""
    try:
        for _ in range(5):
            assert repr(thing)
            assert len(list(thing.items())) == 1
            assert thing.tobytes()[-8:] == np.int64(999).tobytes()
            assert np.from_dlpack(thing)[999] == np.asarray(memoryview(thing["data"]))[999] == 999
    except pw.Closed:
        pass


def everything_is_back(domain: pw.Domain) -> bool:
    return pw._native.flush(WATCHDOG) and domain.ls() == []


def test_two_threads_close_a_segment_that_others_read(domain):
    for _ in range(ROUNDS):
        segment = domain.put("x", np.arange(1000))
        together(segment.close, segment.close, lambda: use(segment), lambda: use(segment))
    assert everything_is_back(domain)


def test_a_build_is_closed_committed_written_and_read_at_once(domain):
    def commit() -> None:
        try:
            build.commit().close()
        except pw.Closed:
            pass

    def write() -> None:
        try:
            build.write(np.arange(1000))
        except (pw.Closed, pw.ReadOnly):
            pass

    for _ in range(ROUNDS):
        build = domain.create("x", 1000, "int64", device="host")
        build.write(np.arange(1000))
        together(build.close, commit, write, lambda: use(build))
        build.close()
    assert everything_is_back(domain)


def test_a_connection_is_closed_while_others_ask(socket):
    def ask() -> None:
        try:
            for _ in range(20):
                assert connection.ls() == []
                assert repr(connection)
        except pw.Closed:
            pass

    for _ in range(ROUNDS // 4):
        connection = pw.connect(socket=socket)
        together(connection.close, connection.close, ask, ask)


def test_a_timeline_is_closed_while_others_use_it(domain):
    def use(timeline: pw.Timeline) -> None:
        try:
            for value in range(1, 20):
                assert repr(timeline)
                if timeline.is_writer:
                    timeline.signal(value)
                timeline.wait(value)
                timeline.event(value).close()
        except (pw.Closed, pw.TimelineEnded):
            pass

    for _ in range(ROUNDS // 2):
        t, writer = domain.timeline("t"), domain.timeline("t", writer=True)
        together(t.close, writer.close, lambda: use(t), lambda: use(writer), lambda: use(t))
    assert everything_is_back(domain)


def test_a_semaphore_is_closed_while_others_use_it(domain):
    def use() -> None:
        try:
            for _ in range(10):
                assert repr(s)
                with s:
                    s.acquire(10).release()
                    if permit := s.try_acquire():
                        permit.release()
        except pw.Closed:
            pass

    for _ in range(ROUNDS // 4):
        # One each for three that are inside, and one to go round.
        s = domain.semaphore("s", 4)
        together(s.close, s.close, use, use, use)
    assert everything_is_back(domain)
    again = domain.semaphore("s", 1)
    again.close()


def test_pickles_are_opened_while_connections_come_and_go(domain):
    def come_and_go() -> None:
        for _ in range(20):
            pw.connect(socket=domain.socket).close()

    def reopen() -> None:
        for _ in range(20):
            with pickle.loads(sent) as opened:
                assert opened.tobytes() == b"abc"

    with domain.put("x", b"abc") as put:
        sent = pickle.dumps(put)
        together(come_and_go, come_and_go, reopen, reopen)
    assert everything_is_back(domain)


def capsule_pointer(capsule: object, name: bytes) -> int:
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.argtypes, take.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return take(capsule, name)


# Where the deleter is in a managed tensor, and in a versioned one.
@pytest.mark.parametrize(("name", "version", "deleter"), [(b"dltensor", None, 56), (b"dltensor_versioned", (1, 0), 16)])
def test_a_deleter_is_called_by_whatever_thread_with_or_without_the_gil(domain, name, version, deleter):
    def without_the_gil() -> None:
        delete(pointer)

    def with_the_gil() -> None:
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)(pointer)

    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = ctypes.c_char_p(b"used_" + name)
    for call in (without_the_gil, with_the_gil):
        put = domain.put("x", np.arange(10))
        capsule = put.__dlpack__(max_version=version)
        pointer = capsule_pointer(capsule, name)
        rename(capsule, used)
        del capsule
        put.close()
        assert [it.name for it in domain.ls()] == ["x"]
        address = ctypes.c_void_p.from_address(pointer + deleter).value
        delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert everything_is_back(domain)


def test_untaken_capsules_end_with_their_python_object(domain):
    put = domain.put("x", np.arange(10))
    capsules = [put.__dlpack__(max_version=version) for version in (None, (1, 0)) for _ in range(100)]
    put.close()
    assert [it.name for it in domain.ls()] == ["x"]
    del capsules
    assert everything_is_back(domain)


def test_a_capsule_is_taken_by_one_consumer(domain):
    with domain.put("x", np.arange(10)) as put:

        class Again:
            def __init__(self) -> None:
                self.capsule = put.__dlpack__(max_version=(1, 0))

            def __dlpack__(self, **_: object) -> object:
                return self.capsule

            def __dlpack_device__(self) -> tuple[int, int]:
                return 1, 0

        again = Again()
        first = np.from_dlpack(again)
        with pytest.raises(Exception, match="(?i)capsule"):
            np.from_dlpack(again)
        assert list(first) == list(range(10))
        del first
    assert everything_is_back(domain)


def test_cycles_with_tensors_are_collected(domain):
    for _ in range(20):
        segment = domain.put("x", np.arange(1000))
        cycle: list[object] = [segment, segment.tensor, np.from_dlpack(segment), memoryview(segment.tensor)]
        cycle.append(cycle)
        segment.cycle = cycle
    del segment, cycle
    gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert [member.leases for member in domain.ps()] == [0]
    domain.rm("x")


LEAVES = {
    "views": "x = d.put('x', np.arange(9)); a, m = np.from_dlpack(x), memoryview(x.tensor)",
    "a build": "b = d.create('x', 9, 'int64', device='host'); v = np.from_dlpack(b)",
    "for ever": "import builtins; x = d.put('x', np.arange(9)); builtins.kept = [x, np.from_dlpack(x), d]",
    "a cycle": "x = d.put('x', np.arange(9)); x.me = [x, np.from_dlpack(x)]; x.me.append(x.me)",
    "a wait": "threading.Thread(target=d.open, args=('never', None), daemon=True).start()",
    "a builder": "threading.Thread(target=d.open_or_build, args=('x', lambda c: lock.acquire()), daemon=True).start()",
    "a timeline": "t, u = d.timeline('t', writer=True), d.timeline('t'); e = u.event(1)",
    "a wait for a value": "threading.Thread(target=d.timeline('t').wait, args=(1,), daemon=True).start()",
    "a permit": "p = d.semaphore('s', 1).acquire()",
    "a wait for a permit": "s = d.semaphore('s', 1); p = s.acquire()\n"
    "threading.Thread(target=s.acquire, daemon=True).start()",
    "a task's wait for a permit": """
import asyncio
async def leave():
    s = d.semaphore('s', 1)
    p = s.acquire()
    t = asyncio.create_task(s.acquire_async())
    await asyncio.sleep(0.1)
asyncio.run(leave())""",
    "what is imported to be shown": "import builtins; q = d.queue('q', tasks=1)\n"
    "t, p = d.topic('t', max_bytes=8, device='host'), d.pool('p', blocks=1, block_bytes=8, device='host')\n"
    "builtins.kept = [q, t, t.subscriber(), p]",
    "a watch": "w = d.watch()",
    "a wait for an event": "threading.Thread(target=d.watch().next, daemon=True).start()",
    "a capsule": "c = d.put('x', np.arange(9)).__dlpack__()",
}


@pytest.mark.parametrize("left", LEAVES)
def test_an_interpreter_ends_well_whatever_is_left_open(socket, left):
    code = f"{PRELUDE}\nimport threading; lock = threading.Lock(); lock.acquire()\nd = pw.connect(socket=sys.argv[1])\n"
    # Sleeps, so that the threads are in the middle of their work.
    code += f"{LEAVES[left]}\nimport time; time.sleep(0.2)"
    command = [sys.executable, "-X", "dev", "-X", "faulthandler", "-c", code, socket]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr and "ignored" not in ran.stderr, ran.stderr
    with pw.connect(socket=socket) as domain:
        while domain.ls():
            pass


COMMITS = {
    "put": lambda d: d.put("x", np.arange(9)),
    "commit": lambda d: d.create("x", 9, "int64", device="host").commit(),
    "claim": lambda d: d.open_or_build("x", lambda claim: claim.put(np.arange(9))),
}


# Holds 247.
@pytest.mark.parametrize("commit", COMMITS)
def test_a_dropped_commit_leaves_its_name_to_the_domain(socket, commit):
    domain, other = pw.connect(socket=socket), pw.connect(socket=socket)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        COMMITS[commit](domain)
        gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert [it.name for it in other.ls()] == ["x"]
    # No segment is open: the domain keeps the name without mapping the memory.
    assert [member.leases for member in other.ps()] == [0, 0]
    with other.open("x") as opened:
        domain.close()
        assert other.ls() == []
        assert opened["data"].shape == (9,)
    other.close()


def test_a_put_file_that_is_dropped_leaves_its_name(domain, tmp_path):
    (tmp_path / "bytes").write_bytes(b"abc")
    domain.put_file(tmp_path / "bytes", "x", device="host")
    gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert [it.name for it in domain.ls()] == ["x"]


def test_versions_that_are_dropped_pile_up_nowhere(domain):
    for number in range(3000):
        domain.put("x", np.int64(number))
    assert pw._native.flush(WATCHDOG)
    assert [(it.name, it.version) for it in domain.ls()] == [("x", 3000)]
    assert [member.leases for member in domain.ps()] == [0]
    with open("/proc/self/maps") as maps:
        assert sum("partywall" in line for line in maps) < 100


def test_a_left_name_goes_with_its_removal_and_with_a_newer_version(socket):
    with pw.connect(socket=socket) as domain, pw.connect(socket=socket) as other:
        domain.put("removed", b"1")
        domain.put("newer", b"1")
        gc.collect()
        assert pw._native.flush(WATCHDOG)
        other.rm("removed")
        newer = other.put("newer", b"2")
        domain.close()
        assert [(it.name, it.version) for it in other.ls()] == [("newer", 2)]
        newer.close()


def test_closing_the_committers_segment_takes_its_name(domain):
    with domain.put("x", np.arange(9)):
        pass
    assert domain.ls() == []
    # The same if an array outlives the segment.
    put = domain.put("y", np.arange(9))
    array = np.from_dlpack(put)
    put.close()
    del array, put
    assert everything_is_back(domain)


def test_an_array_leaves_the_name_of_a_dropped_commit(domain):
    array = np.from_dlpack(domain.put("x", np.arange(9)))
    assert list(array) == list(range(9))
    del array
    gc.collect()
    assert pw._native.flush(WATCHDOG)
    assert [it.name for it in domain.ls()] == ["x"]


def test_a_left_name_goes_with_its_process(domain, child):
    other = child(
        """
        import os
        d = pw.connect(socket=sys.argv[1])
        d.put("x", np.arange(9))
        d.put("kept", np.arange(9), kept=True)
        say("put")
        told()
        os._exit(0)
        """,
        domain.socket,
    )
    assert other.says() == "put"
    opened = domain.open("x")
    other.tell()
    opened.wait_withdrawn(WATCHDOG)
    assert [it.name for it in domain.ls()] == ["kept"]
    opened.close()


def test_a_forked_child_takes_no_name_away(domain):
    domain.put("x", np.arange(9))
    gc.collect()
    assert pw._native.flush(WATCHDOG)
    held = domain.put("held", np.arange(9))
    pid = fork()
    if pid == 0:
        del held
        gc.collect()
        domain.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [it.name for it in domain.ls()] == ["held", "x"]


# Holds 246.
def test_closed_samples_keep_neither_name_nor_memory(domain):
    topic = domain.topic("frames", max_bytes=8, device="host")
    publisher, subscriber = topic.publisher(), topic.subscriber()
    publisher.send(b"12345678")
    sample = subscriber.recv(WATCHDOG)
    for thing in (publisher, subscriber, topic):
        thing.close()
    assert [it.name for it in domain.ls()] == ["frames"]
    sample.close()
    assert domain.ls() == []
    assert [member.leases for member in domain.ps()] == [0]
    assert sample.closed and sample.topic == "frames" and "frames" in repr(sample)


# Holds 246.
def test_closed_loans_and_blocks_keep_neither_name_nor_memory(domain):
    topic = domain.topic("frames", max_bytes=8, device="host")
    publisher = topic.publisher()
    with publisher.loan(8, "uint8") as published:
        pass
    returned = publisher.loan(8, "uint8")
    returned.close()
    pool = domain.pool("blocks", blocks=1, block_bytes=8, device="host")
    block = pool.alloc()
    for thing in (publisher, topic, pool):
        thing.close()
    block.release()
    assert domain.ls() == []
    assert published.closed and returned.closed and not block.held


CLOSED = {
    "segment": lambda d: d.put("x", b"1"),
    "build": lambda d: d.create("x", 1, "uint8", device="host"),
    "pool": lambda d: d.pool("x", blocks=1, block_bytes=8, device="host"),
    "topic": lambda d: d.topic("x", max_bytes=8, device="host"),
    "semaphore": lambda d: d.semaphore("x", 1),
    "timeline": lambda d: d.timeline("x"),
    "watch": lambda d: d.watch("x"),
}


# Holds 246.
@pytest.mark.parametrize("made", CLOSED)
def test_closed_handles_keep_no_domain(socket, made):
    domain = pw.connect(socket=socket)
    handle = CLOSED[made](domain)
    handle.close()
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Domain"):
        del domain
        gc.collect()
    assert handle.closed


# Holds 47.
def test_a_given_name_ends_with_its_owner_and_not_with_its_committer(domain, child):
    owner = child("d = pw.connect(socket=sys.argv[1]); say(d.token); told()", domain.socket)
    token = owner.says()
    committer = child(
        "d = pw.connect(socket=sys.argv[1]); d.put('x', np.arange(3), owner=sys.argv[2]); say('put'); told()",
        domain.socket,
        token,
    )
    assert committer.says() == "put"
    committer.kill()
    with domain.open("x") as opened:
        assert opened.tobytes() == np.arange(3).tobytes()
        owner.kill()
        opened.wait_withdrawn(WATCHDOG)
    assert domain.ls() == []


GIVES = {
    "claim put": "d.open_or_build('x', lambda claim: claim.put(np.arange(3), 'host', owner=token))",
    "claim create": """d.open_or_build(
        'x', lambda claim: claim.create(3, 'int64', 'host', owner=token).commit()
    )""",
    "put_file": "d.put_file(sys.argv[3], 'x', 'host', owner=token)",
}


# Holds 47.
@pytest.mark.parametrize("how", GIVES)
def test_a_name_is_given_by_every_call_that_commits(domain, child, tmp_path, how):
    file = tmp_path / "x"
    file.write_bytes(b"123")
    owner = child("d = pw.connect(socket=sys.argv[1]); say(d.token); told()", domain.socket)
    token = owner.says()
    code = f"d = pw.connect(socket=sys.argv[1]); token = sys.argv[2]\n{GIVES[how]}\nsay('given'); told()"
    committer = child(code, domain.socket, token, str(file))
    assert committer.says() == "given"
    committer.kill()
    with domain.open("x") as opened:
        owner.kill()
        opened.wait_withdrawn(WATCHDOG)
    with pytest.raises(pw.NoSuchMember):
        domain.put_file(file, "x", "host", owner=token)
    with pytest.raises(ValueError, match="owner"):
        domain.put_file(file, "x", "host", owner=domain.token, kept=True)
    with pytest.raises(ValueError, match="token"):
        domain.open_or_build("x", lambda claim: claim.put(np.arange(3), owner="x"))
    assert domain.ls() == []


# Holds 47.
def test_an_owner_must_be_alive_and_the_name_not_kept(domain):
    with pytest.raises(pw.NoSuchMember):
        domain.put("x", np.arange(3), owner="123456")
    with pytest.raises(ValueError, match="owner"):
        domain.put("x", np.arange(3), owner=domain.token, kept=True)
    for token in "", "x", "-1", "1" * 30, 7:
        with pytest.raises(ValueError, match="token"):
            domain.put("x", np.arange(3), owner=token)
    assert domain.ls() == []


def test_a_name_given_to_this_process_outlives_its_segment(domain):
    domain.put("x", np.arange(3), owner=domain.token).close()
    with domain.open("x") as opened:
        assert opened.version == 1
    domain.put("x", np.arange(3)).close()
    assert domain.ls() == []
