"""Whole runs in forked ranks, on a tiny model and tiny data, and what they gave.

A run is a configuration as a user writes it, trained by `pretrain.run` or by Megatron alone. What
it gave is read where a user reads it (`metrics.jsonl`, the printed lines) and from the model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalatent import platform

platform.install()

# What every rank would otherwise import after the fork.
for _name in (
    "megalatent.training.setup",
    "megalatent.checkpoint.fresh",
    "megalatent.training.pretrain",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.core.models.mimo",
    "megatron.training.datasets.sft_dataset",
):
    importlib.import_module(_name)

from megatron.training import training  # noqa: E402

from megalatent.config import Config  # noqa: E402
from megalatent.training import pretrain  # noqa: E402
from megalatent.training.exits import TrainingStopped  # noqa: E402
from tests.distributed.harness import run_ranks  # noqa: E402
from tests.distributed.layout import (  # noqa: E402
    OPTIMIZER_TENSORS,
    full_optimizer_tensors,
    full_parameters,
)
from tests.waiting import HANG  # noqa: E402

__all__ = [
    "CHANGING",
    "MIXED",
    "SEQ",
    "VOCAB",
    "Outcome",
    "Sources",
    "configuration",
    "last_stage",
    "losses",
    "metrics",
    "same_state",
    "train",
]

SEQ = 32
VOCAB = 64  # no padding on one or two TP ranks; the last token ends documents

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.1,
    "seq_length": SEQ,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 8,
    "num_workers": 0,
    "split": "90,10,0",
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "lr": 3e-3,
    "lr_decay_iters": 100,
    "weight_decay": 0.1,
    "log_interval": 1,
    "eval_iters": 0,
    "no_create_attention_mask_in_dataloader": True,
    "ckpt_format": "torch_dist",
    "save_interval": 1000,
    "no_persist_layer_norm": True,  # plain Megatron's norms refuse it
}

# K changes all the time; jitter and prefix mixin are on by default.
MIXED: dict[str, Any] = {
    "schedule": {1: 0.4, 2: 0.3, 3: 0.3},
    "lambda": 0.5,
    "timeout_seconds": 300,
}
# K is 2, 1, 3, 1, 2 in the first five steps.
CHANGING: dict[str, Any] = {
    "schedule": [
        {"start": start, "mixture": {passes: 1.0}} for start, passes in enumerate((2, 1, 3, 1, 2))
    ],
    "lambda": 0.5,
    "timeout_seconds": 300,
}


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        log: step -> what Megatron's own log is given: `loss` (last stage only) and `grad_norm`.
        weights: all weights in full, by global name.
        optimizer: `param` (masters), `exp_avg`, … -> the same in full.
        steps: every count of steps found in the optimiser's states.
        printed: what the rank printed.
        exit_code: of `sys.exit`, or None if the run came to its end.
        kept: what `each_step` returned: first before any step, then step by step.
    """

    log: dict[int, dict[str, float]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    steps: set[float] = field(default_factory=set)
    printed: str = ""
    exit_code: int | None = None
    kept: list[Any] = field(default_factory=list)


def write_data(prefix: Path, *, documents: int = 120) -> None:
    """Documents of uneven length with something to learn: every second token repeats."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    generator = torch.Generator().manual_seed(0)
    for i in range(documents):
        tokens = torch.randint(VOCAB - 1, (6 + (i * 7) % 60,), generator=generator)
        tokens[1::2] = tokens[: len(tokens) // 2 * 2 : 2]
        tokens[-1] = VOCAB - 1
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def configuration(
    folder: Path, latent: Mapping[str, Any] | None = None, **megatron: Any
) -> dict[str, Any]:
    """What a configuration file holds: the tiny model on the data in `folder`.

    Args:
        folder: holds the data, which is written if it is not there.
        latent: the section `latent:`; the default changes K all the time.
        megatron: options besides those of `MODEL`; None leaves one out.
    """
    prefix = folder / "data"
    if not prefix.with_suffix(".idx").exists():
        write_data(prefix)
    options = {**MODEL, "data_path": [str(prefix)], "data_cache_path": str(folder / "cache")}
    options |= megatron
    return {
        "latent": {"passes": MIXED} if latent is None else dict(latent),
        "megatron": {name: value for name, value in options.items() if value is not None},
    }


# Called with the wrapped chunks, Megatron's optimiser and the number of steps done, before the
# first step and after each.
EachStep = Callable[[list[Any], Any, int], Any]


@dataclass(frozen=True, kw_only=True)
class _Job:
    run: Callable[[Config], None]
    config: Config
    each_step: EachStep | None
    prepare: Callable[[int], None] | None


def train(
    given: Mapping[str, Any],
    ranks: int = 1,
    *,
    plain_megatron: bool = False,
    each_step: EachStep | None = None,
    prepare: Callable[[int], None] | None = None,
    timeout: float = HANG,
) -> list[Outcome]:
    """Run a configuration on `ranks` ranks to its end; outcomes by rank.

    Args:
        plain_megatron: nothing of ours but the datasets: Megatron's model, schedule and loss.
        each_step: called on every rank before the first step and after each; its results are kept.
        prepare: called on every rank before the run, for patches.

    Raises:
        RankError: a rank failed; the message has what it printed.
    """
    config = Config.from_mapping(given)
    config.check(ranks)
    run = run_plain_megatron if plain_megatron else pretrain.run
    job = _Job(run=run, config=config, each_step=each_step, prepare=prepare)
    return run_ranks(ranks, _rank, job, timeout=timeout)


def _rank(rank: int, job: _Job) -> Outcome:
    outcome, made = Outcome(), dict[str, Any]()
    _observe(job, outcome, made)
    if job.prepare is not None:
        job.prepare(rank)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            job.run(job.config)
    except SystemExit as end:
        outcome.exit_code = end.code if isinstance(end.code, int) else 0
    except TrainingStopped as end:
        outcome.exit_code = end.status
    except BaseException as error:
        shown = printed.getvalue().split("end of arguments")[-1]
        raise RuntimeError(f"{type(error).__name__}: {error}\n{shown}") from error
    outcome.printed = printed.getvalue()
    chunks, optimizer = made["chunks"], made["optimizer"]
    outcome.weights = full_parameters(chunks)
    if optimizer is None:  # nothing was to be trained
        return outcome
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if "step" in state:
                outcome.steps.add(float(state["step"]))
    outcome.optimizer = {
        key: full_optimizer_tensors(chunks, optimizer, key) for key in OPTIMIZER_TENSORS
    }
    return outcome


def _observe(job: _Job, outcome: Outcome, made: dict[str, Any]) -> None:
    """Look on at the module attributes through which Megatron calls its own functions."""
    setup, log = training.setup_model_and_optimizer, training.training_log
    after_step = training.post_training_step_callbacks

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        made["chunks"], made["optimizer"] = result[0], result[1]
        if job.each_step is not None:
            outcome.kept.append(job.each_step(result[0], result[1], training.get_args().iteration))
        return result

    @functools.wraps(log)
    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _, _, iteration, _, _, _, grad_norm, *_ = args
        # A step that is skipped because of an overflow has no norm.
        seen = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        if "lm loss" in loss_dict:
            seen["loss"] = float(loss_dict["lm loss"])
        outcome.log[iteration] = seen
        return log(loss_dict, *args, **kwargs)

    def post_training_step_callbacks(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any
    ) -> Any:
        if job.each_step is not None:
            outcome.kept.append(job.each_step(model, optimizer, iteration))
        return after_step(model, optimizer, scheduler, iteration, *rest)

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.training_log = training_log
    training.post_training_step_callbacks = post_training_step_callbacks


def run_plain_megatron(config: Config) -> None:
    """Megatron alone on the same options: its layers, its schedule, its example's loss."""
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megalatent.training.data import dataset_provider

    sys.argv = ["megatron", *config.megatron_argv()]
    args = parse_and_validate_args()
    model_config = gpt_config_from_args(args)
    training.pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        dataset_provider,
        ModelType.encoder_or_decoder,
        _forward_step,
    )


