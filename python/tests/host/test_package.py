"""The package as it is installed and imported."""

import importlib
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import partywall as pw
from partywall._program import PROGRAM

from ..conftest import PRELUDE, WATCHDOG

BACKEND = Path(__file__).parents[2] / "build_backend"


def test_an_import_starts_and_loads_nothing(tmp_path):
    code = "import partywall, sys; print([m for m in ('numpy', 'torch', 'cupy', 'jax') if m in sys.modules]); print(open('/proc/self/maps').read())"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    imported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert imported.stdout.startswith("[]\n")
    assert "libcuda" not in imported.stdout and "simcuda" not in imported.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_program_comes_along():
    for command in ([Path(sys.executable).with_name("partywall")], [sys.executable, "-m", "partywall"]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert pw.__version__ in said.stdout


def test_the_package_says_that_it_is_typed():
    folder = Path(pw.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
    assert PROGRAM.exists() and os.access(PROGRAM, os.X_OK)


def test_everything_public_has_a_docstring():
    for name in pw.__all__:
        thing = getattr(pw, name)
        assert isinstance(thing, str) or thing.__doc__, name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert value.__doc__, f"{name}.{member}"


def test_one_wheel_is_for_all_pythons_with_a_gil(monkeypatch):
    monkeypatch.syspath_prepend(BACKEND)
    backend = importlib.import_module("partywall_build")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    with pytest.raises(RuntimeError, match="free-threaded builds of Python are not supported"):
        backend.build_wheel("/nowhere")


def test_a_subinterpreter_is_refused():
    code = """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        other = interpreters.create()
        script = "import sys; sys.path[:0] = %r\\ntry:\\n import partywall\\nexcept ImportError as e:\\n print(e)" % sys.path
        (interpreters.exec if hasattr(interpreters, "exec") else interpreters.run_string)(other, script)
    """
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert "main interpreter only" in ran.stdout or "does not support loading in subinterpreters" in ran.stdout, ran
    assert ran.returncode == 0, ran.stderr
