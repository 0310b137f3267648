"""Checkpoints of other layouts: imported models loaded by Megatron, and trained ones exported."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalatent import platform

platform.install()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megalatent.checkpoint.convert import from_hf, to_hf  # noqa: E402
from megalatent.checkpoint.reader import CheckpointReader  # noqa: E402
from tests.checkpoint import models  # noqa: E402
from tests.distributed.harness import Layout, init, run_ranks  # noqa: E402
from tests.distributed.latent import EOD, VOCAB, Rig, Setup  # noqa: E402
from tests.distributed.layout import full_parameters, initialise, unwrap  # noqa: E402

# The rig's model, as the Hugging Face side calls it.
RIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "head_dim": 8,
    "qk_norm": True,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MEGATRON_MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}


def setup(fusion: str, moe: bool = False) -> Setup:
    """Rows of one document, all positions counted, evaluated with three passes."""
    return Setup(
        fusion=fusion,
        passes=(1, 1),
        packed=False,
        masked=False,
        eval_passes=3 if fusion != "none" else 1,
        config=MEGATRON_MOE if moe else {},
    )


def hf_losses(folder: Path, given: Setup) -> dict[int, float]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = torch.stack([given.row(sample) for sample in range(given.batch)])
    options = {"num_passes": given.eval_passes} if given.fusion != "none" else {}
    with torch.no_grad():
        out = model(rows, labels=rows, **options)
    losses = getattr(out, "pass_losses", None) or (out.loss,)
    return {k: float(loss) for k, loss in enumerate(losses, 1)}


def evaluated(rig: Rig) -> dict[int, float]:
    for model in rig.models:
        model.eval()
    rig.run(forward_only=True)
    return rig.losses(evaluation=True)


def arguments(given: Setup) -> Namespace:
    """What Megatron's arguments would say of the rig's model, as far as an export asks."""
    fusion = given.latent().fusion
    return Namespace(
        num_layers=given.layers,
        hidden_size=given.hidden,
        ffn_hidden_size=2 * given.hidden,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=given.hidden // 4,
        max_position_embeddings=given.seq_length,
        layernorm_epsilon=1e-5,
        qk_layernorm=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=False,
        rotary_base=10000,
        num_experts=4 if given.config else None,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_aux_loss_coeff=0.0,
        moe_layer_freq=1,
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB,
        latent_config={
            "fusion": {
                "kind": fusion.kind,
                "input_norm": fusion.input_norm,
                "jitter": fusion.jitter,
                "prefix_mixin": fusion.prefix_mixin,
            },
            "passes": {"loss_weighting": "mean", "lambda": 0.5},
        },
    )


LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2)]


@pytest.mark.parametrize(
    ("fusion", "layout", "moe"),
    [
        ("gated", Layout(tp=2), False),
        ("additive", Layout(pp=2), False),
        ("concat", Layout(), False),
        ("gated", Layout(ep=2, dp=2), True),
    ],
    ids=str,
)
def test_an_export_has_the_losses_of_the_checkpoint(
    tmp_path: Path, fusion: str, layout: Layout, moe: bool
) -> None:
    """Megatron -> Hugging Face -> Megatron; losses of passes 1, 2 and 3 on the way."""
    given = setup(fusion, moe)
    folder = tmp_path / "iter_0000005"
    folder.mkdir()

    def save(rank: int) -> dict[int, float]:
        init(layout)
        rig = Rig(given, layout)
        for model in rig.models:
            # A fresh adapter of zeros would hide the fusion.
            initialise(model, vocab_size=VOCAB, std=0.1)
        losses = evaluated(rig)
        state = {"args": arguments(given), "checkpoint_version": 3.0, "iteration": 5}
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {"dp_cp_group": replicas}  # as Megatron's own saving gives it
        state |= {"model": rig.models[0].sharded_state_dict(metadata=metadata)}
        dist_checkpointing.save(state, str(folder))
        return losses

    losses = run_ranks(layout.world_size, save)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")

    to_hf(tmp_path, tmp_path / "hf", max_shard=40_000)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config
    assert (config.vocab_size, config.document_end_token_id) == (VOCAB, EOD)
    found = hf_losses(tmp_path / "hf", given)
    assert found.keys() == losses.keys() == {1, 2, 3}
    assert len({round(loss, 4) for loss in losses.values()}) == 3  # the fusion does something
    for k, loss in losses.items():
        assert found[k] == pytest.approx(loss, abs=1e-5)

    from_hf(tmp_path / "hf", tmp_path / "back")
    before, after = CheckpointReader(folder), CheckpointReader(tmp_path / "back")
    assert before.tensors.keys() == after.tensors.keys()
    for key, entry in after.tensors.items():
        rows = (0, VOCAB) if key == "embedding.word_embeddings.weight" else None
        assert list(before.tensors[key].size)[1:] == list(entry.size)[1:]
        assert torch.equal(before.read(key, [], rows), after.read(key, [])), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama-untied", "gated", "moe"])
def test_megatron_loads_an_import_in_any_layout(tmp_path: Path, name: str, layout: Layout) -> None:
    if name == "llama-untied":
        given, settings = setup("none"), {"tie_word_embeddings": False, "fusion": "none"}
    elif name == "gated":
        given, settings = setup("gated"), {"fusion": "gated"}
    else:
        given, settings = setup("none", moe=True), {"fusion": "none", **MOE}
        layout = Layout(ep=2, dp=2) if layout.tp > 1 else layout
    models.save_own(tmp_path / "hf", **{**RIG, **settings})
    from_hf(tmp_path / "hf", tmp_path / "megatron")
    tied = bool({**RIG, **settings}["tie_word_embeddings"])

    def load(rank: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        init(layout)
        rig = Rig(given, layout)
        if not tied:
            rig = UntiedRig(given, layout)
        (model,) = rig.models
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, str(tmp_path / "megatron" / "release"))
        model.load_state_dict(loaded["model"])
        return evaluated(rig), full_parameters([unwrap(model)], vocab_size=VOCAB)

    (losses, weights), *_ = run_ranks(layout.world_size, load)
    for k, loss in hf_losses(tmp_path / "hf", given).items():
        assert losses[k] == pytest.approx(loss, abs=1e-5)
    original = models.weights(tmp_path / "hf")
    table, last = "embedding.word_embeddings.weight", "decoder.layers.3.self_attention."
    assert torch.equal(weights[table], original["model.embed_tokens.weight"])
    projection = original["model.layers.3.self_attn.o_proj.weight"]
    assert torch.equal(weights[f"{last}linear_proj.weight"], projection)


class UntiedRig(Rig):
    """The rig with a head of its own."""

    def _model(self, chunk: int) -> Any:
        from megatron.core.models.gpt.gpt_model import GPTModel

        from megalatent.model.build import latent_model
        from megalatent.model.layers import layer_spec

        multiple = 8 * self.layout.tp
        backbone = GPTModel(
            self.config,
            layer_spec(self.config),
            -(-VOCAB // multiple) * multiple,
            self.setup.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        return latent_model(backbone, self.setup.latent(), VOCAB)
