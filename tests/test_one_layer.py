"""The folded network against two others: PyTorch's encoder layer, and the equations written token by token."""

import numpy as np
import pytest
import torch

from benign_attention.parameters import ParameterError
from benign_attention.realdata import one_layer
from benign_attention.realdata.one_layer import Architecture

D, HEADS, PATCHES, PIXELS, SAMPLES = 12, 3, 5, 7, 6


def network(mlp_width: int = 20, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights in float64 with every bias and gain moved away from its initial value."""
    rng = np.random.default_rng(seed)
    arrays = one_layer.initial_weights(Architecture(D, HEADS, mlp_width, PATCHES, PIXELS), rng)
    return {name: torch.tensor(a + 0.3 * rng.normal(size=a.shape), requires_grad=True) for name, a in arrays.items()}


def detached(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in network(seed=seed).items()}


def images(seed: int = 1) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(SAMPLES, PATCHES, PIXELS)))


def tokens(weights, patches):
    embedded = patches @ weights["embedding"].T + weights["positions"][1:]
    return torch.cat([weights["positions"][0].expand(len(patches), 1, D), embedded], dim=1)


def by_encoder_layer(weights, patches):
    """All tokens through `torch.nn.TransformerEncoderLayer`, with a key bias that must not matter."""
    layer = torch.nn.TransformerEncoderLayer(
        D, HEADS, dim_feedforward=len(weights["mlp_in"]), dropout=0.0, batch_first=True, dtype=torch.float64
    )
    key_bias = torch.linspace(-2, 2, D, dtype=torch.float64)
    state = {
        "self_attn.in_proj_weight": torch.cat([weights[k] for k in ("query", "key", "value")]),
        "self_attn.in_proj_bias": torch.cat([weights["query_bias"], key_bias, weights["value_bias"]]),
        "self_attn.out_proj.weight": weights["output"],
        "self_attn.out_proj.bias": weights["output_bias"],
        "linear1.weight": weights["mlp_in"],
        "linear1.bias": weights["mlp_in_bias"],
        "linear2.weight": weights["mlp_out"],
        "linear2.bias": weights["mlp_out_bias"],
        "norm1.weight": weights["norm1_gain"],
        "norm1.bias": weights["norm1_bias"],
        "norm2.weight": weights["norm2_gain"],
        "norm2.bias": weights["norm2_bias"],
    }
    out = torch.func.functional_call(layer, state, (tokens(weights, patches),))
    return out[:, 0] @ weights["readout"] + weights["readout_bias"]


def by_tokens(weights, patches):
    """Attention as loops over images and heads, keys and values formed for every token; no MLP, no library module."""
    outputs = []
    for x in tokens(weights, patches):
        heads, size = [], D // HEADS
        for h in range(HEADS):
            rows = slice(h * size, (h + 1) * size)
            q = weights["query"][rows] @ x[0] + weights["query_bias"][rows]
            logits = torch.stack([(weights["key"][rows] @ token) @ q for token in x]) / size**0.5
            weight = torch.exp(logits) / torch.exp(logits).sum()
            values = torch.stack([weights["value"][rows] @ token + weights["value_bias"][rows] for token in x])
            heads.append((weight[:, None] * values).sum(0))
        r = x[0] + weights["output"] @ torch.cat(heads) + weights["output_bias"]
        r = (r - r.mean()) / torch.sqrt(r.var(correction=0) + 1e-5)
        r = r * weights["norm1_gain"] + weights["norm1_bias"]
        outputs.append(r @ weights["readout"] + weights["readout_bias"])
    return torch.stack(outputs)


@pytest.mark.parametrize(("reference", "mlp_width"), [(by_encoder_layer, 20), (by_tokens, 0)])
def test_outputs_and_all_gradients_equal_the_unfolded_network(reference, mlp_width):
    patches, labels = images(), torch.tensor([1.0, -1, 1, 1, -1, -1], dtype=torch.float64)
    networks = [network(mlp_width, seed) for seed in (0, 5)]
    signs = torch.stack([labels, -labels.flip(0)])
    outputs, gradients = one_layer.loss_gradients(networks, patches, signs, HEADS)
    for weights, y, ours, by_name in zip(networks, signs, outputs, gradients, strict=True):
        theirs = reference(weights, patches)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
        loss = torch.nn.functional.softplus(-y * theirs).mean()
        assert set(by_name) == set(weights)
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            torch.testing.assert_close(by_name[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_attention_sums_to_one_and_equals_that_of_multihead_attention():
    weights, patches = network(), images()
    ours = one_layer.class_attention([weights], patches, HEADS)[0]
    layer = torch.nn.MultiheadAttention(D, HEADS, batch_first=True, dtype=torch.float64)
    zero = torch.zeros(D, dtype=torch.float64)
    state = {
        "in_proj_weight": torch.cat([weights[k] for k in ("query", "key", "value")]),
        "in_proj_bias": torch.cat([weights["query_bias"], zero, weights["value_bias"]]),
        "out_proj.weight": weights["output"],
        "out_proj.bias": weights["output_bias"],
    }
    x = tokens(weights, patches)
    _, theirs = torch.func.functional_call(layer, state, (x[:, :1], x, x), {"average_attn_weights": False})
    torch.testing.assert_close(ours, theirs[:, :, 0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.sum(-1), torch.ones(SAMPLES, HEADS, dtype=torch.float64))


def test_descent_by_gd_follows_the_hand_written_update():
    """Ten steps of w -= step_size * gradient, with gradients of the unfolded network; another network beside it."""
    patches, labels = images(), torch.tensor([[1.0, 1, -1, 1, -1, -1], [1, -1, 1, 1, 1, -1]], dtype=torch.float64)
    networks, theirs = [detached(3), detached()], network()
    outputs = [out.clone() for _, out in one_layer.descend(networks, patches, labels, HEADS, 10, 0.05, "gd")]
    for _ in range(10):
        loss = torch.nn.functional.softplus(-labels[1] * by_encoder_layer(theirs, patches)).mean()
        gradients = torch.autograd.grad(loss, list(theirs.values()))
        theirs = {
            k: (w - 0.05 * g).detach().requires_grad_() for (k, w), g in zip(theirs.items(), gradients, strict=True)
        }
    assert len(outputs) == 11
    torch.testing.assert_close(outputs[-1][1], by_encoder_layer(theirs, patches).detach(), rtol=1e-9, atol=1e-12)


def test_every_yielded_step_carries_its_own_weights():
    networks, patches = [detached(), detached(2)], images()
    labels = torch.ones(2, SAMPLES, dtype=torch.float64)
    steps = []
    for step, outputs in one_layer.descend(networks, patches, labels, HEADS, 3, 0.1, "adam"):
        steps.append(step)
        torch.testing.assert_close(outputs, one_layer.class_logits(networks, patches, HEADS))
    assert steps == [0, 1, 2, 3]


def test_adam_equals_that_of_pytorch_on_the_unfolded_network():
    patches, labels = images(), torch.tensor([[1.0, 1, -1, 1, -1, -1]], dtype=torch.float64)
    *_, (_, ours) = one_layer.descend([detached()], patches, labels, HEADS, 10, 0.01, "adam")
    theirs = network()
    adam = torch.optim.Adam(theirs.values(), lr=0.01)
    for _ in range(10):
        adam.zero_grad()
        torch.nn.functional.softplus(-labels[0] * by_encoder_layer(theirs, patches)).mean().backward()
        adam.step()
    torch.testing.assert_close(ours[0], by_encoder_layer(theirs, patches).detach(), rtol=1e-7, atol=1e-9)


def test_adam_fits_arbitrary_labels():
    labels = torch.tensor([[1.0, -1, -1, 1, -1, 1]], dtype=torch.float64)
    *_, (_, outputs) = one_layer.descend([detached()], images(), labels, HEADS, 100, 0.01, "adam")
    assert bool((labels * outputs > 0).all())


def test_the_order_of_patches_matters_only_through_positions():
    weights, patches = detached(), images()
    shuffled = patches[:, torch.tensor([3, 1, 4, 0, 2])]
    assert not torch.allclose(*(one_layer.class_logits([weights], x, HEADS) for x in (patches, shuffled)))
    weights["positions"][1:] = 0
    torch.testing.assert_close(*(one_layer.class_logits([weights], x, HEADS) for x in (patches, shuffled)))


def test_heads_must_divide_the_dimension():
    with pytest.raises(ParameterError, match=r"^n_heads must divide dim, got n_heads 3 and dim 64$"):
        Architecture(64, 3, 128, 16, 49)
