"""The table and figures on parameterisations; each takes what `experiments.parameterisations` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benign_attention.experiments.parameterisations import VARIANTS, Direction, Table
from benign_attention.figures.style import PALETTE, band
from benign_attention.records import seed_metric

QUANTITIES = (
    ("test_accuracy", "test accuracy", PALETTE["test"], "o"),
    ("clean_attention", "attention on signal, clean samples", PALETTE["clean"], "s"),
    ("noisy_attention", "attention on signal, noisy samples", PALETTE["noisy"], "D"),
)


def verdict_table(found: Table) -> str:
    """Markdown: a row a variant, a column a signal strength; verdict, train and test accuracy, attention."""
    head = " | ".join(f"$c={c:g}$" for c in found.places.values())
    lines = [f"| trained | {head} |", "|:--|" + ":--|" * len(found.places)]
    for variant, title in VARIANTS.items():
        cells = [_cell(found, variant, place) for place in found.places]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Table, variant: str, place: str) -> str:
    names = ("train_accuracy", "test_accuracy", "clean_attention", "noisy_attention")
    means = [seed_metric(found.values(variant, place, name)).value for name in names]
    numbers = ["–" if m is None else f"{m:.2f}" for m in means]
    return f"**{found.verdict(variant, place)}**, {numbers[0]}, {numbers[1]}; {numbers[2]}, {numbers[3]}"


def outcomes(found: Table) -> Figure:
    """Test accuracy and attention on the signal, all seeds: a row a variant, a panel a signal strength."""
    figure, axes = plt.subplots(1, len(found.places), figsize=(8, 0.9 + 0.33 * len(VARIANTS)), sharey=True)
    rows = np.arange(len(VARIANTS))
    for ax, (place, c) in zip(axes, found.places.items(), strict=True):
        for k, (name, label, color, marker) in enumerate(QUANTITIES):
            for row, variant in enumerate(VARIANTS):
                values = found.values(variant, place, name)
                shown = label if ax is axes[0] and row == 0 else None
                height = np.full(values.shape, row + 0.22 * (k - 1))
                ax.plot(values, height, marker, color=color, markersize=3.5, alpha=0.7, linestyle="none", label=shown)
        for row in rows[::2]:
            ax.axhspan(row - 0.5, row + 0.5, color=PALETTE["neutral"], alpha=0.08, linewidth=0)
        ax.axvline(0.5, color=PALETTE["theory"], linewidth=0.8, linestyle="--")
        ax.set(title=f"$c = {c:g}$", xlim=(-0.04, 1.04), ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticks(rows, VARIANTS.values())
        ax.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, markerscale=1.5)
    return figure


def direction(found: Direction) -> Figure:
    """Distance of p's direction from the SVM's, over steps and over the length of p."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.1), sharey=True)
    for head, color in (("aligned", PALETTE["clean"]), ("random", PALETTE["noisy"])):
        for rule, line in (("plain", "-"), ("normalised", "--")):
            distance = 1 - getattr(found, f"cosine_{rule}")[head]
            length = getattr(found, f"length_{rule}")[head]
            band(axes[0], found.steps, distance, f"{head} head, {rule}", color, log=True, linestyle=line)
            axes[1].plot(length.T, distance.T, color=color, linestyle=line, linewidth=1)
    axes[0].set(xlabel="gradient steps", ylabel="1 - cosine with the SVM", xscale="log", yscale="log")
    axes[1].set(xlabel=r"length of $p$ in units of the SVM's", xscale="log")
    axes[0].legend(fontsize=8, loc="lower left")
    return figure
