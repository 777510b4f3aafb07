"""What Python has of the library's, until it gives it back."""

import os
import warnings
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from partywall._domain import Domain


class Endable(Protocol):
    """What the compiled half has of something that is to be given back."""

    @property
    def closed(self) -> bool:
        """Whether it was."""


class Closable(Endable, Protocol):
    """The same, that gives it back when it is told to."""

    def close(self) -> None:
        """Gives it back."""


E = TypeVar("E", bound=Endable)
N = TypeVar("N", bound=Closable)


class Held(Generic[E]):
    """Something that is to be given back. Whoever only drops it is warned."""

    def __init__(self, native: E) -> None:
        self._native = native
        self._pid = os.getpid()

    def __del__(self, warn: Any = warnings.warn, pid: Any = os.getpid) -> None:
        # Not what a forked child has of its parent. As defaults, they are there at the end of the interpreter, too.
        if hasattr(self, "_pid") and self._pid == pid() and not self._native.closed:
            warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)


class Handle(Held[N], Generic[N]):
    """Something that is open until it is closed, by the end of its `with` at the latest."""

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._native.closed

    def close(self) -> None:
        """Closes it. Calling it again does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Connected(Handle[N], Generic[N]):
    """A handle that keeps its domain, until it is closed."""

    def __init__(self, domain: "Domain | None", native: N) -> None:
        self._domain = domain
        super().__init__(native)

    def close(self) -> None:
        """Closes it. Calling it again does nothing."""
        super().close()
        self._domain = None
