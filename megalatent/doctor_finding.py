"""One row of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status"]

Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        name: what was looked at.
        status: `ok` if it runs here, `absent` if it is not there (its `detail` says what that
            costs, or how to get it), `broken` if it is there and does not work.
        detail: version, choice or reason, in one sentence.
        needed: without it nothing trains here.
    """

    name: str
    status: Status
    detail: str
    needed: bool = False
