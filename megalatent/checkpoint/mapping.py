"""How tensors of a Hugging Face model and of a Megatron checkpoint correspond, as data.

A family of models is a list of `Rule`s: name templates on both sides, the shape of every tensor in
named dimensions, and the form that leads from one side to the other. The engine applies the same
rules in both directions; nothing else knows a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "COPY",
    "QKV",
    "STACK",
    "VOCABULARY",
    "Family",
    "Form",
    "Rule",
    "Unit",
    "attention_rules",
    "branch_rules",
    "dense_rules",
    "dimensions",
    "ends_rules",
    "expert_rules",
    "fusion_rules",
    "units",
]

Dims = Mapping[str, int]


def dimensions(config: Any) -> dict[str, int]:
    """Sizes by the names that rules use.

    h: hidden; v: vocabulary; d: one head; q, k: all query heads, all key heads; f, m: inner size
    of dense blocks and of one expert; e: experts; hh: two states.
    """
    return {
        "h": config.hidden_size,
        "hh": 2 * config.hidden_size,
        "v": config.vocab_size,
        "d": config.head_dim,
        "q": config.num_attention_heads * config.head_dim,
        "k": config.num_key_value_heads * config.head_dim,
        "heads": config.num_attention_heads,
        "groups": config.num_key_value_heads,
        "f": config.intermediate_size,
        "m": config.moe_intermediate_size,
        "e": config.num_experts,
    }


Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """How Hugging Face tensors lie in one Megatron tensor.

    Attributes:
        places: Megatron's tensor and the parts' shapes -> a view of it for each part, whose
            elements in order are the part's. One description serves both directions.
    """

    name: str
    places: Callable[[Tensor, Shapes, Dims], list[Tensor]]


def _qkv(tensor: Tensor, shapes: Shapes, dims: Dims) -> list[Tensor]:
    groups = dims["groups"]
    grouped = tensor.view(groups, -1, *tensor.shape[1:])
    return list(grouped.split([shape[0] // groups for shape in shapes], dim=1))


COPY = Form("copy", lambda tensor, *_: [tensor])
# Padding of the vocabulary is cut when the checkpoint is read, and never written: Megatron loads a
# table of another height into its own.
VOCABULARY = Form("vocabulary without padding", COPY.places)
STACK = Form(
    "rows of all parts in turn",
    lambda tensor, shapes, _: list(tensor.split([shape[0] for shape in shapes])),
)
# Per key/value head: its query heads, its key head, its value head.
QKV = Form("query, key and value rows interleaved by key/value head", _qkv)


def _always(config: Any, layer: int | None) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors it is made of.

    Attributes:
        megatron: name templates with `{layer}` and `{expert}`; the first one is written unless the
            target's layers call it otherwise, any of them is read.
        hf: name templates of the parts.
        shapes: of the parts, in the names of `dimensions`.
        where: whether a model of this configuration has the tensor, in this layer.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    form: Form = COPY
    where: Callable[[Any, int | None], bool] = _always

    def __str__(self) -> str:
        return f"{' + '.join(self.hf)} <-> {self.megatron[0]} ({self.form.name})"


@dataclass(frozen=True)
class Unit:
    """A rule for one layer and expert: what is read, converted and written at a time."""

    rule: Rule
    layer: int | None
    expert: int | None
    dims: Dims

    def names(self) -> list[str]:
        """Hugging Face names of the parts."""
        return [name.format(layer=self.layer, expert=self.expert) for name in self.rule.hf]

    def shapes(self) -> list[tuple[int, ...]]:
        """Hugging Face shapes of the parts."""
        return [tuple(self.dims[name] for name in shape) for shape in self.rule.shapes]

    def megatron_shape(self) -> tuple[int, ...]:
        """Shape of Megatron's tensor, layer and expert axes left out."""
        shapes = self.shapes()
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def places(self, tensor: Tensor) -> list[Tensor]:
        """Views of Megatron's tensor, one for each part, with the part's elements in order."""
        return self.rule.form.places(tensor, self.shapes(), self.dims)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share names and a configuration.

    Attributes:
        model_type: of their `config.json`.
        architecture: the class whose weights are converted.
        rules: what tensors there are.
        carried: fields of `config.json` that are carried over, or that change nothing.
        settings: configuration of the family -> fields of `MegalatentConfig`.
        derived: name endings of tensors that the configuration decides, not read.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    carried: frozenset[str]
    settings: Callable[[Any], dict[str, Any]]
    derived: tuple[str, ...] = (".rotary_emb.inv_freq",)


