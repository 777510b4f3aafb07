"""A server that is killed, and a spare that continues: requests are answered again within a second, and none is lost.

    python serve_and_crash.py                 # starts a server, sends requests, and kills the worker three times
    python serve_and_crash.py serve           # serves; kill the worker yourself, and see the next one take over
    python serve_and_crash.py request         # sends requests to it, from another terminal

The weights stay in memory under a name, and requests wait in a queue. A worker that dies leaves its request in the
queue; the next one is a process that has everything imported already, and maps the weights in place. `--device` is
`cuda`, `host` or `auto`. With torch installed the worker computes with torch, otherwise with NumPy if the weights are
in host memory.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

import partywall as pw
from partywall import spares

WEIGHTS = "examples/served"
REQUESTS = "examples/requests"
SIZE = 1024
TIMEOUT = 60
KILLS = 3


def load() -> dict[str, np.ndarray[Any, Any]]:
    """Stands in for slow work: reading a checkpoint. The layers turn x into x + 3."""
    return {f"layers.{layer}": np.full(SIZE, 1.0, "float32") for layer in range(3)}


def worker(device: str) -> None:
    """Answers requests until it is killed. Everything that needs a connection or CUDA happens here, in the fork."""
    with pw.connect() as domain, requests(domain) as queue:
        weights = domain.open_or_build(WEIGHTS, lambda claim: claim.put(load(), device, kept=True))
        forward = model(weights)
        print(f"worker {os.getpid()} is ready", flush=True)
        for task in queue.claims(None):
            given = np.asarray(task.inputs[0].tensor(dtype="float32"))
            np.asarray(task.output.tensor(dtype="float32"))[:] = forward(given)


def model(weights: pw.Segment) -> Any:
    """Returns a function that adds the layers to its argument, where the weights are."""
    if importlib.util.find_spec("torch"):
        import torch

        layers = [torch.from_dlpack(tensor) for tensor in weights.values()]

        def forward(given: Any) -> Any:
            x = torch.from_numpy(given.copy()).to(layers[0].device)
            for layer in layers:
                x = x + layer
            return x.cpu().numpy()

        return forward
    arrays = [np.asarray(tensor) for tensor in weights.values()]
    return lambda given: given + sum(arrays)


def requests(domain: pw.Domain) -> pw.Queue:
    """Opens or creates the queue of requests, in host memory."""
    size = (8, SIZE * 4)
    return domain.queue(REQUESTS, tasks=8, inputs=size, outputs=size, device="host")


def answered(queue: pw.Queue, number: int) -> bool:
    """Sends a request, and returns whether the answer is right."""
    ticket = queue.submit("add", [np.full(SIZE, number, "float32")], output=SIZE * 4, timeout=TIMEOUT)
    with ticket.result(TIMEOUT) as result:
        return bool((np.asarray(result.tensor(dtype="float32")) == number + 3).all())


def demonstrate(device: str) -> None:
    command = [sys.executable, __file__, "serve", "--device", device]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    right = 0
    with pw.connect() as domain, requests(domain) as queue:
        for kill in range(KILLS + 1):
            line = server.stdout.readline()
            if not line:
                sys.exit(f"the server has ended with exit code {server.wait()}: above it says why")
            pid = line.split()[1]
            right += sum(answered(queue, number) for number in range(10))
            if kill < KILLS:
                start = time.perf_counter()
                os.kill(int(pid), signal.SIGKILL)
                right += answered(queue, 10)
                took = time.perf_counter() - start
                print(f"worker {pid} killed: the next answer came after {took:.2f} s", flush=True)
    server.terminate()
    server.wait()
    print(f"{right} of {KILLS * 11 + 10} answers are right")
    with pw.connect() as domain:
        remove(domain)


def remove(domain: pw.Domain) -> None:
    for name in (WEIGHTS, REQUESTS):
        with contextlib.suppress(pw.NameNotFound):
            domain.rm(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["all", "serve", "request"], default="all")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.role == "serve":
        preload = [module for module in ("torch",) if importlib.util.find_spec(module)]
        spares.run(worker, given.device, spares=2, preload=preload)
    elif given.role == "request":
        with pw.connect() as domain, requests(domain) as queue:
            print(f"{sum(answered(queue, number) for number in range(100))} of 100 answers are right")
    else:
        demonstrate(given.device)


if __name__ == "__main__":
    main()
