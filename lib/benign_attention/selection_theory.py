r"""Closed forms of token selection, and its orthogonal limit: d/n to infinity at fixed x = n |mu|^2 / d.

In the limit tokens of different samples share nothing but signals, the kernel of the logits stays what it is at the
start, X W_0 W_0^T X^T = X X^T / 3, irrelevant tokens have value zero, and all clean and all noisy samples behave
alike. In the time tau = t d / (3 n), with h_r = sg(-m) s_r (v_r - m) the pull on a token of role r (v its value times
the training label, m = y f, s its attention, the softmax of z_r + rho_r Q with rho_r = 1, rho, rho, 0),

    dz_r / dtau = h_r        a token's own part of its logit, for clean and for noisy samples,
    dQ / dtau = (x/2) sum over clean (1 - eta) and noisy (eta) samples of h_relevant + rho (h_weak + h_confusing),

and Q, the logit of either signal, is all that a fresh token sees. Derived in chapters
token_selection and delayed_generalization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, ndtr

from benign_attention.flow import System, gradient_flow
from benign_attention.selection import by_role


def untrained_accuracy(signal_norm, n_tokens: int):
    """Test accuracy under uniform attention, Phi(|mu| / sqrt(2 T)), elementwise (eq-ts-untrained)."""
    return ndtr(np.asarray(signal_norm) / math.sqrt(2 * n_tokens))


def logistic(margin: float) -> float:
    """log(1 + exp(-margin))."""
    return float(np.logaddexp(0.0, -margin))


def selected_train_loss(label_noise: float, weak_ratio: float, fitted: bool) -> float:
    """Train loss, values' noise apart, when clean samples look at their relevant token only and flipped ones at their
    confusing token (`fitted`) or at their relevant one."""
    flipped = weak_ratio if fitted else -1.0
    return (1 - label_noise) * logistic(math.sqrt(0.5)) + label_noise * logistic(flipped * math.sqrt(0.5))


def first_turn(n_tokens: int, label_noise: float, weak_ratio: float) -> float:
    """x = n SNR^2 above which flipped samples, too, first turn to the relevant token; inf where no signal is enough.

    2 r (1 - 1/T) / {(1 - (1 + 2 rho)/T)^2 [1 - eta - eta r]}, r = exp(1/(sqrt(2) T)), in the orthogonal limit
    (prop-ts-first-turn).
    """
    harder = math.exp(1 / (math.sqrt(2) * n_tokens))
    vote = 1 - label_noise - label_noise * harder
    reach = 1 - (1 + 2 * weak_ratio) / n_tokens
    return 2 * harder * (1 - 1 / n_tokens) / (reach**2 * vote) if vote > 0 and reach != 0 else math.inf


def waiting_rate(n_tokens: int, label_noise: float) -> float:
    """d log(t) / dx for the time t that flipped labels wait, as x = n SNR^2 grows; for rho_w = 0 (thm-ts-waiting).

    (T - 1)/(2 T) [(1 - eta) log(R*/R_0) - log((1 + R*)/(1 + R_0))], R* = (1 - eta)/eta, R_0 = exp(1/sqrt 2); zero if
    R* <= R_0, where even the strongest signal cannot hold them, infinite without flipped labels.
    """
    eta, start = label_noise, math.exp(math.sqrt(0.5))
    if eta == 0:
        return math.inf
    end = (1 - eta) / eta
    if end <= start:
        return 0.0
    return (n_tokens - 1) / (2 * n_tokens) * ((1 - eta) * math.log(end / start) - math.log((1 + end) / (1 + start)))


def _flipped_values(signal_norm: float, weak_ratio: float, n_tokens: int) -> np.ndarray:
    """(T,): means of a flipped sample's label times values, in units of their standard deviation 1/|mu|."""
    return signal_norm / math.sqrt(2) * np.array([-1.0, -weak_ratio, weak_ratio] + [0.0] * (n_tokens - 3))


def best_value_shares(signal_norm: float, weak_ratio: float, n_tokens: int) -> np.ndarray:
    """(4,): probability that the token whose value suits a flipped label best has the role (prop-ts-luckiest)."""
    means = _flipped_values(signal_norm, weak_ratio, n_tokens)
    z = np.linspace(-9, 9, 2001)
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = [ndtr(z[:, None] + mean - np.delete(means, t)).prod(axis=1) for t, mean in enumerate(means)]
    return by_role(np.trapezoid(density * below, z, axis=-1))


def unfittable_share(signal_norm: float, weak_ratio: float, n_tokens: int) -> float:
    """Probability that no token's value suits a flipped label, so that no attention can fit it."""
    return float(ndtr(-_flipped_values(signal_norm, weak_ratio, n_tokens)).prod())


def gap_clock(gap, n_others: float):
    """2 L + 2 sinh(L - log n_others), elementwise (thm-clock).

    Grows at a constant rate where dL/dt is proportional to s (1 - s), s = 1 / (1 + n_others e^-L) the attention of one
    token among `n_others` equal ones, T - 1 for T tokens; with T in its place it is the g of Sakamoto and Sato (2025).
    """
    with np.errstate(over="ignore"):
        return 2.0 * gap + 2.0 * np.sinh(gap - np.log(n_others))


