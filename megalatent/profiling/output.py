"""Everything that comes out of a recording: the terminal's tables and the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megalatent.errors import UserError
from megalatent.passes.costs import Costs
from megalatent.profiling.advice import Advice, advise
from megalatent.profiling.diagnose import Finding, diagnose
from megalatent.profiling.measured_costs import cheaper_passes
from megalatent.profiling.records import SCHEMA, VERSION, Recording
from megalatent.profiling.report import Report, report
from megalatent.training.output_files import Staging, check_file

__all__ = ["Targets", "document", "publish", "write_json"]

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

    def check(self, config: str | None = None) -> None:
        """That all files can be written, as far as can be told before.

        Args:
            config: a file that is no target.

        Raises:
            UserError: a folder is missing, a file cannot be written or is meant for two things, or
                a package is missing.
        """
        taken = {} if config is None else {Path(config).resolve(): "CONFIG"}
        for name, path in (
            ("--json", self.json),
            ("--trace", self.trace),
            ("--html", self.html),
            ("--costs", self.costs),
        ):
            if path is None:
                continue
            if path in ("", "-"):
                raise UserError(f"{name}: {path!r} is no file: give a path")
            folder = Path(path).absolute().parent
            if not folder.is_dir():
                raise UserError(f"{name}: {path}: {folder} is no folder: make it, or name another")
            check_file(name, Path(path), overwrite=True)
            other = taken.setdefault(Path(path).resolve(), name)
            if other != name:
                raise UserError(f"{name}: {path} is also {other}: give another path")
        if self.trace is not None and self.trace.endswith(_NATIVE) and not find_spec("perfetto"):
            raise UserError(
                f"--trace: {self.trace}: Perfetto's own form needs the package perfetto: install"
                " megalatent[profile], or name a .json file, which Perfetto opens too"
            )


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
    """Print the tables and write the files, each of them whole or not at all.

    Args:
        stream: for the tables; the default is standard output.

    Raises:
        UserError: nothing was recorded, or a file cannot be written; the others are.
    """
    from megalatent.profiling.tables import print_profile

    if not any(case.steps for case in recording.cases):
        raise UserError("nothing was recorded: every step was repeated or broken off")
    figures = report(recording)
    findings, advice = diagnose(figures), advise(recording, targets.costs)
    out = stream or sys.stdout
    if targets.table:
        print_profile(figures, findings, advice, out)
    failed = []
    for path, write in _files(recording, targets, figures, findings, advice):
        try:
            with Staging() as staging:
                write(staging.path(Path(path).resolve()))
        except OSError as error:
            failed.append(f"{path} ({error.strerror or error})")
            continue
        if targets.table:
            print(f"written: {path}", file=out, flush=True)
    if targets.table and targets.costs:
        for remark in cheaper_passes(Costs.from_dict(figures.costs)):
            print(f"in {targets.costs}: {remark}", file=out, flush=True)
    if failed:
        raise UserError(f"not written: {', '.join(failed)}: make room there, or give other paths")


def _files(
    recording: Recording,
    targets: Targets,
    figures: Report,
    findings: list[Finding],
    advice: Advice,
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Every file, and what writes it."""
    if targets.json:
        values = _document(recording, figures, findings, advice)
        yield targets.json, partial(write_json, values)
    if targets.html:
        from megalatent.profiling.html import write_html

        deepest = max(figures.cases, key=lambda case: (max(case.passes), sum(case.passes)))
        said = {deepest.name: [finding.text for finding in findings]}
        yield targets.html, partial(write_html, recording, findings=said)
    if targets.trace:
        from megalatent.profiling.trace import write_chrome_trace, write_perfetto_trace

        native = targets.trace.endswith(_NATIVE)
        write_trace = write_perfetto_trace if native else write_chrome_trace
        yield targets.trace, partial(write_trace, recording)
    for option in advice.options:
        if option.costs_file:
            yield option.costs_file, partial(write_json, option.costs, indent=1)


def write_json(values: Any, path: Path, indent: int | None = None) -> None:
    """Write plain values; raises OSError."""
    text = json.dumps(values, indent=indent, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
