# Holds 249.
"""Streams of torch and cupy that wait for other processes, and signal to them.

Every kernel has run once, and all memory is allocated, before a stream waits: behind a wait either could block.
"""

import asyncio
import os
import signal

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

LONG = 2_000_000_000
"""Clock cycles of a kernel that is still running when whatever follows it is enqueued: about a second."""
COUNT = 1 << 20
"""The number of shared elements."""
ROUNDS = 50

TORCH = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x", timeout=60) as x, d.timeline("t") as t:
    shared, out = torch.from_dlpack(x), torch.zeros((), dtype=torch.int64, device="cuda")
    done = torch.cuda.Event()
    def read():
        torch.sum(shared, 0, out=out)
        done.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        read()
        torch.cuda.synchronize()
        t.wait_on(1)
        read()
    say("behind a wait:", done.query())
    done.synchronize()
    t.check()
    say(int(out))
"""

CUPY = """
import cupy
copy = cupy.RawKernel(
    "extern \\"C\\" __global__ void copy(const long long* in, long long* out) { out[0] = in[1 << 19]; }", "copy"
)
with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x", timeout=60) as x, d.timeline("t") as t:
    shared, out = cupy.from_dlpack(x), cupy.zeros(1, "int64")
    done = cupy.cuda.Event(disable_timing=True)
    def read():
        copy((1,), (1,), (shared, out))
        done.record()
    with cupy.cuda.Stream(non_blocking=True):
        read()
        cupy.cuda.Device().synchronize()
        t.wait_on(1)
        read()
    say("behind a wait:", done.done)
    done.synchronize()
    t.check()
    say(int(out[0]) * (1 << 20))
