"""Builds the wheel: the `partywall` program and the extension in one command, then maturin, which packs both.

The wheel is `cp311-abi3`: one for every Python from 3.11 on, except free-threaded builds, which cannot load it. Its
stubs are generated from the compiled half at each build, so they cannot differ from it.

`PARTYWALL_PROFILE` names the cargo profile; the default is `release`. `PARTYWALL_BUILD` has the arguments of cargo where
they belong to a larger build.
"""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import maturin
from maturin import get_requires_for_build_wheel

__all__ = ["build_wheel", "build_sdist", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "python/data/scripts/partywall"
CARGO = Path(__file__).with_name("cargo.sh")


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    # maturin refuses a folder of data that is missing, although it does not read it here.
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    return str(maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # Without the stable ABI, maturin would build a wheel that enables the GIL again, and such a wheel is not
        # tested.
        raise RuntimeError("free-threaded builds of Python are not supported: use the ordinary build of this version")
    profile = os.environ.get("PARTYWALL_PROFILE", "release")
    os.environ.setdefault("PARTYWALL_BUILD", f"build --locked --profile {profile} -p partywall-cli -p partywall-python")
    os.environ["PARTYWALL_CARGO"] = os.environ.get("CARGO", "cargo")
    os.environ["CARGO"] = str(CARGO)
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(_program(), PROGRAM)
    arguments = os.environ.get("MATURIN_PEP517_ARGS", "")
    os.environ["MATURIN_PEP517_ARGS"] = f"--profile={profile} --generate-stubs {arguments}"
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def _program() -> str:
    built = subprocess.run([CARGO, "rustc"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    artifacts = [message for line in built.stdout.splitlines() if (message := json.loads(line)).get("executable")]
    [program] = [
        artifact["executable"]
        for artifact in artifacts
        if artifact["target"]["name"] == "partywall" and not artifact["profile"]["test"]
    ]
    return str(program)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("there is no source distribution: the package is built from a clone (pip install ./python)")
