"""The two conversions from beginning to end: what is read, decided, written and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import reprlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megalatent.checkpoint.arguments import megatron_options, model_config
from megalatent.checkpoint.export_config import export_config, named_tokenizer
from megalatent.checkpoint.exporting import Progress, export_weights
from megalatent.checkpoint.families import find_family
from megalatent.checkpoint.families.fields import NEUTRAL
from megalatent.checkpoint.importing import import_weights
from megalatent.checkpoint.mapping import fusion_rules
from megalatent.checkpoint.quantize import Quantization
from megalatent.checkpoint.reader import CheckpointReader, SafetensorsReader, check_manifest
from megalatent.checkpoint.writer import Staging, hash_file
from megalatent.config_model import ModelConfig
from megalatent.errors import UserError

__all__ = ["from_hf", "read_model_config", "to_hf"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = "generation_config.json"
_SILENT: Progress = lambda stage, n, total: None  # noqa: E731


def to_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    max_shard: int = 5 * 10**9,
    overwrite: bool = False,
    vocab_size: int | None = None,
    document_end: int | None = None,
    quantization: Quantization | None = None,
    check: Callable[[CheckpointReader, Path], dict[str, Any]] | None = None,
    progress: Progress = _SILENT,
) -> None:
    """Export a Megatron checkpoint as a Hugging Face model that loads alone.

    Args:
        dtype: of all weights; None keeps the checkpoint's.
        tokenizer: folder with the tokenizer; by default the one that the checkpoint names, or the
            one that `from_hf` put beside it.
        max_shard: bytes in a file, unless one tensor is larger.
        vocab_size: without padding, where neither checkpoint nor tokenizer says it.
        document_end: token that ends a document, likewise.
        quantization: quantise the model after it was written and verified; it must fit in memory.
        check: called with the reader and the finished folder, not quantised yet, before it gets
            its name; what it returns is kept in the manifest.

    Raises:
        UserError: see `megalatent.checkpoint.exporting`.
    """
    if quantization is not None:
        quantization.require_package()
    reader = CheckpointReader(checkpoint)
    folder = reader.folder.resolve()
    check_manifest(folder.parent, folder.name)
    args = reader.args()
    tokenizer = tokenizer or named_tokenizer(args, folder)
    config = export_config(args, reader, tokenizer, vocab_size, document_end, dtype)
    if quantization is not None:
        quantization.check(config, tokenizer)
    made_from = {
        "checkpoint": str(folder),
        "metadata": hash_file(folder / ".metadata"),
        "files": {x.name: [x.stat().st_size, x.stat().st_mtime_ns] for x in folder.iterdir()},
        "dtype": str(dtype),
        "max_shard": max_shard,
        "config": json.loads(config.to_json_string(use_diff=False)),
    }
    with _staged(out, made_from, overwrite) as staging:
        export_weights(
            reader,
            staging,
            find_family("megalatent"),
            config,
            dtype=dtype,
            max_shard=max_shard,
            copies=1 if quantization is None else 2,
            progress=progress,
        )
        _write_model_files(staging.folder, config, tokenizer)
        details: dict[str, Any] = {"converted": "to-hf", "from": str(reader.folder)}
        if check is not None:
            details["logits"] = check(reader, staging.folder)
        if quantization is not None:
            quantization.apply(staging.folder)
            staging.done.clear()  # these files are gone
            details["quantized"] = quantization.describe()
        staging.finish(details)


def from_hf(
    model: Path,
    out: Path,
    *,
    fusion: str | None = None,
    overwrite: bool = False,
    check: Callable[[Path, Path], dict[str, Any]] | None = None,
    progress: Progress = _SILENT,
) -> None:
    """Turn a Hugging Face model into a Megatron checkpoint, which loads in any layout.

    Args:
        fusion: a plain model gets a fresh fusion of this kind; None leaves a model as it is.
        check: as for `to_hf`, called with the model's folder and the new checkpoint.

    Raises:
        UserError: see `megalatent.checkpoint.importing`.
    """
    if not model.is_dir():
        raise UserError(f"{model} is not a folder: give a folder with a Hugging Face model")
    check_manifest(model)
    raw = _read_json(model / "config.json")
    family = find_family(str(raw.get("model_type")))
    config = read_model_config(raw, model)
    reader = SafetensorsReader(model)
    fresh: dict[str, Tensor] = {}
    if fusion is not None and fusion != config.fusion:
        if config.fusion != "none":
            raise UserError(
                f"--fusion {fusion}: {model} has the fusion {config.fusion!r} already: leave the"
                " option out"
            )
        config = _with_fusion(config, fusion)
        fresh = _fresh_fusion(config, reader)
    rules = fusion_rules(config.fusion) if fresh and family.model_type != "megalatent" else ()
    options = megatron_options(config)
    made_from = {"model": str(model.resolve()), "fusion": config.fusion}
    with _staged(out, made_from, overwrite) as staging:
        import_weights(
            reader,
            staging,
            family,
            config,
            fresh=fresh,
            extra_rules=rules,
            progress=progress,
        )
        _write_run_options(staging.folder / "model.yaml", config, options)
        _copy_tokenizer(model, staging.folder / "tokenizer")
        details: dict[str, Any] = {
            "converted": "from-hf",
            "from": str(model),
            "family": family.model_type,
        }
        if check is not None:
            details["logits"] = check(model, staging.folder)
        staging.finish(details)


@contextlib.contextmanager
def _staged(out: Path, made_from: Mapping[str, Any], overwrite: bool) -> Iterator[Staging]:
    try:
        staging = Staging(out, made_from, overwrite)
    except OSError as error:
        raise UserError(
            f"{out} cannot be made ({error.strerror or error}): choose another folder"
        ) from error
    try:
        yield staging
    except OSError as error:
        where = error.filename or staging.folder  # reading fails too
        raise UserError(
            f"{where}: {error.strerror or error}: nothing was written to {out}; solve it and run"
            " the same command again"
        ) from error
    finally:
        staging.close()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give a folder with a Hugging Face model") from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON: download the model again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a configuration: download the model again")
    return found


# -- Hugging Face's side ----------------------------------------------------------------------


def read_model_config(raw: Mapping[str, Any], folder: Path) -> Any:
    """A model's `config.json` as a `MegalatentConfig`.

    Raises:
        UserError: a field that is not carried, or a value that cannot be.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from megalatent.hf.configuration_megalatent import MegalatentConfig

    family = find_family(str(raw.get("model_type")))
    where = folder / "config.json"
    if unknown := sorted(set(raw) - family.carried - NEUTRAL):
        shown = ", ".join(f"{name}={reprlib.repr(raw[name])}" for name in unknown)
        raise UserError(
            f"{where}: {shown} cannot be carried to Megatron, and a model without it may compute"
            " something else: remove the field if you know that it changes nothing"
        )
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UserError(
            f"{where}: architectures={architectures} does not convert (only"
            f" {family.architecture}): give a causal language model"
        )
    own = MegalatentConfig if family.model_type == "megalatent" else None
    try:
        config = (own or CONFIG_MAPPING[family.model_type]).from_dict(dict(raw))
        settings = family.settings(config)
        return MegalatentConfig(**settings)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except Exception as error:  # transformers raises all kinds for values of the wrong type
        raise UserError(f"{where} is no configuration of such a model: {error}") from None


