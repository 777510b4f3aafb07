# Holds 28.
"""Memory on a real GPU in torch, cupy, jax and numba: every dtype, both ways, at the same address."""

import importlib
import os

import numpy as np
import pytest

import partywall as pw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

TORCH = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
CUPY = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
JAX = [*CUPY, "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def raw(dtype: str) -> bytes:
    """Returns bytes that are valid elements of the dtype."""
    items = np.arange(24, dtype="uint8") % 2 if dtype == "bool" else np.arange(24 * 16, dtype="uint8") % 60
    return items.tobytes()


@pytest.mark.parametrize("dtype", TORCH)
def test_torch_both_ways(domain, dtype):
    given = torch.frombuffer(bytearray(raw(dtype)), dtype=getattr(torch, dtype)).cuda()
    try:
        torch.from_dlpack(given.__dlpack__())
    except (BufferError, RuntimeError) as error:
        pytest.skip(f"torch {torch.__version__} does not pass {dtype} to itself: {error}")
    with domain.put("put", given) as put, domain.create("built", given.shape, given.dtype) as build:
        torch.from_dlpack(build).copy_(given)
        with build.commit() as built, domain.open("built") as opened:
            for segment in (put, built, opened):
                taken = torch.from_dlpack(segment)
                assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
                assert taken.data_ptr() == segment.tensor.data_ptr
                assert taken.view(torch.uint8).cpu().numpy().tobytes() == segment.tobytes() == raw(dtype)
                del taken


@pytest.mark.parametrize("dtype", CUPY)
def test_cupy_both_ways(domain, dtype):
    cupy = pytest.importorskip("cupy")
    given = cupy.asarray(np.frombuffer(raw(dtype), dtype))
    with domain.put("put", given) as put, domain.create("built", given.shape, given.dtype) as build:
        cupy.from_dlpack(build)[...] = given
        with build.commit() as built, domain.open("built") as opened:
            for segment in (put, built, opened):
                for taken in (cupy.from_dlpack(segment), cupy.asarray(segment.tensor)):
                    assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
                    assert taken.data.ptr == segment.tensor.data_ptr
                    assert taken.tobytes() == segment.tobytes() == raw(dtype)
                    del taken


@pytest.mark.parametrize("dtype", JAX)
def test_jax_both_ways(domain, dtype):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no GPU")
    given = jax.numpy.asarray(np.frombuffer(raw(dtype), jax.numpy.dtype(dtype)))
    with domain.put("put", given) as put, domain.open("put") as opened:
        for segment in (put, opened):
            taken = jax.dlpack.from_dlpack(segment.tensor)
            assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
            assert taken.unsafe_buffer_pointer() == segment.tensor.data_ptr
            assert np.asarray(taken).tobytes() == segment.tobytes() == raw(dtype)
            del taken


def test_numba_copies_to_and_from_it_in_place(domain):
    cuda = pytest.importorskip("numba.cuda")
    with domain.create("x", 1000, "float32") as build:
        array = cuda.as_cuda_array(build.tensor)
        assert array.device_ctypes_pointer.value == build.tensor.data_ptr
        array.copy_to_device(np.full(1000, 3, "float32"))
        with build.commit() as committed, domain.open("x") as opened:
            assert np.frombuffer(committed.tobytes(), "float32").sum() == 3000
            assert cuda.as_cuda_array(opened.tensor).copy_to_host().sum() == 3000


def test_a_kernel_of_numbas_writes_in_place(domain):
    cuda = pytest.importorskip("numba.cuda")
    try:
        # The compiler loads this before anything else.
        importlib.import_module("numba.cuda.np.arrayobj")
    except AttributeError as error:
        pytest.skip(f"this numba-cuda compiles nothing with NumPy {np.__version__}: {error}")

    @cuda.jit
    def fill(out):
        at = cuda.grid(1)
        if at < out.size:
            out[at] = at

    with domain.create("x", 1000, "float32") as build:
        fill[4, 256](cuda.as_cuda_array(build.tensor))
        with build.commit() as committed:
            assert np.frombuffer(committed.tobytes(), "float32").sum() == 499500


def test_numpy_and_buffers_say_that_it_is_on_a_gpu(domain):
    with domain.put("x", torch.ones(3, device="cuda")) as put:
        for take in (np.from_dlpack, lambda segment: memoryview(segment.tensor)):
            with pytest.raises((BufferError, RuntimeError)):
                take(put)


def test_tensors_with_gaps_and_gradients_are_put(domain):
    whole = torch.arange(60.0, device="cuda").reshape(3, 4, 5)
    given = {"part": whole[:, 1::2], "turned": whole.permute(2, 0, 1), "learned": torch.nn.Parameter(whole)}
    with domain.put("x", given) as put:
        for name, tensor in given.items():
            assert torch.equal(torch.from_dlpack(put[name]), tensor.detach())


def test_every_view_of_a_frozen_segment_says_read_only_where_it_can(domain):
    with domain.put("x", torch.ones(3, device="cuda")) as put:
        assert put.tensor.readonly and put.__cuda_array_interface__["data"][1]
        assert isinstance(put.tensor, pw.Tensor)
