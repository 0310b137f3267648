"""What a profile runs: its cases, and in which iteration each one has its turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalatent.config_schedule import read_mixture
from megalatent.errors import UserError
from megalatent.passes.plan_options import apportion

if TYPE_CHECKING:
    from megalatent.config import Config

__all__ = ["CasePlan", "Cases", "left_out", "profile_overrides", "read_cases"]

# Options that would write files, end the run early or skip its steps.
_AWAY = (
    "save",
    "save_params_interval",
    "save_activations_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
    "log_progress",
    "tensorboard_dir",
    "wandb_project",
    "wandb_exp_name",
    "exit_duration_in_mins",
    "phase_transition_iterations",
    "iterations_to_skip",
    "skip_train",
)

#: Shares of K within the micro-batches of a step.
Mixture = Mapping[int, float]
Cases = tuple[Mixture, ...]


@dataclass(frozen=True)
class CasePlan:
    """Rounds in which every case has one turn; who begins changes from round to round.

    The first round counts what visits keep, then come rounds to warm up, then the recorded ones:
    whatever slows the machine for a while meets all cases alike.

    Attributes:
        cases: shares of K of each.
        warmup, steps: rounds.
    """

    cases: Cases
    warmup: int
    steps: int

    @property
    def iterations(self) -> int:
        return len(self.cases) * (1 + self.warmup + self.steps)

    @property
    def counted(self) -> range:
        return range(len(self.cases))

    @property
    def recorded(self) -> range:
        return range(len(self.cases) * (1 + self.warmup), self.iterations)

    def passes(self, iteration: int, micro_batches: int) -> tuple[int, ...]:
        """K of each micro-batch of an iteration; beyond the last one, of the first case."""
        round_, turn = divmod(iteration, len(self.cases))
        case = self.cases[(turn + round_) % len(self.cases)]
        return apportion(case, micro_batches)


def read_cases(config: Config, passes: str | None, mixture: str | None) -> Cases:
    """The cases that `--passes` and `--mixture` name; the default is K = 1 to the largest trained.

    Raises:
        UserError: no numbers of passes, or more than one pass without a fusion.
    """
    numbers = _numbers(passes)
    if numbers is None and mixture is None:
        numbers = list(range(1, config.latent.passes.max_passes + 1))
    cases: list[Mixture] = [{k: 1.0} for k in numbers or ()]
    if mixture is not None:
        cases.append(_mixture(mixture))
    most = max(k for case in cases for k in case)
    if most > 1 and not config.latent.fusion.fuses:
        raise UserError(
            f"--passes: K = {most} with latent.fusion.kind: none, where every pass would repeat"
            " the first: give --passes 1, or choose a fusion with --set latent.fusion.kind=gated"
        )
    return tuple(cases)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    # More passes than fit into nine digits are no number that anybody means.
    if not all(re.fullmatch("0*[1-9][0-9]{,8}", word) for word in words):
        raise UserError(f"--passes: {text!r}: give numbers of passes, for example 1,2,3")
    numbers = [int(word) for word in words]
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--passes: {text!r} names a number twice: give each once")
    return numbers


def _mixture(text: str) -> Mixture:
    shares: dict[int, float] = {}
    for part in text.split(","):
        k, _, share = part.partition(":")
        try:
            number, value = int(k), float(share)
        except ValueError:
            raise UserError(
                f"--mixture: {part!r}: give K:SHARE pairs, for example 1:0.75,2:0.25"
            ) from None
        if number in shares:
            raise UserError(f"--mixture: {text!r} names K = {number} twice: give each once")
        shares[number] = value
    return read_mixture(shares, "--mixture")


def left_out(cases: Cases, micro_batches: int) -> list[int]:
    """The K of mixtures that no micro-batch of a step has: their shares are too small for it."""
    return [
        k
        for case in cases
        for k, share in case.items()
        if share > 0 and k not in apportion(case, micro_batches)
    ]


def profile_overrides(config: Config, iterations: int) -> list[str]:
    """What is changed in a config to run that many iterations and leave nothing behind.

    The run ends by Megatron's own `exit_interval`, so that everything that counts in the length of
    the run (learning rate, phases of the schedule) stays as it is.
    """
    given = config.megatron
    overrides = [f"megatron.{name}=null" for name in _AWAY if given.get(name) is not None]
    overrides += [f"megatron.exit_interval={iterations}", "megatron.eval_iters=0"]
    if given.get("load") is not None:
        # Weights count (a router's choices cost time), the rest of the checkpoint does not.
        names = ("finetune", "no_load_optim", "no_load_rng")
        overrides += [f"megatron.{name}=true" for name in names]
    if given.get("train_iters") is not None and given["train_iters"] < iterations:
        overrides.append(f"megatron.train_iters={iterations}")
    return overrides
