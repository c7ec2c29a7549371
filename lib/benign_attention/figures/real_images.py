"""Figures of part two of the chapter `real_images` that `figures.finetuning` does not have; each returns a figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from benign_attention.experiments.real_images import CONTROL_SEEDS, Exploration
from benign_attention.figures.style import PALETTE, band

SHOWN = 3  # of each kind


def learning_rates(found: Exploration) -> Figure:
    """Train loss and share of flipped labels fitted over the epochs, for each learning rate."""
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3))
    panels = (("train_loss", "train loss", (0, np.inf)), ("flipped_fitted", "flipped labels fitted", (0, 1)))
    styles = (("fourth", "^", ":"), ("clean", "o", "-"), ("noisy", "s", "--"))
    for ax, (name, title, bounds) in zip(axes, panels, strict=True):
        for (rate, study), (color, marker, line) in zip(found.rates.items(), styles, strict=True):
            values = study.history(name, found.study.params.sweep_n)[:CONTROL_SEEDS, 1]
            style = {"marker": marker, "linestyle": line, "markersize": 5}
            band(ax, study.epochs, values, f"{rate:.2g}", PALETTE[color], bounds, **style)
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xticks(study.epochs, [f"{epoch:g}" for epoch in study.epochs])
        ax.minorticks_off()
        ax.set(title=title, xlabel="epochs")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(-0.03, 1.03)
    axes[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[1].legend(title="learning rate", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def attention_on_images(found: Exploration) -> Figure:
    """Training images of run 0 at `sweep_n`, kept and memorised ones: the most attended patch, and all attention."""
    study, seen = found.study, found.memorised[0]
    run = study.runs[study.params.sweep_n][0]
    names, grid = study.dataset.source.class_names, study.backbone.grid
    memorised = run.flipped[1] & seen.fitted[1]
    shown = np.r_[np.flatnonzero(~run.flipped[1])[:SHOWN], np.flatnonzero(memorised)[:SHOWN]]
    shown = shown if len(shown) else np.array([0])
    figure, axes = plt.subplots(3, len(shown), figsize=(1.3 * len(shown), 4.2), squeeze=False)
    on_patches = seen.attention[:2, :, 1:]
    top = on_patches[:, shown].max()
    for column, i in enumerate(shown):
        place = study.rows[run.samples[i]]
        image = study.dataset.inputs[place]
        ax = axes[0, column]
        ax.imshow(image.squeeze(), cmap="gray")
        for model, color, line in ((0, "clean", "-"), (1, "noisy", "--")):
            _outline(ax, on_patches[model, i].argmax(), image.shape, grid, PALETTE[color], line)
        label, given = names[study.dataset.labels[place]], names[run.given[1, i]]
        title = f"{label} given\nas {given}" if run.flipped[1, i] else f"{label}\nkept"
        ax.set_title(title, color=PALETTE["noisy" if run.flipped[1, i] else "clean"])
        for row, model in ((1, 1), (2, 0)):
            picture = axes[row, column].imshow(on_patches[model, i].reshape(grid), vmin=0, vmax=top)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
    for ax, name in zip(axes[:, 0], ("image", "attention,\nwith flips", "attention,\nwithout"), strict=True):
        ax.set_ylabel(name)
    figure.colorbar(picture, ax=axes[1:], label="attention on the patch", shrink=0.8)
    return figure


def _outline(ax: Axes, patch: int, shape: tuple, grid: tuple[int, int], color: str, line: str) -> None:
    height, width = shape[0] / grid[0], shape[1] / grid[1]
    corner = ((patch % grid[1]) * width - 0.5, (patch // grid[1]) * height - 0.5)
    ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linestyle=line, linewidth=2))
