"""A topic between C++, Rust and Python, and libpartywall for tests that load it themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import WATCHDOG

ROOT = Path(__file__).parents[2]
COUNT = 300
LANGUAGES = ["cpp", "rust", "python"]

needs_examples = pytest.mark.skipif("PARTYWALL_EXAMPLES" not in os.environ, reason="the Rust examples are not built")


def library(folder: Path) -> Path:
    """Puts a copy of libpartywall, by its SONAME, into a folder."""
    built = Path(os.environ["PARTYWALL_EXAMPLES"]).parent / "deps/libpartywall_c.so"
    linked = folder / "libpartywall.so.0"
    linked.symlink_to(built)
    return linked


def commands(folder: Path) -> dict[str, list[str]]:
    """Returns the command of each language's program."""
    program = folder / "frames"
    include = ROOT / "crates/partywall-c/include"
    source = ROOT / "examples/c/frames.cpp"
    options: list[str | Path] = ["-std=c++17", "-I", include, source, library(folder)]
    subprocess.run(["c++", *options, f"-Wl,-rpath,{folder}", "-o", program], check=True, timeout=WATCHDOG)
    rust = Path(os.environ["PARTYWALL_EXAMPLES"]) / "frames"
    return {
        "cpp": [str(program)],
        "rust": [str(rust)],
        "python": [sys.executable, str(ROOT / "python/examples/frames.py")],
    }


def exchange(by: list[str], to: list[str], device: str) -> None:
    """Has one program publish frames to another one."""
    with subprocess.Popen([*by, "publish", str(COUNT), device]) as publisher:
        subscriber = [*to, "subscribe", device]
        said = subprocess.run(subscriber, stdout=subprocess.PIPE, text=True, timeout=WATCHDOG, check=True).stdout
        assert publisher.wait(timeout=WATCHDOG) == 0
    assert said == f"{COUNT} frames, {COUNT} of them right\n"
