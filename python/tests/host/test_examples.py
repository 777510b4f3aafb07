"""The examples that need no GPU."""

import subprocess
import sys
from pathlib import Path

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_weights_survive_their_server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, EXAMPLES / "weights_survive.py", "--device", "host", "--mib", "16"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=True)
    finally:
        subprocess.run([PROGRAM, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)
    first, second, removed = ran.stdout.splitlines()
    assert first.startswith("first start: ready after") and second.startswith("after SIGKILL: ready after")
    assert first.endswith("64 tensors made") and second.endswith("64 tensors made")
    assert removed.startswith("removed")
