"""The handle of a model in shared memory, and the connection that is used where none is given."""

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partywall._domain import Domain, connect
from partywall._errors import BrokerGone, Closed
from partywall._segment import Segment
from partywall.torch._parallel import ignore_read_only, spare_read_only


@dataclass(frozen=True)
class Loading:
    """How a model was loaded, and its further versions are."""

    device: Any
    buffers: str
    private: bool
    fingerprint: Mapping[str, str] | None

    def is_private(self, is_parameter: bool) -> bool:
        """Returns whether the model has a copy of its parameters, or of its buffers."""
        return self.private if is_parameter else self.buffers == "private"


class ModuleHandle:
    """A model's version in shared memory; `share_module` and `load_module` return one.

    It need not be kept. The version stays open for as long as a loaded model lives.
    """

    def __init__(self, segment: Segment, copied: int, model: Any = None, loading: Loading | None = None) -> None:
        self._segment = segment
        self._copied = copied
        self._loading = loading
        self._model = None if model is None else weakref.ref(model)
        # Ends the lease with the model, and leaves the waiting to a background thread.
        self._end = None if model is None else weakref.finalize(model, _release, segment)

    @property
    def name(self) -> str:
        """The name."""
        return self._segment.name

    @property
    def version(self) -> int:
        """The version."""
        return self._segment.version

    @property
    def segment(self) -> Segment:
        """The segment, with all tensors by their names."""
        return self._segment

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory, including alignment."""
        return self._segment.nbytes

    @property
    def copied(self) -> int:
        """The bytes that were copied: into the segment by `share_module`; into private tensors by `load_module`."""
        return self._copied

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._segment.closed

    def advance(
        self,
        stream: Any = None,
        *,
        version: int | None = None,
        stable_address: bool = False,
        streams: Iterable[Any] | None = None,
        timeout: float | None = 0.0,
        verify: bool = False,
    ) -> int:
        """Gives the loaded model the latest version of the name, or `version`, and returns the version that it has now.

            while True:
                handle.advance()
                serve(model, next_batch())

        Without a newer version nothing changes, also if the name has ended; `timeout` says for how many seconds to wait
        for one. A given `version` is awaited as by `Domain.open`. Private buffers are overwritten by a copy on
        `stream`, by default torch's current one, and so are the parameters of a model that was loaded with `private`.

        The parameters get other addresses. Work that was enqueued before goes on with the former memory, which is
        released once the work and all tensors that show it have ended. Parameters whose memory other tensors show are
        refused (`TensorInUse`).

        With `stable_address` the new version is mapped at the same addresses, so that captured CUDA graphs, compiled
        code and views of parameters show it. That waits first for all work of this process on the GPU; or, with
        `streams`, for the work on these streams and on `stream`, on your word that no other work uses the model. No
        thread may enqueue work of the model until this returns. The model must be in a GPU's memory, and its tensors
        laid out in the segment as before, which they are if `share_module` was called in the same way: else
        `LayoutChanged`.

        `verify` first compares all tensors of the new version with the checksums that `share_module(checksums=True)`
        made, and always waits for all work of this process on the GPU.

        After an error the model has the version that it had, except after a `CudaError` with the anchor `not-mapped`:
        the driver mapped neither version whole, and the model must not be used. Raises also `ModuleMismatch`,
        `ChecksumMismatch`, `Captured` while the stream is captured into a graph, and what `Domain.open` raises.
        """
        from partywall.torch._advance import advance

        return advance(self, stream, version, stable_address, streams, timeout, verify)

    def _show(self, model: Any, segment: Segment) -> None:
        """Makes this the handle of another version, which the model has now, and releases the former one."""
        former = self._segment
        if self._end is not None:
            self._end.detach()
        self._segment = segment
        self._end = weakref.finalize(model, _release, segment)
        _release(former)

    def close(self) -> None:
        """Releases the lease, once no tensor of the segment is used any more: the model stays usable.

        The handle of `share_module` also withdraws the name, unless it is kept. Calling it again does nothing.
        """
        if self._end is not None:
            self._end.detach()
        self._segment.close()

    def __enter__(self) -> "ModuleHandle":
        return self

    def __exit__(self, *_: object) -> None:
        if self._segment._is_ours():
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes"
        return f"<partywall.torch.ModuleHandle {self.name}@{self.version}: {state}>"


def _release(segment: Segment) -> None:
    segment._native.close_later()


def remember(model: Any, handle: ModuleHandle) -> None:
    """Keeps the handle of a model whose tensors are in shared memory, ends the lease of what it showed before, and
    tells torch what it must not write."""
    spare_read_only()
    ignore_read_only(model)
    before = _handles.get(id(model))
    if before is None:
        weakref.finalize(model, _handles.pop, id(model), None)
    elif before._end is not None:
        before.close()
    _handles[id(model)] = handle


def handle(model: Any) -> ModuleHandle | None:
    """Returns the handle of a model that was loaded, or that was shared with `move=True`; `None` for any other."""
    return _handles.get(id(model))


@contextlib.contextmanager
def set_aside(model: Any) -> Iterator[None]:
    """Keeps the handle that a model has, and its lease, whatever handle the body gives it."""
    own = _handles[id(model)]
    _handles[id(model)] = ModuleHandle(own.segment, own.copied)
    try:
        yield
    finally:
        _handles[id(model)] = own


def domain_or_default(domain: Domain | None) -> Domain:
    """Returns the domain, or this process's connection to the one that `connect()` chooses, which stays open."""
    if domain is not None:
        if not isinstance(domain, Domain):
            raise TypeError(f"domain= is what partywall.connect() returns, not {domain!r}")
        return domain
    key = (os.getpid(), os.environ.get("PARTYWALL_SOCKET"), os.environ.get("PARTYWALL_DOMAIN"))
    found = _domains.get(key)
    if found is not None:
        # Another broker may serve the domain by now.
        with contextlib.suppress(BrokerGone, Closed):
            found.exists("partywall")
            return found
    # The end of the process closes it.
    found = _domains[key] = connect()
    found._is_own = False
    return found


_handles: dict[int, ModuleHandle] = {}
"""The handle of each living model, by its identity: models of some classes have no hash."""

_domains: dict[tuple[Any, ...], Domain] = {}
