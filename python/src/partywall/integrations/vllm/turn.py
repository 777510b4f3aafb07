"""Engines that start on one GPU measure its memory one after another. Importing this module imports torch and vLLM.

vLLM sees how much memory is free, loads and runs the model, sees again how much is free, and takes for keys and values
what is left of its budget. It would count what another engine allocates meanwhile as its own.
"""

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from vllm.distributed import parallel_state

import partywall as pw

_permits: list[pw.Permit] | None = None
"""What this process holds from `take` until vLLM has allocated its keys and values: its turn. `None` without one."""


def take(vllm_config: Any, connect: Callable[[], pw.Domain], timeout: float | None) -> None:
    """Waits until no other engine has its turn on a GPU of this one; after `timeout` seconds it goes on without.

    All workers of an engine call this. The first one holds the permits, which end with its process at the latest. The
    engines of a data-parallel group wait for each other while they start, so they have no turns.
    """
    global _permits
    if _permits is not None or vllm_config.parallel_config.data_parallel_size > 1:
        return
    _permits = []
    world = parallel_state.get_world_group()
    gpus = [_gpu(vllm_config)]
    if world.world_size > 1:
        gpus *= world.world_size
        torch.distributed.all_gather_object(gpus, gpus[0], group=world.cpu_group)
    if world.rank_in_group == 0:
        with connect() as domain:
            # In one order, so that no two engines wait for each other.
            for gpu in sorted(set(gpus)):
                with closing(domain.semaphore(f"vllm/start/{gpu}", 1)) as semaphore:
                    _permits += _permit(semaphore, timeout)
    if world.world_size > 1:
        world.barrier()


def end_with_caches(vllm_config: Any) -> None:
    """Ends the turn once vLLM has allocated its keys and values, which it then binds to each layer of attention.

    While it measures it also binds some. Only with those that stay does it know the size of their hashed blocks.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    layer = next((layer for layer in layers if hasattr(layer, "bind_kv_cache")), None)
    if layer is None or not hasattr(vllm_config.cache_config, "hash_block_size"):
        end()
        return
    bind = layer.bind_kv_cache

    def bind_and_end(*arguments: Any) -> None:
        bind(*arguments)
        if vllm_config.cache_config.hash_block_size is not None:
            del layer.bind_kv_cache
            end()

    layer.bind_kv_cache = bind_and_end


def end() -> None:
    """Ends the turn, if there is one."""
    global _permits
    permits, _permits = _permits or [], None
    for permit in permits:
        permit.release()


def _permit(semaphore: pw.Semaphore, timeout: float | None) -> list[pw.Permit]:
    """Returns the permit, or nothing if another engine keeps it for too long."""
    if permit := semaphore.try_acquire():
        return [permit]
    _log.info("waits until another engine that starts on this GPU has measured its memory")
    try:
        return [semaphore.acquire(timeout)]
    except TimeoutError:
        _log.warning(
            "starts although another engine on this GPU has measured for %s s: it may count memory of that one", timeout
        )
        return []


def _gpu(vllm_config: Any) -> str:
    """Returns what processes agree on, however they number their GPUs."""
    device = torch.device(vllm_config.device_config.device)
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


_log = logging.getLogger(__name__)
