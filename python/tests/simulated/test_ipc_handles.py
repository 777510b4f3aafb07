"""Handles of published tensors, for programs that know nothing of Partywall."""

import base64
import gc
import json

import pytest

import partywall as pw

from ..conftest import WATCHDOG
from ..triton import REGIONS, SERVER as TRITON
from . import driver

SIZE = 1024

SERVER = (
    REGIONS
    + """
import base64
import json

regions = Regions()
say("ready")
while line := told():
    request = json.loads(line)
    regions.register("x", base64.b64decode(request["raw_handle"]["b64"]), request["device_id"], request["byte_size"])
    say(list(regions.read("x", *map(int, told().split()))))
    told()
    regions.unregister("x")
    say("closed")
"""
)


def published(domain: pw.Domain, offset: int = 256) -> tuple[pw.Segment, driver.DeviceBytes]:
    """Publishes four bytes inside of an allocation."""
    driver.use()
    address = driver.allocate(SIZE)
    driver.fill(address, 0, SIZE, 0)
    driver.fill(address + offset, 7, 4, 0)
    driver.wait(0)
    tensor = driver.DeviceBytes(address + offset, [4])
    return domain.publish("x", {"t": tensor}), tensor


# Holds 430.
def test_server_reads_a_tensor_by_what_is_registered(domain, child):
    segment, _ = published(domain)
    server = child(SERVER)
    assert server.says() == "ready"
    with segment, segment.ipc_handle("t") as region:
        assert len(base64.b64decode(region.raw_handle, validate=True)) == 64
        assert (region.device_id, region.offset, region.nbytes, region.byte_size) == (0, 256, 4, 260)
        # As the client for HTTP does.
        handle = {"b64": region.raw_handle.decode()}
        body = {"raw_handle": handle, "device_id": region.device_id, "byte_size": region.byte_size}
        server.tell(json.dumps(body))
        server.tell(f"{region.nbytes} {region.offset}")
        assert server.says() == "[7, 7, 7, 7]"
        server.tell()
        assert server.says() == "closed"


# Holds 431.
@pytest.mark.parametrize("dropped", [False, True])
def test_handle_keeps_the_memory_of_a_closed_segment(domain, dropped):
    segment, tensor = published(domain)
    region = segment.ipc_handle("t")
    segment.close()
    assert tensor.released == 0 and not region.closed
    assert repr(region) == "<partywall.IpcHandle x@1:t: 4 bytes>"
    if dropped:
        with pytest.warns(ResourceWarning, match="unclosed <partywall.IpcHandle x@1:t"):
            del region
            gc.collect()
    else:
        region.close()
        region.close()
        assert repr(region) == "<partywall.IpcHandle x@1:t: closed>"
        with pytest.raises(pw.Closed, match="this handle is closed"):
            _ = region.raw_handle
    assert pw._native.flush(WATCHDOG)
    assert tensor.released == 1 and domain.ls() == []


# Holds 430.
def test_handles_of_other_memory_are_refused_with_the_way_out(domain, child):
    for device in ("host", "pinned", "cuda"):
        with domain.put("other", bytes(16), device) as segment:
            with pytest.raises(pw.WrongKind, match="published legacy") as refused:
                segment.ipc_handle("data")
            assert "Domain.publish" in str(refused.value)
    segment, _ = published(domain)
    with segment:
        with pytest.raises(pw.TensorNotFound):
            segment.ipc_handle("y")
        reader = child(
            """
            with pw.connect(socket=sys.argv[1], start=False) as d, d.open("x") as opened:
                try:
                    opened.ipc_handle("t")
                except pw.WrongKind as error:
                    say(error)
            """,
            domain.socket,
        )
        assert "opened legacy memory" in reader.says()
    with pytest.raises(pw.Closed):
        segment.ipc_handle("t")


# Holds 430.
def test_triton_client_registers_a_tensor(domain, child):
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    segment, _ = published(domain)
    server = child(TRITON)
    with grpc.InferenceServerClient(f"127.0.0.1:{server.says()}") as client:
        with segment, segment.ipc_handle("t") as region:
            client.register_cuda_shared_memory("t", region.raw_handle, region.device_id, region.byte_size)
            given = grpc.InferInput("INPUT0", [4], "UINT8")
            given.set_shared_memory("t", region.nbytes, region.offset)
            answer = client.infer("echo", [given])
            client.unregister_cuda_shared_memory("t")
        assert answer.as_numpy("OUTPUT0").tolist() == [7, 7, 7, 7]
    server.tell()
    assert server.end() == 0
