"""`python -m partywall.spares`."""

import argparse
import logging
import signal
import sys
import traceback

from partywall import spares
from partywall._errors import CannotPreload, WorkerFailed
from partywall.spares import _preload
from partywall.spares._parent import MOST_PROCESSES

EPILOG = """\
TARGET is MODULE:FUNCTION or FILE.py:FUNCTION; the function is main if none is named. It is imported before anything is
forked, so what it imports is preloaded too. The arguments are passed to the function as strings. A worker that returns
is finished; one that dies is replaced by a spare immediately, or after a longer time each time if it fails again and
again. Exit code: 0 once all workers have finished, 1 if something cannot be preloaded or a worker cannot be started,
otherwise the signal that ended this process.
"""


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m partywall.spares",
        description="Calls a function in a worker, and keeps processes ready that continue if the worker dies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--spares", type=int, default=1, metavar="N", help="processes that are kept ready (default 1)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that call it (default 1)")
    parser.add_argument("--preload", default="", metavar="MODULE,…", help="modules to import first")
    parser.add_argument("--attempts", type=int, default=5, metavar="N", help="failed starts in a row (default 5)")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="for workers to end (default 10)")
    parser.add_argument(
        "--steady", type=float, default=60.0, metavar="SECONDS", help="run that ends a row of failures (default 60)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="for the same random numbers in each run")
    parser.add_argument("target", metavar="TARGET", help="the function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its arguments")
    given = parser.parse_args()
    if given.workers < 1 or given.spares < 0 or given.attempts < 1 or not (given.grace >= 0 and given.steady >= 0):
        parser.error("--workers and --attempts are at least 1, --spares, --grace and --steady at least 0")
    if given.workers + given.spares > MOST_PROCESSES:
        parser.error(f"--workers and --spares are at most {MOST_PROCESSES} together: each is a process")
    return given


def main() -> int:
    given = _parsed()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    # A target that parses its command line sees its own.
    sys.argv = [given.target.partition(":")[0], *given.arguments]
    try:
        _preload.preloaded(module for module in given.preload.split(",") if module)
        spares.run(
            _preload.function(given.target),
            *given.arguments,
            workers=given.workers,
            spares=given.spares,
            attempts=given.attempts,
            grace=given.grace,
            steady=given.steady,
            seed=given.seed,
        )
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except (CannotPreload, WorkerFailed) as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
