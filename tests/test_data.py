"""The data models draw what the papers define. Statistical tests fix their seeds; false alarms as stated."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benign_attention.data import (
    SingleHeadParams,
    TokenSelectionParams,
    draw_labels,
    draw_single_head,
    draw_token_selection,
    from_natural_units,
    signal_coordinates,
)
from benign_attention.parameters import ParameterError

sizes = st.integers(2, 40)


def sorted_rows(tokens):
    return tokens[np.lexsort(tokens.T)]


@given(n=sizes, dim=st.integers(3, 30), n_tokens=st.integers(2, 6), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_a_sample_holds_exactly_its_signal_and_its_noise_tokens(n, dim, n_tokens, seed):
    data = draw_single_head(n, dim, n_tokens, 3.0, 0.2, np.random.default_rng(seed))
    assert data.tokens.shape == (n, n_tokens, dim)
    for i in range(n):
        signal = data.signals[0 if data.clean_labels[i] == 1 else 1]
        np.testing.assert_array_equal(data.tokens[i, data.position[i]], signal)
        expected = np.vstack([signal, data.noise[i]])
        np.testing.assert_array_equal(sorted_rows(data.tokens[i]), sorted_rows(expected))


@given(dim=st.integers(3, 50), signal_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_signals_are_orthogonal_to_each_other_and_to_the_noise(dim, signal_norm, seed):
    data = draw_single_head(5, dim, 3, signal_norm, 0.1, np.random.default_rng(seed))
    np.testing.assert_allclose(np.linalg.norm(data.signals, axis=1), signal_norm)
    assert data.signals[0] @ data.signals[1] == 0
    assert not np.any(data.noise @ data.signals.T)


def test_noise_is_standard_gaussian_in_the_complement_of_the_signals():
    """Kolmogorov-Smirnov at 1e-3, and every covariance entry within 5 standard errors (false alarm below 1e-4)."""
    noise = draw_single_head(4000, 7, 3, 2.0, 0.1, np.random.default_rng(1)).noise[..., 2:].reshape(-1, 5)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    error = math.sqrt(len(noise))
    assert np.all(np.abs(noise.T @ noise / len(noise) - np.eye(5)) < 5 * np.sqrt(1 + np.eye(5)) / error)


@pytest.mark.parametrize("n_tokens", [2, 3, 5])
def test_the_signal_stands_anywhere_with_equal_probability_whatever_the_label(n_tokens):
    """Two chi-squared tests at level 1e-3."""
    data = draw_single_head(20_000, 3, n_tokens, 1.0, 0.2, np.random.default_rng(2))
    counts = np.bincount(data.position, minlength=n_tokens)
    assert len(counts) == n_tokens
    assert stats.chisquare(counts).pvalue > 1e-3
    table = [np.bincount(data.position[data.labels == y], minlength=n_tokens) for y in (-1, 1)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("label_noise", [0.05, 0.2, 0.45])
def test_labels_are_balanced_and_flip_independently_of_the_class(label_noise):
    """Three exact or asymptotic tests at level 1e-3."""
    clean, labels = draw_labels(50_000, label_noise, np.random.default_rng(3))
    assert set(clean) == set(labels) == {-1.0, 1.0}
    flipped = clean != labels
    assert stats.binomtest(int((clean > 0).sum()), clean.size, 0.5).pvalue > 1e-3
    assert stats.binomtest(int(flipped.sum()), clean.size, label_noise).pvalue > 1e-3
    table = [[np.sum(flipped & (clean == y)), np.sum(~flipped & (clean == y))] for y in (-1, 1)]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_without_label_noise_no_label_flips():
    clean, labels = draw_labels(1000, 0.0, np.random.default_rng(4))
    np.testing.assert_array_equal(clean, labels)


def test_natural_units_of_the_figure_configuration_and_back():
    params = SingleHeadParams()
    assert params.natural_c == pytest.approx(30 * math.sqrt(200 / 40_000))
    assert params.natural_b == pytest.approx(5.0)
    assert params.snr == pytest.approx(0.15)
    assert params.natural_c == pytest.approx(params.snr * math.sqrt(200))
    assert from_natural_units(params.natural_c, params.natural_b, 200, 40_000) == pytest.approx((30.0, 0.025))


@given(c=st.floats(1e-2, 1e2), b=st.floats(1e-3, 1e3), n=st.integers(2, 10**4), dim=st.integers(3, 10**9))
def test_natural_units_invert(c, b, n, dim):
    signal_norm, step_size = map(float, from_natural_units(c, b, n, dim))
    params = SingleHeadParams(n_train=n, dim=dim, signal_norm=signal_norm, step_size=step_size)
    assert (params.natural_c, params.natural_b) == pytest.approx((c, b))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_train": 1}, "n_train must be a whole number in [2, 1e+09], got 1"),
        ({"n_train": 20.0}, "n_train must be a whole number in [2, 1e+09], got 20.0"),
        ({"dim": 2}, "dim must be a whole number in [3, 1e+15], got 2"),
        ({"dim": 10**16}, "dim must be a whole number in [3, 1e+15], got 10000000000000000"),
        ({"n_tokens": 2}, "n_tokens must be a whole number of at least 3, got 2"),
        ({"signal_norm": 0.0}, "signal_norm must be a number in [1e-15, 1e+15], got 0.0"),
        ({"signal_norm": -5.0}, "signal_norm must be a number in [1e-15, 1e+15], got -5.0"),
        ({"signal_norm": math.inf}, "signal_norm must be a number in [1e-15, 1e+15], got inf"),
        ({"signal_norm": "20"}, "signal_norm must be a number in [1e-15, 1e+15], got '20'"),
        ({"weak_ratio": -0.1}, "weak_ratio must be a number in [0, 1000], got -0.1"),
        ({"weak_ratio": math.nan}, "weak_ratio must be a number in [0, 1000], got nan"),
        ({"label_noise": 0.5}, "label_noise must be a number in [0, 0.5), got 0.5"),
        ({"label_noise": -0.1}, "label_noise must be a number in [0, 0.5), got -0.1"),
        ({"label_noise": None}, "label_noise must be a number in [0, 0.5), got None"),
        ({"signal": 3.0}, "signal is not a parameter; the parameters are "),
    ],
)
def test_a_bad_token_selection_parameter_is_named_in_one_line(change, message):
    with pytest.raises(ParameterError) as caught:
        TokenSelectionParams(**change)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("n", "percent"), [(20, 20), (20, 0), (21, 20), (7, 45), (3, 49), (2, 40), (10, 30), (100, 7), (25, 28), (50, 14)]
)
def test_token_selection_flips_the_rounded_up_share_evenly_over_balanced_classes(n, percent):
    """The count in whole numbers: ceil(n percent / 100), also where n * label_noise is not exact in floating point."""
    params = TokenSelectionParams(n_train=n, label_noise=percent / 100, dim=5)
    data = draw_token_selection(params, np.random.default_rng(n))
    sizes = [np.sum(data.clean_labels == y) for y in (1, -1)]
    flips = [np.sum((data.clean_labels == y) & (data.labels != y)) for y in (1, -1)]
    assert sum(sizes) == n
    assert abs(sizes[0] - sizes[1]) <= 1
    assert sum(flips) == -(-n * percent // 100)
    assert abs(flips[0] - flips[1]) <= 1


def test_every_sample_is_as_likely_to_be_flipped():
    """Chi-squared at level 1e-3 (over classes of 10, 2 flips each)."""
    rng = np.random.default_rng(5)
    params = TokenSelectionParams(dim=3)
    counts = np.zeros(params.n_train)
    for _ in range(2000):
        data = draw_token_selection(params, rng)
        counts += data.labels != data.clean_labels
    for y in (1, -1):
        assert np.sum(counts[data.clean_labels == y]) == 4000
    # within a class the two flips are drawn without replacement: variance of a count is smaller by 8/9
    statistic = np.sum((counts - 400) ** 2 / 400) * 9 / 8
    assert stats.chi2.sf(statistic, 18) > 1e-3
    assert stats.chi2.cdf(statistic, 18) > 1e-4


def test_token_selection_tokens_have_the_defined_means_and_unit_covariance():
    """Means within 5 standard errors and noise Gaussian at level 1e-3 (false alarm below 2e-3)."""
    params = TokenSelectionParams(n_train=4000, dim=6, n_tokens=5, signal_norm=7.0, weak_ratio=0.3)
    data = draw_token_selection(params, np.random.default_rng(6))
    assert data.tokens.shape == (4000, 5, 6)
    np.testing.assert_allclose(data.signals @ data.signals.T, 49.0 * np.eye(2))
    expected = np.zeros((4000, 5, 6))
    for i, y in enumerate(data.clean_labels):
        own, other = data.signals if y > 0 else data.signals[::-1]
        expected[i, :3] = [own, 0.3 * own, 0.3 * other]
    noise = data.tokens - expected
    for y in (1, -1):
        means = noise[data.clean_labels == y].mean(axis=0)
        assert np.all(np.abs(means) < 5 / math.sqrt(2000))
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    flat = noise.reshape(4000, -1)
    assert np.all(np.abs(flat.T @ flat / 4000 - np.eye(30)) < 5 * np.sqrt(1 + np.eye(30)) / math.sqrt(4000))


@pytest.mark.parametrize(("n", "n_tokens", "dim"), [(2, 3, 3), (3, 3, 4), (7, 9, 5)])
def test_the_smallest_and_odd_token_selection_sets(n, n_tokens, dim):
    params = TokenSelectionParams(n_train=n, n_tokens=n_tokens, dim=dim, label_noise=0.0, weak_ratio=0.0)
    data = draw_token_selection(params, np.random.default_rng(n))
    assert data.tokens.shape == (n, n_tokens, dim)
    np.testing.assert_array_equal(data.labels, data.clean_labels)
    assert data.clean_labels.sum() == n % 2
    without_signal = data.tokens.copy()
    without_signal[:, 0] -= data.signals[(data.clean_labels < 0).astype(int)]
    assert np.abs(without_signal).max() < 6


def test_signal_coordinates_are_the_signals_of_the_three_roles():
    params = TokenSelectionParams(n_train=2, n_tokens=5, signal_norm=4.0, weak_ratio=0.25)
    plus, minus = signal_coordinates(params, np.array([1.0, -1.0]))
    np.testing.assert_array_equal(plus, [[4, 0], [1, 0], [0, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(minus, plus[:, ::-1])
