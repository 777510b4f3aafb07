"""Conversion of other libraries' arrays, dtypes and shapes into arguments of the compiled module."""

import contextlib
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, SupportsIndex, TypeAlias

from partywall._errors import BadSource, BadTensor, Error
from partywall._native import Source

Access: TypeAlias = Literal["cpu", "gpu", "both"]
Shape: TypeAlias = SupportsIndex | Iterable[SupportsIndex]

Placed: TypeAlias = tuple[str, str, list[int], list[int] | None, tuple[str, int] | None]
"""A tensor to be created: its name, dtype and shape; its strides, unless it has no gaps; and the earlier tensor whose
memory it shows, if any, with the offset in bytes."""

SINGLE = "data"
"""The name of the only tensor of a segment that was created without tensor names, as with `partywall put`."""

_FOREIGN = ">" if sys.byteorder == "little" else "<"

_PYTHON: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


# NumPy's spellings on 64-bit Linux, beside the full names. A dtype that NumPy has no name for has one spelling.
_NUMPY: dict[str, str] = {
    spelling: name
    for name, spellings in {
        "bool": "? b1 bool_",
        "int8": "b i1 byte",
        "uint8": "B u1 ubyte",
        "int16": "h i2 short",
        "uint16": "H u2 ushort",
        "int32": "i i4 intc",
        "uint32": "I u4 uintc",
        "int64": "l q p i8 int int_ intp long longlong",
        "uint64": "L Q P u8 uint uintp ulong ulonglong",
        "float16": "e f2 half",
        "float32": "f f4 single",
        "float64": "d f8 float double",
        "complex64": "F c8 csingle",
        "complex128": "D c16 complex cdouble",
    }.items()
    for spelling in spellings.split()
}


def dtype_name(dtype: Any) -> str:
    """Returns Partywall's name of a dtype, from a name or an object of numpy, torch or jax; Python's `float` has 64
    bits."""
    if isinstance(dtype, str):
        spelling = dtype[1:] if dtype[:1] in ("<", ">", "=", "|") else dtype
        name = _NUMPY.get(spelling, dtype)
        if dtype[:1] == _FOREIGN and name not in (dtype, "bool", "int8", "uint8"):
            raise ValueError(f"{dtype!r} is not in this machine's byte order: use {spelling!r}")
        return name
    if isinstance(dtype, type):
        if dtype in _PYTHON:
            return _PYTHON[dtype]
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(dtype, numpy.generic):
            # Some of NumPy's classes are named after C's types.
            dtype = numpy.dtype(dtype)
    if not getattr(dtype, "isnative", True):
        raise ValueError(f"{dtype!r} is not in this machine's byte order: use {dtype.newbyteorder('=')!r}")
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def device_name(device: Any) -> str:
    """Returns Partywall's name of a device, from a string or torch's object."""
    return str(device)


def dimensions(shape: Shape) -> list[int]:
    """Returns a shape as a list of numbers; a single number is a shape of one dimension."""
    try:
        lengths = [operator.index(shape)]  # type: ignore[arg-type]
    except TypeError:
        lengths = [operator.index(length) for length in shape]  # type: ignore[union-attr]
    for length in lengths:
        if not 0 <= length < 1 << 63:
            raise ValueError(f"the shape {shape!r} is invalid: a dimension has 0 to 2⁶³ - 1 elements, not {length}")
    return lengths


def count(number: SupportsIndex) -> int:
    """Checks a number of bytes or elements, and returns it."""
    number = operator.index(number)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"a number of bytes or elements is 0 to 2⁶³ - 1, not {number}")
    return number


def optional_count(number: SupportsIndex | None) -> int | None:
    """Checks a number of bytes or elements, if it is given."""
    return None if number is None else count(number)


def planned(tensors: Mapping[str, tuple[Shape, Any]]) -> list[tuple[str, str, list[int]]]:
    """Returns descriptions of tensors to be created, as the compiled module takes them."""
    return [(name, dtype_name(dtype), dimensions(shape)) for name, (shape, dtype) in named(tensors).items()]


def placed(tensors: Mapping[str, tuple[Shape, Any]]) -> list[Placed]:
    """As `planned`, for a version that begins."""
    return [(name, dtype, shape, None, None) for name, dtype, shape in planned(tensors)]


def named(tensors: Any) -> dict[str, Any]:
    """Returns the tensors of a mapping, or a single tensor under the name `SINGLE`."""
    named = dict(tensors) if isinstance(tensors, Mapping) else {SINGLE: tensors}
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name is a string, not {name!r}")
        check_text(name, "the name of a tensor")
    return named


