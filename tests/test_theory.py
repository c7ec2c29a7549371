"""Closed forms and the orthogonal limit: against training on exactly orthogonal tokens, and against d/n growing."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_ndtr

from benign_attention import explicit, population, reduced, theory
from benign_attention.data import SingleHeadData, SingleHeadParams, from_natural_units
from benign_attention.gram import noise_gram

SCALARS = ("signal_logit", "signal_value", "clean_logit", "noisy_logit", "clean_value", "noisy_value")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def labels_of(sizes, noisy):
    """Clean and training labels with `sizes` samples and `noisy` flips in the two classes."""
    clean = np.repeat([1.0, -1.0], sizes)
    flipped = np.concatenate([np.arange(size) < k for size, k in zip(sizes, noisy, strict=True)])
    return clean, np.where(flipped, -clean, clean)


def orthogonal_data(sizes, noisy, n_tokens, signal_norm, noise_norm):
    n, k = sum(sizes), n_tokens - 1
    clean, labels = labels_of(sizes, noisy)
    axes = np.eye(n * k + 2)
    return SingleHeadData(
        signal_norm * axes[:2], clean, labels, noise_norm * axes[2:].reshape(n, k, -1), np.arange(n) % n_tokens
    )


@pytest.mark.parametrize(
    ("n_tokens", "sizes", "noisy"), [(2, (10, 10), (1, 1)), (3, (10, 4), (2, 1)), (5, (4, 6), (0, 2))]
)
@pytest.mark.parametrize(("c", "b"), [(2.0, 5.0), (0.3, 5.0), (5.0, 5.0), (2.0, 20.0)])
def test_the_limit_is_descent_on_exactly_orthogonal_tokens(n_tokens, sizes, noisy, c, b):
    """Autograd on tokens that are orthogonal and all of norm sqrt(d); classes differ in size and in label noise."""
    n, d = sum(sizes), 400
    signal_norm, step_size = map(float, from_natural_units(c, b, n, d))
    data = orthogonal_data(sizes, noisy, n_tokens, signal_norm, math.sqrt(d))
    model = explicit.SingleHeadAttention(data.signals.shape[1])
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    limits = [
        theory.limit_gradient_descent(theory.LimitPoint(c, b, k / size, n_tokens, size / n), 80)
        for size, k in zip(sizes, noisy, strict=True)
    ]
    descent = explicit.gradient_descent(model, tokens, labels, step_size, 80)
    for first, second, _ in zip(*limits, descent, strict=True):
        p, v = model.p.detach().numpy(), model.v.detach().numpy()
        attention = model.attention(tokens).detach().numpy()[np.arange(n), data.position]
        margins = data.labels * model(tokens).detach().numpy()
        logits, values = data.noise @ p, data.labels[:, None] * (data.noise @ v)
        scale_p, scale_v = np.abs(logits).max() + np.abs(data.signals @ p).max(), np.abs(values).max()
        for k, (y, limit) in enumerate(zip((1, -1), (first, second), strict=True)):
            own = data.clean_labels == y
            assert data.signals[k] @ p == pytest.approx(limit.signal_logit, abs=1e-10 * scale_p + 1e-15)
            assert y * (data.signals[k] @ v) == pytest.approx(
                limit.signal_value, abs=1e-10 * (scale_v + abs(limit.signal_value))
            )
            for kind, selected in (("clean", own & (data.labels == y)), ("noisy", own & (data.labels != y))):
                shape = (selected.sum(), n_tokens - 1)
                for name, ours, scale in (("logit", logits, scale_p), ("value", values, scale_v)):
                    expected = np.full(shape, getattr(limit, f"{kind}_{name}"))
                    np.testing.assert_allclose(ours[selected], expected, rtol=0, atol=1e-10 * scale + 1e-15)
                for name, ours in (("attention", attention), ("margin", margins)):
                    expected = np.full(shape[0], getattr(limit, f"{kind}_{name}"))
                    np.testing.assert_allclose(ours[selected], expected, rtol=1e-9, atol=1e-10)


@given(
    c=st.floats(0.05, 10),
    b=st.floats(1e-3, 50),
    label_noise=st.floats(0, 0.49),
    n_tokens=st.integers(2, 8),
)
@settings(deadline=None)
def test_two_steps_in_closed_form(c, b, label_noise, n_tokens):
    point = theory.LimitPoint(c, b, label_noise, n_tokens)
    *_, state = theory.limit_gradient_descent(point, 2)
    closed = theory.two_step_closed_form(point)
    assert closed.n_tokens == n_tokens
    for scale, names in (
        (b**2 * (1 + c**4), SCALARS[::2][:1] + SCALARS[2:4]),
        (b * (1 + c**2), (SCALARS[1], *SCALARS[4:])),
    ):
        for name in names:
            ours, expected = getattr(closed, name), getattr(state, name)
            assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15 * scale)
    for name in ("clean_attention", "noisy_attention", "clean_margin", "noisy_margin"):
        assert getattr(closed, name) == pytest.approx(float(getattr(state, name)), rel=1e-11, abs=1e-12)


def test_clean_attention_exceeds_one_over_t_exactly_where_the_corollary_says():
    """The inequality of cor-select, written out again; points closer to equality than rounding are left out."""
    grid = np.meshgrid(np.geomspace(0.1, 10, 40), np.geomspace(0.01, 50, 40), [0.0, 0.05, 0.2, 0.4], indexing="ij")
    c, b, eta = grid
    for T in (2, 3, 8):
        k, e = T - 1, 1 - 2 * eta
        S, N = b * c**2 * e / (4 * T), b / (2 * T)
        r = (1 + np.exp((S + k * N) / T)) / (1 + np.exp((k * N - S) / T))
        left, right = (S - N) * (1 + c**2 * k / 2 * (1 - eta)), c**2 * k / 2 * eta * r * (S + N)
        attention = theory.two_step_closed_form(theory.LimitPoint(c, b, eta, T)).clean_attention
        decided = (np.abs(left - right) > 1e-9 * (np.abs(left) + right)) & (np.abs(attention - 1 / T) > 1e-14)
        assert decided.mean() > 0.95
        assert 0.05 < (left > right)[decided].mean() < 0.95
        np.testing.assert_array_equal((attention > 1 / T)[decided], (left > right)[decided])


def test_the_first_step_of_the_limit():
    """V = b c^2 e pi / (2T), noise values b / (2T), p = 0."""
    state = next(theory.limit_gradient_descent(theory.LimitPoint(2.0, 5.0, 0.1, 3, 0.25), 1))
    assert state.signal_value == pytest.approx(5 * 4 * 0.8 * 0.25 / 6)
    assert state.clean_value == state.noisy_value == pytest.approx(5 / 6)
    assert state.signal_logit == state.clean_logit == state.noisy_logit == 0
    assert state.clean_attention == state.noisy_attention == pytest.approx(1 / 3)


def test_points_may_be_grids():
    c, b = np.array([0.5, 2.0, 5.0])[:, None], np.array([1.0, 5.0, 7.0, 20.0])
    *_, together = theory.limit_gradient_descent(theory.LimitPoint(c, b, 0.05, 3), 40)
    closed = theory.two_step_closed_form(theory.LimitPoint(c, b, 0.05, 3))
    for i, j in np.ndindex(3, 4):
        *_, alone = theory.limit_gradient_descent(theory.LimitPoint(c[i, 0], b[j], 0.05, 3), 40)
        for name in SCALARS:
            assert getattr(together, name)[i, j] == pytest.approx(float(getattr(alone, name)), rel=1e-13)
        two = theory.two_step_closed_form(theory.LimitPoint(c[i, 0], b[j], 0.05, 3))
        assert closed.clean_attention[i, j] == pytest.approx(float(two.clean_attention), rel=1e-13)


def test_the_limit_point_of_parameters():
    params = SingleHeadParams(n_tokens=3)
    point = theory.LimitPoint.of(params)
    assert astuple(point) == (params.natural_c, params.natural_b, 0.05, 3, 0.5)


def test_the_figure_configuration_reaches_the_attention_seen_in_simulation():
    """Attention after 2, 10, 100, 1000 steps as once measured at n = 200, d = 40000, to its two digits."""
    point = theory.LimitPoint.of(SingleHeadParams())
    states = dict(enumerate(theory.limit_gradient_descent(point, 1000), 1))
    clean = [states[t].clean_attention for t in (2, 10, 100, 1000)]
    noisy = [states[t].noisy_attention for t in (2, 10, 100, 1000)]
    assert clean == pytest.approx([0.58, 0.86, 0.95, 0.97], abs=0.015)
    assert noisy == pytest.approx([0.05, 0.06, 0.04, 0.02], abs=0.015)


def relative_errors(dim, n_steps, seeds, n_tokens=3, c=2.0, b=3.0):
    """RMS deviation of each sample's logits and values from the limit, over the limit's own size, at exact flips."""
    sizes, noisy = (20, 20), (2, 2)
    clean, labels = labels_of(sizes, noisy)
    signal_norm, step_size = map(float, from_natural_units(c, b, 40, dim))
    m = 40 * (n_tokens - 1)
    grams = np.stack([noise_gram(m, dim - 2, np.random.default_rng([dim, seed])) for seed in range(seeds)])
    training = reduced.TrainingSet(grams, np.tile(clean, (seeds, 1)), np.tile(labels, (seeds, 1)))
    *_, state = reduced.gradient_descent(training, signal_norm, step_size, n_steps)
    *_, limit = theory.limit_gradient_descent(theory.LimitPoint(c, b, 0.1, n_tokens), n_steps)
    out = reduced.outputs(training, state, signal_norm)
    is_noisy = labels != clean
    expected = {
        "logits": np.where(is_noisy, limit.noisy_logit, limit.clean_logit),
        "values": labels * np.where(is_noisy, limit.noisy_value, limit.clean_value),
    }
    errors = {
        name: np.sqrt(np.mean((getattr(out, name)[:, 1:] - value) ** 2) / np.mean(value**2))
        for name, value in expected.items()
        if np.any(value)
    }
    signal = {"signal_logit": out.logits[:, 0], "signal_value": clean * out.values[:, 0]}
    for name, ours in signal.items():
        if np.any(getattr(limit, name)):
            errors[name] = np.sqrt(np.mean((ours / getattr(limit, name) - 1) ** 2))
    attention = np.where(is_noisy, limit.noisy_attention, limit.clean_attention)
    errors["attention"] = np.sqrt(np.mean((out.attention[:, 0] - attention) ** 2))
    return errors


@pytest.mark.parametrize(("n_tokens", "n_steps"), [(2, 2), (2, 10), (2, 100), (3, 2), (3, 10), (5, 2)])
def test_deviation_from_the_limit_falls_as_the_square_root_of_n_over_d(n_tokens, n_steps):
    """Slope of log deviation on log d over three decades: -1/2, to .05. The Gram matrix off the diagonal is of order
    sqrt(d) where the diagonal is d; 20 seeds put the slope's standard error near .02.

    Early steps only for several noise tokens: there the noise tokens of one sample compete, and small differences
    between them grow from step to step, whatever d / n.
    """
    dims = [40 * 10**k for k in (3, 4, 5, 6)]
    errors = [relative_errors(dim, n_steps, 20, n_tokens) for dim in dims]
    for name in errors[0]:
        sizes = np.array([e[name] for e in errors])
        slope = np.polyfit(np.log(dims), np.log(sizes), 1)[0]
        assert slope == pytest.approx(-0.5, abs=0.05), name
        assert sizes[-1] < 0.05, name


@pytest.mark.parametrize("ratio", [10, 1000, 10**5])
def test_deviation_after_one_step_has_the_predicted_size(ratio):
    """RMS of (G_ii + sum of ±G_ij) / (d - 2) - 1 over the m noise tokens is sqrt((m + 1) / (d - 2)).

    The row sums are nearly independent: 20 seeds x 80 tokens give 2 % (one standard error); 8 % allowed.
    The recurrence counts d, the data d - 2 noise dimensions: at d / n = 10 that bias is .5 %, below the deviation.
    """
    errors = relative_errors(40 * ratio, 1, 20)
    assert errors["values"] == pytest.approx(math.sqrt(81 / (40 * ratio - 2)), rel=0.08)
    assert errors["signal_value"] < 1e-12


@pytest.mark.parametrize(("n_tokens", "c", "n", "dim"), [(2, 1.0, 60, 2000), (3, 1.5, 40, 1000), (5, 1.0, 60, 2000)])
def test_test_error_after_one_step_against_the_population(n_tokens, c, n, dim):
    """Given the counts, v's noise part has |sum of ±xi|^2 = m chi^2_{d-2} exactly: so does the error's spread.

    100 seeds; Kolmogorov-Smirnov against that law at 1e-3, median within the range of the formula.
    """
    clean, labels = labels_of((n // 2, n // 2), (n // 20, n // 20))
    signal_norm = float(from_natural_units(c, 1.0, n, dim)[0])
    params = SingleHeadParams(n_train=n, dim=dim, n_tokens=n_tokens, signal_norm=signal_norm, label_noise=0.1)
    m = n * (n_tokens - 1)
    grams = np.stack([noise_gram(m, dim - 2, np.random.default_rng([n_tokens, seed])) for seed in range(100)])
    training = reduced.TrainingSet(grams, np.tile(clean, (100, 1)), np.tile(labels, (100, 1)))
    state = next(reduced.gradient_descent(training, signal_norm, 0.3, 1))
    log_error = population.log_test_error(training, state, signal_norm).value
    quantiles = -stats.norm.isf(np.exp(log_error))
    limit = -stats.norm.isf(theory.test_error_after_one_step(params))
    assert limit == pytest.approx(-(c**2) * 0.8 * math.sqrt(dim / n) / (2 * (n_tokens - 1)))
    chi2 = (limit / quantiles) ** 2 * dim
    assert stats.kstest(chi2, stats.chi2(dim - 2).cdf).pvalue > 1e-3
    assert np.median(quantiles) == pytest.approx(limit, rel=5 * 1.25 / math.sqrt(2 * dim * 100) + 2 / dim)


@pytest.mark.parametrize("noisy", [(0, 0), (3, 3), (6, 0), (0, 9)])
def test_test_error_after_one_step_given_the_counts(noisy):
    """Unbalanced flips: each class's error by its own excess; at d / n = 1e6 the population agrees to 1 %."""
    sizes, n, n_tokens, dim = (12, 18), 30, 3, 30 * 10**6
    clean, labels = labels_of(sizes, noisy)
    excess = np.array([(size - 2 * k) / n for size, k in zip(sizes, noisy, strict=True)])
    signal_norm = float(from_natural_units(0.04, 1.0, n, dim)[0])
    params = SingleHeadParams(n_train=n, dim=dim, n_tokens=n_tokens, signal_norm=signal_norm, label_noise=0.1)
    gram = noise_gram(60, dim - 2, np.random.default_rng(0))
    training = reduced.TrainingSet(gram, clean, labels)
    state = next(reduced.gradient_descent(training, signal_norm, 1e-3, 1))
    log_error = population.log_test_error(training, state, signal_norm).value
    assert theory.log_test_error_after_one_step(params, excess) == pytest.approx(float(log_error), rel=0.01)
    by_class = stats.norm.cdf(-(0.04**2) * 1e3 / 2 * excess)
    assert theory.test_error_after_one_step(params, excess) == pytest.approx(by_class.mean(), rel=1e-10)


