"""Figures of chapter two_step_gd; each takes what `experiments.two_step_gd` returns."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from benign_attention.experiments.two_step_gd import (
    ClosedForm,
    DimensionSweep,
    ErrorAfterOneStep,
    Margins,
    SignalSweep,
    StepSizeMap,
    TokenSweep,
    Trajectory,
    Windows,
)
from benign_attention.figures.style import PALETTE, band

SERIES = [PALETTE[k] for k in ("clean", "noisy", "test", "other", "fourth")]
UNIT = (0.0, 1.0)


def margins(found: Margins) -> Figure:
    """Training margins after steps 1 and 2, clean and noisy samples, with the limit's values."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True)
    for step, ax in enumerate(axes):
        values = np.concatenate([found.clean[step], found.noisy[step]])
        bins = np.linspace(min(values.min(), 0), values.max(), 45)
        for name, limit in (("clean", found.limit_clean), ("noisy", found.limit_noisy)):
            ax.hist(getattr(found, name)[step], bins, color=PALETTE[name], alpha=0.7, label=f"{name} samples")
            ax.axvline(limit[step], color=PALETTE[name], linestyle="--", linewidth=1.5)
        ax.axvline(0, color=PALETTE["theory"], linewidth=1)
        ax.set(title=f"after step {step + 1}", xlabel="margin  $y_i f(X_i)$", yscale="symlog")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("training samples")
    axes[1].legend()
    return figure


def error_after_one_step(found: ErrorAfterOneStep) -> Figure:
    """Test error after step 1 over c for several d/n, with the formula."""
    figure, ax = plt.subplots(figsize=(7.2, 3.1))
    for ratio, measured, balanced, color in zip(found.d_over_n, found.measured, found.balanced, SERIES, strict=False):
        band(ax, found.c, measured, f"$d/n = {ratio:g}$", color, log=True, marker="o", markersize=4, linestyle="none")
        ax.plot(found.c, balanced, color=color, linewidth=1)
    ax.plot([], [], color=PALETTE["theory"], linewidth=1, label=r"$\Phi(-c^2(1-2\eta)\sqrt{d/n}/2(T-1))$")
    ax.set(xlabel=r"signal strength  $c = \mathrm{SNR}\,\sqrt{n}$", ylabel="test error after step 1", yscale="log")
    ax.set_ylim(1e-12, 1.5)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def closed_form(found: ClosedForm) -> Figure:
    """Per-sample deviation from the two-step closed form over d/n."""
    figure, ax = plt.subplots(figsize=(6, 3.4))
    for name, label, color in (
        ("clean_attention", "attention, clean samples", PALETTE["clean"]),
        ("noisy_attention", "attention, noisy samples", PALETTE["noisy"]),
        ("signal_logit", r"$p_2\cdot\mu$, relative", PALETTE["test"]),
    ):
        band(ax, found.d_over_n, getattr(found, name), label, color, log=True, marker="o", markersize=4)
    guide = found.clean_attention[:, 0].mean() * 3 * np.sqrt(found.d_over_n[0] / found.d_over_n)
    ax.plot(found.d_over_n, guide, color=PALETTE["theory"], linestyle="--", label=r"slope $-1/2$")
    ax.set(xlabel="$d/n$", ylabel="deviation from the closed form", xscale="log", yscale="log")
    ax.legend()
    return figure


