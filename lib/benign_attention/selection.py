r"""Gradient descent of the token-selection model, exactly, in n T + 2 dimensions instead of d.

The model is f(X) = nu^T X^T softmax(X W p), with nu fixed, W_0 Gaussian and p_0 = 0 (Sakamoto and Sato 2025,
Section 3). Let E be an orthonormal basis of the span of the two signals and all m = n T training tokens, r = m + 2
vectors for d >= m + 2, and Q one of the rows of E^T W_0. Gradients move p along Q and W by E (...) Q^T only, so

    p = Q a,        W = W_0 + E (V - V_0) Q^T,        V_0 = E^T W_0 Q,

and (a, V) obey the very equations of (p, W) with the tokens' coordinates A = X E in place of X:

    logits A V a,       a <- a - lr V^T A^T c,       V <- V - lr A^T c a^T,       c = dLoss/dlogits.

What lies outside E is never trained and meets training through nothing: a fresh token sees it as noise, of squared
size |C a|^2 with C = (1 - E E^T) W_0 Q. For Gaussian tokens and W_0 the three matrices are drawn without the d
dimensions: A from signals and a Bartlett factor with d - 2 degrees of freedom, V_0 and C from Bartlett factors with
d and d - r. In the notation of Gram matrices, U = X W_0: G = A A^T = X X^T, K = (A V_0)(A V_0)^T = U U^T,
H = A V_0 (V_0^T V_0 + C^T C) V_0^T A^T = (U W_0^T)(U W_0^T)^T.

Every array may carry leading batch axes. Written against the array API: NumPy on the CPU, torch elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_array
from scipy.linalg.blas import dger

from benign_attention.data import TokenSelectionData, TokenSelectionParams, balanced_labels, signal_coordinates
from benign_attention.gram import noise_rows
from benign_attention.movable import Movable
from benign_attention.parameters import ParameterError

Array = Any
MAX_ROWS = 10_000  # training tokens: matrices of 800 MB
ROLES = ("relevant", "weak", "confusing", "irrelevant")


@dataclass(frozen=True)
class TrainingSet(Movable):
    """All that training and testing see of the data and of W_0.

    tokens : (..., n T, r), A: row i T + t is token t of sample i, roles in the order of `ROLES`, the coordinates along
    mu_+ and mu_- first; head : (..., r), nu; weights : (..., r, r), V_0; outside : (..., q, r), C; clean_labels,
    labels : (..., n), +-1; signal_norm, weak_ratio : (...), |mu| and rho_w.
    """

    tokens: Array
    head: Array
    weights: Array
    outside: Array
    clean_labels: Array
    labels: Array
    signal_norm: Array
    weak_ratio: Array

    @classmethod
    def stack(cls, sets: Iterable[TrainingSet]) -> TrainingSet:
        """Several sets of the same shapes as one batch, along a new first axis."""
        columns = zip(*([getattr(s, f.name) for f in fields(s)] for s in sets), strict=True)
        return cls(*(np.stack(column) for column in columns))

    @cached_property
    def namespace(self):
        """The array namespace in which all of it lives."""
        return array_namespace(self.tokens)

    @cached_property
    def n_train(self) -> int:
        return self.labels.shape[-1]

    @cached_property
    def n_tokens(self) -> int:
        return self.tokens.shape[-2] // self.n_train

    @property
    def noisy(self) -> Array:
        """(..., n), true where the label was flipped."""
        return self.labels != self.clean_labels

    @cached_property
    def values(self) -> Array:
        """nu . x for every token, (..., n, T)."""
        values = _apply(self.tokens, self.head)
        return self.namespace.reshape(values, (*values.shape[:-1], self.n_train, self.n_tokens))

    @cached_property
    def value_differences(self) -> Array:
        """values of token t less values of token u, (..., n, T, T)."""
        return self.values[..., :, None] - self.values[..., None, :]

    def gram_matrices(self) -> tuple[Array, Array, Array]:
        """(G, K, H) of the module's text, each (..., n T, n T)."""
        keys = self.tokens @ self.weights
        metric = sum(_t(w) @ w for w in (self.weights, self.outside))
        return self.tokens @ _t(self.tokens), keys @ _t(keys), keys @ metric @ _t(keys)


