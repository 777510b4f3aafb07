# Holds 32.
"""Loaded models that go on to another version, on the CPU: at other addresses."""

import copy
import gc
import os
import re
import threading
import time

import pytest

import partywall as pw

from ..conftest import WATCHDOG
from .test_torch_modules import Toy, named, on_meta, run, shared, torch


def version(domain, seed, **options):
    """Shares a model as the next version of `toy`, and returns it."""
    torch.manual_seed(seed)
    model = Toy()
    shared.share_module(model, "toy", domain=domain, **options)
    return model


def loaded(domain, **options):
    """Loads a model from `toy`, and returns it with its handle."""
    model = on_meta()
    return model, shared.load_module(model, "toy", domain=domain, **options)


def until(condition):
    """Waits for what another thread brings about."""
    end = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_same(model, other):
    theirs = named(other)
    return all(torch.equal(tensor.float(), theirs[name].float()) for name, tensor in named(model).items())


def test_advanced_model_is_the_new_version_in_place(domain):
    version(domain, 0)
    model, handle = loaded(domain)
    objects, weight = named(model), model.embed.weight
    private = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    former = model.norm.weight.data_ptr()
    second = version(domain, 1)
    assert handle.version == 1 and not is_same(model, second)
    assert handle.advance() == 2 and handle.version == handle.segment.version == 2
    assert is_same(model, second) and torch.equal(run(model), run(second))
    assert all(tensor is objects[name] for name, tensor in named(model).items())
    assert model.head.weight is weight and model.weights[0] is model.layers[0].weight and model.turned.scale == 3
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == handle.segment[name].data_ptr and not parameter.requires_grad
    assert model.norm.weight.data_ptr() != former
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == private
    model.mean.fill_(2)
    with pytest.raises(pw.ReadOnly, match="private=True"):
        model.requires_grad_(True)
    assert shared.handle(model) is handle and "toy@2" in repr(handle)


def test_no_newer_version_changes_nothing(domain):
    first = version(domain, 0, kept=True)
    model, handle = loaded(domain)
    addresses = {name: tensor.data_ptr() for name, tensor in named(model).items()}

    def is_unchanged():
        return {name: tensor.data_ptr() for name, tensor in named(model).items()} == addresses and is_same(model, first)

    assert handle.advance() == handle.advance(timeout=0.01) == handle.advance(version=1) == 1 and is_unchanged()
    with pytest.raises(pw.TimeoutError):
        handle.advance(version=2, timeout=0.01)
    domain.rm("toy")
    assert handle.advance() == handle.advance(timeout=0.01) == 1 and is_unchanged()
    second = version(domain, 1)
    assert handle.advance() == 2 and is_same(model, second)


def test_next_version_is_awaited(domain):
    version(domain, 0)
    model, handle = loaded(domain)
    shares = threading.Timer(0.05, version, (domain, 1))
    shares.start()
    assert handle.advance(timeout=WATCHDOG) == 2
    shares.join()


def test_older_version_can_be_chosen_while_it_exists(domain):
    first = version(domain, 0)
    model, handle = loaded(domain)
    with domain.open("toy"):
        version(domain, 1)
        assert handle.advance() == 2
        assert handle.advance(version=1) == 1 and is_same(model, first)
        assert handle.advance() == 2
    until(lambda: list(domain.holders("toy")) == [2])
    with pytest.raises(pw.VersionNotFound):
        handle.advance(version=1)
    assert handle.version == 2


