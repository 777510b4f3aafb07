"""Storages of torch that other processes open: how long they live, and in which order streams use them.

A payload is the name of a publication of the whole storage (`until_unused`), and a value of a timeline that the
sender's stream signals. The sender's lease is a *hold* (`_native.Hold`). Weak references count the living tensors that
were sent, and the compiled half keeps the time until which unread payloads can be opened. When both are over, the hold
leaves the name to its readers. A tensor that is sent again costs neither a call to the broker nor a wait, only a
signal. Each stream that sends has a timeline of its own, because a timeline that changes its stream waits for it.
"""

import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from partywall import _arrays, _native
from partywall._domain import Domain, through
from partywall._errors import NameNotFound, OwnerDied
from partywall._segment import Segment
from partywall.torch._errors import Expired


class Payloads:
    """The storages that this process has sent or received.

    A storage is published once, under a name that ends with the last process that has it open. The sender holds it
    until the sent tensors are dead and the time of its payloads has passed. A receiver holds it with its tensors.
    Nothing here is locked, because a forked child could find the lock held: each step is one operation on a dictionary.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Known] = {}
        self._by_storage: dict[int, Known] = {}
        self._connections: dict[str, Domain] = {}
        self._limit = 128

    def send(self, tensor: Any, storage: Any, domain: Callable[[], Domain], seconds: float) -> "Known":
        """Makes the storage of a tensor openable for `seconds` at least, and as long as the tensor lives.

        `domain` returns the connection for a storage that is not known yet.
        """
        known = self._by_storage.get(storage._cdata)
        if known is not None and known.is_of(storage):
            if known.keep(tensor, seconds):
                return known
            if known.is_received:
                # Its name exists as long as this process has tensors of it.
                segment, known.domain = self._open(known.domain.socket, known.name, seconds)
                known.hold(segment._native, tensor, seconds)
                return known
        # The names of a process have a beginning of their own, by which it watches them all.
        name = f"torch/{os.getpid()}/{secrets.token_hex(8)}"
        known = Known(domain(), name, storage, is_received=False)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        known.hold(publish(known.domain, known.name, flat), tensor, seconds)
        self._remember(known)
        return known

    def receive(self, socket: str, name: str, seconds: float) -> tuple[Any, Domain]:
        """Returns the storage of a payload that was sent for `seconds`, and the connection to its broker."""
        known = self._by_name.get(name)
        storage = None if known is None else known.storage()
        if known is None or storage is None:
            segment, domain = self._open(socket, name, seconds)
            storage = torch.from_dlpack(segment.tensor).untyped_storage()
            # The lease ends with the last tensor.
            segment._native.close_later()
            known = Known(domain, name, storage, is_received=True)
            self._remember(known)
        return storage, known.domain

    def _open(self, socket: str, name: str, seconds: float) -> tuple[Segment, Domain]:
        try:
            segment = through(socket, lambda domain: domain.open(name, write=True))
        except NameNotFound as error:
            raise Expired(
                f"the tensor that was sent as {name!r} has expired: its time of {seconds:g} s has passed, or its "
                "sender has ended",
                "receive it sooner, keep the tensor in the sender until then, or give the sender's "
                "install_reductions() more seconds by expires=",
                "expired-payload",
            ) from error
        domain = segment._domain
        assert domain is not None, "the segment is open"
        # The segment alone would keep the connection only as long as its tensors live.
        self._connections[socket] = domain
        return segment, domain

    def _remember(self, known: "Known") -> None:
        self._by_name[known.name] = known
        self._by_storage[known.weak.cdata] = known
        if len(self._by_name) > self._limit:
            for name, other in list(self._by_name.items()):
                if other.weak.expired():
                    self._by_name.pop(name, None)
            for address, other in list(self._by_storage.items()):
                if other.weak.expired():
                    self._by_storage.pop(address, None)
            self._limit = max(128, 2 * len(self._by_name))


class Known:
    """A storage, and the name by which others open it."""

    def __init__(self, domain: Domain, name: str, storage: Any, is_received: bool) -> None:
        self.domain = domain
        self.name = name
        self.is_received = is_received
        # No other storage gets the address of this one while the reference exists.
        self.weak = StorageWeakRef(storage)
        self._extent = storage.data_ptr(), storage.nbytes()
        self._hold: _native.Hold | None = None
        self._tensors: dict[int, Any] = {}

    def is_of(self, storage: Any) -> bool:
        """Returns whether the storage has the memory that it had, which `resize_` may have replaced."""
        return self._extent == (storage.data_ptr(), storage.nbytes())

    def storage(self) -> Any:
        """Returns the storage; `None` if it is dead."""
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def hold(self, segment: _native.Segment, tensor: Any, seconds: float) -> None:
        """Takes a segment of the storage, to hold it as `keep` does."""
        self._tensors = {}
        self._hold = hold = _native.Hold(segment, seconds)
        self.keep(tensor, seconds)
        # It began with one use, so that it did not end before the tensor was another.
        hold.leave()

    def keep(self, tensor: Any, seconds: float) -> bool:
        """Holds the storage for `seconds` at least, and as long as the tensor lives.

        Returns false if the name may have ended: its time has passed, its connection is closed, or the broker is gone.
        """
        hold, tensors, key = self._hold, self._tensors, id(tensor)
        is_known = key in tensors
        if hold is None or self.domain._native.ended or not hold.extend(seconds, not is_known):
            return False
        if is_known:
            return True

        def end(_: Any) -> None:
            tensors.pop(key, None)
            hold.leave()

        reference = weakref.ref(tensor, end)
        if tensors.setdefault(key, reference) is not reference:
            # Another thread has just sent the same tensor.
            hold.leave()
        return True


class Order:
    """The order of streams: a receiver's stream continues once the sender's stream has done what was before the send.

    Each stream that sends signals a timeline of its own, because a timeline that changes its stream waits for it.
    """

    def __init__(self) -> None:
        self._sending: dict[tuple[str, str, int, int], _Line] = {}
        self._known: dict[tuple[str, str, str], Any] = {}

    def signal(self, domain: Domain, device: int) -> tuple[str, int]:
        """Enqueues a signal on the current stream of a GPU. Returns the timeline's name and the value."""
        stream = torch.cuda.current_stream(device).cuda_stream
        # Members of two brokers may have the same number.
        key = (domain.socket, domain.token, device, stream)
        line = self._sending.get(key)
        if line is None or line.domain._native.ended:
            for other, former in list(self._sending.items()):
                # Its timeline would keep the connection.
                if former.domain._native.ended:
                    self._sending.pop(other, None)
            line = self._sending.setdefault(key, _Line(domain))
        return line.name, line.signal(f"cuda:{device}", stream)

    def wait(self, domain: Domain, name: str, value: int, device: int) -> None:
        """Has the current stream of a GPU wait for a signal."""
        key = (domain.socket, domain.token, name)
        timeline = self._known.get(key)
        if timeline is None:
            timeline = self._known[key] = _native.Timeline(domain, name, False, False)
            if len(self._known) > _SENDERS:
                self._known.pop(next(iter(self._known)), None)
        if timeline.announced < value:
            # Opening a timeline that has ended with its sender makes a new one, whose value nobody would reach.
            self._known.pop(key, None)
            raise OwnerDied(
                f"the process that sent a tensor has ended, and with it its timeline {name!r}",
                "send the tensor again from a process that lives until it is received",
                "owner-died",
            )
        timeline.wait_on(value, torch.cuda.current_stream(device).cuda_stream, device=f"cuda:{device}")


class _Line:
    """The timeline of one stream that sends."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.name = f"torch/{secrets.token_hex(8)}"
        self._timeline = _native.Timeline(domain, self.name, True, False)
        self._lock = threading.Lock()
        self._value = 0

    def signal(self, device: str, stream: int) -> int:
        # Threads may share the stream, and values must grow in the order of the signals.
        with self._lock:
            self._value += 1
            self._timeline.signal_on(self._value, stream, device=device)
            return self._value


def publish(domain: Domain, name: str, flat: Any) -> _native.Segment:
    """Publishes a storage, given as a tensor of its bytes, in place. Other processes may write it."""
    taken = [(_arrays.SINGLE, _arrays.source(flat, None))]
    return domain._native.publish(
        name, taken, [], mutable=True, kept=False, shared=False, if_absent=True, until_unused=True
    )


_SENDERS = 64
"""Timelines of senders that a receiver keeps open. An older one is opened again."""

payloads = Payloads()
order = Order()


def _forget() -> None:
    global payloads, order, _inherited
    # A forked child has no part in what its parent has sent and received, and must release nothing of it.
    _inherited = payloads, order
    payloads, order = Payloads(), Order()


_inherited: Any = None

os.register_at_fork(after_in_child=_forget)
