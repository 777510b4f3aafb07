"""Adapters of a model in the memory of real GPUs, trained by two processes under DistributedDataParallel."""

import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
shared = pytest.importorskip("partywall.torch")

from ..host.test_torch_parallel import MODEL

RANK = MODEL + """
rank, backend, device = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.cuda.set_device(device)
dist.init_process_group(backend, init_method="file://" + sys.argv[5], rank=rank, world_size=2)
torch.manual_seed(rank)
with pw.connect(socket=sys.argv[1]) as d:
    with torch.device("meta"):
        base = Base()
    handle = partywall.torch.load_module(base, f"base/{device}", 60, domain=d)
    before = digest(torch.from_dlpack(tensor) for tensor in handle.segment.values())
    model = Adapted(base).cuda()
    wrapped = DistributedDataParallel(model, device_ids=[device])
    began = digest(p for p in model.parameters() if p.requires_grad)
    for _ in range(3):
        step(wrapped, rank, "cuda")
    torch.cuda.synchronize()
    trained = digest(p for p in model.parameters() if p.requires_grad)
    assert trained != began
    assert base.first.weight.data_ptr() == handle.segment["first.weight"].data_ptr
    after = digest(torch.from_dlpack(tensor) for tensor in handle.segment.values())
    say(len(wrapped.parameters_to_ignore), before == after, trained)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_of_a_loaded_model_train_in_step(domain, child, tmp_path, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    scope: dict[str, type] = {}
    exec(MODEL, scope)
    torch.manual_seed(7)
    model = scope["Base"]()
    handles = [shared.share_module(model.to(gpu), f"base/{gpu}", domain=domain) for gpu in range(gpus)]
    # NCCL takes no two ranks of one GPU.
    backend = "nccl" if gpus == 2 else "gloo"
    group = str(tmp_path / "group")
    ranks = [
        child(RANK, domain.socket, str(rank), backend, str(rank % gpus), group, GLOO_SOCKET_IFNAME="lo")
        for rank in range(2)
    ]
    said = [rank.says() for rank in ranks]
    assert [rank.end() for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert said[0].startswith("5 True [")
    for handle in handles:
        handle.close()