def test_private_parameters_are_overwritten(domain):
    version(domain, 0)
    model, handle = loaded(domain, private=True)
    model(torch.arange(10)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    places = {name: tensor.data_ptr() for name, tensor in named(model).items()}
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    second = version(domain, 1)
    assert handle.advance() == 2 and is_same(model, second)
    assert {name: tensor.data_ptr() for name, tensor in named(model).items()} == places
    assert {name for name, tensor in model.named_parameters() if tensor.requires_grad} == trained


def test_shared_buffers_follow(domain):
    version(domain, 0)
    model, handle = loaded(domain, buffers="shared")
    second = version(domain, 1)
    assert handle.advance() == 2 and is_same(model, second)
    assert model.rope.data_ptr() == handle.segment["rope"].data_ptr


def test_another_model_is_refused_with_all_differences(domain):
    first = version(domain, 0)
    model, handle = loaded(domain)
    other = copy.deepcopy(first)
    other.norm = torch.nn.LayerNorm(8)
    shared.share_module(other, "toy", domain=domain)
    with pytest.raises(shared.ModuleMismatch, match=re.escape("norm.weight: shape [8] in the segment, [16]")):
        handle.advance()
    assert handle.version == 1 and is_same(model, first)
    shared.share_module(first, "toy", domain=domain, fingerprint={"tp": "1/2"})
    with pytest.raises(shared.ModuleMismatch, match="fingerprint"):
        handle.advance()
    domain.put("toy", {"x": torch.zeros(3)})
    with pytest.raises(pw.WrongKind, match="holds no model"):
        handle.advance()
    until(lambda: domain.holders("toy") == {1: [os.getpid()], 4: []})
    second = version(domain, 1)
    assert handle.advance() == 5 and is_same(model, second)


# Holds 266.
def test_parameters_with_views_are_refused(domain):
    first = version(domain, 0)
    model, handle = loaded(domain)
    view = model.norm.weight[1:]
    # Buffers that are overwritten may have views.
    kept = model.mean[:2]
    second = version(domain, 1)
    with pytest.raises(shared.TensorInUse, match=r"norm\.weight has a live view"):
        handle.advance()
    assert handle.version == 1 and is_same(model, first)
    view = model.norm.weight.detach()
    with pytest.raises(shared.TensorInUse, match=r"norm\.weight shares its memory with a tensor outside of the model"):
        handle.advance()
    assert handle.version == 1 and is_same(model, first)
    del view
    assert handle.advance() == 2 and is_same(model, second)
    assert torch.equal(kept, second.mean[:2])


@pytest.mark.parametrize("what", ["swap", "copy"])
def test_failed_advance_leaves_the_version(domain, monkeypatch, what):
    first = version(domain, 0)
    model, handle = loaded(domain)
    addresses = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    version(domain, 1)
    real, calls = torch.utils.swap_tensors, []

    def swap(a, b):
        calls.append(a)
        real(a, b)
        if len(calls) == 5:
            raise KeyboardInterrupt

    def fail(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if what == "swap":
            patched.setattr(torch.utils, "swap_tensors", swap)
        else:
            patched.setattr("partywall.torch._advance.flat", fail)
        with pytest.raises(KeyboardInterrupt):
            handle.advance()
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == addresses
    assert handle.version == 1 and is_same(model, first)
    with pytest.raises(pw.ReadOnly):
        model.requires_grad_(True)
    assert handle.advance() == 2


def test_wrong_uses_say_what_to_do(domain):
    given = version(domain, 0)
    of_trainer = shared.share_module(given, "toy", domain=domain)
    with pytest.raises(ValueError, match="loaded model can advance, and load_module has not made this one"):
        of_trainer.advance()
    model, handle = loaded(domain)
    version(domain, 1)
    with pytest.raises(ValueError, match="streams= says what stable_address=True waits for"):
        handle.advance(streams=[])
    told = '"toy" is host memory; advancing in place needs frozen GPU memory'
    with pytest.raises(pw.WrongKind, match=told) as refused:
        handle.advance(stable_address=True)
    assert "without stable_address" in str(refused.value)
    with domain.open("toy", version=2) as segment, pytest.raises(pw.WrongKind, match="advancing in place"):
        segment.advance()
    assert handle.version == 2 and is_same(model, given)
    # The exception knows the frames, and these the model.
    del model, refused
    gc.collect()
    with pytest.raises(ValueError, match="that of a model that has ended"):
        handle.advance()
    model, handle = loaded(domain)
    handle.close()
    with pytest.raises(pw.Closed):
        handle.advance()


def test_versions_end_with_their_last_model(domain):
    version(domain, 0)
    model, handle = loaded(domain)
    kept = torch.from_dlpack(handle.segment["norm.weight"])
    expected = kept.clone()
    for seed in range(1, 31):
        version(domain, seed)
        assert handle.advance() == seed + 1
    # The tensor keeps the first version, and the others are gone.
    until(lambda: domain.holders("toy") == {1: [os.getpid()], 31: [os.getpid()]})
    assert torch.equal(kept, expected)
    del kept
    until(lambda: domain.holders("toy") == {31: [os.getpid()]})
    del model
    until(lambda: domain.holders("toy") == {31: []})


# Holds 276.
def test_trainer_learns_which_version_each_worker_has(domain, child):
    version(domain, 0)
    code = """
        import pathlib, torch, partywall.torch
        from tests.host.test_torch_modules import Toy
        with pw.connect(socket=sys.argv[1]) as d:
            with torch.device("meta"):
                model = Toy()
            handle = partywall.torch.load_module(model, "toy", domain=d)
            say(handle.version)
            while told():
                say(handle.advance())
    """
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    workers = [child(code, domain.socket, PYTHONPATH=path) for _ in range(2)]
    assert [worker.says() for worker in workers] == ["1", "1"]
    first, second = (worker.process.pid for worker in workers)
    version(domain, 1)
    assert domain.holders("toy") == {1: sorted([first, second]), 2: []}
    workers[0].tell("advance")
    assert workers[0].says() == "2"
    until(lambda: domain.holders("toy") == {1: [second], 2: [first]})
    workers[1].kill()
    until(lambda: domain.holders("toy") == {2: [first]})
    with pytest.raises(pw.NameNotFound):
        domain.holders("none")


# Holds 49.
def test_killed_trainer_leaves_workers_on_their_version(domain, child):
    first = version(domain, 0, kept=True)
    model, handle = loaded(domain)
    trainer = child(
        """
        with pw.connect(socket=sys.argv[1]) as d:
            build = d.create("toy", 1 << 20, "uint8", device="host", kept=True)
            build.write(np.ones(1 << 20, "uint8"))
            say("written")
            told()
        """,
        domain.socket,
    )
    assert trainer.says() == "written"
    trainer.kill()
    until(lambda: len(domain.ps()) == 1)
    assert handle.advance() == 1 and is_same(model, first)
    second = version(domain, 1, kept=True)
    assert handle.advance() == 2 and is_same(model, second)
    until(lambda: domain.holders("toy") == {2: [os.getpid()]})
    assert [row.version for row in domain.ls()] == [2]


def test_guard_knows_the_version_after_an_advance(domain):
    version(domain, 0)
    model, handle = loaded(domain)
    version(domain, 1)
    with shared.guard(), torch.no_grad():
        handle.advance()
        with pytest.raises(pw.ReadOnly, match=r'"norm\.weight" of toy@2'):
            model.norm.weight.add_(1)
        model.mean.add_(1)


# Holds 275.
def test_damage_is_found_on_request(domain, monkeypatch):
    first = version(domain, 0)
    with pytest.raises(pw.WrongKind, match="version 1 of 'toy' was shared without checksums"):
        shared.load_module(on_meta(), "toy", domain=domain, verify=True)
    model, handle = loaded(domain)
    second = version(domain, 1, checksums=True)
    assert handle.advance(verify=True) == 2 and is_same(model, second)
    _, again = loaded(domain, verify=True)
    # As if another process had written the third version in spite of its read-only mapping: it has the sums of the
    # second.
    sums = shared._checksum.checksums(named(second)[name] for name in handle.segment)
    with torch.no_grad():
        second.norm.bias[3] += 1
        second.positions.untyped_storage()[7] ^= 1
    with monkeypatch.context() as patched:
        patched.setattr(shared._checksum, "checksums", lambda _: sums)
        shared.share_module(second, "toy", domain=domain, checksums=True)
    with pytest.raises(shared.ChecksumMismatch, match="version 3 of 'toy' is damaged") as refused:
        handle.advance(verify=True)
    assert refused.value.anchor == "checksum-mismatch" and "is damaged: positions, norm.bias;" in str(refused.value)
    with pytest.raises(shared.ChecksumMismatch):
        shared.load_module(on_meta(), "toy", domain=domain, verify=True)
    assert handle.version == 2 and torch.equal(model.norm.bias, torch.zeros(16))
    assert handle.advance() == 3 and is_same(model, second)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_checksums_depend_on_each_byte(monkeypatch, size):
    torch.manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    whole = shared._checksum.checksums([data])
    # In pieces, and from an address that is no multiple of a word.
    monkeypatch.setattr(shared._checksum, "_PIECE", 16)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert shared._checksum.checksums([data, shifted]) == whole + whole
    for place in range(size):
        changed = data.clone()
        changed[place] ^= 1 << place % 8
        assert shared._checksum.checksums([changed]) != whole
    if size == 100:
        assert shared._checksum.checksums([data.flip(0)]) != whole


def test_handle_of_a_model_that_was_loaded_again_is_closed(domain):
    version(domain, 0)
    model, former = loaded(domain)
    handle = shared.load_module(model, "toy", domain=domain)
    second = version(domain, 1)
    with pytest.raises(pw.Closed, match="because its model was loaded again; advance the handle"):
        former.advance()
    assert handle.advance() == 2 and is_same(model, second)
