"""Engines that start on one GPU measure its memory one after another. Importing this module imports torch.

An engine sees how much memory is free, loads and runs the model, sees again how much is free, and takes for keys and
values what is left of its budget. It would count what another engine allocates meanwhile as its own.
"""

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

import partywall as pw

_permits: list[pw.Permit] | None = None
"""What this process holds from `take` until the engine has allocated its keys and values: its turn. `None` without one."""


def take(world: Any, device: torch.device, connect: Callable[[], pw.Domain], timeout: float | None) -> None:
    """Waits until no other engine has its turn on a GPU of this one; after `timeout` seconds it goes on without.

    All workers of an engine call this, each with its GPU and the group of all of them. The first one holds the permits,
    which end with its process at the latest.
    """
    global _permits
    if _permits is not None:
        return
    _permits = []
    gpus = [_gpu(device)]
    if world.world_size > 1:
        gpus *= world.world_size
        torch.distributed.all_gather_object(gpus, gpus[0], group=world.cpu_group)
    if world.rank_in_group == 0:
        with connect() as domain:
            # In one order, so that no two engines wait for each other.
            for gpu in sorted(set(gpus)):
                with closing(domain.semaphore(f"engine/start/{gpu}", 1)) as semaphore:
                    _permits += _permit(semaphore, timeout)
    if world.world_size > 1:
        world.barrier()


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


def _gpu(device: torch.device) -> str:
    """Returns what processes agree on, however they number their GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


_log = logging.getLogger(__name__)
