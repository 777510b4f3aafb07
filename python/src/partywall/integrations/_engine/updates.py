"""New weights for a model that maps those of a name. Importing this module imports torch.

Nobody writes memory that others read: an update becomes the next version of the name, which engines map one after
another. The first of them makes it: it loads the new weights into memory of its own, has its engine process them, and
shares them as the first builder did. If it dies before its commit, the next engine makes the version. Versions that
nobody has open any more are freed.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch

import partywall as pw
from partywall.integrations._engine import weights
from partywall.integrations._engine.errors import unsupported
from partywall.integrations._engine.loader import Wanted
from partywall.integrations._engine.settings import LAYOUT, PROCESSED
from partywall.torch import TensorInUse, _checksum
from partywall.torch._copy import flat
from partywall.torch._handle import ModuleHandle, handle, set_aside
from partywall.torch._share import share
from partywall.torch._swap import allow_gradients, refuse_gradients

SOURCE = "partywall.source"
"""The key in the metadata of a version that identifies the weights that it was made of. The first one has none."""


def update(
    model: Any,
    wanted: Wanted,
    domain: pw.Domain,
    given: Iterable[pw.Segment],
    reload: Callable[[], None],
    world: Any,
    timeout: float | None,
) -> bool:
    """Gives a model the version that is made of the given segments. Returns whether it had another one before.

    `reload` loads them into the model, which is private then, and has its engine process it. All workers of an engine
    call this, with the group of all of them as `world`. After any error the model has the version that it had, except
    after a `CudaError` with the anchor `not-mapped`. Raises `TimeoutError` if
    another engine does not finish an update of the name within `timeout` seconds; `ModuleMismatch` if that engine is
    configured otherwise, after the name was removed and made again; `UnsupportedModel` if
    the engine lays its weights out in another way than before, so that captured graphs could not show them.
    """
    own = handle(model)
    assert own is not None, "only a model that maps its weights is updated so"
    source = _identity(given)
    with _turn(domain, wanted.name, world, timeout):
        if own.segment.metadata.get(SOURCE) == source:
            return False
        made = _opened(domain, wanted, source)
        if made is None:
            _make(model, wanted, domain, source, reload)
            made = _opened(domain, wanted, source)
            if made is None:
                raise pw.NameNotFound(
                    f"{wanted.name!r} was removed while it was updated", "update again", "name-not-found"
                )
    try:
        _show(model, own, made, wanted.device)
    except BaseException:
        made.close()
        raise
    return True


@contextlib.contextmanager
def _turn(domain: pw.Domain, name: str, world: Any, timeout: float | None) -> Iterator[None]:
    """Keeps other engines from updating a name meanwhile.

    Each rank has a name, with turns of its own. The first rank goes ahead: while it has its turn, no other rank of
    another engine can, so no two engines wait for each other although the ranks of one do.
    """
    with closing(domain.semaphore(f"{name}/update", 1)) as turns, contextlib.ExitStack() as held:
        error: BaseException | None = None
        if world.rank_in_group == 0:
            try:
                held.enter_context(turns.acquire(timeout))
            except BaseException as caught:
                # Reported to the other ranks, which wait below.
                error = caught
        if world.world_size > 1:
            reports: list[str | None] = [None] * world.world_size
            own = None if error is None else str(error)
            torch.distributed.all_gather_object(reports, own, group=world.cpu_group)
            if reports[0] is not None and error is None:
                raise TimeoutError(f"the first rank of this engine has no turn to update: {reports[0]}")
        if error is not None:
            raise error
        if world.rank_in_group > 0:
            held.enter_context(turns.acquire(timeout))
        yield


def _identity(given: Iterable[pw.Segment]) -> str:
    """Identifies the content of segments: a name that has ended begins again with version 1."""
    digest = hashlib.sha256()
    for segment in given:
        tensors = segment._tensors()
        described = [(tensor.name, str(tensor.dtype), tensor.shape, tensor.strides) for tensor in tensors]
        digest.update(repr(described).encode())
        digest.update(_checksum.checksums(torch.from_dlpack(tensor) for tensor in tensors).encode())
    return digest.hexdigest()


def _opened(domain: pw.Domain, wanted: Wanted, source: str) -> pw.Segment | None:
    """Opens the version that was made of a source, if there is one."""
    try:
        versions = sorted(domain.holders(wanted.name), reverse=True)
    except pw.NameNotFound:
        return None
    device = wanted.device if wanted.device.type == "cuda" else None
    for version in versions:
        # Its last reader may end meanwhile.
        with contextlib.suppress(pw.NameNotFound, pw.VersionNotFound):
            segment = domain.open(wanted.name, version=version, device=device)
            if segment.metadata.get(SOURCE) == source:
                try:
                    weights.check_fingerprint(segment, wanted.fingerprint)
                except BaseException:
                    segment.close()
                    raise
                return segment
            segment.close()
    return None


def _make(model: Any, wanted: Wanted, domain: pw.Domain, source: str, reload: Callable[[], None]) -> None:
    """Makes the next version of the name."""
    metadata = {LAYOUT: PROCESSED, SOURCE: source}

    def shared(move: bool) -> ModuleHandle:
        return share(
            model,
            wanted.name,
            move,
            chunked=True,
            domain=domain,
            metadata=metadata,
            fingerprint=wanted.fingerprint,
            kept=True,
        )

    with set_aside(model), _private(model):
        reload()
        try:
            made = shared(True)
        except TensorInUse:
            # Compiled code has references to them, or layers have views.
            made = shared(False)
    made.close()


@contextlib.contextmanager
def _private(model: Any) -> Iterator[None]:
    """Gives a model parameters with memory of its own, and takes all of it back at the end, whatever the engine has
    registered meanwhile."""
    registered = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    mapped = [(parameter, parameter.data, allow_gradients(parameter)) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    copies: dict[tuple[Any, ...], Any] = {}
    try:
        with torch.inference_mode(False):
            for parameter, data, _ in mapped:
                place = (data.data_ptr(), data.dtype, data.shape, data.stride())
                if place not in copies or not data.numel():
                    copies[place] = data.clone()
                parameter.data = copies[place]
        del copies
        yield
    finally:
        for module, parameters, module_buffers in registered:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(module_buffers)
        for parameter, data, frozen in mapped:
            parameter.data = data
            allow_gradients(parameter)
            if frozen is not None:
                refuse_gradients(parameter, frozen)
        for buffer, data in buffers:
            buffer.data.copy_(data)


def _show(model: Any, own: ModuleHandle, made: pw.Segment, device: Any) -> None:
    """Has a model show another version: on a GPU at the same addresses, which captured graphs know."""
    with torch.inference_mode(False):
        if device.type == "cuda":
            try:
                own.segment._advance(made, None, None)
            except pw.LayoutChanged as error:
                raise unsupported(
                    f"cannot update the weights of {own.name!r} in place: {error.args[0]}",
                    "start the engine with mode 'copy'",
                ) from error
        else:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.data = torch.from_dlpack(made[name])
            own._show(model, made)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            flat(buffer).copy_(flat(torch.from_dlpack(own.segment[name])))
