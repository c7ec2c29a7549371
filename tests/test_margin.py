"""Max-margin solver: coordinates, gradients, and problems whose answer is known."""

import itertools

import numpy as np
import pytest

from benign_attention import margin_limit, reduced
from benign_attention.data import draw_single_head
from benign_attention.hard_margin import hard_margin
from benign_attention.margin import max_margin, polish, refine
from benign_attention.margin_problem import (
    MarginProblem,
    best_head,
    coordinates_of,
    problem_of,
    promised_gain,
    selection_margin,
    state_of,
)
from benign_attention.margin_starts import NAMED, named_selection, starts
from benign_attention.parameters import ParameterError
from benign_attention.reduced import TrainingSet


def drawn(n, dim, c, eta, seed, n_tokens=2):
    stack = reduced.draw(n, dim, n_tokens, eta, [np.random.default_rng(seed)])
    training = TrainingSet(stack.gram[0], stack.clean_labels[0], stack.labels[0])
    return training, problem_of(training, c * np.sqrt(dim / n))


def balanced(n, flips, dim, seed):
    """n samples, two equal classes with `flips` flipped labels each."""
    half = n // 2
    clean = np.repeat([1.0, -1.0], half)
    labels = np.where(np.tile(np.arange(half) < flips, 2), -clean, clean)
    gram = reduced.noise_gram(n, dim - 2, np.random.default_rng(seed))
    return TrainingSet(gram, clean, labels)


def solve(training, problem, radius, n_starts=7, seed=0):
    return max_margin(problem, radius, starts(problem, training.clean_labels, n_starts, np.random.default_rng(seed)))


# ---- coordinates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [60, 9])
def test_reduced_tokens_have_the_inner_products_of_the_tokens(dim):
    data = draw_single_head(6, dim, 3, 2.0, 0.3, np.random.default_rng(0))
    problem = problem_of(reduced.from_data(data), 2.0)
    signal = data.signals[(data.clean_labels < 0).astype(int)][:, None]
    tokens = np.concatenate([signal, data.noise], axis=1)
    ours, theirs = (t.reshape(18, -1) for t in (problem.tokens, tokens))
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-9)
    assert problem.tokens.shape[-1] == 2 + min(12, dim - 2)


def test_margins_are_those_of_the_reduced_engine_and_back():
    training, problem = drawn(8, 100, 2.0, 0.2, 0, n_tokens=3)
    rng = np.random.default_rng(1)
    p, v = rng.standard_normal((2, problem.tokens.shape[-1]))
    state = state_of(problem, p, v)
    out = reduced.outputs(training, state, 2.0 * np.sqrt(100 / 8))
    assert problem.margin(p, v) == pytest.approx((training.labels * out.f).min(), rel=1e-9)
    np.testing.assert_allclose(problem.attention(p), out.attention.T, rtol=1e-9)
    np.testing.assert_allclose(coordinates_of(problem, state), [p, v], atol=1e-10)


# ---- fixed p --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_for_fixed_p_the_head_is_the_support_vector_machine_on_attended_tokens(spread):
    _, problem = drawn(20, 1600, 2.0, 0.1, 0)
    p = spread * problem.unit * np.random.default_rng(0).standard_normal(problem.tokens.shape[-1])
    attended = np.einsum("nt,ntr->nr", problem.attention(p), problem.tokens)
    if spread == 0:
        np.testing.assert_allclose(attended, problem.tokens.mean(axis=1))
    certificate = hard_margin(problem.labels[:, None] * attended)
    head = best_head(problem, p)
    assert head.margin == pytest.approx(certificate.margin, rel=1e-8)
    np.testing.assert_allclose(head.v, certificate.direction * certificate.margin, atol=1e-6)
    assert problem.margin(p, head.v) == pytest.approx(head.margin, rel=1e-8)


