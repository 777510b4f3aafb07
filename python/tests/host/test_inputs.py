"""Arguments: shapes, dtypes, names and arrays of all kinds, and the errors for invalid ones."""

import array
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import partywall as pw
from partywall import _arrays


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (3, (3,)),
        (np.int32(3), (3,)),
        ((), ()),
        ((2, 0), (2, 0)),
        ([np.int64(2), 3], (2, 3)),
        (np.array([2, 3]), (2, 3)),
        (iter((2, 3)), (2, 3)),
    ],
)
def test_a_shape_is_a_number_or_several(domain, shape, lengths):
    with domain.create("x", shape, "int8", device="host") as build:
        assert build.shape == lengths


@pytest.mark.parametrize(("version", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError), (1.0, TypeError)])
def test_version_is_a_number_from_1_on(domain, version, error):
    with domain.put("x", np.zeros(1), device="host"), domain.open("x", version=np.int64(1)) as segment:
        for use in (domain.open, lambda _, version: segment.advance(version=version)):
            with pytest.raises(error, match="versions are counted from 1|as an integer"):
                use("x", version=version)


@pytest.mark.parametrize("shape", [-1, (2, -3), 1 << 63, (1 << 40, 1 << 40), (1,) * 65])
def test_impossible_shape_is_a_value_error(domain, shape):
    with pytest.raises(ValueError, match="shape|dimensions"):
        domain.create("x", shape, "float32", device="host")


@pytest.mark.parametrize("shape", ["12", 1.5, None, (1, "2"), (None,)])
def test_value_that_is_not_a_shape_is_a_type_error(domain, shape):
    with pytest.raises(TypeError):
        domain.create("x", shape, "float32", device="host")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float32"),
        (np.float32, "float32"),
        (np.dtype("f4"), "float32"),
        (np.dtype("i8"), "int64"),
        (np.dtype(bool), "bool"),
        (np.bool_, "bool"),
        (np.longlong, "int64"),
        (float, "float64"),
        (int, "int64"),
        (bool, "bool"),
        (complex, "complex128"),
        ("f4", "float32"),
        ("<f4", "float32"),
        ("=i8", "int64"),
        ("|u1", "uint8"),
        (">u1", "uint8"),
        ("d", "float64"),
        ("?", "bool"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_a_dtype_is_what_numpy_means_by_it(domain, dtype, name):
    with domain.create("x", 2, dtype, device="host") as build:
        assert build.dtype == name
        assert build.tensor.view(dtype).dtype == name


def test_numpys_spellings_are_those_of_numpy():
    for spelling, name in _arrays._NUMPY.items():
        assert np.dtype(spelling).name == name, spelling


def test_a_dtype_is_taken_wherever_one_is(domain):
    with domain.topic("t", shape=(2,), dtype="<f4", device="host") as topic, topic.publisher() as publisher:
        assert topic.dtype == "float32"
        with publisher.loan(2, "f4") as loan:
            assert loan.dtype == "float32"
    with domain.pool("p", blocks=1, block_bytes=8, device="host") as pool, pool.alloc() as block:
        assert block.tensor(2, "f4").dtype == "float32"
    with domain.create_many("m", {"a": (2, "i2")}, device="host") as build:
        assert build["a"].dtype == "int16"


@pytest.mark.parametrize("dtype", ["float3", None, object, np.dtype("S4"), np.dtype([("a", "f4")]), "", "S4", "<M8[s]"])
def test_error_for_an_unknown_dtype_lists_the_known_ones(domain, dtype):
    with pytest.raises(ValueError, match="unknown dtype .* known are bool, uint8"):
        domain.create("x", 2, dtype, device="host")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "FLOAT32"])
def test_error_for_a_dtype_that_numpy_lacks_says_its_name(domain, dtype):
    with pytest.raises(ValueError, match="full name"):
        domain.create("x", 2, dtype, device="host")


def test_another_byte_order_is_refused(domain):
    for dtype in (np.dtype(">f4"), ">f4"):
        with pytest.raises(ValueError, match="byte order"):
            domain.create("x", 2, dtype, device="host")
    with pytest.raises(TypeError, match="byte order"):
        domain.put("x", np.zeros(3, ">f4"))


