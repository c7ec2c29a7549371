"""Label noise in the last attention layer of a pretrained transformer: what `real_images` and `real_text` share.

Phase 1 trains a classifier on clean samples; phase 2 draws query and key of the last layer anew and trains them alone,
on n other samples with flipped labels. (Sakamoto & Sato 2025, real-world experiments; `realdata.finetune`.)
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from benign_attention import devices
from benign_attention.parameters import ChapterParams, ParameterError, Positive, SamplesCount, StepsCount
from benign_attention.realdata import backbones, cache, features, finetune, last_layer, sources
from benign_attention.realdata.backbones import BACKBONES, Backbone
from benign_attention.realdata.catalogue import NOISY, SOURCES
from benign_attention.records import Metric, fraction_metric, seed_metric

MARGIN = 0.02  # about the 95 % error that 1000 test samples leave between two models that disagree on a tenth of them
FITTED = 0.9  # share of flipped labels from which on they count as fitted
WATCHED = 6
SWEEP_LEVELS = (0.0, 0.05, 0.1, 0.15, 0.2)
SWEEP_N = 200  # the default of the authors' code when their sweep was logged
NoiseLevel = Annotated[float, Field(ge=0, lt=1)]


class FinetuneParams(ChapterParams):
    source: str = Field("mnist5k", description="data set; the book's catalogue names them")
    backbone: str = Field("vit-small-scratch", description="pretrained transformer for the source's kind of data")
    finetune_n_train_grid: list[SamplesCount] = Field(
        [20, 200, 1000], min_length=1, description="numbers of samples in phase 2"
    )
    label_noise_grid: list[NoiseLevel] = Field(
        [0.0, 0.1, 0.2], min_length=2, description="probabilities that a label is replaced; the first is 0, the control"
    )
    n_epochs: StepsCount = Field(15, description="epochs of phase 2")
    optimizer: Literal["adamw", "sgd", "gd"] = Field("adamw", description="adamw (falling rate), sgd or gd, of phase 2")
    learning_rate: Positive = Field(1e-3, description="learning rate of phase 2")
    batch_size: int = Field(16, ge=0, description="samples in a mini batch; 0: all of them")
    n_pretrain: int = Field(2000, ge=10, description="clean samples of phase 1, at most")
    n_test: int = Field(1000, ge=10, description="test samples, at most")
    n_seeds: int = Field(3, ge=1, description="independent runs behind every interval")

    def __init__(self, **values):
        super().__init__(**values)
        kind = BACKBONES[type(self).model_fields["backbone"].default].kind
        _known("source", self.source, SOURCES, kind)
        _known("backbone", self.backbone, BACKBONES, kind)
        source = SOURCES[self.source]
        if BACKBONES[self.backbone].kind != source.kind:
            raise ParameterError(
                f"backbone {self.backbone} reads {BACKBONES[self.backbone].kind}s, "
                f"but source {self.source} holds {source.kind}s"
            )
        for name in ("finetune_n_train_grid", "label_noise_grid"):
            values = getattr(self, name)
            if sorted(set(values)) != values:
                raise ParameterError(f"{name} must increase, got {values}")
        if self.label_noise_grid[0] != 0:
            raise ParameterError(f"label_noise_grid must start with 0, the control, got {self.label_noise_grid}")
        highest = 1 - 1 / source.n_classes
        if self.label_noise_grid[-1] >= highest:
            raise ParameterError(
                f"label_noise_grid must stay below {highest:g}, where labels say nothing, "
                f"got {self.label_noise_grid[-1]:g}"
            )
        if len({f"{level:g}" for level in self.label_noise_grid}) < len(self.label_noise_grid):
            raise ParameterError(f"label_noise_grid must differ in the first six digits, got {self.label_noise_grid}")
        if self.source in NOISY:
            self.check_size(NOISY[self.source])

    def check_size(self, n_noisy: int) -> None:
        """Refuse an n that is larger than the part of the data set that is set aside for phase 2."""
        if self.finetune_n_train_grid[-1] > n_noisy:
            raise ParameterError(
                f"finetune_n_train_grid must be at most {n_noisy} for source {self.source}, "
                f"got {self.finetune_n_train_grid[-1]}"
            )

    def check_pool(self) -> None:
        """The same once the data set can be asked; loads it."""
        self.check_size(len(sources.load(self.source).noisy))

    def reading(self) -> dict:
        """How the backbone reads its inputs, as arguments of `backbones.load`."""
        return {}

    @property
    def label_noise(self) -> float:
        """The lowest level of label noise above 0."""
        return self.label_noise_grid[1]

    @property
    def sweep_n(self) -> int:
        """The n at which the label noise is swept: the largest in the grid up to 200, as in the authors' code."""
        return max([n for n in self.finetune_n_train_grid if n <= SWEEP_N] or self.finetune_n_train_grid[:1])


