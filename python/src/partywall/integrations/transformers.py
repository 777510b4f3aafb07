"""Models of Hugging Face transformers from shared memory."""

import contextlib
import copy
import inspect
import logging
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import transformers
import transformers.modeling_utils

# The package may lack this attribute of itself, if a model was imported before.
from transformers import initialization

from partywall._domain import Domain
from partywall._native import Tensor
from partywall.torch import _load, _manifest, _tensors
from partywall.torch._handle import Loading, domain_or_default
from partywall.torch._manifest import Manifest

__all__ = ["from_name"]


def from_name(
    cls: Any,
    config: Any,
    name: str,
    timeout: float | None = 0.0,
    *,
    domain: Domain | None = None,
    version: int | None = None,
    device: Any = None,
    allow_peer: bool = False,
    buffers: Literal["private", "shared"] = "private",
    fingerprint: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Returns a model of the class `cls`, or of the class that an Auto class chooses, whose parameters are those that
    `partywall.torch.share_module` has committed as `name`, in place: as `cls.from_pretrained`, without a file and
    without a copy.

        config = AutoConfig.from_pretrained("llama")
        model = from_name(LlamaForCausalLM, config, "llama", timeout=60)

    The other arguments are as for `partywall.torch.load_module`, and `options` as for `from_pretrained`. On a GPU that
    reserves memory for the whole model (`caching_allocator_warmup`): in the calling thread, and for the time of this
    call, that function does nothing. `partywall.torch.handle` returns the handle of the model.

    The model that `cls` and `config` describe is compared with the shared one before any of it is loaded. One with
    other modules than those of its class, such as quantized or fused ones, is compared when it is loaded.

    Raises what `load_module` raises.
    """
    _load.check_choice(buffers)
    if not isinstance(config, transformers.PreTrainedConfig):
        raise TypeError(f"config is a configuration of transformers, not {config!r}: use AutoConfig.from_pretrained()")
    if not hasattr(cls, "from_pretrained"):
        raise TypeError(f"cls is a class of models of transformers, such as LlamaForCausalLM, not {cls!r}")
    if taken := {"pretrained_model_name_or_path", "state_dict"} & options.keys():
        raise TypeError(f"from_name() takes no {min(taken)}=: it gives from_pretrained the tensors of the name")
    cls = _concrete(cls, config)
    segment = domain_or_default(domain).open(name, timeout, version=version, device=device, allow_peer=allow_peer)
    try:
        shared = _load.mapped(segment, device)
        kinds = Manifest.read(segment).kinds
        persistent = [tensor for tensor, kind in zip(shared, kinds, strict=True) if kind != "n"]
        if not any(options.get(key) or getattr(config, key, None) for key in _OTHER_MODULES):
            described = _described(cls, config, persistent, options)
            _manifest.check(segment, shared, described, _tensors.named_tensors(described), (), fingerprint)
        state = {tensor.name: torch.from_dlpack(tensor) for tensor in persistent}
        place = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        if place.type != "cpu":
            # Without a map, the tensors would be copied to the CPU.
            options.setdefault("device_map", {"": place})
        with _no_warmup():
            model = cls.from_pretrained(None, config=config, state_dict=state, **options)
        del state
        tensors = _tensors.named_tensors(model)
        _tensors.check_supported(tensors)
        _load.install(model, tensors, segment, shared, Loading(device, buffers, False, fingerprint))
        return model
    except BaseException:
        segment.close()
        raise


def _concrete(cls: Any, config: Any) -> Any:
    """Returns the class that an Auto class chooses for a configuration: by itself, it loads from files alone."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    # On use, because it imports much more of transformers.
    from transformers.models.auto.auto_factory import _get_model_class

    return _get_model_class(config, mapping)


def _described(cls: Any, config: Any, persistent: Iterable[Tensor], options: Mapping[str, Any]) -> Any:
    """Returns the model that `from_pretrained` would fill with these tensors, on *meta*."""
    dtype = _dtype(config, persistent, options)
    own = {key: options[key] for key in inspect.signature(cls.__init__).parameters if key in options}
    # Older models read numbers that they compute while they are built, which tensors on *meta* lack.
    computed = getattr(initialization, "meta_device_safe_creation_ops", contextlib.nullcontext)
    with _replacing, torch.device("meta"), computed():
        model = cls._from_config(copy.deepcopy(config), dtype=dtype, **own)
    # Loading keeps some tensors of models in half precision in another dtype.
    plan: dict[str, Any] = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    for named in _tensors.named_tensors(model):
        for pattern, kept in plan.items():
            if named.kind != "n" and re.search(pattern.replace("*", ".*"), named.name):
                named.tensor.data = named.tensor.data.to(kept)
    return model


def _dtype(config: Any, persistent: Iterable[Tensor], options: Mapping[str, Any]) -> Any:
    """Returns the dtype that `from_pretrained` chooses: that of its options, the configuration, or the first weight."""
    chosen = options.get("dtype") or options.get("torch_dtype") or "auto"
    if chosen == "auto":
        weights = (tensor.dtype for tensor in persistent if tensor.dtype in _DEFAULTS)
        chosen = getattr(config, "dtype", None) or next(weights, "float32")
    if isinstance(chosen, Mapping):
        chosen = chosen.get("", torch.get_default_dtype())
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


@contextlib.contextmanager
def _no_warmup() -> Iterator[None]:
    """Replaces transformers' warm-up of torch's allocator, for this thread."""
    with _replacing:
        module = transformers.modeling_utils
        warmup = getattr(module, _WARMUP, None)
        if warmup is None:
            warnings.warn(
                f"this version of transformers has no {_WARMUP}: loading may reserve the memory of the model twice",
                RuntimeWarning,
                stacklevel=4,
            )
            yield
            return
        thread = threading.get_ident()

        def skipped(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return warmup(*arguments, **named)
            _log.info("skipped %s: the weights are in shared memory", _WARMUP)
            return None

        _log.info("replaced transformers.modeling_utils.%s until the model is loaded", _WARMUP)
        setattr(module, _WARMUP, skipped)
        try:
            yield
        finally:
            setattr(module, _WARMUP, warmup)


_OTHER_MODULES = ("quantization_config", "fusion_config", "kernel_config", "distributed_config", "tp_plan", "tp_size")
"""Options, some also of the configuration, with which `from_pretrained` replaces or splits modules of the class."""

_DEFAULTS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes in which torch can make a whole model."""

_WARMUP = "caching_allocator_warmup"

# One thread replaces functions of transformers and torch at a time, so that each restores the original.
_replacing = threading.RLock()

_log = logging.getLogger(__name__)
