"""Copies of tensors with their strides, and of the bytes in the gaps between their elements."""

from typing import Any

import torch

from partywall.torch._tensors import span


def flat(tensor: Any) -> Any:
    """Returns all memory from the first element of a tensor to the end of its last, as one dimension.

    Gaps between its elements may belong to other tensors that lie within it.
    """
    return tensor.detach().as_strided((span(tensor.shape, tensor.stride()),), (1,))


def copy(tensor: Any) -> Any:
    """Returns a copy of a tensor, with the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    flat(made).copy_(flat(tensor))
    return made
