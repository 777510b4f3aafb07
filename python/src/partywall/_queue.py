"""Queues of tasks: processes submit them, workers claim them, none is lost."""

import asyncio
import operator
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from partywall import _arrays, _native, _streams
from partywall._arrays import Shape
from partywall._errors import TimeoutError
from partywall._exchange import Exported
from partywall._handle import Connected, Held
from partywall._pool import Block, Pool

if TYPE_CHECKING:
    from partywall._domain import Domain


@dataclass(frozen=True)
class QueueStats:
    """The counts of a queue. While others use it, they are of no single moment."""

    pending: int
    """Tasks that wait for a worker."""
    claimed: int
    """Tasks that workers have."""
    enqueued: int
    """Tasks that streams of workers complete."""
    done: int
    """Results that nobody has taken."""
    dead: int
    """Dead letters."""
    free: int
    """Tasks that may be submitted now."""
    completed: int
    """Results, ever."""
    returned: int
    """Attempts without a result, ever."""
    free_inputs: int
    """Input blocks that may be allocated."""
    free_outputs: int
    """Output blocks that no attempt and no result has."""


@dataclass(frozen=True)
class TaskInfo:
    """A task that is in a queue."""

    task: str
    """The task: `Queue.ticket`, `retry` and `purge` take it."""
    status: str
    """`pending`, `claimed`, `enqueued`, `done` or `dead`."""
    kind: str
    """The kind of work."""
    attempts: int
    """How often it was claimed."""
    max_attempts: int
    """How often it may be."""
    age: float
    """Seconds since it was submitted."""
    failures: list[tuple[int, str]]
    """Why its last attempts had no result, with their numbers; at most 4."""
    text: str
    """What the last worker said that failed it."""


OnDeath: TypeAlias = Literal["keep", "cancel"]


@dataclass(frozen=True)
class Task:
    """A task for `Queue.submit_all`; the fields are the arguments of `Queue.submit`."""

    kind: str
    """The kind of work, at most 32 bytes."""
    inputs: Sequence[Any] = ()
    """Blocks of the queue's `inputs`, or arrays, which are copied; at most 8."""
    output: SupportsIndex = field(default=0, kw_only=True)
    """Bytes of the output."""
    args: bytes = field(default=b"", kw_only=True)
    """Arguments for the worker, at most 512 bytes."""
    max_attempts: int = field(default=3, kw_only=True)
    """How often it may be attempted."""
    on_death: OnDeath = field(default="keep", kw_only=True)
    """What becomes of it, and of its result, when this process dies."""


