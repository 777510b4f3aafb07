"""A model of vLLM's kind, its ordinary loader and its configuration, for tests of the loader. Needs torch.

`stand_ins.vllm_loaders` installs vLLM itself.
"""

import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import stand_ins
from .stand_ins import QuantizeMethodBase

SIZE = 16
"""Of each dimension of the model."""


class Transposed(QuantizeMethodBase):
    """Stores the weight in another shape and the scale under another name, and can take both from elsewhere."""

    supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: Any) -> None:
        if stand_ins.processed.get():
            return
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.inverse = torch.nn.Parameter(1 / layer.scale.data, requires_grad=False)
        del layer.scale

    def apply(self, layer: Any, x: Any) -> Any:
        return x @ layer.weight / layer.inverse


class Packed(QuantizeMethodBase):
    """Packs the weight into memory that nobody else knows."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.data.t().contiguous()
        layer.apply_packed = lambda x: x @ packed * layer.scale
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, x: Any) -> Any:
        return layer.apply_packed(x)


class CarelesslyPacked(Packed):
    """Says that its weights can be taken from elsewhere, as vLLM's linear layers do on a CPU."""

    supports_pre_processed_weights = True


class Weight(torch.nn.Parameter):
    """A parameter with attributes, as vLLM's are."""


class Linear(torch.nn.Module):
    def __init__(self, method: QuantizeMethodBase) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = Weight(torch.empty(SIZE, SIZE), requires_grad=False)
        self.weight.output_dim = 0
        self.scale = torch.nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.quant_method.apply(self, x)


class Rope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin", torch.arange(SIZE, dtype=torch.float32).cos(), persistent=False)

    def forward(self, x: Any) -> Any:
        return x * self.cos_sin


class Attention(torch.nn.Module):
    """Writes its buffer after the weights are loaded, as vLLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(3.0))

    def process_weights_after_loading(self, dtype: Any) -> None:
        self._k_scale.fill_(1.0)

    def bind_kv_cache(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache


class Layer(torch.nn.Module):
    def __init__(self, rope: Rope, method: QuantizeMethodBase) -> None:
        super().__init__()
        self.rope = rope
        self.attention = Attention()
        self.linear = Linear(method)

    def forward(self, x: Any) -> Any:
        return self.linear(self.rope(x)) * self.attention._k_scale


class Model(torch.nn.Module):
    """Has a tied head, and one module under several names."""

    def __init__(self, method: QuantizeMethodBase) -> None:
        super().__init__()
        rope = Rope()
        self.embed = torch.nn.Embedding(SIZE, SIZE)
        self.embed.weight.requires_grad_(False)
        self.layers = torch.nn.ModuleList(Layer(rope, method) for _ in range(2))
        self.head = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def answer(model: Any) -> Any:
    """Returns what the model says, to be compared bit for bit."""
    with torch.inference_mode():
        return model(torch.arange(SIZE, device=model.embed.weight.device)).cpu().tolist()


class Ordinary(stand_ins.BaseModelLoader):
    """Loads weights as from a checkpoint."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) + 2)
        model_config.loaded()

    def download_model(self, model_config: Any) -> None:
        pass


class Reloading:
    """What vLLM knows of a layer whose weights it loads again: as it was made, and as it is used."""

    def __init__(self, layer: Any) -> None:
        self.made = {name: parameter.to("meta") for name, parameter in _parameters(layer).items()}
        self.restore_device = torch.get_default_device()
        self.reset()

    def reset(self) -> None:
        self.used: dict[str, Any] | None = None


def _parameters(layer: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}


_layers: weakref.WeakKeyDictionary[Any, Reloading] = weakref.WeakKeyDictionary()


def initialize_layerwise_reload(model: Any) -> None:
    """Gives the layers parameters to load into, as vLLM does, except where an update was begun before."""
    for layer in model.modules():
        reloading = _layers[layer]
        if reloading.used is None:
            reloading.used = _parameters(layer)
            for name in reloading.used:
                del layer._parameters[name]
            for name, made in reloading.made.items():
                empty = torch.full(made.shape, torch.nan, dtype=made.dtype, device=reloading.restore_device)
                layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    """Processes what was loaded, and copies it to where it is used, as vLLM does. Layers that got nothing stay."""
    for layer in model.modules():
        reloading = _layers[layer]
        used, loaded = reloading.used, _parameters(layer)
        if loaded and not any(parameter.isnan().any() for parameter in loaded.values()):
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
            for name, parameter in used.items():
                parameter.data.copy_(getattr(layer, name))
        for name in _parameters(layer):
            del layer._parameters[name]
        layer._parameters.update(used)
        reloading.reset()
    for layer in model.modules():
        if hasattr(layer, "process_weights_after_loading"):
            layer.process_weights_after_loading(model_config.dtype)


