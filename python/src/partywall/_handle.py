"""Base classes of objects that hold a resource and must be closed or released."""

import asyncio
import os
import warnings
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from partywall._members import Withdrawal

if TYPE_CHECKING:
    from partywall._domain import Domain


class Closable(Protocol):
    """A compiled object that can be closed."""

    @property
    def closed(self) -> bool:
        """Whether it is released."""

    def close(self) -> None:
        """Releases it."""


class Droppable(Closable, Protocol):
    """A compiled object that can also leave all waiting to a background thread."""

    def close_later(self) -> None:
        """Releases the object without waiting."""


class Withdrawable(Closable, Protocol):
    """A compiled object with a name that can be withdrawn."""

    @property
    def name(self) -> str:
        """The name."""

    def wait_withdrawn(self, timeout: float | None) -> Withdrawal | None:
        """Waits until the name is withdrawn."""

    def check(self) -> None:
        """Raises if it is stale."""


N = TypeVar("N", bound=Closable)
I = TypeVar("I", bound=Droppable)
W = TypeVar("W", bound=Withdrawable)


class Closing:
    """An object that is open until `close`, or until the end of its `with`. Dropping an open one issues a
    `ResourceWarning`.

    The rest of it is a compiled class, from which a subclass inherits, or which it wraps as `Handle` does.
    """

    if TYPE_CHECKING:

        @property
        def closed(self) -> bool:
            """Whether it is closed."""

        def close(self) -> None:
            """Closes it. Calling it again does nothing."""

    def __init__(self, *_: Any) -> None:
        self._pid = os.getpid()

    def _is_ours(self) -> bool:
        """Whether this process made it. In a forked child it belongs to the parent, and the end of a `with` does
        nothing."""
        return self._pid == os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_ours():
            self.close()

    def __del__(self, warn: Any = warnings.warn, pid: Any = os.getpid) -> None:
        # A forked child does not own its parent's objects. Default arguments outlive the module at interpreter
        # shutdown.
        if hasattr(self, "_pid") and self._pid == pid() and not self.closed:
            try:
                what = repr(self)
            except Exception:
                # It shows state that the broker may have taken along, or for which nothing can be imported any more.
                what = object.__repr__(self)
            warn(f"unclosed {what}", ResourceWarning, source=self, stacklevel=2)


class Handle(Closing, Generic[N]):
    """A handle that wraps a compiled object."""

    def __init__(self, native: N) -> None:
        self._native = native
        super().__init__()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._native.closed

    def close(self) -> None:
        """Closes it. Calling it again does nothing."""
        self._native.close()


class Connected(Closing):
    """A handle that keeps its domain until it is closed. Stands before the class that releases it."""

    def __init__(self, domain: "Domain | None", *others: Any, **_: Any) -> None:
        self._domain = domain
        super().__init__(*others)

    def close(self) -> None:
        """Closes it. Calling it again does nothing."""
        super().close()
        self._domain = None


class Named(Connected, Handle[W], Generic[W]):
    """A handle of an object with a name that can be withdrawn."""

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    def wait_withdrawn(self, timeout: float | None = None) -> Withdrawal | None:
        """Waits up to `timeout` seconds, or for ever, until the name is removed or its owner ends.

        A newer version does not end the wait. Returns the withdrawal if this process has a deadline to drop the object.
        """
        return self._native.wait_withdrawn(timeout)

    def check(self) -> None:
        """Raises `Withdrawn` once the deadline of a withdrawal with `then="stale"` has passed.

        Raises `DeviceLost` once the GPU has lost the memory.
        """
        self._native.check()


class Interruptible(Handle[I], Generic[I]):
    """A handle whose `close` waits for the GPU. If Ctrl-C ends its `with`, that wait is skipped."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_ours():
            self._native.close_later() if kind is KeyboardInterrupt else self.close()


async def readable(fd: int) -> None:
    """Waits in the event loop until a file descriptor is readable."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def found() -> None:
        # The loop may call this again before the waiter continues.
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, found)
    try:
        await ready
    finally:
        loop.remove_reader(fd)
