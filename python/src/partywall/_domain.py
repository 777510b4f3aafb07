"""A connection to a domain."""

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar, Unpack

from partywall import _arrays, _command, _native
from partywall._arrays import Access, Shape
from partywall._build import Build, fill
from partywall._descriptors import Descriptors
from partywall._errors import BadValue, BrokerGone, Closed, VersionNotFound, WrongQueue
from partywall._handle import Handle
from partywall._hosts import Host, Replicas
from partywall._members import EvictedMember, Member
from partywall._options import (
    ClaimOptions,
    CommitOptions,
    FileOptions,
    HostsOptions,
    PublishOptions,
    PullOptions,
    UrlOptions,
    converted,
    spelled_out,
)
from partywall._pool import Pool
from partywall._program import PROGRAM
from partywall._queue import Queue
from partywall._segment import Segment, valid_version
from partywall._semaphore import Semaphore
from partywall._timeline import Timeline
from partywall._topic import SampleShape, Topic, sample_shape
from partywall._watch import Watch

if TYPE_CHECKING:
    from partywall.integrations.cupy import CupyPool
    from partywall.torch._pool import TorchPool


@dataclass(frozen=True)
class Name:
    """A name in a listing."""

    name: str
    version: int
    """The latest version."""
    kind: str
    """`host`, `vmm`, `legacy`, `pinned` or `live`."""
    place: str
    """`host`, the UUID of a GPU, or `pinned:N`."""
    nbytes: int
    """The number of allocated bytes."""
    tensors: int
    """The number of tensors."""
    mutable: bool
    """Whether the version may be written after its commit."""
    kept: bool
    """Whether the name stays after its committer has ended."""
    uid: int
    """The user to which the name belongs."""
    shared: bool
    """Whether processes of other users may open it."""


