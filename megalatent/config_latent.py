"""The `latent:` section of a config as frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalatent.config_model import ModelConfig, depth_multiplier
from megalatent.config_optimizer import DecayPhaseConfig, NorMuonConfig
from megalatent.config_paths import read_path
from megalatent.config_profile import ProfileConfig
from megalatent.config_schedule import PhaseConfig, check_passes, read_schedule
from megalatent.config_values import choose, read_dataclass, require
from megalatent.errors import UserError

__all__ = [
    "FusionConfig",
    "LatentConfig",
    "ModelConfig",
    "PassesConfig",
    "ProfileConfig",
    "Recompute",
    "SftConfig",
]

Recompute = Literal["never", "extra", "all"]
_RECOMPUTE = ("never", "extra", "all")


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """How the previous position's state enters the next stack input.

    Attributes:
        kind: `none` (ordinary transformer, one pass), or a name in
            `megalatent.model.fusion.FUSIONS`.
        input_norm: `fused` leaves plain positions as they are; `all` norms every stack input.
        jitter: sigma of the uniform noise on the state in training; null in the file: the
            fusion's own default.
        prefix_mixin: plain prefix of random length in each pass k >= 2; null in the file: the
            fusion's own default.
        init_std: of normally drawn fusion weights; null in the file: `megatron.init_method_std`.
        warmup_iters: steps over which the learning rate of fresh fusion weights rises after their
            first update.
        kernel: which implementation of the pointwise part runs.
        fp8: with `megatron.fp8_format`, whether the fusion's matrices compute in FP8 too.
    """

    kind: str = "gated"
    input_norm: Literal["fused", "all"] = "fused"
    jitter: float = 0.02
    prefix_mixin: bool = True
    init_std: float = 0.02
    warmup_iters: int = 0
    kernel: Literal["auto", "cuda", "triton", "torch"] = "auto"
    fp8: bool = False

    def __post_init__(self) -> None:
        where = "latent.fusion"
        for name in ("jitter", "init_std"):
            value = getattr(self, name)
            ok = math.isfinite(value) and value >= 0
            require(ok, f"{where}.{name}", value, "is negative or not finite", "give 0 or more")
        require(
            self.warmup_iters >= 0,
            f"{where}.warmup_iters",
            self.warmup_iters,
            "is negative",
            "give 0 or more iterations",
        )

    @property
    def fuses(self) -> bool:
        """Whether there is a fusion at all, and so more than one pass to make."""
        return self.kind != "none"


def _fill_nulls(given: Mapping[str, Any], megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The section `latent:` with a value in place of every null that stands for another one's.

    Raises:
        UserError: `kind` names no fusion, or the fusion lacks what `input_norm` asks for.
    """
    from megalatent.config_megatron import value_of
    from megalatent.config_ranges import check_range

    fusion = dict(given.get("fusion") or {})
    if fusion.get("kind") == "none":
        for name in ("jitter", "prefix_mixin"):
            if fusion.get(name):
                raise UserError(
                    f"latent.fusion.{name}: {fusion[name]} has no effect with kind: none: leave it"
                    " out, or choose a fusion"
                )
    kind = fusion.setdefault("kind", FusionConfig().kind)
    jitter, mixin = 0.0, False
    if kind != "none":
        from megalatent.model.fusion import FUSIONS

        choose(kind, ["none", *FUSIONS], "latent.fusion.kind", "fusion")
        jitter, mixin = FUSIONS[kind].default_jitter, FUSIONS[kind].default_prefix_mixin
        if fusion.get("input_norm") == "all" and not FUSIONS[kind].has_fused_norm:
            raise UserError(
                f"latent.fusion.input_norm: 'all' norms every stack input, and the fusion {kind!r}"
                " has no such norm: write input_norm: fused"
            )
    init_std = value_of(megatron, "init_method_std")
    _fill(fusion, {"jitter": jitter, "prefix_mixin": mixin, "init_std": init_std})
    filled = {**given, "fusion": fusion}
    if "model" in given:
        filled["model"] = depth_multiplier(given["model"], value_of(megatron, "num_layers"))
    if filled.get("seed") is None:
        filled["seed"] = value_of(megatron, "seed")
        check_range("seed", filled["seed"])  # under the name that the file has
    return filled