@dataclass(frozen=True)
class Study:
    """Both phases. rows: places in the data set of the hidden states, in their order; test: rows of `hidden`.

    runs, trained: `[n][run]`.
    """

    params: FinetuneParams
    dataset: sources.Dataset
    backbone: Backbone
    head: finetune.Head
    rows: np.ndarray
    hidden: features.HiddenStates
    test: np.ndarray
    runs: dict[int, list[finetune.Run]]
    trained: dict[int, list[finetune.Trained]]

    @cached_property
    def pretrained(self) -> float:
        """Test accuracy of the head of phase 1 with the pretrained query and key."""
        return self._test_accuracy(self.backbone.last.pretrained)

    @cached_property
    def uniform(self) -> float:
        """The same with equal attention on all positions, which is no attention at all."""
        return self._test_accuracy(self.backbone.last.pretrained.map(torch.zeros_like))

    def _test_accuracy(self, maps: last_layer.QueryKey) -> float:
        tokens = self.backbone.last.tokens(self.hidden.hidden, self.hidden.mask, self.test)
        found = self.head(finetune.class_vectors(self.backbone.last, maps, tokens)[0]).argmax(-1).cpu().numpy()
        return float((found == self.dataset.labels[self.rows[self.test]]).mean())

    @property
    def epochs(self) -> np.ndarray:
        return next(iter(self.trained.values()))[0].history.epochs

    def history(self, name: str, n_train: int) -> np.ndarray:
        """What `finetune.Watched` calls `name`: (runs, label noises, epochs)."""
        return np.array([getattr(one.history, name) for one in self.trained[n_train]])

    def last(self, name: str) -> np.ndarray:
        """The same at the end of training, for every n: (n, runs, label noises)."""
        return np.array([self.history(name, n)[:, :, -1] for n in self.trained])


def draw(params: FinetuneParams, dataset: sources.Dataset, run: int, n_train: int, dim: int) -> finetune.Run:
    """Samples, labels at each noise level, and the initial query and key of one run; samples: places in the data set.

    The noise levels share everything, and a label that is flipped at one is flipped at every higher one, to the same
    class. So do runs on the same source with another backbone, optimiser or reading. Different n are independent draws
    without replacement from `noisy`; at n = its size only flips, initial weights and order differ between runs.
    """
    rng = ChapterParams(seed=params.seed).generator(run, study="finetuning", source=params.source, n_train=n_train)
    samples = rng.choice(dataset.noisy, n_train, replace=False)
    flips, order = (int(number) for number in rng.integers(2**32, size=2))
    labels, n_classes = dataset.labels[samples], dataset.source.n_classes
    pairs = [sources.flip(labels, n_classes, noise, np.random.default_rng(flips)) for noise in params.label_noise_grid]
    given, flipped = (np.stack(parts) for parts in zip(*pairs, strict=True))
    return finetune.Run(samples, given, flipped, last_layer.draw(dim, [rng]), order)


