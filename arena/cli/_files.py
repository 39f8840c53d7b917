"""Output files: found unwritable before the run, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from arena.cli._errors import UsageError

__all__ = ["output"]


@contextlib.contextmanager
def output(path: Path, option: str) -> Iterator[Path]:
    """Lend a new file beside ``path``, which takes its place once something was written to it.

    Raises UsageError, naming ``option``, when that cannot work.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # replacing /dev/stdout would be a surprise
        raise UsageError(f"{option} {str(path)!r} is not a regular file")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.touch(exist_ok=False)
    except FileExistsError:
        raise UsageError(
            f"{option} {str(path)!r} is named twice, or left by a killed run"
        ) from None
    except OSError as error:
        raise UsageError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from None
    try:
        yield draft
        if draft.stat().st_size:
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
