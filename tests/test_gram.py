"""Wishart draws against drawn tokens. Seeds are fixed; each test states its false-alarm rate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benign_attention.gram import noise_gram, noise_rows


def drawn_gram(n_rows, dof, rng):
    tokens = rng.standard_normal((n_rows, dof))
    return tokens @ tokens.T


@given(n_rows=st.integers(1, 30), dof=st.integers(1, 60), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_a_draw_is_a_positive_semidefinite_matrix_of_the_right_rank(n_rows, dof, seed):
    rows = noise_rows(n_rows, dof, np.random.default_rng(seed))
    gram = noise_gram(n_rows, dof, np.random.default_rng(seed))
    assert rows.shape == (n_rows, min(n_rows, dof))
    np.testing.assert_array_equal(gram, rows @ rows.T)
    eigenvalues = np.linalg.eigvalsh(gram)
    assert np.sum(eigenvalues > 1e-11 * eigenvalues[-1]) <= min(n_rows, dof)
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]


@pytest.mark.parametrize("dof", [30, 10**3, 10**9, 10**15])
def test_size_does_not_depend_on_the_dimension(dof):
    rows = noise_rows(30, dof, np.random.default_rng(0))
    assert rows.shape == (30, 30)
    np.testing.assert_array_equal(rows, np.tril(rows))
    assert np.all(np.isfinite(rows))


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 10, 1000, 10**9])
def test_moments(dof):
    """Seven means over 20000 draws, each within 5 standard errors: false alarm about 1e-5 for each dof.

    For rows x, y, z: E|x|^2 = d, Var|x|^2 = 2d, E(xy)^2 = d, E(xy)(yz)(zx) = d, E|x|^2|y|^2 = d^2,
    E|x|^2 (xy)^2 = d(d + 2), E(xy) = 0.
    """
    rng = np.random.default_rng(dof)
    g = np.array([noise_gram(3, dof, rng) for _ in range(20_000)])
    xx, yy = (g[:, 0, 0] - dof) / np.sqrt(dof), (g[:, 1, 1] - dof) / np.sqrt(dof)
    xy, yz, zx = g[:, 0, 1] / np.sqrt(dof), g[:, 1, 2] / np.sqrt(dof), g[:, 2, 0] / np.sqrt(dof)
    moments = [
        (xx, 0),
        (xx**2, 2),
        (xy, 0),
        (xy**2, 1),
        (xy * yz * zx, dof**-0.5),
        (xx * yy, 0),
        (xx * xy**2, 2 * dof**-0.5),
        (g[:, 2, 2] / dof, 1),
    ]
    for sample, mean in moments:
        assert abs(sample.mean() - mean) < 5 * sample.std() / np.sqrt(sample.size)


@pytest.mark.parametrize(("n_rows", "dof"), [(8, 7), (8, 8), (8, 9), (8, 40), (5, 400), (6, 1), (12, 5)])
def test_a_draw_has_the_law_of_drawn_tokens(n_rows, dof):
    """Two-sample Kolmogorov-Smirnov on six statistics, 3000 draws each, at 1e-3: false alarm 0.6 % for each case."""
    rng = np.random.default_rng(1000 * n_rows + dof)
    draws = [np.array([draw(n_rows, dof, rng) for _ in range(3000)]) for draw in (noise_gram, drawn_gram)]
    u = np.random.default_rng(0).standard_normal(n_rows)

    def statistics(g):
        eigenvalues = np.linalg.eigvalsh(g)
        yield eigenvalues[:, -1]
        yield eigenvalues[:, max(n_rows - dof, 0)]
        yield g[:, 0, -1]
        yield g[:, -1, -1]
        yield (g @ u)[:, 1] / u[0]
        yield np.abs(np.triu(g, 1)).max(axis=(1, 2))

    for ours, reference in zip(*map(statistics, draws), strict=True):
        assert stats.ks_2samp(ours, reference).pvalue > 1e-3


@pytest.mark.parametrize("dof", [10, 10**6])
def test_inner_products_over_a_length_are_standard_normal_and_below_the_union_bound(dof):
    """3000 draws: Kolmogorov-Smirnov at 1e-3, and violations of a bound that holds with probability 0.9 or more.

    More than 0.127 of them would be 5 standard errors above 0.1: false alarm 1e-3 for each dof.
    """
    m, delta, rng = 6, 0.1, np.random.default_rng(dof)
    g = np.array([noise_gram(m, dof, rng) for _ in range(3000)])
    lengths = np.sqrt(np.diagonal(g, axis1=1, axis2=2))
    first, second = np.triu_indices(m, 1)
    ratios = g[:, first, second] / lengths[:, second]
    assert stats.kstest(ratios[:, 0], "norm").pvalue > 1e-3
    bound = np.sqrt(2 * np.log(m * (m - 1) / (2 * delta)))
    assert (np.abs(ratios) > bound).any(axis=1).mean() < 0.127


def test_one_degree_of_freedom_is_a_product_of_numbers():
    gram = noise_gram(4, 1, np.random.default_rng(0))
    np.testing.assert_allclose(gram**2, np.outer(np.diag(gram), np.diag(gram)))
