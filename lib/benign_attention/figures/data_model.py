"""Figures of chapter data_model."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import binom

from benign_attention.assumptions import no_flip_probability
from benign_attention.data import TokenSelectionParams
from benign_attention.experiments import data_model as chapter
from benign_attention.figures.style import PALETTE, band

_KINDS = {
    "signal": ("clean", "o"),
    "noise": ("neutral", "o"),
    "relevant": ("clean", "o"),
    "weakly relevant": ("test", "s"),
    "confusing": ("noisy", "^"),
    "irrelevant": ("neutral", "."),
}


def tokens(clouds: tuple[list[chapter.TokenCloud], list[chapter.TokenCloud]]) -> Figure:
    """Tokens of both models in the plane of the signals, and by their length inside and outside of it."""
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 6))
    for column, (title, model) in enumerate(zip(("single-head model", "token-selection model"), clouds, strict=True)):
        plane, lengths = axes[:, column]
        for cloud in reversed(model):
            color, marker = _KINDS[cloud.name]
            style = {"s": 22, "color": PALETTE[color], "marker": marker, "alpha": 0.6, "label": cloud.name, "lw": 0}
            plane.scatter(*cloud.plane.T, **style)
            lengths.scatter(np.linalg.norm(cloud.plane, axis=1), cloud.rest, **style)
        plane.set(title=title, xlabel="component along the first signal", ylabel="component along the second")
        lengths.set(xlabel="length inside the signals' plane", ylabel="length outside of it")
        longest = max(cloud.rest.max() for cloud in model)
        lengths.set_ylim(-0.05 * longest, 1.15 * longest)
        handles, labels = plane.get_legend_handles_labels()
        plane.legend(handles[::-1], labels[::-1], loc="upper right")
    return figure


def gram_images(images: list[chapter.GramImage]) -> Figure:
    """|G| / d of the first noise tokens of one draw at several dimensions."""
    figure, axes = plt.subplots(1, len(images), figsize=(2.9 * len(images), 2.9), squeeze=False)
    for ax, image in zip(axes[0], images, strict=True):
        shown = ax.imshow(image.entries, vmin=0, vmax=1)
        ax.set(title=f"d = {image.dim:,}", xticks=[], yticks=[])
        ax.grid(False)
    figure.colorbar(shown, ax=axes, label="|inner product| / d", extend="max")
    return figure


def concentration(found: chapter.Concentration, n_train: int) -> Figure:
    """Largest pair, signed and unsigned sums over the dimension, and the share of tokens with the wrong sign."""
    m, dims = found.n_rows, found.dims
    smooth = np.geomspace(dims[0], dims[-1], 200)
    figure, (sizes, signs) = plt.subplots(1, 2, figsize=(7.8, 3.9), width_ratios=(3, 2))
    for values, predicted, name, color in (
        (found.aligned, chapter.predicted_aligned, "sum, every sign against the token", "noisy"),
        (found.cross_talk, chapter.predicted_cross_talk, "sum, labels as signs", "clean"),
        (found.largest, chapter.predicted_largest, "largest single pair", "test"),
    ):
        band(sizes, dims, values, name, PALETTE[color], (0, np.inf), marker="o", markersize=3.5, linestyle="none")
        sizes.plot(smooth, predicted(m, smooth), color=PALETTE[color], linestyle="--", linewidth=1)
    sizes.plot([], [], color=PALETTE["theory"], linestyle="--", linewidth=1, label="prediction")
    sizes.axhline(1, color=PALETTE["neutral"], linewidth=1)
    sizes.set(
        xscale="log",
        yscale="log",
        xlabel="dimension d",
        ylabel="inner products with other noise tokens / d",
    )
    sizes.text(dims[-1], 1.15, "the token's own share", ha="right", color=PALETTE["neutral"])
    _mark(sizes, {"n": n_train, "n²": n_train**2})
    sizes.legend(loc="lower left")
    band(
        signs,
        dims,
        found.wrong_sign,
        "measured",
        PALETTE["clean"],
        (0, 1),
        marker="o",
        markersize=3.5,
        linestyle="none",
    )
    signs.plot(
        smooth, chapter.wrong_sign_probability(m, smooth), color=PALETTE["theory"], linestyle="--", label="exact"
    )
    signs.set(
        xscale="log",
        xlabel="dimension d",
        ylabel="share of noise tokens with the wrong sign",
        ylim=(-0.02, 0.52),
        xlim=(dims[0] / 1.5, max(1e5, 5.0 * n_train**2)),
    )
    _mark(signs, {"n": n_train, "n²": n_train**2})
    signs.legend(loc="upper right")
    return figure


def _mark(ax, places: dict[str, float]) -> None:
    for name, x in places.items():
        ax.axvline(x, color=PALETTE["neutral"], linestyle=":", linewidth=1)
        ax.text(x, 1.01, f"d = {name}", transform=ax.get_xaxis_transform(), ha="center", color=PALETTE["neutral"])


def sampler(found: chapter.SamplerCheck) -> Figure:
    """Distribution of log det of the Gram matrix by sampler."""
    edges = np.linspace(*np.quantile(np.concatenate([found.drawn, found.wrong]), [0.001, 0.999]), 36)
    centres = (edges[1:] + edges[:-1]) / 2
    figure, ax = plt.subplots(figsize=(6.5, 3.6))
    for samples, name, color, line in (
        (found.drawn, "drawn tokens", "theory", {"marker": "o", "markersize": 3.5, "linestyle": "none"}),
        (found.bartlett, "Bartlett factor", "clean", {}),
        (found.wrong, "off by one degree of freedom", "noisy", {"linestyle": "--"}),
    ):
        densities = np.array([np.histogram(one, edges, density=True)[0] for one in samples])
        band(ax, centres, densities, name, PALETTE[color], (0, np.inf), **line)
    ax.set(xlabel="log det of the Gram matrix", ylabel="density")
    ax.set_ylim(0, 1.25 * ax.get_ylim()[1])
    ax.legend()
    return figure


def flips(found: chapter.Flips, n_train: int, label_noise: float) -> Figure:
    """Number of flipped labels at the point, and the probability of none over the number of samples."""
    figure, (counts, none) = plt.subplots(1, 2, figsize=(7.4, 3.2))
    k = np.arange(found.counts.max() + 2)
    shares = np.array([np.bincount(one, minlength=len(k)) / len(one) for one in found.counts])
    dots = {"marker": "o", "markersize": 4, "linestyle": "none"}
    band(counts, k, shares, "measured", PALETTE["noisy"], (0, 1), **dots)
    counts.plot(k, binom.pmf(k, n_train, label_noise), color=PALETTE["theory"], linestyle="--", label="binomial")
    counts.set(xlabel="flipped labels in a training set", ylabel="probability", ylim=(0, None))
    counts.legend()
    band(none, found.sizes, found.none, "measured", PALETTE["noisy"], (0, 1), **dots)
    n = np.geomspace(found.sizes[0], found.sizes[-1], 200)
    none.plot(n, no_flip_probability(n, label_noise), color=PALETTE["theory"], linestyle="--", label="(1 − η)ⁿ")
    none.set(xscale="log", xlabel="training samples n", ylabel="probability of no flip", ylim=(-0.02, 1.02))
    if label_noise > 0:
        none.axvline(1 / label_noise, color=PALETTE["neutral"], linestyle=":", linewidth=1)
        none.text(1 / label_noise, 0.9, " n = 1/η", color=PALETTE["neutral"])
    none.legend(loc="lower left")
    return figure


def natural_units(found: chapter.NaturalUnits) -> Figure:
    """Attention over steps at one (c, b) for several sizes, and how far from the limit it gets over d/n."""
    figure, (attention, distance) = plt.subplots(1, 2, figsize=(7.8, 3.7))
    styles = [("clean", "-"), ("test", "--"), ("fourth", ":"), ("other", "-.")]
    for trajectory, (color, line) in zip([*found.same, found.low], styles, strict=True):
        style = {"linestyle": line, "linewidth": 1.6}
        band(attention, found.steps, trajectory.clean, trajectory.name, PALETTE[color], (0, 1), **style)
        band(attention, found.steps, trajectory.noisy, "", PALETTE[color], (0, 1), **style)
    for values in (found.limit.clean, found.limit.noisy):
        attention.plot(found.steps, values.mean(axis=0), color=PALETTE["theory"], linewidth=0.8)
    attention.plot([], [], color=PALETTE["theory"], linewidth=0.8, label=found.limit.name)
    attention.set(xscale="log", xlabel="steps", ylabel="mean attention on the signal token", ylim=(0, 1))
    attention.legend(loc="center right")
    ratios, dots = found.d_over_n, {"marker": "o", "markersize": 3.5}
    band(distance, ratios, found.of_samples, "single samples", PALETTE["noisy"], (1e-9, 1), **dots)
    band(distance, ratios, found.of_means, "means over samples", PALETTE["clean"], (1e-9, 1), **dots)
    distance.plot(ratios, 0.5 * ratios**-0.5, color=PALETTE["theory"], linestyle="--", linewidth=1, label="slope −1/2")
    distance.plot(ratios, 0.2 / ratios, color=PALETTE["theory"], linestyle=":", linewidth=1, label="slope −1")
    distance.set(xscale="log", yscale="log", xlabel="d / n", ylabel="largest distance from the limit", ylim=(1e-6, 2))
    distance.legend(loc="lower left")
    return figure


def meter_planes(params: chapter.Params, points: list[TokenSelectionParams]) -> Figure:
    """Where the hypotheses reach factor 1: single-head over (n, d), token selection over (d, |mu|)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 4.2))
    rho2 = params.signal_norm**2
    n = np.geomspace(2, max(1e4, 10 * params.n_train, 10 * rho2), 300)
    lowest, highest = min(10.0, params.dim / 10), max(n[-1] ** 2, 10.0 * params.dim)
    left.fill_between(n, np.minimum(n**2, n * rho2), n * rho2, where=n <= rho2, color=PALETTE["clean"], alpha=0.2, lw=0)
    left.plot(n, n**2, color=PALETTE["noisy"], label="d = n²")
    left.plot(n, n * rho2, color=PALETTE["clean"], linestyle="--", label="c = 1, that is d = n |μ|²")
    left.plot(n, n, color=PALETTE["neutral"], linestyle=":", label="d = n")
    left.plot(params.n_train, params.dim, "*", color=PALETTE["theory"], markersize=13, label="this chapter's point")
    left.set(
        xscale="log",
        yscale="log",
        xlim=(n[0], n[-1]),
        ylim=(lowest, highest),
        xlabel="training samples n",
        ylabel="dimension d",
        title=f"single-head, |μ| = {params.signal_norm:g}",
    )
    left.legend(loc="upper left")
    first = points[0]
    d = np.geomspace(1e2, 1e5, 200)
    edge = np.sqrt(d / first.n_train)
    right.fill_between(d, edge, 1e3, color=PALETTE["fourth"], alpha=0.2, lw=0)
    right.fill_between(d, 1, edge, color=PALETTE["test"], alpha=0.2, lw=0)
    right.plot(d, edge, color=PALETTE["theory"], linestyle="--", label="n SNR² = 1")
    right.text(2e2, 300, "towards ω(1/n): not overfitting")
    right.text(2e2, 1.4, "towards o(1/n): benign overfitting")
    for point in points:
        right.plot(point.dim, point.signal_norm, "D", color=PALETTE["theory"], markersize=6)
        right.annotate(
            f"({point.dim}, {point.signal_norm:g})",
            (point.dim, point.signal_norm),
            (-8, 3),
            textcoords="offset points",
            ha="right",
        )
    right.set(
        xscale="log",
        yscale="log",
        xlim=(d[0], d[-1]),
        ylim=(1, 1e3),
        xlabel="dimension d",
        ylabel="signal norm |μ|",
        title=f"token selection, n = {first.n_train}",
    )
    right.legend(loc="center right", bbox_to_anchor=(1, 0.62))
    return figure
