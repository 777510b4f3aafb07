"""libpartywall and the Python package in one process: each has connections of its own, samples cross by name, and a
forked child connects anew with both.
"""

import subprocess
import sys

import pytest

from ..conftest import WATCHDOG
from ..languages import library, needs_examples

pytestmark = needs_examples

PROGRAM = """
import ctypes
import os
import sys
import warnings

first, mode, path = sys.argv[1:]
mode = getattr(os, mode)
sys.setdlopenflags(os.RTLD_NOW | mode)
if first == "library":
    c = ctypes.CDLL(path, mode=mode)
import numpy as np
import partywall as pw
if first == "package":
    c = ctypes.CDLL(path, mode=mode)

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
OK, INVALID_ARGUMENT, UNREACHABLE = 0, 1, 10
U8 = 2
c.pw_error_message.restype = ctypes.c_char_p
c.pw_error_message.argtypes = [ctypes.c_void_p]
c.pw_last_error.restype = ctypes.c_void_p

def call(name, *arguments):
    status = getattr(c, name)(*arguments)
    assert status == OK, (name, status, c.pw_error_message(c.pw_last_error()))

def opened(name, *arguments):
    handle = ctypes.c_void_p()
    call(name, *arguments, ctypes.byref(handle))
    return handle

def connect():
    # In C by the defaults of the environment, as in Python.
    return pw.connect(), opened("pw_domain_connect", None)

class Ends:
    \"\"\"Both ends of a topic, in both languages.\"\"\"
    def __init__(self, d, domain):
        self.topic = d.topic("frames")
        self.publisher, self.subscriber = self.topic.publisher(), self.topic.subscriber()
        topic = opened("pw_topic_open", domain, b"frames", None)
        self.c_publisher = opened("pw_publisher_open", topic)
        self.c_subscriber = opened("pw_subscriber_open", topic, None)
        call("pw_topic_close", topic)

    def send(self, value):
        self.publisher.send(np.full(8, value, np.uint8))

    def c_send(self, value):
        shape = (ctypes.c_uint64 * 1)(8)
        forever = ctypes.c_int64(-1)
        call("pw_publisher_send", self.c_publisher, U8, shape, 1, bytes([value] * 8), 8, forever, None)

    def receive(self, value):
        with self.subscriber.recv(60) as sample:
            assert sample.tobytes() == bytes([value] * 8)

    def c_receive(self, value):
        sample = opened("pw_subscriber_recv", self.c_subscriber, ctypes.c_int64(-1))
        seen = ctypes.create_string_buffer(8)
        call("pw_sample_read", sample, ctypes.c_uint64(0), seen, 8)
        assert seen.raw == bytes([value] * 8)
        call("pw_sample_close", sample)

    def cross(self, value):
        self.send(value)
        self.receive(value)
        self.c_receive(value)
        self.c_send(value + 1)
        self.receive(value + 1)
        self.c_receive(value + 1)

    def close(self):
        self.publisher.close()
        self.subscriber.close()
        self.topic.close()
        call("pw_publisher_close", self.c_publisher)
        call("pw_subscriber_close", self.c_subscriber)

d, domain = connect()
assert [member.pid for member in d.ps()].count(os.getpid()) == 2, "each has a connection of its own"
kept = d.topic("frames", max_bytes=8, publishers=4, subscribers=4, device="host")
ends = Ends(d, domain)
ends.cross(1)

# A segment, and a failure of one that the other one does not see.
d.put("weights", {"w": np.arange(4, dtype=np.uint8)})
segment = opened("pw_segment_open", domain, b"weights", None, ctypes.c_int64(0))
seen = ctypes.create_string_buffer(4)
call("pw_segment_read", segment, b"w", ctypes.c_uint64(0), seen, 4)
assert seen.raw == bytes(range(4))
call("pw_segment_close", segment)
try:
    d.open("absent", timeout=0)
    raise SystemExit("it is absent")
except pw.NameNotFound:
    assert c.pw_last_error() is None
# An object of Python is no handle, nor is its address.
assert c.pw_domain_ping(ctypes.c_void_p(id(d))) == INVALID_ARGUMENT
assert c.pw_domain_ping(None) == INVALID_ARGUMENT
d.ls()

pid = os.fork()
if pid == 0:
    try:
        assert c.pw_domain_ping(domain) == UNREACHABLE
        try:
            d.ls()
            os._exit(2)
        except pw.Forked:
            pass
        call("pw_domain_close", domain)
        d, domain = connect()
        inner = Ends(d, domain)
        inner.send(10)
        inner.c_send(11)
        for value in (10, 11):
            inner.receive(value)
            inner.c_receive(value)
        inner.close()
        call("pw_domain_close", domain)
        d.close()
        os._exit(0)
    finally:
        os._exit(3)
for value in (10, 11):
    ends.receive(value)
    ends.c_receive(value)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ends.cross(20)
ends.close()
kept.close()
call("pw_domain_close", domain)
assert c.pw_domain_close(domain) == INVALID_ARGUMENT
d.ls()
d.close()
print("done")
"""


# Holds 373.
@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
@pytest.mark.parametrize("first", ["package", "library"])
@pytest.mark.usefixtures("domain")
def test_library_and_package_share_a_process(socket, tmp_path, monkeypatch, first, mode):
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, first, mode, str(library(tmp_path))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
