"""A one-layer transformer on images with flipped labels, for growing n: part one of the chapter `real_images`.

The experiment that the authors of Magen et al. 2025 describe in their reply to the reviewers (question 3).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from benign_attention import devices
from benign_attention.parameters import (
    ChapterParams,
    Dimension,
    FlipProbability,
    ParameterError,
    Positive,
    SamplesCount,
    StepsCount,
)
from benign_attention.realdata import binary, one_layer, sources
from benign_attention.records import Metric, fraction_metric, seed_metric

NOISE_LEVELS = (0.2, 0.35, 0.49)
EASY_TASK, HARD_TASK = "0-1", "odd_even"
CONTROL_SEEDS = 3
WATCHED_STEPS = 22
Z_95 = 1.96
MARGIN = 0.02  # 95 % error that 2000 test images leave between two networks that disagree on a fifth of them
SIDE_AND_CHANNELS = {
    "mnist5k": (28, 1),
    "digits8": (8, 1),
    "mnist": (28, 1),
    "cifar10": (32, 3),
    "pneumoniamnist": (28, 1),
    "breastmnist": (28, 1),
}
MNIST = ("mnist5k", "mnist")
Job = tuple["OneLayerParams", int, int, tuple[float, ...], bool]


class OneLayerParams(ChapterParams):
    n_train_grid: list[SamplesCount] = Field(
        [100, 300, 1000, 3000], min_length=1, description="numbers of training images"
    )
    n_steps: StepsCount = Field(500, description="full-batch steps")
    dim: Dimension = Field(48, description="token dimension d of the transformer")
    n_heads: int = Field(2, ge=1, description="attention heads; divides dim")
    label_noise: FlipProbability = Field(0.1, description="probability that a training label is flipped")
    source: Literal["mnist5k", "digits8", "mnist", "cifar10", "pneumoniamnist", "breastmnist"] = Field(
        "mnist5k", description="data set of images; all but the first two need a network once"
    )
    task: str = Field("odd_even", description="odd_even, or two classes such as 3-8")
    step_size: Positive = Field(1e-3, description="step size of the optimiser")
    optimizer: Literal["adam", "gd"] = Field("adam", description="adam or gd, always full batch")
    mlp_ratio: int = Field(2, ge=0, description="hidden width of the MLP over dim; 0: no MLP")
    patch_size: int = Field(7, ge=1, description="side of a square patch in pixels; divides the image's side")
    n_seeds: int = Field(3, ge=1, description="independent runs behind every interval")

    def __init__(self, **values):
        super().__init__(**values)
        binary.parse_task(self.task, self.source)
        if sorted(set(self.n_train_grid)) != self.n_train_grid:
            raise ParameterError(f"n_train_grid must increase, got {self.n_train_grid}")
        if self.side % self.patch_size:
            raise ParameterError(f"patch_size must divide {self.side}, got {self.patch_size}")
        self.architecture()
        if not sources.SOURCES[self.source].needs:
            self.check_pool()

    def check_pool(self) -> None:
        """Refuse an n that is larger than the pool of training images; loads the source if that is not on this disk."""
        pool = binary.pool_size(self.task, self.source)
        for place, n in enumerate(self.n_train_grid):
            if n > pool:
                raise ParameterError(f"n_train_grid[{place}] must be at most {pool} for task {self.task}, got {n}")

    def architecture(self) -> one_layer.Architecture:
        return one_layer.Architecture(
            dim=self.dim,
            n_heads=self.n_heads,
            mlp_width=self.mlp_ratio * self.dim,
            n_patches=(self.side // self.patch_size) ** 2,
            n_pixels=self.patch_size**2 * SIDE_AND_CHANNELS[self.source][1],
        )

    def task_data(self) -> binary.BinaryTask:
        return binary.binary_task(self.task, self.source)

    def class_names(self) -> dict[int, str]:
        return binary.class_names(self.task, self.source)

    def named(self, metric: str) -> str:
        """Claims are about one data set: a metric that they rest on carries the source's name, unless it is MNIST."""
        return metric if self.source in MNIST else f"{metric}_{self.source}"

    @property
    def side(self) -> int:
        """Side of the images in pixels."""
        return SIDE_AND_CHANNELS[self.source][0]

    @property
    def controls_n(self) -> int:
        """The n at which label noise is raised and one choice at a time is changed: the middle of the grid."""
        return self.n_train_grid[(len(self.n_train_grid) - 1) // 2]


@dataclass(frozen=True)
class Draw:
    """One training set and one initialisation. chosen: (n,) places in the pool; luck: (n,) uniform in [0, 1), a label
    is flipped where it is below the label noise; flipped: (n,) bool, at `params.label_noise`."""

    chosen: np.ndarray
    luck: np.ndarray
    flipped: np.ndarray
    weights: dict[str, np.ndarray]


@dataclass(frozen=True)
class Fit:
    """One trained network, watched at `steps` (w,).

    clean, flipped: (w,) share of training samples whose *given* label is fitted, among those that kept their label
    and among the flipped ones (nan if there are none); train: (w,) both together; test: (w,) accuracy against clean
    labels; all four are nan once training has diverged. is_flipped: (n,); attention: (n, H, T + 1), the class token's
    on the training images, at the last step.
    """

    steps: np.ndarray
    clean: np.ndarray
    flipped: np.ndarray
    train: np.ndarray
    test: np.ndarray
    is_flipped: np.ndarray
    attention: np.ndarray


@dataclass(frozen=True)
class Choice:
    """One change of what the authors do not publish, and what follows from it at `OneLayerParams.controls_n`."""

    name: str
    train: Metric
    flipped: Metric
    test: Metric


@dataclass(frozen=True)
class Contrast:
    """The same experiment on a task of another difficulty. test, without: (runs, n) test accuracy with and without
    flips, at the ends of the grid or of the task's smaller pool."""

    task: str
    n_train_grid: list[int]
    test: np.ndarray
    without: np.ndarray


@dataclass(frozen=True)
class Exploration:
    """Arrays behind the figures; runs come first, then n or the levels of label noise.

    fits, clean_fits: `[n][run]`, on the given labels and on the same images without flips; nearest, nearest_clean:
    (runs, n) test accuracy of the nearest training image's label, given or clean; noise_levels: (l,); noise_flipped,
    noise_test: (runs, l), share of flipped labels fitted and test accuracy at `OneLayerParams.controls_n`.
    """

    fits: dict[int, list[Fit]]
    clean_fits: dict[int, list[Fit]]
    nearest: np.ndarray
    nearest_clean: np.ndarray
    noise_levels: np.ndarray
    noise_flipped: np.ndarray
    noise_test: np.ndarray
    choices: list[Choice]
    contrast: Contrast
    metrics: dict[str, Metric]


def draw(params: OneLayerParams, run: int, n_train: int) -> Draw:
    """Images without replacement from the pool, independent flips, and initial weights."""
    rng = params.generator(run, n_train=n_train)
    chosen = rng.choice(binary.pool_size(params.task, params.source), n_train, replace=False)
    luck = rng.random(n_train)
    return Draw(chosen, luck, luck < params.label_noise, one_layer.initial_weights(params.architecture(), rng))


def watched_steps(n_steps: int) -> np.ndarray:
    """Steps 0 … n_steps, evenly spaced in log(step), without repetition."""
    return np.unique(np.r_[0, np.geomspace(1, n_steps, WATCHED_STEPS).round()].astype(int))


def fit(params: OneLayerParams, run: int, n_train: int, levels: tuple[float, ...], watch: bool = True) -> list[Fit]:
    """Train one network for each level of label noise, and watch them.

    All have the same images and initial weights, and what is flipped at one level is flipped at every higher one;
    level 0 is the control without flips. Without `watch` only the last step is looked at. Kept in memory: `measure`
    and `explore` need many of the same networks.
    """
    alone = params.replace(n_train_grid=[n_train], n_seeds=1, record_path="", sections="all")
    return _fit(alone.model_dump_json(), run, n_train, levels, watch)


@lru_cache(maxsize=512)
def _fit(params_json: str, run: int, n_train: int, levels: tuple[float, ...], watch: bool) -> list[Fit]:
    params = OneLayerParams(**json.loads(params_json))
    device = devices.resolve(params.device)
    data, sample = params.task_data(), draw(params, run, n_train)
    is_flipped = sample.luck < np.array(levels)[:, None]

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=device)

    labels = np.where(is_flipped, -data.pool_labels[sample.chosen], data.pool_labels[sample.chosen])
    networks = [{name: to_device(array) for name, array in sample.weights.items()} for _ in levels]
    patches = to_device(binary.cut_into_patches(data.pool_images[sample.chosen], params.patch_size))
    test_patches = to_device(binary.cut_into_patches(data.test_images, params.patch_size))
    steps = watched_steps(params.n_steps) if watch else np.array([params.n_steps])
    watched = []
    for step, outputs in one_layer.descend(
        networks, patches, to_device(labels), params.n_heads, params.n_steps, params.step_size, params.optimizer
    ):
        if step in steps:
            test_outputs = one_layer.class_logits(networks, test_patches, params.n_heads)
            watched.append([x.cpu().numpy() for x in (outputs, test_outputs)])
    attention = one_layer.class_attention(networks, patches, params.n_heads).cpu().numpy()
    return [
        Fit(
            steps,
            *np.array([_shares(out[k], labels[k], flips, test[k], data.test_labels) for out, test in watched]).T,
            is_flipped=flips,
            attention=attention[k],
        )
        for k, flips in enumerate(is_flipped)
    ]


