"""One look for all figures: palette, rc settings, bands over seeds."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from benign_attention.records import seed_metric

# Okabe-Ito, told apart by colour-blind readers
PALETTE = {
    "clean": "#0072B2",
    "noisy": "#D55E00",
    "test": "#009E73",
    "theory": "#000000",
    "neutral": "#7F7F7F",
    "other": "#CC79A7",
    "fourth": "#E69F00",
}


def use_style() -> None:
    """Set matplotlib's defaults for the book."""
    mpl.rcParams.update(
        {
            "figure.dpi": 110,
            "savefig.bbox": "tight",
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.prop_cycle": mpl.cycler(color=[PALETTE[k] for k in ("clean", "noisy", "test", "other", "fourth")]),
            "font.size": 10,
            "axes.titlesize": 10,
            "legend.frameon": False,
            "image.cmap": "cividis",
        }
    )


def band(
    ax: Axes, x, per_seed: np.ndarray, label: str, color: str, bounds=(-np.inf, np.inf), log: bool = False, **line
) -> None:
    """Mean over seeds with its 95 % interval. per_seed : (n_seeds, len(x)); columns without a number are skipped.

    `log` takes mean and interval of logarithms, for positive quantities on a logarithmic axis.
    """
    values = np.asarray(per_seed, float)
    if log:
        values = np.log(values, out=np.full_like(values, np.nan), where=values > 0)
    metrics = [seed_metric(column, bounds) for column in values.T]
    curves = (np.array([getattr(m, name) for m in metrics], dtype=float) for name in ("value", "low", "high"))
    mean, low, high = (np.exp(c) if log else c for c in curves)
    ax.plot(x, mean, label=label, color=color, **line)
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
