"""Figures of chapter token_selection; each takes what `experiments.token_selection` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from benign_attention.experiments.token_selection import (
    CONFUSING,
    IRRELEVANT,
    REGIMES,
    RELEVANT,
    WEAK,
    Encoder,
    HeatMap,
    Late,
    Plane,
    Regimes,
    Release,
    Selected,
)
from benign_attention.figures.style import PALETTE, band
from benign_attention.records import seed_metric
from benign_attention.selection_theory import best_value_shares, untrained_accuracy, waiting_rate

UNIT = (0.0, 1.0)
SERIES = [PALETTE[k] for k in ("clean", "noisy", "test", "other", "fourth")]
ROLE_COLORS = {RELEVANT: PALETTE["clean"], WEAK: PALETTE["fourth"], CONFUSING: PALETTE["noisy"], IRRELEVANT: "#999999"}
ROLE_NAMES = {RELEVANT: "relevant", WEAK: "weakly relevant", CONFUSING: "confusing", IRRELEVANT: "irrelevant"}
REGIME_NAMES = ("benign", "weak signal", "strong signal")


def _title(regime: int) -> str:
    dim, norm = REGIMES[regime]
    return f"{REGIME_NAMES[regime]}\n$d={dim}$, $|\\mu|={norm:g}$"


def _power(time: float) -> str:
    return f"10^{{{np.log10(time):.0f}}}"


def regimes(found: Regimes) -> Figure:
    """Accuracy and loss over gradient steps in the three regimes."""
    figure, axes = plt.subplots(2, 3, figsize=(8, 4.6), sharex=True, sharey="row")
    for k, (above, below) in enumerate(axes.T):
        reading = found.descent[k]
        for name, label, color, line in (
            ("clean_train_accuracy", "train, true labels", PALETTE["clean"], "-"),
            ("noisy_train_accuracy", "train, flipped labels", PALETTE["noisy"], "-"),
            ("test_accuracy", "fresh data", PALETTE["test"], "--"),
        ):
            band(above, found.steps, getattr(reading, name), label, color, UNIT, linestyle=line, linewidth=2)
        for name, label, color, line in (
            ("train_loss", "train", PALETTE["theory"], "-"),
            ("test_loss", "fresh data", PALETTE["test"], "--"),
        ):
            band(below, found.steps, getattr(reading, name), label, color, (0, np.inf), linestyle=line, linewidth=2)
        above.set(title=_title(k), ylim=(-0.04, 1.04))
        below.set(xlabel="gradient steps", xscale="log")
    axes[0, 0].set_ylabel("accuracy")
    axes[1, 0].set_ylabel("mean logistic loss")
    axes[0, 0].legend(fontsize=8, loc="center left")
    axes[1, 0].legend(fontsize=8, loc="lower left")
    return figure


def sample_attention(found: Regimes) -> Figure:
    """Attention of the first clean and the first flipped sample, token by token."""
    figure, axes = plt.subplots(2, 3, figsize=(8, 4.4), sharex=True, sharey=True)
    for k in range(3):
        for kind, ax in enumerate(axes[:, k]):
            tokens = found.samples[k, kind].T
            for t in reversed(range(len(tokens))):
                role = min(t, IRRELEVANT)
                label = ROLE_NAMES[role] if t <= IRRELEVANT else None
                ax.plot(
                    found.steps,
                    tokens[t],
                    color=ROLE_COLORS[role],
                    linewidth=1 if role == IRRELEVANT else 2,
                    label=label,
                    zorder=2 - (role == IRRELEVANT),
                )
            ax.set_ylim(-0.04, 1.04)
        axes[0, k].set_title(_title(k))
        axes[1, k].set(xlabel="gradient steps", xscale="log")
    axes[0, 0].set_ylabel("clean sample\nattention")
    axes[1, 0].set_ylabel("flipped sample\nattention")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4)
    return figure


def planes(found: list[Plane], titles: list[str]) -> Figure:
    """Attended outputs in the plane of the two signals."""
    figure, axes = plt.subplots(2, 2, figsize=(6.4, 7.4), sharex=True, sharey=True)
    for ax, plane, title in zip(axes.flat, found, titles, strict=True):
        for y, marker in ((1.0, "o"), (-1.0, "s")):
            here = plane.fresh_labels == y
            ax.plot(*plane.fresh_position[here].T, marker, color=PALETTE["test"], alpha=0.25, markersize=3, mew=0)
            for kind, name in ((False, "clean"), (True, "noisy")):
                here = (plane.clean_labels == y) & (plane.noisy == kind)
                ax.plot(*plane.position[here].T, marker, color=PALETTE[name], markersize=7, mec="white", mew=0.7)
        low, high = -0.75, 1.6
        ax.plot([low, high], [low, high], color=PALETTE["theory"], linewidth=0.8, linestyle=":")
        ax.set(
            xlim=(low, high),
            ylim=(low, high),
            aspect="equal",
            title=f"{title}\naccuracy: {plane.train_accuracy:.2f} train, {plane.test_accuracy:.2f} fresh",
        )
    for ax in axes[-1]:
        ax.set_xlabel(r"along $\mu_+$")
    for ax in axes[:, 0]:
        ax.set_ylabel(r"along $\mu_-$")
    for color, label in (("clean", "train, true label"), ("noisy", "train, flipped label"), ("test", "fresh")):
        axes[0, 0].plot([], [], "o", color=PALETTE[color], label=label)
    for marker, label in (("o", r"true class $+$"), ("s", r"true class $-$")):
        axes[0, 0].plot([], [], marker, color="none", mec=PALETTE["theory"], label=label)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def selected(found: Selected) -> Figure:
    """Tokens that flipped samples look at most, over signal norm and over time."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for role in (CONFUSING, IRRELEVANT, WEAK, RELEVANT):
        for ax, x, reading in (
            (axes[0], found.norms, found.over_norm.noisy_selected[..., role].T),
            (axes[1], found.times, found.over_time.noisy_selected[..., role]),
        ):
            band(ax, x, reading, ROLE_NAMES[role], ROLE_COLORS[role], UNIT, linewidth=2, marker="o", markersize=3)
    for ax, x in zip(axes, (found.norms, found.times), strict=True):
        ax.set_xlim(0.8 * x.min(), 1.25 * x.max())
    axes[0].set(xscale="log", xlabel=r"signal norm $|\mu|$", ylabel="share of flipped samples", ylim=(-0.04, 1.04))
    axes[0].set_xticks([5, 10, 20, 40, 100], ["5", "10", "20", "40", "100"])
    axes[0].minorticks_off()
    axes[0].legend(fontsize=8, loc="center right")
    axes[1].set(xscale="log", xlabel="flow time $t$")
    return figure


