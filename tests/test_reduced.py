"""The reduced dynamics are gradient descent: against autograd on the same tokens, exactly.

"Inside", "edge" and "outside" are points (c, b) of the window in which, in the orthogonal limit at
label_noise = 0.05, all labels are fitted and clean attention exceeds 1/2 (c = 2: b from 2.1 to 7).
"""

from collections import defaultdict
from dataclasses import fields, replace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benign_attention import devices, explicit, reduced
from benign_attention.data import draw_single_head, from_natural_units

POINTS = {
    "inside": (2.0, 5.0),
    "lower edge": (2.0, 2.1),
    "upper edge": (2.0, 7.0),
    "signal too strong": (5.0, 5.0),
    "signal too weak": (0.3, 5.0),
    "step too large": (2.0, 20.0),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def data_with_noisy(n, dim, n_tokens, signal_norm, n_noisy, seed):
    data = draw_single_head(n, dim, n_tokens, signal_norm, 0.0, np.random.default_rng(seed))
    return replace(data, labels=np.where(np.arange(n) < n_noisy, -1.0, 1.0) * data.clean_labels)


def relative_difference(ours, reference):
    difference = np.abs(ours - reference).max()
    return 0.0 if difference == 0 else difference / np.abs(reference).max()


def worst_differences(data, signal_norm, step_size, n_steps):
    """Largest relative differences between reduced and explicit over all steps, by quantity."""
    training = reduced.from_data(data)
    model = explicit.SingleHeadAttention(data.signals.shape[1])
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    signal = data.signals[(data.clean_labels < 0).astype(int)]
    signal_first = np.concatenate([signal[:, None], data.noise], axis=1)
    ours = reduced.gradient_descent(training, signal_norm, step_size, n_steps)
    reference = explicit.gradient_descent(model, tokens, labels, step_size, n_steps)
    worst, steps = defaultdict(float), 0
    for state, _ in zip(ours, reference, strict=True):
        steps += 1
        p, v = model.p.detach().numpy(), model.v.detach().numpy()
        out = reduced.outputs(training, state, signal_norm)
        with torch.no_grad():
            f = model(tokens).numpy()
        pairs = {
            "p": (reduced.vectors(state, data)[0], p),
            "v": (reduced.vectors(state, data)[1], v),
            "logits": (out.logits.T, signal_first @ p),
            "values": (out.values.T, signal_first @ v),
            "outputs": (out.f, f),
        }
        for name, pair in pairs.items():
            worst[name] = max(worst[name], relative_difference(*pair))
    assert steps == n_steps
    return worst


@pytest.mark.parametrize(("n_tokens", "dim"), [(2, 96), (3, 128), (5, 200)])
@pytest.mark.parametrize("point", POINTS)
def test_reduced_is_explicit_at_every_step(point, n_tokens, dim):
    signal_norm, step_size = map(float, from_natural_units(*POINTS[point], 20, dim))
    data = data_with_noisy(20, dim, n_tokens, signal_norm, 1, seed=n_tokens)
    worst = worst_differences(data, signal_norm, step_size, 1000)
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.parametrize("n_noisy", [0, 3])
@pytest.mark.parametrize("n_tokens", [2, 3, 5])
def test_reduced_is_explicit_without_and_with_more_noisy_labels(n_tokens, n_noisy):
    signal_norm, step_size = map(float, from_natural_units(2.0, 5.0, 16, 200))
    data = data_with_noisy(16, 200, n_tokens, signal_norm, n_noisy, seed=10 + n_tokens)
    worst = worst_differences(data, signal_norm, step_size, 1000)
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.parametrize(("n_tokens", "dim"), [(2, 3), (2, 12), (3, 20), (5, 33)])
@pytest.mark.parametrize(("c", "b"), [(2.0, 5.0), (0.3, 1.0)])
def test_reduced_is_explicit_in_low_dimension(c, b, n_tokens, dim):
    """Fewer dimensions than tokens: the Gram matrix is singular, coefficients are not unique, weights are.

    Larger steps make descent itself unstable here (the noise has n / d times more curvature than b says): rounding
    errors grow until any two orders of summation disagree.
    """
    signal_norm, step_size = map(float, from_natural_units(c, b, 24, dim))
    data = data_with_noisy(24, dim, n_tokens, signal_norm, 2, seed=dim)
    worst = worst_differences(data, signal_norm, step_size, 1000)
    assert max(worst.values()) < 1e-10, worst


def test_more_samples_than_dimensions_can_be_drawn_and_trained():
    training = reduced.draw(500, 10, 2, 0.05, [np.random.default_rng(0)])
    assert training.gram.shape == (1, 500, 500)
    assert np.linalg.matrix_rank(training.gram[0]) == 8
    *_, state = reduced.gradient_descent(training, 2.0, 0.5, 50)
    assert all(np.all(np.isfinite(x)) for x in (state.signal, state.noise))


@given(
    n_tokens=st.integers(2, 5),
    scale=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    label_noise=st.sampled_from([0.0, 0.2, 0.4]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=60)
def test_a_step_from_any_state_is_autograds_gradient(n_tokens, scale, label_noise, seed):
    rng = np.random.default_rng(seed)
    n, dim, signal_norm = 7, 25, 3.0
    data = draw_single_head(n, dim, n_tokens, signal_norm, label_noise, rng)
    training = reduced.from_data(data)
    state = reduced.State(
        scale * rng.standard_normal((2, 2)), scale / np.sqrt(n) * rng.standard_normal((2, n * (n_tokens - 1)))
    )
    model = explicit.SingleHeadAttention(dim)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reduced.vectors(state, data), strict=True):
            parameter.copy_(torch.tensor(value))
    explicit.logistic_loss(model(torch.tensor(data.tokens)), torch.tensor(data.labels)).backward()
    stepped = reduced.vectors(reduced.step(training, state, signal_norm, 1.0), data)
    for before, after, parameter in zip(reduced.vectors(state, data), stepped, model.parameters(), strict=True):
        gradient = parameter.grad.numpy()
        # coefficients are subtracted, so that rounding is relative to the weights as well
        tolerance = 1e-11 * np.abs(gradient).max() + 1e-14 * np.abs(before).max()
        np.testing.assert_allclose(before - after, gradient, rtol=0, atol=tolerance)


def test_the_first_step_in_closed_form():
    n, n_tokens, signal_norm, step_size = 12, 3, 4.0, 0.7
    data = data_with_noisy(n, 40, n_tokens, signal_norm, 2, seed=0)
    state = next(reduced.gradient_descent(reduced.from_data(data), signal_norm, step_size, 1))
    unit = step_size / (2 * n * n_tokens)
    assert not np.any(state.signal[0])
    assert not np.any(state.noise[0])
    np.testing.assert_allclose(state.noise[1], unit * np.tile(data.labels, n_tokens - 1), rtol=1e-14)
    excess = [data.labels[data.clean_labels == y].sum() for y in (1, -1)]
    np.testing.assert_allclose(state.signal[1], unit * signal_norm * np.array(excess), rtol=1e-13)


@pytest.mark.parametrize("gap", [5, 40, 200, 600])
@pytest.mark.parametrize("n_tokens", [2, 3])
def test_a_saturated_gradient_keeps_its_relative_precision(n_tokens, gap):
    """Attention exp(-gap) away from certainty: d loss / d(p.mu) against 60 digits; cancellation would leave nothing.

    Noise logits of -gap and a signal logit of zero, so that the new signal component of p is the step alone.
    """
    n, signal_norm = 4, 2.0
    rng = np.random.default_rng(gap)
    m = n * (n_tokens - 1)
    gram = np.diag(rng.uniform(5, 6, m))
    clean = np.array([1.0, 1.0, -1.0, -1.0])
    labels = np.array([1.0, -1.0, -1.0, -1.0])
    noise = np.stack([-gap / np.diag(gram), rng.standard_normal(m)])
    signal = np.array([[0.0, 0.0], [0.9, -1.1]])
    state = reduced.State(signal, noise)
    stepped = reduced.step(reduced.TrainingSet(gram, clean, labels), state, signal_norm, 1.0)

    with mpmath.workdps(700):
        expected = [mpmath.mpf(0), mpmath.mpf(0)]
        for i in range(n):
            k = 0 if clean[i] > 0 else 1
            rows = range(i, m, n)
            logits = [mpmath.mpf(0)] + [mpmath.mpf(noise[0, r]) * mpmath.mpf(gram[r, r]) for r in rows]
            values = [signal_norm * mpmath.mpf(signal[1, k])] + [mpmath.mpf(noise[1, r] * gram[r, r]) for r in rows]
            weights = [mpmath.exp(x) for x in logits]
            attention = [w / mpmath.fsum(weights) for w in weights]
            f = mpmath.fdot(attention, values)
            g = -labels[i] / (n * (1 + mpmath.exp(labels[i] * f)))
            expected[k] -= signal_norm * g * attention[0] * (values[0] - f)
        expected = np.array([float(x) for x in expected])
    # a logit of size `gap` is itself known to gap * 1e-16
    np.testing.assert_allclose(stepped.signal[0], expected, rtol=1e-13 + 1e-15 * gap)


def single(training, index):
    return reduced.TrainingSet(*(getattr(training, field.name)[index] for field in fields(training)))


def final(training, signal_norm, step_size, n_steps=60):
    *_, state = reduced.gradient_descent(training, signal_norm, step_size, n_steps)
    return state


def assert_same(ours, reference, tolerance=1e-14):
    for field in fields(reference):
        a, b = (np.asarray(torch.as_tensor(getattr(s, field.name)).cpu()) for s in (ours, reference))
        assert a.shape == b.shape
        assert relative_difference(a, b) <= tolerance


def generators(seeds):
    return [np.random.default_rng(seed) for seed in seeds]


@pytest.mark.parametrize(("dim", "n_tokens"), [(10**6, 2), (900, 3), (12, 2)])
def test_a_batch_of_seeds_is_the_single_runs(dim, n_tokens):
    batch = reduced.draw(20, dim, n_tokens, 0.1, generators(range(4)))
    signal_norm, step_size = map(float, from_natural_units(2.0, 5.0, 20, dim))
    together = final(batch, signal_norm, step_size)
    assert together.signal.shape == (4, 2, 2)
    assert together.noise.shape == (4, 2, 20 * (n_tokens - 1))
    for i in range(4):
        alone = reduced.draw(20, dim, n_tokens, 0.1, generators([i]))
        np.testing.assert_array_equal(alone.gram[0], batch.gram[i])
        np.testing.assert_array_equal(alone.labels[0], batch.labels[i])
        np.testing.assert_array_equal(alone.clean_labels[0], batch.clean_labels[i])
        state = reduced.State(together.signal[i], together.noise[i])
        assert_same(state, final(single(batch, i), signal_norm, step_size))


def test_grids_broadcast_against_seeds():
    """Two seeds x three signal norms x four step sizes at once, against 24 separate runs."""
    batch = reduced.draw(10, 2000, 3, 0.1, generators(range(2)))
    c, b = np.array([0.3, 2.0, 5.0])[:, None], np.array([0.5, 2.0, 5.0, 20.0])
    signal_norms, step_sizes = from_natural_units(c, b, 10, 2000)
    together = final(batch.with_axes(2), signal_norms, step_sizes)
    assert together.noise.shape == (2, 3, 4, 2, 20)
    out = reduced.outputs(batch.with_axes(2), together, signal_norms)
    assert out.logits.shape == (2, 3, 4, 3, 10)
    assert out.f.shape == (2, 3, 4, 10)
    for i, j, k in np.ndindex(2, 3, 4):
        alone = final(single(batch, i), float(signal_norms[j, 0]), float(step_sizes[k]))
        state = reduced.State(together.signal[i, j, k], together.noise[i, j, k])
        assert_same(state, alone, 1e-12)
        f = reduced.outputs(single(batch, i), alone, float(signal_norms[j, 0])).f
        assert relative_difference(out.f[i, j, k], f) < 1e-11


def test_a_grid_over_one_training_set_needs_no_batch_axis():
    training = single(reduced.draw(8, 500, 2, 0.2, generators([5])), 0)
    signal_norms = np.array([1.0, 5.0, 20.0])
    together = final(training, signal_norms, 0.1)
    for i, signal_norm in enumerate(signal_norms):
        state = reduced.State(together.signal[i], together.noise[i])
        assert_same(state, final(training, float(signal_norm), 0.1), 1e-13)


@pytest.mark.parametrize("name", devices.available())
def test_torch_on_every_device_is_numpy(name):
    batch = reduced.draw(12, 5000, 3, 0.1, generators(range(3)))
    signal_norms, step_sizes = from_natural_units(np.array([0.3, 2.0])[:, None], np.array([1.0, 5.0, 7.0]), 12, 5000)
    here = final(batch.with_axes(2), signal_norms, step_sizes)
    there = final(batch.to(name).with_axes(2), signal_norms, step_sizes)
    assert there.noise.device.type == torch.device(name).type
    tolerance = 1e-3 if name == "mps" else 1e-11
    assert_same(there, here, tolerance)
    outputs_there = reduced.outputs(batch.to(name).with_axes(2), there, signal_norms)
    assert_same(outputs_there, reduced.outputs(batch.with_axes(2), here, signal_norms), tolerance)


@given(n_tokens=st.integers(2, 4), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_the_order_of_samples_does_not_matter(n_tokens, seed):
    rng = np.random.default_rng(seed)
    signal_norm, step_size = map(float, from_natural_units(2.0, 3.0, 8, 300))
    data = draw_single_head(8, 300, n_tokens, signal_norm, 0.3, rng)
    order = rng.permutation(8)
    shuffled = replace(
        data,
        **{name: getattr(data, name)[order] for name in ("clean_labels", "labels", "noise", "position")},
    )
    state, other = (final(reduced.from_data(x), signal_norm, step_size, 20) for x in (data, shuffled))
    rows = state.noise.reshape(2, n_tokens - 1, 8)[..., order].reshape(2, -1)
    assert_same(other, reduced.State(state.signal, rows), 1e-10)


def test_before_training_attention_is_uniform_and_outputs_are_zero():
    training = reduced.draw(6, 100, 4, 0.1, generators([0, 1]))
    out = reduced.outputs(training, reduced.zero_state(training), 3.0)
    assert np.all(out.attention == 0.25)
    assert not np.any(out.f)


@given(scale=st.floats(0, 200), n_tokens=st.integers(2, 5), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_attention_is_a_distribution_and_outputs_lie_between_values(scale, n_tokens, seed):
    rng = np.random.default_rng(seed)
    training = single(reduced.draw(5, 50, n_tokens, 0.2, [rng]), 0)
    state = reduced.State(scale * rng.standard_normal((2, 2)), scale * rng.standard_normal((2, 5 * (n_tokens - 1))))
    out = reduced.outputs(training, state, 2.0)
    assert np.all(out.attention >= 0)
    np.testing.assert_allclose(out.attention.sum(axis=0), 1.0, rtol=1e-14)
    slack = 1e-13 * np.abs(out.values).max()
    assert np.all(out.f <= out.values.max(axis=0) + slack)
    assert np.all(out.f >= out.values.min(axis=0) - slack)


def test_a_step_far_from_the_data_stays_finite():
    """Margins of ±1e5 and saturated attention: no overflow, no NaN, no warning."""
    training = single(reduced.draw(6, 100, 3, 0.2, generators([3])), 0)
    rng = np.random.default_rng(3)
    state = reduced.State(1e4 * rng.standard_normal((2, 2)), 1e3 * rng.standard_normal((2, 12)))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        stepped = reduced.step(training, state, 10.0, 1.0)
    assert all(np.all(np.isfinite(x)) for x in (stepped.signal, stepped.noise))


def test_flipped_labels_are_the_noisy_ones():
    data = data_with_noisy(9, 20, 2, 1.0, 4, seed=0)
    training = reduced.from_data(data)
    np.testing.assert_array_equal(training.noisy, np.arange(9) < 4)
    assert (training.n_train, training.n_noise) == (9, 1)
    np.testing.assert_array_equal(training.membership.sum(axis=0), 1)
    np.testing.assert_array_equal(training.membership[0], data.clean_labels > 0)


def explicit_weights(n_tokens, dim, scale):
    """Tokens, Gaussian weights in all dimensions, and the same weights on coefficients with what they leave outside."""
    rng = np.random.default_rng([n_tokens, dim])
    data = draw_single_head(12, dim, n_tokens, 3.0, 0.2, rng)
    weights = scale * rng.standard_normal((2, dim))
    rows = data.noise.swapaxes(0, 1).reshape(-1, dim)
    state = reduced.State(weights[:, :2], weights @ np.linalg.pinv(rows))
    return data, weights, state


@pytest.mark.parametrize(("n_tokens", "dim"), [(2, 60), (3, 60), (3, 15)])
@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_descent_from_random_weights_moves_only_the_span_of_the_tokens(scale, n_tokens, dim):
    data, weights, start = explicit_weights(n_tokens, dim, scale)
    outside = weights - np.stack(reduced.vectors(start, data))
    model = explicit.SingleHeadAttention(dim)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(value))
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    ours = reduced.gradient_descent(reduced.from_data(data), 3.0, 0.5, 300, start)
    for state, _ in zip(ours, explicit.gradient_descent(model, tokens, labels, 0.5, 300), strict=True):
        for vector, rest, parameter in zip(reduced.vectors(state, data), outside, model.parameters(), strict=True):
            assert relative_difference(vector + rest, parameter.detach().numpy()) < 1e-10


@pytest.mark.parametrize("dim", [9, 14, 15, 40])
def test_random_weights_have_the_law_of_gaussian_vectors(dim):
    """Products with tokens, and squared lengths, of 4000 draws: within 5 standard errors (false alarm < 1e-4)."""
    n_draws, scale = 4000, 0.5
    one = reduced.draw(6, dim, 3, 0.2, generators([dim]))
    training = reduced.TrainingSet(*(np.repeat(getattr(one, f.name), n_draws, axis=0) for f in fields(one)))
    start = reduced.random_start(training, dim, scale, generators(range(n_draws)))
    inside = np.einsum("skm,mn,sln->skl", start.state.noise, one.gram[0], start.state.noise)
    lengths = inside + start.state.signal @ np.swapaxes(start.state.signal, 1, 2) + start.outside
    for value, mean, variance in (
        (lengths[:, 0, 0], dim, 2 * dim),
        (lengths[:, 1, 1], dim, 2 * dim),
        (lengths[:, 0, 1], 0, dim),
    ):
        assert abs(value.mean() / scale**2 - mean) < 5 * np.sqrt(variance / n_draws)
        assert (value / scale**2).var() == pytest.approx(variance, rel=5 * np.sqrt(14 / n_draws))
    logits = start.state.noise @ one.gram[0]
    covariance = np.einsum("skm,skn->mn", logits, logits) / (2 * n_draws * scale**2)
    spread = np.sqrt((one.gram[0] ** 2 + np.outer(*[np.diag(one.gram[0])] * 2)) / (2 * n_draws))
    assert np.abs((covariance - one.gram[0]) / spread).max() < 5
    assert (start.outside == 0).all() == (dim - 2 <= 12)


def test_random_weights_of_two_scales_are_multiples():
    training = reduced.draw(5, 100, 2, 0.2, generators(range(3)))
    small, large = (reduced.random_start(training, 100, s, generators(range(3))) for s in (0.1, 0.4))
    np.testing.assert_allclose(large.state.noise, 4 * small.state.noise, rtol=1e-14)
    np.testing.assert_allclose(large.outside, 16 * small.outside, rtol=1e-14)
