"""The options of calls that commit versions, each of which is written once."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_args, get_type_hints

from partywall import _arrays
from partywall._arrays import Access


class _Options(TypedDict, total=False):
    metadata: Mapping[str, str] | None
    """Text that readers get with the version."""
    mutable: bool
    """Whether the version can be written after the commit."""
    kept: bool
    """Whether the version stays after this process has ended."""
    shared: bool
    """Whether processes of other users may read it, where the broker admits them."""


class _Allocation(TypedDict, total=False):
    access: Access | None
    """What gets access to pinned memory immediately."""
    owner: str | None
    """The `token` of the process with which the name ends, if it is not this one."""


class _Absence(TypedDict, total=False):
    if_absent: bool
    """Whether the commit fails if the name exists."""


class ClaimOptions(_Allocation, _Options, total=False):
    """Options of a version that fulfils a claim."""

    reserve: int | None
    """The number of bytes to which a mutable version can grow."""


class CommitOptions(ClaimOptions, _Absence):
    """Options of a version that is created."""


class PublishOptions(_Options, _Absence):
    """Options of a version that is published in place."""


class FileOptions(_Allocation, _Absence, total=False):
    """Options of a version that is put from a file."""

    mutable: bool
    kept: bool
    shared: bool


class UrlOptions(_Allocation, total=False):
    """Options of a version that is put from a server."""

    mutable: bool
    kept: bool
    shared: bool
    if_absent: bool
    """Whether a version that exists, or that another process is downloading, is returned instead."""
    allow_http: bool
    """Whether `http://` may go to other machines."""
    threads: int | None
    """The number of connections, by default 8."""
    retries: int | None
    """How often in a row a request is made again without 16 KiB between, by default 7."""
    timeout: float | None
    """The seconds in which a connection has to bring 16 KiB, by default 30."""


class NetworkOptions(TypedDict, total=False):
    """Options of calls that reach other hosts. Without `connect`, the bridge of this domain says how."""

    connect: str | Sequence[str] | None
    """The address of another host's bridge, `HOST:PORT`, or several."""
    tls: "str | os.PathLike[str] | None"
    """The directory of the certificate, as for `partywall bridge`."""
    allow: str | Sequence[str] | None
    """Further hosts that may take part, with such a certificate."""
    insecure_network: bool
    """Whether the addresses may be of other machines without `tls`."""
    realm: str | None
    """The realm of the bridges, by default `default`."""


class HostsOptions(NetworkOptions, total=False):
    """Options of the list of hosts."""

    timeout: float | None
    """The seconds that the bridge may take to answer, by default 20, or 10 if there is none."""


class PullOptions(_Allocation, NetworkOptions, total=False):
    """Options of a version that is copied from another host."""

    kept: bool
    also: str | Sequence[str] | None
    """Further hosts that are asked for the same content."""
    timeout: float | None
    """The seconds without a byte after which it fails, by default 60, or 10 if nobody knows the bridge or the host."""


F = TypeVar("F", bound=Callable[..., Any])


def spelled_out(function: F) -> F:
    """Shows the options of a function one by one in its signature, as `help` prints it."""
    signature = inspect.signature(function)
    *others, options = signature.parameters.values()
    [kind] = get_args(options.annotation)
    only = inspect.Parameter.KEYWORD_ONLY
    keywords = [
        inspect.Parameter(name, only, default=False if hint is bool else None, annotation=hint)
        for name, hint in get_type_hints(kind).items()
    ]
    function.__signature__ = signature.replace(parameters=[*others, *keywords])  # type: ignore[attr-defined]
    return function


def converted(options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Checks options, and returns them as keywords of compiled functions."""
    unknown = options.keys() - kind.__optional_keys__
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    taken = dict(options)
    if "metadata" in kind.__optional_keys__:
        taken["metadata"] = pairs(options.get("metadata"))
    if "access" in kind.__optional_keys__:
        taken.setdefault("access", None)
    if "reserve" in options:
        taken["reserve"] = _arrays.optional_count(options["reserve"])
    if "owner" in options:
        taken["owner"] = owner_of(options["owner"])
    return taken


def pairs(metadata: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Checks metadata, and returns it as the compiled module takes it."""
    pairs = list(dict(metadata or {}).items())
    for pair in pairs:
        if not all(isinstance(text, str) for text in pair):
            raise TypeError(f"metadata maps strings to strings, but {pair[0]!r} has the value {pair[1]!r}")
        for text in pair:
            _arrays.check_text(text, "metadata")
    return pairs


def owner_of(token: str | None) -> int | None:
    """Checks the owner of a name, and returns its number."""
    if token is None:
        return None
    if not (isinstance(token, str) and token.isascii() and token.isdecimal() and int(token) < 2**64):
        raise ValueError(f"{token!r} is not a token: pass the Domain.token of the process that is to own the name")
    return int(token)
