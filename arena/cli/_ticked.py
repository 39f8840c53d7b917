"""Puts ticks into programs that have none: functions are decorated while their file is compiled."""

from __future__ import annotations

import ast
import dataclasses
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Ticked", "Wanted"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class Wanted:
    """One ``--tick FILE:FUNCTION``, and what became of it."""

    file: str
    function: str
    wrapped: int = 0
    seen: list[str] = dataclasses.field(default_factory=list)  # functions of files that matched
    files: int = 0
    generator: bool = False  # it is an async one, which cannot be a tick

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Read the argument. Raises ValueError, whose text says what is wrong."""
        file, _, function = text.rpartition(":")
        parts = function.replace(".<locals>", "").split(".")
        if not file or not all(part.isidentifier() for part in parts):
            raise ValueError(
                f"not FILE:FUNCTION, such as pkg/mod.py:Handler.do_GET or pkg.mod:main: {text!r}"
            )
        return cls(file, ".".join(parts))

    def matches(self, path: str, module: str) -> bool:
        """Whether this file is meant: by its path, the end of its path, or as a module."""
        if self.file == module:
            return True
        if os.path.realpath(self.file) == os.path.realpath(path):
            return True
        parts = tuple(part for part in self.file.split("/") if part not in ("", "."))
        if not self.file.endswith(".py"):
            if len(parts) != 1:
                return False
            *parents, last = self.file.split(".")
            if _ends(path, (*parents, last, "__init__.py")):
                return True
            parts = (*parents, f"{last}.py")
        return not self.file.startswith("/") and _ends(path, parts)

    @property
    def problem(self) -> str | None:
        """What to tell the user at the end, if it is not part of the program."""
        name = f"--tick {self.file}:{self.function}"
        if self.generator:
            return f"{name} is an async generator function, which cannot be a tick"
        if self.wrapped:
            return None
        if not self.files:
            loaded = any(
                self.matches(getattr(module, "__file__", None) or "", module_name)
                for module_name, module in list(sys.modules.items())
                if isinstance(module, ModuleType)
            )
            if loaded:
                return f"{name} matched nothing: that module was loaded before the program began"
            return f"{name} matched nothing: the program imported no such file"
        known = ", ".join(self.seen[:8]) + (", ..." if len(self.seen) > 8 else "")
        return f"{name} matched nothing: the file has {known or 'no functions'}"


def _ends(path: str, parts: Sequence[str]) -> bool:
    return tuple(path.split(os.sep)[-len(parts) :]) == tuple(parts)


class Ticked(MetaPathFinder):
    """Compiles files with their wanted functions in ticks; a finder, to do so as they are imported.

    ``options`` are the keyword arguments of each ``arena.tick()``: constants. ``warn`` is told, as
    soon as a file is compiled, of what it has not: another file with such a name may have it yet.
    """

    def __init__(
        self, wanted: Sequence[Wanted], options: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._wanted = wanted
        self._options = options

    def compile(self, source: bytes, path: str, module: str) -> CodeType:
        """The code of this file, with ticks if it is a wanted one. Raises SyntaxError, ValueError.

        Lines are numbered as they were: the decorators stand in lines that there are.
        """
        wanted = [one for one in self._wanted if one.matches(path, module)]
        if not wanted:
            return compile(source, path, "exec", dont_inherit=True)
        # As ast.parse() does, but without its frame in the traceback of a syntax error.
        tree = compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        _Decorator(wanted, self._options).visit(tree)
        for one in wanted:
            one.files += 1
            if one.problem:  # told at the end too, but a server may run for days until then
                self._warn(f"warning: {one.problem}")
        return compile(tree, path, "exec", dont_inherit=True)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module as the other finders do; if it is wanted, load it by ``compile()``."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            loader = spec.loader
            if type(loader) is importlib.machinery.SourceFileLoader and any(
                one.matches(loader.path, fullname) for one in self._wanted
            ):
                spec.loader = _Loader(self, loader.name, loader.path)
            return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads from the source alone: no bytecode cache is read or written for it."""

    def __init__(self, ticked: Ticked, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._ticked = ticked

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self._ticked.compile(self.get_data(path), path, fullname)


class _Decorator(ast.NodeTransformer):
    """Puts ``arena.tick(...)`` on the wanted functions, next to the function.

    Innermost, for a decorator may register what it is given (a route, a handler): above it, the
    tick would be on a name that nobody calls. And what it makes (a property, a command) stays so.
    """

    def __init__(self, wanted: Sequence[Wanted], options: dict[str, Any]) -> None:
        self._wanted = wanted
        self._options = options
        self._names: list[str] = []

    def _inside(self, node: ast.ClassDef | _Function) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    visit_ClassDef = _inside  # noqa: N815 - ast's names

    def _function(self, node: _Function) -> ast.AST:
        name = ".".join([*self._names, node.name])
        self._inside(node)
        for wanted in self._wanted:
            if name not in wanted.seen:
                wanted.seen.append(name)
            if name != wanted.function:
                continue
            if isinstance(node, ast.AsyncFunctionDef) and any(map(_yields, node.body)):
                wanted.generator = True
                continue
            line = node.decorator_list[-1] if node.decorator_list else node
            node.decorator_list.append(self._tick(name, line))
            wanted.wrapped += 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815

    def _tick(self, name: str, line: ast.expr | _Function) -> ast.expr:
        # __import__ needs no name in the module, so none of its own can be in the way.
        options = ", ".join(f"{option}={value!r}" for option, value in self._options.items())
        call = ast.parse(f"__import__('arena').tick({name!r}, {options})", mode="eval").body
        for node in ast.walk(call):
            if isinstance(node, ast.expr | ast.keyword):
                node.lineno = node.end_lineno = line.lineno
                node.col_offset = node.end_col_offset = line.col_offset
        return call


def _yields(node: ast.AST) -> bool:
    """Whether the node makes the function that it is part of a generator."""
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    return any(map(_yields, _same_function(node)))


def _same_function(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, _Function | ast.Lambda | ast.ClassDef):
        yield from ast.iter_child_nodes(node)
