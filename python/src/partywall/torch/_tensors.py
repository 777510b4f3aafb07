"""The tensors of a model: their names, their kinds, and the memory that they share with each other."""

import collections
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from partywall import _arrays
from partywall._arrays import Placed, check_text
from partywall._native import Tensor
from partywall.torch._errors import TensorInUse, UnsupportedTensor
from partywall.torch._swap import weak_references
from partywall.torch._version import is_older

Kind: TypeAlias = Literal["p", "f", "b", "n"]
"""A parameter, with or without gradients; a buffer, persistent or not."""

Place: TypeAlias = tuple[Any, int, int]
"""An address space, and the first byte and the end of a tensor in it."""


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of a model under one of its names."""

    name: str
    tensor: Any
    kind: Kind

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter."""
        return self.kind in "pf"


def named_tensors(model: Any) -> list[Named]:
    """Lists all parameters and buffers of a model in its order, each under every name that it has."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a model is a torch.nn.Module, not {type(model).__name__}: use put() and open() for tensors")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            # Its tensors belong to code that is not Python's, and cannot be replaced.
            raise UnsupportedTensor(
                f"cannot share {path or 'the model'}: it is a module of TorchScript ({type(module).__name__})",
                "share and load the module that it was made of, then script or trace that",
                "unsupported-tensor",
            )
    found: list[Named] = []
    _collect(model, "", set(), found)
    return found


def _collect(module: Any, prefix: str, above: set[int], found: list[Named]) -> None:
    for name, tensor in module._parameters.items():
        if tensor is not None:
            found.append(Named(prefix + name, tensor, "p" if tensor.requires_grad else "f"))
    for name, tensor in module._buffers.items():
        if tensor is not None:
            found.append(Named(prefix + name, tensor, "n" if name in module._non_persistent_buffers_set else "b"))
    # A module that contains itself has endless names.
    above = above | {id(module)}
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            _collect(child, f"{prefix}{name}.", above, found)


def check_supported(tensors: list[Named]) -> None:
    """Raises `UnsupportedTensor`, which names all tensors that are more or less than strided memory, and `BadTensor`
    for a name that is not UTF-8.
    """
    for named in tensors:
        check_text(named.name, "the name of a tensor")
    refused = [f"{named.name}: {why}" for named in tensors if (why := _unsupported(named.tensor))]
    if refused:
        raise UnsupportedTensor(
            "cannot share " + "; ".join(refused),
            "share its plain tensors with put(), or convert the model back to plain tensors first",
            "unsupported-tensor",
        )


def _unsupported(tensor: Any) -> str | None:
    kind = type(tensor)
    name = kind.__name__
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return f"{name} has no shape yet: run the model once"
    if hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{name} is a subclass of Tensor that keeps its data in other tensors"
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        # `isinstance` also accepts tensors of any class that are used as parameters.
        if not issubclass(kind, (torch.nn.Parameter, torch.nn.Buffer)):
            return f"{name} is a subclass of Tensor whose state is unknown"
        inner = [attribute for attribute, _ in _reach(tensor.__dict__, "", set())]
        if inner:
            return f"{name} has further tensors in its attributes ({inner[0].lstrip('.')})"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"it is {'quantized' if tensor.is_quantized else tensor.layout}, not strided memory"
    if tensor.is_conj() or tensor.is_neg():
        return "its conjugation or negation is pending: use resolve_conj() or resolve_neg()"
    if tensor.dtype not in _DTYPES:
        return f"elements of {tensor.dtype} are not known to Partywall: share a view as torch.uint8"
    if str(tensor.dtype).startswith("torch.float8") and is_older(2, 10):
        return f"elements of {tensor.dtype} need torch 2.10 or later: share a view as torch.uint8"
    return None


def place(tensor: Any) -> Place:
    """Returns where the bytes of a tensor lie. Tensors on *meta* have no addresses, but know whose memory they show."""
    # Asked first, because it is the rule and costs a fifth.
    elements = tensor.numel() if tensor.is_contiguous() else span(tensor.shape, tensor.stride())
    size = elements * tensor.itemsize
    if tensor.is_meta:
        start = tensor.storage_offset() * tensor.itemsize
        return ("meta", tensor.untyped_storage()._cdata), start, start + size
    start = tensor.data_ptr()
    return str(tensor.device), start, start + size


def end(tensor: Any) -> int:
    """Returns the bytes from the start of a tensor's storage to the end of its last element; 0 without elements."""
    elements = span(tensor.shape, tensor.stride())
    return int((tensor.storage_offset() + elements) * tensor.itemsize) if elements else 0