def selected_by_size(found: Selected, n_tokens: int) -> Figure:
    """Share of flipped samples that select the confusing token over rho_w |mu|, with the prediction."""
    figure, ax = plt.subplots(figsize=(5.6, 3.5))
    size = np.geomspace(0.3, 8, 60)
    ratio = float(found.ratios[0])
    chance = [best_value_shares(s / ratio, ratio, n_tokens)[CONFUSING] for s in size]
    ax.plot(size, chance, color=PALETTE["theory"], label="has the best value (theory)")
    shift = np.exp(0.05 * (np.arange(len(found.ratios)) - 1))
    for k, ratio in enumerate(found.ratios):
        shares = found.over_size.noisy_selected[k, ..., CONFUSING]
        label = rf"selected, $\rho_w={ratio:g}$"
        _points(ax, found.sizes * shift[k], shares, label, SERIES[k])
    ax.set(xscale="log", xlabel=r"$\rho_w|\mu|$", ylabel="share, confusing token", ylim=(-0.04, 1.04))
    ax.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ax.minorticks_off()
    ax.legend(loc="upper left", fontsize=9)
    return figure


def _points(ax: Axes, place, per_seed: np.ndarray, label: str, color: str, bounds=UNIT, flat: bool = False) -> None:
    """Mean and 95 % interval as points with error bars, horizontal if `flat`. per_seed : (len(place), n_seeds)."""
    metrics = [seed_metric(row, bounds) for row in per_seed]
    mean, low, high = (np.array([getattr(m, k) for m in metrics], float) for k in ("value", "low", "high"))
    style = {"fmt": "o", "color": color, "label": label, "capsize": 2, "markersize": 4}
    error = [mean - low, high - mean]
    if flat:
        ax.errorbar(mean, place, xerr=error, **style)
    else:
        ax.errorbar(place, mean, yerr=error, **style)


