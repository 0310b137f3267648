"""Strategies with a fixed order: a flush's order without the flush, and one by one."""

from __future__ import annotations

from megalatent.passes.problem import B, F, H, Problem

__all__ = ["one_by_one", "pass_by_pass"]


def pass_by_pass(p: Problem) -> list[list[int]]:
    """All forwards, pass after pass, then all backwards: never slower than with flushes.

    A plan with barriers between the passes runs the same lists, so taking the barriers away can
    only help. It holds every activation of the step.
    """
    virtual = range(p.width)
    forwards = [p.code(m, v, F) for v in virtual for m in range(p.alive[v])]
    if p.forward_only:
        return _with_heads(p, [forwards] * p.stages)
    backwards = [p.code(m, v, B) for v in reversed(virtual) for m in range(p.alive[v])]
    return _with_heads(p, [forwards + backwards] * p.stages)


def one_by_one(p: Problem) -> list[list[int]]:
    """Each micro-batch alone, forward and backward: the least memory there is."""
    actions: list[int] = []
    for m, length in enumerate(p.lengths):
        actions += [p.code(m, v, F) for v in range(length)]
        if not p.forward_only:
            actions += [p.code(m, v, B) for v in reversed(range(length))]
    return _with_heads(p, [actions] * p.stages)


def _with_heads(p: Problem, lists: list[list[int]]) -> list[list[int]]:
    """Put each head right after its forward on the last rank."""
    last: list[int] = []
    for action in lists[-1]:
        last.append(action)
        if action & 3 == F and p.has_head((action >> 2) % p.width):
            last.append(action - F + H)
    return [*lists[:-1], last]
