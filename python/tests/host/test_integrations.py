"""The integrations, with stand-ins for the frameworks."""

import asyncio
import importlib.metadata
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import partywall as pw

from .. import stand_ins
from ..conftest import WATCHDOG
from ..stand_ins import Device, Model, tensor

PAGE = Path(__file__).parents[3] / "docs/integrations.md"
CONFIG = types.SimpleNamespace(backend="partywall")
VLLM_CONFIG = stand_ins.vllm_config()


@pytest.fixture(autouse=True)
def fresh(monkeypatch, socket):
    """Imports the integrations anew with each test's stand-ins, which use the test's broker."""
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    stand_ins.torch(monkeypatch)
    forget()
    yield
    forget()


def forget():
    for name in [name for name in sys.modules if name.startswith("partywall.integrations.")]:
        package, _, last = name.rpartition(".")
        del sys.modules[name]
        if package in sys.modules:
            delattr(sys.modules[package], last)


@pytest.fixture
def engine(monkeypatch, domain):
    """A worker's engine, as vLLM creates it."""
    from partywall.integrations import vllm

    factory = stand_ins.vllm(monkeypatch)
    vllm.register()
    made = factory.create_engine(CONFIG, VLLM_CONFIG, Device("cpu"), Model())
    yield made
    made.shutdown()


def test_integrations_import_no_framework():
    code = "import sys, partywall.integrations.vllm, partywall.integrations.sglang\n"
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'sglang')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Holds 292.
def test_vllm_finds_the_plug_in():
    [found] = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "partywall"]
    assert found.value == "partywall.integrations.vllm:register"


def test_vllm_registration_is_idempotent_and_refuses_a_duplicate(monkeypatch):
    from partywall.integrations import vllm

    factory = stand_ins.vllm(monkeypatch)
    vllm.register()
    vllm.register()
    assert list(factory._registry) == ["partywall"]
    assert "partywall.integrations.vllm.weight_transfer" not in sys.modules
    with pytest.raises(ValueError, match="already registered"):
        factory.register_engine("partywall", "other")


def test_vllm_loader_is_registered_with_its_load_format(monkeypatch):
    from partywall.integrations import vllm

    stand_ins.vllm(monkeypatch)
    vllm.register()
    made = sys.modules["vllm.model_executor.model_loader"].get_model_loader(
        types.SimpleNamespace(load_format="partywall", model_loader_extra_config={"name": "llm"})
    )
    assert type(made).__name__ == "PartywallModelLoader"
    assert "partywall.integrations.vllm.weights" not in sys.modules


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "'name'"),
        ({"name": ""}, "'name'"),
        ({"name": 7}, "'name'"),
        ({"name": "llm", "nmae": 1, "x": 2}, "'nmae', 'x'"),
        ({"name": "llm", "mode": "zero_copy"}, "'mode'"),
        ({"name": "llm", "mode": []}, "'mode'"),
        ({"name": "llm", "timeout": "1"}, "'timeout'"),
        ({"name": "llm", "timeout": -1}, "'timeout'"),
        ({"name": "llm", "timeout": float("nan")}, "'timeout'"),
        ({"name": "llm", "timeout": True}, "'timeout'"),
        ({"name": "llm", "socket": 5}, "'socket'"),
        ({"name": "llm", "domain": []}, "'domain'"),
        ({"name": "llm", "load_format": "Partywall"}, "'load_format'"),
        ({"name": "llm", "load_format": None}, "'load_format'"),
        ("llm", "dictionary"),
    ],
)
def test_vllm_loader_names_what_is_wrong_in_its_settings(given, named):
    from partywall.integrations._engine.settings import Settings

    with pytest.raises(ValueError, match=named):
        Settings.read(given)
    assert Settings.read({"name": "llm", "timeout": None}).timeout is None


# Holds 292.
def test_vllm_update_reads_the_named_version(engine, domain):
    for version in 1, 2, 3:
        domain.put("policy", {"a.weight": np.full((2, 3), version, "float32"), "b": np.arange(4) + version})
        if version == 2:
            lease = domain.open("policy@2")
    engine.init_transfer_engine(engine.parse_init_info({}))
    engine.start_weight_update()
    engine.update_weights(json.loads(json.dumps({"name": "policy@2"})))
    engine.finish_weight_update()
    assert engine.model.calls == ["initialize", "load", "finalize"]
    assert sorted(engine.model.weights) == ["a.weight", "b"]
    assert (engine.model.weights["a.weight"] == 2).all() and engine.model.weights["b"].tolist() == [2, 3, 4, 5]
    lease.close()
    assert pw._native.flush(WATCHDOG)
    with pytest.raises(pw.VersionNotFound):
        domain.open("policy@2")


