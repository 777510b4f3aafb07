"""Streams of the libraries that are loaded."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from partywall._streams import handle


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """Removes all libraries; a test adds those that it needs."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)


def stream(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (0, 0),
        (7, 7),
        (stream(__cuda_stream__=lambda: (0, 8)), 8),
        (stream(__cuda_stream__=(0, 9)), 9),
        (stream(cuda_stream=10), 10),
        (stream(ptr=11), 11),
        (stream(handle=12), 12),
        (stream(handle=ctypes.c_void_p(13)), 13),
        (stream(handle=ctypes.c_void_p(0)), 0),
    ],
)
def test_streams_of_all_libraries_are_known(given, known):
    assert handle(given, 0) == known


@pytest.mark.parametrize("given", ["stream", 1.5, object(), stream()])
def test_a_value_that_is_not_a_stream_is_refused(given):
    with pytest.raises(TypeError, match="not a CUDA stream"):
        handle(given, 0)


def test_the_default_is_torchs_current_stream_then_cupys_then_none(monkeypatch):
    assert handle(None, 1) is None
    cupy = stream(cuda=stream(get_current_stream=lambda device: stream(ptr=20 + device)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert handle(None, 1) == 21
    used = False
    torch = stream(
        cuda=stream(is_initialized=lambda: used, current_stream=lambda device: stream(cuda_stream=30 + device))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert handle(None, 1) == 21
    used = True
    assert handle(None, 1) == 31


@pytest.mark.parametrize("half", [stream(), stream(cuda=stream())])
def test_libraries_that_are_just_being_imported_have_no_stream(monkeypatch, half):
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, half)
    assert handle(None, 0) is None
