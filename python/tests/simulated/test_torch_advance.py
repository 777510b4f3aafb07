# Holds 275.
"""Models of torch that advance in place, on the simulated driver.

The tensors of the loaded models are copies: what their segments show is compared.
"""

import contextlib
import os

import pytest

import partywall as pw

from ..conftest import WATCHDOG
from . import driver

torch = pytest.importorskip("torch")
shared = pytest.importorskip("partywall.torch")

from ..host.test_torch_modules import Toy, named, on_meta  # noqa: E402
from . import copies  # noqa: E402

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")

@pytest.fixture(autouse=True)
def copied(monkeypatch):
    """Gives torch copies of what is on the GPU."""
    driver.use()
    monkeypatch.setattr(torch, "from_dlpack", copies.from_dlpack)


@contextlib.contextmanager
def version(domain, seed):
    """Shares a model with checksums as the next version of `toy`, on the GPU, until the end of the block."""
    torch.manual_seed(seed)
    model = Toy()
    with shared.share_module(model, "host", domain=domain, checksums=True) as made, made.segment.pin():
        build = made.segment.to("cuda", name="toy")
        with build.commit():
            yield model


def shows(handle, model):
    """Returns whether the memory of a loaded model has the content of another model."""
    return all(torch.equal(torch.from_dlpack(handle.segment[name]), tensor) for name, tensor in named(model).items())


def test_verified_version_is_mapped_in_place(domain):
    with version(domain, 0):
        model = on_meta()
        handle = shared.load_module(model, "toy", domain=domain, verify=True)
        addresses = {name: handle.segment[name].data_ptr for name in handle.segment}
        with version(domain, 1) as second:
            assert handle.advance(stable_address=True, verify=True) == handle.version == 2
            assert shows(handle, second)
            assert {name: handle.segment[name].data_ptr for name in handle.segment} == addresses
            assert torch.equal(model.mean, second.mean)


def test_damaged_version_is_refused_before_anything_is_unmapped(domain, monkeypatch):
    with version(domain, 0) as first:
        model = on_meta()
        handle = shared.load_module(model, "toy", domain=domain)
        addresses = {name: handle.segment[name].data_ptr for name in handle.segment}
        sums = shared._checksum.checksums(named(first)[name] for name in handle.segment)
        with contextlib.ExitStack() as versions:
            with monkeypatch.context() as patched:
                # As if another process had written the second version: it has the checksums of the first.
                patched.setattr(shared._checksum, "checksums", lambda _: sums)
                versions.enter_context(version(domain, 1))
            with monkeypatch.context() as patched:
                patched.delattr(pw.Segment, "_advance")
                with pytest.raises(shared.ChecksumMismatch, match="version 2 of 'toy' is damaged: turned, "):
                    handle.advance(stable_address=True, verify=True)
            assert handle.version == handle.segment.version == 1
            assert shows(handle, first) and torch.equal(model.mean, first.mean)
            assert {name: handle.segment[name].data_ptr for name in handle.segment} == addresses
        # The refused version is not held.
        assert pw._native.flush(WATCHDOG)
        assert domain.holders("toy") == {1: [os.getpid()]}
