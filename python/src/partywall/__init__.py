"""Processes on one Linux machine share arrays and models in GPU or host memory by name, without copying them.

    import partywall as pw

    with pw.connect() as d, d.create("weights", (1024, 1024), "float32") as build:
        torch.from_dlpack(build).normal_()
        weights = build.commit()          # now other processes see it, and no process can change it

    # in any other process, before or after:
    x = torch.from_dlpack(pw.connect().open("weights", timeout=60))

Importing the package loads no driver, starts no broker, and imports no framework.
"""

import atexit
import importlib.util
import os

from partywall import _native
from partywall._build import Build
from partywall._descriptors import Chunk, Descriptors, TensorPlace
from partywall._doctor import Finding, doctor
from partywall._domain import Claim, Domain, Name, connect
from partywall._errors import *
from partywall._graph import launch
from partywall._hosts import Host, Replicas
from partywall._members import EvictedMember, Member, MemberWait, Withdrawal
from partywall._native import (
    Attachment,
    Block,
    ClaimedTask,
    EnqueuedResult,
    GraphNode,
    LimitedWait,
    Loan,
    Permit,
    Sample,
    SegmentPart,
    TaskBytes,
    TaskResult,
    Tensor,
    Ticket,
)
from partywall._pool import BlockPart, BlockRef, Pool, PoolStats
from partywall._queue import Queue, QueueStats, Task, TaskInfo
from partywall._segment import IpcHandle, Pinned, Segment
from partywall._semaphore import Semaphore
from partywall._timeline import Timeline, TimelineEvent
from partywall._topic import Ages, Publisher, Subscriber, SubscriberStats, Topic, TopicStats
from partywall._watch import Event, Watch

__version__ = _native.VERSION

__all__ = [
    "Abandoned",
    "AccessDenied",
    "Ages",
    "Attachment",
    "AttemptFailed",
    "BadDeadline",
    "BadFile",
    "BadGraph",
    "BadName",
    "BadPattern",
    "BadSource",
    "BadTask",
    "BadTensor",
    "BadValue",
    "BeingWithdrawn",
    "Block",
    "BlockPart",
    "BlockRef",
    "BlockTooSmall",
    "BrokerGone",
    "BrokerUnreachable",
    "Build",
    "CannotAttach",
    "CannotGrow",
    "CannotKeep",
    "CannotPreload",
    "CannotShare",
    "Captured",
    "Chunk",
    "Claim",
    "ClaimedTask",
    "ClaimLost",
    "Closed",
    "ContextLost",
    "CudaError",
    "Descriptors",
    "Detached",
    "DeviceLost",
    "Domain",
    "EnqueuedResult",
    "Error",
    "Event",
    "Evicted",
    "EvictedMember",
    "FileNotFound",
    "Finding",
    "Forked",
    "GraphNode",
    "Host",
    "HostNotFound",
    "HostUnreachable",
    "InputsLost",
    "InputsNotReady",
    "IpcHandle",
    "LaunchBlocking",
    "LayoutChanged",
    "LimitedWait",
    "LimitReached",
    "Loan",
    "Member",
    "MemberWait",
    "Name",
    "NameExists",
    "NameNotFound",
    "NoDevice",
    "NoSuchMember",
    "NoSuchView",
    "NotAttached",
    "NotHeld",
    "NotReady",
    "NotShareable",
    "NotUnderMps",
    "NotWriter",
    "NotYourself",
    "OtherUser",
    "OutOfMemory",
    "OutputsFull",
    "OwnerDied",
    "Permit",
    "Pinned",
    "Pool",
    "PoolStats",
    "Publisher",
    "Queue",
    "QueueFull",
    "QueueStats",
    "ReadOnly",
    "RemoteDevice",
    "Replicas",
    "Sample",
    "SampleFailed",
    "Segment",
    "SegmentInUse",
    "SegmentPart",
    "Semaphore",
    "StaleBlock",
    "StillShared",
    "StillUsed",
    "Subscriber",
    "SubscriberStats",
    "Suspended",
    "Tainted",
    "Task",
    "TaskBytes",
    "TaskFailed",
    "TaskGone",
    "TaskInfo",
    "TaskResult",
    "TaskRunning",
    "Tensor",
    "TensorNotFound",
    "TensorPlace",
    "Ticket",
    "Timeline",
    "TimelineEnded",
    "TimelineEvent",
    "TimelineLost",
    "TimeoutError",
    "TooManyHeld",
    "TooManyLoans",
    "Topic",
    "TopicFull",
    "TopicIdle",
    "TopicStats",
    "TorchTooOld",
    "Unproven",
    "VersionMismatch",
    "VersionNotFound",
    "Watch",
    "Withdrawal",
    "Withdrawn",
    "WorkerFailed",
    "WriterClosed",
    "WriterDied",
    "WriterEvicted",
    "WriterExists",
    "WriterFaulted",
    "WrongKind",
    "WrongMaximum",
    "WrongPool",
    "WrongQueue",
    "WrongSample",
    "WrongTaskState",
    "WrongTopic",
    "__version__",
    "connect",
    "doctor",
    "launch",
]

# At exit, waits up to one second for resources that were dropped earlier. The end of the process releases the rest.
atexit.register(_native.flush, 1.0)

if os.environ.get("PARTYWALL_TORCH_GUARD", "0") not in ("", "0") and importlib.util.find_spec("torch"):
    # The one case in which importing the package imports a framework: it was asked for.
    from partywall.torch import _guard

    _guard.guard_all_threads()
