"""Images as two classes, scaled and cut into patches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benign_attention.parameters import ParameterError
from benign_attention.realdata import packaged, sources


@dataclass(frozen=True)
class BinaryTask:
    """images: (samples, H, W, C) float32, scaled to mean 0 and variance 1 over the training pool;
    labels: (samples,) float32, clean, each -1 or +1. The pool is everything that may be trained on."""

    pool_images: np.ndarray
    pool_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def parse_task(task: str, source: str = "mnist5k") -> tuple[int, int] | None:
    """The two classes (by number) of a task such as `3-8`, or None for `odd_even`.

    Raises
    ------
    ParameterError
        If `task` is neither, or `source` has no images.
    """
    n_classes = _source(source).n_classes
    if task == "odd_even":
        return None
    pair = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", task)
    classes = (int(pair[1]), int(pair[2])) if pair else (0, 0)
    if classes[0] == classes[1] or max(classes) >= n_classes:
        what = "two different digits" if n_classes == 10 else f"two different classes below {n_classes}"
        example = "3-8" if n_classes > 8 else "0-1"
        raise ParameterError(f"task must be odd_even or {what} such as {example}, got {task!r}")
    return classes


def class_names(task: str, source: str = "mnist5k") -> dict[int, str]:
    """What the labels -1 and +1 mean."""
    pair, names = parse_task(task, source), _source(source).class_names
    if pair is not None:
        return {-1: names[pair[0]], 1: names[pair[1]]}
    if all(name.isdigit() for name in names):
        return {-1: "even", 1: "odd"}
    return {sign: ", ".join(names[start::2]) for sign, start in ((-1, 0), (1, 1))}


def pool_size(task: str, source: str = "mnist5k") -> int:
    """How many images there are to train on. Needs no data for the sources that ship with packages."""
    pair = parse_task(task, source)
    if source in packaged.IMAGES_PER_CLASS:
        per_class = packaged.IMAGES_PER_CLASS[source]
        return (per_class["pretraining"] + per_class["noisy"]) * (_source(source).n_classes if pair is None else 2)
    return len(binary_task(task, source).pool_labels)


@lru_cache(maxsize=4)
def binary_task(task: str, source: str = "mnist5k") -> BinaryTask:
    """Images as two classes: `odd_even` (classes of odd number are +1), or a pair `a-b` (b is +1)."""
    pair = parse_task(task, source)
    data = sources.load(source)
    positive = data.labels % 2 == 1 if pair is None else data.labels == pair[1]
    labels = np.where(positive, 1, -1).astype(np.float32)
    wanted = np.ones(len(labels), bool) if pair is None else np.isin(data.labels, pair)
    pool = np.concatenate([data.pretraining, data.noisy])
    pool, test = pool[wanted[pool]], data.test[wanted[data.test]]
    mean, spread = data.inputs[pool].mean(), data.inputs[pool].std()

    def scaled(chosen: np.ndarray) -> np.ndarray:
        return ((data.inputs[chosen] - mean) / spread).astype(np.float32)

    return BinaryTask(scaled(pool), labels[pool], scaled(test), labels[test])


def cut_into_patches(images: np.ndarray, patch_size: int) -> np.ndarray:
    """Square patches, row by row, as flat vectors: (samples, side, side, C) to (samples, patches, patch_size**2 * C).

    Raises
    ------
    ParameterError
        If `patch_size` does not divide the side of the images.
    """
    n, side, _, channels = images.shape
    if patch_size < 1 or side % patch_size:
        raise ParameterError(f"patch_size must divide {side}, got {patch_size}")
    k = side // patch_size
    blocks = images.reshape(n, k, patch_size, k, patch_size, channels).swapaxes(2, 3)
    return np.ascontiguousarray(blocks.reshape(n, k * k, patch_size**2 * channels))


def nearest(pool: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Place in `pool` (n, ...) of the nearest image (Euclidean, over pixels) to each of `images` (m, ...)."""
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


def _source(name: str) -> sources.Source:
    images = [source.name for source in sources.SOURCES.values() if source.kind == "image"]
    if name not in images:
        raise ParameterError(f"source must be one of {', '.join(images)}, got {name!r}")
    return sources.SOURCES[name]
