"""What the tests on the simulated driver share."""

from collections.abc import Iterator

import pytest

from .driver import GATES


@pytest.fixture(autouse=True)
def open_gates() -> Iterator[None]:
    """Opens the gates that a failed test has left closed: later tests would wait for their streams."""
    yield
    for gate in GATES:
        gate.open()
    GATES.clear()
