"""Triton's client registers a tensor with a process that knows nothing of Partywall."""

import os

import numpy as np
import pytest

from ..triton import SERVER

torch = pytest.importorskip("torch")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)


# Holds 430.
def test_triton_client_registers_a_tensor(domain, child):
    server = child(SERVER)
    port = server.says()
    whole = torch.arange(1000, dtype=torch.float32, device="cuda")
    part = whole[100:200]
    with (
        grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
        domain.publish("x", {"whole": whole, "part": part}) as segment,
    ):
        offsets = []
        for name, tensor in (("whole", whole), ("part", part)):
            with segment.ipc_handle(name) as region:
                client.register_cuda_shared_memory(name, region.raw_handle, region.device_id, region.byte_size)
                given = grpc.InferInput("INPUT0", list(tensor.shape), "FP32")
                given.set_shared_memory(name, region.nbytes, region.offset)
                answer = client.infer("echo", [given])
                client.unregister_cuda_shared_memory(name)
                offsets.append(region.offset)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), tensor.cpu().numpy())
        assert offsets[1] - offsets[0] == 400
    server.tell()
    assert server.end() == 0
