"""Models in shared memory under `DistributedDataParallel`.

It broadcasts all parameters and buffers of the module that it wraps, in place, and so writes even those that nobody
trains. Those in read-only memory are kept from it. Which these are is asked when a module is wrapped: libraries such as
peft put the loaded model into modules of their own, under other names.
"""

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from partywall import _native
from partywall.torch._guard import address

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which torch looks for the names of tensors that it leaves alone."""


@functools.cache
def spare_read_only() -> None:
    """Has `DistributedDataParallel` leave alone what lies in read-only memory of Partywall, from now on."""
    wrap = DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_others(self: Any, module: Any, *arguments: Any, **options: Any) -> None:
        names = _read_only(module) if isinstance(module, torch.nn.Module) else set()
        if not names:
            wrap(self, module, *arguments, **options)
            return
        own = vars(module).get(_IGNORED)
        setattr(module, _IGNORED, names.union(getattr(module, _IGNORED, ())))
        try:
            wrap(self, module, *arguments, **options)
        finally:
            # The module may have other memory when it is wrapped again.
            if own is None:
                delattr(module, _IGNORED)
            else:
                setattr(module, _IGNORED, own)

    DistributedDataParallel.__init__ = wrap_others


def _read_only(module: Any) -> set[str]:
    """Returns the names of the parameters and buffers of a module that this process can only read."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name for name, tensor in tensors if _native.read_only_at(address(tensor)) is not None}
