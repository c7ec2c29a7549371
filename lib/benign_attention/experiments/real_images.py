"""Chapter `real_images`: transformers on real images with flipped labels.

Part one trains a one-layer transformer (`one_layer_images`), part two the last attention layer of a pretrained vision
transformer (`finetuning`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from benign_attention.devices import one_thread
from benign_attention.experiments import finetuning, one_layer_images
from benign_attention.experiments.finetuning import FinetuneParams, NoiseLevel, Study
from benign_attention.experiments.one_layer_images import OneLayerParams
from benign_attention.parameters import ChapterParams, Dimension, FlipProbability, Positive, SamplesCount, StepsCount
from benign_attention.realdata import finetune
from benign_attention.records import Metric, fraction_metric, seed_metric

DARK = 0.1  # of the brightest pixel
LONGER = 3  # times the epochs
CONTROL_SEEDS = 3


class Params(ChapterParams):
    """Both parts check what they read when this is built, so bounds are stated there."""

    n_train_grid: list[SamplesCount] = Field([100, 300, 1000, 3000], description="part one: numbers of training images")
    n_steps: StepsCount = Field(500, description="part one: full-batch steps")
    dim: Dimension = Field(48, description="part one: token dimension d of the transformer")
    n_heads: int = Field(2, description="part one: attention heads; divides dim")
    label_noise: FlipProbability = Field(0.1, description="part one: probability that a training label is flipped")
    source: str = Field("mnist5k", description="data set of images, for both parts; the book's catalogue names them")
    task: str = Field("odd_even", description="part one: odd_even, or two classes such as 3-8")
    step_size: Positive = Field(1e-3, description="part one: step size of the optimiser")
    one_layer_optimizer: Literal["adam", "gd"] = Field("adam", description="part one: adam or gd, always full batch")
    mlp_ratio: int = Field(2, description="part one: hidden width of the MLP over dim; 0: no MLP")
    patch_size: int = Field(7, description="part one: side of a square patch in pixels; divides the image's side")
    backbone: str = Field("vit-small-scratch", description="part two: pretrained vision transformer")
    finetune_n_train_grid: list[SamplesCount] = Field([20, 200, 1000], description="part two: numbers of samples")
    label_noise_grid: list[NoiseLevel] = Field(
        [0.0, 0.1, 0.2], description="part two: probabilities that a label is replaced; the first is 0, the control"
    )
    n_epochs: StepsCount = Field(45, description="part two: epochs")
    optimizer: Literal["adamw", "sgd", "gd"] = Field("adamw", description="part two: adamw (falling rate), sgd or gd")
    learning_rate: float = Field(5e-3, ge=1e-14, le=1e14, description="part two: learning rate")
    batch_size: int = Field(16, description="part two: samples in a mini batch; 0: all of them")
    n_pretrain: int = Field(2000, description="part two: clean samples of phase 1, at most")
    n_test: int = Field(2000, description="part two: test samples, at most")
    finetune_n_seeds: int = Field(5, ge=1, description="part two: independent runs behind every interval")
    n_seeds: int = Field(3, ge=1, description="part one: independent runs behind every interval")

    def __init__(self, **values):
        super().__init__(**values)
        self.one_layer()
        self.finetune()

    def one_layer(self) -> OneLayerParams:
        """What part one reads. Its random numbers depend on nothing else."""
        return self._part(OneLayerParams, optimizer="one_layer_optimizer")

    def finetune(self) -> FinetuneParams:
        """What part two reads. Its random numbers depend on nothing else."""
        return self._part(FinetuneParams, n_seeds="finetune_n_seeds")

    def _part(self, kind: type[ChapterParams], **renamed: str) -> ChapterParams:
        return kind(**{name: getattr(self, renamed.get(name, name)) for name in kind.model_fields})

    @property
    def ran(self) -> str:
        """What part two ran on, as its claims name it: they are about one data set and one kind of backbone."""
        source = "mnist" if self.source in one_layer_images.MNIST else self.source
        return f"{source}_scratch" if self.backbone.endswith("-scratch") else f"{source}_{self.backbone.split('/')[-1]}"


@dataclass(frozen=True)
class Memorised:
    """Where the class token looks after phase 2, on the training samples of one run; L models, m samples.

    fitted: (L, m), whether the given label is; attention: (L, m, 1 + patches), mean over heads, the class token first;
    dark: (m, patches), patches without a pixel brighter than a tenth of the brightest.
    """

    fitted: np.ndarray
    attention: np.ndarray
    dark: np.ndarray


@dataclass(frozen=True)
class Exploration:
    """Part one's arrays, and those of part two: its study, and at `FinetuneParams.sweep_n` more levels of label noise,
    and in three runs a third and three times the learning rate, and three times the epochs; where the class token looks
    in each run there."""

    one_layer: one_layer_images.Exploration
    study: Study
    sweep: Study
    rates: dict[float, Study]
    longer: Study
    memorised: list[Memorised]
    metrics: dict[str, Metric]


def measure(params: Params) -> dict[str, Metric]:
    """The metrics of `one_layer_images.measure` and of `finetuning.measure`, and what the claims of part two rest on.

    The latter end in `_noise<e>_<source>_<backbone>`, see `Params.ran`, with the lowest label noise e above 0:
    `test_change`, `highest_train_loss` and `lowest_noisy_train_accuracy` as in `finetuning`, `noise_cost` at `sweep_n`,
    `test_accuracy` at the largest n, and `lowest_attention_rise`, the lowest `attention_rise` over n, run by run.
    """
    both = params.finetune()
    found, noise, grid = finetuning.measure(both), f"noise{both.label_noise:g}", both.finetune_n_train_grid
    rises = np.array([found[f"attention_rise_n{n:g}_{noise}"].per_seed for n in grid], float)
    claimed = {
        name: found[f"{name}_{noise}"] for name in ("test_change", "highest_train_loss", "lowest_noisy_train_accuracy")
    } | {
        "noise_cost": found[f"noise_cost_n{both.sweep_n:g}_{noise}"],
        "test_accuracy": found[f"test_accuracy_n{grid[-1]:g}_{noise}"],
        "lowest_attention_rise": seed_metric(rises.min(0), (-1, 1)),
    }
    named = {f"{name}_{noise}_{params.ran}": metric for name, metric in claimed.items()}
    return one_layer_images.measure(params.one_layer()) | found | named


def explore(params: Params) -> Exploration:
    """The controls of `one_layer_images.explore`, and those of part two, at its lowest label noise e above 0.

    At `sweep_n`: `sweep_test_accuracy_noise<e>`, `sweep_noisy_train_accuracy_noise<e>` for more levels;
    `train_loss_rate<r>`, `noisy_train_accuracy_rate<r>` for other learning rates; `longer_train_loss`,
    `longer_noisy_train_accuracy` and `longer_noise_cost` after three times the epochs; in three runs.

    On the training samples there, for flipped ones whose given label is fitted (`memorised`) and for `kept` ones:
    `attention_moved_<which>`, total variation between the attention with flips and without, and their difference
    `attention_moved_difference`; `patch_changed_<which>`, share whose most attended patch is another one with flips
    than without; `dark_attention_<which>`, attention on dark patches.
    """
    both = params.finetune()
    n, rate, at_sweep_n = both.sweep_n, both.learning_rate, both.replace(finetune_n_train_grid=[both.sweep_n])
    few = at_sweep_n.replace(label_noise_grid=[0.0, both.label_noise], n_seeds=min(both.n_seeds, CONTROL_SEEDS))
    study, sweep = finetuning.study(both), finetuning.noise_sweep(both)
    rates = {r: finetuning.study(few.replace(learning_rate=r)) for r in (rate / 3, 3 * rate)}
    longer = finetuning.study(few.replace(n_epochs=LONGER * both.n_epochs))
    found = Exploration(
        one_layer=one_layer_images.explore(params.one_layer()),
        study=study,
        sweep=sweep,
        rates={rate / 3: rates[rate / 3], rate: study, 3 * rate: rates[3 * rate]},
        longer=longer,
        memorised=[look(study, n, run) for run in range(both.n_seeds)],
        metrics={},
    )
    found.metrics.update(found.one_layer.metrics | _training_metrics(found, n))
    found.metrics.update(_attention_metrics(found.memorised, study.runs[n]))
    return found


def _training_metrics(found: Exploration, n_train: int) -> dict[str, Metric]:
    metrics = {}
    for place, noise in enumerate(finetuning.SWEEP_LEVELS):
        for name, what in (("test_accuracy", "test_accuracy"), ("noisy_train_accuracy", "flipped_fitted")):
            metrics[f"sweep_{name}_noise{noise:g}"] = fraction_metric(found.sweep.last(what)[0, :, place])
    named = {f"{{}}_rate{rate:.2g}": study for rate, study in found.rates.items()} | {"longer_{}": found.longer}
    for name, study in named.items():
        loss, flipped = (
            study.history(what, n_train)[:CONTROL_SEEDS, 1, -1] for what in ("train_loss", "flipped_fitted")
        )
        metrics[name.format("train_loss")] = seed_metric(loss, (0, np.inf))
        metrics[name.format("noisy_train_accuracy")] = fraction_metric(flipped)
    test = found.longer.last("test_accuracy")[0]
    return metrics | {"longer_noise_cost": seed_metric(test[:, 0] - test[:, 1], (-1, 1))}


def look(found: Study, n_train: int, run: int) -> Memorised:
    """Where the class token of the trained models of one run looks, and which labels they fit."""
    drawn, trained, layer = found.runs[n_train][run], found.trained[n_train][run], found.backbone.last
    maps = trained.maps.map(lambda part: part.to(layer.device))
    with one_thread():
        tokens = layer.tokens(found.hidden.hidden, found.hidden.mask, drawn.samples)
        answers = found.head(finetune.class_vectors(layer, maps, tokens)).argmax(-1).cpu().numpy()
    return Memorised(
        answers == drawn.given,
        trained.attention.mean(2),
        dark_patches(found.dataset.inputs[found.rows[drawn.samples]], found.backbone.grid),
    )


def dark_patches(images: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Which patches of images (m, H, W, C), cut into grid = (rows, columns), hold no bright pixel: (m, patches)."""
    brightest = images.max(-1)
    for axis, count in enumerate(grid, start=1):
        edges = np.linspace(0, brightest.shape[axis], count, endpoint=False).astype(int)
        brightest = np.maximum.reduceat(brightest, edges, axis=axis)
    return (brightest <= DARK * images.max()).reshape(len(images), -1)


def _attention_metrics(memorised: list[Memorised], runs: list[finetune.Run]) -> dict[str, Metric]:
    by_run = np.array([_means(seen, run.flipped[1]) for seen, run in zip(memorised, runs, strict=True)])
    metrics = {
        f"{name}_{which}": fraction_metric(by_run[:, i, j])
        for i, name in enumerate(("attention_moved", "patch_changed", "dark_attention"))
        for j, which in enumerate(("memorised", "kept"))
    }
    return metrics | {"attention_moved_difference": seed_metric(by_run[:, 0, 0] - by_run[:, 0, 1], (-1, 1))}


def _means(seen: Memorised, flipped: np.ndarray) -> list[list[float]]:
    """(3, 2): what `_attention_metrics` names, of memorised and of kept samples; nan where there are none."""
    without, trained = seen.attention[:2]
    by_sample = (
        np.abs(trained - without).sum(-1) / 2,
        trained[:, 1:].argmax(-1) != without[:, 1:].argmax(-1),
        (trained[:, 1:] * seen.dark).sum(-1),
    )
    groups = (flipped & seen.fitted[1], ~flipped)
    return [[values[group].mean() if group.any() else np.nan for group in groups] for values in by_sample]
