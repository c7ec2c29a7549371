"""Baselines: reduced gradient descent against autograd, laws of fresh samples against samples, closed forms."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from benign_attention import baselines, explicit, theory
from benign_attention.baselines import NETWORKS, BaselineParams, search
from benign_attention.data import SingleHeadParams, draw_single_head
from benign_attention.devices import available
from benign_attention.parameters import ParameterError

POINT = BaselineParams(n_train=40, dim=800, n_tokens=3, signal_norm=9.0)


def network_output(model, weights, tokens):
    """The network as it is written down, by torch on explicit tokens (n, T, dim)."""
    n = len(tokens)
    patches = {"tokens": tokens, "concat": tokens.reshape(n, 1, -1), "mean": tokens.mean(dim=1, keepdim=True)}
    h = patches[model.patches] @ weights.T
    features = h if model.power == 0 else torch.relu(h) ** model.power
    return features.sum(dim=1) @ torch.tensor(model.readout)


def explicit_weights(model, T, dim, rng, size=0.3):
    return size * rng.standard_normal((len(model.readout), dim * (T if model.patches == "concat" else 1)))


@pytest.mark.parametrize("name", NETWORKS)
def test_reduced_gradient_descent_is_autograd_on_explicit_tokens(name):
    model, rng = NETWORKS[name], np.random.default_rng(1)
    data = draw_single_head(7, 12, 3, 2.0, 0.3, rng)
    start = explicit_weights(model, 3, 12, rng)
    weights = torch.tensor(start, requires_grad=True)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    for _ in range(4):
        loss = explicit.logistic_loss(network_output(model, weights, tokens), labels)
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.5 * gradient).detach().requires_grad_()
    patches = baselines.patches_of(data, model.patches)
    *_, (_, coefficients, _), (_, _, margins) = baselines.gradient_descent(
        model,
        patches.rows @ patches.rows.T,
        patches.counts,
        data.labels,
        start @ patches.rows.T,
        np.array([0.1, 0.5]),
        5,
    )
    np.testing.assert_allclose(start + coefficients[1] @ patches.rows, weights.detach(), rtol=1e-9, atol=1e-12)
    expected = (network_output(model, weights, tokens) * labels).detach()
    np.testing.assert_allclose(margins[1], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_law_of_a_fresh_sample_is_that_of_explicit_tokens(name, fixed):
    """Accuracy and mean output of 20,000 samples each, within 4.5 standard errors (false alarm < 2e-4 in all)."""
    model, rng = NETWORKS[name], np.random.default_rng(2)
    point = BaselineParams(n_train=5, dim=12, n_tokens=3, signal_norm=2.0, label_noise=0.0)
    weights, slots = explicit_weights(model, 3, 12, rng), 3 if model.patches == "concat" else 1
    outside = np.zeros((slots, len(weights), len(weights)))
    law = baselines.fresh_law(model, point, slots, weights, outside, (0,) if fixed else range(3))
    ours = law.outputs(20_000, rng)
    data = draw_single_head(20_000, 12, 3, 2.0, 0.0, rng)
    if fixed:
        data = type(data)(data.signals, data.clean_labels, data.labels, data.noise, 0 * data.position)
    theirs = network_output(model, torch.tensor(weights), torch.tensor(data.tokens)).numpy() * data.labels
    for read in (lambda f: f > 0, lambda f: f, lambda f: f**2):
        a, b = read(ours).astype(float), read(theirs).astype(float)
        assert abs(a.mean() - b.mean()) < 4.5 * np.sqrt((a.var() + b.var()) / 20_000)
    if model.power == 0:
        exact = law.exact_accuracy()
        assert abs((theirs > 0).mean() - exact) < 4.5 * np.sqrt(exact * (1 - exact) / 20_000)


def test_initial_weights_keep_their_size_outside_the_training_span():
    """A fresh noise token's first preactivation has variance INITIAL^2; 20 filters, d = 4000: within 5 %."""
    weights, outside = baselines.initial_weights(NETWORKS["cnn_relu"], POINT, 1, np.random.default_rng(3), 42)
    diagonal = (weights[:, 2:] ** 2).sum(axis=1) + outside[0].diagonal()
    assert diagonal.mean() == pytest.approx(baselines.INITIAL**2, rel=0.05)
    concat, outside = baselines.initial_weights(NETWORKS["mlp"], POINT, 3, np.random.default_rng(3), 42)
    by_slot = (concat.reshape(20, 3, 42)[..., 2:] ** 2).sum(axis=-1) + outside.diagonal(axis1=1, axis2=2).T
    assert by_slot.mean() == pytest.approx(baselines.INITIAL**2 / 2, rel=0.05)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", ["linear_concat", "linear_mean"])
