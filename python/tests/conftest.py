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
"""Seconds after which a test is stuck. No test depends on how long something takes."""


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A socket of the test's own, whose broker ends with it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = str(tmp_path / "sockets" / "test.sock")
    yield path
    subprocess.run([PROGRAM, "--socket", path, "stop", "--force"], capture_output=True, timeout=WATCHDOG, check=False)


@pytest.fixture
def domain(socket: str) -> Iterator[pw.Domain]:
    """A connection."""
    with pw.connect(socket=socket) as connected:
        yield connected


class Child:
    """Another process, which runs Python code: it says lines, and is told some."""

    def __init__(self, code: str, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(code), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self._watchdog = threading.Timer(WATCHDOG, self.process.kill)
        self._watchdog.start()

    def says(self) -> str:
        """The next line; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str = "") -> None:
        """Gives it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Waits for its end: its exit code, or minus the signal that ended it."""
        self.process.communicate()
        self._watchdog.cancel()
        return self.process.returncode

    def kill(self) -> None:
        """Kills it, if it still runs."""
        self.process.kill()
        self.end()


# A process inherits the signals that its parent blocks or ignores. A shell ignores SIGINT in what it starts in the
# background, and nohup ignores SIGHUP. Some tests send SIGINT to this process.
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
    """Starts other processes, which end with the test."""
    children: list[Child] = []

    def start(code: str, *arguments: str, **environment: str) -> Child:
        children.append(Child(code, *arguments, **environment))
        return children[-1]

    yield start
    for started in children:
        started.kill()
