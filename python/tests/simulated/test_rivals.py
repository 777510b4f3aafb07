"""Ways to share memory that `benches/peers/table.py` compares, those of a GPU on the simulated driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import WATCHDOG

PEERS = Path(__file__).parents[3] / "benches" / "peers"

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


@pytest.mark.parametrize("way", ["topic", "queue", "pipe"])
def test_messages_come_back(domain, way):
    arguments = [domain.socket] if way == "topic" else []
    (ready, *samples), errors = run("messages.py", way, "100000", *arguments, requests="3\n")
    assert ready == "ready" and len(samples) == 3 and errors == ""


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
    (tmp_path / "wrong.py").write_text(code)
    command = [sys.executable, "-B", str(tmp_path / "wrong.py"), "memfd"]
    environment = {**os.environ, "PYTHONPATH": str(PEERS)}
    ended = subprocess.run(
        command, input="1\n", capture_output=True, text=True, timeout=WATCHDOG, check=False, env=environment
    )
    assert ended.returncode != 0 and "the bytes are" in ended.stderr
