"""An open version of a name."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from partywall import _native
from partywall._exchange import Tensors

if TYPE_CHECKING:
    from partywall._domain import Domain


class Segment(Tensors):
    """An open version of a name: its tensors by their names, where they lie, and a lease on it.

    A segment of one tensor can be given to `from_dlpack`, `memoryview` and the like itself. The committer of a name that
    is not `kept` holds it with this: closing it withdraws the name.
    """

    def __init__(self, domain: "Domain", native: _native.Segment) -> None:
        self._domain = domain
        self._native = native

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def version(self) -> int:
        """The version."""
        return self._native.version

    @property
    def place(self) -> str:
        """`host`, or the UUID of the GPU that has the memory."""
        return self._native.place

    @property
    def kind(self) -> str:
        """`host`, `vmm` or `legacy`."""
        return self._native.kind

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped, with what alignment adds."""
        return self._native.nbytes

    @property
    def mutable(self) -> bool:
        """Whether processes may open it for writing."""
        return self._native.mutable

    @property
    def kept(self) -> bool:
        """Whether the name stays when its committer goes."""
        return self._native.kept

    @property
    def metadata(self) -> dict[str, str]:
        """Its metadata."""
        return self._native.metadata

    def __getitem__(self, tensor: str) -> _native.Tensor:
        return self._native.tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    def _tensors(self) -> list[_native.Tensor]:
        return self._native.tensors()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._native.closed

    def close(self) -> None:
        """Gives the lease back, at once if no tensor is used any more, else with the last of them.

        Waits for the work of this process on the GPU that has the memory. Calling it again does nothing.
        """
        self._native.close()

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native") and not self._native.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __reduce__(self) -> tuple[Any, ...]:
        from partywall._domain import reopen

        return reopen, (self._domain.socket, self.name, self.version)

    def __repr__(self) -> str:
        return f"<partywall.Segment {self.name}@{self.version}: {self._contents(self._native)}>"
