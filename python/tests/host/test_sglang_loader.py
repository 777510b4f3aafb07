# Holds 34, 293.
"""SGLang's load format `partywall`, with a stand-in for SGLang, and real models of torch."""

import contextlib
import importlib.metadata
import re
import select
import sys
from pathlib import Path

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")

from .. import small_sglang  # noqa: E402
from ..small_sglang import Deriving, LoadConfig, Stamping, engine, install, load, ordinary, start  # noqa: E402
from ..small_vllm import CarelesslyPacked, answer  # noqa: E402

NAME = "llm/tp0of1"

TESTS = str(Path(__file__).resolve().parents[2])
"""The folder from which children import the stand-ins."""


@pytest.fixture
def sglang(monkeypatch, socket, domain):
    """What SGLang knows, with the plug-in in it."""
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    forget()
    yield install(monkeypatch)
    forget()


def forget():
    for name in [name for name in sys.modules if name.startswith("partywall.integrations.sglang.")]:
        package, _, last = name.rpartition(".")
        del sys.modules[name]
        delattr(sys.modules[package], last)


@contextlib.contextmanager
def refused(why):
    """Expects an error of the loader that says why, in the way of its entry in the documentation."""
    with pytest.raises(ValueError, match=why) as caught:
        yield
    assert caught.value.anchor == "unsupported-model" and caught.value.advice
    assert re.match("cannot .*weights", str(caught.value))


def unread(*arguments, **settings):
    """Returns a configuration whose checkpoint must not be read."""
    return engine(*arguments, loaded=lambda: pytest.fail("the checkpoint was read again"), **settings)


def changed(config, path, value):
    """Returns a configuration with another value, of a field that it must have."""
    *above, last = path.split(".")
    owner = config
    for part in above:
        owner = getattr(owner, part)
    assert hasattr(owner, last)
    setattr(owner, last, value)
    return config


def is_shared(model):
    return pw.torch.handle(model) is not None


# Holds 34.
def test_plug_in_is_found_and_makes_the_format_known(sglang):
    [found] = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "partywall"]
    assert found.load() is pw.integrations.sglang.register
    assert sglang["choices"] == ["partywall"]
    assert LoadConfig("partywall").load_format.__name__ == "PartywallModelLoader"
    # Other formats are SGLang's affair.
    assert LoadConfig("DUMMY").load_format is small_sglang.LoadFormat.DUMMY
    with pytest.raises(ValueError, match="partywal"):
        LoadConfig("partywal")


# Holds 34, 294.
@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_engines_map_what_the_first_has_processed(sglang, domain, mode):
    builder, cold = start(sglang, mode=mode)
    # SGLang has measured this memory as that of the engine.
    assert builder.preloaded_weights_bytes == 0
    for _ in range(2):
        loader, warm = start(sglang, unread(), mode=mode)
        assert answer(warm) == answer(cold) == answer(ordinary())
        with domain.open(NAME) as segment:
            assert segment.kept and loader.preloaded_weights_bytes == segment.nbytes > 0
        inside = {name: tensor.data_ptr for name, tensor in pw.torch.handle(warm).segment.items()}
        shown = {name: parameter.data_ptr() for name, parameter in warm.named_parameters(remove_duplicate=False)}
        assert shown == {name: inside[name] for name in shown}
        # Ties have stayed, and so has what another layer knows by itself.
        assert warm.head.weight is warm.embed.weight and warm.router.bias_of_model[0] is warm.bias
        assert not {buffer.data_ptr() for buffer in warm.buffers()} & set(inside.values())
    assert is_shared(cold)


# Holds 294.
def test_weights_that_cannot_come_from_elsewhere_are_copied_or_refused(sglang, domain, caplog):
    def quantized():
        return changed(engine(), "model_config.quantization", "awq")

    cases = {
        "processed weights of awq": quantized,
        "keeps double as plain attributes": lambda: engine(model_class=Deriving),
        r"changed layers\.0\.linear\.dispatcher\.config\.output": lambda: engine(Stamping()),
        r"repacked layers\.0\.linear\.weight": lambda: engine(CarelesslyPacked()),
        "torch divides the layers": lambda: changed(
            engine(model_class=type("Divided", (small_sglang.Model,), {"supports_torch_tp": True})),
            "parallel.tp_size",
            2,
        ),
    }
    for number, (why, make) in enumerate(cases.items()):
        expected = answer(ordinary(make()))
        with refused(why):
            load(sglang, make(), mode="shared")
        assert domain.ls() == []
        cold = load(sglang, make(), name=f"llm{number}")
        assert re.search(f"each engine copies the weights of llm{number}/.*{why}", caplog.text)
        config = make()
        config.model_config.loaded = lambda: pytest.fail("the checkpoint was read again")
        loader, warm = start(sglang, config, name=f"llm{number}")
        assert answer(cold) == answer(warm) == expected
        assert not is_shared(cold) and not is_shared(warm) and loader.preloaded_weights_bytes == 0
        [name] = domain.ls()
        assert domain.rm(name.name) == 0