class OfItsOwn(Ordinary):
    """Makes the model in its own way."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return super().load_model(vllm_config, model_config, prefix)


@dataclass
class LoadConfig:
    load_format: str = "partywall"
    model_loader_extra_config: Any = field(default_factory=dict)
    device: str | None = None


def config(
    method: QuantizeMethodBase | None = None, device: str = "cpu", loaded: Callable[[], Any] = lambda: None
) -> Any:
    """Returns vLLM's configuration. `loaded` is called when a checkpoint was read."""
    hf_config = {"hidden_size": SIZE, "architectures": ["Model"], "quantization_config": {"bits": 8}}
    model = types.SimpleNamespace(
        model="org/model",
        revision=None,
        hf_config=types.SimpleNamespace(architectures=["Model"], to_dict=lambda: hf_config),
        dtype=torch.float32,
        quantization=None,
        quantization_config=None,
        enable_sleep_mode=False,
        loaded=loaded,
    )
    layers: dict[str, Any] = {}

    def model_class() -> Model:
        made = Model(method or Transposed())
        _layers.update({layer: Reloading(layer) for layer in made.modules()})
        layers.update({f"layers.{index}.attention": layer.attention for index, layer in enumerate(made.layers)})
        return made

    model.model_class = model_class
    return types.SimpleNamespace(
        model_config=model,
        parallel_config=types.SimpleNamespace(
            data_parallel_size=1,
            enable_eplb=False,
            enable_expert_parallel=False,
            expert_placement_strategy="linear",
        ),
        cache_config=types.SimpleNamespace(cache_dtype="auto", hash_block_size=None),
        compilation_config=types.SimpleNamespace(static_forward_context=layers),
        kernel_config=types.SimpleNamespace(linear_backend="auto", moe_backend="auto"),
        device_config=types.SimpleNamespace(device=device),
        offload_config=types.SimpleNamespace(
            uva=types.SimpleNamespace(cpu_offload_gb=0), prefetch=types.SimpleNamespace(offload_group_size=0)
        ),
        speculative_config=None,
        weight_transfer_config=None,
    )


def install(patch: Any, **groups: stand_ins.Group) -> dict[str, Any]:
    """Installs vLLM with the loader of Partywall and two of the checkpoint, `auto` and `own`. Returns all by name."""
    loaders: dict[str, Any] = stand_ins.vllm_loaders(patch, groups)
    reload = "vllm.model_executor.model_loader.reload"
    stand_ins.module(
        patch,
        reload,
        initialize_layerwise_reload=initialize_layerwise_reload,
        finalize_layerwise_reload=finalize_layerwise_reload,
    )
    stand_ins.module(patch, f"{reload}.layerwise", get_layerwise_info=_layers.__getitem__)
    from partywall.integrations.vllm.loader import PartywallModelLoader

    loaders |= {"partywall": PartywallModelLoader, "auto": Ordinary, "own": OfItsOwn}
    return loaders


def loader(loaders: dict[str, Any], **settings: Any) -> Any:
    """Returns the loader of Partywall, as vLLM makes it."""
    return loaders["partywall"](LoadConfig(model_loader_extra_config={"name": "llm"} | settings))


def load(loaders: dict[str, Any], engine: Any = None, **settings: Any) -> Any:
    """Returns the model of an engine that uses Partywall."""
    engine = engine or config()
    return loader(loaders, **settings).load_model(engine, engine.model_config)


def allocate_caches(engine: Any) -> None:
    """Binds keys and values to the layers, first while the engine measures, then for good, as vLLM does."""
    for size in None, 16:
        engine.cache_config.hash_block_size = size
        for layer in engine.compilation_config.static_forward_context.values():
            layer.bind_kv_cache(torch.empty(size or 1))


def ordinary(engine: Any = None) -> Any:
    """Returns the model of an engine that does not."""
    engine = engine or config()
    return Ordinary(LoadConfig("auto")).load_model(engine, engine.model_config)
