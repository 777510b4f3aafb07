# Holds 49.
"""Updates of weights in host memory: what workers read while a trainer goes on, and what deaths leave."""

import contextlib
import time

import numpy as np
import pytest

import partywall as pw

from .. import updates
from ..conftest import WATCHDOG, await_proof

LAST = 10
KILLS = 3


def full(value: int) -> np.ndarray:
    return np.full(updates.ELEMENTS, value, "int32")


@pytest.fixture
def started(domain, child):
    """Starts a program of `updates`."""
    return lambda code, *arguments: child(code, domain.socket, "host", updates.TESTS, *map(str, arguments))


@pytest.fixture
def served(domain):
    """Opens the timelines in which workers signal the versions that they have read."""
    with contextlib.ExitStack() as stack:
        yield lambda number: stack.enter_context(domain.timeline(f"policy/{number}"))


def assert_newest(domain: pw.Domain, version: int) -> None:
    """Asserts that this version is the newest one and complete, and waits until all before are freed."""
    with domain.open("policy") as policy:
        tensors = {name: np.asarray(tensor) for name, tensor in policy.items()}
        assert (policy.version, updates.versions_in(tensors)) == (version, {version})
        del tensors
    assert pw._native.flush(WATCHDOG)
    watchdog = time.monotonic() + WATCHDOG
    for before in range(1, version):
        # The death of a reader has to be proved before.
        while is_there(domain, before):
            assert time.monotonic() < watchdog, f"version {before} is still there"


def is_there(domain: pw.Domain, version: int) -> bool:
    try:
        domain.open("policy", version=version).close()
    except pw.VersionNotFound:
        return False
    return True


# Holds 4.
def test_workers_read_one_version_at_a_time_while_the_trainer_goes_on(domain, started, served):
    workers = [started(updates.FOLLOW, number, LAST) for number in range(4)]
    timelines = [served(number) for number in range(len(workers))]
    policy = updates.weights(full, 0)
    for version in range(1, LAST + 1):
        updates.train(policy)
        for timeline in timelines:
            timeline.wait(version - 1, WATCHDOG)
        assert domain.put("policy", policy).version == version
    assert [worker.says() for worker in workers] == ["all right"] * len(workers)
    for worker in workers:
        worker.tell()
        assert worker.end() == 0
    assert_newest(domain, LAST)
    assert domain.rm("policy") == 0


def test_trainer_killed_inside_a_put_leaves_the_version_before(domain, started, served):
    domain.put("policy", updates.weights(full, 1), kept=True)
    worker = started(updates.FOLLOW, 0, 3)
    read = served(0)
    trainer = started(updates.HALF)
    assert trainer.says() == "inside"
    trainer.kill()
    read.wait(1, WATCHDOG)
    await_proof(domain, trainer.process.pid)
    assert_newest(domain, 1)
    # The next trainers put the version that the first one began, and go on.
    for version in 2, 3:
        assert domain.put("policy", updates.weights(full, version), kept=True).version == version
    assert worker.says() == "all right"
    assert_newest(domain, 3)
    assert domain.rm("policy") == 0


def test_trainers_killed_at_any_moment_leave_whole_versions(domain, started, served):
    worker = started(updates.FOLLOW, 0, 1 << 60)
    read, newest = served(0), 0
    for kill in range(KILLS):
        trainer = started(updates.PUT)
        # Each begins with the version after the last one that was committed.
        for version in range(newest + 1, newest + 3 + kill):
            assert trainer.says() == str(version)
        trainer.kill()
        await_proof(domain, trainer.process.pid)
        with domain.open("policy") as policy:
            newest = policy.version
        read.wait(newest, WATCHDOG)
        assert_newest(domain, newest)
    worker.kill()
    await_proof(domain, worker.process.pid)
    assert domain.rm("policy") == 0


def test_killed_worker_changes_nothing_for_the_others(domain, started):
    policy = updates.weights(full, 0)

    def put() -> int:
        updates.train(policy)
        return domain.put("policy", policy).version

    assert put() == 1
    killed, other = started(updates.HALT), started(updates.FOLLOW, 0, 3)
    assert killed.says() == "inside"
    assert put() == 2
    # The killed one still has the first version open.
    killed.kill()
    assert put() == 3
    assert other.says() == "all right"
    assert_newest(domain, 3)