class Queue(Connected[_native.Queue]):
    """A named queue of tasks; made by `Domain.queue`.

        ticket = queue.submit("sqrt", [numbers], output=numbers.nbytes)     # one process
        for task in queue.claims():                                         # another one
            numbers = np.asarray(task.inputs[0].tensor(dtype="float32"))
            np.sqrt(numbers, out=np.asarray(task.output.tensor(dtype="float32")))

    A task belongs to one worker at a time. If the worker dies, fails it or drops it, the task goes to another worker. Each task
    has one result, which is taken once. Threads may share a handle.
    """

    def __init__(self, domain: "Domain", native: _native.Queue) -> None:
        super().__init__(domain, native)
        self._inputs = Pool(domain, native.inputs())

    def close(self) -> None:
        """Closes it. Tasks, tickets and blocks stay. Calling it again does nothing."""
        # One whose construction failed has no pool.
        if hasattr(self, "_inputs"):
            self._inputs.close()
        super().close()

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def version(self) -> int:
        """The version. A queue that is removed and created again has another one."""
        return self._native.version

    @property
    def capacity(self) -> int:
        """How many tasks and results it has room for."""
        return self._native.capacity

    @property
    def output_bytes(self) -> int:
        """Bytes of each output block."""
        return self._native.output_bytes

    @property
    def lease(self) -> float | None:
        """Seconds that an attempt may take, unless it is extended; `None` if it may take for ever."""
        return self._native.lease

    @property
    def place(self) -> str:
        """`host`, or the UUID of the GPU that has the blocks."""
        return self._native.place

    @property
    def inputs(self) -> Pool:
        """The pool of input blocks. Its `alloc` gives blocks to submit."""
        return self._inputs

    def submit(
        self,
        kind: str,
        inputs: Sequence[Any] = (),
        *,
        output: SupportsIndex = 0,
        args: bytes = b"",
        max_attempts: int = 3,
        on_death: OnDeath = "keep",
        stream: Any = None,
        timeout: float | None = None,
    ) -> "Ticket":
        """Submits a task, and waits for room up to `timeout` seconds, or for ever: `QueueFull`.

        `inputs` are blocks of `inputs`, which become the task's, or arrays as `Domain.put` takes them, which are copied into
        such blocks. `output` is how many bytes the result has room for. With `on_death="cancel"` the task and its result go
        when this process dies.

        On a GPU the task is submitted in the order of `stream`, by default torch's or cupy's current one: a worker's stream
        waits until it has written the inputs. Blocks of a task that is refused stay the caller's.
        """
        task = Task(kind, inputs, output=output, args=args, max_attempts=max_attempts, on_death=on_death)
        place = None if self._native.place == "host" or not inputs else _streams.place(stream, None)
        with self._request(task, stream, timeout) as request:
            return Ticket(self._native.submit(request, place, timeout))

    def submit_all(self, tasks: Iterable[Task], *, timeout: float | None = None) -> list["Ticket"]:
        """Submits several tasks in their order, and wakes workers once. Their inputs are complete.

        If it fails, or Ctrl-C ends it, the exception has the tickets of those that were submitted as `submitted`.
        """
        requests: list[_Request] = []
        try:
            for task in tasks:
                requests.append(self._request(task, None, timeout))
            tickets, error = self._native.submit_all([request.native for request in requests], timeout)
        finally:
            for request in requests:
                request.release()
        submitted = [Ticket(ticket) for ticket in tickets]
        if error is not None:
            error.submitted = submitted
            raise error
        return submitted

    def claim(self, timeout: float | None = None) -> "ClaimedTask":
        """Claims the oldest task, and waits for one up to `timeout` seconds, or for ever.

        `OutputsFull` if there are tasks, but results that were not taken have all output blocks.
        """
        return ClaimedTask(self._native.claim(1, timeout)[0])

    def claim_all(self, most: SupportsIndex, timeout: float | None = None) -> list["ClaimedTask"]:
        """Waits for a task as `claim` does, and claims up to `most`: as many as there are then."""
        most = operator.index(most)
        if most < 1:
            raise ValueError(f"at least one task is claimed, not {most}")
        return [ClaimedTask(task) for task in self._native.claim(most, timeout)]

    def claims(self, timeout: float | None = None) -> Iterator["ClaimedTask"]:
        """Claims one task after another, each within `timeout` seconds, or for ever; ends when none comes in time.

            for task in queue.claims():
                ...                             # its end completes the task

        Asking for the next task completes the one before, unless it is over. An exception that leaves the body of the loop fails
        the task, with its text as the reason. After `break` or `return` the task is still the caller's: complete it, or it
        goes to another worker when it is dropped.
        """
        # Nothing in Python stands between the loop and the compiled iterator, which sees why the loop drops it.
        return map(ClaimedTask, self._native.claims(timeout))

    def ticket(self, task: str) -> "Ticket":
        """Returns the ticket of a task that any process has submitted."""
        return Ticket(self._native.ticket(str(task)))

    def retry(self, task: str) -> None:
        """Makes a dead letter pending again, as if it had not been attempted. `WrongTaskState` if it is none."""
        self._native.retry(str(task))

    def purge(self, task: str) -> None:
        """Drops a result that was not taken, or a dead letter. `WrongTaskState` if the task is neither."""
        self._native.purge(str(task))

    def tasks(self, status: str | None = None, *, most: SupportsIndex = 100) -> list[TaskInfo]:
        """Lists up to `most` tasks, of all states or of one."""
        if status not in (None, "pending", "claimed", "enqueued", "done", "dead"):
            raise ValueError(f"a task is pending, claimed, enqueued, done or dead, not {status!r}")
        return [TaskInfo(*task) for task in self._native.tasks(_arrays.count(most), status)]

    def stats(self) -> QueueStats:
        """Counts what is in the queue."""
        return QueueStats(*self._native.stats())

    def _request(self, task: Task, stream: Any, timeout: float | None) -> "_Request":
        return _Request(self._inputs, task, stream, timeout)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a queue is shared by its name: send that")

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Queue {self.name}: closed>"
        stats = self.stats()
        return f"<partywall.Queue {self.name}: {stats.pending} pending, {stats.done} done, {stats.dead} dead>"


