"""Benchmarks of arena: ``python -m benchmarks NAME``; each module without a leading _ is a NAME."""


class UnavailableError(Exception):
    """A benchmark cannot run here; the text says why, in one line."""
