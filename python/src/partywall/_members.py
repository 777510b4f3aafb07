"""Who is in a domain."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Member:
    """A member in a listing: a process has one for each of its connections."""

    member: int
    """Its number."""
    pid: int
    """Its process, as the broker sees it, or as it says itself if it is in another PID namespace."""
    uid: int
    """Its user."""
    command: str
    """Its command line."""
    state: Literal["alive", "hung", "lost_context", "suspect", "evicted", "held_by_child", "unproven", "dead"]
    """How it is."""
    doubt: Literal["mps", "no_pidfd"] | None
    """Why its death will be no proof that its work is over: `mps`, `no_pidfd`, or `None`."""
    quiet: float | None
    """Seconds since its last heartbeat, where one is expected."""
    leases: int
    """Leases that it holds."""
    timelines: int
    """Timelines that it signals."""
    permits: int | None
    """Permits of semaphores that it has; `None` if they are too many to be counted."""
    blocks: int | None
    """Blocks of pools and topics that it has; `None` if they are too many to be counted."""
    nbytes: int
    """Bytes of what it holds."""
    since: float
    """When it joined, as `time.time()` has it."""
    simulated: bool
    """Whether it runs on the simulated CUDA driver."""


@dataclass(frozen=True)
class EvictedMember:
    """A member that was evicted."""

    member: int
    """Its number."""
    pid: int
    """Its process."""
    command: str
    """Its command line."""
    leases: int
    """Leases that stay in quarantine until its death is proved."""
    nbytes: int
    """Bytes of what these are on."""
    kill: Literal["not_asked", "sent", "exited", "no_pidfd", "refused"]
    """What came of killing it."""
    errno: int | None
    """Why the kernel refused that, if it did."""
