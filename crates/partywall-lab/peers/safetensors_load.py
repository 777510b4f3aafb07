"""safetensors: loads a file from the page cache into torch tensors on the GPU.

    safetensors_load.py FILE [--touch]   milliseconds until all of its tensors are loaded

A process that loads the file again reuses the memory that torch has kept from the earlier tensors.
"""

import sys
from typing import Any

import peer
import torch
from safetensors.torch import load_file


def main() -> None:
    path, *touch = sys.argv[1:]
    peer.read(torch.ones(1, dtype=torch.uint8, device="cuda"))

    def load() -> dict[str, Any]:
        model: dict[str, Any] = load_file(path, device="cuda")
        torch.cuda.synchronize()
        if touch:
            peer.touch(model)
        return model

    def sample() -> float:
        elapsed, model = peer.milliseconds(load)
        peer.check(model)
        return elapsed

    peer.serve(sample)


if __name__ == "__main__":
    main()
