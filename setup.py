"""The cffi build and the abi3 tag; everything else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Abi3Wheel(bdist_wheel):
    """One wheel for CPython 3.11 and every later one."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


setup(
    cffi_modules=["arena/_build.py:ffibuilder"],
    cmdclass={"bdist_wheel": Abi3Wheel},
)
