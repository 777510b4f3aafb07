"""Arguments: shapes, dtypes, names and arrays of all kinds, and the errors for invalid ones."""

import array
import ctypes
import os

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
    ids=str,
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
    ids=str,
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


@pytest.mark.parametrize(
    ("device", "capsule", "error"),
    [
        (fail, None, ZeroDivisionError),
        ((1, 0), fail, ZeroDivisionError),
        ((1, 0), 3, TypeError),
        ((1, 0), None, TypeError),
        (("a", 0), None, TypeError),
        (3, None, TypeError),
        ((13, 0), VALUES.__dlpack__, None),
    ],
    ids=str,
)
def test_error_names_the_library_that_breaks_the_protocol(domain, device, capsule, error):
    if error is None:
        with domain.put("x", Exporter(device, capsule), device="host") as put:
            assert np.array_equal(np.asarray(put), VALUES)
    else:
        with pytest.raises(error):
            domain.put("x", Exporter(device, capsule))
    assert pw._native.flush(60)
    assert domain.ls() == []


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


def test_without_a_gpu_memory_is_on_the_host_and_no_message_mentions_cuda(domain, child):
    with domain.topic("frames", max_bytes=8, device="host"), domain.pool("blocks", blocks=1, block_bytes=8, device="host"):
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
