"""Figures of chapter multi_step_dynamics; each takes what `experiments.multi_step_dynamics` returns."""

from __future__ import annotations

import math

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from benign_attention.experiments.multi_step_dynamics import (
    POOR,
    SHARES_OF_THRESHOLD,
    DescentAgainstFlow,
    InitialWeights,
    LossTimes,
    Shares,
    SizeMap,
    Snapshot,
    StepMap,
    StrongSignal,
    TokenCounts,
    Trajectories,
    Windows,
)
from benign_attention.figures.style import PALETTE, band

UNIT = (0.0, 1.0)
LEAST_LOSS = 1e-2  # lower end of the axis of test losses, so that slow growth shows


def _colors(count: int) -> list:
    return [mpl.colormaps["viridis"](x) for x in np.linspace(0.0, 0.85, count)]


def _lines(ax, x, found: Snapshot, name: str, labels, bounds=UNIT, **line) -> None:
    """One band for each entry of the last axis of the field `name`, (n_seeds, x, entries)."""
    values = getattr(found, name)
    for k, (label, color) in enumerate(zip(labels, _colors(values.shape[-1]), strict=True)):
        band(ax, x, values[..., k], label, color, bounds, **line)


def accuracy(found: Trajectories) -> Figure:
    """Test accuracy, test loss and train loss over time for several c; lines: flow, dots: gradient descent."""
    figure, axes = plt.subplots(3, 1, figsize=(7, 7.2), sharex=True)
    labels = [f"{share:g} ({c:.2g})" for share, c in zip(SHARES_OF_THRESHOLD, found.c, strict=True)]
    none = [None] * len(labels)
    free = (-np.inf, np.inf)
    for ax, name, bounds in zip(axes, ("test_accuracy", "test_loss", "train_loss"), (UNIT, free, free), strict=True):
        log = name != "test_accuracy"
        _lines(ax, found.times, found.flow, name, labels, bounds, log=log)
        dots = {"marker": "o", "markersize": 3, "linestyle": "none"}
        _lines(ax, found.step_times, found.descent, name, none, bounds, log=log, **dots)
    band(axes[0], found.times, found.flow.train_accuracy.min(axis=-1), "train, lowest", PALETTE["noisy"], UNIT, ls=":")
    axes[0].set(ylabel="accuracy", ylim=(0.48, 1.02))
    axes[0].legend(title="c / threshold (c)", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[1].set(ylabel="test loss", yscale="log", ylim=(LEAST_LOSS, None))
    axes[2].set(ylabel="train loss", yscale="log", xscale="log", xlabel="time t = step size × steps")
    return figure


def attention(found: Trajectories) -> Figure:
    """Attention on the signal of clean and noisy samples over time."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), sharex=True, sharey=True)
    labels = [f"{share:g}" for share in SHARES_OF_THRESHOLD]
    for ax, name in zip(axes, ("clean", "noisy"), strict=True):
        _lines(ax, found.times, found.flow, f"{name}_attention", labels)
        dots = {"marker": "o", "markersize": 3, "linestyle": "none"}
        _lines(ax, found.step_times, found.descent, f"{name}_attention", [None] * len(labels), **dots)
        ax.set(title=f"{name} samples", xscale="log", xlabel="time t", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("attention on the signal token")
    axes[1].legend(title="c / threshold", fontsize=8)
    return figure


def weights(found: Trajectories) -> Figure:
    """Lengths of the signal and noise parts of p and v over time, flow, below and above the threshold."""
    chosen = (1, len(found.c) - 1)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), sharex=True, sharey=True)
    for ax, k in zip(axes, chosen, strict=True):
        for name, label, color in (
            ("p_signal", "p, signal", "clean"),
            ("p_noise", "p, noise", "noisy"),
            ("v_signal", "v, signal", "test"),
            ("v_noise", "v, noise", "other"),
        ):
            values = getattr(found.flow, name)[..., k]
            band(ax, found.times, values, label, PALETTE[color], log=True)
        title = f"c = {found.c[k]:.2g}, {SHARES_OF_THRESHOLD[k]:g} × threshold"
        ax.set(title=title, xscale="log", yscale="log", xlabel="time t")
    axes[0].set_ylabel("length")
    axes[1].legend(fontsize=8, loc="lower right")
    return figure


def descent_against_flow(found: DescentAgainstFlow) -> Figure:
    """Difference of attention between gradient descent and flow at one time, over step size."""
    figure, ax = plt.subplots(figsize=(5.6, 3.2))
    band(ax, found.b, found.difference, "measured", PALETTE["clean"], log=True, marker="o")
    last = float(np.nanmean(found.difference[:, -1]))
    ax.plot(found.b, last * found.b / found.b[-1], color=PALETTE["theory"], linestyle="--", label="slope 1")
    ax.set(xscale="log", yscale="log", xlabel=r"step size  $b = \beta d/n$", ylabel="difference of attention")
    ax.legend()
    return figure


def step_map(found: StepMap, mark: tuple[float, float], threshold: float, late: int) -> Figure:
    """Test accuracy after 2 and after `late` steps, fit and attention, over (c, b); bottom strip: flow at t_max."""
    panels = (
        ("test accuracy,\n2 steps", found.descent.test_accuracy[:, 0], None),
        (f"test accuracy,\n{late} steps", found.descent.test_accuracy[:, 1], found.flow.test_accuracy),
        (f"all labels fitted,\n{late} steps", found.descent.train_accuracy[:, 1] == 1, found.flow.train_accuracy == 1),
        (f"clean attention,\n{late} steps", found.descent.clean_attention[:, 1], found.flow.clean_attention),
    )
    figure, axes = plt.subplots(2, 4, figsize=(8, 3.5), sharex=True, sharey="row", height_ratios=(8, 1))
    for (ax, strip), (title, values, by_flow) in zip(axes.T, panels, strict=True):
        image = ax.pcolormesh(found.c, found.b, values.mean(axis=0).T, norm=Normalize(0, 1), shading="nearest")
        ax.plot(*mark, marker="+", color="white", markersize=9, markeredgewidth=2)
        ax.set(title=title, xscale="log", yscale="log")
        if by_flow is None:
            strip.text(0.5, 0.5, "–", ha="center", va="center", transform=strip.transAxes)
        else:
            row = np.tile(by_flow.mean(axis=0), (2, 1))
            strip.pcolormesh(found.c, [0, 1], row, norm=Normalize(0, 1), shading="nearest")
            strip.axvline(threshold, color=PALETTE["noisy"])
        ax.axvline(threshold, color=PALETTE["noisy"])
        strip.set(xlabel="c", yticks=[], xticks=[0.5, 1, 2, 5], xticklabels=["0.5", "1", "2", "5"])
        strip.minorticks_off()
        for each in (ax, strip):
            each.grid(False)
    axes[0, 0].set_ylabel("b")
    axes[1, 0].set_ylabel("flow", rotation=0, ha="right", va="center")
    figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.01)
    return figure


def windows(found: Windows, n_tokens: int, late: int) -> Figure:
    """Attention on the signal over step size after 2 and `late` steps; bars: steps where all conclusions hold."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.1), sharey=True)
    for k, (ax, steps) in enumerate(zip(axes, (2, late), strict=True)):
        for name in ("clean", "noisy"):
            values = getattr(found.found, f"{name}_attention")[:, k]
            band(ax, found.b, values, f"attention, {name}", PALETTE[name], UNIT)
        band(ax, found.b, found.found.test_accuracy[:, k], "test accuracy", PALETTE["test"], UNIT, linestyle="--")
        inside = found.inside[:, k].all(axis=0)
        ax.fill_between(found.b, 0, 1, where=inside, color=PALETTE["neutral"], alpha=0.2, linewidth=0, label="all hold")
        ax.axhline(1 / n_tokens, color=PALETTE["theory"], linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlabel=r"$b = \beta d/n$", title=f"{steps} steps", ylim=(-0.03, 1.03))
    axes[1].legend(fontsize=8, loc="center left")
    return figure


def strong_signal(found: StrongSignal, step_time: float) -> Figure:
    """Test accuracy and clean attention at c = 5 for two steps b and the flow; `step_time`: t of a step of b = 1."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.1), sharex=True)
    colors = (PALETTE["noisy"], PALETTE["clean"])
    for ax, name, label in zip(
        axes, ("test_accuracy", "clean_attention"), ("test accuracy", "attention, clean samples"), strict=True
    ):
        for k, (b, color) in enumerate(zip(found.b, colors, strict=True)):
            values = getattr(found.descent, name)[..., k]
            band(ax, found.steps * b * step_time, values, f"b = {b:.2g}", color, UNIT, marker="o", markersize=3)
        shown = found.times < 1e4 * found.steps[-1] * found.b[0] * step_time
        values = getattr(found.flow, name)[:, shown]
        band(ax, found.times[shown], values, "flow", PALETTE["theory"], UNIT, linestyle="--")
        ax.set(xscale="log", xlabel="time t = step size × steps", ylabel=label, ylim=(-0.03, 1.03))
    axes[0].legend(fontsize=8, loc="lower right")
    return figure


def size_map(found: SizeMap, threshold: float, late: int) -> Figure:
    """Train and test accuracy over (n, SNR) after 2 and `late` steps, with curves c / sqrt(n)."""
    rows = [(0, 0), (1, 0), (1, 1)]
    figure, axes = plt.subplots(len(rows), 2, figsize=(7, 7), sharex=True, sharey=True)
    fine = np.geomspace(found.n_train[0], found.n_train[-1], 60)
    for (moment, k), pair in zip(rows, axes, strict=True):
        for ax, name in zip(pair, ("train_accuracy", "test_accuracy"), strict=True):
            cells = getattr(found.found, name)[:, moment, :, :, k].mean(axis=0)
            image = ax.pcolormesh(found.n_train, found.snr, cells.T, norm=Normalize(0.5, 1), shading="nearest")
            for c, style in ((threshold, "-"), (1.0, ":"), (4.0, "--")):
                label = f"c = {c:.2g}" + (" (threshold)" if c == threshold else "")
                ax.plot(fine, c / np.sqrt(fine), color=PALETTE["noisy"], linestyle=style, label=label)
            kind = name.split("_")[0]
            ax.set(title=f"{kind}, {(2, late)[moment]} steps, b = {found.b[k]:.2g}", xscale="log", yscale="log")
            ax.set_ylim(found.snr[0], found.snr[-1])
            ax.grid(False)
            ax.set_xticks(found.n_train, [f"{n}" for n in found.n_train])
            ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if found.snr[0] <= x <= found.snr[-1]]
            ax.set_yticks(ticks, [f"{x:g}" for x in ticks])
            ax.minorticks_off()
        pair[0].set_ylabel("SNR")
    for ax in axes[-1]:
        ax.set_xlabel("n")
    figure.colorbar(image, ax=axes, shrink=0.5, aspect=30, pad=0.01, label="accuracy")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    return figure


def loss_times(found: LossTimes) -> Figure:
    """log10 of the time at which generalisation is lost over d/n, several c, with the orthogonal limit."""
    figure, ax = plt.subplots(figsize=(6.8, 3.6))
    for k, (c, color) in enumerate(zip(found.c, _colors(found.c.size), strict=True)):
        values, limit = (np.where(np.isfinite(x), x / math.log(10), np.nan) for x in (found.log_time, found.log_limit))
        band(ax, found.d_over_n, values[:, k], f"c = {c:.2g}", color, marker="o", linestyle="none")
        ax.plot(found.d_over_n, limit[k], color=color)
        censored = np.isposinf(found.log_time[:, k]).all(axis=0)
        ax.plot(found.d_over_n[censored], found.log_last[censored] / math.log(10), "^", color=color)
    ax.plot([], [], color=PALETTE["neutral"], label="orthogonal limit")
    ax.set(xscale="log", xlabel="d/n", ylabel=rf"$\log_{{10}}$ of t d/n when test < {POOR:g}")
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def shares(found: Shares) -> Figure:
    """Largest noise token's share over time for several T; and when it wins, over d/n."""
    figure, (ax, right) = plt.subplots(1, 2, figsize=(7.6, 3.3), width_ratios=(3, 2))
    for k, (T, color) in enumerate(zip(found.n_tokens, ("clean", "noisy", "test"), strict=True)):
        band(ax, found.times, found.flow.largest_share[k], f"T = {T}", PALETTE[color], UNIT)
        dots = {"marker": "o", "markersize": 3, "linestyle": "none"}
        band(ax, found.step_times, found.descent.largest_share[k], None, PALETTE[color], UNIT, **dots)
        ax.axhline(1 / (T - 1), color=PALETTE[color], linewidth=0.8, linestyle=":")
    ax.set(xscale="log", xlabel="time t", ylabel="share of the noise mass", ylim=(0, 1.03))
    ax.set_xlim(found.times[0], max(1e3 * found.step_times[-1], 10 * found.times[0]))
    ax.legend(fontsize=8)
    finite = np.where(np.isfinite(found.log_win), found.log_win, np.nan)
    band(right, found.d_over_n, np.exp(finite), None, PALETTE["clean"], log=True, marker="o")
    right.set(xscale="log", yscale="log", xlabel="d/n", ylabel="t d/n at share 3/4", title="T = 3")
    return figure


def token_counts(found: TokenCounts, late: int) -> Figure:
    """Clean attention and test accuracy over T under three kinds of steps, and clean attention over d/n."""
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.6), sharey=True)
    names = ("clean_attention", "test_accuracy")
    for ax, name in zip(axes[:2], names, strict=True):
        for series, text, color in ((found.fixed, "b fixed", "clean"), (found.scaled, "b ∝ T", "noisy")):
            for moment, style in ((0, ":"), (1, "-")):
                values = getattr(series, name)[..., moment].T
                label = f"{text}, {(2, late)[moment]} steps"
                band(ax, found.n_tokens, values, label, PALETTE[color], UNIT, linestyle=style)
        band(ax, found.n_tokens, getattr(found.flow, name).T, "flow", PALETTE["theory"], UNIT, linestyle="--")
        ax.set(xscale="log", xlabel="tokens T", title=name.replace("_", " "), ylim=(-0.03, 1.03))
        ax.set_xticks(found.n_tokens, [f"{T}" for T in found.n_tokens])
        ax.minorticks_off()
    for series, T, color in ((found.few, 2, "test"), (found.many, found.many_tokens, "other")):
        values = series.clean_attention.T
        band(axes[2], found.d_over_n, values, f"T = {T}", PALETTE[color], UNIT, marker="o", markersize=4)
    axes[2].set(xscale="log", xlabel="d/n", title=f"clean attention,\nb fixed, {late} steps")
    axes[2].legend(fontsize=8, loc="center right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def initial_weights(found: InitialWeights) -> Figure:
    """Test accuracy and clean attention over steps for several scales of random initial weights."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.1), sharex=True)
    for ax, name, label in zip(
        axes, ("test_accuracy", "clean_attention"), ("test accuracy", "attention, clean samples"), strict=True
    ):
        for k, (scale, color) in enumerate(zip(found.scales, _colors(found.scales.size), strict=True)):
            style = "--" if scale == 0 else "-"
            values = getattr(found.descent, name)[k]
            band(ax, found.steps, values, f"{scale:g}", color, UNIT, linestyle=style)
        ax.set(xscale="log", xlabel="steps", ylabel=label, ylim=(-0.03, 1.03))
    axes[0].legend(title=r"$s\sqrt{d}$", fontsize=8, loc="lower right")
    return figure
