"""Logits of a checkpoint through Megatron, beside those of a Hugging Face model.

In single precision, by pass and by decoding mode: what is compared is the conversion, not kernels.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["MODES", "compare_logits"]

# Decoding modes: passes over the prompt, and whether generated positions are fused.
MODES = {"standard": (1, False), "soft": (1, True), "fused": (2, True)}
MAX_PASSES = 3
_LENGTH, _PROMPT = 24, 16
_SAMPLE = (
    "A transformer reads a token at every position and passes it on; here it also passes on the"
    " state that it computed, so that the next position starts from what the last one knew."
)


def compare_logits(checkpoint: Path, model: Path) -> dict[str, Any]:
    """Largest and mean difference of the logits, in fp32.

    Two rows are read in one, two and three passes, and then continued in every decoding mode: the
    Hugging Face model through `generate()` with its cache, Megatron by the recurrence without one.
    A model without fusion has one pass and one mode.

    Args:
        checkpoint: the folder of an iteration.
        model: a Hugging Face model of any family that converts.

    Returns:
        `"K = 1"` …, `"mode standard"` … -> `max`, `mean` and `scale` (the largest logit).
    """
    from transformers import AutoModelForCausalLM

    import megalatent.hf  # noqa: F401 - the Auto classes know the model from then on
    from megalatent.checkpoint.runner import open_runner

    with _quiet(), torch.no_grad():
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        hf = hf.eval()
        latent = getattr(hf.config, "fusion", "none") != "none"
        end = getattr(hf.config, "document_end_token_id", None)
        tokens = _tokens(model, hf.config.vocab_size, end)
        report = {}
        with open_runner(checkpoint, _LENGTH, end) as megatron:
            logits = megatron.passes(tokens, MAX_PASSES if latent else 1)
            for k, ours in enumerate(logits, 1):
                wanted = hf(tokens, **({"num_passes": k} if latent else {})).logits
                report[f"K = {k}"] = _difference(ours, wanted)
            for mode, (prefill, fused) in MODES.items() if latent else [("standard", (1, False))]:
                text, wanted = _decode(hf, tokens[:, :_PROMPT], mode if latent else None)
                ours = megatron.decode(text, _PROMPT, prefill, fused)
                report[f"mode {mode}"] = _difference(ours, wanted)
    return report


def _tokens(model: Path, vocab_size: int, document_end: int | None) -> Tensor:
    """A row of text, if the model has its tokenizer, and one of random tokens of all kinds."""
    from transformers import AutoTokenizer

    tokens = torch.randint(vocab_size, (2, _LENGTH), generator=torch.Generator().manual_seed(0))
    try:
        ids = AutoTokenizer.from_pretrained(model, local_files_only=True)(_SAMPLE)["input_ids"]
    except (OSError, ValueError, KeyError, TypeError):
        ids = []  # no tokenizer, or none that transformers knows: random tokens in both rows
    text = torch.tensor([token for token in ids if token < vocab_size][:_LENGTH], dtype=torch.long)
    tokens[0, : len(text)] = text
    if document_end is not None:
        tokens[1, _PROMPT // 2] = document_end  # what follows must read no state
    return tokens


def _decode(hf: Any, prompt: Tensor, mode: str | None) -> tuple[Tensor, Tensor]:
    """Greedy text `[b, s]` of a prompt and the logits `[b, n, v]` it was chosen from."""
    from transformers import GenerationConfig

    hf.generation_config = GenerationConfig()  # no end of text, no other sampling
    out = hf.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_LENGTH - _PROMPT,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **({"mode": mode} if mode else {}),
    )
    return out.sequences, torch.stack(out.logits, dim=1)


def _difference(ours: Tensor, wanted: Tensor) -> dict[str, float]:
    difference = (ours[..., : wanted.shape[-1]] - wanted).abs()
    return {
        "max": float(difference.max()),
        "mean": float(difference.mean()),
        "scale": float(wanted.abs().max()),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and bars of loading a model, which say nothing of the comparison."""
    from transformers.utils import logging as hf_logging

    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()
        logger.setLevel(level)