def test_envelope_gradient_is_the_slope_of_the_best_margin():
    _, problem = drawn(12, 200, 1.5, 0.2, 0, n_tokens=3)
    rng = np.random.default_rng(0)
    p = problem.unit * rng.standard_normal(problem.tokens.shape[-1])
    head = best_head(problem, p)
    for _ in range(5):
        d = problem.unit * rng.standard_normal(len(p))
        h = 1e-5
        slope = (best_head(problem, p + h * d).margin - best_head(problem, p - h * d).margin) / (2 * h)
        assert slope == pytest.approx(head.gradient @ d, rel=1e-5, abs=1e-7 * head.margin)


# ---- known answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 6, 8])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("c", [0.8, 1.6, 2.5])
def test_brute_force_over_token_selections_at_large_radius(n, seed, c):
    training, problem = drawn(n, 50 * n, c, 0.25, seed)
    selections = [np.array(s) for s in itertools.product([0, 1], repeat=n)]
    margins = [selection_margin(problem, s) for s in selections]
    best = int(np.argmax(margins))
    found = solve(training, problem, 1e3 * problem.unit, n_starts=25)
    assert found.converged, found.status
    assert found.margin == pytest.approx(margins[best], rel=1e-4)
    chosen = (problem.tokens @ found.p).argmax(axis=1)
    assert selection_margin(problem, chosen) == pytest.approx(margins[best], rel=1e-6)
    if np.sort(margins)[-2] < margins[best] * (1 - 1e-4):
        np.testing.assert_array_equal(chosen, selections[best])


def test_tiny_signal_selects_noise_everywhere():
    training, problem = drawn(20, 4000, 0.05, 0.1, 0)
    found = solve(training, problem, 100 * problem.unit)
    assert found.converged
    rows = training.labels[:, None] * problem.tokens[:, 1]
    assert found.margin == pytest.approx(hard_margin(rows).margin, rel=1e-3)
    assert problem.attention(found.p)[:, 0].max() < 0.01


@pytest.mark.parametrize("flips", [0, 1, 3])
@pytest.mark.parametrize("c", [0.7, 1.3, 1.5, 1.8, 3.0])
def test_margins_of_the_limit(c, flips):
    dim, n = 10**9, 20
    training = balanced(n, flips, dim, 0)
    problem = problem_of(training, c * np.sqrt(dim / n))
    eta = 2 * flips / n
    unit = np.sqrt(dim / n)
    formulas = {"signal": (2 / c**2 + eta) ** -0.5, "noise": 1.0}
    for name, formula in formulas.items():
        here = selection_margin(problem, named_selection(name, training.clean_labels, training.labels)) / unit
        assert here == pytest.approx(formula, rel=1e-3)
    found = solve(training, problem, 100 * problem.unit)
    assert found.converged
    assert found.margin / unit == pytest.approx(max(formulas.values()), rel=1e-3)
    assert found.margin / unit == pytest.approx(margin_limit.best_limit_margin(c, [0.5, 0.5], [eta, eta]), rel=1e-3)
    sees_signal = problem.attention(found.p)[training.clean_labels == training.labels, 0].mean()
    assert (sees_signal > 0.5) == (c > np.sqrt(2 / (1 - eta)))


def test_classes_switch_one_by_one():
    """14 and 6 samples: one switches at 1 / sqrt(.7) = 1.20, the other at 1 / sqrt(.3) = 1.83."""
    dim, n = 10**9, 20
    clean = np.where(np.arange(n) < 14, 1.0, -1.0)
    training = TrainingSet(reduced.noise_gram(n, dim - 2, np.random.default_rng(0)), clean, clean)
    for c, first, second in ((1.1, 0, 0), (1.5, 1, 0), (2.0, 1, 1)):
        problem = problem_of(training, c * np.sqrt(dim / n))
        found = solve(training, problem, 100 * problem.unit)
        attention = problem.attention(found.p)[:, 0]
        assert attention[:14].mean() == pytest.approx(first, abs=0.01)
        assert attention[14:].mean() == pytest.approx(second, abs=0.01)
        limit = margin_limit.best_limit_margin(c, [0.7, 0.3], [0.0, 0.0])
        assert found.margin / np.sqrt(dim / n) == pytest.approx(limit, rel=1e-3)


