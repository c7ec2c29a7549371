r"""What other models make of single-head data: linear classifiers, an MLP, two-layer CNNs, and attention itself.

Every model but attention has the form

    f(X) = sum_r a_r sum_q sigma(w_r . z_q(X)),

with patches z_q that are the tokens (CNN, filters shared), the one concatenation of all tokens (linear_concat, mlp) or
the one mean token (linear_mean). Networks have `WIDTH` filters with a_r = +1/WIDTH, as many with -1/WIDTH (both fixed),
and sigma the ReLU or a power of it (Cao et al. 2022; Kou et al. 2023); a linear model has one filter and sigma(h) = h.

**Reduction.** Gradient descent moves the filters only within the span of the distinct training patches, the P rows Z
of `Patches`. With W = W_0 + A Z and G = Z Z^T the preactivations are W_0 Z^T + A G, a step costs one product with G,
whatever the dimension, and a fresh noise token enters only through its R preactivations, which are jointly Gaussian:
nothing is approximated. Written against the array API: NumPy arrays on the CPU, torch tensors elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace
from pydantic import Field
from scipy.special import ndtr

from benign_attention import population, reduced
from benign_attention.data import SingleHeadData, draw_labels
from benign_attention.gram import noise_gram, noise_rows
from benign_attention.parameters import Dimension, FlipProbability, ParameterError, Parameters, Positive

Array = Any
WIDTH = 10  # filters of either sign
INITIAL = 0.1  # scale of the initial preactivations
RELATIVE_STEPS = np.array([0.1, 0.4, 1.6, 6.4, 25.6])
N_VALIDATION, N_TEST = 500, 10_000
MAX_TOKENS = 2500  # a CNN then takes about a minute a search


class BaselineParams(Parameters):
    """One point of the single-head data model, without anything that belongs to one classifier."""

    n_train: int = Field(100, ge=2, le=2000, description="training samples")
    dim: Dimension = Field(2000, description="token dimension d")
    n_tokens: int = Field(2, ge=2, le=32, description="tokens per sample, T")
    signal_norm: Positive = Field(9.0, description="|mu|, the papers' rho")
    label_noise: FlipProbability = Field(0.1, description="probability that a training label is flipped")

    @property
    def n_noise(self) -> int:
        """Noise tokens per sample, K = T - 1."""
        return self.n_tokens - 1

    @property
    def snr(self) -> float:
        """|mu| / sqrt(d)."""
        return self.signal_norm / math.sqrt(self.dim)

    @property
    def natural_c(self) -> float:
        """Signal strength in natural units, c = SNR sqrt(n)."""
        return self.snr * math.sqrt(self.n_train)

    @property
    def natural_step(self) -> float:
        """n / (K d + n |mu|^2 / 2): the step size that moves outputs of a linear model on all tokens by order one."""
        return self.n_train / (self.n_noise * self.dim + self.n_train * self.signal_norm**2 / 2)


@dataclass(frozen=True)
class Model:
    """patches: what a filter sees; power: sigma is the ReLU to this power, 0 for a linear model."""

    patches: Literal["tokens", "concat", "mean"]
    power: int

    @property
    def readout(self) -> np.ndarray:
        """The fixed second layer a, (R,)."""
        return np.repeat([1.0, -1.0], WIDTH) / WIDTH if self.power else np.ones(1)

    def sigma(self, h: Array) -> Array:
        return _power(_relu(h), self.power) if self.power else h

    def slope(self, h: Array) -> Array:
        """Derivative of sigma."""
        xp = array_namespace(h)
        if self.power == 0:
            return xp.ones_like(h)
        return xp.astype(h > 0, h.dtype) if self.power == 1 else self.power * _power(_relu(h), self.power - 1)


NETWORKS = {
    "linear_concat": Model("concat", 0),
    "linear_mean": Model("mean", 0),
    "mlp": Model("concat", 1),
    "cnn_relu": Model("tokens", 1),
    "cnn_relu2": Model("tokens", 2),
    "cnn_relu3": Model("tokens", 3),
}
MODELS = ("linear_concat", "linear_mean", "mlp", "cnn_relu", "cnn_relu2", "attention")


def _relu(h: Array) -> Array:
    return h * (h > 0)


def _power(h: Array, power: int) -> Array:
    """By products, which are ten times faster than a general power."""
    return math.prod([h] * (power - 1), start=h)


# ---- data -----------------------------------------------------------------------------------------------------------


def draw(point: BaselineParams, rng: np.random.Generator, fixed_position: bool = False) -> SingleHeadData:
    """Training samples as an isometric copy of their tokens, in at most n K + 2 dimensions.

    The signal stands in a random position, or in the first one.
    """
    n, k, T = point.n_train, point.n_noise, point.n_tokens
    if n * T > MAX_TOKENS:
        raise ParameterError(f"n_train must be at most {MAX_TOKENS // T} with {T} tokens per sample, got {n}")
    clean, labels = draw_labels(n, point.label_noise, rng)
    position = np.zeros(n, int) if fixed_position else rng.integers(T, size=n)
    rows = noise_rows(n * k, point.dim - 2, rng)
    noise = np.concatenate([np.zeros((n, k, 2)), rows.reshape(n, k, -1)], axis=-1)
    signals = np.zeros((2, noise.shape[-1]))
    signals[0, 0] = signals[1, 1] = point.signal_norm
    return SingleHeadData(signals, clean, labels, noise, position)


@dataclass(frozen=True)
class Patches:
    """What a network sees of the training set.

    rows : (P, slots D), the distinct patches; counts : (n, P), how often a sample holds each; slots : token positions
    that a filter tells apart.
    """

    rows: np.ndarray
    counts: np.ndarray
    slots: int


def patches_of(data: SingleHeadData, kind: str) -> Patches:
    """The training samples as patches of this kind."""
    n, k, dim = data.noise.shape
    if kind == "tokens":
        rows = np.concatenate([data.noise.reshape(n * k, dim), data.signals])
        own = np.repeat(np.eye(n), k, axis=1)
        which = np.stack([data.clean_labels > 0, data.clean_labels < 0], axis=-1)
        return Patches(rows, np.concatenate([own, which], axis=1), 1)
    if kind == "concat":
        return Patches(data.tokens.reshape(n, -1), np.eye(n), k + 1)
    return Patches(data.tokens.mean(axis=1), np.eye(n), 1)


# ---- training -------------------------------------------------------------------------------------------------------


def initial_weights(
    model: Model, point: BaselineParams, slots: int, rng: np.random.Generator, reduced_dim: int, scale: float = INITIAL
) -> tuple[np.ndarray, np.ndarray]:
    """W_0 on the reduced coordinates, (R, slots reduced_dim), and the Gram matrix of the rest by slot, (slots, R, R).

    Linear models start at zero, networks at independent Gaussians of variance scale^2 / d, or / (K d) for
    concatenated tokens: `scale` is the standard deviation of a noise patch's first preactivation.
    """
    n_filters = len(model.readout)
    if model.power == 0:
        return np.zeros((n_filters, slots * reduced_dim)), np.zeros((slots, n_filters, n_filters))
    sd = scale / math.sqrt(point.dim * (point.n_noise if model.patches == "concat" else 1))
    inside = sd * rng.standard_normal((n_filters, slots * reduced_dim))
    left = point.dim - reduced_dim
    outside = [sd**2 * noise_gram(n_filters, left, rng) if left else np.zeros((n_filters,) * 2) for _ in range(slots)]
    return inside, np.stack(outside)


def gradient_descent(
    model: Model, gram: Array, counts: Array, labels: Array, start: Array, step_sizes: Array, n_steps: int
) -> Iterator[tuple[int, Array, Array]]:
    """Full-batch gradient descent on the mean logistic loss, one run for each of S step sizes.

    gram : (P, P); counts : (n, P); labels : (n,); start : (R, P), initial preactivations W_0 Z^T; step_sizes : (S,).
    Yields after steps 1, ..., n_steps: the step, the coefficients A, (S, R, P), and the training margins y f before
    that step, (S, n).
    """
    xp = array_namespace(gram)
    readout = xp.asarray(model.readout, dtype=gram.dtype, device=gram.device)[:, None]
    coefficients = xp.zeros((step_sizes.shape[0], *start.shape), dtype=gram.dtype, device=gram.device)
    pull = -labels / labels.shape[0]
    for step in range(1, n_steps + 1):
        h = start + xp.matmul(coefficients, gram)
        margins = labels * xp.matmul(xp.sum(readout * model.sigma(h), axis=-2), counts.T)
        by_sample = pull / (1.0 + xp.exp(xp.clip(margins, -700.0, 700.0)))
        by_patch = xp.matmul(by_sample, counts)[:, None, :]
        coefficients = coefficients - step_sizes[:, None, None] * (readout * model.slope(h) * by_patch)
        yield step, coefficients, margins


# ---- fresh data -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FreshLaw:
    """What decides a fresh sample of a trained network.

    signal : (slots, 2, R), preactivations of the signal of either class; covariance : (slots, R, R), of the
    preactivations of a noise token in that slot.
    """

    model: Model
    n_tokens: int
    signal: np.ndarray
    covariance: np.ndarray
    positions: tuple[int, ...]

    def outputs(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """y f on `n` fresh clean samples, the two classes and the signal's positions drawn uniformly."""
        k, a = self.n_tokens - 1, self.model.readout
        label = rng.integers(2, size=n)
        position = np.array(self.positions)[rng.integers(len(self.positions), size=n)]
        if self.model.patches == "tokens":
            noise = rng.standard_normal((n * k, len(a))) @ _root(self.covariance[0])
            of_signal, of_noise = self.model.sigma(self.signal[0]) @ a, self.model.sigma(noise) @ a
            f = of_signal[label] + of_noise.reshape(n, k).sum(axis=1)
        else:
            mean, covariance = self._one_patch()
            noise = rng.standard_normal((n, len(a)))
            h = mean[position, label]
            for place in self.positions:
                h[position == place] += noise[position == place] @ _root(covariance[place])
            f = self.model.sigma(h) @ a
        return np.where(label == 0, f, -f)

    def _one_patch(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean (T, 2, R) and covariance (T, R, R) of a sample's preactivations, by the signal's position."""
        T = self.n_tokens
        if self.model.patches == "mean":
            return np.repeat(self.signal / T, T, axis=0), np.repeat(self.covariance * (T - 1) / T**2, T, axis=0)
        return self.signal, self.covariance.sum(axis=0) - self.covariance

    def exact_accuracy(self) -> float:
        """Clean test accuracy of a linear model: Phi(mean / sd), averaged over classes and positions."""
        mean, covariance = (x[list(self.positions)] for x in self._one_patch())
        mean, sd = mean[..., 0] * [1.0, -1.0], np.sqrt(np.maximum(covariance[:, 0], 0.0))
        certain = np.where(mean == 0, 0.0, np.copysign(np.inf, mean))
        return float(ndtr(np.divide(mean, sd, out=certain, where=np.broadcast_to(sd > 0, mean.shape))).mean())


def _root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


def fresh_law(
    model: Model, point: BaselineParams, slots: int, weights: np.ndarray, outside: np.ndarray, positions
) -> FreshLaw:
    """A fresh sample's law; weights : (R, slots D) on the reduced coordinates, outside : (slots, R, R) for the rest."""
    by_slot = weights.reshape(len(weights), slots, -1).swapaxes(0, 1)
    signal = point.signal_norm * by_slot[..., :2].swapaxes(1, 2)
    noise = by_slot[..., 2:]
    return FreshLaw(model, point.n_tokens, signal, noise @ noise.swapaxes(1, 2) + outside, tuple(positions))


# ---- closed forms of linear models ----------------------------------------------------------------------------------


def max_margin_error(name: str, point: BaselineParams, data: SingleHeadData, fixed_position: bool = False) -> float:
    """Exact clean test error of the linear classifier of least norm with y f = 1 on every training sample.

    That is the hard-margin solution, to which gradient descent tends, if all its multipliers are positive: else nan.
    """
    model = NETWORKS[name]
    patches = patches_of(data, model.patches)
    gram = patches.rows @ patches.rows.T
    if patches.rows.shape[1] < len(gram):
        return math.nan
    multipliers = np.linalg.solve(gram, data.labels)
    if (multipliers * data.labels <= 0).any():
        return math.nan
    weights, outside = (multipliers @ patches.rows)[None], np.zeros((patches.slots, 1, 1))
    positions = (0,) if fixed_position else range(point.n_tokens)
    return 1 - fresh_law(model, point, patches.slots, weights, outside, positions).exact_accuracy()


def _repeats(name: str, point: BaselineParams, fixed_position: bool) -> tuple[int, int]:
    """(h, D): copies of the signal to be learnt, and in how many slots memory is spread."""
    if name == "linear_mean":
        return 1, 1
    return (1, point.n_noise) if fixed_position else (point.n_tokens, point.n_tokens)


def one_step_z(name: str, n_train: float, point: BaselineParams, fixed_position: bool = False) -> float:
    """z of the clean test error Phi(-z) of a linear classifier after one step, orthogonal limit, an even training set.

    z = e c^2 sqrt(D d / n) / (2 K h), with e = 1 - 2 eta, c^2 = n SNR^2 and (h, D) = (1, 1) on the mean token, (1, K)
    on concatenated tokens with a fixed signal position, (T, T) with a random one. On the mean token it is attention
    after one step too. Even: classes, flips and signal positions are evenly spread. Derived in chapter baselines,
    "Linear classifiers" (prop-linear-baselines).
    """
    h, dimensions = _repeats(name, point, fixed_position)
    signal = (1 - 2 * point.label_noise) * n_train * point.snr**2 / (2 * point.n_noise * h)
    return signal * math.sqrt(dimensions * point.dim / n_train)


def max_margin_z(name: str, n_train: float, point: BaselineParams, fixed_position: bool = False) -> float:
    """z of the clean test error Phi(-z) of a max-margin linear classifier, orthogonal limit, an even training set.

    S = e / (1 + 2 K h / c^2) and z = S sqrt(D d / n) / sqrt((1 - eta) (1 - S)^2 + eta (1 + S)^2), letters as in
    `one_step_z`. Derived in chapter baselines, "Linear classifiers" (prop-linear-baselines).
    """
    h, dimensions = _repeats(name, point, fixed_position)
    eta = point.label_noise
    signal = (1 - 2 * eta) / (1 + 2 * point.n_noise * h / (n_train * point.snr**2))
    spread = (1 - eta) * (1 - signal) ** 2 + eta * (1 + signal) ** 2
    return signal * math.sqrt(dimensions * point.dim / n_train / spread)


# ---- search ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A trained model at one step size and step. test_error_sd: standard error of a sampled accuracy, 0 if exact."""

    relative_step: float
    step: int
    train_accuracy: float
    noisy_accuracy: float
    validation_accuracy: float
    test_accuracy: float
    test_error_sd: float


@dataclass(frozen=True)
class Search:
    """What the search over step size and stopping found.

    stopped: best validation accuracy of all. fitted: best validation accuracy among the stops that fit the most
    training labels. last: the last stop of those, at the smallest step size. diverged: share of stops not finite.
    """

    stopped: Fit
    fitted: Fit
    last: Fit
    diverged: float


def checkpoints(n_steps: int) -> np.ndarray:
    """Steps at which training may stop: 1, 2, and twelve more up to n_steps."""
    return np.unique(np.concatenate([[1, min(2, n_steps)], np.geomspace(1, n_steps, 12).round()])).astype(int)


def search(
    name: str,
    point: BaselineParams,
    rng: np.random.Generator,
    fixed_position: bool = False,
    device: str = "cpu",
    n_steps: int = 200,
    initial: float = INITIAL,
) -> Search:
    """Draw a training set, train at every step size of RELATIVE_STEPS, and choose step size and stop on held-out data.

    The validation set is clean, fresh and of the same size for every model. Linear models and attention then get their
    exact test accuracy, networks that of N_TEST further samples.
    """
    data = draw(point, rng, fixed_position)
    if name == "attention":
        stops, laws = _attention_stops(point, data, device, n_steps)
    else:
        stops, laws = _network_stops(NETWORKS[name], point, data, rng, fixed_position, device, n_steps, initial)
    finite = np.array([np.isfinite(margins).all() for _, _, margins in stops])
    noisy = data.labels != data.clean_labels
    fitted = np.array([(margins > 0).mean() for _, _, margins in stops])
    seed = int(rng.integers(2**32))
    validation = np.array(
        [
            (law.outputs(N_VALIDATION, np.random.default_rng(seed)) > 0).mean() if ok else -1.0
            for law, ok in zip(laws, finite, strict=True)
        ]
    )
    fitted[~finite] = -1.0

    def fit(index: int) -> Fit:
        accuracy, sd = _test_accuracy(laws[index], np.random.default_rng([seed, 1]))
        relative, step, margins = stops[index]
        on_noisy = (margins[noisy] > 0).mean() if noisy.any() else math.nan
        return Fit(relative, step, float(fitted[index]), float(on_noisy), float(validation[index]), accuracy, sd)

    most = fitted == fitted.max()
    last = max(np.flatnonzero(most), key=lambda i: (stops[i][1], -stops[i][0]))
    best = np.argmax(validation), np.argmax(np.where(most, validation, -2.0)), last
    return Search(*(fit(int(i)) for i in best), diverged=float(1 - finite.mean()))


def _test_accuracy(law, rng: np.random.Generator) -> tuple[float, float]:
    if isinstance(law, AttentionLaw) or law.model.power == 0:
        return law.exact_accuracy(), 0.0
    accuracy = float((law.outputs(N_TEST, rng) > 0).mean())
    return accuracy, math.sqrt(accuracy * (1 - accuracy) / N_TEST)


def _network_stops(model, point, data, rng, fixed_position, device, n_steps, initial):
    """(relative step, step, training margins) of every stop, and its law of a fresh sample (None if not finite)."""
    patches = patches_of(data, model.patches)
    weights, outside = initial_weights(model, point, patches.slots, rng, data.noise.shape[-1], initial)
    to_device, to_numpy = _transfer(device)
    relative = RELATIVE_STEPS
    size = (
        relative
        * point.natural_step
        * (WIDTH if model.power else 1)
        * (point.n_tokens if model.patches == "mean" else 1)
    )
    arrays = (patches.rows @ patches.rows.T, patches.counts, data.labels, weights @ patches.rows.T, size)
    wanted = set(checkpoints(n_steps))
    positions = (0,) if fixed_position else range(point.n_tokens)
    held, stops, laws = None, [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for step, coefficients, margins in gradient_descent(model, *map(to_device, arrays), n_steps=n_steps + 1):
            if held is not None:
                for rel, y_f, a in zip(relative, to_numpy(margins), to_numpy(held), strict=True):
                    stops.append((float(rel), step - 1, y_f))
                    laws.append(
                        fresh_law(model, point, patches.slots, weights + a @ patches.rows, outside, positions)
                        if np.isfinite(y_f).all()
                        else None
                    )
            held = coefficients if step in wanted else None
    return stops, laws


def _transfer(device: str) -> tuple[Callable, Callable]:
    """To the arrays of `device` and back."""
    if device == "cpu":
        return np.asarray, np.asarray
    import torch

    from benign_attention.devices import resolve

    there = resolve(device)
    dtype = torch.float32 if there.type == "mps" else torch.float64
    return lambda x: torch.as_tensor(x, dtype=dtype, device=there), population.as_numpy


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionLaw:
    """A fresh sample under a trained attention head."""

    training: reduced.TrainingSet
    state: reduced.State
    signal_norm: float

    def outputs(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """y f on `n` fresh clean samples, the two classes drawn uniformly."""
        law = population.fresh_token(self.training, self.state, self.signal_norm)
        label = rng.integers(2, size=n)
        z = rng.standard_normal((2, n, self.training.n_noise))
        logits = np.concatenate([law.signal_logit[label][:, None], law.sd_p * z[0]], axis=1)
        values = np.concatenate([law.signal_value[label][:, None], law.slope * z[0] + law.sd_v * z[1]], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.where(label == 0, 1, -1) * (weights * values).sum(axis=1) / weights.sum(axis=1)

    def exact_accuracy(self) -> float:
        return float(population.test_accuracy(self.training, self.state, self.signal_norm).value)


def _attention_stops(point, data, device, n_steps):
    on_cpu = reduced.from_data(data)
    training = on_cpu.on(device)
    size, stops, laws = RELATIVE_STEPS * point.natural_step, [], []
    wanted = set(checkpoints(n_steps))
    for step, state in enumerate(reduced.gradient_descent(training, point.signal_norm, size, n_steps), 1):
        if step in wanted:
            f = population.as_numpy(reduced.outputs(training, state, point.signal_norm).f)
            signal, noise = population.as_numpy(state.signal), population.as_numpy(state.noise)
            for k, relative in enumerate(RELATIVE_STEPS):
                stops.append((float(relative), step, data.labels * f[k]))
                laws.append(AttentionLaw(on_cpu, reduced.State(signal[k], noise[k]), point.signal_norm))
    return stops, laws
