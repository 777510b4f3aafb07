"""CUDA tensors in `torch.multiprocessing`, sent through Partywall."""

import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from partywall._domain import Domain
from partywall.torch import _payloads
from partywall.torch._errors import ReductionsPatched, UnsupportedTensor
from partywall.torch._handle import domain_or_default


def install_reductions(*, domain: Domain | None = None, expires: float = 600.0) -> None:
    """Has `torch.multiprocessing` send the CUDA tensors of this process through Partywall, from now on.

    Queues, pipes and `ForkingPickler` then carry them to any process of the domain, in place: receivers may write, and
    the sender sees it. Received tensors can be sent on. A receiver needs the package, but need not install anything,
    unless its code calls `torch.multiprocessing.reductions.rebuild_cuda_tensor` itself.

    The memory of a sent tensor stays as long as a process uses it, and for at least `expires` seconds after each send,
    so that it can be received. A tensor that is received later raises `Expired`, unless the sender still has the
    tensor. When the sender's process ends, tensors that were not received are lost, and the content of the others is
    undefined: the memory is the sender's.

    The first send of a storage waits for the work of this process on the GPU. Later sends wait for nothing: the
    receiver's current stream waits for what the sender's current stream had enqueued before the send.

    `domain` is by default the connection that `connect()` chooses. Calling this again changes `domain` and `expires`
    for later sends. Tensors in main memory, and CUDA events, are sent as before.

    Raises `ReductionsPatched` if another library, such as SGLang, has replaced torch's functions already.
    """
    global _settings
    if not (isinstance(expires, (int, float)) and 0 <= expires <= threading.TIMEOUT_MAX):
        most = f"{threading.TIMEOUT_MAX:.0f}"
        raise ValueError(f"expires= is a number of seconds, 0 or more and at most {most}, not {expires!r}")
    if domain is not None:
        domain_or_default(domain)
    for name, ours in _OURS.items():
        found = getattr(reductions, name)
        if found is not ours and found is not ours.__wrapped__ or not _is_of_torch(ours.__wrapped__):
            raise _patched(name, found, "call install_reductions() before that library patches torch")
    _settings = _Settings(domain, float(expires))
    _replace({ours.__wrapped__: ours for ours in _OURS.values()})


def uninstall_reductions() -> None:
    """Has `torch.multiprocessing` send CUDA tensors as torch does, from now on. Tensors that were sent can be received.

    Raises `ReductionsPatched` if another library has replaced the functions since `install_reductions`.
    """
    for name, ours in _OURS.items():
        found = getattr(reductions, name)
        if found is not ours and found is not ours.__wrapped__:
            raise _patched(name, found, "undo what that library has done first")
    _replace({ours: ours.__wrapped__ for ours in _OURS.values()})


def reduce_tensor(tensor: Any) -> Any:
    """Returns a function and its arguments that make the tensor again, in any process."""
    if not _is_carried(tensor):
        return reduce_tensor.__wrapped__(tensor)  # type: ignore[attr-defined]
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedTensor(
            "cannot share a tensor whose conjugation or negation is pending: the receiver would have other numbers",
            "send tensor.resolve_conj().resolve_neg()",
            "unsupported-tensor",
        )
    torch.utils.hooks.warn_if_has_hooks(tensor)
    storage = tensor.untyped_storage()
    handle, event = _MARK, None
    if storage.nbytes():
        settings = _settings
        known = _payloads.payloads.send(tensor, storage, settings.connection, settings.expires)
        handle = _MARK + f"{known.name}\0{settings.expires}\0{known.domain.socket}".encode()
        if storage.device.type == "cuda":
            line, value = _payloads.order.signal(known.domain, storage.device.index)
            event = f"{line} {value}".encode()
    arguments = (
        *(type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), torch.storage.TypedStorage),
        *(tensor.dtype, storage.device.index, handle, storage.nbytes(), 0, tensor.requires_grad),
        *(None, 0, event, event is not None),
    )
    return rebuild_cuda_tensor, arguments


