"""What other users may open: set by its creator, and shown to everybody who sees it."""

import contextlib
import os

import numpy as np
import pytest

import partywall as pw


def test_each_version_says_whether_it_is_shared(domain):
    assert not domain.put("x", np.zeros(4)).shared
    with domain.put("x", np.zeros(4), shared=True) as segment, domain.open("x") as opened:
        assert (segment.shared, segment.uid, opened.shared) == (True, os.geteuid(), True)
        [row] = domain.ls()
        assert (row.name, row.uid, row.shared) == ("x", os.geteuid(), True)
    with pytest.raises(pw.CannotShare, match="mutable") as raised:
        domain.create("y", (4,), "float32", "host", mutable=True, shared=True)
    assert raised.value.anchor == "cannot-share"
    assert issubclass(pw.OtherUser, PermissionError)


def test_objects_are_created_shared(domain):
    with (
        domain.pool("p", blocks=1, block_bytes=8, device="host", shared=True),
        domain.topic("t", max_bytes=8, device="host", shared=True),
        domain.queue("q", tasks=1, device="host", shared=True),
        domain.timeline("l", writer=True, shared=True) as timeline,
        domain.timeline("l") as waiter,
        contextlib.closing(domain.semaphore("s", 1, shared=True)) as semaphore,
    ):
        assert [row.shared for row in domain.ls()] == [True] * 3
        timeline.signal(1)
        waiter.wait(1, timeout=10)
        with semaphore.acquire(timeout=10):
            assert semaphore.available == 0
