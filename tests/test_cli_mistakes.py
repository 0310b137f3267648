"""A mistake in a configuration: exit code 2, one line that helps, nothing started or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalatent.cli import main
from tests.test_config import MODEL as PLAIN

MODEL: dict[str, Any] = {**PLAIN, "position_embedding_type": "rope"}

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}

# Name -> (latent, changes under megatron, processes, what the line must contain).
# A change of "gone" takes the option out of the model above.
CASES: dict[str, tuple[Any, dict[str, Any], int, tuple[str, ...]]] = {
    # Names and types.
    "option": ({}, {"num_layer": 2}, 1, ("megatron.num_layer", "'num_layers'")),
    "option with dashes": ({}, {"num-layers": 2}, 1, ("'num_layers'",)),
    "inner name": ({}, {"layernorm_epsilon": 1e-6}, 1, ("write norm_epsilon",)),
    "inverted switch": ({}, {"add_bias_linear": False}, 1, ("disable_bias_linear: true",)),
    "whole number": ({}, {"num_layers": 2.5}, 1, ("megatron.num_layers", "whole number")),
    "number as text": ({}, {"lr": "fast"}, 1, ("megatron.lr: 'fast'", "number")),
    "switch": ({}, {"swiglu": "yes"}, 1, ("megatron.swiglu", "true")),
    "choice": ({}, {"normalization": "RMSnorm"}, 1, ("did you mean 'RMSNorm'",)),
    "pattern": ({}, {"moe_layer_freq": "every second"}, 1, ("--moe-layer-freq",)),
    "list for one value": ({}, {"hidden_size": [64]}, 1, ("takes one value",)),
    "two names": (
        {},
        {"save_interval": 1, "persistent_save_interval": 2},
        1,
        ("sets the same as megatron.save_interval",),
    ),
    "latent is a list": ([], {}, 1, ("latent", "not a section")),
    "latent key": ({"fusoin": {}}, {}, 1, ("latent.fusoin", "'fusion'")),
    "fusion key": ({"fusion": {"jiter": 0.1}}, {}, 1, ("latent.fusion.jiter", "'jitter'")),
    "fusion kind": ({"fusion": {"kind": "gatd"}}, {}, 1, ("'gatd'", "'gated'")),
    "norm choice": ({"fusion": {"input_norm": "al"}}, {}, 1, ("input_norm", "'all'")),
    "jitter": ({"fusion": {"jitter": -1}}, {}, 1, ("jitter", "0 or more")),
    "mixin type": ({"fusion": {"prefix_mixin": 1}}, {}, 1, ("prefix_mixin", "true or false")),
    "warm-up": ({}, {"lr_warmup_iters": 10}, 1, ("lr_warmup_iters: 10", "10 iters")),
    "hybrid": ({}, {"hybrid_layer_pattern": "M*M*"}, 1, ("hybrid_layer_pattern", "leave it out")),
    "recomputed twice": (
        {"passes": {"recompute": "extra"}},
        {"recompute_granularity": "selective"},
        1,
        ("recompute_granularity", "keep one"),
    ),
    "packed CP": (
        {},
        {"context_parallel_size": 2, "dataloader_inter_document_masking": True},
        2,
        ("context_parallel_size: 2", "reset_attention_mask"),
    ),
    # Passes.
    "K = 0": ({"passes": {"schedule": 0}}, {}, 1, ("schedule: 0", "K >= 1")),
    "K = 0 in a mixture": ({"passes": {"schedule": {0: 1.0}}}, {}, 1, ("K >= 1",)),
    "K = 1.5": ({"passes": {"schedule": 1.5}}, {}, 1, ("K >= 1",)),
    "mixture sum": ({"passes": {"schedule": {1: 0.5, 2: 0.4}}}, {}, 1, ("0.9", "sum to 1")),
    "mixture share": ({"passes": {"schedule": {1: 1.5, 2: -0.5}}}, {}, 1, ("from 0 to 1",)),
    "late first phase": (
        {"passes": {"schedule": [{"start": 5, "mixture": {1: 1.0}}]}},
        {},
        1,
        ("must start at 0",),
    ),
    "phases out of order": (
        {
            "passes": {
                "schedule": [
                    {"start": 0, "mixture": {1: 1.0}},
                    {"start": 0.9, "mixture": {2: 1.0}},
                    {"start": 8, "mixture": {3: 1.0}},
                ]
            }
        },
        {},
        1,
        ("schedule.2.start", "10 iterations"),
    ),
    "fraction of one": (
        {
            "passes": {
                "schedule": [{"start": 0, "mixture": {1: 1}}, {"start": 1.0, "mixture": {2: 1}}]
            }
        },
        {},
        1,
        ("schedule.1.start: 1.0", "not 1 itself"),
    ),
    "phase key": ({"passes": {"schedule": [{"start": 0, "mix": {1: 1.0}}]}}, {}, 1, ("no phase",)),
    "lambda of a sum": (
        {"passes": {"loss_weighting": "sum", "lambda": 0.5}},
        {},
        1,
        ("latent.passes.lambda", "no effect"),
    ),
    "evaluation without passes": ({"passes": {"eval_passes": 0}}, {}, 1, ("eval_passes",)),
    "no room": ({"passes": {"max_in_flight": 0}}, {}, 1, ("max_in_flight",)),
    "no time": ({"passes": {"timeout_seconds": 0}}, {}, 1, ("timeout_seconds",)),
    "recompute": ({"passes": {"recompute": {2: "some"}}}, {}, 1, ("recompute.2", "never, extra")),
    "costs file": ({"passes": {"costs": "no.json"}}, {}, 1, ("latent.passes.costs: no.json",)),
    "passes without fusion": (
        {"fusion": {"kind": "none"}, "passes": {"schedule": 2}},
        {},
        1,
        ("schedule", "choose a fusion"),
    ),
    "norm without a norm": (
        {"fusion": {"kind": "additive", "input_norm": "all"}},
        {},
        1,
        ("'additive'", "input_norm: fused"),
    ),
    "prefill": ({"sft": {"k_prefill": 3}}, {}, 1, ("k_prefill: 3",)),
    # What must be given.
    "no layers": ({}, {"num_layers": "gone"}, 1, ("megatron.num_layers: missing",)),
    "no length of the run": ({}, {"train_iters": "gone"}, 1, ("train_iters: missing",)),
    "no data": ({}, {"mock_data": "gone"}, 1, ("data_path: missing",)),
    "no vocabulary": ({}, {"vocab_size": "gone"}, 1, ("vocab_size: missing",)),
    # Layout.
    "world": ({}, TP2, 3, ("3 processes", "a multiple of 2")),
    "heads": ({}, {**TP2, "num_attention_heads": 1}, 2, ("num_attention_heads: 1", "2")),
    "heads of the width": ({}, {"num_attention_heads": 3}, 1, ("hidden_size: 64",)),
    "feed-forward": ({}, {**TP2, "ffn_hidden_size": 65}, 2, ("ffn_hidden_size: 65",)),
    "query groups": (
        {},
        {
            "tensor_model_parallel_size": 3,
            "num_attention_heads": 6,
            "hidden_size": 96,
            "seq_length": 30,
            "group_query_attention": True,
            "num_query_groups": 2,
        },
        3,
        ("num_query_groups: 2", "neither"),
    ),
    "groups without GQA": ({}, {"num_query_groups": 2}, 1, ("group_query_attention: true",)),
    "layers over stages": ({}, {**PP2, "num_layers": 5}, 2, ("5 layers do not fill 2",)),
    "layers over chunks": (
        {},
        {**PP2, "num_layers_per_virtual_pipeline_stage": 3},
        2,
        ("3 does not divide the 2 layers",),
    ),
    "own last stage": (
        {},
        {**PP2, "decoder_last_pipeline_num_layers": 9},
        2,
        ("decoder_last_pipeline_num_layers: 9",),
    ),
    "counted embedding": (
        {},
        {**PP2, "account_for_embedding_in_pipeline_split": True},
        2,
        ("1 for the embedding", "5 layers do not fill"),
    ),
    "chunks without stages": ({}, {"num_virtual_stages_per_pipeline_rank": 2}, 1, ("is 1",)),
    "length over context": (
        {},
        {"context_parallel_size": 2, "attention_dropout": 0.0, "seq_length": 34},
        2,
        ("seq_length: 34", "2 x context_parallel_size"),
    ),
    "length over slices": (
        {},
        {**TP2, "sequence_parallel": True, "seq_length": 33},
        2,
        ("seq_length: 33",),
    ),
    "sequence parallel alone": ({}, {"sequence_parallel": True}, 1, ("sequence_parallel",)),
    "experts over ranks": (
        {},
        {"num_experts": 3, "expert_model_parallel_size": 2, "disable_bias_linear": True},
        2,
        ("num_experts: 3",),
    ),
    "experts without SP": (
        {},
        {**TP2, "num_experts": 4},
        2,
        ("num_experts", "sequence_parallel: true"),
    ),
    "EP without experts": ({}, {"expert_model_parallel_size": 2}, 2, ("without experts",)),
    "batch": ({}, {"global_batch_size": 5}, 2, ("global_batch_size: 5", "give 4")),
    "padded vocabulary": (
        {},
        {**TP2, "vocab_size": 101, "no_pad_vocab_size": True},
        2,
        ("vocab_size: 101",),
    ),
    # Values that contradict each other.
    "two precisions": ({}, {"bf16": True, "fp16": True}, 1, ("fp16",)),
    "run without name": ({}, {"wandb_project": "passes"}, 1, ("wandb_exp_name", "a name")),
    "two lengths": ({}, {"train_samples": 5}, 1, ("train_samples: 5", "keep one")),
    "learning rate": ({}, {"min_lr": 1.0}, 1, ("min_lr: 1", "lr: 0.001")),
    "positions": ({}, {"max_position_embeddings": 8}, 1, ("max_position_embeddings: 8",)),
    "no save interval": ({}, {"save": "out"}, 1, ("save_interval",)),
    "Megatron's own check": ({}, {"overlap_param_gather": True}, 1, ("overlap_param_gather",)),
    "two sources": ({}, {"data_path": "x"}, 1, ("keep one",)),
    # Files.
    "data file": ({}, {"mock_data": False, "data_path": "no/data"}, 1, ("no/data.bin",)),
    "data weights": (
        {},
        {"mock_data": False, "data_path": ["a", "b"]},
        1,
        ("'a' is no weight",),
    ),
    "several sets": (
        {},
        {"multiple_validation_sets": True},
        1,
        ("multiple_validation_sets: true", "add full_validation: true"),
    ),
    "rows of whole sets": (
        {},
        {"full_validation": True, "micro_batch_size": 2},
        1,
        ("eval_micro_batch_size: 2 with full_validation", "write 1"),
    ),
    "tokenizer": (
        {},
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "no/tokenizer"},
        1,
        ("tokenizer_model: no/tokenizer",),
    ),
    "vocabulary file": (
        {},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "no.json", "merge_file": "no.txt"},
        1,
        ("vocab_file: no.json",),
    ),
    "checkpoint": ({}, {"load": "no/checkpoint"}, 1, ("load: no/checkpoint",)),
    "step of a checkpoint": ({}, {"load": "checkpoint", "ckpt_step": 7}, 1, ("iter_0000007",)),
    "not a checkpoint": ({}, {"load": "empty"}, 1, ("holds no checkpoint",)),
    "output below a file": (
        {},
        {"save": "file/out", "save_interval": 5},
        1,
        ("save: file/out", "is a file"),
    ),
    # Options that cannot work with passes.
    **{
        f"refused {name}": ({}, {name: value}, 1, (f"megatron.{name}", "because"))
        for name, value in {
            "cuda_graph_impl": "full_iteration",
            "enable_cuda_graph": True,
            "optimizer_cuda_graph": True,
            "defer_embedding_wgrad_compute": True,
            "distribute_saved_activations": True,
            "fine_grained_activation_offloading": True,
            "overlap_moe_expert_parallel_comm": True,
            "hybrid_context_parallel": True,
            "variable_seq_lengths": True,
            "use_megatron_fsdp": True,
            "use_torch_fsdp2": True,
            "overlap_param_gather_with_optimizer_step": True,
            "yaml_cfg": "other.yaml",
        }.items()
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a checkpoint of step 3, an empty folder and a file."""
    (tmp_path / "checkpoint" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def no_processes(*args: object, **kwargs: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("name", CASES)
def test_mistake(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    latent, changes, nproc, expected = CASES[name]
    megatron = {k: v for k, v in {**MODEL, **changes}.items() if v != "gone"}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"latent": latent, "megatron": megatron}, sort_keys=False))
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr("megalatent.launch.local.run_local", no_processes)
    assert main(["train", str(path), "--nproc", str(nproc)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith(f"megalatent: error: {path}: ")
    for part in expected:
        assert part in printed.err
    assert sorted(folder.rglob("*")) == before


def test_the_model_of_this_table_is_right(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Else any case above could fail for a reason of its own."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"megatron": MODEL}))
    assert main(["train", str(path), "--nproc", "2", "--dry-run"]) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("# 2 processes\nlatent:\n")
    shown = yaml.safe_load(printed.out.split("# Megatron's command line:")[0])
    assert shown["megatron"].items() >= MODEL.items()
    assert "--num-layers 4" in printed.out


def test_untied_embeddings_must_be_said(folder: Path) -> None:
    """The default is tied; the config may say otherwise."""
    from megalatent.config import Config
    from megalatent.config_megatron import parse

    tied = Config.from_mapping({"megatron": MODEL})
    assert parse(tied.megatron_argv()).untie_embeddings_and_output_weights is False
    said = {**MODEL, "untie_embeddings_and_output_weights": True}
    untied = Config.from_mapping({"megatron": said})
    assert parse(untied.megatron_argv()).untie_embeddings_and_output_weights is True


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nproc", "0"], "--nproc: 0"),
        (["--nproc", "two"], "--nproc"),
        (["--set", "megatron.lr"], "section.key=value"),
        (["--set", "megatron.lr=[1"], "not valid YAML"),
        (["--set", "megatron.lr.x=1"], "'x' is inside 0.001"),
        (["--set", "megatrn.lr=1"], "megatrn: unknown section"),
        (["--wrong"], "--wrong"),
    ],
)
def test_mistake_on_the_command_line(
    arguments: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"megatron": MODEL}))
    assert main(["train", str(path), *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("megalatent: error: ")
    assert expected in printed.err
