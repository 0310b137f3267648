"""The command `megalatent generate`."""

import argparse
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from megalatent.generate_command import add_generate_parser, run_generate_command
from megalatent.hf import MegalatentForCausalLM
from tests.hf.reference import FBT, TINY, Reference, tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:;!?'-()=+"  # token 0 is padding
PROMPT = "cab"


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    model = tiny_model(**FBT)
    model.generation_config = GenerationConfig(mode="soft")
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0} | {letter: n for n, letter in enumerate(LETTERS, 1)}
    assert len(vocabulary) == TINY["vocab_size"]
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}"
    fast.save_pretrained(folder)
    return folder


def run(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_generate_parser(parser.add_subparsers())
    return run_generate_command(parser.parse_args(["generate", *map(str, arguments)]))


def decode(tokens) -> str:
    return "".join(LETTERS[token - 1] for token in tokens if token)


def expected(mode: str, count: int, ids=(3, 1, 2), passes: int | None = None):
    """Text and log-probability by the slow reference."""
    reference = Reference(tiny_model(**FBT))
    passes = passes or {"fused": 2}.get(mode, 1)
    tokens, states = reference.generate(list(ids), count, mode, passes)
    chosen = [
        torch.log_softmax(reference.logits(state), -1)[token]
        for state, token in zip(states, tokens, strict=True)
    ]
    return decode(tokens), float(sum(chosen))


@pytest.mark.parametrize("mode", ["standard", "soft", "fused"])
def test_a_mode_prints_its_text(export, capsys, mode: str) -> None:
    assert run(export, "--prompt", PROMPT, "--mode", mode, "--max-new-tokens", 6) == 0
    assert capsys.readouterr().out == expected(mode, 6)[0] + "\n"


def test_the_exports_own_mode_is_the_default(export, capsys, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text("ef")
    arguments = ["--prompt", PROMPT, "--prompt-file", tmp_path / "prompt.txt"]
    assert run(export, *arguments, "--max-new-tokens", 5) == 0
    one, two = expected("soft", 5)[0], expected("soft", 5, (5, 6))[0]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["--- prompt 1 of 2", one, "--- prompt 2 of 2", two]


def test_compare_shows_the_modes_side_by_side(export, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    options = ["--compare", "--prefill-passes", 3, "--max-new-tokens", 6]
    assert run(export, "--prompt", PROMPT, *options) == 0
    out = capsys.readouterr().out
    rows = {
        cells[0]: cells[1:]
        for line in out.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")])
        == 4
    }
    answers = [expected("standard", 6), expected("soft", 6), expected("fused", 6, passes=3)]
    assert PROMPT in out
    assert rows["mode"] == ["standard", "soft", "fused"]
    assert rows["prompt passes"] == ["1", "1", "3"]
    assert rows["tokens"] == ["6", "6", "6"]
    assert rows["text"] == [text for text, _ in answers]
    for shown, mean, (_, probability) in zip(
        rows["log-probability"], rows["per token"], answers, strict=True
    ):
        assert float(shown) == pytest.approx(probability, abs=2e-3)
        assert float(mean) == pytest.approx(probability / 6, abs=2e-4)


def test_compare_folds_long_texts(export, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(export, "--prompt", PROMPT, "--compare", "--max-new-tokens", 40) == 0
    table = capsys.readouterr().out.replace("┃", "│").splitlines()
    lines = [line.strip("│").split(" │ ") for line in table if line.count(" │ ") == 3]
    start = next(n for n, cells in enumerate(lines) if cells[0].strip() == "text")
    for column, mode in enumerate(["standard", "soft", "fused"], 1):
        shown = "".join(cells[column].strip(" │") for cells in lines[start:])
        assert shown.replace(" ", "") == expected(mode, 40)[0].replace(" ", "")


def test_json_lines(export, capsys) -> None:
    options = ["--json", "--mode", "fused", "--num-beams", 3, "--max-new-tokens", 4]
    assert run(export, "--prompt", PROMPT, *options) == 0
    sample = json.loads(capsys.readouterr().out)
    reference = Reference(tiny_model(**FBT))
    texts, scores = reference.beam_search([3, 1, 2], 4, 3, "fused", 2)
    assert sample["text"] == decode(texts[0])
    assert sample["log_probability"] == pytest.approx(scores[0], abs=1e-3)
    assert (sample["mode"], sample["prefill_passes"], sample["tokens"]) == ("fused", 2, 4)


def test_stop_strings_and_streaming_and_chat(export, capsys) -> None:
    text, _ = expected("soft", 6)
    stop = text[2:4]
    assert run(export, "--prompt", PROMPT, "--max-new-tokens", 6, "--stop", stop) == 0
    assert capsys.readouterr().out == text[: text.index(stop) + 2] + "\n"
    assert run(export, "--prompt", PROMPT, "--max-new-tokens", 6, "--stream") == 0
    assert capsys.readouterr().out == text + "\n"
    assert run(export, "--prompt", PROMPT, "--max-new-tokens", 6, "--chat") == 0
    chat, _ = expected("soft", 6, [36, 3, 1, 2, 37])
    assert capsys.readouterr().out == chat + "\n"


def test_the_seed_decides_a_sample(export, capsys) -> None:
    texts = []
    for seed in (1, 1, 2):
        options = ["--temperature", 2, "--seed", seed, "--max-new-tokens", 8]
        assert run(export, "--prompt", PROMPT, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["--prompt", "a", "--compare", "--mode", "soft"], "leave --mode soft out"),
        (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens 0"),
        (["--prompt", "a", "--temperature", -1], "--temperature -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature nan"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature inf"),
        (["--prompt", "a", "--temperature", 1e-320], "give 0, which is greedy"),
        (["--prompt", "a", "--seed", 10**30], "--seed 1000"),
        (["--prompt", "a", "--stop", ""], "--stop ''"),
        (["--prompt", "\ud800"], "no valid UTF-8"),
        (["--prompt", "a", "--top-p", 0], "--top-p 0.0"),
        (["--prompt", "a", "--stream", "--json"], "--stream cannot"),
        (["--prompt", "a", "--dtype", "float33"], "--dtype float33"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "a", "--max-new-tokens", 64], "exceed the model's context of 64"),
        (["--prompt-file", "no-such-file"], "no-such-file cannot be read"),
        (["--prompt", "a", "--mode", "standard", "--prefill-passes", 2], "one plain pass"),
        (["--prompt", "a", "--mode", "soft", "--prefill-passes", 0], "prefill_passes=0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(export, capsys, arguments, message) -> None:
    assert run(export, *arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert message in captured.err
    assert captured.err.startswith("megalatent: error: ")
    assert captured.err.count("\n") == 1


def damaged(export, folder, damage):
    for file in export.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    return folder


def _truncate(folder) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _drop_a_tensor(folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {k: v for k, v in model.state_dict().items() if "state_proj" not in k}
    model.save_pretrained(folder, state_dict=state)


def _change_size(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 16}))


def _make_llama(folder) -> None:
    LlamaConfig(vocab_size=8).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "cannot be loaded"),
        (_drop_a_tensor, "missing keys model.fusion.state_proj.weight"),
        (_change_size, "mlp.down_proj.weight"),
        (_make_llama, "is a llama model"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer of"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "the tokenizer of"),
    ],
)
def test_damaged_exports_are_refused(export, tmp_path, capsys, damage, message) -> None:
    folder = damaged(export, tmp_path, damage)
    capsys.readouterr()
    assert run(folder, "--prompt", "a") == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]


def test_stop_strings_of_which_the_tokenizer_knows_nothing(export, tmp_path, capsys) -> None:
    folder = damaged(export, tmp_path, lambda folder: None)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    assert run(folder, "--prompt", "a", "--stop", "a", "--max-new-tokens", 2) == 2
    assert "--stop cannot be used with the tokenizer" in capsys.readouterr().err


def test_a_device_without_enough_memory(export, capsys, monkeypatch) -> None:
    def generate(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(MegalatentForCausalLM, "generate", generate)
    assert run(export, "--prompt", "a", "--max-new-tokens", 2) == 2
    assert "cpu is out of memory: give --dtype bfloat16" in capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys) -> None:
    assert run("no/such/folder", "--prompt", "a") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_the_parser_needs_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import argparse, sys; from megalatent.generate_command import add_generate_parser;"
        "add_generate_parser(argparse.ArgumentParser().add_subparsers());"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
