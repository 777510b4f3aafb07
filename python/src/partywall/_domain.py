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
    """The latest."""
    kind: str
    """`host`, `vmm` or `legacy`."""
    place: str
    """`host`, or the UUID of a GPU."""
    nbytes: int
    """Bytes that are allocated."""
    tensors: int
    """How many it has."""
    mutable: bool
    """Whether it may be written."""
    kept: bool
    """Whether it stays when its committer goes."""


class Domain(Handle[_native.Domain]):
    """A place where processes share memory by name: a connection to one broker. Made by `connect`.

    It keeps the names that are committed through it, also when what `put` or `commit` returned is dropped: until that
    segment or the domain is closed, or the process ends. Any thread may use it. A forked child must connect anew.
    Builds and segments stay usable when it is closed.
    """

    def __init__(self, native: _native.Domain, is_own: bool = True) -> None:
        super().__init__(native)
        # Whether somebody has asked for it and so is to close it.
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
        """Begins the next version of `name`, of one tensor: zeroes on `device`, which nobody else sees before `commit`.

        `device` is `auto`: the calling thread's current CUDA device, else the first GPU, and `host` where there is none. Or
        it is `cuda` or `gpu`, the same without `host`; `cuda:N`; a GPU's UUID; or `host` or `cpu`. A `mutable` version can be
        written after the commit, and grow to `reserve` bytes. A `kept` one stays when this process goes. With `if_absent` the
        commit fails if the name exists.
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

        Waits up to `timeout` seconds for what is not there yet, with `None` for ever; otherwise that is `NameNotFound`. With
        `write` a mutable version is opened for writing. `device` is the GPU that is to use the memory, by default the one
        that has it; with `allow_peer` these may be two.
        """
        if version is not None and version < 1:
            raise ValueError(f"versions count from 1; {version} is none")
        place = None if device is None else _arrays.device_name(device)
        native = self._native.open(name, version, timeout, write, place, allow_peer)
        return Segment(self, native)

    def open_or_build(
        self, name: str, build: "Callable[[Claim], Segment]", *, timeout: float | None = None
    ) -> Segment:
        """Opens the latest version of `name`; if there is none, has `build` make it.

        Of all processes that ask at the same time one builds, and the others wait for it, up to `timeout` seconds or for
        ever. If it dies or fails, one of them builds. `build` is given a `Claim` to make the version with, and returns the
        segment.
        """
        opened = self._native.open_or_build(name, timeout)
        if isinstance(opened, _native.Segment):
            return Segment(self, opened)
        try:
            built = build(Claim(self, opened))
        finally:
            # What was created and not committed keeps it; it ends with that.
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
        """Copies a tensor, or a mapping of tensors by their names, and commits that as the next version of `name`.

        A tensor is whatever speaks DLPack, or is a buffer. The copy is made once, on the GPU if the tensors are on one, or
        on `device`; it comes after what torch or cupy has enqueued on its current stream, or on `stream`.
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
        """Publishes a tensor on a GPU, or a mapping of them, where it lies: nothing is copied.

        The tensors are held for as long as the name is there: until the segment or the domain is closed, a newer version
        follows, the name is removed, or this process dies. Readers see what is written there later, and map whole allocations. Memory that the driver does not share by handle, such as
        torch's expandable segments, is `NotShareable`: `put` it.
        """
        taken = [(key, _arrays.source(tensor, None)) for key, tensor in _arrays.named(tensors).items()]
        native = self._native.publish(name, taken, pairs(metadata), mutable=mutable, if_absent=if_absent)
        return Segment(self, native)

    def timeline(self, name: str, writer: bool = False) -> Timeline:
        """Opens a timeline, to wait for it, or as its one `writer`. Makes it, at 0, if there is none: either may come first.

        A writer goes on from where the one before it has ended; `WriterExists` while there is another.
        """
        return Timeline(self, self._native.timeline(name, writer))

    def semaphore(self, name: str, maximum: SupportsIndex) -> Semaphore:
        """Opens a semaphore of `maximum` permits, 1 to 65,536. Makes it, with all of them free, if there is none."""
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
        """Opens a pool; with `blocks`, 1 to 65,536, of `block_bytes` each, makes it if there is none.

        It is made on `device`, by default `auto` as in `create`, and one that is there has to be as is said; else that is
        `WrongPool`. Without a `device` it may be anywhere.
        Without numbers `device` is the GPU that is to use the blocks, by default the one that has them; with `allow_peer`
        these may be two. The pool goes with the last process that has it open, unless it is made as `kept`.

        Of a pool that is made as `zeroed` whoever takes a block finds it all zero, and nothing of what others had in it, also
        of those that died; by default he finds what its last holder left there.

        Waits up to `timeout` seconds for a pool that is not there, by default not at all; or, with numbers, that another
        process is just making, by default 10 s.
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
        """Opens a topic; with a `shape`, or the `max_bytes` of its largest sample, makes it if need be.

        `shape` and `dtype` are the type of all samples: another one is `WrongSample`. For samples that vary give `max_bytes`,
        alone for samples of any type and shape, or with a shape in which `None` is any length: `(None, 640, 3)`.

        The ring keeps `depth` samples (4), of which a subscriber gets the last `history` (0) when it joins. There is room for
        so many `publishers` (2) at a time, each of which may have so many `loans` (2), for so many `subscribers` (4), each of
        which may hold `held` samples (2), and for as many `blocks` as that takes (4 + 2 · 2 + 4 · 2 = 16). A topic that is
        there has to be as is said, else that is `WrongTopic`; what is not said may be as it likes.

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
        """Watches names that are like `pattern`, in which `*` stands for any characters, also `/`, and `?` for one.

        Begins with what happens from now on, or after the `point` that a watch before has come to.
        """
        return Watch(self, self._native.watch(pattern, after))

    def ps(self) -> list[Member]:
        """All members of the domain, this process among them, in the order in which they joined."""
        return [Member(**row) for row in self._native.members()]

    def evict(self, pid: int, kill: bool = False) -> list[EvictedMember]:
        """Takes from all members with this pid what they wait for, build and own, and refuses them everything from now on.

        What they hold comes back when they are dead: nobody can take memory away from a process that has it mapped. With
        `kill` the broker sends SIGKILL; that it could not is no error, but said in what is returned.
        """
        return [EvictedMember(**row) for row in self._native.evict(pid, kill)]

    def ls(self) -> list[Name]:
        """All names, in order."""
        return [Name(*row) for row in self._native.names()]

    def exists(self, name: str) -> bool:
        """Whether there is this name; of `NAME@V`, whether that is its latest version. The same as `name in domain`."""
        return self._native.exists(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.exists(name)

    def rm(self, name: str) -> int:
        """Removes a name. Whoever has it open keeps it: returns how many bytes that are."""
        return self._native.remove(name)[1]

    def close(self) -> None:
        """Takes away the names that it keeps, and ends the connection once no build or segment of it is open any more.

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
    """The right to build a name that others wait for; what `Domain.open_or_build` gives to its `build`."""

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
    """Opens something through a connection of this process to that broker, or one that goes with it."""
    for domain in connections():
        if domain.socket == socket:
            try:
                return opened(domain)
            except Closed:
                # By another thread, just now.
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
    """This process's own that are open."""
    # In one step, as is what changes it: threads connect meanwhile, and a lock might be held in a forked child for ever.
    known = [reference() for reference in list(_open.values())]
    return [domain for domain in known if domain is not None and domain._pid == os.getpid() and not domain.closed]


_open: "dict[int, weakref.ref[Domain]]" = {}
