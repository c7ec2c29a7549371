"""Figures of the chapter `real_text` that `figures.finetuning` does not have; each returns a figure."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benign_attention.experiments.real_text import Exploration, Params, Sentence, noise_costs
from benign_attention.figures.style import PALETTE

WORDS_SHOWN = 12


def words(found: Exploration) -> Figure:
    """Attention on the word pieces of a flipped and of a kept training text, before and after phase 2."""
    shown = [(title, text) for title, text in (("flipped", found.flipped), ("kept", found.kept)) if text]
    figure, axes = plt.subplots(1, len(shown), figsize=(8, 4), squeeze=False)
    for ax, (title, text) in zip(axes[0], shown, strict=True):
        _bars(ax, text)
        given = f"{text.label} → {text.given}" if title == "flipped" else text.label
        ax.set_title(f"{title}: {given}")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    return figure


def _bars(ax: plt.Axes, text: Sentence) -> None:
    chosen = np.argsort(-text.after, kind="stable")[:WORDS_SHOWN]
    places = -np.arange(len(chosen))
    ax.barh(places, text.after[chosen], height=0.7, color=PALETTE["noisy"], label="after")
    ax.plot(text.before[chosen], places, "o", color=PALETTE["clean"], markersize=5, label="before")
    ax.set_yticks(places, [f"{text.words[j].replace('$', '＄')}  ({j})" for j in chosen], fontsize=8)
    ax.set_xlabel("attention of position 0")


def explanations(params: Params, found: Exploration) -> Figure:
    """Noise cost, a dot a run: [CLS] against first word at `sweep_n`; two sources over their SNR, largest n."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    n_sweep, n_last = params.sweep_n, params.finetune_n_train_grid[-1]
    by_reading = {params.special_tokens: found.main, not params.special_tokens: found.reading}
    for place, special in enumerate((True, False)):
        _dots(axes[0], place, noise_costs(by_reading[special], n_sweep), "clean")
    axes[0].set(title=f"what is read ({params.source}, n = {n_sweep})", xlim=(-0.5, 1.5))
    axes[0].set_xticks([0, 1], ["[CLS]", "first word"])
    for study, snr, color in ((found.main, "snr", "clean"), (found.other, "other_snr", "noisy")):
        at = found.metrics[snr].value
        _dots(axes[1], at, noise_costs(study, n_last), color)
        axes[1].annotate(study.params.source, (at, 0), xytext=(0, 4), textcoords="offset points", ha="center")
    axes[1].set(title=f"SNR of the tokens (n = {n_last})", xlabel="estimated SNR")
    axes[1].margins(x=0.3)
    for ax in axes:
        ax.axhline(0, color=PALETTE["theory"], linewidth=0.8)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel(f"noise cost, η = {params.label_noise:g}")
    return figure


def _dots(ax: plt.Axes, at: float, costs: np.ndarray, color: str) -> None:
    ax.plot(np.full(len(costs), at), costs, "o", color=PALETTE[color], alpha=0.7)
    ax.plot(at, costs.mean(), "_", color=PALETTE["theory"], markersize=16)