def trajectory(found: Trajectory) -> Figure:
    """Accuracy and attention over gradient steps."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), sharex=True)
    s = found.summary
    for name, label, color in (
        ("train_accuracy", "train, given labels", PALETTE["clean"]),
        ("noisy_train_accuracy", "train, flipped labels", PALETTE["noisy"]),
        ("test_accuracy", "test, clean labels", PALETTE["test"]),
    ):
        band(axes[0], found.steps, getattr(s, name), label, color, UNIT, linewidth=2)
    for name, label in (("clean", "clean samples"), ("noisy", "noisy samples")):
        band(axes[1], found.steps, getattr(s, f"{name}_attention"), label, PALETTE[name], UNIT, linewidth=2)
    axes[0].set(ylabel="accuracy", xlabel="gradient steps", xscale="log", ylim=(-0.03, 1.03))
    axes[1].set(ylabel="attention on the signal token", xlabel="gradient steps", ylim=(-0.03, 1.03))
    for ax in axes:
        ax.axvline(2, color=PALETTE["neutral"], linestyle=":", linewidth=1)
        ax.legend(loc="center right")
    return figure


MAPS = (
    ("train_accuracy", "all labels fitted\n(share of runs)"),
    ("test_accuracy", "test accuracy"),
    ("clean_attention", "attention on signal,\nclean samples"),
    ("noisy_attention", "attention on signal,\nnoisy samples"),
)


def step_size_map(found: StepSizeMap, mark: tuple[float, float], n_tokens: int) -> Figure:
    """Four maps over (c, b) for every label noise; `mark` is the chapter's own point (c, b)."""
    n = len(found.label_noise)
    figure, axes = plt.subplots(n, 4, figsize=(8, 0.9 + 1.75 * n), sharex=True, sharey=True, squeeze=False)
    limits = {
        "train_accuracy": (found.limit_fitted.astype(float), 0.5),
        "clean_attention": (found.limit_clean_attention, 1 / n_tokens),
        "noisy_attention": (found.limit_noisy_attention, 1 / n_tokens),
    }
    for row, noise in enumerate(found.label_noise):
        for ax, (name, title) in zip(axes[row], MAPS, strict=True):
            cells = getattr(found.summary, name)[row]
            cells = (cells == 1).mean(axis=0) if name == "train_accuracy" else cells.mean(axis=0)
            ax.grid(False)
            if np.isnan(cells).all():
                ax.text(0.5, 0.5, "no noisy\nsamples", ha="center", va="center", transform=ax.transAxes)
            else:
                image = ax.pcolormesh(
                    found.c, found.b, cells.T, norm=Normalize(0, 1), shading="nearest", rasterized=True
                )
                if name in limits:
                    values, level = limits[name]
                    with np.errstate(invalid="ignore"):
                        ax.contour(found.c, found.b, values[row].T, [level], colors=PALETTE["noisy"], linewidths=2.2)
            ax.plot(*mark, marker="+", color="white", markersize=9, markeredgewidth=2)
            ax.set(xscale="log", yscale="log")
            if row == 0:
                ax.set_title(title)
            if row == n - 1:
                ax.set_xlabel(r"$c$")
                ax.set_xticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
                ax.minorticks_off()
        axes[row, 0].set_ylabel(rf"$\eta = {noise:g}$" + "\n$b$")
        axes[row, 0].set_yticks([1, 10], ["1", "10"])
    figure.colorbar(image, ax=axes, shrink=0.8, aspect=40, pad=0.01)
    return figure


def windows(found: Windows, n_tokens: int) -> Figure:
    """Clean attention over step size for several label noises; thick where every label is fitted."""
    figure, ax = plt.subplots(figsize=(6.4, 3.6))
    for k, noise in enumerate(found.label_noise):
        band(ax, found.b, found.clean_attention[k], "", SERIES[k], UNIT, linewidth=1, linestyle=":")
        fitted = (found.train_accuracy[k] == 1).all(axis=0)
        mean = np.where(fitted, found.clean_attention[k].mean(axis=0), np.nan)
        ax.plot(found.b, mean, color=SERIES[k], linewidth=2.5, label=rf"$\eta = {noise:g}$")
    ax.axhline(1 / n_tokens, color=PALETTE["theory"], linewidth=1, linestyle="--")
    ax.set(
        xscale="log",
        xlabel=r"step size  $b = \beta d/n$",
        ylabel="attention on the signal, clean samples",
        ylim=(-0.03, 1),
        title=f"$c = {found.c:g}$",
    )
    ax.legend(title="thick: all labels fitted")
    return figure


