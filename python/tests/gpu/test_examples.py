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
        (["serve_and_crash.py", "--device", "cuda"], "43 of 43 answers are right"),
        (["two_frameworks.py"], "its last element is 4194303"),
        (["double_buffer.py"], "as it should be: True"),
        (["camera.py"], "second viewer: 20 frames seen, 20 of them as they were sent"),
        (["rl_update.py", "--device", "cuda"], "0 requests saw two versions"),
        (["pipeline.py", "--device", "cuda"], "64 of 64 frames in order, as they should be"),
        (["loader.py"], "64 of 64 batches as they were decoded"),
        (["sleeping_weights.py"], "they are as they were: True"),
        (["own_kernel.py"], "2 everywhere"),
        (["own_kernel.py", "--break"], "2 everywhere"),
    ],
)
def test_an_example_runs(tmp_path, monkeypatch, command, last):
    name, *arguments = command
    said = output(tmp_path, monkeypatch, [sys.executable, EXAMPLES / name, *arguments])
    assert last in said, said
    assert "host memory" not in said, said
    assert said.count(" requests saw two versions") == said.count("; 0 requests saw two versions"), said
    assert ("refused the write" in said) == ("--break" in arguments), said


def test_ranks_on_one_gpu_relax_a_grid_as_one_process_does(tmp_path, monkeypatch, mpirun):
    command = [mpirun, "-n", "4", sys.executable, EXAMPLES / "mpi_halo.py", "--device", "cuda"]
    said = output(tmp_path, monkeypatch, command)
    assert "ranks: 4," in said and "the grid is that of one process: True" in said, said


def output(tmp_path, monkeypatch, command) -> str:
    """Runs an example, and returns what it prints."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    try:
        ran = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3 * WATCHDOG, check=False
        )
    finally:
        subprocess.run([PROGRAM, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout
