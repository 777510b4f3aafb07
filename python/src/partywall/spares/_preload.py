"""Modules that the parent imports for its children."""

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from partywall import _domain
from partywall._errors import CannotPreload

CUDA_ERROR_NOT_INITIALIZED = 3

OMP_PAUSE_SOFT = 1

ADVICE = "do this in main, and import there what does it by itself"


def preloaded(modules: Iterable[str]) -> None:
    """Imports modules. Raises `CannotPreload`, which names the module that cannot be preloaded."""
    for module in modules:
        _loaded(module, lambda: importlib.import_module(module))


def function(target: str) -> Callable[..., object]:
    """Returns the function of `MODULE:FUNCTION` or `FILE.py:FUNCTION`; the function is `main` if none is named."""
    source, _, name = target.partition(":")
    module = _loaded(target, lambda: _file(Path(source)) if source.endswith(".py") else importlib.import_module(source))
    found = getattr(module, name or "main", None)
    if not callable(found):
        raise CannotPreload(
            f"cannot call {target}: {source} has no function {name or 'main'}",
            "name one as MODULE:FUNCTION or FILE.py:FUNCTION",
            "cannot-preload",
        )
    return found  # type: ignore[no-any-return]


def check(what: str) -> None:
    """Raises `CannotPreload` if this process has what its forks cannot have."""
    if reason := _obstacle():
        raise CannotPreload(f"cannot preload: {what} {reason}", ADVICE, "cannot-preload")


def uses_cuda() -> bool:
    """Returns whether this process has initialised CUDA, by whichever library.

    Open devices do not say so: NVML, by which torch and vLLM count GPUs without CUDA, opens some, too.
    """
    for name in "libcuda.so.1", os.environ.get("PARTYWALL_LIBCUDA"):
        if name:
            # Not a driver that this call would load.
            with contextlib.suppress(OSError):
                driver = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
                if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED:
                    return True
    return False


def end_openmp_threads() -> None:
    """Ends the threads that GNU OpenMP, which torch uses on the CPU, keeps for the next parallel region.

    A fork does not have them, and would wait for them for ever in its first parallel region. With none, it starts its
    own. Other implementations of OpenMP handle a fork themselves.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    for library in {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}:
        # Versions that are older than OpenMP 5.0 lack the function.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_SOFT)


def _loaded(what: str, load: Callable[[], Any]) -> Any:
    try:
        module = load()
    except (Exception, SystemExit) as error:
        raise CannotPreload(
            f"cannot preload {what}: {type(error).__name__}: {error}",
            "install or correct it, or leave it out",
            "cannot-preload",
        ) from error
    check(what)
    return module


def _file(path: Path) -> Any:
    """Imports a file as a module of its name, with its directory on the path as if it were run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _obstacle() -> str | None:
    """Returns what this process has that its forks cannot have."""
    if uses_cuda():
        return "has initialised CUDA, which does not work in forks of a process that has used it"
    if threads := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        return f"has started the thread {threads[0]}: forks do not have it, and locks that it holds stay locked in them"
    if connections := _domain.connections():
        return f"has connected to the domain at {connections[0].socket}: a connection is of no use in forks"
    return None
