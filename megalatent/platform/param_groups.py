"""Parameter groups of a checkpoint whose learning rates or weight decays the run has changed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["SCHEDULED", "match_groups_by_weights", "ways_to_tell_weights"]

# What the scheduler sets a group's learning rate and weight decay by.
SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")

Group = dict[str, Any]


def match_groups_by_weights(original: Any) -> Any:
    """Take a checkpoint's groups for the run's that have the same weights, whatever their rates.

    Megatron tells groups from one another by their rates too, so that a checkpoint trained at
    another rate has none of the run's. Which rates hold then is the scheduler's question: the
    checkpoint's with `use_checkpoint_opt_param_scheduler`, else the run's.
    """
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.training import global_vars

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        kept: list[tuple[Any, list[dict[str, Any]]]] = []
        for part, state in _parts(self, state_dict):
            if not isinstance(part, ChainedOptimizer):  # which comes here itself
                saved = state.get("optimizer", state).get("param_groups", [])
                kept.append((part, _adopt(part.param_groups, saved)))
        original(self, state_dict)
        args = global_vars._GLOBAL_ARGS
        if args is not None and args.use_checkpoint_opt_param_scheduler:
            for part, before in kept:
                for group, values in zip(part.param_groups, before, strict=False):
                    _set(group, values)

    return load_state_dict


def _parts(chained: Any, state_dict: Any) -> Iterator[tuple[Any, Any]]:
    """Optimisers of a chain with their states, as the chain itself takes them apart."""
    if len(chained.chained_optimizers) == 1:
        yield chained.chained_optimizers[0], state_dict
    else:
        yield from zip(
            chained.chained_optimizers, (state_dict[i] for i in sorted(state_dict)), strict=False
        )


def _adopt(current: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    """Give saved groups the run's rates; what they had, in the order of the run's groups."""
    before = []
    for group, partner in _pairs(current, saved):
        before.append(_rates(partner))
        _set(partner, _rates(group))
    return before


def _pairs(current: Sequence[Group], saved: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Each of the run's groups with the saved one of the same weights; none if that is unclear."""
    for names in ways_to_tell_weights():
        mine, theirs = (
            {tuple(group.get(name) for name in names): group for group in groups}
            for groups in (current, saved)
        )
        if len(mine) == len(current) and len(theirs) == len(saved) and mine.keys() == theirs.keys():
            return [(group, theirs[key]) for key, group in mine.items()]
    return []


def ways_to_tell_weights() -> tuple[list[str], list[str]]:
    """Names of what differs between groups with other weights, whatever their rates.

    Two groups may differ in their rates alone: then whether the rate is the common one tells.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    weights = [name for name in param_group_identifier_keys if name not in SCHEDULED]
    return [*weights, "default_config"], weights


def _rates(group: Group) -> dict[str, Any]:
    return {name: group[name] for name in SCHEDULED if name in group}


def _set(group: Group, rates: dict[str, Any]) -> None:
    for name in SCHEDULED:
        group.pop(name, None)
    group.update(rates)
