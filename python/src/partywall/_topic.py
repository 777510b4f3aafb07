"""Topics: streams of samples between processes."""

import asyncio
import builtins
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from partywall import _arrays, _native
from partywall._errors import Closed, TopicIdle
from partywall._handle import Closing, Connected, readable
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
        return Publisher(self)

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
        return Subscriber(self, policy, history, queue, order, until)

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


class Publisher(Closing, _native.Publisher):
    """A publisher of samples; `Topic.publisher` returns one. The samples of one publisher are received in their order.

    On a GPU its streams complete samples without waiting for each other.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a publisher is this process's own: send the topic")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.published} published"
        return f"<partywall.Publisher {self.id} of {self.topic}: {state}>"


class Subscriber(Closing, _native.Subscriber, Iterator[Sample], AsyncIterator[Sample]):
    """A receiver of samples; `Topic.subscriber` returns one.

        for sample in subscriber:               # or: async for
            ...

    Threads and tasks may share it; each sample is received once. Iterations end when it is closed and, with
    `until="idle"`, when the last publisher has left.
    """

    async def recv_async(self, timeout: float | None = None) -> Sample:
        """As `recv`, in an event loop."""
        try:
            async with asyncio.timeout(_native.checked_timeout(timeout)):
                return await self._received()
        except builtins.TimeoutError:
            if timeout is not None:
                self._late(timeout)
            raise

    async def _received(self) -> Sample:
        while (sample := self.try_recv()) is None:
            event = self._event()
            try:
                async with asyncio.timeout(_MAX_SLEEP):
                    await readable(event.fileno())
            except builtins.TimeoutError:
                # The end of the broker does not make the descriptor readable, so check again.
                pass
            finally:
                event.close()
            try:
                sample = self._recv(_MOMENT)
                break
            except builtins.TimeoutError:
                # Another task received the sample, or there is none yet. If the broker is gone, only a wait reports it.
                pass
        if self._by_streams:
            sample.wait_on()
            return sample
        pause = _PAUSES[0]
        try:
            while not sample.ready:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSES[1])
        except asyncio.CancelledError:
            self._give_up(sample)
            raise
        return sample

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
        return f"<partywall.Subscriber {self.id} of {self.topic}: {state}>"


def sample_shape(shape: SampleShape) -> list[int | None]:
    """Returns the shape of a topic's samples as a list, in which `None` is any length."""
    if isinstance(shape, Iterable):
        return [None if length is None else _arrays.dimensions(length)[0] for length in shape]
    return list(_arrays.dimensions(shape))


_MAX_SLEEP = 1.0
"""Seconds after which a wait in an event loop checks whether the subscriber is still in the topic."""

_MOMENT = 0.001
"""Seconds to wait for a sample after its descriptor was readable."""

_PAUSES = 0.0001, 0.001
"""Seconds between two polls of a GPU: the first pause, and the longest."""
