"""Figures of chapter baselines; each takes what `experiments.baselines` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benign_attention.experiments.baselines import (
    LINEAR,
    MODELS,
    STRONG_MODELS,
    VARIANTS,
    LinearErrors,
    SampleSize,
    Strong,
    label_of,
    read,
)
from benign_attention.figures.style import PALETTE, band

NAMES = {
    "linear_concat": "linear, concatenated",
    "linear_mean": "linear, mean token",
    "mlp": "MLP",
    "cnn_relu": "CNN, ReLU",
    "cnn_relu2": "CNN, ReLU²",
    "cnn_relu3": "CNN, ReLU³",
    "attention": "attention",
    "linear_concat_fixed": "linear, concatenated, fixed position",
    "mlp_fixed": "MLP, fixed position",
}
COLORS = dict(
    zip(
        ("attention", "linear_concat", "linear_mean", "cnn_relu", "cnn_relu2", "mlp", "cnn_relu3"),
        (PALETTE[k] for k in ("clean", "noisy", "test", "fourth", "other", "neutral", "theory")),
        strict=True,
    )
)
MARKERS = dict(zip(COLORS, "os^DvPX", strict=True))
PANELS = (
    (("attention", False), ("linear_mean", False), ("cnn_relu", False), ("cnn_relu2", False), ("cnn_relu3", False)),
    (("attention", False), ("linear_concat", False), ("linear_concat", True), ("mlp", False), ("mlp", True)),
)


def linear_errors(found: LinearErrors) -> Figure:
    """Test error of max-margin linear classifiers over c, with the closed form."""
    figure, axes = plt.subplots(1, len(found.n_tokens), figsize=(7.4, 3.3), sharey=True)
    for j, (ax, T) in enumerate(zip(axes, found.n_tokens, strict=True)):
        for k, (variant, color) in enumerate(zip(LINEAR, ("test", "noisy", "clean"), strict=True)):
            measured = np.where(np.isnan(found.measured[k, j]).any(axis=0), np.nan, found.measured[k, j])
            label = NAMES[label_of(variant)] + (", random position" if variant == ("linear_concat", False) else "")
            band(
                ax,
                found.c,
                measured,
                label,
                PALETTE[color],
                (-np.inf, 0),
                marker="os^"[k],
                markersize=4,
                linestyle="none",
            )
            ax.plot(found.c, found.predicted[k, j], color=PALETTE[color], linestyle=("-", "-", "--")[k], linewidth=1)
        ax.set(title=f"$T = {T}$", xlabel=r"$c = \mathrm{SNR}\,\sqrt{n}$", xscale="log", ylim=(-4.2, 0.2))
        ax.set_xticks([0.25, 0.5, 1, 2], ["0.25", "0.5", "1", "2"])
        ax.minorticks_off()
    axes[0].set_ylabel(r"$\log_{10}$ clean test error")
    axes[0].legend(fontsize=8, loc="lower left")
    return figure


def sample_size(found: SampleSize, criterion: str) -> Figure:
    """Sample size over SNR; arrows where the largest size tried fails in most runs."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 4.6), sharey=True)
    order = np.argsort(found.snr)
    for ax, panel in zip(axes, PANELS, strict=True):
        for j, (name, fixed) in enumerate(panel):
            k = VARIANTS.index((name, fixed))
            lower, upper = found.lower[criterion][k][order], found.upper[criterion][k][order]
            known = (lower > 0) & np.isfinite(upper)
            logs = np.where(known, np.log(np.where(known, lower * upper, 1.0)) / 2, np.nan)
            failed = np.isinf(upper).mean(axis=1) > 0.5
            x = found.snr[order] * (1 + 0.02 * (j - 2))
            style = {"color": COLORS[name], "marker": MARKERS[name], "linestyle": ":" if fixed else "-"}
            shown = known.any(axis=1) & ~failed
            middle = np.full(len(x), np.nan)
            middle[shown] = [np.exp(np.nanmean(row)) for row in logs[shown]]
            ends = [[np.exp(f(row[np.isfinite(row)])) for f in (np.min, np.max)] for row in logs[shown]]
            spread = np.abs(np.array(ends).reshape(-1, 2).T - middle[shown])
            label = NAMES[label_of((name, fixed))]
            hollow = {"markerfacecolor": "white"} if fixed else {}
            ax.errorbar(x[shown], middle[shown], spread, label=label, markersize=5, linewidth=1.2, **style, **hollow)
            top = lower[failed].max(axis=1) if failed.any() else []
            ax.plot(x[failed], top, linestyle="none", marker="^", markersize=8, color=COLORS[name], fillstyle="none")
            if np.isfinite(found.predicted[k]).any():
                ax.plot(found.snr[order], found.predicted[k][order], color=COLORS[name], linewidth=0.8, linestyle="--")
        ax.set(xscale="log", yscale="log", xlabel=r"SNR $= \rho/\sqrt{d}$")
        ax.set_xticks(found.snr, [f"{s:g}" for s in found.snr])
        ax.minorticks_off()
        tried = np.concatenate([found.lower[criterion].ravel(), found.upper[criterion].ravel()])
        ax.set_ylim(top=3 * max(1, tried[np.isfinite(tried)].max()))
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes[0].set_ylabel("samples needed for test error 0.05")
    return figure


def strong(found: Strong) -> Figure:
    """Test accuracy of fitted models over a strong signal, and of attention at a fixed step."""
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    for name in STRONG_MODELS:
        band(
            ax,
            found.snr,
            found.of(name, "test_accuracy"),
            NAMES[name],
            COLORS[name],
            (0, 1),
            marker=MARKERS[name],
            markersize=5,
        )
    values = found.fixed_step.test_accuracy
    band(ax, found.snr, values, "attention, fixed step $b=5$", COLORS["attention"], (0, 1), linestyle=":", marker="x")
    ax.axvspan(0, found.snr[0] / found.c[0], color=PALETTE["neutral"], alpha=0.15, linewidth=0)
    ax.set(xscale="log", xlabel=r"SNR $= \rho/\sqrt{d}$", ylabel="clean test accuracy", ylim=(0.4, 1.03))
    ax.set_xlim(found.snr[0] * 0.45, found.snr[-1] * 1.2)
    ax.set_xticks(found.snr, [f"{s:.2g}" for s in found.snr])
    ax.minorticks_off()
    ax.legend(fontsize=8, loc="center right")
    return figure


def regimes(searches: np.ndarray) -> Figure:
    """Test accuracy of every model in two places; filled: best stop that fits all labels, hollow: the last one."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.9), sharey=True)
    titles = ("weak signal, high dimension", "eight tokens, low dimension")
    for ax, runs, title in zip(axes, searches, titles, strict=True):
        for k, name in enumerate(MODELS):
            fitted, last = (read(runs[k], c, "test_accuracy") for c in ("fitted", "last"))
            ax.plot(fitted, np.full(len(fitted), k - 0.13), MARKERS[name], color=COLORS[name], alpha=0.7)
            ax.plot(last, np.full(len(last), k + 0.17), MARKERS[name], color=COLORS[name], fillstyle="none")
        ax.axvline(0.95, color=PALETTE["theory"], linewidth=1, linestyle="--")
        ax.set(title=title, xlabel="clean test accuracy", xlim=(0.45, 1.02))
    axes[0].set_yticks(range(len(MODELS)), [NAMES[name] for name in MODELS])
    axes[0].invert_yaxis()
    return figure