# Holds 292.
def test_vllm_update_holds_its_version_until_it_is_finished(engine, domain):
    domain.put("policy", {"a": np.zeros(3)})
    engine.start_weight_update()
    engine.update_weights({"name": "policy"})
    domain.put("policy", {"a": np.ones(3)})
    domain.open("policy@1").close()
    engine.finish_weight_update()
    assert pw._native.flush(WATCHDOG)
    with pytest.raises(pw.VersionNotFound):
        domain.open("policy@1")


# Holds 295.
@pytest.mark.skipif(not PAGE.is_file(), reason="the package alone, without the repository")
def test_vllm_answers_by_the_new_weights_after_the_documented_update(monkeypatch, domain, caplog):
    from partywall.integrations import vllm

    factory = stand_ins.vllm(monkeypatch)
    vllm.register()
    worker = factory.create_engine(CONFIG, stand_ins.vllm_config(enable_prefix_caching=True), Device("cpu"), Model())
    llm = stand_ins.LLM(worker)
    programs = re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [update] = [program for program in programs if "llm.finish_weight_update()" in program]
    without_reset = "\n".join(line for line in update.splitlines() if "reset_prefix_cache" not in line)

    def updated(code: str, value: float) -> list[float]:
        model = types.SimpleNamespace(named_parameters=lambda: {"weight": np.full(1, value)}.items())
        request = types.SimpleNamespace
        exec(code, {"d": domain, "llm": llm, "model": model, "WeightTransferUpdateRequest": request})
        return llm.generate(prompt)

    # Two whole blocks and a part of a third.
    prompt = list(range(40))
    sums = [sum(prompt[:end]) for end in (16, 32, 40)]
    assert updated(update, 1.0) == sums
    assert updated(update, 2.0) == [2 * number for number in sums]
    assert updated(without_reset, 3.0) == [2 * sums[0], 2 * sums[1], 3 * sums[2]]
    # The log says so once.
    assert [record.message.count("reset_prefix_cache()") for record in caplog.records] == [1]
    worker.shutdown()


# Holds 292.
def test_vllm_update_without_its_name_leaves_the_model_alone(engine):
    engine.init_transfer_engine(engine.parse_init_info({"timeout": 0.01}))
    engine.start_weight_update()
    with pytest.raises(pw.NameNotFound, match="policy"):
        engine.update_weights({"name": "policy"})
    engine.finish_weight_update()
    assert engine.model.calls == []


# Holds 292.
@pytest.mark.parametrize(
    "given",
    [{}, {"name": "x", "extra": 1}, {"names": ["x"]}, {"name": 7}, {"name": ""}, {"name": None}, {"name": ["x"]}],
)
def test_vllm_refuses_any_other_update_info(engine, given):
    with pytest.raises(ValueError):
        engine.parse_update_info(given)


@pytest.mark.parametrize("given", [{"extra": 1}, {"timeout": "1"}, {"timeout": -1}, {"socket": 5}, {"domain": []}])
def test_vllm_refuses_any_other_init_info(engine, given):
    with pytest.raises(ValueError):
        engine.parse_init_info(given)


# Holds 297.
def test_sglang_loads_a_name_in_place_of_tensors(domain):
    from partywall.integrations import sglang

    domain.put("policy", {"w": np.arange(6.0)})
    for given in "policy@1", ["policy"], [("policy", tensor([]))]:
        model = Model()
        sglang.load(model, given)
        assert model.weights["w"].tolist() == [0, 1, 2, 3, 4, 5]
    # The loader has given all of its leases back.
    assert pw._native.flush(WATCHDOG) and domain.rm("policy") == 0


# Holds 297.
def test_sglang_refuses_what_is_no_name(domain, monkeypatch):
    from partywall.integrations import sglang

    monkeypatch.setattr(sglang, "TIMEOUT", 0.01)
    domain.put("policy", {"w": np.arange(6.0)})
    model = Model()
    for given in [], [("policy", tensor([1.0]))], [3], "":
        with pytest.raises(ValueError):
            sglang.load(model, given)
    with pytest.raises(pw.NameNotFound):
        sglang.load(model, [("policy", tensor([])), ("missing", tensor([]))])
    assert model.calls == []


