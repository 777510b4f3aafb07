"""`Domain.pull`, `Domain.follow` and `Domain.hosts`, beside the program `partywall-bridge`."""

import os
import pickle
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest

import partywall as pw
from partywall._program import PROGRAM

from ..conftest import WATCHDOG, eventually
from ..host.test_errors import assert_quoted

LAYER = np.arange(1 << 19, dtype="float32")
"""Two pieces."""


@pytest.fixture
def pair(host):
    """Host `a`, which exports everything, and `b`, which is connected to it."""
    a = host("a", "--export", "*")
    return a, host("b", "--connect", a.endpoint)


# Holds 408.
def test_segment_of_another_host_becomes_one_of_this_connection(pair):
    a, b = pair
    a.domain.put("llm", {"w": LAYER, "b": LAYER[:3]}, metadata={"step": "7"})
    with b.domain.pull("//a/llm", device="host") as replica:
        assert (np.asarray(replica["w"]) == LAYER).all() and np.asarray(replica["b"]).tolist() == [0, 1, 2]
        assert (replica.name, replica.version, replica.kept) == ("llm", 1, False)
        assert replica.metadata["step"] == "7" and replica.metadata["origin"] == "//a/llm@1"
        with b.domain.pull("//a/llm@1", device="host", kept=True) as same:
            assert same.version == 1 and not same.kept
    with pw.connect(socket=b.domain.socket) as other:
        other.pull("//a/llm", "gone", "host").close()
        other.pull("//a/llm", "copy", "host", kept=True, also=["a"], timeout=30).close()
        other.pull("//a/llm", "of/b", device="host", owner=b.domain.token).close()
    assert not b.domain.exists("gone")
    assert all(b.domain.exists(name) for name in ("llm", "copy", "of/b"))


# Holds 408.
def test_hosts_are_listed_with_their_states(pair, host):
    a, b = pair
    [seen] = b.domain.hosts()
    assert (seen.name, seen.state, seen.unreachable, seen.protocol) == ("a", "alive", None, None)
    assert (seen.release, seen.endpoints) == (pw.__version__, (a.endpoint,))
    a.bridge.kill()
    eventually(lambda: b.domain.hosts()[0].state == "unreachable")
    [lost] = b.domain.hosts()
    assert lost.unreachable >= 0 and lost.instance == seen.instance
    # A host without a bridge of its own has to know an address.
    b.bridge.kill()
    c = host("c")
    eventually(lambda: b.members() == 1)
    with pytest.raises(pw.HostNotFound, match="this domain has no bridge") as raised:
        b.domain.hosts(timeout=0)
    assert_quoted(raised.value)
    assert [found.name for found in b.domain.hosts(connect=c.endpoint)] == ["c"]
    assert b.domain.hosts(connect=[c.endpoint], realm="other") == []


# Holds 408.
def test_failures_are_the_usual_exceptions(pair):
    a, b = pair
    a.domain.put("llm", LAYER)
    a.domain.create("live", 3, "uint8", "host", mutable=True).commit()
    for kind, origin, options in [
        (pw.NameNotFound, "//a/nothing", {}),
        (pw.VersionNotFound, "//a/llm@7", {}),
        (pw.WrongKind, "//a/live", {}),
        (pw.HostNotFound, "//z/llm", {"timeout": 5}),
        (pw.HostUnreachable, "//a/llm", {"connect": "127.0.0.1:9", "timeout": 0.1}),
        (pw.BadValue, "//a/llm", {"connect": ["10.1.2.3:7447"]}),
    ]:
        with pytest.raises(kind) as raised:
            b.domain.pull(origin, device="host", **options)
        assert raised.value.advice and not isinstance(raised.value, pw.BadFile)
        assert_quoted(raised.value)
    with pytest.raises(pw.BadValue, match="does not begin with //HOST/"):
        b.domain.pull("llm", device="host")
    with pytest.raises(pw.NoSuchMember):
        b.domain.pull("//a/llm", "y", device="host", owner="123456")
    with pytest.raises(pw.BadValue, match="one end"):
        b.domain.pull("//a/llm", device="host", owner="123456", kept=True)
    for kind, origin in [(pw.NameNotFound, "//a/nothing"), (pw.BadValue, "//a/llm@1")]:
        with b.domain.follow(origin, device="host") as replicas, pytest.raises(kind):
            next(replicas)
    with pytest.raises(TypeError, match="unexpected keyword"):
        b.domain.pull("//a/llm", device="host", mutable=True)
    assert [name.name for name in b.domain.ls() if not name.name.startswith(".")] == []


