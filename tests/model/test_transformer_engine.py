"""Layers for Transformer Engine and local layers: one description, one set of checkpoint keys.

Transformer Engine cannot be installed without a GPU. Its classes are stood in for, in a process of
its own, and Megatron's real wrappers and specs are built from them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG

Facts = dict[str, Any]
CASES = ("plain", "gate", "sandwich", "fbt", "experts", "grouped experts")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("structure")
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.standin.structure", str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((folder / "report.json").read_text())


def both(report: dict[str, dict[str, Any]], case: str) -> tuple[Facts, Facts]:
    return report[case]["local"], report[case]["transformer_engine"]


@pytest.mark.parametrize("tp", ["", ", tp2"], ids=["tp1", "tp2"])
@pytest.mark.parametrize("case", CASES)
def test_same_checkpoint_keys_shapes_and_shards(
    report: dict[str, dict[str, Any]], case: str, tp: str
) -> None:
    local, engine = both(report, case + tp)
    assert local["tensors"] == engine["tensors"]
    keys = "\n".join(engine["tensors"])
    assert ("self_attention.linear_gate.weight" in keys) == (case not in ("plain", "sandwich"))
    assert ("mlp_bda.norm.weight" in keys) == (case not in ("plain", "gate"))
    assert "self_attention.linear_qkv.layer_norm_weight" in keys
    # What only one of them saves is Transformer Engine's scaling factors.
    assert set(local["objects"]) <= set(engine["objects"])
    assert all("._extra_state/" in name for name in engine["objects"])


@pytest.mark.parametrize("tp", ["", ", tp2"], ids=["tp1", "tp2"])
@pytest.mark.parametrize("case", CASES)
def test_same_parameters_and_marks(report: dict[str, dict[str, Any]], case: str, tp: str) -> None:
    """But for norms inside linear layers, and experts in one product."""
    local, engine = both(report, case + tp)
    gated = case not in ("plain", "sandwich")

    def engines(name: str) -> str:
        if not gated:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if not _before_router(name, case):
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if case == "grouped experts" and ".local_experts." in name:
            start, rest = name.split(".local_experts.")
            expert, part = rest.split(".", 1)
            name = f"{start}.{part}{expert}"
        return name

    assert {engines(n): s for n, s in local["parameters"].items()} == engine["parameters"]
    assert sorted(map(engines, local["marked"])) == engine["marked"]
    if tp:
        gates = [n for n in engine["parameters"] if "linear_gate" in n or "_bda.norm" in n]
        assert set(gates) <= set(engine["marked"])


def _before_router(name: str, case: str) -> bool:
    return "experts" in case and name.startswith("decoder.layers.1.")


def test_classes_and_wiring(report: dict[str, dict[str, Any]]) -> None:
    expected = {
        "plain": {
            "input_layernorm": "IdentityOp",
            "self_attention": "SelfAttention",
            "self_attention.linear_qkv": "TELayerNormColumnParallelLinear",
            "self_attention.core_attention": "TEDotProductAttention",
            "self_attention.linear_proj": "TERowParallelLinear",
            "mlp.linear_fc1": "TELayerNormColumnParallelLinear",
            "mlp.linear_fc2": "TERowParallelLinear",
        },
        # The gate reads what the norm gives, so this norm is a module of its own.
        "fbt": {
            "input_layernorm": "RMSNorm",
            "self_attention": "GatedSelfAttention",
            "self_attention.linear_qkv": "TEColumnParallelLinear",
            "self_attention.linear_gate": "HeadGate",
            "self_attention.core_attention": "TEDotProductAttention",
            "self_attention.q_layernorm": "RMSNorm",
            "self_attn_bda": "ResidualBranch",
            "self_attn_bda.norm": "RMSNorm",
            "pre_mlp_layernorm": "IdentityOp",
            "mlp.linear_fc1": "TELayerNormColumnParallelLinear",
            "mlp_bda": "ResidualBranch",
            "mlp_bda.norm": "RMSNorm",
        },
    }
    for case, wanted in expected.items():
        classes = report[case]["transformer_engine"]["classes"]
        found = {name: classes[f"decoder.layers.0.{name}"] for name in wanted}
        assert found == wanted


@pytest.mark.parametrize("case", ["fbt", "experts"])
def test_same_windows(report: dict[str, dict[str, Any]], case: str) -> None:
    local, engine = both(report, case)
    assert local["windows"] == engine["windows"] == [[4, 0], None]


@pytest.mark.parametrize("case", [case for case in CASES if case != "grouped experts"])
def test_each_loads_the_others_checkpoint(report: dict[str, dict[str, Any]], case: str) -> None:
    """Saved, loaded and run: the same logits to fp32 rounding, where they were far apart."""
    outputs = report[case]["outputs"]
    for first in ("local", "transformer_engine"):
        assert outputs[f"{first} before"] > 1
        assert outputs[f"{first} after"] < 1e-5