def check_text(text: str, what: str) -> None:
    """Raises `BadTensor` unless the table of a segment can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise not_utf8(BadTensor, what, text) from None


def not_utf8(kind: type[Error], what: str, text: str) -> Error:
    """Returns the error that a text has surrogates, as in a file name that `os.fsdecode` could not decode."""
    at = next(at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    advice = 'leave it out, or replace it: `text.encode("utf-8", "replace").decode()`'
    message = f"{text!r} cannot be {what}: its character {at} is a surrogate, which is not UTF-8"
    return kind(message, advice, "not-utf-8")


def source(tensor: Any, stream: Any) -> Source:
    """Holds a tensor in place. On a GPU, `stream` is ordered after the work that the tensor's library has enqueued."""
    if getattr(tensor, "requires_grad", False):
        # torch does not export tensors that record gradients. A parameter that is not initialised has no other form,
        # and is refused below.
        with contextlib.suppress(ValueError):
            tensor = tensor.detach()
    # NumPy exports a masked array without its mask. If there is one, NumPy's module for them is loaded.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(tensor, masked.MaskedArray):
        raise _masked()
    if not hasattr(tensor, "__dlpack__"):
        tensor = _plain(tensor)
    return Source(tensor, stream)


def _plain(thing: Any) -> Any:
    """Converts objects that export neither DLPack nor a plain buffer: NumPy's scalars, images, arrays of ctypes."""
    interface = getattr(thing, "__array_interface__", None)
    if interface is not None:
        import numpy

        if isinstance(interface, dict) and interface.get("mask") is not None:
            raise _masked()
        try:
            return numpy.asarray(thing)
        except (TypeError, ValueError) as error:
            what = f"this cannot be copied or published: NumPy does not take its __array_interface__: {error}"
            raise BadSource(what, "report it to the library that made it", "bad-source") from error
    try:
        return memoryview(thing)
    except TypeError:
        return thing


def _masked() -> BadSource:
    what = "this cannot be copied or published: it has a mask, which would be lost"
    advice = "give its numbers without the mask: a.filled(), or put the mask beside them: a.mask"
    return BadSource(what, advice, "bad-source")


def dense(tensor: Any, stream: Any) -> Source:
    """Holds a tensor to be copied, as `source` does. Its library makes it contiguous if it can, on its own stream."""
    return _contiguous(source(_negated(tensor), stream), tensor, stream)


def taken(tensors: Any, stream: Any, once: bool) -> tuple[dict[str, Source], dict[str, str]]:
    """Holds tensors to be copied, as `dense` does; and returns for each name that of its tensor. With `once`, that is
    an earlier name if the tensor is the same memory as the earlier one.
    """
    sources: dict[str, Source] = {}
    names: dict[str, str] = {}
    first: dict[Any, tuple[str, Source]] = {}
    for name, tensor in named(tensors).items():
        tensor = _negated(tensor)
        found = source(tensor, stream)
        # Keeps each source, because its memory could otherwise be given to a later one.
        identity = found.identity if once else None
        names[name] = name if identity is None else first.setdefault(identity, (name, found))[0]
        if names[name] == name:
            sources[name] = _contiguous(found, tensor, stream)
    return sources, names


def _negated(tensor: Any) -> Any:
    """Negates a tensor of torch, which does so lazily: DLPack has no flag for a tensor whose negation is pending."""
    try:
        pending = getattr(tensor, "is_neg", bool)()
    except ValueError:
        # A parameter that is not initialised, which is refused as it is taken.
        pending = False
    return tensor.resolve_neg() if pending else tensor


def _contiguous(found: Source, tensor: Any, stream: Any) -> Source:
    if not found.contiguous:
        for make in ("contiguous", "copy"):
            # The method of torch, then that of numpy, cupy and jax.
            if callable(method := getattr(tensor, make, None)):
                return source(method(), stream)
    return found


def plan(tensors: Mapping[str, Source], names: Mapping[str, str]) -> list[Placed]:
    """Returns descriptions of the tensors to allocate for what `taken` has returned."""
    return [
        (name, tensors[of].dtype, tensors[of].shape, None, None if of == name else (of, 0))
        for name, of in names.items()
    ]


def common_device(tensors: Mapping[str, Source]) -> str:
    """Returns the device that all tensors are on."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        places = ", ".join(sorted(devices))
        raise ValueError(f"the tensors are on {places}: give device=, or put each device's tensors alone")
    return devices.pop() if devices else "host"
