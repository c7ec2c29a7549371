"""Exact test quantities of the single-head model: integrals over fresh data, not samples.

A fresh noise token xi enters only through u = p.xi and w = v.xi, jointly Gaussian with the covariance that the
Gram matrix gives. Given the u of all K noise tokens the output is Gaussian, so accuracy and loss are integrals
over the u of closed forms: one-dimensional quadrature for T = 2, randomised quasi-Monte Carlo in K dimensions
above. Labels are clean and the two classes weigh one half each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri, roots_hermitenorm, roots_legendre
from scipy.stats import qmc

from benign_attention.reduced import State, TrainingSet

roots_hermitenorm, roots_legendre = (lru_cache(f) for f in (roots_hermitenorm, roots_legendre))
_LOG_TINY = -45.0  # stretches of an integrand below exp(-45) of its peak are left out


@dataclass(frozen=True)
class Estimate:
    """A value and its absolute numerical error, each of the batch's shape (`error` is a standard error if T > 2)."""

    value: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class FreshToken:
    """What decides a fresh sample: the weights' signal parts and the law of (p.xi, v.xi).

    signal_logit, signal_value : (..., 2) over classes; sd_p, slope, sd_v : (...), with p.xi = sd_p z and
    v.xi = slope z + sd_v z' for independent standard normal z, z'.
    """

    signal_logit: np.ndarray
    signal_value: np.ndarray
    sd_p: np.ndarray
    slope: np.ndarray
    sd_v: np.ndarray

    @property
    def flat(self) -> FreshToken:
        """The same laws with the batch axes as one."""
        return FreshToken(
            *(x.reshape(-1, 2) for x in (self.signal_logit, self.signal_value)),
            *(x.reshape(-1) for x in (self.sd_p, self.slope, self.sd_v)),
        )


def fresh_token(training: TrainingSet, state: State, signal_norm, outside=0.0) -> FreshToken:
    """The law of a fresh sample under `state`; `signal_norm` broadcasts against the batch axes.

    outside : (..., 2, 2), inner products of what p and v hold outside the span of the training tokens
    (`reduced.RandomStart`); zero after training from zero.
    """
    gram, noise, signal = (as_numpy(x) for x in (training.gram, state.noise, state.signal))
    covariance = noise @ gram @ np.swapaxes(noise, -1, -2) + outside
    sd_p = np.sqrt(np.maximum(covariance[..., 0, 0], 0.0))
    slope = np.divide(covariance[..., 0, 1], sd_p, out=np.zeros_like(sd_p), where=sd_p > 0)
    sd_v = np.sqrt(np.maximum(covariance[..., 1, 1] - slope**2, 0.0))
    signal = np.asarray(signal_norm, dtype=float)[..., None, None] * signal
    return FreshToken(signal[..., 0, :], signal[..., 1, :], sd_p, slope, sd_v)


def log_test_error(training: TrainingSet, state: State, signal_norm, seed: int = 0, outside=0.0) -> Estimate:
    """Natural logarithm of the clean test error; exact also where the error is far below 1e-16 (T = 2).

    For T > 2, `seed` sets the randomisation, and errors much below 1e-7 come with standard errors of their own size.
    """
    return _expectation(training, state, signal_norm, _log_error, seed, outside)


def test_accuracy(training: TrainingSet, state: State, signal_norm, seed: int = 0, outside=0.0) -> Estimate:
    """Accuracy on clean fresh data; an output of exactly zero counts one half."""
    return accuracy_of(fresh_token(training, state, signal_norm, outside), training.n_noise, seed)


def accuracy_of(law: FreshToken, n_noise: int, seed: int = 0, log2_points: int = 12) -> Estimate:
    """Accuracy on clean fresh data with `n_noise` noise tokens that follow `law`.

    For T > 2 from 8 randomisations of 2^log2_points points each.
    """
    log_error = _expectation_of(law, n_noise, _log_error, seed, log2_points)
    error = np.exp(log_error.value)
    return Estimate(1.0 - error, error * log_error.error)


def test_loss(training: TrainingSet, state: State, signal_norm, seed: int = 0, outside=0.0) -> Estimate:
    """Mean logistic loss on clean fresh data."""
    return loss_of(fresh_token(training, state, signal_norm, outside), training.n_noise, seed)


def loss_of(law: FreshToken, n_noise: int, seed: int = 0, log2_points: int = 12) -> Estimate:
    """Mean logistic loss where `accuracy_of` is accuracy."""
    return _exponential(_expectation_of(law, n_noise, _log_loss, seed, log2_points))


