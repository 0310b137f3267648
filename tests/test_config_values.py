"""Values that mean nothing are refused, each in one line that names the option and the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megalatent.cli import main
from megalatent.config import Config
from megalatent.config_megatron import options, parse
from megalatent.config_passes import notes
from megalatent.config_ranges import RANGES
from megalatent.config_yaml import apply_overrides, read_yaml
from megalatent.errors import UserError
from tests.test_config import MODEL, config
from tests.unprivileged import open_folder, run_as_nobody

GOOD: dict[str, Any] = {"position_embedding_type": "rope"}


def problem(latent: Any = None, world_size: int = 1, **megatron: Any) -> str:
    with pytest.raises(UserError) as caught:
        config(latent, **{**GOOD, **megatron}).check(world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (["lr"], "megatron.lr: missing: give the learning rate"),
        (
            ["num_layers", "train_iters"],
            "megatron: 2 options are missing: give num_layers (the number of transformer layers),"
            " train_iters (the number of training steps)",
        ),
    ],
)
def test_what_is_missing_is_said_at_once(left_out: list[str], expected: str) -> None:
    given = {name: value for name, value in MODEL.items() if name not in left_out}
    with pytest.raises(UserError) as caught:
        Config.from_mapping({"megatron": given}).check(1)
    assert str(caught.value) == expected


def test_every_range_is_of_an_option() -> None:
    assert set(RANGES) <= set(options())


def test_megatrons_defaults_are_in_their_ranges() -> None:
    args = parse([])
    for name, allowed in RANGES.items():
        value = getattr(args, options()[name].action.dest)
        assert value is None or allowed.holds(value), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_iters", -5),
        ("train_iters", 0),
        ("vocab_size", 0),
        ("vocab_size", -5),
        ("make_vocab_size_divisible_by", 0),
        ("num_workers", -1),
        ("eval_iters", -1),
        ("eval_global_batch_size", -4),
        ("lr", float("inf")),
        ("clip_grad", float("nan")),
        ("weight_decay", float("nan")),
        ("adam_beta1", 1.5),
        ("adam_beta2", 1.0),
        ("norm_epsilon", -1.0),
        ("rotary_percent", 2.0),
        ("rotary_percent", 0.0),
        ("rotary_base", 0),
        ("moe_router_topk", 0),
        ("exit_interval", 0),
        ("kv_channels", 0),
        ("lr_decay_iters", 0),
        ("lr_decay_iters", -1),
        ("mtp_num_layers", -1),
        ("seed", 2**70),
        ("seed", -1),
        ("num_query_groups", 0),
        ("attention_dropout", 1.0),
        ("split", "banana"),
        ("split", "0,0,0"),
        ("split", "90,-10,20"),
        ("split", "1,1,1,1"),
        ("save", ""),
    ],
)
def test_a_value_out_of_range(name: str, value: Any) -> None:
    found = problem(**{name: value}, **({"save_interval": 1} if name == "save" else {}))
    assert found.startswith(f"megatron.{name}: ")
    assert str(value) in found


def test_samples_out_of_range() -> None:
    for value in (0, -4):
        assert "megatron.train_samples" in problem(train_iters=None, train_samples=value)


def test_no_query_groups_is_no_division_by_zero() -> None:
    assert "num_query_groups: 0" in problem(group_query_attention=True, num_query_groups=0)


def test_any_error_inside_megatrons_checks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    for error in (ZeroDivisionError("division by zero"), AttributeError("x"), KeyError("y")):

        def validate_args(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(arguments, "validate_args", validate_args)
        assert problem().startswith("megatron: ")


@pytest.mark.parametrize(
    ("latent", "expected"),
    [
        ({"passes": {"timeout_seconds": 1e-9}}, "latent.passes.timeout_seconds: 1e-09"),
        ({"passes": {"schedule": 1_000_000_000}}, "latent.passes.schedule: K = 1000000000"),
        ({"passes": {"eval_passes": 1_000_000_000}}, "latent.passes.eval_passes"),
        ({"seed": 2**64}, "latent.seed"),
        ({"fusion": {"kind": "none", "jitter": 0.1}}, "latent.fusion.jitter: 0.1 has no effect"),
        ({"fusion": {"kind": "none", "prefix_mixin": True}}, "latent.fusion.prefix_mixin"),
        ({"sft": {"k_prefill": 1}}, "latent.sft.k_prefill: 1 has no effect"),
    ],
)
def test_a_latent_value_out_of_range(latent: Any, expected: str) -> None:
    assert expected in problem(latent)


LATE = {
    "schedule": [{"start": 0, "mixture": {1: 1.0}}, {"start": 0.9, "mixture": {3: 1.0}}],
    "max_in_flight": 5,
}


def test_a_cap_is_held_against_the_deepest_phase() -> None:
    """It comes at iteration 9 of 10; two chunks of three passes keep six activations."""
    pipeline = {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    }
    found = problem({"passes": LATE}, 2, **pipeline)
    assert "latent.passes.max_in_flight: 5" in found
    assert "give 6 or more" in found
    config({"passes": {**LATE, "max_in_flight": 6}}, **GOOD, **pipeline).check(2)
    config({"passes": LATE}, **GOOD, pipeline_model_parallel_size=2).check(2)


def test_a_phase_that_rounding_swallows() -> None:
    """0.1 of 3 iterations is iteration 0, where the first phase begins."""
    phases = [{"start": 0, "mixture": {1: 1.0}}, {"start": 0.1, "mixture": {2: 1.0}}]
    found = problem({"passes": {"schedule": phases}}, train_iters=3)
    assert "latent.passes.schedule.1.start: 0.1" in found
    assert "iterations 0 and 0" in found


def test_what_a_run_will_not_do_is_noted() -> None:
    phases = [{"start": 0, "mixture": {1: 1.0}}, {"start": 50, "mixture": {2: 1.0}}]
    latent = {"passes": {"schedule": phases, "recompute": {2: "all", 9: "extra"}}}
    first, second, third = notes(config(latent, **GOOD))
    assert "schedule.1.start: the phase begins at iteration 50, after the run's 10" in first
    assert "recompute.9: no phase draws K = 9" in second
    assert "no model with normalization: 'LayerNorm' (but 'RMSNorm'), swiglu: False" in third
    assert notes(config(**GOOD, normalization="RMSNorm", swiglu=True)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on a GPU")
def test_a_kernel_that_does_not_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = problem({"fusion": {"kernel": "triton"}})
    assert found.startswith("latent.fusion.kernel: 'triton' does not run")


def test_an_empty_first_stage() -> None:
    found = problem(None, 2, pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=0)
    assert found.startswith("megatron.decoder_first_pipeline_num_layers: 0")


def test_a_path_that_looks_like_an_option(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "run.yaml"
    given = config(**GOOD).megatron | {"mock_data": False, "data_path": ["-x/data"]}
    file.write_text(yaml.safe_dump({"megatron": given}))
    assert main(["train", str(file)]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"megalatent: error: {file}: megatron.data_path.0: '-x/data'")
    assert error.count("\n") == 1


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = config(
        {"passes": {"costs": "~/costs.json"}}, save="~/runs", data_path=["0.5", "~/a", "1", "b~/c"]
    )
    assert given.megatron["save"] == str(tmp_path / "runs")
    assert given.megatron["data_path"] == ["0.5", str(tmp_path / "a"), "1", "b~/c"]
    assert given.latent.passes.costs == str(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "text",
    [
        "a: !!int x",
        "a: !!bool maybe",
        "a: !!float abc",
        "a: !!timestamp foo",
        f"a: {'1' * 5001}",
        f"a: {'[' * 2000}",
        'a: "\\ud800"',
        'a: "x\\0y"',
    ],
)
def test_yaml_that_its_reader_chokes_on(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="not valid YAML") as caught:
        read_yaml(file)
    assert len(str(caught.value)) < 500
    value = text.removeprefix("a: ")
    with pytest.raises(UserError, match=r"--set megatron\.lr=") as caught:
        apply_overrides({"megatron": {}}, [f"megatron.lr={value}"])
    assert len(str(caught.value)) < 500


def test_digits_that_are_no_numbers() -> None:
    assert apply_overrides({"megatron": {}}, ["megatron.²=1"]) == {"megatron": {"²": 1}}
    with pytest.raises(UserError, match="no index"):
        apply_overrides({"a": [1, 2]}, ["a.²=1"])


@pytest.mark.parametrize(
    ("option", "path"),
    [
        ("save", "closed/run"),
        ("save", "read only/run"),
        ("save", "x" * 300),
        ("load", "closed/checkpoint"),
        ("load", "hidden tracker"),
        ("data_path", "closed/data"),
        ("data_args_path", "closed/data"),
        ("tensorboard_dir", "closed/logs"),
    ],
)
def test_what_the_system_refuses(option: str, path: str) -> None:
    parse([])  # imports what nobody may read
    Config.from_mapping({"megatron": {"tokenizer_type": "NullTokenizer"}})
    with open_folder() as folder:
        (folder / "closed" / "checkpoint").mkdir(parents=True)
        (folder / "closed").chmod(0o700)
        (folder / "read only").mkdir(mode=0o555)
        tracker = folder / "hidden tracker" / "latest_checkpointed_iteration.txt"
        tracker.parent.mkdir()
        tracker.write_text("3")
        tracker.chmod(0o600)
        given = {**config(**GOOD, save_interval=1).megatron, option: str(folder / path)}
        if option.startswith("data"):
            del given["mock_data"]
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump({"megatron": given}))
        file.chmod(0o644)
        status, error = run_as_nobody(["train", str(file), "--nproc", "1"])
    assert status == 2, error
    assert error.startswith(f"megalatent: error: {file}: megatron.{option}: {folder / path}")
    assert error.count("\n") == 1


def test_no_place_in_the_run() -> None:
    from megalatent.launch.placement import find_place

    master = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for rank, size in (("5", "2"), ("2", "2"), ("0", "0"), ("²", "4"), ("0", "²")):
        with pytest.raises(UserError, match=r"RANK|WORLD_SIZE"):
            find_place({"RANK": rank, "WORLD_SIZE": size, **master})
