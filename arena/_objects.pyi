"""Stubs of the compiled module behind ``objects=True``: cffi's lib and ffi."""

from typing import Any

ffi: Any
lib: Any
