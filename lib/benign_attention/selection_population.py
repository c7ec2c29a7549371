"""Exact test quantities of the token-selection model: integrals over fresh data, not samples.

The noise of a fresh token enters only through u = q.eps, q = W p, and w = nu.eps, jointly Gaussian; signals shift
both by what their role says. Given the u of all T tokens the output is Gaussian, so accuracy and loss are integrals
of closed forms over T standard normals, and so is the attention of each role: randomised quasi-Monte Carlo, with its
standard error. Fresh labels are clean, and the two classes weigh one half each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from scipy.special import ndtr

from benign_attention.population import Estimate, as_numpy, expected_softplus, sobol_normals
from benign_attention.selection import ROLES, State, TrainingSet


@dataclass(frozen=True)
class FreshSample:
    """What decides fresh samples, for a batch of states.

    logits, values : (..., 2, T), means of q.x and y nu.x by class and token; spread : (...), standard deviation of
    q.eps; slope, rest : (...), nu.eps = slope z + rest z' for q.eps = spread z and independent standard normal z, z'.
    """

    logits: np.ndarray
    values: np.ndarray
    spread: np.ndarray
    slope: np.ndarray
    rest: np.ndarray

    @classmethod
    def stack(cls, samples: Iterable[FreshSample], axis: int = -1) -> FreshSample:
        """Several batches as one, along a new batch axis."""
        samples = list(samples)
        axis = axis % (samples[0].spread.ndim + 1)
        return cls(*(np.stack([getattr(s, f.name) for s in samples], axis=axis) for f in fields(cls)))


def fresh_sample(training: TrainingSet, state: State) -> FreshSample:
    """The law of fresh samples under `state`."""
    query = state.query[..., None]
    inside, outside = (as_numpy((w @ query)[..., 0]) for w in (state.weights, training.outside))
    head = as_numpy(training.head)
    norm, weak = (as_numpy(x)[..., None] for x in (training.signal_norm, training.weak_ratio))
    shape = (*np.broadcast_shapes(inside.shape[:-1], head.shape[:-1]), 2, training.n_tokens)
    logits, values = np.zeros(shape), np.zeros(shape)
    for signals, vector, sign in ((logits, inside, 1.0), (values, head, np.array([1.0, -1.0]))):
        own, other = sign * norm * vector[..., :2], sign * norm * vector[..., 1::-1]
        signals[..., 0], signals[..., 1], signals[..., 2] = own, weak * own, weak * other
    spread = np.sqrt((inside**2).sum(axis=-1) + (outside**2).sum(axis=-1))
    along = (inside * head).sum(axis=-1)
    slope = np.divide(along, spread, out=np.zeros_like(along), where=spread > 0)
    return FreshSample(logits, values, spread, slope, np.sqrt(np.maximum((head**2).sum(axis=-1) - slope**2, 0.0)))


@dataclass(frozen=True)
class TestQuantities:
    """Expectations over fresh data with clean labels, each with its standard error; of the batch's shape.

    attention : (..., 4), mean mass on the tokens of each role, all irrelevant ones together.
    """

    __test__ = False

    accuracy: Estimate
    loss: Estimate
    attention: Estimate


def test_quantities(law: FreshSample, seed: int = 0, log2_points: int = 10, n_randomisations: int = 8):
    """`TestQuantities` of a batch of states; `seed` sets the randomisation, which all states share."""
    shape = law.spread.shape
    z = np.stack(sobol_normals(law.logits.shape[-1], seed, log2_points, n_randomisations), axis=1)
    rows = (_expectations(_row(law, index), z) for index in np.ndindex(shape))
    draws = np.array(list(rows)).reshape(*shape, 2 + len(ROLES), n_randomisations)
    value, error = draws.mean(axis=-1), draws.std(axis=-1, ddof=1) / np.sqrt(n_randomisations)
    accuracy, loss = (Estimate(value[..., k], error[..., k]) for k in (0, 1))
    return TestQuantities(accuracy, loss, Estimate(value[..., 2:], error[..., 2:]))


test_quantities.__test__ = False


def _row(law: FreshSample, index: tuple[int, ...]) -> FreshSample:
    return FreshSample(*(getattr(law, f.name)[index] for f in fields(law)))


def _expectations(law: FreshSample, z: np.ndarray) -> np.ndarray:
    """Accuracy, loss and attention by role, (6, R): means over both classes and the points z, (T, R, points)."""
    y = np.array([1.0, -1.0])[:, None, None, None]
    logits = law.logits[..., None, None] + law.spread * z
    attention = np.exp(logits - logits.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    mean = (attention * (law.values[..., None, None] + y * law.slope * z)).sum(axis=1)
    spread = law.rest * np.sqrt((attention**2).sum(axis=1))
    certain = np.where(mean == 0, 0.0, np.where(np.isnan(mean), np.nan, np.copysign(np.inf, mean)))
    accuracy = ndtr(np.divide(mean, spread, out=certain, where=spread > 0))
    loss = expected_softplus(mean, spread, n_nodes=4 if law.rest < 0.3 else 64)
    roles = attention.mean(axis=(0, 3))
    return np.array([accuracy.mean(axis=(0, 2)), loss.mean(axis=(0, 2)), *roles[:3], roles[3:].sum(axis=0)])
