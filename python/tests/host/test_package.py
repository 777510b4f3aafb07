"""The package as it is installed and imported."""

import importlib
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import partywall as pw
from partywall import _program
from partywall._program import PROGRAM

from .. import stand_ins
from ..conftest import PRELUDE, WATCHDOG
from .test_errors import assert_quoted

BACKEND = Path(__file__).parents[2] / "build_backend"


# Holds 242.
def test_an_import_starts_and_loads_nothing(tmp_path):
    code = (
        "import partywall, sys; print([m for m in ('numpy', 'torch', 'cupy', 'jax') if m in sys.modules]); "
        "print(open('/proc/self/maps').read())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    imported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert imported.stdout.startswith("[]\n")
    assert "libcuda" not in imported.stdout and "simcuda" not in imported.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_program_comes_along():
    for command in ([Path(sys.executable).with_name("partywall")], [sys.executable, "-m", "partywall"]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert pw.__version__ in said.stdout


# Holds 256.
def test_the_program_is_installed_as_it_was_compiled():
    # A script in Python would start the interpreter for each command.
    assert Path(sys.executable).with_name("partywall") == PROGRAM
    assert PROGRAM.read_bytes()[:4] == b"\x7fELF" and os.access(PROGRAM, os.X_OK)
    [program] = [file for file in importlib.metadata.files("partywall") or () if file.name == "partywall"]
    assert program.locate().resolve() == PROGRAM.resolve(), "an uninstallation removes it"


# Holds 256.
def test_the_program_is_found_where_pip_has_put_it(tmp_path):
    # As `pip install --target` leaves it, and as an installer records it elsewhere.
    elsewhere = "../programs/bin/partywall"
    for recorded, place in [("../../bin/partywall", "bin/partywall"), (elsewhere, elsewhere)]:
        packages = tmp_path / place.replace("/", "-").replace(".", "") / "packages"
        package = packages / "partywall"
        information = packages / "partywall-0.1.0.dist-info"
        for folder in (package, information, (packages / place).parent):
            folder.mkdir(parents=True)
        shutil.copy2(_program.__file__, package)
        (information / "RECORD").write_text(f"partywall/_program.py,,\n{recorded},sha256=x,7\n")
        (packages / place).touch()
        command = [sys.executable, "-c", "import _program; print(_program.PROGRAM)"]
        said = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout
        assert Path(said.strip()).samefile(packages / place)


def test_the_package_says_that_it_is_typed():
    folder = Path(pw.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()
    assert PROGRAM.exists() and os.access(PROGRAM, os.X_OK)


# Holds 267.
@pytest.mark.parametrize(
    ("version", "is_older"),
    [("1.13.1", True), ("2.4.1+cu121", True), ("2.5.0a0+872d972e41.nv24.08", False), ("2.11.0", False)],
)
def test_older_torch_is_refused_by_its_version(tmp_path, version, is_older):
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    code = """
    import partywall as pw
    for module in "partywall.torch", "partywall.torch._guard":
        try:
            __import__(module)
        except pw.TorchTooOld as error:
            print(isinstance(error, ImportError), error.anchor, error)
        except (ImportError, AttributeError):
            # This stand-in has nothing but a version.
            print("new enough")
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    refused = f"True torch-too-old partywall.torch needs torch 2.5 or later, and this is torch {version}; upgrade torch"
    assert said == [refused if is_older else "new enough"] * 2


# Holds 267.
def test_pool_needs_a_torch_whose_pools_are_of_one_thread(domain, monkeypatch):
    stand_ins.torch_pools(monkeypatch, version="2.7.1+cu126")
    with pytest.raises(pw.TorchTooOld, match=r"torch_pool\(\) needs torch 2\.8 or later, .* 2\.7\.1\+cu126") as old:
        domain.torch_pool("pool", size=1 << 20)
    assert_quoted(old.value)


def test_everything_public_has_a_docstring():
    for name in pw.__all__:
        thing = getattr(pw, name)
        assert isinstance(thing, str) or thing.__doc__, name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert value.__doc__, f"{name}.{member}"


@pytest.mark.parametrize("name", ["create", "create_many", "put", "put_file", "publish"])
def test_options_are_spelled_out_and_no_others_are_taken(domain, name):
    method = getattr(domain, name)
    options = inspect.signature(method).parameters
    assert all(option.kind is not inspect.Parameter.VAR_KEYWORD for option in options.values())
    assert [options[name].default for name in ("mutable", "kept", "shared", "if_absent")] == [False] * 4
    assert ("reserve" in options) == (name in ("create", "create_many", "put"))
    arguments = {"create": ("x", 1, "uint8"), "put": ("x", b"1"), "put_file": ("/dev/null", "x")}.get(name, ("x", {}))
    for unknown in ("keep", "chunk_bytes", "until_unused"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            method(*arguments, **{unknown: 1})
    assert domain.ls() == []


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
        script = "import sys; sys.path[:0] = %r\\n" % sys.path
        script += "try:\\n import partywall\\nexcept ImportError as e:\\n print(e)"
        (interpreters.exec if hasattr(interpreters, "exec") else interpreters.run_string)(other, script)
    """
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
    assert "main interpreter only" in ran.stdout or "does not support loading in subinterpreters" in ran.stdout, ran
    assert ran.returncode == 0, ran.stderr
