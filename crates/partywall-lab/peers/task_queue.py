"""Tasks for workers: a number goes in, its square root comes back.

    task_queue.py ours WORKERS SOCKET    microseconds for each task through a queue of Partywall
    task_queue.py pool WORKERS           … through multiprocessing.Pool, in chunks of one task
    task_queue.py redis WORKERS          … through two lists in Redis, which this program starts and stops

The workers are processes. The master submits the tasks one by one and waits for every result.
"""

import math
import multiprocessing
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peer

TASKS = 1_000
ROOTS = sum(math.sqrt(number) for number in range(TASKS))
NAME = "benches/tasks"


def main() -> None:
    system, workers, *arguments = sys.argv[1:]
    with ExitStack() as stack:
        systems: dict[str, Callable[..., Callable[[], float]]] = {"ours": ours, "pool": pool, "redis": redis}
        run = systems[system](stack, int(workers), *arguments)

        def sample() -> float:
            start = time.perf_counter()
            total = run()
            elapsed = time.perf_counter() - start
            if abs(total - ROOTS) > 1e-6:
                raise ValueError(f"the roots sum up to {total} instead of {ROOTS}")
            return elapsed / TASKS * 1e6

        peer.serve(sample)


def started(stack: ExitStack, workers: int, work: Callable[..., None], *arguments: Any) -> None:
    """Starts worker processes that end with the program."""
    for _ in range(workers):
        worker = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
        worker.start()
        stack.callback(worker.terminate)


def ours(stack: ExitStack, workers: int, socket: str) -> Callable[[], float]:
    import partywall as pw

    domain = stack.enter_context(pw.connect(socket=socket, start=False))
    queue = stack.enter_context(domain.queue(f"{NAME}.{workers}", tasks=2 * TASKS, outputs=(2 * TASKS, 8), device="host"))
    started(stack, workers, our_worker, socket, queue.name)

    def run() -> float:
        tickets = [queue.submit("sqrt", args=struct.pack("d", number), output=8) for number in range(TASKS)]
        total = 0.0
        for ticket in tickets:
            with ticket.result() as result:
                total += struct.unpack("d", result.tobytes())[0]
        return total

    return run


def our_worker(socket: str, name: str) -> None:
    import partywall as pw

    with pw.connect(socket=socket, start=False) as domain, domain.queue(name) as queue:
        for task in queue.claims():
            memoryview(task.output.tensor())[:] = struct.pack("d", math.sqrt(*struct.unpack("d", task.args)))


def pool(stack: ExitStack, workers: int) -> Callable[[], float]:
    processes = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers))
    return lambda: sum(processes.imap_unordered(math.sqrt, range(TASKS), chunksize=1))


def redis(stack: ExitStack, workers: int) -> Callable[[], float]:
    from redis import Redis

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    path = str(Path(folder) / "redis.sock")
    options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    while not Path(path).exists():
        time.sleep(0.01)
    client = Redis(unix_socket_path=path)
    started(stack, workers, redis_worker, path)

    def run() -> float:
        for number in range(TASKS):
            client.lpush("tasks", struct.pack("d", number))
        return sum((float(struct.unpack("d", client.brpop(["roots"])[1])[0]) for _ in range(TASKS)), 0.0)

    return run


def redis_worker(path: str) -> None:
    from redis import Redis

    client = Redis(unix_socket_path=path)
    while True:
        _, number = client.brpop(["tasks"])
        client.lpush("roots", struct.pack("d", math.sqrt(*struct.unpack("d", number))))


if __name__ == "__main__":
    main()
