# Holds 274.
"""Models of torch that advance to another version at their addresses, on a real GPU: captured graphs show it."""

import os

import pytest

import partywall as pw

from .test_sharing import assert_all_comes_back, free

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
nn = torch.nn
shared = pytest.importorskip("partywall.torch")
from partywall.torch import _checksum, _manifest  # noqa: E402

MIB = 1 << 20
LAYERS = 8
WIDTH = 2048


class Uniform(nn.Module):
    """A model whose parameters and buffer all consist of one number."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("scale", torch.empty(WIDTH))
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.fill_(number)

    def forward(self) -> torch.Tensor:
        """Returns the least and the greatest number in it."""
        tensors = (*self.parameters(), self.scale)
        least = torch.stack([tensor.min() for tensor in tensors]).min()
        return torch.stack([least, torch.stack([tensor.max() for tensor in tensors]).max()])


def version(domain, number: int, **options) -> None:
    """Shares a model of this number as the next version of `net`."""
    with torch.device("cuda"):
        shared.share_module(Uniform(number), "net", domain=domain, **options)


@pytest.fixture
def loaded(domain):
    """A loaded model, and its handle."""
    version(domain, 1)
    with torch.device("meta"):
        model = Uniform()
    handle = shared.load_module(model, "net", domain=domain)
    # The first use of kernels allocates.
    with torch.no_grad():
        model()
    return model, handle


def captured(model):
    """Captures the model in a graph. Returns a function that launches it and returns the numbers in the model."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        numbers = model()

    def launch():
        graph.replay()
        return numbers.tolist()

    return launch


def test_captured_graph_shows_each_version_whole(domain, loaded):
    model, handle = loaded
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), model.scale)]
    view = model.layers[0].weight.detach()[1:]
    launch = captured(model)
    assert launch() == [1, 1]
    for number in range(2, 12):
        version(domain, number)
        assert launch() == [number - 1, number - 1]
        assert handle.advance(stable_address=True) == number
        assert launch() == [number, number] and view.min().item() == number
    assert [tensor.data_ptr() for tensor in (*model.parameters(), model.scale)] == addresses
    with pytest.raises(pw.ReadOnly, match="net@11"), shared.guard(), torch.no_grad():
        model.layers[0].weight.add_(1)


def test_fifty_advances_leave_nothing(domain, loaded):
    model, handle = loaded
    launch = captured(model)

    def advance(number):
        version(domain, number)
        assert handle.advance(stable_address=True) == number
        assert launch() == [number, number]

    for number in range(2, 6):
        advance(number)
    before = free()
    for number in range(6, 56):
        advance(number)
    # The broker frees the memory of a former version a little later.
    assert_all_comes_back(before - 32 * MIB)
    assert domain.holders("net") == {55: [os.getpid()]}


def test_other_addresses_show_the_new_version_too(domain, loaded):
    model, handle = loaded
    before = model.layers[0].weight.data_ptr()
    version(domain, 2)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        former = model()
        assert handle.advance() == 2
        assert former.tolist() == [1, 1] and model().tolist() == [2, 2]
    assert model.layers[0].weight.data_ptr() != before


def test_streams_are_those_to_wait_for(domain, loaded):
    model, handle = loaded
    version(domain, 2)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        # Does not use the model.
        torch.cuda._sleep(100_000_000)
    with torch.cuda.stream(stream), torch.no_grad():
        former = model()
    assert handle.advance(stream, stable_address=True, streams=[torch.cuda.current_stream()]) == 2
    assert former.tolist() == [1, 1]
    with torch.cuda.stream(stream), torch.no_grad():
        assert model().tolist() == [2, 2]


def test_advance_is_refused_during_a_capture(domain, loaded):
    model, handle = loaded
    version(domain, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        numbers = model()
        with pytest.raises(pw.Captured):
            handle.advance(stable_address=True)
    graph.replay()
    assert numbers.tolist() == [1, 1] and handle.version == 1
    assert handle.advance(stable_address=True) == 2
    graph.replay()
    assert numbers.tolist() == [2, 2]


# Holds 275.
def test_graph_shows_a_verified_version_and_no_damaged_one(domain, loaded, monkeypatch):
    model, handle = loaded
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), model.scale)]
    launch = captured(model)
    version(domain, 2, checksums=True)
    assert handle.advance(stable_address=True, verify=True) == 2 and launch() == [2, 2]
    sums = _manifest.Manifest.read(handle.segment).checksums
    with monkeypatch.context() as patched:
        # As if another process had written the third version: it has the checksums of the second.
        patched.setattr(_checksum, "checksums", lambda _: sums)
        version(domain, 3, checksums=True)
    with pytest.raises(shared.ChecksumMismatch, match="version 3 of 'net' is damaged: "):
        handle.advance(stable_address=True, verify=True)
    assert handle.version == 2 and launch() == [2, 2]
    assert [tensor.data_ptr() for tensor in (*model.parameters(), model.scale)] == addresses
    assert handle.advance(stable_address=True) == 3 and launch() == [3, 3]


def test_other_layouts_are_refused(domain, loaded):
    model, handle = loaded
    with torch.device("cuda"):
        other = Uniform(2)
    shared.share_module(other, "net", domain=domain, move=True)
    with pytest.raises(pw.LayoutChanged, match="chunk"):
        handle.advance(stable_address=True)
    assert handle.version == 1 and model().tolist() == [1, 1]
    assert handle.advance() == 2 and model().tolist() == [2, 2]
