# Holds 89.
"""Pinned host memory, on the simulated driver: tensors of the host that GPUs use in place, and copies between
places."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

import partywall as pw
from partywall._build import Build

from ..conftest import WATCHDOG
from ..host.test_examples import ran
from ..host.test_exchange import capsule_name
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

DOCS = Path(__file__).parents[3] / "docs"

VALUES = np.arange(1000, dtype="float32")


@pytest.mark.parametrize(("device", "place"), [("pinned", "pinned:0"), ("pinned:1", "pinned:1")])
def test_pinned_memory_is_taken_as_host_memory_is(domain, device, place):
    with domain.create("x", 1000, "float32", device) as build:
        assert build.place == place and build.__dlpack_device__() == (1, 0)
        np.asarray(build)[:] = VALUES
        with build.commit() as committed, domain.open("x") as opened:
            assert (committed.kind, opened.place) == ("pinned", place)
            tensor = opened.tensor
            assert (tensor.device, tensor.__dlpack_device__()) == ("host", (1, 0)), "never kDLCUDAHost"
            assert (np.from_dlpack(opened) == VALUES).all()
            array = np.asarray(opened)
            assert (array == VALUES).all() and not array.flags.writeable and tensor.readonly
            assert not hasattr(tensor, "__cuda_array_interface__")
            assert opened.tobytes() == VALUES.tobytes()
    assert [name.place for name in domain.ls()] == []


@pytest.mark.parametrize("library", ["torch", "jax.dlpack"])
def test_frameworks_take_it_as_memory_of_the_cpu(domain, library):
    module = pytest.importorskip(library)
    with domain.create("x", 1000, "float32", "pinned") as build:
        build.write(VALUES)
        with build.commit() as x:
            array = module.from_dlpack(x)
            assert float(array.sum()) == VALUES.sum()
            del array


def test_auto_never_chooses_it_and_a_missing_node_is_said(domain):
    with domain.create("x", 4, "uint8") as build:
        assert build.place.startswith("GPU-")
    with pytest.raises(pw.Error, match="pinned memory") as caught:
        domain.create("x", 4, "uint8", "pinned:7")
    assert caught.value.anchor == "no-pinned-memory"
    with pytest.raises(ValueError, match="is not a device"):
        domain.create("x", 4, "uint8", "pinned:first")
    with pytest.raises(pw.OutOfMemory, match="on pinned:1"):
        domain.create("x", 1 << 44, "uint8", "pinned:1")


def test_frozen_memory_is_not_opened_for_writing_and_grows_within_its_reserve(domain):
    with domain.put("x", VALUES, "pinned") as x:
        with pytest.raises(pw.ReadOnly):
            domain.open("x", write=True)
        with pytest.raises(pw.CannotGrow):
            x.grow(2000)
    with domain.create("log", 1000, "int32", "pinned", mutable=True, reserve=4 << 20) as build, build.commit() as log:
        with pytest.raises(pw.CannotGrow, match="are reserved"):
            log.grow(1 << 30)
        assert log.shape == (1000,), "it is as before"


def test_it_is_put_from_arrays_and_files(domain, tmp_path):
    np.save(tmp_path / "x.npy", VALUES)
    with domain.put("x", VALUES, "pinned") as x, domain.put_file(tmp_path / "x.npy", "y", "pinned:1") as y:
        assert (x.place, y.place) == ("pinned:0", "pinned:1")
        assert x.tobytes() == y.tobytes() == VALUES.tobytes()
        with domain.put("z", x.on("cuda:0")) as z, domain.put("back", z, "pinned") as back:
            assert z.kind == "vmm" and z.tobytes() == np.asarray(back).tobytes() == VALUES.tobytes()
            with pytest.raises(pw.ReadOnly):
                back.tensor.write(z)


def test_on_is_the_tensor_of_a_gpu_at_the_same_address(domain):
    with domain.put("x", VALUES, "pinned") as x:
        view = x.on("cuda:0")
        assert (view.device, view.__dlpack_device__()) == ("cuda:0", (2, 0))
        assert (view.data_ptr, view.shape, view.dtype) == (x.tensor.data_ptr, (1000,), "float32")
        assert view.__cuda_array_interface__["data"] == (view.data_ptr, True)
        assert capsule_name(view.__dlpack__(stream=2, max_version=(1, 0))) == "dltensor_versioned"
        assert view.tobytes(stream=2) == VALUES.tobytes()
        with pytest.raises(BufferError, match="GPU"):
            memoryview(view)
        assert view.on("cuda").data_ptr == view.data_ptr
        # Taking the view leaves the tensors of the host as they are.
        assert x["data"].device == "host"
        with pytest.raises(ValueError, match="used on a GPU"):
            x.on("host")
        with pytest.raises(RuntimeError, match="no GPU"):
            x.on("cuda:7")
        with pytest.raises(pw.WrongKind, match="is pinned memory; .* use it as it is"):
            x.pin()
    with domain.put("h", VALUES, "host") as host, pytest.raises(pw.WrongKind):
        host.on("cuda:0")
    with domain.put("g", VALUES, "cuda") as on_gpu:
        assert on_gpu.on("cuda:0").data_ptr == on_gpu.tensor.data_ptr


def test_it_is_used_on_one_gpu_of_the_process(domain, child):
    with domain.put("x", VALUES, "pinned"):
        reader = child(
            """
            with pw.connect(socket=sys.argv[1]) as d:
                with d.open("x", device="cuda:1") as x:
                    say(x.tensor.device, x.on("cuda:1").device, np.asarray(x).sum())
                    try:
                        x.on("cuda:0")
                    except pw.NoSuchView as error:
                        say(error.advice)
                with d.open("x") as x:
                    say(x.on("cuda:1").device)
            """,
            domain.socket,
            SIMCUDA_DEVICES="2",
        )
        assert reader.says() == "host cuda:1 499500.0"
        assert "device=" in reader.says()
        assert reader.says() == "cuda:1"
        assert reader.end() == 0


def test_a_stream_writes_a_build_and_the_commit_waits_for_it(domain):
    driver.use()
    with domain.create("x", 4096, "uint8", "pinned") as build:
        driver.fill(build.on("cuda:0").data_ptr, 7, 4096, 0)
        with build.commit() as x:
            assert np.asarray(x).tobytes() == b"\7" * 4096
            assert x.on("cuda:0").readonly


# Holds 90.
@pytest.mark.parametrize("access", ["cpu", "gpu", "both"])
def test_access_is_given_from_the_start_and_the_other_on_first_use(domain, access):
    with domain.create("x", 1000, "float32", "pinned", access=access) as build:
        build.write(VALUES)
        assert build.on("cuda:0").tobytes() == VALUES.tobytes()
        with build.commit(), domain.open("x", access=access) as x:
            assert x.on("cuda:0").tobytes() == np.asarray(x).tobytes() == VALUES.tobytes()
            assert x.tensor.data_ptr == x.on("cuda:0").data_ptr


@pytest.mark.parametrize("access", ["cpu", "gpu", "both"])
def test_access_is_given_to_each_chunk_that_is_allocated_on_demand(domain, access):
    planned = [(name, "uint8", [2 << 20], None, None) for name in "ab"]
    options = {"mutable": False, "reserve": None, "kept": False, "shared": False, "if_absent": False, "owner": None}
    native = domain._native.create("x", "pinned:0", access, planned, [], chunk_bytes=2 << 20, **options)
    with Build(domain, native) as build:
        assert build.nbytes == 0, "access allocates nothing"
        for at, name in enumerate("ab", 1):
            build[name].write(np.full(2 << 20, at, "uint8"))
            assert build.nbytes == at * (2 << 20)
        with build.commit() as x:
            assert [int(np.asarray(x[name])[-1]) for name in "ab"] == [1, 2]
            assert x["b"].on("cuda:0").tobytes() == x["b"].tobytes()


WRITER = """
from pathlib import Path
how, calls, source = sys.argv[2:5]
access = sys.argv[5] if len(sys.argv) > 5 else None
values = np.arange(1000, dtype="float32")
def given():
    return Path(calls).read_text().count("cuMemSetAccess")