class _Request:
    """A task as the compiled half takes it. Blocks that were taken here for arrays return unless they are submitted."""

    def __init__(self, pool: Pool, task: Task, stream: Any, timeout: float | None) -> None:
        if not 1 <= operator.index(task.max_attempts) <= 255:
            raise ValueError(f"a task is attempted 1 to 255 times, not {task.max_attempts}")
        if task.on_death not in ("keep", "cancel"):
            raise ValueError(f"on_death is 'keep' or 'cancel', not {task.on_death!r}")
        self._copies: list[Block] = []
        try:
            blocks = [self._block(pool, item, stream, timeout)._native for item in task.inputs]
        except BaseException:
            self.release()
            raise
        cancels = task.on_death == "cancel"
        output = _arrays.count(task.output)
        self.native = (task.kind, blocks, bytes(task.args), output, operator.index(task.max_attempts), cancels)

    def _block(self, pool: Pool, item: Any, stream: Any, timeout: float | None) -> Block:
        if isinstance(item, Block):
            return item
        source = _arrays.dense(item, stream)
        block = pool.alloc(timeout)
        self._copies.append(block)
        block.tensor(source.shape, source.dtype).write(source, stream)
        return block

    def release(self) -> None:
        """Gives back what was not submitted."""
        for block in self._copies:
            block.close()

    def __enter__(self) -> Any:
        return self.native

    def __exit__(self, *_: object) -> None:
        self.release()


class Ticket:
    """A task that was submitted. Dropping it changes nothing. `await` it, or call `result`."""

    def __init__(self, native: _native.Ticket) -> None:
        self._native = native

    @property
    def task(self) -> str:
        """The task, for other processes: `Queue.ticket` takes it."""
        return self._native.task

    @property
    def status(self) -> str:
        """`pending`, `claimed`, `enqueued`, `done`, `dead` or `gone`."""
        return self._native.status

    def result(self, timeout: float | None = None) -> "TaskResult":
        """Waits until the task is done, and takes its result. `TaskFailed` for a dead letter, `TaskGone` if it is over."""
        block, nbytes, attempt = self._native.result(timeout)
        return TaskResult(None if block is None else Block(block), nbytes, attempt)

    def done(self) -> bool:
        """Whether the task has a result, is a dead letter, or is over."""
        return self.status in ("done", "dead", "gone")

    def cancel(self) -> None:
        """Cancels the task. `TaskRunning` if a worker has it, `TaskGone` if it is over."""
        self._native.cancel()

    def __await__(self) -> Generator[Any, None, "TaskResult"]:
        return self._taken().__await__()

    async def _taken(self) -> "TaskResult":
        # A ticket has no descriptor, and a thread for each would be many. The pauses add a tenth to the wait, at most.
        pause = _PAUSES[0]
        while True:
            try:
                return self.result(0)
            except TimeoutError:
                await asyncio.sleep(pause)
            pause = min(pause * 1.1, _PAUSES[1])

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a ticket is this process's own: send its task")

    def __repr__(self) -> str:
        return f"<partywall.Ticket {self.task}: {self.status}>"


class TaskResult(Exported):
    """A result that was taken. Its end of a `with`, or `release`, gives the output block back.

    `from_dlpack`, `np.asarray` and the like take its bytes; `tensor` gives them another shape and type.
    """

    def __init__(self, output: Block | None, nbytes: int, attempt: int) -> None:
        self.output = output
        """The block that the worker has written; `None` for a task without output."""
        self.nbytes = nbytes
        """Bytes of the output that the submitter asked for."""
        self.attempt = attempt
        """The number of the attempt that succeeded, from 1."""

    def tensor(self, shape: Shape | None = None, dtype: Any = "uint8") -> _native.Tensor:
        """Returns the beginning of the output as a tensor; without a shape, of as many elements as fit into `nbytes`."""
        if self.output is None:
            raise TypeError("the task was submitted without room for an output")
        if shape is None:
            block = self.output.tensor(None, dtype)
            shape = self.nbytes * block.shape[0] // max(block.nbytes, 1)
        return self.output.tensor(shape, dtype)

    def release(self) -> None:
        """Gives the output block back. Calling it again does nothing."""
        if self.output is not None:
            self.output.close()

    def _exported(self) -> _native.Tensor:
        return self.tensor()

    def __enter__(self) -> "TaskResult":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<partywall.TaskResult: {self.nbytes} bytes, attempt {self.attempt}>"


