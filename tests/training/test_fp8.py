"""When weights are quantised anew: which flag reaches which module, at which action.

Transformer Engine needs a GPU. Stand-ins take the place of its layers here: they read and clear
`is_first_microbatch` in every call, as its layers do, and note what they saw.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megalatent.training.program import MegatronProgram
from tests.distributed.harness import Layout, init, run_ranks
from tests.distributed.latent import Rig, Setup


@dataclass
class Calls:
    """What happened in one step, in order.

    Attributes:
        seen: (module, kind of action, micro-batch, pass, chunk, flag) of every call.
        contexts: action of every FP8 context that was entered.
        nested: whether one was entered inside another.
    """

    seen: list[tuple[str, str, int, int, int, bool]] = field(default_factory=list)
    contexts: list[tuple[str, int, int, int]] = field(default_factory=list)
    nested: bool = False


class _Observer:
    def __init__(self, rig: Rig) -> None:
        self.calls = Calls()
        self.action: tuple[str, int, int, int] | None = None
        self.depth = 0
        for chunk, model in enumerate(rig.models):
            for name, module in model.named_modules():
                weight = getattr(module, "weight", None)
                matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
                if matrix or name.endswith("output_layer"):
                    self._stand_in(f"{chunk} {name}", module)
        for kind in ("forward", "head", "backward"):
            self._note_action(kind)
        self._note_contexts()

    def _stand_in(self, name: str, module: Any) -> None:
        module.is_first_microbatch = True

        def before(*_: Any) -> None:
            assert self.action is not None
            self.calls.seen.append((name, *self.action, module.is_first_microbatch))
            module.is_first_microbatch = False

        module.register_forward_pre_hook(before)

    def _note_action(self, kind: str) -> None:
        original = getattr(MegatronProgram, kind)

        def noted(program: Any, action: Any, *args: Any) -> Any:
            self.action = tuple(action)
            return original(program, action, *args)

        setattr(MegatronProgram, kind, noted)

    def _note_contexts(self) -> None:
        from megatron.core import recompute
        from megatron.core.transformer import transformer_block

        @contextmanager
        def context(*_: Any, **__: Any) -> Any:
            assert self.action is not None
            self.calls.contexts.append(self.action)
            self.calls.nested |= self.depth > 0
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

        transformer_block.get_fp8_context = context
        # Transformer Engine's, in place of which plain recomputation will do.
        recompute.te_checkpoint = _recomputed


def _recomputed(run: Any, _distribute: Any, _tracker: Any, _group: Any, *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False)


def _steps(rank: int, layout: Layout, setup: Setup, count: int) -> list[Calls]:
    init(layout)
    rig = Rig(setup, layout)
    observer = _Observer(rig)
    found = []
    for _ in range(count):
        rig.run()
        found.append(observer.calls)
        observer.calls = Calls()
        rig.next_step()
    rig.run(forward_only=True)
    return [*found, observer.calls]


def _setup(recipe: str, **changed: Any) -> Setup:
    setup = Setup(layers=2, passes=(2, 3), config={"fp8": "hybrid", "fp8_recipe": recipe})
    return replace(setup, **changed)


@pytest.mark.parametrize(
    ("layout", "setup"),
    [
        pytest.param(Layout(), _setup("delayed"), id="one"),
        pytest.param(Layout(), _setup("delayed", recompute="all"), id="recomputed"),
        pytest.param(Layout(pp=2), _setup("tensorwise"), id="pp2"),
        pytest.param(Layout(pp=2, vp=2), _setup("delayed", layers=4), id="pp2-vp2"),
    ],
)
def test_weights_are_quantised_once_a_step(layout: Layout, setup: Setup) -> None:
    for steps in run_ranks(layout.world_size, _steps, layout, setup, 2):
        for calls in steps:
            assert calls.seen
            for name in {call[0] for call in calls.seen}:
                mine = [call for call in calls.seen if call[0] == name]
                flags = [call[-1] for call in mine]
                # The first use in the step, whichever action it is in, and no other.
                assert flags == [True] + [False] * (len(flags) - 1), name
        training = steps[0].seen
        _first_uses(training)
        if setup.recompute == "all":
            assert {kind for _, kind, *_ in training} == {"F", "H", "B"}


def _first_uses(seen: list[tuple[str, str, int, int, int, bool]]) -> None:
    """Layers: a pass 1. The head: its own action. The fusion: a pass 2."""
    for name, kind, _micro_batch, k, _chunk, first in seen:
        if first:
            wanted = ("H", 1) if "output_layer" in name else ("F", 2 if "fusion." in name else 1)
            assert (kind, k) == wanted, name


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_contexts_wrap_each_visit(recipe: str) -> None:
    """Delayed scaling has one context a visit, after which it updates its scales; the others one
    a layer. No context is inside another, and heads have none."""
    setup = _setup(recipe)
    (step, _, evaluation) = run_ranks(1, _steps, Layout(), setup, 2)[0]
    layers = 1 if recipe == "delayed" else setup.layers
    visits = [("F", m, k, 0) for m, passes in enumerate(setup.passes) for k in range(1, passes + 1)]
    for calls, expected in ((step, visits), (evaluation, None)):
        assert not calls.nested
        assert {kind for kind, *_ in calls.contexts} == {"F"}
        if expected is not None:
            assert sorted(calls.contexts) == sorted(expected * layers)


def test_a_plain_step_leaves_the_fusion_to_be_quantised_at_its_first_use() -> None:
    """Steps of one pass do not use the fusion; the first fused pass after them must not reuse."""
    setup = _setup("delayed", passes=(1, 1), eval_passes=2)
    *plain, evaluation = run_ranks(1, _steps, Layout(), setup, 2)[0]
    for calls in plain:
        assert not [name for name, *_ in calls.seen if "fusion." in name]
    first = [call[-1] for call in evaluation.seen if "fusion.state_proj" in call[0]]
    assert first == [True] + [False] * (len(first) - 1)
    assert first


def test_fusion_matrices_are_made_by_the_given_class() -> None:
    from megalatent.model.fusion import FUSIONS, FusionSettings

    class Counted(torch.nn.Linear):
        pass

    for kind in ("gated", "additive"):
        fusion = FUSIONS[kind](FusionSettings(hidden_size=8, eps=1e-5, matrix=Counted))
        plain = FUSIONS[kind](FusionSettings(hidden_size=8, eps=1e-5))
        made = [m for m in fusion.modules() if isinstance(m, torch.nn.Linear)]
        assert made
        assert all(isinstance(m, Counted) for m in made)
        assert {n: p.shape for n, p in fusion.named_parameters()} == {
            n: p.shape for n, p in plain.named_parameters()
        }


class _EngineLinear(torch.nn.Linear):
    """What the fusion uses of Transformer Engine's layer: its arguments, marks and extra state."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:  # type: ignore[override]
        self.seen.append(is_first_microbatch)
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("the fusion saves no such state")


