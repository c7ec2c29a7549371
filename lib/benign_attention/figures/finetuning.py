"""Figures of fine-tuning with label noise, shared by `real_images` and `real_text`: each returns a figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from benign_attention import published
from benign_attention.experiments.finetuning import Study
from benign_attention.figures.style import PALETTE, band

COLORS = ("clean", "fourth", "noisy", "other", "test", "neutral")
MARKERS = "osD^vP"


def over_n(found: Study, beside: str = "") -> Figure:
    """Train loss, share of flipped labels fitted and test accuracy against n, a curve for each label noise.

    beside : the source whose published values at label noise 0.1 are shown as stars.
    """
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.4))
    grid = np.array(found.params.finetune_n_train_grid)
    panels = (
        ("train_loss", "train loss", (0, np.inf)),
        ("flipped_fitted", "flipped labels fitted", (0, 1)),
        ("test_accuracy", "test accuracy", (0, 1)),
    )
    for ax, (name, title, bounds) in zip(axes, panels, strict=True):
        values = found.last(name)
        for place, (noise, style) in enumerate(_styles(found)):
            if name != "flipped_fitted" or noise:
                band(ax, grid * 1.04 ** (place - 1), values[:, :, place].T, f"η = {noise:g}", bounds=bounds, **style)
        ax.set(title=title, xlabel="training samples n", xlim=(grid[0] / 1.2, grid[-1] * 1.2), xscale="log")
        ax.set_xticks(grid, [f"{n:g}" for n in grid])
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(-0.03, 1.03)
    untrained = found.history("test_accuracy", grid[-1])[:, :, 0].mean()
    axes[2].axhline(found.pretrained, color=PALETTE["theory"], linewidth=0.8, linestyle=":", label="pretrained")
    axes[2].axhline(untrained, color=PALETTE["neutral"], linewidth=0.8, linestyle="--", label="untrained")
    if beside in published.BY_N:
        axes[2].plot(
            published.BY_N_GRID, published.BY_N[beside], "*", color=PALETTE["theory"], label=f"published, {beside}"
        )
    for ax in axes[1:]:
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[2].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def noise_sweep(found: Study, beside: tuple[str, ...]) -> Figure:
    """Change of test accuracy and train loss against the label noise; beside: sources of the authors' log."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    levels = np.array(found.params.label_noise_grid)
    test, loss = found.last("test_accuracy")[0], found.last("train_loss")[0]
    ours = f"{found.params.source}, {found.params.backbone}, n = {found.params.finetune_n_train_grid[0]}"
    band(axes[0], levels, test - test[:, :1], ours, PALETTE["clean"], marker="o")
    band(axes[1], levels, loss, ours, PALETTE["clean"], (0, np.inf), marker="o")
    for source, color, line in zip(beside, ("noisy", "test", "other", "fourth"), ("-", "--", ":", "-."), strict=False):
        log = published.noise_sweep(source)
        style = {"color": PALETTE[color], "linestyle": line, "linewidth": 1.2, "label": f"published, {source}"}
        axes[0].plot(log.label_noise, log.test_accuracy - log.test_accuracy[0], **style)
        axes[1].plot(log.label_noise, log.train_loss, **style)
    axes[0].set(title="test accuracy, minus that without noise", xlabel="label noise η")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[1].set(title="train loss", xlabel="label noise η", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2)
    return figure


def attention_over_training(found: Study) -> Figure:
    """Largest attention of position 0, mean over heads and training samples, over the epochs, a panel for each n."""
    grid = found.params.finetune_n_train_grid
    figure, axes = plt.subplots(1, len(grid), figsize=(8, 3.2), sharey=True, squeeze=False)
    for ax, n in zip(axes[0], grid, strict=True):
        values = found.history("max_attention", n)
        for place, (noise, style) in enumerate(_styles(found)):
            band(ax, found.epochs, values[:, place], f"η = {noise:g}", bounds=(0, 1), **style)
        ax.set(title=f"n = {n:g}", xlabel="epochs")
        _epochs(ax, found.epochs)
    axes[0][0].set(ylabel="largest attention", ylim=(0, None))
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def during_training(found: Study, n_train: int) -> Figure:
    """Kept and flipped labels fitted, and test accuracy, over the epochs at one n, with flips and without."""
    figure, ax = plt.subplots(figsize=(6.4, 3.4))
    noise = found.params.label_noise
    curves = (
        ("kept_fitted", 1, "kept labels fitted", "clean", "o", "-"),
        ("flipped_fitted", 1, "flipped labels fitted", "noisy", "s", "--"),
        ("test_accuracy", 1, "test accuracy", "test", "D", "-."),
        ("test_accuracy", 0, "test accuracy, no flips", "neutral", "^", ":"),
    )
    for name, place, label, color, marker, line in curves:
        values = found.history(name, n_train)[:, place]
        band(ax, found.epochs, values, label, PALETTE[color], (0, 1), marker=marker, linestyle=line, markersize=5)
    ax.set(title=f"n = {n_train:g}, η = {noise:g}", xlabel="epochs", ylim=(-0.03, 1.03))
    _epochs(ax, found.epochs)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _styles(found: Study) -> list[tuple[float, dict]]:
    """Each label noise with what tells its curve apart."""
    return [
        (noise, {"color": PALETTE[COLORS[place % 6]], "marker": MARKERS[place % 6], "markersize": 5})
        for place, noise in enumerate(found.params.label_noise_grid)
    ]


def _epochs(ax: Axes, epochs: np.ndarray) -> None:
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(-0.1, epochs[-1] * 1.15)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(epochs, [f"{epoch:g}" for epoch in epochs])
