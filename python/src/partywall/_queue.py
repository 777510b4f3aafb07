"""Queues of tasks: processes submit them, workers claim them, none is lost."""

import asyncio
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias
from weakref import WeakKeyDictionary

from partywall import _arrays, _native, _streams
from partywall._arrays import Shape
from partywall._errors import Error, TimeoutError
from partywall._handle import Connected
from partywall._native import Attachment, ClaimedTask, SegmentPart, TaskResult, Ticket
from partywall._pool import Block, Pool
from partywall._segment import Segment

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
    attached: int
    """Segments that are attached."""


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


# Not frozen: a frozen one takes several times as long to make.
@dataclass(slots=True)
class Task:
    """A task for `Queue.submit_all`; the fields are the arguments of `Queue.submit`."""

    kind: str
    """The kind of work, at most 32 bytes."""
    inputs: Sequence[Any] = ()
    """Blocks of the queue's `inputs`, parts of attached segments, or arrays, which are copied; at most 8."""
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
    ) -> Ticket:
        """Submits a task, and waits for room up to `timeout` seconds, or for ever: `QueueFull`.

        `inputs` are blocks of `inputs`, which become the task's, parts of segments that were attached (`attach`), or arrays as
        `Domain.put` takes them, which are copied into such blocks. `output` is how many bytes the result has room for. With
        `on_death="cancel"` the task and its result go when this process dies.

        On a GPU the task is submitted in the order of `stream`, by default torch's or cupy's current one: a worker's stream
        waits until it has written the inputs. Blocks of a task that is refused stay the caller's.
        """
        if len(inputs) == 0:
            return self._native.submit(kind, None, output, args, max_attempts, on_death, None, timeout)
        place = None if self._native.place == "host" else _streams.place(stream, None)
        taken = _Inputs(self._inputs, inputs, stream, timeout)
        try:
            return self._native.submit(kind, taken.native, output, args, max_attempts, on_death, place, timeout)
        finally:
            taken.release()

    def submit_all(self, tasks: Iterable[Task], *, timeout: float | None = None) -> list[Ticket]:
        """Submits several tasks in their order, and wakes workers once. Their inputs are complete.

        If it fails, or Ctrl-C ends it, the exception has the tickets of those that were submitted as `submitted`.
        """
        inputs: list[_Inputs] = []
        requests = []
        try:
            for task in tasks:
                taken = None
                if len(task.inputs) > 0:
                    inputs.append(_Inputs(self._inputs, task.inputs, None, timeout))
                    taken = inputs[-1].native
                requests.append((task.kind, taken, task.output, task.args, task.max_attempts, task.on_death))
            submitted, error = self._native.submit_all(requests, timeout)
        finally:
            for of_task in inputs:
                of_task.release()
        if error is not None:
            error.submitted = submitted
            raise error
        return submitted

    def claim(self, timeout: float | None = None) -> ClaimedTask:
        """Claims the oldest task, and waits for one up to `timeout` seconds, or for ever.

        `OutputsFull` if there are tasks, but results that were not taken have all output blocks.
        """
        return self._native.claim(timeout)

    def claim_all(self, most: SupportsIndex, timeout: float | None = None) -> list[ClaimedTask]:
        """Waits for a task as `claim` does, and claims up to `most`: as many as there are then."""
        most = operator.index(most)
        if most < 1:
            raise ValueError(f"at least one task is claimed, not {most}")
        return self._native.claim_all(most, timeout)

    def claims(self, timeout: float | None = None) -> Iterator[ClaimedTask]:
        """Claims one task after another, each within `timeout` seconds, or for ever; ends when none comes in time.

            for task in queue.claims():
                ...                             # its end completes the task

        Asking for the next task completes the one before, unless it is over. An exception that leaves the body of the loop fails
        the task, with its text as the reason. After `break` or `return` the task is still the caller's: complete it, or it
        goes to another worker when it is dropped. Threads call `claims` each for itself.
        """
        # Nothing in Python stands between the loop and the compiled iterator, which sees why the loop drops it.
        return self._native.claims(timeout)

    def attach(self, segment: Segment | str) -> Attachment:
        """Has the queue hold a segment, or the latest version of a name (`NAME@V`: that version), for tasks to name parts of it.

            weights = queue.attach("model")
            ticket = queue.submit("infer", [weights["layers.0"], weights[:4096], numbers], output=numbers.nbytes)

        The segment stays as long as the queue holds it, whichever process dies. Workers open it once, for reading, and read it
        in place. A version that the queue holds already is not attached again. At most 32 are attached at a time. `CannotAttach`
        for memory that goes with its publisher.
        """
        if isinstance(segment, str):
            return self._native.attach_name(segment)
        return self._native.attach(segment._native)

    def detach(self, attachment: Attachment, timeout: float | None = None) -> None:
        """Ends an attachment, once no task names it: waits up to `timeout` seconds, or for ever, then `SegmentInUse`.

        Dead letters name it, too. `NotAttached` if it was detached before.
        """
        self._native.detach(attachment, timeout)

    def ticket(self, task: str) -> Ticket:
        """Returns the ticket of a task that any process has submitted."""
        return self._native.ticket(str(task))

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

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a queue is shared by its name: send that")

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Queue {self.name}: closed>"
        stats = self.stats()
        return f"<partywall.Queue {self.name}: {stats.pending} pending, {stats.done} done, {stats.dead} dead>"


