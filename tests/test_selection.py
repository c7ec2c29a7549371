"""Token selection in reduced coordinates: gradient descent of the written-down model, exactly, at any dimension.

Statistical tests fix their seeds and state how often they would fail by chance before the seeds were fixed.
"""

import math
from collections import defaultdict
from dataclasses import fields, replace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import digamma, expit, polygamma
from threadpoolctl import threadpool_limits

from benign_attention import devices, explicit, selection, selection_population
from benign_attention.data import TokenSelectionParams, draw_token_selection
from benign_attention.parameters import ParameterError

# n |mu|^2 / d of the authors' runs with n = 20 at (d, |mu|) = (2000, 20), (5000, 5), (1000, 100)
REGIMES = {"benign": 4.0, "benign after long training": 0.1, "not overfitting": 200.0}
STEP_SIZE = 5e-3


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def at_signal(n_snr2, dim, n_train=20, **others):
    return TokenSelectionParams(
        n_train=n_train, dim=dim, signal_norm=math.sqrt(n_snr2 * dim / n_train), weak_ratio=0.1, **others
    )


def explicit_start(params, seed):
    """Data and W_0 with entries of variance 1/(3d)."""
    rng = np.random.default_rng(seed)
    data = draw_token_selection(params, rng)
    return data, rng.standard_normal((params.dim, params.dim)) / math.sqrt(3 * params.dim)


def model_of(data, weights, head=None):
    model = explicit.TokenSelectionAttention(torch.tensor(data.signals), torch.tensor(weights))
    if head is not None:
        model.nu = torch.tensor(head)
    return model


def relative_difference(ours, reference):
    difference = np.abs(ours - reference).max()
    return 0.0 if difference == 0 else difference / np.abs(reference).max()


# --- against the written-down model --------------------------------------------------------------------------


def worst_differences(params, seed, step_size, steps, head=None, rotation=None):
    """Largest relative differences between reduced and explicit over the listed steps, by quantity."""
    data, initial = explicit_start(params, seed)
    if rotation is not None:
        data = replace(data, signals=data.signals @ rotation, tokens=data.tokens @ rotation)
    training, basis = selection.from_data(data, initial, params.weak_ratio)
    if head is not None:
        training = replace(training, head=basis.left.T @ head)
    model = model_of(data, initial, head)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    directions = data.signals / params.signal_norm
    reference = explicit.gradient_descent(model, tokens, labels, step_size, max(steps))
    ours = selection.gradient_descent(training, step_size, steps)
    worst, compared = defaultdict(float), 0
    for t, _ in enumerate(reference, 1):
        if t not in steps:
            continue
        compared += 1
        state = next(ours)
        p, change = selection.vectors(training, state, basis)
        out = selection.outputs(training, state)
        fresh = selection_population.fresh_sample(training, state)
        with torch.no_grad():
            q = (model.W @ model.p).numpy()
            pairs = {
                "p": (p, model.p.numpy()),
                "W - W_0": (change, model.W.numpy() - initial),
                "logits": (out.logits, data.tokens @ q),
                "attention": (out.attention, model.attention(tokens).numpy()),
                "outputs": (out.f, model(tokens).numpy()),
                "|q|^2": (fresh.spread**2, q @ q),
                "q.e_k": (fresh.logits[:, 0] / params.signal_norm, directions @ q),
                "q.nu": (fresh.spread * fresh.slope, (model.nu @ torch.tensor(q)).numpy()),
            }
        for name, pair in pairs.items():
            worst[name] = max(worst[name], relative_difference(*pair))
    assert compared == len(steps)
    return worst


STEPS = [1, 2, 3, 5, 10, 20, 50, 100, 200, 300, 500, 700, 1000]


@pytest.mark.parametrize("dim", [300, 600])
@pytest.mark.parametrize("regime", REGIMES)
def test_reduced_is_explicit(regime, dim):
    worst = worst_differences(at_signal(REGIMES[regime], dim), dim, STEP_SIZE, STEPS)
    assert max(worst.values()) < 1e-8, worst


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "signal_norm"), [(1000, 100.0), (2000, 20.0)])
def test_reduced_is_explicit_at_the_published_size(dim, signal_norm):
    params = TokenSelectionParams(dim=dim, signal_norm=signal_norm)
    worst = worst_differences(params, dim, STEP_SIZE, STEPS)
    assert max(worst.values()) < 1e-8, worst


@pytest.mark.parametrize("dim", [3, 12, 27, 28, 29, 30, 31, 45])
@pytest.mark.parametrize("n_snr2", [0.1, 4.0])
def test_reduced_is_explicit_where_dimensions_are_few(n_snr2, dim):
    """n T = 28 tokens and two signals: below, at and above the dimension in which they are independent."""
    params = at_signal(n_snr2, dim, n_train=7, n_tokens=4)
    worst = worst_differences(params, dim, 0.05, [1, 2, 10, 100, 300])
    assert max(worst.values()) < 1e-8, worst


@pytest.mark.parametrize("dim", [4, 30, 90])
@pytest.mark.parametrize("seed", range(4))
def test_reduced_is_explicit_for_signals_in_any_direction(seed, dim):
    rotation = stats.ortho_group.rvs(dim, random_state=100 * dim + seed)
    params = at_signal(4.0, dim, n_train=7, n_tokens=4)
    worst = worst_differences(params, seed, 0.05, [1, 10, 100], rotation=rotation)
    assert max(worst.values()) < 1e-8, worst


