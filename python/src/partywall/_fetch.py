"""`Domain.put_url`: the program that reads files from servers, and its answer."""

import json
import subprocess
from collections.abc import Sequence

from partywall import _errors
from partywall._program import PROGRAM


def put(socket: str, url: str, name: str, options: Sequence[str]) -> tuple[int, bool]:
    """Runs `partywall put URL NAME`. Returns the version that there is then, and whether it was there before."""
    command = [str(PROGRAM), "--socket", socket, "--json", "put", *options, "--", url, name]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as program:
        try:
            output, _ = program.communicate()
        except BaseException:
            # Interrupted: what it has begun ends with it.
            program.kill()
            raise
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise _errors.Error(f"{PROGRAM} ended with {program.returncode} and said {output!r}") from None
    if error := answer.get("error"):
        kind: type[_errors.Error] = getattr(_errors, error["class"] or "Error")
        raise kind(error["message"], error["advice"], error["entry"] or "")
    return int(answer["version"]), bool(answer["existed"])
