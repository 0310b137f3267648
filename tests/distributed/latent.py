"""A small latent model on any layout, its data, and one training step through the real schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megalatent import kernels
from megalatent.config import FusionConfig, LatentConfig, ModelConfig, PassesConfig
from megalatent.model.batch import RowSettings
from megalatent.model.build import latent_model
from megalatent.model.fusion import FUSIONS
from megalatent.model.layers import layer_spec
from megalatent.training.data import DataSettings
from megalatent.training.schedule import LatentSchedule, StepPosition
from tests.distributed.harness import Layout
from tests.distributed.layout import initialise
from tests.oracle.model import Shape

VOCAB = 61  # padded to 64 on one TP rank: the padding must not show
EOD = 60
SEED = (7 << 32) + 11


@dataclass(frozen=True)
class Setup:
    """A model, its data and how it is trained; the layout is separate.

    Attributes:
        passes: K of each micro-batch of a step on one data-parallel rank.
        batch: rows of the global batch.
        packed: rows hold several documents, isolated by attention masks.
        thd: packed rows are given as THD sequences instead.
        std: of all matrices.
        model: what the layers have besides Megatron's options.
        window: Megatron's `window_size` and `window_attn_skip_freq`, or None.
    """

    fusion: str = "gated"
    passes: tuple[int, ...] = (2, 2)
    batch: int = 4
    seq_length: int = 32
    hidden: int = 32
    layers: int = 4
    jitter: float = 0.02
    prefix_mixin: bool = True
    input_norm: str = "fused"
    packed: bool = True
    thd: bool = False
    weighting: str = "mean"
    lambda_: float = 0.5  # not 1: with 1 and K = 2 a wrong pass weight would not show
    eval_passes: int = 2
    recompute: Any = "never"
    per_token: bool = False
    masked: bool = True
    dtype: torch.dtype = torch.float32
    ddp: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    std: float = 0.1
    plain_prompts: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    window: tuple[tuple[int, int], int] | None = None

    def latent(self) -> LatentConfig:
        fuses = self.fusion != "none"
        return LatentConfig(
            seed=SEED,
            model=self.model,
            fusion=FusionConfig(
                kind=self.fusion,
                input_norm=self.input_norm,  # type: ignore[arg-type]
                jitter=self.jitter if fuses else 0.0,
                prefix_mixin=self.prefix_mixin and fuses,
                init_std=0.02,
            ),
            passes=PassesConfig(
                schedule=PassesConfig().schedule if fuses else _plain_schedule(),
                loss_weighting=self.weighting,  # type: ignore[arg-type]
                lambda_=self.lambda_,
                eval_passes=self.eval_passes if fuses else 1,
                recompute=self.recompute,
                timeout_seconds=300,
            ),
        )

    def shape(self) -> Shape:
        """What the oracle must be told of the model."""
        window = {} if self.window is None else {"window": self.window[0][0] + 1}
        every = None if self.window is None else self.window[1]
        return Shape(
            layers=self.layers,
            heads=4,
            groups=2,
            head_dim=self.hidden // 4,
            vocab=VOCAB,
            full_every=every,
            multiplier=self.model.residual_multiplier,
            **window,
        )

    def starts(self, samples: Sequence[int]) -> torch.Tensor:
        """Document starts of these samples, ``[b, S]`` bool."""
        tokens = torch.stack([self.row(s)[:-1] for s in samples])
        starts = torch.zeros_like(tokens, dtype=torch.bool)
        starts[:, 0] = True
        starts[:, 1:] |= tokens[:, :-1] == EOD
        return starts

    def row(self, sample: int) -> torch.Tensor:
        """Tokens of a sample and the one that follows, ``[S + 1]``."""
        generator = torch.Generator().manual_seed(1000 + sample)
        row = torch.randint(0, EOD, (self.seq_length + 1,), generator=generator)
        if self.packed:
            for end in (4 + 2 * (sample % 3), 17, 18 + sample % 5):  # odd and even lengths, 1 token
                row[end] = EOD
        return row

    def micro_batch(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """A whole micro-batch as Megatron's loader gives it."""
        rows = torch.stack([self.row(s) for s in samples])
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape)
        if self.masked:
            # Uneven, so that a mean over the wrong count shows.
            for i, s in enumerate(samples):
                loss_mask[i, : 3 + 2 * (s % 4)] = 0.0
        documents = self.starts(samples).cumsum(1)
        length = self.seq_length
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        different = documents[:, :, None] != documents[:, None, :]
        raw = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": torch.arange(length).expand_as(tokens).contiguous(),
        }
        if self.thd:
            bounds = torch.full((len(samples), length + 1), length, dtype=torch.int32)
            for i, starts in enumerate(self.starts(samples)):
                where = torch.nonzero(starts).flatten()
                bounds[i, : len(where)] = where
            sizes = bounds[:, 1:] - bounds[:, :-1]
            raw |= {"cu_seqlens": bounds, "max_seqlen": sizes.max(1).values.to(torch.int32)}
        else:
            raw["attention_mask"] = (causal | different)[:, None]
        return raw


