# Holds 289.
"""Warm spares on a real GPU: the parent has no CUDA, its forks have it, and no memory is left behind."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import pytest

import partywall as pw

from ..conftest import WATCHDOG, Child

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

KILLS = 20

SERVES = """
import os
from partywall import spares
def main(name):
    import torch
    with pw.connect(socket=sys.argv[1]) as d, d.open(name) as opened:
        weights = torch.from_dlpack(opened)
        say(os.getpid(), int((weights @ weights)[0, 0]))
        while True:
            weights @ weights
spares.run(main, "w", spares=2, preload=["torch"])
"""


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def opened_devices(pid: int) -> list[str]:
    """The driver's devices that a process has open."""
    opened = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(fd.readlink()))
    return [path for path in opened if path.startswith("/dev/nvidia")]


def test_killed_workers_are_replaced_and_leave_no_memory(domain, socket, child):
    domain.put("w", torch.ones(2048, 2048, device="cuda"), kept=True)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    launcher = child(SERVES, socket)
    for _ in range(KILLS):
        worker, found = map(int, launcher.says().split())
        assert found == 2048
        assert opened_devices(worker)
        assert opened_devices(launcher.process.pid) == []
        for spare in set(children(launcher.process.pid)) - {worker}:
            assert opened_devices(spare) == []
        os.kill(worker, signal.SIGKILL)
    last = os.pidfd_open(int(launcher.says().split()[0]))
    launcher.process.terminate()
    assert select.select([last], [], [], WATCHDOG)[0]
    os.close(last)
    deadline = time.monotonic() + WATCHDOG
    while torch.cuda.mem_get_info()[0] < before - (64 << 20):
        assert time.monotonic() < deadline, "memory is left behind"
        time.sleep(0.05)


def test_module_that_uses_cuda_is_refused_by_name(child, tmp_path):
    (tmp_path / "uses_cuda.py").write_text("import torch\nx = torch.ones(1, device='cuda')\n")
    launcher = child(
        """
        from partywall import spares
        sys.path.insert(0, sys.argv[1])
        try:
            spares.run(say, "never", preload=["torch", "uses_cuda"])
        except pw.CannotPreload as error:
            say(error)
        """,
        str(tmp_path),
    )
    assert launcher.says().startswith("cannot preload: uses_cuda has initialised CUDA")


def test_module_that_counts_gpus_by_nvml_is_preloaded(child, tmp_path):
    """As vLLM does when it is imported. NVML opens devices of the driver, and leaves CUDA alone."""
    (tmp_path / "counts.py").write_text(
        "import ctypes\nnvml = ctypes.CDLL('libnvidia-ml.so.1')\nassert nvml.nvmlInit_v2() == 0\n"
    )
    launcher = child(
        """
        import torch
        from partywall import spares
        sys.path.insert(0, sys.argv[1])
        def main():
            say(torch.ones(1000, device="cuda").sum().item())
        spares.run(main, preload=["torch", "counts"])
        """,
        str(tmp_path),
    )
    assert launcher.says() == "1000.0"


# Holds 270.
def test_guard_stops_a_write_and_the_context_lives(domain):
    from partywall.torch import guard

    domain.put("w", torch.ones(1000, device="cuda"))
    with domain.open("w") as opened:
        weights = torch.from_dlpack(opened)
        with pytest.raises(pw.ReadOnly, match=r'cannot write tensor "data" of w@1 by aten\.add_\.Tensor'), guard():
            weights.add_(1)
        torch.cuda.synchronize()
        assert int(weights.sum()) == 1000


DRAWS = """
import os, time
import torch
from partywall import spares
def main():
    os.write(1, f"{os.getpid()} {int(torch.randint(10**9, (), device='cuda'))}\\n".encode())
    time.sleep(1000)
torch.manual_seed(1)
"""


def drawn(launcher: Child) -> list[str]:
    """What two starts of a worker draw on the GPU."""
    numbers = []
    for _ in range(2):
        worker, number = launcher.says().split()
        numbers.append(number)
        os.kill(int(worker), signal.SIGKILL)
    return numbers


def test_workers_draw_numbers_of_their_own_on_the_gpu(child):
    calls = ("spares.run(main)", "spares.run(main, seed=7)", "spares.run(main, seed=7)", "spares.run(main)")
    first, seeded, again, last = (drawn(child(DRAWS + call)) for call in calls)
    assert seeded == again
    assert len({*first, *seeded, *last}) == 6
