"""Layer specs: Megatron's own but for single submodules, and the same model on every layout."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megalatent import platform

platform.install()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megalatent.model.layers import layer_spec, mtp_spec, substitute  # noqa: E402
from megalatent.model.norms import LocalNorm  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.layout import full_gradients, full_parameters, initialise  # noqa: E402

# The same padding on every layout: Megatron's loss counts the padded columns.
VOCAB, PADDED, SEQ, BATCH, MICRO = 100, 112, 16, 2, 4


def config_for(layout: Layout, **changes: Any) -> TransformerConfig:
    arguments: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
        "finalize_model_grads_func": finalize_model_grads,
    }
    return TransformerConfig(**{**arguments, **layout.config_kwargs(), **changes})


MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1, 1, 1],
}


def build(config: TransformerConfig, vp_stage: int | None = None, spec: Any = None) -> GPTModel:
    from megatron.core import parallel_state

    chunk = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        spec or layer_spec(config, vp_stage=vp_stage),
        vocab_size=PADDED,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(**chunk),
        post_process=parallel_state.is_pipeline_last_stage(**chunk),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        mtp_block_spec=mtp_spec(config, vp_stage=vp_stage),
    )


def _train_step(rank: int, layout: Layout, changes: dict[str, Any], sharded: bool) -> Any:
    """One batch through Megatron's own schedule: the mean loss and all gradients in full."""
    from megatron.core import parallel_state

    init(layout)
    config = config_for(layout, **changes)
    wrapping = DistributedDataParallelConfig(
        overlap_grad_reduce=sharded, use_distributed_optimizer=sharded, bucket_size=4000
    )
    chunks = []
    for stage in range(layout.vp or 1):
        model = build(config, stage if layout.vp else None)
        initialise(model, vocab_size=VOCAB)
        chunks.append(DistributedDataParallel(config, wrapping, model))
    tokens = torch.randint(
        VOCAB, (MICRO, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)
    )
    dp, cp = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    per_rank = MICRO // layout.dp
    chunk = SEQ // (2 * layout.cp)
    order = torch.arange(SEQ).view(2 * layout.cp, chunk)
    own = order[[cp, 2 * layout.cp - 1 - cp]].flatten() if layout.cp > 1 else order.flatten()

    def step(iterator: Any, model: nn.Module) -> Any:
        rows = tokens[dp * per_rank + next(iterator)]
        losses = model(
            rows[:, :-1][:, own],
            own.expand(BATCH, -1),
            None,
            labels=rows[:, 1:][:, own],
        )

        def loss(output: torch.Tensor) -> Any:
            # Over the tokens of all CP ranks: Megatron undoes DDP's mean over them.
            mean = output.float().sum() / (BATCH * SEQ)
            # A copy: the schedule divides the loss in place.
            return mean, {"loss": mean.detach() * layout.cp}

        return losses, loss

    iterators = [iter(range(per_rank)) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if layout.vp else iterators[0],
        model=chunks if layout.vp else chunks[0],
        num_microbatches=per_rank,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    total = torch.tensor([sum(r["loss"] for r in reports), float(len(reports))])
    if parallel_state.get_tensor_model_parallel_rank():
        total.zero_()
    torch.distributed.all_reduce(total)
    return total[0] / total[1], full_gradients(chunks, vocab_size=VOCAB)


_REFERENCE: dict[str, Any] = {}


def _reference(changes: dict[str, Any]) -> Any:
    key = repr(changes)
    if key not in _REFERENCE:
        _REFERENCE[key] = run_ranks(1, _train_step, Layout(), changes, False)[0]
    return _REFERENCE[key]


def _assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert gradient.norm() > 0, name
        error = (got[1][name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("layout", "sharded"),
    [
        (Layout(tp=2), False),
        (Layout(tp=2, sp=True), False),
        (Layout(pp=2), False),
        (Layout(pp=2, vp=2), False),
        (Layout(cp=2), False),
        (Layout(cp=2), True),
        (Layout(dp=2), True),
    ],
    ids=str,
)
def test_same_loss_and_gradients_on_every_layout(layout: Layout, sharded: bool) -> None:
    """`sharded`: distributed optimiser's shards, several buckets, overlapped reduction."""
    got = run_ranks(layout.world_size, _train_step, layout, {}, sharded)[0]
    _assert_equal(got, _reference({}))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_under_sequence_and_context_parallelism(normalization: str) -> None:
    changes = {"normalization": normalization, "window_size": (5, 0), "window_attn_skip_freq": 2}
    layout = Layout(tp=2, sp=True, cp=2)
    got = run_ranks(4, _train_step, layout, changes, False)[0]
    _assert_equal(got, _reference(changes))


def test_prediction_layers_know_sequence_parallelism() -> None:
    changes = {"mtp_num_layers": 1}
    got = run_ranks(2, _train_step, Layout(tp=2, sp=True), changes, False)[0]
    assert any(name.startswith("mtp.layers.0.") for name in got[1])
    _assert_equal(got, _reference(changes))


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2, sp=True)], ids=str
)
def test_experts(layout: Layout, dispatcher: str) -> None:
    changes = {**MOE, "moe_token_dispatcher_type": dispatcher}
    got = run_ranks(layout.world_size, _train_step, layout, changes, False)[0]
    _assert_equal(got, _reference({**MOE, "moe_token_dispatcher_type": "allgather"}))


