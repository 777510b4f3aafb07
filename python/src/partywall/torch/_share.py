"""A model put into shared memory.

A shared model is an ordinary segment: the table describes strides and shared memory, and JSON in the metadata adds the
rest (`_manifest`). Moving a model allocates its segment on demand, one chunk after the other, because a build can be
written and used before its commit.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from partywall import _arrays
from partywall._arrays import Placed
from partywall._build import Build
from partywall._domain import Domain
from partywall._errors import NameExists
from partywall._options import pairs
from partywall.torch import _checksum, _tensors
from partywall.torch._copy import flat
from partywall.torch._errors import UnsupportedTensor
from partywall.torch._handle import ModuleHandle, domain_or_default, remember
from partywall.torch._manifest import KEY, Manifest
from partywall.torch._swap import Swap, allow_gradients, replacement, swap, without_references
from partywall.torch._tensors import Named


def share_module(
    model: Any,
    name: str,
    move: bool = False,
    *,
    domain: Domain | None = None,
    device: Any = None,
    metadata: Mapping[str, str] | None = None,
    fingerprint: Mapping[str, str] | None = None,
    kept: bool = False,
    shared: bool = False,
    if_absent: bool = False,
    checksums: bool = False,
) -> ModuleHandle:
    """Commits all parameters and buffers of a model as the next version of `name`; `load_module` gives them to a model
    of the same class in another process.

    Each tensor keeps its dtype and strides. Tied weights, and other tensors that share memory, are stored once. The
    tensors are copied to `device`, by default their own. The copy is made after the work on torch's current stream.

    With `move`, the parameters of this model then lie in the shared memory themselves: the segment is allocated chunk
    by chunk, each no larger than a hundredth of the model or its largest tensor, and the memory that a chunk replaces
    is given back to the driver before the next one is allocated. From then on the parameters cannot be trained, because
    the memory is frozen, and their gradients are dropped; buffers stay private. If this fails, the model is as usable
    as before: parameters that have moved lie in memory of this process alone. If the commit itself is refused, that
    memory is frozen, and the parameters are copied into private memory again. A note of the exception names those for
    which there was no room: they can be read, but not trained.

    `domain` is by default the connection that `connect()` chooses; it stays open until the process ends. `kept`,
    `shared`, `if_absent` and `metadata` are as for `Domain.create`. `fingerprint` is what `load_module` must be given,
    too. With `checksums` the version carries a checksum of each tensor, for `verify` of `load_module` and
    `ModuleHandle.advance`. Computing them reads the model several times.

    Raises `UnsupportedTensor` for tensors that are not plain memory, such as those of torchao, bitsandbytes or DTensor;
    with `move`, `TensorInUse` for tensors whose memory others show.
    """
    return share(
        model,
        name,
        move,
        chunked=move,
        domain=domain,
        device=device,
        metadata=metadata,
        fingerprint=fingerprint,
        kept=kept,
        shared=shared,
        if_absent=if_absent,
        checksums=checksums,
    )


def share(
    model: Any,
    name: str,
    move: bool,
    *,
    chunked: bool,
    domain: Domain | None = None,
    device: Any = None,
    metadata: Mapping[str, str] | None = None,
    fingerprint: Mapping[str, str] | None = None,
    kept: bool = False,
    shared: bool = False,
    if_absent: bool = False,
    checksums: bool = False,
) -> ModuleHandle:
    """As `share_module`. A copy that is `chunked` has the chunks of a model that moves, so that one can take the place
    of the other."""
    if metadata and KEY in metadata:
        raise ValueError(f"metadata= has the key {KEY!r}, under which the segment describes the model: choose another")
    tensors = _tensors.named_tensors(model)
    _tensors.check_supported(tensors)
    place = _device(tensors)
    planned = _tensors.plan(tensors)
    if move:
        if device is not None:
            raise ValueError(f"a model moves within its device, {place}: leave out device=, or copy the model")
        with without_references(model):
            _tensors.check_replaceable(tensors, _tensors.attributes(model, tensors))
    kind = {named.name: named.kind for named in tensors}
    sums = None
    if checksums:
        by_name = {named.name: named.tensor for named in tensors}
        with _on(place):
            sums = _checksum.checksums(by_name[part[0]] for part in planned)
    manifest = Manifest.of(model, "".join(kind[part[0]] for part in planned), fingerprint, sums)
    domain = domain_or_default(domain)
    if if_absent and domain.exists(name):
        # The commit would say so, too, but then a model has moved.
        raise NameExists(f"{name!r} already exists", "load it, or leave if_absent out for a new version", "name-exists")
    native = domain._native.create(
        name,
        _arrays.device_name(place if device is None else device),
        None,
        planned,
        pairs({**(metadata or {}), **manifest.write()}),
        mutable=False,
        reserve=None,
        kept=kept,
        shared=shared,
        if_absent=if_absent,
        chunk_bytes=_chunk_bytes(planned, tensors, place) if chunked else None,
        owner=None,
    )
    with Build(domain, native) as build, _on(place), torch.inference_mode(False):
        if move:
            with without_references(model):
                copied = _move(build, planned, tensors, place)
                try:
                    segment = build.commit()
                except BaseException as error:
                    _move_back(planned, tensors, error)
                    raise
        else:
            copied = _copy(build, planned, tensors)
            segment = build.commit()
        handle = ModuleHandle(segment, copied)
    if move:
        remember(model, handle)
    return handle


def _device(tensors: Iterable[Named]) -> Any:
    """Returns the device that all tensors are on."""
    devices: dict[Any, str] = {}
    for named in tensors:
        devices.setdefault(named.tensor.device, named.name)
    if any(device.type == "meta" for device in devices):
        where = devices[torch.device("meta")]
        why = f"cannot share {where}: it is on meta and has no data"
        raise UnsupportedTensor(why, "load the model first", "unsupported-tensor")
    for named in tensors:
        if _tensors.end(named.tensor) > named.tensor.untyped_storage().nbytes():
            why = f"cannot share {named.name}: it is longer than its storage, which was freed or made smaller"
            raise UnsupportedTensor(why, "give it its data first (FSDP: unshard the model)", "unsupported-tensor")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"the model is on several devices ({places}): share the part on each under its own name")
    return next(iter(devices), torch.device("cpu"))


def _chunk_bytes(planned: list[Placed], tensors: Iterable[Named], device: Any) -> int:
    sizes = _sizes(planned, tensors).values()
    least = _GRANULARITY if device.type == "cuda" else 1
    return max(least, sum(sizes) // 100, max(sizes, default=0))


def _sizes(planned: list[Placed], tensors: Iterable[Named]) -> dict[str, int]:
    """Returns the bytes of each tensor that has memory of its own."""
    by_name = {named.name: named.tensor for named in tensors}
    alone = [name for name, *_, within in planned if within is None]
    return {name: flat(by_name[name]).nbytes for name in alone}


def _copy(build: Build, planned: list[Placed], tensors: Iterable[Named]) -> int:
    """Copies a model into a build. Returns the number of bytes."""
    by_name = {named.name: named.tensor for named in tensors}
    sizes = _sizes(planned, tensors)
    for target in build._tensors():
        if sizes.get(target.name):
            flat(torch.from_dlpack(target)).copy_(flat(by_name[target.name]))
    return sum(sizes.values())


def _move(build: Build, planned: list[Placed], tensors: list[Named], device: Any) -> int:
    """Moves the parameters of a model into a build, and copies its buffers. Returns the number of bytes."""
    by_name = {named.name: named.tensor for named in tensors}
    parameters = _parameters(tensors)
    trained = {named.name for named in tensors if named.kind == "p"}
    sizes = _sizes(planned, tensors)
    pending: list[Swap] = []

    def replace() -> None:
        if device.type == "cuda":
            # The memory of the sources goes back to an allocator that knows nothing of the copies on this stream.
            torch.cuda.current_stream(device).synchronize()
        swap(pending)
        pending.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    try:
        for root, names in _parts(planned).items():
            if not build._native.is_allocated(root):
                replace()
            if sizes[root]:
                flat(torch.from_dlpack(build[root])).copy_(flat(by_name[root]))
            for name in names:
                parameter = by_name[name]
                if parameters.get(id(parameter)) == name:
                    data = torch.from_dlpack(build[name])
                    pending.append((parameter, replacement(parameter, data, False), build.name))
        replace()
    except BaseException:
        pending.clear()
        for name in trained:
            # What has moved can still be written.
            allow_gradients(by_name[name])
            by_name[name].requires_grad_()
        raise
    return sum(sizes.values())


def _move_back(planned: list[Placed], tensors: list[Named], error: BaseException) -> None:
    """Copies the parameters of a model that has moved out of memory that is frozen, and was not committed."""
    by_name = {named.name: named.tensor for named in tensors}
    parameters = _parameters(tensors)
    trained = {named.name for named in tensors if named.kind == "p"}
    frozen = []
    for names in _parts(planned).values():
        moved = [name for name in names if parameters.get(id(by_name[name])) == name]
        try:
            swap([(by_name[name], data, None) for name, data in _private(moved, by_name, trained)])
        except Exception as why:
            frozen += [f"{name} ({type(why).__name__})" for name in moved]
    if frozen:
        which = f"{frozen[0]} and others" if len(frozen) > 1 else frozen[0]
        error.add_note(
            f"{len(frozen)} parameters lie in frozen memory of this process, because they could not be copied out: "
            f"{which}. They can be read, but not trained. Load the model again."
        )


def _private(names: list[str], by_name: dict[str, Any], trained: set[str]) -> Iterator[tuple[str, Any]]:
    """Returns replacements of parameters, which share private memory as the parameters share theirs."""
    places = {name: _tensors.place(by_name[name]) for name in names}
    start = min((start for _, start, _ in places.values()), default=0)
    end = max((end for *_, end in places.values()), default=0)
    memory = None
    for name, (_, low, high) in places.items():
        old = by_name[name]
        if memory is None:
            memory = torch.empty(end - start, dtype=torch.uint8, device=old.device)
        data = memory[low - start : high - start].view(old.dtype).as_strided(old.shape, old.stride())
        flat(data).copy_(flat(old))
        yield name, replacement(old, data, name in trained)


def _parameters(tensors: list[Named]) -> dict[int, str]:
    """Returns the first name of each parameter, by its identity."""
    return {id(named.tensor): named.name for named in reversed(tensors) if named.is_parameter}


def _parts(planned: list[Placed]) -> dict[str, list[str]]:
    """Returns the tensors that share the memory of a tensor, by the name of that one."""
    parts: dict[str, list[str]] = {}
    for name, *_, within in planned:
        parts.setdefault(name if within is None else within[0], []).append(name)
    return parts


def _on(device: Any) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_GRANULARITY = 2 << 20
"""The driver allocates memory of GPUs in multiples of this."""