@pytest.mark.parametrize("name", ["", "/", "a//b", "../x", "größe", "a\0b", "a b", "a@b", "a:b", "a" * 256])
def test_error_for_an_invalid_name_says_which_rule_it_breaks(domain, name):
    for use in (
        lambda: domain.create(name, 1, "int8", device="host"),
        lambda: domain.put(name, b"x"),
        lambda: domain.open(name),
        lambda: domain.open_or_build(name, lambda claim: claim.put(b"x")),
        lambda: domain.rm(name),
    ):
        with pytest.raises(pw.BadName, match="is not a (name|version)"):
            use()
    assert domain.ls() == []


def test_names_and_tensors_may_have_parts(domain):
    with domain.put("team/model-7/v1.0_x", {"größe/ä": b"x"}) as put, domain.open("team/model-7/v1.0_x") as opened:
        assert list(opened) == list(put) == ["größe/ä"]


@pytest.mark.parametrize("name", [5, None, b"x"])
def test_name_that_is_no_string_is_refused(domain, name):
    for use in (domain.open, domain.rm, domain.exists, domain.timeline, lambda name: domain.put(name, np.zeros(1))):
        with pytest.raises(TypeError, match="^a name is a string, not "):
            use(name)


def test_segment_of_several_tensors_names_one(domain):
    with domain.put("x", {"b": np.zeros(2), "a": np.ones(2)}) as segment:
        with pytest.raises(TypeError, match=r'has 2 tensors: choose one by its name, such as \["b"\]'):
            np.from_dlpack(segment)


def test_gpu_is_another_word_for_cuda(domain):
    def outcome(device):
        try:
            with domain.create("x", 1, "uint8", device=device) as build:
                return build.place
        except pw.NoDevice as error:
            return str(error)

    assert outcome("gpu") == outcome("cuda")


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, [("a", None)]])
def test_metadata_are_strings(domain, metadata):
    with pytest.raises(TypeError, match="metadata maps strings"):
        domain.put("x", b"x", metadata=metadata)
    with domain.put("x", b"x", metadata=[("a", "b")]) as put:
        assert put.metadata == {"a": "b"}


@pytest.mark.parametrize("version", [0, -1])
def test_versions_count_from_one(domain, version):
    with domain.put("x", b"x"), pytest.raises(ValueError, match="counted from 1"):
        domain.open("x", version=version)


@pytest.mark.parametrize("reserve", [-1, 1 << 63])
def test_reserve_is_a_number_of_bytes(domain, reserve):
    with pytest.raises(ValueError, match="number of bytes"):
        domain.create("x", 1, "int8", device="host", mutable=True, reserve=reserve)


def test_a_device_is_a_string_or_prints_as_one(domain):
    class Device:
        """A device object like torch's."""

        def __str__(self) -> str:
            return "cpu"

    with domain.create("x", 1, "int8", Device()) as build:
        assert build.place == "host"
    for device in (None, 0, "tpu"):
        with pytest.raises(ValueError, match="is not a device: use auto, host, pinned, pinned:N, cuda"):
            domain.create("x", 1, "int8", device)


VALUES = np.arange(24, dtype="int32").reshape(4, 6)


@pytest.mark.parametrize(
    "given",
    [
        VALUES[:, ::2],
        VALUES[::-1],
        VALUES[:, ::-2],
        VALUES.T,
        np.broadcast_to(VALUES[0], (3, 6)),
        np.broadcast_to(np.int32(7), (3, 2)),
        np.asfortranarray(VALUES),
        VALUES[:0],
        np.array(7),
        np.float32(7),
        np.lib.stride_tricks.sliding_window_view(VALUES[0], 3),
        memoryview(VALUES)[::2],
        memoryview(b"abcdef")[::-1],
        memoryview(b"abcdef")[1:4],
        array.array("d", [1, 2]),
        (ctypes.c_int32 * 3)(1, 2, 3),
        bytearray(b"abc"),
        b"",
    ],
)
def test_any_array_of_numbers_can_be_put(domain, given):
    expected = np.asarray(given) if not isinstance(given, (bytes, bytearray)) else np.frombuffer(given, "uint8")
    with domain.put("x", given, device="host") as put:
        assert put.shape == expected.shape
        assert np.dtype(put.dtype) == expected.dtype
        assert np.array_equal(np.asarray(put), expected)


@pytest.mark.parametrize(
    "given",
    [
        object(),
        None,
        3,
        "text",
        [1, 2],
        {"a": {"b": VALUES}},
        np.array([None]),
        np.zeros(2, "S4"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "g"),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, ">i4"),
        array.array("u", "abc"),
    ],
)
def test_values_that_are_not_arrays_are_refused_with_a_sentence(domain, given):
    with pytest.raises(pw.BadSource, match="; (give|make|report|convert|put)") as raised:
        domain.put("x", given)
    assert isinstance(raised.value, TypeError)
    assert domain.ls() == []


