"""The parent: it forks workers and spares, and replaces those that die.

Each child has a pipe of its own. A spare reads from it and so sleeps until the parent writes the number of the worker
to become, and how often that was started before. The parent sleeps until a signal arrives: SIGCHLD, or one that ends
it. Nobody polls. The parent never uses CUDA, has one thread of Python and no connection: then each fork of it can use
CUDA and connect by itself.
"""

import atexit
import contextlib
import ctypes
import gc
import logging
import math
import os
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from partywall._errors import WorkerFailed
from partywall.spares._preload import check, end_openmp_threads, preloaded
from partywall.spares._random import begin_streams

WORKER = "PARTYWALL_WORKER"
"""The environment variable with the number of the worker, from 0."""

STARTUP = 1.0
"""Seconds after which a process counts as started. One that ends earlier has ended at once."""

MOST_KILLS = 100
"""How often in a row a process may be killed at once from outside. There is no back-off for that, so it is bounded."""

BACK_OFF = 0.1
"""Seconds before the second start after a failed one. The time doubles with each further failure, up to
`MOST_BACK_OFF`."""

MOST_BACK_OFF = 10.0

MOST_PROCESSES = 1024
"""Workers and spares together. More are a mistake that would take the memory of the machine."""

MOST_DOUBLINGS = 16
"""Longer than the longest back-off, and a power that fits in a float however often something fails."""

LONGEST_POLL = 86400.0
"""Seconds that fit in the argument of poll, whatever the time of grace."""

CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
"""Signals by which a process ends through a fault of its own."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end the parent. It passes them on to the workers first."""

PR_SET_PDEATHSIG = 1

_START = struct.Struct("<IQ")
"""What starts a process: the number of the worker, and how often that was started before."""

_log = logging.getLogger("partywall.spares")


def run(
    main: Callable[..., object],
    *arguments: Any,
    workers: int = 1,
    spares: int = 1,
    preload: Sequence[str] = (),
    attempts: int = 5,
    grace: float = 10.0,
    steady: float = 60.0,
    seed: int | None = None,
) -> None:
    """Calls `main(*arguments)` in a forked process, keeps `spares` more processes ready, and replaces each that dies.

    Imports the modules of `preload` first. Returns once `main` has returned in all `workers`: a worker that returns, or
    ends by `sys.exit(0)`, is not replaced. `PARTYWALL_WORKER` in `os.environ` of a worker is its number, from 0. A
    worker starts with what this process has in memory, and runs `atexit` handlers at its end, so call this first in a
    program.

    Each worker has streams of random numbers of its own in the modules `random`, `numpy.random` and `torch`, also if
    the program has seeded them before; its replacement has others. With a `seed` they are the same in each run: they
    depend on it, on the number of the worker, and on how many starts of this worker went before. Of `numpy` and `torch`
    that holds if they are imported before the first fork, as by `preload`.

    A worker that fails within a second of its start, by an exception or a crash, is started again after 0.1 s, and
    after twice as long each further time, up to 10 s. After `attempts` such failures in a row, this ends all workers
    and raises `WorkerFailed`. One that fails later is replaced immediately, any number of times; if it fails again
    before it has run for `steady` seconds, it is started after 0.1 s, and so on as above, without an end. A run of
    `steady` seconds ends the row; with 0 there is no such wait.

    A worker that another process kills is replaced immediately, up to a hundred times in a row within a second of its
    start, and any number of times later.

    SIGTERM, SIGINT and SIGHUP are passed on to the workers, which have `grace` seconds to end before they are killed;
    then this process gets the signal again, as if it had not been handled. A second signal kills the workers
    immediately. If this process is killed, the kernel kills its workers and spares. Each of these is the leader of a
    process group; the rest of the group is killed when the leader ends, unless this process was killed.

    Raises `CannotPreload`, which names the module, if a module cannot be imported, or has used CUDA, started a thread
    or connected to a domain, none of which a fork survives. Call it in the main thread.
    """
    if not callable(main):
        raise TypeError(f"main is a function, not {type(main).__name__}")
    if isinstance(preload, str):
        raise TypeError(f"preload is a list of names, such as [{preload!r}], not a string")
    if workers < 1 or spares < 0 or attempts < 1 or not (grace >= 0 and steady >= 0):
        raise ValueError("workers and attempts are at least 1, spares, grace and steady at least 0")
    if workers + spares > MOST_PROCESSES:
        asked = f"{workers} workers and {spares} spares"
        raise ValueError(f"each worker and spare is a process, and {asked} are more than {MOST_PROCESSES}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run() handles signals, so it is called in the main thread")
    check("this program")
    preloaded(preload)
    end_openmp_threads()
    parent = _Parent(main, arguments, spares, attempts, grace, steady, seed)
    # Keeps the garbage collector of the children off the memory that they share with the parent.
    gc.collect()
    gc.freeze()
    try:
        ended_by = parent.run(workers)
    finally:
        gc.unfreeze()
    if ended_by is not None:
        signal.raise_signal(ended_by)
        if signal.getsignal(ended_by) == signal.SIG_DFL:
            # The kernel ignores a signal without a handler in process 1 of a container.
            sys.exit(128 + ended_by)


