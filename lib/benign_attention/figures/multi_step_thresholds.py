"""Figures on the thresholds of chapter multi_step_dynamics; each takes what `explore_thresholds` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benign_attention import margin_limit
from benign_attention.experiments.multi_step_thresholds import (
    CLASS_FRACTION,
    D_OVER_N,
    FINITE_SIZE_NOISE,
    UNBALANCED_NOISE,
    Curves,
    Measured,
    Thresholds,
    over_seeds,
)
from benign_attention.figures.style import PALETTE
from benign_attention.thresholds import Bracket

POINTS = (
    ("initial_gap", "(i) clean attention starts to rise", PALETTE["clean"]),
    ("initial_logit", r"(ii) $p\cdot\mu$ starts to rise", PALETTE["fourth"]),
    ("late", "(iii) late attention on the signal", PALETTE["noisy"]),
)


def against_label_noise(found: Thresholds) -> Figure:
    """The three thresholds over label noise, one panel for each T: limit (lines) and brackets of gradient descent."""
    figure, axes = plt.subplots(1, len(found.curves), figsize=(8, 3.3), sharey=True)
    for ax, (T, curves) in zip(axes, found.curves.items(), strict=True):
        _three(ax, curves, found.measured[T])
        ax.set(title=f"$T = {T}$", xlabel=r"label noise $\eta$", yscale="log")
        if T == 2:
            c_mm = margin_limit.switch(0.5, curves.label_noise)
            ax.plot(curves.label_noise, c_mm, color=PALETTE["neutral"], linestyle=":", label="max-margin solution")
        else:
            ax.fill_between(curves.label_noise, curves.late, curves.uneven, color=PALETTE["noisy"], alpha=0.25)
        ax.set_yticks([1.5, 2, 3, 4, 6], ["1.5", "2", "3", "4", "6"])
        ax.yaxis.minorticks_off()
    axes[0].set_ylabel(r"threshold in $c = \mathrm{SNR}\,\sqrt{n}$")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _three(ax: Axes, curves: Curves, measured: Measured) -> None:
    for name, label, color in POINTS:
        ax.plot(curves.label_noise, getattr(curves, name), color=color, label=label, linewidth=1.2)
        _brackets(ax, measured.label_noise, getattr(measured, name), color)


def _brackets(ax: Axes, x, bracket: Bracket, color: str, **line) -> None:
    low, middle, high = (np.atleast_1d(value) for value in (bracket.low, bracket.middle, bracket.high))
    ax.errorbar(
        np.atleast_1d(x), middle, [middle - low, high - middle], color=color, fmt="o", markersize=4, capsize=3, **line
    )


def by_class(found: Thresholds) -> Figure:
    """The late threshold over the class's share of the training set, and over d/n for few and many tokens."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.1))
    share = np.linspace(0.2, 0.8, 60)
    half = np.interp(UNBALANCED_NOISE, found.curves[2].label_noise, found.curves[2].late)
    left.plot(share, half * np.sqrt(0.5 / share), color=PALETTE["theory"], label=r"limit, $\propto 1/\sqrt{\pi}$")
    for k, x in enumerate((CLASS_FRACTION, 1 - CLASS_FRACTION)):
        _brackets(left, x, over_seeds(found.unbalanced.searches[0], k), PALETTE["noisy"])
    left.set(xlabel=r"share $\pi$ of the class", ylabel="late threshold in $c$", title=rf"$\eta={UNBALANCED_NOISE}$")
    left.legend()
    for (T, bracket), color in zip(found.finite_size.late.items(), (PALETTE["clean"], PALETTE["noisy"]), strict=True):
        _brackets(right, D_OVER_N, bracket, color, label=f"$T = {T}$")
        right.plot(D_OVER_N, found.finite_size.limit[T], "x", color=color, markersize=8)
    right.plot([], [], "x", color=PALETTE["theory"], label=r"limit with a head start $\sqrt{Kn/d}$")
    right.set(xlabel="$d/n$", xscale="log", title=rf"$\eta={FINITE_SIZE_NOISE}$")
    right.legend()
    return figure
