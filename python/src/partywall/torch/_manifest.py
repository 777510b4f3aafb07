"""What a segment says about the model in it, as JSON in its metadata, and the comparison with another model.

The table of the segment already describes the tensors, with their strides and which of them share bytes. The manifest
adds the kind of each, and a fingerprint.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from partywall import _arrays
from partywall._errors import WrongKind
from partywall._native import Tensor
from partywall._segment import Segment
from partywall.torch import _tensors
from partywall.torch._errors import ModuleMismatch
from partywall.torch._tensors import Kind, Named

KEY = "partywall.torch"
"""The key of the manifest in the metadata of a segment."""


CHECKSUM = 16
"""Hexadecimal digits of a checksum."""


@dataclass(frozen=True)
class Manifest:
    """What a segment says about its model."""

    model: str
    """The name of the model's class."""
    config: Any
    """Its configuration as JSON has it; `None` without one."""
    fingerprint: dict[str, str]
    """What the caller adds to be compared."""
    kinds: str
    """The `Kind` of each tensor, in the order of the segment."""
    checksums: str | None = None
    """The checksums of the tensors, in the same order, of `CHECKSUM` digits each, if it was shared with checksums."""

    @classmethod
    def of(
        cls, model: Any, kinds: str, fingerprint: Mapping[str, str] | None, checksums: str | None = None
    ) -> "Manifest":
        """Describes a model."""
        given = fingerprint or {}
        if not (
            isinstance(given, Mapping) and all(isinstance(text, str) for pair in given.items() for text in pair)
        ):
            raise TypeError("fingerprint= maps strings to strings")
        return cls(type(model).__name__, configuration(getattr(model, "config", None)), dict(given), kinds, checksums)

    @classmethod
    def read(cls, segment: Segment) -> "Manifest":
        """Reads the manifest of a segment. Raises `WrongKind` if it has none that this version of Partywall reads."""
        text = segment.metadata.get(KEY)
        if text is None:
            raise WrongKind(
                f"{segment.name!r} holds no model: it was not made by share_module()",
                "open() gives its tensors",
                "no-module",
            )
        try:
            manifest = json.loads(text)
            read = cls(**manifest) if manifest.pop("format") == _FORMAT else None
            count = len(segment)
            if (
                read
                and len(read.kinds) == count
                and set(read.kinds) <= _KINDS.keys()
                and isinstance(read.fingerprint, dict)
                and len(read.checksums or "") in (0, count * CHECKSUM)
            ):
                return read
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # Not what `write` writes: metadata of a file that was put under a name is the file's.
            pass
        raise WrongKind(
            f"the model in {segment.name!r} was shared by another version of Partywall",
            "share it again with the version that loads it",
            "module-format",
        )

    def write(self) -> dict[str, str]:
        """Returns the manifest as metadata."""
        manifest = {"format": _FORMAT, **dataclasses.asdict(self)}
        return {KEY: json.dumps(manifest, separators=(",", ":"))}

    def differences(self, other: "Manifest") -> list[str]:
        """Says how another model's class, configuration and fingerprint differ."""
        found = []
        if self.model != other.model:
            found.append(f"class: the segment has a {self.model}, and the model is a {other.model}")
        found.extend(_fields("config", self.config, other.config))
        found.extend(_fields("fingerprint", self.fingerprint, other.fingerprint))
        return found


