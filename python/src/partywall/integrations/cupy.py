"""cupy: arrays whose memory is shareable from its birth."""

import threading
from typing import Any, SupportsIndex

import cupy

from partywall import _arrays, _native
from partywall._domain import Domain
from partywall._errors import OutOfMemory


class CupyPool(cupy.cuda.MemoryPool):  # type: ignore[misc]
    """A `cupy.cuda.MemoryPool` whose arrays `Domain.publish` shares without a copy; `Domain.cupy_pool` makes one.

    Arrays that this thread creates in a `with` of the pool lie in it. `cupy.cuda.set_allocator(pool.malloc)` makes it
    the pool of all threads. cupy caches and reuses the memory as in every pool.
    """

    def __init__(self, domain: Domain, name: str, size: SupportsIndex, device: Any = None) -> None:
        index = cupy.cuda.Device(device).id
        heap = domain._native.heap(name, _arrays.count(size), f"cuda:{index}")

        def allocate(nbytes: int, on: int) -> int:
            try:
                if on != index:
                    here = f"pool {name!r} is on cuda:{index}"
                    raise ValueError(f"{here}, and cannot allocate on cuda:{on}: create a pool there")
                return heap.allocate(nbytes)
            except OutOfMemory as error:
                # cupy frees what it has cached, tries again, and then raises its OutOfMemoryError.
                raise cupy.cuda.runtime.CUDARuntimeError(_OUT_OF_MEMORY) from error

        def free(address: int, _: int) -> None:
            _native.Heap.free(address)

        super().__init__(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)
        self._heap, self._name, self._index = heap, name, index
        # The allocators that each thread had before it entered the pool.
        self._entered = threading.local()

    @property
    def name(self) -> str:
        """The name that errors show."""
        return self._name

    @property
    def size(self) -> int:
        """The most bytes that it takes from the GPU."""
        return self._heap.limit

    @property
    def nbytes(self) -> int:
        """The bytes that it has taken from the GPU, whether arrays use them or not."""
        return self._heap.nbytes

    def __enter__(self) -> "CupyPool":
        entered = cupy.cuda.using_allocator(self.malloc)
        entered.__enter__()
        self._entered.__dict__.setdefault("contexts", []).append(entered)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.contexts.pop().__exit__(*raised)

    def __repr__(self) -> str:
        return f"<CupyPool {self.name}: {self.nbytes} of {self.size} bytes on cuda:{self._index}>"


_OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation`."""
