"""Ways to share memory that programs of `crates/partywall-lab/peers` compare, those of a GPU on the simulated driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import WATCHDOG

PEERS = Path(__file__).parents[3] / "crates" / "partywall-lab" / "peers"

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")


def run(program: str, *arguments: str, requests: str) -> tuple[list[str], str]:
    """What a program prints when it gets these requests, and its errors."""
    command = [sys.executable, "-B", str(PEERS / program), *arguments]
    ended = subprocess.run(command, input=requests, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    return ended.stdout.split(), ended.stderr


@pytest.mark.parametrize("way", ["memfd", "shared_memory", "legacy", "fds", "partywall", "partywall-gpu"])
def test_every_rival_shares_what_was_written(domain, way):
    arguments = [domain.socket] if way.startswith("partywall") else []
    requests = "2 share 4096\n2 open 4096\n1 open 3000000\n2 share 3000000\n"
    (ready, *samples), errors = run("table.py", way, *arguments, requests=requests)
    assert ready == "ready" and len(samples) == 7, errors
    assert all(float(sample) > 0 for sample in samples) and errors == ""


@pytest.mark.parametrize("way", ["legacy", "fds", "partywall-gpu"])
def test_memory_is_used_on_another_gpu(domain, way, monkeypatch):
    monkeypatch.setenv("SIMCUDA_DEVICES", "2")
    arguments = [domain.socket] if way.startswith("partywall") else []
    requests = "2 share 4096\n2 open 4096\n2 copy 4096\n1 copy 3000000\n"
    (ready, *samples), errors = run("table.py", way, *arguments, "1", requests=requests)
    assert ready == "ready" and len(samples) == 7, errors
    assert all(float(sample) > 0 for sample in samples) and errors == ""


def test_copy_of_wrong_bytes_ends_the_program(tmp_path):
    code = (
        "import sys, table, table_cuda\n"
        "class Wrong(table_cuda.Legacy):\n"
        "    def copied(self):\n"
        "        return super().copied() // 2\n"
        "table.WAYS['legacy'] = Wrong\n"
        "if __name__ == '__main__':\n"
        "    table.main()\n"
    )
    assert "the bytes are" in wrong(tmp_path, code, "legacy", "1 copy 4096\n")


@pytest.mark.parametrize("way", ["topic", "queue", "pipe"])
def test_messages_come_back(domain, way):
    arguments = [domain.socket] if way == "topic" else []
    (ready, *samples), errors = run("messages.py", way, "100000", *arguments, requests="3\n")
    assert ready == "ready" and len(samples) == 3 and errors == ""


@pytest.mark.parametrize("way", ["partywall", "tensors", "bucket"])
def test_workers_get_new_weights(domain, way):
    if way != "partywall":
        pytest.importorskip("torch")
    arguments = [domain.socket] if way == "partywall" else []
    requests = "2 step\n1 peak\n1 stranded\n1 step\n"
    (ready, *samples), errors = run("weight_updates.py", way, "host", "2", "20", "40000", *arguments, requests=requests)
    assert ready == "ready" and len(samples) == 5, errors
    assert all(float(samples[step]) > 0 for step in (0, 1, 4)) and errors == ""


def test_weights_of_another_version_end_the_program(domain, tmp_path):
    code = (
        "import numpy as np, weight_updates\n"
        "class Wrong(weight_updates.Partywall):\n"
        "    def take(self, message):\n"
        "        first, *others = super().take(message)\n"
        "        return [np.zeros_like(first), *others]\n"
        "weight_updates.WAYS['partywall'] = Wrong\n"
        "if __name__ == '__main__':\n"
        "    weight_updates.main()\n"
    )
    errors = wrong(tmp_path, code, "partywall", "1 step\n", "host", "2", "20", "40000", domain.socket)
    assert "tensor 0 of version 1 sums up to 0" in errors


def test_wrong_bytes_end_the_program(tmp_path):
    code = (
        "import sys, table, table_host\n"
        "class Wrong(table_host.Memfd):\n"
        "    def whole(self, opened):\n"
        "        return super().whole(opened) // 2\n"
        "table.WAYS['memfd'] = Wrong\n"
        "if __name__ == '__main__':\n"
        "    table.main()\n"
    )
    assert "the bytes are" in wrong(tmp_path, code, "memfd", "1\n")


def wrong(folder: Path, code: str, way: str, requests: str, *arguments: str) -> str:
    """The errors of a program that fails when it gets these requests."""
    (folder / "wrong.py").write_text(code)
    command = [sys.executable, "-B", str(folder / "wrong.py"), way, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PEERS)}
    ended = subprocess.run(
        command, input=requests, capture_output=True, text=True, timeout=WATCHDOG, check=False, env=environment
    )
    assert ended.returncode != 0
    return ended.stderr