def _shares(outputs, labels, is_flipped, test_outputs, test_labels) -> tuple[float, float, float, float]:
    """What `Fit` calls clean, flipped, train and test, of one network at one step."""
    if not (np.isfinite(outputs).all() and np.isfinite(test_outputs).all()):
        return (np.nan,) * 4
    fitted, right = outputs * labels > 0, test_outputs * test_labels > 0
    return _share(fitted[~is_flipped]), _share(fitted[is_flipped]), _share(fitted), _share(right)


def _share(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


def _jobs(params: OneLayerParams, levels: tuple[float, ...], watch: bool = True) -> list[Job]:
    return [(params, run, n, levels, watch) for n in params.n_train_grid for run in range(params.n_seeds)]


def _train(jobs: list[Job], device: str) -> None:
    """Fit what will be needed; the longest first, so that no core waits at the end."""
    jobs = sorted(jobs, key=lambda job: -job[2] * len(job[3]))
    devices.map_runs(lambda job: fit(*job), jobs, devices.resolve(device))


def _collect(jobs: list[Job]) -> list[dict[int, list[Fit]]]:
    """For every level, the networks of all n and runs, `[n][run]`, from `_jobs` of one set of parameters."""
    found = [{} for _ in jobs[0][3]]
    for job in jobs:
        for place, one in enumerate(fit(*job)):
            found[place].setdefault(job[2], []).append(one)
    return found


def fits(params: OneLayerParams) -> tuple[dict[int, list[Fit]], dict[int, list[Fit]]]:
    """The networks of all n and runs, `[n][run]`: with flipped labels, and without."""
    params.check_pool()
    params.task_data()
    jobs = _jobs(params, (params.label_noise, 0.0))
    _train(jobs, params.device)
    return tuple(_collect(jobs))


def measure(params: OneLayerParams) -> dict[str, Metric]:
    """Accuracies after the last step, for every n, and the three numbers that the claim rests on.

    `train_accuracy_n<k>`: all given labels; `clean_train_accuracy_n<k>` and `noisy_train_accuracy_n<k>`: kept and
    flipped labels (undefined where nothing was flipped); `test_accuracy_n<k>`: clean labels of the test images.
    `test_gain`: test accuracy at the largest n minus that at the smallest (undefined for a single n);
    `lowest_train_accuracy` and `lowest_noisy_train_accuracy`: the lowest over n, seed by seed.
    """
    trained, _ = fits(params)
    last = {what: last_values(trained, what) for what in ("train", "clean", "flipped", "test")}
    names = {"train": "train", "clean": "clean_train", "flipped": "noisy_train", "test": "test"}
    metrics = {
        f"{names[what]}_accuracy_n{n:g}": fraction_metric(values[:, place])
        for place, n in enumerate(params.n_train_grid)
        for what, values in last.items()
    }
    lowest_flipped = np.where(np.isnan(last["flipped"]), np.inf, last["flipped"]).min(1)
    return metrics | {
        params.named("test_gain"): seed_metric(_gain(last["test"]), (-1, 1)),
        params.named("lowest_train_accuracy"): fraction_metric(last["train"].min(1)),
        params.named("lowest_noisy_train_accuracy"): fraction_metric(lowest_flipped),
    }


def explore(params: OneLayerParams) -> Exploration:
    """The controls: no flips, nearest neighbour, another task, more label noise, other choices of what is unpublished.

    Metrics, at every n: `test_accuracy_without_flips_n<k>`; `noise_cost_n<k>`, that accuracy minus the one with flips
    (same images, same initial weights); `nearest_noise_cost_n<k>`, the same for the nearest neighbour. At the largest
    n: `noise_cost`; `attention_shift_flipped` and `attention_shift_kept`, how far the class token's attention on a
    training image moved because of the flips (total variation, mean over heads and images) and
    `attention_shift_difference` between the two, run by run. On the contrast task:
    `contrast_test_gain` and `contrast_noise_cost`, as `test_gain` and `noise_cost`.
    """
    grid = params.n_train_grid
    trained, without = fits(params)
    test, clean = last_values(trained, "test"), last_values(without, "test")
    nearest, nearest_clean = np.array(
        [[nearest_accuracies(params, run, n) for n in grid] for run in range(params.n_seeds)]
    ).transpose(2, 0, 1)
    metrics = {}
    for place, n in enumerate(grid):
        metrics[f"test_accuracy_without_flips_n{n:g}"] = fraction_metric(clean[:, place])
        metrics[f"noise_cost_n{n:g}"] = seed_metric((clean - test)[:, place], (-1, 1))
        metrics[f"nearest_noise_cost_n{n:g}"] = seed_metric((nearest_clean - nearest)[:, place], (-1, 1))
    metrics[params.named("noise_cost")] = metrics[f"noise_cost_n{grid[-1]:g}"]
    metrics |= _attention_shifts(trained[grid[-1]], without[grid[-1]])

    few = params.replace(n_seeds=min(params.n_seeds, CONTROL_SEEDS))
    there = _contrast_params(few)
    at_one_n = few.replace(n_train_grid=[params.controls_n])
    changed = {
        name: _jobs(at_one_n.replace(**change), (params.label_noise,), False)
        for name, change in other_choices(params).items()
    }
    more_noise = _jobs(at_one_n, NOISE_LEVELS, False)
    on_contrast = _jobs(there, (there.label_noise, 0.0), False)
    _train([*more_noise, *on_contrast, *(job for jobs in changed.values() for job in jobs)], params.device)

    contrast = Contrast(
        there.task, there.n_train_grid, *(last_values(found, "test") for found in _collect(on_contrast))
    )
    metrics[params.named("contrast_test_gain")] = seed_metric(_gain(contrast.test), (-1, 1))
    metrics[params.named("contrast_noise_cost")] = seed_metric((contrast.without - contrast.test)[:, -1], (-1, 1))
    by_level = {0.0: without[params.controls_n], params.label_noise: trained[params.controls_n]}
    by_level |= {
        level: found[params.controls_n] for level, found in zip(NOISE_LEVELS, _collect(more_noise), strict=True)
    }
    by_level = {level: found[: few.n_seeds] for level, found in sorted(by_level.items())}
    choices = {"as in this chapter": trained[params.controls_n][: few.n_seeds]}
    choices |= {name: _collect(jobs)[0][params.controls_n] for name, jobs in changed.items()}
    return Exploration(
        fits=trained,
        clean_fits=without,
        nearest=nearest,
        nearest_clean=nearest_clean,
        noise_levels=np.array(list(by_level)),
        noise_flipped=last_values(by_level, "flipped"),
        noise_test=last_values(by_level, "test"),
        choices=[_choice(name, found) for name, found in choices.items()],
        contrast=contrast,
        metrics=metrics,
    )


def last_values(trained: dict[float, list[Fit]], name: str) -> np.ndarray:
    """(runs, keys): the value after the last step of what `Fit` calls `name`."""
    return np.array([[getattr(one, name)[-1] for one in runs] for runs in trained.values()]).T


def _gain(test: np.ndarray) -> np.ndarray:
    """(runs,): last column minus first, undefined where there is only one."""
    return test[:, -1] - test[:, 0] if test.shape[1] > 1 else np.full(len(test), np.nan)


def _contrast_params(params: OneLayerParams) -> OneLayerParams:
    """The other task, at the two ends of the grid or of its own smaller pool."""
    task = HARD_TASK if params.task == EASY_TASK else EASY_TASK
    pool = binary.pool_size(task, params.source)
    ends = (params.n_train_grid[0], params.n_train_grid[-1])
    return params.replace(task=task, n_train_grid=sorted({min(n, pool) for n in ends}))


def other_choices(params: OneLayerParams) -> dict[str, dict]:
    """One change at a time of what the authors' reply leaves open, each with a name."""
    other = (
        {"optimizer": "gd", "step_size": 0.1}
        if params.optimizer == "adam"
        else {"optimizer": "adam", "step_size": 1e-3}
    )
    return {
        f"{other['optimizer']}, step size {other['step_size']:g}": other,
        "without MLP" if params.mlp_ratio else "with MLP": {"mlp_ratio": 0 if params.mlp_ratio else 2},
    }


def _choice(name: str, found: list[Fit]) -> Choice:
    train, flipped, test = ([getattr(f, what)[-1] for f in found] for what in ("train", "flipped", "test"))
    return Choice(name, fraction_metric(train), fraction_metric(flipped), fraction_metric(test))


def nearest_accuracies(params: OneLayerParams, run: int, n_train: int) -> tuple[float, float]:
    """Test accuracy of the nearest training image's label, with the flips and without (prop-nearest)."""
    data, sample = params.task_data(), draw(params, run, n_train)
    nearest = binary.nearest(data.pool_images[sample.chosen], data.test_images)
    clean = data.pool_labels[sample.chosen][nearest] == data.test_labels
    return float(np.mean(clean != sample.flipped[nearest])), float(np.mean(clean))


def _attention_shifts(trained: list[Fit], without: list[Fit]) -> dict[str, Metric]:
    """Total variation between the attention of two networks that differ in the flips only."""
    moved = [np.abs(a.attention - b.attention).sum(-1).mean(-1) / 2 for a, b in zip(trained, without, strict=True)]
    flipped = [_share(shift[one.is_flipped]) for shift, one in zip(moved, trained, strict=True)]
    kept = [_share(shift[~one.is_flipped]) for shift, one in zip(moved, trained, strict=True)]
    return {
        "attention_shift_flipped": fraction_metric(flipped),
        "attention_shift_kept": fraction_metric(kept),
        "attention_shift_difference": seed_metric(np.subtract(flipped, kept), (-1, 1)),
    }


def binomial_half_width(accuracy: float, n_test: int) -> float:
    """Half-width of a 95 % normal interval for an accuracy measured on `n_test` images.

    Every seed is tested on the same images, so a band over seeds does not contain this error.
    """
    return Z_95 * float(np.sqrt(accuracy * (1 - accuracy) / n_test))