"""


@pytest.fixture
def shared(domain):
    """Memory that all processes may write, on which the kernels have run once."""
    with domain.create("x", COUNT, torch.int64, mutable=True) as build, build.commit() as x:
        view = torch.from_dlpack(x)
        torch.cuda._sleep(1)
        view.fill_(0)
        torch.cuda.synchronize()
        yield view
        torch.cuda.synchronize()


@pytest.fixture
def writer(domain):
    with domain.timeline("t", writer=True) as t:
        yield t


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_kernel_runs_after_one_of_another_process(domain, shared, writer, child, library):
    pytest.importorskip(library)
    reader = child({"torch": TORCH, "cupy": CUPY}[library], domain.socket)
    assert reader.says() == "behind a wait: False"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        shared.fill_(7)
        writer.signal_on(1)
    assert writer.announced == 1
    assert reader.says() == str(7 * COUNT)
    assert reader.end() == 0
    assert writer.value == 1


def test_cupy_signals_on_its_current_stream(domain, shared, child):
    pytest.importorskip("cupy")
    signaller = child(
        """
        import cupy
        slow = cupy.RawKernel(
            "extern \\"C\\" __global__ void slow(long long n) "
            "{ long long from = clock64(); while (clock64() - from < n); }",
            "slow",
        )
        d = pw.connect(socket=sys.argv[1], start=False)
        with d, d.open("x", write=True) as x, d.timeline("t", writer=True) as t:
            shared = cupy.from_dlpack(x)
            slow((1,), (1,), (1,))
            shared.fill(0)
            cupy.cuda.Device().synchronize()
            say("ready")
            told()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                slow((1,), (1,), (2_000_000_000,))
                shared.fill(7)
                t.signal_on(1)
                say("enqueued")
                told()
                stream.synchronize()
        """,
        domain.socket,
    )
    assert signaller.says() == "ready"
    assert int(shared.sum()) == 0
    with domain.timeline("t") as t:
        signaller.tell()
        assert signaller.says() == "enqueued"
        t.wait_announced(1, WATCHDOG)
        t.wait_on(1, torch.cuda.current_stream())
        assert int(shared.sum()) == 7 * COUNT
        t.check()
    signaller.tell()
    assert signaller.end() == 0


def test_two_processes_take_turns_without_a_host(domain, shared, writer, child):
    other = child(
        f"""
        import torch
        with (
            pw.connect(socket=sys.argv[1], start=False) as d,
            d.open("x", timeout=60) as x,
            d.timeline("t") as ready,
            d.timeline("back", writer=True) as back,
        ):
            shared, sums = torch.from_dlpack(x), torch.zeros({ROUNDS + 1}, dtype=torch.int64, device="cuda")
            back.rests_on(ready)
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.sum(shared, 0, out=sums[0])
                torch.cuda.synchronize()
                for n in range(1, {ROUNDS + 1}):
                    ready.wait_on(n)
                    torch.sum(shared, 0, out=sums[n])
                    back.signal_on(n)
                say("enqueued")
                torch.cuda.synchronize()
            ready.check()
            say(sums.tolist() == [n * {COUNT} for n in range({ROUNDS + 1})])
            told()
        """,
        domain.socket,
    )
    assert other.says() == "enqueued"
    with domain.timeline("back") as back, torch.cuda.stream(torch.cuda.Stream()):
        for n in range(1, ROUNDS + 1):
            back.wait_on(n - 1)
            shared.fill_(n)
            writer.signal_on(n)
        assert other.says() == "True"
        back.wait(ROUNDS, WATCHDOG)
        back.check()
    other.tell()
    assert other.end() == 0


def test_hosts_and_tasks_wait_for_a_slow_kernel(domain, shared, writer):
    async def main(t: pw.Timeline) -> None:
        await t.wait_async(2, WATCHDOG)

    done = torch.cuda.Event()
    with domain.timeline("t") as t:
        torch.cuda._sleep(LONG)
        done.record()
        writer.signal_on_and_wake(1)
        t.wait(1, WATCHDOG)
        assert done.query()
        torch.cuda._sleep(LONG)
        done.record()
        writer.signal_on(2)
        asyncio.run(main(t))
        assert done.query()


def test_a_kernel_of_cupys_signals_by_itself(domain, writer):
    cupy = pytest.importorskip("cupy")
    store = cupy.RawKernel(
        """
        extern "C" __global__ void store(unsigned long long* word, unsigned long long value, long long n) {
            long long from = clock64();
            while (clock64() - from < n);
            __threadfence_system();
            *(volatile unsigned long long*)word = value;
        }
        """,
        "store",
    )
    store((1,), (1,), (cupy.zeros(1, "uint64"), cupy.uint64(7), cupy.int64(1)))
    cupy.cuda.Device().synchronize()
    with domain.timeline("t") as t, cupy.cuda.Stream(non_blocking=True) as stream:
        store((1,), (1,), (cupy.uint64(writer.device_ptr()), cupy.uint64(1), cupy.int64(LONG)))
        writer.promise_on(1, stream)
        t.wait_announced(1, 0)
        t.wait(1, WATCHDOG)
        assert t.value == 1


def test_a_killed_writer_lets_the_stream_go_on_and_check_says_so(domain, shared, child):
    dead = child(
        """
        import torch
        with pw.connect(socket=sys.argv[1], start=False) as d, d.timeline("t", writer=True) as t:
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            t.signal_on(1)
            torch.cuda.synchronize()
            # The signal is enqueued, but never reached.
            torch.cuda._sleep(1 << 60)
            t.signal_on(2)
            say("running")
            told()
        """,
        domain.socket,
    )
    assert dead.says() == "running"
    done, side = torch.cuda.Event(), torch.cuda.Stream()
    with domain.timeline("t") as t, torch.cuda.stream(side):
        shared.fill_(0)
        done.record()
        done.synchronize()
        t.wait_on(1)
        t.wait_on(2)
        shared.fill_(1)
        done.record()
        t.wait_announced(2, WATCHDOG)
        assert not done.query()
        dead.kill()
        assert dead.process.returncode == -signal.SIGKILL
        done.synchronize()
        with pytest.raises(pw.WriterDied):
            t.check()
        assert t.value == 1


def test_a_wait_with_a_limit_lets_the_stream_go_on(domain, shared, writer):
    done, side = torch.cuda.Event(), torch.cuda.Stream()
    with domain.timeline("t") as t, torch.cuda.stream(side):
        shared.fill_(0)
        done.record()
        done.synchronize()
        limited = t.wait_on(1, limit=0.2)
        shared.fill_(1)
        done.record()
        done.synchronize()
        with pytest.raises(pw.TimeoutError):
            limited.check()
        writer.signal_on(1)
        t.wait(1, WATCHDOG)


def test_a_permit_goes_back_when_the_stream_has_come_so_far(domain, shared, child):
    s = domain.semaphore("s", 1)
    permit = s.acquire()
    other = child(
        """
        with pw.connect(socket=sys.argv[1], start=False) as d:
            s = d.semaphore("s", 1)
            say("waits")
            with s:
                say("has it")
            s.close()
        """,
        domain.socket,
    )
    assert other.says() == "waits"
    done, side = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        done.record()
        permit.release_on()
    assert not permit.held
    assert other.says() == "has it"
    assert done.query()
    assert other.end() == 0
    s.close()
