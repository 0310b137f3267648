"""Quantising an export for serving, through nvidia-modelopt.

Calibration reads text in several passes, so that the scales also fit the inputs that the layers get
at fused positions. The fusion itself, the embedding, the head and routers keep their precision:
they are a small part of the weights, and errors of the fusion feed back at every token.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalatent.errors import UserError

__all__ = ["FORMATS", "Quantization", "calibration_tokens", "quantize_model"]

FORMATS = {  # ours -> modelopt's configuration
    "fp8": "FP8_DEFAULT_CFG",
    "int8": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
}
_BLOCK = 128  # input channels that share a scale in int4_awq
PASSES = 3
_ROWS, _LENGTH, _BATCH = 32, 512, 4


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `convert to-hf --quantize` does.

    Attributes:
        format: a key of `FORMATS`.
        calibration: a text file; None for Python's own manual.
    """

    format: str
    calibration: Path | None = None

    def require_package(self) -> None:
        """Raise UserError unless modelopt is installed."""
        try:
            importlib.import_module("modelopt.torch.quantization")
        except ImportError as error:
            raise UserError(
                f"--quantize {self.format} needs nvidia-modelopt ({error}): pip install"
                " 'megalatent[quantize]'"
            ) from None

    def check(self, config: Any, tokenizer: Path | None) -> None:
        """Raise UserError for what cannot be quantised, before anything is written.

        Args:
            config: `MegalatentConfig` of the export.
            tokenizer: folder of its tokenizer.
        """
        if tokenizer is None:
            raise UserError(
                f"--quantize {self.format} calibrates on text, and the checkpoint names no"
                " tokenizer that is there: give --tokenizer DIR"
            )
        if self.calibration is not None and not self.calibration.is_file():
            raise UserError(f"--calibration {self.calibration} is not a file: give a text file")
        if self.format != "int4_awq":
            return
        if config.num_experts:
            raise UserError(
                "--quantize int4_awq cannot be exported for models with experts (modelopt keeps"
                " theirs in one tensor): use fp8 or int8"
            )
        for name, size in _input_channels(config).items():
            if size % _BLOCK:
                raise UserError(
                    f"--quantize int4_awq has one scale for {_BLOCK} input channels, and {name} is"
                    f" {size}, no multiple of it: use fp8 or int8"
                )

    def apply(self, folder: Path) -> None:
        """Replace the weights in a finished export by quantised ones.

        Raises:
            UserError: there is too little text to calibrate with.
        """
        from transformers import GenerationConfig

        import megalatent.hf

        tokens = calibration_tokens(folder, self.calibration)
        model = megalatent.hf.MegalatentForCausalLM.from_pretrained(folder, dtype="auto")
        passes = PASSES if model.config.fusion != "none" else 1
        model.generation_config = GenerationConfig()  # else it is checked when it is written
        quantize_model(model.eval(), self.format, tokens, passes)
        target = folder / "quantized"
        _export(model, target)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            old.unlink()
        for new in target.iterdir():
            # The code stands there already, and how text is generated does not change.
            if new.suffix != ".py" and new.name != "generation_config.json":
                new.replace(folder / new.name)
        shutil.rmtree(target)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of it."""
        modelopt = importlib.import_module("modelopt")
        text = str(self.calibration) if self.calibration else "the manual of Python"
        return {"format": self.format, "calibration": text, "modelopt": modelopt.__version__}


def _input_channels(config: Any) -> dict[str, int]:
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads x head_dim": config.num_attention_heads * config.head_dim,
    }
    return sizes | {"intermediate_size": config.intermediate_size}


def calibration_tokens(folder: Path, text_file: Path | None) -> Tensor:
    """Rows of text `[rows, s]` in the tokens of an export.

    Raises:
        UserError: the text is not long enough for one row, or cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if text_file is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    else:
        try:
            text = text_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--calibration {text_file} cannot be read: {error}") from None
    length = min(_LENGTH, config.max_position_embeddings)
    # Tokens are not longer than this on average; tokenizing a whole book would take minutes.
    ids = tokenizer(text[: 32 * _ROWS * length], verbose=False)["input_ids"]
    ids = [token for token in ids if token < config.vocab_size]
    rows = min(_ROWS, len(ids) // length)
    if rows == 0:
        raise UserError(
            f"--calibration {text_file} has {len(ids)} tokens and one row takes {length}: give a"
            " longer text"
        )
    return torch.tensor(ids[: rows * length]).view(rows, length)


def quantize_model(model: Any, format_: str, tokens: Tensor, passes: int) -> None:
    """Insert modelopt's quantisers into a model and calibrate them, in place.

    Args:
        tokens: `[rows, s]` to calibrate with.
        passes: of each forward; from the second on the layers see fused inputs.
    """
    quantization = importlib.import_module("modelopt.torch.quantization")
    config = copy.deepcopy(getattr(quantization, FORMATS[format_]))
    config["quant_cfg"].append({"quantizer_name": "*model.fusion.*", "enable": False})
    with _quiet(), torch.no_grad():
        quantization.quantize(model, config, calibration_loop(tokens, passes))


def calibration_loop(tokens: Tensor, passes: int) -> Callable[[Any], None]:
    """What modelopt calls to have a model see its data."""

    def loop(model: Any) -> None:
        for rows in tokens.split(_BATCH):
            model(rows.to(model.device), num_passes=passes, use_cache=False)

    return loop


def _export(model: Any, folder: Path) -> None:
    exporting = importlib.import_module("modelopt.torch.export")
    with _quiet(), torch.inference_mode():
        exporting.export_hf_checkpoint(model, export_dir=folder)


@contextlib.contextmanager
def _quiet() -> Any:
    """Without modelopt's running commentary."""
    import warnings

    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
