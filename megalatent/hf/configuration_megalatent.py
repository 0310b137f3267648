"""Configuration of the Hugging Face model: a Llama-like backbone and a latent-feedback fusion.

This file and the other `*_megalatent.py` files of its folder import nothing of megalatent outside
the folder: `save_pretrained` copies them into an export, which then loads alone with
`trust_remote_code=True`.
"""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

__all__ = ["AUTO_MAP", "MegalatentConfig"]

AUTO_MAP = {
    "AutoConfig": "configuration_megalatent.MegalatentConfig",
    "AutoModel": "modeling_megalatent.MegalatentModel",
    "AutoModelForCausalLM": "modeling_megalatent.MegalatentForCausalLM",
}
"""Where transformers finds the classes among the files of an export."""

# Fusions of the Full-bandwidth transformer train with jitter and prefix mixin, Recycler's without.
_FUSIONS_WITH_NOISE = ("gated", "concat")
_JITTER = 0.02
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)


@strict
class MegalatentConfig(PreTrainedConfig):
    """What a `MegalatentForCausalLM` is made of.

    Backbone (defaults give a plain Llama-like model with a tied head):
        num_key_value_heads, head_dim: default to `num_attention_heads` and
            `hidden_size / num_attention_heads`.
        attention_bias, attention_output_bias, mlp_bias: biases of q/k/v, of the output projection
            and of the three feed-forward projections.
        qk_norm: RMSNorm over each head of queries and keys.
        attention_gate: one sigmoid gate per head on the attention output, computed from the normed
            layer input, applied before the output projection.
        sandwich_norm: RMSNorm also on the output of both residual branches.
        residual_multiplier: each branch is multiplied by it after its norm; `1/sqrt(L)` keeps the
            residual stream at RMS O(1) over L layers.
        sliding_window: keys a sliding layer sees, the position itself included.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer; by default all
            layers slide if there is a window.
        num_experts: 0 for a dense model. With experts, `mlp_only_layers` lists the layers that stay
            dense, `norm_topk_prob` makes the chosen experts' weights sum to one.

    Latent feedback:
        fusion: `"gated"` (FBT eq. 4), `"additive"` (Recycler eq. 2), `"concat"` or `"none"`.
        input_norm: `"fused"` leaves plain stack inputs as they are, `"all"` passes every stack
            input through `fused_norm` (gated and concat only).
        document_end_token_id: the position after this token starts a new document, which reads no
            state. `None`: documents are told apart by `position_ids` alone.
        num_passes: passes of a forward that is not told otherwise.
        loss_weighting, loss_lambda: FBT eq. 12, `L_1 + lambda/(K-1) * sum L_k` (`"mean"`), or
            Recycler eq. 4, `sum L_k` (`"sum"`).
        prefix_mixin, jitter: training noise of FBT; by default on (jitter 0.02) for gated and
            concat, off for additive.
    """

    model_type = "megalatent"
    # Tensors of every pass, of no use to a trainer that gathers predictions.
    keys_to_ignore_at_inference = ["past_key_values", "pass_losses", "pass_states"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    sandwich_norm: bool = False
    residual_multiplier: float | int = 1.0
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float | int = 0.001
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    fusion: Literal["none", "gated", "additive", "concat"] = "gated"
    input_norm: Literal["fused", "all"] = "fused"
    document_end_token_id: int | None = None
    num_passes: int = 1
    loss_weighting: Literal["mean", "sum"] = "mean"
    loss_lambda: float | int = 1.0
    prefix_mixin: bool | None = None
    jitter: float | int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        if self.prefix_mixin is None:
            self.prefix_mixin = self.fusion in _FUSIONS_WITH_NOISE
        if self.jitter is None:
            self.jitter = _JITTER if self.fusion in _FUSIONS_WITH_NOISE else 0.0
        super().__post_init__(**kwargs)
        self._check()

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward block of this layer (counted from 0) has experts."""
        return self.num_experts > 0 and layer not in (self.mlp_only_layers or [])

    def _check(self) -> None:
        """Raise ValueError for settings that contradict each other, or sizes that are none."""
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: it must be at least 1.")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: each key/value head serves the "
                "same number of query heads."
            )
        kinds = set(self.layer_types or [])
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"layer_types holds {sorted(unknown)}: use 'full_attention' or 'sliding_attention'."
            )
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers: set sliding_window to their width.")
        if self.rope_parameters and set(self.rope_parameters) & kinds:
            raise ValueError("rope_parameters per layer type are not supported: give one set.")
        if (self.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                "partial_rotary_factor is not supported: all channels of a head are rotated."
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and "
                f"num_experts={self.num_experts}."
            )
        if self.input_norm == "all" and self.fusion not in ("gated", "concat"):
            raise ValueError(
                f"input_norm='all' needs a fusion with a fused_norm (gated or concat), "
                f"not {self.fusion!r}."
            )
        if self.num_passes < 1:
            raise ValueError(f"num_passes={self.num_passes}: a forward has at least one pass.")
        if self.num_passes > 1 and self.fusion == "none":
            raise ValueError(f"num_passes={self.num_passes} needs a fusion, and fusion is 'none'.")
