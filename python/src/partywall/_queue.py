"""Queues of tasks: processes submit tasks, workers claim them, and no task is lost."""

import asyncio
import operator
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias
from weakref import WeakKeyDictionary

from partywall import _arrays, _native, _streams
from partywall._arrays import Shape
from partywall._errors import BadTask, Error, TimeoutError
from partywall._handle import Connected
from partywall._native import Attachment, Block, ClaimedTask, SegmentPart, TaskResult, Ticket
from partywall._pool import BlockPart, Pool
from partywall._segment import Segment

if TYPE_CHECKING:
    from partywall._domain import Domain


@dataclass(frozen=True)
class QueueStats:
    """The counts of a queue. While other processes use the queue, the counts are not of one single moment."""

    pending: int
    """Tasks that wait for a worker."""
    claimed: int
    """Tasks that workers have claimed."""
    enqueued: int
    """Tasks that streams of workers will complete."""
    done: int
    """Results that were not taken."""
    dead: int
    """Dead letters."""
    free: int
    """How many more tasks can be submitted now."""
    completed: int
    """Results so far."""
    returned: int
    """Attempts without a result so far."""
    free_inputs: int
    """Input blocks that are free."""
    free_outputs: int
    """Output blocks that no attempt and no result uses."""
    attached: int
    """Attached segments."""


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
    """The number of the last attempt."""
    max_attempts: int
    """The number of the last attempt that the task may have. A retry raises it."""
    age: float
    """Seconds since the task was submitted."""
    failures: list[tuple[int, str]]
    """The number of each of the last attempts without a result, and the reason; at most 4."""
    text: str
    """The reason that the last worker that failed the task gave: at most 127 bytes; `…` ends one that was cut."""


Output: TypeAlias = SupportsIndex | tuple[Shape, Any]
"""What a worker is asked for: a number of bytes, or `(shape, dtype)`."""

OnDeath: TypeAlias = Literal["keep", "cancel"]


# Not frozen: creating a frozen dataclass takes several times as long.
@dataclass(slots=True)
class Task:
    """A task for `Queue.submit_all`; the fields are the arguments of `Queue.submit`."""

    kind: str
    """The kind of work, at most 32 bytes."""
    inputs: Sequence[Any] = ()
    """Blocks of the queue's `inputs` or parts of them, parts of attached segments, or arrays, which are copied; at most
    8."""
    output: Output = field(default=0, kw_only=True)
    """Bytes of the output, or its shape and type."""
    args: bytes = field(default=b"", kw_only=True)
    """Arguments for the worker, at most 512 bytes."""
    max_attempts: int = field(default=3, kw_only=True)
    """How often the task may be attempted."""
    on_death: OnDeath = field(default="keep", kw_only=True)
    """Whether the task and its result are kept or cancelled when this process dies."""


