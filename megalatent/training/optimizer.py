"""NorMuon for the matrices and Adam for the rest, built by Megatron's own optimiser factory.

Megatron sorts parameters by itself: two-dimensional ones go to the optimiser that
``megatron.optimizer`` names, embeddings, the output layer and vectors to Adam. What is ours is the
optimiser behind the name ``adaptive_muon``, and Adam's own learning rate and decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megalatent.config import LatentConfig, NorMuonConfig

__all__ = ["NORMUON", "install"]

# Megatron's name; its command line cannot be given another.
NORMUON = "adaptive_muon"


def install(latent: LatentConfig, args: Any) -> None:
    """Put our optimiser, its settings and our scheduler where Megatron's trainer looks them up.

    Args:
        args: Megatron's arguments; gets those that `OptimizerConfig` has and no flag sets.
    """
    from megatron.training import training

    from megalatent.training.decay import scheduler_class

    if args.optimizer == NORMUON:
        _register(args, latent.optimizer)
        training.get_megatron_optimizer_config = _with_adam_settings(
            training.get_megatron_optimizer_config, latent.optimizer
        )
    training.OptimizerParamScheduler = scheduler_class(latent.decay_phase)


def _register(args: Any, config: NorMuonConfig) -> None:
    """Make Megatron's factory build our NorMuon."""
    from megatron.core.optimizer import emerging_optimizers

    from megalatent.training.normuon import NorMuon, init_state

    args.adaptive_muon_moment2_method = "normuon"
    args.adaptive_muon_beta2 = config.beta2
    emerging_optimizers._EMERGING_OPTIMIZERS[NORMUON] = emerging_optimizers.EmergingOptimizerEntry(
        optimizer_cls=NorMuon, init_state_fn=init_state, config_to_kwargs=_arguments
    )


def _arguments(config: Any, model_chunks: list[Any], pg_collection: Any) -> dict[str, Any]:
    """What NorMuon is built with. Tags the weights first, before fp32 masters copy their tags."""
    for chunk in model_chunks:
        for weight, rows in _made_of_several(chunk, split_qkv=config.muon_split_qkv):
            # Megatron copies this attribute to masters, and gives it to QKV weights itself.
            weight.qkv_split_shapes = rows
    return {
        "lr": config.lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        "beta2": config.adaptive_muon_beta2,
        "eps": config.adaptive_muon_eps,
        "layout_of": _layouts(pg_collection, config.muon_tp_mode),
        "nesterov": config.muon_nesterov,
        "coefficient_type": config.muon_coefficient_type,
        "num_ns_steps": config.muon_num_ns_steps,
        "scale_mode": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
        "matmul_precision": config.muon_fp32_matmul_prec,
    }


def _made_of_several(chunk: Any, *, split_qkv: bool) -> Iterator[tuple[Any, list[int]]]:
    """Weights that hold several matrices, and the rows of each in one repetition."""
    from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    interleaved = config.moe_mlp_glu_interleave_size or config.moe_shared_expert_glu_interleave_size
    for name, weight in chunk.named_parameters():
        if weight.dim() != 2:
            continue
        if split_qkv and name.endswith("linear_qkv.weight"):
            yield weight, _get_qkv_split_shapes(config)
        elif config.gated_linear_unit and "linear_fc1.weight" in name and not interleaved:
            # A rank's shard has its part of the gate above its part of the up projection.
            yield weight, [weight.shape[0] // 2] * 2


def _layouts(pg_collection: Any, mode: Any) -> Callable[[Tensor], Any]:
    from megalatent.training.normuon import Layout

    def layout_of(weight: Any) -> Layout:
        group = pg_collection.expt_tp if getattr(weight, "expert_tp", False) else pg_collection.tp
        split = getattr(weight, "tensor_model_parallel", False) and group.size() > 1
        return Layout(
            split=tuple(getattr(weight, "qkv_split_shapes", None) or ()),
            dim=weight.partition_dim if split else None,
            group=group,
            mode=mode,
        )

    return layout_of


def _with_adam_settings(
    original: Callable[..., Any], settings: NorMuonConfig
) -> Callable[..., Any]:
    """Megatron's ``get_megatron_optimizer_config`` with Adam's own learning rate and decay.

    The decay is that of embeddings and the output layer; vectors have none, as Megatron has it.
    """

    def get_megatron_optimizer_config(args: Any) -> Any:
        from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

        config, overrides = original(args)
        overrides = dict(overrides)
        if settings.adam_lr is not None:
            # Both rates end at the same fraction of their peak.
            fraction = config.min_lr / config.lr if config.min_lr else 0.0
            least = fraction * settings.adam_lr
            everything = ParamPredicate(name="latent_adam", fn=_is_nonlinear_or_embedding)
            overrides[ParamKey(predicate=everything)] = {
                "max_lr": settings.adam_lr,
                "min_lr": least,
            }
        if settings.adam_weight_decay is not None:
            tables = ParamPredicate(name="latent_adam_tables", fn=_is_table)
            decay = settings.adam_weight_decay
            overrides[ParamKey(predicate=tables)] = {"start_wd": decay, "end_wd": decay}
        return config, overrides

    return get_megatron_optimizer_config


def _is_table(parameter: Any) -> bool:
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    return bool(_is_nonlinear_or_embedding(parameter)) and len(parameter.shape) > 1
