"""What `--model-loader-extra-config` says to a loader. Importing this module imports neither torch nor an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import partywall as pw
from partywall.integrations._engine.errors import unsupported

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
        """Checks the dictionary that the engine was given. Raises `ValueError`, which names what is wrong."""
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
        if made.load_format.lower() == LOAD_FORMAT:
            raise _wrong("load_format", made.load_format, "the load format of the checkpoint, such as 'auto'")
        return made

    def connect(self) -> pw.Domain:
        """Connects to the domain of the weights."""
        return pw.connect(self.domain, socket=self.socket)

    def reason_to_copy(self, reasons: Mapping[str, Any]) -> str | None:
        """Returns the first of the `reasons` that applies, that is whose value is true, or that the mode is `copy`;
        `None` if the engine may map weights. Raises `UnsupportedModel` if it may not, but is to."""
        if self.mode == "copy":
            return "the mode is 'copy'"
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        if reason is not None and self.mode == "shared":
            raise unsupported(f"cannot map weights: {reason}", "use mode 'auto' or 'copy'")
        return reason


def _wrong(key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"model_loader_extra_config[{key!r}] is {value!r}, but must be {wanted}")


LOAD_FORMAT = "partywall"
"""The load format of the loaders."""

LAYOUT = "partywall.layout"
"""The key in the metadata of a segment that says which layout its weights have."""

PROCESSED = "processed"
"""The layout of weights as an engine uses them."""

LOADED = "loaded"
"""The layout of weights as they were loaded, before the engine has processed them."""
