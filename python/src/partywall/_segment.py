"""An open version of a name."""

import base64
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partywall import _arrays, _native
from partywall._arrays import Access, Shape
from partywall._exchange import Tensors
from partywall._handle import Interruptible, Named

if TYPE_CHECKING:
    from partywall._build import Build
    from partywall._domain import Domain


class Segment(Interruptible[_native.Segment], Named[_native.Segment], Tensors):
    """An open version of a name: a lease on it, and a mapping of names to its tensors, in place.

    `from_dlpack`, `memoryview` and similar functions also take a segment with one tensor. Closing the segment that
    committed a name withdraws the name, unless it is `kept`. If that segment is only dropped, its domain keeps the
    name.
    """

    def __init__(self, domain: "Domain", native: _native.Segment) -> None:
        self._socket = domain.socket
        super().__init__(domain, native)

    @property
    def version(self) -> int:
        """The version."""
        return self._native.version

    @property
    def place(self) -> str:
        """`host`, the UUID of the GPU that has the memory, or `pinned:N`."""
        return self._native.place

    @property
    def kind(self) -> str:
        """`host`, `vmm`, `legacy`, `pinned` or `live`."""
        return self._native.kind

    @property
    def nbytes(self) -> int:
        """The number of mapped bytes, including alignment."""
        return self._native.nbytes

    @property
    def reserved(self) -> int:
        """Bytes that it can grow to in this process; 0 if it cannot grow."""
        return self._native.reserved

    @property
    def mutable(self) -> bool:
        """Whether processes may open it for writing."""
        return self._native.mutable

    @property
    def kept(self) -> bool:
        """Whether the name stays after its committer has ended."""
        return self._native.kept

    @property
    def uid(self) -> int:
        """The user to which the name belongs."""
        return self._native.uid

    @property
    def shared(self) -> bool:
        """Whether processes of other users may open it."""
        return self._native.shared

    @property
    def metadata(self) -> dict[str, str]:
        """Its metadata."""
        return self._native.metadata

    def grow(
        self,
        length: int | None = None,
        *,
        tensors: Mapping[str, tuple[Shape, Any]] | None = None,
        spare: int = 0,
    ) -> None:
        """Grows a `mutable` version that this segment has committed. Later opens see all of the growth or none.

        The last tensor becomes `length` long along its first dimension. `tensors`, a mapping of names to shapes and
        dtypes, are added behind it. `spare` bytes stay free for later growths. Existing data keeps its place, and
        existing arrays keep their length: get the tensor again. Processes that have the version open see the growth
        after `refresh`.
        """
        added = [] if tensors is None else _arrays.planned(tensors)
        self._native.grow(None if length is None else _arrays.count(length), added, _arrays.count(spare))

    def refresh(self) -> bool:
        """Maps the memory that a `mutable` version has gained since it was opened or refreshed. Returns whether it has
        grown.

        Raises `CannotGrow` if there is no room behind the mapping of this process: open the segment again.
        """
        return self._native.refresh()

    def wait_growth(self, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds, or for ever, until the version has grown, and refreshes.

        Raises `CannotGrow` if no process can grow it any more.
        """
        self._native.wait_growth(timeout)

    def advance(
        self,
        stream: Any = None,
        *,
        version: int | None = None,
        streams: Iterable[Any] | None = None,
        timeout: float | None = 0.0,
    ) -> int:
        """Maps the latest version of the name, or `version`, in place of this one. Returns the version that is mapped
        then.

        The addresses stay: tensors and arrays of this segment, views of them and captured CUDA graphs show the new
        version. Without a newer version nothing changes, also if the name has ended; `timeout` says for how many
        seconds to wait for one. A given `version` is awaited as by `Domain.open`.

        Waits first for all work of this process on the GPU; or, with `streams`, for the work on these streams and on
        `stream`, on your word that no other work uses the segment. `stream` is by default torch's or cupy's current
        one. No thread may enqueue work that uses the segment until this returns: it would end CUDA in this process.

        Raises `WrongKind` unless the segment is frozen and in a GPU's memory; `LayoutChanged` if the tensors differ;
        `Captured` while one of the streams is captured into a graph; `TimeoutError` if a call of another thread uses
        the segment for 10 seconds. The former version then stays. It also stays if the driver refuses the new one,
        unless the `CudaError` has the anchor `not-mapped`.
        """
        newer = self._newer(version, timeout)
        if newer is not None:
            try:
                self._advance(newer, stream, streams)
            finally:
                newer.close()
        return self.version

    def _newer(self, version: int | None, timeout: float | None) -> "Segment | None":
        """Opens another version as this one was opened, if there is one."""
        native = self._native.newer(valid_version(version), timeout)
        assert self._domain is not None, "a closed segment has raised"
        return None if native is None else Segment(self._domain, native)

    def _advance(self, newer: "Segment", stream: Any, streams: Iterable[Any] | None) -> None:
        """Maps another version, of which no tensor is used, in place of this one, and closes it."""
        self._native.advance(newer._native, [stream, *(streams or ())], streams is not None)

    def pin(self, device: Any = "cuda") -> "Pinned":
        """Registers host memory with CUDA until the returned object is closed, so that a GPU can copy it
        asynchronously.

        Takes 0.4 ms per MiB. Tensors that torch creates from the segment meanwhile are pinned. Where several processes
        use the memory with GPUs, create it with `device="pinned"` instead.
        """
        return Pinned(self, self._native.pin(_arrays.device_name(device)))

    def ipc_handle(self, tensor: str) -> "IpcHandle":
        """Returns the driver's handle of a tensor that this process has published, for programs that open GPU memory by
        `cudaIpcMemHandle_t`, such as Triton Inference Server.

        The tensor's memory stays until the handle is closed, also after this segment is. Raises `WrongKind` unless the
        memory is of kind `legacy` and was published by this process.
        """
        return IpcHandle(self, tensor, self._native.ipc_handle(tensor))

    def to(self, device: Any, stream: Any = None, *, name: str, access: Access | None = None) -> "Build":
        """Begins the next version of `name` on `device` with the same tensors and metadata, and enqueues a copy into
        it.

        The copy is made on `stream`, by default torch's or cupy's current one, of the GPU of `device`, else of the one
        that uses this segment. `Build.commit` waits for it. The lease of this segment stays until the copy is made.
        `access` is as for `Domain.open`.

        Copies are made between GPUs' memory and pinned memory, and from host memory that is pinned by `pin`; raises
        `WrongKind` otherwise. To host memory, `Domain.put` copies the tensors.
        """
        from partywall._build import Build

        native = self._native.to(name, _arrays.device_name(device), access, stream)
        return Build(self._domain, native)

    def copy_from(self, source: "Segment", stream: Any = None) -> None:
        """Enqueues a copy of all tensors of `source`, which has the same, into this segment, which is open for writing.

        As for `to`, but other processes may see a part of the copy. Raises `ReadOnly` unless it is open for writing,
        and `WrongKind` if the tensors differ.
        """
        self._native.copy_from(native_of(source), stream)

    def __getitem__(self, tensor: str) -> _native.Tensor:
        return self._native.tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    def _tensors(self) -> list[_native.Tensor]:
        return self._native.tensors()

    def close(self) -> None:
        """Releases the lease: immediately if no tensor is in use, else when the last of them is dropped. If this object
        has committed the name, and it is not kept, the name ends then, too.

        Waits for the work of this process on the GPU that has the memory. Calling it again does nothing.
        """
        super().close()

    def __del__(self, *_: Any) -> None:
        # The result of a commit may be dropped: the domain keeps the name.
        if hasattr(self, "_native") and not self._native.committed:
            super().__del__()

    def __reduce__(self) -> tuple[Any, ...]:
        from partywall._domain import reopen

        return reopen, (self._socket, self.name, self.version)

    def __repr__(self) -> str:
        return f"<partywall.Segment {self.name}@{self.version}: {self._contents(self._native)}>"


def valid_version(version: int | None) -> int | None:
    """Returns a version, or raises `ValueError` if no version has this number."""
    if version is not None and operator.index(version) < 1:
        raise ValueError(f"{version} is not a version: versions are counted from 1")
    return version


def native_of(source: Segment) -> _native.Segment:
    """Checks the source of a copy, and returns its compiled object."""
    if not isinstance(source, Segment):
        raise TypeError(f"copy_from takes a segment, not {type(source).__name__}: use write() for arrays")
    return source._native


class Pinned(Interruptible[_native.Pinned]):
    """A registration of a segment in host memory with CUDA; `Segment.pin` returns one. Closing it unregisters the
    memory."""

    def __init__(self, segment: Segment, native: _native.Pinned) -> None:
        self._name = f"{segment.name}@{segment.version}"
        super().__init__(native)

    @property
    def nbytes(self) -> int:
        """The number of registered bytes: the size of the segment when it was first pinned."""
        return self._native.nbytes

    def close(self) -> None:
        """Unregisters the memory if it is the segment's last pin, once all work of this process on the GPU is done.

        Calling it again does nothing.
        """
        self._native.close()

    def __repr__(self) -> str:
        return f"<partywall.Pinned {self._name}: {'closed' if self.closed else f'{self.nbytes} bytes'}>"


class IpcHandle(Interruptible[_native.IpcHandle]):
    """A published tensor for programs that open GPU memory by CUDA's 64-byte handles; `Segment.ipc_handle` returns one.

    Keeps the tensor's memory until it is closed. Nobody knows who has opened the handle: have the other program close
    it first, because from then on it would see whatever uses the memory next. `raw_handle`, `device_id` and `byte_size`
    are what clients of Triton Inference Server register; `nbytes` and `offset` name the tensor in the region.
    """

    def __init__(self, segment: Segment, tensor: str, native: _native.IpcHandle) -> None:
        self._name = f"{segment.name}@{segment.version}:{tensor}"
        super().__init__(native)

    @property
    def raw_handle(self) -> bytes:
        """The handle of the allocation that contains the tensor, in base64. Raises `Closed` once this is closed."""
        return base64.b64encode(self._native.handle)

    @property
    def device_id(self) -> int:
        """The number of the GPU in this process. A process that sees other GPUs numbers it differently."""
        return self._native.device_id

    @property
    def byte_size(self) -> int:
        """The bytes of the smallest region that contains the tensor: from the begin of the allocation to its end."""
        return self.offset + self.nbytes

    @property
    def offset(self) -> int:
        """Where the tensor begins in the allocation, in bytes."""
        return self._native.offset

    @property
    def nbytes(self) -> int:
        """The bytes from the first element to the end of the last."""
        return self._native.nbytes

    def close(self) -> None:
        """Lets the memory end with its segment. Have the other program close the handle before. Calling it again does
        nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<partywall.IpcHandle {self._name}: {'closed' if self.closed else f'{self.nbytes} bytes'}>"