def _plain_schedule() -> Any:
    from megalatent.config import PhaseConfig

    return (PhaseConfig(start=0, mixture={1: 1.0}),)


class FixedPasses:
    """A sampler that gives what the setup says."""

    def __init__(self, passes: Sequence[int]) -> None:
        self.given = tuple(passes)

    def passes(self, iteration: int, micro_batches: int) -> tuple[int, ...]:
        assert micro_batches == len(self.given)
        return self.given


class Rig:
    """The model and schedule of one rank."""

    def __init__(self, setup: Setup, layout: Layout) -> None:
        self.setup, self.layout = setup, layout
        self.micro_batches = len(setup.passes)
        per_rank = setup.batch // layout.dp
        assert per_rank % self.micro_batches == 0
        self.micro_batch_size = per_rank // self.micro_batches
        self.step_position = StepPosition(0, 0)
        self.config = self._transformer_config()
        self.models = [self._model(v) for v in range(layout.vp or 1)]
        self.chunks: list[Any] = list(self.models)
        if setup.dtype != torch.float32:
            from megatron.core.transformer.module import Float16Module

            self.chunks = [Float16Module(self.config, m) for m in self.models]
        ddp = DistributedDataParallelConfig(**setup.ddp)
        self.chunks = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.schedule = self._schedule()

    def _transformer_config(self) -> TransformerConfig:
        setup = self.setup
        kwargs: dict[str, Any] = {
            "num_layers": setup.layers,
            "hidden_size": setup.hidden,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 2 * setup.hidden,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            "params_dtype": setup.dtype,
            "bf16": setup.dtype == torch.bfloat16,
            "calculate_per_token_loss": setup.per_token,
            "masked_softmax_fusion": False,
            "apply_rope_fusion": False,
            "deallocate_pipeline_outputs": True,
        }
        if setup.recompute != "never":
            kwargs |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        if setup.window is not None:
            kwargs["window_size"], kwargs["window_attn_skip_freq"] = setup.window
        layout = self.layout.config_kwargs() | {"pipeline_dtype": setup.dtype}
        return TransformerConfig(**{**kwargs, **layout, **setup.config})

    def _model(self, chunk: int) -> Any:
        vp_stage = chunk if self.layout.vp else None
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        multiple = 8 * self.layout.tp
        backbone = GPTModel(
            self.config,
            layer_spec(self.config, vp_stage=vp_stage, model=self.setup.model),
            -(-VOCAB // multiple) * multiple,
            self.setup.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        model = latent_model(backbone, self.setup.latent(), VOCAB)
        initialise(model, vocab_size=VOCAB, std=self.setup.std)
        return model

    def _schedule(self) -> LatentSchedule:
        setup, latent = self.setup, self.setup.latent()
        rows = None
        if setup.fusion in FUSIONS:
            rows = RowSettings(seed=SEED, jitter=setup.jitter, prefix_mixin=setup.prefix_mixin)
        data = DataSettings(
            seq_length=setup.seq_length,
            end_of_document=EOD if setup.packed else None,
            packed=setup.thd,
            attention_mask=not setup.thd,
            rows=rows,
            sequence_parallel=self.layout.sp,
            plain_prompts=setup.plain_prompts,
        )
        return LatentSchedule(
            latent,
            sampler=FixedPasses(setup.passes),  # type: ignore[arg-type]
            data=data,
            kernels=kernels.select("torch", torch.device("cpu"), setup.dtype),
            position=lambda: self.step_position,
        )

    def samples(self, micro_batch: int) -> list[int]:
        """Consumed-sample indices of this rank's micro-batch."""
        dp, rank = self.layout.dp, parallel_state.get_data_parallel_rank()
        consumed = self.step_position.consumed_samples
        first = consumed + (micro_batch * dp + rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for i in range(self.micro_batches):
            yield self.setup.micro_batch(self.samples(i))

    def run(self, *, forward_only: bool = False) -> list[dict[str, torch.Tensor]]:
        """One forward and backward over a step's micro-batches; gradients are left in place."""
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        return self.schedule(
            data_iterator=self.batches(),
            model=self.chunks,
            num_microbatches=self.micro_batches,
            seq_length=self.setup.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )

    def next_step(self) -> None:
        position = self.step_position
        self.step_position = StepPosition(
            position.iteration + 1, position.consumed_samples + self.setup.batch
        )

    def losses(self, *, evaluation: bool = False) -> dict[int, float]:
        """Loss per pass of the last step, reduced over all ranks; the same on every rank."""
        import torch.distributed as dist

        sums = self.schedule.eval_sums if evaluation else [*self.schedule.train_sums.values()]
        mine = {k: v.tolist() for k, v in sums[-1].loss.items()} if sums else {}
        keep = parallel_state.get_tensor_model_parallel_rank() == 0
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine if keep else {})
        total: dict[int, list[float]] = {}
        for part in every:
            for k, (loss, tokens) in part.items():
                have = total.setdefault(k, [0.0, 0.0])
                have[0] += loss
                have[1] += tokens
        return {k: loss / tokens for k, (loss, tokens) in sorted(total.items())}
