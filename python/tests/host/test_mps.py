# Holds 238.
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
    command = [sys.executable, __file__, "daemon", str(listener.fileno())]
    subprocess.Popen(command, close_fds=False, start_new_session=True)
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
    # A daemon of this domain's own could not have sockets here.
    directory = os.path.dirname(control)
    too_long = f"{directory}/{'x' * (100 - len(directory))}.sock"
    other = child(
        """
        import os
        with pw.connect(socket=sys.argv[1], mps=True):
            say(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        """,
        too_long,
        CUDA_MPS_PIPE_DIRECTORY=pipes,
    )
    assert other.says() == pipes
    assert other.end() == 0
    assert not Path(too_long.removesuffix(".sock") + ".mps").exists()
    subprocess.run([PROGRAM, "--socket", too_long, "stop", "--force"], capture_output=True, check=True)


REFUSED = """
import os
def refused(**options):
    try:
        pw.connect(socket=sys.argv[1], mps=True, **options)
    except pw.NotUnderMps as error:
        return error
error = refused(start=False)
say(error)
say(error.anchor)
say(error.advice)
os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"
say(refused())
say(os.environ.pop("CUDA_MPS_PIPE_DIRECTORY"))
os.environ["PATH"] = "/nonexistent"
say(refused())
say("CUDA_MPS_PIPE_DIRECTORY" in os.environ)
"""


def test_refusals_say_why(control, child):
    # In a child, because no process whose earlier tests used a GPU becomes a client any more.
    refused = child(REFUSED, control)
    assert "no MPS daemon listens at" in (said := refused.says()) and "test.mps/pipe" in said
    assert refused.says() == "mps-no-daemon"
    assert "partywall run --mps" in refused.says()
    assert "no MPS daemon listens at /nonexistent" in refused.says()
    assert refused.says() == "/nonexistent"
    assert "there is no such program on PATH" in refused.says()
    assert refused.says() == "False"
    assert refused.end() == 0
    assert not Path(control.removesuffix(".sock") + ".mps").exists()
