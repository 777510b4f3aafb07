"""A model from shared memory.

Loading compares everything first, then swaps the contents of the tensor objects, so that identities hold.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from partywall._domain import Domain
from partywall._native import Tensor
from partywall._segment import Segment
from partywall.torch import _checksum, _manifest, _tensors
from partywall.torch._copy import copy, flat
from partywall.torch._handle import Loading, ModuleHandle, domain_or_default, remember
from partywall.torch._swap import Swap, replacement, swap, without_references
from partywall.torch._tensors import Kind, Named


def load_module(
    model: Any,
    name: str,
    timeout: float | None = 0.0,
    *,
    domain: Domain | None = None,
    version: int | None = None,
    device: Any = None,
    allow_peer: bool = False,
    buffers: Literal["private", "shared"] = "private",
    private: bool = False,
    fingerprint: Mapping[str, str] | None = None,
    verify: bool = False,
) -> ModuleHandle:
    """Gives a model the parameters and buffers that `share_module` has committed as `name`, in place and without a
    copy.

        with torch.device("meta"):
            model = Net()
        partywall.torch.load_module(model, "net", timeout=60)

    The model is on *meta* or has memory, which it gives up. Its parameters stay the same objects, so that ties, lists
    and attributes keep them. They show the shared memory, which is read-only, and cannot be trained: with `private`,
    they are copies that can. `DistributedDataParallel`, which broadcasts parameters in place, leaves the shared ones
    out. Buffers are copies, because models write them, unless `buffers="shared"`. The model is compared with the shared
    one first, and nothing changes if they differ.

    The version stays open until the model ends; the returned handle need not be kept. `domain` is as for
    `share_module`; `timeout`, `version`, `device` and `allow_peer` are as for `Domain.open`. `fingerprint` must be what
    `share_module` was given. `verify` compares all tensors with the checksums that `share_module(checksums=True)` made.

    Raises `ModuleMismatch`, which names all differences; `TensorInUse` for tensors whose memory others show;
    `UnsupportedTensor`; `ChecksumMismatch`; `WrongKind` if the name holds no model, or no checksums; and what
    `Domain.open` raises.
    """
    check_choice(buffers)
    tensors = _tensors.named_tensors(model)
    _tensors.check_supported(tensors)
    segment = domain_or_default(domain).open(name, timeout, version=version, device=device, allow_peer=allow_peer)
    try:
        loading = Loading(device, buffers, private, fingerprint)
        shared = mapped(segment, device)
        if verify:
            _checksum.verify(segment, shared)
        return install(model, tensors, segment, shared, loading)
    except BaseException:
        segment.close()
        raise


def check_choice(buffers: str) -> None:
    """Raises `ValueError` unless this is a choice for buffers."""
    if buffers not in ("private", "shared"):
        raise ValueError(f'buffers= is "private" or "shared", not {buffers!r}')


def mapped(segment: Segment, device: Any) -> list[Tensor]:
    """Returns the tensors of a segment; those of pinned memory on `device`, if it is given."""
    tensors = segment._tensors()
    if segment.kind == "pinned" and device is not None:
        return [tensor.on(str(device)) for tensor in tensors]
    return tensors


def install(
    model: Any,
    tensors: list[Named],
    segment: Segment,
    shared: list[Tensor],
    loading: Loading,
) -> ModuleHandle:
    """Compares a model, whose tensors are supported, with those of a segment, and replaces its tensors by them."""
    others = _tensors.attributes(model, tensors)
    kinds = _manifest.check(segment, shared, model, tensors, others, loading.fingerprint)
    with without_references(model):
        _tensors.check_replaceable(tensors, others)
        copied = _replace(tensors, kinds, segment, shared, loading)
    handle = ModuleHandle(segment, copied, model, loading)
    remember(model, handle)
    return handle


def in_place(named: Named, source: Tensor, segment: Segment) -> Swap:
    """Returns the swap of a tensor of a model with the one in a segment."""
    frozen = segment.name if named.is_parameter else None
    return named.tensor, replacement(named.tensor, torch.from_dlpack(source), False), frozen


def _replace(
    tensors: list[Named], kinds: Mapping[str, Kind], segment: Segment, shared: list[Tensor], loading: Loading
) -> int:
    """Replaces tensors by those of a segment. Returns how many bytes were copied."""
    there = {tensor.name: tensor for tensor in shared}
    copies: dict[tuple[Any, ...], Any] = {}

    def own(tensor: Tensor) -> Any:
        key = (tensor.data_ptr, tensor.dtype, tensor.shape, tensor.strides)
        if key not in copies or not tensor.nbytes:
            copies[key] = copy(torch.from_dlpack(tensor))
        return copies[key]

    swaps: list[Swap] = []
    # Tensors that are made in inference mode could not be used by a graph for backward() later.
    with torch.inference_mode(False):
        for named in {id(named.tensor): named for named in reversed(tensors)}.values():
            source = there[named.name]
            if loading.is_private(named.is_parameter):
                trained = kinds[named.name] == "p"
                swaps.append((named.tensor, replacement(named.tensor, own(source).detach(), trained), None))
            else:
                swaps.append(in_place(named, source, segment))
    swap(swaps)
    return sum(flat(made).nbytes for made in copies.values())
