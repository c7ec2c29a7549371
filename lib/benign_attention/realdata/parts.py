"""Splitting a data set once and for all: an order that is the same everywhere, and parts that share no content."""

from __future__ import annotations

import hashlib

import numpy as np

READ_WORDS = 64
EMPTY_TEXT = hashlib.sha256(b"").digest()


def digests(inputs: np.ndarray) -> np.ndarray:
    """SHA-256 of every sample's content, as (N,) bytes objects.

    An image is its pixels. A text is its first 64 words, lower case: texts that agree there look the same to a model
    that reads 128 tokens, whatever comes later.
    """
    if inputs.dtype == object:
        contents = (" ".join(text.lower().split()[:READ_WORDS]).encode() for text in inputs)
    else:
        contents = (image.tobytes() for image in inputs)
    found = np.empty(len(inputs), dtype=object)
    found[:] = [hashlib.sha256(content).digest() for content in contents]
    return found


def not_empty(content: np.ndarray) -> np.ndarray:
    """(N,) bool: False where there is no content, a text without a word."""
    return np.array([digest != EMPTY_TEXT for digest in content], bool)


def first_of_their_kind(content: np.ndarray, but_not: np.ndarray = ()) -> np.ndarray:
    """(N,) bool: the first sample of each content, none where the content is in `but_not`."""
    seen, first = set(but_not), np.zeros(len(content), bool)
    for i, digest in enumerate(content):
        first[i] = digest not in seen
        seen.add(digest)
    return first


def consistent(content: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) bool: False where one content has several labels."""
    label_of, several = {}, set()
    for digest, label in zip(content, labels, strict=True):
        if label_of.setdefault(digest, label) != label:
            several.add(digest)
    return np.array([digest not in several for digest in content], bool)


def proportional(labels: np.ndarray, n_classes: int, size: int) -> np.ndarray:
    """(n_classes,): how many of `size` samples each class gets, in proportion to its share (largest remainders)."""
    exact = np.bincount(labels, minlength=n_classes) * (size / max(len(labels), 1))
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: size - counts.sum()]] += 1
    return counts


def split(content: np.ndarray, labels: np.ndarray, among: np.ndarray, counts: list[np.ndarray]) -> list[np.ndarray]:
    """Disjoint index arrays: `counts[k][c]` samples of class c each, classes one after the other.

    Within a class, the samples `among` (indices) are ordered by SHA-256, which mixes them as well as a shuffle does and
    is the same everywhere.
    """
    order = np.array(sorted(among, key=lambda i: content[i]), dtype=int)
    members = [order[labels[order] == c] for c in range(len(counts[0]))]
    ends = np.cumsum(counts, axis=0)
    starts = ends - counts
    return [
        np.concatenate([own[a:b] for own, a, b in zip(members, start, end, strict=True)])
        for start, end in zip(starts, ends, strict=True)
    ]
