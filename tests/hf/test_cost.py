"""What decoding costs, counted: floating-point operations and kernel launches."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megalatent.hf import LatentDynamicCache, MegalatentConfig, MegalatentForCausalLM
from tests.hf.reference import prompts, tiny_model

PROMPT = 64


def recipe_model(fusion: str, num_layers: int) -> MegalatentForCausalLM:
    """With 24 layers the 1B-parameter model of FBT, without memory for its weights."""
    every = 6 if num_layers == 24 else 2
    layers = [
        "sliding_attention" if n % every else "full_attention" for n in range(1, num_layers + 1)
    ]
    config = MegalatentConfig(
        vocab_size=100_352,
        hidden_size=1536,
        intermediate_size=6656,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        sliding_window=2048,
        layer_types=layers,
        qk_norm=True,
        attention_gate=True,
        sandwich_norm=True,
        residual_multiplier=num_layers**-0.5,
        fusion=fusion,
    )
    with torch.device("meta"):
        return MegalatentForCausalLM(config).eval()


def count_flops(model, tokens: int, cache: LatentDynamicCache, **arguments) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, past_key_values=cache, logits_to_keep=1, **arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("fusion", "num_layers", "products"),
    [("gated", 24, 2), ("gated", 2, 2), ("additive", 2, 1), ("concat", 2, 2)],
)
def test_operations_of_steps_and_prefills(fusion: str, num_layers: int, products: int) -> None:
    model = recipe_model(fusion, num_layers)
    cache = LatentDynamicCache(config=model.config)
    one = count_flops(model, PROMPT, cache, num_passes=1)
    soft = count_flops(model, 1, cache, use_carried_state=True)
    cache.crop(-1)
    standard = count_flops(model, 1, cache)
    assert soft - standard == products * 2 * 1536**2
    if num_layers == 24:
        # Two operations for each weight of the stack and the head, and some for attention.
        assert standard > 2 * 1_060_000_000
        assert soft / standard <= 1.01

    two = count_flops(model, PROMPT, LatentDynamicCache(config=model.config), num_passes=2)
    head = 2 * 1536 * 100_352  # for the last position alone, once
    product = 2 * 1536**2  # D x D; positions but the first read a state, all have a gate, once
    fused = (PROMPT - 1) * (2 if fusion == "concat" else 1) * product
    gates = PROMPT * product if fusion == "gated" else 0
    assert two - one == (one - head) + fused + gates
    if num_layers == 2:
        three = count_flops(model, PROMPT, LatentDynamicCache(config=model.config), num_passes=3)
        assert three - two == (one - head) + fused


class Launches(TorchDispatchMode):
    """Counts the operations that reach a kernel; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fusion", ["gated", "additive", "concat"])
def test_a_soft_step_launches_nothing_but_the_fusion(fusion: str) -> None:
    model = tiny_model(fusion=fusion)
    counts = {}
    for mode in ("standard", "soft"):
        with torch.no_grad(), Launches() as long:
            model.generate(prompts(2, 4), mode=mode, max_new_tokens=8, do_sample=False)
        with torch.no_grad(), Launches() as short:
            model.generate(prompts(2, 4), mode=mode, max_new_tokens=3, do_sample=False)
        counts[mode] = long.counts - short.counts  # five steps of generate()
    embeds, state = torch.randn(2, 1, 24), torch.randn(2, 1, 24)
    with torch.no_grad(), Launches() as alone:
        model.model.fusion(state, model.model.fusion.token_term(embeds))
    assert counts["soft"] - counts["standard"] == Counter(
        {name: 5 * count for name, count in alone.counts.items()}
    )
    assert not counts["standard"] - counts["soft"]
