"""Semaphores: limits on the number of permits that processes hold at a time."""

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from partywall import _native, _threads
from partywall._handle import Connected
from partywall._native import Permit

if TYPE_CHECKING:
    from partywall._domain import Domain


class Semaphore(Connected, _native.Semaphore):
    """A named number of permits. All processes together hold at most that many at a time.

        with sem:                               # waits for a permit, and gives it back
            ...

    Waiters are served in the order of their arrival. The permits of a process that dies become free. Threads and tasks
    may share a handle.
    """

    def __init__(self, domain: "Domain", *_: Any) -> None:
        super().__init__(domain)
        # The permits of all open `with` blocks. They are interchangeable.
        self._inside: list[Permit] = []

    async def acquire_async(self, timeout: float | None = None) -> Permit:
        """As `acquire`, in an event loop. If it has to wait, it starts a thread for the wait."""
        _native.checked_timeout(timeout)
        if free := self.try_acquire():
            return free
        loop, given_up = asyncio.get_running_loop(), threading.Event()
        acquired: asyncio.Future[Permit | None] = loop.create_future()

        def give_back(permit: Permit | None) -> None:
            if permit is not None:
                permit.release()

        def deliver(permit: Permit | None, error: BaseException | None) -> None:
            if acquired.done():
                # The wait was cancelled.
                give_back(permit)
            else:
                acquired.set_result(permit) if error is None else acquired.set_exception(error)

        def wait() -> None:
            permit, error = None, None
            try:
                permit = self._acquire_unless(timeout, given_up.is_set)
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(deliver, permit, error)
            except RuntimeError:
                # The loop is closed, and the waiting task with it.
                give_back(permit)

        _threads.start("partywall-acquire", wait)
        try:
            permit = await acquired
        except asyncio.CancelledError:
            # The permit may have arrived at the same moment.
            if not acquired.cancelled() and acquired.exception() is None:
                give_back(acquired.result())
            raise
        finally:
            given_up.set()
        assert permit is not None, "the thread gives up only after the task has stopped waiting"
        return permit

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