class Domain(Handle[_native.Domain]):
    """A connection to a domain, in which processes share memory by name. `connect` returns one.

    A name that is committed through a domain stays until its segment or the domain is closed, or the process ends;
    dropping the segment that `put` or `commit` returned does not remove the name. Any thread may use a domain. A forked
    child must connect anew. Builds and segments stay usable after the domain is closed.
    """

    def __init__(self, native: _native.Domain, is_own: bool = True) -> None:
        super().__init__(native)
        # Whether the user opened this connection and therefore must close it.
        self._is_own = is_own
        key = id(self)
        _open[key] = weakref.ref(self, lambda _: _open.pop(key, None))

    @property
    def socket(self) -> str:
        """The broker's socket."""
        return self._native.socket

    @property
    def token(self) -> str:
        """Identifies this connection to other processes of the domain, which pass it as `owner` to `create`, `put` and
        others.

        It is no secret, and valid until the connection or the broker ends.
        """
        return str(self._native.member)

    @spelled_out
    def create(
        self,
        name: str,
        shape: Shape,
        dtype: Any,
        device: Any = "auto",
        **options: Unpack[CommitOptions],
    ) -> Build:
        """Begins the next version of `name` with one tensor of zeroes. Other processes see the version after `commit`.

        `device` is one of: `auto`, the calling thread's current CUDA device, else the first GPU, or `host` if there is
        none; `cuda` or `gpu`, which mean the same but never `host`; `cuda:N`; a GPU's UUID; `host` or `cpu`; `pinned`,
        host memory that the driver pins on the NUMA node of that GPU, or `pinned:N` on node N. `access` is as for
        `open`. A `mutable` version can be written after the commit, and can grow to `reserve` bytes. A `kept` version
        stays after this process has ended. A `shared` version may be read by processes of other users, where the broker
        admits them; it cannot be mutable. With `if_absent` the commit fails if the name exists.

        With `owner`, the `token` of another process of this user, the name ends with that process and not with this
        one. The commit raises `NoSuchMember` if that process has ended.
        """
        tensors = {_arrays.SINGLE: (shape, dtype)}
        return self.create_many(name, tensors, device, **options)

    @spelled_out
    def create_many(
        self,
        name: str,
        tensors: Mapping[str, tuple[Shape, Any]],
        device: Any = "auto",
        **options: Unpack[CommitOptions],
    ) -> Build:
        """As `create`, with several tensors: a mapping of names to shapes and dtypes."""
        native = self._native.create(
            name,
            _arrays.device_name(device),
            tensors=_arrays.placed(tensors),
            **converted(options, CommitOptions),
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
        access: Access | None = None,
    ) -> Segment:
        """Opens the latest version of `name`, or `version`; `NAME@V` means the same.

        Waits up to `timeout` seconds for the version to exist, or for ever with `None`; then raises `TimeoutError`.
        With a timeout of 0 it raises `NameNotFound` or `VersionNotFound` at once. With `write` a mutable version is
        opened for writing. `device` is the GPU that uses the memory, by default the one that has it; with `allow_peer`
        it may be another one.

        `access` says what gets access to pinned memory immediately: `"cpu"`, `"gpu"` or `"both"`; by default the GPU if
        a `device` is given, else the CPU. The other one gets access on first use.
        """
        version = valid_version(version)
        place = None if device is None else _arrays.device_name(device)
        native = self._native.open(name, version, timeout, write, place, allow_peer, access)
        return Segment(self, native)

    @staticmethod
    def suspend() -> None:
        """Unmaps the memory of all open segments of this process, whatever their domains, and gives up what it holds of
        it until `resume`, so that the process can be checkpointed and restored (`cuda-checkpoint`).

            d.suspend()
            ...  # another process checkpoints this one, and restores it
            d.resume()

        Leases and addresses stay: tensors and captured CUDA graphs are valid again after `resume`, and must not be used
        before. No thread may open anything meanwhile, or ask for a stream or an event, or wait for one: that ends a
        process that is being checkpointed. Waits for the work of this process on its GPUs first. Segments in host memory
        stay as they are. An interrupt resumes what was suspended.

        Raises `StillShared` if the process holds other memory of a GPU or pinned memory that it can share, such as
        that of pools, topics and queues; `WrongKind` for a segment of published memory; `Captured` during a capture;
        `TimeoutError` if a call of another thread, such as a wait, uses a segment for 10 seconds; `CudaError`. Nothing
        is suspended then, unless the `CudaError` has the anchor `not-mapped`.
        """
        _native.Domain.suspend()

    @staticmethod
    def resume() -> None:
        """Maps the memory of all suspended segments again, at the same addresses.

        Raises `CudaError` if the driver refuses one, and `BrokerGone` or `Evicted` if the broker has lost this process
        meanwhile. A segment that fails stays suspended, and the others are resumed. It may be called again.
        """
        _native.Domain.resume()

    def descriptors(self, name: str, timeout: float | None = 0.0) -> Descriptors:
        """Returns the memory of the latest version of `name`, or `NAME@V`, as file descriptors for other APIs and
        programs.

        Maps nothing and loads no driver. Waits as `open` does. Raises `WrongKind` for memory of `publish`, which has
        none.
        """
        return Descriptors(self, name, timeout)

    def open_or_build(
        self, name: str, build: "Callable[[Claim], Segment]", *, timeout: float | None = None
    ) -> Segment:
        """Opens the latest version of `name`; if there is none, calls `build` to make it.

        If several processes call this at the same time, one builds and the others wait for it, up to `timeout` seconds
        or for ever. If the builder dies or fails, another process builds. `build` receives a `Claim`, creates the
        version with it, and returns the committed segment.
        """
        opened = self._native.open_or_build(name, timeout)
        if isinstance(opened, _native.Segment):
            return Segment(self, opened)
        try:
            built = build(Claim(self, opened))
        finally:
            # If a build is not committed yet, it holds the claim and ends it later.
            opened.close()
        if not isinstance(built, Segment) or built.name != name:
            raise TypeError(f"build() must return the segment that it has committed as {name!r}, not {built!r}")
        return built

    @spelled_out
    def put(
        self,
        name: str,
        tensors: Any,
        device: Any = None,
        *,
        stream: Any = None,
        **options: Unpack[CommitOptions],
    ) -> Segment:
        """Copies a tensor, or a mapping of tensors by their names, and commits the copy as the next version of `name`.

        A tensor is any object that supports DLPack or the buffer protocol. It is copied once: to the GPU that has the
        tensors, or to `device`. The copy is made after the work on `stream`, by default the current stream of torch or
        cupy. The same memory under several names, such as tied weights of a model, is stored once, unless the version
        is mutable. `access` is as for `open`.

        `owner` and the other options are as for `create`.
        """
        taken, names = _arrays.taken(tensors, stream, once=not options.get("mutable", False))
        native = self._native.create(
            name,
            _arrays.common_device(taken) if device is None else _arrays.device_name(device),
            tensors=_arrays.plan(taken, names),
            **converted(options, CommitOptions),
        )
        return fill(self, native, taken, stream)

    @spelled_out
    def put_file(
        self,
        path: "str | bytes | os.PathLike[Any]",
        name: str,
        device: Any = "auto",
        **options: Unpack[FileOptions],
    ) -> Segment:
        """Puts a safetensors or NumPy file, a folder of shards, or the bytes of any other file, as `partywall put`
        does.

        `access` is as for `open`; the CPU, which reads the file, has access in any case. `owner` is as for `create`.
        """
        native = self._native.put_file(
            os.fsdecode(path), name, _arrays.device_name(device), **converted(options, FileOptions)
        )
        return Segment(self, native)

    @spelled_out
    def put_url(
        self,
        url: str,
        name: str,
        device: Any = "auto",
        **options: Unpack[UrlOptions],
    ) -> Segment:
        """Puts what a URL names, as `partywall put URL` does: `https://`, `s3://`, `gs://`, `az://` or `hf://`.

        Returns once the version is complete. The name ends with this connection unless it is `kept` or has another
        `owner`. With `if_absent` an existing version is returned; if several processes put the name so at the same
        time, one downloads and all get its version. The download ends with an interrupt and with this process. The URL
        is in no command line; `env://VARIABLE` stands for that in a variable. Needs the program `partywall-fetch`
        (`pip install ./python/fetch`).
        """
        if "://" not in url:
            raise BadValue("this is no URL: use put_file for a file")
        taken = converted(options, UrlOptions)
        if url.lower().startswith("env://"):
            return self._committed("put", (url, name), device, taken)
        # Other users can read command lines, and a URL may contain a password or a signature.
        return self._committed("put", (f"env://{_URL}", name), device, taken, **{_URL: url})

    @spelled_out
    def pull(
        self,
        origin: str,
        name: str | None = None,
        device: Any = "auto",
        **options: Unpack[PullOptions],
    ) -> Segment:
        """Copies a segment of another host, `//HOST/NAME` or `//HOST/NAME@V`, as the next version of `name`, by default
        its name there.

        Returns once the version is complete; each piece is verified before it is kept. A version with the same content
        that is here already is returned. Of several processes that pull it at the same time, one copies. The name ends
        with this connection unless it is `kept` or has another `owner`. The copying ends with an interrupt and with
        this process.

        Without `connect` and `tls` the bridge of this domain says how to reach other hosts. Raises `HostNotFound`,
        `HostUnreachable`, `NameNotFound`, `VersionNotFound`; `WrongKind` for what does not cross; `BadFile` if no host
        sends the right bytes any more. Needs the program `partywall-bridge`.
        """
        words = (origin,) if name is None else (origin, name)
        return self._committed("pull", words, device, converted(options, PullOptions))

    @spelled_out
    def follow(
        self,
        origin: str,
        name: str | None = None,
        device: Any = "auto",
        **options: Unpack[PullOptions],
    ) -> Replicas:
        """Copies the versions of a segment of another host, `//HOST/NAME`, one after the other, and iterates over them.

        The arguments are as for `pull`, whose exceptions the iteration raises: for the first version, and later for
        what is wrong on this host. Once there is a first version, the other host may be lost and return.
        """
        flags, access = self._flags(device, converted(options, PullOptions))
        words = (origin,) if name is None else (origin, name)
        return Replicas(self, access, ["--follow", *flags, "--", *words])

    @spelled_out
    def hosts(self, **options: Unpack[HostsOptions]) -> list[Host]:
        """Lists the hosts that this domain's bridge knows, or those at `connect`, by name.

        Raises `HostNotFound` if there is no bridge, `HostUnreachable` if it does not answer. Needs the program
        `partywall-bridge`.
        """
        words = _command.flags(converted(options, HostsOptions))
        return [
            Host(
                name=host["host"],
                instance=host["instance"],
                state=host["state"],
                unreachable=host["unreachable_seconds"],
                release=host["release"],
                endpoints=tuple(host["endpoints"] or ()),
                protocol=host["protocol"],
            )
            for host in _command.run(self.socket, "hosts", words)["hosts"]
        ]

    def _committed(
        self, command: str, words: tuple[str, ...], device: Any, options: dict[str, Any], **environment: str
    ) -> Segment:
        """Has the program commit a version, and opens that."""
        mutable = options.get("mutable", False)
        flags, access = self._flags(device, options)
        answer = _command.run(self.socket, command, [*flags, "--", *words], **environment)
        return self.open(
            answer["name"], version=answer["version"], write=mutable and not answer["existed"], access=access
        )

    def _flags(self, device: Any, options: dict[str, Any]) -> tuple[list[str], Access | None]:
        """Returns what the program is told about a version that it commits, and the `access` to it here."""
        access = options.pop("access")
        owner = options.pop("owner", None)
        kept = options.pop("kept", False)
        if kept and owner is not None:
            raise BadValue("a name has one end: give at most one of kept and owner")
        if not kept:
            options["owner"] = self.token if owner is None else owner
        return _command.flags({"device": _arrays.device_name(device), **options}), access

    @spelled_out
    def publish(
        self,
        name: str,
        tensors: Any,
        **options: Unpack[PublishOptions],
    ) -> Segment:
        """Publishes a tensor on a GPU, or a mapping of such tensors, in place, without a copy.

        Readers see later writes, and map whole allocations. Tensors in pools of `torch_pool` or `cupy_pool` become a
        segment of kind `live`, which outlives this process while it is read, and which may be `kept`. They are held
        until the name has ended and the last reader has closed it.

        Other tensors become a segment of kind `legacy`, and are held as long as the name exists: until the segment or
        the domain is closed, a newer version is committed, the name is removed, or this process dies. Raises
        `NotShareable` for memory that the driver does not share by handle, such as torch's expandable segments; use
        `put`.
        """
        taken = [(key, _arrays.source(tensor, None)) for key, tensor in _arrays.named(tensors).items()]
        native = self._native.publish(
            name, taken, **converted(options, PublishOptions)
        )
        return Segment(self, native)

    def torch_pool(self, name: str, *, size: SupportsIndex, device: Any = None) -> "TorchPool":
        """Creates a `torch.cuda.MemPool` whose tensors `publish` shares without a copy.

        In a `with` of the pool torch allocates there. The pool takes at most `size` bytes of `device`, by default
        torch's current one, as they are needed. A tensor for which there is no room raises `torch.OutOfMemoryError`.
        `name` is shown in errors; it is no name of the domain. The pool stays usable after the domain is closed.
        Raises `TorchTooOld` before torch 2.8.
        """
        from partywall.torch._pool import TorchPool

        return TorchPool(self, name, size, device)

    def cupy_pool(self, name: str, *, size: SupportsIndex, device: Any = None) -> "CupyPool":
        """Creates a `cupy.cuda.MemoryPool` whose arrays `publish` shares without a copy.

        In a `with` of the pool cupy allocates there. The arguments are as for `torch_pool`; `device` is a number, by
        default cupy's current device. An array for which there is no room raises cupy's `OutOfMemoryError`.
        """
        from partywall.integrations.cupy import CupyPool

        return CupyPool(self, name, size, device)

    def timeline(self, name: str, writer: bool = False, *, shared: bool = False) -> Timeline:
        """Opens a timeline to wait for it, or as its only `writer`. Creates it at 0 if it does not exist.

        If it is created as `shared`, processes of other users may open it, where the broker admits them. All that have
        it open can write its word, so each of their users can break it for all, and nothing else.

        A new writer continues at the last value of the writer before it. Raises `WriterExists` if there is a writer
        already.
        """
        return Timeline(self, name, writer, shared)

    def semaphore(self, name: str, maximum: SupportsIndex, *, shared: bool = False) -> Semaphore:
        """Opens a semaphore of `maximum` permits, 1 to 65,536. Creates it with all permits free if it does not exist.

        `shared` is as for `timeline`.
        """
        return Semaphore(self, name, maximum, shared)

    def pool(
        self,
        name: str,
        *,
        blocks: SupportsIndex | None = None,
        block_bytes: SupportsIndex | None = None,
        zeroed: bool | None = None,
        device: Any = None,
        access: Access | None = None,
        kept: bool = False,
        shared: bool = False,
        allow_peer: bool = False,
        timeout: float | None = None,
    ) -> Pool:
        """Opens a pool. With `blocks` (1 to 65,536) of `block_bytes` each, creates it if it does not exist.

        The pool is created on `device`, by default `auto` as in `create`. An existing pool must match the request, else
        `WrongPool` is raised; without a `device` it may be in any place. Without numbers, `device` is the GPU that uses
        the blocks, by default the one that has them; with `allow_peer` it may be another one. `access` is as for
        `open`, for a pool that exists. The pool ends with the last process that has it open, unless it is created as
        `kept`. If it is created as `shared`, processes of other users may open it, where the broker admits them. All
        that have it open write its control memory, so each of their users can break it for all, and nothing else.

        A block of a `zeroed` pool is all zero when it is taken, even if its last holder died. Otherwise a block keeps
        the content that its last holder left.

        Without numbers, waits up to `timeout` seconds for a pool that does not exist, by default not at all. With
        numbers, waits up to `timeout` seconds for another process that is creating the pool, by default 10 s.
        """
        return Pool(
            self,
            name,
            blocks,
            block_bytes,
            None if device is None else _arrays.device_name(device),
            access,
            zeroed=None if zeroed is None else bool(zeroed),
            kept=kept,
            shared=shared,
            allow_peer=allow_peer,
            timeout=timeout,
        )

    def queue(
        self,
        name: str,
        *,
        tasks: SupportsIndex | None = None,
        inputs: tuple[SupportsIndex, SupportsIndex] | None = None,
        outputs: tuple[SupportsIndex, SupportsIndex] | None = None,
        lease: float | None = None,
        device: Any = None,
        access: Access | None = None,
        kept: bool = False,
        shared: bool = False,
        timeout: float | None = None,
    ) -> Queue:
        """Opens a queue of tasks. With `tasks`, `inputs` or `outputs`, creates it if it does not exist.

        The queue has room for `tasks` (default 1024) tasks and results. `inputs` and `outputs` describe its two pools,
        each as the number of blocks and the bytes of one; by default its tasks have no blocks. With a `lease`, in
        seconds, an attempt that takes longer loses its task to another worker. An existing queue must match the
        request, else `WrongQueue` is raised.

        `device`, `access`, `kept`, `shared` and `timeout` are as for `pool`.
        """
        return Queue(
            self,
            name,
            tasks,
            _blocks(name, "inputs", inputs),
            _blocks(name, "outputs", outputs),
            lease,
            None if device is None else _arrays.device_name(device),
            access,
            kept=kept,
            shared=shared,
            timeout=timeout,
        )

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
        access: Access | None = None,
        kept: bool = False,
        shared: bool = False,
        allow_peer: bool = False,
        stamps: bool = True,
        timeout: float | None = None,
    ) -> Topic:
        """Opens a topic. With a `shape`, or the `max_bytes` of its largest sample, creates it if it does not exist.

        All samples have this `shape` and `dtype`; publishing another sample raises `WrongSample`. For samples that
        vary, give `max_bytes`: alone for samples of any type and shape, or with a shape in which `None` is any length,
        as in `(None, 640, 3)`.

        The ring keeps `depth` samples (default 4); a subscriber gets the last `history` (0) of them when it joins. A
        topic has at most `publishers` (2) with `loans` (2) each, and `subscribers` (4) that hold `held` samples (2)
        each. By default it has as many `blocks` as these need: 4 + 2 · 2 + 4 · 2 = 16. An existing topic must match the
        request, else `WrongTopic` is raised; options that are not given are not compared.

        `device`, `access`, `kept`, `shared`, `allow_peer` and `timeout` are as for `pool`. With `stamps=False` the
        publishers of this object do not stamp samples with the time: such samples have no `age`.
        """
        return Topic(
            self,
            name,
            None if device is None else _arrays.device_name(device),
            access,
            max_bytes=max_bytes,
            shape=None if shape is None else sample_shape(shape),
            dtype=dtype,
            depth=depth,
            history=history,
            publishers=publishers,
            loans=loans,
            subscribers=subscribers,
            held=held,
            blocks=blocks,
            kept=kept,
            shared=shared,
            allow_peer=allow_peer,
            stamps=stamps,
            timeout=timeout,
        )

    def watch(self, pattern: str = "*", after: str | None = None) -> Watch:
        """Watches names that match `pattern`, in which `*` stands for any characters, also `/`, and `?` for one.

        Begins with the next event, or with the first one after the `point` of another watch or event.
        """
        return Watch(self, pattern, after)

    def ps(self) -> list[Member]:
        """Lists all members of the domain, including this process, in the order in which they joined."""
        return self._native.members()

    def evict(self, pid: int, kill: bool = False) -> list[EvictedMember]:
        """Evicts all members with this pid: ends their waits, builds and names, and refuses all their further requests.

        Memory that they hold is freed when they are dead: it cannot be taken from a process that has it mapped. With
        `kill` the broker sends SIGKILL. If that fails, the returned rows report it, and no exception is raised.
        """
        return self._native.evict(pid, kill)

    def ls(self) -> list[Name]:
        """Lists all names, in order."""
        return self._native.names()

    def holders(self, name: str) -> dict[int, list[int]]:
        """Returns for each version of `name` that exists the pids of the processes that have it open, in order.

        A version that is no longer the latest ends with the last of them. Raises `NameNotFound`.
        """
        return self._native.holders(name)

    def exists(self, name: str) -> bool:
        """Returns whether the name exists; for `NAME@V`, whether V is its latest version. Same as `name in domain`."""
        return self._native.exists(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.exists(name)

    def rm(
        self,
        name: str,
        *,
        deadline: float | None = None,
        then: Literal["wait", "stale", "evict"] | None = None,
    ) -> int:
        """Removes a name. Returns how many bytes stay allocated because segments of it are open.

        With a `deadline` its readers have that many seconds to drop it: `Segment.wait_withdrawn` tells them. `then`
        says what happens to those that are left. `"wait"`, the default: nothing. `"stale"`: they can take no other
        tensor of it, and `Segment.check` raises `Withdrawn`; what they have stays valid. `"evict"`: they are evicted,
        except this process.
        """
        if then is not None and deadline is None:
            raise ValueError("then= says what happens at a deadline: give deadline=, too")
        return self._native.remove(name, deadline, then or "wait")[1]

    def close(self) -> None:
        """Withdraws the names that were committed through this domain, except `kept` ones, and ends the waits of its
        methods.

        The connection ends once no build or segment of it is open any more. Calling `close` again does nothing.
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
    """The right to build a name that other processes wait for; `Domain.open_or_build` passes it to its `build`."""

    def __init__(self, domain: Domain, native: _native.Claim) -> None:
        self._domain = domain
        self._native = native

    @property
    def name(self) -> str:
        """The name to be built."""
        return self._native.name

    @spelled_out
    def create(
        self,
        shape: Shape,
        dtype: Any,
        device: Any = "auto",
        **options: Unpack[ClaimOptions],
    ) -> Build:
        """As `Domain.create`."""
        tensors = {_arrays.SINGLE: (shape, dtype)}
        return self.create_many(tensors, device, **options)

    @spelled_out
    def create_many(
        self,
        tensors: Mapping[str, tuple[Shape, Any]],
        device: Any = "auto",
        **options: Unpack[ClaimOptions],
    ) -> Build:
        """As `Domain.create_many`."""
        native = self._native.create(
            _arrays.device_name(device),
            tensors=_arrays.placed(tensors),
            **converted(options, ClaimOptions),
        )
        return Build(self._domain, native)

    @spelled_out
    def put(
        self,
        tensors: Any,
        device: Any = None,
        *,
        stream: Any = None,
        **options: Unpack[ClaimOptions],
    ) -> Segment:
        """As `Domain.put`."""
        taken, names = _arrays.taken(tensors, stream, once=not options.get("mutable", False))
        native = self._native.create(
            _arrays.common_device(taken) if device is None else _arrays.device_name(device),
            tensors=_arrays.plan(taken, names),
            **converted(options, ClaimOptions),
        )
        return fill(self._domain, native, taken, stream)

    def __repr__(self) -> str:
        return f"<partywall.Claim {self.name}>"


def connect(
    domain: str | None = None,
    start: bool = True,
    *,
    socket: "str | os.PathLike[str] | None" = None,
    mps: bool = False,
) -> Domain:
    """Connects to a domain; with `start`, starts its broker if there is none.

    Without a name or a `socket`, the environment variables `PARTYWALL_SOCKET` or `PARTYWALL_DOMAIN` choose the domain;
    without them it is `default`.

    With `mps`, this process and its children become clients of the domain's MPS daemon, which is started if it does not
    run (not with `start=False`): `CUDA_MPS_PIPE_DIRECTORY` is set in `os.environ`, unless it names a daemon already.
    Connect before any library uses the GPU: once the CUDA driver is initialised, this raises `NotUnderMps`. Under MPS
    kernels of several processes run at the same time; a fault in one process ends CUDA in all of them.
    """
    path = None if socket is None else os.fspath(socket)
    program = str(PROGRAM)
    if mps:
        variable = _native.Domain.join_mps(domain, path, start, program)
        if variable is not None:
            name, pipes = variable
            os.environ[name] = os.fspath(pipes)
    return Domain(_native.Domain.connect(domain, path, start=start, program=program, mps=mps))


def reopen(socket: str, name: str, version: int) -> Segment:
    """Opens a segment that was sent as a pickle."""
    return through(socket, lambda domain: domain.open(name, version=version))


def reopen_topic(socket: str, name: str, version: int) -> Topic:
    """Opens a topic that was sent as a pickle."""
    topic = through(socket, lambda domain: domain.topic(name))
    if topic.version != version:
        topic.close()
        gone = f"topic {name!r} now has version {topic.version}, but version {version} was sent"
        advice = "send the topic again from a process that has the new version open"
        raise VersionNotFound(gone, advice, "version-not-found")
    return topic


def through(socket: str, opened: "Callable[[Domain], _Opened]") -> "_Opened":
    """Opens an object through an existing connection of this process to the broker, or through a new one."""
    for domain in connections():
        if domain.socket == socket:
            try:
                return opened(domain)
            except (BrokerGone, Closed):
                # Another broker has the socket now, or another thread has just closed the connection.
                continue
    return opened(Domain(_native.Domain.connect(None, socket, start=False, program=None, mps=False), is_own=False))


_Opened = TypeVar("_Opened")


def connections() -> list[Domain]:
    """Lists the open connections of this process."""
    # Copies in one atomic step, and the dictionary changes in atomic steps, because other threads connect meanwhile. A
    # lock could stay held for ever in a forked child.
    known = [reference() for reference in list(_open.values())]
    return [domain for domain in known if domain is not None and domain._pid == os.getpid() and not domain.closed]


_open: "dict[int, weakref.ref[Domain]]" = {}

_URL = "PARTYWALL_PUT_URL"


def _blocks(queue: str, what: str, blocks: Any) -> tuple[SupportsIndex, SupportsIndex] | None:
    if blocks is None:
        return None
    if not isinstance(blocks, (tuple, list)) or len(blocks) != 2:
        message = f"cannot create queue {queue!r}: {what}={blocks!r} is not the number of blocks and the bytes of one"
        raise WrongQueue(message, f"give both: {what}=(16, 4096) is 16 blocks of 4096 bytes each", "bad-queue")
    return blocks[0], blocks[1]
