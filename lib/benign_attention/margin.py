"""Max-margin solutions of the single-head model (Magen et al. 2025, Section 4).

    maximise over |v| <= 1, |p| <= R    min_i y_i f(X_i; p, v),        f = v^T X^T softmax(X p).

In v this is convex, in p it is not: `max_margin` climbs along the envelope gradient of phi (see `margin_problem`)
from several starts, tries swaps of single tokens, and keeps the best; no more than "best of these" is claimed. The
end is then certified (the head by an interior-point solver, p by what the linearised margin still promises) and
polished by another method, sequential quadratic programming on the epigraph form in (p, v, t), which must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import softmax

from benign_attention.hard_margin import HardMargin, hard_margin
from benign_attention.margin_problem import MarginProblem, best_head, promised_gain, selecting, selection_margin
from benign_attention.parameters import ParameterError

STATIONARY = 1e-6  # relative gain in margin that the linearised problem may still promise at a solution
CERTIFIED = 1e-6  # KKT residual and duality gap of the head
LEAD = 2.0  # logits by which a start prefers its tokens: enough to choose a basin, and far from saturation
SOFT = 3.0  # length of p, in units of the problem, up to which starts are first followed
NEAR = 0.98  # starts whose first climb ends this near to the best are refined, one for each selection
AGREED = 1e-5  # relative difference between the climb and its polish


@dataclass(frozen=True)
class Climb:
    """Where one start led. margin : phi(p), nan if no head fits; promised_gain : see there."""

    p: np.ndarray
    margin: float
    promised_gain: float


def climb(problem: MarginProblem, radius: float, start: np.ndarray) -> Climb:
    """A local maximum of phi from `start` (r,), coarsely.

    By SLSQP on log phi on a ball small enough that attention stays soft (|p| <= SOFT in units of the problem), and then
    along the ray to |p| = radius where that is better.
    """
    best = _Best(problem, min(radius, SOFT * problem.unit), start)
    best.search(lambda head: (-np.log(head.margin), -head.gradient / head.margin), 1e-7)
    best.radius = radius
    best.try_point(radius * best.p / max(np.linalg.norm(best.p), 1e-300))
    return best.climb


def refine(problem: MarginProblem, radius: float, start: np.ndarray) -> Climb:
    """`climb` to the end.

    Where attention is nearly hard, phi differs from the margin of the hard selection by little, and only log(hard
    margin - phi) still tells good directions of p from bad ones: that is minimised in turn.
    """
    best = _Best(problem, radius, start)
    for _ in range(4):
        before = best.head.margin
        best.search(lambda head: (-np.log(head.margin), -head.gradient / head.margin), 1e-9)
        hard = selection_margin(problem, (problem.tokens @ best.p).argmax(axis=1))
        room = hard - best.head.margin
        if 1e-12 * hard < room < 0.1 * hard:

            def log_deficit(head, hard=hard):
                deficit = hard - head.margin
                if deficit <= 1e-14 * hard:
                    return np.log(1e-14 * hard), np.zeros_like(head.gradient)
                return np.log(deficit), -head.gradient / deficit

            best.search(log_deficit, 1e-8)
        best.try_point(radius * best.p / max(np.linalg.norm(best.p), 1e-300))
        if best.head.margin - before <= max(0.01 * abs(room), 1e-12 * hard):
            break
    return best.climb


class _Best:
    """The best point seen inside the ball so far."""

    def __init__(self, problem: MarginProblem, radius: float, start: np.ndarray):
        self.problem, self.radius = problem, radius
        self.p = start * min(1.0, radius / max(np.linalg.norm(start), 1e-300))
        self.head = best_head(problem, self.p)

    @property
    def climb(self) -> Climb:
        if self.head.margin == 0:
            return Climb(self.p, np.nan, np.nan)
        return Climb(self.p, self.head.margin, promised_gain(self.head, self.p, self.radius))

    def try_point(self, p: np.ndarray) -> None:
        head = best_head(self.problem, p)
        if head.margin > self.head.margin:
            self.p, self.head = p, head

    def search(self, objective, tolerance: float) -> None:
        """SLSQP in units of `problem.unit`, on an objective of the head: value and gradient in p."""
        if self.head.margin == 0:
            return
        unit, radius = self.problem.unit, self.radius / self.problem.unit

        def function(x):
            outside = max(1.0, np.linalg.norm(x) / (2 * radius))  # trial steps far outside are read at twice the radius
            p = unit * x / outside
            head = best_head(self.problem, p)
            if head.margin > self.head.margin and np.linalg.norm(p) <= self.radius * (1 + 1e-12):
                self.p, self.head = p, head
            if head.margin == 0:
                return 1e3, np.zeros_like(x)
            value, gradient = objective(head)
            return value, unit * gradient / outside

        ball = {"type": "ineq", "fun": lambda x: 1 - x @ x / radius**2, "jac": lambda x: -2 * x / radius**2}
        options = {"maxiter": 300, "ftol": tolerance}
        found = minimize(function, self.p / unit, jac=True, method="SLSQP", constraints=[ball], options=options)
        if np.isfinite(found.x).all():
            self.try_point(unit * found.x * min(1.0, radius / max(np.linalg.norm(found.x), 1e-300)))


def polish(problem: MarginProblem, radius: float, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(p, v, margin) by SLSQP on max t, y_i f(X_i; p, v) >= t, |p| <= R, |v| <= 1, started at 0.9 p.

    Knows nothing of dual weights or envelopes, and so checks `climb`.
    """
    unit, r = problem.unit, len(p)
    tokens, labels, bound = problem.tokens * unit, problem.labels, radius / unit

    def margins(z):
        s = softmax(tokens @ z[:r], axis=1)
        return labels * (s * (tokens @ z[r : 2 * r])).sum(axis=1) - z[-1]

    def slopes(z):
        s, values = softmax(tokens @ z[:r], axis=1), tokens @ z[r : 2 * r]
        pull = s * (values - (s * values).sum(axis=1, keepdims=True))
        by_p, by_v = (labels[:, None] * np.einsum("nt,ntr->nr", w, tokens) for w in (pull, s))
        return np.hstack([by_p, by_v, -np.ones((len(labels), 1))])

    def balls(z):
        return np.array([1 - z[:r] @ z[:r] / bound**2, 1 - z[r:-1] @ z[r:-1]])

    def ball_slopes(z):
        nothing = np.zeros(r)
        return -2 * np.array([[*z[:r] / bound**2, *nothing, 0.0], [*nothing, *z[r:-1], 0.0]])

    start = 0.9 * p
    head = best_head(problem, start)
    found = minimize(
        lambda z: -z[-1],
        np.concatenate([start / unit, head.v, [head.margin * unit]]),
        jac=lambda z: -np.eye(2 * r + 1)[-1],
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": margins, "jac": slopes},
            {"type": "ineq", "fun": balls, "jac": ball_slopes},
        ],
        options={"maxiter": 400, "ftol": 1e-10},
    )
    p = unit * found.x[:r] * min(1.0, bound / np.linalg.norm(found.x[:r]))
    v = found.x[r:-1] / np.linalg.norm(found.x[r:-1])
    return p, v, problem.margin(p, v)


