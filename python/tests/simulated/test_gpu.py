"""Memory on a GPU, on the simulated driver: `PARTYWALL_LIBCUDA` names it."""

import gc
import os
import warnings

import numpy as np
import pytest

import partywall as pw

from . import driver
from ..host.test_exchange import NUMPY, OTHERS, capsule_name

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")


@pytest.mark.parametrize("dtype", NUMPY)
def test_an_array_goes_to_the_gpu_and_comes_back(domain, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    with domain.put("x", {"whole": values, "turned": values.T}, device="cuda") as put, domain.open("x") as opened:
        assert put.kind == "vmm" and put.place.startswith("GPU-")
        tensor = opened["whole"]
        assert (tensor.device, tensor.__dlpack_device__()) == ("cuda:0", (2, 0))
        assert tensor.tobytes() == values.tobytes()
        assert opened["turned"].tobytes() == values.T.tobytes()
        interface = tensor.__cuda_array_interface__
        assert interface["typestr"] == values.dtype.str
        assert interface["data"] == (tensor.data_ptr, True)
        assert (interface["shape"], interface["strides"]) == ((2, 3, 4), None)
        assert (interface["version"], interface["stream"]) == (3, None)
        with pytest.raises(BufferError, match="GPU"):
            memoryview(tensor)


@pytest.mark.parametrize("dtype", OTHERS)
def test_dtypes_without_an_array_interface_have_dlpack(domain, dtype):
    with domain.create("x", 4, dtype) as build:
        assert not hasattr(build.tensor, "__cuda_array_interface__")
        assert capsule_name(build.__dlpack__(stream=1, max_version=(1, 0))) == "dltensor_versioned"
        with domain.put("y", build) as put:
            assert (put.dtype, put.place) == (dtype, build.place)


def test_a_tensor_on_the_gpu_is_copied_there_and_to_the_host(domain):
    values = np.arange(1000, dtype="float32")
    with domain.put("x", values, device="cuda") as x, domain.put("y", x) as y, domain.put("z", y, device="host") as z:
        assert y.kind == "vmm" and y.tensor.data_ptr != x.tensor.data_ptr
        assert (np.from_dlpack(z) == values).all()
        assert y.tobytes() == values.tobytes()


def test_a_tensor_without_bytes_is_on_its_gpu_too(domain):
    with domain.create("x", (0, 3), "float32") as build:
        assert build.tensor.__dlpack_device__() == (2, 0)
        with build.commit() as committed, domain.open("x") as opened:
            assert committed.tensor.device == opened.tensor.device == "cuda:0"


def test_read_only_tensors_are_found_by_their_address(domain):
    with domain.create("x", 1000, "float32", device="cuda") as build:
        tensor = build.tensor
        assert pw._native.read_only_at(tensor.data_ptr) is None
        with build.commit(), domain.open("x") as opened:
            for address in tensor.data_ptr, opened.tensor.data_ptr:
                assert pw._native.read_only_at(address + 3999) == ("data", "x@1")
                assert pw._native.read_only_at(address + 4000) is None


class Protocol:
    """A stream of an arbitrary library."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 2


def test_streams_are_integers_or_speak_the_protocol(domain):
    values = np.arange(5)
    with domain.create("x", 5, "int64") as build, domain.put("source", values, device="cuda") as source:
        for stream in (None, 0, 1, 2, Protocol()):
            build.write(source, stream)
            assert build.tobytes(stream) == values.tobytes()
        with pytest.raises(TypeError, match="not a CUDA stream"):
            build.tobytes("stream")
        for stream in (None, 1, 2, -1, 77):
            build.__dlpack__(stream=stream)
        with pytest.raises(ValueError, match="stream 0"):
            build.__dlpack__(stream=0)


def test_a_read_only_capsule_says_so(domain):
    with domain.create("x", 5, "int64") as build:
        assert build.__cuda_array_interface__["data"][1] is False
        tensor = build.tensor
        with build.commit() as committed:
            assert tensor.__cuda_array_interface__["data"] == committed.__cuda_array_interface__["data"]
            assert tensor.readonly and committed.__cuda_array_interface__["data"][1] is True
            with pytest.raises(PermissionError):
                tensor.write(np.zeros(5, "int64"))


def test_memory_that_the_driver_does_not_share_is_refused_with_the_ways_out(domain):
    with domain.put("x", np.zeros(5), device="cuda") as x:
        with pytest.raises(pw.NotShareable, match="expandable_segments:False.*copy") as raised:
            domain.publish("y", x)
        assert raised.value.anchor == "vmm-memory"
    with pytest.raises(BufferError):
        domain.publish("y", np.zeros(5))


def test_a_gpu_that_is_not_there_is_no_device(domain):
    for device in ("cuda:7", "GPU-00000000-0000-0000-0000-000000000000"):
        with pytest.raises(RuntimeError, match="no GPU"):
            domain.create("x", 1, "uint8", device)
    with pytest.raises(ValueError, match="is not a device"):
        domain.create("x", 1, "uint8", "tpu")


def test_allocation_beyond_the_memory_is_an_error(domain):
    with pytest.raises(MemoryError, match="cannot allocate 1 TiB") as raised:
        domain.create("x", 1 << 40, "uint8")
    assert (raised.value.cuda_error, raised.value.anchor) == (2, "out-of-memory")


# Holds 65.
def test_nothing_is_left_on_the_gpu(socket, child, tmp_path, monkeypatch):
    monkeypatch.setenv("SIMCUDA_LEDGER", str(tmp_path))
    worker = child(
        """
        import gc
        with pw.connect(socket=sys.argv[1]) as d:
            with d.put("x", np.zeros(1 << 20), device="cuda") as x, d.open("x") as y, d.put("z", y["data"]) as z:
                capsules = [it.__dlpack__(stream=-1) for it in (x, y, z)]
            build = d.create("left", 1 << 20, "uint8")
            view = build.tensor
            build.close()
            with d.create("log", 1000, "uint8", mutable=True, reserve=1 << 26).commit() as log, d.open("log") as reader:
                log.grow(1 << 25)
                reader.refresh()
            host = d.put("host", np.zeros(1 << 20))
            pin = host.pin()
            host.close()
            try:
                with host.pin():
                    pass
            except pw.Closed:
                pass
            del capsules, view, x, y, z, build, log, reader, pin, host
        gc.collect()
        say(pw._native.flush(60))
        """,
        socket,
    )
    assert worker.says() == "True"
    assert worker.end() == 0
    [ledger] = tmp_path.glob("*.json")
    assert ledger.read_text().strip() == "[]"


def test_a_view_outlives_its_segment_and_connection(socket):
    values = np.arange(5)
    with pw.connect(socket=socket) as domain, domain.put("x", values, device="cuda") as x:
        view = x.tensor.view("uint64")
    assert view.tobytes() == values.tobytes()


def test_another_process_reads_it(domain, child):
    values = np.arange(1000)
    with domain.put("x", values, device="cuda"):
        reader = child(
            """
            with pw.connect(socket=sys.argv[1]) as d, d.open("x") as x:
                say(np.frombuffer(x.tobytes(), "int64").sum())
            """,
            domain.socket,
        )
        assert reader.says() == str(values.sum())
        assert reader.end() == 0


@pytest.mark.parametrize(
    ("code", "said"), [(719, "ContextLost 719 broken-context"), (801, "CudaError 801 not-supported")]
)
def test_a_refusal_of_the_driver_has_its_code(domain, child, code, said):
    failing = child(
        f"""
        import os
        os.environ["SIMCUDA_FAULTS"] = "cuMemCreate:1={code}"
        with pw.connect(socket=sys.argv[1]) as d:
            try:
                d.create("x", 1, "uint8")
            except RuntimeError as error:
                say(type(error).__name__, error.cuda_error, error.anchor)
        """,
        domain.socket,
    )
    assert failing.says() == said
    assert failing.end() == 0


def test_a_segment_on_the_gpu_grows_where_it_lies(domain):
    with domain.create("x", 1000, "int32", mutable=True, reserve=64 << 20) as build:
        build.write(np.arange(1000, dtype="int32"))
        with build.commit() as log, domain.open("x") as reader:
            old = log.tensor
            log.grow(8 << 20)
            assert log.tensor.data_ptr == old.data_ptr and log.nbytes >= 32 << 20
            assert reader.refresh() and reader.shape == (8 << 20,)
            # Of the tensor as it was.
            assert len(old.tobytes()) == 4000
            old.write(np.full(1000, 3, "int32"))
            with domain.put("y", np.full(1000, 4, "int32"), device="cuda") as source:
                old.write(source)
            assert np.frombuffer(reader.tobytes(), "int32").sum() == 4000


@pytest.mark.parametrize("mutable", [True, False])
def test_host_memory_is_pinned_until_the_last_pin_ends(domain, mutable):
    with domain.put("x", np.arange(1000), device="host", mutable=mutable) as put:
        first, second = put.pin(), put.pin("cuda:0")
        assert first.nbytes == second.nbytes == put.nbytes
        assert repr(first) == f"<partywall.Pinned x@1: {put.nbytes} bytes>"
        first.close()
        first.close()
        assert first.closed and not second.closed and repr(first) == "<partywall.Pinned x@1: closed>"
        with pytest.raises(ValueError, match="pinned for a GPU"):
            put.pin("host")
    # The pin holds the memory, and the memory keeps the name.
    assert [name.name for name in domain.ls()] == ["x"]
    second.close()
    assert pw._native.flush(60) and domain.ls() == []
    with domain.put("y", np.arange(1000), device="cuda") as put:
        with pytest.raises(TypeError, match="host memory|needs host"):
            put.pin()


def test_a_pin_that_is_left_open_warns(domain):
    with domain.put("x", np.arange(1000), device="host") as put:
        with pytest.warns(ResourceWarning, match="unclosed <partywall.Pinned x@1"):
            put.pin()
            gc.collect()
    assert pw._native.flush(60) and domain.ls() == []


def test_a_forked_child_lets_go_of_its_parents_memory(domain):
    put = domain.put("x", np.arange(1000), device="cuda")
    build = domain.create("y", 1000, "int64")
    view, capsule = put.tensor, put.__dlpack__(stream=-1)
    with warnings.catch_warnings():
        # Python warns of forks beside threads, which is what this is about.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        outcome = 1
        try:
            # There is no warning, because closing the object is the parent's responsibility.
            warnings.simplefilter("error")
            put.close()
            del view, capsule
            build.close()
            del put, build
            gc.collect()
            outcome = 0 if pw._native.flush(60) else 2
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert view.tobytes() == np.arange(1000).tobytes()
    with build.commit() as committed:
        assert committed.tobytes() == bytes(8000)
    put.close()


def test_memory_of_another_gpu_needs_permission(domain, child):
    code = """
        with pw.connect(socket=sys.argv[1]) as d:
            try:
                d.open("x")
            except pw.RemoteDevice as error:
                say(isinstance(error, RuntimeError), error.anchor)
            with d.open("x", allow_peer=True) as x:
                say(x.place, np.frombuffer(x.tobytes(), "int64").sum())
    """
    writer = child(
        """
        with pw.connect(socket=sys.argv[1]) as d, d.put("x", np.arange(1000), "cuda:1") as x:
            say(x.place)
            told()
        """,
        domain.socket,
        SIMCUDA_DEVICES="2",
    )
    place = writer.says()
    reader = child(code, domain.socket, SIMCUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="0")
    assert reader.says() == "True remote-device"
    assert reader.says() == f"{place} 499500"
    assert reader.end() == 0
    # It may number them as it likes.
    other = child('x = pw.connect(socket=sys.argv[1]).open("x"); say(x.place, x.tensor.device)', domain.socket,
                  SIMCUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1,0")
    assert other.says() == f"{place} cuda:0"


def test_numpy_is_told_how_to_take_a_tensor_of_a_gpu(domain):
    with domain.put("w", {"a": np.zeros(3)}, device="cuda") as w:
        with pytest.raises(BufferError, match=r'"a" is on cuda:0, and NumPy uses .* torch.from_dlpack\(\)'):
            np.asarray(w["a"])
        with pytest.raises(BufferError, match="NumPy uses host memory only"):
            np.asarray(w)


def test_descriptors_of_gpu_memory_name_their_gpu_and_those_of_published_memory_are_refused(domain):
    with domain.put("x", np.arange(4, dtype="uint8"), "cuda") as segment, domain.descriptors("x") as x:
        assert x.kind == "vmm" and x.place == segment.place and x.place.startswith("GPU-")
        assert [chunk.nbytes for chunk in x.chunks] == [2 << 20] == [x.nbytes]
        assert [(place.dtype, place.offset) for place in x.tensors.values()] == [("uint8", 0)]
    driver.use()
    with domain.publish("published", driver.DeviceBytes(driver.allocate(8), [8])):
        with pytest.raises(pw.WrongKind, match="a file descriptor needs host, pinned or vmm memory") as caught:
            domain.descriptors("published")
        assert "put" in caught.value.advice
