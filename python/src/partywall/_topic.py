"""Topics: streams of samples between processes."""

import asyncio
import builtins
import operator
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from partywall import _arrays, _native, _streams
from partywall._arrays import Shape
from partywall._errors import Closed, TopicIdle
from partywall._exchange import OneTensor
from partywall._handle import Connected, Handle, readable
from partywall._native import Sample

if TYPE_CHECKING:
    from partywall._domain import Domain


SampleShape: TypeAlias = SupportsIndex | Iterable[SupportsIndex | None]


@dataclass(frozen=True)
class TopicStats:
    """The state of a topic. While other processes use the topic, the numbers are not of one single moment."""

    published: int
    """Samples that have been published."""
    free: int
    """Blocks that are free for new samples."""
    held: int
    """Blocks that publishers hold as loans, or while a stream writes them."""
    in_ring: int
    """Blocks in the ring."""
    read: int
    """Blocks that have left the ring and are held by subscribers."""
    publishers: int
    """The number of publishers."""
    subscribers: int
    """The number of subscribers."""


@dataclass(frozen=True)
class Ages:
    """The ages of samples when a subscriber received them, in seconds: the time since each was published.

    A sample that is published behind a stream counts from `publish`, not from the end of the stream's work. Percentiles
    are at most an eighth too large.
    """

    count: int
    """The number of samples. The other numbers are 0 if there are none."""
    p50: float
    """The median."""
    p99: float
    """The age that 99 of 100 samples do not exceed."""
    max: float
    """The greatest age."""


@dataclass(frozen=True)
class SubscriberStats:
    """The state of a subscriber."""

    received: int
    """Samples that it has received."""
    dropped: int
    """Samples that it has missed."""
    lag: int
    """How many samples it is behind."""
    held: int
    """Samples that it holds."""
    ages: Ages
    """The ages of the samples that it has received."""


class Topic(Connected, _native.Topic):
    """A named stream of samples from its publishers to its subscribers; `Domain.topic` returns one.

        publisher, subscriber = topic.publisher(), topic.subscriber()
        publisher.send(frame)
        with subscriber.recv() as sample:
            np.asarray(sample)

    A sample is one tensor. Subscribers read it in place, and it does not change while they hold it. All subscribers see
    the samples of all publishers in the same order. Threads may share a handle. docs/topics.md describes what happens
    when a process falls behind or dies.
    """

    def __init__(self, domain: "Domain", *_: Any, **__: Any) -> None:
        self._socket = domain.socket
        super().__init__(domain)

    def publisher(self) -> "Publisher":
        """Adds a publisher to the topic, and returns it."""
        return Publisher(self, self._publisher())

    def subscriber(
        self,
        policy: Literal["block", "drop-oldest", "latest"] = "block",
        *,
        history: SupportsIndex | None = None,
        queue: SupportsIndex | None = None,
        order: Literal["host", "stream"] = "host",
        until: Literal["idle"] | None = None,
    ) -> "Subscriber":
        """Adds a subscriber to the topic, which receives all samples from now on and the last `history` samples before.

        `policy` decides about samples that the subscriber does not receive in time. With `block` publishers wait for
        the subscriber, so that it misses nothing; with `drop-oldest` it misses the oldest once it is `queue` samples
        behind; with `latest` it always receives the latest.

        On a GPU a sample may be received while its publisher's stream still writes it. With `order="host"` `recv` and
        iteration wait until the sample is complete. With `order="stream"` they return immediately, and the stream that
        is given to `recv`, by default the current one, waits. Samples in pinned memory are then tensors of that
        stream's GPU; otherwise, unless `recv` is given a stream, they are tensors of the host, and `on` gives those of
        a GPU.

        A subscriber waits for further publishers for ever. With `until="idle"` its loop ends, and `recv` and `try_recv`
        raise `TopicIdle`, once the last publisher has left and all samples are received. A topic that has never had a
        publisher is not idle, so a subscriber that has joined waits for the first one.
        `Publisher.wait_for_subscribers` keeps a publisher from starting before its subscribers have joined.
        """
        if until not in (None, "idle"):
            raise ValueError(f"{until!r} is not a value of until: use until='idle', or leave it out")
        if order not in ("host", "stream"):
            raise ValueError(f"{order!r} is not a value of order: use 'host' or 'stream'")
        ordinal = self._ordinal(order == "stream")
        if order == "stream" and ordinal is None:
            raise ValueError("samples in host memory are always ordered by hosts: leave order out")
        native = self._subscriber(policy, number(history), number(queue), until == "idle")
        return Subscriber(native, ordinal if order == "stream" else None)

    def close(self) -> None:
        """Closes the handle. Publishers, subscribers and samples stay. Calling it again does nothing."""
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        from partywall._domain import reopen_topic

        return reopen_topic, (self._socket, self.name, self.version)

    def __repr__(self) -> str:
        if self.closed:
            return f"<partywall.Topic {self.name}: closed>"
        stats = self.stats()
        who = f"{stats.publishers} publishers, {stats.subscribers} subscribers"
        what = f"samples of {self._samples}, up to {self.max_bytes} bytes on {self.place}"
        return f"<partywall.Topic {self.name}: {what}, {who}>"


