"""The workers of a loader: processes of torch's, with a pipe each, which can be replaced."""

import contextlib
import itertools
import logging
import queue
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate, pin_memory

from partywall._errors import Error
from partywall.torch._batches import Batches, Packed, Source, is_plain
from partywall.torch._errors import LoaderWorkerDied


class Context(BaseContext):
    """Makes what torch's iterator makes by a context of `multiprocessing`: queues, an event and processes.

    torch's workers send through one queue and share its locks, as they do those of the event. A worker that is killed
    while it has one of them would stop all others. Here each has a pipe, and there are no locks."""

    def __init__(self, real: Any, batches: Batches) -> None:
        self._real = real
        self._source = batches.begin()
        self.results: Results | None = None
        self._batches = batches

    def Queue(self, maxsize: int = 0) -> Any:
        if self.results is None:
            self.results = Results(self._batches)
            return self.results
        return _Tasks(self._real)

    def Event(self) -> Any:
        return _Flag(self._real)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        assert self.results is not None
        number = len(self.results.workers)
        worker = _Worker(self._real, number, (self._source, target, args))
        self.results.workers.append(worker)
        return worker


class Results:
    """What the workers send, in the process that iterates. It replaces the workers that die, as often as it may."""

    def __init__(self, batches: Batches) -> None:
        self.workers: list[_Worker] = []
        self.restarts = 0
        self._batches = batches
        self._turn = itertools.count()

    def get(self, timeout: float) -> Any:
        """Returns the next task that is done and its data. Raises `queue.Empty` after `timeout` seconds."""
        while True:
            if dead := [worker for worker in self.workers if worker.reader is None and not worker.is_ended]:
                raise dead[0].death()
            readers = {worker.reader: worker for worker in self.workers if worker.reader is not None}
            ready = wait(readers, timeout)
            if not ready:
                # A process that a dead worker has started may keep its pipe open.
                for worker in readers.values():
                    if not worker.is_alive():
                        self._replace(worker, EOFError())
                raise queue.Empty
            # In turn, so that a worker that is always ready does not keep the others waiting.
            reader: Any = ready[next(self._turn) % len(ready)]
            worker = readers[reader]
            try:
                message = reader.recv_bytes()
            except (EOFError, OSError) as error:
                self._replace(worker, error)
                continue
            try:
                task, data = ForkingPickler.loads(message)
                if isinstance(data, Packed):
                    data = self._batches.open(data)
                elif self._batches.pins:
                    data = pin_memory.pin_memory(data)
            except Exception as error:
                # A worker whose block is lost is dead, or will be at once: the broker may know that earlier.
                if not isinstance(error, Error) and worker.is_alive():
                    raise
                self._replace(worker, error)
                continue
            worker.tasks.done(task)
            return task, data

    def _replace(self, worker: "_Worker", cause: Exception) -> None:
        if worker.end():
            return
        if self.restarts == 0:
            raise worker.death() from cause
        self.restarts -= 1
        former = worker.what()
        worker.start()
        _log.warning("%s and is replaced by pid %s", former, worker.pid)

    def close(self) -> None:
        """Ends the waits of workers for a reader."""
        for worker in self.workers:
            worker.close()

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""


class _Worker:
    """A worker, and the one that replaces it. Otherwise it is its process."""

    def __init__(self, context: Any, number: int, arguments: tuple[Source, Callable[..., None], tuple[Any, ...]]):
        self._context = context
        self._number = number
        self._arguments = arguments
        self.tasks: _Tasks = next(argument for argument in arguments[2] if isinstance(argument, _Tasks))
        self.reader: Connection | None = None
        self.is_ended = False
        """Whether it has ended because it was told to."""
        self._process: Any = None

    def start(self) -> None:
        """Starts a process. If there was one, gives it the tasks that the former one has not done."""
        source, target, arguments = self._arguments
        self.reader, writer = self._context.Pipe(duplex=False)
        channel = _Channel(source, self.tasks.renew(), writer)
        given = [channel if isinstance(argument, (_Tasks, Results)) else argument for argument in arguments]
        self._process = self._context.Process(target=_work, args=(channel, target, given), daemon=True)
        self._process.start()
        # From now on the worker alone has it, so the end of the worker is the end of the pipe.
        writer.close()

    def end(self) -> bool:
        """Notes that it has ended, and waits until that is so. Returns whether it was told to end."""
        self.close()
        self.is_ended = self.tasks.are_over
        if not self.is_ended:
            # Also if its block was lost while it lived.
            self._process.kill()
            self._process.join()
        return self.is_ended

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def what(self) -> str:
        """Says how it died."""
        # Unknown if another thread has asked for it at the same moment.
        code = self._process.exitcode or 0
        how = f"ended with exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        return f"worker {self._number} of a loader (pid {self._process.pid}) {how}"

    def death(self) -> LoaderWorkerDied:
        return LoaderWorkerDied(
            self.what(),
            "look for its traceback above, or with SIGKILL for the kernel's messages about lack of memory (dmesg); "
            "restart=N replaces workers that die",
            "loader-worker-died",
        )

    # What torch sets before the start.
    daemon = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_process"], name)