def _t(matrix: Array) -> Array:
    return array_namespace(matrix).matrix_transpose(matrix)


def draw(params: TokenSelectionParams, rng: np.random.Generator, head_noise: float = 0.0) -> TrainingSet:
    """A training set and W_0 with i.i.d. entries N(0, 1/(3d)), at a cost that does not depend on `dim`.

    The law is that of explicit tokens, whatever `dim`: the Bartlett factors give way to rectangular Gaussians where
    there are fewer degrees of freedom than rows, and r to d where n T + 2 > d. With `head_noise` > 0 the head is not
    aligned: nu has a further component of this size along a direction orthogonal to both signals (and r one more).
    """
    n_rows = params.n_train * params.n_tokens
    if n_rows > MAX_ROWS:
        raise ParameterError(f"n_train times n_tokens must be at most {MAX_ROWS}, got {n_rows}")
    clean, labels = balanced_labels(params.n_train, params.label_noise, rng)
    aligned = np.array([1.0, -1.0]) / (math.sqrt(2.0) * params.signal_norm)
    special = np.append(aligned, head_noise) if head_noise else aligned
    tokens = np.concatenate(
        [rng.standard_normal((n_rows, special.size)), noise_rows(n_rows, params.dim - special.size, rng)], axis=1
    )
    tokens[:, :2] += signal_coordinates(params, clean).reshape(n_rows, 2)
    rank = tokens.shape[1]
    spread = math.sqrt(1.0 / (3.0 * params.dim))
    weights = spread * noise_rows(rank, params.dim, rng)
    outside = spread * noise_rows(rank, params.dim - rank, rng).T
    head = np.append(special, np.zeros(rank - special.size))
    scalars = (np.asarray(x) for x in (params.signal_norm, params.weak_ratio))
    return TrainingSet(tokens, head, weights, outside, clean, labels, *scalars)


@dataclass(frozen=True)
class Basis:
    """Where reduced coordinates lie in d dimensions. left, right : (d, r), E and Q; initial_weights : (d, d), W_0."""

    left: np.ndarray
    right: np.ndarray
    initial_weights: np.ndarray


def from_data(data: TokenSelectionData, initial_weights: np.ndarray, weak_ratio: float) -> tuple[TrainingSet, Basis]:
    """The training set of explicit tokens and an explicit W_0, (d, d), with the aligned head of the paper.

    Fresh data will have this `weak_ratio`.
    """
    n, n_tokens, dim = data.tokens.shape
    rows = data.tokens.reshape(n * n_tokens, dim)
    norm = float(np.linalg.norm(data.signals[0]))
    directions = data.signals / norm
    spanning = rows if len(rows) + 2 < dim else np.eye(dim)
    left, factor = np.linalg.qr(np.concatenate([directions, spanning]).T)
    left[:, :2] *= np.sign(np.diag(factor)[:2])
    right, factor = np.linalg.qr((left.T @ initial_weights).T)
    beyond = initial_weights @ right - left @ factor.T
    head = left.T @ (directions[0] - directions[1]) / (math.sqrt(2.0) * norm)
    scalars = (np.asarray(x) for x in (norm, weak_ratio))
    training = TrainingSet(rows @ left, head, factor.T, beyond, data.clean_labels, data.labels, *scalars)
    return training, Basis(left, right, initial_weights)


def vectors(training: TrainingSet, state: State, basis: Basis) -> tuple[np.ndarray, np.ndarray]:
    """p, (d,), and W - W_0, (d, d), of a state trained on explicit tokens (prop-ts-reduction)."""
    return basis.right @ state.query, basis.left @ (state.weights - training.weights) @ basis.right.T


@dataclass(frozen=True)
class State:
    """What is trained, in reduced coordinates. query : (..., r), a, where p = Q a; weights : (..., r, r), V."""

    query: Array
    weights: Array


@dataclass(frozen=True)
class Outputs:
    """The model on its training samples. logits, attention : (..., n, T); f : (..., n)."""

    logits: Array
    attention: Array
    f: Array


