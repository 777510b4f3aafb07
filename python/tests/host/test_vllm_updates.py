"""Updates of engines that map their weights, with a stand-in for vLLM, and real models of torch."""

import contextlib
import types
import weakref
from typing import ClassVar

import pytest

import partywall as pw

from .. import stand_ins
from ..conftest import WATCHDOG, eventually

torch = pytest.importorskip("torch")

from partywall.torch._manifest import Manifest  # noqa: E402

from .. import small_vllm  # noqa: E402
from ..small_vllm import answer, config, load, loader  # noqa: E402
from .test_vllm_loader import NAME, TESTS, loaders, refused  # noqa: E402, F401

BACKEND = types.SimpleNamespace(backend="partywall")


def updated(device="cpu"):
    """Returns the configuration of an engine that takes updates."""
    made = config(device=device)
    made.weight_transfer_config = BACKEND
    made.cache_config.enable_prefix_caching = False
    return made


class Engine:
    """An engine that maps its weights and takes updates, as vLLM's worker has it."""

    started: ClassVar[list["Engine"]] = []

    def __init__(self, patch, loaders, device="cpu", **settings):
        self.config = updated(device)
        self.model = load(loaders, self.config, mode="shared", **settings)
        factory = stand_ins.vllm_transfer(patch)
        module = "partywall.integrations.vllm.weight_transfer"
        factory._registry["partywall"] = (module, "PartywallWeightTransferEngine")
        self.transfer = factory.create_engine(BACKEND, self.config, torch.device(device), self.model)
        self.started.append(self)

    def update(self, *names):
        self.transfer.start_weight_update()
        for name in names:
            self.transfer.update_weights({"name": name})
        self.transfer.finish_weight_update()

    @property
    def version(self):
        return pw.torch.handle(self.model).version


@pytest.fixture(autouse=True)
def shut_down():
    yield
    while Engine.started:
        Engine.started.pop().transfer.shutdown()


def trained(seed):
    """Returns weights of a trainer, under the names of a checkpoint."""
    model = config().model_config.model_class()
    torch.manual_seed(seed)
    return {name: torch.randn(tensor.shape) + 2 for name, tensor in model.named_parameters()}


def expected(weights, device="cpu"):
    """Returns what an engine says that has loaded these weights only."""

    class Given(small_vllm.Ordinary):
        def load_weights(self, model, model_config):
            model.load_weights(weights.items())

    engine = config(device=device)
    return answer(Given(small_vllm.LoadConfig("auto")).load_model(engine, engine.model_config))


@pytest.fixture
def fleet(monkeypatch, loaders):  # noqa: F811
    """Three engines that share the weights of the first."""
    return [Engine(monkeypatch, loaders) for _ in range(3)]


# Holds 424.
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_update_is_a_version_that_the_first_engine_makes_and_the_others_map(fleet, domain, monkeypatch, order):
    before = answer(fleet[0].model)
    weights = trained(1)
    domain.put("policy", weights)
    made = []
    monkeypatch.setattr(small_vllm.Model, "load_weights", lambda self, given: made.append(self) or LOAD(self, given))
    for number in order:
        fleet[number].update("policy")
        # Those that have not been updated yet keep their weights.
        assert [answer(engine.model) == before for engine in fleet] == [engine.version == 1 for engine in fleet]
    assert made == [fleet[order[0]].model]
    want = expected(weights)
    for engine in fleet:
        assert answer(engine.model) == want and engine.version == 2
        segment = pw.torch.handle(engine.model).segment
        inside = {name: tensor.data_ptr for name, tensor in segment.items()}
        shown = {name: p.data_ptr() for name, p in engine.model.named_parameters(remove_duplicate=False)}
        assert shown == {name: inside[name] for name in shown}
        assert engine.model.head.weight is engine.model.embed.weight
    # The former version ends with its last reader.
    assert pw._native.flush(WATCHDOG) and list(domain.holders(NAME)) == [2]


# Holds 424.
def test_engine_that_starts_later_gets_the_last_update(fleet, domain, loaders, monkeypatch):  # noqa: F811
    weights = trained(1)
    domain.put("policy", weights)
    fleet[0].update("policy")
    late = Engine(monkeypatch, loaders)
    assert late.version == 2 and answer(late.model) == expected(weights)
    # It is told the same, and has that already.
    late.update("policy")
    assert late.version == 2


def layout(segment):
    """Returns how the memory of a version is divided, as far as it can be seen from here."""
    tensors = [(tensor.name, tensor.dtype, tensor.shape, tensor.strides) for tensor in segment._tensors()]
    return tensors, segment.nbytes, Manifest.read(segment).kinds


# Holds 424.
def test_versions_of_an_update_have_one_layout(fleet, domain):
    """Otherwise captured graphs could not show them on a GPU."""

    layouts = [layout(pw.torch.handle(fleet[0].model).segment)]
    for number, engine in enumerate(fleet, 1):
        domain.put("policy", trained(number))
        engine.update("policy")
        layouts.append(layout(pw.torch.handle(engine.model).segment))
    assert fleet[2].version == 4 and layouts[1:] == layouts[:1] * 3