with pw.connect(socket=sys.argv[1]) as d:
    if how == "put":
        x = d.put("x", values, "pinned", access=access)
    elif how == "put_file":
        x = d.put_file(source, "x", "pinned", access=access)
    elif how == "claim":
        x = d.open_or_build("x", lambda claim: claim.put(values, "pinned", access=access))
    else:
        x = d.put("source", values, "cuda").to("pinned", name="x", access=access).commit()
    before = given()
    say(x.on("cuda:0").tobytes() == values.tobytes() == x.tobytes())
    say(given() - before)
"""


# Holds 90.
@pytest.mark.parametrize("how", ["put", "put_file", "claim", "to"])
@pytest.mark.parametrize(("access", "later"), [([], 1), (["both"], 0)])
def test_access_is_given_when_memory_is_put_or_copied(socket, child, tmp_path, how, access, later):
    np.save(tmp_path / "x.npy", VALUES)
    calls = str(tmp_path / "calls")
    writer = child(WRITER, socket, how, calls, str(tmp_path / "x.npy"), *access, SIMCUDA_CALLS=calls)
    assert writer.says() == "True"
    assert writer.says() == str(later)
    assert writer.end() == 0


# Holds 82, 90.
def test_access_is_paid_for_by_those_who_need_it(domain, child, tmp_path):
    code = """
        with pw.connect(socket=sys.argv[1]) as d, d.open("x", access=sys.argv[2]) as x:
            say(x.on("cuda:0").device if sys.argv[2] == "gpu" else np.asarray(x).sum())
    """
    with domain.put("x", VALUES, "pinned"):
        for access, said in ("cpu", "499500.0"), ("gpu", "cuda:0"):
            calls = tmp_path / access
            reader = child(code, domain.socket, access, SIMCUDA_CALLS=str(calls))
            assert reader.says() == said
            assert reader.end() == 0
            text = calls.read_text()
            assert text.count("cuMemImportFromShareableHandle") == text.count("cuMemSetAccess") == 1
            assert ("Ctx" in text) == (access == "gpu")


def test_access_has_three_values(domain):
    with domain.put("x", VALUES, "pinned") as x:
        for call in (
            lambda: domain.open("x", access="all"),
            lambda: domain.create("y", 1, "uint8", "pinned", access="all"),
            lambda: domain.put("y", VALUES, "pinned", access="all"),
            lambda: domain.put_file(__file__, "y", "pinned", access="all"),
            lambda: x.to("pinned", name="y", access="all"),
            lambda: domain.pool("p", blocks=1, block_bytes=1, device="pinned", access="all"),
            lambda: domain.topic("t", max_bytes=1, device="pinned", access="all"),
            lambda: domain.queue("q", tasks=1, device="pinned", access="all"),
        ):
            with pytest.raises(ValueError, match="access is 'cpu', 'gpu' or 'both', not 'all'"):
                call()


def test_a_pool_is_used_by_the_cpu_and_by_streams(domain):
    driver.use()
    filled = driver.allocate(4096)
    driver.fill(filled, 5, 4096, 0)
    with domain.pool("p", blocks=2, block_bytes=4096, device="pinned", access="cpu") as pool:
        assert pool.place == "pinned:0"
        with pool.alloc() as block:
            block.tensor().write(np.full(4096, 3, "uint8"))
            assert block.__dlpack_device__() == (1, 0)
            view = block.on("cuda:0")
            assert view.device == "cuda:0" and view.tobytes() == b"\3" * 4096
            block.zero(stream=2)
            driver.wait(2)
            assert np.asarray(block).sum() == 0
            # The GPU writes it also after the CPU has read it.
            assert block.tobytes() == bytes(4096)
            view.write(driver.DeviceBytes(filled, [4096]))
            assert block.tobytes() == b"\5" * 4096
            del view
        with pool.alloc() as block:
            block.zero()
            assert block.tobytes() == bytes(4096)


@pytest.fixture
def frames(domain):
    driver.use()
    with domain.topic("frames", shape=4096, dtype="uint8", device="pinned") as opened:
        yield opened


def test_samples_of_the_cpu_are_read_by_the_cpu_and_by_streams(frames):
    with frames.publisher() as publisher, frames.subscriber() as reader, frames.subscriber(order="stream") as trainer:
        with publisher.loan(4096) as out:
            assert out.__dlpack_device__() == (1, 0)
            np.asarray(out)[:] = 7
        publisher.send(np.full(4096, 8, "uint8"))
        for byte in (7, 8):
            with reader.recv(WATCHDOG) as sample:
                assert sample.__dlpack_device__() == (1, 0)
                array = np.asarray(sample)
                assert (array == byte).all() and not array.flags.writeable
                assert sample.on("cuda:0").tobytes() == array.tobytes()
                del array
            with trainer.recv(WATCHDOG, stream=2) as sample:
                assert sample.__dlpack_device__() == (2, 0)
                interface = sample.__cuda_array_interface__
                assert (interface["data"][1], interface["stream"]) == (True, 2)
                assert sample.tobytes(stream=2) == bytes([byte]) * 4096
                with pytest.raises(BufferError):
                    np.asarray(sample)


def test_samples_of_a_stream_are_complete_for_the_cpu(frames):
    with frames.publisher() as publisher, frames.subscriber() as reader, frames.subscriber(order="stream") as trainer:
        gate = driver.Gate()
        with publisher.loan(4096, stream=gate.stream) as out:
            assert out.__dlpack_device__() == (2, 0)
            driver.fill(out.tensor.data_ptr, 9, 4096, gate.stream)
        with trainer.recv(WATCHDOG, stream=2) as early:
            assert early.tensor.device == "cuda:0" and not early.ready
        with pytest.raises(pw.TimeoutError):
            reader.recv(0.01)
        incomplete = reader.try_recv()
        assert incomplete is not None
        with pytest.raises(pw.NotReady):
            np.asarray(incomplete)
        gate.open()
        incomplete.wait(WATCHDOG)
        assert (np.asarray(incomplete) == 9).all()
        incomplete.close()


# Holds 250.
@pytest.mark.parametrize("derived", [False, True])
def test_array_of_a_published_loan_writes_into_no_later_sample(frames, derived):
    with frames.publisher() as publisher, frames.publisher() as other, frames.subscriber() as subscriber:
        gate = driver.Gate()
        if derived:
            with other.loan(4096, stream=gate.stream) as out:
                driver.fill(out.tensor.data_ptr, 9, 4096, gate.stream)
            incomplete = subscriber.try_recv()
            assert incomplete is not None and not incomplete.ready
        with publisher.loan(4096) as out:
            if derived:
                out.rests_on(incomplete)
            stale = np.asarray(out)
            stale[:] = 1
        if derived:
            incomplete.close()
        gate.open()
        with subscriber.recv(WATCHDOG) as sample:
            sample.check()
            assert sample.tobytes() == b"\1" * 4096
        # More than there are blocks.
        for byte in range(20):
            publisher.send(np.full(4096, byte, "uint8"))
            stale[:] = 99
            with subscriber.recv(WATCHDOG) as sample:
                assert sample.tobytes() == bytes([byte]) * 4096


# Holds 90.
def test_sample_received_with_a_stream_is_a_tensor_of_the_gpu(domain, frames):
    with frames.publisher() as publisher, frames.subscriber() as subscriber:
        gate = driver.Gate()
        with publisher.loan(4096, stream=gate.stream) as out:
            driver.fill(out.tensor.data_ptr, 9, 4096, gate.stream)
        with subscriber.recv(WATCHDOG, stream=2) as early:
            assert early.__dlpack_device__() == (2, 0) and not early.ready, "the stream waits, and not the host"
            gate.open()
            assert early.tobytes(stream=2) == b"\t" * 4096
        publisher.send(np.full(4096, 7, "uint8"))
        with subscriber.recv(WATCHDOG) as sample:
            assert sample.__dlpack_device__() == (1, 0)
    with domain.topic("host", max_bytes=8, device="host") as host, host.publisher() as publisher:
        with host.subscriber() as subscriber:
            publisher.send(b"12345678")
            with pytest.raises(ValueError, match="leave stream out"):
                subscriber.recv(WATCHDOG, stream=2)
            with subscriber.recv(WATCHDOG) as sample:
                assert sample.tobytes() == b"12345678", "nothing is lost"


def test_a_tensor_of_a_gpu_is_sent_on_its_stream(frames):
    with frames.publisher() as publisher, frames.subscriber() as reader:
        gate, address = driver.Gate(), driver.allocate(4096)
        driver.fill(address, 5, 4096, gate.stream)
        tensor = driver.DeviceBytes(address, [4096])
        publisher.send(tensor, stream=gate.stream)
        with pytest.raises(pw.TimeoutError):
            reader.recv(0.01)
        gate.open()
        with reader.recv(WATCHDOG) as sample:
            assert np.asarray(sample).tobytes() == b"\5" * 4096


def test_a_loan_that_a_gpu_has_used_is_published_behind_a_stream(frames):
    with frames.publisher() as publisher, frames.subscriber() as reader:
        with publisher.loan(4096) as out:
            driver.fill(out.on("cuda:0").data_ptr, 6, 4096, 0)
        with reader.recv(WATCHDOG) as sample:
            assert np.asarray(sample).tobytes() == b"\6" * 4096


def test_samples_are_received_in_an_event_loop(frames):
    with frames.publisher() as publisher, frames.subscriber() as reader:
        publisher.send(np.full(4096, 4, "uint8"))
        with asyncio.run(reader.recv_async(WATCHDOG)) as sample:
            assert (np.asarray(sample) == 4).all()


def test_a_queue_takes_inputs_of_the_cpu_and_of_streams(domain):
    driver.use()
    with domain.queue("q", tasks=4, inputs=(4, 64), outputs=(4, 64), device="pinned") as queue:
        assert queue.place == "pinned:0"
        ticket = queue.submit("add", [np.full(64, 6, "uint8")], output=64)
        with queue.claim(WATCHDOG) as task:
            [given] = task.inputs
            assert given.__dlpack_device__() == (1, 0) and (np.asarray(given) == 6).all()
            assert given.on("cuda:0").tobytes() == b"\6" * 64
            np.asarray(task.output)[:] = 8
        with ticket.result(WATCHDOG) as result:
            assert np.asarray(result).tobytes() == b"\10" * 64

        gate = driver.Gate()
        block = queue.inputs.alloc()
        driver.fill(block.on("cuda:0").data_ptr, 5, 64, gate.stream)
        queue.submit("late", [block], stream=gate.stream)
        with queue.claim(WATCHDOG) as task:
            with pytest.raises(pw.InputsNotReady):
                np.asarray(task.inputs[0])
            gate.open()
            task.wait_inputs(WATCHDOG)
            assert np.asarray(task.inputs[0]).tobytes() == b"\5" * 64
            task.wait_inputs_on(2)
            assert task.inputs[0].__dlpack_device__() == (2, 0), "the view of the stream that waits"


def test_a_stream_reads_a_result_before_it_is_taken(domain):
    driver.use()
    with domain.queue("q", tasks=4, outputs=(4, 64), device="pinned") as queue:
        ticket = queue.submit("fill", output=64)
        gate = driver.Gate()
        task = queue.claim(WATCHDOG)
        driver.fill(task.output.on("cuda:0").data_ptr, 9, 64, gate.stream)
        task.complete_on(gate.stream)
        enqueued = ticket.wait_on(2, timeout=WATCHDOG)
        assert enqueued.tensor().__dlpack_device__() == (2, 0)
        gate.open()
        with enqueued.take(WATCHDOG) as result:
            assert result.tobytes() == b"\t" * 64


def test_blocks_and_samples_are_released_behind_a_stream(domain, frames):
    with domain.pool("p", blocks=1, block_bytes=64, device="pinned") as pool:
        gate = driver.Gate()
        block = pool.alloc()
        driver.fill(block.on("cuda:0").data_ptr, 3, 64, gate.stream)
        block.release_on(gate.stream)
        assert pool.try_alloc() is None, "the stream may still write it"
        gate.open()
        with pool.alloc(WATCHDOG) as block:
            assert np.asarray(block).tobytes() == b"\3" * 64
    with frames.publisher() as publisher, frames.subscriber(order="stream") as trainer:
        publisher.send(np.full(4096, 4, "uint8"))
        sample = trainer.recv(WATCHDOG, stream=2)
        sample.release_on(2)
        assert sample.closed


# Holds 91.
def test_to_copies_a_segment_to_another_place(domain):
    tensors = {"a": VALUES, "b": np.arange(12, dtype="int64").reshape(3, 4), "none": np.zeros((0, 3), "uint8")}
    with domain.put("llm", tensors, "pinned", metadata={"made": "here"}) as llm:
        with llm.to("cuda:0", name="llm-gpu") as build:
            assert isinstance(build, pw.Build) and build.name == "llm-gpu" and list(build) == list(tensors)
            with build.commit() as on_gpu, on_gpu.to("pinned:1", stream=2, name="back").commit() as back:
                assert (on_gpu.kind, back.place) == ("vmm", "pinned:1")
                for copy in (on_gpu, back):
                    assert copy.metadata == {"made": "here"}
                    for name, values in tensors.items():
                        assert copy[name].tobytes() == values.tobytes() and copy[name].shape == values.shape
                assert (np.asarray(back["b"]) == tensors["b"]).all()
    assert domain.ls() == []


# Holds 91.
def test_the_commit_waits_for_the_stream_of_the_copy(domain):
    driver.use()
    with domain.put("x", VALUES, "pinned") as x:
        gate = driver.Gate()
        build = x.to("cuda", stream=gate.stream, name="y")
        assert not driver.is_done(gate.stream)
        gate.open()
        with build.commit() as y:
            assert driver.is_done(gate.stream) and y.tobytes() == VALUES.tobytes()


# Holds 91.
def test_a_copy_fills_a_build_or_a_segment_that_is_open_for_writing(domain):
    driver.use()
    with domain.put("x", VALUES, "pinned") as x, domain.create("y", 1000, "float32", "cuda", mutable=True) as build:
        build.copy_from(x)
        with build.commit() as y:
            assert y.tobytes() == VALUES.tobytes()
            with domain.put("other", VALUES[::-1], "pinned") as other, domain.open("y", write=True) as writer:
                writer.copy_from(other, stream=2)
                driver.wait(2)
                assert y.tobytes() == VALUES[::-1].tobytes()
            with domain.open("y") as reader, pytest.raises(pw.ReadOnly):
                reader.copy_from(x)
            with domain.put("fewer", VALUES[:7], "pinned") as fewer, pytest.raises(pw.WrongKind, match="tensors"):
                y.copy_from(fewer)
            with pytest.raises(TypeError, match="takes a segment, not ndarray: use write"):
                y.copy_from(VALUES)


# Holds 91.
def test_host_memory_is_copied_once_it_is_pinned(domain):
    with domain.put("x", VALUES, "host") as x:
        with pytest.raises(pw.WrongKind, match="pinned"):
            x.to("cuda", name="y")
        with x.pin(), x.to("cuda", name="y").commit() as y:
            assert y.tobytes() == VALUES.tobytes()
            assert (np.asarray(x) == VALUES).all(), "it is host memory as before"
        with domain.put("g", VALUES, "cuda") as g:
            with pytest.raises(pw.WrongKind, match="cannot copy to \"z\" by a stream: it is host memory") as refused:
                g.to("host", name="z")
            assert "Domain.put" in str(refused.value) and refused.value.anchor == "copy-to-host"
            with domain.put("z", {key: g[key] for key in g}, "host") as z:
                assert z.tobytes() == VALUES.tobytes()


def test_memory_grows_where_it_lies(domain):
    with domain.create("log", 1000, "int32", "pinned", mutable=True, reserve=64 << 20) as build:
        with build.commit() as log, domain.open("log", access="both") as reader:
            start = log.tensor.data_ptr
            log.grow(2 << 20)
            assert reader.refresh() and reader.shape == (2 << 20,)
            log.tensor.write(np.full(2 << 20, 4, "int32"))
            assert log.tensor.data_ptr == start
            assert (np.asarray(reader) == 4).all() and reader.on("cuda:0").tobytes() == np.asarray(reader).tobytes()


def test_nothing_is_left(socket, child, tmp_path, monkeypatch):
    monkeypatch.setenv("SIMCUDA_LEDGER", str(tmp_path))
    worker = child(
        """
        import gc
        with pw.connect(socket=sys.argv[1]) as d:
            with d.put("x", np.zeros(1 << 20), device="pinned") as x, x.to("cuda:0", name="y").commit() as y:
                capsules = [x.__dlpack__(), x.on("cuda:0").__dlpack__(stream=-1), y.__dlpack__(stream=-1)]
            build = d.create("left", 1 << 20, "uint8", "pinned:1")
            view = build.on("cuda:0")
            build.close()
            del capsules, view, x, y, build
        gc.collect()
        say(pw._native.flush(60))
        """,
        socket,
    )
    assert worker.says() == "True"
    assert worker.end() == 0
    [ledger] = tmp_path.glob("*.json")
    assert ledger.read_text().strip() == "[]"


def test_a_forked_child_is_told_to_spawn(domain, child):
    with domain.put("x", VALUES, "pinned"):
        parent = child(
            """
            import os, warnings
            warnings.simplefilter("ignore")
            d = pw.connect(socket=sys.argv[1])
            opened = d.open("x")
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    pw.connect(socket=sys.argv[1], start=False).open("x")
                except pw.Error as error:
                    code = 0 if "spawn" in str(error) + str(error.advice) else 2
                finally:
                    os._exit(code)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            opened.close()
            d.close()
            """,
            domain.socket,
        )
        assert parent.says() == "0"
        assert parent.end() == 0


def test_weights_sleep_in_pinned_memory_and_wake_on_a_gpu(tmp_path, monkeypatch):
    asleep, awake, right, removed = ran(tmp_path, monkeypatch, "sleeping_weights.py", "--mib", "16", device="cuda")
    assert "on pinned:0" in asleep and "on GPU-" in awake
    assert right == "they are as they were: True" and removed == "removed; 0 bytes stay with others"


@pytest.mark.skipif(not DOCS.is_dir(), reason="the package alone, without the repository")
@pytest.mark.parametrize(
    ("page", "section", "said"),
    [
        ("pinned.md", "# Pinned host memory", ["cuda:0 (256, 1024) 262144.0", "vmm float32"]),
        ("python.md", "## Memory for the CPU and the GPU", ["cuda:0 b'\\x07\\x07\\x07'"]),
    ],
)
def test_the_examples_of_the_pages_run(domain, child, page, section, said):
    text = (DOCS / page).read_text().split(section + "\n")[1].split("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    example = child(code, PARTYWALL_SOCKET=domain.socket)
    assert [example.says() for _ in said] == said
    assert example.end() == 0
