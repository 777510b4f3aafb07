# Holds 293.
"""vLLM's load format `partywall`, with a stand-in for vLLM, and real models of torch."""

import contextlib
import re
import sys
import types
from pathlib import Path

import pytest

import partywall as pw

from .. import stand_ins
from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")

from .. import small_vllm  # noqa: E402
from ..small_vllm import answer, config, install, load, loader, ordinary  # noqa: E402

NAME = "llm/tp0of1"

TESTS = str(Path(__file__).resolve().parents[2])
"""The folder from which children import the stand-ins."""


@pytest.fixture
def loaders(monkeypatch, socket, domain):
    """vLLM's registry, with the loader in it and an ordinary one."""
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    forget()
    yield install(monkeypatch)
    if turn := sys.modules.get("partywall.integrations._engine.turn"):
        turn.end()
    forget()


def forget():
    for name in [name for name in sys.modules if name.startswith("partywall.integrations.vllm.")]:
        package, _, last = name.rpartition(".")
        del sys.modules[name]
        if package in sys.modules:
            delattr(sys.modules[package], last)


@contextlib.contextmanager
def refused(why):
    """Expects an error of the loader that says why, in the way of its entry in the documentation."""
    with pytest.raises(ValueError, match=why) as caught:
        yield
    assert caught.value.anchor == "unsupported-model" and caught.value.advice
    assert re.match("cannot .*weights", str(caught.value))


def unread(*method):
    """Returns a configuration whose checkpoint must not be read."""
    return config(*method, loaded=lambda: pytest.fail("the checkpoint was read again"))


