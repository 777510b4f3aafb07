"""When an engine of vLLM has its turn on a GPU. Importing this module imports torch and vLLM."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import parallel_state

import partywall as pw
from partywall.integrations._engine import turn


def take(vllm_config: Any, connect: Callable[[], pw.Domain], timeout: float | None) -> None:
    """Takes the turn, before vLLM measures for the first time.

    The engines of a data-parallel group wait for each other while they start, so they have no turns.
    """
    if vllm_config.parallel_config.data_parallel_size == 1:
        device = torch.device(vllm_config.device_config.device)
        turn.take(parallel_state.get_world_group(), device, connect, timeout)


def end_with_caches(vllm_config: Any) -> None:
    """Ends the turn once vLLM has allocated its keys and values, which it then binds to each layer of attention.

    While it measures it also binds some. Only with those that stay does it know the size of their hashed blocks.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    layer = next((layer for layer in layers if hasattr(layer, "bind_kv_cache")), None)
    if layer is None or not hasattr(vllm_config.cache_config, "hash_block_size"):
        turn.end()
        return
    bind = layer.bind_kv_cache

    def bind_and_end(*arguments: Any) -> None:
        bind(*arguments)
        if vllm_config.cache_config.hash_block_size is not None:
            del layer.bind_kv_cache
            turn.end()

    layer.bind_kv_cache = bind_and_end
