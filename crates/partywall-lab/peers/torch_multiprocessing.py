"""torch.multiprocessing: tensors of torch's allocator, sent to another process as pickles.

    torch_multiprocessing.py rebuilt [SOCKET]   bytes stranded by exports that another process reads several times
    torch_multiprocessing.py dropped [SOCKET]   bytes stranded by exports that nobody reads
    torch_multiprocessing.py sent [SOCKET]      tensors a second, of one that is sent again and again and received

With the socket of a broker, `partywall.torch.install_reductions` carries them.
"""

import sys
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import peer
import torch
import torch.multiprocessing


def main() -> None:
    what, *socket = sys.argv[1:]
    if socket:
        import partywall as pw
        from partywall.torch import install_reductions

        install_reductions(domain=pw.connect(socket=socket[0], start=False), expires=EXPIRES)
    spawn = torch.multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=receive_all if what == "sent" else read_all, args=(theirs,), daemon=True)
    reader.start()
    theirs.close()
    ours.recv()

    if what == "sent":
        tensor = torch.ones(1024, device="cuda")

        def send() -> float:
            start = time.perf_counter()
            for _ in range(SENDS):
                ours.send_bytes(ForkingPickler.dumps(tensor))
            ours.recv()
            return SENDS / (time.perf_counter() - start)

        peer.serve(send)
        return

    def export(reads: int) -> None:
        tensor = torch.ones(peer.EXPORTED, dtype=torch.uint8, device="cuda")
        payload = bytes(ForkingPickler.dumps(tensor))
        for _ in range(reads):
            ours.send_bytes(payload)
            assert ours.recv() == peer.EXPORTED

    # The first use of a library may allocate memory that it never frees.
    export(1)
    reads = {"rebuilt": peer.READS, "dropped": 0}[what]
    peer.serve(lambda: peer.stranded(lambda: export(reads), torch.cuda.ipc_collect))


def read_all(exports: Any) -> None:
    """Runs in the other process: reads every export."""
    peer.read(torch.ones(1, dtype=torch.uint8, device="cuda"))
    exports.send("ready")
    while True:
        try:
            payload = exports.recv_bytes()
        except EOFError:
            return
        tensor = ForkingPickler.loads(payload)
        total = peer.read(tensor)
        del tensor
        exports.send(total)


def receive_all(exports: Any) -> None:
    """Runs in the other process: makes a tensor of every export, and answers each `SENDS` of them."""
    torch.ones(1, dtype=torch.uint8, device="cuda")
    exports.send("ready")
    while True:
        for _ in range(SENDS):
            try:
                tensor = ForkingPickler.loads(exports.recv_bytes())
            except EOFError:
                return
        exports.send(tensor.numel())


SENDS = 2000
"""Twice as many as torch makes events for; then each of its sends waits for the GPU."""

EXPIRES = 1.0
"""Seconds after which an export that nobody reads is freed, by Partywall."""

if __name__ == "__main__":
    main()
