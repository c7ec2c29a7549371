"""What a frozen backbone makes of a sample, computed once and kept in the cache folder.

Entries are called by the backbone's key and the content of the samples, so nothing stale can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from tqdm import tqdm

from benign_attention.parameters import ParameterError
from benign_attention.realdata import cache
from benign_attention.realdata.backbones import Backbone
from benign_attention.realdata.sources import Dataset

STORED = np.float16


@dataclass(frozen=True)
class HiddenStates:
    """What enters the last layer, in the order that was asked for. mask: (n, T) bool, False at padding."""

    file: Path
    mask: np.ndarray

    @property
    def hidden(self) -> np.ndarray:
        """(n, T, d) float16, 0 at padding; mapped anew each time, so that what was read does not stay in memory."""
        return np.load(self.file, mmap_mode="r")


def hidden_states(backbone: Backbone, dataset: Dataset, samples: np.ndarray) -> HiddenStates:
    """The last layer's input for `samples` (n,), rows of the data set; T is the longest of them.

    2 bytes a number: n T d of them are kept on disk, and read where they are used.

    Raises
    ------
    ParameterError
        If there are no samples, or they are no rows of the data set.
    """
    _check(samples, dataset)

    def make(folder: Path) -> None:
        hidden = mask = None
        for rows, states, real in _run(backbone, dataset, samples):
            if hidden is None:  # the longest samples come first
                shape = (len(samples), *states.shape[1:])
                hidden = open_memmap(folder / "hidden.npy", mode="w+", dtype=STORED, shape=shape)
                mask = np.zeros(shape[:2], bool)
            length = states.shape[1]
            hidden[rows, :length] = (states * real[:, :, None]).cpu().numpy()
            mask[rows, :length] = real.cpu().numpy()
        hidden.flush()
        np.save(folder / "mask.npy", mask)

    entry = cache.kept(_name("hidden", backbone, dataset, samples), make)
    return HiddenStates(entry / "hidden.npy", np.load(entry / "mask.npy"))


def class_vectors(backbone: Backbone, dataset: Dataset, samples: np.ndarray) -> np.ndarray:
    """The pretrained model's output at position 0, final norm included: (n, d) float32 for `samples` (n,).

    Raises ParameterError as `hidden_states` does.
    """
    _check(samples, dataset)

    def make(folder: Path) -> None:
        vectors = np.empty((len(samples), backbone.last.dim), np.float32)
        for rows, states, real in _run(backbone, dataset, samples):
            tokens = backbone.last.tokens(states.cpu().numpy(), real.cpu().numpy(), np.arange(len(rows)))
            with torch.no_grad():
                vectors[rows] = backbone.last.class_vectors(backbone.last.pretrained, tokens)[0].cpu().numpy()
        np.save(folder / "vectors.npy", vectors)

    return np.load(cache.kept(_name("class", backbone, dataset, samples), make) / "vectors.npy")


def _run(
    backbone: Backbone, dataset: Dataset, samples: np.ndarray
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
    title = f"{backbone.name} reads {len(samples)} samples of {dataset.source.name}"
    with tqdm(total=len(samples), desc=title, leave=False, delay=1, mininterval=1.0) as bar:
        for rows, states, mask in backbone.hidden(dataset.inputs[samples]):
            yield rows, states, mask
            bar.update(len(rows))


def _check(samples: np.ndarray, dataset: Dataset) -> None:
    n = len(dataset.inputs)
    whole = np.ndim(samples) == 1 and np.issubdtype(np.asarray(samples).dtype, np.integer)
    if not whole or not len(samples) or np.min(samples) < 0 or np.max(samples) >= n:
        raise ParameterError(f"samples must be at least one row in 0..{n - 1} of {dataset.source.name}")


def _name(what: str, backbone: Backbone, dataset: Dataset, samples: np.ndarray) -> str:
    inputs = dataset.inputs[samples]
    digest = hashlib.sha256(f"{np.dtype(STORED)} {inputs.shape}".encode())
    for sample in inputs:
        content = sample.encode() if isinstance(sample, str) else sample.tobytes()
        digest.update(len(content).to_bytes(8) + content)
    return f"features/{what}-{backbone.key}-{digest.hexdigest()[:16]}"
