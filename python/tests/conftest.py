"""Brokers and processes for tests."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import partywall as pw
from partywall._program import PROGRAM

WATCHDOG = 60.0
"""Seconds after which a test counts as hanging. No test depends on how long something takes."""


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A private socket for the test. Its broker is stopped at the end of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = str(tmp_path / "sockets" / "test.sock")
    yield path
    subprocess.run([PROGRAM, "--socket", path, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)


@pytest.fixture
def domain(socket: str) -> Iterator[pw.Domain]:
    """A connection to the test's broker."""
    with pw.connect(socket=socket) as connected:
        yield connected


class Child:
    """A child process that runs Python code and exchanges lines with the test."""

    def __init__(self, code: str, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(code), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self._watchdog = threading.Timer(WATCHDOG, self.process.kill)
        self._watchdog.start()

    def says(self) -> str:
        """Returns the next line of its standard output, or an empty string at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str = "") -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Waits until it has ended. Returns its exit code, or minus the signal that ended it."""
        self.process.communicate()
        self._watchdog.cancel()
        return self.process.returncode

    def kill(self) -> None:
        """Kills it if it still runs."""
        self.process.kill()
        self.end()


# A process inherits the signals that its parent blocks or ignores. A shell ignores SIGINT in background processes, and nohup
# ignores SIGHUP. Some tests send SIGINT to this process.
signal.signal(signal.SIGINT, signal.default_int_handler)

PRELUDE = """
import signal
import sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in signal.SIGHUP, signal.SIGTERM:
    signal.signal(number, signal.SIG_DFL)
import numpy as np
import partywall as pw
def say(*words):
    print(*words, flush=True)
def told():
    return sys.stdin.readline().strip()
"""


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts child processes, which are killed at the end of the test."""
    children: list[Child] = []

    def start(code: str, *arguments: str, **environment: str) -> Child:
        children.append(Child(code, *arguments, **environment))
        return children[-1]

    yield start
    for started in children:
        started.kill()
