"""Builds the wheel of `partywall-fetch` by maturin.

`PARTYWALL_PROFILE` names the cargo profile; the default is `release`. `PARTYWALL_BUILD` has the arguments of cargo
where they belong to a larger build.
"""

import os
from pathlib import Path
from typing import Any

import maturin
from maturin import get_requires_for_build_wheel, prepare_metadata_for_build_wheel

__all__ = ["build_sdist", "build_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]

CARGO = Path(__file__).resolve().parents[2] / "build_backend/cargo.sh"


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    profile = os.environ.get("PARTYWALL_PROFILE", "release")
    os.environ.setdefault("PARTYWALL_BUILD", f"build --locked --profile {profile} -p partywall-fetch")
    os.environ["PARTYWALL_CARGO"] = os.environ.get("CARGO", "cargo")
    os.environ["CARGO"] = str(CARGO)
    os.environ["MATURIN_PEP517_ARGS"] = f"--profile={profile} {os.environ.get('MATURIN_PEP517_ARGS', '')}"
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("there is no source distribution: the wheel is built from a clone (pip install ./python/fetch)")
