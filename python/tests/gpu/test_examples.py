"""The examples on a real GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "last"),
    [
        (["weights_survive.py", "--device", "cuda"], "removed"),
        (["two_frameworks.py"], "its last element is 4194303"),
        (["double_buffer.py"], "as it should be: True"),
        (["camera.py"], "second viewer: 20 frames seen, 20 of them as they were sent"),
        (["own_kernel.py"], "2 everywhere"),
        (["own_kernel.py", "--break"], "2 everywhere"),
    ],
)
def test_an_example_runs(tmp_path, monkeypatch, command, last):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    name, *arguments = command
    try:
        ran = subprocess.run(
            [sys.executable, EXAMPLES / name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3 * WATCHDOG,
            check=False,
        )
    finally:
        subprocess.run([PROGRAM, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)
    assert ran.returncode == 0, ran.stdout
    assert last in ran.stdout, ran.stdout
    assert ("refused the write" in ran.stdout) == ("--break" in arguments), ran.stdout