def signal_sweep(found: SignalSweep, label_noise: float) -> Figure:
    """Attention, test accuracy and the head's signal share over signal strength."""
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.2), sharex=True)
    for name in ("clean", "noisy"):
        band(axes[0], found.c, getattr(found.step2, f"{name}_attention"), f"{name}, fixed $b$", PALETTE[name], UNIT)
    band(
        axes[0],
        found.c,
        found.constant_product.clean_attention,
        "clean, fixed $bc^2$",
        PALETTE["other"],
        UNIT,
        linestyle="--",
    )
    axes[0].plot(found.c, found.limit_clean_attention, ".", color=PALETTE["theory"], label="orthogonal limit")
    axes[0].plot(found.c, found.limit_constant_product, ".", color=PALETTE["theory"])
    axes[0].set(ylabel="attention on the signal, step 2")
    band(axes[1], found.c, found.step2.test_accuracy, "step 2", PALETTE["test"], UNIT)
    band(axes[1], found.c, found.late.test_accuracy, "step 1000", PALETTE["fourth"], UNIT, linestyle="--")
    band(axes[1], found.c, found.step2.train_accuracy, "train, step 2", PALETTE["clean"], UNIT, linestyle=":")
    axes[1].set(ylabel="accuracy", ylim=(0.45, 1.02))
    band(axes[2], found.c, found.head_share, "", PALETTE["clean"], UNIT)
    axes[2].set(ylabel=r"$\|v_{\mathrm{signal}}\|^2 / \|v\|^2$, step 2", ylim=(0, 1))
    for ax in axes:
        ax.set(xscale="log", xlabel=r"$c = \mathrm{SNR}\,\sqrt{n}$")
        ax.set_xticks([0.1, 0.3, 1, 2, 5], ["0.1", "0.3", "1", "2", "5"])
        ax.minorticks_off()
    axes[0].legend(fontsize=8, loc="upper left")
    axes[0].set_ylim(-0.03, 1.05)
    axes[1].legend(fontsize=8, loc="lower center")
    return figure


def dimension_sweep(found: DimensionSweep, n_train: int, c: float) -> Figure:
    """Test accuracy over d/n for the point's signal and for a weak one."""
    figure, ax = plt.subplots(figsize=(6.8, 3.6))
    for name, label, color, line in (
        ("step2", f"$c={c:.2g}$, step 2", PALETTE["clean"], "-"),
        ("late", f"$c={c:.2g}$, step 1000", PALETTE["clean"], "--"),
        ("weak_step2", "$c=0.3$, step 2", PALETTE["noisy"], "-"),
        ("weak_late", "$c=0.3$, step 1000", PALETTE["noisy"], "--"),
    ):
        band(
            ax,
            found.d_over_n,
            getattr(found, name).test_accuracy,
            label,
            color,
            UNIT,
            linestyle=line,
            marker="o",
            markersize=3,
        )
    for x, text in ((2, "$d=2n$"), (n_train, "$d=n^2$")):
        ax.axvline(x, color=PALETTE["neutral"], linewidth=1, linestyle=":")
        ax.annotate(text, (x, 1.035), xycoords=("data", "axes fraction"), ha="center", annotation_clip=False)
    ax.set(xscale="log", xlabel="$d/n$", ylabel="test accuracy", ylim=(0.45, 1.02))
    ax.legend(loc="center right")
    return figure


def token_sweep(found: TokenSweep) -> Figure:
    """Attention on the signal over step size for several T; shaded where every label is fitted."""
    figure, axes = plt.subplots(1, len(found.n_tokens), figsize=(7.4, 2.9), sharey=True, squeeze=False)
    for k, (ax, T) in enumerate(zip(axes[0], found.n_tokens, strict=True)):
        for name, limit in (("clean", found.limit_clean_attention), ("noisy", found.limit_noisy_attention)):
            values = getattr(found.summary, f"{name}_attention")[k]
            band(ax, found.b, values, f"{name} samples", PALETTE[name], UNIT, linewidth=2)
            ax.plot(found.b, limit[k], color=PALETTE["theory"], linestyle=":", linewidth=1.2)
        fitted = (found.summary.train_accuracy[k] == 1).all(axis=0)
        ax.fill_between(
            found.b, 0, 1, where=fitted, color=PALETTE["neutral"], alpha=0.18, linewidth=0, label="all labels fitted"
        )
        ax.axhline(1 / T, color=PALETTE["theory"], linewidth=0.8, linestyle="--")
        ax.set(xscale="log", xlabel=r"$b = \beta d/n$", title=f"$T = {T}$", ylim=(0, 1))
    axes[0, 0].set_ylabel("attention on the signal, step 2")
    axes[0, 0].legend(fontsize=8, loc="upper left")
    return figure
