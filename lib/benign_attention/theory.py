"""Closed forms of the single-head model and its orthogonal limit, d/n to infinity.

In the limit different noise tokens are orthogonal, so that all samples of one kind (clean or noisy, of one
class) behave alike and training is a recurrence on a handful of scalars. Derived in chapter two_step_gd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, log_ndtr, logsumexp

from benign_attention.data import SingleHeadParams
from benign_attention.parameters import ParameterError


@dataclass(frozen=True)
class LimitPoint:
    """A point of the orthogonal limit in natural units; the fields may be arrays, which broadcast.

    c : SNR sqrt(n); b : step_size dim / n; label_noise : fraction of flipped labels in the class;
    n_tokens : T; class_fraction : the class's share of the training set.
    """

    c: np.ndarray | float
    b: np.ndarray | float
    label_noise: np.ndarray | float
    n_tokens: int = 2
    class_fraction: np.ndarray | float = 0.5

    @classmethod
    def of(cls, params: SingleHeadParams) -> LimitPoint:
        return cls(params.natural_c, params.natural_b, params.label_noise, params.n_tokens)


@dataclass(frozen=True)
class LimitState:
    """Scalars of one class in the orthogonal limit.

    signal_logit, signal_value : p.mu, v.mu (times the class's sign); clean_logit, noisy_logit : noise logits on clean
    and noisy samples; clean_value, noisy_value : noise values times the training label.
    """

    n_tokens: int
    signal_logit: np.ndarray
    signal_value: np.ndarray
    clean_logit: np.ndarray
    noisy_logit: np.ndarray
    clean_value: np.ndarray
    noisy_value: np.ndarray

    @property
    def clean_attention(self) -> np.ndarray:
        """Attention mass on the signal token of clean samples."""
        return expit(self.signal_logit - self.clean_logit - np.log(self.n_tokens - 1))

    @property
    def noisy_attention(self) -> np.ndarray:
        """Attention mass on the signal token of noisy samples."""
        return expit(self.signal_logit - self.noisy_logit - np.log(self.n_tokens - 1))

    @property
    def clean_margin(self) -> np.ndarray:
        """y f on clean samples."""
        s = self.clean_attention
        return s * self.signal_value + (1 - s) * self.clean_value

    @property
    def noisy_margin(self) -> np.ndarray:
        """y f on noisy samples, y the flipped label."""
        s = self.noisy_attention
        return -s * self.signal_value + (1 - s) * self.noisy_value


def limit_step(point: LimitPoint, state: LimitState) -> LimitState:
    """One step of gradient descent in the orthogonal limit."""
    k = point.n_tokens - 1
    s_c, s_n = state.clean_attention, state.noisy_attention
    g_c, g_n = expit(-state.clean_margin), expit(-state.noisy_margin)
    # gamma_t - f, written through the attention of the other tokens so that it survives saturation
    signal_c = (1 - s_c) * (state.signal_value - state.clean_value)
    noise_c = s_c * (state.clean_value - state.signal_value)
    signal_n = (1 - s_n) * (state.signal_value + state.noisy_value)
    noise_n = s_n * (state.noisy_value + state.signal_value)
    shared = point.b * point.c**2 * point.class_fraction
    clean, noisy = (1 - point.label_noise) * g_c * s_c, point.label_noise * g_n * s_n
    own_c, own_n = point.b * g_c * (1 - s_c) / k, point.b * g_n * (1 - s_n) / k
    return replace(
        state,
        signal_logit=state.signal_logit + shared * (clean * signal_c - noisy * signal_n),
        signal_value=state.signal_value + shared * (clean - noisy),
        clean_logit=state.clean_logit + own_c * noise_c,
        noisy_logit=state.noisy_logit + own_n * noise_n,
        clean_value=state.clean_value + own_c,
        noisy_value=state.noisy_value + own_n,
    )


def limit_gradient_descent(point: LimitPoint, n_steps: int) -> Iterator[LimitState]:
    """Yields the state of the orthogonal limit after steps 1, ..., n_steps from zero.

    For T > 2 the limit is symmetric among a sample's noise tokens. Gradient descent at finite d/n leaves that symmetry
    after a few tens of steps, when one of them wins: do not trust the limit there at late times.
    """
    zero = np.zeros(
        np.broadcast_shapes(*(np.shape(x) for x in (point.c, point.b, point.label_noise, point.class_fraction)))
    )
    state = LimitState(point.n_tokens, *[zero] * 6)
    for _ in range(n_steps):
        state = limit_step(point, state)
        yield state


def two_step_closed_form(point: LimitPoint) -> LimitState:
    """The orthogonal limit after two steps in closed form, balanced classes (class_fraction = 1/2).

    The attention follows from the logits exactly; values are those of step 1 plus the second step's increment.
    Derived in chapter two_step_gd, "After two steps" (prop-two-step); the setting of Magen et al. 2025, Theorem 3.3.
    Clean attention exceeds 1/T exactly where cor-select says.
    """
    if np.any(np.asarray(point.class_fraction) != 0.5):
        raise ParameterError(f"class_fraction must be 0.5 for the closed form, got {point.class_fraction}")
    T, b, c, eta = point.n_tokens, point.b, point.c, point.label_noise
    k, e = T - 1, 1 - 2 * eta
    S, N = b * c**2 * e / (4 * T), b / (2 * T)
    f_clean, f_noisy = (S + k * N) / T, (k * N - S) / T
    g_clean, g_noisy = expit(-f_clean), expit(-f_noisy)
    return LimitState(
        T,
        signal_logit=b * c**2 / (2 * T) * ((1 - eta) * g_clean * (S - f_clean) - eta * g_noisy * (S + f_noisy)),
        signal_value=S + b * c**2 / (2 * T) * ((1 - eta) * g_clean - eta * g_noisy),
        clean_logit=b / T * g_clean * (N - f_clean),
        noisy_logit=b / T * g_noisy * (N - f_noisy),
        clean_value=N + b / T * g_clean,
        noisy_value=N + b / T * g_noisy,
    )


def log_test_error_after_one_step(params: SingleHeadParams, class_excess: np.ndarray | None = None) -> np.ndarray:
    """Natural logarithm of `test_error_after_one_step`, exact where the error itself underflows."""
    excess = np.full(2, 0.5 - params.label_noise) if class_excess is None else np.asarray(class_excess)
    ratio = params.natural_c**2 * np.sqrt(params.dim / params.n_train) / params.n_noise
    return logsumexp(log_ndtr(-ratio * excess), axis=-1) - np.log(2)


def test_error_after_one_step(params: SingleHeadParams, class_excess: np.ndarray | None = None) -> np.ndarray:
    """Clean test error after one gradient step, in the orthogonal limit; it does not depend on the step size.

    Phi(-c^2 (1 - 2 eta) sqrt(d / n) / (2 (T - 1))) for balanced classes with exactly a share eta of flips. With
    `class_excess` (..., 2), for each class the number of its clean minus its noisy samples over n, the error given
    these counts. Derived in chapter two_step_gd, "After one step" (prop-one-step-error); the
    setting of Magen et al. 2025, Theorem 3.3.
    """
    return np.exp(log_test_error_after_one_step(params, class_excess))


test_error_after_one_step.__test__ = False  # not a test, whatever pytest thinks of the name
