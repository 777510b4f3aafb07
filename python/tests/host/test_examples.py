"""The examples that need no GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(
    tmp_path, monkeypatch, name: str, *arguments: str, device: str | None = "host", by: Sequence[str] = ()
) -> list[str]:
    """Runs an example, `by` a launcher if one is given, and returns the lines that it prints."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [*by, sys.executable, EXAMPLES / name, *(["--device", device] if device else []), *arguments]
    try:
        example = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    finally:
        subprocess.run([PROGRAM, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)
    assert example.returncode == 0, example.stderr
    return example.stdout.splitlines()


def test_weights_survive_their_server(tmp_path, monkeypatch):
    first, second, removed = ran(tmp_path, monkeypatch, "weights_survive.py", "--mib", "16")
    assert first.startswith("first start: ready after") and second.startswith("after SIGKILL: ready after")
    assert first.endswith("64 tensors made") and second.endswith("64 tensors made")
    assert removed.startswith("removed")


@pytest.mark.parametrize("device", ["host", None])
def test_two_processes_fill_and_use_two_buffers(tmp_path, monkeypatch, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ran(tmp_path, monkeypatch, "double_buffer.py", device=device)[0].endswith("as it should be: True")


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


@pytest.mark.parametrize("device", ["host", "pinned"])
def test_trainer_receives_what_four_workers_decode(tmp_path, monkeypatch, device):
    *said, last = ran(tmp_path, monkeypatch, "loader.py", "--batches", "6", device=device)
    assert last.startswith("6 of 6 batches as they were decoded") and last.endswith("(host)")
    assert [line for line in said if "host memory" not in line] == []
    assert len(said) == (device == "pinned"), "without a GPU it says so"


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_weights_sleep_and_another_process_wakes_them(tmp_path, monkeypatch, device):
    lines = ran(tmp_path, monkeypatch, "sleeping_weights.py", "--mib", "16", device=device)
    *said, asleep, awake, right, removed = lines
    assert asleep.startswith("first process: asleep after") and awake.startswith("awake after")
    assert right == "they are as they were: True" and removed == "removed; 0 bytes stay with others"
    assert ("sleep and wake in host memory" in "".join(said)) == (device == "cuda"), "without a GPU it says so"


def test_server_that_cannot_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, EXAMPLES / "serve_and_crash.py", "--device", "nonsense"]
    example = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert example.returncode == 1 and "is not a device" in example.stderr
    assert example.stderr.splitlines()[-1] == "the server has ended with exit code 1: above it says why"


@pytest.mark.parametrize("device", ["host", None])
def test_a_viewer_that_is_killed_is_replaced(tmp_path, monkeypatch, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = ran(tmp_path, monkeypatch, "camera.py", device=device)
    for line, viewer in zip(lines, ("first", "second"), strict=True):
        assert line.startswith(f"the {viewer} viewer: 20 frames seen, 20 of them as they were sent;")


# Holds 286.
def test_requests_are_answered_after_each_death_of_the_worker(tmp_path, monkeypatch):
    *killed, right = ran(tmp_path, monkeypatch, "serve_and_crash.py")
    assert len(killed) == 3 and all("killed: the next answer came after" in line for line in killed)
    assert right == "43 of 43 answers are right"


# Holds 4.
def test_workers_take_new_versions_and_no_request_sees_two(tmp_path, monkeypatch):
    updates, *workers = ran(tmp_path, monkeypatch, "rl_update.py", "--steps", "10")
    assert updates.startswith("10 updates of 32 MiB: ")
    assert len(workers) == 4 and all(line.endswith("; 0 requests saw two versions") for line in workers), workers


def test_killed_middle_stage_of_a_pipeline_loses_no_frame(tmp_path, monkeypatch):
    *killed, last = ran(tmp_path, monkeypatch, "pipeline.py")
    assert killed == [f"the middle stage was killed before frame {number}" for number in (16, 32)]
    assert last == "64 of 64 frames in order, as they should be (host)"


# Holds 299.
def test_ranks_relax_a_grid_as_one_process_does(tmp_path, monkeypatch, mpirun):
    steps, same = ran(tmp_path, monkeypatch, "mpi_halo.py", by=[mpirun, "-n", "4"])
    assert steps.startswith("ranks: 4, steps: 200, ") and steps.endswith("(host)")
    assert same == "the grid is that of one process: True"


def test_missing_mpi_is_named_with_what_to_install():
    code = "import runpy, sys; sys.modules['mpi4py'] = None; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", code, EXAMPLES / "mpi_halo.py"]
    example = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert example.returncode == 1 and "`pip install mpi4py mpich`" in example.stderr
