"""Slow, independent reference for the Hugging Face model, written from the equations.

It reads the weights by name and uses nothing of the model's code: attention is one product with
a mask, experts are a loop over tokens, the recurrence a loop over positions without a cache.
"""

import math
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax, silu

from megalatent.hf import MegalatentConfig, MegalatentForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    # Large enough for greedy texts to vary, small enough for errors not to compound over passes.
    "initializer_range": 0.04,
}
FBT: dict[str, Any] = {  # everything that the 1B recipe of FBT switches on
    "qk_norm": True,
    "attention_gate": True,
    "sandwich_norm": True,
    "residual_multiplier": 3**-0.5,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


def tiny_model(seed: int = 0, dtype=torch.float32, **settings) -> MegalatentForCausalLM:
    """A random model in which every weight matters: norms are not one, the adapter not zero."""
    torch.manual_seed(seed)
    if dtype == torch.float64:  # the grouped product of experts has no double precision
        settings = {"experts_implementation": "eager", **settings}
    config = MegalatentConfig(**{**TINY, **settings})
    model = MegalatentForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(("adapter_proj.weight", "bias")):
                parameter.normal_(std=0.2)
    return model.to(dtype).eval()


def prompts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, TINY["vocab_size"], (batch, length), generator=generator)


class Reference:
    """The model's function for one sequence, recomputed from its weights."""

    def __init__(self, model: MegalatentForCausalLM) -> None:
        self.config = model.config
        self.weights = {k: v.detach() for k, v in model.state_dict().items()}
        self.table = self.weights["model.embed_tokens.weight"]

    def norm(self, x, name):
        scale = (x.double().pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return (x.double() * scale).to(x.dtype) * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def embed(self, ids) -> torch.Tensor:
        return self.table[torch.as_tensor(ids)]

    def plain(self, embedding):
        if self.config.input_norm == "all":
            return self.norm(embedding, "model.fusion.fused_norm")
        return embedding

    def fuse(self, state, embedding):
        """Stage input from the state of the position before, as in the papers."""
        f = "model.fusion"
        if self.config.fusion == "gated":
            gate = self.linear(self.norm(embedding, f"{f}.gate_norm"), f"{f}.gate_proj")
            return self.norm(
                self.linear(state, f"{f}.state_proj") / (1 + torch.exp(-gate)), f"{f}.fused_norm"
            )
        if self.config.fusion == "additive":
            return embedding + self.linear(
                self.norm(state, f"{f}.adapter_norm"), f"{f}.adapter_proj"
            )
        both = [self.norm(state, f"{f}.state_norm"), self.norm(embedding, f"{f}.gate_norm")]
        return self.norm(self.linear(torch.cat(both, -1), f"{f}.concat_proj"), f"{f}.fused_norm")

    def stack(self, x: torch.Tensor, positions=None) -> torch.Tensor:
        """States `[s, h]` of stage inputs `[s, h]`, all layers and the final norm."""
        positions = range(len(x)) if positions is None else positions
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            branch = self.attention(normed, layer, list(positions))
            if self.config.sandwich_norm:
                branch = self.norm(branch, f"{name}.attention_output_norm")
            x = x + self.config.residual_multiplier * branch
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            if self.config.num_experts and layer not in (self.config.mlp_only_layers or []):
                branch = torch.stack([self.experts(token, f"{name}.mlp") for token in normed])
            else:
                inner = silu(self.linear(normed, f"{name}.mlp.gate_proj"))
                inner = inner * self.linear(normed, f"{name}.mlp.up_proj")
                branch = self.linear(inner, f"{name}.mlp.down_proj")
            if self.config.sandwich_norm:
                branch = self.norm(branch, f"{name}.mlp_output_norm")
            x = x + self.config.residual_multiplier * branch
        return self.norm(x, "model.norm")

    def attention(self, x, layer, positions):
        c, name = self.config, f"model.layers.{layer}.self_attn"
        query = self.linear(x, f"{name}.q_proj").view(len(x), c.num_attention_heads, c.head_dim)
        key = self.linear(x, f"{name}.k_proj").view(len(x), c.num_key_value_heads, c.head_dim)
        value = self.linear(x, f"{name}.v_proj").view(len(x), c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        group = c.num_attention_heads // c.num_key_value_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        window = c.sliding_window if c.layer_types[layer] == "sliding_attention" else len(x)
        scores = torch.einsum("tnd,jnd->ntj", query, key) / math.sqrt(c.head_dim)
        ago = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = (ago < 0) | (ago >= window)  # the window counts the position itself
        shares = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        heads = torch.einsum("ntj,jnd->tnd", shares, value)
        if c.attention_gate:
            heads = heads * torch.sigmoid(self.linear(x, f"{name}.gate_proj"))[..., None]
        return self.linear(heads.reshape(len(x), -1), f"{name}.o_proj")

    def rotate(self, x, positions):
        half = self.config.head_dim // 2
        base = self.config.rope_parameters["rope_theta"]
        rates = [base ** (-2 * i / self.config.head_dim) for i in range(half)]
        angles = torch.tensor([[position * rate for rate in rates] for position in positions])
        turn = torch.polar(torch.ones_like(angles), angles).to(x.dtype.to_complex())[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def experts(self, token, name):
        shares = torch.softmax(self.linear(token, f"{name}.gate"), -1)
        best = shares.topk(self.config.num_experts_per_tok)
        total = best.values.sum() if self.config.norm_topk_prob else 1.0
        out = torch.zeros_like(token)
        for share, expert in zip(best.values, best.indices, strict=True):
            gate, up = (self.weights[f"{name}.experts.gate_up_proj"][expert] @ token).chunk(2)
            down = self.weights[f"{name}.experts.down_proj"][expert]
            out = out + share / total * (down @ (silu(gate) * up))
        return out

    # -- passes and the recurrence

    def passes(self, ids, count: int, fused=None) -> list[torch.Tensor]:
        """States `[s, h]` of each of `count` passes; `fused[t]` says whether position t may read
        the state before it (position 0 never does)."""
        embedded = self.embed(ids)
        states = [self.stack(self.plain(embedded))]
        for _ in range(count - 1):
            inputs = [
                self.fuse(states[-1][t - 1], embedded[t])
                if t > 0 and (fused is None or fused[t])
                else self.plain(embedded[t])
                for t in range(len(embedded))
            ]
            states.append(self.stack(torch.stack(inputs)))
        return states

    def prompt_inputs(self, ids, prefill_passes: int) -> list[torch.Tensor]:
        """Stage inputs of the last prefill pass, one `[h]` per prompt position."""
        embedded = self.embed(ids)
        inputs = [self.plain(e) for e in embedded]
        if prefill_passes > 1:
            states = self.passes(ids, prefill_passes - 1)[-1]
            inputs[1:] = [self.fuse(states[t - 1], embedded[t]) for t in range(1, len(embedded))]
        return inputs

    def logits(self, state):
        head = self.weights.get("lm_head.weight", self.table)
        return head @ state

    def generate(self, ids, count: int, mode: str, prefill_passes: int):
        """Greedy text by the uncached recurrence: token ids and the state each was read from."""
        inputs, tokens, states = self.prompt_inputs(ids, prefill_passes), [], []
        for _ in range(count):
            states.append(self.stack(torch.stack(inputs))[-1])
            tokens.append(int(self.logits(states[-1]).argmax()))
            embedding = self.embed(tokens[-1])
            fused = mode != "standard"
            inputs.append(self.fuse(states[-1], embedding) if fused else self.plain(embedding))
        return tokens, torch.stack(states)

    def beam_search(self, ids, count: int, beams: int, mode: str, prefill_passes: int):
        """All of the `beams` best texts by summed log-probability, no early end."""
        running: list[Any] = [(0.0, [], self.prompt_inputs(ids, prefill_passes))]
        for _ in range(count):
            candidates = []
            for score, tokens, inputs in running:
                state = self.stack(torch.stack(inputs))[-1]
                for token, gain in enumerate(log_softmax(self.logits(state), -1).tolist()):
                    candidates.append((score + gain, [*tokens, token], inputs, state))
            candidates.sort(key=lambda each: -each[0])
            running = []
            for score, tokens, inputs, state in candidates[:beams]:
                embedding = self.embed(tokens[-1])
                fused = mode != "standard"
                new = self.fuse(state, embedding) if fused else self.plain(embedding)
                running.append((score, tokens, [*inputs, new]))
        return [tokens for _, tokens, _ in running], [score for score, _, _ in running]
