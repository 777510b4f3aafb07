"""Threads of the package that run Python."""

import signal
import threading
from collections.abc import Callable

from partywall._errors import LimitReached


def start(name: str, run: Callable[[], None]) -> None:
    """Starts a daemon thread that blocks all signals, as the compiled threads do: it would otherwise get those that a
    program blocks in order to take them with `signal.sigwait`."""
    # The thread inherits the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise LimitReached(
            f"cannot start the thread {name}: no further thread or process is allowed here",
            "end threads or processes, or raise the limit: `ulimit -u` of the user, the container's limit of pids, "
            "TasksMax= of systemd",
            "no-process",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