# Holds 294.
@pytest.mark.parametrize("mode", ["auto", "shared"])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.custom_weight_loader", ["partywall.integrations.sglang.load"]),
        ("exec.offload.cpu_offload_gb", 1),
        ("exec.offload.offload_group_size", 1),
    ],
)
def test_engine_that_writes_its_weights_copies_them_or_is_refused(sglang, domain, mode, path, value):
    config = changed(engine(), path, value)
    if mode == "shared":
        with refused("cannot map weights"):
            load(sglang, config, mode=mode)
        assert domain.ls() == []
    else:
        model = load(sglang, config, mode=mode)
        model.embed.weight.data.add_(1)
        assert small_sglang.update_error(model) is None


# Holds 294.
def test_memory_saver_gets_the_weights_unless_they_are_to_be_shared(sglang, domain):
    load(sglang)

    def config():
        return changed(unread(), "exec.features.enable_memory_saver", True)

    loader, copied = start(sglang, config())
    assert not is_shared(copied) and loader.preloaded_weights_bytes == 0
    copied.embed.weight.data.add_(1)
    assert is_shared(load(sglang, config(), mode="shared"))


# Holds 294.
@pytest.mark.parametrize(("path", "value"), [("exec.moe.enable_eplb", True), ("exec.moe.elastic_ep_backend", "nixl")])
def test_engine_that_moves_experts_is_refused(sglang, domain, path, value):
    for mode in "auto", "shared", "copy":
        with refused("moves experts"):
            load(sglang, changed(unread(), path, value), mode=mode)
    assert domain.ls() == []


# Holds 294.
def test_shared_weights_are_not_updated(sglang, domain):
    load(sglang)
    for model in load(sglang, unread()), load(sglang, name="other"):
        assert "read-only" in small_sglang.update_error(model) and "'copy'" in small_sglang.update_error(model)
    assert small_sglang.update_error(load(sglang, unread(), mode="copy")) is None
    # What SGLang does to all layers around an update would write them, too.
    for given, done in (load(sglang, unread()), []), (ordinary(), ["restored", "processed True"]):
        updater = small_sglang.WeightUpdater(given)
        updater.begin_weight_update()
        updater.end_weight_update(run_post_load=True)
        assert updater.processed == done
    # The default format of an update from a disk is that of the server, without its settings.
    assert "choose another one" in f"{small_sglang.get_model_loader(LoadConfig('partywall'))}"


FIELDS = {
    "checkpoint": ("model_config.model_path", "org/other"),
    "revision": ("model_config.revision", "v2"),
    "architectures": ("model_config.hf_config.architectures", ["Other"]),
    "dtype": ("model_config.dtype", torch.bfloat16),
    "quantization": ("model_config.quantization", "fp8"),
    "model_impl": ("model.model_impl", "transformers"),
    "kv_cache_dtype": ("model.kv_cache_dtype", "fp8_e5m2"),
    "moe_runner_backend": ("exec.moe.moe_runner_backend", "triton"),
    "enable_fp32_lm_head": ("exec.features.enable_fp32_lm_head", True),
    "fp8_gemm_runner_backend": ("exec.kernel.fp8_gemm_runner_backend", "triton"),
    "moe_ep_size": ("parallel.moe_ep_size", 2),
    "attn_dp_size": ("parallel.attn_dp_size", 2),
}


# Holds 293.
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_weights_of_another_configuration_are_refused_and_the_field_named(sglang, domain, field, mode):
    load(sglang, mode=mode)
    with pytest.raises(pw.torch.ModuleMismatch, match="partywall rm") as caught:
        load(sglang, changed(unread(), *FIELDS[field]), mode=mode)
    named = "checkpoint" if field == "revision" else field
    [difference] = caught.value.differences
    assert difference.startswith(f"{named}: ") and "in the engine" in difference


# Holds 293.
@pytest.mark.parametrize("package", ["sglang", "partywall", "torch"])
def test_weights_of_another_release_are_refused(sglang, domain, monkeypatch, package):
    load(sglang)
    forget()
    versioned = sys.modules["sglang.version" if package == "sglang" else package]
    monkeypatch.setattr(versioned, "__version__", "0.0.1")
    with pytest.raises(pw.torch.ModuleMismatch) as caught:
        load(sglang, unread())
    assert [difference.split(":")[0] for difference in caught.value.differences] == [package]


# Holds 293.
def test_each_rank_has_a_name_of_its_own(sglang, domain):
    for key in "tp", "pp", "dp":
        for rank in range(2):
            load(sglang, changed(changed(engine(), f"parallel.{key}_size", 2), f"parallel.{key}_rank", rank))
    tp = {f"llm/tp{rank}of2" for rank in range(2)}
    others = {f"{NAME}/{key}{rank}of2" for key in ("pp", "dp") for rank in range(2)}
    assert {name.name for name in domain.ls()} == tp | others


