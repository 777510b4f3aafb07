"""torch.load: loads a file of `torch.save` from the page cache into torch tensors on the GPU.

    torch_load.py FILE   milliseconds until all tensors are loaded

FILE is a safetensors file, of which the other one is made first, beside it.
"""

import sys
from pathlib import Path
from typing import Any

import peer
import torch
from safetensors.torch import load_file


def main() -> None:
    path = Path(sys.argv[1]).with_suffix(".pt")
    torch.save(load_file(sys.argv[1]), path)
    peer.read(torch.ones(1, dtype=torch.uint8, device="cuda"))

    def load() -> dict[str, Any]:
        model: dict[str, Any] = torch.load(path, map_location="cuda", weights_only=True)
        torch.cuda.synchronize()
        return model

    def sample() -> float:
        elapsed, model = peer.milliseconds(load)
        peer.check(model)
        return elapsed

    peer.serve(sample)


if __name__ == "__main__":
    main()
