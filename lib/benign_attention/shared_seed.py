"""What it changes to draw training and test data of the token-selection model from one random seed.

The authors' scripts (Sakamoto and Sato 2025, official code) draw both sets from generators with the same seed, sample
after sample, the first half of each set in class +1. So the noise of the first n test samples is that of the training
samples, and as n < n_test / 2 these are all in class +1. Those whose training sample is in class +1 too are its
*copies*, with the clean label even where the training label is flipped; the others are *transplants*: the noise of a
training sample of class -1 under the signals of class +1. All other test samples are independent of the training set.

Both kinds live in the span of signals and training tokens, so they are judged in the coordinates of `selection`,
exactly and at any dimension; independent samples by the exact integrals of `selection_population`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benign_attention.parameters import ParameterError
from benign_attention.selection import State, TrainingSet
from benign_attention.selection_population import fresh_sample, test_quantities


@dataclass(frozen=True)
class SharedSeed:
    """One trained model on the test set of its training set's seed.

    copies, transplants : (n/2,) each, the outputs on contaminated test samples, whose label is +1;
    accuracy, loss : exact, on independent samples; n_test : size of the test set.
    """

    copies: np.ndarray
    transplants: np.ndarray
    accuracy: float
    loss: float
    n_test: int

    @property
    def contaminated(self) -> np.ndarray:
        return np.concatenate([self.copies, self.transplants])

    @property
    def accuracy_bias(self) -> float:
        """Expected test accuracy as reported, minus the accuracy on independent samples."""
        return float(((self.contaminated > 0) - self.accuracy).sum() / self.n_test)

    @property
    def loss_bias(self) -> float:
        """Expected test loss as reported, minus the loss on independent samples."""
        return float((np.logaddexp(0.0, -self.contaminated) - self.loss).sum() / self.n_test)


def contaminated_tokens(training: TrainingSet) -> tuple[np.ndarray, np.ndarray]:
    """Copies and transplants in reduced coordinates, (n/2, T, r) each."""
    tokens = training.tokens.reshape(training.n_train, training.n_tokens, -1)
    weak = float(training.weak_ratio)
    to_plus = float(training.signal_norm) * np.outer([1.0, weak, -weak], [1.0, -1.0])
    transplants = tokens[training.clean_labels < 0]
    transplants[:, :3, :2] += to_plus
    return tokens[training.clean_labels > 0], transplants


def compare(training: TrainingSet, state: State, n_test: int = 1000) -> SharedSeed:
    """`SharedSeed` of a trained model (one, without batch axes).

    Raises
    ------
    ParameterError
        `n_test` is less than twice the number of training samples.
    """
    if n_test < 2 * training.n_train:
        raise ParameterError(
            f"n_test must be at least twice n_train, {2 * training.n_train}, to hold them in class +1, got {n_test}"
        )
    query = state.weights @ state.query
    found = test_quantities(fresh_sample(training, state))
    outputs = []
    for tokens in contaminated_tokens(training):
        logits = tokens @ query
        attention = np.exp(logits - logits.max(axis=1, keepdims=True))
        attention /= attention.sum(axis=1, keepdims=True)
        values = (tokens[..., 0] - tokens[..., 1]) / (math.sqrt(2.0) * float(training.signal_norm))
        outputs.append((attention * values).sum(axis=1))
    return SharedSeed(*outputs, float(found.accuracy.value), float(found.loss.value), n_test)
