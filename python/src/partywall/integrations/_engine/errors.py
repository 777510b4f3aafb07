"""The exception of the loaders."""

from partywall._errors import Error


class UnsupportedModel(Error, ValueError):
    """The engine is configured for something that shared weights do not allow, or a layer of its model does not."""


def unsupported(what: str, advice: str) -> UnsupportedModel:
    """Returns the exception with its entry in the documentation."""
    return UnsupportedModel(what, advice, "unsupported-model")
