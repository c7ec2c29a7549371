"""The data models of the two papers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from benign_attention.parameters import (
    Dimension,
    FlipProbability,
    Parameters,
    Positive,
    Ratio,
    SamplesCount,
    TokensCount,
)


class SingleHeadParams(Parameters):
    """One point of the single-head setting (Magen et al. 2025, Section 2)."""

    n_train: SamplesCount = Field(200, description="training samples")
    dim: Dimension = Field(40_000, description="token dimension d")
    n_tokens: TokensCount = Field(2, description="tokens per sample, T")
    signal_norm: Positive = Field(30.0, description="|mu|, the papers' rho")
    label_noise: FlipProbability = Field(0.05, description="probability that a training label is flipped")
    step_size: Positive = Field(0.025, description="gradient descent step, beta")

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
    def natural_b(self) -> float:
        """Step size in natural units, b = beta d / n."""
        return self.step_size * self.dim / self.n_train


def from_natural_units(c, b, n_train: int, dim: int):
    """`(signal_norm, step_size)` of the point (c, b) at this size (eq-natural-units); arrays broadcast."""
    return np.asarray(c) * math.sqrt(dim / n_train), np.asarray(b) * n_train / dim


def draw_labels(n_train: int, label_noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Clean labels, uniform on ±1, and labels each flipped with probability `label_noise`; both (n_train,)."""
    clean = rng.choice([-1.0, 1.0], n_train)
    flipped = rng.random(n_train) < label_noise
    return clean, np.where(flipped, -clean, clean)


@dataclass(frozen=True)
class SingleHeadData:
    """Explicit samples of the single-head data model.

    signals : (2, dim), mu_1 and mu_2; clean_labels, labels : (n,) ±1 (+1 carries mu_1);
    noise : (n, n_tokens - 1, dim); position : (n,), where the signal token stands.
    """

    signals: np.ndarray
    clean_labels: np.ndarray
    labels: np.ndarray
    noise: np.ndarray
    position: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """All tokens in the order in which a model sees them, (n, n_tokens, dim)."""
        n, k, dim = self.noise.shape
        tokens = np.empty((n, k + 1, dim))
        rows = np.arange(n)
        others = np.argsort(np.arange(k + 1) == self.position[:, None], axis=1, kind="stable")[:, :k]
        tokens[rows, self.position] = self.signals[(self.clean_labels < 0).astype(int)]
        tokens[rows[:, None], others] = self.noise
        return tokens


def draw_single_head(
    n: int, dim: int, n_tokens: int, signal_norm: float, label_noise: float, rng: np.random.Generator
) -> SingleHeadData:
    """Draw `n` samples as explicit tokens (Magen et al. 2025, Section 2; def-single-head-data).

    One token is the signal, mu_1 for clean label +1 and mu_2 for -1, in a random position; the others are
    standard Gaussian in the orthogonal complement of both. mu_1, mu_2 lie along the first two axes.
    """
    clean, labels = draw_labels(n, label_noise, rng)
    signals = np.zeros((2, dim))
    signals[0, 0] = signals[1, 1] = signal_norm
    noise = rng.standard_normal((n, n_tokens - 1, dim))
    noise[..., :2] = 0.0
    return SingleHeadData(signals, clean, labels, noise, rng.integers(n_tokens, size=n))


class TokenSelectionParams(Parameters):
    """One point of the token-selection setting (Sakamoto and Sato 2025, Section 3)."""

    n_train: SamplesCount = Field(20, description="training samples")
    dim: Dimension = Field(2000, description="token dimension d")
    n_tokens: int = Field(8, ge=3, description="tokens per sample, T")
    signal_norm: Positive = Field(20.0, description="|mu|")
    weak_ratio: Ratio = Field(0.1, description="size of the weak and the confusing signal relative to |mu|")
    label_noise: FlipProbability = Field(0.2, description="fraction of training labels that are flipped")


def flipped_count(n_train: int, label_noise: float) -> int:
    """ceil(n eta), the number of flipped labels of the token-selection model."""
    return math.ceil(round(n_train * label_noise, 9))  # 100 * 0.07 is a little more than 7


def balanced_labels(n_train: int, label_noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Clean labels +1, -1, +1, ... and labels of which ceil(n eta) are flipped, spread evenly over the classes.

    Both (n_train,); which samples of a class are flipped is drawn (Sakamoto and Sato 2025, Section 3).
    """
    clean = np.where(np.arange(n_train) % 2 == 0, 1.0, -1.0)
    labels = clean.copy()
    flips = flipped_count(n_train, label_noise)
    by_class = [rng.permutation(np.flatnonzero(clean == y)) for y in (1, -1)]
    for k, y in enumerate((1, -1)):
        labels[by_class[k][: (flips + 1 - k) // 2]] = -y
    return clean, labels


def signal_coordinates(params: TokenSelectionParams, clean_labels: np.ndarray) -> np.ndarray:
    """Signal part of every token along mu_+ and mu_-, (n, T, 2)."""
    own = np.stack([clean_labels > 0, clean_labels < 0], axis=-1) * params.signal_norm
    signals = np.zeros((len(clean_labels), params.n_tokens, 2))
    signals[:, 0] = own
    signals[:, 1] = params.weak_ratio * own
    signals[:, 2] = params.weak_ratio * own[:, ::-1]
    return signals


@dataclass(frozen=True)
class TokenSelectionData:
    """Explicit samples of the token-selection data model.

    signals : (2, dim), mu_+ and mu_-; tokens : (n, n_tokens, dim), in the order relevant, weakly relevant,
    confusing, irrelevant...; clean_labels, labels : (n,) ±1.
    """

    signals: np.ndarray
    tokens: np.ndarray
    clean_labels: np.ndarray
    labels: np.ndarray


def draw_token_selection(params: TokenSelectionParams, rng: np.random.Generator) -> TokenSelectionData:
    """Draw `params.n_train` samples (Sakamoto and Sato 2025, Section 3; def-token-selection-data).

    With signal y and standard Gaussian noise on every token: relevant mu_y, weakly relevant rho_w mu_y,
    confusing rho_w mu_{-y}, and T - 3 tokens of noise alone. As in the authors' runs the classes are balanced
    and ceil(n eta) labels are flipped, spread evenly over the classes.
    """
    clean, labels = balanced_labels(params.n_train, params.label_noise, rng)
    signals = np.zeros((2, params.dim))
    signals[0, 0] = signals[1, 1] = params.signal_norm
    tokens = rng.standard_normal((params.n_train, params.n_tokens, params.dim))
    tokens[..., :2] += signal_coordinates(params, clean)
    return TokenSelectionData(signals, tokens, clean, labels)
