# Holds 28.
"""Exchange of host memory with other libraries."""

import ctypes
import signal
import sys

import numpy as np
import pytest

import partywall as pw

NUMPY = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def capsule_name(capsule: object) -> str:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.argtypes, name.restype = [ctypes.py_object], ctypes.c_char_p
    return name(capsule).decode()


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_reads_and_writes_every_dtype_that_it_has_where_it_lies(domain, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    with domain.create("x", values.shape, dtype, device="host") as build:
        written = np.from_dlpack(build)
        written[...] = values
        with build.commit() as committed, domain.open("x") as opened:
            for array in (np.from_dlpack(opened), np.asarray(memoryview(opened.tensor))):
                assert (array.dtype, array.shape) == (values.dtype, values.shape)
                assert not array.flags.writeable
                assert (array == values).all()
                assert array.ctypes.data == opened.tensor.data_ptr
            assert written.ctypes.data == committed.tensor.data_ptr
            assert opened.tobytes() == values.tobytes()
            del array


@pytest.mark.parametrize("dtype", NUMPY)
def test_put_data_comes_out_unchanged(domain, dtype):
    values = np.arange(60).reshape(3, 4, 5).astype(dtype)
    with domain.put("x", {"whole": values, "part": values[:, 1::2, ::3], "turned": values.T}) as put:
        assert list(put) == ["whole", "part", "turned"]
        assert (np.from_dlpack(put["whole"]) == values).all()
        assert (np.from_dlpack(put["part"]) == values[:, 1::2, ::3]).all()
        assert (np.from_dlpack(put["turned"]) == values.T).all()


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_dtype_that_buffers_lack_says_what_to_do_and_can_be_viewed_as_another(domain, dtype):
    with domain.create("x", 4, dtype, device="host") as build:
        with pytest.raises(BufferError, match="view"):
            memoryview(build.tensor)
        same_size = "uint16" if dtype == "bfloat16" else "uint8"
        np.from_dlpack(build.tensor.view(same_size))[:] = [1, 2, 3, 4]
        with build.commit() as committed:
            assert list(np.from_dlpack(committed.tensor.view(same_size))) == [1, 2, 3, 4]
            with pytest.raises(ValueError, match="not as long"):
                committed.tensor.view("float64")


def test_packed_elements_come_as_bytes(domain):
    with domain.create("x", 8, "float4_e2m1fn", device="host") as build:
        with pytest.raises(pw.NoSuchView, match="uint8"):
            build.__dlpack__()
        assert np.from_dlpack(build.tensor.view("uint8")).shape == (4,)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 5, 1)])
def test_scalars_and_tensors_without_elements(domain, shape):
    values = np.ones(shape, "float32")
    with domain.put("x", values, device="host") as put:
        assert np.from_dlpack(put).shape == memoryview(put.tensor).shape == shape
        assert np.from_dlpack(put).sum() == values.sum()


def test_capsules_are_versioned_on_request(domain):
    with domain.put("x", np.zeros(3)) as put:
        assert capsule_name(put.__dlpack__()) == "dltensor"
        assert capsule_name(put.__dlpack__(max_version=(0, 8))) == "dltensor"
        assert capsule_name(put.__dlpack__(max_version=(1, 0))) == "dltensor_versioned"
        assert capsule_name(put.__dlpack__(max_version=(2, 5), dl_device=(1, 0), copy=False)) == "dltensor_versioned"
        assert put.__dlpack_device__() == (1, 0)


def test_unsupported_dlpack_requests_are_refused(domain):
    with domain.put("x", np.zeros(3)) as put:
        with pytest.raises(BufferError, match="copy"):
            put.__dlpack__(copy=True)
        with pytest.raises(BufferError, match="is on host"):
            put.__dlpack__(dl_device=(2, 0))
        for stream in (0, 7):
            with pytest.raises(ValueError, match="stream"):
                put.__dlpack__(stream=stream)
        assert not hasattr(put, "__cuda_array_interface__")


# Holds 29.
def test_everything_made_of_a_tensor_holds_the_lease(domain):
    makers = [
        lambda tensor: tensor,
        lambda tensor: np.from_dlpack(tensor),
        lambda tensor: memoryview(tensor),
        lambda tensor: tensor.__dlpack__(),
        lambda tensor: tensor.__dlpack__(max_version=(1, 0)),
        lambda tensor: tensor.view("uint64"),
    ]
    for make in makers:
        put = domain.put("x", np.zeros(1000))
        held = make(put.tensor)
        put.close()
        # A name that is not kept ends with its committer's lease.
        assert [name.name for name in domain.ls()] == ["x"]
        assert held is not None
        del held
        assert pw._native.flush(60)
        assert domain.ls() == []


# Holds 29.
def test_views_that_were_made_before_the_commit_stay_where_they_are(domain):
    with domain.create_many("x", {"a": (4, "int32"), "b": ((2, 2), "int64")}, device="host") as build:
        a, b = np.from_dlpack(build["a"]), np.asarray(memoryview(build["b"]))
        tensor = build["a"]
        a[:], b[:] = 7, 8
        assert not tensor.readonly
        committed = build.commit()
    assert tensor.readonly
    assert not np.from_dlpack(tensor).flags.writeable
    committed.close()
    assert (a == 7).all() and (b == 8).all()


# Holds 29.
def test_a_commit_that_fails_leaves_the_build_and_its_views(domain):
    with domain.put("x", np.zeros(3)), domain.create("x", 3, "float64", device="host", if_absent=True) as build:
        view = np.from_dlpack(build)
        view[:] = 5
        with pytest.raises(FileExistsError):
            build.commit()
        assert (view == 5).all()
        domain.rm("x")
        with build.commit() as committed:
            assert (np.from_dlpack(committed) == 5).all()
    assert (view == 5).all()


