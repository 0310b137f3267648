"""What a plan's actions do with Megatron model chunks: forward, head and backward of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalatent.model.batch import MicroBatch
from megalatent.model.wrapper import LatentModel
from megalatent.passes.execute import Recorder
from megalatent.passes.plan import Action
from megalatent.training.data import BatchReader
from megalatent.training.losses import PassLoss
from megalatent.training.recompute import RecomputeSwitch

__all__ = ["MegatronProgram", "PartRecorder", "Visit"]


class PartRecorder(Recorder, Protocol):
    """A recorder that also takes parts of actions, and what belongs to the whole step."""

    def begin(self, kind: str, action: Action | None = None) -> None: ...

    def end(self, kind: str, action: Action | None = None) -> None: ...

    def kept(self, action: Action) -> AbstractContextManager:
        """Around a forward visit: may count what it keeps for its backward."""


@dataclass(kw_only=True)
class Visit:
    """A chunk visit between its forward and its backward.

    The backward needs the node of the graph that made the output, not the output: the tensor goes
    as soon as it has been received elsewhere, or once the head has used it. (Megatron frees it by
    emptying the tensor behind autograd's back; a gradient edge needs no such trick.)

    Attributes:
        stage_input: leaf that collects the gradient to hand back, or None for pass 1 of the
            first chunk.
        root: where the backward begins: the output's edge, or the loss where stack and head run
            as one graph.
        output: ``[s, b, h]``, on the last chunk until its head has run.
        head_gradient: gradient of the state from the head, on the last chunk.
    """

    stage_input: Tensor | None
    root: GradientEdge | Tensor | None
    output: Tensor | None
    head_gradient: Tensor | None = None


@dataclass(kw_only=True)
class _Tokens:
    """The token side of a micro-batch on the first chunk, shared by all its passes.

    The graphs behind ``embedding`` and behind the fusion's token part are walked backwards once,
    after the last backward of the micro-batch; until then their gradients gather in leaves.
    """

    embedding: Tensor
    leaf: Tensor
    roots: list[Tensor] | None = None
    leaves: list[Tensor] | None = None


class MegatronProgram:
    """One step of this rank's chunks.

    Args:
        chunks: unwrapped model chunks of this rank.
        batches: micro-batches, as this rank sees them.
        passes: K of each micro-batch.
        kernels: pointwise kernels of the fusion.
        loss: the objective; used on the last chunk only.
        recompute: switches activation recomputation per pass.
        recorder: takes the times of parts of actions; or None, which costs nothing.
        training: False runs forwards and heads without gradients.
        on_last_backward: called with a chunk's index before its last backward.
        on_chunk_finished: called with a chunk's index once its gradients are final here.
    """

    def __init__(
        self,
        chunks: Sequence[LatentModel],
        batches: BatchReader,
        passes: Sequence[int],
        *,
        kernels: Any,
        loss: PassLoss,
        recompute: RecomputeSwitch,
        training: bool,
        recorder: PartRecorder | None = None,
        on_last_backward: Callable[[int], None] = lambda chunk: None,
        on_chunk_finished: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        self.chunks = chunks
        self.batches = batches
        self.passes = passes
        self.kernels = kernels
        self.loss = loss
        self.recompute = recompute
        self.training = training
        self.recorder = recorder
        self.on_last_backward = on_last_backward
        self.on_chunk_finished = on_chunk_finished
        self.config = chunks[0].config
        self._visits: dict[tuple[int, int, int], Visit] = {}
        self._tokens: dict[int, _Tokens] = {}
        self._fresh_chunks = set(range(len(chunks)))
        # Backwards that have come to the fusion, if they are recorded.
        self._in_fusion: set[Action] = set()

    # -- actions ----------------------------------------------------------------------------

    def forward(self, action: Action, stage_input: Tensor | None) -> Tensor:
        _, micro_batch, k, chunk = action
        model = self.chunks[chunk]
        with self._part("data", action, k == 1 and chunk == 0):
            batch = self.batches[micro_batch]
        if chunk in self._fresh_chunks:
            # Quantised weight caches are filled by the first visit of a step only: pass 2 of the
            # first micro-batch is not a first micro-batch.
            self._fresh_chunks.discard(chunk)
            model.set_is_first_microbatch()
        if stage_input is not None and self.training:
            stage_input = stage_input.detach().requires_grad_()
        with self._timed("forward-compute"), self._autocast(), self._kept(action):
            with self._part("embedding" if k == 1 else "fusion", action, model.pre_process):
                x = self._stack_input(model, batch, micro_batch, k, stage_input)
            if self.recorder is not None and model.pre_process and k > 1 and x.requires_grad:
                x.register_hook(lambda _: self._comes_to_fusion(action._replace(kind="B")))
            with self.recompute.visit(k, self.passes[micro_batch]):
                output = model("stack", batch, x)
        if self.training or model.post_process:
            self._visits[micro_batch, k, chunk] = Visit(
                stage_input=stage_input,
                root=get_gradient_edge(output) if self.training else None,
                output=output if model.post_process else None,
            )
        if not self.training and model.pre_process and k == self.passes[micro_batch]:
            self._tokens.pop(micro_batch, None)
        return output

    def head(self, action: Action) -> None:
        _, micro_batch, k, chunk = action
        model, batch = self.chunks[chunk], self.batches[micro_batch]
        visit = self._visits[micro_batch, k, chunk]
        if not self.training:
            del self._visits[micro_batch, k, chunk]
            with self._autocast():
                self.loss.evaluate(micro_batch, k, model("head", batch, visit.output), batch, visit)
            return
        K = self.passes[micro_batch]
        self.loss.set_auxiliary_scales(k, K)
        if self._one_graph(model, K):
            with self._timed("forward-compute"), self._autocast():
                losses = model(self.loss.head_action, batch, visit.output)
            visit.root = self.loss.objective(micro_batch, k, K, losses, batch, visit)
            visit.output = None
            return
        assert visit.output is not None
        state = visit.output.detach().requires_grad_()
        with self._timed("forward-compute"), self._autocast():
            losses = model(self.loss.head_action, batch, state)
        objective = self.loss.objective(micro_batch, k, K, losses, batch, visit)
        with self._timed("backward-compute"):
            torch.autograd.backward(objective)
        visit.head_gradient = state.grad
        visit.output = None

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        _, micro_batch, k, chunk = action
        model = self.chunks[chunk]
        visit = self._visits.pop((micro_batch, k, chunk))
        self.loss.set_auxiliary_scales(k, self.passes[micro_batch])
        with self._timed("backward-compute"):
            # The last chunk's state has two gradients: from its loss, and from the pass that
            # consumed it. Summed first, so that the stack is walked once.
            if visit.head_gradient is not None:
                gradient = (
                    visit.head_gradient if gradient is None else visit.head_gradient + gradient
                )
                visit.head_gradient = None
            assert visit.root is not None
            torch.autograd.backward(visit.root, gradient)
            self._leaves_fusion(action)
            if model.pre_process and k == 1:
                self._tokens_backward(action)
        return None if visit.stage_input is None else visit.stage_input.grad

    def last_backward(self, chunk: int) -> None:
        with self._part("reduce"):
            self.on_last_backward(chunk)

    def chunk_finished(self, chunk: int) -> None:
        with self._part("reduce"):
            self.on_chunk_finished(chunk)

    # -- first chunk ------------------------------------------------------------------------

    def _one_graph(self, model: LatentModel, passes: int) -> bool:
        """A plain micro-batch on a single stage runs as one graph, as Megatron runs it.

        The tied embedding then gets one sum of its two gradients, in Megatron's order of
        rounding; nothing would be gained by cutting the graph.
        """
        return passes == 1 and model.pre_process and model.post_process

    def _stack_input(
        self,
        model: LatentModel,
        batch: MicroBatch,
        micro_batch: int,
        k: int,
        stage_input: Tensor | None,
    ) -> Tensor:
        if not model.pre_process:
            assert stage_input is not None
            return stage_input
        if k == 1:
            embedding = model("embed", batch)
            leaf = embedding
            if self.training and not self._one_graph(model, self.passes[micro_batch]):
                leaf = embedding.detach().requires_grad_()
            self._tokens[micro_batch] = _Tokens(embedding=embedding, leaf=leaf)
            return model("plain", leaf)
        tokens = self._tokens[micro_batch]
        if tokens.leaves is None:
            rows, token_part = model("prepare", tokens.leaf)
            tokens.roots = [token_part] if rows is tokens.leaf else [rows, token_part]
            if self.training:
                cut = [x.detach().requires_grad_() if x.requires_grad else x for x in tokens.roots]
            else:
                cut = tokens.roots
            tokens.leaves = [tokens.leaf, *cut] if rows is tokens.leaf else cut
        rows, token_part = tokens.leaves
        return model("fuse", self.kernels, batch, k, stage_input, rows, token_part)

    def _tokens_backward(self, action: Action) -> None:
        tokens = self._tokens.pop(action.micro_batch)
        if tokens.roots is not None and tokens.leaves is not None:
            cut = tokens.leaves[-len(tokens.roots) :]
            pairs = [
                (root, leaf.grad)
                for root, leaf in zip(tokens.roots, cut, strict=True)
                if root.requires_grad and leaf.grad is not None
            ]
            if pairs:
                with self._part("fusion_backward", action):
                    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        if tokens.leaf is not tokens.embedding:
            with self._part("embedding_backward", action):
                torch.autograd.backward(tokens.embedding, tokens.leaf.grad)

    # -- surroundings -----------------------------------------------------------------------

    def _autocast(self) -> AbstractContextManager:
        if self.config.enable_autocast:
            return torch.autocast("cuda", dtype=self.config.autocast_dtype)
        return nullcontext()

    def _part(
        self, kind: str, action: Action | None = None, here: bool = True
    ) -> AbstractContextManager:
        """Records what runs in it, if there is a recorder and it is `here`."""
        if self.recorder is None or not here:
            return nullcontext()
        return _Part(self.recorder, kind, action)

    def _kept(self, action: Action) -> AbstractContextManager:
        return nullcontext() if self.recorder is None else self.recorder.kept(action)

    def _comes_to_fusion(self, action: Action) -> None:
        assert self.recorder is not None
        self._in_fusion.add(action)
        self.recorder.begin("fusion_backward", action)

    def _leaves_fusion(self, action: Action) -> None:
        if action in self._in_fusion:
            assert self.recorder is not None
            self._in_fusion.discard(action)
            self.recorder.end("fusion_backward", action)

    def _timed(self, name: str) -> AbstractContextManager:
        timers = self.config.timers
        return nullcontext() if timers is None else _Timed(timers(name, log_level=2))


class _Part:
    def __init__(self, recorder: PartRecorder, kind: str, action: Action | None) -> None:
        self._recorder, self._kind, self._action = recorder, kind, action

    def __enter__(self) -> None:
        self._recorder.begin(self._kind, self._action)

    def __exit__(self, *_: object) -> None:
        self._recorder.end(self._kind, self._action)


class _Timed:
    def __init__(self, timer: Any) -> None:
        self._timer = timer

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.stop()
