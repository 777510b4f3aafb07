"""Tensors of torch for memory of the simulated GPU, which torch does not know: copies in main memory.

Each uses the memory of the GPU as long as it lives.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from . import driver

REAL: Callable[[Any], Any] = torch.from_dlpack

_MEMORY: list[Any] = []
"""The memory of all copies, which stays."""


def from_dlpack(tensor: Any) -> Any:
    """Takes the place of `torch.from_dlpack`."""
    if tensor.__dlpack_device__()[0] != 2:
        return REAL(tensor)
    elements = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.strides, strict=True))
    size = elements * getattr(torch, tensor.dtype).itemsize if tensor.nbytes else 0
    memory = ctypes.create_string_buffer(driver.read(tensor.data_ptr, size, 0) if size else b"", size + 1)
    _MEMORY.append(memory)
    return torch._C._from_dlpack(driver.on_host(tensor.__dlpack__(max_version=(1, 0)), ctypes.addressof(memory)))
