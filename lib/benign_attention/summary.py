"""Train and test quantities of a training state, one number each per run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benign_attention import population, reduced
from benign_attention.reduced import State, TrainingSet


@dataclass(frozen=True)
class Summary:
    """Quantities of a batch of states, each of the batch's shape; nan where there is no such sample.

    train_accuracy: on the given labels; noisy_train_accuracy: on flipped samples alone; test_accuracy: clean labels,
    exact over fresh data; clean_attention, noisy_attention: mean mass on the signal token over clean / noisy samples.
    """

    train_accuracy: np.ndarray
    noisy_train_accuracy: np.ndarray
    test_accuracy: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray


def summarize(training: TrainingSet, state: State, signal_norm) -> Summary:
    """The summary of every state of the batch; `signal_norm` broadcasts against the batch axes."""
    out = reduced.outputs(training, state, signal_norm)
    labels, noisy = population.as_numpy(training.labels), population.as_numpy(training.noisy) > 0
    fitted = population.as_numpy(out.f) * labels > 0
    on_signal = population.as_numpy(out.attention)[..., 0, :]
    return Summary(
        train_accuracy=fitted.mean(axis=-1),
        noisy_train_accuracy=_mean_over(fitted, noisy),
        test_accuracy=population.test_accuracy(training, state, signal_norm).value,
        clean_attention=_mean_over(on_signal, ~noisy),
        noisy_attention=_mean_over(on_signal, noisy),
    )


def _mean_over(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (values * chosen).sum(axis=-1) / np.broadcast_to(chosen, values.shape).sum(axis=-1)