@pytest.mark.parametrize("name", [1, None, b"a"])
def test_the_names_of_tensors_are_strings(domain, name):
    with pytest.raises(TypeError, match="a tensor's name is a string"):
        domain.put("x", {name: VALUES})
    with pytest.raises(TypeError, match="a tensor's name is a string"):
        domain.create_many("x", {name: (1, "int8")}, device="host")
    with domain.put("x", VALUES) as put:
        assert name not in put and "data" in put


class Exporter:
    """A library that breaks the DLPack protocol."""

    def __init__(self, device: object, capsule: object) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> object:
        return self.device() if callable(self.device) else self.device

    def __dlpack__(self, **_: object) -> object:
        return self.capsule() if callable(self.capsule) else self.capsule


def fail() -> None:
    raise ZeroDivisionError


# Holds 253.
@pytest.mark.parametrize(
    ("device", "capsule", "error"),
    [
        (fail, None, "it away: ZeroDivisionError; give"),
        ((1, 0), fail, "it away: ZeroDivisionError; give"),
        ((1, 0), 3, "no DLPack capsule"),
        ((1, 0), None, "no DLPack capsule"),
        (("a", 0), None, "cannot be interpreted as an integer"),
        (3, None, "is not an instance of 'tuple'"),
        ((13, 0), VALUES.__dlpack__, None),
    ],
)
def test_error_names_the_library_that_breaks_the_protocol(domain, device, capsule, error):
    if error is None:
        with domain.put("x", Exporter(device, capsule), device="host") as put:
            assert np.array_equal(np.asarray(put), VALUES)
    else:
        with pytest.raises(pw.BadSource, match=error) as raised:
            domain.put("x", Exporter(device, capsule))
        assert fail not in (device, capsule) or isinstance(raised.value.__cause__, ZeroDivisionError)
    assert pw._native.flush(60)
    assert domain.ls() == []


# Holds 253.
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, pw.Closed("x is closed")])
def test_exceptions_that_say_more_stay_as_they_are(domain, error):
    def end() -> None:
        raise error

    for exporter in (Exporter(end, None), Exporter((1, 0), end)):
        with pytest.raises(type(error) if isinstance(error, pw.Error) else error) as raised:
            domain.put("x", exporter)
        assert not isinstance(raised.value, pw.BadSource)


@contextlib.contextmanager
def ways_in(domain: pw.Domain, given: object) -> Iterator[list[Callable[[], object]]]:
    """Every call that takes an array, each with this one. Three elements of float32 would fit all of them."""
    with contextlib.ExitStack() as stack:
        build = stack.enter_context(domain.create("build", 3, "float32", device="host"))
        topic = stack.enter_context(domain.topic("topic", shape=(3,), dtype="float32", device="host"))
        publisher = stack.enter_context(topic.publisher())
        queue = stack.enter_context(domain.queue("queue", tasks=2, inputs=(2, 64), outputs=(2, 64), device="host"))
        pool = stack.enter_context(domain.pool("pool", blocks=1, block_bytes=64, device="host"))
        block = stack.enter_context(pool.alloc())

        def fill() -> None:
            with publisher.loan(3) as loan:
                loan.write(given)

        yield [
            lambda: domain.put("x", given, device="host"),
            lambda: domain.put("x", {"a": np.zeros(3), "b": given}, device="host"),
            lambda: domain.publish("x", given),
            lambda: domain.open_or_build("x", lambda claim: claim.put(given, device="host")),
            lambda: build.write(given),
            lambda: build.tensor.write(given),
            lambda: publisher.send(given),
            fill,
            lambda: block.tensor(3, "float32").write(given),
            lambda: queue.submit("kind", [given]),
            lambda: queue.submit_all([pw.Task("kind", [given])]),
        ]


class Described:
    """An array that NumPy is told of."""

    def __init__(self, **interface: object) -> None:
        self.__array_interface__ = {"version": 3, "shape": (3,), "typestr": "<f4", **interface}