def study(params: FinetuneParams, followed: bool = True) -> Study:
    """Both phases for every n, run and level of label noise. Kept in memory: `measure` and figures need the same.

    followed : evaluate during training too, not only before and after.

    Raises
    ------
    SourceError
        If the data set or the backbone cannot be had: one line, with what can be used instead.
    """
    alone = params.replace(record_path="", sections="all")
    return _study(type(params), alone.model_dump_json(), followed)


@lru_cache(maxsize=16)
def _study(kind: type[FinetuneParams], params_json: str, followed: bool) -> Study:
    params = kind(**json.loads(params_json))
    params.check_pool()
    reading = tuple(params.reading().items())
    ready = _phase_one(
        params.source, params.backbone, reading, params.n_pretrain, params.n_test, params.seed, params.device
    )
    dataset, backbone, head, test = ready
    grid = params.finetune_n_train_grid
    jobs = [(n, run) for n in grid for run in range(params.n_seeds)]
    drawn = [draw(params, dataset, run, n, backbone.last.dim) for n, run in jobs]
    rows = np.unique(np.concatenate([test, *(run.samples for run in drawn)]))
    hidden = features.hidden_states(backbone, dataset, rows)
    test_rows = np.searchsorted(rows, test)
    placed = [
        finetune.Run(np.searchsorted(rows, run.samples), run.given, run.flipped, run.start, run.order) for run in drawn
    ]
    epochs = finetune.log_spaced(params.n_epochs, WATCHED) if followed else (0, params.n_epochs)
    schedule = finetune.Schedule(params.optimizer, params.learning_rate, epochs, params.batch_size)
    trained = finetune.finetune(
        backbone.last,
        head,
        hidden.hidden,
        hidden.mask,
        placed,
        schedule,
        test_rows,
        dataset.labels[test],
        device=params.device,
    )
    by_job = dict(zip(jobs, zip(placed, trained, strict=True), strict=True))
    return Study(
        params,
        dataset,
        backbone,
        head,
        rows,
        hidden,
        test_rows,
        {n: [by_job[n, run][0] for run in range(params.n_seeds)] for n in grid},
        {n: [by_job[n, run][1] for run in range(params.n_seeds)] for n in grid},
    )


@lru_cache(maxsize=8)
def _phase_one(
    source: str, backbone: str, reading: tuple, n_pretrain: int, n_test: int, seed: int, device: str
) -> tuple[sources.Dataset, Backbone, finetune.Head, np.ndarray]:
    """Data set, backbone, head, and the places of the test samples: the same in every study that shares these."""
    dataset = sources.load(source)
    loaded = backbones.load(backbone, dataset, device=device, **dict(reading))
    rng = ChapterParams(seed=seed).generator(0, study="finetuning", source=source, part="phase 1, test")
    pretraining = np.sort(rng.permutation(dataset.pretraining)[:n_pretrain])
    test = np.sort(rng.permutation(dataset.test)[:n_test])
    return dataset, loaded, _head(loaded, dataset, pretraining), test


def _head(backbone: Backbone, dataset: sources.Dataset, samples: np.ndarray) -> finetune.Head:
    """The head of phase 1, kept in the cache; trained on one thread: the number of threads changes nothing."""
    vectors, labels = features.class_vectors(backbone, dataset, samples), dataset.labels[samples]
    device, n_classes = backbone.last.device, dataset.source.n_classes
    if backbone.pooler is None and len(np.unique(labels)) < n_classes:
        raise ParameterError(
            f"n_pretrain must be large enough for clean samples of all {n_classes} classes of {dataset.source.name}, "
            f"got {len(samples)} samples of {len(np.unique(labels))} classes"
        )
    settings = [n_classes, finetune.L2, finetune.POOLED_EPOCHS, finetune.POOLED_LEARNING_RATE]
    content = hashlib.sha256(json.dumps(settings).encode() + vectors.tobytes() + labels.tobytes()).hexdigest()[:16]

    def train(inputs: torch.Tensor) -> finetune.Head:
        if backbone.pooler is None:
            return finetune.linear_head(inputs, labels, n_classes)
        return finetune.pooled_head(inputs, labels, n_classes, backbone.pooler)

    def make(folder: Path) -> None:
        (head,) = devices.map_runs(train, [torch.tensor(vectors, device=device)], device)
        parts = [head.weight, head.bias, *(head.pooler or ())]
        np.savez(folder / "head.npz", *(part.cpu().numpy() for part in parts))

    with np.load(cache.kept(f"heads/{backbone.key}-{content}", make) / "head.npz") as kept:
        weight, bias, *pooler = (torch.tensor(kept[name], device=device) for name in kept.files)
    return finetune.Head(weight, bias, tuple(pooler) or None)