def rebuild_cuda_tensor(
    tensor_cls: Any,
    tensor_size: Any,
    tensor_stride: Any,
    tensor_offset: Any,
    storage_cls: Any,
    dtype: Any,
    storage_device: Any,
    storage_handle: Any,
    storage_size_bytes: Any,
    storage_offset_bytes: Any,
    requires_grad: Any,
    ref_counter_handle: Any,
    ref_counter_offset: Any,
    event_handle: Any,
    event_sync_required: Any,
) -> Any:
    """Makes a tensor that was sent, by Partywall or by torch. The parameters are those of torch's function.

    `storage_device` is not used for tensors of Partywall, whose GPU is known by its UUID: several libraries replace it
    by the number that the GPU has in this process, or by a UUID.
    """
    if not (isinstance(storage_handle, bytes) and storage_handle.startswith(_MARK)):
        return rebuild_cuda_tensor.__wrapped__(  # type: ignore[attr-defined]
            *(tensor_cls, tensor_size, tensor_stride, tensor_offset, storage_cls, dtype, storage_device),
            *(storage_handle, storage_size_bytes, storage_offset_bytes, requires_grad),
            *(ref_counter_handle, ref_counter_offset, event_handle, event_sync_required),
        )
    if _DEVICE == "cuda":
        # Also refuses forked children of processes that have used CUDA.
        torch.cuda._lazy_init()
    if storage_size_bytes == 0:
        storage = torch.UntypedStorage(0, device=_DEVICE)
    else:
        name, seconds, socket = storage_handle.removeprefix(_MARK).decode().split("\0", 2)
        storage, domain = _payloads.payloads.receive(socket, name, float(seconds))
        if event_handle is not None:
            line, value = event_handle.decode().split(" ")
            _payloads.order.wait(domain, line, int(value), storage.device.index)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return reductions.rebuild_tensor(tensor_cls, typed, (tensor_offset, tensor_size, tensor_stride, requires_grad))


def _is_carried(tensor: Any) -> bool:
    """Returns whether a tensor is plain memory of a GPU. torch's own function carries or refuses all others."""
    return (
        tensor.device.type == _DEVICE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (tensor.is_leaf or not tensor.requires_grad)
        # torch 2.15 has no named tensors any more.
        and not getattr(tensor, "has_names", bool)()
    )


def _is_of_torch(function: Any) -> bool:
    return bool(getattr(function, "__module__", None) == reductions.__name__)


def _replace(functions: dict[Any, Any]) -> None:
    for name in _OURS:
        found = getattr(reductions, name)
        setattr(reductions, name, functions.get(found, found))
    for kind, reducer in list(ForkingPickler._extra_reducers.items()):  # type: ignore[attr-defined]
        if reducer in functions:
            ForkingPickler.register(kind, functions[reducer])


def _patched(name: str, found: Any, advice: str) -> ReductionsPatched:
    by = "torch itself" if _is_of_torch(found) else getattr(found, "__module__", repr(found))
    where = f"torch.multiprocessing.reductions.{name}"
    return ReductionsPatched(f"cannot replace {where}: {by} has replaced it", advice, "reductions-patched")


@dataclass(frozen=True)
class _Settings:
    domain: Domain | None = None
    expires: float = 600.0

    def connection(self) -> Domain:
        return domain_or_default(self.domain)


_settings = _Settings()

# As `functools.wraps` does: `inspect.unwrap` finds torch's functions.
reduce_tensor.__wrapped__ = reductions.reduce_tensor  # type: ignore[attr-defined]
rebuild_cuda_tensor.__wrapped__ = reductions.rebuild_cuda_tensor  # type: ignore[attr-defined]

_OURS: dict[str, Any] = {"reduce_tensor": reduce_tensor, "rebuild_cuda_tensor": rebuild_cuda_tensor}

_MARK = b"partywall\0"
"""The beginning of handles that Partywall has made."""

_DEVICE = "cuda"
"""The type of the devices whose tensors are carried. Tests carry those of the CPU."""