class _Tasks:
    """The tasks of a worker, in the process that iterates."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._queue: Any = None
        self._waiting: dict[Any, Any] = {}
        self.are_over = False

    def put(self, task: Any) -> None:
        if task is None:
            self.are_over = True
        else:
            self._waiting[_key(task)] = task
        self._queue.put(task)

    def done(self, task: Any) -> None:
        self._waiting.pop(_key(task), None)

    def renew(self) -> Any:
        """Returns a new queue with all tasks that are not done. Killed readers of the former one may have its lock."""
        former, self._queue = self._queue, self._context.Queue()
        self._queue.cancel_join_thread()
        if former is not None:
            former.close()
        for task in self._waiting.values():
            self._queue.put(task)
        return self._queue

    def cancel_join_thread(self) -> None:
        if self._queue is not None:
            self._queue.cancel_join_thread()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()


def _key(task: Any) -> Any:
    """Returns the number of a task; the order to begin the next pass has none."""
    if isinstance(task, tuple):
        return task[0]
    return task if isinstance(task, int) else None


class _Flag:
    """An event without a lock: it is set when its pipe can be read."""

    def __init__(self, context: Any) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)

    def set(self) -> None:
        if not self.is_set():
            self._writer.send_bytes(b"set")

    def is_set(self) -> bool:
        return bool(self._reader.poll(0))

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader}


class _Channel:
    """Both queues of a worker, in its process."""

    def __init__(self, source: Source, tasks: Any, writer: Connection) -> None:
        self.source = source
        self._tasks = tasks
        self._writer = writer
        self._pending: Any = None

    def get(self, timeout: float) -> Any:
        # By now torch has dropped the batch, so that its block can be offered.
        self._flush()
        return self._tasks.get(timeout=timeout)

    def put(self, result: Any) -> None:
        task, data = result
        try:
            packed = self.source.pack(data)
            if packed is None:
                message = ForkingPickler.dumps(result)
        except Exception:
            where = f"in DataLoader worker process {torch.utils.data.get_worker_info().id}"
            message, packed = ForkingPickler.dumps((task, ExceptionWrapper(where=where))), None
        if packed is None:
            self._send(message)
        else:
            self._pending = (task, *packed)

    def _flush(self) -> None:
        if self._pending is not None:
            (task, packed, room), self._pending = self._pending, None
            data = packed if self.source.offer(packed, room) else packed.read(room.memory)
            self._send(ForkingPickler.dumps((task, data)))

    def _send(self, message: Any) -> None:
        # If the iteration is over, nobody reads any more.
        with contextlib.suppress(BrokenPipeError):
            self._writer.send_bytes(message)

    def cancel_join_thread(self) -> None:
        """Does nothing: there is no thread."""

    def close(self) -> None:
        self._writer.close()


def _work(channel: _Channel, target: Callable[..., None], arguments: list[Any]) -> None:
    """Runs in a worker."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        out = channel.source.empty((len(batch), *first.shape), first.dtype) if is_plain(first) else None
        if out is None:
            return torchs(batch, collate_fn_map=collate_fn_map)
        return torch.stack(batch, 0, out=out)

    functions = collate.default_collate_fn_map
    torchs = functions.get(torch.Tensor)
    if torchs is collate.collate_tensor_fn:
        functions[torch.Tensor] = stack
    target(*arguments)


_log = logging.getLogger("partywall.torch")
