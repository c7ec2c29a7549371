"""Data from the network, on request only: fetched once, converted to plain arrays, kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benign_attention.realdata import cache, parts
from benign_attention.realdata.catalogue import Source, SourceError, cannot_be_had

INPUT_COLUMNS = {"image": ("image", "img"), "text": ("text",)}
LABEL_COLUMNS = ("label",)
COARSE_LABEL_COLUMNS = ("label_coarse_original", "coarse_label")  # `label` of TREC is the fine one
PRETRAINING = {"pneumoniamnist": 3000, "breastmnist": 200, "trec": 3000}
MOST_PRETRAINING = 10_000
HUB_FILES = ("README.md", "*.parquet", "*.jsonl")
TIMEOUT = (10, 30)  # seconds to connect, and without a sign of life


def samples(source: Source) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Inputs, labels (N,) int64 and parts of a set that needs a network; see `sources.load`.

    Raises
    ------
    SourceError
        No network, a missing package, an answer that is not the data, a wrong hash: one line. What was fetched is
        thrown away then, so that the next call asks again.
    """
    inputs, labels, is_test = (_from_hub if source.needs == "hub" else _from_zenodo)(source)
    if len(inputs) != source.samples or len(labels) != source.samples:
        raise cannot_be_had(source, f"it should have {source.samples} samples, but {len(inputs)} came")
    content = parts.digests(inputs)
    test = np.flatnonzero(is_test)
    train = np.flatnonzero(~is_test & parts.consistent(content, labels) & parts.not_empty(content))
    train = train[parts.first_of_their_kind(content[train], but_not=content[test])]
    available = np.bincount(labels[train], minlength=source.n_classes)
    size = min(PRETRAINING.get(source.name, MOST_PRETRAINING), len(train))
    pretraining = parts.proportional(labels[train], source.n_classes, size)
    pretraining_part, noisy_part = parts.split(content, labels, train, [pretraining, available - pretraining])
    (test_part,) = parts.split(content, labels, test, [np.bincount(labels[test], minlength=source.n_classes)])
    return inputs, labels, {"test": test_part, "pretraining": pretraining_part, "noisy": noisy_part}