class Publisher(Handle[_native.Publisher]):
    """A publisher of samples; `Topic.publisher` returns one. The samples of one publisher are received in their order.

    On a GPU its streams complete samples without waiting for each other.
    """

    def __init__(self, topic: Topic, native: _native.Publisher) -> None:
        self._dtype = topic.dtype
        self._ordinal = topic._ordinal(False)
        """The GPU that has the samples."""
        super().__init__(native)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._native.topic

    @property
    def id(self) -> int:
        """Its number, which no other publisher or subscriber of the topic ever has."""
        return self._native.id

    @property
    def published(self) -> int:
        """How many samples it has published."""
        return self._native.published()

    def wait_for_subscribers(self, least: SupportsIndex = 1, *, timeout: float | None = None) -> None:
        """Waits until the topic has at least `least` subscribers, so that each of them receives what is sent next.

        A subscriber begins with the next sample unless it asks for history, so a publisher that starts first and does
        not wait sends for nobody. Waits up to `timeout` seconds, or for ever; then raises `TimeoutError`. More than the
        topic has room for raise `LimitReached`.
        """
        self._native.wait_for_subscribers(required_number(least), timeout)

    def send(self, tensor: Any, header: bytes = b"", *, timeout: float | None = None, stream: Any = None) -> int:
        """Publishes a copy of a tensor and a header of up to 256 bytes. Returns how many samples it had published
        before.

        It takes the same tensors as `Domain.put`. To pinned memory the CPU copies what is on the host. From GPU to GPU
        the copy is made on `stream`, by default torch's or cupy's current one, and no host waits for it. Waits up to
        `timeout` seconds, or for ever, for a block and for subscribers that must miss nothing; then raises `TopicFull`.
        """
        handle = self._stream(stream)
        source = _arrays.dense(tensor, stream if handle is None else handle)
        return self._native.send(source, header, timeout, handle)

    def loan(
        self,
        shape: Shape,
        dtype: Any = None,
        *,
        header: bytes = b"",
        timeout: float | None = None,
        stream: Any = None,
    ) -> "Loan":
        """Borrows a block to fill in place. Use it in a `with`, whose end publishes the block.

            with publisher.loan((480, 640, 3), "uint8") as out:
                torch.from_dlpack(out).fill_(7)

        The default `dtype` is the topic's. On a GPU the block is published after the work that is then on `stream`, by
        default torch's or cupy's current one. In pinned memory the block is a tensor of the host that the CPU
        publishes, or with a `stream` one of the GPU. Waits up to `timeout` seconds, or for ever, for a block, and again
        to publish it. A publisher that already has as many loans as it may have gets `TooManyLoans` immediately, and so
        does one whose arrays of former loans keep too many blocks.
        """
        if dtype is None and self._dtype is None:
            raise TypeError("the dtype is missing: give dtype=, because samples of this topic may have any type")
        name = _arrays.dtype_name(self._dtype if dtype is None else dtype)
        native = self._native.loan(name, _arrays.dimensions(shape), header, timeout, stream is not None)
        return Loan(self, native, header, timeout, stream)

    def _stream(self, stream: Any, on_gpu: bool = False) -> int | None:
        # In pinned memory the CPU publishes, unless a stream is given or a GPU has used the block.
        ordinal = self._ordinal
        if ordinal is None and (on_gpu or stream is not None):
            ordinal = self._native.ordinal()
        return None if ordinal is None else _streams.handle(stream, ordinal)

    def check(self) -> None:
        """Raises if the topic cannot be found by its name any more, or if this publisher cannot publish.

        `NameNotFound` says who removed the name, if that was within the last minute; `VersionNotFound`, a kind of it,
        that the name was used again. A publisher can go on then: subscribers that have the topic open receive its
        samples. Asks the broker.
        """
        self._native.check()

    def close(self) -> None:
        """Detaches the publisher, and ends the waits of `send` and of loans. Samples that its streams still write are
        delivered. Calling it again does nothing.
        """
        self._native.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a publisher is this process's own: send the topic")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.published} published"
        return f"<partywall.Publisher {self._native.id} of {self.topic}: {state}>"


