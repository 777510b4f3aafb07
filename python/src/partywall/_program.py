"""The `partywall` program, which the package brings along."""

import os
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("_bin") / "partywall"


def main() -> None:
    """Becomes the program."""
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
