"""`Domain.put_url`: the program that reads files from servers, and its answer."""

import json
import os
import subprocess
from collections.abc import Sequence

from partywall import _errors
from partywall._program import PROGRAM


def put(socket: str, url: str, name: str, options: Sequence[str]) -> tuple[int, bool]:
    """Runs `partywall put URL NAME`. Returns the version that there is then, and whether it was there before."""
    environment = dict(os.environ)
    if not url.lower().startswith("env://"):
        # Other users can read command lines, and a URL may contain a password or a signature.
        environment[_VARIABLE] = url
        url = f"env://{_VARIABLE}"
    # If this process is killed, nobody is left for the download.
    options = [*options, "--with-parent", str(os.getpid())]
    command = [str(PROGRAM), "--socket", socket, "--json", "put", *options, "--", url, name]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, text=True
    ) as program:
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
        named = error["class"] or ("BadValue" if error["kind"] == "usage" else "Error")
        kind: type[_errors.Error] = getattr(_errors, named)
        raise kind(error["message"], error["advice"], error["entry"] or "")
    return int(answer["version"]), bool(answer["existed"])


_VARIABLE = "PARTYWALL_PUT_URL"
