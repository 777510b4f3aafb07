"""The `partywall` program, which is installed with the package."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_NAME = "bin/partywall"


def _places() -> Iterator[Path]:
    """Returns where the program may be, the most certain place first."""
    packages = Path(__file__).parents[1]
    # What an installer has written. `importlib.metadata` would take longer than the rest of the import.
    for record in packages.glob("partywall-*.dist-info/RECORD"):
        for line in record.read_text().splitlines():
            path = line.split(",")[0]
            if path.endswith(_NAME):
                yield Path(os.path.normpath(packages / path))
    # `pip install --target` moves what it has recorded.
    yield packages / _NAME
    yield Path(sys.prefix) / _NAME


PROGRAM = next((place for place in _places() if place.exists()), Path(sys.prefix) / _NAME)


def main() -> None:
    """Replaces this process by the program."""
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
