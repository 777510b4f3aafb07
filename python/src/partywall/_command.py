"""Commands of the program whose answers are JSON, for what the package leaves to programs of their own."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partywall import _errors
from partywall._program import PROGRAM


def run(socket: str, command: str, words: Sequence[str], **environment: str) -> Mapping[str, Any]:
    """Runs `partywall COMMAND WORDS` and returns its answer. The command ends with an interrupt.

    Raises the exception of a library's error, `BadValue` if the arguments are wrong, else what the error names.
    """
    with start(socket, command, words, **environment) as program:
        try:
            output, _ = program.communicate()
        except BaseException:
            # Interrupted: what it has begun ends with it.
            program.kill()
            raise
    return answer(program, output)


def start(socket: str, command: str, words: Sequence[str], **environment: str) -> "subprocess.Popen[str]":
    """Starts `partywall COMMAND WORDS`. It ends with the thread that calls this."""
    # If this process is killed, nobody is left for the answer.
    options = ["--socket", socket, "--json", "--with-parent", str(os.getpid())]
    return subprocess.Popen(
        [str(PROGRAM), *options, command, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    )


def answer(program: "subprocess.Popen[str]", output: str) -> Mapping[str, Any]:
    """Returns the last line of a program's output, or raises the exception that it is."""
    try:
        said: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise _errors.Error(f"{PROGRAM} ended with {program.wait()} and said {output!r}") from None
    if error := said.get("error"):
        named = error["class"] or ("BadValue" if error["kind"] == "usage" else "Error")
        kind: type[_errors.Error] = getattr(_errors, named)
        raise kind(error["message"], error["advice"], error["entry"] or "")
    return said


def flags(options: Mapping[str, Any]) -> list[str]:
    """Returns options as the program takes them. One with several values is repeated."""
    words = []
    for option, value in options.items():
        flag = "--" + option.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            values = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
            words += [f"{flag}={one}" for one in values]
    return words
