"""Semaphores: limits on the number of permits that processes hold at a time."""

import asyncio
import operator
import threading
from typing import TYPE_CHECKING, Any, SupportsIndex

from partywall import _native, _streams, _threads
from partywall._errors import NoDevice
from partywall._handle import Connected, Held

if TYPE_CHECKING:
    from partywall._domain import Domain


class Semaphore(Connected[_native.Semaphore]):
    """A named number of permits. All processes together hold at most that many at a time.

        with sem:                               # waits for a permit, and gives it back
            ...

    Waiters are served in the order of their arrival. The permits of a process that dies become free. Threads and tasks
    may share a handle.
    """

    def __init__(self, domain: "Domain", native: _native.Semaphore) -> None:
        super().__init__(domain, native)
        # The permits of all open `with` blocks. They are interchangeable.
        self._inside: list[Permit] = []

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def maximum(self) -> int:
        """The total number of permits."""
        return self._native.maximum

    @property
    def available(self) -> int:
        """The number of permits that are free now."""
        return self._native.available

    @property
    def waiting(self) -> int:
        """The number of threads, in all processes, that wait for a permit now."""
        return self._native.waiting

    def acquire(self, timeout: float | None = None) -> "Permit":
        """Takes a permit. Waits for one up to `timeout` seconds, or for ever."""
        permit = self._native.acquire(timeout, None)
        assert permit is not None, "without a callback, the wait cannot be stopped"
        return Permit(permit)

    def try_acquire(self) -> "Permit | None":
        """Takes a permit if one is free and no thread waits for it; else returns `None`."""
        permit = self._native.try_acquire()
        return None if permit is None else Permit(permit)

    async def acquire_async(self, timeout: float | None = None) -> "Permit":
        """As `acquire`, in an event loop. If it has to wait, it starts a thread for the wait."""
        _native.checked_timeout(timeout)
        if free := self.try_acquire():
            return free
        loop, given_up = asyncio.get_running_loop(), threading.Event()
        acquired: asyncio.Future[_native.Permit | None] = loop.create_future()

        def deliver(permit: _native.Permit | None, error: BaseException | None) -> None:
            if acquired.done():
                # The wait was cancelled; dropping the permit gives it back.
                return
            acquired.set_result(permit) if error is None else acquired.set_exception(error)

        def wait() -> None:
            permit, error = None, None
            try:
                permit = self._native.acquire(timeout, given_up.is_set)
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(deliver, permit, error)
            except RuntimeError:
                # The loop is closed, and the waiting task with it.
                pass

        _threads.start("partywall-acquire", wait)
        try:
            permit = await acquired
        finally:
            given_up.set()
        assert permit is not None, "the thread gives up only after the task has stopped waiting"
        return Permit(permit)

    def close(self) -> None:
        """Closes the handle, and ends the waits of this process that use it. Permits stay.

        Calling it again does nothing.
        """
        super().close()

    def __enter__(self) -> "Semaphore":
        self._inside.append(self.acquire())
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aenter__(self) -> "Semaphore":
        self._inside.append(await self.acquire_async())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        permit = self._inside.pop()
        if self._is_ours():
            permit.release()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a semaphore is shared by name: send the name")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.available} of {self.maximum} free, {self.waiting} waiting"
        return f"<partywall.Semaphore {self.name}: {state}>"


def permits(number: SupportsIndex) -> int:
    """Checks a number of permits, and returns it."""
    number = operator.index(number)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"a semaphore has 1 to 65,536 permits, not {number}")
    return number


class Permit(Held[_native.Permit]):
    """A permit of a semaphore. Give it back with `release`, `release_on` or the end of its `with`."""

    @property
    def held(self) -> bool:
        """Whether the permit must still be given back."""
        return not self._native.closed

    def release(self) -> None:
        """Gives the permit back. Raises `NotHeld` if it was already given back."""
        self._native.release()

    def release_on(self, stream: Any = None, *, device: Any = None) -> None:
        """Gives the permit back once all work that is now on the stream is done. Returns immediately.

        `stream` and `device` are as for a `Timeline`.
        """
        try:
            self._native.release_on(*_streams.place(stream, device))
        except NoDevice as error:
            raise _streams.without_gpu(error, "release()") from None

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        if self.held and self._is_ours():
            self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a permit is this process's own")

    def __repr__(self) -> str:
        return f"<partywall.Permit of {self._native.name}: {'held' if self.held else 'given back'}>"