@dataclass(eq=False)
class _Process:
    """A child."""

    pid: int
    starter: int
    """Writing the number of a worker, and of its earlier starts, to this pipe starts it."""
    since: float
    """When it was forked, or started as a worker."""

    def start(self, worker: int, starts: int) -> None:
        """Starts it as a worker, which was started so often before."""
        self.since = time.monotonic()
        # One that has just died is found dead in the next round, as a worker.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.starter, _START.pack(worker, starts))

    def send(self, number: int) -> None:
        """Sends a signal. Its pid is its own until it is reaped."""
        os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kills it and the processes of its group."""
        # It may have left its group.
        for kill in (os.killpg, os.kill):
            # It may have become a process of another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def lived(self) -> float:
        """Returns the seconds since its start."""
        return time.monotonic() - self.since

    def has_ended(self) -> bool:
        """Returns whether it has ended and waits to be reaped."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Reaps it once it has ended. Returns its exit code, or minus the signal that ended it."""
        # Before it is reaped, because afterwards the number of its group may be another's.
        self.kill_group()
        os.close(self.starter)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass
class _Starts:
    """How starting a worker, or the spares, has gone."""

    due: float | None = 0.0
    """When to start; `None` if there is nothing to start."""
    failed: int = 0
    """How often in a row a process has ended before it counted as started."""
    unsteady: int = 0
    """How often a started worker has failed since one ran for long."""
    begun: int = 0
    """How many processes were started."""

    def ended(self, lived: float) -> None:
        """Counts a process that has ended, `lived` seconds after its start."""
        self.failed = self.failed + 1 if lived < STARTUP else 0

    def back_off(self) -> float:
        """Returns the seconds to wait before the next start."""
        # A single failure of a started worker says nothing about the next one.
        failures = max(self.failed, self.unsteady - 1)
        return min(BACK_OFF * 2.0 ** min(failures - 1, MOST_DOUBLINGS), MOST_BACK_OFF) if failures > 0 else 0.0

    def start_in(self, delay: float) -> None:
        """Has the next process start in `delay` seconds."""
        self.due = time.monotonic() + delay

    def is_due(self) -> bool:
        """Returns whether a process is to be started now."""
        return self.due is not None and self.due <= time.monotonic()


