"""Hosts for tests: each is a domain with a bridge of its own, and all listen on the loopback."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import partywall as pw
from partywall._program import PROGRAM

from ..conftest import WATCHDOG


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `partywall` find the program that knows other hosts: one that is installed, or the one that is named."""
    if named := os.environ.get("PARTYWALL_BRIDGE"):
        monkeypatch.setenv("PATH", str(Path(named).parent), prepend=os.pathsep)
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("partywall-bridge", path=path) is None:
        pytest.skip("there is no partywall-bridge here: cargo install --locked --path crates/partywall-bridge")


class Host:
    """A host with a running bridge."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.domain = pw.connect(socket=folder / name / "broker")
        command = [PROGRAM, "--socket", self.domain.socket, "--json", "bridge", "--listen", "127.0.0.1:0", *options]
        if "--tls" not in options:
            command += ["--host", name]
        self.bridge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.bridge.stdout is not None
        said = json.loads(self.bridge.stdout.readline())
        assert said.get("host") == name, said
        self.endpoint = said["endpoints"][0]

    def members(self) -> int:
        """The number of members, of which two are the test and the bridge."""
        return len(self.domain.ps())

    def end(self) -> None:
        self.bridge.kill()
        self.bridge.communicate()
        stop = [PROGRAM, "--socket", self.domain.socket, "stop", "--force"]
        self.domain.close()
        subprocess.run(stop, capture_output=True, timeout=WATCHDOG, check=False)


@pytest.fixture
def host(socket: str) -> Iterator[Callable[..., Host]]:
    """Starts hosts by their names and the options of their bridges."""
    hosts: list[Host] = []

    def start(name: str, *options: str) -> Host:
        hosts.append(Host(name, Path(socket).parents[1], *options))
        return hosts[-1]

    yield start
    for started in hosts:
        started.end()