@pytest.mark.parametrize("dim", [3, 12, 30])
def test_reduced_is_explicit_with_a_head_that_is_not_aligned(dim):
    """Where E spans all dimensions every head lies in its span."""
    head = np.random.default_rng(dim).standard_normal(dim) / 3
    params = TokenSelectionParams(n_train=7, dim=dim, n_tokens=4, signal_norm=2.0)
    worst = worst_differences(params, dim, 0.05, [1, 2, 10, 100, 300], head)
    assert max(worst.values()) < 1e-8, worst


@pytest.mark.parametrize(
    "params",
    [
        TokenSelectionParams(n_train=2, dim=20, n_tokens=3, signal_norm=3.0, label_noise=0.0),
        TokenSelectionParams(n_train=2, dim=20, n_tokens=3, signal_norm=3.0, label_noise=0.4),
        TokenSelectionParams(n_train=3, dim=40, n_tokens=3, signal_norm=2.0, label_noise=0.2, weak_ratio=0.0),
        TokenSelectionParams(n_train=9, dim=80, n_tokens=3, signal_norm=5.0, label_noise=0.0, weak_ratio=1.0),
        TokenSelectionParams(n_train=11, dim=60, n_tokens=12, signal_norm=8.0, label_noise=0.3, weak_ratio=2.5),
    ],
    ids=lambda p: f"n={p.n_train},T={p.n_tokens},eta={p.label_noise:g},rho_w={p.weak_ratio:g}",
)
def test_reduced_is_explicit_for_small_odd_and_clean_sets(params):
    worst = worst_differences(params, 5, 0.1, [1, 2, 10, 100, 300])
    assert max(worst.values()) < 1e-8, worst


