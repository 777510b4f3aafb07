# Holds 284.
"""The reductions of `torch.multiprocessing` with tensors of a pool, on the simulated driver.

A tensor of the CPU stands for one of a GPU, and its payload is the memory of a pool with the same bytes.
"""

import os

import pytest

from ..conftest import NO_PTRACE

pytest.importorskip("torch")
pytest.importorskip("partywall.torch")

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")

PEER = (
    NO_PTRACE
    + """
give_up_ptrace()
from multiprocessing.reduction import ForkingPickler
import torch
import partywall.torch
from partywall.torch import _payloads, _reductions
from tests.simulated import copies, driver
from tests.simulated.test_heaps import functions
driver.use()
torch.from_dlpack = copies.from_dlpack
_reductions._DEVICE = "cpu"
domain = pw.connect(socket=sys.argv[1])
partywall.torch.install_reductions(domain=domain)
def dump(tensor):
    return bytes(ForkingPickler.dumps(tensor)).hex()
"""
)

SENDER = (
    PEER
    + """
heap = domain._native.heap("pool", 64 << 20, "cuda:0")
callbacks = heap.torch_allocator(functions)
publish = _payloads.publish
def publish_in_pool(domain, name, flat):
    address = callbacks.allocate(flat.numel())
    driver.fill(address, flat[0].item(), flat.numel(), 0)
    return publish(domain, name, driver.DeviceBytes(address, [flat.numel()]))
_payloads.publish = publish_in_pool
tensor = torch.full((4096,), 7, dtype=torch.uint8)
say(dump(tensor))
told()
"""
)

RECEIVER = (
    PEER
    + """
assert not may_take_descriptors(int(sys.argv[2]))
tensor = ForkingPickler.loads(bytes.fromhex(told()))
say(tensor.unique().tolist())
say(dump(tensor))
told()
"""
)


def test_tensors_of_pools_need_no_ptrace_rights(domain, child):
    sender = child(SENDER, domain.socket, PYTHONPATH="python")
    payload = sender.says()
    assert [row.kind for row in domain.ls()] == ["live"]
    for _ in range(2):
        # The second one receives what the first one has received.
        receiver = child(RECEIVER, domain.socket, str(sender.process.pid), PYTHONPATH="python")
        receiver.tell(payload)
        assert receiver.says() == "[7]"
        sender, payload = receiver, receiver.says()
    assert len(domain.ls()) == 1
