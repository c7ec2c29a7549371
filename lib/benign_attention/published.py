"""Values that Sakamoto and Sato (2025) published for real data, to be shown beside ours.

The sweep over the label noise is the authors' own log, one seed, from the plotting notebook in the history of their
public repository (revision 57150b2); the number of samples is not in the log, 200 is the default of the code then.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np

from benign_attention import paths

FILE = paths.BOOK / "published" / "ts_noise_sweep.csv"
NAMES = {"ag_news": "agnews"}  # of ours where the log has others
# Label noise 0.1, 2000 epochs: test accuracy at n = 20 and at n = 1000
BY_N = {"mnist": (0.885, 0.914), "ag_news": (0.836, 0.776)}
BY_N_GRID = (20, 1000)


@dataclass(frozen=True)
class Sweep:
    """One data set of the log. Arrays (levels,), one seed."""

    source: str
    label_noise: np.ndarray
    train_loss: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray


def noise_sweep(source: str) -> Sweep:
    """The log for `mnist`, `cifar10`, `pneumoniamnist`, `breastmnist`, `ag_news` or `trec`, label noise 0 … 0.2.

    Raises
    ------
    KeyError
        If the authors logged no such data set.
    """
    with FILE.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["dataset"] == NAMES.get(source, source)]
    if not rows:
        raise KeyError(source)
    names = ("noise_ratio", "train_loss", "test_loss", "test_accuracy")
    return Sweep(source, *(np.array([float(row[name]) for row in rows]) for name in names))
