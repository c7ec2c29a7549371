"""The hard-margin problem: known answers, optimality, and problems without a solution."""

import numpy as np
import pytest
from scipy.optimize import nnls

from benign_attention.hard_margin import hard_margin
from benign_attention.parameters import ParameterError


def test_two_rows_at_a_right_angle():
    found = hard_margin(np.array([[3.0, 0.0], [0.0, 4.0]]))
    np.testing.assert_allclose(found.direction, [1 / 3, 1 / 4], rtol=1e-8)
    assert found.margin == pytest.approx(12 / 5, rel=1e-8)


@pytest.mark.parametrize("shape", [(5, 40), (30, 40), (20, 3)])
@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e6])
def test_solution_is_optimal_and_agrees_with_non_negative_least_squares(shape, unit):
    """1 / margin^2 is twice the largest value of sum(a) - |rows^T a|^2 / 2 over a >= 0, an NNLS problem."""
    rng = np.random.default_rng(0)
    rows = unit * (rng.standard_normal(shape) + 2.0 * np.eye(shape[1])[0])
    found = hard_margin(rows)
    assert found.status == "optimal" and found.kkt_residual < 1e-7 and found.duality_gap < 1e-8
    assert (rows @ found.direction).min() == pytest.approx(1.0, abs=1e-7)
    np.testing.assert_allclose(found.direction, rows.T @ found.multipliers, rtol=1e-6, atol=1e-7 / unit)
    # min |rows^T a|^2 + (s - sum a)^2 over a >= 0, with s large: a is proportional to the multipliers
    system = np.vstack([rows.T / unit, np.ones(shape[0])])
    a, _ = nnls(system, np.append(np.zeros(shape[1]), 1.0))
    assert np.linalg.norm(rows.T @ a) / a.sum() == pytest.approx(found.margin, rel=1e-7)


def test_margin_is_the_best_over_unit_vectors():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((4, 6))
    found = hard_margin(rows)
    best = found.direction / np.linalg.norm(found.direction)
    assert (rows @ best).min() == pytest.approx(found.margin, rel=1e-8)
    for _ in range(200):
        other = best + 0.1 * rng.standard_normal(6)
        assert (rows @ other).min() / np.linalg.norm(other) < found.margin


def test_rows_on_both_sides_are_infeasible_and_give_no_number():
    found = hard_margin(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
    assert found.status != "optimal"
    assert np.isnan([found.margin, found.kkt_residual, found.duality_gap, *found.direction]).all()


@pytest.mark.parametrize("rows", [np.zeros((2, 2)), np.ones(3), np.empty((0, 3)), np.array([[np.nan, 1.0]])])
def test_bad_rows_are_refused(rows):
    with pytest.raises(ParameterError, match=r"^rows must be"):
        hard_margin(rows)