class Queue(Connected, _native.Queue):
    """A named queue of tasks; `Domain.queue` returns one.

        ticket = queue.submit("sqrt", [numbers], output=(numbers.shape, numbers.dtype))   # one process
        for task in queue.claims():                                         # another one
            np.sqrt(np.asarray(task.inputs[0]), out=np.asarray(task.output))

    A task belongs to one worker at a time. If the worker dies, fails the task or drops it, the task goes to another
    worker. Each task has one result, which is taken once. Threads may share a handle.
    """

    def __init__(self, domain: "Domain", *_: Any, **__: Any) -> None:
        super().__init__(domain)
        self._inputs = Pool(domain, self.name, queue=self)

    def close(self) -> None:
        """Closes the handle, and ends the waits of this process that use it, those of its tickets included.

        Tasks, tickets and blocks stay, and a ticket can be waited for again. Calling it again does nothing.
        """
        # An object whose construction failed has no pool.
        if hasattr(self, "_inputs"):
            self._inputs.close()
        super().close()

    @property
    def inputs(self) -> Pool:
        """The pool of input blocks. Its `alloc` returns blocks to submit."""
        return self._inputs

    def submit(
        self,
        kind: str,
        inputs: Sequence[Any] = (),
        *,
        output: Output = 0,
        args: bytes = b"",
        max_attempts: int = 3,
        on_death: OnDeath = "keep",
        stream: Any = None,
        timeout: float | None = None,
    ) -> Ticket:
        """Submits a task. Waits for a free slot up to `timeout` seconds, or for ever; then raises `QueueFull`, which
        counts the results that were not taken.

        `inputs` are blocks of the queue's `inputs`, which then belong to the task, or parts of them (`Block.part`);
        parts of segments that were attached (`attach`); or arrays as `Domain.put` takes them, which are copied into
        such blocks. The worker gets each with its length, type and shape; a whole block is bytes. `output` is what the
        worker is asked for: a number of bytes, or `(shape, dtype)`, which the result has, too. With `on_death="cancel"`
        the task and its result are removed when this process dies.

        On a GPU the task is submitted in the order of `stream`, by default torch's or cupy's current one: a worker's
        stream waits until that stream has written the inputs. In pinned memory the inputs are complete, unless you give
        a `stream`. If the task is refused, its blocks still belong to the caller.
        """
        if not _is_list(inputs):
            return self._submit(kind, None, output, args, max_attempts, on_death, None, timeout)
        by_cpu = self.place == "host" or (stream is None and self.place.startswith("pinned"))
        place = None if by_cpu else _streams.place(stream, None)
        deadline = _Deadline(timeout)
        taken = _Inputs(self._inputs, inputs, stream, lambda: self._inputs.alloc(deadline.left()))
        try:
            left = deadline.left()
            return self._submit(kind, taken.native, output, args, max_attempts, on_death, place, left)
        finally:
            taken.release()

    def submit_all(self, tasks: Iterable[Task], *, timeout: float | None = None) -> list[Ticket]:
        """Submits several tasks in their order, and wakes workers once. The inputs must be complete. Waits for slots
        and blocks up to `timeout` seconds, or for ever.

        Arrays are copied into blocks of the queue's `inputs`. When no block is free, the tasks before are submitted at
        once, so that workers free blocks.

        If it fails or Ctrl-C ends it, the exception's attribute `submitted` has the tickets of the tasks that were
        submitted.
        """
        batch = _Batch(self, timeout)
        try:
            for task in tasks:
                batch.add(task)
            batch.submit()
        except BaseException as error:
            error.submitted = batch.submitted  # type: ignore[attr-defined]
            raise
        finally:
            batch.release()
        return batch.submitted

    def claim_all(self, most: SupportsIndex, timeout: float | None = None) -> list[ClaimedTask]:
        """Waits for a task as `claim` does, then claims all tasks that are there, up to `most`."""
        return self._claim_all(_at_most(most, 1, "claim"), timeout)

    def attach(self, segment: Segment | str) -> Attachment:
        """Attaches a segment, or the latest version of a name (`NAME@V`: version V), so that tasks can name parts of
        it.

            weights = queue.attach("model")
            ticket = queue.submit("infer", [weights["layers.0"], weights[:4096], numbers], output=numbers.nbytes)

        The queue holds the segment until it is detached, whichever process dies. Workers open it once, for reading, and
        read it in place. A version that is already attached is not attached again. At most 32 are attached at a time.
        Raises `CannotAttach` for memory that ends with its publisher.
        """
        if isinstance(segment, str):
            return self._attach_name(segment)
        if not isinstance(segment, Segment):
            raise TypeError(f"a queue holds a partywall.Segment or a name, not {type(segment).__name__}")
        return self._attach(segment._native)

    def tasks(self, status: str | None = None, *, most: SupportsIndex = 100) -> list[TaskInfo]:
        """Lists up to `most` tasks, of all states or of one."""
        if status not in (None, "pending", "claimed", "enqueued", "done", "dead"):
            raise ValueError(f"a task is pending, claimed, enqueued, done or dead, not {status!r}")
        return self._tasks(_at_most(most, 0, "list"), status)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a queue is shared by name: send the name")

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Queue {self.name}: closed>"
        stats = self.stats()
        return f"<partywall.Queue {self.name}: {stats.pending} pending, {stats.done} done, {stats.dead} dead>"


def _at_most(most: SupportsIndex, least: int, verb: str) -> int:
    """Checks a number of tasks, and returns it, or the largest number that the library counts to."""
    most = operator.index(most)
    if most < least:
        raise ValueError(f"the number of tasks to {verb} must be at least {least}, not {most}")
    return min(most, sys.maxsize)


def _is_list(inputs: Sequence[Any]) -> bool:
    """Returns whether there are inputs in a list of inputs. Refuses other objects, above all an array without a
    list."""
    # Most calls have one of these, and the check of any other takes several times as long.
    if not isinstance(inputs, (tuple, list)) and (
        not isinstance(inputs, Sequence) or isinstance(inputs, (str, bytes, bytearray, memoryview))
    ):
        kind = type(inputs).__name__
        raise TypeError(f"the inputs of a task are a list, not {kind}: for one input write [input]")
    return len(inputs) > 0


class _Inputs:
    """The inputs of a task. Blocks that were allocated here for arrays return to the pool unless they are submitted."""

    def __init__(self, pool: Pool, inputs: Sequence[Any], stream: Any, alloc: Callable[[], Block]) -> None:
        blocks = sum(not isinstance(item, SegmentPart) for item in inputs)
        why = None
        if len(inputs) > _native.MAX_INPUTS:
            why = f"{_native.MAX_INPUTS} inputs, not {len(inputs)}"
        elif blocks > pool.blocks:
            # It would wait for blocks that it or its caller has.
            why = f"as many blocks and arrays as the queue has input blocks ({pool.blocks}), not {blocks}"
        if why is not None:
            advice = "put several small inputs into one"
            raise BadTask(f"a task for queue {pool.name!r} has at most {why}", advice, "bad-task")
        self._copies: list[Block] = []
        try:
            self.native = [self._input(item, stream, alloc) for item in inputs]
        except BaseException:
            self.release()
            raise

    def _input(self, item: Any, stream: Any, alloc: Callable[[], Block]) -> Any:
        if isinstance(item, SegmentPart):
            return item
        if isinstance(item, Block):
            return item
        if isinstance(item, BlockPart):
            return item.block, item.offset, item.dtype, item.shape
        source = _arrays.dense(item, stream)
        block = alloc()
        self._copies.append(block)
        block.tensor(source.shape, source.dtype).write(source, stream)
        return block, 0, source.dtype, source.shape

    def release(self) -> None:
        """Gives back the blocks that were not submitted."""
        for block in self._copies:
            block.close()


