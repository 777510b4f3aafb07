# Holds 31.
"""Models of torch and transformers in the memory of a real GPU: identity, peaks, and a writer that is stopped."""

import os

import pytest

import partywall as pw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
nn = torch.nn
shared = pytest.importorskip("partywall.torch")

MIB = 1 << 20
SLACK = 256 * MIB


def stack(layers: int, width: int = 4096, device: str = "cuda"):
    """Makes a model of `layers` matrices of `width` x `width` in bf16, with tied ends, a buffer and small tensors."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers))
            self.tied = self.layers[0].weight
            self.register_buffer("scale", torch.full((width,), 2.0, dtype=torch.bfloat16), persistent=False)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x * self.scale))
            return x @ self.tied

    with torch.device(device):
        return Stack()


def used() -> int:
    """Returns the bytes that the driver counts as used on the GPU."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(model):
    """Runs the model without a graph for backward(), which would be a use of its parameters."""
    with torch.no_grad():
        return model(torch.ones(4, 4096, dtype=torch.bfloat16, device="cuda"))


def test_loaded_model_is_the_shared_one_in_place(domain):
    model = stack(4)
    shared.share_module(model, "net", domain=domain)
    loaded = stack(4, device="meta")
    before = dict(loaded.named_parameters())
    handle = shared.load_module(loaded, "net", domain=domain)
    for name, parameter in loaded.named_parameters():
        assert parameter is before[name] and parameter.data_ptr() == handle.segment[name].data_ptr
    assert loaded.tied is loaded.layers[0].weight
    assert loaded.scale.data_ptr() != handle.segment["scale"].data_ptr and handle.copied == loaded.scale.nbytes
    loaded.scale.fill_(2)
    assert torch.equal(run(loaded), run(model))


def test_loading_allocates_the_buffers_alone(domain):
    shared.share_module(stack(16), "net", domain=domain)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, before = torch.cuda.max_memory_reserved(), used()
    loaded = stack(16, device="meta")
    shared.load_module(loaded, "net", domain=domain)
    assert torch.cuda.max_memory_reserved() - reserved <= 2 * MIB and used() - before <= 64 * MIB
    assert torch.isfinite(run(loaded)).all()


