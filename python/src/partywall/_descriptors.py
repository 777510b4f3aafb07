"""A version's memory as file descriptors, for code that maps it by other means."""

from dataclasses import dataclass

from partywall import _native
from partywall._handle import Connected


@dataclass(frozen=True)
class Chunk:
    """One chunk of a version's memory."""

    fd: int
    """Its file descriptor, which belongs to the `Descriptors` and ends with them."""
    nbytes: int
    """The length of the chunk, as allocated. On a GPU this is the size to import."""

    def fileno(self) -> int:
        """Returns the file descriptor."""
        return self.fd


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is."""

    dtype: str
    """The type of the elements, such as `float32`."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    strides: tuple[int, ...]
    """Elements from one index to the next along each dimension."""
    chunk: int
    """The index of its chunk."""
    offset: int
    """Its offset in the chunk, in bytes."""
    nbytes: int
    """Bytes from its first element to the end of its last."""


class Descriptors(Connected, _native.Descriptors):
    """A lease on a version, and its memory as file descriptors; `Domain.descriptors` returns one.

        with d.descriptors("weights", timeout=10) as weights:
            arguments = [f"{chunk.fd}:{chunk.nbytes}" for chunk in weights.chunks]
            subprocess.run(["./renderer", *arguments], pass_fds=weights.fds)

    Nothing is mapped and no driver is loaded. Any API that imports memory by file descriptor can use the version in
    place: `cuMemImportFromShareableHandle`, Vulkan's `OPAQUE_FD`, OpenGL or HIP for `vmm` memory, `mmap` for `host`
    memory. Map a version that is not `mutable` for reading only: the kernel enforces that in host memory, and nothing
    does on a GPU.

    The descriptors close on exec; `pass_fds` of `subprocess` hands them to a child. Closing this object closes them and
    gives the lease back. Memory that was mapped before stays usable.
    """

    @property
    def tensors(self) -> dict[str, TensorPlace]:
        """Where each tensor is, by name."""
        return dict(self._tensors())

    def close(self) -> None:
        """Closes the descriptors and gives the lease back. Calling it again does nothing."""
        super().close()

    def __repr__(self) -> str:
        return f"<partywall.Descriptors {self.name}@{self.version}: {self.nbytes} bytes on {self.place}>"
