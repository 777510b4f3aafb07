"""verl: a checkpoint-engine backend for trainers and rollouts on one machine.

Importing this module registers the backend. In the configuration of the rollout:

    checkpoint_engine:
      backend: partywall
      custom_backend_module: partywall.integrations.verl

The first trainer rank commits the weights in buckets of `update_weights_bucket_megabytes`. Each rollout reads them in
place.
"""

import secrets
import weakref
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

import partywall as pw
from partywall.integrations._names import opened

_LAST = "last"
"""The metadata that marks the last bucket of an update."""


@CheckpointEngineRegistry.register("partywall")
class PartywallCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Carries the weights of an update under names that only this update uses, so no rollout mixes two updates.

    The names end when the update is finalized, or with the first trainer rank. `domain` and `socket` are as for
    `partywall.connect`. A rollout waits up to `timeout` seconds for each bucket, then `receive_weights` raises
    `NameNotFound`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        domain: str | None = None,
        socket: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._timeout = timeout
        self._domain = pw.connect(domain, socket=socket)
        # verl drops an engine without a call.
        weakref.finalize(self, self._domain.close)
        self._prefix: str | None = None
        self._buckets: list[pw.Segment] = []

    def prepare(self) -> str | None:
        """Returns the names' prefix from the first trainer rank, which chooses it."""
        return f"verl/{secrets.token_hex(8)}" if self._is_master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Gives each rank the prefix."""
        prefix = metadata[0]
        return {"prefix": [prefix] * actor_wg_world_size}, {"prefix": [prefix] * rollout_world_size}

    def init_process_group(self, prefix: str) -> None:
        """Takes the prefix of the update. One that failed and was not finalized ends here."""
        self.finalize()
        self._prefix = prefix

    def finalize(self) -> None:
        """Ends the names of the update. Readers keep what they still use."""
        for bucket in self._buckets:
            bucket.close()
        self._buckets.clear()
        self._prefix = None

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Commits the tensors in buckets. Every trainer rank iterates `weights`, because that may gather shards."""
        bucket: dict[str, Any] = {}
        held = 0
        for name, tensor in weights:
            if not self._is_master:
                continue
            if bucket and held + tensor.nbytes > self._bucket_bytes:
                self._commit(bucket, is_last=False)
                bucket, held = {}, 0
            bucket[name] = tensor.detach()
            held += tensor.nbytes
        if self._is_master:
            self._commit(bucket, is_last=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Yields the tensors, in place and read-only."""
        index = 0
        is_last = False
        while not is_last:
            with opened(self._domain, f"{self._prefix}/{index}", self._timeout) as bucket:
                for name, tensor in bucket.items():
                    yield name, torch.from_dlpack(tensor)
                is_last = bucket.metadata[_LAST] == "true"
            index += 1

    def _commit(self, tensors: dict[str, Any], *, is_last: bool) -> None:
        name = f"{self._prefix}/{len(self._buckets)}"
        self._buckets.append(self._domain.put(name, tensors, metadata={_LAST: str(is_last).lower()}))
