"""Models of torch in shared memory: they survive the processes that use them.

    import partywall.torch

    partywall.torch.share_module(model, "llm", kept=True)

    # in any other process, before or after:
    with torch.device("meta"):
        model = Llama(config)
    partywall.torch.load_module(model, "llm", timeout=60)

`DataLoader` is torch's, with batches in shared memory that GPUs copy from. `install_reductions()` has `torch.multiprocessing` send tensors of GPUs through Partywall. Importing this imports torch,
which must be 2.5 or later: else it raises `partywall.TorchTooOld`, an `ImportError`.
"""

from partywall.torch._version import require

# Before the modules that use what older versions lack.
require("partywall.torch", 2, 5)

from partywall.torch._errors import (
    ChecksumMismatch,
    Expired,
    LoaderWorkerDied,
    ModuleMismatch,
    ReductionsPatched,
    TensorInUse,
    UnsupportedTensor,
)
from partywall.torch._guard import guard
from partywall.torch._handle import ModuleHandle, handle
from partywall.torch._load import load_module
from partywall.torch._loader import DataLoader
from partywall.torch._pool import TorchPool, is_shareable
from partywall.torch._reductions import install_reductions, uninstall_reductions
from partywall.torch._share import share_module

__all__ = [
    "ChecksumMismatch",
    "DataLoader",
    "Expired",
    "LoaderWorkerDied",
    "ModuleHandle",
    "ModuleMismatch",
    "ReductionsPatched",
    "TensorInUse",
    "TorchPool",
    "UnsupportedTensor",
    "guard",
    "handle",
    "install_reductions",
    "is_shareable",
    "load_module",
    "share_module",
    "uninstall_reductions",
]