# Holds 298.
def test_verl_carries_an_update_in_buckets(monkeypatch, domain):
    registered = stand_ins.verl(monkeypatch)
    import partywall.integrations.verl  # noqa: F401

    master = registered["partywall"](bucket_size=100, is_master=True)
    other = registered["partywall"](bucket_size=100)
    rollout = registered["partywall"](bucket_size=100, timeout=30.0)
    engines = [master, other, rollout]
    weights = {f"w{i}": tensor(np.full(10, i)) for i in range(5)} | {"large": tensor(np.arange(100))}

    async def step(count):
        metadata = [engine.prepare() for engine in engines]
        actors, rollouts = registered["partywall"].build_topology(2, 1, metadata)
        for engine, prefix in zip(engines, actors["prefix"] + rollouts["prefix"], strict=True):
            engine.init_process_group(prefix=prefix)
        for engine in engines[:2]:
            await engine.send_weights(((name, weight + count) for name, weight in weights.items()), global_steps=count)
        assert len(domain.ls()) == 4, "two tensors of 40 bytes fit into a bucket, and the large one has its own"
        received = [(name, weight.copy()) async for name, weight in rollout.receive_weights(global_steps=count)]
        assert [name for name, _ in received] == list(weights)
        assert all((weight == weights[name] + count).all() for name, weight in received)
        for engine in engines:
            engine.finalize()
        assert domain.ls() == []

    for count in range(3):
        asyncio.run(step(count))


def test_verl_update_after_one_that_failed_begins_anew(monkeypatch, domain):
    registered = stand_ins.verl(monkeypatch)
    import partywall.integrations.verl  # noqa: F401

    master = registered["partywall"](bucket_size=10, is_master=True)
    rollout = registered["partywall"](bucket_size=10, timeout=0.0)

    def failing():
        yield "a", tensor(np.zeros(10))
        yield "b", tensor(np.zeros(10))
        raise RuntimeError("injected")

    async def step(weights):
        prefix = master.prepare()
        for engine in master, rollout:
            engine.init_process_group(prefix=prefix)
        await master.send_weights(weights)
        return [name async for name, _ in rollout.receive_weights()]

    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(step(failing()))
    assert asyncio.run(step([("c", tensor(np.ones(10)))])) == ["c"]
    assert len(domain.ls()) == 1, "the update that failed has left nothing"
    master.finalize()


# Holds 298.
def test_verl_rollout_is_told_that_its_bucket_never_came(monkeypatch, domain):
    registered = stand_ins.verl(monkeypatch)
    import partywall.integrations.verl  # noqa: F401

    rollout = registered["partywall"](bucket_size=100, timeout=0.01)
    rollout.init_process_group(prefix="verl/none")

    async def receive():
        return [item async for item in rollout.receive_weights()]

    with pytest.raises(pw.NameNotFound, match="verl/none/0"):
        asyncio.run(receive())


@pytest.fixture
def transport(monkeypatch, domain):
    """The transport as an actor creates it."""
    registered = stand_ins.ray(monkeypatch)
    from partywall.integrations import ray

    ray.register()
    ray.register()
    yield registered["PARTYWALL"]
    ray._drivers[0].close()


# Holds 296.
def test_ray_object_lives_until_it_is_collected(transport, domain):
    source, receiver = transport(), transport()
    given = [tensor(np.arange(4)), tensor([[1], [2]], "int64"), tensor([])]
    meta = source.extract_tensor_transport_metadata("id", given)
    assert meta.tensor_meta == [(item.shape, item.dtype) for item in given] and meta.tensor_device == "cpu"
    first, second = (receiver.recv_multiple_tensors("id", meta, None) for _ in range(2))
    for item, taken in zip(given, first, strict=True):
        assert taken.dtype == item.dtype and taken.tolist() == item.tolist()
    assert not first[0].flags.writeable
    buffers = [tensor(np.zeros_like(item), item.dtype) for item in given]
    assert receiver.recv_multiple_tensors("id", meta, None, buffers) is buffers
    assert buffers[1].tolist() == [[1], [2]]
    source.garbage_collect("id", meta, given)
    source.garbage_collect("id", meta, given)
    assert domain.ls() == [] and second[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(pw.NameNotFound):
        receiver.recv_multiple_tensors("id", meta, None)


def test_ray_object_without_tensors_has_no_name(transport, domain):
    meta = transport().extract_tensor_transport_metadata("id", [])
    assert (meta.tensor_meta, meta.tensor_device, domain.ls()) == ([], None, [])
    assert transport().recv_multiple_tensors("id", meta, None) == []
    transport().garbage_collect("id", meta, [])


# Holds 296.
def test_ray_carries_copies_to_and_from_another_machine(transport, domain, caplog):
    here, elsewhere = transport(), type("Moved", (transport,), {"node": "elsewhere"})()
    import ray

    given = [tensor([1.0, 2.0]), tensor([], "int64")]
    for source, receiver in (here, elsewhere), (elsewhere, here), (elsewhere, elsewhere):
        meta = source.extract_tensor_transport_metadata("id", given)
        assert [item.tolist() for item in receiver.recv_multiple_tensors("id", meta, None)] == [[1.0, 2.0], []]
        source.garbage_collect("id", meta, given)
        assert domain.ls() == []
    assert [task["scheduling_strategy"] for task in ray.tasks] == [("elsewhere", False)] * 4
    assert caplog.text.count("the driver is on node elsewhere and this actor on node") == 1
