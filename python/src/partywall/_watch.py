"""Events of names, as they happen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from partywall import _native
from partywall._handle import Connected


@dataclass(frozen=True)
class Event:
    """Something that happened to a name."""

    event: Literal[
        "created",
        "committed",
        "withdrawn",
        "deadline_set",
        "deadline_passed",
        "owner_died",
        "owner_faulted",
        "device_lost",
        "reclaimed",
        "missed",
    ]
    """What happened.

    `missed` means that the broker has discarded events. A program that keeps a list of names then lists the names
    again.
    """
    named: Literal["segment", "timeline", "semaphore", "pool", "topic"] | None
    """The kind of object that has the name."""
    name: str | None
    """The name."""
    version: int | None
    """The version that was committed, or whose memory was freed."""
    nbytes: int | None
    """The size of that version in bytes."""
    pid: int | None
    """The process that caused the event, or that ended."""
    at: float | None
    """The time, as `time.time()` counts it."""
    missed: int | None
    """How many events were missed, if that is known."""
    point: str
    """The point after this event, for `Domain.watch(after=…)`."""


class Watch(Connected, _native.Watch):
    """The events of all names that match a pattern, in order; `Domain.watch` returns one.

        for event in d.watch("llm/*"):
            print(event.event, event.name)

    A broker keeps one mebibyte of events. A watch that falls further behind receives `missed`; otherwise none is lost.
    """

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return self.next()

    def close(self) -> None:
        """Ends the watch. Calling it again does nothing."""
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a watch is this process's own: send its point")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.point}"
        return f"<partywall.Watch of {self.pattern}: {state}>"
