"""Runs a program in this process as ``python SCRIPT`` and ``python -m MODULE`` do."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from types import CodeType, ModuleType, TracebackType
from typing import Any

from arena.cli._errors import UsageError
from arena.cli._ticked import Ticked

__all__ = ["Program"]

_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
_ARENA = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BETWEEN = (
    _ARENA + "_decorate.py",
    os.path.abspath(__file__),
    _ARENA + "cli/_ticked.py",
    "<frozen importlib",  # Python hides those too, unless they lead to a loader of ours
)


@dataclasses.dataclass
class Program:
    """A script, a folder or zip file with a ``__main__.py``, or a module, and its arguments."""

    name: str
    is_module: bool
    args: Sequence[str]
    ticked: Ticked
    error: BaseException | None = None
    """What ended it. While it is kept, so are the frames that it came through."""
    status: int = 0

    def check(self) -> None:
        """Raise UsageError if there is no such program, as far as that can be told from here."""
        if self.is_module:
            if not all(part.isidentifier() for part in self.name.split(".")):
                raise UsageError(f"not the name of a module: {self.name!r}")
        elif not os.path.exists(self.name):
            raise UsageError(f"no such script: {self.name!r}")
        elif self._is_container() and self._container_spec() is None:
            raise UsageError(f"no __main__.py in {self.name!r}")

    def run(self) -> None:
        """Run it to its end, that of its threads included, and set ``status`` and ``error``.

        It has ``sys.argv``, ``sys.path`` and ``__main__`` to itself. Its uncaught exception is
        told by its own ``sys.excepthook``, without the frames that are ours. Raises UsageError
        where there turns out to be no such module.
        """
        sys.argv = [self.name, *self.args]
        if not self.is_module and not sys.flags.safe_path:
            # `python -m arena` has put the working directory there.
            container = self._is_container()
            sys.path[0] = self.name if container else os.path.dirname(os.path.realpath(self.name))
        code = None
        try:
            code, main = self._load()
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
        except UsageError:
            raise
        except BaseException as error:
            self.error = error
            self.status = self._told(error, code)
        try:
            threading._shutdown()  # type: ignore[attr-defined] # as multiprocessing does
        except KeyboardInterrupt:
            self.status = _INTERRUPTED

    def _is_container(self) -> bool:
        return os.path.isdir(self.name) or zipfile.is_zipfile(self.name)

    def _container_spec(self) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec("__main__", [self.name])

    def _load(self) -> tuple[CodeType, ModuleType]:
        if self.is_module:
            return self._from_spec(self._module_spec())
        if self._is_container():
            spec = self._container_spec()
            assert spec is not None
            return self._from_spec(spec)
        path = os.path.abspath(self.name)
        if path.endswith(".pyc"):
            sourceless = importlib.machinery.SourcelessFileLoader("__main__", path)
            return self._main(sourceless.get_code("__main__"), path, loader=sourceless)
        with io.open_code(path) as file:
            code = self.ticked.compile(file.read(), path, "__main__")
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        return self._main(code, path, loader=loader)

    def _module_spec(self) -> importlib.machinery.ModuleSpec:
        name = self.name
        try:
            spec = importlib.util.find_spec(name)  # runs the packages around it
            if spec is not None and spec.submodule_search_locations is not None:
                name += ".__main__"
                spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not f"{name}.".startswith(f"{missing}."):
                raise
            spec = None
        if spec is None:
            raise UsageError(f"no module named {name!r}")
        return spec

    def _from_spec(self, spec: importlib.machinery.ModuleSpec) -> tuple[CodeType, ModuleType]:
        loader: Any = spec.loader
        if spec.origin and type(loader) is importlib.machinery.SourceFileLoader:
            module = "__main__" if spec.name == "__main__" else spec.name
            code = self.ticked.compile(loader.get_data(spec.origin), spec.origin, module)
        else:
            code = loader.get_code(spec.name)
        if code is None:
            raise UsageError(f"{self.name!r} has no Python code")
        if self.is_module:
            sys.argv[0] = spec.origin or self.name
        return self._main(code, spec.origin, spec=spec, loader=loader)

    def _main(
        self,
        code: CodeType | None,
        path: str | None,
        *,
        spec: importlib.machinery.ModuleSpec | None = None,
        loader: object = None,
    ) -> tuple[CodeType, ModuleType]:
        if code is None:
            raise UsageError(f"{self.name!r} has no Python code")
        main = ModuleType("__main__")
        package = spec.parent if spec is not None else None
        main.__dict__.update(
            __file__=path,
            __cached__=None,
            __loader__=loader,
            __package__=package,
            __spec__=spec,
            __builtins__=sys.modules["builtins"],
        )
        return code, main

    def _told(self, error: BaseException, code: CodeType | None) -> int:
        """Tell of the exception as Python does at the end of a program, and return its status."""
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return error.code or 0
            print(error.code, file=sys.stderr)
            return 1
        _prune(error, code, set())
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:
            sys.__excepthook__(type(error), error, error.__traceback__)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _prune(error: BaseException | None, code: CodeType | None, seen: set[int]) -> None:
    """Take our frames out of the traceback: those that lead to the program, and those between."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without(_from_program(error.__traceback__, code))
    _prune(error.__cause__, code, seen)
    _prune(error.__context__, code, seen)
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            _prune(one, code, seen)


def _from_program(traceback: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    """From the program's outermost frame on; all of it where that is not in it."""
    step = traceback
    while step is not None and step.tb_frame.f_code is not code:
        step = step.tb_next
    if step is not None:
        return step
    while traceback is not None and (
        traceback.tb_frame.f_code.co_filename.startswith(_ARENA)
        or traceback.tb_frame.f_code.co_filename == importlib.util.__file__
    ):
        traceback = traceback.tb_next
    return traceback


def _without(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType | None] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_BETWEEN):
            kept.append(traceback)
        traceback = traceback.tb_next
    kept.append(None)
    for one, after in pairwise(kept):
        if one is not None:
            one.tb_next = after
    return kept[0]