def measure(params: FinetuneParams) -> dict[str, Metric]:
    """What phase 2 ends with, for every n and label noise.

    `train_loss`, `test_accuracy`, `max_attention` (largest attention of position 0, mean over heads and training
    samples), `noisy_train_accuracy` and `clean_train_accuracy` (share of flipped and of kept labels fitted; undefined
    where there are none), each followed by `_n<k>_noise<e>`.

    Reference points: `test_accuracy_pretrained` and `test_accuracy_uniform` (see `Study`), `test_accuracy_untrained`
    with query and key drawn anew. What the claims rest on, with the same endings: `noise_cost`, test accuracy at label
    noise 0 minus that at e (same samples, same start), `attention_rise`, `max_attention` minus that before training;
    and over n: `test_change_noise<e>`, test accuracy at the largest n minus that at the smallest (undefined for a
    single n), `highest_train_loss_noise<e>` and `lowest_noisy_train_accuracy_noise<e>`, seed by seed.
    """
    found = study(params)
    loss, test, attention = (found.last(name) for name in ("train_loss", "test_accuracy", "max_attention"))
    flipped, kept = found.last("flipped_fitted"), found.last("kept_fitted")
    grid, levels = params.finetune_n_train_grid, params.label_noise_grid
    rise = attention - np.array([found.history("max_attention", n)[:, :, 0] for n in grid])
    metrics = {}
    for i, n in enumerate(grid):
        for j, noise in enumerate(levels):
            end = f"n{n:g}_noise{noise:g}"
            metrics[f"train_loss_{end}"] = seed_metric(loss[i, :, j], (0, np.inf))
            metrics[f"test_accuracy_{end}"] = fraction_metric(test[i, :, j])
            metrics[f"max_attention_{end}"] = fraction_metric(attention[i, :, j])
            metrics[f"noisy_train_accuracy_{end}"] = fraction_metric(flipped[i, :, j])
            metrics[f"clean_train_accuracy_{end}"] = fraction_metric(kept[i, :, j])
            metrics[f"attention_rise_{end}"] = seed_metric(rise[i, :, j], (-1, 1))
            if noise:
                metrics[f"noise_cost_{end}"] = seed_metric(test[i, :, 0] - test[i, :, j], (-1, 1))
    lowest = np.where(np.isnan(flipped), np.inf, flipped).min(0)
    change = test[-1] - test[0] if len(grid) > 1 else np.full(test[0].shape, np.nan)
    for j, noise in enumerate(levels):
        metrics[f"test_change_noise{noise:g}"] = seed_metric(change[:, j], (-1, 1))
        metrics[f"highest_train_loss_noise{noise:g}"] = seed_metric(loss[:, :, j].max(0), (0, np.inf))
        if noise:
            metrics[f"lowest_noisy_train_accuracy_noise{noise:g}"] = fraction_metric(lowest[:, j])
    untrained = found.history("test_accuracy", grid[-1])[:, 0, 0]
    return metrics | {
        "test_accuracy_pretrained": fraction_metric([found.pretrained]),
        "test_accuracy_untrained": fraction_metric(untrained),
        "test_accuracy_uniform": fraction_metric([found.uniform]),
    }


