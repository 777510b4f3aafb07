"""Warm spares: who replaces a worker that dies, and that nothing is left behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import partywall as pw
from partywall import spares
from partywall.spares import _parent

from ..conftest import WATCHDOG, Child
from .test_errors import assert_quoted

# A worker says its pid, and then serves until a signal ends it. One write a line, because several workers may write.
SERVES = """
import os, time
from partywall import spares
def main(*arguments):
    os.write(1, (" ".join(map(str, [os.getpid(), *arguments])) + "\\n").encode())
    time.sleep(1000)
"""


def children(pid: int) -> list[int]:
    """The children of a process that have not ended."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(pid) for pid in pids if not has_ended(pid)]


def has_ended(pid: str) -> bool:
    """Whether a process has ended, and may wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + WATCHDOG
    while not holds():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.01)


def ready(parent: int, worker: int, spares: int) -> list[int]:
    """Waits until so many spares are ready, and returns their pids."""
    until(lambda: len(children(parent)) == spares + 1)
    return [pid for pid in children(parent) if pid != worker]


class Ends:
    """Processes whose end a test waits for."""

    def __init__(self, *pids: int) -> None:
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def wait(self) -> None:
        for fd in self._fds:
            assert select.select([fd], [], [], WATCHDOG)[0], "a process is left"
            os.close(fd)


def kill(*pids: int) -> None:
    """Kills processes, and waits until they have ended."""
    ends = Ends(*pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ends.wait()


# Holds 286.
def test_killed_workers_are_replaced_by_spares_and_find_the_weights(socket, child):
    launcher = child(
        """
        import os, time
        from partywall import spares
        def main(name):
            with pw.connect(socket=sys.argv[1]) as d:
                weights = d.open_or_build(name, lambda claim: claim.put(np.arange(5.0), "host", kept=True))
                say(os.getpid(), weights.version, np.asarray(weights).sum())
                time.sleep(1000)
        spares.run(main, "w", spares=2)
        """,
        socket,
    )
    spares_of_last: list[int] = []
    for turn in range(20):
        worker, version, total = launcher.says().split()
        assert (version, total) == ("1", "10.0")
        assert turn == 0 or int(worker) in spares_of_last
        spares_of_last = ready(launcher.process.pid, int(worker), 2)
        kill(int(worker))
    last = int(launcher.says().split()[0])
    # No spare has the connection of a worker, so their deaths are proved.
    with pw.connect(socket=socket) as d:
        until(lambda: {member.pid for member in d.ps()} == {os.getpid(), last})


# A worker says its number and its pid, and draws twice from each module.
DRAWS = """
import os, random, time
from partywall import spares
import numpy, numpy.random
try:
    import torch
except ImportError:
    torch = None
def draw():
    numbers = [random.randrange(10**9), numpy.random.randint(10**9)]
    return numbers + ([] if torch is None else [int(torch.randint(10**9, ()))])
def main():
    numbers = draw() + draw()
    os.write(1, (" ".join(map(str, [os.environ["PARTYWALL_WORKER"], os.getpid(), *numbers])) + "\\n").encode())
    time.sleep(1000)
random.seed(1)
numpy.random.seed(1)
if torch is not None:
    torch.manual_seed(1)
