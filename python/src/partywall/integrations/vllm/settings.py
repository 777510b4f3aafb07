"""What `--model-loader-extra-config` says to the loader. Importing this module imports neither torch nor vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Mode = Literal["auto", "shared", "copy"]
"""What the engine makes of the weights: maps them if it can, maps them or refuses, or copies them."""


@dataclass(frozen=True)
class Settings:
    """The settings of the loader."""

    name: str
    """The name of the weights. Each rank appends its own part, such as `/tp0of2`."""
    domain: str | None = None
    """The domain, as for `partywall.connect`."""
    socket: str | None = None
    """The broker's socket, in place of a domain."""
    timeout: float | None = 1800.0
    """Seconds that an engine waits while another one loads the weights; `None` waits as long as that one lives."""
    mode: Mode = "auto"
    """What the engine makes of the weights."""
    load_format: str = "auto"
    """The load format with which the first engine loads the weights."""

    @classmethod
    def read(cls, given: Any) -> "Settings":
        """Checks the dictionary that vLLM was given. Raises `ValueError`, which names what is wrong."""
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(f"model_loader_extra_config is {given!r}, but must be a dictionary")
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ValueError(
                f"model_loader_extra_config has unknown keys: {', '.join(map(repr, unknown))}; "
                f"the load format partywall knows {', '.join(known)}"
            )
        if "name" not in given:
            raise ValueError(
                "model_loader_extra_config has no 'name': the load format partywall needs the name of the weights, "
                """such as {"name": "llama"}"""
            )
        made = cls(**given)
        for key in "name", "load_format":
            value = getattr(made, key)
            if not isinstance(value, str) or not value:
                raise _wrong(key, value, "a string that is not empty")
        for key in "domain", "socket":
            if not isinstance(value := getattr(made, key), str | None):
                raise _wrong(key, value, "a string")
        timeout = made.timeout
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
        ):
            raise _wrong("timeout", timeout, "a number of seconds, 0 or more, or null")
        if made.mode not in get_args(Mode):
            raise _wrong("mode", made.mode, " or ".join(map(repr, get_args(Mode))))
        if made.load_format.lower() == "partywall":
            raise _wrong("load_format", made.load_format, "the load format of the checkpoint, such as 'auto'")
        return made


def _wrong(key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"model_loader_extra_config[{key!r}] is {value!r}, but must be {wanted}")


LAYOUT = "partywall.vllm"
"""The key in the metadata of a segment that says which layout its weights have."""

PROCESSED = "processed"
"""The layout of weights as an engine uses them."""

LOADED = "loaded"
"""The layout of weights as they were loaded, before vLLM has processed them."""
