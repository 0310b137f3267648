"""The quickstart: trains a small latent-feedback model on this machine and shows what passes do.

Prepares real text (the sources and docstrings of Python's standard library), trains a tokenizer
and a small full-bandwidth transformer on a pipeline of two processes through Megatron, evaluates
it with 1 to 8 passes, writes a table and a plot, exports the model to Hugging Face form, and
samples from it in the three decoding modes. Safe to repeat: what exists is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RUN = Path("runs/quickstart")
METRICS = RUN / "checkpoints" / "metrics.jsonl"
EXPORT = RUN / "export"
PROMPT = "def read(self, size):"
MEGALATENT = [sys.executable, "-m", "megalatent.cli"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes, one pipeline stage each")
    parser.add_argument("--fresh", action="store_true", help="start anew, also if a run is there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    args = parser.parse_args()
    os.chdir(REPOSITORY)
    console = Console()
    started = time.monotonic()
    RUN.mkdir(parents=True, exist_ok=True)
    prepare_data(console)
    if args.fresh or not finished():
        shutil.rmtree(METRICS.parent, ignore_errors=True)
        if not train(console, args.nproc, args.overrides):
            return 1
    else:
        console.print(f"A finished run is in {RUN}; --fresh trains anew.")
    evaluation = list(records("evaluation"))[-1]
    console.print(results_table(evaluation))
    plot = RUN / "passes.png"
    draw(plot)
    console.print(f"plot: {plot}   metrics: {METRICS}   log: {RUN / 'train.log'}")
    if not (export(console) and sample(console)):
        return 1
    console.print(f"done in {time.monotonic() - started:.0f} s")
    return 0


def prepare_data(console: Console) -> None:
    """Text, tokenizer and token files, unless they are there."""
    if (RUN / "data.idx").exists():
        console.print(f"Data is there: {RUN / 'data.bin'}")
        return
    console.print("Preparing text: the sources and docstrings of Python's standard library")
    command = [*MEGALATENT, "data", "python-stdlib", "--train-tokenizer", "2048", "--append-eod"]
    command += ["--tokenizer", str(RUN / "tokenizer"), "--output", str(RUN / "data")]
    subprocess.run([*command, "--overwrite"], check=True)


def finished() -> bool:
    evaluations = list(records("evaluation"))
    return bool(evaluations) and evaluations[-1]["final"]


def records(kind: str) -> Iterator[dict]:
    """Complete records of one kind from the metrics file; of evaluations, those of validation."""
    if not METRICS.exists():
        return
    with METRICS.open() as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    last = max((x["iteration"] for x in lines if x["kind"] == "train"), default=0)
    total = max((x["iterations"] for x in lines if x["kind"] == "train"), default=-1)
    for record in lines:
        if record["kind"] == kind and record.get("set", "validation") == "validation":
            yield {**record, "final": last == total and record["iteration"] == last}


def train(console: Console, nproc: int, overrides: list[str]) -> bool:
    """Run the training command, showing its progress."""
    command = [*MEGALATENT, "train", str(HERE / "config.yaml"), "--nproc", str(nproc)]
    for override in [f"megatron.pipeline_model_parallel_size={nproc}", *overrides]:
        command += ["--set", override]
    console.print(f"Training on a pipeline of {nproc} stages: {' '.join(command[1:])}")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    log_path = RUN / "train.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            show_progress(console, process)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            console.print("stopped")
            return False
    if process.returncode:
        console.print(f"[red]training failed[/red] (exit code {process.returncode}); {log_path}:")
        console.print("".join(log_path.read_text().splitlines(keepends=True)[-15:]), markup=False)
        return False
    return True


def show_progress(console: Console, process: subprocess.Popen) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("iteration", total=None, note="starting Megatron")
        seen = 0
        while process.poll() is None:
            time.sleep(0.5)
            steps = list(records("train"))
            if len(steps) == seen:
                continue
            for step in steps[seen:]:
                progress.update(
                    task,
                    completed=step["iteration"],
                    total=step["iterations"],
                    note=note(step),
                )
                if not console.is_terminal:
                    console.print(f"iteration {step['iteration']}/{step['iterations']}", note(step))
            seen = len(steps)


def note(step: dict) -> str:
    losses = "  ".join(f"pass {k}: {v:.3f}" for k, v in step["loss_per_pass"].items())
    return f"{step['tokens_per_second']:,.0f} tokens/s  loss {losses}"


def export(console: Console) -> bool:
    """Convert the last checkpoint, which names its tokenizer, to Hugging Face form."""
    command = ["convert", "to-hf", str(METRICS.parent), str(EXPORT), "--overwrite"]
    return run_command(console, "Exporting the model", command)


def sample(console: Console) -> bool:
    """A sample in each decoding mode, side by side, from the export."""
    command = ["generate", str(EXPORT), "--compare", "--prompt", PROMPT]
    command += ["--max-new-tokens", "24", "--temperature", "0.7"]
    return run_command(console, "Sampling in the three modes", command)


def run_command(console: Console, what: str, command: list[str]) -> bool:
    shown = " ".join(f"'{word}'" if " " in word else word for word in command)
    console.print(f"{what}: megalatent {shown}", markup=False, highlight=False, soft_wrap=True)
    return subprocess.run([*MEGALATENT, *command]).returncode == 0


def results_table(evaluation: dict) -> Table:
    table = Table(title=f"Validation by pass, iteration {evaluation['iteration']}")
    table.add_column("passes k", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("state change |h_k - h_(k-1)| / |h_k|", justify="right")
    for k, loss in evaluation["loss_per_pass"].items():
        change = evaluation["state_change"].get(k)
        table.add_row(k, f"{loss:.4f}", "" if change is None else f"{change:.4f}")
    return table


def draw(path: Path) -> None:
    """Training losses per pass, and loss and state change by number of passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (training, loss, change) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    steps = list(records("train"))
    for k in sorted({k for step in steps for k in step["loss_per_pass"]}):
        points = [(s["iteration"], s["loss_per_pass"][k]) for s in steps if k in s["loss_per_pass"]]
        training.plot(*zip(*points, strict=True), marker=".", label=f"pass {k}")
    training.set(xlabel="iteration", ylabel="loss", title="training")
    training.legend()
    # The last evaluation of an iteration: the run ends with one more.
    for evaluation in {e["iteration"]: e for e in records("evaluation")}.values():
        label = f"iteration {evaluation['iteration']}"
        losses, changes = evaluation["loss_per_pass"], evaluation["state_change"]
        loss.plot([int(k) for k in losses], list(losses.values()), marker=".", label=label)
        change.plot([int(k) for k in changes], list(changes.values()), marker=".", label=label)
    loss.set(xlabel="passes k", ylabel="loss", title="validation loss by pass")
    change.set(xlabel="passes k", title="state change by pass", yscale="log")
    change.set_ylabel(r"$|h^{(k)} - h^{(k-1)}| \,/\, |h^{(k)}|$")
    for axes in (loss, change):
        axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
