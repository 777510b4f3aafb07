"""`connect(mps=True)`, with a stand-in for NVIDIA's MPS control program."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import partywall as pw
from partywall._program import PROGRAM

from ..conftest import WATCHDOG

STAND_IN = """#!{python}
import os, socket, subprocess, sys
control = os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
def connected():
    client = socket.socket(socket.AF_UNIX)
    client.connect(control)
    return client
if sys.argv[1:] == ["-d"]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(control)
    listener.listen()
    os.set_inheritable(listener.fileno(), True)
    subprocess.Popen([sys.executable, __file__, "daemon", str(listener.fileno())], close_fds=False, start_new_session=True)
elif sys.argv[1:2] == ["daemon"]:
    listener = socket.socket(fileno=int(sys.argv[2]))
    while True:
        client, _ = listener.accept()
        request = client.recv(100).decode().strip()
        if request.startswith("quit"):
            os.unlink(control)
            break
        client.close()
else:
    try:
        client = connected()
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    client.sendall(sys.stdin.readline().encode())
    sys.stdout.write(client.recv(100).decode())
"""


@pytest.fixture
def control(socket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A socket whose domain finds the stand-in. Its daemon is stopped at the end of the test."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    yield socket
    stopped = subprocess.run(
        [PROGRAM, "--socket", socket, "mps", "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False
    )
    assert stopped.returncode == 0, stopped


def held(socket: str) -> tuple[bool, bool]:
    """Returns whether the daemon runs and whether a process holds it."""
    command = [PROGRAM, "--json", "--socket", socket, "mps", "status"]
    status = subprocess.run(command, capture_output=True, timeout=WATCHDOG, check=True).stdout.decode()
    return '"runs":true' in status, '"held":true' in status


JOINS = """
import os, subprocess
with pw.connect(socket=sys.argv[1], mps=True):
    say(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    say(subprocess.run(["sh", "-c", "echo $CUDA_MPS_PIPE_DIRECTORY"], capture_output=True, text=True).stdout.strip())
with pw.connect(socket=sys.argv[1], mps=True):
    say("again")
told()
"""


def test_process_and_its_children_become_clients(control, child):
    started = child(JOINS, control)
    pipes = started.says()
    assert pipes == control.removesuffix(".sock") + ".mps/pipe"
    assert Path(pipes, "control").is_socket()
    assert [started.says(), started.says()] == [pipes, "again"]
    assert held(control) == (True, True), "until the process ends, it may use a GPU"
    started.tell()
    assert started.end() == 0
    assert held(control) == (True, False)


def test_daemon_that_is_named_already_is_used(control, child):
    first = child(JOINS, control)
    pipes = first.says()
    other = child(
        """
        import os
        with pw.connect(socket=sys.argv[1], mps=True):
            say(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        """,
        control + ".other",
        CUDA_MPS_PIPE_DIRECTORY=pipes,
    )
    assert other.says() == pipes
    assert other.end() == 0
    assert not Path(control + ".mps").exists()
    subprocess.run([PROGRAM, "--socket", control + ".other", "stop", "--force"], capture_output=True, check=True)


def test_refusals_say_why(control, monkeypatch):
    with pytest.raises(pw.NotUnderMps, match="no MPS daemon listens at .*test.mps/pipe") as raised:
        pw.connect(socket=control, start=False, mps=True)
    assert raised.value.anchor == "mps-no-daemon" and "partywall run --mps" in raised.value.advice
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    with pytest.raises(pw.NotUnderMps, match="no MPS daemon listens at /nonexistent"):
        pw.connect(socket=control, mps=True)
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent"
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(pw.NotUnderMps, match="there is no such program on PATH"):
        pw.connect(socket=control, mps=True)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(control.removesuffix(".sock") + ".mps").exists()