class TaskBytes(Exported):
    """An input, or the output, of a claimed task, where it lies.

    `from_dlpack`, `np.asarray` and the like take its bytes; `tensor` gives them another shape and type.
    """

    def __init__(self, task: _native.Task, index: int | None, nbytes: int) -> None:
        self._task = task
        self._index = index
        self.nbytes = nbytes
        """Bytes: of the block of an input, and as many as were asked for of an output."""

    def tensor(self, shape: Shape | None = None, dtype: Any = "uint8") -> _native.Tensor:
        """Returns its beginning as a tensor; without a shape, of as many elements as fit."""
        name = _arrays.dtype_name(dtype)
        lengths = None if shape is None else _arrays.dimensions(shape)
        return self._task.output(name, lengths) if self._index is None else self._task.input(self._index, name, lengths)

    def _exported(self) -> _native.Tensor:
        return self.tensor()

    def __repr__(self) -> str:
        what = "output" if self._index is None else f"input {self._index}"
        return f"<partywall.TaskBytes: {what} of {self._task.task}, {self.nbytes} bytes>"


class ClaimedTask(Held[_native.Task]):
    """A task that this process has, for one attempt.

    The end of its `with` completes the task, unless it is over; an exception fails it with the exception's text. A task that is
    dropped goes to another worker. If a lease has ended, the task is another worker's, and `complete` raises `ClaimLost`.
    """

    def __init__(self, native: _native.Task) -> None:
        super().__init__(native)

    @property
    def task(self) -> str:
        """The task, for other processes."""
        return self._native.task

    @property
    def kind(self) -> str:
        """The kind of work."""
        return self._native.kind

    @property
    def args(self) -> bytes:
        """The arguments."""
        return self._native.args

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1."""
        return self._native.attempt

    @property
    def max_attempts(self) -> int:
        """How often the task may be attempted."""
        return self._native.max_attempts

    @property
    def claimed(self) -> bool:
        """Whether it is still this worker's: if not, the rest of the work is in vain."""
        return self._native.claimed

    @property
    def closed(self) -> bool:
        """Whether it was completed, failed or given back here."""
        return self._native.closed

    @property
    def inputs(self) -> tuple[TaskBytes, ...]:
        """The inputs, read-only, in the order in which they were given."""
        return tuple(TaskBytes(self._native, index, nbytes) for index, nbytes in enumerate(self._native.inputs))

    @property
    def output(self) -> TaskBytes:
        """The room for the output, which this attempt alone uses. It contains what its last user left in it."""
        if not self.closed and not self._native.has_output:
            raise TypeError(f"task {self.task} was submitted without room for an output")
        return TaskBytes(self._native, None, self._native.output_bytes)

    def wait_inputs(self, timeout: float | None = None) -> None:
        """Waits until the submitter's stream has completed the inputs. `InputsLost` if it ended before that."""
        self._native.wait_inputs(timeout)

    def wait_inputs_on(self, stream: Any = None, *, device: Any = None) -> None:
        """Has a stream wait until the inputs are complete. Returns at once. `stream` and `device` as for a `Timeline`."""
        self._native.wait_inputs_on(*_streams.place(stream, device))

    def complete(self) -> None:
        """Completes the task: its output is the result. On a GPU, waits for all work of this process there."""
        self._native.complete()

    def complete_on(self, stream: Any = None, *, device: Any = None) -> None:
        """Completes the task when all work that is on a stream now is done. Returns at once."""
        self._native.complete_on(*_streams.place(stream, device))

    def fail(self, reason: str) -> None:
        """Fails the attempt: the task goes to another worker, or is a dead letter. 127 bytes of the reason are kept."""
        # Messages with names of files may have halves of surrogate pairs, which are no UTF-8.
        self._native.fail(str(reason).encode(errors="backslashreplace").decode())

    def extend(self, seconds: float) -> None:
        """Has the lease end so many seconds from now on."""
        self._native.extend(seconds)

    def close(self) -> None:
        """Gives the task back, which counts as an attempt, unless it is over. Calling it again does nothing."""
        self._native.close()

    def __enter__(self) -> "ClaimedTask":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.closed:
            return
        if kind is None:
            self.complete()
        else:
            self.fail(f"{kind.__name__}: {error}")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a claimed task is this process's own")

    def __repr__(self) -> str:
        state = "over" if self.closed else f"attempt {self.attempt}"
        return f"<partywall.ClaimedTask {self.task}: {self.kind}, {state}>"


_PAUSES = (50e-6, 5e-3)
"""Seconds between two looks at a ticket: at first, and at most."""
