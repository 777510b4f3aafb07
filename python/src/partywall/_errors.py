"""What can go wrong. Each class also is the built-in one that people catch."""

import builtins
from typing import Any


class Error(Exception):
    """Everything that Partywall raises. Its text says what happened and what to do."""

    cuda_error: int | None
    """The CUDA driver's code, where it was the driver that refused."""
    advice: str
    """What to do about it."""
    anchor: str
    """The entry of docs/troubleshooting.md about it."""

    def __init__(self, message: str, advice: str = "", anchor: str = "", cuda_error: int | None = None) -> None:
        super().__init__(message)
        self._message = message
        self.advice = advice
        self.anchor = anchor
        self.cuda_error = cuda_error

    def __str__(self) -> str:
        return f"{self._message}; {self.advice}" if self.advice else self._message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._message, self.advice, self.anchor, self.cuda_error)


class NameNotFound(Error, KeyError):
    """No segment has this name."""


class VersionNotFound(NameNotFound):
    """The name has no such version, and never will have again."""


class Withdrawn(NameNotFound):
    """Its publisher has withdrawn the name; what was open stays readable."""


class NoSuchMember(Error, LookupError):
    """No member of the domain has this pid or number."""


class TensorNotFound(Error, KeyError):
    """The segment has no tensor of this name."""


class NameExists(Error, FileExistsError):
    """The name exists and was to be made only if it did not."""


class WriterExists(Error, FileExistsError):
    """The timeline has a writer, in this process or another."""


class OwnerDied(Error, ConnectionError):
    """The process that published the memory, or that signalled the timeline, is dead."""


class Evicted(Error, ConnectionError):
    """This process was evicted from the domain."""


class BrokerGone(Error, ConnectionError):
    """The broker that the connection belonged to is gone."""


class TimelineEnded(Error, ConnectionError):
    """The timeline ended before it reached the value. What was signalled until then is valid."""


class WriterDied(TimelineEnded, OwnerDied):
    """The timeline's writer is dead."""


class WriterFaulted(TimelineEnded):
    """The timeline's writer has lost its CUDA context."""


class WriterClosed(TimelineEnded):
    """The timeline's writer has closed it."""


class WriterEvicted(TimelineEnded):
    """The timeline's writer was evicted from the domain."""


class Abandoned(TimelineEnded):
    """The timeline was abandoned, by its writer or by somebody else."""


class TimelineLost(TimelineEnded, BrokerGone):
    """The broker is gone, and with it whoever would have noticed the writer's death."""


class Tainted(Error, RuntimeError):
    """The value rests on a timeline that has failed, or the sample on one that has."""


class BrokerUnreachable(Error, ConnectionError):
    """No broker answers, and none could be started."""


class VersionMismatch(Error, ConnectionError):
    """The broker is another build with another protocol."""


class AccessDenied(Error, PermissionError):
    """The broker, or its directory, is another user's; or it serves another driver."""


class ReadOnly(Error, PermissionError):
    """The version is frozen, or was opened for reading."""


class NotWriter(Error, PermissionError):
    """The timeline was opened to be waited for, not to be signalled."""


class TimeoutError(Error, builtins.TimeoutError):
    """It did not happen in time."""


class OutOfMemory(Error, MemoryError):
    """There is not enough memory."""


class LimitReached(Error, OSError):
    """A limit of the broker, of open files, or of a topic's publishers or subscribers, is reached."""


class BadName(Error, ValueError):
    """The name breaks the rules for names."""


class BadPattern(Error, ValueError):
    """No name would be like the pattern."""


class BadValue(Error, ValueError):
    """The value is not larger than those before, or larger than values can be."""


class WrongMaximum(Error, ValueError):
    """The semaphore has another number of permits, or none can have so many."""


class NotYourself(Error, ValueError):
    """A process cannot evict itself."""


class BadTensor(Error, ValueError):
    """Tensors that cannot be laid out, or bytes that a tensor does not have."""


class CannotGrow(Error, ValueError):
    """The version does not become longer."""


class CannotKeep(Error, ValueError):
    """Memory that goes with its publisher cannot be kept."""


class WrongKind(Error, TypeError):
    """The name, the memory or its elements are of another kind than the call takes."""


class WrongSample(WrongKind, ValueError):
    """A sample is of another type or shape than the topic's."""


class BadSource(Error, TypeError):
    """What was to be copied or published is no tensor that can be."""


class NotShareable(Error, BufferError):
    """The driver does not share this memory by handle."""


class NoSuchView(Error, BufferError):
    """The memory cannot be had in the way that was asked for."""


class NoDevice(Error, RuntimeError):
    """There is no such GPU, or no driver."""


class RemoteDevice(Error, RuntimeError):
    """The memory is on another GPU than the reader's."""


class CudaError(Error, RuntimeError):
    """The CUDA driver refused a call; `cuda_error` is its code."""


class ContextLost(CudaError):
    """The CUDA context of this process is lost: only a restart brings it back."""


class LaunchBlocking(Error, RuntimeError):
    """With `CUDA_LAUNCH_BLOCKING` set, a stream that waits would stop the process."""


class Captured(Error, RuntimeError):
    """The stream is being captured into a CUDA graph, which this cannot be part of."""


class NotHeld(Error, RuntimeError):
    """The permit or block was given back before."""


class WrongPool(Error, ValueError):
    """The pool is not as was said, or cannot be so; or the name is of something else, or the block of another pool."""


class BlockTooSmall(Error, ValueError):
    """What was to be in a block does not fit."""


class StaleBlock(Error, RuntimeError):
    """The reference is of a block that is not offered any more."""


class WrongTopic(Error, ValueError):
    """The topic is not as was said, or cannot be so; or the name is of something else."""


class TopicFull(TimeoutError):
    """A sample was not published in time: a subscriber that is to miss nothing does not read."""


class TopicIdle(Error, EOFError):
    """The topic's last publisher has left, and everything was received: the end of a subscriber with `until="idle"`."""


class TooManyLoans(Error, RuntimeError):
    """The publisher has as many loans that are not published as it may."""


class TooManyHeld(Error, RuntimeError):
    """The subscriber holds as many samples as it may."""


class NotReady(Error, RuntimeError):
    """A stream of its publisher still writes the sample."""


class SampleFailed(Error, ConnectionError):
    """The sample's publisher ended before a stream had completed it."""


class Parted(Error, ConnectionError):
    """The broker has taken this publisher or subscriber out of the topic."""


class StillUsed(Error, BufferError):
    """Arrays of a block that is to be offered are still used."""


class Unproven(Error, RuntimeError):
    """The member is dead, and what it held is in quarantine; or it is not known to be dead, and nothing is."""


class Forked(Error, RuntimeError):
    """The connection was made before a fork, by the parent."""


class Closed(Error, ValueError):
    """It was closed before."""


class FileNotFound(Error, FileNotFoundError):
    """A file to be put does not exist."""


class BadFile(Error, OSError):
    """A file could not be read."""
