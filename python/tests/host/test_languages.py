"""A topic between C++, Rust and Python: each publishes to each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import WATCHDOG

ROOT = Path(__file__).parents[3]
COUNT = 300
LANGUAGES = ["cpp", "rust", "python"]

PYTHON = """
import sys
import numpy as np
import partywall as pw

with pw.connect() as d, d.topic("examples/frames", shape=(48, 64), dtype="uint8", device="host") as frames:
    if sys.argv[1] == "publish":
        with frames.publisher() as publisher:
            publisher.wait_for_subscribers(timeout=60)
            for number in range(int(sys.argv[2])):
                with publisher.loan((48, 64)) as out:
                    np.asarray(out)[:] = number % 256
    else:
        received = right = 0
        with frames.subscriber(until="idle") as subscriber:
            for sample in subscriber:
                right += bool((np.asarray(sample) == received % 256).all())
                received += 1
        print(f"{received} frames, {right} of them right")
"""

pytestmark = pytest.mark.skipif("PARTYWALL_EXAMPLES" not in os.environ, reason="the Rust examples are not built")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The command of each language's program."""
    folder = tmp_path_factory.mktemp("cpp")
    examples = Path(os.environ["PARTYWALL_EXAMPLES"])
    library = examples.parent / "deps/libpartywall_c.so"
    (folder / "libpartywall.so.0").symlink_to(library)
    program = folder / "frames"
    include = ROOT / "crates/partywall-c/include"
    source = ROOT / "examples/c/frames.cpp"
    compiler = ["c++", "-std=c++17", "-I", include, source, library, f"-Wl,-rpath,{folder}", "-o", program]
    subprocess.run(compiler, check=True, timeout=WATCHDOG)
    return {"cpp": [str(program)], "rust": [str(examples / "frames")], "python": [sys.executable, "-c", PYTHON]}


# Holds 375.
@pytest.mark.parametrize("to", LANGUAGES)
@pytest.mark.parametrize("by", LANGUAGES)
@pytest.mark.usefixtures("domain")
def test_frames_go_from_each_language_to_each(
    socket: str, monkeypatch: pytest.MonkeyPatch, commands: dict[str, list[str]], by: str, to: str
) -> None:
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    with subprocess.Popen([*commands[by], "publish", str(COUNT)]) as publisher:
        subscriber = [*commands[to], "subscribe"]
        said = subprocess.run(subscriber, stdout=subprocess.PIPE, text=True, timeout=WATCHDOG, check=True).stdout
        assert publisher.wait(timeout=WATCHDOG) == 0
    assert said == f"{COUNT} frames, {COUNT} of them right\n"