def signal_attention(training: TrainingSet, state: State, signal_norm, seed: int = 0, outside=0.0) -> Estimate:
    """Mean attention mass on the signal token of fresh data."""
    return _exponential(_expectation(training, state, signal_norm, _log_attention, seed, outside))


test_accuracy.__test__ = test_loss.__test__ = False  # not tests, whatever pytest thinks of the names


def expected_softplus(mean: np.ndarray, sd: np.ndarray, n_nodes: int = 64) -> np.ndarray:
    """E log(1 + exp(-X)) for X ~ N(mean, sd^2), elementwise.

    Narrow Gaussians by Gauss-Hermite. Wide ones by parts: max(-X, 0) in closed form, and the rest,
    log(1 + exp(-|X|)), which lives within a few units of zero, by Gauss-Legendre.
    """
    mean, sd = np.broadcast_arrays(np.asarray(mean, float), np.asarray(sd, float))
    result = np.zeros(mean.shape)
    narrow = sd < 1.0
    nodes, weights = roots_hermitenorm(n_nodes)
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        result[narrow] += weight * np.logaddexp(0.0, -mean[narrow] - sd[narrow] * node)
    m, s = mean[~narrow], sd[~narrow]
    wide = s * np.exp(-0.5 * (m / s) ** 2) / np.sqrt(2 * np.pi) - m * ndtr(-m / s)
    nodes, weights = roots_legendre(n_nodes)
    half = 20.0
    for x, weight in zip(half * (1 + nodes), half * weights, strict=True):
        density = np.exp(-0.5 * ((x - m) / s) ** 2) + np.exp(-0.5 * ((x + m) / s) ** 2)
        wide += weight * np.log1p(np.exp(-x)) * density / (s * np.sqrt(2 * np.pi))
    result[~narrow] = wide
    return result


@lru_cache(maxsize=8)
def sobol_normals(n_dims: int, seed: int, log2_points: int, n_randomisations: int) -> tuple[np.ndarray, ...]:
    """Independently scrambled Sobol sequences as standard normal points: `n_randomisations` of (n_dims, points)."""
    children = np.random.SeedSequence(seed).spawn(n_randomisations)
    sequences = (qmc.Sobol(n_dims, rng=np.random.default_rng(child)).random_base2(log2_points) for child in children)
    return tuple(np.ascontiguousarray(ndtri(np.clip(u, 1e-16, 1 - 1e-16)).T) for u in sequences)


