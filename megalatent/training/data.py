"""Micro-batches from Megatron's datasets, and the extra facts that fused passes need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
from torch import Tensor

from megalatent.model.batch import (
    FusedRows,
    MicroBatch,
    RowSettings,
    document_starts,
    response_tokens,
)
from megalatent.model.shift import (
    context_parallel_positions,
    document_parallel_positions,
    sequence_slice,
)
from megalatent.training.token_ids import check_ids

__all__ = ["BatchReader", "DataSettings", "dataset_provider", "micro_batch_from"]

_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How rows of tokens become micro-batches.

    Attributes:
        seq_length: S, tokens of a row.
        end_of_document: token id after which a new document starts, or None.
        vocabulary: ids in the data are below this; None checks none.
        packed: the dataset gives document boundaries (``cu_seqlens``); attention is THD.
        attention_mask: the dataset gives attention masks.
        rows: draws of the fusion; None for a model without one.
        sequence_parallel: states are split over TP between layers.
        plain_prompts: only tokens of responses are fused (``latent.sft.k_prefill: 1``).
    """

    seq_length: int
    end_of_document: int | None
    vocabulary: int | None = None
    packed: bool = False
    attention_mask: bool = False
    rows: RowSettings | None = None
    sequence_parallel: bool = False
    plain_prompts: bool = False


def micro_batch_from(
    raw: dict[str, Any], samples: Tensor, settings: DataSettings, *, first_stage: bool
) -> MicroBatch:
    """This rank's part of a whole micro-batch.

    Args:
        raw: whole rows, the same on every TP and CP rank: ``tokens``, ``labels``, ``loss_mask``,
            ``position_ids`` ``[b, S]``, and ``attention_mask``, ``cu_seqlens`` or None.
        samples: ``[b]`` int64, consumed-sample index of each row.
        first_stage: whether this rank embeds tokens, hence fuses.
    """
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    cp_size = parallel_state.get_context_parallel_world_size()
    cp_rank = parallel_state.get_context_parallel_rank()
    tokens, cu_seqlens = raw["tokens"], raw.get("cu_seqlens")
    starts = document_starts(tokens, settings.end_of_document, cu_seqlens)
    responses = response_tokens(raw["loss_mask"]) if settings.plain_prompts else None
    flat = cu_seqlens is not None
    packed_seq_params, boundaries = None, None
    if flat:
        raw = flatten_batch_for_packed_sequences(dict(raw))
        packed_seq_params, boundaries = _packed(raw)
    length = raw["tokens"].shape[1]
    device = raw["tokens"].device
    positions = (
        context_parallel_positions(length, cp_size, cp_rank)
        if boundaries is None or cp_size == 1
        else document_parallel_positions(boundaries, cp_size, cp_rank)
    ).to(device)

    def local(key: str, dim: int = 1) -> Tensor | None:
        value = raw.get(key)
        return value if value is None or cp_size == 1 else value.index_select(dim, positions)

    latent = None
    if first_stage and settings.rows is not None:
        group = (
            parallel_state.get_tensor_and_context_parallel_group()
            if tp_size * cp_size > 1
            else None
        )
        piece = sequence_slice(
            length=length,
            cu_seqlens=boundaries,
            tp_size=tp_size,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            cp_size=cp_size,
            cp_rank=cp_rank,
            group=group,
            device=device,
        )
        latent = FusedRows(
            starts=starts,
            samples=samples,
            piece=piece,
            flat=flat,
            settings=settings.rows,
            responses=responses,
        )
    return MicroBatch(
        tokens=local("tokens"),
        position_ids=local("position_ids"),
        labels=local("labels"),
        loss_mask=local("loss_mask"),
        attention_mask=local("attention_mask", 2),
        packed_seq_params=packed_seq_params,
        latent=latent,
    )


