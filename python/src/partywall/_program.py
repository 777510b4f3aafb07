"""The `partywall` program, which is part of the package."""

import os
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("_bin") / "partywall"


def main() -> None:
    """Replaces this process by the program."""
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
