"""Models of torch whose tensors are in use when they are to be replaced, on the CPU."""

import copy
import io
import re

import pytest

from .test_torch_modules import Toy, named, on_meta, run, shared, torch, toy

nn = torch.nn


# Holds 260, 266.
def test_parameters_in_use_are_named(domain, toy):
    model = on_meta()
    model.half = {"rows": model.embed.weight[:2]}
    view = model.layers[0].weight.detach()[1:]
    loose = model.norm.weight[2:]
    with pytest.raises(shared.ModuleMismatch, match=re.escape("half['rows']: on meta")):
        shared.load_module(model, "toy", domain=domain)
    model = Toy()
    model.half = {"rows": model.embed.weight[:2]}
    loose = model.norm.weight[2:]
    with pytest.raises(shared.TensorInUse) as refused:
        shared.load_module(model, "toy", domain=domain)
    assert "half['rows'] is a view of embed.weight" in str(refused.value)
    assert "norm.weight has a live view" in str(refused.value) and "use_count" not in str(refused.value)
    del loose, view, model.half, refused
    shared.load_module(model, "toy", domain=domain)
    assert torch.equal(run(model), run(toy))


# Holds 266.
@pytest.mark.parametrize(
    "show",
    [
        lambda weight: weight.detach(),
        lambda weight: weight.detach()[1:],
        lambda weight: weight.data,
        lambda weight: weight.detach().numpy(),
        lambda weight: nn.Parameter(weight.data),
        lambda weight: torch.from_dlpack(weight.detach()),
        lambda weight: torch.empty(0).set_(weight.untyped_storage()),
    ],
)
def test_tensors_outside_of_the_model_that_show_its_memory_are_found(domain, toy, show):
    model = Toy()
    before = {name: tensor.data_ptr() for name, tensor in named(model).items()}
    outside = show(model.norm.weight)
    refused = r"norm\.weight shares its memory with a tensor outside of the model"
    for attempt in (
        lambda: shared.load_module(model, "toy", domain=domain),
        lambda: shared.share_module(model, "other", move=True, domain=domain),
    ):
        with pytest.raises(shared.TensorInUse, match=refused):
            attempt()
    assert {name: tensor.data_ptr() for name, tensor in named(model).items()} == before
    del outside
    shared.load_module(model, "toy", domain=domain)
    assert torch.equal(run(model), run(toy))


# Holds 266.
def test_state_that_is_held_is_found(domain, toy):
    model = Toy()
    state = model.state_dict()
    with pytest.raises(shared.TensorInUse, match=r"layers\.0\.weight shares its memory .*positions shares its memory"):
        shared.load_module(model, "toy", domain=domain)
    model.load_state_dict(copy.deepcopy(state), assign=True)
    del state
    shared.load_module(model, "toy", domain=domain)


# Holds 266.
def test_users_that_hold_the_tensors_themselves_are_no_obstacle(domain):
    class Flat(nn.Module):
        """Parameters and a buffer that share memory, and modules that keep their parameters in lists."""

        def __init__(self):
            super().__init__()
            flat = torch.randn(300)
            self.first, self.second = nn.Parameter(flat[:200].view(20, 10)), nn.Parameter(flat[200:])
            self.tied = nn.Parameter(self.first.data)
            self.register_buffer("rows", torch.arange(10.0).expand(3, 10))
            self.register_buffer("row", self.rows[1])
            self.rnn = nn.LSTM(10, 10, 2)

        def forward(self, x):
            return self.rnn(x @ self.first.T @ self.tied + self.second[:10] + self.rows[0])[0]

    def trained():
        model = Flat()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        hooks = [parameter.register_post_accumulate_grad_hook(print) for parameter in [model.second]]
        hooks.append(model.first.register_hook(lambda gradient: gradient))
        hooks.append(model.register_forward_hook(lambda *_: None))
        model(torch.ones(4, 10)).sum().backward()
        optimizer.step()
        others = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model), model.first.untyped_storage()]
        parameters = dict(model.named_parameters())
        torch.func.functional_call(model, parameters, (torch.ones(4, 10),))
        torch.save(model.state_dict(), io.BytesIO())
        model.first.detach().numpy().sum()
        return model, (optimizer, hooks, others, parameters, torch.multiprocessing.reductions.StorageWeakRef(others[2]))

    torch.manual_seed(0)
    model, users = trained()
    shared.share_module(model, "flat", move=True, domain=domain)
    other, others = trained()
    shared.load_module(other, "flat", domain=domain)
    assert all(torch.equal(tensor, named(model)[name]) for name, tensor in named(other).items())
    del users, others
