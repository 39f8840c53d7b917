"""The version of the Python side; arena/_load.py compares it with the compiled module's."""

__version__ = "0.1.0"
