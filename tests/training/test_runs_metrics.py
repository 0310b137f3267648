"""What a run reports of itself: the fusion's gradient, counts, and where all of it is written."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent.cli import main
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import Rig, Setup
from tests.training.runs import MIXED, configuration, metrics, train

full = pytest.mark.full

LATENT = {"passes": MIXED}
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
STEPS = 6


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a checkpoint: layouts initialise differently, and load alike."""
    folder = tmp_path_factory.mktemp("start")
    train(configuration(folder, LATENT, save=str(folder / "start"), train_iters=1))
    return folder


def _run(start: Path, save: Path, ranks: int, each_step: Any = None, **options: Any) -> Any:
    load = {"load": str(start / "start"), "finetune": True, "train_iters": STEPS}
    given = configuration(start, LATENT, save=str(save), **load, **options)
    return train(given, ranks, each_step=each_step), metrics(save)


_SUMS: dict[str, torch.Tensor] = {}


def _sum_of_autograd(chunks: list[Any], optimizer: Any, step: int) -> float:
    """Norm of the sum of all gradients that autograd gave the fusion's weights in the step."""
    if step == 0 or not _SUMS:
        for name, weight in chunks[0].named_parameters():
            if "fusion." in name:
                _SUMS[name] = torch.zeros_like(weight)

                def add(gradient: torch.Tensor, name: str = name) -> None:
                    _SUMS[name] += gradient

                weight.register_hook(add)
        return 0.0
    norm = torch.cat([gradient.flatten() for gradient in _SUMS.values()]).norm()
    for gradient in _SUMS.values():
        gradient.zero_()
    return float(norm)


@pytest.fixture(scope="module")
def one_rank(start: Path) -> Any:
    # No clipping, which comes later and must not show; the fusion's gradient is not scaled.
    outcomes, records = _run(start, start / "one", 1, _sum_of_autograd)
    return outcomes[0], records


def _norms(records: dict[int, Any]) -> list[float | None]:
    return [record["fusion_gradient_norm"] for record in records.values()]


