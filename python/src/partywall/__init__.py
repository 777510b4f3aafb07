"""Processes on one Linux machine share arrays and models in GPU or host memory by name, without copying them.

    import partywall as pw

    with pw.connect() as d, d.create("weights", (1024, 1024), "float32") as build:
        torch.from_dlpack(build).normal_()
        weights = build.commit()          # from here on others see it, and nobody can change it

    # in any other process, before or after:
    x = torch.from_dlpack(pw.connect().open("weights", timeout=60))

Importing this loads no driver, starts no broker, and imports no framework.
"""

import atexit

from partywall import _native
from partywall._build import Build
from partywall._doctor import Finding, doctor
from partywall._domain import Claim, Domain, Name, connect
from partywall._errors import (
    Abandoned,
    AccessDenied,
    BadFile,
    BadName,
    BadPattern,
    BadSource,
    BadTensor,
    BadValue,
    BlockTooSmall,
    BrokerGone,
    BrokerUnreachable,
    CannotGrow,
    CannotKeep,
    Captured,
    Closed,
    ContextLost,
    CudaError,
    Error,
    Evicted,
    FileNotFound,
    Forked,
    LaunchBlocking,
    LimitReached,
    NameExists,
    NameNotFound,
    NoDevice,
    NoSuchMember,
    NoSuchView,
    NotHeld,
    NotReady,
    NotShareable,
    NotWriter,
    NotYourself,
    OutOfMemory,
    OwnerDied,
    Parted,
    ReadOnly,
    RemoteDevice,
    SampleFailed,
    StaleBlock,
    StillUsed,
    Tainted,
    TensorNotFound,
    TimelineEnded,
    TimelineLost,
    TimeoutError,
    TooManyHeld,
    TooManyLoans,
    TopicFull,
    Unproven,
    VersionMismatch,
    VersionNotFound,
    Withdrawn,
    WriterClosed,
    WriterDied,
    WriterEvicted,
    WriterExists,
    WriterFaulted,
    WrongKind,
    WrongMaximum,
    WrongPool,
    WrongTopic,
)
from partywall._members import EvictedMember, Member
from partywall._native import LimitedWait, Sample, Tensor
from partywall._pool import Block, BlockRef, Pool, PoolStats
from partywall._segment import Pinned, Segment
from partywall._semaphore import Permit, Semaphore
from partywall._timeline import Timeline, TimelineEvent
from partywall._topic import Loan, Publisher, Subscriber, SubscriberStats, Topic, TopicStats
from partywall._watch import Event, Watch

__version__ = _native.VERSION

__all__ = [
    "Abandoned",
    "AccessDenied",
    "BadFile",
    "BadName",
    "BadPattern",
    "BadSource",
    "BadTensor",
    "BadValue",
    "Block",
    "BlockRef",
    "BlockTooSmall",
    "BrokerGone",
    "BrokerUnreachable",
    "Build",
    "CannotGrow",
    "CannotKeep",
    "Captured",
    "Claim",
    "Closed",
    "ContextLost",
    "CudaError",
    "Domain",
    "Error",
    "Event",
    "Evicted",
    "EvictedMember",
    "FileNotFound",
    "Finding",
    "Forked",
    "LaunchBlocking",
    "LimitReached",
    "LimitedWait",
    "Loan",
    "Member",
    "Name",
    "NameExists",
    "NameNotFound",
    "NoDevice",
    "NoSuchMember",
    "NoSuchView",
    "NotHeld",
    "NotReady",
    "NotShareable",
    "NotWriter",
    "NotYourself",
    "OutOfMemory",
    "OwnerDied",
    "Parted",
    "Permit",
    "Pinned",
    "Pool",
    "PoolStats",
    "Publisher",
    "ReadOnly",
    "RemoteDevice",
    "Sample",
    "SampleFailed",
    "Segment",
    "Semaphore",
    "StaleBlock",
    "StillUsed",
    "Subscriber",
    "SubscriberStats",
    "Tainted",
    "Tensor",
    "TensorNotFound",
    "Timeline",
    "TimelineEnded",
    "TimelineEvent",
    "TimelineLost",
    "TimeoutError",
    "TooManyHeld",
    "TooManyLoans",
    "Topic",
    "TopicFull",
    "TopicStats",
    "Unproven",
    "VersionMismatch",
    "VersionNotFound",
    "Watch",
    "Withdrawn",
    "WriterClosed",
    "WriterDied",
    "WriterEvicted",
    "WriterExists",
    "WriterFaulted",
    "WrongKind",
    "WrongMaximum",
    "WrongPool",
    "WrongTopic",
    "__version__",
    "connect",
    "doctor",
]

# What was dropped before is given back while there is still time; the rest goes with the process.
atexit.register(_native.flush, 1.0)
