"""Descriptors of GPU memory in a program that talks to nobody but the driver."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ..conftest import WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("no C compiler", allow_module_level=True)

PARENT = Path(__file__).parents[2]
SOURCES = [folder / "descriptors.c" for folder in (PARENT / "examples", PARENT.parent / "crates/partywall/examples")]
"""In a bundle for a machine with a GPU, and in the repository."""


def fnv1a(data: bytes) -> str:
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return f"{digest:016x}\n"


def test_program_in_c_reads_a_tensor_of_torch_also_after_its_creator_was_killed(domain, child, tmp_path):
    program = tmp_path / "descriptors"
    source = next(source for source in SOURCES if source.exists())
    subprocess.run(["cc", "-o", program, source, "-ldl"], check=True, timeout=WATCHDOG)
    creator = child(
        """
        import torch
        with pw.connect(socket=sys.argv[1], start=False) as d:
            values = torch.arange(2500, dtype=torch.int32, device="cuda")
            with d.put("x", {"first": values, "second": values * 3}, kept=True):
                say("there")
                told()
        """,
        domain.socket,
    )
    assert creator.says() == "there"
    with domain.descriptors("x") as x:
        place = x.tensors["second"]
        chunks = [f"{chunk.fd}:{chunk.nbytes}" for chunk in x.chunks]
        command = [program, x.place, str(place.chunk), str(place.offset), str(place.nbytes), *chunks]
        expected = fnv1a((torch.arange(2500, dtype=torch.int32) * 3).numpy().tobytes())

        def read() -> str:
            done = subprocess.run(command, pass_fds=x.fds, capture_output=True, text=True, timeout=WATCHDOG, check=True)
            return done.stdout

        assert read() == expected
        creator.kill()
        assert read() == expected
