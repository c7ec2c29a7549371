"""Margins of token selections in the orthogonal limit, d/n and R to infinity. Derived in chapter max_margin."""

from __future__ import annotations

import numpy as np


def limit_margin(c, class_fraction, label_noise, sees_signal):
    """Margin over sqrt(d/n) when clean samples of class k see the signal or their noise tokens, noisy ones noise.

    c : SNR sqrt(n); class_fraction (..., 2), label_noise (..., 2): share of class k among all samples, and of flipped
    labels in it; sees_signal (..., 2): true where the clean samples of class k see the signal. A class costs the
    squared length 1/c^2 + pi_k eta_k or pi_k of the head; the margin is one over the length (prop-margins; the
    problem of Magen et al. 2025, Section 4).
    """
    fraction, noise = np.asarray(class_fraction, float), np.asarray(label_noise, float)
    c = np.asarray(c, float)[..., None]
    return (np.where(sees_signal, 1 / c**2 + fraction * noise, fraction).sum(axis=-1)) ** -0.5


def best_limit_margin(c, class_fraction, label_noise):
    """The largest of the four: each class sees the signal where c > `switch` of it."""
    sees = np.asarray(c, float)[..., None] > switch(class_fraction, label_noise)
    return limit_margin(c, class_fraction, label_noise, sees)


def switch(class_fraction, label_noise):
    """c above which clean samples of class k see the signal in the best solution, 1 / sqrt(pi_k (1 - eta_k)).

    Derived in chapter max_margin, "Margins of token selections" (prop-margins).
    """
    with np.errstate(divide="ignore"):
        return 1 / np.sqrt(np.asarray(class_fraction, float) * (1 - np.asarray(label_noise, float)))
