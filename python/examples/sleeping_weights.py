"""Weights that sleep in pinned memory while no request needs them, and wake on the GPU at the speed of its bus.

    python sleeping_weights.py                 # demonstrates it: sleeps, kills the process, and wakes them in another
    python sleeping_weights.py sleep           # loads the weights, puts them to sleep, and waits; end it at any time
    python sleeping_weights.py wake            # on any GPU
    python sleeping_weights.py remove

Without a GPU it says so, and the weights sleep and wake in host memory. `--mib` is the size of the weights.
"""

import argparse
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

import partywall as pw

AWAKE = "examples/weights/awake"
ASLEEP = "examples/weights/asleep"
LAYERS = 64


def load(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    """Stands in for slow work: reading a checkpoint, converting, quantising, or training."""
    rows = mib * (1 << 20) // LAYERS // 4 // 1024
    random = np.random.default_rng(7)
    return {f"layers.{i}.weight": random.standard_normal((rows, 1024), "float32") for i in range(LAYERS)}


def sleep(domain: pw.Domain, device: str, mib: int) -> None:
    """Loads the weights on the GPU, and moves them into pinned memory."""
    with domain.put(AWAKE, load(mib), device) as weights:
        start = time.perf_counter()
        # `kept` lets them outlive this process.
        if device == "host":
            asleep = domain.put(ASLEEP, weights, kept=True)
        else:
            tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
            with domain.create_many(ASLEEP, tensors, "pinned", kept=True) as build:
                build.copy_from(weights)
                asleep = build.commit()
    # The end of `with` has freed the memory of the GPU.
    report("asleep", asleep, start)
    signal.pause()


def wake(domain: pw.Domain, device: str, mib: int) -> None:
    """Copies the weights from where they sleep to the GPU."""
    start = time.perf_counter()
    # Only the GPU reads them: a mapping for the CPU would take longer.
    with domain.open(ASLEEP, access="gpu") as asleep:
        awake = domain.put(AWAKE, asleep) if device == "host" else asleep.to(device, name=AWAKE).commit()
        report("awake", awake, start)
        # The weights on the GPU are a model for torch.from_dlpack. Those in pinned memory stay for the next process.
        with awake:
            right = all(awake[name].tobytes() == layer.tobytes() for name, layer in load(mib).items())
            print(f"they are as they were: {right}")


def report(what: str, weights: pw.Segment, start: float) -> None:
    took = time.perf_counter() - start
    print(f"{what} after {took * 1e3:.1f} ms, {weights.nbytes / took / 1e9:.1f} GB/s: {weights!r}", flush=True)


def demonstrate(arguments: list[str]) -> None:
    command = [sys.executable, __file__]
    with subprocess.Popen([*command, "sleep", *arguments], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        print(f"first process: {first.stdout.readline().strip()}", flush=True)
        first.kill()
    subprocess.run([*command, "wake", *arguments], check=True)


def place(domain: pw.Domain, device: str) -> str:
    """Returns the device on which the weights are awake: host memory, if there is no GPU with pinned memory."""
    try:
        if device != "host":
            domain.create(AWAKE, 1, "uint8", "pinned").close()
    except pw.NoDevice as error:
        print(f"{error}\nthe weights sleep and wake in host memory")
        return "host"
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["all", "sleep", "wake", "remove"], default="all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mib", type=int, default=512)
    given = parser.parse_args()
    with pw.connect() as domain:
        if given.role != "remove":
            device = place(domain, given.device)
        if given.role == "sleep":
            sleep(domain, device, given.mib)
        if given.role == "wake":
            wake(domain, device, given.mib)
        if given.role == "all":
            demonstrate(["--device", device, "--mib", str(given.mib)])
        if given.role in ("all", "remove"):
            print(f"removed; {domain.rm(ASLEEP)} bytes stay with others")


if __name__ == "__main__":
    main()