def _forward_step(iterator: Any, model: Any) -> Any:
    from megatron.core.tensor_parallel import broadcast_data

    given = next(iterator) if iterator is not None else None
    batch = broadcast_data(["tokens", "labels", "position_ids"], given, torch.int64)
    mask = broadcast_data(["loss_mask"], given, torch.float32)["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> Any:
        total = torch.sum(losses.view(-1).float() * mask.view(-1))
        tokens = mask.sum().clone().detach().to(torch.int)
        report = torch.cat([total.clone().detach().view(1), tokens.view(1)])
        return total, tokens, {"lm loss": report}

    return output, loss


class Sources:
    """Uninterrupted runs by layout, each made once.

    Args:
        train: called with the folder, the run's name in it, the number of ranks, and options.
    """

    def __init__(
        self, folder: Path, train: Callable[[Path, str, int, dict[str, Any]], Outcome]
    ) -> None:
        self.folder, self.train = folder, train
        self.made: dict[str, Outcome] = {}

    def get(self, ranks: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        name = f"{ranks} {options}".translate(str.maketrans("", "", " {}':,_"))
        if name not in self.made:
            self.made[name] = self.train(self.folder, name, ranks, options)
        return name, self.made[name]


def last_stage(outcomes: list[Outcome]) -> Outcome:
    """The outcome of a rank that saw losses."""
    return next(o for o in outcomes if any("loss" in seen for seen in o.log.values()))


def metrics(
    folder: Path, kind: str = "train", name: str = "validation"
) -> dict[int, dict[str, Any]]:
    """Records of `metrics.jsonl` by iteration; of a repeated iteration the last one.

    Args:
        name: of the set, for evaluations.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
        record["iteration"]: record
        for record in records
        if record["kind"] == kind and record.get("set", name) == name
    }


def losses(folder: Path) -> dict[int, dict[str, float]]:
    """Losses per pass of every step."""
    return {iteration: record["loss_per_pass"] for iteration, record in metrics(folder).items()}


def same_state(got: Outcome, want: Outcome) -> None:
    """Assert that weights and optimisers are equal to the last bit."""
    assert got.steps == want.steps
    assert got.weights.keys() == want.weights.keys()
    for name, tensor in want.weights.items():
        assert torch.equal(got.weights[name], tensor), name
    for key, tensors in want.optimizer.items():
        for name, tensor in tensors.items():
            assert torch.equal(got.optimizer[key][name], tensor), f"{key} of {name}"
