# Holds 289.
"""What the parent of warm spares may not do, with a driver whose state can be asked."""

import os

import pytest

from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")


@pytest.mark.parametrize("initialised", [True, False])
def test_module_may_load_the_driver_and_not_initialise_it(child, tmp_path, initialised):
    source = "import ctypes, os\ndriver = ctypes.CDLL(os.environ['PARTYWALL_LIBCUDA'])\n"
    (tmp_path / "preloaded_here.py").write_text(source + "driver.cuInit(0)\n" * initialised)
    launcher = child(
        """
        from partywall import spares
        sys.path.insert(0, sys.argv[1])
        try:
            spares.run(lambda: say("runs"), preload=["json", "preloaded_here"])
        except pw.CannotPreload as error:
            say(error)
        """,
        str(tmp_path),
        PARTYWALL_LIBCUDA=os.environ["PARTYWALL_LIBCUDA"],
    )
    refusal = (
        "cannot preload: preloaded_here has initialised CUDA, which does not work in forks of a process that has used it"
    )
    assert launcher.says().startswith(refusal if initialised else "runs")
