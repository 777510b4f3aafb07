"""The versions of torch that parts of the package need."""

import torch

from partywall._errors import TorchTooOld


def is_older(major: int, minor: int) -> bool:
    """Returns whether torch is older than a version. A vendor's build ahead of the release counts as the release."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2]) < (major, minor)


def require(what: str, major: int, minor: int) -> None:
    """Raises `TorchTooOld` if torch is older than the version that something needs."""
    if is_older(major, minor):
        raise TorchTooOld(
            f"{what} needs torch {major}.{minor} or later, and this is torch {torch.__version__}",
            "upgrade torch",
            "torch-too-old",
        )
