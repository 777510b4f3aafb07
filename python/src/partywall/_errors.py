"""Exceptions. Each class also derives from the built-in exception that users expect to catch.

The package exports every name of this module that does not begin with `_`. `Error::python_class` of the library names
the classes of its errors.
"""

import builtins as _builtins


class Error(Exception):
    """The base of all exceptions of Partywall. The text says what happened and what to do, and a note below it in
    tracebacks where to read more."""

    cuda_error: int | None
    """The CUDA driver's code, if the driver refused a call."""
    advice: str
    """What to do about it."""
    anchor: str
    """Its entry in docs/troubleshooting.md, which `partywall explain ENTRY` prints."""

    def __init__(self, message: str, advice: str = "", anchor: str = "", cuda_error: int | None = None) -> None:
        super().__init__(message)
        self._message = message
        self.advice = advice
        self.anchor = anchor
        self.cuda_error = cuda_error
        if anchor:
            self.add_note(f"more: partywall explain {anchor}")

    def __str__(self) -> str:
        return f"{self._message}; {self.advice}" if self.advice else self._message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._message, self.advice, self.anchor, self.cuda_error)


class NameNotFound(Error, KeyError):
    """No segment has this name."""


class VersionNotFound(NameNotFound):
    """The name does not have this version, and will never have it again."""


class Withdrawn(NameNotFound):
    """The name was withdrawn. Arrays that were taken before stay readable; after the deadline of a withdrawal with
    `then="stale"` no other can be taken."""


class HostNotFound(Error, LookupError):
    """No other host has this name, or there is no bridge that knows other hosts."""


class BeingWithdrawn(Error, RuntimeError):
    """The name is being withdrawn, and its readers have a deadline that cannot be changed."""


class BadDeadline(Error, ValueError):
    """The deadline of a withdrawal is more than a year away."""


class NoSuchMember(Error, LookupError):
    """No member of the domain has this pid or number."""


class TensorNotFound(Error, KeyError):
    """The segment has no tensor of this name."""


class NameExists(Error, FileExistsError):
    """The name exists, but the call was to create it only if it is absent."""


class WriterExists(Error, FileExistsError):
    """The timeline already has a writer, in this process or another one."""


class OwnerDied(Error, ConnectionError):
    """The process that published the memory or signalled the timeline is dead."""


class Evicted(Error, ConnectionError):
    """This process was evicted from the domain."""


class BrokerGone(Error, ConnectionError):
    """The broker of the connection is gone."""


class TimelineEnded(Error, ConnectionError):
    """The timeline ended before it reached the value. Values that were signalled before are valid."""


class WriterDied(TimelineEnded, OwnerDied):
    """The timeline's writer is dead."""


class WriterFaulted(TimelineEnded):
    """The timeline's writer has lost its CUDA context."""


class WriterClosed(TimelineEnded):
    """The timeline's writer has closed it."""


class WriterEvicted(TimelineEnded):
    """The timeline's writer was evicted from the domain."""


class Abandoned(TimelineEnded):
    """The timeline was abandoned, by its writer or another process."""


class TimelineLost(TimelineEnded, BrokerGone):
    """The broker is gone, so nothing would report the death of the writer."""


class Tainted(Error, RuntimeError):
    """The value or sample depends on a timeline or sample that has failed."""


class BrokerUnreachable(Error, ConnectionError):
    """No broker answers, and none could be started."""


class NotUnderMps(Error, RuntimeError):
    """This process cannot become a client of an MPS daemon, or the daemon cannot be started."""


class VersionMismatch(Error, ConnectionError):
    """The broker comes from another build and uses another protocol."""


class AccessDenied(Error, PermissionError):
    """The broker or its directory belongs to another user, or the broker serves another driver."""


class ReadOnly(Error, PermissionError):
    """The version is frozen, or was opened only for reading."""


class NotWriter(Error, PermissionError):
    """The timeline was opened for waiting, not for signalling."""


class TimeoutError(Error, _builtins.TimeoutError):
    """The operation did not finish in time."""


class HostUnreachable(TimeoutError):
    """Another host has not answered in time. It may still run."""


class OutOfMemory(Error, MemoryError):
    """There is not enough memory."""


class LimitReached(Error, OSError):
    """A limit of the broker, of open files, or of a topic's publishers or subscribers, is reached."""


class BadName(Error, ValueError):
    """The name breaks the rules for names."""


class BadPattern(Error, ValueError):
    """The pattern can match no name."""


class BadValue(Error, ValueError):
    """The value is not greater than all values before, or exceeds the limit."""


class WrongMaximum(Error, ValueError):
    """The semaphore has another number of permits, or the number exceeds the limit."""


class NotYourself(Error, ValueError):
    """A process cannot evict itself."""


class BadTensor(Error, ValueError):
    """The tensors cannot be laid out, or the bytes are outside the tensor."""


class CannotGrow(Error, ValueError):
    """The version cannot grow."""


class CannotKeep(Error, ValueError):
    """Memory that ends with its publisher cannot be kept."""


class CannotShare(Error, ValueError):
    """A mutable segment cannot be shared with other users, because its readers could write it."""


class OtherUser(Error, PermissionError):
    """It belongs to another user."""


class WrongKind(Error, TypeError):
    """The name, the memory or its elements are not of the kind that the call takes."""


class LayoutChanged(Error, ValueError):
    """A version cannot take the place of another one at the same addresses, because its tensors or chunks differ."""


