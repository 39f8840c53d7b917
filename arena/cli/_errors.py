"""What a user can get wrong on the command line."""

__all__ = ["UsageError"]


class UsageError(Exception):
    """What the user asked for cannot be done; the text is the one line that says why."""
