"""Gradient descent of the single-head model, exactly, on coefficients.

From zero, p and v stay in the span of the training tokens. With `Xi` the m = K n noise tokens as rows (row
j n + i is noise token j of sample i), G = Xi Xi^T and signals mu_1, mu_2 of norm rho,

    p = sum_k S_pk mu_k / rho + Xi^T a,        v = sum_k S_vk mu_k / rho + Xi^T b,

and one step costs one product of G with the two rows (a, b), whatever the dimension. Every array may carry
leading batch axes (seeds, grids of `signal_norm` and `step_size`), which broadcast. Written against the array
API: NumPy arrays on the CPU, torch tensors elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from benign_attention.data import SingleHeadData, draw_labels
from benign_attention.gram import noise_gram
from benign_attention.movable import Movable

Array = Any


@dataclass(frozen=True)
class TrainingSet(Movable):
    """All that training sees of the data. gram : (..., m, m); clean_labels, labels : (..., n), ±1."""

    gram: Array
    clean_labels: Array
    labels: Array

    @property
    def n_train(self) -> int:
        return self.labels.shape[-1]

    @property
    def n_noise(self) -> int:
        """Noise tokens per sample, K."""
        return self.gram.shape[-1] // self.n_train

    @property
    def noisy(self) -> Array:
        """(..., n), true where the label was flipped."""
        return self.labels != self.clean_labels

    @cached_property
    def membership(self) -> Array:
        """(..., 2, n), 1 where the sample carries mu_1 (first row) or mu_2 (second row)."""
        xp = array_namespace(self.labels)
        return xp.stack([1.0 + self.clean_labels, 1.0 - self.clean_labels], axis=-2) / 2.0

    @cached_property
    def of_class(self) -> Array:
        """`membership` transposed, (..., n, 2)."""
        return array_namespace(self.labels).moveaxis(self.membership, -1, -2)

    def with_axes(self, n_axes: int) -> TrainingSet:
        """The same sets with `n_axes` axes of length 1 behind the batch axes, to broadcast against a grid."""
        xp = array_namespace(self.labels)
        n_batch = self.labels.ndim - 1
        return TrainingSet(
            *(
                xp.reshape(x, (*x.shape[:n_batch], *(1,) * n_axes, *x.shape[n_batch:]))
                for x in (self.gram, self.clean_labels, self.labels)
            )
        )


def _rows(data: SingleHeadData) -> np.ndarray:
    return data.noise.swapaxes(0, 1).reshape(-1, data.noise.shape[-1])


def from_data(data: SingleHeadData) -> TrainingSet:
    """The training set of explicit tokens."""
    rows = _rows(data)
    return TrainingSet(rows @ rows.T, data.clean_labels, data.labels)


def draw(n_train: int, dim: int, n_tokens: int, label_noise: float, rngs: list[np.random.Generator]) -> TrainingSet:
    """One training set for each generator, stacked along the first axis; the cost does not depend on `dim`."""
    labels = [draw_labels(n_train, label_noise, rng) for rng in rngs]
    grams = [noise_gram(n_train * (n_tokens - 1), dim - 2, rng) for rng in rngs]
    return TrainingSet(np.stack(grams), *(np.stack(x) for x in zip(*labels, strict=True)))


@dataclass(frozen=True)
class State:
    """Weights on coefficients; the first row belongs to p, the second to v.

    signal : (..., 2, 2), components along mu_1/rho and mu_2/rho; noise : (..., 2, m), the rows a and b.
    """

    signal: Array
    noise: Array


@dataclass(frozen=True)
class Outputs:
    """What the model does on its training samples.

    logits, attention, values : (..., T, n), the signal token first; f : (..., n).
    """

    logits: Array
    attention: Array
    values: Array
    f: Array


def zero_state(training: TrainingSet, batch: tuple[int, ...] | None = None) -> State:
    """Weights at zero; `batch` are the leading axes (default: those of the training set)."""
    xp = array_namespace(training.gram)
    batch = tuple(training.labels.shape[:-1]) if batch is None else batch
    like = {"dtype": training.gram.dtype, "device": device(training.gram)}
    return State(xp.zeros((*batch, 2, 2), **like), xp.zeros((*batch, 2, training.gram.shape[-1]), **like))


@dataclass(frozen=True)
class RandomStart:
    """Weights p_0, v_0 ~ N(0, scale^2 I_d): `state` in the span of the tokens, and what lies outside.

    outside : (..., 2, 2), inner products of the parts of (p_0, v_0) that are orthogonal to all training tokens.
    Training never moves these parts and never sees them; fresh tokens do.
    """

    state: State
    outside: np.ndarray


def random_start(training: TrainingSet, dim: int, scale: float, rngs: list[np.random.Generator]) -> RandomStart:
    """Independent Gaussian weights, one generator for each NumPy training set of the batch (one batch axis).

    In an orthonormal basis of the span the components are scale times standard normal, whatever the basis: with the
    r = min(m, dim - 2) largest eigenvalues s of G = U diag(s) U^T, a = U diag(s)^(-1/2) z. Outside there are
    dim - 2 - r dimensions more: a Wishart matrix. From equal states of `rngs`, two scales give multiples of each other.
    """
    n_rows = training.gram.shape[-1]
    rank = min(n_rows, dim - 2)
    signal, noise, outside = [], [], []
    for gram, rng in zip(training.gram, rngs, strict=True):
        values, basis = np.linalg.eigh(gram)
        signal.append(scale * rng.standard_normal((2, 2)))
        inside = rng.standard_normal((2, rank))
        noise.append(scale * (inside / np.sqrt(values[-rank:])) @ basis[:, -rank:].T)
        outside.append(scale**2 * noise_gram(2, dim - 2 - rank, rng))
    return RandomStart(State(np.stack(signal), np.stack(noise)), np.stack(outside))


def _like(value, array: Array, n_axes: int) -> Array:
    """A scalar or batch of scalars as an array of the same kind, with `n_axes` axes of length 1 behind it."""
    if np.ndim(value) == 0:
        return value
    xp = array_namespace(array)
    value = xp.asarray(value, dtype=array.dtype, device=device(array))
    return value[(..., *(None,) * n_axes)]


def outputs(training: TrainingSet, state: State, signal_norm) -> Outputs:
    """The model on its training samples; `signal_norm` broadcasts against the batch axes."""
    xp = array_namespace(state.noise)
    products = _products(state.noise, training.gram, xp)
    products = xp.reshape(products, (*products.shape[:-1], training.n_noise, training.n_train))
    signal = xp.matmul(state.signal * _like(signal_norm, state.noise, 2), training.membership)
    both = xp.concat([signal[..., None, :], products], axis=-2)
    logits, values = both[..., 0, :, :], both[..., 1, :, :]
    weights = xp.exp(logits - xp.max(logits, axis=-2, keepdims=True))
    attention = weights / xp.sum(weights, axis=-2, keepdims=True)
    return Outputs(logits, attention, values, xp.sum(attention * values, axis=-2))


def _products(rows: Array, gram: Array, xp) -> Array:
    """rows G; rows of a whole grid on one training set are one product, which reads G once."""
    if gram.ndim > 2:
        return xp.matmul(rows, gram)
    return xp.reshape(xp.matmul(xp.reshape(rows, (-1, rows.shape[-1])), gram), rows.shape)


def _centred_values(attention: Array, values: Array, xp) -> Array:
    """gamma_t - f as sum_u s_u (gamma_t - gamma_u), which keeps its relative precision when attention saturates."""
    differences = values[..., :, None, :] - values[..., None, :, :]
    return xp.sum(attention[..., None, :, :] * differences, axis=-2)


def velocity(training: TrainingSet, state: State, signal_norm) -> State:
    """Minus the gradient of the mean logistic loss: the right-hand side of the gradient flow."""
    xp = array_namespace(state.noise)
    out = outputs(training, state, signal_norm)
    y = training.labels
    margin = y * out.f
    small = xp.exp(-xp.abs(margin))
    g = y * xp.where(margin > 0, small, 1.0) / (training.n_train * (1.0 + small))
    for_v = g[..., None, :] * out.attention
    for_p = for_v * _centred_values(out.attention, out.values, xp)
    pull = xp.stack([for_p, for_v], axis=-3)
    by_class = xp.matmul(pull[..., 0, :], training.of_class)
    return State(_like(signal_norm, state.noise, 2) * by_class, xp.reshape(pull[..., 1:, :], state.noise.shape))


def step(training: TrainingSet, state: State, signal_norm, step_size) -> State:
    """One step of gradient descent on the mean logistic loss."""
    ahead = velocity(training, state, signal_norm)
    size = _like(step_size, state.noise, 2)
    return State(state.signal + size * ahead.signal, state.noise + size * ahead.noise)


def gradient_descent(
    training: TrainingSet, signal_norm, step_size, n_steps: int, start: State | None = None
) -> Iterator[State]:
    """Yields the state after steps 1, ..., n_steps of gradient descent from `start` (default: zero)."""
    batches = [np.shape(signal_norm), np.shape(step_size), tuple(training.labels.shape[:-1])]
    if start is None:
        state = zero_state(training, np.broadcast_shapes(*batches))
    else:
        xp = array_namespace(start.noise)
        batch = np.broadcast_shapes(*batches, tuple(start.noise.shape[:-2]))
        state = State(*(xp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (start.signal, start.noise)))
    for _ in range(n_steps):
        state = step(training, state, signal_norm, step_size)
        yield state


def vectors(state: State, data: SingleHeadData) -> tuple[np.ndarray, np.ndarray]:
    """p and v themselves, (dim,), for a single state trained on these explicit tokens."""
    directions = data.signals / np.linalg.norm(data.signals, axis=1, keepdims=True)
    p, v = state.signal @ directions + state.noise @ _rows(data)
    return p, v
