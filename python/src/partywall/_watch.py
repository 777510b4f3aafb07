"""What happens to names, as it happens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from partywall import _native
from partywall._handle import Connected

if TYPE_CHECKING:
    from partywall._domain import Domain


@dataclass(frozen=True)
class Event:
    """Something that happened to a name."""

    event: Literal["created", "committed", "withdrawn", "owner_died", "owner_faulted", "reclaimed", "missed"]
    """What happened.

    `missed`: some of what happened cannot be told any more. A program that keeps a list of names makes it anew and
    goes on.
    """
    named: Literal["segment", "timeline", "semaphore", "pool", "topic"] | None
    """What has the name."""
    name: str | None
    """The name."""
    version: int | None
    """The version, where one was committed or its memory is free."""
    nbytes: int | None
    """Bytes of that."""
    pid: int | None
    """The process that did it, or whose end it was."""
    at: float | None
    """When, as `time.time()` has it."""
    missed: int | None
    """How many events are missed, where that is known."""
    point: str
    """Where a watch goes on that is to get what follows: `Domain.watch(after=…)`."""


class Watch(Connected[_native.Watch]):
    """The events of names that are like a pattern, one after the other; made by `Domain.watch`.

        for event in d.watch("llm/*"):
            print(event.event, event.name)

    Nothing is lost while events are taken as fast as they come. A broker keeps a mebibyte of them: who is slower gets
    `missed`.
    """

    def __init__(self, domain: "Domain", native: _native.Watch) -> None:
        super().__init__(domain, native)

    @property
    def pattern(self) -> str:
        """The pattern."""
        return self._native.pattern

    @property
    def point(self) -> str:
        """Where another watch goes on that is to get what this one has not returned yet, in whatever process."""
        return self._native.point

    def next(self, timeout: float | None = None) -> Event:
        """The next event, for which it waits up to `timeout` seconds, or for ever."""
        return Event(**self._native.next(timeout))

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return self.next()

    def close(self) -> None:
        """Ends it. Calling it again does nothing."""
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a watch is this process's own: send its point")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.point}"
        return f"<partywall.Watch of {self.pattern}: {state}>"