@dataclass(frozen=True)
class MaxMargin:
    """The best of several climbs.

    p, v : (r,), |p| <= R, |v| = 1; margin : min_i y_i f, nan unless `status` is "converged"; start : whence the best
    came; margins : of every start (nan: no head fits; coarse, to about 1e-3, for those behind); head : certificate of
    the head at p; promised_gain : see there; polished : margin that `polish` found; status : "converged", "no head
    fits", or what is not below its tolerance.
    """

    p: np.ndarray
    v: np.ndarray
    margin: float
    start: str
    margins: dict[str, float]
    head: HardMargin
    promised_gain: float
    polished: float
    status: str

    @property
    def converged(self) -> bool:
        return self.status == "converged"


def max_margin(problem: MarginProblem, radius: float, starts: Mapping[str, np.ndarray]) -> MaxMargin:
    """The largest smallest margin over |v| <= 1, |p| <= radius (eq-max-margin), best of `starts` (name to p, (r,))."""
    if not starts:
        raise ParameterError("starts must not be empty")
    climbs = {name: climb(problem, radius, start) for name, start in starts.items()}
    margins = {name: found.margin for name, found in climbs.items()}
    fitting = [name for name in climbs if np.isfinite(margins[name])]
    if not fitting:
        nothing = np.full(problem.tokens.shape[-1], np.nan)
        no_head = HardMargin(nothing, np.full(len(problem.labels), np.nan), *[np.nan] * 3, "infeasible")
        return MaxMargin(nothing, nothing, np.nan, "", margins, no_head, np.nan, np.nan, "no head fits")
    seen = set()
    for name in sorted(fitting, key=lambda k: -margins[k]):
        selection = (problem.tokens @ climbs[name].p).argmax(axis=1).tobytes()
        if margins[name] > NEAR * max(margins[k] for k in fitting) and selection not in seen:
            seen.add(selection)
            climbs[name] = refine(problem, radius, climbs[name].p)
            margins[name] = climbs[name].margin
    start = max(fitting, key=margins.get)
    swapped = _swapped(problem, [(problem.tokens @ climbs[name].p).argmax(axis=1) for name in fitting])
    if swapped is not None:
        climbs["swaps"] = refine(problem, radius, swapped)
        margins["swaps"] = climbs["swaps"].margin
        start = max((*fitting, "swaps"), key=margins.get)
    p, gain = climbs[start].p, climbs[start].promised_gain
    for _ in range(4):
        polished_p, _, polished = polish(problem, radius, p)
        if gain < STATIONARY and polished < margins[start] * (1 + AGREED):
            break
        again = refine(problem, radius, polished_p)
        if again.margin < margins[start]:
            break
        p, gain, margins[start] = again.p, again.promised_gain, again.margin
    attended = np.einsum("nt,ntr->nr", problem.attention(p), problem.tokens)
    head = hard_margin(problem.labels[:, None] * attended)
    v = head.direction * head.margin
    checks = {
        f"head {head.status}": head.status == "optimal",
        "KKT residual of the head": head.kkt_residual < CERTIFIED,
        "duality gap of the head": head.duality_gap < CERTIFIED,
        "promised gain": gain < STATIONARY,
        "polish disagrees": abs(polished / margins[start] - 1) < AGREED,
        "certificate disagrees": abs(head.margin / margins[start] - 1) < CERTIFIED,
    }
    status = "; ".join(name for name, fine in checks.items() if not fine) or "converged"
    margin = problem.margin(p, v) if status == "converged" else np.nan
    return MaxMargin(p, v, margin, start, margins, head, gain, polished, status)


def _swapped(problem: MarginProblem, selections: list[np.ndarray]) -> np.ndarray | None:
    """p (r,) of the best hard selection that swaps of one sample's token at a time reach from `selections`.

    None if no swap is better than the best of them.
    """
    n, n_tokens = problem.tokens.shape[:2]
    known: dict[bytes, float] = {}

    def margin(selected):
        key = selected.tobytes()
        if key not in known:
            known[key] = selection_margin(problem, selected)
        return known[key]

    def ascent(selected):
        while True:
            neighbours = np.repeat(selected[None], n * n_tokens, axis=0)
            neighbours[np.arange(n * n_tokens), np.repeat(np.arange(n), n_tokens)] = np.tile(np.arange(n_tokens), n)
            best = max(neighbours, key=margin)
            if margin(best) <= margin(selected) * (1 + 1e-9):
                return selected
            selected = best

    best = max((ascent(selected) for selected in selections), key=margin)
    if margin(best) <= max(map(margin, selections)) * (1 + 1e-9):
        return None
    p = selecting(problem, best, LEAD)
    return p if p.any() else None