def shown(model):
    """Returns the address of each parameter by its name."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


# Holds 34, 294.
@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_engines_map_what_the_first_has_processed(loaders, domain, mode):
    cold = load(loaders, mode=mode)
    warm = [load(loaders, unread(), mode=mode) for _ in range(2)]
    assert [answer(model) for model in [cold, *warm]] == [answer(ordinary())] * 3
    for model in warm:
        with domain.open(NAME) as segment:
            assert segment.kept
        inside = {name: tensor.data_ptr for name, tensor in pw_tensors(model).items()}
        assert shown(model) == {name: inside[name] for name in shown(model)}
        # The names and shapes are those after processing; ties and attributes have stayed.
        assert sorted(dict(model.layers[0].linear.named_parameters())) == ["inverse", "weight"]
        assert model.head.weight is model.embed.weight
        assert type(model.layers[0].linear.weight) is small_vllm.Weight
        assert model.layers[0].rope is model.layers[1].rope
        # Buffers are its own.
        assert not {buffer.data_ptr() for buffer in model.buffers()} & set(inside.values())
    # The builder's parameters lie in shared memory, too.
    assert pw_tensors(cold)["embed.weight"].data_ptr == cold.embed.weight.data_ptr()


def pw_tensors(model):
    return dict(pw.torch.handle(model).segment.items())


# Holds 34.
@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_engines_copy_what_the_first_has_loaded(loaders, domain, mode, caplog):
    cold = load(loaders, config(small_vllm.Packed()), mode=mode)
    warm = [load(loaders, unread(small_vllm.Packed()), mode=mode) for _ in range(2)]
    assert [answer(model) for model in [cold, *warm]] == [answer(ordinary(config(small_vllm.Packed())))] * 3
    assert ("the mode is 'copy'" if mode == "copy" else "layers.0.linear has Packed") in caplog.text
    # Nothing uses the memory any more: what the engines have is their own.
    assert domain.rm(NAME) == 0
    assert pw.torch.handle(warm[0]) is None and warm[0].embed.weight.data.add_(1) is not None


def test_processed_weights_are_copied_on_request(loaders, domain):
    load(loaders)
    copied = load(loaders, unread(), mode="copy")
    assert answer(copied) == answer(ordinary())
    copied.embed.weight.data.add_(1)
    assert answer(load(loaders, unread())) == answer(ordinary())


# Holds 34.
def test_weights_outlive_their_builder(loaders, domain, child, socket):
    builder = child(BUILDER, TESTS, PARTYWALL_SOCKET=socket)
    assert builder.says() == "building" and builder.says() == "built"
    builder.kill()
    assert answer(load(loaders, unread())) == answer(ordinary())


BUILDER = """
import pytest
sys.path.insert(0, sys.argv[1])
from tests import small_vllm
loaders = small_vllm.install(pytest.MonkeyPatch())
small_vllm.load(loaders, small_vllm.config(loaded=lambda: say("building")))
say("built")
told()
"""

FIELDS = {
    "checkpoint": lambda c: setattr(c.model_config, "model", "org/other"),
    "architectures": lambda c: setattr(c.model_config.hf_config, "architectures", ["Other"]),
    "dtype": lambda c: setattr(c.model_config, "dtype", torch.bfloat16),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "quantization_config": lambda c: setattr(c.model_config, "quantization_config", {"bits": 4}),
    "config.quantization_config": lambda c: c.model_config.hf_config.to_dict().update(quantization_config={"bits": 4}),
    "config.hidden_size": lambda c: c.model_config.hf_config.to_dict().update(hidden_size=17),
    "kv_cache_dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
    "linear_backend": lambda c: setattr(c.kernel_config, "linear_backend", "other"),
    "moe_backend": lambda c: setattr(c.kernel_config, "moe_backend", "other"),
    "expert_placement": lambda c: setattr(c.parallel_config, "enable_expert_parallel", True),
    "vllm": lambda c: sys.modules["vllm.version"].__dict__.update(__version__="0.33.0"),
    "revision": lambda c: setattr(c.model_config, "revision", "v2"),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_weights_of_another_configuration_are_refused_and_the_field_named(loaders, domain, field, mode):
    load(loaders, mode=mode)
    engine = unread()
    FIELDS[field](engine)
    with pytest.raises(pw.torch.ModuleMismatch, match="partywall rm") as caught:
        load(loaders, engine, mode=mode)
    named = "checkpoint" if field == "revision" else field
    [difference] = caught.value.differences
    assert difference.startswith(f"{named}: ") and "in the engine" in difference


@pytest.mark.parametrize("key", ["tp", "pp", "dp", "pcp"])
def test_each_rank_has_a_name_of_its_own(loaders, domain, monkeypatch, key):
    load(loaders)
    for rank in range(2):
        registered = install(monkeypatch, **{key: stand_ins.Group(rank, 2)})
        load(registered)
    others = {f"llm/{key}{rank}of2" if key == "tp" else f"{NAME}/{key}{rank}of2" for rank in range(2)}
    assert {name.name for name in domain.ls()} == {NAME} | others


def test_rank_of_another_size_is_refused_and_named(loaders, domain, monkeypatch):
    from partywall.integrations.vllm import loader as module

    load(loaders)
    # Only a name that was chosen badly can be that of another rank.
    monkeypatch.setattr(module, "rank_name", lambda name, ranks: NAME)
    with pytest.raises(pw.torch.ModuleMismatch, match="tp: '0 of 1' in the segment, '1 of 2' in the engine"):
        load(install(monkeypatch, tp=stand_ins.Group(1, 2)))


def test_checkpoint_is_known_by_its_files_until_they_are_gone(loaders, domain, tmp_path):
    def engine():
        made = config()
        made.model_config.model = str(tmp_path)
        return made

    def write(header, weights):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)

    write(b"{}", b"w" * 1_000_000)
    load(loaders, engine())
    load(loaders, engine())
    # A model that was trained further differs in its weights alone.
    for header, weights in (b"{ }", b"w" * 1_000_000), (b"{}", b"v" * 1_000_000):
        write(header, weights)
        with pytest.raises(pw.torch.ModuleMismatch, match="checkpoint"):
            load(loaders, engine())
    (tmp_path / "model.safetensors").unlink()
    load(loaders, engine())


@pytest.mark.parametrize("mode", ["auto", "shared", "copy"])
def test_eplb_is_refused_at_the_start(loaders, domain, mode):
    engine = unread()
    engine.parallel_config.enable_eplb = True
    made = loader(loaders, mode=mode)
    for start in (lambda: made.get_external_weight_memory(engine), lambda: load(loaders, engine, mode=mode)):
        with refused("EPLB"):
            start()
    assert domain.ls() == []


# Holds 294.
def test_mapped_memory_is_external(loaders, domain):
    def external(**settings):
        return loader(loaders, **settings).get_external_weight_memory(config())

    assert external() == 0
    load(loaders)
    with domain.open(NAME) as segment:
        assert external() == external(mode="shared") == segment.nbytes > 0
    assert external(mode="copy") == 0
    # Weights that are to be copied are not external, either.
    load(loaders, name="copied", mode="copy")
    assert external(name="copied") == 0


@pytest.mark.parametrize("mode", ["auto", "shared"])
@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c, "weight_transfer_config", object()),
        lambda c: setattr(c.offload_config.uva, "cpu_offload_gb", 1),
        lambda c: setattr(c.offload_config.prefetch, "offload_group_size", 1),
        lambda c: delattr(sys.modules["vllm.model_executor.utils"], "weights_already_processed"),
    ],
)
def test_engine_that_writes_its_weights_copies_them_or_is_refused(loaders, domain, mode, change):
    engine = config()
    change(engine)
    if mode == "shared":
        with refused("cannot map weights"):
            load(loaders, engine, mode=mode)
        assert domain.ls() == []
    else:
        load(loaders, engine, mode=mode).embed.weight.data.add_(1)
        assert loader(loaders).get_external_weight_memory(engine) == 0


# Holds 294.
def test_sleeping_engine_gives_its_weights_back_unless_they_are_to_be_shared(loaders, domain):
    def engine():
        made = unread()
        made.model_config.enable_sleep_mode = True
        return made

    load(loaders)
    assert loader(loaders).get_external_weight_memory(engine()) == 0
    load(loaders, engine()).embed.weight.data.add_(1)
    with domain.open(NAME) as segment:
        assert loader(loaders, mode="shared").get_external_weight_memory(engine()) == segment.nbytes
    model = load(loaders, engine(), mode="shared")
    assert shown(model)["embed.weight"] == pw_tensors(model)["embed.weight"].data_ptr


def test_layers_that_cannot_be_mapped_are_named(loaders, domain):
    with refused(r"layers\.0\.linear has Packed"):
        load(loaders, config(small_vllm.Packed()), mode="shared")
    with refused(r"repacked layers\.0\.linear\.weight, layers\.1\.linear\.weight"):
        load(loaders, config(small_vllm.CarelesslyPacked()), mode="shared")
    assert domain.ls() == []
    load(loaders, config(small_vllm.Packed()))
    with refused("have to be copied"):
        load(loaders, config(small_vllm.Packed()), mode="shared")


def test_weights_are_copied_on_a_cpu_because_vllm_repacks_them(loaders, domain, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cpu", lambda: True)
    cold = load(loaders, config(small_vllm.CarelesslyPacked()))
    assert "repacks them for this CPU" in caplog.text
    assert answer(load(loaders, unread(small_vllm.CarelesslyPacked()))) == answer(cold)


def test_tensor_in_a_plain_attribute_is_named(loaders, domain):
    engine = config()
    make = engine.model_config.model_class

    def with_attribute():
        model = make()
        model.table = [torch.zeros(3)]
        return model

    engine.model_config.model_class = with_attribute
    load(loaders, engine)
    with refused(r"keeps table\[0\] as plain attributes"):
        load(loaders, engine)


def test_weights_quantized_while_they_load_have_no_loaded_layout(loaders, domain):
    engine = config()
    make = engine.model_config.model_class

    def on_meta():
        with torch.device("meta"):
            return make()

    engine.model_config.model_class = on_meta
    with refused(r"quantizes embed\.weight"):
        load(loaders, engine, mode="copy")


def test_parameters_in_use_are_shared_as_a_copy(loaders, domain, caplog):
    engine = config()
    views = []
    engine.model_config.loaded = lambda: None
    make = engine.model_config.model_class

    def with_view():
        model = make()
        views.append(model.embed.weight[0])
        return model

    engine.model_config.model_class = with_view
    cold = load(loaders, engine)
    assert "second copy" in caplog.text and "embed.weight" in caplog.text
    sleeps = config()
    sleeps.model_config.enable_sleep_mode, sleeps.model_config.model_class = True, with_view
    with refused("an engine that sleeps: .*embed.weight"):
        load(loaders, sleeps, name="asleep", mode="shared")
    assert pw.torch.handle(cold) is None
    assert answer(load(loaders, unread())) == answer(cold)


# Holds 34.
def test_next_engine_builds_if_the_first_fails(loaders, domain):
    def fail():
        raise RuntimeError("no checkpoint")

    with pytest.raises(RuntimeError, match="no checkpoint"):
        load(loaders, config(loaded=fail))
    assert domain.ls() == []
    assert answer(load(loaders)) == answer(ordinary())


def test_draft_model_is_loaded_in_the_ordinary_way(loaders, domain):
    engine = config()
    engine.speculative_config = types.SimpleNamespace(draft_model_config=engine.model_config)
    assert answer(load(loaders, engine)) == answer(ordinary())
    assert domain.ls() == []


def test_loaders_that_make_the_model_themselves_are_refused(loaders, domain):
    with refused("'own'"):
        load(loaders, load_format="own")
    assert domain.ls() == []


def test_running_engine_is_not_reloaded(loaders, domain):
    model = load(loaders)
    with refused("running engine"):
        loader(loaders).load_weights(model, config().model_config)


def test_name_of_something_else_is_refused(loaders, domain):
    domain.put(NAME, {"a": torch.zeros(3)}, kept=True)
    with pytest.raises(pw.WrongKind, match="holds no model"):
        load(loaders)


ELECTION = """
import os
import pytest
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from tests import small_vllm
loaders = small_vllm.install(pytest.MonkeyPatch())
# What torch imports on first use is imported once, and not in each fork.
import partywall.integrations._engine.weights
with torch.device("meta"):
    small_vllm.config().model_config.model_class()
