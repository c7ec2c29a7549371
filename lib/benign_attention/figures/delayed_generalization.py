"""Figures of chapter delayed_generalization."""

from __future__ import annotations

import math

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benign_attention.experiments.delayed_generalization import (
    HEAD_NOISE,
    OFFICIAL_STEP,
    OFFICIAL_STEPS,
    REGIMES,
    X_CLOCK,
    DelayFit,
    Dependence,
    DescentAgainstFlow,
    Params,
    Setting,
    Trajectory,
    natural_time,
)
from benign_attention.figures.style import PALETTE, band

LOG10 = math.log(10.0)
TIME_LABEL = "time t, in units of 3n/d"


def _colors(count: int) -> list:
    return [mpl.colormaps["viridis"](x) for x in np.linspace(0.0, 0.85, count)]


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _mean(values: np.ndarray) -> float:
    """Mean of what is finite, nan if nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _exponent(params: Params, found: Trajectory) -> np.ndarray:
    """log10 of t / (3 n / d); the times of all seeds are the same."""
    return np.log10(found.time[0] / natural_time(params.point(1.0)))


def _power_axis(ax) -> None:
    ax.xaxis.set_major_formatter(lambda x, _: f"$10^{{{x:g}}}$")
    ax.set_xlabel(TIME_LABEL)


def attention(params: Params, trajectories: dict[float, Trajectory]) -> Figure:
    """Attention of training and of fresh samples on the relevant token, and test loss, over time."""
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.5, 6.0), sharex=True)
    chosen = dict(sorted(trajectories.items(), reverse=True))
    for (x, found), color in zip(chosen.items(), _colors(len(chosen)), strict=True):
        at = _exponent(params, found)
        band(top, at, found.test_attention, f"x = {x:g}", color, (0, 1))
        band(bottom, at, found.test_loss, f"x = {x:g}", color, (0, np.inf))
    first = next(iter(chosen.values()))
    at = _exponent(params, first)
    band(top, at, first.train_attention, "training, clean", PALETTE["theory"], (0, 1), linestyle="--")
    band(top, at, first.train_accuracy, "training accuracy", PALETTE["noisy"], (0, 1), linestyle=":")
    top.axhline(0.5, color=PALETTE["neutral"], linewidth=0.8)
    top.set(ylabel="attention on the relevant token", ylim=(0, 1.03))
    fig.legend(*top.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside upper center")
    bottom.set_ylabel("test loss")
    _power_axis(bottom)
    return fig


def delay(fit: DelayFit) -> Figure:
    """log(t_gen / t_fit) over 1/x against the limit, and the ratio to it."""
    fig, (ax, ratio) = plt.subplots(1, 2, figsize=(8.0, 3.6))
    finite = _finite(fit.log_delay)
    ax.plot(1 / fit.x_fine, fit.limit.log_delay, color=PALETTE["theory"], label="orthogonal limit")
    slope, intercept = _mean(fit.slope), _mean(fit.intercept)
    line = np.linspace(0, 1 / fit.x.min(), 50)
    ax.plot(line, slope * line + intercept, color=PALETTE["noisy"], linestyle="--", label="line fitted to x ≤ 1/2")
    for k, row in enumerate(finite):
        ax.plot(1 / fit.x, row, "o", color=PALETTE["clean"], markersize=5, label="measured" if k == 0 else None)
    ax.set(xlabel="1/x = 1 / (n SNR²)", ylabel=r"$\ln(t_\mathrm{gen}/t_\mathrm{fit})$", ylim=(0, None), xlim=(0, None))
    ax.legend(fontsize=9, loc="upper left")
    band(ratio, 1 / fit.x, finite / fit.limit_at_x.log_delay, "measured / limit", PALETTE["clean"], marker="o")
    ratio.axhline(1, color=PALETTE["theory"], linewidth=1)
    span = (0.8 / fit.x.max(), 1.25 / fit.x.min())
    ratio.set(xlabel="1/x", xlim=span, xscale="log", ylabel="measured / limit", ylim=(0.95, 1.05))
    return fig


def scale(params: Params, trajectories: dict[float, Trajectory]) -> Figure:
    """From fitting to generalising, on an axis drawn to scale, with what steps of gradient descent reach."""
    fig, ax = plt.subplots(figsize=(8.0, 0.5 * len(trajectories) + 1.6))
    unit = natural_time(params.point(1.0))
    chosen = sorted(trajectories.items())
    last = math.log10(params.t_max / unit)
    for k, (_, found) in enumerate(chosen):
        fit = _mean(found.log_fit) / LOG10 - math.log10(unit)
        reached = np.isfinite(found.log_generalisation).all()
        end = found.log_generalisation.mean() / LOG10 - math.log10(unit) if reached else last
        ax.plot([fit, end], [k, k], color=PALETTE["clean"], linewidth=7, solid_capstyle="butt")
        note = f"$10^{{{end - fit:.1f}}}$ times later" if reached else "not by t_max"
        room = end < 0.7 * last
        ax.text(
            end + 0.01 * last if room else end - 0.01 * last,
            k + (0 if room else 0.33),
            note,
            ha="left" if room else "right",
            va="center",
            fontsize=8,
        )
    dim, _ = REGIMES[0]
    per_step = OFFICIAL_STEP * dim / (3 * params.n_train)
    reach = {f"{OFFICIAL_STEPS} steps": OFFICIAL_STEPS, "10⁹ steps": 1e9}
    for (name, steps), style in zip(reach.items(), ("-", ":"), strict=True):
        ax.axvline(math.log10(steps * per_step), color=PALETTE["noisy"], linestyle=style, label=name)
    ax.set_yticks(range(len(chosen)), [f"x = {x:g}" for x, _ in chosen])
    ax.set(xlim=(0, 1.02 * last), ylim=(-0.6, len(chosen) - 0.4))
    ax.legend(fontsize=9, loc="upper right", title="gradient descent reaches")
    _power_axis(ax)
    return fig


def clock(params: Params, limit_like: Trajectory, official: Trajectory) -> Figure:
    """g(Lambda)/t over time for both forms of g at two points, and what bends it."""
    fig, (ax, norm) = plt.subplots(2, 1, figsize=(7.5, 6.0), sharex=True, height_ratios=(3, 2))
    dim, mu = REGIMES[0]
    units = {
        f"d = {params.dim:.0e}, x = {X_CLOCK:g}": natural_time(params.point(X_CLOCK)),
        f"d = {dim}, |μ| = {mu:g}": natural_time(params.point(1.0, dim=dim)),
    }
    for (name, unit), found, color in zip(units.items(), (limit_like, official), ("clean", "noisy"), strict=True):
        time = found.time[0] / unit
        shown = time < 1e12
        for clock, style, form in ((found.log_clock, "-", "log(T − 1)"), (found.log_clock_paper, "--", "log T")):
            rate = np.exp(clock - np.log(time))[:, shown]
            band(ax, np.log10(time[shown]), rate, f"{name}, {form}", PALETTE[color], linestyle=style, log=True)
        band(norm, np.log10(time[shown]), 3 * found.query_norm2[:, shown], name, PALETTE[color], log=True)
    ax.set(yscale="log", ylabel="(g(Λ) − g(0)) / t")
    ax.legend(fontsize=8)
    norm.set(yscale="log", ylabel="|p|² / (1/3)", ylim=(1e-8, None))
    norm.axhline(1, color=PALETTE["neutral"], linewidth=0.8)
    norm.legend(fontsize=8, loc="lower right")
    _power_axis(norm)
    return fig


_DEPENDENCE = {
    "n_tokens": ("tokens T", "linear"),
    "label_noise": ("label noise η", "linear"),
    "dim": ("dimension d / samples n", "log"),
}


def dependence(params: Params, dependences: list[Dependence]) -> Figure:
    """The delay at one x over T, eta and d/n."""
    fig, axes = plt.subplots(1, 3, figsize=(8.0, 3.2), sharey=True)
    for ax, d in zip(axes, dependences, strict=True):
        label, scale = _DEPENDENCE[d.name]
        values = d.values / params.n_train if d.name == "dim" else d.values
        finite = _finite(d.log_delay)
        ax.plot(values, d.limit, color=PALETTE["theory"], label="orthogonal limit")
        for k, row in enumerate(finite):
            ax.plot(values, row, "o", color=PALETTE["clean"], markersize=5, label="measured" if k == 0 else None)
        never = np.isinf(d.log_delay).all(axis=0)
        for value in values[never]:
            ax.annotate("never", (value, 2), ha="left", fontsize=9, color=PALETTE["noisy"])
        ax.set(xlabel=label, xscale=scale)
    top = max(np.nanmax(_finite(d.log_delay), initial=1.0) for d in dependences)
    axes[0].set(ylabel=r"$\ln(t_\mathrm{gen}/t_\mathrm{fit})$", ylim=(0, 1.1 * top))
    axes[0].legend(fontsize=9, loc="lower right")
    return fig


def descent(descent: DescentAgainstFlow) -> Figure:
    """Largest difference of a logit between gradient descent and flow, over step size."""
    fig, ax = plt.subplots(figsize=(6.5, 3.6))
    series = zip(descent.names, descent.difference, "osD^", ("clean", "noisy", "test", "other"), strict=True)
    for name, rows, marker, color in series:
        band(ax, descent.step_ratio, rows, name, PALETTE[color], log=True, marker=marker)
    ax.set(xscale="log", yscale="log", xlabel="step size / the paper's step size")
    ax.set_ylabel("largest difference of a logit")
    ax.set_xticks(descent.step_ratio, [f"{r:g}" for r in descent.step_ratio])
    ax.minorticks_off()
    ax.legend(fontsize=8)
    return fig


def accuracy(params: Params, search: list[Setting], accuracy: dict[float, Setting]) -> Figure:
    """Test accuracy over time with heads that are less and less aligned, and over n SNR^2 for one of them."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.0, 3.8), sharey=True)
    shown = [s for s in search if "head noise" in s.name or s.name == "aligned head"]
    for ax, settings in ((left, shown), (right, list(accuracy.values()))):
        for setting, color in zip(settings, _colors(len(settings)), strict=True):
            found = setting.trajectories
            at = _exponent(params, found)
            band(ax, at, found.test_accuracy, setting.name, color, (0, 1))
            fit = _mean(found.log_fit) / LOG10
            fit -= math.log10(natural_time(params.point(1.0)))
            ax.plot(fit, np.interp(fit, at, found.test_accuracy.mean(axis=0)), "v", color=color, markersize=7)
        ax.legend(fontsize=8, loc="lower right")
        _power_axis(ax)
    left.set(ylabel="test accuracy", title="heads, at one x", ylim=(0.45, 1.02))
    right.set(title=f"head noise {HEAD_NOISE:g}, over x")
    return fig