def heat_map(found: HeatMap) -> Figure:
    """Train and test loss over dimension and signal norm, with the limit's boundaries and the published ones."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.9), sharex=True, sharey=True)
    for ax, name, title in zip(axes, ("train_loss", "test_loss"), ("train loss", "test loss"), strict=True):
        cells = getattr(found.reading, name).mean(axis=-1).T
        image = ax.pcolormesh(found.dims, found.norms, cells, shading="nearest", rasterized=True)
        figure.colorbar(image, ax=ax, location="top", label=title, shrink=0.9)
        ax.grid(False)
        ax.set(xlabel="dimension $d$", xlim=_edges(found.dims), ylim=_edges(found.norms))
    axes[0].plot(found.dims, found.noisy_boundary, color="white", linewidth=2)
    axes[1].plot(found.dims, found.fresh_boundary, color="white", linewidth=2)
    published = {"color": PALETTE["noisy"], "linewidth": 1.8, "linestyle": "--"}
    axes[0].plot([250, 1200, 1200], [55, 55, 100], **published)
    axes[1].plot([250, 5000], [20, 20], **published)
    axes[0].set_ylabel(r"signal norm $|\mu|$")
    return figure


def _edges(centres: np.ndarray) -> tuple[float, float]:
    half = (centres[-1] - centres[0]) / (2 * (len(centres) - 1))
    return float(centres[0] - half), float(centres[-1] + half)


def heat_map_by_signal(found: HeatMap) -> Figure:
    """The cells of the map over x = n SNR^2, coloured by dimension."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True)
    for ax, name, title in zip(axes, ("train_loss", "test_loss"), ("train loss", "test loss"), strict=True):
        cells = getattr(found.reading, name).mean(axis=-1)
        dims = np.broadcast_to(found.dims[:, None], cells.shape)
        fitted = (found.reading.train_accuracy == 1).mean(axis=-1) > 0.5
        norm = LogNorm(found.dims[0], found.dims[-1])
        for marker, here, label in (
            ("o", fitted, "all labels fitted"),
            ("X", ~fitted, "not all labels fitted"),
        ):
            dots = ax.scatter(
                found.n_snr2[here],
                cells[here],
                c=dims[here],
                norm=norm,
                marker=marker,
                s=26,
                linewidths=0.3,
                edgecolors="white",
                label=label,
            )
        ax.set(xscale="log", xlabel=r"$x = n\,\mathrm{SNR}^2$", ylabel=title)
    axes[1].legend(fontsize=8, loc="upper right")
    bar = figure.colorbar(dots, ax=axes, label="dimension $d$", pad=0.01)
    bar.set_ticks([250, 500, 1000, 2000, 5000], labels=["250", "500", "1000", "2000", "5000"])
    bar.minorticks_off()
    return figure