class Loan(Handle[_native.Loan], OneTensor):
    """A block to be written and published as a sample; `Publisher.loan` returns one.

    The end of its `with` publishes the block, or gives it back if the body raises. Arrays that outlive that keep the
    block from later loans. Do not write through them: they show what subscribers read.
    """

    def __init__(
        self, publisher: Publisher, native: _native.Loan, header: bytes, timeout: float | None, stream: Any
    ) -> None:
        self._publisher: Publisher | None = publisher
        self._topic = publisher.topic
        self._header = header
        self._timeout = timeout
        self._stream = stream
        super().__init__(native)

    @property
    def tensor(self) -> _native.Tensor:
        """The block as a tensor, to be written."""
        return self._native.tensor

    @property
    def header(self) -> bytes:
        """The header of the sample, up to 256 bytes."""
        return self._header

    @header.setter
    def header(self, header: bytes) -> None:
        self._native.header(header)
        self._header = header

    def write(self, tensor: Any, stream: Any = None) -> None:
        """Calls `Tensor.write` of its tensor."""
        self.tensor.write(tensor, stream)

    def rests_on(self, *samples: Sample) -> None:
        """Declares that this sample depends on the given samples. Their blocks are held until their validity is known.

        If one of them is invalid, so is this sample: `Sample.check` of its subscribers raises `Tainted`.
        """
        for sample in samples:
            self._native.rests_on(sample)

    def publish(self) -> int:
        """Publishes the block. Returns how many samples its publisher had published before.

        If that fails, for example because a subscriber that must miss nothing does not read, the block is given back.
        """
        publisher = self._publisher
        # The compiled loan raises if it was already published or given back.
        stream = None if publisher is None else publisher._stream(self._stream, self._native.on_gpu)
        try:
            return self._native.publish(self._timeout, stream)
        finally:
            if self.closed:
                self._publisher = None

    @property
    def closed(self) -> bool:
        """Whether the block is published or given back."""
        return self._native.closed

    def close(self) -> None:
        """Gives the block back unless it is published. Calling it again does nothing.

        If arrays of the loan are in use, the last of them gives the block back.
        """
        self._native.close()
        self._publisher = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_ours():
            return
        try:
            if kind is None and not self.closed:
                self.publish()
        finally:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a loan is this process's own: publish it")

    def __repr__(self) -> str:
        state = "published or given back" if self.closed else f"{self.dtype}{list(self.shape)}"
        return f"<partywall.Loan of {self._topic}: {state}>"


