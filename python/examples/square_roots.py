"""A master and workers on one queue: arrays go in, square roots come out. No task is lost if a worker dies.

    python square_roots.py                    # a master that starts two workers, and kills one
    python square_roots.py master             # in one terminal, with workers in other terminals:
    python square_roots.py worker             # or `cargo run -p partywall --example square_roots -- worker`

Either side may also be the program in Rust (`crates/partywall/examples/square_roots.rs`). All blocks are in host
memory.
"""

import argparse
import subprocess
import sys

import numpy as np

import partywall as pw

NAME = "examples/square_roots"
TASKS = 100
NUMBERS = 1024
TIMEOUT = 60


def opened(domain: pw.Domain) -> pw.Queue:
    """Opens or creates the queue. Both sides call this, so either side may start first."""
    size = (64, NUMBERS * 4)
    return domain.queue(NAME, tasks=64, inputs=size, outputs=size, device="host")


def master(queue: pw.Queue) -> int:
    """Submits all tasks, and counts the right results."""
    right = 0
    # Submits no more tasks at a time than there are blocks.
    for first in range(0, TASKS, 32):
        tickets = {
            number: queue.submit("sqrt", [np.full(NUMBERS, number**2, "float32")], output=NUMBERS * 4, timeout=TIMEOUT)
            for number in range(first, min(first + 32, TASKS))
        }
        for number, ticket in tickets.items():
            with ticket.result(TIMEOUT) as result:
                right += bool((np.asarray(result.tensor(dtype="float32")) == number).all())
    return right


def worker(queue: pw.Queue) -> None:
    """Computes square roots until a task of kind `last` arrives."""
    for task in queue.claims(TIMEOUT):
        if task.kind == "last":
            task.complete()
            break
        if task.kind != "sqrt":
            raise ValueError(f"no worker knows {task.kind!r}")
        numbers = np.asarray(task.inputs[0].tensor(dtype="float32"))
        np.sqrt(numbers, out=np.asarray(task.output.tensor(dtype="float32")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", nargs="?", choices=("master", "worker"))
    parser.add_argument("--device", choices=("host",), default="host", help="where the arrays are")
    role = parser.parse_args().role
    with pw.connect() as domain, opened(domain) as queue:
        if role == "worker":
            worker(queue)
            return
        workers = []
        if role is None:
            workers = [subprocess.Popen([sys.executable, __file__, "worker"]) for _ in range(2)]
            # If the killed worker has a task, another worker gets it.
            workers.pop().kill()
        right = master(queue)
        queue.submit("last").result(TIMEOUT)
        for process in workers:
            assert process.wait() == 0
        print(f"{right} of {TASKS} results are right")


if __name__ == "__main__":
    main()
