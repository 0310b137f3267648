"""Whether a run can read the optimiser's state of a checkpoint: Megatron finds out too late.

The state is written in one form for each way of spreading it over ranks. Another form ends in
errors that name its insides. Weights of experts are a part of their own only where they are spread;
that much can be mended (`optimizer_form`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megalatent.errors import UserError
from megalatent.training.optimizer_form import in_own_form

__all__ = ["check_optimizer_state", "checking_state"]


# One optimiser for all weights; others are several, each with experts in a part of its own or not.
_ONE_OPTIMIZER = ("adam", "sgd")


def checking_state(read: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `_load_global_dist_base_checkpoint`, which looks before it reads the state."""

    @functools.wraps(read)
    def checked(
        load_dir: Any, args: Any, rank0: bool, wanted: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        found = read(load_dir, args, rank0, wanted, *rest, **kwargs)
        state = found[0]
        if rank0:  # what ranks have in common; read first
            check_optimizer_state(state.get("args"), args)
        elif args.num_experts and args.optimizer in _ONE_OPTIMIZER and "optimizer" in wanted:
            state["optimizer"] = in_own_form(wanted["optimizer"], state["optimizer"])
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
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if args.num_experts:
        names += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
    for name in names:
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
    if args.num_experts and args.optimizer not in _ONE_OPTIMIZER:
        many = args.expert_model_parallel_size > 1
        form["expert_model_parallel_size"] = "more than 1" if many else 1
    if not spread:  # which has masters in fp32 also of weights in fp32
        form["bf16"] = bool(args.bf16)
    return form


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
