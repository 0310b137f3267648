"""Everything that comes out of a recording: the terminal's tables and the files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megalatent.errors import UserError
from megalatent.profiling.advice import Advice, advise
from megalatent.profiling.diagnose import Finding, diagnose
from megalatent.profiling.records import SCHEMA, VERSION, Recording
from megalatent.profiling.report import Report, report

__all__ = ["Targets", "document", "publish", "publish_part"]

#: Traces in Perfetto's own form are told by these ends of their names.
_NATIVE = (".pftrace", ".perfetto-trace")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Where things go; None: nowhere.

    Attributes:
        json: the profile.
        trace: for Chrome or Perfetto, by the end of its name.
        html: the page.
        costs: measured costs for the planner; those of suggested settings go beside it.
        table: whether the tables are printed.
    """

    json: str | None = None
    trace: str | None = None
    html: str | None = None
    costs: str | None = None
    table: bool = True

    def check(self) -> None:
        """That all files can be written.

        Raises:
            UserError: a folder is missing or cannot be written.
        """
        for name, path in (
            ("--json", self.json),
            ("--trace", self.trace),
            ("--html", self.html),
            ("--costs", self.costs),
        ):
            folder = Path(path).absolute().parent if path else None
            if folder is not None and not folder.is_dir():
                raise UserError(f"{name}: {path}: {folder} is no folder: make it, or name another")


def document(recording: Recording, costs_file: str | None = None) -> dict[str, Any]:
    """What a profile's JSON file holds."""
    figures = report(recording)
    return _document(recording, figures, diagnose(figures), advise(recording, costs_file))


def _document(
    recording: Recording, figures: Report, findings: list[Finding], advice: Advice
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "report": {
            **figures.to_dict(),
            "findings": [asdict(finding) for finding in findings],
            "advice": advice.to_dict(),
        },
        "recording": recording.to_dict(),
    }


def publish(recording: Recording, targets: Targets, stream: IO[str] | None = None) -> None:
    """Write the files and print the tables.

    Args:
        stream: for the tables; the default is standard output.

    Raises:
        UserError: nothing was recorded.
        OSError: a file cannot be written.
    """
    from megalatent.profiling.tables import print_profile

    if not any(case.steps for case in recording.cases):
        raise UserError("nothing was recorded: every step was repeated or broken off")
    figures = report(recording)
    findings, advice = diagnose(figures), advise(recording, targets.costs)
    if targets.json:
        text = json.dumps(_document(recording, figures, findings, advice), allow_nan=False)
        Path(targets.json).write_text(text + "\n", encoding="utf-8")
    for option in advice.options:
        if option.costs_file:
            text = json.dumps(option.costs, indent=1)
            Path(option.costs_file).write_text(text + "\n", encoding="utf-8")
    if targets.trace:
        from megalatent.profiling.trace import write_chrome_trace, write_perfetto_trace

        native = targets.trace.endswith(_NATIVE)
        (write_perfetto_trace if native else write_chrome_trace)(recording, targets.trace)
    if targets.html:
        from megalatent.profiling.html import write_html

        deepest = max(figures.cases, key=lambda case: (max(case.passes), sum(case.passes)))
        said = {deepest.name: [finding.text for finding in findings]}
        write_html(recording, targets.html, findings=said)
    if targets.table:
        print_profile(figures, findings, advice, stream or sys.stdout)
        written = [p for p in (targets.json, targets.trace, targets.html, targets.costs) if p]
        for path in written:
            print(f"written: {path}", file=stream or sys.stdout, flush=True)


def publish_part(recording: Recording, targets: Targets, name: str) -> None:
    """The same in the middle of a training run: nothing that goes wrong may end it."""
    try:
        print(f" profile of {name}", flush=True)
        publish(recording, targets)
    except (UserError, OSError) as error:
        print(f"megalatent: no profile: {error}", file=sys.stderr, flush=True)
