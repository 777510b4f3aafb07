"""Tests of what works on this machine."""

from dataclasses import dataclass
from typing import Literal

from partywall import _native
from partywall._program import PROGRAM


Outcome = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one test."""

    title: str
    outcome: Outcome
    """`ok`, `warning`, `failed`, or `skipped` (not tried)."""
    detail: str
    """What the test observed."""
    meaning: str
    """The consequence, or an empty string."""
    fix: str
    """What to do about it, or an empty string."""
    simulated: bool
    """Whether the driver is the simulated one. The result then says nothing about a GPU."""

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.outcome}: {self.detail}", self.meaning, self.fix]
        return "\n    ".join(line for text in lines if text for line in text.splitlines())


def doctor(domain: str | None = None, device: str = "auto") -> list[Finding]:
    """Tests what works on this machine by trying it, as `partywall doctor` does. Takes some seconds.

    `device` is the GPU to try: `auto`, the first; `all`; `cuda:N`; or a UUID. Leaves nothing behind.
    """
    return _native.examine(str(PROGRAM), domain, device)
