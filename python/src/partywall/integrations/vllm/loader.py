"""vLLM's load format `partywall`. Importing this module imports vLLM; loading a model imports torch."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import partywall as pw
from partywall.integrations._engine.errors import unsupported
from partywall.integrations._engine.fingerprint import fingerprint, rank_name
from partywall.integrations._engine.loader import Fill, SharedLoader, Wanted
from partywall.integrations._engine.settings import LAYOUT, LOAD_FORMAT, PROCESSED, Settings
from partywall.integrations.vllm.fingerprint import fields, ranks


class PartywallModelLoader(SharedLoader, BaseModelLoader):  # type: ignore[misc]
    """Loads a model once for all engines of vLLM that ask for its name, see `SharedLoader`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = Settings.read(load_config.model_loader_extra_config)
        # How `load_weights` fills the model that vLLM's `load_model` is making, with the loader of the checkpoint.
        self._fill: tuple[Fill, BaseModelLoader] | None = None
        # Whether an update failed before its layers had made what belongs to the weights that they show.
        self._is_behind = False

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Returns the bytes of shared memory that exist already and that this engine is going to map.

        The memory of an engine that builds or copies is its own, and vLLM measures it. It begins to do so when this
        returns, so this first waits for other engines that are starting on the same GPU.
        """
        from partywall.integrations.vllm import turn

        why_copy = self._reason_to_copy(vllm_config)
        turn.take(vllm_config, self._settings.connect, self._settings.timeout)
        if why_copy is not None:
            return 0
        with self._settings.connect() as domain:
            try:
                segment = domain.open(rank_name(self._settings.name, ranks()))
            except pw.NameNotFound:
                return 0
            with segment:
                return segment.nbytes if segment.metadata.get(LAYOUT) == PROCESSED else 0

    def download_model(self, model_config: Any) -> None:
        """Downloads the checkpoint, for an engine that builds."""
        self._ordinary().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fills a model that `load_model` is making. Raises `UnsupportedModel` for any other, whose weights may be
        shared with other engines."""
        if self._fill is None:
            raise unsupported(
                "cannot load weights into a running engine: they are shared",
                "after sleep they are still there; for others start it with another load format, or with the weight-transfer "
                "backend of Partywall",
            )
        fill, ordinary = self._fill
        fill(model, lambda: ordinary.load_weights(model, model_config))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Returns the model, built by this engine or by another one.

        Raises `ModuleMismatch`, which names all differences, if the name holds other weights; `UnsupportedModel` if
        the engine is configured for something that shared weights do not allow; `TimeoutError` if another engine does
        not finish the weights in time; and `RemoteDevice` if they are on another GPU.
        """
        from partywall.integrations._engine.turn import end
        from partywall.integrations.vllm.turn import end_with_caches
        from partywall.torch import handle

        speculative = vllm_config.speculative_config
        if speculative is not None and model_config is speculative.draft_model_config:
            return self._ordinary().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        try:
            own_ranks = ranks()
            wanted = Wanted(
                name=rank_name(self._settings.name, own_ranks),
                fingerprint=fingerprint(fields(vllm_config, model_config, self._settings.load_format), own_ranks),
                device=self._device(vllm_config),
                why_copy=self._reason_to_copy(vllm_config),
                sleeps=model_config.enable_sleep_mode,
            )
            model = self._share(wanted, vllm_config, model_config, prefix)
        except BaseException:
            # Its process may live on, and other engines would wait for it.
            end()
            raise
        end_with_caches(vllm_config)
        if handle(model) is not None:
            # The weight-transfer engine knows the model alone.
            model._partywall_update = functools.partial(self._update, wanted, vllm_config, model_config)
        return model

    def _make(self, fill: Fill, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        ordinary = self._ordinary()
        if type(ordinary).load_model is not BaseModelLoader.load_model:
            raise unsupported(
                f"cannot load weights with the load format {self._settings.load_format!r}: its loader makes the model "
                "itself",
                "choose another load_format in model_loader_extra_config, such as 'auto'",
            )
        self._fill = fill, ordinary
        try:
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        finally:
            self._fill = None

    def _make_on_meta(self, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        import torch
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if (layer := _layer_that_cannot_map(model)) is not None:
            raise unsupported(f"cannot map the weights of {self._settings.name!r}: {layer}", "remove the name")
        return model

    def _finish(
        self, model: Any, segment: pw.Segment, private: bool, vllm_config: Any, model_config: Any, prefix: str
    ) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        device = self._device(vllm_config)
        for module in model.modules():
            # Where updates make what they load: vLLM has noted that the model was made on meta.
            get_layerwise_info(module).restore_device = device
        self._rebuild(model, vllm_config, model_config)

    def _rebuild(self, model: Any, vllm_config: Any, model_config: Any) -> None:
        """Has the layers make what they keep beside their processed weights."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.model_executor.utils import weights_already_processed
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(model_config.dtype), weights_already_processed():
            process_weights_after_loading(model, model_config, self._device(vllm_config))

    def _update(
        self,
        wanted: Wanted,
        vllm_config: Any,
        model_config: Any,
        model: Any,
        given: Iterable[pw.Segment],
        reload: Callable[[], None],
    ) -> None:
        """Gives a model that maps its weights the version that is made of the given segments."""
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        from partywall.integrations._engine.updates import update

        world = parallel_state.get_world_group()

        def reload_or_forget() -> None:
            try:
                reload()
            except BaseException:
                for module in model.modules():
                    # Otherwise vLLM would go on with this update in the next one.
                    get_layerwise_info(module).reset()
                raise

        # After an error in between, the next update makes what belongs to the weights that the model has then.
        was_behind, self._is_behind = self._is_behind, True
        with self._settings.connect() as domain:
            if update(model, wanted, domain, given, reload_or_forget, world, self._settings.timeout) or was_behind:
                self._rebuild(model, vllm_config, model_config)
        self._is_behind = False

    def _device(self, vllm_config: Any) -> Any:
        import torch

        return torch.device(self.load_config.device or vllm_config.device_config.device)

    def _reason_of(self, model: Any, *_: Any) -> str | None:
        from vllm.platforms import current_platform

        layer = _layer_that_cannot_map(model)
        if layer is not None and self._settings.mode == "shared":
            raise unsupported(f"cannot share the weights: {layer}", "use mode 'auto' or 'copy'")
        if layer is None and self._settings.mode == "auto" and current_platform.is_cpu():
            return "vLLM repacks them for this CPU"
        return layer

    def _ordinary(self) -> Any:
        """Returns the loader of the checkpoint."""
        from vllm.model_executor.model_loader import get_model_loader

        load_format = self._settings.load_format
        config = dataclasses.replace(self.load_config, load_format=load_format, model_loader_extra_config={})
        return get_model_loader(config)

    def _reason_to_copy(self, vllm_config: Any) -> str | None:
        """Returns why this engine must have weights of its own, whatever the model; `None` if it may map them.

        Raises `UnsupportedModel` if they are to be mapped, or if not even copies would do.
        """
        if vllm_config.parallel_config.enable_eplb:
            raise unsupported(
                "cannot share the weights of an engine with EPLB, which moves experts between its ranks",
                "start it without enable_eplb, or with another load format",
            )
        offload = vllm_config.offload_config
        transfer = vllm_config.weight_transfer_config
        updates_by_name = self._settings.mode == "shared" and getattr(transfer, "backend", None) == LOAD_FORMAT
        return self._settings.reason_to_copy(
            {
                "weight_transfer_config is set, and updates write the weights": transfer and not updates_by_name,
                "sleep mode is enabled, and is to give the weights' memory back": vllm_config.model_config.enable_sleep_mode
                and self._settings.mode != "shared",
                "a part of the weights is offloaded to host memory": offload.uva.cpu_offload_gb
                or offload.prefetch.offload_group_size,
                "this vLLM cannot take processed weights": not _takes_processed_weights(),
            }
        )


def _layer_that_cannot_map(model: Any) -> str | None:
    """Names a layer that has to process its weights itself; `None` if there is none."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not getattr(method, "supports_pre_processed_weights", False):
            return f"{name or 'the model'} has {type(method).__name__}, which must process its weights itself"
    return None


def _takes_processed_weights() -> bool:
    """Returns whether this release of vLLM has the mode of processed weights, which it does not document."""
    import vllm.model_executor.utils as utils

    return hasattr(utils, "weights_already_processed")
