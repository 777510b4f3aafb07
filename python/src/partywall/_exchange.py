"""What builds and segments have in common: of one tensor, they are as good as it."""

from typing import Any

from partywall import _native


class Single:
    """Passes on what is asked of its only tensor."""

    def _tensors(self) -> list[_native.Tensor]:
        raise NotImplementedError

    @property
    def tensor(self) -> _native.Tensor:
        """Its only tensor. A `TypeError` if it has several, or none."""
        tensors = self._tensors()
        if len(tensors) != 1:
            raise TypeError(f"{self!r} has {len(tensors)} tensors: choose one by its name, in []")
        return tensors[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its only tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """The dtype of its only tensor."""
        return self.tensor.dtype

    def tobytes(self, stream: Any = None) -> bytes:
        """As `Tensor.tobytes` of its only tensor."""
        return self.tensor.tobytes(stream)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.tensor.__cuda_array_interface__

    def _contents(self, native: _native.Segment | _native.Build) -> str:
        if native.closed:
            return "closed"
        tensors = self._tensors()
        what = f"{len(tensors)} tensors"
        if len(tensors) == 1:
            what = f"{tensors[0].dtype}{list(tensors[0].shape)}"
        return f"{what}, {native.nbytes} bytes on {native.place}"