@given(
    n_tokens=st.integers(3, 6),
    dim=st.sampled_from([4, 20, 40, 60]),
    scale=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    label_noise=st.sampled_from([0.0, 0.2, 0.4]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=60)
def test_the_velocity_from_any_state_is_minus_autograds_gradient(n_tokens, dim, scale, label_noise, seed):
    params = TokenSelectionParams(n_train=5, dim=dim, n_tokens=n_tokens, signal_norm=3.0, label_noise=label_noise)
    data, initial = explicit_start(params, seed)
    training, basis = selection.from_data(data, initial, params.weak_ratio)
    rng = np.random.default_rng(seed)
    rank = training.weights.shape[-1]
    state = selection.State(
        scale * rng.standard_normal(rank), training.weights + scale / rank * rng.standard_normal((rank, rank))
    )
    p, change = selection.vectors(training, state, basis)
    model = model_of(data, initial + change)
    with torch.no_grad():
        model.p.copy_(torch.tensor(p))
    explicit.logistic_loss(model(torch.tensor(data.tokens)), torch.tensor(data.labels)).backward()
    ahead = selection.velocity(training, state)
    moved = selection.State(ahead.query, training.weights + ahead.weights)
    for ours, parameter in zip(selection.vectors(training, moved, basis), (model.p, model.W), strict=True):
        gradient = parameter.grad.numpy()
        # W - W_0 is formed by a subtraction, so that rounding is relative to W_0 as well
        np.testing.assert_allclose(ours, -gradient, rtol=0, atol=1e-10 * np.abs(gradient).max() + 1e-15)


@given(scale=st.sampled_from([0.01, 1.0, 5.0]), dim=st.sampled_from([4, 60]), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_the_velocity_of_a_trained_head_is_minus_autograds_gradient(scale, dim, seed):
    params = TokenSelectionParams(n_train=5, dim=dim, n_tokens=4, signal_norm=2.0)
    data, initial = explicit_start(params, seed)
    training, basis = selection.from_data(data, initial, params.weak_ratio)
    rng = np.random.default_rng(seed)
    training = replace(training, head=scale * rng.standard_normal(training.head.size))
    state = selection.State(scale * rng.standard_normal(training.head.size), training.weights)
    head = torch.tensor(basis.left @ training.head, requires_grad=True)
    model = model_of(data, initial, basis.left @ training.head)
    with torch.no_grad():
        model.p.copy_(torch.tensor(selection.vectors(training, state, basis)[0]))
    model.nu = head
    explicit.logistic_loss(model(torch.tensor(data.tokens)), torch.tensor(data.labels)).backward()
    gradient = head.grad.numpy()
    found = basis.left @ selection.head_velocity(training, state)
    np.testing.assert_allclose(found, -gradient, rtol=0, atol=1e-10 * np.abs(gradient).max() + 1e-15)


def test_the_first_step_in_closed_form():
    """p = lr W_0^T sum_it y_i sg(-y_i f_i) (gamma_it - f_i) x_it / (n T), f_i the mean of gamma_it over t; W stays."""
    params = TokenSelectionParams(n_train=6, dim=50, n_tokens=5, signal_norm=4.0)
    data, initial = explicit_start(params, 1)
    training, basis = selection.from_data(data, initial, params.weak_ratio)
    (state,) = selection.gradient_descent(training, 0.7, [1])
    nu = (data.signals[0] - data.signals[1]) / (math.sqrt(2) * 16.0)
    values = data.tokens @ nu
    np.testing.assert_allclose(training.values, values, rtol=0, atol=1e-13)
    f = values.mean(axis=1)
    pull = (data.labels * expit(-data.labels * f))[:, None] * (values - f[:, None]) / (6 * 5)
    expected = 0.7 * initial.T @ np.einsum("it,itd->d", pull, data.tokens)
    p, change = selection.vectors(training, state, basis)
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-13 * np.abs(expected).max())
    assert not np.any(change)


def test_the_order_of_samples_does_not_matter():
    params = TokenSelectionParams(n_train=8, dim=70, n_tokens=4, signal_norm=4.0)
    data, initial = explicit_start(params, 2)
    order = np.random.default_rng(0).permutation(8)
    shuffled = replace(data, **{name: getattr(data, name)[order] for name in ("tokens", "clean_labels", "labels")})
    results = []
    for each in (data, shuffled):
        training, basis = selection.from_data(each, initial, params.weak_ratio)
        (state,) = selection.gradient_descent(training, 0.1, [200])
        results.append((selection.outputs(training, state).logits, *selection.vectors(training, state, basis)))
    (logits, *weights), (other_logits, *other_weights) = results
    assert relative_difference(other_logits, logits[order]) < 1e-10
    for ours, reference in zip(other_weights, weights, strict=True):
        assert relative_difference(ours, reference) < 1e-10


def test_before_training_attention_is_uniform():
    training = selection.draw(TokenSelectionParams(dim=100), np.random.default_rng(0))
    (state,) = selection.gradient_descent(training, 1.0, [0])
    out = selection.outputs(training, state)
    assert np.all(out.attention == 1 / 8)
    np.testing.assert_allclose(out.f, training.values.mean(axis=1), rtol=1e-13)
    np.testing.assert_array_equal(state.weights, training.weights)


def test_states_on_the_way_do_not_depend_on_which_are_asked_for_and_stay_as_they_were():
    training = selection.draw(TokenSelectionParams(dim=2000), np.random.default_rng(0))
    drawn = training.weights.copy()
    all_states = list(selection.gradient_descent(training, 0.05, range(31)))
    some = dict(zip([0, 7, 30], selection.gradient_descent(training, 0.05, [0, 7, 30]), strict=True))
    for t, state in some.items():
        np.testing.assert_array_equal(state.query, all_states[t].query)
        np.testing.assert_array_equal(state.weights, all_states[t].weights)
    assert not np.array_equal(all_states[29].weights, all_states[30].weights)
    np.testing.assert_array_equal(training.weights, drawn)


# --- the recursion on Gram matrices, a second code that never sees coordinates ---------------------------------


def on_gram_matrices(gram, keys, values, labels, step_size, n_steps):
    """(a, M) of p = U^T a and W = W_0 + X^T M U by gradient descent, from G and K alone."""
    n, n_tokens = values.shape
    a, m = np.zeros(n * n_tokens), np.zeros((n * n_tokens, n * n_tokens))
    for _ in range(n_steps):
        logits = (keys @ a + gram @ (m @ (keys @ a))).reshape(n, n_tokens)
        s = np.exp(logits - logits.max(axis=1, keepdims=True))
        s /= s.sum(axis=1, keepdims=True)
        f = (s * values).sum(axis=1)
        g = -labels * expit(-labels * f) / n
        c = (g[:, None] * s * (values - f[:, None])).ravel()
        a, m = a - step_size * (c + m.T @ (gram @ c)), m - step_size * np.outer(c, a)
    return a, m


@pytest.mark.parametrize("dim", [30, 42, 60, 10**4, 10**9, 10**15])
def test_drawn_sets_follow_the_recursion_on_their_gram_matrices(dim):
    """Also where no explicit code can go; steps shrink with 1/d, as the model's speed grows with d."""
    params = at_signal(4.0, dim, n_train=10, n_tokens=4)
    training = selection.draw(params, np.random.default_rng(dim))
    step_size = 10.0 / dim
    (state,) = selection.gradient_descent(training, step_size, [500])
    gram, keys, metric = training.gram_matrices()
    a, m = on_gram_matrices(gram, keys, training.values, training.labels, step_size, 500)
    r = m @ (keys @ a)
    out = selection.outputs(training, state)
    assert 0.3 < out.attention.max() < 1
    assert relative_difference(out.logits.ravel(), keys @ a + gram @ r) < 1e-9
    assert state.query @ state.query == pytest.approx(a @ keys @ a, rel=1e-9)
    spread = selection_population.fresh_sample(training, state).spread
    assert spread**2 == pytest.approx(a @ metric @ a + 2 * (keys @ a) @ r + r @ gram @ r, rel=1e-9)


def test_in_the_limit_of_many_dimensions_nothing_is_random():
    """At d = 1e15 and fixed n |mu|^2 / d: G = d + signal parts, K = G / 3, H = 2 G / 9, up to relative 1e-7."""
    params = at_signal(2.0, 10**15, n_train=8, n_tokens=4)
    norm, weak = params.signal_norm, params.weak_ratio
    trained = []
    for seed in range(3):
        training = selection.draw(params, np.random.default_rng(seed))
        order = np.lexsort([training.noisy, training.clean_labels])  # which sample is flipped is still drawn
        parts = np.zeros((8, 4, 2))
        for i, y in enumerate(training.clean_labels):
            own = np.array([y > 0, y < 0], float) * norm
            parts[i, :3] = own, weak * own, weak * own[::-1]
        flat = parts.reshape(32, 2)
        gram = 1e15 * np.eye(32) + flat @ flat.T
        values = (parts[..., 0] - parts[..., 1]) / (math.sqrt(2) * norm)
        (state,) = selection.gradient_descent(training, 5e-15, [400])
        a, m = on_gram_matrices(gram, gram / 3, values, training.labels, 5e-15, 400)
        r = m @ (gram @ a) / 3
        out = selection.outputs(training, state)
        assert relative_difference(out.logits.ravel(), gram @ a / 3 + gram @ r) < 1e-5
        square = 2 * a @ gram @ a / 9 + 2 * (gram @ a) @ r / 3 + r @ gram @ r
        assert selection_population.fresh_sample(training, state).spread ** 2 == pytest.approx(square, rel=1e-5)
        trained.append(out.logits[order])
    assert np.abs(trained[0]).max() > 1
    for other in trained[1:]:
        assert relative_difference(other, trained[0]) < 1e-5


# --- the law of drawn sets -----------------------------------------------------------------------------------

SMALL = {"n_train": 2, "n_tokens": 3, "signal_norm": 3.0}  # n T = 6 rows, r = 8


def with_signal_directions(training):
    """The same sets with the two signal directions as rows before the tokens."""
    rank = training.tokens.shape[-1]
    directions = np.broadcast_to(np.eye(rank)[:2], (*training.tokens.shape[:-2], 2, rank))
    return replace(training, tokens=np.concatenate([directions, training.tokens], axis=-2))


def drawn_sets(dim, n_draws, **point):
    rng = np.random.default_rng([dim, n_draws])
    params = TokenSelectionParams(dim=dim, **point)
    return selection.TrainingSet.stack(selection.draw(params, rng) for _ in range(n_draws))


def standardised(matrix, metric):
    """L^-1 matrix L^-T for metric = L L^T, over batch axes."""
    factor = np.linalg.cholesky(metric)
    left = np.linalg.solve(factor, matrix)
    return np.linalg.solve(factor, np.swapaxes(left, -1, -2))


def assert_moments(sample, mean, variance):
    """Mean and variance within 5 standard errors."""
    centred = (sample - mean) / math.sqrt(variance)
    assert abs(centred.mean()) < 5 / math.sqrt(centred.size)
    assert abs((centred**2).mean() - 1) < 5 * (centred**2).std() / math.sqrt(centred.size)


def assert_wishart(matrices, dof):
    """Diagonals, trace, determinant and rank are those of Wishart matrices with `dof` degrees of freedom."""
    rows = matrices.shape[-1]
    diagonal = np.diagonal(matrices, axis1=-2, axis2=-1)
    for k in range(rows):
        assert_moments(diagonal[:, k], dof, 2 * dof)
    assert_moments(diagonal.sum(axis=-1), rows * dof, 2 * rows * dof)
    assert_moments(matrices[:, 0, -1], 0, dof)
    if dof >= rows:
        half = (dof - np.arange(rows)) / 2
        sign, log = np.linalg.slogdet(matrices)
        assert np.all(sign == 1)
        assert_moments(log, (digamma(half) + math.log(2)).sum(), polygamma(1, half).sum())
    else:
        assert np.all(np.linalg.matrix_rank(matrices, tol=1e-5, hermitian=True) <= dof)


@pytest.mark.parametrize("dim", [8, 9, 10, 14, 15, 16, 17, 40, 2000, 10**9, 10**15])
def test_degrees_of_freedom_of_the_drawn_matrices(dim):
    """Noise part of G: d - 2. K given G: d. H given both: d - n T, and d - r with the signal directions as rows.

    Some 120 numbers for a dimension, each within 5 standard errors: false alarm below 1e-3 for all dimensions.
    """
    spread = 1 / (3 * dim)
    sets = drawn_sets(dim, 3000, **SMALL)
    noise = sets.tokens[..., 2:]
    noise_gram = noise @ np.swapaxes(noise, -1, -2)
    assert_wishart(noise_gram, dim - 2)
    statistics = [np.trace(noise_gram, axis1=1, axis2=2)]
    for rows, each in ((6, sets), (8, with_signal_directions(sets))):
        gram, keys, metric = each.gram_matrices()
        keys_given_gram = standardised(keys, gram) / spread
        assert_wishart(keys_given_gram, dim)
        outside = standardised(metric - keys @ np.linalg.solve(gram, keys), keys) / spread
        if dim > rows:
            assert_wishart(outside, dim - rows)
        else:
            assert sets.outside.shape[-2] == 0
        statistics += [np.trace(x, axis1=1, axis2=2) for x in (keys_given_gram, outside)]
    independent = [x for x in statistics[:3] if x.std() > 1e-6]
    correlation = np.corrcoef(independent) - np.eye(len(independent))
    assert np.abs(correlation).max() < 5 / math.sqrt(3000)


def test_drawn_tokens_carry_the_signals_with_unit_noise():
    """Kolmogorov-Smirnov on the noise along the signals at 1e-3, and 40 means within 5 standard errors."""
    sets = drawn_sets(5000, 1500, n_train=4, n_tokens=5, signal_norm=7.0, weak_ratio=0.3)
    along = sets.tokens[..., :2].reshape(1500, 4, 5, 2)
    expected = np.zeros((4, 5, 2))
    for i, y in enumerate(sets.clean_labels[0]):
        own = np.array([y > 0, y < 0], float) * 7.0
        expected[i, :3] = own, 0.3 * own, 0.3 * own[::-1]
    noise = along - expected
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    assert np.all(np.abs(noise.mean(axis=0)) < 5 / math.sqrt(1500))


def explicit_gram_matrices(params, rng):
    """G, K, H of the signal directions and tokens, from d-dimensional draws of all of them."""
    data = draw_token_selection(params, rng)
    weights = rng.standard_normal((params.dim, params.dim)) / math.sqrt(3 * params.dim)
    rows = np.concatenate([np.eye(params.dim)[:2], data.tokens.reshape(-1, params.dim)])
    keys = rows @ weights
    metric = keys @ weights.T
    return rows @ rows.T, keys @ keys.T, metric @ metric.T


def gram_statistics(gram, keys, metric):
    for matrix in (gram, keys, metric):
        eigenvalues = np.linalg.eigvalsh(matrix)
        yield eigenvalues[:, -1]
        yield eigenvalues[:, -3]
        yield matrix[:, 0, 1]
        yield matrix[:, 1, -1]
        yield matrix[:, 2, 5]
        yield matrix[:, -1, -1]
    yield np.einsum("bij,bji->b", gram, metric) / np.einsum("bij,bji->b", keys, keys)
    yield np.einsum("bij,bji->b", gram, keys) / np.einsum("bij,bji->b", gram, gram)


@pytest.mark.parametrize("dim", [3, 5, 6, 7, 8, 9, 10, 15, 16, 17, 40])
def test_drawn_matrices_have_the_law_of_explicit_ones(dim):
    """r = 8 and 2 r = 16 are where Bartlett factors take over. Two-sample Kolmogorov-Smirnov on 20 statistics of 1500
    draws at level 2e-4: false alarm 4 % for all dimensions."""
    params = TokenSelectionParams(dim=dim, **SMALL)
    rng = np.random.default_rng(100 + dim)
    reference = [np.stack(x) for x in zip(*(explicit_gram_matrices(params, rng) for _ in range(1500)), strict=True)]
    ours = with_signal_directions(drawn_sets(dim, 1500, **SMALL)).gram_matrices()
    assert ours[0].shape == (1500, 8, 8)
    for x, y in zip(gram_statistics(*ours), gram_statistics(*reference), strict=True):
        if np.ptp(y) > 1e-9:  # the signal directions' own Gram matrix is not random
            assert stats.ks_2samp(x, y).pvalue > 2e-4
        else:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", [3, 4, 161, 162, 163, 323, 324, 325, 5000, 10**9, 10**15])
def test_sizes_across_the_boundaries_of_the_samplers(dim):
    """n T + 2 = 162: r is d below and 162 above; C has d - r rows, at most r."""
    training = selection.draw(TokenSelectionParams(dim=dim, signal_norm=1.0), np.random.default_rng(0))
    rank = min(dim, 162)
    assert training.tokens.shape == (160, rank)
    assert training.weights.shape == (rank, rank)
    assert training.outside.shape == (min(dim - rank, rank), rank)
    (state,) = selection.gradient_descent(training, 10.0 / dim, [20])
    assert np.all(np.isfinite(state.weights))
    assert np.any(state.query)


# --- the law of outcomes -------------------------------------------------------------------------------------

OUTCOMES = ("loss", "clean attention", "noisy attention", "|p|", "|q| / |p|", "q.nu", "q.e_+ + q.e_-")
TINY = {"n_train": 8, "n_tokens": 4}  # n T = 32 rows, r = 34


def outcomes(attention, f, clean_labels, labels, p_norm, q_norm, along_head, along_signals):
    """(7, B): what training did, and all that decides what fresh samples see."""
    loss = np.logaddexp(0.0, -labels * f).mean(axis=-1)
    noisy = labels != clean_labels
    relevant = attention[..., 0]
    by_kind = [(relevant * kind).sum(axis=-1) / kind.sum(axis=-1) for kind in (~noisy, noisy)]
    return np.array([loss, *by_kind, p_norm, q_norm / p_norm, along_head, along_signals.sum(axis=-1)])


def drawn_outcomes(params, seeds, step_size, n_steps, head_noise=0.0):
    sets = (selection.draw(params, np.random.default_rng([7, s]), head_noise) for s in seeds)
    return outcomes_of(selection.TrainingSet.stack(sets), step_size, n_steps)


def outcomes_of(training, step_size, n_steps):
    (state,) = selection.gradient_descent(training, step_size, [n_steps])
    out = selection.outputs(training, state)
    fresh = selection_population.fresh_sample(training, state)
    along_signals = fresh.logits[..., 0] / np.asarray(training.signal_norm)[..., None]
    sizes = np.linalg.norm(state.query, axis=-1), fresh.spread, fresh.spread * fresh.slope, along_signals
    return outcomes(out.attention, out.f, training.clean_labels, training.labels, *sizes)


def explicit_outcomes(params, seeds, step_size, n_steps, head_noise=0.0):
    """Gradient descent on d-dimensional p and W, all seeds at once; written here a second time, in NumPy."""
    starts = [explicit_start(params, [11, s]) for s in seeds]
    tokens, clean, labels = (np.stack([getattr(d, k) for d, _ in starts]) for k in ("tokens", "clean_labels", "labels"))
    weights, p = np.stack([w for _, w in starts]), np.zeros((len(seeds), params.dim))
    nu = np.zeros(params.dim)
    nu[:3] = np.array([1, -1, 0]) / (math.sqrt(2) * params.signal_norm) + np.array([0, 0, head_noise])
    values = tokens @ nu
    for t in range(n_steps + 1):
        q = np.einsum("bij,bj->bi", weights, p)
        logits = np.einsum("bntd,bd->bnt", tokens, q)
        s = np.exp(logits - logits.max(axis=-1, keepdims=True))
        s /= s.sum(axis=-1, keepdims=True)
        f = (s * values).sum(axis=-1)
        if t == n_steps:
            break
        g = -labels * expit(-labels * f) / params.n_train
        pull = np.einsum("bnt,bntd->bd", g[..., None] * s * (values - f[..., None]), tokens)
        ahead = p - step_size * np.einsum("bij,bi->bj", weights, pull)
        weights -= step_size * pull[:, :, None] * p[:, None, :]
        p = ahead
    return outcomes(s, f, clean, labels, np.linalg.norm(p, axis=1), np.linalg.norm(q, axis=1), q @ nu, q[:, :2])


def p_values(ours, reference):
    return {name: stats.ks_2samp(x, y).pvalue for name, x, y in zip(OUTCOMES, ours, reference, strict=True)}


@pytest.mark.parametrize("dim", [16, 33, 34, 35, 36, 67, 68, 69, 150])
def test_outcomes_have_the_law_of_explicit_runs(dim):
    """40 explicit runs against 400 drawn ones across both boundaries, r = 34 and 2 r = 68.

    Two-sample Kolmogorov-Smirnov on 7 outcomes at 1e-3: false alarm 6 % for all dimensions.
    """
    params = at_signal(2.0, dim, **TINY)
    reference = explicit_outcomes(params, range(40), 20 / dim, 40)
    found = p_values(drawn_outcomes(params, range(400), 20 / dim, 40), reference)
    assert min(found.values()) > 1e-3, found


@pytest.mark.parametrize("dim", [3, 16, 34, 35, 36, 69, 70, 150])
def test_outcomes_with_a_head_that_is_not_aligned_have_the_law_of_explicit_runs(dim):
    """As above, with r = 35 from d = 35 on; false alarm 6 % for all dimensions."""
    params = at_signal(2.0, dim, **TINY)
    head_noise = 1.5 / params.signal_norm
    reference = explicit_outcomes(params, range(40), 20 / dim, 40, head_noise)
    found = p_values(drawn_outcomes(params, range(400), 20 / dim, 40, head_noise), reference)
    assert min(found.values()) > 1e-3, found


@pytest.mark.parametrize(("dim", "rank"), [(3, 3), (34, 34), (35, 35), (500, 35)])
def test_a_head_that_is_not_aligned_has_a_component_orthogonal_to_both_signals(dim, rank):
    """A further coordinate of every token is standard normal, without a signal: Kolmogorov-Smirnov at 1e-3."""
    params = TokenSelectionParams(dim=dim, signal_norm=4.0, **TINY)
    rng = np.random.default_rng(dim)
    sets = [selection.draw(params, rng, 0.7) for _ in range(100)]
    expected = np.zeros(rank)
    expected[:3] = 1 / math.sqrt(32), -1 / math.sqrt(32), 0.7
    for training in sets:
        np.testing.assert_allclose(training.head, expected, rtol=1e-14)
        np.testing.assert_allclose(training.values, (training.tokens @ expected).reshape(8, 4), atol=1e-14)
    assert stats.kstest(np.concatenate([x.tokens[:, 2] for x in sets]), "norm").pvalue > 1e-3


FLAWS = {
    "more dimensions": lambda params, rng: selection.draw(params.replace(dim=130), rng),
    "W_0 15 % too large": lambda params, rng: scaled(selection.draw(params, rng), weights=1.15, outside=1.15),
    "nothing outside the span": lambda params, rng: scaled(selection.draw(params, rng), outside=0.0),
    "d degrees of freedom outside": lambda params, rng: scaled(selection.draw(params, rng), outside=(100 / 66) ** 0.5),
    "another head": lambda params, rng: selection.draw(params, rng, 1.5 / params.signal_norm),
}


def scaled(training, **factors):
    return replace(training, **{name: factor * getattr(training, name) for name, factor in factors.items()})


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_comparison_of_outcomes_sees_a_wrong_law(flaw):
    params = at_signal(2.0, 100, **TINY)
    reference = explicit_outcomes(params, range(40), 0.2, 40)
    wrong = selection.TrainingSet.stack(FLAWS[flaw](params, np.random.default_rng([7, s])) for s in range(400))
    assert min(p_values(outcomes_of(wrong, 0.2, 40), reference).values()) < 1e-3


def from_explicit(params, seeds):
    sets = []
    for seed in seeds:
        data, initial = explicit_start(params, [13, seed])
        sets.append(selection.from_data(data, initial, params.weak_ratio)[0])
    return sets


def check_outcomes_at_full_size(n_snr2, dim):
    params = at_signal(n_snr2, dim)
    drawn = [selection.draw(params, np.random.default_rng([17, s])) for s in range(40)]
    ours, reference = (
        np.stack([outcomes_of(x, STEP_SIZE, 1000) for x in sets], axis=-1)
        for sets in (drawn, from_explicit(params, range(40)))
    )
    found = p_values(ours, reference)
    assert min(found.values()) > 1e-3, found


def test_outcomes_at_the_published_size_over_forty_seeds():
    """n = 20, T = 8, d = 300 (outside, rectangular): Kolmogorov-Smirnov, 7 outcomes at 1e-3, false alarm 0.7 %."""
    check_outcomes_at_full_size(4.0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [160, 161, 162, 163, 325, 600])
@pytest.mark.parametrize("regime", REGIMES)
def test_outcomes_at_the_published_size_across_the_boundaries(regime, dim):
    """n = 20, T = 8, r = 162: false alarm 12 % for all cases."""
    check_outcomes_at_full_size(REGIMES[regime], dim)


def test_outcomes_are_continuous_in_the_dimension():
    """r = 14, 2 r = 28: mean outcomes of 500 seeds at each d = 9...36 lie on a cubic in log d, chi-squared at 1e-3.

    False alarm 0.7 % if the curve is a cubic; at this accuracy it is.
    """
    dims = np.arange(9, 37)
    means, errors = [], []
    for dim in dims:
        params = TokenSelectionParams(n_train=4, n_tokens=3, dim=int(dim), signal_norm=3.0)
        found = drawn_outcomes(params, range(1000 * int(dim), 1000 * int(dim) + 500), 0.3, 60)
        means.append(found.mean(axis=-1))
        errors.append(found.std(axis=-1, ddof=1) / math.sqrt(500))
    for mean, error in zip(np.transpose(means), np.transpose(errors), strict=True):
        fit = np.polynomial.Polynomial.fit(np.log(dims), mean, 3, w=1 / error)
        residual = (((mean - fit(np.log(dims))) / error) ** 2).sum()
        assert stats.chi2.sf(residual, len(dims) - 4) > 1e-3


# --- saturated attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [5, 40, 200, 600])
@pytest.mark.parametrize("n_tokens", [3, 8])
def test_a_saturated_gradient_keeps_its_relative_precision(n_tokens, gap):
    """Attention exp(-gap) away from certainty: dLoss/dlogits against 700 digits; cancellation would leave nothing."""
    rng = np.random.default_rng([n_tokens, gap])
    params = TokenSelectionParams(n_train=4, dim=10**4, n_tokens=n_tokens, signal_norm=20.0, label_noise=0.3)
    training = selection.draw(params, rng)
    logits = rng.uniform(-3, 0, (4, n_tokens)) - gap
    logits[np.arange(4), rng.integers(n_tokens, size=4)] = 0.0
    q = np.linalg.lstsq(training.tokens, logits.ravel(), rcond=None)[0]
    state = selection.State(np.linalg.solve(training.weights, q), training.weights)
    out = selection.outputs(training, state)
    top = np.sort(out.logits, axis=1)
    assert np.all(top[:, -1] - top[:, -2] > 0.99 * gap)
    found = selection.logit_gradient(training, out).reshape(4, n_tokens)
    with mpmath.workdps(700):
        expected = np.zeros((4, n_tokens))
        for i, y in enumerate(training.labels):
            weights = [mpmath.exp(mpmath.mpf(x)) for x in out.logits[i]]
            s = [w / mpmath.fsum(weights) for w in weights]
            values = [mpmath.mpf(v) for v in training.values[i]]
            f = mpmath.fdot(s, values)
            g = -mpmath.mpf(y) / (4 * (1 + mpmath.exp(mpmath.mpf(y) * f)))
            expected[i] = [float(g * w * (v - f)) for w, v in zip(s, values, strict=True)]
    assert np.all(expected != 0)
    # a logit of size `gap` is itself known to gap * 1e-16
    np.testing.assert_allclose(found, expected, rtol=1e-13 + 1e-15 * gap)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_extreme_states_give_finite_numbers_without_warnings(size):
    training = selection.draw(TokenSelectionParams(dim=500, signal_norm=0.01), np.random.default_rng(3))
    assert np.abs(training.values).max() > 100
    state = selection.State(size * np.random.default_rng(4).standard_normal(162), training.weights)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out = selection.outputs(training, state)
        ahead = selection.velocity(training, state)
    np.testing.assert_allclose(out.attention.sum(axis=1), 1.0, rtol=1e-13)
    assert np.all(np.isfinite(ahead.query))
    assert np.all(np.isfinite(ahead.weights))


@pytest.mark.parametrize("margin", [-800.0, -30.0, 0.0, 30.0, 700.0])
def test_the_gradient_keeps_its_precision_at_every_margin(margin):
    """1/(1 + exp(m)) from -800 to 700: values y m - 1, y m, y m + 1, equally attended."""
    labels = np.array([1.0, -1.0])
    tokens = np.zeros((6, 3))
    tokens[:, 0] = np.add.outer(labels * margin, [-1.0, 0.0, 1.0]).ravel()
    scalars = np.asarray(1.0), np.asarray(0.1)
    training = selection.TrainingSet(tokens, np.eye(3)[0], np.eye(3), np.eye(3), labels, labels, *scalars)
    out = selection.outputs(training, selection.initial_state(training))
    np.testing.assert_allclose(labels * out.f, margin, rtol=1e-13, atol=1e-13)
    found = selection.logit_gradient(training, out).reshape(2, 3)
    with mpmath.workdps(50):
        expected = [[float(-y * k / (6 * (1 + mpmath.exp(mpmath.mpf(margin))))) for k in (-1, 0, 1)] for y in labels]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


# --- batches and devices ---------------------------------------------------------------------------------------


def single(training, index):
    return selection.TrainingSet(*(getattr(training, field.name)[index] for field in fields(training)))


def assert_same(ours, reference, tolerance):
    for field in fields(reference):
        a, b = (np.asarray(torch.as_tensor(getattr(s, field.name)).cpu()) for s in (ours, reference))
        assert a.shape == b.shape
        assert relative_difference(a, b) <= tolerance, field.name


def batch_of(n_sets, dim=5000, n_train=7, **point):
    """Sets that differ in signal norm and weak ratio too; n is odd."""
    params = [
        TokenSelectionParams(
            n_train=n_train, dim=dim, n_tokens=4, signal_norm=10.0 + 5 * k, weak_ratio=0.1 * k, **point
        )
        for k in range(n_sets)
    ]
    return selection.TrainingSet.stack(selection.draw(p, np.random.default_rng(k)) for k, p in enumerate(params))


@pytest.mark.parametrize("dim", [10, 40, 5000, 10**12])
def test_a_batch_is_its_single_runs(dim):
    batch = batch_of(3, dim)
    steps, step_size = [0, 1, 10, 100], min(0.01, 20 / dim)
    together = list(selection.gradient_descent(batch, step_size, steps))
    for k in range(3):
        for state, alone in zip(together, selection.gradient_descent(single(batch, k), step_size, steps), strict=True):
            assert_same(selection.State(state.query[k], state.weights[k]), alone, 1e-12)
            out = selection.outputs(batch, state)
            mine = selection.Outputs(out.logits[k], out.attention[k], out.f[k])
            assert_same(mine, selection.outputs(single(batch, k), alone), 1e-12)
            ahead = selection.velocity(batch, state)
            mine = selection.State(ahead.query[k], ahead.weights[k])
            assert_same(mine, selection.velocity(single(batch, k), alone), 1e-11)


def test_a_batch_may_have_several_axes():
    sets = [batch_of(2, dim, n_train=3) for dim in (5000, 6000, 7000)]
    batch = selection.TrainingSet.stack(sets)
    (state,) = selection.gradient_descent(batch, 1e-3, [50])
    assert batch.noisy.shape == (3, 2, 3)
    assert all(x.shape == (3, 2, 12, 12) for x in batch.gram_matrices())
    for i, j in np.ndindex(3, 2):
        (alone,) = selection.gradient_descent(single(sets[i], j), 1e-3, [50])
        assert_same(selection.State(state.query[i, j], state.weights[i, j]), alone, 1e-12)


@pytest.mark.parametrize("name", devices.available())
@pytest.mark.parametrize("batched", [True, False])
def test_torch_on_every_device_is_numpy(name, batched):
    training = batch_of(3) if batched else single(batch_of(1), 0)
    there = training.to(name)
    tolerance = 1e-3 if name == "mps" else 1e-11
    for ours, reference in zip(
        selection.gradient_descent(there, 5e-3, [0, 100]),
        selection.gradient_descent(training, 5e-3, [0, 100]),
        strict=True,
    ):
        assert ours.weights.device.type == torch.device(name).type
        assert_same(ours, reference, tolerance)
        assert_same(selection.outputs(there, ours), selection.outputs(training, reference), tolerance)
        assert_same(selection.velocity(there, ours), selection.velocity(training, reference), tolerance)
        assert_same(
            selection_population.fresh_sample(there, ours),
            selection_population.fresh_sample(training, reference),
            tolerance,
        )
    for a, b in zip(there.gram_matrices(), training.gram_matrices(), strict=True):
        assert relative_difference(a.cpu().numpy(), b) <= tolerance


@pytest.mark.parametrize("name", devices.available())
def test_training_on_a_device_leaves_the_set_as_it_was(name):
    there = batch_of(2).to(name)
    before = there.weights.clone()
    states = list(selection.gradient_descent(there, 5e-3, [1, 2, 3]))
    assert torch.equal(there.weights, before)
    assert not torch.equal(states[1].weights, states[2].weights)


def test_the_cpu_is_numpy_and_an_unknown_device_is_refused():
    training = single(batch_of(1), 0)
    assert training.on("cpu") is training
    with pytest.raises(ParameterError, match=r"^device must be one of"):
        training.on("abacus")


# --- labels and parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_train", "label_noise", "n_noisy"), [(2, 0.0, 0), (2, 0.2, 1), (3, 0.4, 2), (20, 0.2, 4)])
def test_flipped_labels_are_the_noisy_ones(n_train, label_noise, n_noisy):
    params = TokenSelectionParams(n_train=n_train, n_tokens=3, label_noise=label_noise)
    training = selection.draw(params, np.random.default_rng(0))
    assert (training.n_train, training.n_tokens) == (n_train, 3)
    assert training.noisy.sum() == n_noisy
    assert abs(training.clean_labels.sum()) == n_train % 2
    np.testing.assert_array_equal(training.noisy, training.labels == -training.clean_labels)


def test_a_draw_is_set_by_its_generator():
    params = TokenSelectionParams()
    one, same, other = (selection.draw(params, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert_same(one, same, 0.0)
    assert relative_difference(one.weights, other.weights) > 0.1


def test_irrelevant_tokens_are_added_up():
    tokens = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 1.0, 0.0, 2.0, 0.0, 2.0]])
    np.testing.assert_array_equal(selection.by_role(tokens), [[1, 2, 3, 15], [0, 1, 0, 4]])
    np.testing.assert_array_equal(selection.by_role(tokens[:, :3]), [[1, 2, 3, 0], [0, 1, 0, 0]])
    assert len(selection.ROLES) == 4


@pytest.mark.parametrize("steps", [[10, 5], [-1], [2.5]])
def test_steps_must_be_whole_and_in_order(steps):
    training = selection.draw(TokenSelectionParams(n_train=4, dim=50), np.random.default_rng(0))
    with pytest.raises(ParameterError, match="steps must be whole numbers of at least 0 that do not decrease, got"):
        list(selection.gradient_descent(training, 0.01, steps))
