"""Chapter baselines: linear classifiers, an MLP and CNNs on the data of single-head attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from scipy.stats import norm

from benign_attention import baselines, reduced
from benign_attention.baselines import MAX_TOKENS, MODELS, BaselineParams, Search
from benign_attention.data import from_natural_units
from benign_attention.experiments import parameterisations
from benign_attention.parallel import map_processes
from benign_attention.parameters import ChapterParams, ParameterError
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.summary import Summary, summarize

SNR = Annotated[float, Field(ge=1e-6, le=1e6)]
GOAL = 0.95  # clean test accuracy that a sample size must reach
CRITERIA = ("stopped", "fitted", "last")
VARIANTS = (*((name, False) for name in (*MODELS, "cnn_relu3")), ("linear_concat", True), ("mlp", True))
STRONG_C = (2.0, 6.0, 20.0)
STRONG_N, STRONG_D_OVER_N, STRONG_STEPS = 50, 4, 800
STRONG_MODELS = ("linear_concat", "cnn_relu", "cnn_relu2", "attention")
FIXED_B = 5.0  # the step size b of the figure configuration of Magen et al.
WEAK = {"c": 0.5, "n_train": 100, "d_over_n": 200, "n_tokens": 2}
MANY = {"c": 3.0, "n_train": 50, "d_over_n": 4, "n_tokens": 8}
NOT_ATTENTION = ("linear_concat", "linear_mean", "mlp")
INITIAL_SCALES = (0.01, 0.1, 1.0)
ERROR_C = np.geomspace(0.25, 2.0, 7)


class Params(ChapterParams, BaselineParams):
    """The point has c = 2; the sample sizes are measured at the point's dimension, tokens and label noise."""

    snr_grid: list[SNR] = Field(
        [0.1, 0.13, 0.17, 0.22], min_length=2, description="SNRs at which sample sizes are measured"
    )
    n_train_grid: list[int] = Field(
        [6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181], min_length=2, description="sample sizes that are tried"
    )
    n_seeds: int = Field(5, ge=1, description="independent runs behind every interval")

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = ChapterParams.HOUSEKEEPING

    def __init__(self, **values):
        super().__init__(**values)
        most = MAX_TOKENS // self.n_tokens
        if self.n_train > most:
            raise ParameterError(
                f"n_train must be at most {most} with {self.n_tokens} tokens per sample, got {self.n_train}"
            )
        grid = self.n_train_grid
        if grid != sorted(set(grid)) or grid[0] < 2 or grid[-1] > min(most, 2000):
            raise ParameterError(
                f"n_train_grid must increase from at least 2 to at most {min(most, 2000)} "
                f"with {self.n_tokens} tokens per sample, got {grid}"
            )
        if len({f"{x:g}" for x in self.snr_grid}) < len(self.snr_grid):
            raise ParameterError(f"snr_grid must hold different values, to six digits, got {self.snr_grid}")

    def point(self, **changes) -> BaselineParams:
        """The data model's part of the parameters, some values replaced."""
        return BaselineParams(**{**{k: getattr(self, k) for k in BaselineParams.model_fields}, **changes})

    def at_natural(self, c: float, n_train: int, d_over_n: float, **changes) -> BaselineParams:
        """The point with signal strength c = SNR sqrt(n) at this size."""
        dim = max(round(n_train * d_over_n), 3)
        rho = float(from_natural_units(c, 1.0, n_train, dim)[0])
        return self.point(n_train=n_train, dim=dim, signal_norm=rho, **changes)


@dataclass(frozen=True)
class _Job:
    """One search of one run; all models of a run draw the same training set."""

    params: Params
    name: str
    point: BaselineParams
    run: int
    fixed_position: bool = False
    n_steps: int = 200
    initial: float = baselines.INITIAL

    def search(self) -> Search:
        rng = self.params.generator(self.run, **self.point.model_dump(), part="baselines")
        p = self.params
        return baselines.search(self.name, self.point, rng, self.fixed_position, p.device, self.n_steps, self.initial)


def _search(job: _Job) -> Search:
    return job.search()


def _map(function, jobs: list, params: Params) -> list:
    return map_processes(function, jobs) if params.device == "cpu" else [function(job) for job in jobs]


def _searches(params: Params, points: list[BaselineParams], names, **settings) -> np.ndarray:
    """Searches of every model at every point and run, (models, points, n_seeds) of Search."""
    jobs = [
        _Job(params, name, point, run, **settings)
        for name in names
        for point in points
        for run in range(params.n_seeds)
    ]
    found = np.empty(len(jobs), dtype=object)
    found[:] = _map(_search, jobs, params)
    return found.reshape(len(names), len(points), params.n_seeds)


