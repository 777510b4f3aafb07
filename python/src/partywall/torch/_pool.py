"""Memory of torch that is shareable from its birth."""

from typing import Any, SupportsIndex

import torch

from partywall import _arrays, _native
from partywall._domain import Domain
from partywall.torch._version import require


class TorchPool(torch.cuda.MemPool):  # type: ignore[misc]
    """A `torch.cuda.MemPool` whose tensors `Domain.publish` shares without a copy; `Domain.torch_pool` makes one.

    Tensors that this thread creates in a `with` of the pool lie in it; torch caches and reuses their memory as in every
    pool. A pool can be entered again, and passed to torch wherever torch takes a pool. Dropping it is safe at any time:
    tensors in it stay, and their memory goes back to the GPU as torch's `empty_cache` returns it.
    """

    def __init__(self, domain: Domain, name: str, size: SupportsIndex, device: Any = None) -> None:
        # Older versions let all threads allocate in a pool that one has entered.
        require("torch_pool()", 2, 8)
        # Without a GPU, torch says so here.
        torch.cuda.init()
        with torch.cuda.device(device):
            self._index = torch.cuda.current_device()
            # Dropped with the pool: from then on torch only frees.
            self._heap = domain._native.heap(name, _arrays.count(size), f"cuda:{self._index}")
            super().__init__(self._heap.torch_allocator(_allocator))
        self._name = name
        self._entered: list[Any] = []

    @property
    def name(self) -> str:
        """The name that errors show."""
        return self._name

    @property
    def device(self) -> Any:
        """The `torch.device` of its tensors."""
        return torch.device("cuda", self._index)

    @property
    def size(self) -> int:
        """The most bytes that it takes from the GPU."""
        return self._heap.limit

    @property
    def nbytes(self) -> int:
        """The bytes that it has taken from the GPU, whether tensors use them or not."""
        return self._heap.nbytes

    def __enter__(self) -> "TorchPool":
        self._heap.take_refusal()
        entered = torch.cuda.use_mem_pool(self, self._index)
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered.pop().__exit__(kind, error, trace)
        refusal = self._heap.take_refusal()
        if refusal and isinstance(error, torch.OutOfMemoryError):
            # torch's message has the numbers of the GPU, not of the pool.
            error.add_note(refusal)

    def __repr__(self) -> str:
        return f"<partywall.torch.TorchPool {self.name}: {self.nbytes} of {self.size} bytes on {self.device}>"


def is_shareable(tensor: Any) -> bool:
    """Returns whether a tensor of torch lies in a `TorchPool`: then `Domain.publish` shares it as kind `live`."""
    return tensor.layout is torch.strided and _native.Heap.contains(tensor.data_ptr())


def _allocator(allocate: str, free: str) -> Any:
    """Returns torch's object for two functions of the compiled module."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, allocate, free).allocator()