def test_a_write_into_a_view_that_is_frozen_ends_the_process(socket, child):
    writer = child(
        """
        with pw.connect(socket=sys.argv[1]) as d, d.create("x", 4, "int32", device="host") as build:
            view = np.from_dlpack(build)
            with build.commit():
                say("committed")
                view[0] = 1
                say("written")
        """,
        socket,
    )
    assert writer.says() == "committed"
    assert writer.says() == ""
    assert writer.end() == -signal.SIGSEGV


def test_a_mutable_segment_is_written_by_all_its_writers(domain):
    with domain.create("x", 4, "int32", device="host", mutable=True) as build:
        before = np.from_dlpack(build)
        with build.commit() as committed, domain.open("x", write=True) as writer, domain.open("x") as reader:
            before[0] = 1
            np.from_dlpack(committed)[1] = 2
            memoryview(writer.tensor)[2] = 3
            writer.tensor.view("uint32").view("int32")
            assert list(np.from_dlpack(reader)) == [1, 2, 3, 0]
            assert reader.tensor.readonly and not writer.tensor.readonly
            writer.tensor.write(np.array([4, 5, 6, 7], "int32"))
            assert list(np.from_dlpack(reader)) == [4, 5, 6, 7]
            with pytest.raises(PermissionError):
                reader.tensor.write(np.zeros(4, "int32"))


def test_a_frozen_segment_is_not_opened_for_writing(domain):
    with domain.put("x", np.zeros(3)), pytest.raises(PermissionError):
        domain.open("x", write=True)


def test_buffers_and_arrays_that_are_read_only_are_put(domain):
    frozen = np.arange(3)
    frozen.flags.writeable = False
    with domain.put("x", {"bytes": b"abc", "memory": memoryview(bytearray(b"def")), "frozen": frozen}) as put:
        assert [put[name].tobytes() for name in put] == [b"abc", b"def", frozen.tobytes()]


def test_asarray_is_the_memory_itself_or_says_why_not(domain):
    with domain.put("x", np.arange(6).reshape(2, 3)) as put:
        for array in (np.asarray(put), np.asarray(put.tensor)):
            assert array.ctypes.data == put.tensor.data_ptr and not array.flags.writeable
        assert np.array(put).flags.writeable
        assert np.asarray(put, dtype="float32").dtype == "float32"
        del array
    with domain.create_many("z", {"a": (1, "int8"), "b": (1, "int8")}, device="host") as build:
        with pytest.raises(TypeError, match="2 tensors"):
            np.asarray(build)


# Holds 254.
@pytest.mark.parametrize("dtype", OTHERS)
def test_arrays_of_ml_dtypes_go_in_and_come_out(domain, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(24).reshape(4, 6).astype(getattr(ml_dtypes, dtype))
    frozen = values.copy()
    frozen.flags.writeable = False
    given = {
        "whole": values,
        "gaps": values[:, ::2],
        "backwards": values[::-1],
        "turned": values.T,
        "frozen": frozen,
        "array": np.array(values[1, 2]),
        "scalar": values[1, 2],
        "empty": values[:0],
    }
    with domain.put("x", given, device="host") as put:
        for name, array in given.items():
            found = np.asarray(put[name])
            assert (put[name].dtype, found.dtype) == (dtype, values.dtype)
            assert found.tobytes() == np.asarray(array).tobytes() and found.shape == np.asarray(array).shape
            assert not found.flags.writeable or not found.size
        assert np.asarray(put["whole"]).ctypes.data == put["whole"].data_ptr
        converted = np.asarray(put["whole"], dtype="float32")
        assert np.array_equal(converted, values.astype("float32"), equal_nan=True)
        assert np.array(put["whole"]).flags.writeable
        del found
    row = values[0, :3].copy()
    with domain.create("y", 3, getattr(ml_dtypes, dtype), device="host") as build:
        build.write(row)
        np.asarray(build)[0] = row[2]
        assert build.tobytes() == row[[2, 1, 2]].tobytes()
    with domain.topic("t", max_bytes=64, device="host") as topic, topic.publisher() as publisher:
        with topic.subscriber() as subscriber:
            publisher.send(row)
            with subscriber.recv(10) as sample:
                assert (sample.dtype, np.asarray(sample).tobytes()) == (dtype, row.tobytes())
    with domain.queue("q", tasks=1, inputs=(1, 64), outputs=(1, 64), device="host") as queue:
        queue.submit("kind", [row])
        with queue.claim(10) as task:
            assert task.inputs[0].tensor(3, dtype).tobytes() == row.tobytes()
            task.complete()


# Holds 254.
@pytest.mark.parametrize(
    "dtype",
    ["int2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"],
)
def test_dtypes_of_ml_dtypes_that_partywall_lacks_are_named(domain, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.zeros(4, getattr(ml_dtypes, dtype))
    with pytest.raises(pw.BadSource, match=f"its elements are {dtype},") as raised:
        domain.put("x", values, device="host")
    assert "records" not in str(raised.value)
    with domain.put("x", values.view("uint8"), device="host") as put:
        assert put.tobytes() == values.tobytes()


def test_numpy_without_ml_dtypes_says_what_to_do(domain, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with domain.create("y", 3, "bfloat16", device="host") as build:
        for thing in (build, build.tensor):
            with pytest.raises(BufferError, match="ml_dtypes.*view"):
                np.asarray(thing)
    with domain.create("z", 4, "float4_e2m1fn", device="host") as build, pytest.raises(BufferError, match="view"):
        np.asarray(build)
