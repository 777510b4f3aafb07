"""The weights of models in shared memory. Importing this module imports torch."""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import partywall as pw
from partywall.integrations._engine.errors import unsupported
from partywall.integrations._engine.fingerprint import differences
from partywall.integrations._engine.settings import LAYOUT, LOADED, PROCESSED
from partywall.torch import ModuleMismatch, TensorInUse, _manifest, _tensors, share_module
from partywall.torch._copy import copy, flat
from partywall.torch._handle import ModuleHandle, remember
from partywall.torch._load import mapped
from partywall.torch._manifest import Manifest
from partywall.torch._share import share
from partywall.torch._swap import replacement


def share_loaded(model: Any, name: str, domain: pw.Domain, fingerprint: Mapping[str, str]) -> pw.Segment:
    """Publishes the weights of a model as they were loaded, in host memory."""
    _check_on_device(model)
    metadata = {LAYOUT: LOADED}
    handle = share_module(
        model,
        name,
        domain=domain,
        device="host",
        metadata=metadata,
        fingerprint=fingerprint,
        kept=True,
        if_absent=True,
    )
    # The name is kept, and this process does not use its memory.
    handle.close()
    return handle.segment


def share_processed(
    model: Any, name: str, domain: pw.Domain, fingerprint: Mapping[str, str], sleeps: bool
) -> pw.Segment:
    """Publishes the weights of a model as it uses them. Its parameters then lie in the shared memory, if they can be
    replaced. Raises `UnsupportedModel` if they cannot, and the engine `sleeps`, which would lose them."""
    metadata = {LAYOUT: PROCESSED}

    def shared(move: bool) -> ModuleHandle:
        return share(
            model,
            name,
            move,
            # As all versions that follow, which take its place.
            chunked=True,
            domain=domain,
            metadata=metadata,
            fingerprint=fingerprint,
            kept=True,
            if_absent=True,
        )

    try:
        return shared(True).segment
    except TensorInUse as error:
        if sleeps:
            raise unsupported(
                f"cannot share the weights of an engine that sleeps: {error}", "use mode 'auto' or 'copy'"
            ) from error
        _log.warning("this engine keeps a second copy of the weights that it shares as %s: %s", name, error)
    handle = shared(False)
    handle.close()
    return handle.segment


def check_fingerprint(segment: pw.Segment, wanted: Mapping[str, str]) -> None:
    """Raises `ModuleMismatch`, which names all differences, unless a segment holds the weights that an engine wants."""
    found = differences(Manifest.read(segment).fingerprint, wanted)
    if found:
        raise ModuleMismatch(
            f"the model differs from {segment.name!r} version {segment.version}",
            found,
            "choose another name in model_loader_extra_config, or remove this one: partywall rm",
        )


def copy_loaded(model: Any, segment: pw.Segment) -> None:
    """Copies weights as they were loaded into a model that was made like the builder's.

    Raises `ModuleMismatch` if the models differ nevertheless.
    """
    _check_on_device(model)
    tensors = _tensors.named_tensors(model)
    shared = mapped(segment, None)
    _manifest.check(segment, shared, model, tensors, (), Manifest.read(segment).fingerprint)
    there = {tensor.name: tensor for tensor in shared}
    with torch.no_grad():
        for named in {id(named.tensor): named for named in tensors}.values():
            named.tensor.copy_(torch.from_dlpack(there[named.name]))


def install(model: Any, segment: pw.Segment, private: bool) -> int:
    """Registers the processed weights of a segment in a model on *meta*. Returns how many bytes were copied.

    Parameters are the shared memory itself, unless they are to be `private`. Buffers are copies, because engines write
    them. Processing may have added tensors, and changed shapes and dtypes: the fingerprint says that they fit.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[tuple[Any, ...], Any] = {}
    copied = 0
    with torch.inference_mode(False):
        for shared, kind in zip(mapped(segment, None), Manifest.read(segment).kinds, strict=True):
            path, _, leaf = shared.name.rpartition(".")
            module = modules.get(path)
            if module is None:
                raise unsupported(
                    f"cannot map the weights of {segment.name!r}: the engine has added {path} while it processed the model",
                    "remove the name, and use mode 'copy'",
                )
            is_parameter = kind in "pf"
            key = (is_parameter, shared.data_ptr, shared.dtype, shared.shape, shared.strides)
            if key not in made or not shared.nbytes:
                data = torch.from_dlpack(shared)
                if private or not is_parameter:
                    data = copy(data)
                    copied += flat(data).nbytes
                made[key] = _parameter(module._parameters.get(leaf), data) if is_parameter else data
            for registry in module._parameters, module._buffers, module.__dict__:
                registry.pop(leaf, None)
            if is_parameter:
                module.register_parameter(leaf, made[key])
            else:
                module.register_buffer(leaf, made[key], persistent=kind == "b")
    return copied


def check_complete(model: Any) -> None:
    """Drops parameters and buffers that the builder's processing has consumed. Raises `UnsupportedModel` if anything
    else is left on *meta*."""
    for module in model.modules():
        for registry in module._parameters, module._buffers:
            for leaf in [leaf for leaf, tensor in registry.items() if tensor is not None and tensor.is_meta]:
                del registry[leaf]
    others = _tensors.attributes(model, _tensors.named_tensors(model))
    left = [path for path, tensor in others if tensor.is_meta and tensor.numel()]
    if left:
        raise unsupported(
            f"cannot map the weights: the model keeps {some(left)} as plain attributes, which are not shared",
            "use mode 'copy' with another name",
        )


def hold(model: Any, segment: pw.Segment, copied: int, private: bool) -> None:
    """Keeps a segment open as long as the model that uses it."""
    if private:
        segment.close()
    else:
        remember(model, ModuleHandle(segment, copied, model))


def plain_attributes(model: Any) -> str:
    """Names the tensors with data that are neither parameters nor buffers; empty if there are none."""
    others = _tensors.attributes(model, _tensors.named_tensors(model))
    return some([path for path, tensor in others if tensor.numel()])


def names_with_data(model: Any) -> list[str]:
    """Lists the parameters and buffers that are not empty."""
    return [named.name for named in _tensors.named_tensors(model) if named.tensor.numel()]


def check_kept(model: Any, filled: Iterable[str]) -> None:
    """Raises `UnsupportedModel` if the engine has emptied tensors that had data, which is now where no other engine finds
    it."""
    kept = set(names_with_data(model))
    lost = [named.name for named in _tensors.named_tensors(model) if named.name in filled and named.name not in kept]
    if lost:
        raise unsupported(
            f"cannot share the weights: the engine has repacked {some(lost)} into memory of its own",
            "use mode 'auto' or 'copy'",
        )


def some(names: list[str]) -> str:
    """Returns the first of the names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_on_device(model: Any) -> None:
    """Raises `UnsupportedModel` if layers quantize weights while they are loaded: these have no loaded layout."""
    left = [named.name for named in _tensors.named_tensors(model) if named.tensor.is_meta]
    if left:
        raise unsupported(
            f"cannot copy the weights: the engine quantizes {some(left)} while it loads them",
            "quantize the checkpoint, or use another load format",
        )


def _parameter(old: Any, data: Any) -> Any:
    """Returns a parameter with the class and the attributes of the one that it replaces, if there is one. It is the same
    object, which layers may have under further names, unless there are views of that."""
    if old is None:
        return torch.nn.Parameter(data, requires_grad=False)
    new = replacement(old, data, False)
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(old, new)
        return old
    return new


_SHOWN = 5

_log = logging.getLogger(__name__)
