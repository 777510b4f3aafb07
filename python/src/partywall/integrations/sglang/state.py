"""What a model keeps beside its tensors. Engines that map weights make it anew, as it is before weights are processed."""

from collections.abc import Mapping
from typing import Any

import torch


def state(model: Any) -> dict[str, str]:
    """Describes what the layers of a model and its parameters keep, by dotted names."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        _describe(name, {key: value for key, value in vars(module).items() if key not in _REGISTRIES}, found, seen)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                _describe(f"{name}.{key}".lstrip("."), vars(parameter), found, seen)
    return found


def added(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Lists what is new or has changed. What is gone is of no use to anybody."""
    return [path for path, value in after.items() if before.get(path) != value]


def _describe(path: str, values: Mapping[Any, Any], found: dict[str, str], seen: set[int], depth: int = 0) -> None:
    for key, value in list(values.items()):
        below = f"{path}.{key}" if path else str(key)
        if type(value) in _SIMPLE:
            found[below] = repr(value)
            continue
        found[below] = type(value).__name__
        if depth == _DEPTH or id(value) in seen or isinstance(value, type | torch.Tensor | torch.nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            _describe(below, value, found, seen, depth + 1)
        elif isinstance(value, list | tuple):
            _describe(below, dict(enumerate(value)), found, seen, depth + 1)
        else:
            _describe(below, getattr(value, "__dict__", {}), found, seen, depth + 1)


_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))

_SIMPLE = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device))

_DEPTH = 3
"""Objects in objects; deeper ones are configurations."""
