"""The method in slow, plain PyTorch: the independent check of everything else.

Nothing of Megatron or of the package is imported. Weights are whole, by Megatron's global names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Heads = list[Tensor]  # one tensor a head


@dataclass(frozen=True)
class Shape:
    """What the weights' shapes do not tell."""

    layers: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    vocab: int  # true vocabulary: rows of the embedding beyond it are padding
    eps: float = 1e-5
    rope_base: float = 10000.0
    window: int | None = None  # keys a position sees, itself included; Megatron: (window - 1, 0)
    full_every: int | None = None  # every n-th layer (from 1) has no window
    multiplier: float = 1.0  # of each residual branch

    def window_of(self, layer: int) -> int | None:
        return None if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    def add(self, x: Tensor, branch: Tensor, norm: Tensor | None) -> Tensor:
        """`x` plus a residual branch, normed if there is a norm for it, then scaled."""
        return x + self.multiplier * (branch if norm is None else rms_norm(branch, norm, self.eps))


class MultiPass(NamedTuple):
    losses: list[Tensor]  # of pass 1 … K, scalars
    objective: Tensor
    states: list[Tensor]  # of pass 1 … K, each [b, s, D]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate `x [n, head_dim]` at `positions [n]`: dimension i pairs with i + head_dim / 2."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None].double() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def queries_keys_values(
    shape: Shape, weights: Weights, layer: str, x: Tensor, positions: Tensor
) -> tuple[Heads, Heads, Heads]:
    """`x [n, D]` to rotated queries (one `[n, head_dim]` per head), keys and values (per group).

    The rows of `linear_qkv` are, group after group, `[queries of the group | key | value]`.
    """
    found: tuple[Heads, Heads, Heads] = ([], [], [])
    per_group = shape.heads // shape.groups
    x = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], shape.eps)
    packed = weights[f"{layer}.self_attention.linear_qkv.weight"]
    for i, matrix in enumerate(packed.split(shape.head_dim)):
        kind, out = max(0, i % (per_group + 2) - per_group + 1), x @ matrix.T
        norm = weights.get(f"{layer}.self_attention.{'qk-'[kind]}_layernorm.weight")
        out = out if norm is None else rms_norm(out, norm, shape.eps)
        found[kind].append(out if kind == 2 else rope(out, positions, shape.rope_base))
    return found


def finish_layer(shape: Shape, weights: Weights, layer: str, x: Tensor, heads: Heads) -> Tensor:
    """Add the heads `[n, head_dim]`, gated if there are gates, to `x [n, D]`, then the SwiGLU."""
    gates = weights.get(f"{layer}.self_attention.linear_gate.weight")
    if gates is not None:
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], shape.eps)
        heads = [(normed @ g).sigmoid()[:, None] * h for g, h in zip(gates, heads, strict=True)]
    out = torch.cat(heads, -1) @ weights[f"{layer}.self_attention.linear_proj.weight"].T
    x = shape.add(x, out, weights.get(f"{layer}.self_attn_bda.norm.weight"))
    normed = rms_norm(x, weights[f"{layer}.pre_mlp_layernorm.weight"], shape.eps)
    gate, up = (normed @ weights[f"{layer}.mlp.linear_fc1.weight"].T).chunk(2, -1)
    out = (gate * gate.sigmoid() * up) @ weights[f"{layer}.mlp.linear_fc2.weight"].T
    return shape.add(x, out, weights.get(f"{layer}.mlp_bda.norm.weight"))


def decoder(shape: Shape, weights: Weights, x: Tensor, document: Tensor) -> Tensor:
    """Stack inputs `x [s, D]` of one row to its states (after the final norm).

    `document [s]` numbers the document of each position; attention stays inside it.
    """
    at = torch.arange(len(x))
    behind = at[:, None] - at[None, :]  # query position minus key position
    visible = (behind >= 0) & (document[:, None] == document[None, :])
    for i in range(shape.layers):
        layer, window = f"decoder.layers.{i}", shape.window_of(i)
        seen = visible if window is None else visible & (behind < window)
        queries, keys, values = queries_keys_values(shape, weights, layer, x, at)
        heads: list[Tensor] = []
        for head, query in enumerate(queries):
            group = head * shape.groups // shape.heads
            scores = (query @ keys[group].T) / shape.head_dim**0.5
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values[group])
        x = finish_layer(shape, weights, layer, x, heads)
    return rms_norm(x, weights["decoder.final_layernorm.weight"], shape.eps)


