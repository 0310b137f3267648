"""Errors that are the user's to mend: shown as one line, never as a traceback."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """What was given, what is wrong with it, and what to do, in one sentence.

    The command line prints it as `megalatent: error: …` and exits with code 2.
    """