def as_numpy(array) -> np.ndarray:
    """A float64 NumPy array, wherever `array` lives."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array, dtype=float)


def _exponential(log: Estimate) -> Estimate:
    value = np.exp(log.value)
    return Estimate(value, value * log.error)


def _given_logits(law: FreshToken, z: np.ndarray):
    """Attention on the signal, mean and sd of y f (each (B, C, N)) given standardised noise logits z (B, C, N, K)."""
    y = np.array([1.0, -1.0])[:, None]
    u = law.sd_p[:, None, None, None] * z
    logit = law.signal_logit[..., None]
    top = np.maximum(u.max(axis=-1), logit)
    signal, noise = np.exp(logit - top), np.exp(u - top[..., None])
    total = signal + noise.sum(axis=-1)
    drift = (noise * z).sum(axis=-1) * law.slope[:, None, None]
    mean = y * (signal * law.signal_value[..., None] + drift) / total
    sd = law.sd_v[:, None, None] * np.sqrt((noise**2).sum(axis=-1)) / total
    return signal / total, mean, sd


def _log_error(law: FreshToken, z: np.ndarray) -> np.ndarray:
    _, mean, sd = _given_logits(law, z)
    certain = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
    return log_ndtr(-np.divide(mean, sd, out=certain, where=sd > 0))


def _log_loss(law: FreshToken, z: np.ndarray) -> np.ndarray:
    _, mean, sd = _given_logits(law, z)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(expected_softplus(mean, sd), 0.0))


def _log_attention(law: FreshToken, z: np.ndarray) -> np.ndarray:
    u = law.sd_p[:, None, None, None] * z
    rest = logsumexp(u, axis=-1) - law.signal_logit[..., None]
    return -np.logaddexp(0.0, rest)


def _expectation(training, state, signal_norm, log_integrand, seed: int, outside) -> Estimate:
    """log of the mean over fresh data of exp(log_integrand), and the absolute error of that logarithm."""
    return _expectation_of(fresh_token(training, state, signal_norm, outside), training.n_noise, log_integrand, seed)


def _expectation_of(law: FreshToken, n_noise: int, log_integrand, seed: int, log2_points: int = 12) -> Estimate:
    shape, flat = law.sd_p.shape, law.flat
    of_many = partial(_quasi_monte_carlo, n_noise=n_noise, seed=seed, log2_points=log2_points)
    integrate = _quadrature if n_noise == 1 else of_many
    chunk = max(1, 2**22 // (2**12 * n_noise))
    parts = [integrate(log_integrand, _take(flat, slice(i, i + chunk))) for i in range(0, flat.sd_p.size, chunk)]
    value, error = (np.concatenate(x).reshape(shape) for x in zip(*parts, strict=True))
    return Estimate(value, error)


def _take(law: FreshToken, index) -> FreshToken:
    return FreshToken(
        law.signal_logit[index], law.signal_value[index], law.sd_p[index], law.slope[index], law.sd_v[index]
    )


def _quadrature(log_integrand: Callable, law: FreshToken, n_nodes=257, max_nodes=1 << 14, tolerance=1e-9):
    """Trapezoidal rule over the stretch of z that carries the integral, doubled until it no longer changes.

    Attention turns at z = signal_logit / sd_p within 1 / sd_p: nodes evenly spaced in t of z = turn + width sinh(t)
    resolve the turn however sharp it is. What stays unresolved (a sign that depends on z alone) is admitted: the
    error is the larger of the last change and half the change before, since a single change may vanish by chance.
    """
    sd_p = law.sd_p[:, None]
    even = 4.0 * np.sinh(np.linspace(-11.0, 11.0, 601))
    width = np.minimum(1.0, np.divide(1.0, sd_p, out=np.ones_like(sd_p), where=sd_p > 0))
    turn = np.divide(law.signal_logit, sd_p, out=np.zeros_like(law.signal_logit), where=sd_p > 0)
    turn = np.clip(turn, even[0], even[-1])

    def place(t, rows=slice(None)):
        return turn[rows][..., None] + width[rows][..., None] * np.sinh(t)

    def log_density(law, z):
        return log_integrand(law, z[..., None]) - 0.5 * z**2 - 0.5 * np.log(2 * np.pi)

    around = np.clip(place(np.linspace(-30.0, 30.0, 401)), even[0], even[-1])
    scan = np.sort(np.concatenate([np.broadcast_to(even, (*turn.shape, even.size)), around], axis=-1), axis=-1)
    coarse = log_density(law, scan)
    carries = coarse > coarse.max(axis=-1, keepdims=True) + _LOG_TINY
    first = np.maximum(carries.argmax(axis=-1) - 1, 0)
    last = np.minimum(scan.shape[-1] - carries[..., ::-1].argmax(axis=-1), scan.shape[-1] - 1)
    low, high = (np.arcsinh((np.take_along_axis(scan, i[..., None], -1)[..., 0] - turn) / width) for i in (first, last))

    def rule(rows, n):
        span = (high - low)[rows]
        t = low[rows][..., None] + span[..., None] * np.linspace(0.0, 1.0, n)
        density = log_density(_take(law, rows), place(t, rows)) + np.log(width[rows])[..., None] + np.log(np.cosh(t))
        return logsumexp(density, axis=-1) + np.log(span / (n - 1))

    todo = np.arange(law.sd_p.size)
    by_class = rule(todo, n_nodes)
    change, error = np.full(todo.size, np.inf), np.full(todo.size, np.inf)
    while todo.size and n_nodes < max_nodes:
        n_nodes = 2 * n_nodes - 1
        finer = rule(todo, n_nodes)
        total = np.maximum(logsumexp(finer, axis=-1), -1e300)[:, None]  # an integral of exactly zero stays so
        new = np.abs(np.exp(finer - total) - np.exp(by_class[todo] - total)).sum(axis=-1)
        error[todo] = np.where(new > tolerance, np.maximum(new, np.minimum(change[todo], 1.0) / 2), new)
        change[todo], by_class[todo] = new, finer
        todo = todo[new > tolerance]
    return logsumexp(by_class, axis=-1) - np.log(2), error


def _quasi_monte_carlo(
    log_integrand: Callable, law: FreshToken, n_noise: int, seed: int, log2_points=12, n_randomisations=8
):
    """Mean and standard error over independently scrambled Sobol sequences."""
    means = []
    for points in sobol_normals(n_noise, seed, log2_points, n_randomisations):
        z = np.broadcast_to(points.T, (law.sd_p.size, 2, *points.T.shape))
        means.append(logsumexp(log_integrand(law, z), axis=(-1, -2)) - np.log(2 * len(points.T)))
    means = np.array(means)
    value = logsumexp(means, axis=0) - np.log(n_randomisations)
    spread = np.exp(np.where(means == value, 0.0, means - np.where(np.isfinite(value), value, 0.0)))
    error = spread.std(axis=0, ddof=1) / np.sqrt(n_randomisations)
    return value, error
