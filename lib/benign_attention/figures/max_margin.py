"""Figures of chapter max_margin; each takes what `experiments.max_margin` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benign_attention import margin_limit
from benign_attention.experiments.max_margin import (
    STARTS_OF_DESCENT,
    Descents,
    RadiusSweep,
    Rests,
    Shortest,
    Sweep,
    Thresholds,
)
from benign_attention.figures.style import PALETTE, band

SERIES = [PALETTE[k] for k in ("clean", "noisy", "test", "other", "fourth")]
UNIT = (0.0, 1.0)
C = r"signal strength  $c = \mathrm{SNR}\,\sqrt{n}$"
ATTENTION = "attention on the signal"


def sweep(found: Sweep) -> Figure:
    """Margin and test accuracy of the best solution over c, for each label noise, with the limit and c_MM."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.2), sharex=True)
    for k, (noise, color) in enumerate(zip(found.label_noise, SERIES, strict=False)):
        style = {"marker": "o", "markersize": 4}
        band(axes[0], found.c, found.margin[k], rf"$\eta = {noise:g}$", color, linestyle="none", **style)
        fine = np.linspace(found.c[0], found.c[-1], 300)
        limit = margin_limit.best_limit_margin(fine, [0.5, 0.5], [noise, noise])
        axes[0].plot(fine, limit, color=color, linewidth=1)
        band(axes[1], found.c, found.test_accuracy[k], rf"$\eta = {noise:g}$", color, UNIT, **style)
        axes[1].axvline(found.switch[k], color=color, linestyle=":", linewidth=1.2)
    axes[0].set(xlabel=C, ylabel=r"margin $/\,\sqrt{d/n}$")
    axes[1].set(xlabel=C, ylabel="test accuracy", ylim=(0.45, 1.03))
    axes[0].legend(loc="upper left")
    return figure


def attention(found: Sweep) -> Figure:
    """Attention of the best solution on clean and on noisy samples over c, for each label noise."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.1), sharex=True, sharey=True)
    for k, (noise, color) in enumerate(zip(found.label_noise, SERIES, strict=False)):
        for ax, values in zip(axes, (found.clean_attention[k], found.noisy_attention[k]), strict=True):
            band(ax, found.c, values, rf"$\eta = {noise:g}$", color, UNIT, marker="o", markersize=4)
        axes[0].axvline(found.switch[k], color=color, linestyle=":", linewidth=1.2)
    for ax, kind in zip(axes, ("clean", "noisy"), strict=True):
        ax.set(xlabel=C, title=f"{kind} samples", ylim=(-0.03, 1.03))
    axes[0].set_ylabel(ATTENTION)
    axes[0].legend(loc="lower right")
    return figure


def starts(found: Sweep, noise: float) -> Figure:
    """Margin that each start reached, relative to the best of its training set, over c."""
    k = int(np.argmin(np.abs(found.label_noise - noise)))
    n_c = len(found.c)
    rows = found.solutions[k * (len(found.solutions) // len(found.label_noise)) :][: found.margin.shape[1] * n_c]
    figure, ax = plt.subplots(figsize=(7, 3.2))
    kinds = ("signal", "noise", "class +1", "class -1", "uniform", "random")
    markers = "osv^Dx"
    for j, (kind, marker) in enumerate(zip(kinds, markers, strict=True)):
        points = [
            (found.c[i % n_c] * (1 + 0.012 * (j - 2.5)), margin / max(row.found.margins.values()))
            for i, row in enumerate(rows)
            for name, margin in row.found.margins.items()
            if name.startswith(kind)
        ]
        if points:
            color = [*SERIES, PALETTE["neutral"]][j]
            ax.plot(*np.array(points).T, marker, color=color, markersize=4, alpha=0.6, label=kind)
    ax.axvline(found.switch[k], color=PALETTE["theory"], linestyle=":")
    ax.set(xlabel=C, ylabel="margin reached / best of all starts")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="start")
    return figure


def thresholds(found: Thresholds, noise: float) -> Figure:
    """SNR at which the two selections have equal margins over n, and c there over label noise, with c_MM."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3))
    band(
        axes[0],
        found.sizes,
        found.by_size / np.sqrt(found.sizes),
        "measured",
        PALETTE["clean"],
        log=True,
        marker="o",
        markersize=4,
        linestyle="none",
    )
    axes[0].plot(
        found.sizes,
        margin_limit.switch(0.5, noise) / np.sqrt(found.sizes),
        color=PALETTE["theory"],
        linewidth=1,
        label=r"$c_{\rm MM}/\sqrt{n}$",
    )
    axes[0].set(xlabel="training samples $n$", ylabel="SNR at equal margins", xscale="log", yscale="log")
    axes[0].set_xticks(found.sizes, [f"{n:g}" for n in found.sizes])
    axes[0].set_yticks([0.1, 0.2, 0.3, 0.4], ["0.1", "0.2", "0.3", "0.4"])
    axes[0].minorticks_off()
    band(
        axes[1],
        found.label_noise,
        found.by_noise,
        "measured",
        PALETTE["clean"],
        marker="o",
        markersize=4,
        linestyle="none",
    )
    fine = np.linspace(0, found.label_noise[-1], 100)
    axes[1].plot(
        fine, margin_limit.switch(0.5, fine), color=PALETTE["theory"], linewidth=1, label=r"$\sqrt{2/(1-\eta)}$"
    )
    axes[1].set(xlabel=r"label noise $\eta$", ylabel="$c$ at equal margins")
    for ax in axes:
        ax.legend()
    return figure