expected = small_vllm.answer(small_vllm.ordinary())

def engine(round, building, done, go):
    def loaded():
        os.write(building, os.getpid().to_bytes(4, "little"))
        os.read(go, 1)
    model = small_vllm.load(loaders, small_vllm.config(loaded=loaded), name=f"llm{round}", timeout=None)
    os.write(done, b"+" if small_vllm.answer(model) == expected else b"-")

def start(*arguments):
    pid = os.fork()
    if pid == 0:
        try:
            engine(*arguments)
        finally:
            os._exit(0)
    return pid

for round in range(int(sys.argv[2])):
    building, done, go = os.pipe(), os.pipe(), os.pipe()
    pids = {start(round, building[1], done[1], go[0]) for _ in range(8)}
    # The first builder is killed, and another one begins.
    first = int.from_bytes(os.read(building[0], 4), "little")
    os.kill(first, signal.SIGKILL)
    second = int.from_bytes(os.read(building[0], 4), "little")
    assert {first, second} < pids and first != second
    os.write(go[1], b"g")
    for pid in pids:
        os.waitpid(pid, 0)
    results = os.read(done[0], 8)
    os.set_blocking(building[0], False)
    try:
        os.read(building[0], 4)
        built = "more"
    except BlockingIOError:
        built = "two"
    for end in *building, *done, *go:
        os.close(end)
    say(results.decode(), built)
