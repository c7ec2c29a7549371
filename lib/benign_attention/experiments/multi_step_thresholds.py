"""Part of chapter multi_step_dynamics: three thresholds in c, measured and in the orthogonal limit.

A class is *kept* at some time when its clean training samples have more than half of their attention on the signal,
on average, and *lost* otherwise. Classes and flips have exact counts, so that only the noise tokens are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, lru_cache, partial

import numpy as np
from pydantic import Field

from benign_attention import flow, population, reduced, thresholds
from benign_attention.data import from_natural_units
from benign_attention.gram import noise_gram
from benign_attention.parallel import map_processes
from benign_attention.parameters import ChapterParams, Dimension, FlipProbability, SamplesCount
from benign_attention.records import Metric, fraction_metric
from benign_attention.reduced import TrainingSet
from benign_attention.thresholds import Bracket

GRID_RATIO = 1.02  # neighbours on the grid of c
SMALL_B = 1e-4  # step size in natural units of the two steps that show the initial direction
MAX_ROWS = 280  # most noise tokens of a training set with T > 2
N_TOKENS = (2, 3, 8)  # as far as the chapter's `tokens_grid` reaches
LABEL_NOISE = (0.1, 0.3)  # of the token comparison
CLASS_FRACTION, UNBALANCED_NOISE = 0.3, 0.1
CURVES_END = 0.4  # label noise
SETTLED = 1e6  # t' = b x steps after which the limit's thresholds no longer move (`Thresholds.over_time` shows it)
TIMES = np.array([1e2, 1e3, 1e4, 1e14])  # t'
D_OVER_N = np.array([20.0, 200.0, 1e5])
FINITE_SIZE_NOISE = 0.1
FINITE_SIZE_SAMPLES = 20
FEW = 3  # seeds of everything but the balanced search at T = 2
STRONG = 0.1  # a larger initial asymmetry among noise tokens, for comparison
TOLERANCE = 2e-3  # of thresholds in the limit


class Params(ChapterParams):
    """What the thresholds need; the parameters of the chapter have these fields and more."""

    n_train: SamplesCount = Field(200, description="training samples")
    dim: Dimension = Field(40_000, description="token dimension d")
    label_noise_grid: list[FlipProbability] = Field([0.05, 0.1, 0.2, 0.3], min_length=1, description="label noises")
    tokens_grid: list[int] = Field([2, 8], min_length=2, description="tokens per sample, from 2 upwards")
    t_max: float = Field(1e10, ge=1.0, le=1e200, description="last time of the gradient flow")
    map_points: int = Field(9, ge=3, le=100, description="points on the curves over label noise")
    n_seeds: int = Field(3, ge=1, description="independent runs behind every interval")


# ---- one training set -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Exact counts of a training set. n_class, n_flipped : of the class with the first and with the second signal."""

    n_class: tuple[int, int]
    n_flipped: tuple[int, int]
    dim: int
    n_tokens: int

    @classmethod
    def of(cls, n_train: int, dim: int, n_tokens: int, label_noise: float, class_fraction: float = 0.5) -> Setting:
        """The nearest whole numbers: at least one sample a class, and fewer than half of them flipped."""
        first = min(max(round(n_train * class_fraction), 1), n_train - 1)
        n_class = (first, n_train - first)
        return cls(n_class, tuple(min(round(n * label_noise), (n - 1) // 2) for n in n_class), dim, n_tokens)

    @property
    def n_train(self) -> int:
        return sum(self.n_class)

    @property
    def class_fraction(self) -> np.ndarray:
        return np.array(self.n_class) / self.n_train

    @property
    def label_noise(self) -> np.ndarray:
        """Share of flipped labels in each class, (2,); off the value asked for by rounding."""
        return np.array(self.n_flipped) / np.array(self.n_class)

    def draw(self, rng: np.random.Generator) -> TrainingSet:
        clean = np.repeat([1.0, -1.0], self.n_class)
        flipped = np.concatenate([np.arange(n) < k for n, k in zip(self.n_class, self.n_flipped, strict=True)])
        gram = noise_gram(self.n_train * (self.n_tokens - 1), self.dim - 2, rng)
        return TrainingSet(gram, clean, np.where(flipped, -clean, clean))

    def grid(self, k: int) -> tuple[int, int]:
        """First and last index of the searched c = GRID_RATIO^index for class k."""
        about = thresholds.initial_gap_threshold(self.label_noise[k], self.n_tokens, self.class_fraction[k])
        low, high = (math.log(float(about) * x) / math.log(GRID_RATIO) for x in thresholds.SEARCHED)
        return math.floor(low), math.ceil(high)


def _on_clean(training: TrainingSet, per_sample: np.ndarray) -> np.ndarray:
    """Mean over the clean samples of each class, (..., 2)."""
    chosen = training.membership * ~training.noisy[..., None, :]
    return (per_sample[..., None, :] * chosen).sum(axis=-1) / chosen.sum(axis=-1)


# ---- (iii), by gradient flow ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """One training set's late thresholds. low, high : (2,), by class, nan where the searched range has none;
    test_accuracy : (2,), at the smaller low and at the larger high, nan likewise."""

    low: np.ndarray
    high: np.ndarray
    test_accuracy: np.ndarray


def _search(job: tuple[Setting, float, np.random.Generator, np.ndarray]) -> Search:
    """`Search`, all nan where a flow is not accurate."""
    try:
        return _bisection(*job)
    except flow.FlowError:
        return Search(*np.full((3, 2), math.nan))


def _bisection(setting: Setting, t_max: float, rng: np.random.Generator, near: np.ndarray) -> Search:
    """Bisection on the grid of c for each class, from c = `near`, (2,); every c is one gradient flow from 0 to t_max.

    Where `near` is nan the search starts in the middle of the grid. It only saves flows.
    """
    training = setting.draw(rng)

    def rho(index: int) -> float:
        return float(from_natural_units(GRID_RATIO**index, 1.0, setting.n_train, setting.dim)[0])

    @cache
    def at(index: int) -> reduced.State:
        (point,) = flow.gradient_flow(flow.single_head(training, rho(index)), [t_max], **thresholds.PRECISION)
        return point.state

    def kept(index: int, k: int) -> bool:
        attention = reduced.outputs(training, at(index), rho(index)).attention[0]
        return bool(_on_clean(training, attention)[k] > 0.5)

    def start(k: int) -> int:
        first, last = setting.grid(k)
        return (first + last) // 2 if math.isnan(near[k]) else round(math.log(near[k]) / math.log(GRID_RATIO))

    ends = [bisect(partial(kept, k=k), *setting.grid(k), start(k)) for k in (0, 1)]
    low, high = np.array([(math.nan, math.nan) if e is None else e for e in ends], dtype=float).T
    accuracy = np.full(2, math.nan)
    if None not in ends:
        outer = [int(low.min()), int(high.max())]
        accuracy = np.array([float(population.test_accuracy(training, at(i), rho(i)).value) for i in outer])
    return Search(GRID_RATIO**low, GRID_RATIO**high, accuracy)


def bisect(holds: Callable[[int], bool], low: int, high: int, start: int) -> tuple[int, int] | None:
    """Neighbours between which `holds` turns true; None unless it is false at `low` and true at `high`.

    The search leaves `start` in strides that double until it has passed the turn. An end is only looked at when it
    arrives there.
    """
    first, last = low, high
    start, stride = min(max(start, low + 1), high - 1), 1
    if holds(start):
        high = start
        while high - stride > low and holds(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(low, high - stride)
    else:
        low = start
        while low + stride < high and not holds(low + stride):
            low, stride = low + stride, 2 * stride
        high = min(high, low + stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    if (low == first and holds(low)) or (high == last and not holds(high)):
        return None
    return low, high


def _searches(params: Params, settings: list[tuple[float, Setting]], near: np.ndarray) -> list[list[Search]]:
    """For each setting, named by the label noise asked for, all seeds' searches, from c = `near`, (settings, 2)."""
    jobs = [
        (s, params.t_max, _generator(params, run, eta, s), start)
        for (eta, s), start in zip(settings, near, strict=True)
        for run in range(params.n_seeds)
    ]
    found = iter(map_processes(_search, jobs, batch=1))
    return [[next(found) for _ in range(params.n_seeds)] for _ in settings]


def _generator(params: Params, run: int, label_noise: float, setting: Setting) -> np.random.Generator:
    return params.generator(
        run,
        part="threshold",
        label_noise=label_noise,
        n_train=setting.n_train,
        dim=setting.dim,
        n_tokens=setting.n_tokens,
        n_first=setting.n_class[0],
    )


# ---- (i) and (ii), by two small steps -------------------------------------------------------------------------------


def _initial(params: Params, label_noise: float, setting: Setting) -> tuple[Bracket, Bracket]:
    """Points (i) and (ii) by the signs after two small steps; brackets over seeds and classes of a balanced setting."""
    index = np.arange(*setting.grid(0))
    c = GRID_RATIO ** index.astype(float)
    rho, beta = from_natural_units(c, SMALL_B, setting.n_train, setting.dim)
    signs = []
    for run in range(params.n_seeds):
        training = setting.draw(_generator(params, run, label_noise, setting)).with_axes(1)
        *_, state = reduced.gradient_descent(training, rho, beta, 2)
        logits = reduced.outputs(training, state, rho).logits
        signal, noise = logits[:, 0], logits[:, 1:].mean(axis=1)
        signs.append([_on_clean(training, signal - noise) > 0, _on_clean(training, signal) > 0])
    above = np.moveaxis(np.array(signs), 1, 0)  # (2 points, seeds, c, classes)
    return tuple(_turn(c, x.all(axis=(0, 2)), ~x.any(axis=(0, 2))) for x in above)


def _turn(c: np.ndarray, all_above: np.ndarray, all_below: np.ndarray) -> Bracket:
    """From the last c before which all are below to the first after which all are above; nan if there is none."""
    below = np.logical_and.accumulate(all_below)
    above = np.logical_and.accumulate(all_above[::-1])[::-1]
    if not (below.any() and above.any()):
        return Bracket(np.array(math.nan), np.array(math.nan))
    return Bracket(c[below][-1], c[above][0])


@dataclass(frozen=True)
class Limit:
    """The three thresholds of the orthogonal limit at the settings' own shares of flips, the larger of both classes."""

    initial_gap: np.ndarray
    initial_logit: np.ndarray
    late: np.ndarray


@dataclass(frozen=True)
class Measured:
    """Thresholds over label noise (E,), each bracketed over seeds and classes, and the limit's values.

    searches : for each label noise and seed.
    """

    label_noise: np.ndarray
    initial_gap: Bracket
    initial_logit: Bracket
    late: Bracket
    limit: Limit
    searches: list[list[Search]]

    @property
    def n_seeds(self) -> int:
        return len(self.searches[0])

    def late_at(self, label_noise: float) -> Bracket:
        """The late threshold at one label noise, nan where the grid lacks it."""
        here = np.flatnonzero(self.label_noise == label_noise)
        return self.late.at(here[0]) if here.size else Bracket(np.array(math.nan), np.array(math.nan))


# ---- metrics --------------------------------------------------------------------------------------------------------


def bracket_metric(low: float, high: float, n_seeds: int) -> Metric:
    """A threshold between `low` and `high`; the value is their geometric mean, undefined if an end is nan."""
    low, high = float(low), float(high)
    if math.isnan(low) or math.isnan(high):
        return Metric(None, None, None, n_seeds, [], "undefined: not found in the searched range for every seed")
    return Metric(math.sqrt(low * high), low, high, n_seeds, [], "bracket over seeds")


def _ratio(above: Bracket, below: Bracket, n_seeds: int) -> Metric:
    """The ratio of two bracketed numbers."""
    return bracket_metric(above.low / below.high, above.high / below.low, n_seeds)


def over_seeds(found: list[Search], k=slice(None)) -> Bracket:
    """[largest c lost for every seed, smallest kept for every seed], of the classes `k`."""
    low, high = (np.array([getattr(s, name)[k] for s in found]) for name in ("low", "high"))
    return Bracket(low.min(), high.max())


def _searched(params: Params, settings: list[tuple[float, Setting]]) -> Measured:
    limit = _limit(params, [s for _, s in settings])
    searches = _searches(params, settings, limit.late)
    gap, logit = (Bracket.stack(x) for x in zip(*(_initial(params, eta, s) for eta, s in settings), strict=True))
    return Measured(
        np.array([eta for eta, _ in settings]),
        gap,
        logit,
        Bracket.stack([over_seeds(found) for found in searches]),
        Limit(*(getattr(limit, f.name).max(axis=1) for f in fields(Limit))),
        searches,
    )


def _limit(params: Params, settings: list[Setting]) -> Limit:
    """By class, (settings, 2)."""
    eta, pi = np.array([s.label_noise for s in settings]), np.array([s.class_fraction for s in settings])
    n_tokens, time = settings[0].n_tokens, min(params.t_max * settings[0].dim / settings[0].n_train, SETTLED)
    try:
        late = thresholds.late_threshold(eta, n_tokens, pi, time, tolerance=TOLERANCE).middle
    except flow.FlowError:
        late = np.full(eta.shape, math.nan)
    return Limit(thresholds.initial_gap_threshold(eta, n_tokens, pi), thresholds.initial_logit_threshold(eta, pi), late)


def balanced(params: Params) -> Measured:
    """(iii) for T = 2, balanced classes and every label noise of the grid."""
    return _balanced(type(params), params.model_dump_json(exclude={"record_path", "sections"}))


@lru_cache(maxsize=2)
def _balanced(kind: type[Params], text: str) -> Measured:
    params = kind.model_validate_json(text)
    grid = sorted(set(params.label_noise_grid))
    return _searched(params, [(eta, Setting.of(params.n_train, params.dim, 2, eta)) for eta in grid])


def measure_thresholds(params: Params) -> dict[str, Metric]:
    """`threshold_c_eta<value>`: the late threshold, T = 2, balanced classes, for every label noise of the grid."""
    found = balanced(params)
    brackets = zip(found.label_noise, found.late.low, found.late.high, strict=True)
    return {f"threshold_c_eta{eta:g}": bracket_metric(low, high, params.n_seeds) for eta, low, high in brackets}


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """The limit's thresholds at one T over label noise, balanced classes, each (E,).

    late : noise tokens nearly equal at first; uneven : one of them ahead by STRONG (the same for T = 2).
    """

    label_noise: np.ndarray
    initial_gap: np.ndarray
    initial_logit: np.ndarray
    late: np.ndarray
    uneven: np.ndarray


def _curves(n_tokens: int, n_points: int) -> Curves:
    eta = np.linspace(0.0, CURVES_END, n_points)
    asymmetry = np.array([thresholds.ASYMMETRY, STRONG] if n_tokens > 2 else [0.0])[:, None]
    late = thresholds.late_threshold(eta, n_tokens, t_max=SETTLED, asymmetry=asymmetry, tolerance=TOLERANCE).middle
    initial = thresholds.initial_gap_threshold(eta, n_tokens), thresholds.initial_logit_threshold(eta)
    return Curves(eta, *initial, late[0], late[-1])


def _over_time(n_tokens: int) -> np.ndarray:
    return thresholds.late_threshold(np.array(LABEL_NOISE)[:, None], n_tokens, t_max=TIMES, tolerance=TOLERANCE).middle


@dataclass(frozen=True)
class FiniteSize:
    """Late thresholds at FINITE_SIZE_NOISE over D_OVER_N, for T = 2 and the largest T.

    late : measured; limit : with an initial asymmetry of sqrt(K n / d), the relative size of the inner products
    that tell one noise token of a sample from another.
    """

    late: dict[int, Bracket]
    limit: dict[int, np.ndarray]


def finite_size(params: Params) -> FiniteSize:
    n, eta = min(params.n_train, FINITE_SIZE_SAMPLES), FINITE_SIZE_NOISE
    late, limit = {}, {}
    for T in (2, tokens_of(params)[-1]):
        asymmetry = np.sqrt((T - 1) / D_OVER_N) if T > 2 else np.zeros(D_OVER_N.shape)
        found = thresholds.late_threshold(eta, T, t_max=SETTLED, asymmetry=asymmetry, tolerance=TOLERANCE)
        limit[T] = found.middle
        settings = [(eta, Setting.of(n, max(round(r * n), 3), T, eta)) for r in D_OVER_N]
        searches = _searches(params, settings, np.stack([limit[T], limit[T]], axis=1))
        late[T] = Bracket.stack([over_seeds(x) for x in searches])
    return FiniteSize(late, limit)


@dataclass(frozen=True)
class Thresholds:
    """All that the section on thresholds shows.

    measured, curves : by T; over_time : by T (the smallest and the largest), (label noise, times) over LABEL_NOISE and
    TIMES, in the limit; unbalanced : T = 2, UNBALANCED_NOISE, with CLASS_FRACTION of the samples in the first class.
    """

    measured: dict[int, Measured]
    curves: dict[int, Curves]
    over_time: dict[int, np.ndarray]
    unbalanced: Measured
    finite_size: FiniteSize
    metrics: dict[str, Metric]


def unbalanced(params: Params) -> Measured:
    """T = 2, UNBALANCED_NOISE, with CLASS_FRACTION of the samples in the first class."""
    eta = UNBALANCED_NOISE
    return _searched(params, [(eta, Setting.of(params.n_train, params.dim, 2, eta, CLASS_FRACTION))])


def tokens_of(params: Params) -> list[int]:
    """The T whose thresholds are compared."""
    return [T for T in N_TOKENS if T <= params.tokens_grid[-1]]


def explore_thresholds(params: Params) -> Thresholds:
    """Measured thresholds for several T and unbalanced classes, the limit's, and the metrics of the claims."""
    measured = {2: balanced(params)}
    params, tokens = params.replace(n_seeds=min(params.n_seeds, FEW)), tokens_of(params)
    for T in tokens[1:]:
        n = min(params.n_train, MAX_ROWS // (T - 1))
        dim = max(round(params.dim * n / params.n_train), 3)
        measured[T] = _searched(params, [(eta, Setting.of(n, dim, T, eta)) for eta in LABEL_NOISE])
    unequal = unbalanced(params)
    curves = dict(zip(tokens, map_processes(partial(_curves, n_points=params.map_points), tokens), strict=True))
    few_and_many = tokens[0], tokens[-1]
    over_time = dict(zip(few_and_many, map_processes(_over_time, few_and_many), strict=True))
    metrics = _claim_metrics(measured, unequal)
    return Thresholds(measured, curves, over_time, unequal, finite_size(params), metrics)


def _claim_metrics(measured: dict[int, Measured], unbalanced: Measured) -> dict[str, Metric]:
    two, metrics = measured[2], {}
    for eta, searches in zip(two.label_noise, two.searches, strict=True):
        below, above = np.array([s.test_accuracy for s in searches]).T
        metrics[f"test_accuracy_below_threshold_eta{eta:g}"] = fraction_metric(below)
        metrics[f"test_accuracy_above_threshold_eta{eta:g}"] = fraction_metric(above)
    for T, found in measured.items():
        metrics[f"threshold_smallest_growth_T{T}"] = smallest_growth(found.late, found.n_seeds)
        for name in ("late", "initial_gap", "initial_logit"):
            bracket, limit = getattr(found, name), getattr(found.limit, name)
            ends = (bracket.low / limit).min(), (bracket.high / limit).max()
            metrics[f"{name}_threshold_over_limit_T{T}"] = bracket_metric(*ends, found.n_seeds)
        if T > 2:
            for k, eta in enumerate(found.label_noise):
                late = found.late.at(k)
                metrics[f"threshold_c_T{T}_eta{eta:g}"] = bracket_metric(late.low, late.high, found.n_seeds)
                metrics[f"threshold_T{T}_over_T2_eta{eta:g}"] = _ratio(late, two.late_at(eta), found.n_seeds)
    for k, eta in enumerate(two.label_noise):
        metrics[f"late_over_initial_gap_eta{eta:g}"] = _ratio(two.late.at(k), two.initial_gap.at(k), two.n_seeds)
    minority, majority = (over_seeds(unbalanced.searches[0], k) for k in (0, 1))
    metrics["class_threshold_ratio"] = _ratio(minority, majority, unbalanced.n_seeds)
    return metrics


def smallest_growth(late: Bracket, n_seeds: int) -> Metric:
    """The smallest ratio of thresholds at neighbouring label noises, in brackets; undefined for a single one."""
    if len(late.low) < 2:
        return bracket_metric(math.nan, math.nan, n_seeds)
    return bracket_metric((late.low[1:] / late.high[:-1]).min(), (late.high[1:] / late.low[:-1]).min(), n_seeds)
