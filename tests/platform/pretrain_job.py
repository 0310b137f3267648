"""A small run of Megatron's own `pretrain()` inside a rank of `run_ranks`, and what it produced."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron.core.tokenizers.text.text_tokenizer  # noqa: F401  (imports transformers: once)
import torch

from tests.distributed.layout import full_optimizer_tensors, full_parameters

SEQ, VOCAB = 16, 96

_ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu
    --group-query-attention --num-query-groups 2 --qk-layernorm --normalization RMSNorm
    --seq-length {SEQ} --max-position-embeddings {SEQ} --position-embedding-type rope
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100 --weight-decay 0.1
    --tokenizer-type NullTokenizer --vocab-size {VOCAB} --make-vocab-size-divisible-by 16
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-rope-fusion --no-masked-softmax-fusion --num-workers 0 --eval-interval 2 --eval-iters 1
    --train-iters 4 --ckpt-format torch_dist --log-interval 1
    --no-create-attention-mask-in-dataloader
""".split()


@dataclass
class Outcome:
    """What one rank saw: losses on the last stage, and the final state in full."""

    train: list[float] = field(default_factory=list)
    evaluation: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    optimizer_steps: set[float] = field(default_factory=set)
    buckets: int = 0


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Row i is drawn from seed i."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + int(index))
        row = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
        # Something to learn: every second token repeats the one before.
        row[1::2] = row[:-1:2]
        return {"tokens": row[:-1], "labels": row[1:]}


def _datasets(_samples: Any, vp_stage: int | None = None) -> Any:
    return _Rows(0), _Rows(10_000), _Rows(20_000)


_datasets.is_distributed = True  # type: ignore[attr-defined]


def run(rank: int, extra: str, save: Path | None = None, load: Path | None = None) -> Outcome:
    """Train to iteration 4, saving every second one into `save`; `load`: go on from iteration 2.

    Prints of Megatron are kept back; they are in the traceback if it fails.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            return _run(extra.split(), save, load)
    except BaseException as error:
        # SystemExit must not end the rank silently.
        raise RuntimeError(f"{type(error).__name__}: {error}\n{output.getvalue()}") from error


def _run(extra: list[str], save: Path | None, load: Path | None) -> Outcome:
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megalatent.model.layers import layer_spec

    storage = []
    if save is not None:
        storage += ["--save", str(save), "--save-interval", "2"]
    if load is not None:
        storage += ["--load", str(load), "--ckpt-step", "2"]
    sys.argv = ["job", *_ARGUMENTS, *storage, *extra]
    args = parse_and_validate_args()
    model_config = gpt_config_from_args(args)
    model_config.transformer_layer_spec = layer_spec
    outcome = Outcome()
    trained: dict[str, Any] = {}

    setup = training.setup_model_and_optimizer

    def keep(*arguments: Any, **keywords: Any) -> Any:
        made = setup(*arguments, **keywords)
        trained["chunks"], trained["optimizer"] = made[0], made[1]
        return made

    training.setup_model_and_optimizer = keep
    training.pretrain(
        pretrain_cfg_container_from_args(args, model_config),
        _datasets,
        ModelType.encoder_or_decoder,
        lambda iterator, model: _forward(iterator, model, outcome),
    )
    chunks = trained["chunks"]
    outcome.weights = full_parameters(chunks)
    outcome.buckets = sum(len(b.buckets) for chunk in chunks for b in chunk.buffers)
    optimizers = getattr(trained["optimizer"], "chained_optimizers", [trained["optimizer"]])
    for part in optimizers:
        outcome.optimizer_steps |= {float(s["step"]) for s in part.optimizer.state.values()}
    for key in ("param", "exp_avg", "exp_avg_sq"):
        outcome.optimizer[key] = full_optimizer_tensors(chunks, trained["optimizer"], key)
    return outcome


def _forward(iterator: Any, model: Any, outcome: Outcome) -> Any:
    from megatron.core import parallel_state

    row = next(iterator)
    cp, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    order = torch.arange(SEQ)
    if cp > 1:
        order = order.view(2 * cp, -1)[[rank, 2 * cp - 1 - rank]].flatten()
    tokens, labels = row["tokens"][:, order], row["labels"][:, order]
    output = model(tokens, order[None], None, labels=labels)

    def loss(losses: torch.Tensor) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int)
        report = torch.stack([total.detach(), count.float()])
        seen = report.clone()
        torch.distributed.all_reduce(
            seen, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        (outcome.train if model.training else outcome.evaluation).append(float(seen[0] / seen[1]))
        return total, count, {"lm loss": report}

    return output, loss
