"""Tensors of a model replaced in place: the object stays, and with it ties, lists, attributes and optimizers' keys.

`load_state_dict(assign=True)` would break ties and leave other tensors on *meta*.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch

from partywall._errors import ReadOnly

Swap: TypeAlias = tuple[Any, Any, str | None]
"""A tensor, its replacement, and the name of the segment if the replacement is a parameter in its frozen memory."""


class NoGradients:
    """Takes the place of `requires_grad_` of a parameter in frozen memory, which an optimizer could not write.

    Its weak reference prevents others from swapping the parameter. torch's own modules make such references, too.
    """

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self._parameter = None if parameter is None else weakref.ref(parameter)
        self._address = None if parameter is None else parameter.data_ptr()

    def __call__(self, requires_grad: bool = True) -> Any:
        if self._parameter is None:
            raise TypeError("a parameter that comes out of a pickle lacks this method: set its requires_grad instead")
        parameter = self._parameter()
        if parameter is not None and (not requires_grad or parameter.data_ptr() != self._address):
            # Its memory may have been replaced, as by `half()`.
            return type(parameter).requires_grad_(parameter, requires_grad)
        raise ReadOnly(
            f"a parameter in {self.name!r} cannot be trained: its memory is shared and frozen",
            "load the model with private=True, or train parameters of your own beside it, such as adapters",
            "shared-parameter",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # torch restores attributes of a parameter without the parameter.
        return NoGradients, (self.name, None)


def replacement(old: Any, data: Any, requires_grad: bool) -> Any:
    """Returns a tensor with the data, and with the class, attributes and hooks of the old one, to be swapped with
    it."""
    kind = type(old)
    new = data if kind is torch.Tensor else torch.Tensor._make_subclass(kind, data, requires_grad)
    new.__dict__.update(old.__dict__)
    new.__dict__.pop(_REQUIRES_GRAD, None)
    # For torch, hooks belong to the memory: without this, it would call none of them after a swap.
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return new


def swap(swaps: Iterable[Swap]) -> None:
    """Swaps each tensor with its replacement, all or none."""
    done = []
    try:
        for old, new, frozen in swaps:
            # Also counts as done if an exception comes behind the swap.
            done.append((old, new, old.untyped_storage()._cdata, allow_gradients(old)))
            torch.utils.swap_tensors(old, new)
            if frozen is not None:
                refuse_gradients(old, frozen)
    except BaseException:
        for old, new, storage, before in reversed(done):
            if old.untyped_storage()._cdata != storage:
                allow_gradients(old)
                torch.utils.swap_tensors(old, new)
            if before is not None:
                refuse_gradients(old, before)
        raise


def refuse_gradients(parameter: Any, name: str) -> None:
    """Has a parameter in the frozen memory of a segment refuse to be trained."""
    parameter.__dict__[_REQUIRES_GRAD] = NoGradients(name, parameter)


def allow_gradients(tensor: Any) -> str | None:
    """Gives a parameter its own `requires_grad_` back. Returns the name of its segment, if it had none."""
    refusal = tensor.__dict__.pop(_REQUIRES_GRAD, None)
    return None if refusal is None else str(refusal.name)


def weak_references(tensor: Any) -> int:
    """Returns the number of weak references to a tensor that others have made."""
    return len(weakref.getweakrefs(tensor)) - (_REQUIRES_GRAD in tensor.__dict__)


@contextlib.contextmanager
def without_references(model: Any) -> Iterator[None]:
    """Drops the weak references to parameters that torch's recurrent modules keep, which would prevent a swap."""
    modules = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in modules:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in modules:
            # Not by the module's own methods: they would copy the weights into new memory.
            weights = module._flat_weights
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


_REQUIRES_GRAD = "requires_grad_"
