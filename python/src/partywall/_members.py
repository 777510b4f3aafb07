"""The members of a domain."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemberWait:
    """A wait of a member for a name or a timeline."""

    on: Literal["commit", "withdrawal", "growth", "timeline"]
    """What it waits for: that a version is committed, withdrawn or grown, or for a value of a timeline."""
    name: str
    """The name of the segment or timeline."""
    target: int | None
    """The version, `None` if any will do, or the value of the timeline."""
    by: int | None
    """The pid of the process that can end the wait, as far as it is known."""
    seconds: float | None
    """Seconds since it began, of a wait for a timeline."""


@dataclass(frozen=True)
class Member:
    """A member in a listing. A process is one member for each of its connections."""

    member: int
    """The number of the member."""
    pid: int
    """The process id as the broker sees it, or as the process reports it if it is in another PID namespace."""
    uid: int
    """The user id."""
    command: str
    """The command line."""
    state: Literal["alive", "hung", "lost_context", "suspect", "evicted", "held_by_child", "unproven", "dead"]
    """The state of the member."""
    doubt: Literal["mps", "no_pidfd"] | None
    """Why its death will not prove that its work has ended: `mps`, `no_pidfd`, or `None`."""
    mps: str | None
    """The directory of the MPS daemon whose client it is; `None` if it is none, or has used no GPU yet."""
    quiet: float | None
    """Seconds since its last heartbeat; `None` if none is expected."""
    leases: int
    """Leases that it holds."""
    timelines: int
    """Timelines that it signals."""
    permits: int | None
    """Permits of semaphores that it holds; `None` if there are too many to count."""
    blocks: int | None
    """Blocks of pools and topics that it holds; `None` if there are too many to count."""
    tasks: int | None
    """Tasks of queues that it works on; `None` if there are too many to count."""
    nbytes: int
    """Bytes of the memory that it holds."""
    since: float
    """When it joined, as `time.time()` counts it."""
    waits: tuple[MemberWait, ...]
    """Its first waits for names, at most four, and its longest wait for a timeline, which is listed once it has lasted
    for about half a second."""
    simulated: bool
    """Whether it runs on the simulated CUDA driver."""


@dataclass(frozen=True)
class EvictedMember:
    """A member that was evicted."""

    member: int
    """The number of the member."""
    pid: int
    """The process id."""
    command: str
    """The command line."""
    leases: int
    """Leases that stay in quarantine until its death is proved."""
    nbytes: int
    """Bytes of the memory that these leases hold."""
    kill: Literal["not_asked", "sent", "exited", "no_pidfd", "refused"]
    """Whether SIGKILL was requested and sent, or why it could not be sent."""
    errno: int | None
    """The error number, if the kernel refused to send SIGKILL."""


@dataclass(frozen=True)
class Withdrawal:
    """A withdrawal with a deadline."""

    pid: int
    """The process that withdrew the name."""
    at: float
    """When it did, in seconds since 1970."""
    until: float
    """Until when readers are to have dropped it, in seconds since 1970."""
    then: Literal["wait", "stale", "evict"]
    """What happens to readers that are left then."""
