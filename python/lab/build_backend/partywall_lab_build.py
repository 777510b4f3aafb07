"""Builds the wheel of `partywall-lab`: the program, the simulated driver's library and the programs of labs that are not
in `partywall-lab` in one command, then maturin, which packs the program with the others beside it.

`PARTYWALL_PROFILE` names the cargo profile of all; the default is `release`. `PARTYWALL_BUILD` has the arguments of cargo
where they belong to a larger build.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import maturin
from maturin import get_requires_for_build_wheel

__all__ = ["build_sdist", "build_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "python/lab/data/scripts"
CARGO = ROOT / "python/build_backend/cargo.sh"
PACKAGES = "-p partywall-lab -p partywall-render -p partywall-simcuda-library"


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    # maturin refuses a folder of data that is missing, although it does not read it here.
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return str(maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    profile = os.environ.get("PARTYWALL_PROFILE", "release")
    os.environ.setdefault("PARTYWALL_BUILD", f"build --locked --profile {profile} {PACKAGES}")
    os.environ["PARTYWALL_CARGO"] = os.environ.get("CARGO", "cargo")
    os.environ["CARGO"] = str(CARGO)
    built = subprocess.run([CARGO, "rustc"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    files = [Path(name) for line in built.stdout.splitlines() for name in json.loads(line).get("filenames", [])]
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    for wanted in ["libsimcuda.so", "partywall-render"]:
        [file] = [file for file in files if file.name == wanted]
        shutil.copy2(file, SCRIPTS / wanted)
    os.environ["MATURIN_PEP517_ARGS"] = f"--profile={profile} {os.environ.get('MATURIN_PEP517_ARGS', '')}"
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("there is no source distribution: the wheel is built from a clone (pip install ./python/lab)")
