# Holds 292, 294, 296.
"""The integrations on a real GPU, with torch, and with stand-ins for the frameworks above it."""

import os
from pathlib import Path

import pytest

import partywall as pw

from .. import stand_ins
from ..conftest import WATCHDOG
from .test_sharing import assert_all_comes_back, free

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)

from .. import small_vllm  # noqa: E402
from ..host.test_vllm_updates import Engine, expected, trained  # noqa: E402

TESTS = str(Path(__file__).resolve().parents[2])
"""The folder from which children import the stand-ins."""

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32]

WORKER = """
import types
import pytest
import torch
sys.path.insert(0, sys.argv[2])
from tests import stand_ins
patch = pytest.MonkeyPatch()
factory = stand_ins.vllm(patch)
from partywall.integrations import vllm
vllm.register()
device = torch.device("cuda", 0)
model = stand_ins.Model(device)
config = types.SimpleNamespace(backend="partywall")
engine = factory.create_engine(config, stand_ins.vllm_config(), device, model)
engine.init_transfer_engine(engine.parse_init_info({"socket": sys.argv[1], "timeout": 0}))
while name := told():
    engine.start_weight_update()
    try:
        engine.update_weights({"name": name})
        engine.finish_weight_update()
        say(len(model.weights), {int(weight.float().sum()) for weight in model.weights.values()})
    except pw.NameNotFound:
        say("NameNotFound")
engine.shutdown()
"""

SOURCE = """
import pytest
import torch
sys.path.insert(0, sys.argv[2])
from tests import stand_ins
patch = pytest.MonkeyPatch()
stand_ins.ray(patch)
from partywall.integrations import ray
class Transport(ray.PartywallTransport):
    broker, owner, node = sys.argv[1], sys.argv[3], "node"
given = [torch.arange(1000, device="cuda"), torch.ones(2, 3, dtype=torch.bfloat16, device="cuda").T]
meta = Transport().extract_tensor_transport_metadata("id", given)
say(meta.name, meta.tensor_device)
told()
"""


def weights(version):
    """Returns tensors of several dtypes, each with the version as its sum."""
    tensors = {}
    for index in range(100):
        tensor = torch.zeros(1 + index * 1000, device="cuda")
        tensor[index * 7] = version
        tensors[f"layers.{index}.weight"] = tensor.to(DTYPES[index % len(DTYPES)])
    return tensors


def test_vllm_workers_read_one_version_each_update(domain, child):
    workers = [child(WORKER, domain.socket, TESTS) for _ in range(2)]
    for worker in workers:
        worker.tell("missing")
        assert worker.says() == "NameNotFound"
    for version in 1, 2, 3, 4:
        domain.put("policy", weights(version))
        for worker in workers:
            worker.tell(f"policy@{version}")
        assert [worker.says() for worker in workers] == [f"100 {{{version}}}"] * 2
    # The death of one worker changes nothing for the other.
    workers[0].kill()
    domain.put("policy", weights(5))
    workers[1].tell("policy")
    assert workers[1].says() == "100 {5}"
    workers[1].tell()
    assert workers[1].end() == 0


def test_ray_object_on_the_gpu_survives_its_source(domain, child, monkeypatch):
    def sums(numbers, ones):
        return int(numbers.sum()), float(ones.float().sum())

    # The first use of a kernel loads it, which allocates memory permanently.
    sums(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(2, 2, dtype=torch.bfloat16, device="cuda").T)
    before = free()
    source = child(SOURCE, domain.socket, TESTS, domain.token)
    name, device = source.says().split()
    assert device == "cuda"
    source.kill()
    stand_ins.ray(monkeypatch)
    from partywall.integrations import ray

    class Transport(ray.PartywallTransport):
        broker, owner, node = domain.socket, domain.token, "node"

    receiver = Transport()
    meta = ray.PartywallTransportMetadata([None, None], "cuda", name)
    numbers, ones = receiver.recv_multiple_tensors("id", meta, None)
    assert numbers.is_cuda and ones.shape == (3, 2) and ones.dtype == torch.bfloat16
    assert sums(numbers, ones) == (499_500, 6)
    receiver.garbage_collect("id", meta, [])
    assert domain.ls() == []
    del numbers, ones
    assert_all_comes_back(before)


