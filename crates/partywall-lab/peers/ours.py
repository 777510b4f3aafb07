"""Partywall's own package, as its users call it.

    ours.py open SOCKET NAME            microseconds to open a segment
    ours.py open-close SOCKET NAME      microseconds to open and close it
    ours.py tensor SOCKET NAME          microseconds to open it, make a torch tensor of it, drop that, and close it
    ours.py model SOCKET NAME [--touch] milliseconds until all tensors of a segment are torch tensors
    ours.py module SOCKET FILE          milliseconds until a model on meta has the tensors of a file in shared memory
    ours.py advance SOCKET TENSORS      milliseconds that a stream stands still for another version: `in-place` or `swapped`; or the `call`
    ours.py put SOCKET FILE [--touch]   milliseconds until a file is a segment and its tensors are torch tensors
    ours.py rebuilt SOCKET              bytes stranded by exports that another process reads several times
    ours.py dropped SOCKET              bytes stranded by exports that nobody reads
"""

import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import partywall as pw
import peer


WORK = 200_000_000
"""Cycles of a GPU's clock, a tenth of a second: longer than it takes to open a version."""


def main() -> None:
    what, socket, *arguments = sys.argv[1:]
    with pw.connect(socket=socket, start=False) as domain:
        if what in ("rebuilt", "dropped"):
            stranded(domain, what)
        else:
            prepare: dict[str, Callable[..., Callable[..., float]]]
            prepare = {"open": only_open, "open-close": open_close, "tensor": as_tensor, "model": as_model, "put": put}
            prepare |= {"module": module, "advance": advance}
            peer.serve(prepare[what](domain, *arguments))


def only_open(domain: pw.Domain, name: str) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        segment = domain.open(name)
        elapsed = time.perf_counter() - start
        segment.close()
        return elapsed * 1e6

    return sample


def open_close(domain: pw.Domain, name: str) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        segment = domain.open(name)
        segment.close()
        return (time.perf_counter() - start) * 1e6

    return sample


def as_tensor(domain: pw.Domain, name: str) -> Callable[[], float]:
    torch = with_context()

    def sample() -> float:
        start = time.perf_counter()
        segment = domain.open(name)
        tensor = torch.from_dlpack(segment)
        del tensor
        segment.close()
        return (time.perf_counter() - start) * 1e6

    return sample


def as_model(domain: pw.Domain, name: str, *touch: str) -> Callable[[], float]:
    torch = with_context()

    def load() -> tuple[pw.Segment, dict[str, Any]]:
        segment = domain.open(name)
        model = {name: torch.from_dlpack(tensor) for name, tensor in segment.items()}
        if touch:
            peer.touch(model)
        return segment, model

    return loading(load)


def module(domain: pw.Domain, path: str) -> Callable[[], float]:
    torch = with_context()
    import partywall.torch
    from safetensors.torch import load_file

    def model(tensors: dict[str, Any]) -> Any:
        """Makes a model of modules with the names and tensors of a file."""
        root = torch.nn.Module()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            inner = root
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, torch.nn.Module())
                inner = inner._modules[part]
            inner.register_parameter(last, torch.nn.Parameter(tensor))
        return root

    given = load_file(path, device="cuda")
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in given.items()}
    shared = model(given)
    del given
    partywall.torch.share_module(shared, "module", move=True, domain=domain)

    def sample() -> float:
        loaded = model({name: torch.empty_like(tensor) for name, tensor in like.items()})
        elapsed, handle = peer.milliseconds(lambda: partywall.torch.load_module(loaded, "module", domain=domain))
        peer.check(dict(loaded.named_parameters()))
        del loaded
        handle.close()
        return elapsed

    return sample


def advance(domain: pw.Domain, tensors: str) -> Callable[[str], float]:
    torch = with_context()
    import partywall.torch

    def model(device: str) -> Any:
        """Makes a model of matrices of 32 MiB."""
        empty = (torch.empty(4096, 4096, dtype=torch.bfloat16, device=device) for _ in range(int(tensors)))
        return torch.nn.ParameterList(torch.nn.Parameter(tensor) for tensor in empty)

    def share(version: int) -> partywall.torch.ModuleHandle:
        trained = model("cuda")
        with torch.no_grad():
            for tensor in trained:
                tensor.fill_(version)
        return partywall.torch.share_module(trained, "advance", domain=domain)

    # An older version can be opened while somebody has it.
    kept = [share(version) for version in (1, 2)]
    torch.cuda.empty_cache()
    worker = model("meta")
    handle = partywall.torch.load_module(worker, "advance", domain=domain)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(how: str) -> float:
        other = len(kept) + 1 - handle.version
        torch.cuda.synchronize()
        if how != "call":
            # A server advances when it has enqueued work.
            torch.cuda._sleep(WORK)
        begin.record()
        elapsed, version = peer.milliseconds(lambda: handle.advance(version=other, stable_address=how != "swapped"))
        end.record()
        assert version == other and all(tensor[0, 0] == other for tensor in worker)
        return elapsed if how == "call" else begin.elapsed_time(end)

    return sample


def put(domain: pw.Domain, path: str, *touch: str) -> Callable[[], float]:
    torch = with_context()

    def load() -> tuple[pw.Segment, dict[str, Any]]:
        segment = domain.put_file(path, "put", device="cuda")
        model = {name: torch.from_dlpack(tensor) for name, tensor in segment.items()}
        if touch:
            peer.touch(model)
        return segment, model

    return loading(load)


def loading(load: Callable[[], tuple[pw.Segment, dict[str, Any]]]) -> Callable[[], float]:
    def sample() -> float:
        elapsed, (segment, model) = peer.milliseconds(load)
        peer.check(model)
        model.clear()
        segment.close()
        return elapsed

    return sample


def stranded(domain: pw.Domain, what: str) -> None:
    torch = with_context()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=read_all, args=(theirs, domain.socket), daemon=True)
    reader.start()
    theirs.close()
    ours.recv()

    def export(reads: int) -> None:
        with domain.create("exported", peer.EXPORTED, torch.uint8) as build:
            torch.from_dlpack(build).fill_(1)
            segment = build.commit()
        payload = pickle.dumps(segment)
        for _ in range(reads):
            ours.send_bytes(payload)
            assert ours.recv() == peer.EXPORTED
        segment.close()

    # The first use of a library may allocate memory that it never frees.
    export(1)
    reads = {"rebuilt": peer.READS, "dropped": 0}[what]
    peer.serve(lambda: peer.stranded(lambda: export(reads), lambda: None))


def read_all(exports: Any, socket: str) -> None:
    """Runs in the other process: reads every export."""
    torch = with_context()
    # Unpickling a segment opens it through this connection.
    with pw.connect(socket=socket, start=False):
        exports.send("ready")
        while True:
            try:
                payload = exports.recv_bytes()
            except EOFError:
                return
            with pickle.loads(payload) as segment:
                exports.send(peer.read(torch.from_dlpack(segment)))


def with_context() -> Any:
    """Imports torch, creates its context on the GPU, and has it load its first kernels."""
    import torch

    peer.read(torch.ones(1, dtype=torch.uint8, device="cuda"))
    return torch


if __name__ == "__main__":
    main()