@dataclass
class _Parent:
    main: Callable[..., object]
    arguments: tuple[Any, ...]
    wanted: int
    """The number of spares."""
    attempts: int
    grace: float
    steady: float
    seed: int | None = None
    """Decides which random numbers workers draw."""
    spares: list[_Process] = field(default_factory=list)
    workers: dict[int, _Process] = field(default_factory=dict)
    starts: dict[int, _Starts] = field(default_factory=dict)
    """Of each worker."""
    spare_starts: _Starts = field(default_factory=_Starts)
    handlers: dict[int, Any] = field(default_factory=dict)
    """The handlers of signals that this process had before."""
    wakeup: tuple[int, int] = (-1, -1)
    """The pipe to which each signal writes its number."""

    def run(self, workers: int) -> int | None:
        """Runs until all workers have finished, or a signal ends it: that one is returned."""
        self.starts = {worker: _Starts() for worker in range(workers)}
        with self._signals():
            try:
                ended_by = self._supervise()
                self._stop(ended_by or signal.SIGTERM)
                return ended_by
            except WorkerFailed:
                self._stop(signal.SIGTERM)
                raise
            finally:
                for process in self._all():
                    process.kill_group()
                    process.reap()

    def _supervise(self) -> int | None:
        while True:
            self._reap()
            if not self.workers and all(starts.due is None for starts in self.starts.values()):
                return None
            self._start_what_is_due()
            if (number := self._signal(self._until_due())) is not None:
                _log.info("ends by %s", signal.Signals(number).name)
                return number

    def _reap(self) -> None:
        """Finds the children that have ended, and decides when to replace them."""
        for spare in [spare for spare in self.spares if spare.has_ended()]:
            self.spares.remove(spare)
            code = spare.reap()
            self._replace_spare(f"spare {spare.pid} {_described(code)}", spare.lived(), _was_killed(code))
        for worker, process in [(worker, process) for worker, process in self.workers.items() if process.has_ended()]:
            del self.workers[worker]
            code = process.reap()
            if code == 0:
                _log.info("worker %d (%d) has finished", worker, process.pid)
                continue
            lived = process.lived()
            how = f"worker {worker} ({process.pid}) {_described(code)} after {lived:.2f} s"
            self._replace_worker(worker, how, lived, _was_killed(code))
        if os.getpid() == 1:
            self._reap_adopted()

    def _reap_adopted(self) -> None:
        """Reaps the processes that workers have left, which process 1 of a container inherits."""
        own = {process.pid for process in self._all()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def _replace_spare(self, how: str, lived: float, killed: bool) -> None:
        # Never gives up, because the worker serves meanwhile. If something kills spares, a short delay is enough.
        self.spare_starts.ended(lived)
        delay = min(self.spare_starts.back_off(), BACK_OFF if killed else MOST_BACK_OFF)
        self.spare_starts.start_in(delay)
        _log.warning("%s; it is replaced%s", how, f" in {delay:.1f} s" if delay else "")

    def _replace_worker(self, worker: int, how: str, lived: float, killed: bool) -> None:
        starts = self.starts[worker]
        starts.ended(lived)
        if starts.failed >= (MOST_KILLS if killed else self.attempts):
            raise WorkerFailed(
                f"{how}; a start has failed {starts.failed} times in a row",
                "see what it has printed, and call main without spares",
                "worker-failed",
            )
        if lived >= self.steady:
            starts.unsteady = 0
        elif lived >= STARTUP and not killed:
            starts.unsteady += 1
        delay = 0.0 if killed else starts.back_off()
        starts.start_in(delay)
        _log.warning("%s; it is replaced%s", how, f" in {delay:.1f} s" if delay else "")

    def _start_what_is_due(self) -> None:
        for worker in [worker for worker, starts in self.starts.items() if starts.is_due()]:
            try:
                process = self.spares.pop(0) if self.spares else self._fork()
            except OSError as error:
                self._replace_worker(worker, f"worker {worker} cannot be forked: {error}", 0.0, killed=False)
                continue
            self.workers[worker] = process
            starts = self.starts[worker]
            starts.due = None
            process.start(worker, starts.begun)
            starts.begun += 1
            _log.info("worker %d is process %d", worker, process.pid)
        if self.spare_starts.due is not None and not self.spare_starts.is_due():
            return
        self.spare_starts.due = None
        # One in each round: a signal that comes while many are forked is seen at once.
        if len(self.spares) < self.wanted:
            try:
                self.spares.append(self._fork())
            except OSError as error:
                self._replace_spare(f"a spare cannot be forked: {error}", 0.0, killed=False)
            else:
                self.spare_starts.start_in(0.0)

    def _until_due(self) -> float | None:
        """Returns the seconds until something is to be started; `None` if nothing is."""
        due = [starts.due for starts in (*self.starts.values(), self.spare_starts) if starts.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _stop(self, number: int) -> None:
        """Ends all children: workers by a signal, and after the time of grace as spares at once."""
        deadline = time.monotonic() + self.grace
        for spare in self.spares:
            spare.kill_group()
        for process in self.workers.values():
            process.send(number)
        while self._all():
            for process in [process for process in self._all() if process.has_ended()]:
                self._forget(process)
                process.reap()
            left = deadline - time.monotonic()
            if not self._all():
                break
            if left <= 0 or self._signal(left) is not None:
                _log.warning("kills what has not ended: %s", ", ".join(str(process.pid) for process in self._all()))
                break

    def _all(self) -> list[_Process]:
        return [*self.workers.values(), *self.spares]

    def _forget(self, process: _Process) -> None:
        self.spares = [spare for spare in self.spares if spare is not process]
        self.workers = {worker: running for worker, running in self.workers.items() if running is not process}

    def _signal(self, timeout: float | None) -> int | None:
        """Waits for signals, up to `timeout` seconds or for ever. Returns one that ends this process, if it came. May
        return earlier."""
        signals = select.poll()
        signals.register(self.wakeup[0], select.POLLIN)
        if not signals.poll(None if timeout is None else math.ceil(min(timeout, LONGEST_POLL) * 1e3)):
            return None
        came = os.read(self.wakeup[0], 4096)
        return next((number for number in came if number in STOPS), None)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Has signals wake `_signal`."""
        self.wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(self.wakeup[1], warn_on_full_buffer=False)
        try:
            for number in (signal.SIGCHLD, *STOPS):
                # A process that is to ignore a signal, as under nohup, goes on to do so.
                if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                    self.handlers[number] = signal.signal(number, lambda *_: None)
            yield
        finally:
            self._restore_signals(before)

    def _restore_signals(self, wakeup: int) -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in self.handlers.items():
            # None stands for a handler that is not Python's, which cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for fd in self.wakeup:
            os.close(fd)

    def _fork(self) -> _Process:
        """Forks a child that waits until it is started."""
        parent = os.getpid()
        reader, starter = os.pipe()
        _flush()
        # A signal that came before the child has restored the handlers would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, *STOPS])
        try:
            pid = _forked()
            if pid == 0:
                os.close(starter)
                self._be_child(parent, reader, mask)
        except OSError:
            os.close(starter)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(reader)
        # Both sides do this, because either may be first. The parent is late if the child has been killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return _Process(pid, starter, time.monotonic())

    def _be_child(self, parent: int, reader: int, mask: set[Any]) -> NoReturn:
        """What a child does: waits, calls `main`, and ends."""
        code = 1
        try:
            os.setpgid(0, 0)
            _die_with(parent)
            for process in self._all():
                os.close(process.starter)
            self._restore_signals(-1)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            told = os.read(reader, _START.size)
            os.close(reader)
            if told:
                worker, starts = _START.unpack(told)
                os.environ[WORKER] = str(worker)
                begin_streams(self.seed, worker, starts)
                code = _called(self.main, self.arguments)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)


def _forked() -> int:
    """Forks without Python's warning of threads: those of libraries handle a fork, and there are none of Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _called(main: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    """Calls `main`, and returns the exit code of the process, with the handlers of the end run."""
    code = 0
    interrupted = False
    try:
        main(*arguments)
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        interrupted = True
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # As at the end of the interpreter, which os._exit leaves out.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code


def _flush() -> None:
    """Writes what is buffered, which a fork would copy and `os._exit` would drop."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have ended before.
    if os.getppid() != parent:
        os._exit(1)


def _was_killed(code: int) -> bool:
    """Returns whether a process was ended from outside, rather than by a fault of its own."""
    return code < 0 and -code not in CRASHES


def _described(code: int) -> str:
    """Returns how a process has ended, for a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
