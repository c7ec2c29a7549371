"""The hard-margin problem without bias, min |w|^2 with rows w >= 1: the convex part of every margin problem here.

With rows y_i x_i(p) it is the best head for given attention; with rows of token differences it is token selection.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from benign_attention.parameters import ParameterError


@dataclass(frozen=True)
class HardMargin:
    """The solution of one problem; all numbers are nan unless `status` is "optimal".

    direction : (r,), w; multipliers : (m,), of the rows, w = rows^T multipliers; margin : 1 / |w|, the largest smallest
    product of the rows with a unit vector; kkt_residual : largest violation of the optimality conditions, with rows
    scaled to length about one; duality_gap : |primal - dual| / primal; status : as the solver reports it.
    """

    direction: np.ndarray
    multipliers: np.ndarray
    margin: float
    kkt_residual: float
    duality_gap: float
    status: str


def hard_margin(rows: np.ndarray) -> HardMargin:
    """Solve min |w|^2 subject to rows @ w >= 1 with Clarabel; `rows` (m, r) in any unit.

    The solution is a combination of the rows, so that more coordinates than rows are first rotated away. Rows that no
    hyperplane through zero keeps on one side give status "infeasible" and no numbers.

    Raises
    ------
    ParameterError
        `rows` is not a finite, non-empty matrix with an entry other than zero.
    """
    rows = np.asarray(rows, float)
    if rows.ndim != 2 or 0 in rows.shape or not np.isfinite(rows).all() or not rows.any():
        raise ParameterError(f"rows must be a finite matrix that is not zero, got shape {rows.shape}")
    m, r = rows.shape
    basis = np.linalg.qr(rows.T)[0] if r > m else np.eye(r)
    unit = np.linalg.norm(rows, axis=1).max()
    scaled = rows @ basis / unit
    w = cp.Variable(scaled.shape[1])
    above = scaled @ w >= 1
    problem = cp.Problem(cp.Minimize(cp.sum_squares(w) / 2), [above])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")  # `status` says so
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        status = problem.status
    except cp.error.SolverError:
        status = "solver_error"
    if status != cp.OPTIMAL:
        return HardMargin(np.full(r, np.nan), np.full(m, np.nan), np.nan, np.nan, np.nan, status)
    primal, dual = w.value, above.dual_value
    slack = scaled @ primal - 1
    half = primal @ primal / 2
    length = np.sqrt(2 * half)
    residuals = (
        np.linalg.norm(primal - scaled.T @ dual) / length,
        np.maximum(-slack, 0).max(),
        np.maximum(-dual, 0).max() / dual.max(),
        np.abs(dual * slack).max() / length**2,
    )
    gap = abs(half - (dual.sum() - np.sum((scaled.T @ dual) ** 2) / 2)) / half
    return HardMargin(
        basis @ primal / unit, dual / unit**2, float(unit / length), float(max(residuals)), float(gap), status
    )