def units(rules: Sequence[Rule], config: Any) -> Iterator[Unit]:
    """All tensors of a model, in the order in which they are converted.

    Args:
        config: a `MegalatentConfig`, whatever the family.
    """
    dims = dimensions(config)
    for layer in (None, *range(config.num_hidden_layers)):
        for rule in rules:
            if ("{layer}" in rule.megatron[0]) != (layer is not None):
                continue
            if not rule.where(config, layer):
                continue
            experts = range(config.num_experts) if "{expert}" in rule.hf[0] else (None,)
            for expert in experts:
                yield Unit(rule, layer, expert, dims)


# -- rules that families share ----------------------------------------------------------------

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def _is_dense(config: Any, layer: int | None) -> bool:
    return not _is_moe(config, layer)


def _is_moe(config: Any, layer: int | None) -> bool:
    return layer is not None and config.is_moe_layer(layer)


def ends_rules() -> tuple[Rule, ...]:
    """Embedding, final norm, and the head of models that do not tie it."""
    table = ("v", "h")
    return (
        Rule(
            megatron=("embedding.word_embeddings.weight",),
            hf=("model.embed_tokens.weight",),
            shapes=(table,),
            form=VOCABULARY,
        ),
        Rule(
            megatron=("decoder.final_layernorm.weight",),
            hf=("model.norm.weight",),
            shapes=(("h",),),
        ),
        Rule(
            megatron=("output_layer.weight",),
            hf=("lm_head.weight",),
            shapes=(table,),
            form=VOCABULARY,
            where=lambda config, _: not config.tie_word_embeddings,
        ),
    )


def attention_rules() -> tuple[Rule, ...]:
    """Attention and the norm before it; biases and head norms where the configuration has them."""
    own, attention = _MEGATRON + "self_attention.", _HF + "self_attn."
    projections = [attention + f"{part}_proj" for part in "qkv"]
    return (
        Rule(
            megatron=(own + "linear_qkv.layer_norm_weight", _MEGATRON + "input_layernorm.weight"),
            hf=(_HF + "input_layernorm.weight",),
            shapes=(("h",),),
        ),
        Rule(
            megatron=(own + "linear_qkv.weight",),
            hf=tuple(f"{name}.weight" for name in projections),
            shapes=(("q", "h"), ("k", "h"), ("k", "h")),
            form=QKV,
        ),
        Rule(
            megatron=(own + "linear_qkv.bias",),
            hf=tuple(f"{name}.bias" for name in projections),
            shapes=(("q",), ("k",), ("k",)),
            form=QKV,
            where=lambda config, _: config.attention_bias,
        ),
        *(
            Rule(
                megatron=(f"{own}{part}_layernorm.weight",),
                hf=(f"{attention}{part}_norm.weight",),
                shapes=(("d",),),
                where=lambda config, _: config.qk_norm,
            )
            for part in "qk"
        ),
        Rule(
            megatron=(own + "linear_proj.weight",),
            hf=(attention + "o_proj.weight",),
            shapes=(("h", "q"),),
        ),
        Rule(
            megatron=(own + "linear_proj.bias",),
            hf=(attention + "o_proj.bias",),
            shapes=(("h",),),
            where=lambda config, _: config.attention_output_bias,
        ),
    )


def branch_rules() -> tuple[Rule, ...]:
    """Gates of the attention's heads and norms after the branches, where there are any."""

    def has_norms(config: Any, layer: int | None) -> bool:
        return config.sandwich_norm

    return (
        Rule(
            megatron=(_MEGATRON + "self_attention.linear_gate.weight",),
            hf=(_HF + "self_attn.gate_proj.weight",),
            shapes=(("heads", "h"),),
            where=lambda config, _: config.attention_gate,
        ),
        Rule(
            megatron=(_MEGATRON + "self_attn_bda.norm.weight",),
            hf=(_HF + "attention_output_norm.weight",),
            shapes=(("h",),),
            where=has_norms,
        ),
        Rule(
            megatron=(_MEGATRON + "mlp_bda.norm.weight",),
            hf=(_HF + "mlp_output_norm.weight",),
            shapes=(("h",),),
            where=has_norms,
        ),
    )