class WrongSample(WrongKind, ValueError):
    """The sample does not have the topic's type and shape."""


class BadSource(Error, TypeError):
    """The object cannot be copied or published as a tensor."""


class NotShareable(Error, BufferError):
    """The driver does not share this memory by handle."""


class NoSuchView(Error, BufferError):
    """The memory cannot be exported in the requested form."""


class NoDevice(Error, RuntimeError):
    """There is no such GPU, or no driver."""


class RemoteDevice(Error, RuntimeError):
    """The memory is on another GPU than the reader."""


class CudaError(Error, RuntimeError):
    """The CUDA driver refused a call; `cuda_error` is its code."""


class ContextLost(CudaError):
    """The CUDA context of this process is lost; only a restart recovers from that."""


class DeviceLost(Error, RuntimeError):
    """The memory of the name is lost: its GPU was reset or has failed, or the driver has lost its pinned memory."""


class LaunchBlocking(Error, RuntimeError):
    """With `CUDA_LAUNCH_BLOCKING` set, a waiting stream would block the process."""


class Captured(Error, RuntimeError):
    """The stream is being captured into a CUDA graph, which cannot contain this operation."""


class Suspended(Error, RuntimeError):
    """The segment is suspended: its memory is not mapped until `Domain.resume`."""


class StillShared(Error, RuntimeError):
    """The process holds memory of a GPU or pinned memory that it can share with others, and that cannot be suspended."""


class NotHeld(Error, RuntimeError):
    """The permit or block was already given back."""


class WrongPool(Error, ValueError):
    """The pool differs from the request, the request is invalid, or the name or block does not belong to this pool."""


class BlockTooSmall(Error, ValueError):
    """The tensor does not fit into the block."""


class StaleBlock(Error, RuntimeError):
    """The block that the reference names is no longer offered."""


class WrongTopic(Error, ValueError):
    """The topic differs from the request, the request is invalid, or the name is not a topic."""


class TopicFull(TimeoutError):
    """The sample was not published in time, because a subscriber that must miss nothing does not read."""


class TopicIdle(Error, EOFError):
    """The last publisher has left and all samples were received; it ends a subscriber with `until="idle"`."""


class WrongQueue(Error, ValueError):
    """The queue differs from the request, the request is invalid, or the name, block or task is not this queue's."""


class BadGraph(Error, ValueError):
    """A CUDA graph that cannot be captured or launched in this way."""


class BadTask(Error, ValueError):
    """The task is beyond the limits of tasks, or has no output."""


class QueueFull(TimeoutError):
    """The queue had no room for the task in time; the message counts the results that were not taken."""


class OutputsFull(TimeoutError):
    """There are tasks, but results that were not taken, or arrays of ended tasks, occupy all output blocks."""


class TaskRunning(Error, RuntimeError):
    """A worker has the task, so it cannot be cancelled."""


class TaskFailed(Error, RuntimeError):
    """The task is a dead letter: it has used up its attempts."""


class TaskGone(Error, LookupError):
    """The task's result was taken, or the task was cancelled or purged."""


class WrongTaskState(Error, RuntimeError):
    """The task is not a dead letter, so it cannot be retried; or it is neither done nor dead, so it cannot be
    purged."""


class SegmentInUse(TimeoutError):
    """The segment was not detached in time, because tasks still name it."""


class NotAttached(Error, LookupError):
    """The segment was detached from the queue."""


class CannotAttach(Error, ValueError):
    """A queue cannot hold the segment, because its memory ends with its publisher."""


class ClaimLost(Error, RuntimeError):
    """The worker no longer has the task: it was completed or failed, or taken back because its lease ended."""


class InputsNotReady(Error, RuntimeError):
    """A stream of the submitter still writes the inputs."""


class InputsLost(Error, ConnectionError):
    """The submitter ended before its stream had completed the inputs."""


class AttemptFailed(Error, ConnectionError):
    """The attempt whose output a stream has read has failed: its worker died or lost the task before its stream was
    done."""


class TooManyLoans(Error, RuntimeError):
    """The publisher has the maximum number of loans, or its arrays of former loans keep too many blocks."""


class TooManyHeld(Error, RuntimeError):
    """The subscriber holds the maximum number of samples."""


class NotReady(Error, RuntimeError):
    """A stream of the publisher still writes the sample."""


class SampleFailed(Error, ConnectionError):
    """The sample's publisher ended before a stream had completed it."""


class Detached(Error, ConnectionError):
    """The broker has detached this publisher or subscriber from the topic."""


class StillUsed(Error, BufferError):
    """Arrays are still in use: of a block that is to be offered, or of ended tasks, so that no other task can come."""


class Unproven(Error, RuntimeError):
    """The member is dead and what it held is in quarantine, or it is not known to be dead, so nothing is in
    quarantine."""


class Forked(Error, RuntimeError):
    """The connection was made by the parent before a fork."""


class Closed(Error, ValueError):
    """The object is closed."""


class CannotPreload(Error, ImportError):
    """A module cannot be preloaded for spares: its import fails, or it has done what forks do not survive."""


class TorchTooOld(Error, ImportError):
    """What was imported or called needs a later version of torch."""


class WorkerFailed(Error, RuntimeError):
    """A worker or spare of `partywall.spares` has ended at once, too often in a row."""


class FileNotFound(Error, FileNotFoundError):
    """A file to be put does not exist."""


class BadFile(Error, OSError):
    """A file could not be read."""