def test_late_gradient_descent_reaches_the_max_margin_classifier(name, fixed):
    data = baselines.draw(POINT, np.random.default_rng(4), fixed)
    patches = baselines.patches_of(data, NETWORKS[name].patches)
    gram = patches.rows @ patches.rows.T
    target = np.linalg.solve(gram, data.labels)
    assert (target * data.labels > 0).all()
    run = baselines.gradient_descent(
        NETWORKS[name], gram, patches.counts, data.labels, np.zeros((1, 40)), np.array([0.02]), 40_000
    )
    a = np.array([a[0, 0] for step, a, _ in run if step in (400, 4000, 40_000)])
    cosine = a @ gram @ target / np.sqrt(np.einsum("si,ij,sj->s", a, gram, a) * (target @ gram @ target))
    assert (np.diff(cosine) > 0).all()  # the way there is logarithmic in time
    assert cosine[-1] > 0.997


@pytest.mark.parametrize(("name", "fixed"), [("linear_concat", False), ("linear_concat", True), ("linear_mean", False)])
@pytest.mark.parametrize("n_tokens", [2, 4])
def test_max_margin_error_tends_to_its_closed_form(name, fixed, n_tokens):
    """d/n = 100, c = 0.7: mean z of 6 draws of 400 samples within 8 %."""
    point = BaselineParams(n_train=400, dim=40_000, n_tokens=n_tokens, signal_norm=7.0, label_noise=0.1)
    errors = [
        baselines.max_margin_error(name, point, baselines.draw(point, np.random.default_rng([5, i]), fixed), fixed)
        for i in range(6)
    ]
    z = -norm.ppf(errors)
    assert z.mean() == pytest.approx(baselines.max_margin_z(name, 400, point, fixed), rel=0.08)


@pytest.mark.parametrize(("name", "fixed"), [("linear_concat", False), ("linear_concat", True), ("linear_mean", False)])
def test_one_step_has_the_error_of_its_closed_form(name, fixed):
    """The head after one step is proportional to the label-weighted sum of patches; mean z of 6 draws within 8 %."""
    point = BaselineParams(n_train=400, dim=40_000, n_tokens=3, signal_norm=9.0, label_noise=0.1)
    model, z = NETWORKS[name], []
    for i in range(6):
        data = baselines.draw(point, np.random.default_rng([14, i]), fixed)
        patches = baselines.patches_of(data, model.patches)
        weights, outside = (data.labels @ patches.rows)[None], np.zeros((patches.slots, 1, 1))
        law = baselines.fresh_law(model, point, patches.slots, weights, outside, (0,) if fixed else range(3))
        z.append(-norm.ppf(1 - law.exact_accuracy()))
    assert np.mean(z) == pytest.approx(baselines.one_step_z(name, 400, point, fixed), rel=0.08)


def test_on_the_mean_token_one_step_is_the_formula_of_attention():
    point = SingleHeadParams(n_train=50, dim=3000, n_tokens=4, signal_norm=12.0, label_noise=0.1)
    ours = BaselineParams(n_train=50, dim=3000, n_tokens=4, signal_norm=12.0, label_noise=0.1)
    z = baselines.one_step_z("linear_mean", 50, ours)
    assert norm.sf(z) == pytest.approx(float(theory.test_error_after_one_step(point)), rel=1e-12)


def test_where_a_sample_is_no_support_vector_the_closed_form_is_refused():
    point = BaselineParams(n_train=40, dim=30, signal_norm=20.0)
    data = baselines.draw(point, np.random.default_rng(6))
    assert np.isnan(baselines.max_margin_error("linear_mean", point, data))