def test_fusion_gradient_norm_is_autograds(one_rank: Any) -> None:
    outcome, records = one_rank
    passes = [len(record["loss_per_pass"]) for record in records.values()]
    assert {1, 2, 3} <= set(passes)
    for norm, expected, k in zip(_norms(records), outcome.kept[1:], passes, strict=True):
        if k == 1:
            assert norm is None
            assert expected == 0.0
        else:
            assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="tp2", marks=full),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="pp2"),
        pytest.param(2, SHARDED, id="dp2-sharded"),
        pytest.param(2, {}, id="dp2", marks=full),
        pytest.param(
            2,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="tp2-sp",
            marks=full,
        ),
        pytest.param(2, {"context_parallel_size": 2}, id="cp2", marks=full),
        pytest.param(
            4,
            {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, **SHARDED},
            id="pp2-tp2-sharded",
            marks=full,
        ),
    ],
)
def test_other_layouts_report_alike(
    start: Path, one_rank: Any, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    outcomes, records = _run(start, tmp_path, ranks, _saved_state, **options)
    # Adam makes rounding errors grow over the steps.
    for norm, expected in zip(_norms(records), _norms(one_rank[1]), strict=True):
        assert norm == (None if expected is None else pytest.approx(expected, rel=1e-3))
    for step, record in records.items():
        for name in ("pass_counts", "token_equivalent_tokens", "passes_per_step"):
            same = _per_step(one_rank[1][step], name)
            assert _per_step(record, name) == same, name
        assert record["flops"] == pytest.approx(one_rank[1][step]["flops"])
    # Megatron compares what the ranks would save, and warns where it differs.
    first, *others = [outcome.kept for outcome in outcomes]
    assert first[-1]["fusion_updates"] == sum(n is not None for n in _norms(records))
    assert all(kept == first for kept in others)


def _per_step(record: dict[str, Any], name: str) -> Any:
    if name != "pass_counts":
        return record[name]
    # Micro-batches of the global batch; with more ranks each has fewer.
    total = sum(record[name].values())
    return {k: n / total for k, n in record[name].items()}


def _saved_state(chunks: list[Any], optimizer: Any, step: int) -> Any:
    from megatron.training import get_args

    return getattr(get_args(), "latent_state", None)


def test_counts_are_those_of_the_steps(one_rank: Any) -> None:
    _, records = one_rank
    counts: Counter[str] = Counter()
    tokens = 0
    for record in records.values():
        k = len(record["loss_per_pass"])
        counts[str(k)] += 2  # micro-batches
        tokens += k * 4 * 32
        assert record["pass_counts"] == counts
        assert record["token_equivalent_tokens"] == tokens
        share = {k: n / sum(counts.values()) for k, n in counts.items()}
        assert record["mixture"] == pytest.approx(share)


def _repeat(rank: int) -> list[tuple[int, float]]:
    init(Layout())
    rig = Rig(Setup(passes=(2, 2), masked=False), Layout())
    seen = []
    for _ in range(2):
        rig.run()
        seen.append(_tokens(rig))
    rig.next_step()
    rig.run()
    seen.append(_tokens(rig))
    return seen


def _tokens(rig: Any) -> tuple[int, float]:
    sums = rig.schedule.train_sums.values()
    return len(sums), sum(float(s.loss[1][1]) for s in sums)


def test_a_replayed_step_is_counted_once() -> None:
    tokens = 4 * 32
    assert run_ranks(1, _repeat)[0] == [(1, tokens), (1, tokens), (2, 2 * tokens)]


# A stand-in for the package, which logs to a server: it writes what it is given.
_WANDB = """
import json, os
def init(**options):
    globals()["path"] = os.path.join(options["dir"], "run.jsonl")
    open(path, "w").close()
    return globals()
def log(values, step=None):
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}
    with open(path, "a") as file:
        file.write(json.dumps([step, numbers]) + "\\n")
class Anything:
    def __call__(self, *args, **options): return self
    def __getattr__(self, name): return self
config = run = Artifact = finish = Anything()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_WANDB)
    monkeypatch.syspath_prepend(str(package.parent))
    return {
        "wandb_project": "passes",
        "wandb_exp_name": "test",
        "wandb_save_dir": str(tmp_path / "wandb"),
    }


def test_everything_goes_everywhere(tmp_path: Path, wandb: dict[str, Any]) -> None:
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = str(tmp_path / "board")
    latent = {"passes": {**MIXED, "eval_passes": 3}}
    evaluated = {"eval_interval": 4, "eval_iters": 1, "train_iters": 4, "log_interval": 2}
    given = configuration(
        tmp_path, latent, save=str(tmp_path / "run"), tensorboard_dir=board, **evaluated, **wandb
    )
    printed = train(given)[0].printed
    assert len(re.findall(r"^ fusion kernels: .* \(auto: .*\)$", printed, re.MULTILINE)) == 1
    expected: dict[tuple[str, int], float] = {}
    for step, record in metrics(tmp_path / "run").items():
        named = {
            "passes per step": record["passes_per_step"],
            "token-equivalent tokens": record["token_equivalent_tokens"],
            "TFLOP per second and rank": record["flops_per_second_and_rank"] / 1e12,
            **{f"loss pass {k}": loss for k, loss in record["loss_per_pass"].items()},
            **{f"share of K={k}": share for k, share in record["mixture"].items()},
        }
        if record["fusion_gradient_norm"] is not None:
            named["fusion gradient norm"] = record["fusion_gradient_norm"]
            assert f"fusion grad norm: {record['fusion_gradient_norm']:.3E}" in printed
        expected |= {(f"latent/{name}", step): value for name, value in named.items()}
        assert f"token-equivalent tokens: {record['token_equivalent_tokens']:,}" in printed
        for k, share in record["mixture"].items():
            assert re.search(rf"so far: .*K={k} {share:.1%}", printed)
    (evaluation,) = metrics(tmp_path / "run", "evaluation").values()
    for name, key in (("validation loss", "loss_per_pass"), ("state change", "state_change")):
        for k, value in evaluation[key].items():
            expected[f"latent/{name} pass {k}", 4] = value
    assert len({name for name, _ in expected}) >= 12

    lines = (tmp_path / "wandb" / "run.jsonl").read_text().splitlines()
    logged = {
        (name, step): value
        for step, values in map(json.loads, lines)
        for name, value in values.items()
        if name.startswith("latent/")
    }
    assert logged == pytest.approx(expected)
    found = events.EventAccumulator(board)
    found.Reload()
    shown = {
        (name, event.step): event.value
        for name in found.Tags()["scalars"]
        if name.startswith("latent/")
        for event in found.Scalars(name)
    }
    assert shown == pytest.approx(expected, rel=1e-6)  # fp32


def test_a_refused_checkpoint_leaves_nothing_behind(
    start: Path, tmp_path: Path, wandb: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a folder of TensorBoard or W&B, nor a run on W&B's server."""
    import yaml

    given = configuration(
        start,
        {"fusion": {"kind": "additive"}, **LATENT},
        load=str(start / "start"),
        finetune=True,
        train_iters=2,
        save=str(tmp_path / "save"),
        tensorboard_dir=str(tmp_path / "board"),
        **wandb,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    assert main(["train", str(path), "--nproc", "1"]) == 2
    assert "fusion" in capfd.readouterr().err
    assert not {p.name for p in tmp_path.iterdir()} & {"save", "board", "wandb"}


def test_lines_of_router_losses_do_not_grow_with_the_passes(tmp_path: Path) -> None:
    """The additive fusion starts at zero: at first the second pass repeats the first."""
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    losses = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01, "mtp_num_layers": 1}
    shown = []
    for k in (1, 2):
        latent = {"fusion": {"kind": "additive"}, "passes": {"schedule": k, "timeout_seconds": 300}}
        given = configuration(tmp_path, latent, train_iters=1, **experts, **losses)
        printed = train(given)[0].printed
        names = ("load_balancing_loss", "z_loss", "mtp_1 loss")
        found = [re.search(rf"{name}: (\S+)", printed) for name in names]
        shown.append([float(match.group(1)) for match in found if match])
    assert len(shown[0]) == 3
    assert min(shown[0]) > 0
    assert shown[1] == pytest.approx(shown[0], rel=1e-5)