class Subscriber(Handle[_native.Subscriber], Iterator[Sample], AsyncIterator[Sample]):
    """A receiver of samples; `Topic.subscriber` returns one.

        for sample in subscriber:               # or: async for
            ...

    Threads and tasks may share it; each sample is received once. Iterations end when it is closed and, with
    `until="idle"`, when the last publisher has left.
    """

    def __init__(self, native: _native.Subscriber, ordinal: int | None) -> None:
        super().__init__(native)
        self._ordinal = ordinal
        """The GPU whose streams wait for samples; `None` if hosts wait."""
        self._event: _native.SubscriberEvent | None = None

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._native.topic

    @property
    def id(self) -> int:
        """Its number, which no other publisher or subscriber of the topic ever has."""
        return self._native.id

    def recv(self, timeout: float | None = None, *, stream: Any = None) -> Sample:
        """Receives the next sample. Waits for it up to `timeout` seconds, or for ever.

        By default the returned sample is complete. If it is not complete in time, the next call receives it. With a
        `stream`, or `order="stream"`, the call returns earlier, and the stream, by default the current one, waits until
        it is complete. A sample in pinned memory is then a tensor of the stream's GPU.
        """
        if self._ordinal is None and stream is None:
            return self._native.recv(timeout, complete=True)
        # Resolved first, so that an invalid stream loses no sample.
        ordinal = self._native.ordinal() if self._ordinal is None else self._ordinal
        if ordinal is None:
            raise ValueError("samples in host memory are always ordered by hosts: leave stream out")
        handle = _streams.handle(stream, ordinal)
        sample = self._native.recv(timeout, complete=False)
        sample.wait_on(handle)
        return sample

    def try_recv(self) -> Sample | None:
        """Returns the next sample, or `None` if there is none.

        On a GPU the publisher's stream may still write the sample: call `Sample.wait` or `Sample.wait_on` before you
        take its arrays.
        """
        return self._native.try_recv()

    async def recv_async(self, timeout: float | None = None) -> Sample:
        """As `recv`, in an event loop."""
        try:
            async with asyncio.timeout(_native.checked_timeout(timeout)):
                return await self._received()
        except builtins.TimeoutError:
            if timeout is not None:
                self._native.late(timeout)
            raise

    async def _received(self) -> Sample:
        while (sample := self._native.try_recv()) is None:
            event = self._native.event()
            try:
                async with asyncio.timeout(_MAX_SLEEP):
                    await readable(event.fileno())
            except builtins.TimeoutError:
                # The end of the broker does not make the descriptor readable, so check again.
                pass
            finally:
                event.close()
            try:
                sample = self._native.recv(_MOMENT, complete=False)
                break
            except builtins.TimeoutError:
                # Another task received the sample, or there is none yet. If the broker is gone, only a wait reports it.
                pass
        if self._ordinal is not None:
            sample.wait_on()
            return sample
        pause = _PAUSES[0]
        try:
            while not sample.ready:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSES[1])
        except asyncio.CancelledError:
            self._native.give_up(sample)
            raise
        return sample

    def fileno(self) -> int:
        """Returns a file descriptor for event loops, readable while `try_recv` would return a sample or raise.

        The subscriber owns it. A sample makes it readable within a millisecond or so; the call that takes the last one,
        whichever it is, makes it unreadable. Threads that wake up for the same sample compete for it, and those that
        find none wait again.
        """
        if self._event is None:
            self._event = self._native.event()
        return self._event.fileno()

    def stats(self) -> SubscriberStats:
        """Returns the state of the subscriber."""
        return self._native.stats()

    def close(self) -> None:
        """Detaches the subscriber, so publishers stop waiting for it. Samples stay. Calling it again does nothing."""
        if self._event is not None:
            self._event.close()
        self._native.close()

    def __iter__(self) -> "Subscriber":
        return self

    def __next__(self) -> Sample:
        try:
            return self.recv()
        except (Closed, TopicIdle):
            raise StopIteration from None

    def __aiter__(self) -> "Subscriber":
        return self

    async def __anext__(self) -> Sample:
        try:
            return await self._received()
        except (Closed, TopicIdle):
            raise StopAsyncIteration from None

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a subscriber is this process's own: send the topic")

    def __repr__(self) -> str:
        state = "closed"
        if not self.closed:
            stats = self.stats()
            state = f"{stats.received} received, {stats.lag} behind, {stats.held} held"
        return f"<partywall.Subscriber {self._native.id} of {self.topic}: {state}>"


def sample_shape(shape: SampleShape) -> list[int | None]:
    """Returns the shape of a topic's samples as a list, in which `None` is any length."""
    if isinstance(shape, Iterable):
        return [None if length is None else _arrays.dimensions(length)[0] for length in shape]
    return list(_arrays.dimensions(shape))


def number(number: SupportsIndex | None) -> int | None:
    """As `required_number`, of a number that may be missing."""
    return None if number is None else required_number(number)


def required_number(number: SupportsIndex) -> int:
    """Returns one of a topic's numbers as 32 bits hold it. Which numbers are valid, the library says."""
    number = operator.index(number)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"numbers of a topic are 0 to 4,294,967,295, not {number}")
    return number


_MAX_SLEEP = 1.0
"""Seconds after which a wait in an event loop checks whether the subscriber is still in the topic."""

_MOMENT = 0.001
"""Seconds to wait for a sample after its descriptor was readable."""

_PAUSES = 0.0001, 0.001
"""Seconds between two polls of a GPU: the first pause, and the longest."""
