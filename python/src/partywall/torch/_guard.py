"""A check of what torch is about to write.

A write to read-only memory of a GPU is an illegal access, which CUDA reports at some later call and which ends the
context; in host memory it ends the process. The guard looks at each operation before it runs.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from partywall import _native
from partywall._errors import ReadOnly


class guard(TorchDispatchMode):  # type: ignore[misc]
    """Raises `ReadOnly` in place of each operation of torch that would write read-only memory of Partywall.

        with partywall.torch.guard():
            model(batch)

    The error names the tensor, its segment and the operation. Known are tensors of frozen versions and of versions that
    were opened only for reading, and samples, inputs and results that were received once a guard had been used. The
    guard holds for this thread and the backward passes that it starts. With `PARTYWALL_TORCH_GUARD=1` in the
    environment, importing `partywall` guards all threads. Each operation takes some microseconds longer.

    The guard sees operations that declare what they write, which are torch's own and those of `torch.library`. It does
    not see code that is given addresses (Triton, cupy, NumPy, `ctypes`, what `torch.compile` has made), replays of CUDA
    graphs, collectives of `torch.distributed`, and the running statistics of batch norms in training, whose operations
    do not declare them.
    """

    # Operators that take functions, such as `cond`, write nothing: the operations that they call are looked at.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # From now on samples are known, too.
        _native.read_only_at(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, name in _written(func):
            _check(args[position] if position < len(args) else kwargs.get(name), func)
        return func(*args, **kwargs)


_known: dict[Any, tuple[tuple[int, str], ...]] = {}
"""The arguments that an operation writes."""


def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    """Returns the position and the name of each argument whose elements an operation writes."""
    written = _known.get(operation)
    if written is None:
        schema = getattr(operation, "_schema", None)
        # An operator without a schema calls others, and operations such as `transpose_` change no element.
        arguments = () if schema is None or torch.Tag.inplace_view in operation.tags else schema.arguments
        written = tuple(
            (position, argument.name)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        _known[operation] = written
    return written


def _check(argument: Any, operation: Any) -> None:
    for tensor in _tensors(argument):
        found = _native.read_only_at(address(tensor))
        if found is not None:
            name, segment = found
            of = f" of {segment}" if segment else ""
            raise ReadOnly(
                f'cannot write tensor "{name}"{of} by {operation}: this process may only read it',
                "write a clone() of it, or commit a new version",
                "guarded-write",
            )


def _tensors(argument: Any) -> Iterator[Any]:
    """Returns the tensors of an argument: one, a list of them, or none."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors(each)


def address(tensor: Any) -> int:
    """Returns the address of the first element; 0 if the tensor has none."""
    if isinstance(tensor, FakeTensor) or tensor.device.type not in ("cpu", "cuda") or tensor.numel() == 0:
        return 0
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        # It has no memory of its own. If it wraps other tensors, the operation is called with them next.
        return 0


def guard_all_threads() -> None:
    """Has the guard on in this thread and in those that `threading` starts, until they end."""

    def begin(*_: Any) -> None:
        sys.setprofile(None)
        guard().__enter__()

    # The only hook of Python that runs code in each new thread.
    threading.setprofile(begin)
    guard().__enter__()
