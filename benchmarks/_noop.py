"""Compiles and loads noop.c: the native no-ops that the limits are made of."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import UnavailableError

SOURCE = Path(__file__).with_name("noop.c")


@functools.cache
def load() -> Any:
    """Return the module noop. Raises UnavailableError when there is no working C compiler."""
    linker = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    with tempfile.TemporaryDirectory(prefix="arena-bench-") as folder:
        built = Path(folder) / "noop.so"
        include = f"-I{sysconfig.get_path('include')}"
        command = [*linker, "-O2", "-fPIC", include, str(SOURCE), "-o", str(built)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise UnavailableError(f"cannot compile {SOURCE.name}: {error}") from None
        except subprocess.CalledProcessError as error:
            reason = next((line for line in error.stderr.splitlines() if "error" in line), "")
            raise UnavailableError(f"cannot compile {SOURCE.name}: {reason or error}") from None
        loader = importlib.machinery.ExtensionFileLoader("noop", str(built))
        spec = importlib.util.spec_from_loader("noop", loader)
        if spec is None:
            raise UnavailableError(f"cannot load {built}")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module  # mapped by now, so its file may go
