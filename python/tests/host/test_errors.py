"""Errors: their classes, and their entries in docs/troubleshooting.md."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import partywall as pw

PAGE = Path(__file__).parents[3] / "docs/troubleshooting.md"


def test_errors_are_the_built_in_ones_too(domain):
    with pytest.raises(KeyError, match="no segment, pool, topic or queue is named") as raised:
        domain.open("nothing")
    error = raised.value
    assert isinstance(error, pw.Error) and isinstance(error, pw.NameNotFound)
    assert (error.anchor, error.cuda_error) == ("not-found", None)
    assert error.advice and error.advice in str(error)
    with pytest.raises(ValueError, match="name"):
        domain.create("no/../name", 1, "uint8", device="host")
    with pytest.raises(FileNotFoundError):
        domain.put_file("/no/such/file", "x", device="host")
    with pytest.raises(ValueError, match="exceeds"):
        domain.create("x", 1 << 61, "float32", device="host")
    with pytest.raises(TimeoutError):
        domain.open("nothing", timeout=0.01)
    with pytest.raises(ValueError, match="timeout"):
        domain.open("nothing", timeout=-1)
    with pytest.raises(ConnectionError):
        pw.connect(socket=domain.socket + ".other", start=False)


def test_other_kinds_name_the_call_that_takes_them(domain):
    pool = domain.pool("pool", blocks=1, block_bytes=16, device="host")
    line = domain.timeline("line")
    with pytest.raises(TypeError, match=r'"pool" is a pool, not a segment; open it with d\.pool\("pool"\)'):
        domain.open("pool")
    with pytest.raises(pw.NameNotFound, match=r'there is a timeline of that name; open it with d\.timeline\("line"\)'):
        domain.open("line")
    pool.close()
    line.close()


def test_error_for_a_name_says_how_the_name_ended(domain):
    domain.put("x", np.zeros(1), device="host").close()
    with pytest.raises(pw.NameNotFound, match=rf"x@1 ended with its owner, pid {os.getpid()} \(\w+.*\), [\d.]+ m?s ago") as raised:
        domain.open("x")
    assert "kept=True" in raised.value.advice


@pytest.mark.parametrize(
    ("array", "what", "advice"),
    [
        (np.array(["a"]), "strings", "encode"),
        (np.array(["2026-01-01"], "M8[s]"), "dates and times", "int64"),
        (np.array([None]), "Python objects", "astype"),
    ],
)
def test_arrays_of_no_numbers_say_what_to_give_instead(domain, array, what, advice):
    with pytest.raises(pw.BadSource, match=f"its elements are {what}") as raised:
        domain.put("x", array, device="host")
    assert advice in raised.value.advice and "DLPack" not in str(raised.value)


def test_every_error_class_goes_through_a_pickle():
    classes = [value for value in vars(pw).values() if isinstance(value, type) and issubclass(value, pw.Error)]
    assert len(classes) > 20
    for kind in classes:
        error = pickle.loads(pickle.dumps(kind("what", "do this", "anchor", 7)))
        assert type(error) is kind
        assert (str(error), error.advice, error.anchor, error.cuda_error) == ("what; do this", "do this", "anchor", 7)


def test_every_error_of_the_package_is_quoted_by_its_entry(domain):
    segment, timeline = domain.put("x", np.zeros(3)), domain.timeline("t")
    failing = [
        lambda: segment.__dlpack__(copy=True),
        lambda: segment.__dlpack__(dl_device=(2, 0)),
        lambda: domain.put("y", 3),
        lambda: domain.put("y", np.array([None])),
        lambda: (segment.close(), segment["data"]),
        lambda: timeline.signal(1),
    ]
    for fail in failing:
        with pytest.raises(pw.Error) as raised:
            fail()
        _, entry = PAGE.read_text().split(f"\n### {raised.value.anchor}\n")
        quoted = re.search("^    (.*)$", entry, re.MULTILINE)[1]
        assert re.match(re.escape(quoted).replace("…", ".*"), str(raised.value)), raised.value
    timeline.close()


def test_another_user_is_refused_with_a_sentence(domain):
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    code = (
        "import os, sys, partywall as pw\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    pw.connect(socket=sys.argv[1], start=False)\n"
        "except PermissionError as error:\n"
        "    print(error)\n"
    )
    refused = subprocess.run([sys.executable, "-c", code, domain.socket], capture_output=True, text=True, check=False)
    assert refused.stdout.startswith(f"the broker at {domain.socket} runs as user 0, this process as user 65534")
