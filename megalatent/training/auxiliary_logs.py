"""Megatron's log lines of router losses and of multi-token prediction, as means over passes.

Megatron sums what every forward adds and divides by the number of micro-batches; with several
passes the sums have more terms, and the lines would grow with the mean number of passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["install"]


def install(passes: Callable[[], tuple[int, ...]]) -> None:
    """Replace the two reporters where Megatron's trainer looks them up.

    Args:
        passes: K of the micro-batches of the step that is being logged.
    """
    from megatron.training import training

    def share() -> float:
        given = passes()
        return len(given) / sum(given)

    tracker = training.get_moe_metrics_tracker
    training.get_moe_metrics_tracker = lambda: _Routers(tracker(), share)
    training.MTPLossLoggingHelper = _Prediction(training.MTPLossLoggingHelper, share)


class _Routers:
    def __init__(self, tracker: Any, share: Callable[[], float]) -> None:
        self._tracker = tracker
        self._share = share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def report(self, *, loss_scale: float, **kwargs: Any) -> str:
        """Megatron's `MoEMetricsTracker.report`."""
        return self._tracker.report(loss_scale=loss_scale * self._share(), **kwargs)


class _Prediction:
    def __init__(self, helper: Any, share: Callable[[], float]) -> None:
        self._helper = helper
        self._share = share

    def track_mtp_metrics(self, loss_scale: float, *args: Any, **kwargs: Any) -> None:
        """Megatron's `MTPLossLoggingHelper.track_mtp_metrics`."""
        self._helper.track_mtp_metrics(loss_scale * self._share(), *args, **kwargs)
