"""Other hosts, and what is copied from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from partywall import _command
from partywall._arrays import Access
from partywall._errors import VersionNotFound
from partywall._handle import Closing
from partywall._segment import Segment

if TYPE_CHECKING:
    from partywall._domain import Domain


@dataclass(frozen=True)
class Host:
    """Another host, as the bridge of this one knows it."""

    name: str
    """Its name, as in `//NAME/llm`."""
    instance: str
    """Identifies the life of its bridge: one that is started anew is another instance."""
    state: Literal["alive", "unreachable"]
    """Whether it is connected. One that is unreachable may still run."""
    unreachable: float | None
    """For how many seconds it has been unreachable."""
    release: str | None
    """The release of its bridge; `None` as long as it has not said so."""
    endpoints: tuple[str, ...]
    """Where its bridge listens."""
    protocol: int | None
    """The number of its protocol, if that is another one: then nothing crosses."""


class Replicas(Closing):
    """The versions of a segment of another host, each copied when it is the newest; `Domain.follow` returns one.

        with d.follow("//trainer/policy") as replicas:
            for policy in replicas:
                ...

    The copying goes on meanwhile, and versions between may be left out. While the other host is unreachable, the next
    version is waited for. The copying ends with `close`, and with the thread that has called `follow`.
    """

    def __init__(self, domain: "Domain", access: Access | None, words: Sequence[str]) -> None:
        self._domain = domain
        self._access = access
        self._is_closed = False
        self._program = _command.start(domain.socket, "pull", words)
        super().__init__()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._is_closed

    def __iter__(self) -> Iterator[Segment]:
        return self

    def __next__(self) -> Segment:
        assert self._program.stdout is not None
        while not self._is_closed:
            line = self._program.stdout.readline()
            if self._is_closed:
                break
            answer = _command.answer(self._program, line)
            try:
                return self._domain.open(answer["name"], version=answer["version"], access=self._access)
            except VersionNotFound:
                pass  # A newer one has come meanwhile.
        raise StopIteration

    def close(self) -> None:
        """Ends the copying. A version that is not complete is dropped. Calling it again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            # It has undone what it has begun when it ends.
            self._program.terminate()
            self._program.wait()
            assert self._program.stdout is not None
            self._program.stdout.close()
