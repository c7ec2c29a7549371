"""Gradient descent with weight decay, on loss + omega/2 (|p|^2 + |v|^2); its small-step limit, and where it rests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, softmax

from benign_attention import flow
from benign_attention.margin_problem import MarginProblem

CONVERGED = 1e-6  # |gradient| / (|gradient of the loss| + omega |weights|) at a point of rest


def objective(problem: MarginProblem, weights: np.ndarray, decay: float) -> tuple[float, np.ndarray, float]:
    """Value and gradient (2, r) of the objective at weights (2, r), p and v; and the size to hold a gradient against.

    The loss is the mean of log(1 + exp(-y f)); the size is |gradient of the loss| + decay |weights|.
    """
    n, n_tokens, r = problem.tokens.shape
    flat = problem.tokens.reshape(-1, r)
    logits, values = (flat @ weights.T).T.reshape(2, n, n_tokens)
    s = softmax(logits, axis=1)
    f = (s * values).sum(axis=1)
    margins = problem.labels * f
    by_f = -problem.labels * expit(-margins) / n
    # gamma_t - f through differences between tokens, which survives saturation
    centred = (s[:, None, :] * (values[:, :, None] - values[:, None, :])).sum(axis=2)
    for_v = by_f[:, None] * s
    slope = np.stack([(for_v * centred).ravel(), for_v.ravel()]) @ flat
    value = np.logaddexp(0, -margins).mean() + decay / 2 * np.sum(weights**2)
    size = np.linalg.norm(slope) + decay * np.linalg.norm(weights)
    return float(value), slope + decay * weights, float(size)


def gradient_descent(
    problem: MarginProblem, decay: float, step_size: float, n_steps: int, start: np.ndarray | None = None
) -> np.ndarray:
    """Weights (2, r) after `n_steps` steps of gradient descent on the objective, from zero or from `start`."""
    weights = np.zeros((2, problem.tokens.shape[-1])) if start is None else start
    for _ in range(n_steps):
        weights = weights - step_size * objective(problem, weights, decay)[1]
    return weights


def flow_states(problem: MarginProblem, decay: float, times: Iterable[float]) -> Iterator[np.ndarray]:
    """Weights (2, r) at each of `times` of the flow from zero, gradient descent with small steps.

    Raises
    ------
    flow.FlowError
        The flow could not be integrated accurately.
    """
    shape = (2, problem.tokens.shape[-1])
    system = flow.System(
        start=np.zeros(2 * shape[1]),
        velocity=lambda y: -objective(problem, y.reshape(shape), decay)[1].ravel(),
        observe=lambda y: (problem.tokens @ y.reshape(shape).T).ravel(),
        scale=np.full(2 * shape[1], problem.unit),
        unpack=lambda y: y.reshape(shape),
    )
    for point in flow.gradient_flow(system, times):
        yield point.state


def gradient_flow(problem: MarginProblem, decay: float, time: float) -> np.ndarray:
    """The last of `flow_states`."""
    (weights,) = flow_states(problem, decay, [time])
    return weights


@dataclass(frozen=True)
class Rest:
    """A point of rest of gradient descent with weight decay.

    p, v : (r,); relative_gradient : |gradient| / (|gradient of the loss| + omega |weights|); least_curvature : smallest
    eigenvalue of the Hessian over omega, positive at a local minimum; moved : |change| / |weights| of the polish.
    """

    p: np.ndarray
    v: np.ndarray
    relative_gradient: float
    least_curvature: float
    moved: float

    @property
    def converged(self) -> bool:
        return self.relative_gradient < CONVERGED and self.least_curvature > 0


def come_to_rest(problem: MarginProblem, decay: float, weights: np.ndarray) -> Rest:
    """The local minimum of the objective into whose basin `weights` (2, r) have come: L-BFGS, then Newton's method."""
    shape, unit = weights.shape, problem.unit

    def scaled(x):
        value, gradient, _ = objective(problem, unit * x.reshape(shape), decay)
        return value / decay / unit**2, gradient.ravel() / decay / unit

    options = {"maxiter": 5000, "maxfun": 20000, "gtol": 1e-10, "ftol": 1e-15, "maxcor": 30}
    x = minimize(scaled, weights.ravel() / unit, jac=True, method="L-BFGS-B", options=options).x
    slope, hessian = scaled(x)[1], _hessian(scaled, x)
    for _ in range(10):
        trial = x - np.linalg.lstsq(hessian, slope)[0]
        new = scaled(trial)[1]
        if not np.linalg.norm(new) < np.linalg.norm(slope):
            break
        x, slope, hessian = trial, new, _hessian(scaled, trial)
    end = unit * x.reshape(shape)
    _, gradient, size = objective(problem, end, decay)
    return Rest(
        *end,
        relative_gradient=float(np.linalg.norm(gradient) / size) if size > 0 else np.inf,
        least_curvature=float(np.linalg.eigvalsh(hessian)[0]),
        moved=float(np.linalg.norm(end - weights) / np.linalg.norm(end)),
    )


def _hessian(function, x: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Central differences of the gradient, symmetrised."""
    steps = h * np.eye(len(x))
    columns = np.array([function(x + step)[1] - function(x - step)[1] for step in steps]) / (2 * h)
    return (columns + columns.T) / 2
