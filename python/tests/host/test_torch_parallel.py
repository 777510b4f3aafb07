"""Models in shared memory under DistributedDataParallel, by two processes on the CPU."""

import textwrap

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
shared = pytest.importorskip("partywall.torch")

MODEL = """
import torch, torch.distributed as dist
import partywall.torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        return self.norm(self.second(self.first(x)) * self.scale)

class Adapted(nn.Module):
    '''As libraries do: the model lies deeper, under other names.'''

    def __init__(self, base):
        super().__init__()
        self.inner = nn.ModuleDict({"model": base})
        self.adapter = nn.Linear(8, 8)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner["model"], name)

    def forward(self, x):
        return self.inner["model"](x) + self.adapter(x)

def step(model, rank, device="cpu"):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x = torch.full((4, 8), 1.0 + rank, device=device) * torch.arange(4.0, device=device)[:, None]
    model(x).square().mean().backward()
    optimizer.step()

def digest(tensors):
    return [round(float(tensor.detach().double().sum()), 6) for tensor in tensors]
"""

RANK = MODEL + """
rank, how = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=2)
torch.manual_seed(rank)
with pw.connect(socket=sys.argv[1]) as d:
    with torch.device("meta"):
        base = Base()
    handle = partywall.torch.load_module(
        base, "base", 60, domain=d, private=how == "private", buffers="shared" if how == "buffers" else "private"
    )
    listed = getattr(base, "_ddp_params_and_buffers_to_ignore", [])
    base.train(how != "buffers")
    before = digest(torch.from_dlpack(tensor) for tensor in handle.segment.values())
    model = base if how == "private" else Adapted(base)
    if how == "peft":
        import peft
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["first"], init_lora_weights=False))
    wrapped = DistributedDataParallel(model)
    began = digest(p for p in model.parameters() if p.requires_grad)
    step(wrapped, rank)
    trained = digest(p for p in model.parameters() if p.requires_grad)
    assert trained != began
    after = digest(torch.from_dlpack(tensor) for tensor in handle.segment.values())
    say(len(listed), len(wrapped.parameters_to_ignore), before == after, trained)
    dist.destroy_process_group()
"""


@pytest.fixture
def base(domain):
    """A model whose parameters are the same memory, shared as `base`."""
    scope: dict[str, type] = {}
    exec(MODEL, scope)
    torch.manual_seed(7)
    model = scope["Base"]()
    with shared.share_module(model, "base", domain=domain) as handle:
        yield handle


# Holds 268.
@pytest.mark.parametrize(("how", "ignored"), [("adapters", 5), ("buffers", 9), ("peft", 5), ("private", 0)])
def test_ranks_of_a_loaded_model_train_in_step(domain, base, child, tmp_path, how, ignored):
    if how == "peft":
        pytest.importorskip("peft")
    group = str(tmp_path / "group")
    ranks = [child(RANK, domain.socket, str(rank), how, group, GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    said = [rank.says() for rank in ranks]
    assert [rank.end() for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert said[0].startswith(f"{ignored} {ignored} True [")


ALONE = MODEL + """
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
NAMES = ["first.bias", "first.weight", "norm.bias", "norm.weight", "second.weight"]
IGNORED = "_ddp_params_and_buffers_to_ignore"

with pw.connect(socket=sys.argv[1]) as d:
"""


def run_alone(domain, child, tmp_path, code):
    code = ALONE + textwrap.indent(code, "    ")
    alone = child(code, domain.socket, str(tmp_path / "group"), GLOO_SOCKET_IFNAME="lo")
    assert alone.end() == 0


# Holds 268.
def test_model_that_has_moved_is_left_alone(domain, child, tmp_path):
    run_alone(
        domain,
        child,
        tmp_path,
        """
base = Base()
model = Adapted(base)
model._ddp_params_and_buffers_to_ignore = ["adapter.bias"]
partywall.torch.share_module(base, "base", True, domain=d)
assert sorted(base._ddp_params_and_buffers_to_ignore) == NAMES
wrapped = DistributedDataParallel(module=model)
step(wrapped, 0)
names = ["adapter.bias", *("inner.model." + name for name in NAMES)]
assert sorted(wrapped.parameters_to_ignore) == names, wrapped.parameters_to_ignore
""",
    )


# Holds 268.
def test_names_of_a_model_that_shows_shared_memory_no_more_are_forgotten(domain, base, child, tmp_path):
    run_alone(
        domain,
        child,
        tmp_path,
        """
import copy, pickle
with torch.device("meta"):
    model = Base()
model._ddp_params_and_buffers_to_ignore = ["scale"]
partywall.torch.load_module(model, "base", 60, domain=d)
assert sorted(model._ddp_params_and_buffers_to_ignore) == sorted([*NAMES, "scale"])
for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    assert type(other._ddp_params_and_buffers_to_ignore) is list
    assert other._ddp_params_and_buffers_to_ignore == ["scale"]
    other.adapter = nn.Linear(8, 8)
    assert DistributedDataParallel(other).parameters_to_ignore == {"scale"}

# Its parameters have memory of their own from here on, under the same names.
model.double()
model.requires_grad_()
wrapped = DistributedDataParallel(model)
assert wrapped.parameters_to_ignore == {"scale"}
assert model._ddp_params_and_buffers_to_ignore == ["scale"]

# So have those of a model that is loaded once more, with copies.
model = Base()
partywall.torch.load_module(model, "base", domain=d)
assert sorted(model._ddp_params_and_buffers_to_ignore) == NAMES
partywall.torch.load_module(model, "base", domain=d, private=True)
assert model._ddp_params_and_buffers_to_ignore == []
""",
    )
