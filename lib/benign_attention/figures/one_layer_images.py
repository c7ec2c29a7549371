"""Figures of part one of the chapter `real_images`: each takes what `one_layer_images` measured, returns a figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from benign_attention.experiments.one_layer_images import (
    MARGIN,
    Exploration,
    Fit,
    OneLayerParams,
    binomial_half_width,
    draw,
    last_values,
)
from benign_attention.figures.style import PALETTE, band
from benign_attention.realdata import binary

KEPT_SHOWN, FLIPPED_SHOWN = 4, 3


def images_and_attention(params: OneLayerParams, found: Exploration) -> Figure:
    """Training images cut into tokens, and where the class token looks: trained with the flips and without.

    Run 0 at the largest n; the attention is the mean over heads.
    """
    n = params.n_train_grid[-1]
    data, sample, names = params.task_data(), draw(params, 0, n), params.class_names()
    shown = np.r_[np.flatnonzero(~sample.flipped)[:KEPT_SHOWN], np.flatnonzero(sample.flipped)[:FLIPPED_SHOWN]]
    rows = ("image", "attention,\nwith flips", "attention,\nwithout")
    figure, axes = plt.subplots(3, len(shown), figsize=(1.25 * len(shown), 3.9), squeeze=False)
    side = params.side // params.patch_size
    maps = [
        f.attention[shown].mean(1)[:, 1:].reshape(-1, side, side) for f in (found.fits[n][0], found.clean_fits[n][0])
    ]
    top = max(m.max() for m in maps)
    for column, i in enumerate(shown):
        axes[0, column].imshow(_to_unit(data.pool_images[sample.chosen[i]]), cmap="gray")
        for line in range(1, side):
            axes[0, column].axhline(line * params.patch_size - 0.5, color=PALETTE["fourth"], linewidth=0.6)
            axes[0, column].axvline(line * params.patch_size - 0.5, color=PALETTE["fourth"], linewidth=0.6)
        label = data.pool_labels[sample.chosen[i]] * (-1 if sample.flipped[i] else 1)
        axes[0, column].set_title(
            f"“{names[int(label)]}”" + ("\nflipped" if sample.flipped[i] else "\nkept"),
            color=PALETTE["noisy" if sample.flipped[i] else "clean"],
        )
        for row, attention in enumerate(maps, start=1):
            picture = axes[row, column].imshow(attention[column], vmin=0, vmax=top)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name)
    figure.colorbar(picture, ax=axes[1:], label="attention on the patch", shrink=0.8)
    return figure


def accuracy_against_n(params: OneLayerParams, found: Exploration) -> Figure:
    """Left: shares of kept and of flipped labels fitted after the last step. Right: test accuracy with and without
    flips, with its binomial error at the largest n drawn beside it."""
    grid = params.n_train_grid
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.4), width_ratios=(1, 1.5))
    band(left, grid, last_values(found.fits, "clean"), "kept labels", PALETTE["clean"], marker="o")
    band(left, grid, last_values(found.fits, "flipped"), "flipped labels", PALETTE["noisy"], marker="s", linestyle="--")
    left.axhline(0, alpha=0)
    left.set(title="training labels fitted", ylim=(0, 1.04), ylabel="share")
    test = last_values(found.fits, "test")
    without = last_values(found.clean_fits, "test")
    band(right, grid, without, "no label flipped", PALETTE["clean"], (0, 1), marker="^", linestyle="--")
    band(
        right,
        grid,
        test,
        f"labels flipped with probability {params.label_noise:g}",
        PALETTE["test"],
        (0, 1),
        marker="o",
    )
    end = test.mean(0)[-1]
    right.errorbar(
        grid[-1] * 1.12,
        end,
        binomial_half_width(end, len(params.task_data().test_labels)),
        color=PALETTE["neutral"],
        capsize=3,
        label="error of the finite test set",
    )
    right.axhline(0.5, color=PALETTE["theory"], linewidth=0.8, linestyle=":", label="guessing")
    right.set(title="test accuracy (clean labels)", ylim=(0.4, 1))
    for ax in (left, right):
        _axis_of_n(ax, grid)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.legend(loc="lower left" if ax is left else "upper left", fontsize=8)
    return figure


def noise_cost(params: OneLayerParams, found: Exploration) -> Figure:
    """Test accuracy lost to the flips, against n, for the transformer and the nearest neighbour."""
    grid = np.array(params.n_train_grid)
    figure, ax = plt.subplots(figsize=(7, 3.8))
    cost = last_values(found.clean_fits, "test") - last_values(found.fits, "test")
    expected = params.label_noise * (2 * found.nearest_clean.mean(0) - 1)
    ax.axhspan(-MARGIN, MARGIN, color=PALETTE["neutral"], alpha=0.2, linewidth=0, label="would count as benign")
    ax.axhline(params.label_noise, color=PALETTE["theory"], linewidth=0.8, linestyle=":", label="label noise η")
    band(ax, grid, cost, "transformer", PALETTE["test"], marker="o")
    band(
        ax,
        grid * 1.05,
        found.nearest_clean - found.nearest,
        "nearest neighbour",
        PALETTE["noisy"],
        marker="s",
        linestyle="--",
    )
    ax.plot(
        grid,
        expected,
        color=PALETTE["theory"],
        marker="_",
        linestyle="none",
        markersize=12,
        label="η (1 − 2 ε₀), nearest neighbour",
    )
    ax.set(ylabel="test accuracy lost to the flips")
    _axis_of_n(ax, grid)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def trajectories(params: OneLayerParams, found: Exploration) -> Figure:
    """Kept labels, flipped labels and test accuracy against the step, for small, middle and large n."""
    grid = params.n_train_grid
    shown = sorted({grid[0], grid[-2:][0], grid[-1]})
    figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 3.2), sharey=True, squeeze=False)
    for ax, n in zip(axes[0], shown, strict=True):
        steps = found.fits[n][0].steps
        for name, label, color, style in (
            ("clean", "kept labels fitted", "clean", "-"),
            ("flipped", "flipped labels fitted", "noisy", "--"),
            ("test", "test accuracy", "test", "-."),
        ):
            band(ax, steps, _all(found.fits[n], name), label, PALETTE[color], (0, 1), linestyle=style)
        band(
            ax,
            steps,
            _all(found.clean_fits[n], "test"),
            "test accuracy, no flips",
            PALETTE["neutral"],
            (0, 1),
            linestyle=":",
        )
        ax.set_xscale("symlog", linthresh=1)
        ax.set(title=f"n = {n}", xlabel="step", ylim=(0, 1.03), xlim=(0, params.n_steps))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def two_tasks(params: OneLayerParams, found: Exploration) -> Figure:
    """Test accuracy with and without flips against n, for the chapter's task and the contrast task."""
    contrast, grid = found.contrast, params.n_train_grid
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.3), sharey=True)
    for ax, task, n, test, without in (
        (axes[0], params.task, grid, last_values(found.fits, "test"), last_values(found.clean_fits, "test")),
        (axes[1], contrast.task, contrast.n_train_grid, contrast.test, contrast.without),
    ):
        band(ax, n, without, "no label flipped", PALETTE["clean"], (0, 1), marker="^", linestyle="--")
        band(ax, n, test, "with flips", PALETTE["test"], (0, 1), marker="o")
        ax.axhline(1 - params.label_noise, color=PALETTE["theory"], linewidth=0.8, linestyle=":", label="1 − η")
        ax.set(
            title=f"{' against '.join(binary.class_names(task, params.source).values())}",
            ylim=(0.5, 1.01),
        )
        _axis_of_n(ax, n)
    axes[0].set_ylabel("test accuracy")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[1].legend(fontsize=8, loc="lower right")
    return figure


