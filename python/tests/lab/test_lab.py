"""The wheel `partywall-lab`, beside the package: the programs that `partywall` starts, and the simulated GPU."""

import subprocess

from partywall._program import PROGRAM

from ..conftest import WATCHDOG


def test_program_starts_the_lab(socket):
    command = [PROGRAM, "--socket", socket, "lab"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=True)
    assert "handle-file" in listed.stdout


def test_program_starts_the_lab_that_is_a_program_of_its_own(socket):
    command = [PROGRAM, "--socket", socket, "lab", "render", "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=True)
    assert "--renderers" in helped.stdout


def test_python_uses_the_simulated_gpu_by_its_name(socket, child):
    process = child(
        """
        import numpy as np
        with pw.connect(socket=sys.argv[1]) as domain, domain.put("x", np.arange(3), device="cuda") as x:
            say(x.place.startswith("GPU-"), domain.ps()[0].simulated)
        """,
        socket,
        PARTYWALL_LIBCUDA="simulated",
    )
    assert process.says() == "True True"
    assert process.end() == 0
