"""The single-head model on a training set in few coordinates, and the best head for given attention.

For fixed p the best unit head v is a hard-margin support vector machine on the attended tokens x_i(p). Its margin

    phi(p) = max_{|v| <= 1} min_i y_i v.x_i(p) = min over the simplex of |sum_i lambda_i y_i x_i(p)|

is what `margin` and `min_norm` maximise over p.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import nnls
from scipy.special import softmax

from benign_attention import reduced


@dataclass(frozen=True)
class MarginProblem:
    """Training samples in few coordinates: tokens (n, T, r), the signal token first; labels (n,), ±1.

    With noise tokens as the rows of a factor of their Gram matrix and two more axes for the signals all inner products
    are those of the d-dimensional tokens, and r = n (T - 1) + 2. Nothing is lost: parts of p and v orthogonal to all
    tokens change no output and only add length, so that some optimum lies in the span of the tokens.
    """

    tokens: np.ndarray
    labels: np.ndarray

    @cached_property
    def unit(self) -> float:
        """Length of p that moves logits by about one when all samples pull at it: sqrt(n) over a token's length."""
        return float(np.sqrt(len(self.labels) / (self.tokens**2).sum(axis=-1).max()))

    def attention(self, p: np.ndarray) -> np.ndarray:
        """Softmax over tokens, (n, T)."""
        return softmax(self.tokens @ p, axis=1)

    def margin(self, p: np.ndarray, v: np.ndarray) -> float:
        """min_i y_i f(X_i; p, v)."""
        return float((self.labels * (self.attention(p) * (self.tokens @ v)).sum(axis=1)).min())


def problem_of(training: reduced.TrainingSet, signal_norm: float) -> MarginProblem:
    """The problem of a single training set (no batch axes)."""
    n, k = training.n_train, training.n_noise
    values, vectors = np.linalg.eigh(training.gram)
    kept = values > values[-1] * len(values) * np.finfo(float).eps
    rows = vectors[:, kept] * np.sqrt(values[kept])
    tokens = np.zeros((n, k + 1, 2 + rows.shape[1]))
    tokens[:, 0, :2] = signal_norm * training.membership.T
    tokens[:, 1:, 2:] = rows.reshape(k, n, -1).swapaxes(0, 1)
    return MarginProblem(tokens, training.labels)


def state_of(problem: MarginProblem, p: np.ndarray, v: np.ndarray) -> reduced.State:
    """The weights (p, v), each (r,), as coefficients of the reduced engine."""
    rows = problem.tokens[:, 1:, 2:].swapaxes(0, 1).reshape(-1, problem.tokens.shape[-1] - 2)
    weights = np.stack([p, v])
    return reduced.State(weights[:, :2], np.linalg.lstsq(rows.T, weights[:, 2:].T)[0].T)


def coordinates_of(problem: MarginProblem, state: reduced.State) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `state_of`."""
    rows = problem.tokens[:, 1:, 2:].swapaxes(0, 1).reshape(-1, problem.tokens.shape[-1] - 2)
    p, v = np.concatenate([state.signal, state.noise @ rows], axis=-1)
    return p, v


@dataclass(frozen=True)
class Head:
    """The best unit head for given p: margin phi(p), 0 if no head fits all labels; v (r,); gradient of phi (r,)."""

    margin: float
    v: np.ndarray
    gradient: np.ndarray


def best_head(problem: MarginProblem, p: np.ndarray) -> Head:
    """phi(p) (eq-phi), its head, and by the envelope theorem its gradient.

    That is the gradient of sum_i lambda_i y_i f_i with lambda and v fixed.
    """
    tokens, labels = problem.tokens, problem.labels
    s = problem.attention(p)
    length, weights, v = shortest_combination(labels[:, None] * np.einsum("nt,ntr->nr", s, tokens))
    values = tokens @ v
    pull = (weights * labels)[:, None] * s * (values - (s * values).sum(axis=1, keepdims=True))
    return Head(length, v, np.einsum("nt,ntr->r", pull, tokens))


def selection_margin(problem: MarginProblem, selected: np.ndarray) -> float:
    """Margin when sample i sees its token selected_i alone, the limit R to infinity of a hard selection; 0 if none."""
    tokens = problem.tokens[np.arange(len(selected)), selected]
    return shortest_combination(problem.labels[:, None] * tokens)[0]


def shortest_combination(rows: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Length, weights and direction of the shortest convex combination of rows (n, r).

    Length and direction are 0 where it vanishes, or where the solver gives up.

    By non-negative least squares: min |rows^T a|^2 + (1 - sum a)^2 over a >= 0 is solved on the ray of these weights.
    """
    unit = np.linalg.norm(rows, axis=1).max()
    scaled = rows / unit
    try:
        a, _ = nnls(np.vstack([scaled.T, np.ones(len(rows))]), np.append(np.zeros(rows.shape[1]), 1.0))
    except RuntimeError:  # too many iterations, seen where rows nearly balance
        return 0.0, np.full(len(rows), 1 / len(rows)), np.zeros(rows.shape[1])
    weights = a / a.sum()
    combination = scaled.T @ weights
    length = float(np.linalg.norm(combination))
    if length < 1e-9:
        return 0.0, weights, np.zeros(rows.shape[1])
    return length * unit, weights, combination / length


def promised_gain(head: Head, p: np.ndarray, radius: float) -> float:
    """Relative gain in margin that the linearisation of phi at p promises inside |p| <= radius; 0 at a KKT point."""
    return float((radius * np.linalg.norm(head.gradient) - head.gradient @ p) / head.margin)


def selecting(problem: MarginProblem, selected: np.ndarray, lead: float) -> np.ndarray:
    """The shortest p (r,) by which `selected` (n,) lead by `lead` logits; zero where no direction selects them.

    The token-selection SVM again (see `selection_svm`), without its certificate.
    """
    n, n_tokens, r = problem.tokens.shape
    others = np.arange(n_tokens) != selected[:, None]
    differences = (problem.tokens[np.arange(n), selected][:, None] - problem.tokens)[others].reshape(-1, r)
    length, _, direction = shortest_combination(differences)
    return lead * direction / length if length > 0 else np.zeros(r)
