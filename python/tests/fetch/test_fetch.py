"""The wheel `partywall-fetch`, beside the package: `Domain.put_url`."""

import http.server
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import partywall as pw

from ..conftest import WATCHDOG, Child

FILE = bytes(range(256)) * 5000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `FILE`, without ranges, and never answers `/stalled`."""

    stalled = threading.Event()
    go_on = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/gone":
            self.send_error(404)
            return
        if self.path.startswith("/stalled"):
            self.stalled.set()
            self.go_on.wait(WATCHDOG)
        self.send_response(200)
        self.send_header("Content-Length", str(len(FILE)))
        self.end_headers()
        self.wfile.write(FILE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Handler.stalled.clear()
    Handler.go_on.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.go_on.set()
        server.shutdown()


# Holds 408.
def test_url_becomes_a_segment_of_this_connection(socket, domain, url):
    with domain.put_url(f"{url}/x.bin", "x", "host") as segment:
        assert bytes(segment["data"]) == FILE
        assert segment.version == 1
    assert domain.exists("x")
    with pw.connect(socket=socket) as other:
        other.put_url(f"{url}/y.bin", "y", "host", mutable=True, threads=1).close()
        with other.put_url(f"{url}/y.bin", "y", "host", if_absent=True) as existing:
            assert existing.version == 1
        other.put_url(f"{url}/z.bin", "z", "host", kept=True).close()
    assert not domain.exists("y")
    assert domain.exists("z")


# Holds 408.
def test_failures_are_the_usual_exceptions(domain, url):
    with pytest.raises(pw.FileNotFound, match="the server has no such file"):
        domain.put_url(f"{url}/gone", "x", "host")
    with pytest.raises(pw.BadFile, match="check the name of the host") as raised:
        domain.put_url("http://127.0.0.1:9/x", "x", "host")
    assert raised.value.anchor == "url"
    with pytest.raises(pw.NoSuchMember):
        domain.put_url(f"{url}/x.bin", "x", "host", owner="123456")
    with pytest.raises(pw.BadValue, match="one end"):
        domain.put_url(f"{url}/x.bin", "x", "host", owner="123456", kept=True)
    with pytest.raises(pw.BadValue, match="no scheme"):
        domain.put_url("ftp://127.0.0.1/x", "x", "host")
    with pytest.raises(pw.BadValue, match="is not set, or is empty"):
        domain.put_url("env://PARTYWALL_NO_SUCH_VARIABLE", "x", "host")
    with pytest.raises(TypeError, match="unexpected keyword"):
        domain.put_url(f"{url}/x.bin", "x", "host", nonsense=1)
    assert not domain.exists("x")


# Holds 408.
def test_interrupt_ends_the_download(domain, url):
    def interrupt() -> None:
        Handler.stalled.wait(WATCHDOG)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        domain.put_url(f"{url}/stalled", "x", "host")
    assert not domain.exists("x")
    # The program ends, and leaves this connection as the only one.
    while len(domain.ps()) > 1:
        time.sleep(0.01)


# Holds 432.
@pytest.mark.parametrize("given", ["URL", "env://MODEL_URL"])
def test_url_is_in_no_command_line(domain, url, monkeypatch, given):
    secret = f"{url}/stalled?sig=SECRET".replace("://", "://user:SECRET@")
    monkeypatch.setenv("MODEL_URL", secret)
    shown = []

    def look() -> None:
        Handler.stalled.wait(WATCHDOG)
        for member in domain.ps():
            shown.extend([member.command, Path(f"/proc/{member.pid}/cmdline").read_text()])
        Handler.go_on.set()

    looking = threading.Thread(target=look)
    looking.start()
    domain.put_url(secret if given == "URL" else given, "x", "host").close()
    looking.join()
    assert any("env://" in text for text in shown)
    assert "SECRET" not in "".join(shown)


# Holds 408.
def test_download_ends_with_its_process(socket, domain, url):
    child = Child(
        f"import partywall as pw\npw.connect(socket={socket!r}).put_url({url + '/stalled'!r}, 'x', 'host', kept=True)"
    )
    Handler.stalled.wait(WATCHDOG)
    child.kill()
    # The server does not answer, so the program would wait on.
    while len(domain.ps()) > 1:
        time.sleep(0.01)
    Handler.go_on.set()
    assert not domain.exists("x")