"""


def drawn(launcher: Child, workers: int) -> list[str]:
    """What each start of the workers draws, twice, in their order. The first starts are killed."""
    lines = []
    for turn in range(2):
        rows = sorted(launcher.says().split() for _ in range(workers))
        lines += [" ".join(numbers) for _, _, *numbers in rows]
        if turn == 0:
            kill(*(int(pid) for _, pid, *_ in rows))
    return lines


def are_distinct(lines: list[str]) -> bool:
    """Whether no number was drawn twice."""
    numbers = " ".join(lines).split()
    return len(numbers) >= 4 * len(lines) and len(set(numbers)) == len(numbers)


# Holds 290.
def test_workers_and_their_replacements_draw_numbers_of_their_own(child):
    launchers = [child(DRAWS + "spares.run(main, workers=3, spares=2)") for _ in range(2)]
    assert are_distinct([line for launcher in launchers for line in drawn(launcher, 3)])


# Holds 290.
@pytest.mark.parametrize("generator", ["MT19937", "PCG64"])
def test_seed_repeats_what_workers_draw(child, generator):
    code = DRAWS + f"numpy.random.set_bit_generator(numpy.random.{generator}(1))\n"
    one, again, other = (drawn(child(code + f"spares.run(main, workers=2, seed={seed})"), 2) for seed in (7, 7, 8))
    assert one == again
    assert are_distinct(one + other)


# Holds 286.
def test_spares_that_die_are_replaced_and_the_worker_stays(child):
    launcher = child(SERVES + "spares.run(main, spares=3)")
    worker = int(launcher.says())
    for _ in range(5):
        kill(*ready(launcher.process.pid, worker, 3))
    assert worker not in ready(launcher.process.pid, worker, 3)
    assert worker in children(launcher.process.pid)


# Holds 286.
def test_spare_that_dies_while_it_is_started_is_replaced(child):
    launcher = child(SERVES + "spares.run(main, spares=1)")
    worker = int(launcher.says())
    for _ in range(5):
        [spare] = ready(launcher.process.pid, worker, 1)
        # Stopped, it cannot start when it is told to.
        os.kill(spare, signal.SIGSTOP)
        kill(worker)
        [next_spare] = ready(launcher.process.pid, spare, 1)
        kill(spare)
        worker = int(launcher.says())
        assert worker == next_spare


# Holds 286.
def test_all_children_killed_at_once_are_replaced(child):
    launcher = child(SERVES + "spares.run(main, spares=2)")
    worker = int(launcher.says())
    for _ in range(5):
        kill(*ready(launcher.process.pid, worker, 2), worker)
        last, worker = worker, int(launcher.says())
        assert worker != last


# Holds 286.
def test_without_spares_a_worker_is_forked_when_one_dies(child):
    launcher = child(SERVES + "spares.run(main, 'a', 2, spares=0)")
    for _ in range(3):
        worker, *arguments = launcher.says().split()
        assert arguments == ["a", "2"] and children(launcher.process.pid) == [int(worker)]
        kill(int(worker))


# Holds 287.
def test_children_of_a_killed_parent_are_killed(child):
    code = SERVES + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nspares.run(main, spares=3, workers=2)"
    for _ in range(5):
        launcher = child(code)
        workers = {int(launcher.says()), int(launcher.says())}
        until(lambda: len(children(launcher.process.pid)) == 5)
        assert workers < set(children(launcher.process.pid))
        ends = Ends(*children(launcher.process.pid))
        launcher.process.kill()
        ends.wait()


# Holds 287.
def test_parent_that_is_killed_while_it_forks_leaves_nothing(child):
    for turn in range(10):
        launcher = child(
            """
            import os
            from partywall import spares
            from partywall.spares import _parent
            _parent.MOST_KILLS = 10**6
            def main():
                os.write(1, b"started\\n")
                os.kill(os.getpid(), signal.SIGKILL)
            spares.run(main, spares=2)
            """
        )
        for _ in range(turn + 1):
            assert launcher.says() == "started"
        launcher.process.kill()
        # Every child has the pipe as its standard output, so it ends with the last of them.
        while True:
            assert select.select([launcher.process.stdout], [], [], WATCHDOG)[0], "a process is left"
            if not os.read(launcher.process.stdout.fileno(), 4096):
                break


# Holds 287.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_parent_ends_workers_in_order(child, number):
    launcher = child(
        """
        import atexit, os, time
        from partywall import spares
        def main():
            signal.signal(int(sys.argv[1]), lambda *_: sys.exit(3))
            atexit.register(say, "at exit")
            try:
                say(os.getpid())
                while True:  # A signal that comes just before a sleep does not end it.
                    time.sleep(0.1)
            finally:
                say("ending")
        spares.run(main, spares=2)
        say("never")
        """,
        str(int(number)),
    )
    worker = int(launcher.says())
    ends = Ends(worker, *ready(launcher.process.pid, worker, 2))
    launcher.process.send_signal(number)
    assert [launcher.says(), launcher.says(), launcher.says()] == ["ending", "at exit", ""]
    assert launcher.end() == -number
    ends.wait()


def test_a_signal_is_seen_while_spares_are_forked(child):
    launcher = child(
        """
        import time
        from partywall import spares
        from partywall.spares import _parent
        forked = 0
        def fork(parent, original=_parent._Parent._fork):
            global forked
            forked += 1
            if forked == 3:
                signal.raise_signal(signal.SIGTERM)
            say(forked)
            return original(parent)
        _parent._Parent._fork = fork
        spares.run(time.sleep, 1000, spares=9)
        """
    )
    assert [launcher.says() for _ in range(4)] == ["1", "2", "3", ""]
    assert launcher.end() == -signal.SIGTERM


# Holds 287.
def test_workers_that_do_not_end_are_killed_after_the_grace_or_by_a_second_signal(child):
    code = SERVES.replace("os.write", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    os.write")
    for grace, signals in (0.1, 1), (1e9, 2):
        launcher = child(code + f"spares.run(main, grace={grace})")
        worker = int(launcher.says())
        [spare] = ready(launcher.process.pid, worker, 1)
        ends, stopped = Ends(worker), Ends(spare)
        launcher.process.terminate()
        stopped.wait()
        if signals == 2:
            launcher.process.terminate()
        assert launcher.end() == -signal.SIGTERM
        ends.wait()


# Holds 288.
@pytest.mark.parametrize(
    ("fails", "how"),
    [
        ("raise ValueError('no weights')", "ended with exit code 1"),
        ("sys.exit(7)", "ended with exit code 7"),
        ("os.abort()", "was ended by SIGABRT"),
    ],
)
def test_worker_that_always_fails_is_given_up(child, fails, how):
    launcher = child(
        f"""
        import faulthandler, os
        from partywall import spares
        faulthandler.disable()
        def main():
            say("started")
            {fails}
        try:
            spares.run(main, attempts=3)
        except pw.WorkerFailed as error:
            say(error)
        """
    )
    assert [launcher.says() for _ in range(3)] == ["started"] * 3
    said = launcher.says()
    assert_quoted(pw.WorkerFailed(said, anchor="worker-failed"))
    assert said.startswith("worker 0 (") and f"{how} after " in said and "3 times in a row" in said
    assert launcher.says() == "" and launcher.end() == 0


# Holds 288.
def test_worker_that_is_killed_at_once_is_given_up_too(child):
    launcher = child(
        """
        import os
        from partywall import spares
        from partywall.spares import _parent
        _parent.MOST_KILLS = 7
        def main():
            say("started")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            spares.run(main)
        except pw.WorkerFailed as error:
            say(error)
        """
    )
    assert [launcher.says() for _ in range(7)] == ["started"] * 7
    assert "was ended by SIGKILL" in launcher.says()


# Holds 288.
def test_worker_that_keeps_failing_later_is_started_after_a_longer_time_each_time(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(_parent, "time", SimpleNamespace(monotonic=lambda: now))
    parent = _parent._Parent(print, (), wanted=0, attempts=5, grace=10.0, steady=60.0)
    parent.starts = {0: _parent._Starts()}

    def delays(lived: float, times: int, killed: bool = False) -> list[float]:
        found = []
        for _ in range(times):
            parent._replace_worker(0, "worker 0 ended", lived, killed)
            found.append(round(parent.starts[0].due - now, 3))
        return found

    longer = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert delays(5.0, 10) == longer
    assert "worker 0 ended; it is replaced in 6.4 s" in caplog.messages
    # It does not end, and no number of failures is too large for the arithmetic.
    assert set(delays(59.9, 2000)) == {10.0}
    # A kill from outside says nothing about the worker; a long run ends the row, whatever ended it.
    assert delays(5.0, 3, killed=True) == [0.0] * 3
    assert delays(60.0, 1, killed=True) == [0.0]
    assert delays(5.0, 3) == longer[:3]
    assert delays(60.0, 3) == [0.0] * 3
    # One that fails at once is given up as before.
    assert delays(0.5, 4) == [0.1, 0.2, 0.4, 0.8]
    with pytest.raises(pw.WorkerFailed):
        delays(0.5, 1)


def test_spare_that_never_starts_is_forked_again_for_ever():
    starts = _parent._Starts(failed=100_000)
    assert starts.back_off() == _parent.MOST_BACK_OFF


# Holds 288.
def test_row_of_later_failures_is_logged_and_goes_on(child):
    launcher = child(
        """
        import logging, os
        from partywall import spares
        from partywall.spares import _parent
        _parent.STARTUP = 0.0
        logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
        reader, writer = os.pipe()
        os.write(writer, b"xxx!")
        def main():
            if os.read(reader, 1) == b"x":
                sys.exit(3)
        spares.run(main, attempts=1, steady=1000)
        say("finished")
        """
    )
    said = [launcher.says() for _ in range(3)]
    assert all("ended with exit code 3" in line for line in said)
    assert [line.rpartition("; ")[2] for line in said] == [
        "it is replaced",
        "it is replaced in 0.1 s",
        "it is replaced in 0.2 s",
    ]
    assert launcher.says() == "finished" and launcher.end() == 0


def test_run_returns_once_all_workers_have_finished(child):
    launcher = child(
        """
        import os
        from partywall import spares
        def main():
            os.write(1, (os.environ["PARTYWALL_WORKER"] + "\\n").encode())
            sys.exit(0) if os.environ["PARTYWALL_WORKER"] == "1" else None
        spares.run(main, workers=3)
        say("finished", os.environ.get("PARTYWALL_WORKER"))
        """
    )
    assert sorted(launcher.says() for _ in range(3)) == ["0", "1", "2"]
    assert launcher.says() == "finished None" and launcher.end() == 0


# Holds 287.
def test_processes_of_a_worker_end_with_it(child):
    launcher = child(
        """
        import os, subprocess, time
        from partywall import spares
        def main():
            say(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid)
            time.sleep(1000)
        spares.run(main)
        """
    )
    for end in (lambda worker: os.kill(worker, signal.SIGKILL), lambda _: launcher.process.terminate()):
        worker, process = map(int, launcher.says().split())
        ends = Ends(process)
        end(worker)
        ends.wait()


# Holds 287.
def test_worker_that_left_its_group_and_ignores_signals_is_killed(child):
    launcher = child(
        """
        import os, time
        from partywall import spares
        def main():
            os.setpgid(0, os.getpgid(os.getppid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say(os.getpid())
            time.sleep(1000)
        spares.run(main, grace=0.1)
        """
    )
    ends = Ends(int(launcher.says()))
    launcher.process.terminate()
    ends.wait()
    assert launcher.end() == -signal.SIGTERM


# Holds 289.
def test_workers_compute_in_parallel_also_if_the_parent_has(child):
    pytest.importorskip("torch")
    launcher = child(
        """
        import torch
        from partywall import spares
        def main():
            say(float(torch.ones(1_000_000).add(1).sum()))
        torch.ones(1_000_000).add(1)
        spares.run(main)
        say("finished")
        """,
        OMP_NUM_THREADS="2",
    )
    assert launcher.says() == "2000000.0"
    assert launcher.says() == "finished" and launcher.end() == 0


# Holds 287.
def test_process_1_of_a_container_reaps_what_workers_leave_and_ends_by_its_signal(tmp_path, child):
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no PID namespace can be made here")
    (tmp_path / "served.py").write_text(
        "import os, subprocess, time\n"
        "def main():\n"
        "    subprocess.Popen(['sleep', '1000'])\n"
        "    print('up', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    outer = child(
        """
        import os
        os.chdir(sys.argv[1])
        os.execvp(sys.argv[2], [*sys.argv[2:], sys.executable, "-m", "partywall.spares", "served"])
        """,
        str(tmp_path),
        *namespace,
    )
    for _ in range(3):
        assert outer.says() == "up"
        [parent] = children(outer.process.pid)
        # Without the processes of earlier workers, dead or alive, which are its own children now.
        until(lambda: len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()) == 2)
        kill(next(pid for pid in children(parent) if children(pid)))
    assert outer.says() == "up"
    os.kill(parent, signal.SIGTERM)
    assert outer.end() == 128 + signal.SIGTERM


def test_parent_that_uses_what_forks_cannot_have_is_refused(domain):
    with pytest.raises(pw.CannotPreload, match="cannot preload: this program has connected to the domain at") as raised:
        spares.run(print)
    assert_quoted(raised.value)


# Holds 289.
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such", "cannot preload preloaded_here: ModuleNotFoundError: No module named 'no_such'"),
        ("raise SystemExit(3)", "cannot preload preloaded_here: SystemExit: 3"),
        ("1 / 0", "cannot preload preloaded_here: ZeroDivisionError: division by zero"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, name='ticker', daemon=True).start()",
            "cannot preload: preloaded_here has started the thread ticker: forks do not have it",
        ),
        (
            "import partywall as pw, sys\nd = pw.connect(socket=sys.argv[2])",
            "cannot preload: preloaded_here has connected to the domain at",
        ),
    ],
)
def test_module_that_cannot_be_preloaded_is_named(socket, child, tmp_path, source, why):
    (tmp_path / "preloaded_here.py").write_text(source)
    launcher = child(
        """
        from partywall import spares
        sys.path.insert(0, sys.argv[1])
        try:
            spares.run(say, "never", preload=["json", "preloaded_here"])
        except pw.CannotPreload as error:
            say(error)
        """,
        str(tmp_path),
        socket,
    )
    assert why in launcher.says()


# Holds 289.
def test_parent_has_what_it_preloads(child):
    launcher = child(
        """
        import time
        from partywall import spares
        def main():
            say("colorsys" in sys.modules)
            time.sleep(1000)
        spares.run(main, preload=["colorsys"])
        """
    )
    assert launcher.says() == "True"


def test_bad_arguments_are_refused():
    for arguments, error in [
        ({"main": "main"}, TypeError),
        ({"main": print, "preload": "torch"}, TypeError),
        ({"main": print, "workers": 0}, ValueError),
        ({"main": print, "spares": -1}, ValueError),
        ({"main": print, "spares": 1 << 20}, ValueError),
        ({"main": print, "attempts": 0}, ValueError),
        ({"main": print, "grace": -1.0}, ValueError),
        ({"main": print, "grace": float("nan")}, ValueError),
    ]:
        with pytest.raises(error):
            spares.run(**arguments)


@pytest.fixture
def command(tmp_path):
    """Runs the command with a file as its target."""

    def ran(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "served.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-m", "partywall.spares", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WATCHDOG,
            check=False,
        )

    return ran


# Holds 290.
def test_command_takes_a_seed(command):
    source = "import random\ndef main(): print(random.random())\n"
    one, again, other = (command("--seed", seed, "served.py", source=source) for seed in ("7", "7", "-8"))
    assert one.returncode == 0, one.stderr
    assert one.stdout == again.stdout != other.stdout


@pytest.mark.parametrize("target", ["served.py", "served.py:main", "served:main", "served"])
def test_command_calls_a_function_of_a_module_or_file(command, target):
    source = "import sys\ndef main(*words):\n    print(*words, sys.argv, flush=True)\n"
    ran = command("--spares", "2", "--preload", "json,colorsys", target, "policy", "--spares", "7", source=source)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"policy --spares 7 {[target.partition(':')[0], 'policy', '--spares', '7']}\n"
    assert "worker 0 is process" in ran.stderr and "has finished" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--preload", "no_such", "served.py"], 1, "error: cannot preload no_such: ModuleNotFoundError"),
        (["served.py:nothing"], 1, "error: cannot call served.py:nothing: served.py has no function nothing"),
        (["absent.py"], 1, "error: cannot preload absent.py: FileNotFoundError: there is no file absent.py"),
        (["--attempts", "2", "served.py"], 1, "error: worker 0 ("),
        (["--workers", "0", "served.py"], 2, "--workers and --attempts are at least 1"),
        (["--steady", "-1", "served.py"], 2, "--grace and --steady at least 0"),
        (["--spares", "100000", "served.py"], 2, "at most 1024 together"),
        ([], 2, "TARGET"),
    ],
)
def test_command_says_why_it_fails(command, arguments, code, said):
    ran = command(*arguments, source="def main():\n    raise ValueError\n")
    assert ran.returncode == code and said in ran.stderr, ran.stderr


# Holds 287.
def test_command_is_ended_by_its_signal(tmp_path, child):
    (tmp_path / "served.py").write_text("import time\ndef main():\n    print('up', flush=True)\n    time.sleep(1000)\n")
    for number in signal.SIGINT, signal.SIGTERM:
        launcher = child(
            """
            import os
            os.chdir(sys.argv[1])
            os.execv(sys.executable, [sys.executable, "-m", "partywall.spares", "served"])
            """,
            str(tmp_path),
        )
        assert launcher.says() == "up"
        ends = Ends(*children(launcher.process.pid))
        launcher.process.send_signal(number)
        assert launcher.end() == -number
        ends.wait()
