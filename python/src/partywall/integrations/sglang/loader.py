"""SGLang's load format `partywall`. Importing this module imports SGLang and torch."""

import dataclasses
import gc
import logging
from typing import Any

import torch
from sglang.srt.model_loader.loader import (
    BaseModelLoader,
    DefaultModelLoader,
    _get_quantization_config,
    _initialize_model,
    get_model_loader,
    post_load_weights,
)
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_exec, get_model, get_parallel
from sglang.srt.utils import is_cpu
from sglang.srt.weight_cache.protocol import get_quant_method_name, is_ipc_quant_supported

import partywall as pw
from partywall.integrations._engine import weights
from partywall.integrations._engine.errors import UnsupportedModel, unsupported
from partywall.integrations._engine.fingerprint import fingerprint, rank_name
from partywall.integrations._engine.loader import Fill, SharedLoader, Wanted
from partywall.integrations._engine.settings import Settings
from partywall.integrations.sglang.fingerprint import fields, ranks
from partywall.integrations.sglang.state import added, state
from partywall.torch import handle


class PartywallModelLoader(SharedLoader, BaseModelLoader):  # type: ignore[misc]
    """Loads a model once for all engines of SGLang that ask for its name, see `SharedLoader`."""

    preloaded_weights_bytes = 0
    """Bytes of the weights that existed before SGLang measured the memory of its GPU. It adds them to its measurement."""

    def __repr__(self) -> str:
        # SGLang says no more, when it is to load new weights from a disk in this way.
        return "load_format is 'partywall', which loads no new weights: choose another one, such as 'auto'"

    def download_model(self, model_config: Any) -> None:
        """Downloads the checkpoint, for an engine that builds."""
        self._settings = Settings.read(self.load_config.model_loader_extra_config)
        self._ordinary(model_config).download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Returns the model, built by this engine or by another one.

        Raises `ModuleMismatch`, which names all differences, if the name holds other weights; `UnsupportedModel` if
        the engine is configured for something that shared weights do not allow; `TimeoutError` if another engine does
        not finish the weights in time; and `RemoteDevice` if they are on another GPU.
        """
        # Not before: SGLang also makes loaders that load no model.
        self._settings = Settings.read(self.load_config.model_loader_extra_config)
        if model_config.is_draft_model:
            return self._ordinary(model_config).load_model(model_config=model_config, device_config=device_config)
        own_ranks = ranks()
        device = torch.device(device_config.device_type)
        wanted = Wanted(
            name=rank_name(self._settings.name, own_ranks),
            fingerprint=fingerprint(fields(model_config, self._settings.load_format), own_ranks),
            device=torch.device(device.type, device_config.gpu_id) if device.type == "cuda" else device,
            why_copy=self._reason_to_copy(),
            sleeps=get_exec().features.enable_memory_saver,
        )
        model = self._share(wanted, model_config, device_config)
        if handle(model) is not None:
            # SGLang then refuses updates, which would write memory of other engines.
            model._derived_weight_cache_error = (
                f"cannot update the weights of {wanted.name!r}: they are shared with other engines and read-only. Start "
                "the engine with mode 'copy' in model_loader_extra_config"
            )
        return model

    def _build(self, domain: pw.Domain, wanted: Wanted, *arguments: Any) -> tuple[Any, pw.Segment]:
        try:
            return super()._build(domain, wanted, *arguments)
        except UnsupportedModel as error:
            if wanted.why_copy is not None or self._settings.mode == "shared":
                raise
            reason = error.args[0]
        _log.warning("loads %s once more, to be copied: %s", wanted.name, reason)
        gc.collect()
        return super()._build(domain, dataclasses.replace(wanted, why_copy=reason), *arguments)

    def _make(self, fill: Fill, model_config: Any, device_config: Any) -> Any:
        ordinary = self._ordinary(model_config)
        standard = DefaultModelLoader.load_weights_and_postprocess
        filled = False

        def load_weights_and_postprocess(model: Any, checkpoint: Any, target_device: Any) -> None:
            nonlocal filled
            filled = True
            fill(model, lambda: ordinary.load_weights_only(model, checkpoint, target_device))
            before = state(model)
            ordinary.postprocess_weights(model, target_device)
            self._changed = added(before, state(model))

        if getattr(type(ordinary), standard.__name__, None) is standard:
            ordinary.load_weights_and_postprocess = load_weights_and_postprocess
            model = ordinary.load_model(model_config=model_config, device_config=device_config)
        if not filled:
            raise unsupported(
                f"cannot load weights with the load format {self._settings.load_format!r}: its loader makes the model "
                "itself",
                "choose another load_format in model_loader_extra_config, such as 'auto'",
            )
        return model

    def _make_on_meta(self, model_config: Any, device_config: Any) -> Any:
        config = self._ordinary_config()
        quantization = _get_quantization_config(model_config, config)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            return _initialize_model(model_config, config, quantization)

    def _finish(self, model: Any, segment: pw.Segment, private: bool, *_: Any) -> None:
        if not private:
            self.preloaded_weights_bytes = segment.nbytes

    def _reason_of(self, model: Any, model_config: Any, device_config: Any) -> str | None:
        config = getattr(model_config.hf_config, "quantization_config", None)
        method = model_config.quantization or get_quant_method_name(config)
        kept = weights.plain_attributes(model)
        reasons = {
            f"SGLang has not verified that processed weights of {method} can come from elsewhere": not (
                is_ipc_quant_supported(method, config)
            ),
            f"the model keeps {kept} as plain attributes, which are not shared": kept,
            "torch divides the layers among the ranks": get_parallel().tp_size > 1
            and getattr(model, "supports_torch_tp", False),
            "SGLang repacks them for this CPU": is_cpu() and self._settings.mode == "auto",
        }
        return self._settings.reason_to_copy(reasons)

    def _check_processed(self, model: Any) -> None:
        if self._changed:
            raise unsupported(
                f"cannot share the weights: SGLang has changed {weights.some(self._changed)} while it processed them, which other "
                "engines would lack",
                "use mode 'auto' or 'copy'",
            )

    def _copied(self, model: Any) -> None:
        # What the model's own `load_weights` does last.
        post_load_weights(model)

    def _ordinary(self, model_config: Any) -> Any:
        """Returns the loader of the checkpoint."""
        return get_model_loader(self._ordinary_config(), model_config)

    def _ordinary_config(self) -> Any:
        return dataclasses.replace(
            self.load_config, load_format=self._settings.load_format, model_loader_extra_config={}
        )

    def _reason_to_copy(self) -> str | None:
        """Returns why this engine must have weights of its own, whatever the model; `None` if it may map them.

        Raises `UnsupportedModel` if they are to be mapped, or if not even copies would do.
        """
        execution = get_exec()
        if execution.moe.enable_eplb or execution.moe.elastic_ep_backend:
            raise unsupported(
                "cannot share the weights of an engine that moves experts between its ranks",
                "start it without enable_eplb and elastic_ep_backend, or with another load format",
            )
        offload = execution.offload
        return self._settings.reason_to_copy(
            {
                "custom_weight_loader is set, and updates write the weights": get_model().custom_weight_loader,
                "the memory saver is enabled, and is to give the weights' memory back": self._settings.mode != "shared"
                and execution.features.enable_memory_saver,
                "a part of the weights is offloaded to host memory": offload.cpu_offload_gb > 0
                or offload.offload_group_size > 0,
            }
        )


_log = logging.getLogger(__name__)
