# Holds 400, 401.
"""`partywall put URL` with real servers on the loopback: nginx, and moto's S3."""

import json
import os
import shutil
import socket as sockets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import WATCHDOG

MODEL = bytes(range(256)) * (40 << 12)
"""40 MiB, so that several connections read ranges."""


def free_port() -> int:
    with sockets.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    """Waits until a server listens."""
    end = time.monotonic() + WATCHDOG
    while time.monotonic() < end:
        with sockets.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"watchdog: nothing listens at {port}")


def safetensors(name: str, data: bytes) -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[str]:
    """The URL of an nginx that serves `tmp_path`."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("there is no nginx here: apt-get install nginx-light")
    port = free_port()
    log = tmp_path / "nginx.log"
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {log};\n"
        # Its workers could not enter the folder otherwise.
        + ("user root;\n" if os.geteuid() == 0 else "")
        + "events {}\nhttp { access_log off; "
        + "".join(f"{of}_temp_path {tmp_path}/{of}; " for of in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"])
        + f"server {{ listen 127.0.0.1:{port}; root {tmp_path}; "
        + f"location /without/ {{ max_ranges 0; alias {tmp_path}/; }} }} }}\n"
    )
    server = subprocess.Popen([program, "-c", tmp_path / "nginx.conf", "-e", log])
    wait_for(port)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(WATCHDOG)


def test_nginx_serves_a_model_in_ranges_or_without(domain, nginx, tmp_path):
    (tmp_path / "model.bin").write_bytes(MODEL)
    (tmp_path / "model.safetensors").write_bytes(safetensors("w", MODEL))
    for url, tensor in [("model.bin", "data"), ("without/model.bin", "data"), ("model.safetensors", "w")]:
        with domain.put_url(f"{nginx}/{url}", "x", "host") as segment:
            assert bytes(segment[tensor]) == MODEL


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of moto's S3, with an empty bucket `models`."""
    pytest.importorskip("moto.server", reason="there is no moto here: pip install moto[server]", exc_type=ImportError)
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    send(f"http://127.0.0.1:{port}/models", b"")
    yield f"http://127.0.0.1:{port}/models"
    server.terminate()
    server.wait(WATCHDOG)


def send(url: str, data: bytes) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, {"Content-Type": "application/octet-stream"}, method="PUT")
    opener.open(request, timeout=WATCHDOG).close()


def test_bucket_of_moto_is_read_as_file_and_as_folder(domain, bucket):
    send(f"{bucket}/m/a.safetensors", safetensors("a", MODEL))
    send(f"{bucket}/m/b.safetensors", safetensors("b", b"12345"))
    send(f"{bucket}/m/text", b"text")
    for url in ["s3://models/m", "s3://models/m/"]:
        with domain.put_url(url, "x", "host") as segment:
            assert bytes(segment["a"]) == MODEL
            assert bytes(segment["b"]) == b"12345"
    with domain.put_url("s3://models/m/text", "x", "host") as segment:
        assert bytes(segment["data"]) == b"text"