# Holds 252.
@pytest.mark.parametrize(
    "given",
    [
        np.ma.masked_array(np.zeros(3, "float32"), [0, 1, 0]),
        np.ma.masked_array(np.zeros(3, "float32")),
        np.ma.masked,
        Described(data=np.zeros(3, "float32").data, mask=np.zeros(3, bool)),
    ],
    ids=["masked", "without masked elements", "constant", "interface"],
)
def test_array_with_a_mask_is_refused_everywhere(domain, given):
    with ways_in(domain, given) as calls:
        for take in calls:
            with pytest.raises(pw.BadSource, match=r"it has a mask.*\.filled\(\)"):
                take()
    assert "x" not in domain
    with domain.put("x", np.ma.masked_array([1.0, 2.0], [0, 1]).filled(7)) as put:
        assert list(np.asarray(put)) == [1, 7]


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


ENOUGH = np.zeros(16, "float32")


class Claims:
    """An exporter whose capsule says anything. By default it says three elements of float32."""

    def __init__(self, version: int, data=ENOUGH.ctypes.data, offset=0, shape=(3,), strides=None, ndim=1):
        numbers = ctypes.c_int64 * 1
        self.kept = numbers(*shape), numbers(*(strides or ()))
        shape_there = ctypes.cast(self.kept[0], ctypes.POINTER(ctypes.c_int64))
        strides_there = ctypes.cast(self.kept[1], ctypes.POINTER(ctypes.c_int64)) if strides else None
        tensor = DLTensor(data, (1, 0), ndim, (2, 32, 1, 0), shape_there, strides_there, offset)
        self.managed = Managed(tensor, None, None) if version == 0 else Versioned((1, 1), None, None, 0, tensor)
        self.name = b"dltensor" if version == 0 else b"dltensor_versioned"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        return new(ctypes.addressof(self.managed), self.name, None)


class Library:
    """A library that exports what its tensors claim by DLPack's C interface."""

    Give = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))

    class Table(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32 * 2), ("functions", ctypes.c_void_p * 6))

    def __init__(self) -> None:
        self.give = self.Give(self._give)
        pointer = ctypes.cast(self.give, ctypes.c_void_p)
        self.table = self.Table((1, 3), (None, None, pointer, None, None, None))
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        capsule = new(ctypes.addressof(self.table), b"dlpack_exchange_api", None)
        self.Tensor = type("Tensor", (Claims,), {"__dlpack_c_exchange_api__": capsule})
        self.given = 0

    def _give(self, tensor: Claims, out: Any) -> int:
        self.given += 1
        out[0] = ctypes.addressof(tensor.managed)
        return 0


# Holds 252.
@pytest.mark.parametrize("version", [0, 1, "table"])
def test_tensor_without_memory_is_refused_everywhere(domain, version):
    library = Library()
    make = (lambda **claims: library.Tensor(1, **claims)) if version == "table" else partial(Claims, version)
    with ways_in(domain, make(data=None, offset=64)) as calls:
        for take in calls:
            with pytest.raises(pw.BadSource, match="it has no memory; give"):
                take()
    assert (library.given > 0) == (version == "table")
    with domain.put("x", make(data=None, shape=(0,)), device="host") as put:
        assert put.shape == (0,)
    with domain.put("y", make()) as put:
        assert list(np.asarray(put)) == [0, 0, 0]


# Holds 252.
@pytest.mark.parametrize(
    "claims",
    [
        {"shape": (-3,)},
        {"shape": (1 << 62,)},
        {"ndim": -1},
        {"ndim": (1 << 31) - 1},
        {"strides": (1 << 62,)},
        {"strides": (-(1 << 62),)},
        {"offset": (1 << 64) - 1},
    ],
    ids=str,
)
def test_shape_that_no_memory_has_is_refused(domain, claims):
    for version in (0, 1):
        with pytest.raises(pw.BadSource, match="its shape is invalid"):
            domain.put("x", Claims(version, **claims), device="host")


@pytest.mark.parametrize("read_only", [False, True])
def test_array_at_address_zero_is_refused(domain, read_only):
    with pytest.raises(pw.BadSource, match="data is NULL.*; report") as raised:
        domain.put("x", Described(data=(0, read_only)), device="host")
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_capsule_is_taken_once(domain):
    taken = Exporter((1, 0), VALUES.__dlpack__(max_version=(1, 0)))
    with domain.put("x", taken):
        with pytest.raises(pw.BadSource, match="no DLPack capsule"):
            domain.put("x", taken)


