"""Closed forms and the orthogonal limit of token selection, against derivations done another way."""

import math

import mpmath
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from benign_attention import flow, selection, selection_population
from benign_attention import selection_theory as theory
from benign_attention.data import TokenSelectionParams

POINT = theory.LimitPoint(n_snr2=0.5, n_tokens=8, label_noise=0.2, weak_ratio=0.1)


@pytest.mark.parametrize("n_others", [2, 7, 31])
def test_clock_is_linear_where_the_gap_moves_at_the_rate_of_s_times_one_minus_s(n_others):
    def rate(_, gap):
        s = 1 / (1 + n_others * np.exp(-gap))
        return s * (1 - s)

    times = np.linspace(0, 1000, 21)
    gap = solve_ivp(rate, (0, 1000), [0.0], t_eval=times, rtol=1e-10, atol=1e-12).y[0]
    clock = theory.gap_clock(gap, n_others)
    np.testing.assert_allclose(clock - clock[0], times, rtol=1e-7, atol=1e-7)
    papers = theory.gap_clock(gap, n_others + 1)
    early, late = np.diff(papers)[0] / times[1], np.diff(papers)[-1] / times[1]
    assert abs(early / late - 1) > 0.005 or n_others > 20


@pytest.mark.parametrize(("n_tokens", "weak_ratio"), [(3, 0.1), (8, 0.0), (8, 0.1), (16, 0.3), (8, 0.995)])
def test_selecting_logit_gives_half_the_attention(n_tokens, weak_ratio):
    q = theory.signal_logit_to_select(n_tokens, weak_ratio)
    logits = [q, weak_ratio * q, weak_ratio * q] + [0.0] * (n_tokens - 3)
    assert np.exp(q) / np.exp(logits).sum() == pytest.approx(0.5, rel=1e-10)


def explicit_limit(point, tau_max, n=20):
    """The limit as a kernel flow of n whole samples with all their tokens: dz/dtau = -n (I + x/n signals) c."""
    T, rho = point.n_tokens, point.weak_ratio
    clean = np.where(np.arange(n) % 2 == 0, 1, -1)
    y = clean * np.where(np.arange(n) < round(n * point.label_noise), -1, 1)
    carried = np.zeros((n, T, 2))
    for i, c in enumerate(clean):
        own = int(c < 0)
        carried[i, 0, own], carried[i, 1, own], carried[i, 2, 1 - own] = 1, rho, rho
    gamma = (carried[..., 0] - carried[..., 1]) / math.sqrt(2)
    rows = carried.reshape(n * T, 2)
    kernel = np.eye(n * T) + point.n_snr2 / n * rows @ rows.T

    def velocity(_, z):
        s = np.exp(z.reshape(n, T) - z.reshape(n, T).max(axis=1, keepdims=True))
        s /= s.sum(axis=1, keepdims=True)
        f = (s * gamma).sum(axis=1)
        pull = (y / (1 + np.exp(y * f)))[:, None] * s * (gamma - f[:, None])
        return kernel @ pull.ravel()

    z = solve_ivp(velocity, (0, tau_max), np.zeros(n * T), rtol=1e-9, atol=1e-11).y[:, -1].reshape(n, T)
    return z, clean == y


def test_limit_is_the_kernel_flow_of_whole_samples():
    z, is_clean = explicit_limit(POINT, 300.0)
    (state,) = theory.limit_flow(POINT, [300.0])
    ours = state.own + state.signal * np.array([1.0, 0.1, 0.1, 0.0])
    np.testing.assert_allclose(z[is_clean][:, :4], np.tile(ours[0], (16, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z[~is_clean][:, :4], np.tile(ours[1], (4, 1)), rtol=1e-5, atol=1e-6)


def test_limit_is_what_the_engine_does_in_very_high_dimension():
    d, n = 10**12, 20
    params = TokenSelectionParams(n_train=n, dim=d, signal_norm=math.sqrt(POINT.n_snr2 * d / n))
    training = selection.draw(params, np.random.default_rng(0))
    taus = [10.0, 100.0, 1e4]
    points = flow.gradient_flow(flow.token_selection(training), [3 * n / d * tau for tau in taus])
    for point, limit in zip(points, theory.limit_flow(POINT, taus), strict=True):
        attention = selection.outputs(training, point.state).attention
        expected = theory.limit_attention(POINT, limit)
        for noisy, row in enumerate(expected):
            chosen = training.noisy == bool(noisy)
            np.testing.assert_allclose(attention[chosen][:, :4], np.tile(row, (chosen.sum(), 1)), atol=2e-3)
        fresh = selection_population.test_quantities(selection_population.fresh_sample(training, point.state))
        assert fresh.attention.value[0] == pytest.approx(theory.limit_fresh_attention(POINT, limit), abs=2e-3)


@pytest.mark.parametrize(("n_tokens", "label_noise", "weak_ratio"), [(8, 0.2, 0.1), (3, 0.3, 0.1), (16, 0.0, 0.2)])
def test_delay_slope_is_the_slope_of_the_limit_at_small_x(n_tokens, label_noise, weak_ratio):
    taus = np.geomspace(1, 1e290, 4000)

    def log_selection(x):
        point = theory.LimitPoint(x, n_tokens, label_noise, weak_ratio)
        attention = [theory.limit_fresh_attention(point, s) for s in theory.limit_flow(point, taus)]
        return np.interp(0.5, attention, np.log(taus))

    slope = (log_selection(0.02) - log_selection(0.025)) / (1 / 0.02 - 1 / 0.025)
    assert theory.delay_slope(n_tokens, label_noise, weak_ratio) == pytest.approx(slope, rel=0.01)


def test_clock_keeps_its_value_where_the_gap_is_large():
    gap = 130.0
    exact = 2 * mpmath.mpf(gap) + 2 * mpmath.sinh(mpmath.mpf(gap) - mpmath.log(7))
    assert theory.gap_clock(gap, 7) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(
    ("n_tokens", "label_noise", "weak_ratio"), [(8, 0.2, 0.0), (8, 0.2, 0.1), (3, 0.2, 0.0), (3, 0.3, 0.2)]
)
def test_noisy_samples_turn_first_to_the_relevant_token_just_above_the_threshold(n_tokens, label_noise, weak_ratio):
    for factor in (0.99, 1.01):
        x = factor * theory.first_turn(n_tokens, label_noise, weak_ratio)
        point = theory.LimitPoint(x, n_tokens, label_noise, weak_ratio)
        (state,) = theory.limit_flow(point, [1e-3])
        assert (theory.limit_attention(point, state)[1, 0] > 1 / n_tokens) == (factor > 1)


def test_what_never_selects_has_an_infinite_delay():
    assert theory.signal_logit_to_select(8, 1.0) == math.inf
    assert theory.delay_slope(8, 0.2, 1.5) == math.inf
    assert theory.first_turn(8, 0.499, 0.1) == math.inf
