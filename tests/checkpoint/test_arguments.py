"""Arguments of Megatron under which a model computes what the Hugging Face model cannot."""

from __future__ import annotations

from typing import Any

import pytest

from megalatent import platform

platform.install()

from megalatent.checkpoint.arguments import config_from_args, megatron_options  # noqa: E402
from megalatent.errors import UserError  # noqa: E402
from megalatent.hf import MegalatentConfig  # noqa: E402
from tests.checkpoint.test_layouts import arguments, setup  # noqa: E402


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("moe_router_force_biased", 0.5),
        ("moe_router_force_load_balancing", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
        ("moe_router_pre_softmax", True),
        ("multi_latent_attention", True),
    ],
)
def test_what_cannot_be_exported(name: str, value: Any) -> None:
    args = arguments(setup("gated", moe=True))
    args.moe_router_load_balancing_type = ["aux_loss", "seq_aux_loss"]
    assert config_from_args(args, args.vocab_size)["num_experts"] == 4
    setattr(args, name, value)
    with pytest.raises(UserError, match=name):
        config_from_args(args, args.vocab_size)


def test_one_expert_at_a_time_cannot_be_imported() -> None:
    """Megatron refuses to build such a model, whose router would get no gradient."""
    config = MegalatentConfig(num_experts=4, num_experts_per_tok=1)
    with pytest.raises(UserError, match="num_experts_per_tok=1 cannot be carried"):
        megatron_options(config)
