"""Predictions against what the true costs give, and suggestions that can be pasted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalatent.config import Config
from megalatent.config_yaml import apply_overrides
from megalatent.passes.costs import Costs
from megalatent.passes.plan import make_plan
from megalatent.passes.simulate import simulate
from megalatent.profiling.advice import AS_IT_IS, MEASURED, Advice, Option, advise
from megalatent.profiling.predict import weights
from megalatent.profiling.records import Activation, Recording
from megalatent.profiling.run_facts import facts_of_config
from tests.profiling import synthetic
from tests.profiling.synthetic import OPTIMIZER, REDUCE, UNIT
from tests.training.runs import MODEL

LAYER = Costs(forward=0.5, backward=1.0)  # of one layer
HEAD, HOP, FUSION = 3.0, 0.02, 0.3
LAYERS = (2, 2, 2, 2)
MS = UNIT * 1e-9


def costs(layers: tuple[int, ...], recompute: bool = False) -> Costs:
    """The truth, in units, of stages with so many layers each."""
    forward = tuple(0.5 * n for n in layers)
    extra = forward if recompute else (0.0,) * len(layers)
    return Costs(
        forward=forward,
        backward=tuple(2 * f for f in forward),
        extra_backward=extra,
        head=HEAD,
        hand_over=HOP,
        fusion=FUSION,
        fusion_backward=FUSION,
        embedding=0.1,
        embedding_backward=0.1,
    )


def recorded(**facts: Any) -> Recording:
    made = synthetic.recording(((1,) * 8, (2,) * 8), costs=costs(LAYERS))
    known = {
        "replicas": 1,
        "num_layers": 8,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "mixture": {"1": 0.75, "2": 0.25},
        "recompute": "never",
        "layer_input_bytes": 1,
    }
    # As the synthetic ranks have it: 10 bytes a visit.
    kept = tuple(Activation(s, 0, k, 10) for s in range(4) for k in (1, 2))
    return replace(made, activations=kept, facts={**made.facts, **known, **facts})


def named(advice: Advice, start: str) -> Option:
    [found] = [option for option in advice.options if option.name.startswith(start)]
    return found


def truth(chunks: int, passes: tuple[int, ...], own: Costs, planned: Costs) -> float:
    plan = make_plan(4, chunks, passes, costs=planned)
    return simulate(plan, own).makespan * MS + (REDUCE + OPTIMIZER) * 1e-9


def test_predictions_are_what_the_true_costs_give(tmp_path: Path) -> None:
    advice = advise(recorded(), tmp_path / "costs.json")
    split = min(
        (o for o in advice.options if o.name.startswith("layers")),
        key=lambda o: o.predicted_step_seconds,
    )
    layers = tuple(map(int, split.name.split()[1:]))
    for option, chunks, m, own in (
        (named(advice, AS_IT_IS), 1, 8, costs(LAYERS)),
        (named(advice, "16"), 1, 16, costs(LAYERS)),
        (named(advice, "4 micro"), 1, 4, costs(LAYERS)),
        (named(advice, "2 chunk"), 2, 8, costs((1,) * 8)),
        (split, 1, 8, costs(layers)),
        (named(advice, "recompute extra"), 1, 8, costs(LAYERS, recompute=True)),
    ):
        for k in (1, 2):
            seconds = option.predicted_step_seconds_by_case[f"K = {k}"]
            expected = truth(chunks, (k,) * m, own, own)
            # Planned with costs that differ in the last digits: another plan, as good as this one.
            assert seconds == pytest.approx(expected, rel=0.01), (option.name, k)
        mean = 0.75 * option.predicted_step_seconds_by_case["K = 1"]
        mean += 0.25 * option.predicted_step_seconds_by_case["K = 2"]
        assert option.predicted_step_seconds == pytest.approx(mean)


def test_best_first_and_gains(tmp_path: Path) -> None:
    advice = advise(recorded(), tmp_path / "costs.json")
    speeds = [option.tokens_per_second for option in advice.options]
    assert all(a >= b for a, b in pairwise(speeds))
    now = named(advice, AS_IT_IS)
    assert (now.gain, now.overrides) == (0.0, ())
    for option in advice.options:
        assert option.gain == pytest.approx(option.tokens_per_second / now.tokens_per_second - 1)
        assert option.changes_batch == ("micro-batches" in option.name)
    # The head makes the last stage the slowest: the best split gives it fewer layers.
    splits = [option for option in advice.options if option.name.startswith("layers")]
    assert splits[0].gain > 0.05
    assert int(splits[0].name.split()[-1]) < 2


def test_memory() -> None:
    advice = advise(recorded())
    now, extra = named(advice, AS_IT_IS), named(advice, "recompute extra")
    assert now.activation_bytes == 10 * now.peak_in_flight
    assert now.predicted_peak_bytes is None  # the process's memory is not the allocator's
    # Pass 2 keeps two inputs of layers in place of 10 bytes.
    assert extra.activation_bytes is not None
    assert extra.activation_bytes < now.activation_bytes
    # Recomputation of everything changes all stages alike here, hence not the plan.
    assert named(advice, "recompute all").activation_bytes == 2 * now.peak_in_flight


def test_peaks_follow_the_activations() -> None:
    own = advise(replace(recorded(), memory_kind="allocated"))
    now, less = named(own, AS_IT_IS), named(own, "recompute all")
    assert now.predicted_peak_bytes == 1010 + 10 * now.peak_in_flight
    assert less.predicted_peak_bytes == 1010 + 2 * now.peak_in_flight


def test_overrides_are_accepted_by_the_config(tmp_path: Path) -> None:
    given = {
        "latent": {"passes": {"schedule": {1: 0.75, 2: 0.25}}},
        "megatron": {
            **MODEL,
            "num_layers": 8,
            "pipeline_model_parallel_size": 4,
            "num_virtual_stages_per_pipeline_rank": 1,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "mock_data": True,
            "train_iters": 10,
        },
    }
    facts = {"pipeline_options": ["num_virtual_stages_per_pipeline_rank"]}
    advice = advise(recorded(**facts), tmp_path / "costs.json")
    for option in advice.options:
        if option.costs_file:
            Path(option.costs_file).write_text("{}")
        Config.from_mapping(apply_overrides(given, option.overrides)).check(4)
    assert named(advice, MEASURED).overrides == (f"latent.passes.costs={tmp_path}/costs.json",)
    layout = named(advice, "2 chunk")
    assert layout.arguments == (
        "--set megatron.num_virtual_stages_per_pipeline_rank=null"
        " --set 'megatron.pipeline_model_parallel_layout=Et|t|t|t|t|t|t|tL'"
        f" --set latent.passes.costs={tmp_path}/costs-2-chunks-a-stage.json"
    )


def names(**facts: Any) -> set[str]:
    return {option.name.split()[0] for option in advise(recorded(**facts)).options}


def test_what_training_would_refuse_is_not_suggested() -> None:
    everything = names()
    assert everything == {"as", "16", "32", "4", "2", "layers", "recompute"}
    assert names(layers_can_move=False) == everything - {"2", "layers"}
    assert names(most_chunks=1) == everything - {"2"}
    assert names(recomputed_by_megatron=True) == everything - {"recompute"}
    # Two chunks of three passes keep six activations of a micro-batch.
    assert names(max_in_flight=5, max_passes=3) == everything - {"2"}
    assert names(max_in_flight=6, max_passes=3) == everything
    # Something other than the batch's size says how many micro-batches there are.
    assert names(global_batch_size=64) == everything - {"16", "32", "4"}


@pytest.mark.parametrize(
    "options",
    [
        {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1},
        {"num_layers": 7, "account_for_loss_in_pipeline_split": True},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"pipeline_model_parallel_layout": "Etttt|t|t|ttL"},
        {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2},
        {"recompute_granularity": "selective"},
        {"recompute_activations": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_suggestions_are_accepted_whatever_the_config_has(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    given = {
        "latent": {"passes": {"schedule": {1: 0.75, 2: 0.25}}},
        "megatron": {
            **MODEL,
            "num_layers": 8,
            "pipeline_model_parallel_size": 4,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "mock_data": True,
            "train_iters": 10,
            **options,
        },
    }
    config = Config.from_mapping(given)
    config.check(4)
    facts = {
        **facts_of_config(config, mtp_layers=None, stages=4),
        "num_layers": given["megatron"]["num_layers"],
    }
    advice = advise(recorded(**facts), tmp_path / "costs.json")
    assert len(advice.options) > 3
    for option in advice.options:
        Config.from_mapping(apply_overrides(given, option.overrides)).check(4, missing=[])


def test_weights_of_cases() -> None:
    cases = recorded().cases
    assert weights(cases, {"1": 0.6, "2": 0.2, "3": 0.2}) == pytest.approx([0.75, 0.25])
    assert weights(cases, {}) == [0.5, 0.5]
    mixed = synthetic.recording(((1,) * 4, (2, 1, 1, 1))).cases
    assert weights(mixed, {"1": 1.0}) == [0.0, 1.0]