_DOCUMENTS = (5, 3, 8)


def _documents(rank: int, cp: int, packed: bool) -> Any:
    """Losses of every token of three documents, and the gradients of their sum.

    `packed`: in one sequence (under CP each padded to a multiple of 2·cp), else one by one.
    """
    from megatron.core import parallel_state

    layout = Layout(cp=cp)
    init(layout)
    config = config_for(layout, window_size=(4, 0), window_attn_skip_freq=2)
    model = build(config)
    initialise(model, vocab_size=VOCAB)
    cp_rank = parallel_state.get_context_parallel_rank()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCAB, (n + 1,), generator=generator) for n in _DOCUMENTS]
    losses = {}
    if not packed:
        for i, row in enumerate(rows):
            positions = torch.arange(len(row) - 1)[None]
            losses[i] = model(row[None, :-1], positions, None, labels=row[None, 1:])[0]
        total = sum(x.sum() for x in losses.values())
    else:
        lengths = [n if cp == 1 else -(-n // (2 * cp)) * 2 * cp for n in _DOCUMENTS]
        ends, padded = ([0, *accumulate(x)] for x in (_DOCUMENTS, lengths))
        own, tokens, labels = [], [], []
        for row, length in zip(rows, lengths, strict=True):
            chunks = torch.arange(length).view(2 * cp, -1) if cp > 1 else None
            mine = (
                torch.arange(length)
                if chunks is None
                else chunks[[cp_rank, 2 * cp - 1 - cp_rank]].flatten()
            )
            text = F.pad(row, (0, length + 1 - len(row)))
            own.append(mine)
            tokens.append(text[:-1][mine])
            labels.append(text[1:][mine])
        real, memory = (torch.tensor(x, dtype=torch.int32) for x in (ends, padded))
        longest = max(lengths)
        packing = PackedSeqParams("thd", real, real, memory, memory, longest, longest)
        found = model(
            torch.cat(tokens)[None],
            torch.cat(own)[None],
            None,
            labels=torch.cat(labels)[None],
            packed_seq_params=packing,
        )[0]
        counted = [mine < n for mine, n in zip(own, _DOCUMENTS, strict=True)]
        total = found[torch.cat(counted)].sum()
        for i, part in enumerate(found.split([len(x) for x in own])):
            whole = torch.zeros(_DOCUMENTS[i])
            losses[i] = whole.index_copy(0, own[i][counted[i]], part[counted[i]])
    total.backward()
    gathered = torch.cat([losses[i].detach() for i in range(len(rows))])
    if packed:
        torch.distributed.all_reduce(gathered)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return gathered, full_gradients([model], vocab_size=VOCAB)


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_documents_are_as_if_alone(cp: int) -> None:
    """Odd lengths, RoPE, windows: losses and gradients of the whole model."""
    got = run_ranks(cp, _documents, cp, True)[0]
    _assert_equal(got, run_ranks(1, _documents, 1, False)[0])


def _plain_and_ours(rank: int, changes: dict[str, Any], moe: bool) -> bool:
    """Weights as drawn, losses and gradients of Megatron's local spec and of ours."""
    init(Layout())
    found = []
    for ours in (False, True):
        # Megatron's norm refuses this flag; ours need not, it only picks a kernel.
        config = config_for(Layout(), persist_layer_norm=ours, **changes)
        torch.manual_seed(3)
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(3)
        if moe:
            spec: Any = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        model = build(config, spec=None if ours else spec)
        rows = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
        losses = model(rows, torch.arange(SEQ).expand(BATCH, -1), mask, labels=rows.flip(1))
        losses.mean().backward()
        found.append([*(p.detach() for p in model.parameters()), losses])
        found[-1] += [p.grad for p in model.parameters()]
    return len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, False),
        ({"hidden_dropout": 0.1, "attention_dropout": 0.1}, False),
        (MOE, True),
    ],
    ids=["dense", "dropout", "experts"],
)
def test_equals_megatrons_local_layers_bit_for_bit(changes: dict[str, Any], moe: bool) -> None:
    assert run_ranks(1, _plain_and_ours, changes, moe) == [True]


