"""The base class of builds and segments. One with a single tensor can be used in place of that tensor."""

import contextlib
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from partywall import _native
from partywall._errors import Error


def array(tensor: _native.Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """Returns an array of the tensor's memory, for `numpy.asarray`. Raises `BufferError` if NumPy cannot use the
    memory, as bfloat16 and float8 without the package ml_dtypes."""
    import numpy

    if tensor.device != "host":
        raise BufferError(
            f'"{tensor.name}" is on {tensor.device}, and NumPy uses host memory only: use torch.from_dlpack() or '
            "cupy.from_dlpack(), or tobytes() for a copy"
        )
    return numpy.array(_added(tensor), dtype=dtype, copy=copy)


def _added(tensor: _native.Tensor) -> Any:
    """Returns the memory of a tensor as an array of the type that ml_dtypes adds to NumPy for it, if there is one, and
    else as a buffer."""
    integer = {"bfloat16": "uint16"}.get(tensor.dtype, "uint8" if tensor.dtype.startswith("float8") else None)
    if integer is not None:
        # Not a dependency. Without it, and for types that it lacks, the buffer says what to do.
        with contextlib.suppress(ImportError):
            import ml_dtypes
            import numpy

            if (added := getattr(ml_dtypes, tensor.dtype, None)) is not None:
                return numpy.asarray(memoryview(tensor.view(integer))).view(added)
    return memoryview(tensor)


class Tensors(Mapping[str, _native.Tensor]):
    """A mapping of names to tensors, in the order in which they were added. With a single tensor it can replace
    that."""

    _given: _native.Tensor | None = None
    """Keeps the memory once `__cuda_array_interface__` was read: its consumers keep this object, and nothing else."""

    def _tensors(self) -> list[_native.Tensor]:
        raise NotImplementedError

    def items(self) -> ItemsView[str, _native.Tensor]:
        """Names and tensors."""
        return _Items(self)

    def values(self) -> ValuesView[_native.Tensor]:
        """The tensors."""
        return _Values(self)

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, str) and super().__contains__(tensor)

    # Compared by identity, because these objects are open or closed. `Mapping` would compare contents.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def tensor(self) -> _native.Tensor:
        """Its only tensor. Raises `TypeError` if it has several or none."""
        tensors = self._tensors()
        if not tensors:
            raise TypeError(f"{self!r} has no tensor")
        if len(tensors) > 1:
            first = tensors[0].name
            raise TypeError(f'{self!r} has {len(tensors)} tensors: choose one by its name, such as ["{first}"]')
        return tensors[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its only tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """The dtype of its only tensor."""
        return self.tensor.dtype

    def tobytes(self, stream: Any = None) -> bytes:
        """Returns a copy of its bytes, made after the work on `stream`."""
        return self.tensor.tobytes(stream)

    def on(self, device: Any) -> _native.Tensor:
        """Returns its tensor as one of a GPU, as `Tensor.on`. Pinned memory only."""
        return self.tensor.on(device)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return array(self.tensor, dtype, copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        tensor = self.tensor
        array = tensor.__cuda_array_interface__
        self._given = tensor
        return array

    def _contents(self, native: _native.Segment | _native.Build) -> str:
        if native.closed:
            return "closed"
        names = native.names()
        what = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        if len(names) == 1:
            # A version that is stale or lost gives no new tensor, but can still be shown.
            with contextlib.suppress(Error):
                what = f"{self.tensor.dtype}{list(self.tensor.shape)}"
        return f"{what}, {native.nbytes} bytes on {native.place}"


class _Items(ItemsView[str, _native.Tensor]):
    """Items that are fetched together: one call for each tensor is slow in a model of thousands."""

    _mapping: Tensors

    def __iter__(self) -> Iterator[tuple[str, _native.Tensor]]:
        return ((tensor.name, tensor) for tensor in self._mapping._tensors())


class _Values(ValuesView[_native.Tensor]):
    """Values that are fetched together, like `_Items`."""

    _mapping: Tensors

    def __iter__(self) -> Iterator[_native.Tensor]:
        return iter(self._mapping._tensors())
