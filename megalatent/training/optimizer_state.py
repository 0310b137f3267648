"""Whether a run can read the optimiser's state of a checkpoint: Megatron finds out too late.

The state is written in one form for each way of spreading it over ranks, and weights of experts are
a part of their own only where they are spread. Another form ends in errors that name its insides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megalatent.errors import UserError

__all__ = ["check_optimizer_state", "checking_state"]


def checking_state(read: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `_load_global_dist_base_checkpoint`, which looks before it reads the state."""

    @functools.wraps(read)
    def checked(load_dir: Any, args: Any, rank0: bool, *rest: Any, **kwargs: Any) -> Any:
        found = read(load_dir, args, rank0, *rest, **kwargs)
        if rank0:  # what ranks have in common; read first
            check_optimizer_state(found[0].get("args"), args)
        return found

    return checked


def check_optimizer_state(checkpoint_args: Any, args: Any) -> None:
    """Raise a `UserError` if the run has its optimiser's state in another form.

    Args:
        checkpoint_args: Megatron's arguments in the checkpoint, or None.
        args: those of the run.
    """
    if args.finetune or args.no_load_optim or args.skip_train:
        return
    if getattr(checkpoint_args, "optimizer", None) is None or checkpoint_args.no_save_optim:
        return
    before, now = _form(checkpoint_args), _form(args)
    for name, value in now.items():
        if before.get(name, value) != value:
            raise UserError(
                f"megatron.{name}: {_shown(value)} cannot read the optimiser's state of the"
                f" checkpoint, which was trained with {_shown(before[name])}: keep it, or start a"
                " new run from the weights (megatron.finetune: true)"
            )
    if args.use_distributed_optimizer and not checkpoint_args.dist_ckpt_optim_fully_reshardable:
        _check_layout(checkpoint_args, args)


def _check_layout(checkpoint_args: Any, args: Any) -> None:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        before, now = getattr(checkpoint_args, name), getattr(args, name)
        if before != now:
            raise UserError(
                f"megatron.{name}: {now} cannot read the optimiser's state of the checkpoint, which"
                f" was saved at {before} without dist_ckpt_optim_fully_reshardable: go on at"
                f" {before} with that option until the next checkpoint, or start a new run from"
                " the weights (megatron.finetune: true)"
            )


def _form(args: Any) -> dict[str, Any]:
    """Options that decide the form, with what they come to."""
    layer_wise = bool(getattr(args, "use_layer_wise_distributed_optimizer", False))
    spread = bool(args.use_distributed_optimizer)
    form: dict[str, Any] = {
        "optimizer": args.optimizer,
        "use_distributed_optimizer": spread or layer_wise,
    }
    if args.num_experts:
        many = args.expert_model_parallel_size > 1
        form["expert_model_parallel_size"] = "more than 1" if many else 1
    if not spread:  # which has masters in fp32 also of weights in fp32
        form["bf16"] = bool(args.bf16)
    return form


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
