"""The written-down model is the model of the paper."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benign_attention import devices
from benign_attention.data import TokenSelectionParams, draw_single_head, draw_token_selection
from benign_attention.explicit import SingleHeadAttention, TokenSelectionAttention, gradient_descent, logistic_loss


def random_model(dim, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    model = SingleHeadAttention(dim)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(scale * torch.randn(dim, generator=generator, dtype=torch.float64))
    return model


@given(dim=st.integers(1, 8), n_tokens=st.integers(1, 5), scale=st.floats(0.01, 30), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_output_is_the_softmax_weighted_sum_of_values(dim, n_tokens, scale, seed):
    model = random_model(dim, scale, seed)
    tokens = np.random.default_rng(seed).standard_normal((3, n_tokens, dim))
    p, v = model.p.tolist(), model.v.tolist()
    for sample, output, attention in zip(
        tokens.tolist(), model(torch.tensor(tokens)).tolist(), model.attention(torch.tensor(tokens)), strict=True
    ):
        logits = [math.fsum(a * b for a, b in zip(token, p, strict=True)) for token in sample]
        values = [math.fsum(a * b for a, b in zip(token, v, strict=True)) for token in sample]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        expected = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / math.fsum(weights)
        assert output == pytest.approx(expected, rel=1e-9, abs=1e-11 * max(1, scale))
        assert attention.sum().item() == pytest.approx(1)


def test_the_order_of_tokens_does_not_matter():
    model = random_model(6, 1.0, 0)
    tokens = torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), model(tokens[:, [2, 0, 3, 1]]), rtol=1e-13, atol=1e-14)


def test_loss_is_the_mean_logistic_loss_also_far_out():
    outputs = torch.tensor([0.0, 1000.0, 1000.0, -2.0], dtype=torch.float64)
    labels = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    expected = (math.log(2) + 0 + 1000 + math.log1p(math.exp(-2))) / 4
    assert logistic_loss(outputs, labels).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("margin", [-800.0, -40.0, -25.0, -20.5, -19.5, -3.0, 0.0, 3.0, 19.5, 25.0, 40.0])
def test_loss_and_its_gradient_are_exact_at_every_margin(margin):
    """log(1 + exp(-m)) and -1 / (1 + exp(m)) to a few units in the last place, on both sides of every threshold."""
    output = torch.tensor([-margin], dtype=torch.float64, requires_grad=True)
    loss = logistic_loss(output, torch.tensor([-1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, [output])
    with mpmath.workdps(50):
        expected = mpmath.log1p(mpmath.exp(-mpmath.mpf(margin)))
        slope = 1 / (1 + mpmath.exp(mpmath.mpf(margin)))
    assert loss.item() == pytest.approx(float(expected), rel=1e-14, abs=0)
    assert gradient.item() == pytest.approx(float(slope), rel=1e-14, abs=0)


def test_descent_follows_the_negative_gradient():
    """One step against central differences of the loss; p and v move together, from the same point."""
    model = random_model(5, 0.7, 3)
    data = draw_single_head(6, 5, 3, 2.0, 0.3, np.random.default_rng(3))
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    start = torch.cat([model.p, model.v]).detach().clone()

    def loss(weights):
        probe = SingleHeadAttention(5)
        with torch.no_grad():
            probe.p.copy_(weights[:5])
            probe.v.copy_(weights[5:])
            return logistic_loss(probe(tokens), labels).item()

    h = 1e-5
    slopes = [(loss(start + h * e) - loss(start - h * e)) / (2 * h) for e in torch.eye(10, dtype=torch.float64)]
    next(gradient_descent(model, tokens, labels, 0.3, 1))
    moved = torch.cat([model.p, model.v]).detach() - start
    np.testing.assert_allclose(moved.numpy(), -0.3 * np.array(slopes), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("n_tokens", [2, 3, 5])
def test_the_first_step_moves_only_v_along_the_label_weighted_tokens(n_tokens):
    data = draw_single_head(12, 30, n_tokens, 4.0, 0.2, np.random.default_rng(0))
    model = SingleHeadAttention(30)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    next(gradient_descent(model, tokens, labels, 0.8, 1))
    assert not torch.any(model.p)
    expected = 0.8 / (2 * 12 * n_tokens) * np.einsum("i,itd->d", data.labels, data.tokens)
    np.testing.assert_allclose(model.v.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


def test_small_steps_lower_the_loss_and_each_step_is_yielded():
    data = draw_single_head(10, 40, 2, 3.0, 0.1, np.random.default_rng(1))
    model = SingleHeadAttention(40)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    losses = [logistic_loss(m(tokens), labels).item() for m in gradient_descent(model, tokens, labels, 0.01, 50)]
    assert len(losses) == 50
    assert all(later < earlier for earlier, later in pairwise([math.log(2), *losses]))


@pytest.mark.parametrize("name", devices.available())
def test_every_device_gives_the_same_weights(name):
    data = draw_single_head(10, 40, 3, 3.0, 0.2, np.random.default_rng(2))
    dtype = torch.float32 if name == "mps" else torch.float64
    trained = []
    for place in (torch.device("cpu"), torch.device(name)):
        model = SingleHeadAttention(40, dtype, place)
        tokens, labels = (torch.tensor(x, dtype=dtype, device=place) for x in (data.tokens, data.labels))
        for _ in gradient_descent(model, tokens, labels, 0.5, 20):
            pass
        assert model.p.device.type == place.type
        trained.append(torch.cat([model.p, model.v]).detach().cpu())
    torch.testing.assert_close(*trained, rtol=1e-3 if name == "mps" else 1e-11, atol=1e-5 if name == "mps" else 1e-13)


# --- token selection -----------------------------------------------------------------------------------------


def selection_model(data, seed=0, dtype=torch.float64, device="cpu", p_scale=0.0):
    """A model with W_0 of variance 1/(3d) and a Gaussian p; and the tokens and labels that it is trained on."""
    dim = data.signals.shape[1]
    rng = np.random.default_rng(seed)
    weights, p = rng.standard_normal((dim, dim)) / math.sqrt(3 * dim), p_scale * rng.standard_normal(dim)
    signals, weights, p, *rest = (
        torch.tensor(x, dtype=dtype, device=device) for x in (data.signals, weights, p, data.tokens, data.labels)
    )
    model = TokenSelectionAttention(signals, weights)
    with torch.no_grad():
        model.p.copy_(p)
    return model, *rest


def draw_selection(seed=0, **point):
    params = TokenSelectionParams(**{"n_train": 6, "dim": 7, "n_tokens": 4, "signal_norm": 2.0, **point})
    return draw_token_selection(params, np.random.default_rng(seed))


@given(dim=st.integers(3, 7), n_tokens=st.integers(3, 5), scale=st.floats(0.01, 30), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_token_selection_weighs_values_by_the_softmax_of_x_w_p(dim, n_tokens, scale, seed):
    data = draw_selection(seed, n_train=3, dim=dim, n_tokens=n_tokens)
    model, tokens, _ = selection_model(data, seed, p_scale=scale)
    weights, p, signal = model.W.tolist(), model.p.tolist(), data.signals[0, 0]
    q = [math.fsum(w * x for w, x in zip(row, p, strict=True)) for row in weights]
    for sample, output, attention in zip(
        data.tokens.tolist(), model(tokens).tolist(), model.attention(tokens).tolist(), strict=True
    ):
        logits = [math.fsum(a * b for a, b in zip(token, q, strict=True)) for token in sample]
        # nu = (e_+ - e_-) / sqrt(2) / |mu|
        values = [(token[0] - token[1]) / math.sqrt(2) / signal for token in sample]
        s = [math.exp(logit - max(logits)) for logit in logits]
        expected = math.fsum(w * value for w, value in zip(s, values, strict=True)) / math.fsum(s)
        assert output == pytest.approx(expected, rel=1e-9, abs=1e-11 * max(1, scale))
        assert attention == pytest.approx([w / math.fsum(s) for w in s], rel=1e-9, abs=1e-12)


def test_the_head_of_token_selection_is_fixed_and_of_size_one_over_the_signal_norm():
    data = draw_selection(signal_norm=5.0)
    model, tokens, labels = selection_model(data)
    assert {name for name, _ in model.named_parameters()} == {"W", "p"}
    assert model.nu.norm().item() == pytest.approx(1 / 5)
    assert (model.nu @ torch.tensor(data.signals).T).tolist() == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)])
    before = model.nu.clone()
    *_, model = gradient_descent(model, tokens, labels, 0.5, 20)
    assert torch.equal(model.nu, before)
    assert torch.any(model.p != 0)


def test_token_selection_follows_the_negative_gradient():
    """One step against central differences of the loss; W and p move together, from the same point."""
    data = draw_selection(3, dim=4)
    model, tokens, labels = selection_model(data, p_scale=0.7)
    start = torch.cat([model.W.flatten(), model.p]).detach().clone()

    def loss(values):
        probe, *_ = selection_model(data)
        with torch.no_grad():
            probe.W.copy_(values[:16].reshape(4, 4))
            probe.p.copy_(values[16:])
            return logistic_loss(probe(tokens), labels).item()

    h = 1e-5
    slopes = [(loss(start + h * e) - loss(start - h * e)) / (2 * h) for e in torch.eye(20, dtype=torch.float64)]
    next(gradient_descent(model, tokens, labels, 0.3, 1))
    moved = torch.cat([model.W.flatten(), model.p]).detach() - start
    np.testing.assert_allclose(moved.numpy(), -0.3 * np.array(slopes), rtol=1e-7, atol=1e-9)


def test_token_selection_keeps_the_weights_that_it_was_given():
    data = draw_selection()
    given_weights = torch.eye(7, dtype=torch.float64)
    model = TokenSelectionAttention(torch.tensor(data.signals), given_weights)
    *_, model = gradient_descent(model, torch.tensor(data.tokens), torch.tensor(data.labels), 0.5, 5)
    assert torch.equal(given_weights, torch.eye(7, dtype=torch.float64))
    assert not torch.equal(model.W, given_weights)


@pytest.mark.parametrize("name", devices.available())
def test_token_selection_is_the_same_on_every_device(name):
    dtype = torch.float32 if name == "mps" else torch.float64
    trained = []
    for place in ("cpu", name):
        model, tokens, labels = selection_model(draw_selection(2), 2, dtype, place)
        *_, model = gradient_descent(model, tokens, labels, 0.5, 30)
        assert model.W.device.type == torch.device(place).type
        trained.append(torch.cat([model.p, model.W.flatten()]).detach().cpu())
    torch.testing.assert_close(*trained, rtol=1e-3 if name == "mps" else 1e-11, atol=1e-5 if name == "mps" else 1e-13)
