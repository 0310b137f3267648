"""What a check of `tools.gpu_check` reports."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

__all__ = ["Outcome", "Row"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One result of a check: `status` is passed, failed, skipped, or measured (no goal is set)."""

    what: str
    status: str
    detail: str

    @classmethod
    def of(cls, what: str, passed: bool, detail: str) -> Outcome:
        return cls(what, "passed" if passed else "failed", detail)


@dataclasses.dataclass(frozen=True)
class Row:
    """An outcome, with the check it belongs to."""

    STATUSES: ClassVar = ("passed", "measured", "failed", "skipped")

    check: str
    what: str
    status: str
    detail: str
