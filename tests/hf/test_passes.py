"""The multi-pass forward and its objective against the slow reference."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from megalatent.hf import MegalatentConfig, MegalatentForCausalLM
from tests.hf.reference import FBT, MOE, TINY, Reference, prompts, tiny_model

FUSIONS = ["gated", "additive", "concat"]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_pass_equals_the_reference(fusion: str) -> None:
    model = tiny_model(fusion=fusion, dtype=torch.float64, **FBT)
    ids = prompts(1, 8)
    out = model(ids, num_passes=3, output_pass_states=True)
    expected = Reference(model).passes(ids[0], 3)
    for ours, theirs in zip(out.pass_states, expected, strict=True):
        assert (ours[0] - theirs).abs().max() < 1e-5  # RoPE angles are single precision
    assert (expected[2] - expected[1]).abs().max() > 1e-2  # the passes do differ


@pytest.mark.parametrize("fusion", ["gated", "concat"])
def test_input_norm_all_norms_plain_inputs_too(fusion: str) -> None:
    model = tiny_model(fusion=fusion, input_norm="all")
    ids = prompts(1, 6)
    out = model(ids, num_passes=2, output_pass_states=True)
    for ours, theirs in zip(out.pass_states, Reference(model).passes(ids[0], 2), strict=True):
        assert (ours[0] - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_as_many_passes_as_positions_are_the_sequential_recurrence(
    fusion: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = tiny_model(fusion=fusion, dtype=dtype, initializer_range=0.02)
    reference = Reference(model)
    ids = prompts(1, 12)[0]
    inputs = [reference.embed(ids[0])]
    for token in ids[1:]:
        state = model.model(inputs_embeds=torch.stack(inputs)[None]).last_hidden_state[0, -1]
        inputs.append(reference.fuse(state, reference.embed(token)))
    sequential = model.model(inputs_embeds=torch.stack(inputs)[None]).last_hidden_state
    out = model(ids[None], num_passes=len(ids), output_pass_states=True)
    assert (out.pass_states[-1] - sequential).abs().max() < tolerance


def test_fused_mask_keeps_positions_plain() -> None:
    model = tiny_model()
    ids = prompts(1, 7)
    fused = [False, False, True, False, True, True, True]
    out = model(ids, num_passes=3, fused_mask=torch.tensor([fused]), output_pass_states=True)
    expected = Reference(model).passes(ids[0], 3, fused)
    assert (out.pass_states[-1][0] - expected[-1]).abs().max() < 1e-4


def test_packed_documents_are_read_as_if_alone() -> None:
    model = tiny_model(**FBT)
    lengths = [3, 1, 5]
    ids = prompts(1, sum(lengths))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, position_ids=position_ids, num_passes=3, output_pass_states=True)
    assert packed.past_key_values is None
    start = 0
    for length in lengths:
        alone = Reference(model).passes(ids[0, start : start + length], 3)[-1]
        ours = packed.pass_states[-1][0, start : start + length]
        assert (ours - alone).abs().max() < 1e-4
        start += length
    with pytest.raises(ValueError, match="pack several sequences"):
        model(ids, position_ids=position_ids, use_cache=True)


def test_the_position_after_an_end_of_document_token_is_plain() -> None:
    model = tiny_model(document_end_token_id=3)
    ids = prompts(1, 8)
    ids[0, [2, 5]] = 3
    fused = [t not in (0, 3, 6) for t in range(8)]
    out = model(ids, num_passes=3, output_pass_states=True)
    expected = Reference(model).passes(ids[0], 3, fused)[-1]
    assert (out.pass_states[-1][0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(side: str) -> None:
    model = tiny_model(**FBT)
    ids, lengths = prompts(3, 7), [7, 3, 5]
    rows = [slice(7 - n, 7) if side == "left" else slice(0, n) for n in lengths]
    mask = torch.zeros_like(ids)
    for row, real in enumerate(rows):
        mask[row, real] = 1
    out = model(ids, attention_mask=mask, num_passes=3, output_pass_states=True)
    for row, real in enumerate(rows):
        alone = Reference(model).passes(ids[row, real], 3)[-1]
        assert (out.pass_states[-1][row, real] - alone).abs().max() < 1e-4


# -- the objective


def _reference_losses(model, ids, passes):
    reference = Reference(model)
    return [
        cross_entropy(states[:-1] @ reference.table.T, ids[0, 1:])
        for states in reference.passes(ids[0], passes)
    ]


@pytest.mark.parametrize(("weighting", "weights"), [("mean", [1, 0.25, 0.25]), ("sum", [1, 1, 1])])
def test_the_loss_weighs_the_passes(weighting: str, weights: list[float]) -> None:
    model = tiny_model(loss_weighting=weighting, loss_lambda=0.5)
    ids = prompts(1, 8)
    out = model(ids, labels=ids, num_passes=3)
    losses = _reference_losses(model, ids, 3)
    assert torch.allclose(torch.stack(out.pass_losses), torch.stack(losses), atol=1e-4)
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    assert abs(out.loss - expected) < 1e-4
    assert out.pass_states is None
    assert out.past_key_values is None


def test_one_pass_is_the_ordinary_objective() -> None:
    model = tiny_model(num_passes=1)
    ids = prompts(2, 8)
    labels = ids.masked_fill(
        torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) < 0.4, -100
    )
    out = model(ids, labels=labels)
    expected = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is None for p in model.model.fusion.parameters())
    # As transformers' trainer asks for it, over the tokens of several micro-batches.
    summed = model(ids, labels=labels, num_items_in_batch=20).loss
    count = (labels[:, 1:] != -100).sum()
    assert torch.allclose(summed, expected * count / 20)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_gradient_runs_through_all_passes(fusion: str) -> None:
    """Against finite differences of the reference: detached states would show."""
    model = tiny_model(
        fusion=fusion, dtype=torch.float64, num_hidden_layers=1, loss_weighting="sum"
    )
    ids = prompts(1, 5)
    model(ids, labels=ids, num_passes=3).loss.backward()
    step = 1e-5
    for name in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        weight = model.get_parameter(name)
        index = (int(ids[0, 1]) if "embed" in name else 2, 3)
        with torch.no_grad():
            weight[index] += step
            above = sum(_reference_losses(model, ids, 3))
            weight[index] -= 2 * step
            below = sum(_reference_losses(model, ids, 3))
            weight[index] += step
        expected = (above - below) / (2 * step)
        assert abs(weight.grad[index] - expected) < 1e-4 * max(1, abs(expected))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    settings = {**FBT, **MOE, "prefix_mixin": False, "jitter": 0.0}
    ids, gradients = prompts(2, 6), []
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    for checkpointing in (False, True):
        model = tiny_model(**settings).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(ids, attention_mask=mask, labels=ids, num_passes=3).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient.isfinite().all()
        assert torch.allclose(gradient, checkpointed[name], atol=1e-6), name


def test_the_load_balancing_loss_carries_the_weights_of_its_passes() -> None:
    settings = {**MOE, "router_aux_loss_coef": 0.5, "loss_lambda": 0.5}
    model = tiny_model(output_router_logits=True, **settings)
    ids = prompts(2, 8)
    out = model(ids, labels=ids, num_passes=3)
    aux = []
    for passes in (1, 2, 3):  # pass k of three is the last pass of k
        logits = model(ids, num_passes=passes).router_logits
        assert len(logits) == 3
        shares = torch.cat(logits).softmax(-1)  # over all layers' tokens
        chosen = torch.zeros_like(shares).scatter(1, shares.topk(2).indices, 1.0)
        aux.append(4 * (chosen.mean(0) * shares.mean(0)).sum())
    expected = aux[0] + 0.25 * aux[1] + 0.25 * aux[2]
    assert torch.allclose(out.aux_loss, expected, atol=1e-5)
    losses = out.pass_losses[0] + 0.25 * (out.pass_losses[1] + out.pass_losses[2])
    assert torch.allclose(out.loss, losses + 0.5 * expected, atol=1e-5)


# -- training noise


def test_the_prefix_mixin_draws_a_plain_prefix_for_each_document() -> None:
    from megalatent.hf.positions_megalatent import document_starts, prefix_positions

    torch.manual_seed(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]] * 3000)
    ends = torch.zeros(3000, 8, dtype=torch.bool)
    ends[:, 4] = True  # documents at positions 2..4 and 5..7
    plain = prefix_positions(document_starts(ends, padding_mask=mask, ends_document=ends), mask)
    assert not plain[:, :2].any()
    for document in (plain[:, 2:5], plain[:, 5:8]):
        lengths = document.sum(1)
        assert torch.equal(document, torch.arange(3) < lengths[:, None])  # prefixes
        shares = lengths.bincount(minlength=4) / 3000
        # Uniform on {1, 2, 3}; the standard deviation of a share is 0.009.
        assert shares[0] == 0
        assert (shares[1:] - 1 / 3).abs().max() < 0.04


def test_noise_is_for_training_alone_and_drawn_anew_in_each_pass() -> None:
    ids = prompts(2, 12)
    model = tiny_model(prefix_mixin=False, jitter=0.3).train()
    inputs: list[torch.Tensor] = []
    hook = model.model.fusion.register_forward_hook(lambda m, args, out: inputs.append(args[0]))
    states = model(ids, num_passes=2, output_pass_states=True).pass_states
    noise = inputs[0] - states[0][:, :-1]
    assert 0.28 < noise.abs().max() <= 0.3
    assert abs(noise.mean()) < 0.03
    model.eval()(ids, num_passes=2)
    assert torch.equal(inputs[1], states[0][:, :-1])
    hook.remove()

    model = tiny_model(jitter=0.0).train()
    drawn = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda m, args: drawn.append(args[0]))
    model(ids, num_passes=3)
    first, second, third = ((x == drawn[0]).all(-1) for x in drawn)
    assert first.all()
    assert second[:, 0].all()
    assert third[:, 0].all()
    assert not torch.equal(second, third)
    hook.remove()


def test_defaults_of_the_noise_follow_the_fusion() -> None:
    noise = {
        fusion: (config.prefix_mixin, config.jitter)
        for fusion in FUSIONS
        for config in [MegalatentConfig(**TINY, fusion=fusion)]
    }
    assert noise == {"gated": (True, 0.02), "concat": (True, 0.02), "additive": (False, 0.0)}


# -- initialisation


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fusion_leaves_the_initialisation_of_the_backbone_alone(fusion: str) -> None:
    torch.manual_seed(5)
    settings = {**TINY, "tie_word_embeddings": False}  # the head is drawn after the fusion
    without = MegalatentForCausalLM(MegalatentConfig(**settings, fusion="none")).state_dict()
    torch.manual_seed(5)
    model = MegalatentForCausalLM(MegalatentConfig(**settings, fusion=fusion))
    for name, tensor in without.items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    weights = dict(model.model.fusion.named_parameters())
    if fusion == "additive":
        assert not weights["adapter_proj.weight"].any()
        ids = prompts(1, 6)
        model.eval()
        assert torch.equal(model(ids, num_passes=3).logits, model(ids).logits)
        return
    scale = model.model.embed_tokens.weight.square().mean().sqrt()
    assert torch.allclose(weights["fused_norm.weight"], scale.expand(TINY["hidden_size"]))
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            assert abs(weight.std() / TINY["initializer_range"] - 1) < 0.1
            assert not torch.equal(
                weight[:2].flatten()[:24], without["model.embed_tokens.weight"][0]
            )
    if fusion == "gated":
        assert not torch.equal(weights["state_proj.weight"], weights["gate_proj.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_passes": 0}, "at least one pass"),
        ({"use_carried_state": True}, "no latent state to continue from: there is no cache"),
        ({"inputs_embeds": torch.zeros(1, 3, 24)}, "exactly one of"),
    ],
)
def test_contradictory_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model()(prompts(1, 3), use_cache=False, **arguments)


def test_a_model_without_fusion_has_one_pass() -> None:
    model = tiny_model(fusion="none")
    with pytest.raises(ValueError, match="num_passes=2 needs a fusion"):
        model(prompts(1, 3), num_passes=2)
    with pytest.raises(ValueError, match="needs a fusion"):
        model(prompts(1, 3), use_carried_state=True)


@pytest.mark.parametrize("input_norm", ["fused", "all"])
def test_the_fusion_may_be_on_another_device(input_norm: str) -> None:
    """As a device map puts it, whose hooks bring a module's inputs to it. Nothing is computed."""

    def bring(module, args):
        weight = next(module.parameters(recurse=False), None)
        return args if weight is None else tuple(arg.to(weight.device) for arg in args)

    model, ids = tiny_model(input_norm=input_norm), prompts(2, 6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fusion = model.model.fusion.to("cuda")
        for module in fusion.modules():
            module.register_forward_pre_hook(bring)
        fusion.register_forward_pre_hook(lambda _, args: tuple(arg.to("cuda") for arg in args))
        out = model(ids, num_passes=3, use_cache=True)
        step = model(ids[:, :1], past_key_values=out.past_key_values, use_carried_state=True)
    assert out.logits.device.type == step.logits.device.type == "cpu"
    assert step.logits.shape == (2, 1, 40)