class _Deadline:
    """The end of a timeout that several waits share."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = _native.checked_timeout(timeout)
        self._begin = time.monotonic()

    def left(self) -> float | None:
        """Returns the seconds that are left; `None` without a timeout."""
        if self._timeout is None:
            return None
        return max(0.0, self._timeout - (time.monotonic() - self._begin))


class _Batch:
    """Tasks that are submitted together, unless they need more blocks than are free."""

    def __init__(self, queue: Queue, timeout: float | None) -> None:
        self.submitted: list[Ticket] = []
        """The tickets so far."""
        self._queue = queue
        self._deadline = _Deadline(timeout)
        self._requests: list[tuple[Any, ...]] = []
        self._inputs: list[_Inputs] = []

    def add(self, task: Task) -> None:
        """Adds a task. Copies its arrays, and submits the tasks before it if no block is free for them."""
        if not isinstance(task, Task):
            raise TypeError(f"submit_all takes objects of partywall.Task, not {type(task).__name__}")
        inputs = None
        if _is_list(task.inputs):
            taken = _Inputs(self._queue.inputs, task.inputs, None, self._alloc)
            self._inputs.append(taken)
            inputs = taken.native
        self._requests.append((task.kind, inputs, task.output, task.args, task.max_attempts, task.on_death))

    def submit(self) -> None:
        """Submits the tasks that were added since the last time."""
        requests, self._requests = self._requests, []
        try:
            submitted, error = self._queue._submit_all(requests, self._deadline.left())
        finally:
            self.release()
        self.submitted += submitted
        if error is not None:
            raise error

    def _alloc(self) -> Block:
        block = self._queue.inputs.try_alloc()
        if block is not None:
            return block
        if self._requests:
            self.submit()
        return self._queue.inputs.alloc(self._deadline.left())

    def release(self) -> None:
        """Gives back the blocks of tasks that were not submitted."""
        for inputs in self._inputs:
            inputs.release()
        self._inputs.clear()


class _Waits:
    """The tickets of a queue that an event loop awaits. They share one file descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event: _native.QueueEvent) -> None:
        self._loop = loop
        self._event = event
        self._waiting: dict[asyncio.Future[None], Ticket] = {}
        loop.add_reader(event.fileno(), self._poll)
        self._timer = loop.call_later(_MAX_SLEEP, self._poll_again)

    def _poll_again(self) -> None:
        self._timer = self._loop.call_later(_MAX_SLEEP, self._poll_again)
        self._poll()

    def _poll(self) -> None:
        gone = None
        try:
            # Cleared first, so that a task that ends after its check below is not missed.
            self._event.clear()
        except Error as error:
            gone = error
        for future, ticket in self._waiting.items():
            if future.done():
                continue
            if ticket.done():
                future.set_result(None)
            elif gone is not None:
                future.set_exception(gone)
            elif not ticket._is_open:
                future.set_result(None)

    def enter(self, ticket: Ticket) -> asyncio.Future[None]:
        """Returns a future that is done once the task may have ended, or the queue was closed."""
        future = self._loop.create_future()
        self._waiting[future] = ticket
        return future

    def leave(self, future: asyncio.Future[None]) -> bool:
        """Ends a wait. Returns whether it was the last one, and then closes the descriptor."""
        del self._waiting[future]
        if self._waiting:
            return False
        self._timer.cancel()
        self._loop.remove_reader(self._event.fileno())
        self._event.close()
        return True


_WAITS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Waits]] = WeakKeyDictionary()
"""For each event loop, the waits of its tickets by queue."""


async def awaited(ticket: Ticket) -> TaskResult:
    """Takes the result of a task in an event loop."""
    loop = asyncio.get_running_loop()
    queues = _WAITS.setdefault(loop, {})
    # As with `result`, closing the queue ends the waits that have begun.
    was_open = ticket._is_open
    while True:
        if ticket.done():
            try:
                return ticket.result(0)
            except TimeoutError:
                # The task was a dead letter and was retried meanwhile.
                continue
        if was_open:
            ticket._require_open()
        waits = queues.get(ticket._queue)
        if waits is None:
            waits = queues[ticket._queue] = _Waits(loop, ticket._event())
        future = waits.enter(ticket)
        try:
            # The task may have ended before the descriptor was registered.
            if not ticket.done():
                await future
        finally:
            if waits.leave(future):
                del queues[ticket._queue]


_MAX_SLEEP = 1.0
"""Seconds between two checks for the broker in an event loop: the broker's end makes no descriptor readable."""
