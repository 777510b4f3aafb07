"""Timelines: they order the work of several processes."""

import asyncio
import builtins
import operator
from typing import Any, SupportsIndex, overload

from partywall import _native, _streams
from partywall._arrays import device_name
from partywall._errors import NoDevice
from partywall._handle import Connected, Handle, readable
from partywall._native import LimitedWait


class Timeline(Connected[_native.Timeline]):
    """A named value that only grows. One process signals it; any number of hosts and streams wait for it.

    Each value stands for work: the timeline reaches 5 when the work that 5 stands for is done. Every wait ends, when
    the value is reached or when the writer ends. If the writer dies, a wait of a host raises `WriterDied`, but a
    waiting stream continues. Therefore call `check` before you use results of work that a stream did after a wait.
    docs/ordering.md has recipes.

    `stream` is an integer, an object with `__cuda_stream__`, a stream of torch, cupy or numba, or `None` for the
    current stream of torch, else of cupy. `device` is the stream's GPU if the stream does not name it; by default the
    current one of torch or cupy.
    """

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def value(self) -> int:
        """The last signalled value."""
        return self._native.value

    @property
    def announced(self) -> int:
        """The highest promised value; at least `value`."""
        return self._native.announced

    @property
    def ending(self) -> str | None:
        """Why no further value will be signalled; `None` as long as a value may be signalled.

        `owner_died`, `owner_faulted`, `closed`, `abandoned`, `broker_gone` or `evicted`.
        """
        return self._native.ending

    @property
    def is_writer(self) -> bool:
        """Whether this handle may signal."""
        return self._native.is_writer

    def signal(self, value: SupportsIndex) -> None:
        """Signals a value, which must be greater than all before. Waiters see all earlier writes of this thread.

        If a stream has not yet stored a promised value, first waits for that stream, for at most 10 seconds.
        """
        self._native.signal(timeline_value(value))

    def signal_on(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """Enqueues a signal on a stream, after all work that is on the stream now. Returns immediately.

        If another stream has not yet stored a promised value, first waits for that stream, for at most 10 seconds.
        """
        try:
            self._native.signal_on(timeline_value(value), *_streams.place(stream, device))
        except NoDevice as error:
            raise _streams.without_gpu(error, f"signal({value})") from None

    def signal_on_and_wake(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """As `signal_on`, but wakes sleeping hosts as soon as the value is reached, not up to a millisecond later.

        A host function that is enqueued after the signal wakes them; it occupies the stream for tens of microseconds.
        """
        try:
            self._native.signal_on_and_wake(timeline_value(value), *_streams.place(stream, device))
        except NoDevice as error:
            raise _streams.without_gpu(error, f"signal({value})") from None

    def promise_on(self, value: SupportsIndex, stream: Any = None, *, device: Any = None) -> None:
        """Declares that your kernel, which is already on a stream, will store `value` at `device_ptr`, and no value
        before.

        Without this call, sleeping hosts see the value up to 100 ms late.
        """
        self._native.promise_on(timeline_value(value), *_streams.place(stream, device))

    def rests_on(self, *timelines: "Timeline") -> None:
        """Declares that all values from now on depend on the given timelines, as waited for through these handles.

        If one of those timelines fails, waiters of this timeline get `Tainted`.
        """
        for timeline in timelines:
            self._native.rests_on(timeline._native)

    def wait(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds, or for ever, until the timeline has reached `value`."""
        self._native.wait(timeline_value(value), timeout)

    def wait_announced(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """Waits until `value` is promised, which means that its work is enqueued. A `wait_on` or `wait` after that is
        short."""
        self._native.wait_announced(timeline_value(value), timeout)

    async def wait_async(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """As `wait`, in an event loop."""
        with self.event(value) as event:
            try:
                async with asyncio.timeout(_native.checked_timeout(timeout)):
                    while not event.check():
                        await self._readable(event)
            except builtins.TimeoutError:
                assert timeout is not None, "only a given timeout can expire"
                event._native.give_up(timeout)

    async def _readable(self, event: "TimelineEvent") -> None:
        """Waits a while for a descriptor. Raises `Closed` once this handle is closed, which does not make it
        readable."""
        self._native.require_open()
        try:
            async with asyncio.timeout(_MAX_SLEEP):
                await readable(event.fileno())
        except builtins.TimeoutError:
            pass

    def event(self, value: SupportsIndex) -> "TimelineEvent":
        """Returns a file descriptor for event loops: readable once `value` is reached, or can no longer be reached."""
        return TimelineEvent(self._native.event(timeline_value(value)))

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
        """Makes work that is enqueued on a stream from now on wait until the timeline has reached `value`. Returns
        immediately.

        Load kernels, launch them once and allocate memory before a stream waits: while a stream waits, CUDA may block
        these calls until the wait ends. With a `limit` the stream continues after at most that many seconds, and the
        returned `LimitedWait` tells how the wait ended. A thread of this process polls such a wait, so it ends up to a
        millisecond later than a wait without a limit.
        """
        place, value = _streams.place(stream, device), timeline_value(value)
        try:
            if limit is not None:
                return self._native.wait_on_for(value, *place, limit)
            self._native.wait_on(value, *place)
        except NoDevice as error:
            raise _streams.without_gpu(error, f"wait({value})") from None
        return None

    def capture_wait(self, stream: Any = None, *, device: Any = None) -> "GraphNode":
        """Adds a wait to the CUDA graph that a stream is being captured into, behind the work captured so far.

        `partywall.launch` says at each launch which value it waits for. Raises `BadGraph` unless the stream is being
        captured.
        """
        return self._capture(False, stream, device)

    def capture_signal(self, stream: Any = None, *, device: Any = None) -> "GraphNode":
        """Adds a signal to the CUDA graph that a stream is being captured into, behind the work captured so far.

        `partywall.launch` says at each launch which value it signals. Raises `BadGraph` unless the stream is being
        captured, and `NotWriter` unless this is the timeline's writer.
        """
        return self._capture(True, stream, device)

    def _capture(self, signal: bool, stream: Any, device: Any) -> "GraphNode":
        return GraphNode(self, _native.capture(self._native, signal, *_streams.place(stream, device)))

    def check(self) -> None:
        """Raises `TimelineEnded` or `Tainted` if a value that was waited for through this handle is known to be
        invalid.

        Call it when the work that a stream did after a wait is done, before you use the results.
        """
        self._native.check()

    def follow(self) -> bool:
        """Follows the next writer after the last one has died or closed. Returns `False` if there is none yet."""
        return self._native.follow()

    def abandon(self) -> None:
        """Ends the waits of all processes for values that were not reached. The writer must open the timeline again."""
        self._native.abandon()

    def device_ptr(self, device: Any = "cuda") -> int:
        """Returns the address of the value, 8 bytes, for kernels on a GPU that read or store it. See
        docs/ordering.md."""
        return self._native.device_ptr(device_name(device))

    def close(self) -> None:
        """Closes the handle. The writer's close ends all waits for values beyond the promised ones.

        Calling it again does nothing.
        """
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a timeline is shared by name: send the name")

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Timeline {self.name}: closed>"
        role, ending = "writer, " if self.is_writer else "", f", {self.ending}" if self.ending else ""
        return f"<partywall.Timeline {self.name}: {role}at {self.value} of {self.announced}{ending}>"


class TimelineEvent(Handle[_native.TimelineEvent]):
    """A file descriptor for one value; `Timeline.event` returns one. Poll it for reading, but do not read from it."""

    def fileno(self) -> int:
        """Returns the descriptor, which this object owns."""
        return self._native.fileno()

    def check(self) -> bool:
        """Returns whether the value is reached. Raises as `Timeline.wait` does if the value can no longer be
        reached."""
        return self._native.check()

    def close(self) -> None:
        """Closes the descriptor. Calling it again does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<partywall.TimelineEvent of {self._native.value}{': closed' if self.closed else ''}>"


class GraphNode:
    """A wait or a signal in a CUDA graph, from `Timeline.capture_wait` or `Timeline.capture_signal`.

    `partywall.launch` gives it a value at each launch. In a launch that gives it none, a wait passes and a signal does
    nothing.
    """

    def __init__(self, timeline: Timeline, native: _native.GraphNode) -> None:
        self._timeline = timeline
        self._native = native

    @property
    def timeline(self) -> Timeline:
        """The timeline."""
        return self._timeline

    @property
    def is_signal(self) -> bool:
        """Whether it signals; otherwise it waits."""
        return self._native.is_signal

    def __repr__(self) -> str:
        kind = "signal of" if self.is_signal else "wait for"
        return f"<partywall.GraphNode: {kind} {self._timeline.name}>"


_MAX_SLEEP = 1.0
"""Seconds between two checks whether the handle was closed."""


def timeline_value(value: SupportsIndex) -> int:
    """Returns a value as the compiled half takes it."""
    value = operator.index(value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"values of a timeline are 0 to 2⁶¹, not {value}")
    return value
