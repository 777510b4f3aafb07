# Holds 166.
"""Failures for which other Python libraries that share memory are known, each named after what goes wrong there.

* The handle object is collected early: bindings in which a Python object owns what was exported. It is collected once
  the exporter has sent a description of it, and the receiver finds nothing.
* A short-lived reader destroys everybody's object: `multiprocessing.shared_memory` before Python 3.13, where each
  process that opens a block also registers it for removal at its end.

Failures that concern every language: `crates/partywall/tests/domain/known_failures.rs`.
"""

import gc
import signal

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG


def test_the_exporters_handle_object_is_collected_early(domain, child):
    exporter = child(
        """
        import gc
        d = pw.connect(socket=sys.argv[1])
        # No object of this process refers to either of them afterwards.
        d.put("put", np.arange(1000))
        build = d.create("built", 1000, "int64", device="host")
        build.write(np.arange(1000))
        build.commit()
        del build
        gc.collect()
        say(pw._native.flush(60))
        told()
        """,
        domain.socket,
    )
    assert exporter.says() == "True"
    for name in ("put", "built"):
        # Nor of the reader: the array alone keeps the memory.
        with domain.open(name, timeout=WATCHDOG) as opened:
            array = np.from_dlpack(opened)
        del opened
        gc.collect()
        assert np.array_equal(array, np.arange(1000))
    exporter.tell()
    assert exporter.end() == 0
    assert np.array_equal(array, np.arange(1000))


READER = """
import os
d = pw.connect(socket=sys.argv[1])
segment = d.open("x")
array = np.from_dlpack(segment)
topic = d.topic("frames").subscriber(policy="block")
say(array.sum())
told()
"""

ENDS = {
    "closed": "topic.close(); del array; segment.close(); d.close()",
    "left to the interpreter": "",
    "ended at once": "os._exit(0)",
    "killed": "told()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_short_lived_reader_destroys_everybodys_object(domain, child, end):
    values = np.arange(1000)
    with (
        domain.topic("frames", max_bytes=8, device="host") as topic,
        topic.publisher() as publisher,
        topic.subscriber() as subscriber,
        domain.put("x", values) as put,
        pw.connect(socket=domain.socket) as other,
        other.open("x") as opened,
    ):
        array = np.from_dlpack(opened)
        reader = child(READER + ENDS[end], domain.socket)
        assert reader.says() == str(values.sum())
        if end == "killed":
            reader.process.send_signal(signal.SIGKILL)
        else:
            reader.tell()
        assert reader.end() == (-signal.SIGKILL if end == "killed" else 0)
        while len(domain.ps()) > 2:
            pass
        # Those that have it keep it, and others still get it.
        assert np.array_equal(array, values) and put.tobytes() == values.tobytes()
        with other.open("x") as again:
            assert again.tobytes() == values.tobytes()
        publisher.send(b"12345678")
        with subscriber.recv(WATCHDOG) as sample:
            assert sample.tobytes() == b"12345678"
        del array