"""


# Holds 34.
def test_one_of_eight_engines_builds_and_the_next_one_if_it_is_killed(domain, socket, child):
    rounds = 20
    started = child(ELECTION, TESTS, str(rounds), PARTYWALL_SOCKET=socket)
    assert [started.says() for _ in range(rounds)] == ["+++++++ two"] * rounds
    assert started.end() == 0
    assert [name.name for name in domain.ls()] == sorted(f"llm{number}/tp0of1" for number in range(rounds))


STARTS = """
import logging
import pytest
sys.path.insert(0, sys.argv[1])
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
from tests import small_vllm
loaders = small_vllm.install(pytest.MonkeyPatch())
engine = small_vllm.config()
engine.parallel_config.data_parallel_size = int(sys.argv[2])
timeout = float(sys.argv[3])
small_vllm.loader(loaders, timeout=timeout).get_external_weight_memory(engine)
say("measures")
told()
small_vllm.load(loaders, engine)
say("loaded")
told()
small_vllm.allocate_caches(engine)
say("serves")
told()
"""

WAITS = "waits until another engine that starts on this GPU has measured its memory"


def starts(child, socket, ranks=1, timeout=60):
    return child(STARTS, TESTS, str(ranks), str(timeout), PARTYWALL_SOCKET=socket)


def free_turns(domain):
    with contextlib.closing(domain.semaphore("engine/start/cpu", 1)) as semaphore:
        return semaphore.available


# Holds 385.
@pytest.mark.parametrize("killed", [False, True])
def test_engines_on_one_gpu_measure_it_one_after_another(domain, socket, child, killed):
    first = starts(child, socket)
    assert first.says() == "measures"
    second = starts(child, socket)
    assert second.says() == WAITS
    first.tell()
    assert first.says() == "loaded"
    # Loaded, the first has still to measure what the model needs.
    assert free_turns(domain) == 0
    if killed:
        first.kill()
    else:
        first.tell()
        assert first.says() == "serves"
    assert second.says() == "measures"


# Holds 385.
def test_turn_of_an_engine_that_cannot_load_passes_on(loaders, domain):
    def fail():
        raise RuntimeError("no checkpoint")

    engine = config(loaded=fail)
    loader(loaders).get_external_weight_memory(engine)
    assert free_turns(domain) == 0
    with pytest.raises(RuntimeError, match="no checkpoint"):
        load(loaders, engine)
    assert free_turns(domain) == 1


# Holds 385.
def test_engine_starts_nevertheless_after_its_time_limit(domain, socket, child):
    first = starts(child, socket)
    assert first.says() == "measures"
    second = starts(child, socket, timeout=0.1)
    assert [second.says() for _ in range(2)] == [
        WAITS,
        "starts although another engine on this GPU has measured for 0.1 s: it may count memory of that one",
    ]
    assert second.says() == "measures"
    # What it does not hold, it does not give back.
    for _ in range(2):
        second.tell()
        second.says()
    assert free_turns(domain) == 0


def test_engines_of_a_data_parallel_group_start_together(domain, socket, child):
    engines = [starts(child, socket, ranks=2) for _ in range(2)]
    assert [engine.says() for engine in engines] == ["measures"] * 2