ENGINE = """
import pytest
import torch
sys.path.insert(0, sys.argv[1])
from tests import small_vllm, stand_ins
rank, size = int(sys.argv[2]), int(sys.argv[3])
torch.cuda.set_device(rank if size > 1 else 0)
loaders = small_vllm.install(pytest.MonkeyPatch(), tp=stand_ins.Group(rank, size))
engine = small_vllm.config(device="cuda", loaded=lambda: say("read"))
model = small_vllm.load(loaders, engine, mode=sys.argv[4])
for buffer in model.buffers():
    buffer.mul_(1)
torch.cuda.synchronize()
say(small_vllm.loader(loaders, mode=sys.argv[4]).get_external_weight_memory(engine))
small_vllm.allocate_caches(engine)
say(model.embed.weight.device, small_vllm.answer(model))
told()
"""


@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_vllm_engines_take_the_weights_of_one(domain, child, mode):
    expected = small_vllm.answer(small_vllm.ordinary(small_vllm.config(device="cuda")))
    # Behind the first product of matrices, whose library allocates memory permanently.
    before = free()
    builder = child(ENGINE, TESTS, "0", "1", mode, PARTYWALL_SOCKET=domain.socket)
    assert builder.says() == "read"
    with domain.open("llm/tp0of1", WATCHDOG) as segment:
        assert (segment.kind, segment.metadata["partywall.layout"]) == (
            ("vmm", "processed") if mode == "shared" else ("host", "loaded")
        )
        mapped = segment.nbytes if mode == "shared" else 0
    assert builder.says() == str(mapped)
    assert builder.says() == f"cuda:0 {expected}"
    builder.kill()
    for _ in range(2):
        engine = child(ENGINE, TESTS, "0", "1", mode, PARTYWALL_SOCKET=domain.socket)
        assert [engine.says(), engine.says()] == [str(mapped), f"cuda:0 {expected}"]
        engine.kill()
    domain.rm("llm/tp0of1")
    assert_all_comes_back(before)


def test_vllm_engine_on_another_gpu_is_refused_and_ranks_have_their_own(domain, child, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    ranks = [child(ENGINE, TESTS, str(rank), "2", "shared", PARTYWALL_SOCKET=domain.socket) for rank in range(2)]
    for rank, started in enumerate(ranks):
        assert started.says() == "read" and int(started.says()) > 0
        assert started.says().startswith(f"cuda:{rank} ")
    with domain.open("llm/tp0of2") as first, domain.open("llm/tp1of2") as second:
        assert first.place != second.place
    loaders = small_vllm.install(monkeypatch, tp=stand_ins.Group(0, 2))
    monkeypatch.setenv("PARTYWALL_SOCKET", domain.socket)
    with torch.cuda.device(1), pytest.raises(pw.RemoteDevice):
        small_vllm.load(loaders, small_vllm.config(device="cuda"))


# Holds 424.
def test_vllm_update_is_shown_by_captured_graphs(domain, monkeypatch):
    monkeypatch.setenv("PARTYWALL_SOCKET", domain.socket)
    loaders = small_vllm.install(monkeypatch)
    fleet = [Engine(monkeypatch, loaders, "cuda") for _ in range(2)]
    tokens = torch.arange(small_vllm.SIZE, device="cuda")
    launches = []
    for engine in fleet:
        with torch.inference_mode():
            engine.model(tokens)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches.append((graph, engine.model(tokens)))
    addresses = [[parameter.data_ptr() for parameter in engine.model.parameters()] for engine in fleet]
    for seed in range(1, 4):
        weights = {name: tensor.cuda() for name, tensor in trained(seed).items()}
        with domain.put("policy", weights):
            for engine in fleet:
                engine.update("policy")
        for graph, said in launches:
            graph.replay()
            assert said.tolist() == expected(weights, "cuda")
        assert pw._native.flush(WATCHDOG) and list(domain.holders("llm/tp0of1")) == [seed + 1]
    assert addresses == [[parameter.data_ptr() for parameter in engine.model.parameters()] for engine in fleet]
    for engine in fleet:
        engine.transfer.shutdown()
    Engine.started.clear()
