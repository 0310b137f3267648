"""Reading configurations: defaults, types, overrides, and the way to Megatron's command line."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent.config import Config, FusionConfig, LatentConfig, PassesConfig, PhaseConfig
from megalatent.config_megatron import options, parse, value_of
from megalatent.config_yaml import apply_overrides, parse_scalar, read_yaml
from megalatent.errors import UserError

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
}


def config(latent: Any = None, **megatron: Any) -> Config:
    return Config.from_mapping({"latent": latent, "megatron": {**MODEL, **megatron}})


def test_defaults() -> None:
    assert config().latent == LatentConfig(
        seed=1234,
        fusion=FusionConfig(kind="gated", jitter=0.02, prefix_mixin=True, init_std=0.02),
        passes=PassesConfig(schedule=(PhaseConfig(start=0, mixture={1: 0.75, 2: 0.25}),)),
    )


@pytest.mark.parametrize(
    ("kind", "jitter", "mixin"),
    [("gated", 0.02, True), ("concat", 0.02, True), ("additive", 0.0, False)],
)
def test_nulls_take_the_fusions_own_values(kind: str, jitter: float, mixin: bool) -> None:
    fusion = config({"fusion": {"kind": kind, "jitter": None}}).latent.fusion
    assert (fusion.jitter, fusion.prefix_mixin) == (jitter, mixin)
    chosen = config({"fusion": {"kind": kind, "jitter": 0.5, "prefix_mixin": not mixin}})
    assert (chosen.latent.fusion.jitter, chosen.latent.fusion.prefix_mixin) == (0.5, not mixin)


def test_nulls_take_megatrons_values() -> None:
    given = config({"seed": None}, seed=7, init_method_std=0.5).latent
    assert (given.seed, given.fusion.init_std) == (7, 0.5)
    given = config({"seed": 3, "fusion": {"init_std": 0.1}}, seed=7, init_method_std=0.5).latent
    assert (given.seed, given.fusion.init_std) == (3, 0.1)


def test_without_fusion_one_pass_is_the_default() -> None:
    passes = config({"fusion": {"kind": "none"}}).latent.passes
    assert (passes.max_passes, passes.eval_passes) == (1, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [(0, {3: 1.0})]),
        ({1: 0.25, 2: 0.75}, [(0, {1: 0.25, 2: 0.75})]),
        (
            [{"start": 0, "mixture": {1: 1}}, {"start": 0.5, "mixture": {3: 0.5, 1: 0.5}}],
            [(0, {1: 1.0}), (0.5, {1: 0.5, 3: 0.5})],
        ),
    ],
)
def test_schedule_forms(given: Any, expected: list[Any]) -> None:
    schedule = config({"passes": {"schedule": given}}).latent.passes.schedule
    assert [(phase.start, dict(phase.mixture)) for phase in schedule] == expected
    assert [type(phase.start) for phase in schedule] == [type(start) for start, _ in expected]


def test_max_passes_ignores_a_share_of_zero() -> None:
    assert config({"passes": {"schedule": {1: 0.5, 2: 0.5, 3: 0.0}}}).latent.passes.max_passes == 2


def test_recompute_per_number_of_passes() -> None:
    passes = config({"passes": {"recompute": {3: "extra", 4: "all"}}}).latent.passes
    assert [passes.recompute_for(k) for k in (1, 2, 3, 4)] == ["never", "never", "extra", "all"]
    everywhere = config({"passes": {"recompute": "all"}}).latent.passes
    assert [everywhere.recompute_for(k) for k in (1, 2)] == ["all", "all"]


def test_resolved_reads_back_to_an_equal_config() -> None:
    latent = {"fusion": {"kind": "concat"}, "passes": {"schedule": {2: 1.0}, "lambda": 0.5}}
    first = config(latent, swiglu=True, window_size=[15, 0], attention_backend="unfused")
    text = yaml.safe_dump(first.resolved())
    again = Config.from_mapping(parse_scalar(text))
    assert (again.latent, again.megatron) == (first.latent, first.megatron)
    assert again.filled_in == {}  # what had been filled in is now given


def test_the_command_line_means_what_the_file_says() -> None:
    given = config(
        swiglu=True,
        sequence_parallel=False,
        no_rope_fusion=True,
        disable_bias_linear=True,
        norm_epsilon=1e-6,
        attention_backend="unfused",
        window_size=[15, 0],
        moe_layer_freq="([1]*3+[0])",
        data_path=["0.5", "a path", 0.5, "b"],
        null_tokenizer_pad_id=-1,
        split="98,2,0",
        rl_persist_cuda_graphs=False,
    )
    args = parse(given.megatron_argv())
    assert args.swiglu is True
    assert args.sequence_parallel is False
    assert args.apply_rope_fusion is False
    assert args.add_bias_linear is False
    assert args.layernorm_epsilon == 1e-6
    assert args.attention_backend.name == "unfused"
    assert args.window_size == (15, 0)
    assert args.moe_layer_freq == [1, 1, 1, 0]
    assert args.data_path == ["0.5", "a path", "0.5", "b"]
    assert args.null_tokenizer_pad_id == -1
    assert args.split == "98,2,0"
    assert args.rl_persist_cuda_graphs is False


def test_every_option_of_megatron_is_reachable() -> None:
    """Each option of a parser that Megatron builds by itself has a key, and each key an option."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {f for action in parser._actions for f in action.option_strings if f.startswith("--")}
    flags.discard("--help")
    spelled = {flag[2:].replace("-", "_") for flag in flags}
    negated = {o.off_flag[2:].replace("-", "_") for o in options().values() if o.off_flag}
    assert set(options()) == spelled - negated
    assert len(options()) > 700


