"""Timelines: in which order the work of several processes is done."""

import asyncio
import builtins
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from partywall import _native, _streams
from partywall._arrays import device_name
from partywall._handle import Connected, Handle, readable
from partywall._native import LimitedWait

if TYPE_CHECKING:
    from partywall._domain import Domain


class Timeline(Connected[_native.Timeline]):
    """A named value that only grows: one process signals it, any number of them wait, on hosts and on streams.

    A value is a promise about work: the timeline stands at 5 when the work is done that 5 stands for. Every wait ends, by
    the value or with the writer. If that dies, a host's wait raises `WriterDied`, and a stream simply goes on: so ask
    `check` before using what was made behind a stream's wait. docs/ordering.md has recipes.

    `stream` is an integer, anything with `__cuda_stream__`, a stream of torch, cupy or numba, or `None` for torch's, else
    cupy's, current one. `device` is its GPU, if the stream does not say, by default the current one of torch or cupy.
    """

    def __init__(self, domain: "Domain", native: _native.Timeline) -> None:
        super().__init__(domain, native)

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def value(self) -> int:
        """The last value that was really signalled."""
        return self._native.value

    @property
    def announced(self) -> int:
        """The highest value that was promised: not less than `value`."""
        return self._native.announced

    @property
    def ending(self) -> str | None:
        """Why no further value will come; `None` while one may.

        `owner_died`, `owner_faulted`, `closed`, `abandoned`, `broker_gone` or `evicted`.
        """
        return self._native.ending

    @property
    def is_writer(self) -> bool:
        """Whether this is the handle that signals."""
        return self._native.is_writer

    def signal(self, value: SupportsIndex) -> None:
        """Signals a value, which is larger than all before; who waits for it sees what this thread did until now.

        If a stream owes a value still, waits for that first, for 10 seconds at most.
        """
        self._native.signal(_value(value))

    def signal_on(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """Has a stream signal a value when everything that is on it now is done. Returns at once.

        If another stream owes a value still, waits for that first, for 10 seconds at most.
        """
        self._native.signal_on(_value(value), *_streams.place(stream, device))

    def signal_on_and_wake(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """As `signal_on`, and wakes hosts that sleep as soon as the value is there, instead of up to a millisecond later.

        That is done by a host function behind the signal, which keeps the stream for tens of microseconds.
        """
        self._native.signal_on_and_wake(_value(value), *_streams.place(stream, device))

    def promise_on(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """Says that a kernel of yours which is on a stream already will store `value` at `device_ptr`, and nothing before.

        Without it hosts that sleep find the value up to 100 ms late.
        """
        self._native.promise_on(_value(value), *_streams.place(stream, device))

    def rests_on(self, *timelines: "Timeline") -> None:
        """Says that values from now on are made of what those timelines stand for, as it is waited for through them.

        If one of them fails, who waits for this one hears of it: `Tainted`.
        """
        for timeline in timelines:
            self._native.rests_on(timeline._native)

    def wait(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds, or for ever, until the timeline has reached `value`."""
        self._native.wait(_value(value), timeout)

    def wait_announced(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """Waits until `value` is promised: until the work that it stands for is enqueued.

        Then `wait_on`, or `wait`, has not long to wait.
        """
        self._native.wait_announced(_value(value), timeout)

    async def wait_async(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """As `wait`, in an event loop."""
        with self.event(value) as event:
            try:
                async with asyncio.timeout(timeout):
                    if not event.check():
                        await readable(event.fileno())
            except builtins.TimeoutError:
                assert timeout is not None, "it is what has timed out"
                event._native.give_up(timeout)
            else:
                event.check()

    def event(self, value: SupportsIndex) -> "TimelineEvent":
        """A file descriptor for other event loops: readable once `value` is reached, or is known not to be."""
        return TimelineEvent(self._native.event(_value(value)))

    @overload
    def wait_on(
        self, value: SupportsIndex, stream: Any = None, *, limit: None = None, device: Any = None
    ) -> None: ...
    @overload
    def wait_on(
        self, value: SupportsIndex, stream: Any = None, *, limit: float, device: Any = None
    ) -> LimitedWait: ...
    def wait_on(
        self, value: SupportsIndex, stream: Any = None, *, limit: float | None = None, device: Any = None
    ) -> LimitedWait | None:
        """Has what is enqueued on a stream from now on wait until the timeline has reached `value`. Returns at once.

        Load kernels, launch them once and allocate before a stream waits: behind a wait CUDA may block until it ends. With
        a `limit` the stream goes on after so many seconds at most; the `LimitedWait` then says how the wait ended. It is
        looked after by a thread of this process, and ends up to a millisecond later than others.
        """
        place, value = _streams.place(stream, device), _value(value)
        if limit is not None:
            return self._native.wait_on_for(value, *place, limit)
        self._native.wait_on(value, *place)
        return None

    def check(self) -> None:
        """Raises if what was waited for through this handle is not valid, as far as is known: `TimelineEnded`, `Tainted`.

        To be asked when the work behind a wait of a stream is done, before its results are used.
        """
        self._native.check()

    def follow(self) -> bool:
        """Goes over to the next writer's values, when the last one is dead or has closed; `False` if there is none yet."""
        return self._native.follow()

    def abandon(self) -> None:
        """Ends all waits for what is not reached, for everybody. The writer has to open the timeline again."""
        self._native.abandon()

    def device_ptr(self, device: Any = "cuda") -> int:
        """Where kernels on a GPU find the value, or store it: an address of 8 bytes. docs/ordering.md says how."""
        return self._native.device_ptr(device_name(device))

    def close(self) -> None:
        """Gives it back; the writer's ends the timeline for who waits for more than is promised.

        Calling it again does nothing.
        """
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a timeline is shared by its name: send that")

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Timeline {self.name}: closed>"
        role, ending = "writer, " if self.is_writer else "", f", {self.ending}" if self.ending else ""
        return f"<partywall.Timeline {self.name}: {role}at {self.value} of {self.announced}{ending}>"


class TimelineEvent(Handle[_native.TimelineEvent]):
    """A file descriptor that tells of a value; made by `Timeline.event`. Poll it for reading, and read nothing from it."""

    def __init__(self, native: _native.TimelineEvent) -> None:
        super().__init__(native)

    def fileno(self) -> int:
        """The descriptor, which is this object's."""
        return self._native.fileno()

    def check(self) -> bool:
        """Whether the value is reached. Raises as `Timeline.wait` does if it will not be."""
        return self._native.check()

    def close(self) -> None:
        """Closes the descriptor. Calling it again does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<partywall.TimelineEvent of {self._native.value}{': closed' if self.closed else ''}>"


def _value(value: SupportsIndex) -> int:
    value = operator.index(value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"values of a timeline are 0 to 2⁶¹, not {value}")
    return value
