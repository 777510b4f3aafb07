"""Builds the wheel of `partywall-lab`: the simulated driver's library first, so that maturin can pack it beside the program.

`PARTYWALL_PROFILE` names the cargo profile of both; the default is `release`.
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


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    # maturin refuses a folder of data that is missing, although it does not read it here.
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return str(maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    profile = os.environ.get("PARTYWALL_PROFILE", "release")
    # With the program, so that both choose the same features of their dependencies and share what is built.
    command = ["cargo", "build", "--locked", "--profile", profile, "--message-format=json"]
    command += ["-p", "partywall-lab", "-p", "partywall-simcuda-library"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    files = [name for line in built.stdout.splitlines() for name in json.loads(line).get("filenames", [])]
    [library] = [name for name in files if name.endswith("/libsimcuda.so")]
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, SCRIPTS / "libsimcuda.so")
    os.environ["MATURIN_PEP517_ARGS"] = f"--profile={profile} {os.environ.get('MATURIN_PEP517_ARGS', '')}"
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("there is no source distribution: the wheel is built from a clone (pip install ./python/lab)")