def _fill(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if section.get(key) is None:
            section[key] = value


def _read_recompute(value: object, where: str) -> Recompute | dict[int, Recompute]:
    if not isinstance(value, Mapping):
        return choose(value, _RECOMPUTE, where, "recomputation")  # type: ignore[return-value]
    result: dict[int, Recompute] = {}
    for passes, what in value.items():
        check_passes(passes, where)
        result[passes] = choose(what, _RECOMPUTE, f"{where}.{passes}", "recomputation")  # type: ignore[assignment]
    return result


_DEFAULT_SCHEDULE = (PhaseConfig(start=0, mixture={1: 0.75, 2: 0.25}),)


@dataclass(frozen=True, kw_only=True)
class PassesConfig:
    """How many passes a micro-batch makes, what they weigh, and how they are executed.

    Attributes:
        schedule: phases; the first starts at 0. In the file also one K, or one mixture.
        draw: K is drawn per global batch or per micro-batch.
        loss_weighting: `mean`: L_1 + lambda/(K-1) sum L_k (FBT eq. 12); `sum`: sum L_k (Recycler).
        lambda_: weight of the extra passes under `mean` (`lambda` in the file).
        eval_passes: validation runs k = 1 … eval_passes.
        recompute: activations recomputed in backward: of no pass, of passes k >= 2 (`extra`), of
            all; or a choice for each K, where a K left out recomputes nothing.
        max_in_flight: cap on in-flight activations of a rank, in chunk visits.
        timeout_seconds: a rank that waits longer for a hand-over stops the run.
        costs: file with measured costs for the planner.
    """

    schedule: tuple[PhaseConfig, ...] = field(
        default=_DEFAULT_SCHEDULE, metadata={"read": read_schedule}
    )
    draw: Literal["batch", "micro_batch"] = "batch"
    loss_weighting: Literal["mean", "sum"] = "mean"
    lambda_: float = field(default=1.0, metadata={"key": "lambda"})
    eval_passes: int = 2
    recompute: Recompute | Mapping[int, Recompute] = field(
        default="never", metadata={"read": _read_recompute}
    )
    max_in_flight: int | None = None
    timeout_seconds: float = 600.0
    costs: str | None = field(default=None, metadata={"read": read_path})

    def __post_init__(self) -> None:
        where = "latent.passes"
        require(
            math.isfinite(self.lambda_) and self.lambda_ >= 0,
            f"{where}.lambda",
            self.lambda_,
            "is negative or not finite",
            "give 0 or more",
        )
        if self.loss_weighting == "sum" and self.lambda_ != 1.0:
            raise UserError(
                f"{where}.lambda: {self.lambda_:g} has no effect with loss_weighting: sum, where"
                " every pass weighs 1: leave lambda out, or write loss_weighting: mean"
            )
        check_passes(self.eval_passes, f"{where}.eval_passes")
        require(
            self.max_in_flight is None or self.max_in_flight >= 1,
            f"{where}.max_in_flight",
            self.max_in_flight,
            "leaves no room for any activation",
            "give 1 or more chunk visits, or null for no cap",
        )
        require(
            math.isfinite(self.timeout_seconds) and self.timeout_seconds >= 1,
            f"{where}.timeout_seconds",
            self.timeout_seconds,
            "is no time to wait",
            "give 1 second or more",
        )

    @property
    def max_passes(self) -> int:
        """The largest K that training can draw."""
        return max(k for phase in self.schedule for k, share in phase.mixture.items() if share > 0)

    @property
    def recomputes(self) -> bool:
        """Whether any pass of any micro-batch is recomputed."""
        given = self.recompute
        modes = given.values() if isinstance(given, Mapping) else [given]
        return any(mode != "never" for mode in modes)

    def recompute_for(self, passes: int) -> Recompute:
        """What a micro-batch of `passes` passes recomputes in its backward."""
        if isinstance(self.recompute, Mapping):
            return self.recompute.get(passes, "never")
        return self.recompute


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Fine-tuning on prompts and responses.

    Attributes:
        k_prefill: 1: prompt positions stay plain in every pass; 2: they are fused from pass 2 on;
            None: no difference between prompt and response.
    """

    k_prefill: int | None = None

    def __post_init__(self) -> None:
        require(
            self.k_prefill in (None, 1, 2),
            "latent.sft.k_prefill",
            self.k_prefill,
            "is no way to treat a prompt",
            "write 1 (plain), 2 (fused) or null",
        )


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Everything under `latent:`.

    Attributes:
        seed: of pass counts, prefix lengths, jitter and fusion weights; null in the file:
            `megatron.seed`.
    """

    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    optimizer: NorMuonConfig = field(default_factory=NorMuonConfig)
    decay_phase: DecayPhaseConfig = field(default_factory=DecayPhaseConfig)

    def __post_init__(self) -> None:
        require(
            0 <= self.seed < 2**64,
            "latent.seed",
            self.seed,
            "is negative or has more than 64 bits",
            "give 0 to 2**64 - 1",
        )
        if not self.fusion.fuses and self.passes.max_passes > 1:
            raise UserError(
                f"latent.passes.schedule: K = {self.passes.max_passes} with latent.fusion.kind:"
                " none, where every pass would repeat the first: write schedule: 1, or choose a"
                " fusion"
            )
        if not self.fusion.fuses and self.passes.eval_passes > 1:
            raise UserError(
                f"latent.passes.eval_passes: {self.passes.eval_passes} with latent.fusion.kind:"
                " none, where every pass would repeat the first: write eval_passes: 1"
            )

    @classmethod
    def read(cls, given: object, megatron: Mapping[str, Any] | None = None) -> LatentConfig:
        """From the mapping in the file.

        Args:
            megatron: Megatron's options; without them, nulls become the defaults of this class.

        Raises:
            UserError: unknown key, wrong type, value out of range, or a contradiction.
        """
        if isinstance(given, Mapping):
            given = _plain_defaults(given)
            # Checked before the nulls are filled, which takes the sections for mappings.
            checked = read_dataclass(cls, _without_nulls(given), "latent")
            if megatron is None:
                return checked
        if megatron is not None:
            given = _fill_nulls(given or {}, megatron)  # type: ignore[arg-type]
        return read_dataclass(cls, given, "latent")


def _plain_defaults(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a fusion there is one pass to make, unless the file asks for more."""
    fusion, passes = given.get("fusion"), given.get("passes")
    if not isinstance(fusion, Mapping) or fusion.get("kind") != "none":
        return given
    if passes is not None and not isinstance(passes, Mapping):
        return given
    return {**given, "passes": {"schedule": 1, "eval_passes": 1, **(passes or {})}}


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without the nulls that stand for another option's value."""
    result = {key: value for key, value in given.items() if (key, value) != ("seed", None)}
    fusion = result.get("fusion")
    if isinstance(fusion, Mapping):
        result["fusion"] = {
            key: value
            for key, value in fusion.items()
            if value is not None or key not in ("jitter", "prefix_mixin", "init_std")
        }
    if "model" in result:
        # Which depth is not known yet; any stands for it.
        result["model"] = depth_multiplier(result["model"], 1)
    return result
