"""Weights that survive the process that loaded them: after a kill and a restart, the process is ready in milliseconds.

    python weights_survive.py                 # demonstrates it: serves, kills, restarts
    python weights_survive.py serve           # loads the weights or finds them; end it and start it again
    python weights_survive.py remove

`--device` is `cuda`, `host` or `auto`, and `--mib` is the size of the weights. With torch installed the weights become
torch tensors, otherwise NumPy arrays if they are in host memory.
"""

import argparse
import importlib
import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import partywall as pw

NAME = "examples/weights"
LAYERS = 64


def load(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    """Stands in for slow work: reading a checkpoint, converting, quantising."""
    rows = mib * (1 << 20) // LAYERS // 4 // 1024
    random = np.random.default_rng(7)
    return {f"layers.{i}.weight": random.standard_normal((rows, 1024), "float32") for i in range(LAYERS)}


def tensors(weights: Mapping[str, pw.Tensor], torch: Any) -> dict[str, Any]:
    """Returns the tensors that a model would use: the shared memory itself, not copies."""
    if torch is not None:
        return {name: torch.from_dlpack(tensor) for name, tensor in weights.items()}
    on_host = {name: tensor for name, tensor in weights.items() if tensor.device == "host"}
    return {name: np.from_dlpack(tensor) for name, tensor in on_host.items()}


def serve(domain: pw.Domain, device: str, mib: int) -> None:
    # Imported before the clock starts: it takes seconds, with or without shared weights.
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    start = time.perf_counter()
    # The first process loads the weights; others wait for it, or open what exists. `kept` lets the weights survive.
    weights = domain.open_or_build(NAME, lambda claim: claim.put(load(mib), device, kept=True))
    with weights:
        model = tensors(weights, torch)
        took = (time.perf_counter() - start) * 1e3
        print(f"ready after {took:.1f} ms: {weights!r}, {len(model)} tensors made", flush=True)
        signal.pause()


def demonstrate(arguments: list[str]) -> None:
    command = [sys.executable, __file__, "serve", *arguments]
    for turn in ("first start", "after SIGKILL"):
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        print(f"{turn}: {server.stdout.readline().strip()}")
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["all", "serve", "remove"], default="all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mib", type=int, default=512)
    given = parser.parse_args()
    with pw.connect() as domain:
        if given.role == "serve":
            serve(domain, given.device, given.mib)
        if given.role == "all":
            demonstrate(["--device", given.device, "--mib", str(given.mib)])
        if given.role in ("all", "remove"):
            print(f"removed; {domain.rm(NAME)} bytes stay with others")


if __name__ == "__main__":
    main()