def test_value_of_follows_switches_and_defaults() -> None:
    assert value_of({}, "apply_rope_fusion") is True
    assert value_of({"no_rope_fusion": True}, "apply_rope_fusion") is False
    assert value_of({"no_rope_fusion": False}, "apply_rope_fusion") is True
    assert value_of({}, "seed") == 1234


def test_null_leaves_an_option_out() -> None:
    assert "save" not in config(save=None).megatron


def test_filled_in_for_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalatent.platform.on_cpu", lambda: True)
    given = config(position_embedding_type="rope", bf16=True)
    expected = {
        "transformer_impl": "local",
        "distributed_backend": "gloo",
        "no_gradient_accumulation_fusion": True,
        "no_rope_fusion": True,
        "no_masked_softmax_fusion": True,
        "eval_interval": 1000,
        "max_position_embeddings": 32,
    }
    assert {name: given.megatron[name] for name in given.filled_in} == expected
    # What the user says stands.
    said = config(position_embedding_type="rope", no_rope_fusion=False, eval_interval=5)
    assert "no_rope_fusion" not in said.filled_in
    assert said.megatron["no_rope_fusion"] is False
    assert said.megatron["eval_interval"] == 5


def test_filled_in_for_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalatent.platform.on_cpu", lambda: False)
    found: list[str] = []

    def find_spec(name: str) -> object:
        found.append(name)
        return None if with_apex is False else object()

    monkeypatch.setattr("megalatent.config_platform.find_spec", find_spec)
    always = {"eval_interval", "max_position_embeddings"}
    with_apex = True
    assert set(config().filled_in) == always
    # Megatron's output layer refuses to be built with what only apex has.
    with_apex = False
    given = config()
    assert set(given.filled_in) == always | {"no_gradient_accumulation_fusion"}
    assert given.megatron["no_gradient_accumulation_fusion"] is True
    assert set(found) == {"fused_weight_gradient_mlp_cuda"}


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"megatron": MODEL, "latent": {"passes": {"recompute": {2: "all"}}}})
    )
    overrides = [
        "megatron.lr=1e-4",
        "megatron.lr=2e-4",
        "megatron.data_path=[0.5, a, 0.5, b]",
        "megatron.mock_data=null",
        "latent.fusion.kind=additive",
        "latent.passes.recompute.3=extra",
        "latent.passes.schedule={1: 0.5, 2: 0.5}",
    ]
    given = Config.load(path, overrides)
    assert given.megatron["lr"] == 2e-4
    assert given.megatron["data_path"] == ["0.5", "a", "0.5", "b"]
    assert "mock_data" not in given.megatron
    assert given.latent.fusion.kind == "additive"
    assert given.latent.passes.recompute == {2: "all", 3: "extra"}


def test_override_of_a_list_element() -> None:
    given = {"latent": {"passes": {"schedule": [{"start": 0, "mixture": {1: 1.0}}]}}}
    changed = apply_overrides(given, ["latent.passes.schedule.0.mixture={2: 1.0}"])
    assert changed["latent"]["passes"]["schedule"] == [{"start": 0, "mixture": {2: 1.0}}]
    assert given["latent"]["passes"]["schedule"][0]["mixture"] == {1: 1.0}  # a copy was changed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("010", 10),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("none", "none"),
        ("null", None),
        ("True", True),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_yaml_1_2(text: str, value: Any) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("a: [1\n", "line 2"),
        ("- 1\n", "holds a list at the top"),
        ("", "holds nothing"),
        ("? [1]\n: 2\n", "cannot be a key"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checks_leave_the_environment_and_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import torch

    before = dict(os.environ)
    config(deterministic_mode=True).check(world_size=1)
    torch.use_deterministic_algorithms(False)
    assert dict(os.environ) == before
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("world_size", "options_"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"context_parallel_size": 2, "attention_dropout": 0.0}),
        (4, {"pipeline_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
        (
            2,
            {
                "num_layers": 7,
                "pipeline_model_parallel_size": 2,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        (2, {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}),
        (4, {"num_experts": 4, "expert_model_parallel_size": 2, "global_batch_size": 8}),
        (4, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}),
        (1, {"untie_embeddings_and_output_weights": True}),
        (1, {"group_query_attention": True, "num_query_groups": 2, "ffn_hidden_size": 192}),
    ],
)
def test_good_layouts_pass(world_size: int, options_: dict[str, Any]) -> None:
    config(position_embedding_type="rope", **options_).check(world_size)


@pytest.mark.parametrize(
    ("package", "extra", "given"),
    [
        ("emerging_optimizers", "optim", {"optimizer": "muon"}),
        ("transformers", "hf", {"tokenizer_type": "HuggingFaceTokenizer"}),
        (
            "wandb",
            "wandb",
            {"wandb_project": "passes", "wandb_exp_name": "first", "wandb_save_dir": "wandb"},
        ),
        ("transformer_engine", "gpu", {"transformer_impl": "transformer_engine"}),
    ],
)
def test_a_missing_package_is_named(
    package: str, extra: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    with pytest.raises(UserError, match=rf"needs the package {package}.*megalatent\[{extra}\]"):
        config(**given).check(1)