# Holds 261.
def test_move_needs_room_for_two_chunks(domain, monkeypatch):
    model = stack(64)
    expected = run(model)
    torch.cuda.empty_cache()
    size = sum(parameter.nbytes for parameter in model.parameters())
    chunk = max(size // 100, max(parameter.nbytes for parameter in model.parameters()))
    before, peaks, empty = used(), [0], torch.cuda.empty_cache

    def sampled() -> None:
        # The most is used behind the copies and before the sources are given back.
        peaks.append(used())
        empty()

    monkeypatch.setattr(torch.cuda, "empty_cache", sampled)
    handle = shared.share_module(model, "net", move=True, domain=domain)
    assert len(peaks) > 10
    assert max(peaks) - before <= 2 * chunk + SLACK
    assert used() - before <= SLACK
    assert all(p.data_ptr() == handle.segment[name].data_ptr for name, p in model.named_parameters())
    assert torch.equal(run(model), expected)


# Holds 262.
def test_a_move_without_memory_leaves_a_working_model(domain):
    model = stack(32)
    expected = run(model)
    torch.cuda.empty_cache()
    # Leaves room for a few chunks only. The memory that the move gives back is taken at once.
    taken, free = [], torch.cuda.mem_get_info()[0]
    taken.append(torch.empty(free - 128 * MIB, dtype=torch.uint8, device="cuda"))
    real, calls = torch.cuda.empty_cache, []

    def grab() -> None:
        real()
        calls.append(0)
        if len(calls) < 6:
            return
        available = torch.cuda.mem_get_info()[0] - 16 * MIB
        if available > 0:
            taken.append(torch.empty(available, dtype=torch.uint8, device="cuda"))

    torch.cuda.empty_cache = grab
    try:
        with pytest.raises(pw.OutOfMemory):
            shared.share_module(model, "net", move=True, domain=domain)
    finally:
        torch.cuda.empty_cache = real
    taken.clear()
    real()
    # Some chunks had moved, and memory was gone when the next was allocated.
    assert len(calls) >= 6 and domain.ls() == [] and torch.equal(run(model), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    shared.share_module(model, "net", move=True, domain=domain)
    assert torch.equal(run(model), expected)


def test_tensors_above_4_gib_and_of_every_kind(domain):
    free = torch.cuda.mem_get_info()[0]
    if free < 14 << 30:
        pytest.skip("needs 14 GiB of free GPU memory")
    model = nn.Module()
    model.large = nn.Parameter(torch.empty((4 << 30) + 4096, dtype=torch.uint8, device="cuda"), requires_grad=False)
    model.large[-3:] = torch.tensor([1, 2, 3], device="cuda")
    model.eighth = nn.Parameter(torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn), requires_grad=False)
    model.packed = nn.Parameter(torch.full((64, 32), 0x12, dtype=torch.uint8, device="cuda"), requires_grad=False)
    model.turned = nn.Parameter(torch.randn(64, 32, device="cuda").t())
    model.none = nn.Parameter(torch.empty(0, 3, device="cuda"))
    handle = shared.share_module(model, "kinds", move=True, domain=domain)
    loaded = nn.Module()
    with torch.device("meta"):
        for name, parameter in model.named_parameters():
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            setattr(loaded, name, nn.Parameter(empty, requires_grad=False))
    shared.load_module(loaded, "kinds", domain=domain)
    assert loaded.large[-3:].tolist() == [1, 2, 3] and handle.nbytes > 4 << 30
    assert torch.equal(loaded.eighth.float(), model.eighth.float())
    assert torch.equal(loaded.turned, model.turned) and loaded.turned.stride() == (1, 32)


# Holds 264.
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_from_name_reserves_nothing_for_a_second_copy(domain, kind):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from partywall.integrations.transformers import from_name

    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"num_hidden_layers": 16, "vocab_size": 32000}
    if kind == "Mixtral":
        sizes |= {"num_local_experts": 4, "num_hidden_layers": 4}
    cls = getattr(transformers, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("cuda"):
        model = cls._from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.arange(16, device="cuda").reshape(1, 16)
    with torch.no_grad():
        expected = model(tokens).logits
    shared.share_module(model, "llm", move=True, domain=domain)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_reserved()
    loaded = from_name(cls, getattr(transformers, f"{kind}Config")(**sizes), "llm", domain=domain)
    assert torch.cuda.max_memory_reserved() - before <= SLACK
    segment = shared.handle(loaded).segment
    assert all(parameter.data_ptr() == segment[name].data_ptr for name, parameter in loaded.named_parameters())
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)


def test_a_write_to_a_loaded_parameter_ends_its_process_alone(domain, socket, child):
    model = stack(2)
    expected = run(model)
    shared.share_module(model, "net", domain=domain)
    writer = child(
        """
        import torch, partywall.torch
        with torch.device("meta"):
            model = torch.nn.Module()
            model.layers = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(2))
            model.tied = model.layers[0].weight
            model.register_buffer("scale", torch.empty(4096, dtype=torch.bfloat16), persistent=False)
        class Stack(type(model)):
            pass
        model.__class__ = Stack
        partywall.torch.load_module(model, "net", domain=pw.connect(socket=sys.argv[1]))
        say("loaded")
        try:
            model.layers[0].weight.data.add_(1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            say("illegal" in str(error))
        """,
        socket,
    )
    assert writer.says() == "loaded" and writer.says() == "True"
    loaded = stack(2, device="meta")
    shared.load_module(loaded, "net", domain=domain)
    assert torch.equal(run(loaded), expected)
