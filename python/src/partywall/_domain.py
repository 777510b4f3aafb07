"""A connection to a domain."""

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

from partywall import _arrays, _native
from partywall._arrays import Shape
from partywall._build import Build, fill
from partywall._errors import Closed, VersionNotFound
from partywall._handle import Handle
from partywall._members import EvictedMember, Member
from partywall._pool import Pool, count
from partywall._program import PROGRAM
from partywall._queue import Queue
from partywall._segment import Segment
from partywall._semaphore import Semaphore, permits
from partywall._timeline import Timeline
from partywall._topic import SampleShape, Topic, number, sample_shape
from partywall._watch import Watch


@dataclass(frozen=True)
class Name:
    """A name in a listing."""

    name: str
    version: int
    """The latest version."""
    kind: str
    """`host`, `vmm` or `legacy`."""
    place: str
    """`host`, or the UUID of a GPU."""
    nbytes: int
    """Bytes that are allocated."""
    tensors: int
    """How many tensors it has."""
    mutable: bool
    """Whether it may be written."""
    kept: bool
    """Whether it stays after its committer has ended."""


class Domain(Handle[_native.Domain]):
    """A connection to a domain, in which processes share memory by name. Made by `connect`.

    It keeps the names that are committed through it until their segment or the domain is closed, or the process ends;
    dropping what `put` or `commit` returned changes nothing. Any thread may use it. A forked child must connect anew.
    Builds and segments stay usable after it is closed.
    """

    def __init__(self, native: _native.Domain, is_own: bool = True) -> None:
        super().__init__(native)
        # Whether the user made this connection, and so must close it.
        self._is_own = is_own
        key = id(self)
        _open[key] = weakref.ref(self, lambda _: _open.pop(key, None))

    @property
    def socket(self) -> str:
        """The broker's socket."""
        return self._native.socket

    def create(
        self,
        name: str,
        shape: Shape,
        dtype: Any,
        device: Any = "auto",
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
        if_absent: bool = False,
    ) -> Build:
        """Begins the next version of `name`, of one tensor of zeroes on `device`. Others see it from `commit` on.

        `device` is `auto`: the calling thread's current CUDA device, else the first GPU, or `host` if there is none. Or it is
        `cuda` or `gpu`, the same without `host`; `cuda:N`; a GPU's UUID; or `host` or `cpu`. A `mutable` version can be
        written after the commit, and can grow to `reserve` bytes. A `kept` version stays after this process has ended. With
        `if_absent` the commit fails if the name exists.
        """
        tensors = {_arrays.SINGLE: (shape, dtype)}
        return self.create_many(
            name,
            tensors,
            device,
            metadata=metadata,
            mutable=mutable,
            reserve=reserve,
            kept=kept,
            if_absent=if_absent,
        )

    def create_many(
        self,
        name: str,
        tensors: Mapping[str, tuple[Shape, Any]],
        device: Any = "auto",
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
        if_absent: bool = False,
    ) -> Build:
        """As `create`, of many tensors: the shape and dtype of each, by its name."""
        native = self._native.create(
            name,
            _arrays.device_name(device),
            _arrays.planned(tensors),
            pairs(metadata),
            mutable=mutable,
            reserve=_arrays.optional_count(reserve),
            kept=kept,
            if_absent=if_absent,
        )
        return Build(self, native)

    def open(
        self,
        name: str,
        timeout: float | None = 0.0,
        *,
        version: int | None = None,
        write: bool = False,
        device: Any = None,
        allow_peer: bool = False,
    ) -> Segment:
        """Opens the latest version of `name`, or `version`; `NAME@V` means the same.

        Waits up to `timeout` seconds for the version to exist, for ever with `None`; then `NameNotFound`. With `write` a
        mutable version is opened for writing. `device` is the GPU that uses the memory, by default the one that has it; with
        `allow_peer` it may be another one.
        """
        if version is not None and version < 1:
            raise ValueError(f"versions count from 1; {version} is not a version")
        place = None if device is None else _arrays.device_name(device)
        native = self._native.open(name, version, timeout, write, place, allow_peer)
        return Segment(self, native)

    def open_or_build(
        self, name: str, build: "Callable[[Claim], Segment]", *, timeout: float | None = None
    ) -> Segment:
        """Opens the latest version of `name`; if there is none, calls `build` to make it.

        Of all processes that call this at the same time, one builds and the others wait for it, up to `timeout` seconds or
        for ever. If the builder dies or fails, another one builds. `build` gets a `Claim` to make the version with, and
        returns the segment.
        """
        opened = self._native.open_or_build(name, timeout)
        if isinstance(opened, _native.Segment):
            return Segment(self, opened)
        try:
            built = build(Claim(self, opened))
        finally:
            # A build that is not committed yet keeps the claim, and ends it.
            opened.close()
        if not isinstance(built, Segment) or built.name != name:
            raise TypeError(f"build() is to return the segment that it has committed as {name!r}, not {built!r}")
        return built

    def put(
        self,
        name: str,
        tensors: Any,
        device: Any = None,
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
        if_absent: bool = False,
        stream: Any = None,
    ) -> Segment:
        """Copies a tensor, or a mapping of tensors by their names, and commits the copy as the next version of `name`.

        A tensor is any object that speaks DLPack or the buffer protocol. It is copied once: to the GPU that has the tensors,
        or to `device`. The copy is made after the work on the current stream of torch or cupy, or on `stream`.
        """
        taken = {key: _arrays.dense(tensor, stream) for key, tensor in _arrays.named(tensors).items()}
        native = self._native.create(
            name,
            _arrays.common_device(taken) if device is None else _arrays.device_name(device),
            _arrays.plan(taken),
            pairs(metadata),
            mutable=mutable,
            reserve=_arrays.optional_count(reserve),
            kept=kept,
            if_absent=if_absent,
        )
        return fill(self, native, taken, stream)

    def put_file(
        self,
        path: "str | bytes | os.PathLike[Any]",
        name: str,
        device: Any = "auto",
        *,
        mutable: bool = False,
        kept: bool = False,
        if_absent: bool = False,
    ) -> Segment:
        """Puts a safetensors or NumPy file, a folder of shards, or any file as bytes, as `partywall put` does."""
        native = self._native.put_file(
            os.fsdecode(path), name, _arrays.device_name(device), mutable=mutable, kept=kept, if_absent=if_absent
        )
        return Segment(self, native)

    def publish(
        self,
        name: str,
        tensors: Any,
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        if_absent: bool = False,
    ) -> Segment:
        """Publishes a tensor on a GPU, or a mapping of such tensors, in place: nothing is copied.

        The tensors are held as long as the name exists: until the segment or the domain is closed, a newer version follows,
        the name is removed, or this process dies. Readers see later writes, and map whole allocations. Memory that the driver
        does not share by handle, such as torch's expandable segments, is `NotShareable`: `put` it.
        """
        taken = [(key, _arrays.source(tensor, None)) for key, tensor in _arrays.named(tensors).items()]
        native = self._native.publish(name, taken, pairs(metadata), mutable=mutable, if_absent=if_absent)
        return Segment(self, native)

    def timeline(self, name: str, writer: bool = False) -> Timeline:
        """Opens a timeline to wait for it, or as its only `writer`. Creates it at 0 if it does not exist.

        A writer continues where the one before it ended; `WriterExists` while there is another one.
        """
        return Timeline(self, self._native.timeline(name, writer))

    def semaphore(self, name: str, maximum: SupportsIndex) -> Semaphore:
        """Opens a semaphore of `maximum` permits, 1 to 65,536. Creates it with all permits free if it does not exist."""
        return Semaphore(self, self._native.semaphore(name, permits(maximum)))

    def pool(
        self,
        name: str,
        *,
        blocks: SupportsIndex | None = None,
        block_bytes: SupportsIndex | None = None,
        zeroed: bool | None = None,
        device: Any = None,
        kept: bool = False,
        allow_peer: bool = False,
        timeout: float | None = None,
    ) -> Pool:
        """Opens a pool; with `blocks`, 1 to 65,536, of `block_bytes` each, creates it if it does not exist.

        The pool is created on `device`, by default `auto` as in `create`. An existing pool must be as requested, else
        `WrongPool`; without a `device` it may be anywhere. Without numbers, `device` is the GPU that uses the blocks, by
        default the one that has them; with `allow_peer` it may be another one. The pool ends with the last process that has
        it open, unless it is created as `kept`.

        A block of a `zeroed` pool is all zero when it is taken, even if its last holder died. By default it has the content
        that its last holder left.

        Waits up to `timeout` seconds for a pool that does not exist, by default not at all. With numbers, waits for another
        process that is just creating it, by default 10 s.
        """
        native = self._native.pool(
            name,
            None if blocks is None else count(blocks),
            _arrays.optional_count(block_bytes),
            None if device is None else _arrays.device_name(device),
            zeroed=None if zeroed is None else bool(zeroed),
            kept=kept,
            allow_peer=allow_peer,
            timeout=timeout,
        )
        return Pool(self, native)

    def queue(
        self,
        name: str,
        *,
        tasks: SupportsIndex | None = None,
        inputs: tuple[SupportsIndex, SupportsIndex] | None = None,
        outputs: tuple[SupportsIndex, SupportsIndex] | None = None,
        lease: float | None = None,
        device: Any = None,
        kept: bool = False,
        timeout: float | None = None,
    ) -> Queue:
        """Opens a queue of tasks; with `tasks`, `inputs` or `outputs`, creates it if it does not exist.

        The queue has room for `tasks` (1024) tasks and results. `inputs` and `outputs` are its two pools: how many blocks, and
        bytes of each; by default its tasks have neither. With a `lease` an attempt that takes longer, in seconds, loses its
        task to another worker. An existing queue must be as requested, else `WrongQueue`.

        `device`, `kept` and `timeout` as for `pool`.
        """
        native = self._native.queue(
            name,
            None if tasks is None else count(tasks),
            None if inputs is None else (count(inputs[0]), _arrays.count(inputs[1])),
            None if outputs is None else (count(outputs[0]), _arrays.count(outputs[1])),
            lease,
            None if device is None else _arrays.device_name(device),
            kept=kept,
            timeout=timeout,
        )
        return Queue(self, native)

    def topic(
        self,
        name: str,
        *,
        max_bytes: SupportsIndex | None = None,
        shape: SampleShape | None = None,
        dtype: Any = None,
        depth: SupportsIndex | None = None,
        history: SupportsIndex | None = None,
        publishers: SupportsIndex | None = None,
        loans: SupportsIndex | None = None,
        subscribers: SupportsIndex | None = None,
        held: SupportsIndex | None = None,
        blocks: SupportsIndex | None = None,
        device: Any = None,
        kept: bool = False,
        allow_peer: bool = False,
        timeout: float | None = None,
    ) -> Topic:
        """Opens a topic; with a `shape`, or the `max_bytes` of its largest sample, creates it if it does not exist.

        `shape` and `dtype` are those of all samples: other samples are `WrongSample`. For samples that vary give `max_bytes`:
        alone for samples of any type and shape, or with a shape in which `None` is any length, as in `(None, 640, 3)`.

        The ring keeps `depth` samples (default 4); a subscriber gets the last `history` (0) of them when it joins. A topic has
        at most `publishers` (2) with `loans` (2) each, and `subscribers` (4) that hold `held` samples (2) each. By default it
        has as many `blocks` as these need: 4 + 2 · 2 + 4 · 2 = 16. An existing topic must be as requested, else `WrongTopic`;
        options that are not given are not compared.

        `device`, `kept`, `allow_peer` and `timeout` as for `pool`.
        """
        native = self._native.topic(
            name,
            (
                _arrays.optional_count(max_bytes),
                None if shape is None else sample_shape(shape),
                None if dtype is None else _arrays.dtype_name(dtype),
            ),
            (
                number(depth),
                number(history),
                number(publishers),
                number(loans),
                number(subscribers),
                number(held),
                number(blocks),
            ),
            None if device is None else _arrays.device_name(device),
            kept=kept,
            allow_peer=allow_peer,
            timeout=timeout,
        )
        return Topic(self, native)

    def watch(self, pattern: str = "*", after: str | None = None) -> Watch:
        """Watches names that match `pattern`, in which `*` stands for any characters, also `/`, and `?` for one.

        Begins with the next event, or with the first one after the `point` of another watch or event.
        """
        return Watch(self, self._native.watch(pattern, after))

    def ps(self) -> list[Member]:
        """Lists all members of the domain, including this process, in the order in which they joined."""
        return [Member(**row) for row in self._native.members()]

    def evict(self, pid: int, kill: bool = False) -> list[EvictedMember]:
        """Evicts all members with this pid: ends their waits, builds and names, and refuses all their further requests.

        Memory that they hold is freed when they are dead: it cannot be taken from a process that has it mapped. With `kill`
        the broker sends SIGKILL. If that fails, the returned rows say so; it is not an error.
        """
        return [EvictedMember(**row) for row in self._native.evict(pid, kill)]

    def ls(self) -> list[Name]:
        """Lists all names, in order."""
        return [Name(*row) for row in self._native.names()]

    def exists(self, name: str) -> bool:
        """Returns whether the name exists; for `NAME@V`, whether V is its latest version. As `name in domain`."""
        return self._native.exists(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.exists(name)

    def rm(self, name: str) -> int:
        """Removes a name. Open segments of it stay: returns how many bytes they keep."""
        return self._native.remove(name)[1]

    def close(self) -> None:
        """Withdraws the names that it keeps, and ends the connection once no build or segment of it is open any more.

        Names that are `kept` stay. Calling it again does nothing.
        """
        self._native.close()

    def __del__(self, *_: Any) -> None:
        if getattr(self, "_is_own", False):
            super().__del__()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a connection is this process's own: send the segment, or connect anew")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"member {self._native.member}"
        return f"<partywall.Domain at {self.socket}: {state}>"


class Claim:
    """The right to build a name that others wait for; `Domain.open_or_build` passes it to its `build`."""

    def __init__(self, domain: Domain, native: _native.Claim) -> None:
        self._domain = domain
        self._native = native

    @property
    def name(self) -> str:
        """The name to be built."""
        return self._native.name

    def create(
        self,
        shape: Shape,
        dtype: Any,
        device: Any = "auto",
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
    ) -> Build:
        """As `Domain.create`."""
        tensors = {_arrays.SINGLE: (shape, dtype)}
        return self.create_many(
            tensors, device, metadata=metadata, mutable=mutable, reserve=reserve, kept=kept
        )

    def create_many(
        self,
        tensors: Mapping[str, tuple[Shape, Any]],
        device: Any = "auto",
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
    ) -> Build:
        """As `Domain.create_many`."""
        native = self._native.create(
            _arrays.device_name(device),
            _arrays.planned(tensors),
            pairs(metadata),
            mutable=mutable,
            reserve=_arrays.optional_count(reserve),
            kept=kept,
        )
        return Build(self._domain, native)

    def put(
        self,
        tensors: Any,
        device: Any = None,
        *,
        metadata: Mapping[str, str] | None = None,
        mutable: bool = False,
        reserve: int | None = None,
        kept: bool = False,
        stream: Any = None,
    ) -> Segment:
        """As `Domain.put`."""
        taken = {key: _arrays.dense(tensor, stream) for key, tensor in _arrays.named(tensors).items()}
        native = self._native.create(
            _arrays.common_device(taken) if device is None else _arrays.device_name(device),
            _arrays.plan(taken),
            pairs(metadata),
            mutable=mutable,
            reserve=_arrays.optional_count(reserve),
            kept=kept,
        )
        return fill(self._domain, native, taken, stream)

    def __repr__(self) -> str:
        return f"<partywall.Claim {self.name}>"


def connect(
    domain: str | None = None, start: bool = True, *, socket: "str | os.PathLike[str] | None" = None
) -> Domain:
    """Connects to a domain; with `start`, starts its broker if there is none.

    Without a name or a `socket`, `PARTYWALL_SOCKET` or `PARTYWALL_DOMAIN` decide, else the domain is `default`.
    """
    path = None if socket is None else os.fspath(socket)
    return Domain(_native.Domain.connect(domain, path, start=start, program=str(PROGRAM)))


def reopen(socket: str, name: str, version: int) -> Segment:
    """Opens a segment that was sent as a pickle."""
    return _through(socket, lambda domain: domain.open(name, version=version))


def reopen_topic(socket: str, name: str, version: int) -> Topic:
    """Opens a topic that was sent as a pickle."""
    topic = _through(socket, lambda domain: domain.topic(name))
    if topic.version != version:
        topic.close()
        gone = f"topic {name!r} is version {topic.version} now, and version {version} was sent"
        raise VersionNotFound(gone, "send it again, by who has the new one", "version-not-found")
    return topic


def _through(socket: str, opened: "Callable[[Domain], _Opened]") -> "_Opened":
    """Opens an object through a connection of this process to that broker, or through a new one."""
    for domain in connections():
        if domain.socket == socket:
            try:
                return opened(domain)
            except Closed:
                # Another thread has just closed it.
                continue
    return opened(Domain(_native.Domain.connect(None, socket, start=False, program=None), is_own=False))


_Opened = TypeVar("_Opened")


def pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Metadata as the compiled half takes it."""
    pairs = list(dict(metadata or {}).items())
    for pair in pairs:
        if not all(isinstance(text, str) for text in pair):
            raise TypeError(f"metadata are strings, by strings: {pair[0]!r} is {pair[1]!r}")
    return pairs


def connections() -> list[Domain]:
    """Lists the open connections of this process."""
    # In one step, as is what changes it: threads connect meanwhile, and a lock might be held in a forked child for ever.
    known = [reference() for reference in list(_open.values())]
    return [domain for domain in known if domain is not None and domain._pid == os.getpid() and not domain.closed]


_open: "dict[int, weakref.ref[Domain]]" = {}