def dense_rules() -> tuple[Rule, ...]:
    """Dense feed-forward blocks, and the norm before them."""
    own, mlp = _MEGATRON + "mlp.", _HF + "mlp."

    def has_bias(config: Any, layer: int | None) -> bool:
        return config.mlp_bias and _is_dense(config, layer)

    return (
        Rule(
            megatron=(own + "linear_fc1.layer_norm_weight", _MEGATRON + "pre_mlp_layernorm.weight"),
            hf=(_HF + "post_attention_layernorm.weight",),
            shapes=(("h",),),
            where=_is_dense,
        ),
        Rule(
            megatron=(own + "linear_fc1.weight",),
            hf=(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            shapes=(("f", "h"), ("f", "h")),
            form=STACK,
            where=_is_dense,
        ),
        Rule(
            megatron=(own + "linear_fc1.bias",),
            hf=(mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            shapes=(("f",), ("f",)),
            form=STACK,
            where=has_bias,
        ),
        Rule(
            megatron=(own + "linear_fc2.weight",),
            hf=(mlp + "down_proj.weight",),
            shapes=(("h", "f"),),
            where=_is_dense,
        ),
        Rule(
            megatron=(own + "linear_fc2.bias",),
            hf=(mlp + "down_proj.bias",),
            shapes=(("h",),),
            where=has_bias,
        ),
    )


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Routed experts, their router and the norm before them.

    Args:
        block: the block's name in a Hugging Face layer, with the projections' names in an expert.
    """
    own, experts = _MEGATRON + "mlp.", _HF + block + ".experts.{expert}."
    return (
        Rule(
            # Transformer Engine fuses this norm into a dense block's product, not into a router.
            megatron=(own + "linear_fc1.layer_norm_weight", _MEGATRON + "pre_mlp_layernorm.weight"),
            hf=(_HF + "post_attention_layernorm.weight",),
            shapes=(("h",),),
            where=_is_moe,
        ),
        Rule(
            megatron=(own + "router.weight",),
            hf=(f"{_HF}{block}.gate.weight",),
            shapes=(("e", "h"),),
            where=_is_moe,
        ),
        Rule(
            megatron=(own + "experts.experts.linear_fc1.weight",),
            hf=(f"{experts}{gate}.weight", f"{experts}{up}.weight"),
            shapes=(("m", "h"), ("m", "h")),
            form=STACK,
            where=_is_moe,
        ),
        Rule(
            megatron=(own + "experts.experts.linear_fc2.weight",),
            hf=(f"{experts}{down}.weight",),
            shapes=(("h", "m"),),
            where=_is_moe,
        ),
    )


_FUSION_WEIGHTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gated": {
        "state_proj": ("h", "h"),
        "gate_proj": ("h", "h"),
        "gate_norm": ("h",),
        "fused_norm": ("h",),
    },
    "additive": {"adapter_proj": ("h", "h"), "adapter_norm": ("h",)},
    "concat": {
        "concat_proj": ("h", "hh"),
        "state_norm": ("h",),
        "gate_norm": ("h",),
        "fused_norm": ("h",),
    },
}


def fusion_rules(kind: str | None = None) -> tuple[Rule, ...]:
    """The fusions' weights, which have one name on both sides; of one fusion, or of all."""

    def rule(fusion: str, name: str, shape: tuple[str, ...]) -> Rule:
        return Rule(
            megatron=(f"fusion.{name}.weight",),
            hf=(f"model.fusion.{name}.weight",),
            shapes=(shape,),
            where=lambda config, _: config.fusion == fusion,
        )

    return tuple(
        rule(fusion, name, shape)
        for fusion, weights in _FUSION_WEIGHTS.items()
        if kind in (None, fusion)
        for name, shape in weights.items()
    )