def by_role(tokens: np.ndarray) -> np.ndarray:
    """A quantity of tokens (..., T) by role (..., 4): the irrelevant tokens added up."""
    return np.concatenate([tokens[..., :3], tokens[..., 3:].sum(axis=-1, keepdims=True)], axis=-1)


def initial_state(training: TrainingSet) -> State:
    """p = 0 and W = W_0."""
    return State(0.0 * training.weights[..., 0], training.weights)


def _apply(matrix: Array, vector: Array) -> Array:
    """matrix vector, over batch axes."""
    return (matrix @ vector[..., None])[..., 0]


def _apply_transposed(matrix: Array, vector: Array) -> Array:
    """matrix^T vector, over batch axes."""
    return (vector[..., None, :] @ matrix)[..., 0, :]


def outputs(training: TrainingSet, state: State) -> Outputs:
    """The model on its training samples."""
    xp = training.namespace
    logits = _apply(training.tokens, _apply(state.weights, state.query))
    logits = logits.reshape((*logits.shape[:-1], training.n_train, training.n_tokens))
    weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    attention = weights / weights.sum(-1)[..., None]
    return Outputs(logits, attention, (attention * training.values).sum(-1))


def _output_gradient(training: TrainingSet, f: Array) -> Array:
    """dLoss/df of the mean logistic loss, (..., n)."""
    xp, y = training.namespace, training.labels
    margin = y * f
    return y * xp.exp(-xp.logaddexp(0.0 * margin, margin)) / -training.n_train


def logit_gradient(training: TrainingSet, out: Outputs) -> Array:
    """c = dLoss/dlogits of the mean logistic loss, (..., n T).

    The gap between a token's value and the output is summed as sum_u s_u (gamma_t - gamma_u), which keeps its
    relative precision when attention saturates.
    """
    g = _output_gradient(training, out.f)
    c = g[..., None] * out.attention * _apply(training.value_differences, out.attention)
    return c.reshape((*c.shape[:-2], -1))


def velocity(training: TrainingSet, state: State) -> State:
    """Right-hand side of the gradient flow, (da/dt, dV/dt)."""
    pull = _pull(training, state)
    return State(-_apply_transposed(state.weights, pull), -pull[..., :, None] * state.query[..., None, :])


def head_velocity(training: TrainingSet, state: State) -> Array:
    """dnu/dt of the gradient flow where the head is trained too, (..., r)."""
    out = outputs(training, state)
    weights = _output_gradient(training, out.f)[..., None] * out.attention
    return -_apply_transposed(training.tokens, weights.reshape((*weights.shape[:-2], -1)))


def _pull(training: TrainingSet, state: State) -> Array:
    return _apply_transposed(training.tokens, logit_gradient(training, outputs(training, state)))


def gradient_descent(training: TrainingSet, step_size: float, steps: Iterable[int]) -> Iterator[State]:
    """Yields the state after each of `steps` of gradient descent on the mean loss; 0 is the start.

    Raises
    ------
    ParameterError
        `steps` decrease, or are not whole numbers of at least 0; or the weights overflow, for a `step_size` too large.
    """
    query, weights = initial_state(training).query, _own_copy(training.weights)
    done = 0
    for wanted in steps:
        if wanted < done or wanted != int(wanted):
            raise ParameterError(f"steps must be whole numbers of at least 0 that do not decrease, got {wanted}")
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(done, int(wanted)):
                pull = step_size * _pull(training, State(query, weights))
                ahead = query - _apply_transposed(weights, pull)
                _subtract_outer(weights, pull, query)
                query = ahead
        if not training.namespace.isfinite(query).all():
            raise ParameterError(
                f"step_size must be small enough for gradient descent not to overflow, got {step_size:g}"
            )
        done = int(wanted)
        yield State(query, _own_copy(weights))


def _own_copy(weights: Array) -> Array:
    return np.array(weights, order="F") if is_numpy_array(weights) else weights.clone()


def _subtract_outer(weights: Array, left: Array, right: Array) -> None:
    """weights -= left right^T in place."""
    if is_numpy_array(weights) and weights.ndim == 2:
        dger(-1.0, left, right, a=weights, overwrite_a=True)  # one pass over a column-major matrix
    else:
        weights -= left[..., :, None] * right[..., None, :]