def signal_logit_to_select(n_tokens: int, weak_ratio: float) -> float:
    """The Q at which a fresh sample's relevant token has attention 1/2: e^Q = T - 3 + 2 e^(rho Q).

    Infinite if rho >= 1 (eq-delay-select).
    """
    if weak_ratio >= 1:
        return math.inf
    irrelevant = math.log(n_tokens - 3) if n_tokens > 3 else -math.inf
    enough = math.log(n_tokens) / (1 - weak_ratio)
    return brentq(lambda q: q - np.logaddexp(irrelevant, math.log(2) + weak_ratio * q), 0.0, enough)


def delay_slope(n_tokens: int, label_noise: float, weak_ratio: float) -> float:
    """Limit of d log(t_gen / t_fit) / d(1/x) as x goes to 0, in the orthogonal limit; inf where Q does not grow.

    2 Q / [(1 - eta)(1 - (1 + 2 rho)/T) - eta ((1 + 2 rho)/T - rho)], Q of `signal_logit_to_select`: while a training
    sample's selected token rises by 1 - 1/T and its others fall by 1/T, Q moves by x/2 times the bracket. Noisy samples
    are taken to select the confusing token, which needs rho > 0 and rho |mu| >> 1. Derived in chapter
    delayed_generalization, "From memorising to generalising" (thm-delay).
    """
    T, eta, rho = n_tokens, label_noise, weak_ratio
    spill = (1 + 2 * rho) / T
    bracket = (1 - eta) * (1 - spill) - eta * (spill - rho)
    return 2 * signal_logit_to_select(T, rho) / bracket if bracket > 0 else math.inf


@dataclass(frozen=True)
class LimitPoint:
    """A point of the orthogonal limit: x = n SNR^2, T, eta, rho_w."""

    n_snr2: float
    n_tokens: int
    label_noise: float
    weak_ratio: float


@dataclass(frozen=True)
class LimitState:
    """Logits in the limit. own : (2, 4), clean and noisy samples by role (one irrelevant token); signal : Q."""

    own: np.ndarray
    signal: float


def _attention(point: LimitPoint, logits: np.ndarray) -> np.ndarray:
    """Attention of one token of each role; roles count 1, 1, 1, T - 3 times."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / (weights @ _counts(point))[..., None]


def _counts(point: LimitPoint) -> np.ndarray:
    return np.array([1.0, 1.0, 1.0, point.n_tokens - 3.0])


def _strengths(point: LimitPoint) -> np.ndarray:
    return np.array([1.0, point.weak_ratio, point.weak_ratio, 0.0])


def _values(point: LimitPoint) -> np.ndarray:
    """(2, 4): values times the training label, of clean and noisy samples by role."""
    clean = np.array([1.0, point.weak_ratio, -point.weak_ratio, 0.0]) / math.sqrt(2.0)
    return np.stack([clean, -clean])


def limit_attention(point: LimitPoint, state: LimitState) -> np.ndarray:
    """(2, 4): attention of clean and noisy training samples on one token of each role."""
    return _attention(point, state.own + state.signal * _strengths(point))


def limit_margins(point: LimitPoint, state: LimitState) -> np.ndarray:
    """(2,): y f on clean and on noisy training samples."""
    return (limit_attention(point, state) * _values(point)) @ _counts(point)


def limit_fresh_attention(point: LimitPoint, state: LimitState) -> float:
    """Attention of a fresh sample on its relevant token."""
    return float(_attention(point, state.signal * _strengths(point))[0])


def limit_system(point: LimitPoint) -> System:
    """The limit as an initial value problem in the time tau = t d / (3 n), for `flow.gradient_flow`."""
    counts, strengths, values = _counts(point), _strengths(point), _values(point)
    differences = values[:, :, None] - values[:, None, :]
    shares = np.array([1.0 - point.label_noise, point.label_noise])

    def unpack(y: np.ndarray) -> LimitState:
        return LimitState(y[:8].reshape(2, 4), float(y[8]))

    def velocity(y: np.ndarray) -> np.ndarray:
        state = unpack(y)
        attention = limit_attention(point, state)
        centred = (differences * (attention * counts)[:, None, :]).sum(axis=-1)
        pull = expit(-limit_margins(point, state))[:, None] * attention * centred
        return np.append(pull, 0.5 * point.n_snr2 * shares @ pull @ strengths)

    def observe(y: np.ndarray) -> np.ndarray:
        state = unpack(y)
        return (state.own + state.signal * strengths).ravel()

    return System(np.zeros(9), velocity, observe, np.ones(9), unpack)


def limit_flow(point: LimitPoint, taus: Iterable[float]) -> Iterator[LimitState]:
    """The limit at each of `taus` (increasing): the solution of eq-limit."""
    return (p.state for p in gradient_flow(limit_system(point), taus))
