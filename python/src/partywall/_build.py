"""A version that is being written."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partywall import _native
from partywall._exchange import Tensors
from partywall._handle import Connected, Interruptible
from partywall._segment import Segment, native_of

if TYPE_CHECKING:
    from partywall._domain import Domain


class Build(Connected, Interruptible[_native.Build], Tensors):
    """A mapping of names to tensors, writable in place, that no other process sees yet.

    `commit` publishes the memory; `close` frees it.
    """

    @property
    def name(self) -> str:
        """The name that `commit` publishes."""
        return self._native.name

    @property
    def place(self) -> str:
        """`host`, the UUID of the GPU that has the memory, or `pinned:N`."""
        return self._native.place

    @property
    def nbytes(self) -> int:
        """The number of allocated bytes."""
        return self._native.nbytes

    def __getitem__(self, tensor: str) -> _native.Tensor:
        return self._native.tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    def _tensors(self) -> list[_native.Tensor]:
        return self._native.tensors()

    def write(self, tensor: Any, stream: Any = None) -> None:
        """Calls `Tensor.write` of its only tensor."""
        self.tensor.write(tensor, stream)

    def copy_from(self, source: Segment, stream: Any = None) -> None:
        """Enqueues a copy of all tensors of `source`, which has the same tensors; otherwise as `Segment.to`."""
        self._native.copy_from(native_of(source), stream)

    def commit(self) -> Segment:
        """Publishes the memory atomically as the next version of its name, and returns that version.

        Waits for all work that this process has enqueued on the GPU that has the memory, on any stream. Arrays made
        from the tensors stay valid. Unless the version is mutable, only read it from now on: a write kills the process,
        or on a GPU its CUDA context. If the commit fails, the build is unchanged.
        """
        domain, committed = self._domain, self._native.commit()
        # `commit` raises for a closed build, so the domain is still set.
        assert domain is not None
        return Segment(domain, committed)

    @property
    def closed(self) -> bool:
        """Whether it is closed or committed."""
        return self._native.closed

    def close(self) -> None:
        """Frees the memory once no tensor of it is used any more. Does nothing after a commit or an earlier close."""
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a build belongs to this process alone: commit it, and send the segment")

    def __repr__(self) -> str:
        return f"<partywall.Build {self.name}: {self._contents(self._native)}>"


def fill(domain: "Domain", build: _native.Build, tensors: Mapping[str, Any], stream: Any) -> Segment:
    """Copies tensors into a build and commits it. Frees the build if that fails."""
    with Build(domain, build) as made:
        for name, tensor in tensors.items():
            made[name].write(tensor, stream)
        return made.commit()
