"""Gate, norms after the branches, multiplier and window pattern against plain PyTorch.

The twin is the oracle's decoder, loops over positions and heads that know nothing of Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalatent import platform

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402

from megalatent.config import ModelConfig  # noqa: E402
from megalatent.model.batch import MicroBatch  # noqa: E402
from megalatent.model.gate import GatedSelfAttention  # noqa: E402
from megalatent.model.layers import layer_spec, mtp_spec, unscale_branches  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.latent import VOCAB, Rig, Setup  # noqa: E402
from tests.distributed.layout import full_gradients, full_parameters  # noqa: E402
from tests.model.test_layers import config_for  # noqa: E402
from tests.oracle.model import decoder  # noqa: E402

SEQ, BATCH = 16, 2
# fp32 sums in another order differ by about 1e-6; a missing part by 1e-1.
CLOSE = 2e-5

PLAIN = Setup(fusion="none", seq_length=SEQ, layers=3, packed=False)
PARTS = {
    "gate": replace(PLAIN, model=ModelConfig(attention_gate=True)),
    "sandwich": replace(PLAIN, model=ModelConfig(sandwich_norm=True)),
    "multiplier": replace(PLAIN, model=ModelConfig(residual_multiplier=3**-0.5)),
    "window": replace(PLAIN, window=((4, 0), 3)),
    "all": replace(
        PLAIN,
        model=ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=0.5),
        window=((4, 0), 3),
    ),
}

# States, gradient of the stack inputs, gradients and values of all weights.
Found = tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]


def _inputs(setup: Setup) -> tuple[Tensor, Tensor]:
    """Stack inputs and the gradient of the states, each `[s, b, h]`."""
    generator = torch.Generator().manual_seed(0)
    shape = (SEQ, BATCH, setup.hidden)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _stack(rank: int, setup: Setup, layout: Layout) -> Found:
    init(layout)
    rig = Rig(setup, layout)
    (chunk,) = rig.chunks
    chunk.zero_grad_buffer()
    x, gradient = _inputs(setup)
    tp = parallel_state.get_tensor_model_parallel_rank()
    if layout.sp:
        x, gradient = (t.chunk(layout.tp)[tp].contiguous() for t in (x, gradient))
    x.requires_grad_()
    positions = torch.arange(SEQ).expand(BATCH, -1)
    batch = MicroBatch(tokens=torch.zeros(BATCH, SEQ, dtype=torch.long), position_ids=positions)
    states = rig.models[0]("stack", batch, x)
    states.backward(gradient)
    finalize_model_grads(rig.chunks)
    assert x.grad is not None
    return (
        states.detach(),
        x.grad,
        full_gradients(rig.chunks, vocab_size=VOCAB),
        full_parameters(rig.chunks, vocab_size=VOCAB),
    )


def _whole(results: list[Found], layout: Layout) -> Found:
    """Rows of all ranks together; what every rank has whole must be equal."""
    if not layout.sp:
        for result in results[1:]:
            assert torch.equal(result[0], results[0][0])
            assert torch.allclose(result[1], results[0][1], atol=CLOSE)
        return results[0]
    states, inputs = (torch.cat([result[i] for result in results]) for i in (0, 1))  # type: ignore[misc]
    return states, inputs, results[0][2], results[0][3]


def _twin(setup: Setup, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    x, gradient = _inputs(setup)
    x.requires_grad_()
    document = torch.zeros(SEQ, dtype=torch.long)
    rows = [decoder(setup.shape(), leaves, x[:, b], document) for b in range(BATCH)]
    states = torch.stack(rows, 1)
    states.backward(gradient)
    assert x.grad is not None
    return (
        states.detach(),
        x.grad,
        {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()},
    )


def _far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "layout",
    [Layout(), pytest.param(Layout(tp=2), marks=pytest.mark.full), Layout(tp=2, sp=True)],
    ids=str,
)
def test_part_equals_plain_pytorch(part: str, layout: Layout) -> None:
    setup = PARTS[part]
    found = _whole(run_ranks(layout.world_size, _stack, setup, layout), layout)
    states, inputs, gradients = _twin(setup, found[3])
    assert _far(found[0], states) < CLOSE
    assert _far(found[1], inputs) < CLOSE
    assert found[2].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert _far(found[2][name], gradient) < 5 * CLOSE, name
    # The part is really there: without it, the twin computes something else.
    weights = {n: w for n, w in found[3].items() if "linear_gate" not in n and "_bda" not in n}
    assert _far(_twin(PLAIN, weights)[0], states) > 1e-2


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.full), True])
def test_gate_where_tp_ranks_share_key_heads(sp: bool) -> None:
    """More TP ranks than key heads: each rank's heads are a part of a group's."""
    layout = Layout(tp=4, sp=sp)
    found = _whole(run_ranks(4, _stack, PARTS["gate"], layout), layout)
    states, inputs, gradients = _twin(PARTS["gate"], found[3])
    assert _far(found[0], states) < CLOSE
    assert _far(found[1], inputs) < CLOSE
    for i in range(3):
        name = f"decoder.layers.{i}.self_attention.linear_gate.weight"
        assert _far(found[2][name], gradients[name]) < 5 * CLOSE


def _entering_final_norm(rank: int, layers: int, model: ModelConfig) -> float:
    """RMS of the residual stream that the final norm reads, weights as Megatron draws them."""
    init(Layout())
    torch.manual_seed(5)
    # 0.1 on 64 channels is what 0.02 is on 1,600: the branches are as large as a real model's.
    config = config_for(Layout(), num_layers=layers, hidden_size=64, init_method_std=0.1)
    unscale_branches(config, model)
    backbone = GPTModel(
        config,
        layer_spec(config, model=model),
        vocab_size=128,
        max_sequence_length=SEQ,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    found = []
    backbone.decoder.final_layernorm.register_forward_pre_hook(
        lambda _, inputs: found.append(inputs[0].square().mean().sqrt())
    )
    tokens = torch.randint(128, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        backbone(tokens, torch.arange(SEQ).expand(BATCH, -1), mask)
    return float(found[0])


def test_depth_scaling_keeps_the_residual_stream_small() -> None:
    """2 L branches of RMS 1: times 1/sqrt(L) the stream has RMS near sqrt(2), else sqrt(2 L)."""
    depths = (4, 24, 96)
    norms = ModelConfig(attention_gate=True, sandwich_norm=True)
    scaled, unscaled = [], []
    for layers in depths:
        depth = replace(norms, residual_multiplier=layers**-0.5)
        scaled += run_ranks(1, _entering_final_norm, layers, depth)
        unscaled += run_ranks(1, _entering_final_norm, layers, norms)
    # Branches of different layers are correlated a little: never more than twofold here.
    assert all(0.7 < rms < 2.8 for rms in scaled), scaled
    for layers, rms, grown in zip(depths, scaled, unscaled, strict=True):
        assert grown > 0.6 * layers**0.5 * rms
    assert unscaled[0] < unscaled[1] < unscaled[2]
    assert unscaled[2] > 4 * unscaled[0]


def _extra_weights(rank: int) -> tuple[list[str], list[str], bool]:
    """Names that the options add to decoder and prediction layers; whether all are marked."""
    init(Layout(tp=2))
    config = config_for(Layout(tp=2, sp=True), num_layers=1, mtp_num_layers=1)
    model = ModelConfig(attention_gate=True, sandwich_norm=True, residual_multiplier=0.5)

    def names(chosen: ModelConfig) -> dict[str, Tensor]:
        backbone = GPTModel(
            config,
            layer_spec(config, model=chosen),
            vocab_size=128,
            max_sequence_length=SEQ,
            position_embedding_type="rope",
            mtp_block_spec=mtp_spec(config, model=chosen),
        )
        return dict(backbone.named_parameters())

    with_parts, without = names(model), names(ModelConfig())
    added = [name for name in with_parts if name not in without]
    assert not without.keys() - with_parts.keys()
    marked = all(getattr(with_parts[name], "sequence_parallel", False) for name in added)
    decoder_names = [n.removeprefix("decoder.layers.0.") for n in added if n.startswith("decoder")]
    return decoder_names, [n for n in added if n.startswith("mtp")], marked


def test_what_the_options_add() -> None:
    decoder_names, mtp_names, marked = run_ranks(2, _extra_weights)[0]
    assert sorted(decoder_names) == [
        "mlp_bda.norm.weight",
        "self_attention.linear_gate.weight",
        "self_attn_bda.norm.weight",
    ]
    assert len(mtp_names) == 3
    assert marked


def _equal_everywhere(rank: int) -> Tensor:
    init(Layout(tp=2))
    config = config_for(Layout(tp=2), num_layers=1)
    block = layer_spec(config, model=ModelConfig(attention_gate=True))
    backbone = GPTModel(
        config, block, vocab_size=128, max_sequence_length=SEQ, position_embedding_type="rope"
    )
    (gate,) = [p for n, p in backbone.named_parameters() if "linear_gate" in n]
    return gate.detach()


def test_every_tp_rank_draws_the_same_gate() -> None:
    first, second = run_ranks(2, _equal_everywhere)
    assert torch.equal(first, second)
    assert first.std() == pytest.approx(0.02, rel=0.3)


def _two_gates(rank: int) -> str:
    init(Layout())
    config = config_for(Layout(), attention_output_gate=True)
    spec: Any = layer_spec(config, model=ModelConfig(attention_gate=True)).layer_specs[0]
    assert spec.submodules.self_attention.module is GatedSelfAttention
    with pytest.raises(ValueError, match="two gates") as caught:
        GatedSelfAttention(config, spec.submodules.self_attention.submodules, 1)
    return str(caught.value)


def test_two_gates_are_refused() -> None:
    assert "leave one of them out" in run_ranks(1, _two_gates)[0]
