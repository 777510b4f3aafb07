# Holds 292.
"""The integrations on a GPU, with stand-ins for the frameworks."""

RECEIVE = """
import types
import pytest
from tests import stand_ins
patch = pytest.MonkeyPatch()
stand_ins.torch(patch)
factory = stand_ins.vllm(patch)
from partywall.integrations import sglang, vllm
vllm.register()
config = types.SimpleNamespace(backend="partywall")
vllm_config = stand_ins.vllm_config()
model = stand_ins.Model(stand_ins.Device("cuda", 1))
engine = factory.create_engine(config, vllm_config, model.device, model)
engine.init_transfer_engine(engine.parse_init_info({"socket": sys.argv[1]}))
d = pw.connect(socket=sys.argv[1])
with d.create("policy", 4, "float32", device="cuda:0") as build, build.commit():
    for load in (lambda: engine.update_weights({"name": "policy"})), (lambda: sglang.load(model, "policy")):
        try:
            load()
            say("loaded")
        except pw.RemoteDevice as error:
            say(type(error).__name__, model.calls)
engine.shutdown()
d.close()
"""


def test_weights_on_another_gpu_are_refused(socket, child):
    started = child(RECEIVE, socket, SIMCUDA_DEVICES="2", PARTYWALL_SOCKET=socket, PYTHONPATH="python")
    assert [started.says(), started.says()] == ["RemoteDevice []"] * 2
    assert started.end() == 0