def stack_input(
    weights: Weights, fusion: str, input_norm: str, eps: float, token: Tensor, state: Tensor | None
) -> Tensor:
    """Stack input `[D]` of the embedding `token [D]`, fused with the previous `state [D]` if given:
    FBT eq. 4 (gated), Recycler eq. 2 (additive), or one matrix on both (concat)."""
    w = {name[len("fusion.") : -len(".weight")]: weights[name] for name in weights}
    if state is None:
        return rms_norm(token, w["fused_norm"], eps) if input_norm == "all" else token
    if fusion == "additive":
        return token + w["adapter_proj"] @ rms_norm(state, w["adapter_norm"], eps)
    normed = rms_norm(token, w["gate_norm"], eps)
    if fusion == "gated":
        mixed = (w["state_proj"] @ state) * (w["gate_proj"] @ normed).sigmoid()
    else:
        assert fusion == "concat", fusion
        mixed = w["concat_proj"] @ torch.cat([rms_norm(state, w["state_norm"], eps), normed])
    return rms_norm(mixed, w["fused_norm"], eps)


def multi_pass(
    shape: Shape, weights: Weights, tokens: Tensor, labels: Tensor, loss_mask: Tensor,
    document_starts: Tensor, passes: int, fusion: str, *,
    prefix_lengths: Mapping[int, list[list[int]]] | None = None,
    fused_masks: Mapping[int, Tensor] | None = None, jitter: Mapping[int, Tensor] | None = None,
    input_norm: str = "fused", loss_weighting: str = "mean", lam: float = 1.0,
) -> MultiPass:  # fmt: skip
    """Losses, objective and states of `passes` passes (FBT eq. 9-12, Recycler eq. 4).

    `tokens`, `labels`, `loss_mask`, `document_starts` (bool) are `[b, s]`; position 0 always starts
    a document. The other mappings are keyed by the pass they act in, 2 … `passes`: the first
    `prefix_lengths[k][row][document]` positions of the document stay plain, as do those where
    `fused_masks[k] [b, s]` is false; `jitter[k] [b, s, D]` is added to the states of pass k - 1.
    """
    prefix_lengths, fused_masks, jitter = prefix_lengths or {}, fused_masks or {}, jitter or {}
    assert {*prefix_lengths, *fused_masks, *jitter} <= {*range(2, passes + 1)}
    starts = document_starts.index_fill(1, torch.tensor(0), True)
    document = starts.cumsum(1) - 1
    table = weights["embedding.word_embeddings.weight"][: shape.vocab]
    losses, states = list[Tensor](), list[Tensor]()
    for k in range(1, passes + 1):
        rows = []
        for b, row in enumerate(tokens):
            inputs, start = [], 0
            for t, token in enumerate(row):
                start = t if starts[b, t] else start
                fused = k > 1 and t > start and bool(k not in fused_masks or fused_masks[k][b, t])
                if k in prefix_lengths:
                    fused = fused and t - start >= prefix_lengths[k][b][int(document[b, t])]
                state = states[-1][b, t - 1] if fused else None
                if state is not None and k in jitter:
                    state = state + jitter[k][b, t - 1].to(state.dtype)
                inputs += [stack_input(weights, fusion, input_norm, shape.eps, table[token], state)]
            rows.append(decoder(shape, weights, torch.stack(inputs), document[b]))
        states.append(torch.stack(rows))
        nll = -(states[-1] @ table.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        losses.append((nll * loss_mask).sum() / loss_mask.sum())
    weight = {"sum": 1.0, "mean": lam / max(passes - 1, 1)}[loss_weighting]
    return MultiPass(losses, losses[0] + weight * sum(losses[1:], losses[0] * 0), states)


def sequential(
    shape: Shape, weights: Weights, tokens: Tensor, fusion: str, *,
    prompt: int = 1, input_norm: str = "fused",
) -> Tensor:  # fmt: skip
    """States `[b, s, D]` of the recurrence, one token at a time; the first `prompt` are plain."""
    table = weights["embedding.word_embeddings.weight"]
    rows = []
    for row in tokens:
        cache = [list[list[list[Tensor]]]() for _ in range(shape.layers)]
        states: list[Tensor] = []
        for t, token in enumerate(row):
            state = states[-1] if t >= prompt else None
            x = stack_input(weights, fusion, input_norm, shape.eps, table[token], state)[None]
            for i in range(shape.layers):
                layer, window = f"decoder.layers.{i}", shape.window_of(i) or t + 1
                queries, *new = queries_keys_values(shape, weights, layer, x, torch.tensor([t]))
                cache[i].append(new)
                heads = []
                for head, query in enumerate(queries):
                    group = head * shape.groups // shape.heads
                    k, v = (torch.cat([p[j][group] for p in cache[i][-window:]]) for j in (0, 1))
                    odds = (k @ query[0] / shape.head_dim**0.5).exp()
                    heads.append((odds @ v / odds.sum())[None])
                x = finish_layer(shape, weights, layer, x, heads)
            states.append(rms_norm(x[0], weights["decoder.final_layernorm.weight"], shape.eps))
        rows.append(torch.stack(states))
    return torch.stack(rows)
