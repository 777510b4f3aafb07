"""torch.multiprocessing: tensors of torch's allocator, sent to another process as pickles.

    torch_multiprocessing.py rebuilt   bytes stranded by exports that another process reads several times
    torch_multiprocessing.py dropped   bytes stranded by exports that nobody reads
"""

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import peer
import torch
import torch.multiprocessing


def main() -> None:
    reads = {"rebuilt": peer.READS, "dropped": 0}[sys.argv[1]]
    spawn = torch.multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=read_all, args=(theirs,), daemon=True)
    reader.start()
    theirs.close()
    ours.recv()

    def export(reads: int) -> None:
        tensor = torch.ones(peer.EXPORTED, dtype=torch.uint8, device="cuda")
        payload = bytes(ForkingPickler.dumps(tensor))
        for _ in range(reads):
            ours.send_bytes(payload)
            assert ours.recv() == peer.EXPORTED

    # The first use of a library may allocate memory that it never frees.
    export(1)
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


if __name__ == "__main__":
    main()
