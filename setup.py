"""The cffi builds and the wheel's tag; everything else is in pyproject.toml.

ARENA_NO_OBJECTS=1 in the environment leaves out what `arena.tick(objects=True)` needs, which is
compiled for one version of CPython; the wheel is then one for all of them.
"""

import os

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

OBJECTS = os.environ.get("ARENA_NO_OBJECTS", "") in ("", "0")


class Wheel(bdist_wheel):
    """One wheel for each version of CPython; without objects one for 3.11 and every later one."""

    def finalize_options(self) -> None:
        if not OBJECTS:
            self.py_limited_api = "cp311"
        super().finalize_options()


setup(
    cffi_modules=[
        "arena/_build.py:ffibuilder",
        *(["arena/_build_objects.py:ffibuilder"] if OBJECTS else []),
    ],
    cmdclass={"bdist_wheel": Wheel},
)