def read(searches: np.ndarray, criterion: str, quantity: str) -> np.ndarray:
    """One number of one of the three stops of each search, in the shape of `searches`."""
    values = [getattr(getattr(s, criterion), quantity) for s in searches.ravel()]
    return np.array(values, float).reshape(searches.shape)


def measure(params: Params) -> dict[str, Metric]:
    """Train and test accuracy of every model at the point, random signal position.

    Step size and stop are those with the best validation accuracy among the stops that fit the most training labels.
    """
    found = _searches(params, [params.point()], MODELS)[:, 0]
    metrics = {}
    for name, runs in zip(MODELS, found, strict=True):
        for quantity in ("train_accuracy", "test_accuracy"):
            metrics[f"{quantity}_{name}"] = fraction_metric(read(runs, "fitted", quantity))
    return metrics


# ---- sample size ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleSize:
    """Brackets of the sample size that reaches accuracy GOAL: it fails at `lower` and succeeds at `upper`.

    lower, upper : {criterion: (variants, snr, n_seeds)}; lower is 0 where the smallest size succeeds, upper is inf
    where the largest fails. predicted : (variants, snr).
    """

    snr: np.ndarray
    lower: dict[str, np.ndarray]
    upper: dict[str, np.ndarray]
    predicted: np.ndarray

    def middle(self, criterion: str, variant: tuple[str, bool]) -> np.ndarray:
        """Geometric middle of the brackets, (snr, n_seeds); nan where the bracket has only one end."""
        k = VARIANTS.index(variant)
        lower, upper = self.lower[criterion][k], self.upper[criterion][k]
        both = (lower > 0) & np.isfinite(upper)
        return np.where(both, np.sqrt(np.where(both, lower * upper, 1.0)), np.nan)

    def at_least(self, criterion: str, variant: tuple[str, bool]) -> np.ndarray:
        """`middle`, and the largest size tried where that fails."""
        k = VARIANTS.index(variant)
        failed = np.isinf(self.upper[criterion][k])
        return np.where(failed, self.lower[criterion][k], self.middle(criterion, variant))


def _succeeds(search: Search, criterion: str) -> bool:
    stop = getattr(search, criterion)
    return stop.test_accuracy >= GOAL and (criterion == "stopped" or stop.train_accuracy == 1)


def _bisect(job: tuple) -> list[tuple[float, float]]:
    """The bracket for each criterion, by bisection on the grid of sample sizes."""
    params, (name, fixed), snr, run = job
    grid, found = params.n_train_grid, {}

    def succeeds(k: int, criterion: str) -> bool:
        if k not in found:
            point = params.point(n_train=grid[k], signal_norm=snr * math.sqrt(params.dim))
            found[k] = _Job(params, name, point, run, fixed).search()
        return _succeeds(found[k], criterion)

    brackets = []
    for criterion in CRITERIA:
        low, high = -1, len(grid)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if succeeds(middle, criterion) else (middle, high)
        brackets.append((grid[low] if low >= 0 else 0, grid[high] if high < len(grid) else math.inf))
    return brackets


def predicted_sample_size(params: Params, name: str, fixed: bool, snr: float) -> float:
    """Sample size in the orthogonal limit: of linear models after one step, and of CNNs with power q > 1.

    Linear models reach GOAL at (2 K h z)^2 / (D e^2 d SNR^4); in a CNN the signal outruns the noise tokens beyond
    2 / (e SNR^q), the order of Cao et al. 2022. Derived in chapter baselines (eq-race). nan for other models.
    """
    point, e = params.point(signal_norm=snr * math.sqrt(params.dim)), 1 - 2 * params.label_noise
    if name.startswith("linear"):
        return float((norm.ppf(GOAL) / baselines.one_step_z(name, 1.0, point, fixed)) ** 2)
    power = baselines.NETWORKS[name].power if name in baselines.NETWORKS else 0
    return 2 / (e * snr**power) if power > 1 else math.nan


