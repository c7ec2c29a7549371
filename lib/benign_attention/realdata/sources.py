"""The data sets of the book, loaded and split once and for all.

The split serves every experiment: `test` is never trained on, `pretraining` is for what is trained on clean labels,
`noisy` is for training with flipped labels. No two parts share a sample, or two samples of the same content.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benign_attention.parameters import ParameterError
from benign_attention.realdata import packaged
from benign_attention.realdata.catalogue import SOURCES, Source, SourceError

__all__ = ["SOURCES", "Dataset", "Source", "SourceError", "flip", "load"]


@dataclass(frozen=True)
class Dataset:
    """inputs: images (N, H, W, C) uint8, or texts (N,) of str; labels: (N,) int64, places in `source.class_names`;
    pretraining, noisy, test: index arrays. Classes come one after the other, so draw from a part at random."""

    source: Source
    inputs: np.ndarray
    labels: np.ndarray
    pretraining: np.ndarray
    noisy: np.ndarray
    test: np.ndarray


@lru_cache(maxsize=4)
def load(name: str) -> Dataset:
    """The data set called `name`, one of `SOURCES`.

    `mnist5k` and `digits8`: balanced over the classes. `news4` (the four largest hierarchies of 20 Newsgroups, also
    balanced) and `r8` (in proportion to the classes): test texts from the test file, the others from the training
    file, 2000, 2000 and 1000. From the network: `test` is the official test part; of the rest, up to 10000 samples
    (3000, 200 and 3000 for `pneumoniamnist`, `breastmnist` and `trec`, as in Sakamoto & Sato 2025) are `pretraining`
    and what remains is `noisy`.

    Texts that are empty, that occurred before (first 64 words) or that have two labels are left out.

    Raises
    ------
    ParameterError
        If there is no such data set.
    SourceError
        One line: the data set, why it cannot be had, and what can be used instead. Nothing is ever substituted.
    """
    if name not in SOURCES:
        raise ParameterError(f"source must be one of {', '.join(SOURCES)}, got {name!r}")
    source = SOURCES[name]
    if source.needs:
        from benign_attention.realdata import remote

        inputs, labels, found = remote.samples(source)
    else:
        inputs, labels, found = (packaged.images if source.kind == "image" else packaged.texts)(name)
    for array in (inputs, labels, *found.values()):
        array.setflags(write=False)
    return Dataset(source, inputs, labels, **found)


def flip(
    labels: np.ndarray, n_classes: int, label_noise: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,) of which each is replaced with probability `label_noise` by another class, all others being equally
    likely; and which ones were, (n,) bool. (Sakamoto & Sato 2025, experiments.)"""
    flipped = rng.random(len(labels)) < label_noise
    shift = rng.integers(1, n_classes, size=len(labels))
    return np.where(flipped, (labels + shift) % n_classes, labels), flipped