class _Inputs:
    """The blocks of a task's inputs. Those that were taken here for arrays return unless they are submitted."""

    def __init__(self, pool: Pool, inputs: Sequence[Any], stream: Any, timeout: float | None) -> None:
        self._copies: list[Block] = []
        try:
            self.native = [self._input(pool, item, stream, timeout) for item in inputs]
        except BaseException:
            self.release()
            raise

    def _input(self, pool: Pool, item: Any, stream: Any, timeout: float | None) -> _native.Block | SegmentPart:
        if isinstance(item, SegmentPart):
            return item
        if isinstance(item, Block):
            return item._native
        source = _arrays.dense(item, stream)
        block = pool.alloc(timeout)
        self._copies.append(block)
        block.tensor(source.shape, source.dtype).write(source, stream)
        return block._native

    def release(self) -> None:
        """Gives back what was not submitted."""
        for block in self._copies:
            block.close()


class _Ends:
    """The tickets of a queue that an event loop awaits. They share one file descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event: _native.QueueEvent) -> None:
        self._loop = loop
        self._event = event
        self._waiting: dict[asyncio.Future[None], Ticket] = {}
        loop.add_reader(event.fileno(), self._look)
        self._timer = loop.call_later(_MAX_SLEEP, self._look_again)

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(_MAX_SLEEP, self._look_again)
        self._look()

    def _look(self) -> None:
        gone = None
        try:
            # First, so that a task that ends meanwhile is not missed.
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

    def enter(self, ticket: Ticket) -> asyncio.Future[None]:
        """Returns what is done when the task may have ended."""
        future = self._loop.create_future()
        self._waiting[future] = ticket
        return future

    def leave(self, future: asyncio.Future[None]) -> bool:
        """Ends a wait. Returns whether nobody waits any more, and closes the descriptor then."""
        del self._waiting[future]
        if self._waiting:
            return False
        self._timer.cancel()
        self._loop.remove_reader(self._event.fileno())
        self._event.close()
        return True


_ENDS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Ends]] = WeakKeyDictionary()
"""Of each event loop: what its tickets wait for, by their queues."""


async def awaited(ticket: Ticket) -> TaskResult:
    """Takes the result of a task in an event loop."""
    loop = asyncio.get_running_loop()
    queues = _ENDS.setdefault(loop, {})
    while True:
        if ticket.done():
            try:
                return ticket.result(0)
            except TimeoutError:
                # A dead letter that was retried meanwhile.
                continue
        ends = queues.get(ticket._queue)
        if ends is None:
            ends = queues[ticket._queue] = _Ends(loop, ticket._event())
        future = ends.enter(ticket)
        try:
            # It may have ended before the descriptor told of that.
            if not ticket.done():
                await future
        finally:
            if ends.leave(future):
                del queues[ticket._queue]


_MAX_SLEEP = 1.0
"""Seconds after which an event loop checks whether the broker is still there: its end makes no descriptor readable."""
