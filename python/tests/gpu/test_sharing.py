"""Order, lifetimes and deaths on a real GPU."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

LONG = 2_000_000_000
"""Clock cycles of a kernel that is still running when whatever follows it is enqueued: about a second."""
MIB = 1 << 20

READER = """
import torch
with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x", timeout=60) as x:
    t = torch.from_dlpack(x)
    say(int(t.sum()), t.device)
    told()
"""


def free() -> int:
    """Returns the free bytes of the GPU, after everything that was dropped is freed."""
    # The first use of a kernel loads it, which allocates memory permanently.
    used = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    used.copy_(torch.full((MIB,), 7, dtype=torch.uint8, device="cuda"))
    assert int(used.min()) == int(used.max())
    torch.cuda._sleep(1)
    del used
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert pw._native.flush(60)
    return torch.cuda.mem_get_info()[0]


def assert_all_comes_back(before: int) -> None:
    """Waits until all memory is freed: the driver takes some time to free the memory of a process that has ended."""
    watchdog = time.monotonic() + WATCHDOG
    while (now := free()) < before:
        assert time.monotonic() < watchdog, f"{before - now} bytes are missing"


def test_a_commit_waits_for_a_slow_kernel_on_any_stream(domain, child):
    side = torch.cuda.Stream()
    with domain.create("x", 1000, torch.int64) as build:
        view = torch.from_dlpack(build)
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            view.fill_(7)
        with build.commit() as committed:
            assert side.query()
            reader = child(READER, domain.socket)
            assert reader.says() == "7000 cuda:0"
            assert int(torch.from_dlpack(committed).sum()) == 7000


def test_a_put_comes_after_what_the_current_stream_has(domain):
    side = torch.cuda.Stream()
    source = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        source.fill_(7)
        with domain.put("x", source) as put:
            assert set(put.tobytes()) == {0, 7}
    torch.cuda._sleep(LONG)
    source.fill_(8)
    with domain.put("x", source, stream=torch.cuda.current_stream()) as put:
        assert set(put.tobytes()) == {0, 8}


def test_a_copy_to_the_host_comes_after_a_stream_that_waits_for_no_other(domain):
    side = torch.cuda.Stream()
    source = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        source.fill_(7)
        with domain.put("x", source, device="host") as put:
            assert set(put.tobytes()) == {0, 7}


def test_a_put_comes_after_what_cupys_current_stream_has(domain):
    cupy = pytest.importorskip("cupy")
    wait = cupy.RawKernel(
        "extern \"C\" __global__ void wait(long long n) { long long from = clock64(); while (clock64() - from < n); }",
        "wait",
    )
    source = cupy.zeros((1000, 2), "int64")
    wait((1,), (1,), (1,))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for device in ("cuda", "host"):
            wait((1,), (1,), (LONG,))
            source += 7
            # Also with gaps, which cupy removes first.
            with domain.put("x", {"whole": source, "column": source[:, 1]}, device) as put:
                assert len(set(put["whole"].tobytes())) == len(set(put["column"].tobytes())) == 2
                assert put["whole"].tobytes() == 2 * put["column"].tobytes() == source.tobytes()


def test_a_write_and_a_read_come_after_the_current_stream(domain):
    side = torch.cuda.Stream()
    with domain.create("x", 1000, torch.int64) as build, torch.cuda.stream(side):
        view = torch.from_dlpack(build)
        torch.cuda._sleep(LONG)
        view.fill_(7)
        assert set(build.tobytes()) == {0, 7}
        torch.cuda._sleep(LONG)
        view.fill_(8)
        build.write(torch.full((1000,), 9, dtype=torch.int64))
        assert set(build.tobytes()) == {0, 9}


def test_a_segment_grows_under_a_running_kernel(domain, child):
    rows = 1 << 20
    with domain.create("log", (1, rows), torch.int64, mutable=True, reserve=1 << 30) as build:
        torch.from_dlpack(build).fill_(1)
        log = build.commit()
    with log, domain.open("log", write=True) as other:
        before = torch.from_dlpack(log)
        torch.cuda._sleep(LONG)
        before.fill_(2)
        log.grow(10)
        after = torch.from_dlpack(log)
        assert after.shape == (10, rows) and after.data_ptr() == before.data_ptr()
        after[1:].fill_(3)
        torch.cuda.synchronize()
        assert other.refresh() and int(torch.from_dlpack(other).sum()) == rows * (2 + 9 * 3)
        reader = child(READER.replace('"x"', '"log"'), domain.socket)
        assert reader.says() == f"{rows * 29} cuda:0"


@pytest.mark.parametrize("mutable", [True, False])
def test_pinned_memory_is_copied_asynchronously(domain, mutable):
    with domain.put("x", torch.full((1 << 22,), 7), mutable=mutable) as put:
        view = torch.from_dlpack(put)
        assert not view.is_pinned()
        try:
            pin = put.pin()
        except pw.CudaError as error:
            # Not every GPU can register memory as read-only.
            assert not mutable and "read-only" in str(error), error
            return
        with pin:
            assert view.is_pinned()
            out = torch.zeros(1 << 22, dtype=torch.int64, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
            out.copy_(view, non_blocking=True)
            running = torch.cuda.Event()
            running.record()
            assert not running.query(), "the copy waited for the stream"
            # Dropping the memory waits for the kernel that reads it.
            del view
        put.close()
        assert int(out.min()) == int(out.max()) == 7


@pytest.mark.parametrize("side", ["host", "cuda"])
@pytest.mark.parametrize("to_gpu", [True, False])
def test_memory_that_is_born_pinned_is_copied_asynchronously(domain, side, to_gpu):
    with domain.create("x", 1 << 22, torch.int64, "pinned", mutable=not to_gpu, access="both") as build:
        torch.from_dlpack(build).fill_(7 if to_gpu else 0)
        x = build.commit()
    with x:
        views = {"host": torch.from_dlpack(x), "cuda": torch.from_dlpack(x.on("cuda:0"))}
        assert [view.device.type for view in views.values()] == ["cpu", "cuda"]
        assert views["host"].data_ptr() == views["cuda"].data_ptr()
        # torch's `is_pinned` may say no of the tensor of the host.
        view, on_gpu = views[side], torch.full((1 << 22,), 0 if to_gpu else 7, device="cuda")
        source, target = (view, on_gpu) if to_gpu else (on_gpu, view)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        target.copy_(source, non_blocking=True)
        running = torch.cuda.Event()
        running.record()
        assert not running.query(), "the copy waited for the stream"
        torch.cuda.synchronize()
        assert int(target.min()) == int(target.max()) == 7
        del views, view, source, target


# Holds 241.
def test_a_view_is_dropped_under_a_running_kernel(domain):
    before = free()
    out = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    segment = domain.put("x", torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda"))
    view = torch.from_dlpack(segment)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    out.copy_(view)
    running = torch.cuda.Event()
    running.record()
    assert not running.query(), "the kernel has to run longer"
    # Drops the object first, so that only the view holds the memory; then the view, whose deleter has no stream.
    segment.close()
    del view, segment
    torch.cuda.synchronize()
    assert int(out.min()) == int(out.max()) == 7
    del out
    assert_all_comes_back(before)


def test_a_segment_is_closed_under_a_running_kernel(domain):
    out = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    segment = domain.put("x", torch.full((MIB,), 7, dtype=torch.uint8, device="cuda"))
    view = torch.from_dlpack(segment)
    torch.cuda._sleep(LONG)
    out.copy_(view)
    del view
    segment.close()
    torch.cuda.synchronize()
    assert int(out.min()) == 7


# Holds 65.
def test_nothing_is_stranded(domain, child):
    code = """
    import torch
    with pw.connect(socket=sys.argv[1], start=False) as d:
        for i in range(5):
            for _ in range(3):
                with d.open(f"read{i}") as x:
                    say(int(torch.from_dlpack(x)[0]))
    """
    with domain.put("warm", torch.ones(1, device="cuda")):
        pass
    before = free()
    data = torch.full((256 * MIB,), 7, dtype=torch.uint8, device="cuda")
    read = [domain.put(f"read{i}", data) for i in range(5)]
    reader = child(code, domain.socket)
    assert [reader.says() for _ in range(15)] == ["7"] * 15
    assert reader.end() == 0
    dropped = [domain.put(f"dropped{i}", data) for i in range(5)]
    sent = [segment.__reduce__() for segment in dropped]
    for segment in read + dropped:
        segment.close()
    del data, read, dropped, sent
    assert_all_comes_back(before)


def test_a_killed_writer_leaves_what_it_kept(socket, child):
    code = """
    import torch
    with pw.connect(socket=sys.argv[1]) as d:
        kept = d.put("x", torch.ones(1000, dtype=torch.int64, device="cuda"), kept=True)
        build = d.create("unfinished", 1000, "int64")
        torch.cuda._sleep(20_000_000_000)
        say("ready")
        told()
    """
    writer = child(code, socket)
    assert writer.says() == "ready"
    writer.kill()
    with pw.connect(socket=socket) as domain, domain.open("x") as x:
        assert int(torch.from_dlpack(x).sum()) == 1000
        assert [name.name for name in domain.ls()] == ["x"]
        domain.rm("x")


def test_a_killed_reader_gives_the_memory_back(domain, child):
    before = free()
    put = domain.put("x", torch.ones(64 * MIB, dtype=torch.int64, device="cuda"))
    reader = child(READER, domain.socket)
    assert reader.says() == f"{64 * MIB} cuda:0"
    domain.rm("x")
    put.close()
    del put
    reader.kill()
    assert_all_comes_back(before)


@pytest.mark.parametrize("visible", ["uuid", "last"])
def test_processes_may_see_other_devices(domain, child, monkeypatch, visible):
    put = domain.put("x", torch.ones(1000, dtype=torch.int64, device="cuda"))
    last = torch.cuda.device_count() - 1
    # The reader sees only the owner's GPU, or only another one: the driver maps memory of such a GPU, too.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", put.place if visible == "uuid" else str(last))
    with put:
        if visible == "last" and last > 0:
            refused = child(READER, domain.socket)
            assert refused.end() == 1
            reader = child(READER.replace('timeout=60', 'timeout=60, allow_peer=True'), domain.socket)
        else:
            reader = child(READER, domain.socket)
        assert reader.says() == "1000 cuda:0"


def test_a_reader_in_a_pid_namespace_of_its_own(domain):
    probe = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us make PID namespaces")
    code = (
        "import sys, torch, partywall as pw\n"
        "with pw.connect(socket=sys.argv[1], start=False) as d, d.open('x') as x:\n"
        "    print(int(torch.from_dlpack(x).sum()))\n"
    )
    with domain.put("x", torch.ones(1000, dtype=torch.int64, device="cuda")):
        command = [*probe[:-1], sys.executable, "-c", code, domain.socket]
        read = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert read.stdout.strip() == "1000", read.stderr


def test_another_user_is_refused_with_a_sentence(domain):
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    code = (
        "import os, sys, partywall as pw\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    pw.connect(socket=sys.argv[1], start=False)\n"
        "except PermissionError as error:\n"
        "    print(error)\n"
    )
    with domain.put("x", torch.ones(3, device="cuda")):
        command = [sys.executable, "-c", code, domain.socket]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
        assert refused.stdout.startswith("this process runs as user 65534, which may not use "), refused


def test_only_the_writer_of_frozen_memory_loses_its_context(domain, child):
    with domain.put("x", torch.full((1000,), 7, dtype=torch.int64, device="cuda")) as put:
        writer = child(
            """
            import torch
            with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x") as x:
                try:
                    torch.from_dlpack(x).fill_(8)
                    torch.cuda.synchronize()
                except RuntimeError:
                    say("refused")
                try:
                    d.create("y", 1000, "int64").commit()
                except pw.CudaError as error:
                    say(error.cuda_error, error.anchor)
                    say(error)
            import os
            os._exit(0)
            """,
            domain.socket,
        )
        assert writer.says() == "refused"
        assert writer.says() == "700 broken-context"
        assert "restart this process" in writer.says()
        assert set(put.tobytes()) == {0, 7}


def test_ctrl_c_ends_a_wait_for_the_gpu(domain, child):
    waiter = child(
        """
        import signal, torch
        with pw.connect(socket=sys.argv[1], start=False) as d, d.create("x", 1000, torch.int64) as build:
            # While the long kernel runs, the first use of another kernel would wait for it.
            view = torch.from_dlpack(build).fill_(0)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000_000)
            view.fill_(7)
            def handle(_, frame):
                if frame.f_code.co_filename.endswith("partywall/_build.py"):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    raise KeyboardInterrupt
            signal.signal(signal.SIGINT, handle)
            say("waiting")
            try:
                build.commit()
            except KeyboardInterrupt:
                say("interrupted", torch.cuda.current_stream().query())
            with build.commit() as committed:
                say(int(view.sum()))
        """,
        domain.socket,
    )
    assert waiter.says() == "waiting"
    assert waiter.interrupt() == "interrupted False"
    assert waiter.says() == "7000"
    assert waiter.end() == 0


def test_torch_memory_is_published_in_place(domain, child):
    tensor = torch.ones(1000, dtype=torch.int64, device="cuda")
    code = READER.replace("told()", "told(); say(int(t.sum())); told()")
    published = domain.publish("x", tensor)
    assert (published.kind, published.tensor.data_ptr) == ("legacy", tensor.data_ptr())
    reader = child(code, domain.socket)
    assert reader.says() == "1000 cuda:0"
    tensor.fill_(2)
    torch.cuda.synchronize()
    reader.tell()
    assert reader.says() == "2000"
    address = tensor.data_ptr()
    del tensor
    # The segment holds the tensor, so torch does not reuse its memory.
    assert torch.zeros(1000, dtype=torch.int64, device="cuda").data_ptr() != address
    published.close()
    with pytest.raises(pw.NameNotFound):
        domain.open("x")


def test_a_view_of_a_tensor_is_published_where_it_lies(domain, child):
    whole = torch.arange(100, device="cuda").reshape(10, 10)
    with domain.publish("x", {"row": whole[3], "column": whole[:, 4]}) as published:
        assert torch.equal(torch.from_dlpack(published["row"]), whole[3])
        assert torch.equal(torch.from_dlpack(published["column"]), whole[:, 4])


def test_expandable_segments_are_refused_with_the_ways_out(domain, child, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    publisher = child(
        """
        import torch
        tensor = torch.ones(1000, dtype=torch.int64, device="cuda")
        with pw.connect(socket=sys.argv[1], start=False) as d:
            try:
                d.publish("x", tensor)
            except pw.NotShareable as error:
                say(error)
            with d.put("x", tensor) as put:
                say(int(torch.from_dlpack(put).sum()))
        """,
        domain.socket,
    )
    said = publisher.says()
    assert "expandable_segments:False" in said and "copy" in said
    assert publisher.says() == "1000"
