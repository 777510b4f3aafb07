"""Hosts for the examples that need several, on this machine: each is a domain with a bridge on the loopback."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

PARTYWALL = [sys.executable, "-m", "partywall"]


class Host:
    """A host. `run` starts a program there."""

    def __init__(self, environment: dict[str, str], endpoint: str) -> None:
        self.environment = environment
        self.endpoint = endpoint

    def run(self, *command: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=self.environment, text=True)


def output(program: "subprocess.Popen[str]") -> str:
    """Waits until a program has ended, and returns the rest of what it has printed. Ends this one if it has failed."""
    said = program.communicate()[0]
    return said if program.returncode == 0 else sys.exit(program.returncode)


@contextmanager
def host(name: str, *options: str) -> Iterator[Host]:
    """Starts a broker and a bridge with these options, and stops them at the end."""
    with tempfile.TemporaryDirectory(prefix="pw") as folder:
        here = Host({**os.environ, "PARTYWALL_SOCKET": f"{folder}/sockets/broker"}, "127.0.0.1:0")
        command = ["--json", "bridge", "--host", name, "--listen", here.endpoint, *options]
        with here.run(*PARTYWALL, *command) as bridge:
            assert bridge.stdout is not None
            said = json.loads(bridge.stdout.readline() or "{}")
            if "endpoints" not in said:
                sys.exit(f"no bridge: {said.get('error', {}).get('message')}")
            here.endpoint = said["endpoints"][0]
            try:
                yield here
            finally:
                bridge.terminate()
                bridge.wait()
                here.run(*PARTYWALL, "stop", "--force").communicate()