def _packed(raw: dict[str, Any]) -> tuple[PackedSeqParams, list[int]]:
    """Megatron's description of a flattened packed micro-batch, and its boundaries."""
    cu_seqlens = raw["cu_seqlens"][0]
    padded = raw.get("cu_seqlens_padded")
    padded = cu_seqlens if padded is None else padded[0]
    longest = int(raw["max_seqlen"].max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return params, padded.tolist()


class BatchReader:
    """Micro-batches of one step by index, read in order however the plan asks for them.

    A plan may visit micro-batches out of order, but the samples a micro-batch gets must not
    depend on the plan. Batches are dropped by :meth:`release`.

    Args:
        read: returns the next micro-batch.
        count: micro-batches of the step.
    """

    def __init__(self, read: Callable[[int], MicroBatch], count: int) -> None:
        self._read = read
        self._count = count
        self._held: dict[int, MicroBatch] = {}
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> MicroBatch:
        while self._next <= index:
            self._held[self._next] = self._read(self._next)
            self._next += 1
        return self._held[index]

    def release(self, index: int) -> None:
        """Forget a micro-batch that no action needs any more."""
        self._held.pop(index, None)

    def exhaust(self) -> None:
        """Read what is left, so that the next step starts at the right sample."""
        for index in range(self._next, self._count):
            self._read(index)
        self._next = self._count


def read_micro_batch(
    iterator: Iterator[dict[str, Any]] | None,
    settings: DataSettings,
    *,
    samples: Tensor,
    micro_batch_size: int,
    first_stage: bool,
) -> MicroBatch:
    """Read one micro-batch on TP rank 0, give it to all TP ranks, cut this rank's part."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    raw: dict[str, Any] = dict.fromkeys(_KEYS)
    if tp_rank == 0:
        assert iterator is not None
        given = next(iterator)
        if settings.vocabulary is not None:
            check_ids(given, settings.vocabulary)
        raw.update({k: v.cuda(non_blocking=True) for k, v in given.items() if torch.is_tensor(v)})
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        # Every stage that reads takes whole batches: the last stage's MTP and every layer's
        # document mask need what Megatron would give to the first stage only.
        raw = get_batch_on_this_tp_rank(
            raw,
            has_cu_seqlens=settings.packed,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=settings.attention_mask,
            broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
            broadcast_group=parallel_state.get_tensor_model_parallel_group(),
            cp_size=1,
            tp_rank=tp_rank,
            micro_batch_size=micro_batch_size,
            seq_length=settings.seq_length,
            mtp_on_this_rank=True,
        )
    return micro_batch_from(raw, samples, settings, first_stage=first_stage)


def sample_indices(
    consumed: int, index: int, micro_batch_size: int, device: torch.device
) -> Tensor:
    """Consumed-sample index of each row of this rank's ``index``-th micro-batch, ``[b]`` int64."""
    dp_size = parallel_state.get_data_parallel_world_size()
    dp_rank = parallel_state.get_data_parallel_rank()
    first = consumed + (index * dp_size + dp_rank) * micro_batch_size
    return torch.arange(first, first + micro_batch_size, device=device)


def reads_data(args: Any, vp_stage: int | None) -> bool:
    """Whether this chunk's data iterator is the one its rank reads from.

    A rank reads once for all its chunks: the first stage through chunk 0, the last through its
    last chunk, and stages between only if every layer needs document boundaries.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    chunk = vp_stage or 0
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        return chunk == 0
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return chunk == chunks - 1
    return chunk == 0 and needs_documents_everywhere(args)


def needs_documents_everywhere(args: Any) -> bool:
    """Whether attention of every layer depends on the data (packed or masked documents)."""
    return bool(args.dataloader_inter_document_masking or args.reset_attention_mask)


def pick_iterator(data_iterator: Any, args: Any) -> Any:
    """The iterator this rank reads from, out of one per chunk."""
    if not isinstance(data_iterator, list):
        return data_iterator
    for chunk, iterator in enumerate(data_iterator):
        if reads_data(args, chunk):
            return iterator
    return None


def dataset_provider(sizes: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Megatron's GPT datasets for train, validation and test.

    Args:
        sizes: number of samples of each split.
        vp_stage: the chunk the datasets are for.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args
    from megatron.training.datasets.sft_dataset import SFTDataset

    args = get_args()
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset

    def built_here(stage: int | None) -> bool:
        return reads_data(args, stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    return BlendedMegatronDatasetBuilder(
        kind, sizes, partial(built_here, vp_stage), dataset_config(args)
    ).build()


dataset_provider.is_distributed = True  # type: ignore[attr-defined]


def dataset_config(args: Any) -> Any:
    """Megatron's ``GPTDatasetConfig`` from its arguments."""
    import json

    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in a group, 1 if there is none."""
    return 1 if group is None else group.size()
