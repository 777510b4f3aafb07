"""Models in shared memory under `DistributedDataParallel`.

It broadcasts all parameters and buffers of the module that it wraps, in place, and so writes even those that nobody
trains. torch has a list of names that it leaves alone, an attribute of the module. The names of tensors in read-only
memory are entered when a model is given that memory, and anew when a module is wrapped. By then libraries such as peft
have put the model into modules of their own, under other names, or it has memory of its own.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from partywall import _native
from partywall.torch._guard import address

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which torch looks for the names of tensors that it leaves alone."""


class Ignored(list[str]):
    """The names that `DistributedDataParallel` leaves alone in a module.

    It tells apart those that lay in read-only memory when it was made, so that they can be replaced.
    """

    def __init__(self, others: Iterable[str], read_only: Iterable[str]) -> None:
        self.read_only = frozenset(read_only).difference(others)
        super().__init__([*others, *sorted(self.read_only)])

    def others(self) -> list[str]:
        """Returns the names that somebody else has entered."""
        return [name for name in self if name not in self.read_only]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module, and one that comes out of a pickle, have memory of their own.
        return list, (self.others(),)


def ignore_read_only(module: Any) -> None:
    """Enters what a module has in read-only memory of Partywall in torch's list of what to leave alone, in place of
    what was entered before."""
    if not isinstance(module, torch.nn.Module):
        return
    read_only = _read_only(module)
    listed = getattr(module, _IGNORED, None)
    if read_only or isinstance(listed, Ignored):
        others = listed.others() if isinstance(listed, Ignored) else list(listed or ())
        setattr(module, _IGNORED, Ignored(others, read_only))


@functools.cache
def spare_read_only() -> None:
    """Has `DistributedDataParallel` leave alone what lies in read-only memory of Partywall, from now on."""
    wrap = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_others(self: Any, module: Any, *arguments: Any, **options: Any) -> None:
        ignore_read_only(module)
        wrap(self, module, *arguments, **options)

    DistributedDataParallel.__init__ = wrap_others


def _read_only(module: Any) -> set[str]:
    """Returns the names of the parameters and buffers of a module that this process can only read."""
    # As torch finds them: a module under several names, or one that contains itself, has those of its first name.
    tensors = (
        (f"{path}.{name}" if path else name, tensor)
        for path, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    )
    return {name for name, tensor in tensors if _native.read_only_at(address(tensor)) is not None}
