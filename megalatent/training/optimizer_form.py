"""The optimiser's state of a checkpoint in the form that the run's own optimisers have.

With experts spread over ranks (EP above 1) Megatron gives them an optimiser of their own beside the
one of the other weights; at EP 1 one optimiser has all. Moments and masters are saved by the names
of the weights and are found in either form. What does not belong to a weight (the step, what the
groups of weights have in common) is saved by the place that it has in the form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalatent.errors import UserError
from megalatent.platform.param_groups import SCHEDULED, ways_to_tell_weights

__all__ = ["in_own_form"]

# What a run's group of weights keeps of its own.
_OWN = ("params", "is_expert_parallel")


def in_own_form(own: Mapping[Any, Any], loaded: Any) -> Any:
    """What `load_state_dict` of the run's optimiser is to get.

    Args:
        own: the sharded state that the run asked for.
        loaded: what Megatron made of it: the sharded parts in the places where they were asked for,
            and what the checkpoint has beside them in the places of the checkpoint's form.

    Raises:
        UserError: the checkpoint's optimiser has no group of weights like one of the run's.
    """
    # Several optimisers stand under their numbers; one has names only.
    numbered = {key: part for key, part in loaded.items() if isinstance(key, int)}
    named = {key: part for key, part in loaded.items() if not isinstance(key, int)}
    if not (numbered and named):  # both have one form
        return loaded
    if all(isinstance(key, int) for key in own):
        return {number: _filled(part, loaded[number], [named]) for number, part in own.items()}
    return _filled(own, named, [numbered[number] for number in sorted(numbered)])


def _filled(own: Mapping[Any, Any], loaded: Any, sources: Sequence[Any]) -> dict[Any, Any]:
    """The state of one of the run's optimisers."""
    state = _with_loaded(own, loaded)
    inner = _inner(state)
    groups = [group for source in sources for group in _inner(source)["param_groups"]]
    inner["param_groups"] = [_like_saved(group, groups) for group in inner["param_groups"]]
    first = _inner(sources[0])
    if "common_step" in first.get("state", ()):
        inner["state"]["common_step"] = first["state"]["common_step"]
    if "grad_scaler" in sources[0]:
        state["grad_scaler"] = sources[0]["grad_scaler"]
    return state


def _inner(state: Any) -> Any:
    """torch's part: optimisers with masters or shards keep it beside these."""
    return state.get("optimizer", state)


def _with_loaded(own: Any, loaded: Any) -> Any:
    """`own`, with what was loaded in the place of each part that asks for it."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if isinstance(own, ShardedBase | LocalNonpersistentObject):
        return loaded
    if isinstance(own, Mapping):
        return {k: _with_loaded(v, _at(loaded, k)) for k, v in own.items()}
    if isinstance(own, list):
        return [_with_loaded(v, _at(loaded, i)) for i, v in enumerate(own)]
    return own


def _at(loaded: Any, key: Any) -> Any:
    """None where nothing was asked for, so that nothing is there."""
    if isinstance(loaded, Mapping):
        return loaded.get(key)
    if isinstance(loaded, list) and key < len(loaded):
        return loaded[key]
    return None


def _like_saved(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for names in _ways_to_tell_groups():
        same = [other for other in saved if all(_of(other, n) == _of(group, n) for n in names)]
        if same and all(_of(other, n) == _of(same[0], n) for other in same for n in SCHEDULED):
            return {**same[0], **{key: group[key] for key in _OWN if key in group}}
    shown = {name: _of(group, name) for name in _ways_to_tell_groups()[0]}
    raise UserError(
        "the checkpoint's optimiser has no group of weights with"
        f" {', '.join(f'{k} = {v}' for k, v in shown.items() if v is not None)}: keep"
        " expert_model_parallel_size as it was, or start a new run from the weights"
        " (megatron.finetune: true)"
    )


def _of(group: Mapping[str, Any], name: str) -> Any:
    return group.get(name, group.get(f"pre_{name}"))


def _ways_to_tell_groups() -> tuple[list[str], ...]:
    """Names of what differs between groups, besides who has the weights; the strictest first.

    A run may have other rates than the checkpoint: see `platform.param_groups`, which comes next.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    ways = (list(param_group_identifier_keys), *ways_to_tell_weights())
    return tuple([name for name in names if name not in _OWN] for names in ways)
