"""Min-norm solutions, against the max-margin curve and plain constrained optimisation."""

import numpy as np
import pytest
from scipy.optimize import minimize
from test_margin import drawn

from benign_attention.margin import max_margin
from benign_attention.margin_problem import MarginProblem
from benign_attention.margin_starts import starts
from benign_attention.min_norm import min_norm
from benign_attention.parameters import ParameterError


@pytest.mark.parametrize("target", [1.0, 8.0])
def test_it_is_the_max_margin_solution_of_its_own_radius(target):
    training, problem = drawn(20, 1600, 2.0, 0.1, 0)
    every = starts(problem, training.clean_labels, 6, np.random.default_rng(0))
    found = min_norm(problem, every, target)
    assert found.status == "converged"
    assert problem.margin(found.p, found.v) == pytest.approx(target, rel=1e-6)
    radius = np.linalg.norm(found.p)
    best = max_margin(problem, radius, every)
    assert np.linalg.norm(found.v) == pytest.approx(target / best.margin, rel=1e-5)
    for factor in (0.7, 0.9, 1.1, 1.4):
        there = max_margin(problem, factor * radius, every)
        assert np.hypot(factor * radius, target / there.margin) > found.norm


def test_constrained_optimisation_in_p_and_v_finds_the_same_norm():
    training, problem = drawn(8, 320, 2.0, 0.1, 1)
    r = problem.tokens.shape[-1]
    found = min_norm(problem, starts(problem, training.clean_labels, 5, np.random.default_rng(0)))

    def margins(z):
        attention, values = problem.attention(z[:r] * problem.unit), problem.tokens @ z[r:] * problem.unit
        return problem.labels * (attention * values).sum(axis=1) - 1

    start = np.concatenate([found.p, found.v]) / problem.unit * 1.3
    other = minimize(
        lambda z: z @ z, start, method="SLSQP", constraints=[{"type": "ineq", "fun": margins}], options={"ftol": 1e-12}
    )
    assert problem.unit * np.sqrt(other.fun) == pytest.approx(found.norm, rel=1e-5)


def test_contradictory_samples_have_no_solution():
    tokens = np.random.default_rng(0).standard_normal((1, 2, 5)).repeat(2, axis=0)
    found = min_norm(MarginProblem(tokens, np.array([1.0, -1.0])), {"uniform": np.zeros(5)})
    assert found.status == "no head fits" and np.isnan(found.norm)


def test_bad_input_is_refused_by_name():
    _, problem = drawn(8, 320, 2.0, 0.1, 1)
    with pytest.raises(ParameterError, match=r"^target must be greater than 0"):
        min_norm(problem, {"uniform": np.zeros(problem.tokens.shape[-1])}, 0.0)
    with pytest.raises(ParameterError, match=r"^starts must not be empty"):
        min_norm(problem, {})
