"""Min-norm solutions of the single-head model: the shortest (p, v) whose margins all reach a target.

    minimise |p|^2 + |v|^2    subject to    y_i f(X_i; p, v) >= M for all i.

For given p the shortest head has length M / phi(p), so that this is min_p |p|^2 + M^2 / phi(p)^2: the max-margin
problem with the radius chosen by the trade between p and v. The minimum of loss + omega/2 (|p|^2 + |v|^2) comes near
to it, with M about log(1/omega).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from benign_attention.hard_margin import HardMargin, hard_margin
from benign_attention.margin import CERTIFIED
from benign_attention.margin_problem import MarginProblem, best_head
from benign_attention.parameters import ParameterError

STATIONARY = 1e-4  # |gradient| / |2 p| at a solution; the squared norm is then right to about its square


@dataclass(frozen=True)
class MinNorm:
    """The best of several descents.

    p, v : (r,); norm : sqrt(|p|^2 + |v|^2), nan unless `status` is "converged"; start : whence the best came; norms :
    of every start (nan: no head fits); head : certificate at p; relative_gradient : |gradient| / |2 p| of the problem
    in p.
    """

    p: np.ndarray
    v: np.ndarray
    norm: float
    start: str
    norms: dict[str, float]
    head: HardMargin
    relative_gradient: float
    status: str


def min_norm(problem: MarginProblem, starts: Mapping[str, np.ndarray], target: float = 1.0) -> MinNorm:
    """The shortest (p, v) with all margins at least `target` (eq-min-norm), best of `starts` (name to p, (r,))."""
    if not starts:
        raise ParameterError("starts must not be empty")
    if not target > 0:
        raise ParameterError(f"target must be greater than 0, got {target}")
    unit = problem.unit

    def squared_norm(x):
        head = best_head(problem, unit * x)
        if head.margin == 0:
            return 1e9, np.zeros_like(x)
        shrink = target / (unit * head.margin)
        return x @ x + shrink**2, 2 * x - 2 * shrink**2 / head.margin * unit * head.gradient

    ends = {}
    for name, start in starts.items():
        options = {"maxiter": 2000, "gtol": 1e-9, "ftol": 1e-14, "maxcor": 30}
        ends[name] = minimize(squared_norm, start / unit, jac=True, method="L-BFGS-B", options=options)
    norms = {name: unit * np.sqrt(end.fun) if end.fun < 1e9 else np.nan for name, end in ends.items()}
    fitting = [name for name in ends if np.isfinite(norms[name])]
    if not fitting:
        nothing = np.full(problem.tokens.shape[-1], np.nan)
        no_head = HardMargin(nothing, np.full(len(problem.labels), np.nan), *[np.nan] * 3, "infeasible")
        return MinNorm(nothing, nothing, np.nan, "", norms, no_head, np.nan, "no head fits")
    start = next(n for n in fitting if norms[n] <= min(norms[k] for k in fitting) * (1 + 1e-7))
    x = ends[start].x
    relative = float(np.linalg.norm(squared_norm(x)[1]) / np.linalg.norm(2 * x))
    attended = np.einsum("nt,ntr->nr", problem.attention(unit * x), problem.tokens)
    head = hard_margin(problem.labels[:, None] * attended)
    fine = head.status == "optimal" and max(head.kkt_residual, head.duality_gap) < CERTIFIED and relative < STATIONARY
    p, v = unit * x, target * head.direction
    norm = float(np.sqrt(p @ p + v @ v)) if fine else np.nan
    return MinNorm(p, v, norm, start, norms, head, relative, "converged" if fine else "not converged")
