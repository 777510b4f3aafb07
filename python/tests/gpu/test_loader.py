"""`partywall.torch.DataLoader` in page-locked memory. `python/tests/host/test_loader.py` tests everything else."""

import torch

from partywall.torch import DataLoader

from ..host.test_loader import Custom, Items, Point

LONG = 200_000_000
"""Clock cycles that a stream is busy."""


def pairs(index):
    return torch.full((1000,), index), {"numbers": torch.tensor([index]), "point": Point(index, "text")}


def test_batches_are_pinned_though_workers_are_forked_from_a_process_that_uses_cuda(domain):
    torch.zeros(1, device="cuda")
    for images, others in DataLoader(Items(8, pairs), batch_size=2, num_workers=2, domain=domain):
        assert images.is_pinned() and others["numbers"].is_pinned() and others["point"].x.is_pinned()
        assert images.to("cuda", non_blocking=True).sum().item() == int(images.sum())
    for batch in DataLoader(Items(4, torch.tensor), batch_size=2, num_workers=1, collate_fn=Custom, domain=domain):
        assert batch.tensors.is_pinned()


def test_batches_beside_the_blocks_are_pinned_too(domain):
    loader = DataLoader(Items(12, torch.tensor), num_workers=1, prefetch_factor=1, held=0, domain=domain)
    kept = list(loader)
    assert [int(batch) for batch in kept] == list(range(12)) and all(batch.is_pinned() for batch in kept)


def test_batches_are_not_pinned_if_so_asked(domain):
    for workers in (0, 1):
        for batch in DataLoader(Items(2, torch.tensor), num_workers=workers, pin_memory=False, domain=domain):
            assert not batch.is_pinned()
    for batch in DataLoader(Items(2, torch.tensor), domain=domain):
        assert batch.is_pinned()


def test_a_block_is_not_written_before_all_copies_of_it_are_done(domain):
    # Few blocks, and a stream that is far behind: what is dropped here is what the worker wants to fill.
    loader = DataLoader(Items(24, lambda i: torch.full((1 << 20,), i)), num_workers=1, held=1, domain=domain)
    stream = torch.cuda.Stream()
    copies = []
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for batch in loader:
            copies.append(batch.to("cuda", non_blocking=True))
            del batch
            if len(copies) % 6 == 0:
                torch.cuda._sleep(LONG)
    stream.synchronize()
    assert [(int(copy.min()), int(copy.max())) for copy in copies] == [(i, i) for i in range(24)]


def test_a_graph_can_be_captured_while_blocks_wait_for_the_gpu(domain):
    loader = DataLoader(Items(12, lambda i: torch.full((1000,), float(i))), num_workers=1, held=2, domain=domain)
    where = torch.zeros(1000, device="cuda")
    graph = None
    for number, batch in enumerate(loader):
        where.copy_(batch[0], non_blocking=True)
        del batch
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = where * 2
        graph.replay()
        assert doubled[0].item() == 2 * number