def test_a_fusion_of_fp8_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same checkpoint keys and values as without FP8; the flag is used up by each first call."""
    from megalatent.model.fp8 import fp8_matrices
    from megalatent.model.fusion import FUSIONS, FusionSettings

    engine = ModuleType("transformer_engine.pytorch")
    engine.Linear = _EngineLinear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    contexts: list[Any] = []

    def context(config: Any) -> Any:
        contexts.append(config)
        return nullcontext()

    monkeypatch.setattr("megatron.core.fp8_utils.get_fp8_context", context)
    settings = FusionSettings(hidden_size=16, eps=1e-5)
    quantised = FUSIONS["gated"](replace(settings, matrix=fp8_matrices("the config")))
    plain = FUSIONS["gated"](settings)
    assert quantised.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(quantised.state_dict()[name], value), name
    quantised.load_state_dict(plain.state_dict())
    assert not any(getattr(p, "tensor_model_parallel", False) for p in quantised.parameters())

    x = torch.randn(4, 2, 16)
    gate: Any = quantised.gate_proj
    for _ in range(2):
        assert torch.equal(quantised("token", x), plain("token", x))
    gate.is_first_microbatch = True
    quantised("token", x)
    assert gate.seen == [True, False, True]
    assert contexts == ["the config"] * 3
