"""Checksums of tensors. They find damage, not forgery, and are the same on the CPU and on GPUs."""

from collections.abc import Iterable
from typing import Any

import torch

from partywall._errors import WrongKind
from partywall._native import Tensor
from partywall._segment import Segment
from partywall.torch._copy import flat
from partywall.torch._errors import ChecksumMismatch
from partywall.torch._manifest import CHECKSUM, Manifest


def checksums(tensors: Iterable[Any]) -> str:
    """Returns a checksum of 64 bits for each tensor, in hexadecimal, one after the other.

    It covers the tensor's bytes and the gaps between its elements.

    Each word counts with an odd factor of its own, so that a change of any one word changes the sum.
    """
    sums = [_sum(flat(tensor)) for tensor in tensors]
    return "".join(f"{number & _MASK:0{CHECKSUM}x}" for number in torch.stack(sums).tolist()) if sums else ""


def _sum(elements: Any) -> Any:
    data = elements.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _PIECE):
        piece = data[start : start + _PIECE]
        # A copy, because a tensor may begin at any address, and end within a word.
        words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: piece.numel()].copy_(piece)
        first = start // 8
        factors = torch.arange(first, first + words.numel(), dtype=torch.int64, device=data.device)
        total += words.mul_(factors.mul_(2).add_(1)).sum()
    return total


def verify(segment: Segment, shared: list[Tensor]) -> None:
    """Compares the tensors of a segment with the checksums that it was shared with.

    Raises `ChecksumMismatch`, which names all tensors that differ, and `WrongKind` if there are no checksums.
    """
    expected = Manifest.read(segment).checksums
    if expected is None:
        raise WrongKind(
            f"version {segment.version} of {segment.name!r} was shared without checksums",
            "share it with checksums=True, or leave out verify",
            "no-checksums",
        )
    found = checksums(torch.from_dlpack(tensor) for tensor in shared)
    digits = [slice(CHECKSUM * index, CHECKSUM * (index + 1)) for index in range(len(shared))]
    wrong = [tensor.name for tensor, of in zip(shared, digits, strict=True) if found[of] != expected[of]]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ChecksumMismatch(
            f"version {segment.version} of {segment.name!r} is damaged: {', '.join(wrong[:_SHOWN])}{more}",
            "share the model again; if it happens again, check the memory of the machine and of the GPU",
            "checksum-mismatch",
        )


_MASK = (1 << 64) - 1

_PIECE = 16 << 20
"""Bytes that are added up at once. Adding them up takes several times as much memory."""

_SHOWN = 20
"""Names in a message."""