# Holds 424.
def test_parameters_in_use_are_updated_too(fleet, domain):
    """As compiled code has them."""
    references = [weakref.ref(parameter) for parameter in fleet[0].model.parameters()]
    former = layout(pw.torch.handle(fleet[0].model).segment)
    weights = trained(1)
    domain.put("policy", weights)
    for engine in fleet:
        engine.update("policy")
        assert answer(engine.model) == expected(weights) and layout(pw.torch.handle(engine.model).segment) == former
    assert [reference() for reference in references] == list(fleet[0].model.parameters())


# Holds 424.
def test_update_from_several_names_changes_nothing_else(fleet, domain):
    weights = trained(1)
    parts = [
        {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        for prefix in ("embed", "layers.0")
    ]
    for name, part in zip(("first", "second"), parts, strict=True):
        domain.put(name, part)
    fleet[0].update("first", "second")
    kept = trained(7)
    assert answer(fleet[0].model) == expected(kept | parts[0] | parts[1])


# Holds 424.
def test_name_that_begins_again_is_another_update(fleet, domain):
    for seed in 1, 2:
        weights = trained(seed)
        with domain.put("policy", weights) as segment:
            assert segment.version == 1
            for engine in fleet:
                engine.update("policy@1")
                assert answer(engine.model) == expected(weights)
    assert {engine.version for engine in fleet} == {3}


# Holds 425.
def test_update_that_fails_leaves_the_engine_as_it_was(fleet, domain):
    before = [answer(engine.model) for engine in fleet]
    domain.put("policy", trained(1) | {"layers.0.linear.weight": torch.ones(3, 3)})
    for engine in fleet:
        with pytest.raises(RuntimeError, match="size"):
            engine.update("policy")
        # What ends such an update in vLLM's worker.
        engine.transfer.finish_weight_update()
    assert [answer(engine.model) for engine in fleet] == before and {engine.version for engine in fleet} == {1}
    with pytest.raises(pw.NameNotFound):
        fleet[0].transfer.init_transfer_engine(fleet[0].transfer.parse_init_info({"timeout": 0.01}))
        fleet[0].update("missing")
    weights = trained(2)
    domain.put("policy", weights)
    for engine in fleet:
        engine.update("policy")
        assert answer(engine.model) == expected(weights)


MAKER = """
import pytest
sys.path.insert(0, sys.argv[1])
from tests import small_vllm
from tests.host.test_vllm_updates import Engine
patch = pytest.MonkeyPatch()
engine = Engine(patch, small_vllm.install(patch))
def load(self, weights):
    say("loads")
    told()
patch.setattr(small_vllm.Model, "load_weights", load)
say("ready")
told()
engine.update("policy")
"""


# Holds 425.
def test_next_engine_makes_the_version_if_the_first_is_killed(fleet, domain, socket, child):
    weights = trained(1)
    domain.put("policy", weights)
    maker = child(MAKER, TESTS, PARTYWALL_SOCKET=socket)
    assert maker.says() == "ready"
    maker.tell()
    assert maker.says() == "loads"
    maker.kill()
    fleet[0].update("policy")
    assert answer(fleet[0].model) == expected(weights) and fleet[0].version == 2


RANK = """
import types
import pytest
import torch
sys.path.insert(0, sys.argv[1])
from tests import small_vllm
from tests.host.test_vllm_updates import LOAD, Engine
rank = int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", world_size=2, rank=rank)
group = types.SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=torch.distributed.group.WORLD)
patch = pytest.MonkeyPatch()
engine = Engine(patch, small_vllm.install(patch, world=group, tp=group))
def load(self, weights):
    torch.distributed.barrier()
    say("loads")
    LOAD(self, weights)
patch.setattr(small_vllm.Model, "load_weights", load)
say("ready")
told()
engine.update("policy")
say("has version", engine.version)
told()
"""


# Holds 425.
def test_engines_with_two_ranks_do_not_wait_for_each_other(domain, socket, child, tmp_path):
    """The ranks of an engine load together."""
    first, second = [
        [child(RANK, TESTS, str(tmp_path / engine), str(rank), PARTYWALL_SOCKET=socket) for rank in range(2)]
        for engine in ("first", "second")
    ]
    assert {rank.says() for rank in first + second} == {"ready"}
    domain.put("policy", trained(1))
    with contextlib.closing(domain.semaphore("llm/tp0of2/update", 1)) as turns:
        first[0].tell()
        eventually(lambda: turns.available == 0)
    second[1].tell()
    second[0].tell()
    first[1].tell()
    for rank in first:
        assert (rank.says(), rank.says()) == ("loads", "has version 2")
    for rank in second:
        assert rank.says() == "has version 2"


# Holds 425.
def test_updates_by_other_backends_are_refused_where_weights_are_shared(loaders, domain):  # noqa: F811
    engine = updated()
    engine.weight_transfer_config = types.SimpleNamespace(backend="nccl")
    with refused("updates write the weights"):
        load(loaders, engine, mode="shared")
    # In the mode that chooses, an engine that takes updates has weights of its own.
    assert pw.torch.handle(load(loaders, updated())) is None
    assert loader(loaders).get_external_weight_memory(updated()) == 0


LOAD = small_vllm.Model.load_weights
