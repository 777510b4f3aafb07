"""vLLM's weight-transfer backend `partywall`. Importing this module imports torch and vLLM."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import partywall as pw
from partywall.integrations._names import opened


@dataclass
class PartywallInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`init_info`: where the engine looks for names. Each field has a default."""

    domain: str | None = None
    """The domain, as for `partywall.connect`."""
    socket: str | None = None
    """The broker's socket, in place of a domain."""
    timeout: float = 10.0
    """Seconds that an update waits for a name that does not exist yet."""

    def __post_init__(self) -> None:
        for field in "domain", "socket":
            value = getattr(self, field)
            if not isinstance(value, str | None):
                raise ValueError(f"init_info[{field!r}] is {value!r}, but must be a string")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not self.timeout >= 0:
            raise ValueError(f"init_info['timeout'] is {self.timeout!r}, but must be a number of seconds, 0 or more")


@dataclass
class PartywallUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`update_info`: the name, or `NAME@VERSION`, of a version whose tensors have the names of a checkpoint."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"update_info['name'] is {self.name!r}, but must be a name: 'policy' or 'policy@2'")


class PartywallWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Reads one version of a name into the worker's model.

    All tensors of an update come from one version, on which the worker holds a lease until the update is finished. A
    name that cannot be opened leaves the model as it was. A model that maps its weights maps another version once the
    update is finished. For any other, the copy into the model is vLLM's: it is not atomic across
    layers. The prefix cache belongs to vLLM's scheduler, which no weight-transfer engine reaches: the
    caller that updates the weights resets it.
    """

    init_info_cls = PartywallInitInfo
    update_info_cls = PartywallUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._init_info = PartywallInitInfo()
        self._domain: pw.Domain | None = None
        self._read: list[pw.Segment] = []
        self._reloading = False
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)

    def init_transfer_engine(self, init_info: PartywallInitInfo) -> None:
        """Connects to the domain."""
        self.shutdown()
        self._init_info = init_info
        self._domain = pw.connect(init_info.domain, socket=init_info.socket)

    def start_weight_update(self) -> None:
        """Begins an update. The model changes once a version is open."""
        self._release()

    def receive_weights(self, update_info: PartywallUpdateInfo) -> None:
        """Opens the version and loads its tensors.

        Raises `NameNotFound` if the name does not exist within the timeout, and `RemoteDevice` if its memory is on
        another GPU than the model.
        """
        if self._domain is None:
            self.init_transfer_engine(self._init_info)
        assert self._domain is not None
        device = self.device if self.device.type == "cuda" else None
        try:
            segment = opened(self._domain, update_info.name, self._init_info.timeout, device)
            self._read.append(segment)
            if self._update_of_shared is None:
                self._load([segment])
        except BaseException:
            # vLLM gives an update up that fails, and does not finish it.
            self._release()
            raise

    def finish_weight_update(self) -> None:
        """Has vLLM process the loaded layers, and gives the leases back."""
        if not self._read:
            return
        try:
            if self._update_of_shared is None:
                self._finalize()
            else:
                self._update_of_shared(self.model, self._read, self._reload)
        finally:
            self._release()
        if self._caches_prefixes:
            self._caches_prefixes = False
            _log.warning(
                "the prefix cache has blocks that the old weights made, which vLLM serves with the new ones: call "
                "reset_prefix_cache() after each finish_weight_update()"
            )

    def shutdown(self) -> None:
        """Gives the leases back and ends the connection."""
        self._release()
        if self._domain is not None:
            self._domain.close()
            self._domain = None

    @property
    def _update_of_shared(self) -> Any:
        """Updates a model that maps its weights; `None` for any other."""
        return getattr(self.model, "_partywall_update", None)

    def _reload(self) -> None:
        self._load(self._read)
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def _load(self, segments: list[pw.Segment]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._reloading:
            initialize_layerwise_reload(self.model)
            self._reloading = True
        weights = [(name, torch.from_dlpack(tensor)) for segment in segments for name, tensor in segment.items()]
        # A trainer has no weights for layers that only predict further tokens.
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)

    def _release(self) -> None:
        self._reloading = False
        for segment in self._read:
            segment.close()
        self._read.clear()


_log = logging.getLogger(__name__)
