"""A loader of torch whose workers write batches into shared memory that a GPU copies from."""

import copy
import inspect
import os
import queue
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from partywall._domain import Domain
from partywall.torch._batches import Batches
from partywall.torch._handle import domain_or_default
from partywall.torch._workers import Context


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[misc]
    """A `torch.utils.data.DataLoader` whose workers write batches straight into memory that the GPU copies from.

        loader = partywall.torch.DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
        for images, labels in loader:
            images = images.to("cuda", non_blocking=True)

    It takes all arguments of torch's, and batches, their order, the seeds of workers and the tracebacks of their errors
    are the same. Batches lie in blocks of a pool, and their tensors are that memory: it is neither copied nor sent, and
    the process that iterates has no thread that pins. A block returns to the workers once all tensors of its batch are
    dropped, and the GPUs of this process have finished with them.

    `pin_memory` is true by default: with a GPU the blocks are page-locked, so that copies with `non_blocking=True` are
    asynchronous. Without a GPU it has no effect.

    `held` is for how many batches, beside those that are prefetched, there are blocks. A program may keep more: those
    are copied into torch's shared memory, as torch does with all.

    A worker that dies is a `LoaderWorkerDied`, which says how. With `restart=N` up to N workers in each pass over the
    data are replaced instead, and make the batches again that were not received. That needs a map-style dataset. The
    random numbers of a worker that replaces another begin anew.

    `domain` is by default the connection that `connect()` chooses.
    """

    def __init__(
        self, *arguments: Any, held: int = 4, restart: int = 0, domain: Domain | None = None, **options: Any
    ) -> None:
        given = inspect.signature(torch.utils.data.DataLoader).bind(*arguments, **options).arguments
        if "pin_memory" not in given:
            options["pin_memory"] = True
        for name, number in {"held": held, "restart": restart}.items():
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{name}= is a number of batches or workers, 0 or more, not {number!r}")
        if restart and isinstance(given["dataset"], torch.utils.data.IterableDataset):
            raise ValueError("restart= needs a map-style dataset: a worker cannot continue the iterator of another")
        if domain is not None:
            domain_or_default(domain)
        self.held = held
        self.restart = restart
        self.domain = domain
        self._batches: Batches | None = None
        super().__init__(*arguments, **options)

    def _get_iterator(self) -> Any:
        twin = copy.copy(self)
        if self.num_workers == 0:
            # torch would warn without a GPU.
            twin.pin_memory = self.pin_memory and torch.cuda.is_available()
            return torch.utils.data.DataLoader._get_iterator(twin)
        self.check_worker_number_rationality()
        if self._batches is None or self._batches.process != os.getpid():
            blocks = self.num_workers * self.prefetch_factor + self.held
            pins = self.pin_memory and torch.cuda.is_available()
            self._batches = Batches(domain_or_default(self.domain), blocks, pins)
        return _Iterator(twin, self._batches)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}


class _Iterator(_MultiProcessingDataLoaderIter):  # type: ignore[misc]
    """torch's iterator, with workers that put batches into blocks."""

    def __init__(self, loader: DataLoader, batches: Batches) -> None:
        context = Context(loader.multiprocessing_context or torch.multiprocessing, batches)
        self._restart = loader.restart
        # The loader is a copy, which torch reads.
        loader.pin_memory = False
        loader.multiprocessing_context = context
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            # torch's handler of SIGCHLD would raise in the midst of other code, and also if the worker is replaced.
            _utils.signal_handling._remove_worker_pids(id(self))
            self._worker_pids_set = False
        self._worker_result_queue.restarts = self._restart
        super()._reset(loader, first_iter)

    def _try_get_data(self, timeout: float = _utils.MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        try:
            return True, self._worker_result_queue.get(timeout)
        except queue.Empty:
            return False, None

    def _shutdown_workers(self) -> None:
        # Workers that wait for a reader of large messages must not wait for the end of the process.
        if (results := self.__dict__.get("_worker_result_queue")) is not None:
            results.close()
        super()._shutdown_workers()
