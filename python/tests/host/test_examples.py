"""The examples that need no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(tmp_path, monkeypatch, name: str, *arguments: str) -> list[str]:
    """Runs an example, and returns the lines that it prints."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, EXAMPLES / name, "--device", "host", *arguments]
    try:
        example = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=True)
    finally:
        subprocess.run([PROGRAM, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)
    return example.stdout.splitlines()


def test_weights_survive_their_server(tmp_path, monkeypatch):
    first, second, removed = ran(tmp_path, monkeypatch, "weights_survive.py", "--mib", "16")
    assert first.startswith("first start: ready after") and second.startswith("after SIGKILL: ready after")
    assert first.endswith("64 tensors made") and second.endswith("64 tensors made")
    assert removed.startswith("removed")


def test_two_processes_fill_and_use_two_buffers(tmp_path, monkeypatch):
    assert ran(tmp_path, monkeypatch, "double_buffer.py")[0].endswith("as it should be: True")


def test_queue_outlives_its_worker(tmp_path, monkeypatch):
    assert ran(tmp_path, monkeypatch, "square_roots.py") == ["100 of 100 results are right"]


@pytest.mark.skipif("PARTYWALL_EXAMPLES" not in os.environ, reason="the Rust examples are not built")
@pytest.mark.parametrize("in_rust", ["master", "worker"])
def test_other_end_of_the_queue_is_in_rust(tmp_path, monkeypatch, in_rust):
    in_python = {"master": "worker", "worker": "master"}[in_rust]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    rust = [Path(os.environ["PARTYWALL_EXAMPLES"]) / "square_roots", in_rust]
    with subprocess.Popen(rust, stdout=subprocess.PIPE, text=True) as other:
        said = ran(tmp_path, monkeypatch, "square_roots.py", in_python)
        said += other.communicate(timeout=WATCHDOG)[0].splitlines()
    assert (said, other.returncode) == (["100 of 100 results are right"], 0)


def test_a_viewer_that_is_killed_is_replaced(tmp_path, monkeypatch):
    lines = ran(tmp_path, monkeypatch, "camera.py")
    for line, viewer in zip(lines, ("first", "second"), strict=True):
        assert line.startswith(f"the {viewer} viewer: 20 frames seen, 20 of them as they were sent;")