def late(found: Late, n_tokens: int) -> Figure:
    """Flipped labels fitted, test accuracy and fresh attention over x, at two times."""
    figure, axes = plt.subplots(3, 2, figsize=(7, 6), sharex=True, sharey="row")
    for k, time in enumerate(found.times):
        for j, dim in enumerate(found.dims):
            reading = found.reading[:, j, :, k]
            for ax, values in zip(
                axes[:, k],
                (reading.noisy_train_accuracy, reading.test_accuracy, reading.test_attention[..., RELEVANT]),
                strict=True,
            ):
                style = {"linestyle": "-" if j else "--", "marker": "o", "markersize": 4, "linewidth": 2}
                band(ax, found.n_snr2, values.T, f"$d = {dim:g}$", SERIES[j], UNIT, **style)
            untrained = untrained_accuracy(found.norms[:, j], n_tokens)
            axes[1, k].plot(found.n_snr2, untrained, color=SERIES[j], linestyle="-.", linewidth=1)
        axes[0, k].set_title(f"$t = {time:g}$" if time < 1e3 else f"$t = {_power(time)}$")
        axes[-1, k].set(xscale="log", xlabel=r"$x = n\,\mathrm{SNR}^2$")
        axes[-1, k].axhline(1 / n_tokens, color=PALETTE["theory"], linewidth=0.8, linestyle=":")
    for ax, label in zip(
        axes[:, 0],
        ("flipped labels\nfitted", "accuracy,\nfresh data", "attention on the\nrelevant token, fresh"),
        strict=True,
    ):
        ax.set(ylabel=label, ylim=(-0.04, 1.04))
    axes[1, 0].set_ylim(0.48, 1.02)
    axes[0, 0].legend(fontsize=9, loc="lower left")
    return figure


def release(found: Release, label_noise: float) -> Figure:
    """Attention of flipped samples on the relevant token over time, and when it lets go, with the limit."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    for k, x in enumerate(found.n_snr2):
        color = SERIES[k % len(SERIES)]
        band(axes[0], found.taus, found.attention[k], f"$x={x:g}$", color, UNIT, linewidth=2)
        axes[0].plot(found.taus, found.limit[k], color=PALETTE["theory"], linestyle=":", linewidth=1.3)
    axes[0].axhline(0.5, color=PALETTE["neutral"], linewidth=0.8)
    axes[0].set(xscale="log", xlim=(0.3, 3e3), ylim=(-0.04, 1.04), xlabel=r"time $\tau = t\,d/(3n)$")
    axes[0].set_ylabel("attention on the relevant token,\nflipped samples")
    axes[0].legend(fontsize=8, loc="lower left")
    _points(axes[1], found.n_snr2, found.time, "gradient flow", PALETTE["noisy"], (0, np.inf))
    axes[1].plot(found.limit_n_snr2, found.limit_time, "--", color=PALETTE["theory"], label="orthogonal limit")
    rate = waiting_rate(found.n_tokens, label_noise)
    if np.isfinite(rate) and np.isfinite(found.limit_time[-1]):
        x = found.limit_n_snr2
        axes[1].plot(x, found.limit_time[-1] * np.exp(rate * (x - x[-1])), color=PALETTE["neutral"], label="slope $c$")
    axes[1].set(yscale="log", xlabel=r"$x = n\,\mathrm{SNR}^2$", ylabel=r"$\tau$ when attention falls below 1/2")
    axes[1].legend(fontsize=8, loc="upper left")
    return figure


def encoders(found: Encoder) -> Figure:
    """Encoders after the last step: flipped labels fitted, accuracy and attention on fresh data, by variant."""
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.6), sharey=True)
    rows = np.arange(len(found.variants))[::-1]
    for ax, name, label in zip(
        axes,
        ("noisy_accuracy", "test_accuracy", "relevant_attention"),
        ("flipped labels fitted", "accuracy, fresh data", "relevant attention, fresh"),
        strict=True,
    ):
        for k in range(len(REGIMES)):
            _points(ax, rows + 0.2 * (1 - k), getattr(found, name)[:, k], REGIME_NAMES[k], SERIES[k], flat=True)
        ax.set(xlabel=label, xlim=(-0.04, 1.04), ylim=(-0.6, len(rows) - 0.4))
        ax.set_xticks([0, 0.5, 1])
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(rows, found.variants)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
