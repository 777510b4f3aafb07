"""SGLang's loader, its plug-in hooks and its configuration, with a small model, for tests of the loader. Needs torch.

The names and signatures are those of SGLang 0.5.23. `test_sglang_wheel.py` compares them with SGLang, where that is
installed.
"""

import contextlib
import dataclasses
import enum
import functools
import json
import pkgutil
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from . import small_vllm, stand_ins
from .small_vllm import Transposed, answer  # noqa: F401
from .stand_ins import QuantizeMethodBase


class Stamping(Transposed):
    """Keeps how it has processed the weights in an object of the layer, as experts do in their dispatchers."""

    def create(self, layer: Any) -> None:
        layer.dispatcher = types.SimpleNamespace(config={})

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.dispatcher.config["output"] = "bf16"


class Model(small_vllm.Model):
    """Has a router's bias that another layer knows, too."""

    def __init__(self, method: QuantizeMethodBase) -> None:
        super().__init__(method)
        self.bias = torch.nn.Parameter(torch.empty(small_vllm.SIZE), requires_grad=False)
        self.router = torch.nn.Module()
        self.router.bias_of_model = [self.bias]
        for layer in self.layers:
            getattr(method, "create", lambda layer: None)(layer.linear)

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) + self.router.bias_of_model[0]

    def load_weights(self, checkpoint: Iterator[tuple[str, Any]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in checkpoint:
            parameters[name].data.copy_(tensor)


class Deriving(Model):
    """Derives a tensor from its weights when they are loaded, as models with latent attention do."""

    def load_weights(self, checkpoint: Iterator[tuple[str, Any]]) -> None:
        super().load_weights(checkpoint)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.double = self.embed.weight.data * 2

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens) + self.double[tokens]


class LoadFormat(str, enum.Enum):
    AUTO = "auto"
    DUMMY = "dummy"


@dataclasses.dataclass
class LoadConfig:
    load_format: Any = LoadFormat.AUTO
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model_loader_extra_config or {}, str):
            self.model_loader_extra_config = json.loads(self.model_loader_extra_config)
        self._verify_load_format()

    def _verify_load_format(self) -> None:
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format.lower())


class BaseModelLoader:
    preloaded_weights_bytes = 0

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        assert load_config.model_loader_extra_config == {}

    def download_model(self, model_config: Any) -> None:
        model_config.loaded()

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        torch.manual_seed(7)
        for name, parameter in model.named_parameters():
            yield name, torch.randn(parameter.shape) + 2
        model_config.loaded()

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        with torch.device(device_config.device):
            model = _initialize_model(model_config, self.load_config, None)
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), device_config.device)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model: Any, weights: Any, target_device: Any) -> None:
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model: Any, target_device: Any) -> None:
        for module in model.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)


class DummyModelLoader(BaseModelLoader):
    """Makes the model itself."""


def get_model_loader(load_config: Any, model_config: Any = None) -> Any:
    if load_config.load_format == LoadFormat.DUMMY:
        return DummyModelLoader(load_config)
    if isinstance(load_config.load_format, type):
        return load_config.load_format(load_config)
    return DefaultModelLoader(load_config)


def _initialize_model(model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
    assert isinstance(load_config.load_format, LoadFormat)
    return model_config.model_class(model_config.method)


def post_load_weights(model: Any) -> None:
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def update_error(model: Any) -> str | None:
    """Returns why SGLang refuses to update the weights of a model."""
    reasons = (getattr(module, "_derived_weight_cache_error", None) for module in model.modules())
    return next(filter(None, reasons), None)


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """The registry of hooks, of which only those around a method are used."""

    _hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any, *, source: Any = None) -> None:
        assert hook_type is HookType.AROUND
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls._hooks.items():
            above, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(above)
            setattr(owner, name, functools.partialmethod(_around, getattr(owner, name), hook))
        cls._hooks.clear()


def _around(self: Any, original: Any, hook: Any, *arguments: Any, **named: Any) -> Any:
    return hook(original, self, *arguments, **named)


class WeightUpdater:
    """Updates the weights of a model. What it does to all layers is recorded."""

    def __init__(self, model: Any) -> None:
        self.get_model = lambda: model
        self.processed: list[str] = []

    def begin_weight_update(self) -> None:
        self.processed.append("restored")

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self.processed.append(f"processed {run_post_load}")


class Scheduler:
    """Measures the memory of its GPU, loads the model, and measures again."""

    def __init__(self, init: Callable[[], None]) -> None:
        self._init = init
        self.init_model_worker()

    def init_model_worker(self) -> None:
        self._init()


