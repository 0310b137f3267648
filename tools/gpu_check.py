"""Everything that needs a GPU, as one table: `tools/gpu_check.sh [--json FILE] [--only NAME …]`.

Checks are run one after another within a time budget. A check that lacks a package is skipped and
says which; without a GPU all are. Exit status: 0 if every check that ran passed, 1 if one failed,
77 if there is no GPU, so that nothing could be checked.

`--rehearse` runs on a CPU what a CPU can, to test this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tools import gpu_check_kernels, gpu_check_training
from tools.gpu_check_report import Outcome, Row

NO_GPU = 77
BUDGET_SECONDS = 7.5 * 60

Check = Callable[[str], Iterator[Outcome]]

# Name, what it shows, and the seconds it needs on one card, by estimate.
CHECKS: dict[str, tuple[Check, int]] = {
    "kernels": (gpu_check_kernels.correctness, 60),
    "noise": (gpu_check_kernels.noise, 5),
    "large": (gpu_check_kernels.large_tensors, 10),
    "graph": (gpu_check_kernels.cuda_graph, 5),
    "compile": (gpu_check_kernels.torch_compile, 30),
    "bandwidth": (gpu_check_kernels.bandwidth, 40),
    "share": (gpu_check_kernels.share_of_a_step, 5),
    "training": (gpu_check_training.against_cpu, 150),
    "layers": (gpu_check_training.layers, 80),
    "fp8": (gpu_check_training.fp8, 60),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("runs/gpu_check.json"))
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, what a CPU can do")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = "cpu" if arguments.rehearse else "cuda"
    if device == "cpu" or has_gpu:
        rows = list(run(arguments.only, device))
    else:
        rows = [Row(name, "", "skipped", "there is no CUDA device here") for name in arguments.only]
    print_table(rows)
    write_json(arguments.json, rows, device if has_gpu or arguments.rehearse else None)
    if any(row.status == "failed" for row in rows):
        return 1
    return NO_GPU if not has_gpu and not arguments.rehearse else 0


def run(names: list[str], device: str) -> Iterator[Row]:
    """Rows of the checks, in order; a check that the budget has no room for is skipped."""
    started = time.monotonic()
    gpu_check_training.set_deadline(started + BUDGET_SECONDS)
    for name in names:
        check, needed = CHECKS[name]
        left = BUDGET_SECONDS - (time.monotonic() - started)
        if left < needed:
            detail = f"{left:.0f} s are left of the time, it needs {needed} s: --only {name}"
            yield Row(name, "", "skipped", detail)
            continue
        print(f"gpu_check: {name} …", file=sys.stderr, flush=True)
        try:
            for outcome in check(device):
                yield Row(name, *dataclasses.astuple(outcome))
        except Exception as error:  # one broken check must not hide the others' results
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            yield Row(name, "", "failed", f"{type(error).__name__}: {reason}")


def print_table(rows: list[Row]) -> None:
    widths = [max(len(getattr(row, field)) for row in rows) for field in ("check", "what")]
    for row in rows:
        print(f"{row.check:<{widths[0]}}  {row.what:<{widths[1]}}  {row.status:<8} {row.detail}")
    counts = {status: sum(row.status == status for row in rows) for status in Row.STATUSES}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


def write_json(path: Path, rows: list[Row], device: str | None) -> None:
    card = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "device": device,
        "card": card,
        "torch": torch.__version__,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
