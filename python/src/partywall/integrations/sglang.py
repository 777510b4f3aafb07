"""SGLang: a custom weight loader that takes a name instead of tensors.

Start the server with `--custom-weight-loader partywall.integrations.sglang.load`, and send one pair for each name.
SGLang moves the second element of a pair to its GPU, so it is an empty tensor:

    d.put("policy", dict(model.named_parameters()))                 # trainer

    engine.update_weights_from_tensor(
        [("policy@2", torch.empty(0))], load_format="partywall.integrations.sglang.load"
    )
"""

from collections.abc import Iterable
from typing import Any

import partywall as pw
from partywall.integrations._names import opened

TIMEOUT = 10.0
"""Seconds that `load` waits for a name that does not exist yet."""


def load(model: Any, names: str | Iterable[str | tuple[str, Any]]) -> None:
    """Loads versions, each a name or `NAME@VERSION`, into a model by its `load_weights`.

    All names are opened before the model changes, in the domain that the environment chooses. Raises `NameNotFound` if
    one does not exist within the timeout, `RemoteDevice` if its memory is on another GPU than the model, and
    `ValueError` for tensors in place of names.
    """
    import torch

    meant = [_name(entry) for entry in ([names] if isinstance(names, str) else names)]
    if not meant:
        raise ValueError("there is no name to load: pass [(NAME, torch.empty(0))]")
    place = next(iter(model.parameters())).device
    device = place if place.type == "cuda" else None
    segments: list[pw.Segment] = []
    with pw.connect() as domain:
        try:
            for name in meant:
                segments.append(opened(domain, name, TIMEOUT, device))
            named = [item for segment in segments for item in segment.items()]
            model.load_weights([(name, torch.from_dlpack(tensor)) for name, tensor in named])
        finally:
            for segment in segments:
                segment.close()


def _name(entry: Any) -> str:
    name, placeholder = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{entry!r} is not a name: pass (NAME, torch.empty(0)), where NAME is such as 'policy@2'")
    if placeholder is not None and placeholder.numel() > 0:
        raise ValueError(f"{name!r} comes with a tensor, but this loader takes names: pass ({name!r}, torch.empty(0))")
    return name
