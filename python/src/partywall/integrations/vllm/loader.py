"""vLLM's load format `partywall`. Importing this module imports vLLM; loading a model imports torch."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import partywall as pw
from partywall.integrations.vllm.errors import unsupported
from partywall.integrations.vllm.fingerprint import fingerprint, rank_name, ranks
from partywall.integrations.vllm.settings import LAYOUT, PROCESSED, Settings


class PartywallModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model once for all engines that ask for its name.

    The first engine builds: it loads the checkpoint with an ordinary loader, and publishes the weights under a name
    that is kept. If it dies or fails before that, the next one builds. The weights have one of two layouts, which the
    name says:

    * *processed*: as the engine uses them, after vLLM has fused, quantized and repacked them. The parameters of the
      builder lie in the shared memory, and other engines map it.
    * *loaded*: as the ordinary loader leaves them, in host memory. Each engine copies them and processes its copy. This
      is for layers whose processed weights cannot come from elsewhere.

    `model_loader_extra_config` has the fields of `Settings`.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._settings = Settings.read(load_config.model_loader_extra_config)
        # How `load_weights` fills the model that vLLM's `load_model` is making.
        self._fill: Callable[[Any, Any], None] | None = None

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Returns the bytes of shared memory that exist already and that this engine is going to map.

        The memory of an engine that builds or copies is its own, and vLLM measures it. It begins to do so when this
        returns, so this first waits for other engines that are starting on the same GPU.
        """
        from partywall.integrations.vllm import turn

        why_copy = self._reason_to_copy(vllm_config)
        turn.take(vllm_config, self._connect, self._settings.timeout)
        if why_copy is not None:
            return 0
        with self._connect() as domain:
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
        self._fill(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Returns the model, built by this engine or by another one.

        Raises `ModuleMismatch`, which names all differences, if the name holds other weights; `UnsupportedModel` if
        the engine is configured for something that shared weights do not allow; `TimeoutError` if another engine does
        not finish the weights in time; and `RemoteDevice` if they are on another GPU.
        """
        from partywall.integrations.vllm import turn

        speculative = vllm_config.speculative_config
        if speculative is not None and model_config is speculative.draft_model_config:
            return self._ordinary().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        try:
            model = self._shared(vllm_config, model_config, prefix)
        except BaseException:
            # Its process may live on, and other engines would wait for it.
            turn.end()
            raise
        turn.end_with_caches(vllm_config)
        return model

    def _shared(self, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        """Returns the model, with weights that it shares or copies."""
        why_copy = self._reason_to_copy(vllm_config)
        own_ranks = ranks()
        name = rank_name(self._settings.name, own_ranks)
        wanted = fingerprint(vllm_config, model_config, own_ranks, self._settings.load_format)
        arguments = (vllm_config, model_config, prefix)
        built: list[Any] = []

        with self._connect() as domain:

            def build(claim: pw.Claim) -> pw.Segment:
                model, segment = self._build(domain, claim.name, wanted, why_copy, *arguments)
                built.append(model)
                return segment

            segment = domain.open_or_build(name, build, timeout=self._settings.timeout)
            if built:
                return built[0]
            return self._take(domain, segment, wanted, why_copy, *arguments)

    def _build(
        self, domain: pw.Domain, name: str, wanted: dict[str, str], why_copy: str | None, *arguments: Any
    ) -> tuple[Any, pw.Segment]:
        """Loads the model with the ordinary loader, and publishes its weights."""
        from partywall.integrations.vllm import weights

        ordinary = self._ordinary()
        load_format = self._settings.load_format
        if type(ordinary).load_model is not BaseModelLoader.load_model:
            raise unsupported(
                f"cannot load weights with the load format {load_format!r}: its loader makes the model itself",
                "choose another load_format in model_loader_extra_config, such as 'auto'",
            )
        published: list[pw.Segment] = []
        filled: set[str] = set()

        def fill(model: Any, model_config: Any) -> None:
            ordinary.load_weights(model, model_config)
            reason = why_copy or self._reason_of(model)
            if reason is None:
                filled.update(weights.names_with_data(model))
                return
            _log.warning("each engine copies the weights of %s: %s", name, reason)
            published.append(weights.share_loaded(model, name, domain, wanted))

        model = self._load(fill, *arguments)
        if not published:
            weights.check_kept(model, filled)
            sleeps = arguments[1].enable_sleep_mode
            published.append(weights.share_processed(model, name, domain, wanted, sleeps))
        return model, published[0]

    def _take(
        self, domain: pw.Domain, segment: pw.Segment, wanted: dict[str, str], why_copy: str | None, *arguments: Any
    ) -> Any:
        """Returns a model with the weights of a segment, which is closed when they are not needed any more."""
        from partywall.integrations.vllm import weights

        try:
            weights.check_fingerprint(segment, wanted)
            if segment.metadata.get(LAYOUT) == PROCESSED:
                return self._map(domain, segment, why_copy is not None, *arguments)
            if self._settings.mode == "shared":
                raise unsupported(
                    f"cannot map the weights of {segment.name!r}: they are not processed yet, and have to be copied",
                    "use mode 'auto' or 'copy', or choose another name",
                )
            with segment:
                return self._load(lambda model, _: weights.copy_loaded(model, segment), *arguments)
        except BaseException:
            segment.close()
            raise

    def _map(
        self,
        domain: pw.Domain,
        segment: pw.Segment,
        private: bool,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
    ) -> Any:
        """Returns a model whose parameters are processed weights, in place unless they are to be `private`."""
        import torch
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.model_executor.utils import weights_already_processed
        from vllm.utils.torch_utils import set_default_torch_dtype

        from partywall.integrations.vllm import weights

        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        if device.type == "cuda":
            with segment:
                # Says so if the memory is on another GPU than the engine.
                segment = domain.open(segment.name, version=segment.version, device=device)
        try:
            with set_default_torch_dtype(model_config.dtype):
                with torch.device("meta"):
                    model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                if (layer := weights.layer_that_cannot_map(model)) is not None:
                    raise unsupported(f"cannot map the weights of {segment.name!r}: {layer}", "remove the name")
                copied = weights.install(model, segment, private)
                with weights_already_processed():
                    process_weights_after_loading(model, model_config, device)
                weights.check_complete(model)
            weights.hold(model, segment, copied, private)
        except BaseException:
            segment.close()
            raise
        return model.eval()

    def _load(self, fill: Callable[[Any, Any], None], vllm_config: Any, model_config: Any, prefix: str) -> Any:
        """Has vLLM make the model, fill it and process its weights."""
        self._fill = fill
        try:
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        finally:
            self._fill = None

    def _ordinary(self) -> Any:
        """Returns the loader of the checkpoint."""
        from vllm.model_executor.model_loader import get_model_loader

        load_format = self._settings.load_format
        config = dataclasses.replace(self.load_config, load_format=load_format, model_loader_extra_config={})
        return get_model_loader(config)

    def _connect(self) -> pw.Domain:
        return pw.connect(self._settings.domain, socket=self._settings.socket)

    def _reason_to_copy(self, vllm_config: Any) -> str | None:
        """Returns why this engine must have weights of its own, whatever the model; `None` if it may map them.

        Raises `UnsupportedModel` if they are to be mapped, or if not even copies would do.
        """
        if vllm_config.parallel_config.enable_eplb:
            raise unsupported(
                "cannot share the weights of an engine with EPLB, which moves experts between its ranks",
                "start it without enable_eplb, or with another load format",
            )
        if self._settings.mode == "copy":
            return "the mode is 'copy'"
        offload = vllm_config.offload_config
        reasons = {
            "weight_transfer_config is set, and updates write the weights": vllm_config.weight_transfer_config,
            "sleep mode is enabled, and is to give the weights' memory back": vllm_config.model_config.enable_sleep_mode
            and self._settings.mode != "shared",
            "a part of the weights is offloaded to host memory": offload.uva.cpu_offload_gb
            or offload.prefetch.offload_group_size,
            "this vLLM cannot take processed weights": not _takes_processed_weights(),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        if reason is not None and self._settings.mode == "shared":
            raise unsupported(f"cannot map weights: {reason}", "use mode 'auto' or 'copy'")
        return reason

    def _reason_of(self, model: Any) -> str | None:
        """Returns why processed weights of this model cannot be shared; `None` if they can."""
        from vllm.platforms import current_platform

        from partywall.integrations.vllm import weights

        layer = weights.layer_that_cannot_map(model)
        if layer is not None and self._settings.mode == "shared":
            raise unsupported(f"cannot share the weights: {layer}", "use mode 'auto' or 'copy'")
        if layer is None and self._settings.mode == "auto" and current_platform.is_cpu():
            return "vLLM repacks them for this CPU"
        return layer


def _takes_processed_weights() -> bool:
    """Returns whether this release of vLLM has the mode of processed weights, which it does not document."""
    import vllm.model_executor.utils as utils

    return hasattr(utils, "weights_already_processed")


_log = logging.getLogger(__name__)
