"""Brokers and processes for tests."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import partywall as pw
from partywall._program import PROGRAM

WATCHDOG = 120.0
"""Seconds after which a test counts as hanging. No test depends on how long something takes."""


def fork() -> int:
    """Forks, as `os.fork`. Python and jax warn of forks beside threads, and such forks are what the tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A private socket for the test. Its broker is stopped at the end of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Not below `tmp_path`, which is long already: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        path = f"{directory}/sockets/test.sock"
        yield path
        stop = [PROGRAM, "--socket", path, "stop", "--force"]
        subprocess.run(stop, capture_output=True, timeout=WATCHDOG, check=False)


@pytest.fixture
def mpirun(monkeypatch: pytest.MonkeyPatch) -> str:
    """The program that starts ranks of MPI, if it and mpi4py are there."""
    pytest.importorskip("mpi4py")
    # Open MPI refuses to run as root, and more ranks than there are processors; MPICH ignores this.
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    return shutil.which("mpirun") or pytest.skip("there is no mpirun")


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

    def says(self) -> str:
        """Returns the next line of its standard output, or an empty string at the end."""
        assert self.process.stdout is not None
        with self._watched():
            return self.process.stdout.readline().strip()

    def interrupt(self) -> str:
        """Sends SIGINT again and again until it says something, and returns that line. A signal may come before the
        wait that it is to end, and one that follows at once would come while the last one is handled."""
        with self._watched():
            while not select.select([self.process.stdout], [], [], 0.05)[0]:
                self.process.send_signal(signal.SIGINT)
        return self.says()

    def tell(self, line: str = "") -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Waits until it has ended. Returns its exit code, or minus the signal that ended it."""
        with self._watched():
            self.process.communicate()
        return self.process.returncode

    def kill(self) -> None:
        """Kills it if it still runs."""
        self.process.kill()
        self.end()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Kills it if the wait in the body takes too long. How long it lives is the test's affair."""
        watchdog = threading.Timer(WATCHDOG, self.process.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()


def eventually(is_so: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    watchdog = time.monotonic() + WATCHDOG
    while not is_so():
        assert time.monotonic() < watchdog
        time.sleep(0.001)


def await_proof(domain: pw.Domain, pid: int) -> None:
    """Waits until the death of a process is proved. No request of that process has an effect any more."""
    watchdog = time.monotonic() + WATCHDOG
    while pid in [member.pid for member in domain.ps()]:
        assert time.monotonic() < watchdog, f"{pid} is still a member"


# A process inherits the signals that its parent blocks or ignores. A shell ignores SIGINT in background processes, and
# nohup ignores SIGHUP. Some tests send SIGINT to this process.
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

NO_PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def give_up_ptrace():
    # Neither uses ptrace rights nor grants them, as in many containers. The capability is that of this thread and of
    # those that it starts.
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~(1 << 19)  # CAP_SYS_PTRACE
    assert libc.capset(header, sets) == 0
    assert libc.prctl(4, 0) == 0  # PR_SET_DUMPABLE
def may_take_descriptors(pid):
    pidfd = os.pidfd_open(pid)
    taken = libc.syscall(438, pidfd, 0, 0)  # pidfd_getfd
    assert taken >= 0 or ctypes.get_errno() == 1
    os.close(pidfd)
    return taken >= 0
"""
"""Lets a child's code give up its ptrace rights."""


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
