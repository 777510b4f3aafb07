"""Timelines: they order the work of several processes."""

import asyncio
import builtins
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from partywall import _native
from partywall._handle import Closing, Connected, readable
from partywall._native import LimitedWait


class Timeline(Connected, _native.Timeline):
    """A named value that only grows. One process signals it; any number of hosts and streams wait for it.

    Each value stands for work: the timeline reaches 5 when the work that 5 stands for is done. Every wait ends, when
    the value is reached or when the writer ends. If the writer dies, a wait of a host raises `WriterDied`, but a
    waiting stream continues. Therefore call `check` before you use results of work that a stream did after a wait.
    docs/ordering.md has recipes.

    `stream` is an integer, an object with `__cuda_stream__`, a stream of torch, cupy or numba, or `None` for the
    current stream of torch, else of cupy. `device` is the stream's GPU if the stream does not name it; by default the
    current one of torch or cupy.
    """

    async def wait_async(self, value: SupportsIndex, timeout: float | None = None) -> None:
        """As `wait`, in an event loop."""
        with self.event(value) as event:
            try:
                async with asyncio.timeout(_native.checked_timeout(timeout)):
                    while not event.check():
                        await self._readable(event)
            except builtins.TimeoutError:
                assert timeout is not None, "only a given timeout can expire"
                event._give_up(timeout)

    async def _readable(self, event: "TimelineEvent") -> None:
        """Waits a while for a descriptor. Raises `Closed` once this handle is closed, which does not make it
        readable."""
        self._require_open()
        try:
            async with asyncio.timeout(_MAX_SLEEP):
                await readable(event.fileno())
        except builtins.TimeoutError:
            pass

    def event(self, value: SupportsIndex) -> "TimelineEvent":
        """Returns a file descriptor for event loops: readable once `value` is reached, or can no longer be reached."""
        return TimelineEvent(self, value)

    if TYPE_CHECKING:

        # The compiled function cannot say that only a `limit` gives a `LimitedWait`.
        @overload  # type: ignore[override]
        def wait_on(
            self, value: SupportsIndex, stream: Any = None, *, limit: None = None, device: Any = None
        ) -> None: ...
        @overload
        def wait_on(
            self, value: SupportsIndex, stream: Any = None, *, limit: float, device: Any = None
        ) -> LimitedWait: ...
        def wait_on(self, *_: Any, **__: Any) -> LimitedWait | None: ...

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


class TimelineEvent(Closing, _native.TimelineEvent):
    """A file descriptor for one value; `Timeline.event` returns one. Poll it for reading, but do not read from it."""

    def __repr__(self) -> str:
        return f"<partywall.TimelineEvent of {self._value}{': closed' if self.closed else ''}>"


_MAX_SLEEP = 1.0
"""Seconds between two checks whether the handle was closed."""
