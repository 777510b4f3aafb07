"""Names that an integration waits for."""

from typing import Any

import partywall as pw


def opened(domain: pw.Domain, name: str, timeout: float | None, device: Any = None) -> pw.Segment:
    """Opens the latest version of a name, or `NAME@VERSION`.

    Raises `NameNotFound` if it does not exist in time, for frameworks that tell a missing name from a slow call.
    """
    try:
        return domain.open(name, timeout, device=device)
    except pw.TimeoutError as error:
        raise pw.NameNotFound(error.args[0], error.advice, error.anchor) from None