# Holds 408.
def test_missing_program_is_named(socket, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    if (PROGRAM.parent / "partywall-bridge").exists():
        pytest.skip("partywall-bridge is installed beside the program")
    with pw.connect(socket=socket) as d, d.follow("//a/llm") as replicas:
        for call in (d.hosts, lambda: d.pull("//a/llm"), lambda: next(replicas)):
            with pytest.raises(pw.Error, match="needs the program partywall-bridge") as raised:
                call()
            assert "cargo install --locked --path crates/partywall-bridge" in raised.value.advice


# Holds 408.
def test_calls_wait_for_a_bridge_that_is_stopped(pair):
    a, b = pair
    a.domain.put("llm", LAYER)
    b.bridge.send_signal(signal.SIGSTOP)
    with pytest.raises(pw.HostUnreachable, match="the bridge of this domain") as raised:
        b.domain.hosts(timeout=1)
    assert_quoted(raised.value)
    # For longer than one question waits.
    threading.Timer(6, b.bridge.send_signal, [signal.SIGCONT]).start()
    with b.domain.follow("//a/llm", "followed", "host") as replicas:
        assert [host.name for host in b.domain.hosts()] == ["a"]
        with b.domain.pull("//a/llm", device="host") as pulled, next(replicas) as followed:
            assert pulled.metadata["origin"] == followed.metadata["origin"] == "//a/llm@1"


# Holds 408.
def test_versions_of_another_host_are_followed(pair):
    a, b = pair
    a.domain.put("llm", np.full(3, 1))
    with b.domain.follow("//a/llm", device="host") as replicas:
        for step in range(1, 4):
            with next(replicas) as replica:
                assert np.asarray(replica["data"]).tolist() == [step] * 3 and replica.version == step
            a.domain.put("llm", np.full(3, step + 1))
        with pytest.raises(TypeError):
            pickle.dumps(replicas)
        # The end of a wait in another thread.
        next(replicas).close()
        waiting = threading.Thread(target=lambda: list(replicas))
        waiting.start()
        replicas.close()
        waiting.join(WATCHDOG)
        assert not waiting.is_alive()
    assert replicas.closed and list(replicas) == []
    eventually(lambda: b.members() == 2)


# Holds 408.
def test_interrupt_ends_the_pull(pair):
    a, b = pair
    a.domain.put("llm", LAYER)
    a.bridge.send_signal(signal.SIGSTOP)

    def interrupt() -> None:
        eventually(lambda: b.members() > 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        b.domain.pull("//a/llm", device="host")
    assert not b.domain.exists("llm")
    eventually(lambda: b.members() == 2)


# Holds 408.
@pytest.mark.parametrize("call", ["pull('//a/llm', device='host')", "follow('//a/llm', device='host')"])
def test_copying_ends_with_its_process(pair, child, call):
    a, b = pair
    a.domain.put("llm", LAYER)
    a.bridge.send_signal(signal.SIGSTOP)
    puller = child(
        f"""
        d = pw.connect(socket={b.domain.socket!r})
        replicas = d.{call}
        next(replicas)
        """
    )
    # The child and its program, which waits for the host.
    eventually(lambda: b.members() == 4)
    puller.kill()
    eventually(lambda: b.members() == 2)
    assert not b.domain.exists("llm")


# Holds 408.
def test_pull_takes_certificates(host, tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl here: apt-get install openssl")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, capture_output=True, timeout=WATCHDOG, check=True)

    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    openssl(f"{new} -keyout ca.key -out ca.pem -subj /CN=authority")
    for name in "ab":
        (tmp_path / name).mkdir()
        own = f"{new} -CA ca.pem -CAkey ca.key -keyout {name}/key.pem -out {name}/cert.pem -subj /CN={name}"
        openssl(f"{own} -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE")
        shutil.copy(tmp_path / "ca.pem", tmp_path / name)
    a = host("a", "--export", "*", "--tls", f"{tmp_path}/a", "--allow", "b")
    b = host("b")
    a.domain.put("llm", LAYER)
    reach = {"connect": a.endpoint.removeprefix("quic/"), "tls": tmp_path / "b", "allow": ["a"]}
    with b.domain.pull("//a/llm", device="host", **reach) as replica:
        assert (np.asarray(replica["data"]) == LAYER).all()
    assert [found.name for found in b.domain.hosts(**reach)] == ["a"]
    assert b.domain.hosts(connect=a.endpoint.replace("quic", "tcp")) == []
