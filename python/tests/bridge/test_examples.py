"""The examples with several hosts, and the commands of docs/hosts.md, as they are pasted."""

import contextlib
import os
import re
import shutil
import signal
import socket as sockets
import subprocess
import sys
from pathlib import Path

import pytest

from partywall._program import PROGRAM

from ..conftest import WATCHDOG

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/hosts.md"


def ran(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, ROOT / "python/examples" / name, *arguments]
    example = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert example.returncode == 0, example.stderr
    return example.stdout.splitlines()


def test_hosts_follow_the_versions_of_a_trainer():
    begun, committed, *served = ran("replicas.py", "--hosts", "2", "--steps", "10")
    assert begun == "there is a policy to serve"
    assert committed == "10 versions of 8 MiB committed" and len(served) == 2
    for number, line in enumerate(served):
        of = rf"//server{number}: \d+ versions came, the last one of step 10; 0 were of more than one step"
        assert re.fullmatch(of, line), line


def test_frames_cross_and_each_is_received_or_missed():
    [said] = ran("far_camera.py", "--frames", "100")
    received, right, missed = map(int, re.findall(r"\d+", said))
    assert received == right > 0 and received + missed == 100


class Shells:
    """A shell for each host of the page, all on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o700)
        self.environment = os.environ | {"PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"}
        for variable in ("PARTYWALL_SOCKET", "PARTYWALL_DOMAIN"):
            self.environment.pop(variable, None)
        self.domains: set[str] = set()
        self.ports: dict[str, int] = {}
        self.groups: list[int] = []

    def paste(self, commands: str, domain: str) -> str:
        """Runs commands of the page. Its addresses are of the loopback here, with ports that are free."""
        self.domains.add(domain)
        environment = self.environment | {"XDG_RUNTIME_DIR": str(self.folder), "PARTYWALL_DOMAIN": domain}
        commands = re.sub(r":(74\d\d)", lambda port: f":{self.port(port[1])}", commands.replace("10.0.0.", "127.0.0."))
        # What it leaves in the background keeps writing to the file.
        with (self.folder / "said").open("w+") as said:
            command = ["bash", "-e", "-o", "pipefail", "-c", commands]
            shell = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=said, start_new_session=True)
            self.groups.append(shell.pid)
            assert shell.wait(WATCHDOG) == 0, commands
            said.seek(0)
            return said.read()

    def port(self, of: str) -> int:
        """Returns the port in place of one of the page."""
        if of not in self.ports:
            with sockets.create_server(("127.0.0.1", 0)) as server:
                self.ports[of] = server.getsockname()[1]
        return self.ports[of]

    def stop(self) -> None:
        for domain in self.domains:
            environment = self.environment | {"XDG_RUNTIME_DIR": str(self.folder), "PARTYWALL_DOMAIN": domain}
            stop = [PROGRAM, "stop", "--force"]
            subprocess.run(stop, env=environment, capture_output=True, timeout=WATCHDOG, check=False)
        # What runs in the background outlives its broker, and would wait for the next one.
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@pytest.fixture
def shells(socket):
    opened = Shells(Path(socket).parents[1])
    yield opened
    opened.stop()


def blocks(heading: str) -> list[str]:
    """Returns the commands of a section of the page, one text a block."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def test_commands_for_one_machine_run_as_pasted(shells):
    [commands] = blocks("On one machine")
    said = shells.paste(commands, "host-a")
    shells.domains.add("host-b")
    assert "they are equal" in said and said.count("int32") >= 1, said


def test_commands_for_two_machines_run_as_pasted(shells):
    bridge, pull, follow, again, publish, echo = blocks("Two machines, five minutes")
    shells.paste(bridge, "a")
    assert "//a/llm@1" in shells.paste(pull, "b")
    model, copy = (shells.folder / name for name in ("model.bin", "copy.bin"))
    assert model.read_bytes() == copy.read_bytes()
    shells.paste(follow.replace("partywall watch llm", ""), "b")
    shells.paste(again, "a")
    shells.paste("until partywall show llm@2; do sleep 0.1; done; partywall get llm copy.bin --force", "b")
    assert model.read_bytes() == copy.read_bytes()
    shells.paste(f"{publish.strip()} &", "a")
    assert shells.paste(echo, "b").count("uint8") == 100


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl here: apt-get install openssl")
def test_certificates_of_the_page_let_its_hosts_pull(shells):
    certificates, first, second = blocks("Certificates")
    shells.paste(certificates, "a")
    shells.paste(first, "a")
    shells.paste("head -c 3M /dev/urandom > model.bin; partywall put model.bin llm --device host", "a")
    assert "copied from //a/llm@1" in shells.paste(second, "b")