def _structure(rank: int) -> tuple[list[bool], list[str]]:
    init(Layout(pp=2))
    model = build(config_for(Layout(pp=2), **{**MOE, "moe_layer_freq": [0, 1, 0, 1]}))
    experts = [isinstance(layer.mlp, MoELayer) for layer in model.decoder.layers]
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.RMSNorm) and "final" in n]
    return experts, norms


def test_expert_layers_follow_the_frequency_on_every_stage() -> None:
    assert run_ranks(2, _structure) == [
        ([False, True], []),
        ([False, True], ["decoder.final_layernorm"]),
    ]


def _marks(rank: int) -> dict[str, bool]:
    init(Layout(tp=2))
    model = build(config_for(Layout(tp=2), sequence_parallel=True))
    marks = {n: getattr(p, "sequence_parallel", False) for n, p in model.named_parameters()}
    return {n: mark for n, mark in marks.items() if "norm" in n}


def test_every_norm_is_marked_under_sequence_parallelism() -> None:
    marks = run_ranks(2, _marks)[0]
    assert len(marks) == 4 * 4 + 1
    assert all(marks.values())


def test_substitute_leaves_the_original_alone() -> None:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    before = spec.submodules.self_attention.submodules.q_layernorm
    changed = substitute(spec, {before: LocalNorm})
    assert changed.submodules.self_attention.submodules.q_layernorm is LocalNorm
    assert spec.submodules.self_attention.submodules.q_layernorm is before
    assert isinstance(changed.submodules.mlp, partial)


def test_norms_torch_does_not_have_are_refused() -> None:
    for changes, word in (
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
        ({"normalization": "L2Norm"}, "L2Norm"),
    ):
        config = config_for(Layout())
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(ValueError, match=word):
            LocalNorm(config, 8)


def _round_trip(rank: int, layout: Layout) -> dict[str, torch.Tensor]:
    init(layout)
    config = config_for(layout)
    chunks = [build(config, v if layout.vp else None) for v in range(layout.vp or 1)]
    for chunk in chunks:
        initialise(chunk, vocab_size=VOCAB)
    return full_parameters(chunks, vocab_size=VOCAB)


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    want = run_ranks(1, _round_trip, Layout())[0]
    got = run_ranks(4, _round_trip, Layout(tp=2, pp=2, vp=2))[0]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert "decoder.layers.3.mlp.linear_fc1.weight" in want