def test_tensors_of_another_shape_or_type_are_not_written(domain):
    with domain.create("x", 3, "float32", device="host") as build:
        for wrong in (np.zeros(3, "float64"), np.zeros(4, "float32"), np.zeros((3, 1), "float32"), b"abc"):
            with pytest.raises(TypeError, match="float32"):
                build.write(wrong)
        build.write(np.arange(6, dtype="float32")[::-2])
        assert list(np.asarray(build)) == [5, 3, 1]


@pytest.mark.parametrize("path", ["/no/such/file", b"/no/such/file"])
def test_a_file_that_is_not_there_is_not_found(domain, path):
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        domain.put_file(path, "x", device="host")


def test_a_folder_without_a_model_is_refused(domain, tmp_path):
    with pytest.raises(OSError, match="no .safetensors file"):
        domain.put_file(tmp_path, "x", device="host")
    # Opening the pipe would wait for a writer.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe"):
        domain.put_file(tmp_path / "pipe", "x", device="host")


# Holds 63.
def test_without_a_gpu_memory_is_on_the_host_and_no_message_mentions_cuda(domain, child):
    topic = domain.topic("frames", max_bytes=8, device="host")
    with topic, domain.pool("blocks", blocks=1, block_bytes=8, device="host"):
        started = child(
            """
            with pw.connect(socket=sys.argv[1]) as d:
                with d.topic("frames", max_bytes=8) as topic, d.pool("blocks", blocks=1, block_bytes=8) as pool:
                    say(topic.place, pool.place)
                with d.topic("ours", max_bytes=8) as topic, d.create("x", 1, "uint8") as build:
                    say(topic.place, build.place)
                try:
                    d.create("y", 1, "uint8", device="cuda")
                except pw.NoDevice as error:
                    say("cuda:0" in str(error))
            """,
            domain.socket,
            PARTYWALL_LIBCUDA="/nonexistent/libcuda.so",
        )
        assert [started.says(), started.says(), started.says()] == ["host host", "host host", "True"]
        assert started.end() == 0


# Holds 257.
def test_streams_without_a_gpu_say_which_calls_are_for_hosts(domain, child):
    started = child(
        """
        import numpy as np
        with pw.connect(socket=sys.argv[1]) as d, d.timeline("steps", writer=True) as steps:
            for call in (steps.signal_on, steps.signal_on_and_wake, steps.wait_on):
                try:
                    call(7, 0)
                except pw.NoDevice as error:
                    say(error.advice.split(";")[0])
            block = d.pool("pool", blocks=1, block_bytes=8, device="host").alloc()
            for held in (d.semaphore("s", 1).acquire(), block):
                try:
                    held.release_on()
                except pw.NoDevice as error:
                    say(error.advice.split(";")[0])
                held.release()
            try:
                d.publish("x", np.zeros(3))
            except pw.NotShareable as error:
                say(error.advice.split(";")[0])
        """,
        domain.socket,
        PARTYWALL_LIBCUDA="/nonexistent/libcuda.so",
    )
    signal = "without a GPU use signal(7)"
    release = "without a GPU use release()"
    said = [signal, signal, "without a GPU use wait(7)", release, release, "use put() for an array in host memory"]
    assert [started.says() for _ in said] == said
    assert started.end() == 0


def test_device_auto_opens_a_segment_wherever_it_is(domain):
    with domain.put("x", b"1") as put, domain.open("x", device="auto") as opened:
        assert opened.place == put.place == "host"


def test_names_are_asked_for_by_in(domain):
    assert "x" not in domain and not domain.exists("x")
    with domain.put("x", b"1"):
        assert "x" in domain and domain.exists("x@1")
        assert "x@2" not in domain and 7 not in domain
        with domain.put("x", b"2"):
            pass
        assert "x" not in domain and not domain.exists("x@1")
    with domain.timeline("line"):
        assert "line" not in domain


def test_a_tensor_passes_for_an_array(domain):
    with domain.put("w", {"a": np.arange(4.0)}) as w:
        assert list(np.asarray(w["a"])) == [0, 1, 2, 3] and np.sum(w["a"]) == 6
        assert list(np.from_dlpack(w["a"])) == list(memoryview(w["a"])) == [0, 1, 2, 3]


def test_a_block_is_closed_like_other_handles(domain):
    with domain.pool("p", blocks=1, block_bytes=8, device="host") as pool:
        block = pool.alloc()
        assert not block.closed
        block.close()
        block.close()
        assert block.closed and not block.held and pool.stats().free == 1
        with pytest.raises(pw.NotHeld):
            block.release()