def test_draft_model_is_loaded_in_the_ordinary_way(sglang, domain):
    assert answer(load(sglang, changed(engine(), "model_config.is_draft_model", True))) == answer(ordinary())
    assert domain.ls() == []


def test_loaders_that_make_the_model_themselves_are_refused(sglang, domain):
    class OfItsOwn(small_sglang.DefaultModelLoader):
        def load_model(self, *, model_config, device_config):
            return model_config.model_class(model_config.method)

    with refused("'dummy'"):
        load(sglang, load_format="dummy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["sglang.srt.model_loader.loader"], "get_model_loader", lambda *_: OfItsOwn(LoadConfig())
        )
        forget()
        loader = LoadConfig("partywall", {"name": "llm"})
        config = engine()
        with refused("'auto'"):
            loader.load_format(loader).load_model(model_config=config.model_config, device_config=config.device_config)
    forget()
    assert domain.ls() == []


@pytest.mark.parametrize(
    ("given", "why"),
    [({}, "no 'name'"), ({"name": "x", "nmae": "y"}, "'nmae'"), ({"name": "x", "mode": "mapped"}, "'mapped'")],
)
def test_settings_that_are_wrong_are_named(sglang, given, why):
    config = engine()
    loader = small_sglang.get_model_loader(LoadConfig("partywall", given))
    for call in (
        lambda: loader.load_model(model_config=config.model_config, device_config=config.device_config),
        lambda: loader.download_model(config.model_config),
    ):
        with pytest.raises(ValueError, match=why):
            call()


# Holds 34.
def test_next_engine_builds_if_the_first_fails(sglang, domain):
    def fail():
        raise RuntimeError("no checkpoint")

    with pytest.raises(RuntimeError, match="no checkpoint"):
        load(sglang, engine(loaded=fail))
    assert domain.ls() == []
    assert answer(load(sglang)) == answer(ordinary())


STARTS = """
import logging
import pytest
sys.path.insert(0, sys.argv[1])
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
logging.getLogger("asyncio").setLevel(logging.WARNING)
from tests import small_sglang
installed = small_sglang.install(pytest.MonkeyPatch())
config = small_sglang.engine(loaded=lambda: say("read"))
installed["published"] = config
config.model.load_format = sys.argv[2]
config.model.model_loader_extra_config = '{"name": "llm", "timeout": 60}'
def init():
    say("measures")
    told()
    if sys.argv[3]:
        raise RuntimeError(sys.argv[3])
    _, model = small_sglang.start(installed, config)
    say(small_sglang.answer(model))
    told()
try:
    small_sglang.Scheduler(init)
except RuntimeError as error:
    say(error)
say("serves")
told()
"""

WAITS = "waits until another engine that starts on this GPU has measured its memory"


# Holds 34, 385.
@pytest.mark.parametrize("end", ["serves", "fails", "is killed"])
def test_engines_on_one_gpu_measure_it_one_after_another(domain, socket, child, end):
    def starts(error="", load_format="partywall"):
        return child(STARTS, TESTS, load_format, error, PARTYWALL_SOCKET=socket)

    first = starts("failed" if end == "fails" else "")
    assert first.says() == "measures"
    # An engine with another format has no turn.
    assert starts(load_format="auto").says() == "measures"
    second = starts()
    assert second.says() == WAITS
    first.tell()
    if end == "fails":
        assert [first.says(), first.says()] == ["failed", "serves"]
    else:
        assert [first.says(), first.says()] == ["read", str(answer(ordinary()))]
        if end == "is killed":
            first.kill()
        else:
            first.tell()
            assert first.says() == "serves"
    assert second.says() == "measures"
    second.tell()
    if end == "fails":
        assert second.says() == "read"
    # The weights are there, whatever has become of their builder.
    assert second.says() == str(answer(ordinary()))


ELECTION = """
import pytest
sys.path.insert(0, sys.argv[1])
from tests import small_sglang
installed = small_sglang.install(pytest.MonkeyPatch())
def loaded():
    say("building")
    told()
say(small_sglang.answer(small_sglang.load(installed, small_sglang.engine(loaded=loaded), timeout=None)))
told()
"""


# Holds 34.
def test_next_engine_builds_if_the_first_is_killed(domain, socket, child):
    engines = [child(ELECTION, TESTS, PARTYWALL_SOCKET=socket)]
    assert engines[0].says() == "building"
    engines += [child(ELECTION, TESTS, PARTYWALL_SOCKET=socket) for _ in range(2)]
    engines[0].kill()
    ready, _, _ = select.select([started.process.stdout for started in engines[1:]], [], [], WATCHDOG)
    [builder] = [started for started in engines[1:] if started.process.stdout in ready]
    [other] = [started for started in engines[1:] if started is not builder]
    assert builder.says() == "building"
    builder.tell()
    assert {builder.says(), other.says()} == {str(answer(ordinary()))}
    assert [name.name for name in domain.ls()] == [NAME]
