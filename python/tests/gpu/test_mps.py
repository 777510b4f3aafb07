# Holds 240.
"""`connect(mps=True)` with NVIDIA's daemon: torch becomes a client of it."""

import json
import os
import shutil
import subprocess

import pytest

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
if shutil.which("nvidia-cuda-mps-control") is None:
    pytest.skip("no nvidia-cuda-mps-control", allow_module_level=True)

CLIENT = """
import torch
with pw.connect(socket=sys.argv[1], mps=True) as d:
    with d.put("x", torch.ones(8, device="cuda")):
        say(next(member.mps for member in d.ps()))
        told()
"""

LATE = """
import torch
torch.ones(1, device="cuda").sum().item()
try:
    pw.connect(socket=sys.argv[1], mps=True)
except pw.NotUnderMps as error:
    say(error.anchor)
"""


def test_torch_becomes_a_client_of_the_domains_daemon(socket, child, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    program = [PROGRAM, "--json", "--socket", socket, "mps"]
    try:
        client = child(CLIENT, socket)
        pipes = client.says()
        assert pipes == socket.removesuffix(".sock") + ".mps/pipe"
        printed = subprocess.run([*program, "status"], capture_output=True, timeout=WATCHDOG, check=True).stdout
        status = json.loads(printed)
        assert [client.process.pid] == [pid for server in status["servers"] for pid in server["clients"]]
        client.tell()
        assert client.end() == 0
    finally:
        subprocess.run([*program, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=True)


MAKER = """
import torch
with pw.connect(socket=sys.argv[1], mps=True) as d:
    with d.create("x", 1000, "int64", "pinned", kept=True) as build:
        torch.from_dlpack(build.on("cuda:0")).fill_(7)
        build.commit()
    say("committed")
    told()
"""

READER = """
import torch
with pw.connect(socket=sys.argv[1], mps=True) as d, d.open("x", access="both") as x:
    view = torch.from_dlpack(x.on("cuda:0"))
    say(int(view.sum()), np.asarray(x).sum())
    told()
    say(int(view.sum()), np.asarray(x).sum())
    del view
"""


# Holds 94.
def test_pinned_memory_of_a_client_is_read_by_others_and_survives_it(socket, child, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    try:
        maker = child(MAKER, socket)
        assert maker.says() == "committed"
        reader = child(READER, socket)
        assert reader.says() == "7000 7000"
        maker.kill()
        late = child(READER, socket)
        assert late.says() == "7000 7000"
        for each in (reader, late):
            each.tell()
            assert each.says() == "7000 7000"
            assert each.end() == 0
    finally:
        program = [PROGRAM, "--socket", socket, "mps", "stop", "--force"]
        subprocess.run(program, capture_output=True, timeout=WATCHDOG, check=True)


def test_process_whose_torch_has_used_the_gpu_is_refused(socket, child, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    late = child(LATE, socket)
    assert late.says() == "mps-too-late"
    assert late.end() == 0
