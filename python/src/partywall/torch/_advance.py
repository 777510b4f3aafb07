"""A loaded model that goes on to another version of its name."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from partywall import _streams
from partywall._errors import Closed
from partywall._native import Tensor
from partywall._segment import Segment
from partywall.torch import _checksum, _manifest, _tensors
from partywall.torch._copy import flat
from partywall.torch._errors import ModuleMismatch
from partywall.torch._handle import Loading, ModuleHandle
from partywall.torch._load import in_place, mapped
from partywall.torch._manifest import Manifest
from partywall.torch._swap import Swap, swap, without_references
from partywall.torch._tensors import Named


def advance(
    handle: ModuleHandle,
    stream: Any,
    version: int | None,
    stable_address: bool,
    streams: Iterable[Any] | None,
    timeout: float | None,
    verify: bool,
) -> int:
    """Gives the model of a handle another version, as `ModuleHandle.advance` says."""
    if streams is not None and not stable_address:
        raise ValueError("streams= says what stable_address=True waits for: without that, leave it out")
    loading = handle._loading
    model = None if handle._model is None else handle._model()
    if loading is None or model is None:
        why = "load_module has not made this one" if loading is None else "this is that of a model that has ended"
        raise ValueError(f"only the handle of a loaded model can advance, and {why}")
    if handle.closed:
        # Loading a model again closes the handle that it had.
        what = f"this handle of {handle.name!r} is closed, by close() or because its model was loaded again"
        raise Closed(what, "advance the handle that load_module() returned last", "closed")
    segment = handle.segment._newer(version, timeout)
    if segment is None:
        return handle.version
    try:
        if verify:
            _checksum.verify(segment, mapped(segment, loading.device))
        tensors = _tensors.named_tensors(model)
        if stable_address:
            _remap(handle.segment, segment, model, tensors, loading, stream, streams)
        else:
            _swap(segment, model, tensors, loading, stream)
            handle._show(model, segment)
    except BaseException:
        segment.close()
        raise
    return handle.version


def _swap(segment: Segment, model: Any, tensors: list[Named], loading: Loading, stream: Any) -> None:
    """Replaces the shared tensors of a model by those of another segment, and overwrites the private ones; or
    neither."""
    shared = mapped(segment, loading.device)
    others = _tensors.attributes(model, tensors)
    _manifest.check(segment, shared, model, tensors, others, loading.fingerprint)
    there = {tensor.name: tensor for tensor in shared}
    replaced = [named for named in tensors if not loading.is_private(named.is_parameter)]

    def swaps() -> Iterator[Swap]:
        for named in _once(replaced):
            yield in_place(named, there[named.name], segment)
        # As the last step of the swap, so that a failure undoes it.
        _overwrite(tensors, there, loading, stream)

    with without_references(model), torch.inference_mode(False):
        _tensors.check_replaceable(replaced, others)
        swap(swaps())


def _remap(
    former: Segment,
    segment: Segment,
    model: Any,
    tensors: list[Named],
    loading: Loading,
    stream: Any,
    streams: Iterable[Any] | None,
) -> None:
    """Maps another segment at the addresses of a model's segment, and overwrites the private tensors."""
    # Compared with the tensors of the former version, because none of the new one may be in use. The layouts are
    # compared next.
    others = _tensors.attributes(model, tensors)
    _manifest.check(former, mapped(former, loading.device), model, tensors, others, loading.fingerprint)
    _check_manifest(former, segment)
    former._advance(segment, stream, streams)
    with torch.inference_mode(False):
        there = {tensor.name: tensor for tensor in mapped(former, loading.device)}
        _overwrite(tensors, there, loading, stream)


def _check_manifest(former: Segment, segment: Segment) -> None:
    """Raises `ModuleMismatch` if a segment describes another model than the one that was loaded."""
    before, after = Manifest.read(former), Manifest.read(segment)
    found = after.differences(before)
    # With another number of tensors the layout has changed.
    if len(before.kinds) == len(after.kinds) and before.kinds != after.kinds:
        found.append("kinds: other tensors are parameters, buffers, or trained")
    if found:
        what = f"version {segment.version} of {segment.name!r} differs from the model"
        raise ModuleMismatch(what, tuple(found))


def _overwrite(tensors: Iterable[Named], there: Mapping[str, Tensor], loading: Loading, stream: Any) -> None:
    """Enqueues copies of tensors of a segment into the private tensors of a model."""
    private = [named for named in tensors if loading.is_private(named.is_parameter) and named.tensor.numel()]
    with _on(stream, next((named.tensor.device for named in private), None)):
        for named in _once(private):
            flat(named.tensor).copy_(flat(torch.from_dlpack(there[named.name])))


def _once(tensors: Iterable[Named]) -> Iterable[Named]:
    """Returns each tensor under its first name."""
    return {id(named.tensor): named for named in reversed(list(tensors))}.values()


def _on(stream: Any, device: Any) -> Any:
    """Makes a stream torch's current one on a GPU."""
    if stream is None or device is None or device.type != "cuda":
        return contextlib.nullcontext()
    if not isinstance(stream, torch.cuda.Stream):
        handle = _streams.handle(stream, device.index)
        # These numbers stand for the default streams of CUDA, which torch knows by another one.
        stream = torch.cuda.ExternalStream(0 if handle in (None, 1) else handle, device=device)
    return torch.cuda.stream(stream)