def outcome(metrics: dict[str, Metric], n_train: int, label_noise: float) -> str:
    """What label noise did, judged by 95 % intervals.

    "not fitted": the flipped labels were not fitted, so that there is no overfitting to judge; "benign" and "harmful":
    they were, and the cost in test accuracy lies below or above 2 %; "open": the runs cannot tell.
    """
    end = f"n{n_train:g}_noise{label_noise:g}"
    fitted, cost = metrics[f"noisy_train_accuracy_{end}"], metrics[f"noise_cost_{end}"]
    if fitted.high is None or cost.high is None:
        return "open"
    if fitted.high < FITTED:
        return "not fitted"
    if fitted.low < FITTED or cost.low <= MARGIN <= cost.high:
        return "open"
    return "harmful" if cost.low > MARGIN else "benign"


def attention_shifts(found: Study) -> dict[str, Metric]:
    """How far the flips moved the attention of position 0, at the largest n and lowest label noise above 0.

    Total variation between training with flips and without, same start; mean over heads and samples, for flipped and
    for kept ones, and their difference run by run.
    """
    n_train = found.params.finetune_n_train_grid[-1]
    moved = []
    for run, trained in zip(found.runs[n_train], found.trained[n_train], strict=True):
        distance = np.abs(trained.attention[1] - trained.attention[0]).sum(-1).mean(-1) / 2
        flipped = run.flipped[1]
        moved.append([distance[where].mean() if where.any() else np.nan for where in (flipped, ~flipped)])
    flipped, kept = np.array(moved).T
    return {
        "attention_shift_flipped": fraction_metric(flipped),
        "attention_shift_kept": fraction_metric(kept),
        "attention_shift_difference": seed_metric(flipped - kept, (-1, 1)),
    }


def token_snr(found: Study) -> float:
    """A stand-in for the theory's SNR = |signal| / |noise| of one token, from cached hidden states.

    signal^2: mean squared distance of the class means from their mean, less what class means of so many samples would
    differ by chance; noise^2: mean squared distance of a single token from its class's mean. Tokens are the hidden
    states at all positions but 0 on the clean labels of the training samples; each sample counts the same. The theory's
    signal sits in one token; here it may be spread over many, so only comparisons mean something.
    """
    rows = np.unique(np.concatenate([run.samples for runs in found.runs.values() for run in runs]))
    labels = found.dataset.labels[found.rows[rows]]
    hidden = found.hidden.hidden
    means, squares = [], []
    for row in rows:
        words = hidden[row, 1:][found.hidden.mask[row, 1:]].astype(np.float32)
        if not len(words):
            words = hidden[row, :1].astype(np.float32)
        means.append(words.mean(0))
        squares.append((words**2).sum(1).mean())
    means, squares = np.array(means), np.array(squares)
    centres, noise, chance = [], [], []
    for label in np.unique(labels):
        own = labels == label
        centre = means[own].mean(0)
        centres.append(centre)
        noise.append(squares[own].mean() - centre @ centre)
        chance.append(((means[own] - centre) ** 2).sum(1).mean() / max(own.sum() - 1, 1))
    signal = ((centres - np.mean(centres, axis=0)) ** 2).sum(1).mean() - np.mean(chance) * (1 - 1 / len(centres))
    return float(np.sqrt(max(signal, 0.0) / np.mean(noise)))


def noise_sweep(params: FinetuneParams) -> Study:
    """More levels of label noise, 0 … 0.2, at `sweep_n`."""
    return study(
        params.replace(finetune_n_train_grid=[params.sweep_n], label_noise_grid=list(SWEEP_LEVELS)), followed=False
    )


def _known(name: str, value: str, known: dict, kind: str) -> None:
    if value not in known:
        of_the_kind = [other for other, origin in known.items() if origin.kind == kind]
        raise ParameterError(f"{name} must be one of {', '.join(of_the_kind)}, got {value!r}")