def heavy_noise(params: OneLayerParams, found: Exploration) -> Figure:
    """Test accuracy and share of flipped labels fitted, against the label noise."""
    figure, ax = plt.subplots(figsize=(6, 3.6))
    levels = found.noise_levels
    band(ax, levels, found.noise_flipped, "flipped labels fitted", PALETTE["noisy"], (0, 1), marker="s", linestyle="--")
    band(ax, levels, found.noise_test, "test accuracy", PALETTE["test"], (0, 1), marker="o")
    ax.axhline(0.5, color=PALETTE["theory"], linewidth=0.8, linestyle=":", label="guessing")
    ax.set(xlabel="label noise η", ylim=(0.3, 1.03), title=f"n = {params.controls_n}")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def choices(params: OneLayerParams, found: Exploration) -> Figure:
    """What was fitted and what was learnt when one unpublished detail is changed; a dot a run, a bar the mean."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 0.45 * len(found.choices) + 1.2), sharey=True)
    for place, choice in enumerate(found.choices):
        for ax, metric, color in zip(axes, (choice.flipped, choice.test), ("noisy", "test"), strict=True):
            dots = [value for value in metric.per_seed if value is not None]
            ax.plot(dots, np.full(len(dots), -place), "o", color=PALETTE[color], alpha=0.7, markersize=6)
            if dots:
                ax.plot(np.mean(dots), -place, "|", color=PALETTE["theory"], markersize=14)
    axes[0].set(title="flipped labels fitted", xlim=(-0.03, 1.03))
    axes[1].set(title="test accuracy", xlim=(0.4, 1))
    axes[0].set_yticks(-np.arange(len(found.choices)), [choice.name for choice in found.choices])
    axes[0].set_ylim(-len(found.choices) + 0.4, 0.6)
    for ax in axes:
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.suptitle(f"n = {params.controls_n}", fontsize=10)
    return figure


def _to_unit(image: np.ndarray) -> np.ndarray:
    """(H, W, C) of any scale to values in [0, 1], without the last axis for grey images."""
    return ((image - image.min()) / (np.ptp(image) or 1)).squeeze()


def _all(fits: list[Fit], name: str) -> np.ndarray:
    return np.array([getattr(one, name) for one in fits])


def _axis_of_n(ax: Axes, grid) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(grid, [f"{n:g}" for n in grid])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("training images n")
