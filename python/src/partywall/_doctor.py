"""What works on this machine."""

from dataclasses import dataclass
from typing import Literal, cast

from partywall import _native
from partywall._program import PROGRAM


Outcome = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing."""

    title: str
    outcome: Outcome
    """`ok`, `warning`, `failed`, or `skipped`: not tried."""
    detail: str
    """What was seen."""
    meaning: str
    """What that means, if it needs saying."""
    fix: str
    """What to do about it, if anything."""
    simulated: bool
    """Whether the driver is the simulated one, so that this says nothing about a GPU."""

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.outcome}: {self.detail}", self.meaning, self.fix]
        return "\n    ".join(line for text in lines if text for line in text.splitlines())


def doctor(domain: str | None = None, device: str = "auto") -> list[Finding]:
    """Finds out by doing what works on this machine, as `partywall doctor` does, in some seconds.

    `device` is the GPU to try: `auto`, the first; `all`; `cuda:N`; or a UUID. Leaves nothing behind.
    """
    return [Finding(row[0], cast(Outcome, row[1]), *row[2:]) for row in _native.examine(str(PROGRAM), domain, device)]