def test_attention_is_that_of_explicit_tokens_in_any_position():
    data = draw_single_head(12, 30, 3, 3.0, 0.2, np.random.default_rng(7))
    point = BaselineParams(n_train=12, dim=30, n_tokens=3, signal_norm=3.0, label_noise=0.2)
    stops, laws = baselines._attention_stops(point, data, "cpu", 3)
    model = explicit.SingleHeadAttention(30)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    size = float(baselines.RELATIVE_STEPS[2] * point.natural_step)
    *_, model = explicit.gradient_descent(model, tokens, labels, size, 3)
    index = [(step, k) for k, (relative, step, _) in enumerate(stops) if relative == baselines.RELATIVE_STEPS[2]][-1][1]
    np.testing.assert_allclose(stops[index][2], (model(tokens) * labels).detach(), rtol=1e-9)
    exact = laws[index].exact_accuracy()
    sampled = (laws[index].outputs(20_000, np.random.default_rng(8)) > 0).mean()
    assert abs(sampled - exact) < 4.5 * np.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("name", [*NETWORKS, "attention"])
def test_the_search_takes_the_best_on_validation_data(name):
    found = search(name, POINT, np.random.default_rng(9), n_steps=40)
    assert found.stopped.validation_accuracy >= found.fitted.validation_accuracy >= found.last.validation_accuracy
    assert found.fitted.train_accuracy == found.last.train_accuracy >= found.stopped.train_accuracy
    assert abs(found.fitted.test_accuracy - found.fitted.validation_accuracy) < 0.08
    assert found == search(name, POINT, np.random.default_rng(9), n_steps=40)


def test_one_step_of_attention_is_one_step_on_the_mean_token():
    """p has not moved: the first stop has the test error of the linear model, whatever the step size."""
    at = dict.fromkeys(("linear_mean", "attention"))
    for name in at:
        at[name] = search(name, POINT, np.random.default_rng(10), n_steps=1).stopped.test_accuracy
    assert at["attention"] == pytest.approx(at["linear_mean"], abs=1e-3)


def test_steps_that_leave_the_finite_numbers_are_counted_and_never_chosen(monkeypatch):
    monkeypatch.setattr(baselines, "RELATIVE_STEPS", np.array([0.4, 1e120]))
    found = search("cnn_relu3", POINT, np.random.default_rng(11), n_steps=200)
    assert 0 < found.diverged <= 0.5
    assert found.stopped.test_accuracy > 0.4


def test_too_many_tokens_are_refused_by_name():
    with pytest.raises(ParameterError, match="n_train must be at most 625 with 4 tokens per sample, got 1500"):
        baselines.draw(BaselineParams(n_train=1500, n_tokens=4), np.random.default_rng(0))


@pytest.mark.parametrize("change", [{"dim": 3}, {"n_train": 2}, {"n_tokens": 5, "dim": 20}, {"label_noise": 0.0}])
@pytest.mark.parametrize("name", [*NETWORKS, "attention"])
def test_low_dimension_and_small_samples_are_legitimate(name, change):
    found = search(name, POINT.replace(**change), np.random.default_rng(12), n_steps=5)
    assert 0 <= found.stopped.test_accuracy <= 1


@pytest.mark.parametrize("device", available())
@pytest.mark.parametrize("name", ["mlp", "cnn_relu2", "linear_mean"])
def test_torch_on_every_device_gives_the_numbers_of_numpy(name, device, monkeypatch):
    expected = search(name, POINT, np.random.default_rng(13), n_steps=20)
    there = torch.device(device)
    dtype = torch.float32 if device == "mps" else torch.float64
    pair = (lambda x: torch.as_tensor(x, dtype=dtype, device=there), lambda x: x.cpu().numpy().astype(float))
    monkeypatch.setattr(baselines, "_transfer", lambda _: pair)
    found = search(name, POINT, np.random.default_rng(13), n_steps=20)
    assert found.stopped.test_accuracy == pytest.approx(expected.stopped.test_accuracy, abs=0.01)
    assert found.fitted.train_accuracy == expected.fitted.train_accuracy
