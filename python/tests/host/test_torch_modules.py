"""Models of torch in shared memory, on the CPU."""

import copy
import gc
import io
import json
import pickle
import subprocess
import sys
import warnings

import pytest

import partywall as pw

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
nn = torch.nn
shared = pytest.importorskip("partywall.torch")


class Toy(nn.Module):
    """A model with everything that makes sharing hard."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(8, 16).t())
        self.part = nn.Parameter(torch.randn(16, 8)[:, ::2], requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.packed = nn.Parameter(torch.arange(32, dtype=torch.uint8).reshape(4, 8), requires_grad=False)
        self.eighth = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mean", torch.randn(16))
        self.register_buffer("rope", torch.randn(4, 16), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.arange(16).expand(2, 16))
        self.weights = [layer.weight for layer in self.layers]
        self.turned.scale = 3
        self.turned.main_grad = torch.zeros(1, device="cpu")

    def forward(self, tokens):
        x = self.embed(tokens) + self.rope[0] + self.mean
        for layer in self.layers:
            x = layer(x.bfloat16()).float()
        x = self.norm(x) + (self.turned.sum(1) * self.turned.scale).sum() + self.part.sum()
        return self.head(x) + self.packed.sum()


TOKENS = torch.arange(10)


def run(model):
    """Runs the model without a graph for backward(), which would be a use of its parameters."""
    with torch.no_grad():
        return model(TOKENS)


def on_meta(make=Toy):
    with torch.device("meta"):
        return make()


def named(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.fixture
def toy(domain):
    """A model that is shared as `toy`."""
    torch.manual_seed(0)
    model = Toy()
    shared.share_module(model, "toy", domain=domain)
    return model


# Holds 31.
def test_loaded_model_is_the_shared_one_in_place(domain, toy):
    model = on_meta()
    weight, before = model.embed.weight, dict(model.named_parameters())
    with shared.load_module(model, "toy", domain=domain) as handle:
        segment = handle.segment
        assert all(now is before[name] for name, now in model.named_parameters())
        assert model.head.weight is weight and model.embed.weight is weight
        assert all(model.weights[i] is model.layers[i].weight for i in range(3))
        assert model.turned.scale == 3 and type(model.turned) is nn.Parameter
        given = named(toy)
        for name, tensor in named(model).items():
            is_buffer = name in dict(model.named_buffers())
            assert (tensor.data_ptr() == segment[name].data_ptr) != (is_buffer and tensor.numel() > 0), name
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (
                given[name].dtype,
                given[name].shape,
                given[name].stride(),
            ), name
            assert torch.equal(tensor.float(), given[name].float()), name
            assert not tensor.requires_grad
        assert list(model.state_dict()) == list(toy.state_dict())
        assert torch.equal(run(model), run(toy))
        assert (handle.name, handle.version, handle.closed) == ("toy", 1, False)
        buffers = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
        assert handle.copied == buffers and handle.nbytes == segment.nbytes
        model.steps += 1
        model.mean.fill_(2)
        del segment
    assert handle.closed and torch.isfinite(run(model)).all()


# Holds 31.
def test_tied_weights_and_overlapping_tensors_are_stored_once(domain, toy):
    with domain.open("toy") as segment:
        spans = {
            tensor.data_ptr(): tensor.itemsize
            * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
            for tensor in named(toy).values()
            if tensor.numel()
        }
        aligned = sum(-(-size // 256) * 256 for size in spans.values())
        assert aligned - 256 < segment.nbytes <= aligned
        assert segment["head.weight"].data_ptr == segment["embed.weight"].data_ptr


# Holds 259.
def test_put_stores_tied_weights_once(domain, toy):
    state = toy.state_dict()
    with domain.put("state", state) as put, domain.open("state") as opened:
        assert list(opened) == list(state)
        assert opened["head.weight"].data_ptr == opened["embed.weight"].data_ptr
        for name, tensor in state.items():
            assert torch.equal(torch.from_dlpack(opened[name]).float(), tensor.float()), name
        once = {name: tensor for name, tensor in state.items() if name != "head.weight"}
        with domain.put("once", once) as without:
            assert put.nbytes == without.nbytes
    with domain.put("mutable", state, mutable=True) as put:
        # A write to one must not show in the other.
        assert put["head.weight"].data_ptr != put["embed.weight"].data_ptr


# Holds 260.
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: delattr(m, "norm"), ["norm.weight: missing in the model", "norm.bias: missing in the model"]),
        (lambda m: setattr(m, "more", nn.Linear(2, 2)), ["more.weight: unexpected", "more.bias: unexpected"]),
        (
            lambda m: setattr(m, "norm", nn.LayerNorm(8, dtype=torch.float64)),
            [
                "norm.weight: dtype float32 in the segment, float64 in the model",
                "norm.weight: shape [16] in the segment, [8]",
            ],
        ),
        (
            lambda m: setattr(m, "turned", nn.Parameter(torch.empty(16, 8))),
            ["turned: strides [1, 16] in the segment, [8, 1]"],
        ),
        (
            lambda m: setattr(m.head, "weight", nn.Parameter(torch.empty(64, 16))),
            ["head.weight: the memory of embed.weight in the segment, memory of its own in the model"],
        ),
        (
            lambda m: setattr(m.layers[1], "weight", m.layers[0].weight),
            ["layers.1.weight: memory of its own in the segment, the memory of layers.0.weight in the model"],
        ),
        (
            lambda m: (delattr(m, "mean"), setattr(m, "mean", nn.Parameter(torch.empty(16)))),
            ["mean: a buffer in the segment"],
        ),
        (lambda m: setattr(m, "cache", [{"k": torch.empty(3)}]), ["cache[0]['k']: on meta"]),
        (lambda m: setattr(m, "hidden", [nn.Linear(2, 2)]), ["hidden[0]._parameters['weight']: on meta"]),
    ],
)
def test_every_difference_is_named_and_nothing_changes(domain, toy, change, words):
    with torch.device("meta"):
        model = Toy()
        change(model)
    before = named(model)
    with pytest.raises(shared.ModuleMismatch, match="differs from 'toy' version 1") as refused:
        shared.load_module(model, "toy", domain=domain)
    for word in words:
        assert any(difference.startswith(word) for difference in refused.value.differences), refused.value
        assert word in str(refused.value)
    assert all(tensor is before[name] and tensor.is_meta for name, tensor in named(model).items())
    assert pickle.loads(pickle.dumps(refused.value)).differences == refused.value.differences


# Holds 260.
def test_all_differences_are_in_one_error(domain, toy):
    with torch.device("meta"):
        model = Toy()
        del model.norm
        model.more = nn.Parameter(torch.empty(1))
        model.part = nn.Parameter(torch.empty(16, 5, dtype=torch.float64))
        model.cache = torch.empty(2)
    with pytest.raises(shared.ModuleMismatch) as refused:
        shared.load_module(model, "toy", domain=domain, fingerprint={"rank": "1"})
    names = [difference.split(":")[0] for difference in refused.value.differences]
    assert names == ["fingerprint.rank", "norm.weight", "norm.bias", "more", "part", "part", "cache"]


# Holds 260.
def test_class_configuration_and_fingerprint_are_compared(domain):
    class Config:
        def __init__(self, **fields):
            self.fields = fields

        def to_dict(self):
            return self.fields

    def make(kind="Net", **fields):
        model = type(kind, (nn.Linear,), {})(2, 2)
        # Equal, although functions have other addresses, sets another order, and a NaN is not equal to itself.
        model.config = Config(**fields, activation=lambda x: x, skipped={"head", "norm"}, scale=float("nan"))
        return model

    model = make(theta=1e6, rope={"type": "yarn"}, _path="a", transformers_version="1")
    assert shared._manifest.configuration(model.config)["skipped"] == ["head", "norm"]
    shared.share_module(model, "net", domain=domain, fingerprint={"tp": "0/2"})
    same = make(theta=1e6, rope={"type": "yarn"}, _path="b", transformers_version="2")
    shared.load_module(same, "net", domain=domain, fingerprint={"tp": "0/2"})
    assert torch.equal(same.weight, model.weight)
    with pytest.raises(shared.ModuleMismatch) as refused:
        other = make("Other", theta=1e4, rope={"type": "linear"})
        shared.load_module(other, "net", domain=domain, fingerprint={"tp": "1/2"})
    assert list(refused.value.differences) == [
        "class: the segment has a Net, and the model is a Other",
        "config.rope.type: 'yarn' in the segment, 'linear' in the model",
        "config.theta: 1000000.0 in the segment, 10000.0 in the model",
        "fingerprint.tp: '0/2' in the segment, '1/2' in the model",
    ]


# Holds 260.
def test_a_failed_swap_leaves_the_model_as_it_was(domain, toy, monkeypatch):
    torch.manual_seed(1)
    model = Toy()
    expected, before = run(model), {name: t.data_ptr() for name, t in named(model).items()}
    real, calls = torch.utils.swap_tensors, []

    def swap(a, b):
        calls.append(a)
        real(a, b)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.utils, "swap_tensors", swap)
    with pytest.raises(KeyboardInterrupt):
        shared.load_module(model, "toy", domain=domain)
    assert {name: t.data_ptr() for name, t in named(model).items()} == before
    assert model.embed.weight.requires_grad and torch.equal(run(model), expected)
    model.embed.weight.requires_grad_(True)
    assert shared.handle(model) is None


def test_a_loaded_parameter_is_not_trained(domain, toy):
    model = on_meta()
    with torch.inference_mode():
        shared.load_module(model, "toy", domain=domain)
    model.requires_grad_(False)
    with pytest.raises(pw.ReadOnly, match="private=True"):
        model.requires_grad_(True)
    assert model.turned.requires_grad_(False) is model.turned
    other = on_meta()
    shared.load_module(other, "toy", domain=domain)
    shared.load_module(other, "toy", domain=domain)
    with pytest.raises(pw.ReadOnly):
        other.turned.requires_grad_(True)
    # Not shared any more.
    other.norm.half()
    assert other.norm.weight.requires_grad_(True).requires_grad
    # Adapters beside it are.
    adapter = nn.Parameter(torch.zeros(64))
    (model(TOKENS) + adapter).sum().backward()
    assert adapter.grad is not None
    copied = copy.deepcopy(model)
    copied.requires_grad_(False)
    assert copied.embed.weight.data_ptr() != model.embed.weight.data_ptr()
    saved = io.BytesIO()
    torch.save(model.turned, saved)
    saved.seek(0)
    restored = torch.load(saved, weights_only=False)
    with pytest.raises(TypeError, match="set its requires_grad"):
        restored.requires_grad_()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["turned"], toy.turned)


def test_private_parameters_are_trained(domain, toy):
    model = on_meta()
    handle = shared.load_module(model, "toy", domain=domain, private=True)
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert trained == {name for name, tensor in toy.named_parameters() if tensor.requires_grad}
    assert model.head.weight is model.embed.weight
    assert model.turned.stride() == toy.turned.stride() and model.turned.data_ptr() != handle.segment["turned"].data_ptr
    expected = run(toy)
    assert torch.equal(run(model), expected)
    model(TOKENS).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(run(model), expected) and torch.equal(run(toy), expected)


def test_metadata_cannot_replace_the_description(domain, toy):
    noted = shared.share_module(toy, "noted", domain=domain, metadata={"step": "7"})
    assert noted.segment.metadata["step"] == "7"
    with pytest.raises(ValueError, match="choose another"):
        shared.share_module(toy, "noted", domain=domain, metadata={"partywall.torch": "7"})


# Holds 31.
def test_hooks_of_parameters_stay(domain, monkeypatch):
    called = []

    def hooked():
        model = torch.nn.Linear(2, 2)
        model.weight.register_hook(lambda _: called.append("gradient"))
        model.weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
        return model

    def hooks(model):
        called.clear()
        model(torch.ones(1, 2)).sum().backward()
        return called

    shared.share_module(hooked(), "hooked", domain=domain)
    private = hooked()
    shared.load_module(private, "hooked", domain=domain, private=True)
    assert hooks(private) == ["gradient", "accumulated"]
    failed = hooked()
    monkeypatch.setattr("partywall._build.Build.commit", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shared.share_module(failed, "failed", move=True, domain=domain)
    assert hooks(failed.half().float().requires_grad_()) == ["gradient", "accumulated"]


def test_buffers_are_shared_on_request(domain, toy):
    model = on_meta()
    handle = shared.load_module(model, "toy", domain=domain, buffers="shared")
    assert handle.copied == 0
    assert model.rope.data_ptr() == handle.segment["rope"].data_ptr
    with pytest.raises(ValueError, match="buffers="):
        shared.load_module(model, "toy", domain=domain, buffers="both")


# Holds 260.
@pytest.mark.parametrize("move", [False, True])
def test_unsupported_tensors_are_named(domain, move):
    class Odd(torch.Tensor):
        pass

    class Quantised(nn.Parameter):
        pass

    model = nn.Module()
    model.odd = nn.Parameter(torch.zeros(3).as_subclass(Odd))
    model.quantised = Quantised(torch.zeros(3))
    model.quantised.quant_state = {"absmax": torch.zeros(1)}
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("conjugate", torch.zeros(3, dtype=torch.complex64).conj())
    model.lazy = nn.LazyLinear(3)
    model.plain = nn.Linear(2, 2)
    with pytest.raises(shared.UnsupportedTensor) as refused:
        shared.share_module(model, "x", move, domain=domain)
    for word in [
        "odd: Odd is a subclass",
        "quant_state",
        "sparse: it is torch.sparse_coo",
        "conjugate: its conjugation",
        "lazy.weight: UninitializedParameter has no shape",
    ]:
        assert word in str(refused.value)
    assert "plain." not in str(refused.value) and domain.ls() == []
    with pytest.raises(shared.UnsupportedTensor, match="on meta"):
        shared.share_module(on_meta(), "x", move, domain=domain)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        shared.share_module({"w": torch.zeros(1)}, "x", move, domain=domain)


def scripted(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(inner)


def traced(inner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(inner, torch.zeros(2))


# Holds 269.
@pytest.mark.parametrize("make", [scripted, traced])
def test_modules_of_torchscript_are_refused(domain, make):
    plain = nn.Linear(2, 2)
    with shared.share_module(plain, "plain", domain=domain):
        for model, what in ((make(nn.Linear(2, 2)), "the model"), (nn.Sequential(plain, make(nn.Linear(2, 2))), "1")):
            for use in (
                lambda model: shared.share_module(model, "net", domain=domain),
                lambda model: shared.share_module(model, "net", True, domain=domain),
                lambda model: shared.load_module(model, "plain", domain=domain),
            ):
                with pytest.raises(shared.UnsupportedTensor, match=f"cannot share {what}: .* of TorchScript"):
                    use(model)
        assert "net" not in domain
        loaded = nn.Linear(2, 2)
        handle = shared.load_module(loaded, "plain", domain=domain)
        model = make(loaded)
        assert torch.equal(model(torch.ones(2)), plain(torch.ones(2)))
        assert model.weight.data_ptr() == handle.segment["weight"].data_ptr


# Holds 269.
def test_model_whose_memory_was_freed_is_refused(domain):
    for nbytes in (0, 8):
        model = nn.Linear(2, 2)
        model.weight.untyped_storage().resize_(nbytes)
        for move in (False, True):
            with pytest.raises(shared.UnsupportedTensor, match="cannot share weight: it is longer than its storage"):
                shared.share_module(model, "net", move, domain=domain)
    assert "net" not in domain


# Holds 31.
def test_overlapping_parameters_keep_their_views(domain):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.arange(24.0).reshape(6, 4)
            self.rows = nn.Parameter(whole[2:4])
            self.whole = nn.Parameter(whole)
            self.odd = nn.Parameter(whole[:, 1::2])

    model = Fused()
    shared.share_module(model, "fused", domain=domain)
    loaded = on_meta(Fused)
    handle = shared.load_module(loaded, "fused", domain=domain)
    assert handle.nbytes == 96
    assert loaded.rows.data_ptr() - loaded.whole.data_ptr() == 32
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    model.rows = nn.Parameter(torch.zeros(2, 4))
    model.other = nn.Parameter(torch.zeros(6)[1:5])
    storage = model.other.untyped_storage()
    model.last = nn.Parameter(torch.empty(0).set_(storage, 3, (3,), (1,)))
    with pytest.raises(shared.UnsupportedTensor, match="other and last: they overlap"):
        shared.share_module(model, "overlap", domain=domain)


# Holds 267.
def test_float8_needs_a_torch_that_passes_it(domain, toy, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    for refused in (
        lambda: shared.share_module(Toy(), "other", domain=domain),
        lambda: shared.load_module(on_meta(), "toy", domain=domain),
    ):
        with pytest.raises(shared.UnsupportedTensor, match=r"eighth: elements of torch\.float8_e4m3fn need torch 2"):
            refused()


# Holds 261.
def test_move_leaves_the_model_in_shared_memory(domain, toy):
    torch.manual_seed(2)
    model = Toy()
    expected, before = run(model), dict(model.named_parameters())
    model.embed.weight.grad = torch.zeros(64, 16)
    handle = shared.share_module(model, "moved", True, domain=domain)
    assert shared.handle(model) is handle
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and not parameter.requires_grad
        assert parameter.data_ptr() == handle.segment[name].data_ptr
    assert model.head.weight is model.embed.weight and model.weights[0] is model.layers[0].weight
    assert torch.equal(run(model), expected)
    model.mean.zero_()
    other = on_meta()
    shared.load_module(other, "moved", domain=domain)
    assert torch.equal(run(other), expected)
    with pytest.raises(pw.ReadOnly):
        model.requires_grad_(True)


# Holds 261.
@pytest.mark.parametrize(("count", "large", "most"), [(300, 5000, 20_000), (150, 1000, 12_080)])
def test_move_allocates_chunk_by_chunk(domain, socket, count, large, most):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.full((1000,), float(i)) for i in range(count))
            self.large = nn.Parameter(torch.ones(large))

    model = Wide()
    shared.share_module(model, "wide", move=True, domain=domain)
    show = [pw._program.PROGRAM, "--socket", socket, "show", "wide", "--json"]
    shown = subprocess.run(show, capture_output=True, check=True, timeout=WATCHDOG)
    chunks = json.loads(shown.stdout)["chunks"]
    # A version has at most 128 chunks. For 150 tensors of equal size that takes two hundredths of the model.
    assert 50 < len(chunks) <= 128 and max(chunks) <= most
    loaded = on_meta(Wide)
    shared.load_module(loaded, "wide", domain=domain)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


# Holds 262.
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 8, 11])
def test_a_failed_move_leaves_a_working_model(domain, monkeypatch, at):
    torch.manual_seed(3)
    model = Toy()
    expected, flags = run(model), {name: p.requires_grad for name, p in model.named_parameters()}
    real, calls = torch.utils.swap_tensors, []

    def swap(a, b):
        if len(calls) == at:
            monkeypatch.setattr(torch.utils, "swap_tensors", real)
            raise MemoryError("injected")
        calls.append(a)
        real(a, b)

    monkeypatch.setattr(torch.utils, "swap_tensors", swap)
    with pytest.raises(MemoryError, match="injected"):
        shared.share_module(model, "moved", move=True, domain=domain)
    assert domain.ls() == []
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert torch.equal(run(model), expected)
    model(TOKENS).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(run(model), expected)
    # And it can be moved again.
    expected = run(model)
    model.zero_grad()
    shared.share_module(model, "moved", move=True, domain=domain)
    assert torch.equal(run(model), expected)


# Holds 262.
def test_a_name_that_exists_is_refused_before_the_model_moves(domain, toy):
    model = Toy()
    with pytest.raises(pw.NameExists):
        shared.share_module(model, "toy", move=True, domain=domain, if_absent=True)
    assert model.head.weight.requires_grad and shared.handle(model) is None


@pytest.fixture
def refused(domain, monkeypatch):
    """Moves a model, and has the commit be refused: the name appears meanwhile. Returns the exception."""
    real = torch.utils.swap_tensors

    def swap(a, b):
        if "toy" not in domain:
            domain.put("toy", torch.ones(1))
        real(a, b)

    def move(model):
        monkeypatch.setattr(torch.utils, "swap_tensors", swap)
        with pytest.raises(pw.NameExists) as refused:
            shared.share_module(model, "toy", move=True, domain=domain, if_absent=True)
        monkeypatch.setattr(torch.utils, "swap_tensors", real)
        return refused.value

    return move


# Holds 262.
def test_a_refused_commit_leaves_a_working_model(domain, refused):
    torch.manual_seed(3)
    model = Toy()
    expected, flags = run(model), {name: p.requires_grad for name, p in model.named_parameters()}
    identities = [id(parameter) for parameter in model.parameters()]
    assert refused(model).__notes__ == ["more: partywall explain name-exists"]
    assert torch.equal(run(model), expected)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert [id(parameter) for parameter in model.parameters()] == identities
    model(TOKENS).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    trained = run(model)
    assert not torch.equal(trained, expected)
    # And it can be moved again.
    model.zero_grad()
    shared.share_module(model, "moved", move=True, domain=domain)
    assert torch.equal(run(model), trained)


# Holds 262.
def test_overlapping_parameters_still_overlap_after_a_refused_commit(refused):
    class Overlapping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.arange(12.0)
            self.all = torch.nn.Parameter(base)
            self.columns = torch.nn.Parameter(base.view(3, 4).t()[1:3])

    model = Overlapping()
    refused(model)
    assert model.columns.tolist() == [[1, 5, 9], [2, 6, 10]] and model.columns.stride() == (1, 4)
    with torch.no_grad():
        model.all[5] = 50
    assert model.columns[0, 1] == 50 and model.all.requires_grad and model.columns.requires_grad


# Holds 262.
def test_parameters_without_room_after_a_refused_commit_are_named(refused, monkeypatch):
    model = Toy()
    expected = run(model)
    real, calls = torch.empty, []

    def empty(*arguments, **options):
        if options.get("dtype") is torch.uint8:
            calls.append(arguments)
            if len(calls) > 1:
                raise MemoryError("injected")
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    _more, note = refused(model).__notes__
    assert f"{len(calls) - 1} parameters lie in frozen memory" in note and "(MemoryError) and others" in note
    assert torch.equal(run(model), expected), "they can be read"
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert flags.count(True) == 1, "the first one has been copied"


def test_views_prevent_a_move_before_anything_is_allocated(domain):
    model = Toy()
    view = model.embed.weight[:3]
    with pytest.raises(shared.TensorInUse, match="embed.weight has a live view"):
        shared.share_module(model, "moved", move=True, domain=domain)
    del view
    assert domain.ls() == [] and model.embed.weight.requires_grad
    with pytest.raises(ValueError, match="moves within its device"):
        shared.share_module(model, "moved", move=True, domain=domain, device="cuda:0")


# Holds 263.
def test_the_lease_ends_with_the_model(domain, socket):
    torch.manual_seed(0)
    model = Toy()
    with shared.share_module(model, "toy", domain=domain) as handle:
        loaded = on_meta()
        shared.load_module(loaded, "toy", domain=domain)
        again = shared.load_module(loaded, "toy", domain=domain)
        assert shared.handle(loaded) is again and handle.version == 1
        first = on_meta()
        kept = shared.load_module(first, "toy", domain=domain)
        del first
        gc.collect()
        assert kept.closed
    # The name is withdrawn, and the memory stays for the model.
    assert domain.ls() == [] and torch.equal(run(loaded), run(model))
    del loaded
    gc.collect()
    assert again.closed and pw._native.flush(WATCHDOG)


# Holds 263.
def test_a_model_survives_its_process(socket, child):
    code = """
    import torch, partywall.torch
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    partywall.torch.share_module(model, "net", kept=True)
    say(model(torch.ones(8)).tolist())
    told()
    """
    sharing = child(code, PARTYWALL_SOCKET=socket)
    expected = sharing.says()
    sharing.kill()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pw.connect(socket=socket) as domain:
        shared.load_module(model, "net", timeout=30, domain=domain)
        assert str(model(torch.ones(8)).tolist()) == expected


def test_a_write_to_a_loaded_parameter_ends_the_process(domain, socket, toy, child):
    writer = child(
        """
        import torch, partywall.torch
        model = torch.nn.Linear(2, 2)
        partywall.torch.share_module(model, "net", move=True)
        say("ready")
        model.weight.data.add_(1)
        say("written")
        """,
        PARTYWALL_SOCKET=socket,
    )
    assert writer.says() == "ready" and writer.says() == ""


def test_names_without_a_model_are_refused(domain):
    with domain.put("plain", torch.ones(3)):
        with pytest.raises(pw.WrongKind, match="holds no model"):
            shared.load_module(on_meta(), "plain", domain=domain)
    wrong = ['{"format": 1}', '{"format": 1, "kinds": "pp"}', '{"format": 1, "kinds": "p", "more": 1}']
    complete = {"format": 1, "model": "Toy", "config": None, "fingerprint": {}, "kinds": "p"}
    wrong += [json.dumps(complete | other) for other in ({"kinds": "x"}, {"fingerprint": None}, {"checksums": "0"})]
    for text in ["", "[]", "{}", *wrong]:
        with domain.put("other", torch.ones(3), metadata={"partywall.torch": text}):
            with pytest.raises(pw.WrongKind, match="another version"):
                shared.load_module(on_meta(), "other", domain=domain)
    with pytest.raises(pw.NameNotFound):
        shared.load_module(on_meta(), "nowhere", domain=domain)
    with pytest.raises(TypeError, match="domain="):
        shared.load_module(on_meta(), "nowhere", domain="default")
    for fingerprint in (["a"], {"a": 1}):
        with pytest.raises(TypeError, match="fingerprint= maps strings to strings"):
            shared.share_module(Toy(), "other", fingerprint=fingerprint, domain=domain)


def test_tensors_outside_of_pools_are_not_shareable():
    for tensor in (torch.ones(3), torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        assert not shared.is_shareable(tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pool_without_a_gpu_raises_what_torch_says(domain):
    with pytest.raises((RuntimeError, AssertionError), match="NVIDIA driver|CUDA enabled"):
        domain.torch_pool("pool", size=1 << 20)


def test_recurrent_modules_are_moved_and_loaded(domain):
    torch.manual_seed(0)
    model, tokens = nn.LSTM(4, 4, 2), torch.randn(3, 1, 4)
    with torch.no_grad():
        expected = model(tokens)[0]
    shared.share_module(model, "lstm", move=True, domain=domain)
    loaded = on_meta(lambda: nn.LSTM(4, 4, 2))
    handle = shared.load_module(loaded, "lstm", domain=domain)
    for module in (model, loaded):
        with torch.no_grad():
            assert torch.equal(module(tokens)[0], expected)
        assert all(a() is b for a, b in zip(module._flat_weight_refs, module._flat_weights, strict=True))
    assert loaded.weight_hh_l1.data_ptr() == handle.segment["weight_hh_l1"].data_ptr


def test_the_default_connection_follows_a_new_broker(socket, monkeypatch):
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    for _ in range(2):
        with shared.share_module(nn.Linear(2, 2), "net"):
            shared.load_module(nn.Linear(2, 2), "net")
        subprocess.run([pw._program.PROGRAM, "--socket", socket, "stop", "--force"], check=True, timeout=WATCHDOG)


# Holds 31.
def test_tens_of_thousands_of_tensors(domain):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ParameterList(torch.full((4,), float(i)) for i in range(12_000))

    shared.share_module(Experts(), "moe", domain=domain)
    model = on_meta(Experts)
    shared.load_module(model, "moe", domain=domain)
    assert [float(model.experts[i][0]) for i in (0, 5_000, 11_999)] == [0, 5_000, 11_999]


def test_shared_modules_and_cycles_have_all_their_names(domain):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a
            self.a.parent = self

    model = Net()
    shared.share_module(model, "net", domain=domain)
    with domain.open("net") as segment:
        assert list(segment) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    loaded = on_meta(Net)
    shared.load_module(loaded, "net", domain=domain)
    assert loaded.a is loaded.b and torch.equal(loaded.b.weight, model.a.weight)


def test_import_of_the_package_imports_no_torch():
    code = "import sys, partywall, partywall.integrations; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WATCHDOG)
