# Holds 28.
"""Host memory in torch and jax on the CPU, if they are installed."""

import gc
import os
from typing import Any

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG
from .test_inputs import ways_in

TORCH = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
JAX = [dtype for dtype in TORCH if dtype != "float8_e8m0fnu"]


def raw(dtype: str) -> bytes:
    """Returns bytes that are valid elements of the dtype."""
    items = np.arange(24, dtype="uint8") % 2 if dtype == "bool" else np.arange(24 * 16, dtype="uint8") % 60
    return items.tobytes()


@pytest.fixture
def jax():
    """jax, with 64 bits, and without the memory of a GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax


@pytest.fixture
def torch():
    """torch."""
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", TORCH)
def test_torch_both_ways(domain, torch, dtype):
    given = torch.frombuffer(bytearray(raw(dtype)), dtype=getattr(torch, dtype)).reshape(4, -1)
    try:
        torch.from_dlpack(given.__dlpack__())
    except (BufferError, RuntimeError) as error:
        pytest.skip(f"torch {torch.__version__} does not pass {dtype} to itself: {error}")
    with domain.put("put", given) as put, domain.create("built", given.shape, given.dtype, given.device) as build:
        written = torch.from_dlpack(build)
        written.copy_(given)
        with build.commit() as built, domain.open("built") as opened:
            assert written.data_ptr() == built.tensor.data_ptr
            for segment in (put, built, opened):
                for thing in (segment, segment.tensor):
                    taken = torch.from_dlpack(thing)
                    assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
                    assert taken.data_ptr() == segment.tensor.data_ptr
                    assert taken.view(torch.uint8).numpy().tobytes() == segment.tobytes() == raw(dtype)
                    del taken


@pytest.mark.parametrize("dtype", JAX)
def test_jax_both_ways(domain, jax, dtype):
    given = jax.numpy.asarray(np.frombuffer(raw(dtype), jax.numpy.dtype(dtype)).reshape(4, -1))
    with domain.put("put", given) as put, domain.open("put") as opened:
        assert (put.dtype, put.place) == (dtype, "host")
        for segment in (put, opened):
            for thing in (segment, segment.tensor):
                taken = jax.dlpack.from_dlpack(thing)
                assert (taken.dtype, taken.shape) == (given.dtype, given.shape)
                assert taken.unsafe_buffer_pointer() == segment.tensor.data_ptr
                assert np.asarray(taken).tobytes() == segment.tobytes() == raw(dtype)
                del taken


def test_jax_computes_with_what_it_took(domain, jax):
    with domain.put("x", np.arange(1000.0)) as put:
        taken = jax.dlpack.from_dlpack(put)
        assert float(jax.jit(lambda x: (x * 2).sum())(taken)) == 999000
        del taken
        # jax keeps no reference.
        put.close()
        gc.collect()
        assert pw._native.flush(WATCHDOG) and domain.ls() == []


def test_tensors_with_gaps_and_gradients_are_put(domain, torch):
    whole = torch.arange(60.0).reshape(3, 4, 5)
    given = {
        "part": whole[:, 1::2],
        "turned": whole.permute(2, 0, 1),
        "learned": torch.nn.Parameter(whole),
        "conjugate": torch.tensor([1 + 2j]).conj().resolve_conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "empty": whole[:0],
        "scalar": torch.tensor(7),
    }
    with domain.put("x", given) as put:
        for name, tensor in given.items():
            assert torch.equal(torch.from_dlpack(put[name]), tensor.detach()), name
    with pytest.raises(pw.BadSource, match="lazy"):
        domain.put("x", torch.tensor([1 + 2j]).conj())


def fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def shortened(torch: Any, nbytes: int) -> Any:
    """A tensor whose storage has become smaller than it."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


REFUSED = {
    "freed": (lambda torch: shortened(torch, 0), "it has no memory; give"),
    "shortened": (lambda torch: shortened(torch, 8), "longer than the storage that it shows; give"),
    "fake": (fake, "it has no memory; give"),
    "meta": (lambda torch: torch.zeros(3, device="meta"), "it is on meta and has no data; load"),
    "nested": (lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested tensor; give"),
    "jagged": (
        lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "nested tensor; give",
    ),
    "sparse": (lambda torch: torch.eye(3).to_sparse(), "its layout is sparse_coo, .*; make"),
    "compressed": (lambda torch: torch.eye(3).to_sparse_csr(), "its layout is sparse_csr, .*; make"),
    "mkldnn": (lambda torch: torch.zeros(3).to_mkldnn(), "its layout is _mkldnn, .*; make"),
    "quantized": (
        lambda torch: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
        "quantized tensor; give",
    ),
    "masked": (
        lambda torch: torch.masked.masked_tensor(torch.zeros(3), torch.tensor([True, False, True])),
        "it has a mask|it has no memory",
    ),
}


# Holds 252, 253.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_torch_that_are_no_plain_memory_are_refused_everywhere(domain, torch, name):
    make, why = REFUSED[name]
    given = make(torch)
    with ways_in(domain, given) as calls:
        for take in calls:
            with pytest.raises(pw.BadSource, match=why):
                take()
    assert "x" not in domain


# Holds 252.
def test_tensors_that_show_a_part_of_a_storage_are_put(domain, torch):
    whole = torch.arange(12.0)
    views = whole[5:9], whole[::3], whole.view(3, 4)[:, 3]
    whole.untyped_storage().resize_(4 * 8)
    with domain.put("x", whole[4:8]) as put:
        assert list(np.asarray(put)) == [4, 5, 6, 7]
    for beyond in views:
        with pytest.raises(pw.BadSource, match="longer than the storage"):
            domain.put("x", beyond)


def test_tensor_within_vmap_is_refused(domain, torch):
    def put(tensor: Any) -> Any:
        with pytest.raises(pw.BadSource, match="its library does not give it away|no memory"):
            domain.put("x", tensor)
        return tensor

    torch.func.vmap(put)(torch.arange(6.0).reshape(2, 3))


def test_deleted_array_of_jax_is_refused(domain, jax):
    for dtype in ("float32", "bfloat16"):
        array = jax.numpy.zeros(4, dtype)
        array.delete()
        with pytest.raises(pw.BadSource, match="its library does not give it away"):
            domain.put("x", array, device="host")


# Holds 254.
def test_dtypes_of_jax_that_partywall_lacks_are_named(domain, jax):
    for dtype in ("int4", "float4_e2m1fn", "float8_e3m4"):
        with pytest.raises(pw.BadSource, match=f"its elements are {dtype},"):
            domain.put("x", jax.numpy.zeros(4, dtype), device="host")


def test_a_view_of_torchs_keeps_the_memory(domain, torch):
    put = domain.put("x", torch.arange(1000))
    views = [torch.from_dlpack(put)[500:] for _ in range(3)]
    put.close()
    assert [int(view[0]) for view in views] == [500] * 3
    assert [name.name for name in domain.ls()] == ["x"]
    del views
    assert pw._native.flush(WATCHDOG) and domain.ls() == []


def test_torchs_dtypes_are_those_of_the_same_name(domain, torch):
    for dtype in TORCH:
        with domain.create("x", torch.Size([2, 3]), getattr(torch, dtype), torch.device("cpu")) as build:
            assert (build.dtype, build.shape, build.place) == (dtype, (2, 3), "host")
