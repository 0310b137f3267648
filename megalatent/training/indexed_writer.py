"""Writes Megatron's .bin/.idx pairs that appear only when they are complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["IndexedOutput", "indexed_outputs"]


@dataclass(kw_only=True)
class IndexedOutput:
    """One pair that is being written, one sequence per document.

    Attributes:
        prefix: path without the endings.
        share: of all tokens, between 0 and 1.
        documents, tokens: written so far.
    """

    prefix: str
    share: float
    builder: Any = field(repr=False)
    documents: int = 0
    tokens: int = 0

    def add(self, ids: Sequence[int]) -> None:
        """Write one document."""
        self.builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)


@contextlib.contextmanager
def indexed_outputs(
    prefixes: Sequence[str], shares: Sequence[float], vocabulary: int
) -> Iterator[list[IndexedOutput]]:
    """Pairs to write; they get their names at the end, and leave nothing behind on an error."""
    from megalatent.platform import install

    install()  # before anything else imports Megatron
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocabulary)
    outputs: list[IndexedOutput] = []
    try:
        for prefix, share in zip(prefixes, shares, strict=True):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            builder = IndexedDatasetBuilder(_temporary(prefix, ".bin"), dtype=dtype)
            outputs.append(IndexedOutput(prefix=prefix, share=share, builder=builder))
        yield outputs
        for output in outputs:
            output.builder.finalize(_temporary(output.prefix, ".idx"))
        for output in outputs:
            for ending in (".bin", ".idx"):
                os.replace(_temporary(output.prefix, ending), output.prefix + ending)
    except BaseException:
        for prefix in prefixes:
            for ending in (".bin", ".idx"):
                Path(_temporary(prefix, ending)).unlink(missing_ok=True)
        raise


def _temporary(prefix: str, ending: str) -> str:
    return f"{prefix}{ending}.tmp"