def place_in_segment(tensor: Tensor) -> Place:
    """Returns where the bytes of a tensor in a segment lie."""
    return "segment", tensor.data_ptr, tensor.data_ptr + tensor.nbytes


def span(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Returns the elements from the first one of a tensor to the end of its last."""
    last = 0
    for length, stride in zip(shape, strides, strict=True):
        if length == 0:
            return 0
        last += (length - 1) * stride
    return last + 1


def strides(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, ...]:
    """Returns strides that can be compared: that of a dimension with a single index means nothing."""
    shape = tuple(shape)
    return tuple(0 if length == 1 or 0 in shape else stride for length, stride in zip(shape, strides, strict=True))


def runs(places: Mapping[str, Place]) -> list[list[str]]:
    """Groups the names of tensors that share bytes. A group begins with the tensor that covers the most of its
    bytes."""
    spans = sorted(
        (str(space), start, -end, index, name)
        for index, (name, (space, start, end)) in enumerate(places.items())
        if end > start
    )
    groups: list[list[str]] = []
    covered: tuple[str, int] = ("", 0)
    for space, start, negative_end, _, name in spans:
        if groups and space == covered[0] and start < covered[1]:
            groups[-1].append(name)
            covered = (space, max(covered[1], -negative_end))
        else:
            groups.append([name])
            covered = (space, -negative_end)
    return groups


def ties(places: Mapping[str, Place]) -> dict[str, tuple[str, int]]:
    """Returns for each tensor that shares bytes with others: the least of their names, and its distance from that."""
    found = {}
    for group in runs(places):
        if len(group) > 1:
            leader = min(group)
            found.update({name: (leader, places[name][1] - places[leader][1]) for name in group})
    return found


def plan(tensors: Iterable[Named]) -> list[Placed]:
    """Returns how tensors are laid out in a segment: bytes that several of them share lie there once."""
    by_name = {named.name: named.tensor for named in tensors}
    places = {name: place(tensor) for name, tensor in by_name.items()}
    within: dict[str, tuple[str, int]] = {}
    for root, *views in runs(places):
        for name in views:
            if places[name][2] > places[root][2]:
                raise UnsupportedTensor(
                    f"cannot share {root} and {name}: they overlap, and neither contains the other",
                    "make one of them a copy: clone()",
                    "unsupported-tensor",
                )
            within[name] = (root, places[name][1] - places[root][1])
    ordered: dict[str, Placed] = {}
    for name in by_name:
        for part in (within[name][0], name) if name in within else (name,):
            tensor = by_name[part]
            dtype = _arrays.dtype_name(tensor.dtype)
            ordered.setdefault(part, (part, dtype, list(tensor.shape), list(tensor.stride()), within.get(part)))
    return list(ordered.values())


def attributes(model: Any, registered: Iterable[Named]) -> list[tuple[str, Any]]:
    """Lists the tensors of a model, by dotted names, that are neither parameters nor buffers: those in plain
    attributes, and in lists, mappings and objects there."""
    modules = list(model.named_modules())
    seen = {id(named.tensor) for named in registered} | {id(module) for _, module in modules}
    found: list[tuple[str, Any]] = []
    for name, module in modules:
        prefix = f"{name}." if name else ""
        own = {
            key: value
            for key, value in vars(module).items()
            if type(value) not in _LEAVES and key not in _REGISTRIES and not (isinstance(value, dict) and not value)
        }
        if own:
            found.extend((prefix + path.lstrip("."), tensor) for path, tensor in _reach(own, "", seen))
    return found


def _reach(value: Any, path: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the tensors that a value leads to, with their paths. The first value is the attributes of an object."""
    # Nearly all attributes of modules: told apart first, because a model has tens of thousands of them.
    if type(value) in _LEAVES:
        return
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
        return
    if isinstance(value, type) or depth > _DEPTH or id(value) in seen:
        return
    if depth > 0:
        # The mapping that the first call takes may end before the walk, and its identity name another object then.
        seen.add(id(value))
    if isinstance(value, (dict, Mapping)):
        parts = [(f".{key}" if depth == 0 else f"[{key!r}]", part) for key, part in list(value.items())]
    elif isinstance(value, _SEQUENCES):
        parts = [(f"[{index}]", part) for index, part in enumerate(list(value))]
    else:
        parts = [(f".{key}", part) for key, part in list(getattr(value, "__dict__", {}).items())]
    for name, part in parts:
        yield from _reach(part, path + name, seen, depth + 1)


def check_replaceable(tensors: list[Named], others: Iterable[tuple[str, Any]]) -> None:
    """Checks that tensors of a model can be replaced, whose `attributes` are `others`.

    Raises `TensorInUse`, which names all tensors that another object uses by their memory rather than by themselves."""
    distinct = {id(named.tensor): named for named in reversed(tensors)}.values()
    owners: dict[Any, str] = {}
    known: dict[Any, dict[int, Any]] = {}
    for named in distinct:
        if named.tensor.numel():
            storage = _storage(named.tensor)
            owners[storage] = named.name
            # A view holds the tensor that it was made of.
            whole = [] if named.tensor._base is None else [named.tensor._base]
            known.setdefault(storage, {}).update((id(tensor), tensor) for tensor in (named.tensor, *whole))
    found = []
    shown = set()
    for path, tensor in others:
        owner = owners.get(_storage(tensor)) if tensor.layout is torch.strided and tensor.numel() else None
        if owner is not None:
            shown.add(owner)
            known[_storage(tensor)][id(tensor)] = tensor
            found.append(f"{path} is a view of {owner}")
    for named in distinct:
        tensor = named.tensor
        if named.name in shown:
            continue
        if weak_references(tensor):
            found.append(f"{named.name} has a weak reference, as torch.compile makes them")
        elif _is_used(tensor):
            found.append(f"{named.name} has a live view or a graph for backward()")
        elif tensor.numel() and not tensor.is_meta and _holders(tensor) > len(known[_storage(tensor)]):
            found.append(f"{named.name} shares its memory with a tensor outside of the model")
    if found:
        raise TensorInUse(
            "cannot replace tensors of the model: " + ", ".join(found),
            "drop what was sliced, detached, computed or compiled from them, and make it again afterwards",
            "tensor-in-use",
        )


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage()._cdata


def _holders(tensor: Any) -> int:
    """Returns how many tensors, in any thread and library, show the memory of a tensor."""
    storage = tensor.untyped_storage()
    # One of the users is the object `storage`, of which there is one for all of Python.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _is_used(tensor: Any) -> bool:
    """Returns whether something in torch itself refers to the tensor, so that `swap_tensors` would refuse it."""
    count = tensor._use_count()
    if count == 2 and tensor.is_leaf and tensor.requires_grad:
        # The node that accumulates its gradient is no obstacle. If there was none, this call makes one, and the count
        # rises.
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        count -= tensor._use_count() == 2
        del node
    return bool(count > 1)


_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))

_DEPTH = 8
"""Objects in objects; deeper ones are configurations and caches of libraries."""

_LEAVES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, bytearray, type, torch.dtype, torch.device, torch.Size),
        *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    )
)

_SEQUENCES = (list, tuple, set, frozenset, collections.deque)

_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)
"""What both torch and Partywall pass by DLPack. torch passes float8 from 2.10 on."""
