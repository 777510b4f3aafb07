"""Which weights an engine wants: the name of its rank, and the fields that must agree with those in shared memory."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import partywall

CHECKPOINT = "checkpoint"
"""The field that identifies the checkpoint; empty if there are no files that identify it."""


def rank_name(name: str, ranks: Mapping[str, tuple[int, int]]) -> str:
    """Returns the name of a rank's weights, such as `llama/tp0of2`. Groups of one rank, except `tp`, are left out."""
    parts = [f"{key}{rank}of{size}" for key, (rank, size) in ranks.items() if size > 1 or key == "tp"]
    return "/".join([name, *parts])


def common(model: str, revision: str | None, load_format: str, hf_config: Any) -> dict[str, Any]:
    """Returns the fields that every engine has.

    They must be read before the model is loaded, because engines then change the configuration of the quantization.
    """
    from partywall.torch._manifest import configuration

    return {
        CHECKPOINT: checkpoint(model, revision),
        "load_format": load_format,
        "partywall": partywall.__version__,
        "architectures": list(getattr(hf_config, "architectures", None) or []),
        **{f"config.{key}": value for key, value in (configuration(hf_config) or {}).items()},
    }


def fingerprint(values: Mapping[str, Any], ranks: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Returns everything that decides what a rank's weights are, as strings by the names of their fields."""
    values = {**values, **{key: f"{rank} of {size}" for key, (rank, size) in ranks.items()}}
    return {key: _text(value) for key, value in values.items()}


def checkpoint(model: str, revision: str | None) -> str:
    """Identifies a checkpoint: a folder by the headers of its safetensors files, which say what is in them and where,
    and by samples of their data; a model of a hub by its name and revision. Returns an empty string for a folder
    without such files."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision}" if revision else model
    digest = hashlib.sha256()
    # Hidden files are no shards, such as the `._NAME` that macOS puts beside a file.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    for path in files:
        with path.open("rb") as file:
            size = file.read(8)
            digest.update(path.name.encode() + size + file.read(min(int.from_bytes(size, "little"), _MOST_HEADER)))
            # A model that was trained further has the same headers, and reading all data takes as long as loading it.
            start, end = file.tell(), file.seek(0, os.SEEK_END)
            for sample in range(_SAMPLES):
                file.seek(start + (end - start) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest() if files else ""


def differences(shared: Mapping[str, str], own: Mapping[str, str]) -> tuple[str, ...]:
    """Says how the fingerprint of a segment differs from that of an engine. A checkpoint that one of them cannot
    identify is not compared."""
    keys = shared.keys() | own.keys()
    if not (shared.get(CHECKPOINT) and own.get(CHECKPOINT)):
        keys -= {CHECKPOINT}
    return tuple(
        f"{key}: {shared.get(key)!r} in the segment, {own.get(key)!r} in the engine"
        for key in sorted(keys)
        if shared.get(key) != own.get(key)
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


_MOST_HEADER = 100_000_000
"""The format's own limit for the bytes of a header."""

_SAMPLES = 64
"""Places in a file from which bytes are read, at equal distances."""

_SAMPLE = 4096
"""Bytes that are read at each place."""
