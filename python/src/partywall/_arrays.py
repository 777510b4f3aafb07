"""Arrays of other libraries on their way in, and how dtypes and shapes are written."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

from partywall import _streams
from partywall._native import Source

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]

SINGLE = "data"
"""The name of the only tensor of a segment that was made without names, as `partywall put` has it."""

_CUDA = 2
"""A CUDA device, for DLPack."""


def dtype_name(dtype: Any) -> str:
    """What Partywall calls a dtype: of a name, or of numpy's, torch's or jax's object; Python's `float` is 64 bits."""
    if isinstance(dtype, str):
        return dtype
    if dtype in (bool, int, float, complex):
        return {bool: "bool", int: "int64", float: "float64", complex: "complex128"}[dtype]
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def dimensions(shape: Shape) -> list[int]:
    """A shape as numbers; one number is a shape of one dimension."""
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    return [length.__index__() for length in lengths]


def named(tensors: Any) -> dict[str, Any]:
    """The tensors of a mapping, or one tensor under the name of the only one."""
    return dict(tensors) if isinstance(tensors, Mapping) else {SINGLE: tensors}


def source(tensor: Any, stream: Any) -> Source:
    """A tensor, held where it lies; on a GPU so that `stream` comes after what its library has enqueued."""
    if getattr(tensor, "requires_grad", False):
        # torch does not export what records gradients.
        tensor = tensor.detach()
    device = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else (0, 0)
    handle = _streams.handle(stream, device[1]) if device[0] == _CUDA else None
    return Source(tensor, handle)


def dense(tensor: Any, stream: Any) -> Source:
    """A tensor to be copied: as `source`, and without gaps where torch can make it so."""
    taken = source(tensor, stream)
    if not taken.contiguous and hasattr(tensor, "contiguous"):
        taken = source(tensor.contiguous(), stream)
    return taken


def plan(tensors: Mapping[str, Source]) -> list[tuple[str, str, list[int]]]:
    """What is to be allocated for copies of them."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def common_device(tensors: Mapping[str, Source]) -> str:
    """Where all of them are."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {', '.join(sorted(devices))}: say device=, or put those of each alone")
    return devices.pop() if devices else "host"