def _with_fusion(config: Any, fusion: str) -> Any:
    from megalatent.hf.configuration_megalatent import MegalatentConfig

    settings = config.to_dict()
    for name in ("model_type", "jitter", "prefix_mixin", "transformers_version"):
        settings.pop(name, None)
    return MegalatentConfig(**settings | {"fusion": fusion})


def _fresh_fusion(config: Any, reader: SafetensorsReader) -> dict[str, Tensor]:
    """The weights that training would start a fusion with, by Hugging Face name."""
    from megalatent.config import LatentConfig
    from megalatent.model.fusion import FUSIONS, FusionSettings

    table = "model.embed_tokens.weight"
    if table not in reader.tensors:
        raise UserError(f"{reader.folder} lacks {table}")
    embedding = reader.read(table)
    module = FUSIONS[config.fusion](
        FusionSettings(
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
            input_norm=config.input_norm,
            init_std=config.initializer_range,
            seed=LatentConfig().seed,
            dtype=embedding.dtype,
        )
    )
    squares = sum(float(rows.double().square().sum()) for rows in embedding.split(1024))
    module.scale_to_embedding((squares / embedding.numel()) ** 0.5)
    return {f"model.fusion.{name}": value.detach() for name, value in module.named_parameters()}


def _write_model_files(folder: Path, config: Any, tokenizer: Path | None) -> None:
    from transformers import GenerationConfig

    from megalatent.hf.export import write_config_and_code

    write_config_and_code(config, folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, folder)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer, and how text is generated with it: which tokens end one, which mode."""
    names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not names:
        return
    if (source / _GENERATION).is_file():
        _read_json(source / _GENERATION)
        names.append(_GENERATION)
    target.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)


# -- Megatron's side --------------------------------------------------------------------------


def _write_run_options(path: Path, config: Any, options: Mapping[str, Any]) -> None:
    """What a run's configuration has to say to load the checkpoint, ready to be copied."""
    latent: dict[str, Any] = {"fusion": {"kind": config.fusion}}
    model = model_config(config)
    if model != ModelConfig():
        latent = {"model": dataclasses.asdict(model), **latent}
    if config.fusion != "none":
        latent["fusion"] |= {
            "input_norm": config.input_norm,
            "jitter": config.jitter,
            "prefix_mixin": config.prefix_mixin,
        }
        latent["passes"] = {"loss_weighting": config.loss_weighting}
        if config.loss_weighting == "mean":
            latent["passes"]["lambda"] = float(config.loss_lambda)
    given = {name: value for name, value in options.items() if value is not False}
    text = "# The model of this checkpoint; add load: and what else a run needs.\n"
    content = {"latent": latent, "megatron": given}
    path.write_text(text + yaml.safe_dump(content, sort_keys=False))
