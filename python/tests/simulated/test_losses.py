# Holds 14.
"""A simulated GPU loses its memory, as by a reset. The driver reads the file that `SIMCUDA_LOSSES` names."""

import os

import pytest

pytestmark = pytest.mark.skipif("simcuda" not in os.environ.get("PARTYWALL_LIBCUDA", ""), reason="not simulated")

HOLDER = """
import time
with pw.connect(socket=sys.argv[1]) as d:
    x = d.put("x", np.arange(4), device="cuda", kept=True)
    d.put("y", np.arange(4), device="host", kept=True).close()
    say("ready")
    while True:
        try:
            x.check()
        except pw.DeviceLost as error:
            say(isinstance(error, RuntimeError), error.anchor)
            break
        time.sleep(0.01)
    told()
"""

READER = """
with pw.connect(socket=sys.argv[1]) as d:
    try:
        d.open("x")
    except pw.DeviceLost as error:
        say(error.anchor, "GPU-51301ca7" in str(error))
    say(d.open("y").tobytes() == np.arange(4).tobytes())
"""


def test_names_of_a_lost_gpu_raise_device_lost(socket, child, tmp_path):
    losses = tmp_path / "losses"
    holder = child(HOLDER, socket, SIMCUDA_LOSSES=str(losses))
    assert holder.says() == "ready"
    losses.write_text("0\n")
    assert holder.says() == "True device-lost"
    reader = child(READER, socket, SIMCUDA_LOSSES=str(losses))
    assert reader.says() == "device-lost True"
    assert reader.says() == "True"
    holder.tell()
    assert holder.end() == 0 and reader.end() == 0
