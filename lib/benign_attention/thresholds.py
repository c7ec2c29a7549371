"""Where small-step training turns from noise to signal: three points in c, and the limit flow that decides the last.

In the orthogonal limit (see `theory`) with a small step size, training is a flow of one class at a time in the time
t' = b x steps = (d/n) x flow time. It depends on c^2 pi (pi the class's share of the training set), the label noise
and T alone. Derived in chapter multi_step_dynamics, "The threshold against label noise"; the setting is that of Magen
et al. 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from benign_attention.flow import System, gradient_flow

ASYMMETRY = 1e-2  # initial logit of each sample's first noise token
LATE = 1e14  # time t' at which "late" is read
_SECTIONS = 9  # points a round of the search
SEARCHED = (0.6, 1.6)  # range of a search for the late threshold, relative to point (i)
PRECISION = {"tolerance": 0.05, "rtol": 1e-6, "atol": 1e-9}  # near a threshold paths part: only the side counts


def initial_gap_threshold(label_noise, n_tokens: int = 2, class_fraction=0.5) -> np.ndarray:
    """(i) The c at which clean attention starts to rise: P - l_clean leaves zero upwards above it.

    c = sqrt(u / pi), u the positive root of K e^2 u^2 - (K - e) u - 1, K = T - 1, e = 1 - 2 eta
    (prop-initial-thresholds).
    """
    e, k = 1 - 2 * np.asarray(label_noise), n_tokens - 1
    u = ((k - e) + np.sqrt((k - e) ** 2 + 4 * k * e**2)) / (2 * k * e**2)
    return np.sqrt(u / class_fraction)


def initial_logit_threshold(label_noise, class_fraction=0.5) -> np.ndarray:
    """(ii) The c at which the signal's logit P = p.mu leaves zero upwards: 1 / (e sqrt(pi)), whatever T.

    See prop-initial-thresholds; without label noise all three points are one (rem-no-noise-thresholds).
    """
    return 1 / ((1 - 2 * np.asarray(label_noise)) * np.sqrt(class_fraction))


@dataclass(frozen=True)
class ClassState:
    """One class in the limit at B points; noise tokens in G groups of equals, kinds clean and noisy.

    signal_logit, signal_value : (B,), p.mu and v.mu times the class's sign; noise_logits, noise_values : (2, G, B),
    values times the training label; group_sizes : (G,), adding up to T - 1.
    """

    signal_logit: np.ndarray
    signal_value: np.ndarray
    noise_logits: np.ndarray
    noise_values: np.ndarray
    group_sizes: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """Values times the training label, (2, 1 + G, B), the signal token first."""
        signal = np.stack([self.signal_value, -self.signal_value])
        return np.concatenate([signal[:, None], self.noise_values], axis=1)

    @property
    def attention(self) -> np.ndarray:
        """Attention mass on the signal token and on each group, (2, 1 + G, B)."""
        signal = np.broadcast_to(self.signal_logit, (2, 1, self.signal_logit.size))
        noise = self.noise_logits + np.log(self.group_sizes)[:, None]
        logits = np.concatenate([signal, noise], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    @property
    def clean_attention(self) -> np.ndarray:
        """Attention mass on the signal token of clean samples, (B,)."""
        return self.attention[0, 0]

    @property
    def noisy_attention(self) -> np.ndarray:
        """Attention mass on the signal token of noisy samples, (B,)."""
        return self.attention[1, 0]


def limit_flow(c, label_noise, n_tokens: int = 2, class_fraction=0.5, asymmetry=ASYMMETRY) -> System:
    """The small-step flow of one class in the orthogonal limit, for every point of the broadcast arguments at once.

    The equations are eq-limit-flow. For T > 2 equal noise tokens are unstable: one of them wins. The first noise token
    of every sample therefore starts at the logit `asymmetry`; 0 keeps all of them equal for ever. States are
    `ClassState`, times t' = b x steps.
    """
    arguments = (np.atleast_1d(x) for x in (c, label_noise, class_fraction, asymmetry))
    c, eta, pi, ahead = (x.ravel() for x in np.broadcast_arrays(*arguments))
    sizes = np.array([1, n_tokens - 2] if ahead.any() and n_tokens > 2 else [n_tokens - 1])
    n_groups, n_points = sizes.size, c.size
    share = c**2 * pi * np.stack([1 - eta, eta])
    sign = np.array([1.0, -1.0])[:, None]

    def unpack(y: np.ndarray) -> ClassState:
        y = y.reshape(2 + 4 * n_groups, n_points)
        logits, values = y[2:].reshape(2, 2, n_groups, n_points)
        return ClassState(y[0], y[1], logits, values, sizes)

    def velocity(y: np.ndarray) -> np.ndarray:
        state = unpack(y)
        attention, values = state.attention, state.values
        # value minus output as a sum over the other tokens, so that it survives saturation
        differences = values[:, :, None] - values[:, None]
        centred = (attention[:, None] * differences).sum(axis=2)
        for_v = expit(-(attention * values).sum(axis=1))[:, None] * attention
        for_p = for_v * centred
        signal = [(share * for_p[:, 0]).sum(axis=0), (share * sign * for_v[:, 0]).sum(axis=0)]
        own = [pull[:, 1:] / sizes[:, None] for pull in (for_p, for_v)]
        return np.concatenate([*signal, *(x.ravel() for x in own)])

    start = np.zeros((2 + 4 * n_groups, n_points))
    if n_groups == 2:
        start[[2, 4]] = ahead
    return System(start.ravel(), velocity, lambda y: y, np.ones(start.size), unpack)


@dataclass(frozen=True)
class Bracket:
    """Ends of an interval in c that contains a threshold, of any shape; nan where the searched range has none."""

    low: np.ndarray
    high: np.ndarray

    @property
    def middle(self) -> np.ndarray:
        """Geometric mean of the ends."""
        return np.sqrt(self.low * self.high)

    def at(self, index) -> Bracket:
        return Bracket(self.low[index], self.high[index])

    @classmethod
    def stack(cls, brackets) -> Bracket:
        """One bracket an entry of a new first axis."""
        return cls(*(np.array([getattr(b, end) for b in brackets]) for end in ("low", "high")))


def late_threshold(
    label_noise,
    n_tokens: int = 2,
    class_fraction=0.5,
    t_max=LATE,
    asymmetry=ASYMMETRY,
    tolerance: float = 1e-3,
) -> Bracket:
    """(iii) The c at which clean samples have half of their attention on the signal at the time t' = `t_max`.

    All arguments but `n_tokens` and `tolerance` broadcast. The search, between the factors `SEARCHED` of point (i),
    stops when high / low is at most 1 + `tolerance`.

    Raises
    ------
    FlowError
        The limit flow is not accurate at some point of the search.
    """
    arguments = (np.asarray(x, float) for x in (label_noise, class_fraction, t_max, asymmetry))
    eta, pi, time, ahead = np.broadcast_arrays(*arguments)
    shape, (eta, pi, time, ahead) = eta.shape, (x.ravel() for x in (eta, pi, time, ahead))
    moments, moment_of = np.unique(time, return_inverse=True)
    low, high = (x * initial_gap_threshold(eta, n_tokens, pi) for x in SEARCHED)
    rows = np.arange(eta.size)
    found = np.ones(eta.size, dtype=bool)
    while np.max(high / low) > 1 + tolerance:
        c = np.geomspace(low, high, _SECTIONS)
        system = limit_flow(c, eta, n_tokens, pi, ahead)
        points = gradient_flow(system, moments, **PRECISION)
        attention = np.stack([point.state.clean_attention.reshape(c.shape) for point in points])
        kept = attention[moment_of, :, rows].T > 0.5
        found &= ~kept[0] & kept[-1]
        first = np.clip(kept.argmax(axis=0), 1, None)
        low, high = c[first - 1, rows], c[first, rows]
    return Bracket(*(np.where(found, x, np.nan).reshape(shape) for x in (low, high)))