def _from_zenodo(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The official validation part joins the training part."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    file = f"{source.name}.npz"

    def fetch(folder: Path) -> None:
        try:
            pooch.retrieve(
                f"{source.origin}?download=1",
                known_hash=source.hash,
                fname=file,
                path=folder,
                downloader=pooch.HTTPDownloader(progressbar=True, timeout=TIMEOUT),
            )
        except Exception as error:
            raise cannot_be_had(source, _reason(error, source)) from None

    with np.load(cache.kept(f"sources/{source.name}", fetch) / file, allow_pickle=False) as arrays:
        images = [arrays[f"{part}_images"] for part in ("train", "val", "test")]
        labels = [arrays[f"{part}_labels"] for part in ("train", "val", "test")]
    is_test = np.arange(sum(map(len, images))) >= len(images[0]) + len(images[1])
    return _with_channels(np.concatenate(images)), np.concatenate(labels).ravel().astype(np.int64), is_test


def _from_hub(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    file = "inputs.npy" if source.kind == "image" else "inputs.json"

    def fetch(folder: Path) -> None:
        try:
            inputs, labels, is_test = _download_from_hub(source)
        except SourceError:
            raise
        except Exception as error:
            raise cannot_be_had(source, _reason(error, source)) from None
        if source.kind == "image":
            np.save(folder / file, inputs)
        else:
            (folder / file).write_text(json.dumps(list(inputs)), encoding="utf-8")
        np.savez(folder / "labels.npz", labels=labels, is_test=is_test)

    entry = cache.kept(f"sources/{source.name}", fetch)
    if source.kind == "image":
        inputs = np.load(entry / file)
    else:
        texts = json.loads((entry / file).read_text(encoding="utf-8"))
        inputs = np.empty(len(texts), dtype=object)
        inputs[:] = texts
    with np.load(entry / "labels.npz") as arrays:
        return inputs, arrays["labels"], arrays["is_test"]


def _download_from_hub(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        import datasets
    except ImportError:
        raise cannot_be_had(source, "it needs the package datasets (pip install 'benign-attention[hub]')") from None
    cache.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.folder(), prefix=".hub-", ignore_cleanup_errors=True) as folder:
        _download_repository(source, Path(folder) / "files")
        both = datasets.load_dataset(f"{folder}/files", cache_dir=f"{folder}/arrow")
        inputs, labels, is_test = [], [], []
        for testing, name in enumerate(("train", "test")):
            part = both[name]
            column = _column(source, part, INPUT_COLUMNS[source.kind])
            inputs += list(_progress(part, column, source))
            labels += _labels(source, part)
            is_test += [bool(testing)] * len(part)
    if source.kind == "image":
        return _with_channels(np.stack(inputs)), np.array(labels, np.int64), np.array(is_test)
    return np.array(inputs, dtype=object), np.array(labels, np.int64), np.array(is_test)


def _download_repository(source: Source, folder: Path) -> None:
    """The data files of the hub's main branch, checked by the SHA-256 that it states for large files; past its own
    cache, which would keep a damaged one.

    One request comes first, so that a hub out of reach is noticed at once and not after many tries.
    """
    import requests
    from huggingface_hub import HfApi, constants

    repository = source.origin.partition("/datasets/")[2]
    if constants.is_offline_mode():
        raise cannot_be_had(source, "the hub is switched off (HF_HUB_OFFLINE)")
    url = f"{constants.ENDPOINT}/api/datasets/{repository}"
    with requests.get(url, timeout=TIMEOUT, stream=True) as answer:
        answer.raise_for_status()
    hub = HfApi(endpoint=constants.ENDPOINT)
    hub.snapshot_download(repository, repo_type="dataset", local_dir=folder, allow_patterns=list(HUB_FILES))
    for entry in hub.list_repo_tree(repository, repo_type="dataset", recursive=True):
        file, stated = folder / entry.path, getattr(entry, "lfs", None)
        if stated and file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != stated.sha256:
            raise cannot_be_had(source, f"{entry.path} does not have the hash that the hub states")


def _progress(part, column: str, source: Source) -> Iterator[np.ndarray | str]:
    from tqdm import tqdm

    for value in tqdm(part[column], desc=source.name, total=len(part)):
        yield np.asarray(value, np.uint8) if source.kind == "image" else " ".join(value.split())


def _column(source: Source, part, candidates: tuple[str, ...]) -> str:
    found = [name for name in candidates if name in part.column_names]
    if not found:
        raise cannot_be_had(
            source, f"the hub's columns are {', '.join(part.column_names)}, none of which is {' or '.join(candidates)}"
        )
    return found[0]


def _labels(source: Source, part) -> list[int]:
    """Places in `class_names`: by name where the hub gives names, else the hub's numbers."""
    column = _column(source, part, COARSE_LABEL_COLUMNS if source.name == "trec" else LABEL_COLUMNS)
    values, names = list(part[column]), getattr(part.features[column], "names", None)
    if names is not None:
        values = [names[value] for value in values]
    known = {key: i for i, name in enumerate(source.class_names) for key in (name, i)}
    unknown = sorted({str(value) for value in values if value not in known})
    if unknown or None in values:
        raise cannot_be_had(source, f"the hub has the labels {', '.join(unknown[:5])}, not {source.class_names}")
    return [known[value] for value in values]


def _with_channels(images: np.ndarray) -> np.ndarray:
    return images[..., None] if images.ndim == 3 else images


def _reason(error: BaseException, source: Source) -> str:
    """Why, in a few words, from what the libraries raised."""
    import requests

    chain, link = [], error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        status = getattr(getattr(link, "response", None), "status_code", None)
        if status is not None:
            return f"{urlsplit(source.origin).hostname} answered {status}"
    if any(isinstance(link, requests.Timeout | TimeoutError) for link in chain):
        return f"{urlsplit(source.origin).hostname} does not answer"
    if any("IncompleteRead" in type(link).__name__ for link in chain):
        return "the download broke off"
    if any(isinstance(link, ConnectionError | requests.ConnectionError) for link in chain):
        return f"there is no connection to {urlsplit(source.origin).hostname}"
    if isinstance(error, ValueError) and "does not match the known hash" in str(error):
        return f"what was downloaded does not have the hash {source.hash}"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
