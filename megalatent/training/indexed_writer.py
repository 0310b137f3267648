"""Writes Megatron's .bin/.idx pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalatent.training.output_files import Staging

__all__ = ["IndexedOutput", "indexed_outputs", "pair"]


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


def pair(prefix: str) -> tuple[Path, Path]:
    """Tokens and index."""
    return Path(prefix + ".bin"), Path(prefix + ".idx")


@contextlib.contextmanager
def indexed_outputs(
    prefixes: Sequence[str], shares: Sequence[float], vocabulary: int, staging: Staging
) -> Iterator[list[IndexedOutput]]:
    """Pairs to write, complete at the end of this context; `staging` then gives them their names.

    Args:
        prefixes: paths without the endings.
        shares: of all tokens, one per pair.
        vocabulary: number of ids, which decides their type in the file.
    """
    from megalatent.platform import install

    install()  # before anything else imports Megatron
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocabulary)
    outputs: list[IndexedOutput] = []
    indices = []
    for prefix, share in zip(prefixes, shares, strict=True):
        tokens, index = (str(staging.path(file)) for file in pair(prefix))
        builder = IndexedDatasetBuilder(tokens, dtype=dtype)
        outputs.append(IndexedOutput(prefix=prefix, share=share, builder=builder))
        indices.append(index)
    yield outputs
    for output, index in zip(outputs, indices, strict=True):
        output.builder.finalize(index)