def test_excess_of_many_runs_broadcasts():
    params = SingleHeadParams(n_train=20, dim=40, signal_norm=2.0)
    excess = np.array([[0.3, 0.2], [0.5, 0.1], [-0.1, 0.4]])
    together = theory.test_error_after_one_step(params, excess)
    assert together.shape == (3,)
    for i in range(3):
        assert together[i] == pytest.approx(float(theory.test_error_after_one_step(params, excess[i])))


@given(
    n=st.integers(2, 1000), dim=st.integers(3, 10**7), n_tokens=st.integers(2, 6),
    signal_norm=st.floats(0.1, 100), label_noise=st.floats(0, 0.49), step_size=st.floats(1e-4, 10),
)  # fmt: skip
@settings(deadline=None)
def test_balanced_test_error_is_one_normal_tail_whatever_the_step(
    n, dim, n_tokens, signal_norm, label_noise, step_size
):
    """Phi(-rho^2 sqrt(n) (1 - 2 eta) / (2 (T - 1) sqrt(d))), also where it underflows."""
    params = SingleHeadParams(
        n_train=n, dim=dim, n_tokens=n_tokens, signal_norm=signal_norm, label_noise=label_noise, step_size=step_size
    )
    z = signal_norm**2 * math.sqrt(n / dim) * (1 - 2 * label_noise) / (2 * (n_tokens - 1))
    ours = theory.log_test_error_after_one_step(params)
    assert ours == pytest.approx(float(log_ndtr(-z)), rel=1e-11)
    assert theory.log_test_error_after_one_step(params.replace(step_size=1.0)) == ours
    assert theory.test_error_after_one_step(params) == pytest.approx(math.exp(ours))


def test_a_saturated_limit_keeps_its_precision():
    """Attention on the noise of order exp(-60): its value and logit still grow by b g (1 - s) / K, and P too."""
    point = theory.LimitPoint(1.0, 2.0, 0.1)
    start = theory.LimitState(2, *map(np.float64, (60.0, 3.0, 0.0, 0.0, 1.0, 2.0)))
    after = theory.limit_step(point, start)
    rest = math.exp(-60)
    g = 1 / (1 + math.exp(3))
    assert after.clean_value - 1 == 0
    assert after.clean_logit == pytest.approx(2 * g * rest * (1 - 3), rel=1e-12)
    assert replace(start, signal_logit=0.0, clean_logit=-60.0).clean_margin == pytest.approx(3)
    small = replace(start, signal_logit=np.float64(0.0), clean_logit=np.float64(-60.0), noisy_logit=np.float64(-60.0))
    moved = theory.limit_step(point, small).signal_logit
    g_noisy = 1 / (1 + math.exp(-3))
    assert moved == pytest.approx(2 * 0.5 * rest * (0.9 * g * (3 - 1) - 0.1 * g_noisy * (3 + 2)), rel=1e-12)