# ---- the search -----------------------------------------------------------------------------------------------------


def test_one_start_can_stick_and_more_starts_do_not():
    training, problem = drawn(40, 6400, 2.0, 0.1, 0)
    every = starts(problem, training.clean_labels, 5, np.random.default_rng(0))
    many = max_margin(problem, 0.5, every)
    one = max_margin(problem, 0.5, {"noise": every["noise"]})
    assert one.converged and many.converged
    assert one.margin < 0.95 * many.margin
    assert set(many.margins) == set(NAMED) and many.margin >= max(many.margins.values()) * (1 - 1e-6)


@pytest.mark.parametrize("radius_in_units", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("n_tokens", [2, 4])
def test_polish_finds_the_same_margin_by_another_method(radius_in_units, n_tokens):
    _, problem = drawn(12, 600, 2.0, 0.1, 0, n_tokens)
    radius = radius_in_units * problem.unit
    found = refine(problem, radius, 0.3 * radius * np.ones(problem.tokens.shape[-1]) / problem.tokens.shape[-1] ** 0.5)
    p, v, margin = polish(problem, radius, found.p)
    assert margin == pytest.approx(found.margin, rel=1e-5)
    assert np.linalg.norm(p) <= radius * (1 + 1e-12) and np.linalg.norm(v) == pytest.approx(1)


def test_solution_is_stationary_and_inside_the_balls():
    training, problem = drawn(20, 1600, 2.0, 0.1, 1)
    found = solve(training, problem, 0.4)
    assert found.converged
    assert np.linalg.norm(found.p) <= 0.4 * (1 + 1e-12) and np.linalg.norm(found.v) == pytest.approx(1.0)
    assert found.head.kkt_residual < 1e-8 and found.head.duality_gap < 1e-8
    assert promised_gain(best_head(problem, found.p), found.p, 0.4) < 1e-6
    assert promised_gain(best_head(problem, 0.5 * found.p), 0.5 * found.p, 0.4) > 1e-3


def test_margin_grows_with_the_radius():
    training, problem = drawn(20, 1600, 2.0, 0.1, 0)
    margins = [solve(training, problem, r * problem.unit).margin for r in (0.1, 1.0, 10.0)]
    assert margins[0] < margins[1] < margins[2]


def test_contradictory_samples_have_no_margin():
    tokens = np.random.default_rng(0).standard_normal((1, 2, 5)).repeat(2, axis=0)
    problem = MarginProblem(tokens, np.array([1.0, -1.0]))
    found = max_margin(problem, 1.0, {"uniform": np.zeros(5)})
    assert found.status == "no head fits" and np.isnan(found.margin) and np.isnan(found.margins["uniform"])


def test_a_search_that_is_not_stationary_gives_no_number(monkeypatch):
    from benign_attention import margin

    monkeypatch.setattr(margin, "STATIONARY", -1.0)
    training, problem = drawn(8, 100, 2.0, 0.1, 0)
    found = solve(training, problem, 0.5, n_starts=2)
    assert "promised gain" in found.status and np.isnan(found.margin)


def test_starts_are_a_growing_list():
    training, problem = drawn(10, 200, 2.0, 0.2, 0)
    few, many = (starts(problem, training.clean_labels, k, np.random.default_rng(3)) for k in (6, 9))
    assert list(many)[:6] == list(few) and list(few)[:5] == list(NAMED)
    for name, p in few.items():
        np.testing.assert_array_equal(p, many[name])
    with pytest.raises(ParameterError, match=r"^starts must not be empty"):
        max_margin(problem, 1.0, {})