def sample_size(params: Params) -> SampleSize:
    """Brackets for every model, SNR and run; assumes that success at one size is success at all larger ones."""
    jobs = [
        (params, variant, snr, run) for variant in VARIANTS for snr in params.snr_grid for run in range(params.n_seeds)
    ]
    shape = (len(VARIANTS), len(params.snr_grid), params.n_seeds, len(CRITERIA), 2)
    found = np.array(_map(_bisect, jobs, params), float).reshape(shape)
    ends = [{c: found[..., k, end] for k, c in enumerate(CRITERIA)} for end in (0, 1)]
    predicted = [[predicted_sample_size(params, *variant, snr) for snr in params.snr_grid] for variant in VARIANTS]
    return SampleSize(np.array(params.snr_grid), *ends, np.array(predicted))


def slope(snr: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Least-squares slope of log n* on log SNR, (n_seeds,), of sizes (snr, n_seeds); nan below three points."""
    slopes = []
    for column in sizes.T:
        there = np.isfinite(column)
        fit = np.polyfit(np.log(snr[there]), np.log(column[there]), 1)[0] if there.sum() > 2 else np.nan
        slopes.append(fit)
    return np.array(slopes)


def log_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Mean over SNR of ln(above / below) per seed, where both are known; nan where they never are."""
    ratio = np.log(above / below)
    known = np.isfinite(ratio)
    return np.where(known.any(axis=0), np.where(known, ratio, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1), np.nan)


# ---- strong signals, weak signals, linear closed form, initial scale ------------------------------------------------


@dataclass(frozen=True)
class Strong:
    """Over c at d/n = STRONG_D_OVER_N. searches : (models, c, n_seeds); fixed_step fields : (n_seeds, c)."""

    c: np.ndarray
    snr: np.ndarray
    searches: np.ndarray
    fixed_step: Summary

    def of(self, name: str, quantity: str) -> np.ndarray:
        """(n_seeds, c)"""
        return read(self.searches[STRONG_MODELS.index(name)], "fitted", quantity).T


def strong(params: Params) -> Strong:
    """Large SNR, with step sizes searched for, and for attention also at the fixed step b = FIXED_B."""
    n = min(params.n_train, STRONG_N)
    points = [params.at_natural(c, n, STRONG_D_OVER_N) for c in STRONG_C]
    searches = _searches(params, points, STRONG_MODELS, n_steps=STRONG_STEPS)
    dim, rngs = points[0].dim, [params.generator(run, part="fixed step") for run in range(params.n_seeds)]
    training = reduced.draw(n, dim, params.n_tokens, params.label_noise, rngs).on(params.device).with_axes(1)
    rho, beta = from_natural_units(np.array(STRONG_C), FIXED_B, n, dim)
    *_, state = reduced.gradient_descent(training, rho, beta, STRONG_STEPS)
    snr = np.array([point.snr for point in points])
    return Strong(np.array(STRONG_C), snr, searches, summarize(training, state, rho))


@dataclass(frozen=True)
class Regimes:
    """All models with a weak signal in high dimension, and with many tokens in low; searches : (2, models, n_seeds)."""

    weak: BaselineParams
    many: BaselineParams
    searches: np.ndarray


def regimes(params: Params) -> Regimes:
    """Training sets are no larger than at the point."""
    weak, many = (
        params.at_natural(**{**place, "n_train": min(place["n_train"], params.n_train)}) for place in (WEAK, MANY)
    )
    return Regimes(weak, many, _searches(params, [weak, many], MODELS).swapaxes(0, 1))


LINEAR = (("linear_mean", False), ("linear_concat", False), ("linear_concat", True))


@dataclass(frozen=True)
class LinearErrors:
    """log10 of the clean test error of max-margin linear classifiers over c, and of its closed form.

    measured : (variants, T, n_seeds, c), nan where not every sample is a support vector; predicted : (variants, T, c).
    """

    n_tokens: np.ndarray
    c: np.ndarray
    measured: np.ndarray
    predicted: np.ndarray


def _max_margin(job: tuple) -> float:
    params, point, (name, fixed), run = job
    rng = params.generator(run, **point.model_dump(), part="max margin")
    error = baselines.max_margin_error(name, point, baselines.draw(point, rng, fixed), fixed)
    return math.log10(error) if error > 0 else math.nan


def linear_errors(params: Params, n_tokens=(2, 4)) -> LinearErrors:
    """Solved exactly, no descent: one linear system a run."""
    n = min(params.n_train, 200)
    points = [[params.at_natural(c, n, 20, n_tokens=T) for c in ERROR_C] for T in n_tokens]
    jobs = [
        (params, point, variant, run)
        for variant in LINEAR
        for row in points
        for run in range(params.n_seeds)
        for point in row
    ]
    shape = (len(LINEAR), len(n_tokens), params.n_seeds, len(ERROR_C))
    measured = np.array([_max_margin(job) for job in jobs]).reshape(shape)
    predicted = [
        [[norm.logsf(baselines.max_margin_z(name, p.n_train, p, fixed)) / math.log(10) for p in row] for row in points]
        for name, fixed in LINEAR
    ]
    return LinearErrors(np.array(n_tokens), ERROR_C, measured, np.array(predicted))


@dataclass(frozen=True)
class InitialScale:
    """Test accuracy of CNNs that fit their labels, over the initial scale. accuracy : (models, scales, n_seeds)."""

    names: tuple[str, ...]
    scale: np.ndarray
    n_train: int
    snr: float
    accuracy: np.ndarray


def initial_scale(params: Params) -> InitialScale:
    """At the middle of the SNRs and three quarters up the sample sizes."""
    snr = sorted(params.snr_grid)[len(params.snr_grid) // 2]
    n = params.n_train_grid[len(params.n_train_grid) * 3 // 4]
    point, names = (
        params.point(n_train=n, signal_norm=snr * math.sqrt(params.dim)),
        ("cnn_relu", "cnn_relu2", "cnn_relu3"),
    )
    searches = [_searches(params, [point], names, initial=scale)[:, 0] for scale in INITIAL_SCALES]
    accuracy = np.stack([read(s, "fitted", "test_accuracy") for s in searches], axis=1)
    return InitialScale(names, np.array(INITIAL_SCALES), n, snr, accuracy)


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the point, and the metrics of its claims."""

    size: SampleSize
    strong: Strong
    regimes: Regimes
    linear: LinearErrors
    initial: InitialScale
    parameterised: parameterisations.Exploration
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the point, and the metrics that the chapter's claims rest on."""
    parts = {
        "size": sample_size(params),
        "strong": strong(params),
        "regimes": regimes(params),
        "linear": linear_errors(params),
        "initial": initial_scale(params),
    }
    parameterised = parameterisations.explore_parameterisations(params)
    return Explored(**parts, parameterised=parameterised, metrics={**_claim_metrics(**parts), **parameterised.metrics})


def label_of(variant: tuple[str, bool]) -> str:
    """`linear_concat`, or `linear_concat_fixed` where the signal's position is fixed."""
    return variant[0] + "_fixed" * variant[1]


def _claim_metrics(size: SampleSize, strong: Strong, regimes: Regimes, **_) -> dict[str, Metric]:
    metrics = {}
    for variant in VARIANTS:
        for criterion in ("fitted", "stopped"):
            slopes = slope(size.snr, size.middle(criterion, variant))
            metrics[f"sample_size_slope_{criterion}_{label_of(variant)}"] = seed_metric(slopes)
    for criterion in CRITERIA:
        attention = size.middle(criterion, ("attention", False))
        for variant in VARIANTS:
            if variant[0] != "attention":
                ratio = log_ratio(size.at_least(criterion, variant), attention)
                metrics[f"log_sample_ratio_{criterion}_{label_of(variant)}"] = seed_metric(ratio)
    cost = log_ratio(*(size.middle("fitted", ("linear_concat", fixed)) for fixed in (False, True)))
    metrics["log_sample_cost_of_random_position"] = seed_metric(cost)
    for name in STRONG_MODELS:
        for quantity in ("train_accuracy", "test_accuracy"):
            values = strong.of(name, quantity)
            metrics[f"{quantity}_strongest_{name}"] = fraction_metric(values[:, -1])
    for quantity in ("train_accuracy", "test_accuracy"):
        values = getattr(strong.fixed_step, quantity)
        metrics[f"{quantity}_strongest_attention_fixed_step"] = fraction_metric(values[:, -1])
    for place, searches in zip(("weak", "many"), regimes.searches, strict=True):
        for name, runs in zip(MODELS, searches, strict=True):
            for quantity in ("train_accuracy", "test_accuracy"):
                metrics[f"{quantity}_{place}_{name}"] = fraction_metric(read(runs, "fitted", quantity))
            metrics[f"test_accuracy_last_{place}_{name}"] = fraction_metric(read(runs, "last", "test_accuracy"))
    many = dict(zip(MODELS, read(regimes.searches[1], "fitted", "test_accuracy"), strict=True))
    best = np.max([many[name] for name in NOT_ATTENTION], axis=0)
    metrics["accuracy_gain_many_tokens"] = seed_metric(many["attention"] - best, (-1, 1))
    return metrics
