"""The stand-in for SGLang beside SGLang itself, which does not run here: its sources are read, and its registry of hooks
runs. Skipped where it is not installed; `pip install --no-deps sglang==0.5.23` is enough."""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from .. import small_sglang  # noqa: E402

try:
    SRT = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/srt")))
except importlib.metadata.PackageNotFoundError:
    pytest.skip("SGLang is not installed", allow_module_level=True)

PACKAGE = Path(__file__).parents[2] / "src/partywall/integrations/sglang"


def tree(module):
    """Returns the parsed source of a module below `sglang.srt`."""
    path = SRT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def found(module, name):
    """Returns the definition of a function, or of a method as `Class.method`."""
    node = tree(module)
    for part in name.split("."):
        [node] = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
    return node


SAME = {
    "configs.load_config": ["LoadConfig._verify_load_format"],
    "model_loader.loader": [
        "BaseModelLoader.__init__",
        "DefaultModelLoader.download_model",
        "DefaultModelLoader.load_model",
        "DefaultModelLoader.load_weights_and_postprocess",
        "DefaultModelLoader.load_weights_only",
        "DefaultModelLoader.postprocess_weights",
        "get_model_loader",
        "post_load_weights",
        "_initialize_model",
    ],
    "plugins.hook_registry": ["HookRegistry.register", "HookRegistry.apply_hooks"],
    "model_executor.model_runner_components.weight_updater": [
        "WeightUpdater.begin_weight_update",
        "WeightUpdater.end_weight_update",
    ],
    "managers.scheduler": ["Scheduler.init_model_worker"],
}


# Holds 423.
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in SAME.items() for name in names])
def test_signatures_of_the_stand_in_are_those_of_sglang(module, name):
    real = found(module, name).args
    stand_in = small_sglang
    for part in name.split("."):
        stand_in = vars(stand_in)[part]
    parameters = inspect.signature(getattr(stand_in, "__func__", stand_in)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == [a.arg for a in real.args]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [a.arg for a in real.kwonlyargs]


# Holds 423.
def test_what_the_loader_imports_is_there():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sglang.srt."):
                continue
            module = tree(node.module.removeprefix("sglang.srt."))
            text = ast.unparse(module)
            for alias in node.names:
                defined = re.search(
                    rf"^(?:class|def) {alias.name}\b|^{alias.name} = |import .*\b{alias.name}\b", text, re.M
                )
                # `sglang.srt.utils` passes on all that `common` has.
                assert defined or "from sglang.srt.utils.common import *" in text, (path.name, node.module, alias.name)


def declared():
    """Returns the names that SGLang's configuration declares, by namespace."""
    names = {}
    for path in (SRT / "arg_groups/fields").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    target = item.target if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [None])[0]
                    if isinstance(target, ast.Name):
                        names.setdefault(path.stem.rstrip("_"), set()).add(target.id)
    return names


# Holds 423.
def test_configuration_of_the_stand_in_is_that_of_sglang():
    published = small_sglang.engine()
    names = declared()
    assert set(vars(published.parallel)) <= names["parallel"]
    assert set(vars(published.model)) <= names["model"]
    assert set(vars(published.device)) <= names["device"]
    for group in vars(published.exec).values():
        assert set(vars(group)) <= names["exec"]
    # Groups below `exec`, as SGLang itself reads them.
    text = (SRT / "model_executor/model_runner_components/load_model_utils.py").read_text()
    text += (SRT / "model_loader/loader.py").read_text() + (SRT / "layers/quantization/fp8_utils.py").read_text()
    for group in "moe", "features", "kernel", "offload":
        assert f"get_exec().{group}." in text


# Holds 423.
def test_objects_that_the_loader_is_given_have_what_it_reads():
    def assigned(module, name):
        nodes = ast.walk(found(module, name))
        return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}

    made = small_sglang.engine()
    own = {"method", "model_class", "loaded"}
    assert set(vars(made.model_config)) - own <= assigned("configs.model_config", "ModelConfig")
    assert set(vars(made.device_config)) <= assigned("configs.device_config", "DeviceConfig")
    group = assigned("distributed.parallel_state", "GroupCoordinator")
    assert {"rank_in_group", "world_size", "cpu_group"} <= group
    assert found("distributed.parallel_state", "GroupCoordinator.barrier")


# Holds 423.
def test_sglang_does_what_the_loader_relies_on():
    def calls(module, name):
        return [ast.unparse(node.func) for node in ast.walk(found(module, name)) if isinstance(node, ast.Call)]

    loader = "model_loader.loader"
    # A class is taken as a format, and the method that the loader puts on an instance is called there.
    assert "isinstance(load_config.load_format, type)" in ast.unparse(found(loader, "get_model_loader"))
    assert "self.load_weights_and_postprocess" in calls(loader, "DefaultModelLoader.load_model")
    # Plug-ins are loaded before the command line is read, and in each scheduler.
    assert "load_plugins" in calls("managers.scheduler", "run_scheduler_process")
    # Ranks know each other, and nothing is measured yet, when workers are made.
    made = calls("managers.scheduler", "Scheduler.__init__")
    assert made.index("bootstrap.init_parallel_runtime") < made.index("self.init_model_worker")
    assert "self.init_memory_pools" in calls("managers.scheduler", "Scheduler.init_model_worker")
    # Mapped bytes are added to what was measured.
    pool = calls("managers.scheduler", "Scheduler.init_target_memory_pool")
    assert any(call.endswith("account_preloaded_weights") for call in pool)
    # All ways to update weights ask the model first.
    updater = "model_executor.model_runner_components.weight_updater"
    assert "_derived_weight_cache_error" in ast.unparse(found(updater, "_unsupported_derived_weight_cache_error"))
    assert "get_model" in ast.unparse(found(updater, "WeightUpdater"))
    for way in "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor":
        assert "_unsupported_derived_weight_cache_error" in calls(updater, f"WeightUpdater.{way}")


# Holds 423.
def test_hooks_work_in_the_registry_of_sglang(monkeypatch, socket, domain):
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    spec = importlib.util.spec_from_file_location("hook_registry", SRT / "plugins/hook_registry.py")
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    installed = small_sglang.install(monkeypatch, registry)
    installed["published"] = small_sglang.engine()
    installed["published"].model.model_loader_extra_config = '{"name": "llm"}'
    assert small_sglang.LoadConfig("partywall").load_format.__name__ == "PartywallModelLoader"
    assert small_sglang.LoadConfig("auto").load_format is small_sglang.LoadFormat.AUTO
    held = []

    def init():
        from partywall.integrations._engine import turn

        held.extend(turn._permits)

    small_sglang.Scheduler(init)
    assert len(held) == 1 and sys.modules["partywall.integrations._engine.turn"]._permits is None
