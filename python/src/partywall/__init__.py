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
    AccessDenied,
    BadFile,
    BadName,
    BadSource,
    BadTensor,
    BrokerGone,
    BrokerUnreachable,
    CannotGrow,
    CannotKeep,
    Closed,
    CudaError,
    Error,
    FileNotFound,
    Forked,
    LimitReached,
    NameExists,
    NameNotFound,
    NoDevice,
    NoSuchView,
    NotShareable,
    OutOfMemory,
    OwnerDied,
    ReadOnly,
    RemoteDevice,
    TensorNotFound,
    TimeoutError,
    VersionMismatch,
    VersionNotFound,
    Withdrawn,
    WrongKind,
)
from partywall._native import Tensor
from partywall._segment import Pinned, Segment

__version__ = _native.VERSION

__all__ = [
    "AccessDenied",
    "BadFile",
    "BadName",
    "BadSource",
    "BadTensor",
    "BrokerGone",
    "BrokerUnreachable",
    "Build",
    "CannotGrow",
    "CannotKeep",
    "Claim",
    "Closed",
    "CudaError",
    "Domain",
    "Error",
    "FileNotFound",
    "Finding",
    "Forked",
    "LimitReached",
    "Name",
    "NameExists",
    "NameNotFound",
    "NoDevice",
    "NoSuchView",
    "NotShareable",
    "OutOfMemory",
    "OwnerDied",
    "Pinned",
    "ReadOnly",
    "RemoteDevice",
    "Segment",
    "Tensor",
    "TensorNotFound",
    "TimeoutError",
    "VersionMismatch",
    "VersionNotFound",
    "Withdrawn",
    "WrongKind",
    "__version__",
    "connect",
    "doctor",
]

# What was dropped before is given back while there is still time; the rest goes with the process.
atexit.register(_native.flush, 1.0)