def engine(
    method: QuantizeMethodBase | None = None,
    loaded: Callable[[], Any] = lambda: None,
    model_class: type = Model,
    device: str = "cpu",
) -> Any:
    """Returns the configuration that a process of SGLang has published, with that of its model and its device. `loaded`
    is called when a checkpoint was read."""
    names = types.SimpleNamespace
    hf_config = {"hidden_size": small_vllm.SIZE, "architectures": ["Model"]}
    return names(
        parallel=names(
            **{f"{key}_rank": 0 for key in ("tp", "pp", "moe_ep", "moe_dp")},
            **{f"{key}_size": 1 for key in ("tp", "pp", "dp", "moe_ep", "moe_dp", "attn_dp", "attn_cp")},
            dp_rank=None,
            moe_dense_tp_size=None,
            enable_dp_lm_head=False,
            world_group=stand_ins.Group(),
        ),
        exec=names(
            moe=names(
                moe_a2a_backend="none",
                moe_runner_backend="auto",
                ep_num_redundant_experts=0,
                init_expert_location="trivial",
                disable_shared_experts_fusion=False,
                enable_eplb=False,
                elastic_ep_backend=None,
            ),
            features=names(enable_fp32_lm_head=False, enable_memory_saver=False),
            kernel=names(fp8_gemm_runner_backend="auto", fp4_gemm_runner_backend="auto"),
            offload=names(cpu_offload_gb=0, offload_group_size=-1),
        ),
        model=names(
            load_format="partywall",
            model_loader_extra_config="{}",
            custom_weight_loader=None,
            model_impl="auto",
            kv_cache_dtype="auto",
        ),
        device=names(device=device, gpu_id=0),
        device_config=names(device=torch.device(device), device_type=device, gpu_id=0),
        model_config=names(
            model_path="org/model",
            revision=None,
            hf_config=names(architectures=["Model"], to_dict=lambda: hf_config, quantization_config=None),
            dtype=torch.float32,
            quantization=None,
            is_draft_model=False,
            method=method or Transposed(),
            model_class=model_class,
            loaded=loaded,
        ),
    )


def install(patch: Any, registry: Any = None) -> dict[str, Any]:
    """Installs SGLang with the plug-in of Partywall, and with a module of hooks if it is given. Returns the choices of
    the load format and what the process has published."""
    installed: dict[str, Any] = {"choices": [], "published": None}
    registry = registry or types.SimpleNamespace(HookRegistry=HookRegistry, HookType=HookType)
    srt = "sglang.srt"
    stand_ins.module(patch, "sglang.version", __version__="0.5.23")
    stand_ins.module(patch, f"{srt}.configs.load_config", LoadConfig=LoadConfig, LoadFormat=LoadFormat)
    stand_ins.module(
        patch,
        f"{srt}.model_loader.loader",
        BaseModelLoader=BaseModelLoader,
        DefaultModelLoader=DefaultModelLoader,
        get_model_loader=get_model_loader,
        post_load_weights=post_load_weights,
        _get_quantization_config=lambda model_config, load_config: None,
        _initialize_model=_initialize_model,
    )
    stand_ins.module(patch, f"{srt}.model_loader.utils", set_default_torch_dtype=contextlib.nullcontext)
    bags = ("parallel", "exec", "model", "device")
    stand_ins.module(
        patch,
        f"{srt}.runtime_context",
        **{f"get_{bag}": lambda bag=bag: getattr(installed["published"], bag) for bag in bags},
    )
    stand_ins.module(patch, f"{srt}.utils", is_cpu=lambda: False)
    stand_ins.module(
        patch,
        f"{srt}.weight_cache.protocol",
        get_quant_method_name=lambda config: (config or {}).get("quant_method", ""),
        is_ipc_quant_supported=lambda method, config: method == "",
    )
    stand_ins.module(
        patch,
        f"{srt}.plugins.hook_registry",
        HookRegistry=registry.HookRegistry,
        HookType=registry.HookType,
    )
    stand_ins.module(patch, f"{srt}.server_args", add_load_format_choices=installed["choices"].extend)
    stand_ins.module(patch, f"{srt}.managers.scheduler", Scheduler=Scheduler)
    stand_ins.module(patch, f"{srt}.model_executor.model_runner_components.weight_updater", WeightUpdater=WeightUpdater)
    from partywall.integrations import sglang

    patch.setattr(sglang, "_registered", False)
    sglang.register()
    sglang.register()
    # Undone with the patch.
    for owner, name in (
        (LoadConfig, "_verify_load_format"),
        (Scheduler, "init_model_worker"),
        (WeightUpdater, "begin_weight_update"),
        (WeightUpdater, "end_weight_update"),
    ):
        patch.setattr(owner, name, vars(owner)[name])
    registry.HookRegistry.apply_hooks()
    return installed


def start(installed: dict[str, Any], config: Any = None, **settings: Any) -> Any:
    """Returns the loader and the model of an engine that uses Partywall, as SGLang's model runner has them made."""
    config = config or engine()
    installed["published"] = config
    config.model.model_loader_extra_config = json.dumps({"name": "llm"} | settings)
    load_config = LoadConfig(config.model.load_format, config.model.model_loader_extra_config)
    loader = get_model_loader(load_config, config.model_config)
    return loader, loader.load_model(model_config=config.model_config, device_config=config.device_config)


def load(installed: dict[str, Any], config: Any = None, **settings: Any) -> Any:
    """Returns the model of an engine that uses Partywall."""
    return start(installed, config, **settings)[1]


def ordinary(config: Any = None) -> Any:
    """Returns the model of an engine that does not."""
    config = config or engine()
    loader = DefaultModelLoader(LoadConfig())
    return loader.load_model(model_config=config.model_config, device_config=config.device_config)
