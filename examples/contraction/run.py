"""The contraction study: do more passes than were trained settle at a fixed point, or run away?

Trains one small model three times, changing nothing but the mixture over the number of passes K,
and evaluates each with 1 to 30 passes. Safe to stop and to repeat: finished trainings are kept,
an interrupted one goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(REPOSITORY))

from examples.contraction.report import draw, markdown, read_training  # noqa: E402

MEGALATENT = [sys.executable, "-m", "megalatent.cli"]


@dataclass(frozen=True)
class Variant:
    """One training of the study.

    Attributes:
        name: of its folder.
        label: of its column and curve.
        schedule: `latent.passes.schedule`, as it is written after `--set`.
        eval_passes: a fusion that was never trained has nothing to say beyond k = 1.
    """

    name: str
    label: str
    schedule: str
    eval_passes: int | None = None


# The baseline comes last: the other two are the study.
VARIANTS = (
    Variant("two", "75% K=1, 25% K=2", "{1: 0.75, 2: 0.25}"),
    Variant("three", "75% K=1, 22% K=2, 3% K=3", "{1: 0.75, 2: 0.22, 3: 0.03}"),
    Variant("one", "100% K=1", "1", eval_passes=1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "runs/contraction")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(len(VARIANTS), len(os.sched_getaffinity(0))),
        help="trainings at a time, one process of one thread each",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs} trains nothing: give 1 or more")
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    prepare_data(output)
    if not train_all(output, args.jobs, args.overrides):
        return 1
    write_report(output)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    return 0


def prepare_data(output: Path) -> None:
    """Text, tokenizer and token files, unless they are there."""
    if (output / "data.idx").exists():
        return
    print("preparing text: the sources and docstrings of Python's standard library", flush=True)
    command = [*MEGALATENT, "data", "python-stdlib", "--train-tokenizer", "2048", "--append-eod"]
    command += ["--tokenizer", str(output / "tokenizer"), "--output", str(output / "data")]
    subprocess.run([*command, "--overwrite"], check=True, cwd=REPOSITORY)


def train_all(output: Path, jobs: int, overrides: list[str]) -> bool:
    """Run what is not finished, `jobs` at a time; whether all of it finished."""
    waiting = [v for v in VARIANTS if not read_training(output / v.name, v.label).finished]
    running: dict[str, subprocess.Popen[bytes]] = {}
    fine = True
    try:
        while running or (waiting and fine):
            while fine and waiting and len(running) < jobs:
                variant = waiting.pop(0)
                print(f"training {variant.label}; log: {output / variant.name}.log", flush=True)
                running[variant.name] = start(output, variant, overrides)
            time.sleep(0.5)
            for name in [n for n, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode:
                    print(f"training failed; the end of {output / name}.log:", file=sys.stderr)
                    lines = (output / f"{name}.log").read_text(errors="replace").splitlines()
                    print("\n".join(lines[-15:]), file=sys.stderr)
                    fine = False
    except KeyboardInterrupt:
        for process in running.values():
            process.terminate()  # Megatron saves at this signal
            process.wait()
        print("stopped; the same command goes on from here")
        return False
    unfinished = [v for v in VARIANTS if not read_training(output / v.name, v.label).finished]
    return fine and not unfinished


def start(output: Path, variant: Variant, overrides: list[str]) -> subprocess.Popen[bytes]:
    """Start a training, or go on with it."""
    folder = output / variant.name
    settings = [
        f"megatron.tokenizer_model={output / 'tokenizer'}",
        f"megatron.data_path=[{output / 'data'}]",
        f"megatron.data_cache_path={folder / 'cache'}",
        f"megatron.save={folder}",
        f"latent.passes.schedule={variant.schedule}",
    ]
    if (folder / "latest_checkpointed_iteration.txt").exists():
        settings.append(f"megatron.load={folder}")
    settings += overrides
    if variant.eval_passes is not None:
        settings.append(f"latent.passes.eval_passes={variant.eval_passes}")
    command = [*MEGALATENT, "train", str(HERE / "config.yaml"), "--nproc", "1"]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (output / f"{variant.name}.log").open("a") as log:
        # Ctrl-C reaches this process alone, which then ends the trainings in order.
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )


def write_report(output: Path) -> None:
    """The table and the plot of all three trainings."""
    trainings = [read_training(output / v.name, v.label) for v in VARIANTS]
    table = markdown(trainings)
    (output / "table.md").write_text(table)
    draw(trainings, output / "contraction.svg")
    print(table)
    print(f"table: {output / 'table.md'}   plot: {output / 'contraction.svg'}")


if __name__ == "__main__":
    sys.exit(main())
