"""A trainer updates a policy while four workers answer requests with it, and no request sees two versions of it.

    python rl_update.py                   # on a GPU with torch; without a GPU it uses host memory and NumPy
    python rl_update.py --device host     # `--device` is `cuda`, `cuda:N`, `host` or `auto`
    python rl_update.py --steps 500       # end a worker meanwhile (`partywall ps` names it): the others go on

A version of the policy appears in one step and never changes, so a worker reads it without a lock or a copy. The worker
takes a newer version between two requests. The trainer begins a version when all workers serve the one before, so that
at most two versions exist.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

import partywall as pw

POLICY = "examples/policy"
WORKERS = 4
LAYERS = 32
SIZE = 1 << 18
"""Elements of each layer."""
TIMEOUT = 60


def train(domain: pw.Domain, device: str, steps: int) -> None:
    """Trains for some steps, and commits the policy after each."""
    policy = initial(device)
    workers = [start(number) for number in range(WORKERS)]
    with ExitStack() as stack:
        latest = stack.enter_context(domain.timeline(f"{POLICY}/latest", writer=True))
        # Each worker signals the version that it serves.
        names = [f"{POLICY}/worker/{number}" for number in range(WORKERS)]
        serving = [stack.enter_context(domain.timeline(name)) for name in names]
        took, version = [], 0
        for _ in range(steps):
            for layer in policy.values():
                layer += 1  # Stands in for a step of training.
            begin = time.perf_counter()
            serving = [worker for worker in serving if serves(worker, version)]
            version = domain.put(POLICY, policy).version
            latest.signal(version)
            took.append((time.perf_counter() - begin) * 1e3)
        # The policy and the timeline end with this process, so the workers have to be up to date first.
        for worker in serving:
            serves(worker, version)
    mib = sum(layer.nbytes for layer in policy.values()) >> 20
    median = statistics.median(took)
    print(f"{steps} updates of {mib} MiB: {median:.1f} ms each, {max(took):.1f} ms at most", flush=True)
    for process in workers:
        process.wait()


def serves(worker: pw.Timeline, version: int) -> bool:
    """Waits until a worker serves `version` or a later one. Returns false if the worker has died."""
    try:
        worker.wait(version, TIMEOUT)
    except pw.TimelineEnded as ended:
        print(f"the trainer goes on without a worker: {ended}", flush=True)
        return False
    return True


def work(domain: pw.Domain, number: int) -> None:
    """Answers requests until the trainer ends, each with the latest policy."""
    with (
        domain.timeline(f"{POLICY}/latest") as latest,
        domain.timeline(f"{POLICY}/worker/{number}", writer=True) as serving,
    ):
        latest.wait(1, TIMEOUT)
        requests, mixed, versions = 0, 0, 0
        while latest.ending is None:
            with domain.open(POLICY) as policy:
                versions += 1
                serving.signal(policy.version)
                # Reading the value of a timeline is a load from shared memory.
                while latest.value <= policy.version and latest.ending is None:
                    requests += 1
                    mixed += answer(policy) != {policy.version}
        said = f"worker {number}: {requests} requests, {versions} versions; {mixed} requests saw two versions\n"
        # In one write, so that the lines of several workers stay apart.
        print(said, end="", flush=True)


def answer(policy: Mapping[str, pw.Tensor]) -> set[int]:
    """Stands in for inference. Returns the versions that are found in the layers: each element is the version."""
    layers = [array(layer) for layer in policy.values()]
    return {int(extreme) for layer in layers for extreme in (layer.min(), layer.max())}


def initial(device: str) -> dict[str, Any]:
    """Returns the policy of the trainer, in memory of its own."""
    names = [f"layers.{layer}" for layer in range(LAYERS)]
    if device == "host":
        return {name: np.zeros(SIZE, "float32") for name in names}
    import torch

    return {name: torch.zeros(SIZE, device=device) for name in names}


def array(tensor: pw.Tensor) -> Any:
    if tensor.device == "host":
        return np.asarray(tensor)
    import torch

    return torch.from_dlpack(tensor)


def start(number: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, __file__, "work", "--number", str(number)])


def chosen(device: str) -> str:
    """Returns the device for `auto`: a GPU if torch finds one."""
    if device != "auto":
        return device
    try:
        import torch
    except ImportError:
        return "host"
    return "cuda" if torch.cuda.is_available() else "host"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["train", "work"], default="train")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--number", type=int, default=0, help="which worker this is")
    given = parser.parse_args()
    with pw.connect() as domain:
        train(domain, chosen(given.device), given.steps) if given.role == "train" else work(domain, given.number)


if __name__ == "__main__":
    main()