def radius(found: RadiusSweep) -> Figure:
    """Margin, and cosine of p with the token-selection SVM, over the radius."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3), sharex=True)
    ratio = found.margin / found.hard_margin
    band(axes[0], found.radius, ratio, "margin / that of hard selection", PALETTE["clean"], marker="o", markersize=4)
    band(axes[0], found.radius, found.attention, "attention on the selected token", PALETTE["test"], UNIT)
    band(axes[1], found.radius, found.cosine, "", PALETTE["clean"], (-1, 1), marker="o", markersize=4)
    for ax in axes:
        ax.axhline(1, color=PALETTE["neutral"], linestyle=":", linewidth=1)
        ax.set(xlabel=r"radius  $R\,\sqrt{d/n}$", xscale="log")
        ax.set_xticks(found.radius, [f"{r:g}" for r in found.radius])
        ax.minorticks_off()
    axes[1].set(ylabel="cosine of $p$ with the SVM")
    axes[0].legend(loc="lower right")
    return figure


def shortest(found: Shortest, sweep: Sweep, noise: float) -> Figure:
    """Test accuracy and clean attention of min-norm solutions for each target, beside the max-margin solution."""
    k = int(np.argmin(np.abs(sweep.label_noise - noise)))
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3), sharex=True)
    for j, (target, color) in enumerate(zip(found.targets, SERIES, strict=False)):
        label = f"min norm, margins $\\geq {target:g}$"
        band(axes[0], found.c, found.test_accuracy[j], label, color, UNIT, marker="o", markersize=4)
        band(axes[1], found.c, found.clean_attention[j], label, color, UNIT, marker="o", markersize=4)
    style = {"linestyle": "--"}
    band(axes[0], sweep.c, sweep.test_accuracy[k], "max margin", PALETTE["neutral"], UNIT, **style)
    band(axes[1], sweep.c, sweep.clean_attention[k], "max margin", PALETTE["neutral"], UNIT, **style)
    axes[0].set(xlabel=C, ylabel="test accuracy", ylim=(0.45, 1.03))
    axes[1].set(xlabel=C, ylabel=f"{ATTENTION}, clean", ylim=(-0.03, 1.03))
    axes[1].legend(loc="lower right", fontsize=8)
    return figure


def descents(point: Descents, between: Descents, between_c: float) -> Figure:
    """Gradient descent against the best solution within its own |p|; one line for each training set."""
    figure, axes = plt.subplots(1, 3, figsize=(7.6, 3), sharex=True)
    names = ("cosine_p", "margin_ratio", "test_accuracy")
    for found, color, label in (
        (point, PALETTE["clean"], "the page's $c$"),
        (between, PALETTE["noisy"], f"$c = {between_c:g}$, balanced"),
    ):
        for ax, name in zip(axes, names, strict=True):
            lines = ax.plot(found.axis, found.field(name).T, color=color, marker="o", markersize=3, alpha=0.7)
            lines[0].set_label(label)
    decays = point.axis[0] < 1
    for ax, label in zip(axes, ("cosine of $p$", "margin / best margin", "test accuracy"), strict=True):
        ax.set(xlabel=r"weight decay  $\omega n/d$" if decays else "time  $t\\,d/n$", xscale="log", title=label)
        ax.set_xticks(point.axis)
        ax.minorticks_off()
    if decays:
        axes[0].invert_xaxis()
    axes[0].axhline(1, color=PALETTE["neutral"], linestyle=":", linewidth=1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def rests(point: Rests, between: Rests) -> Figure:
    """Excess of the objective at points of rest over the least one known, by start; a dot a training set."""
    figure, ax = plt.subplots(figsize=(7, 3.2))
    y = np.arange(len(STARTS_OF_DESCENT))[::-1]
    for found, color, label, shift in (
        (point, PALETTE["clean"], "the page's $c$", 0.15),
        (between, PALETTE["noisy"], "between the thresholds", -0.15),
    ):
        excess = 100 * (found.objective / np.fmin.reduce(found.objective, axis=1)[:, None] - 1)
        jitter = 0.02 * (np.arange(len(excess)) - (len(excess) - 1) / 2)
        lines = ax.plot(excess.T, y[:, None] + shift + jitter, "o", color=color, markersize=4, alpha=0.7)
        lines[0].set_label(label)
    ax.set_yticks(y, STARTS_OF_DESCENT)
    ax.set(xlabel="objective above the least known, per cent")
    ax.legend()
    return figure