def configuration(config: Any) -> Any:
    """Returns a configuration as JSON has it, without what differs between processes that run the same model."""
    if config is not None and callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        return None
    text = json.dumps(_lasting(config), sort_keys=True, default=_text)
    if len(text) > _CONFIG_BYTES:
        return {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.loads(text)


def _lasting(config: Any) -> Any:
    if isinstance(config, Mapping):
        pairs = ((str(key), value) for key, value in config.items())
        return {key: _lasting(value) for key, value in pairs if key not in _PASSING and not key.startswith("_")}
    if isinstance(config, (list, tuple)):
        return [_lasting(value) for value in config]
    if isinstance(config, (set, frozenset)):
        return sorted(map(_text, config))
    return config


def _text(value: Any) -> str:
    # The address of a function or object differs between processes.
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def _fields(path: str, shared: Any, own: Any) -> list[str]:
    if isinstance(shared, dict) and isinstance(own, dict):
        keys = sorted(shared.keys() | own.keys())
        return [text for key in keys for text in _fields(f"{path}.{key}", shared.get(key), own.get(key))]
    # A NaN is not equal to itself.
    same = shared == own or repr(shared) == repr(own)
    return [] if same else [f"{path}: {shared!r} in the segment, {own!r} in the model"]


def check(
    segment: Segment,
    shared: list[Tensor],
    model: Any,
    tensors: list[Named],
    others: Iterable[tuple[str, Any]],
    fingerprint: Mapping[str, str] | None,
) -> dict[str, Kind]:
    """Compares a model with the one in a segment. Returns the kinds of the segment's tensors by their names.

    `others` are the `attributes` of the model.

    Raises `ModuleMismatch`, which names all differences.
    """
    manifest = Manifest.read(segment)
    found = manifest.differences(Manifest.of(model, "", fingerprint))
    there = {tensor.name: tensor for tensor in shared}
    kinds: dict[str, Any] = dict(zip(there, manifest.kinds, strict=True))
    here = {named.name: named for named in tensors}
    found.extend(f"{name}: missing in the model" for name in there if name not in here)
    found.extend(f"{name}: unexpected, the segment has no such tensor" for name in here if name not in there)
    both = [name for name in here if name in there]
    for name in both:
        found.extend(f"{name}: {what}" for what in _compare(there[name], kinds[name], here[name]))
    at_segment = _tensors.ties({name: _tensors.place_in_segment(there[name]) for name in both})
    at_model = _tensors.ties({name: _tensors.place(here[name].tensor) for name in both})
    for name in both:
        if (tie := at_segment.get(name)) != (own := at_model.get(name)):
            found.append(f"{name}: {_tie(name, tie)} in the segment, {_tie(name, own)} in the model")
    for path, tensor in others:
        if tensor.is_meta:
            what = "on meta, and neither parameter nor buffer: register it as a buffer, or make it after loading"
            found.append(f"{path}: {what}")
    if found:
        what = f"the model differs from {segment.name!r} version {segment.version}"
        raise ModuleMismatch(what, tuple(found))
    return kinds


def _compare(shared: Tensor, kind: Kind, own: Named) -> list[str]:
    tensor = own.tensor
    found = []
    if _KINDS[kind] != _KINDS[own.kind]:
        found.append(f"a {_KINDS[kind]} in the segment, a {_KINDS[own.kind]} in the model")
    dtype = _arrays.dtype_name(tensor.dtype)
    if shared.dtype != dtype:
        found.append(f"dtype {shared.dtype} in the segment, {dtype} in the model")
    (shape, strides), (own_shape, own_strides) = (shared.shape, shared.strides), (tensor.shape, tensor.stride())
    if shape != own_shape:
        found.append(f"shape {list(shape)} in the segment, {list(own_shape)} in the model")
    elif strides != own_strides and _tensors.strides(shape, strides) != _tensors.strides(own_shape, own_strides):
        found.append(f"strides {list(strides)} in the segment, {list(own_strides)} in the model")
    return found


def _tie(name: str, tie: tuple[str, int] | None) -> str:
    if tie is None:
        return "memory of its own"
    leader, offset = tie
    if leader == name:
        return "memory with others"
    return f"the memory of {leader}" + (f" {offset:+} bytes" if offset else "")


_FORMAT = 1

_KINDS = {"p": "parameter", "f": "parameter", "b": "buffer", "n": "non-persistent buffer"}

_CONFIG_BYTES = 1 << 18

_PASSING = frozenset(
    (
        # Where the configuration comes from, and what the comparison of tensors covers.
        *("architectures", "dtype", "torch_dtype", "transformers_version"),
        # How a process runs the model.
        *("gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict", "use_cache"),
    )
)
