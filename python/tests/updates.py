"""Programs for the tests of updates: trainers, and workers that give a stand-in of vLLM's engine the latest weights.

In host memory torch is a stand-in, too.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TENSORS = 100
ELEMENTS = 1000
"""The weights of trainers that are to be killed."""

TESTS = str(Path(__file__).resolve().parents[1])
"""The folder from which workers import this module."""

WORKER = """
import types
import pytest
sys.path.insert(0, sys.argv[3])
from tests import stand_ins, updates
patch = pytest.MonkeyPatch()
on_gpu = sys.argv[2] == "cuda"
if on_gpu:
    import torch
    device = torch.device("cuda", 0)
    torch.ones(1, device=device).min().item()
else:
    stand_ins.torch(patch)
    device = stand_ins.Device("cpu")
factory = stand_ins.vllm(patch)
from partywall.integrations import vllm
vllm.register()

class Model(stand_ins.Model):
    def load_weights(self, weights):
        if self.halt:
            say("inside")
            told()
        self.found = updates.versions_in(dict(weights))

model = Model(device)
model.halt = False
config = types.SimpleNamespace(backend="partywall")
engine = factory.create_engine(config, stand_ins.vllm_config(), device, model)
engine.init_transfer_engine(engine.parse_init_info({"socket": sys.argv[1]}))

def update(name):
    engine.start_weight_update()
    engine.update_weights({"name": name})
    engine.finish_weight_update()
    return model.found
"""
"""Arguments: socket, `host` or `cuda`, `TESTS`. Defines `update(name)`, which returns the versions that it finds."""

FOLLOW = (
    WORKER
    + """
with pw.connect(socket=sys.argv[1]) as d, d.timeline(f"policy/{sys.argv[4]}", writer=True) as served:
    last, newest = int(sys.argv[5]), 0
    d.open("policy", timeout=None).close()
    while newest < last:
        found = update("policy")
        if len(found) != 1 or min(found) < newest:
            say("found", sorted(found), "after", newest)
            break
        if found != {newest}:
            newest = int(*found)
            served.signal(newest)
    else:
        say("all right")
    told()
engine.shutdown()
"""
)
"""Further arguments: a number, and the last version. Signals each new version that it finds in `policy/NUMBER`."""

HALT = (
    WORKER
    + """
model.halt = True
update("policy")
"""
)
"""Says `inside` when it has opened a version and not read it yet, and stays there."""

TRAINER = """
sys.path.insert(0, sys.argv[3])
from tests import updates
d = pw.connect(socket=sys.argv[1])
if sys.argv[2] == "cuda":
    import torch
    def full(value):
        return torch.full((updates.ELEMENTS,), value, dtype=torch.int32, device="cuda")
else:
    def full(value):
        return np.full(updates.ELEMENTS, value, "int32")
newest = d.open("policy").version if "policy" in d else 0
policy = updates.weights(full, newest)
"""
"""Arguments: socket, `host` or `cuda`, `TESTS`."""

PUT = (
    TRAINER
    + """
while True:
    updates.train(policy)
    say(d.put("policy", policy, kept=True).version)
"""
)
"""Puts one version after the other, and says each when it is committed."""

HALF = (
    TRAINER
    + """
updates.train(policy)
shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in policy.items()}
build = d.create_many("policy", shapes, sys.argv[2], kept=True)
for name in list(policy)[::2]:
    build[name].write(policy[name])
say("inside")
told()
"""
)
"""Says `inside` when it has written half of a version, and stays there."""


def weights(full: Callable[[int], Any], version: int) -> dict[str, Any]:
    """Returns the weights of a version. `full(value)` makes one tensor."""
    return {f"layers.{index}.weight": full(index + TENSORS * version) for index in range(TENSORS)}


def train(policy: Mapping[str, Any]) -> None:
    """Turns the weights of a version into those of the next one. Each element says its version and its tensor."""
    for weight in policy.values():
        weight += len(policy)


def versions_in(policy: Mapping[str, Any]) -> set[float]:
    """Returns the versions that all elements belong to; a fraction if an element belongs to another tensor."""
    extremes = [(int(name.split(".")[1]), (weight.min(), weight.max())) for name, weight in policy.items()]
    return {(int(value) - index) / len(policy) for index, both in extremes for value in both}
