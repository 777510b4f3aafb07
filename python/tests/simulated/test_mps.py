# Holds 238.
"""`connect(mps=True)` once the driver is initialised."""

LATE = """
import os
with pw.connect(socket=sys.argv[1]) as d, d.create("x", 1, "uint8", device="cuda"):
    try:
        pw.connect(socket=sys.argv[1], mps=True)
    except pw.NotUnderMps as error:
        say(error.anchor)
        say("CUDA_MPS_PIPE_DIRECTORY" in os.environ)
"""


def test_process_that_has_used_the_gpu_is_refused(domain, child):
    started = child(LATE, domain.socket)
    assert [started.says(), started.says()] == ["mps-too-late", "False"]
    assert started.end() == 0


INITIALISED_BY_OTHERS = """
import ctypes, os
driver = ctypes.CDLL(os.environ["PARTYWALL_LIBCUDA"])
if sys.argv[2] == "yes":
    assert driver.cuInit(0) == 0
try:
    pw.connect(socket=sys.argv[1], mps=True, start=False)
except pw.NotUnderMps as error:
    say(error.anchor)
"""


def test_another_librarys_use_of_the_driver_counts(domain, child):
    # A library that is loaded and not initialised has not looked for a daemon yet.
    for initialised, anchor in (("no", "mps-no-daemon"), ("yes", "mps-too-late")):
        started = child(INITIALISED_BY_OTHERS, domain.socket, initialised)
        assert started.says() == anchor
        assert started.end() == 0
