"""What is refused, in one line with exit code 2, and that nothing is left or replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megalatent import platform

platform.install()

from megalatent.checkpoint import convert, exporting, writer  # noqa: E402
from megalatent.cli import main  # noqa: E402
from tests.checkpoint import models  # noqa: E402


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    models.save_plain("qwen3", folder / "hf")
    convert.from_hf(folder / "hf", folder / "megatron")
    return folder


@pytest.fixture
def hf(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "hf", tmp_path / "hf"))


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "megatron", tmp_path / "megatron"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that the command prints; its output folder does not appear."""
    capsys.readouterr()
    out = Path(arguments[2])
    existed = out.exists()
    assert main(["convert", *map(str, arguments)]) == 2
    line = [x for x in capsys.readouterr().err.splitlines() if x.startswith("megalatent: error")]
    assert len(line) == 1
    assert out.exists() == existed
    return line[0]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a model as one file after a change of its tensors."""
    tensors = models.weights(folder)
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logit_scale": 2.0}, "logit_scale=2.0 cannot be carried"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} cannot"),
        ({"quantization_config": {str(n): n for n in range(99)}}, "'11': 11, ...} cannot"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_output_bias=True, mlp_bias=False"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "whole number"),
        ({"model_type": "gemma"}, "models of type 'gemma' do not convert"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForCausalLM"),
        ({"architectures": 3}, "Qwen3ForCausalLM"),
        ({"dtype": []}, "no configuration of such a model"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: it must be at least 1"),
        ({"num_key_value_heads": -1}, "num_key_value_heads=-1: it must be at least 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta='1e4'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta=None"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "set sliding_window to"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0: it must be"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks model.layers.2."),
        ({"num_hidden_layers": 1, "layer_types": None}, "model.layers.1."),
        ({"num_hidden_layers": 3}, "must be equal to the number of `layer_types`"),
        ({"intermediate_size": 40}, "has shape [48, 32], and config.json asks for [40, 32]"),
    ],
)
def test_configurations_that_cannot_be_carried(
    hf: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str
) -> None:
    edit(hf / "config.json", **changes)
    assert expected in refused(capsys, "from-hf", hf, hf.parent / "out")


def test_tensors_that_no_rule_takes(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(hf, lambda t: t.update(extra=t["model.norm.weight"].clone()))
    assert "extra [32]" in refused(capsys, "from-hf", hf, hf.parent / "out")


def test_a_tied_head_must_be_the_table(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(hf / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight differs" in refused(capsys, "from-hf", hf, hf.parent / "out")
    change_tensors(
        hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert main(["convert", "from-hf", str(hf), str(hf.parent / "out")]) == 0


def test_damaged_models(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = sorted(hf.glob("*.safetensors"))
    first, last = load_file(shards[0]), shards[-1].read_bytes()
    save_file({**load_file(shards[-1]), **first}, shards[-1], metadata={"format": "pt"})
    line = refused(capsys, "from-hf", hf, hf.parent / "out")
    assert f"{min(first)} stands in {shards[0].name} and in" in line
    shards[-1].write_bytes(last)
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[:-10])
    assert "truncated" in refused(capsys, "from-hf", hf, hf.parent / "out")
    shards[0].unlink()
    assert f"{shards[0].name} is missing" in refused(capsys, "from-hf", hf, hf.parent / "out")


def test_damaged_checkpoints(
    source: Path, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = megatron.parent / "out"
    (file,) = megatron.rglob("*.distcp")
    whole = file.read_bytes()
    changed = bytearray(whole)
    # A bit of a weight: most bytes of so small a file are paddings, which hold nothing.
    table = models.weights(source / "hf")["model.embed_tokens.weight"]
    place = whole.find(table.numpy().tobytes())
    assert place > 0
    changed[place + 100] ^= 1
    file.write_bytes(changed)
    assert "another SHA-256" in refused(capsys, "to-hf", megatron, out)
    # Megatron's own checkpoints have no manifest.
    (megatron / "conversion.json").unlink()
    assert "truncated or damaged" in refused(capsys, "to-hf", megatron, out)
    file.write_bytes(whole[: len(whole) // 2])
    assert "truncated or damaged" in refused(capsys, "to-hf", megatron, out)
    file.unlink()
    assert "is missing" in refused(capsys, "to-hf", megatron, out)
    (megatron / "release" / ".metadata").write_bytes(b"half")
    assert ".metadata cannot be read" in refused(capsys, "to-hf", megatron, out)
    (megatron / "release" / "metadata.json").unlink()
    assert "no metadata.json" in refused(capsys, "to-hf", megatron, out)


def test_what_stands_there_is_kept(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = megatron.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert "--overwrite" in refused(capsys, "to-hf", megatron, out)
    assert "no earlier conversion" in refused(capsys, "to-hf", megatron, out, "--overwrite")
    assert (out / "thesis.txt").read_text() == "mine"
    again = megatron.parent / "again"
    assert main(["convert", "to-hf", str(megatron), str(again)]) == 0
    assert (
        main(["convert", "to-hf", str(megatron), str(again), "--overwrite", "--dtype", "bf16"]) == 0
    )
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"
    assert [p.name for p in megatron.parent.iterdir() if p.name.startswith(".")] == []


def test_places_where_nothing_can_be_made(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (megatron.parent / "file").write_text("mine")
    for out in (megatron.parent / "file" / "out", Path("/proc/out")):
        assert "cannot be made" in refused(capsys, "to-hf", megatron, out)
    assert (megatron.parent / "file").read_text() == "mine"


def test_links_lead_to_the_output(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The link stays; what it leads to is made, or replaced."""
    disk, link = megatron.parent / "disk", megatron.parent / "link"
    link.symlink_to(disk / "out")
    for options in ([], ["--overwrite", "--dtype", "bf16"]):
        assert main(["convert", "to-hf", str(megatron), str(link), *options]) == 0
        assert link.is_symlink()
        assert [path.name for path in disk.iterdir()] == ["out"]
    assert json.loads((disk / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    (megatron.parent / "loop").symlink_to(megatron.parent / "loop")
    for out in (megatron.parent / "loop", megatron.parent / "loop" / "out"):
        line = refused(capsys, "to-hf", megatron, out)
        assert "links lead back to themselves" in line or "cannot be made" in line


def test_a_disk_is_not_replaced_by_a_folder(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = megatron.parent / "out"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    assert "choose a folder inside it" in refused(capsys, "to-hf", megatron, out)
    assert list(out.iterdir()) == []


def test_what_appears_meanwhile_is_kept(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = megatron.parent / "out"
    write = convert._write_model_files

    def also_write_a_thesis(*args: Any) -> None:
        write(*args)
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    monkeypatch.setattr(convert, "_write_model_files", also_write_a_thesis)
    assert main(["convert", "to-hf", str(megatron), str(out)]) == 2
    assert f"{out} exists" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    monkeypatch.undo()
    shutil.rmtree(out)
    assert main(["convert", "to-hf", str(megatron), str(out)]) == 0


def test_a_value_that_the_dtype_cannot_hold(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(hf, lambda t: t["model.layers.1.mlp.down_proj.weight"][3].fill_(70_000.0))
    megatron, out = hf.parent / "large", hf.parent / "out"
    convert.from_hf(hf, megatron)
    line = refused(capsys, "to-hf", megatron, out, "--dtype", "fp16")
    assert "decoder.layers.mlp.linear_fc2.weight [1] has values beyond 6.55e+04" in line
    assert main(["convert", "to-hf", str(megatron), str(out), "--dtype", "bf16"]) == 0


def test_one_file_counts_before_an_index(hf: Path) -> None:
    """As transformers reads a folder with both."""
    tensors = models.weights(hf)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    convert.from_hf(hf, hf.parent / "out")
    convert.to_hf(hf.parent / "out", hf.parent / "back")
    found = AutoModelForCausalLM.from_pretrained(hf).model.norm.weight
    assert torch.equal(found, models.weights(hf.parent / "back")["model.norm.weight"])


def test_options_that_contradict_the_checkpoint(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = megatron.parent / "out"
    for size in (10, models.VOCAB + 1):
        line = refused(capsys, "to-hf", megatron, out, "--vocab-size", size)
        assert "would cut off" in line or f"{models.VOCAB} embedding rows" in line
    line = refused(capsys, "to-hf", megatron, out, "--document-end-token", models.VOCAB)
    assert f"the vocabulary has {models.VOCAB} tokens" in line
    line = refused(capsys, "to-hf", megatron, out, "--tokenizer", megatron / "nowhere")
    assert "is not a folder" in line
    line = refused(capsys, "to-hf", megatron, out, "--calibration", "text")
    assert "goes with --quantize" in line


def test_a_full_disk(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(megatron)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "free" in refused(capsys, "to-hf", megatron, megatron.parent / "out")


def test_an_interrupted_export_goes_on(megatron: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = writer.write_safetensors

    def until(limit: int) -> Callable[..., Any]:
        def stop(path: Path, *args: Any) -> Any:
            if len(written) == limit:
                raise KeyboardInterrupt
            written.append(path.name)
            return write(path, *args)

        return stop

    out = megatron.parent / "out"
    monkeypatch.setattr(exporting, "write_safetensors", until(2))
    with pytest.raises(KeyboardInterrupt):
        convert.to_hf(megatron, out, max_shard=20_000)
    assert not out.exists()
    monkeypatch.setattr(exporting, "write_safetensors", until(1000))
    convert.to_hf(megatron, out, max_shard=20_000)
    assert len(written) == len(set(written)) > 3  # none was written twice
    whole = megatron.parent / "whole"
    convert.to_hf(megatron, whole, max_shard=10**9)
    tensors = load_file(whole / "model.safetensors")
    found = models.weights(out)
    assert tensors.keys() == found.keys()
    assert all((found[name] == tensor).all() for name, tensor in tensors.items())


def test_an_interrupted_export_of_other_weights_starts_anew(
    megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint saved again: its `.metadata` need not differ."""
    out = megatron.parent / "out"

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_write_model_files", stop)
    with pytest.raises(KeyboardInterrupt):
        convert.to_hf(megatron, out)
    monkeypatch.undo()
    (megatron / "conversion.json").unlink()
    other = megatron.parent / "other"
    hf = megatron.parent / "other-hf"
    models.save_plain("qwen3", hf)
    change_tensors(hf, lambda t: t["model.layers.0.mlp.down_proj.weight"].neg_())
    convert.from_hf(hf, other)
    (new,), (old,) = other.rglob("*.distcp"), megatron.rglob("*.distcp")
    shutil.copyfile(new, old)
    convert.to_hf(megatron, out)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(models.weights(out)[name], models.weights(hf)[name])


def test_a_wrong_write_is_noticed(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer.write_safetensors

    def spoil(path: Path, *args: Any) -> Any:
        entry = write(path, *args)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return entry

    monkeypatch.setattr(exporting, "write_safetensors", spoil)
    assert "as written differs" in refused(capsys, "to-hf", megatron, megatron.parent / "out")
