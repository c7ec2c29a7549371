"""Chapter token_selection: which tokens attention selects, when, and what becomes of fresh data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from benign_attention import flow, selection, selection_population, shared_seed
from benign_attention import selection_theory as theory
from benign_attention.data import TokenSelectionParams, draw_token_selection, flipped_count
from benign_attention.parallel import map_processes
from benign_attention.parameters import ChapterParams, ParameterError, Positive, SignalStrength, StepsCount
from benign_attention.population import as_numpy
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.selection import ROLES, State, TrainingSet, by_role

REGIMES = ((2000, 20.0), (5000, 5.0), (1000, 100.0))  # (d, |mu|) of Sakamoto and Sato 2025: benign, weak, strong
REGIME_NAMES = ("benign", "weak", "strong")
LATE_TIMES = (1e6, 1e12, 1e30)
MAP_DIMS = 250 + 125 * np.arange(39)
MAP_NORMS = 5.0 + 2.5 * np.arange(39)
HIGH_TEST_LOSS = 0.5225  # the middle of the published range
SELECTED_RATIOS = (0.05, 0.1, 0.2)
SELECTED_SIZES = (0.5, 1.5, 3.0, 6.0)  # rho_w |mu|
SELECTED_TAU, SELECTED_STEPS = 400.0, 400
ENCODER_TREND = (1 / 3, 1, 3)  # times encoder_dim
LATE_DIMS = (500, 500_000)
RELEVANT, WEAK, CONFUSING, IRRELEVANT = range(len(ROLES))


class Params(ChapterParams, TokenSelectionParams):
    """The benign regime of the authors' runs is the default."""

    step_size: Positive = Field(5e-3, description="gradient descent step")
    n_steps: StepsCount = Field(1000, description="gradient steps; flow time is step_size times n_steps")
    map_points: int = Field(12, ge=2, le=39, description="cells along each side of the heat map, of the published 39")
    few_seeds: int = Field(3, ge=1, description="independent runs behind every cell of the map and every late time")
    norm_grid: list[Positive] = Field(
        [5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 100.0],
        min_length=1,
        description="signal norms at which selected tokens are counted",
    )
    late_grid: list[SignalStrength] = Field(
        [0.1, 0.5, 2.0, 10.0, 100.0], min_length=1, description="values of n SNR^2 that are followed to late times"
    )
    release_grid: list[SignalStrength] = Field(
        [100.0, 200.0, 300.0, 400.0], min_length=2, description="values of n SNR^2 at which flipped labels wait"
    )

    encoder_dim: int = Field(300, ge=9, le=20_000, description="largest token dimension of the transformer encoder")
    encoder_steps: StepsCount = Field(100, description="gradient steps of the transformer encoder")

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = (
        *ChapterParams.HOUSEKEEPING,
        *("map_points", "few_seeds", "encoder_dim", "encoder_steps"),
    )

    def __init__(self, **values):
        super().__init__(**values)
        for name in ("norm_grid", "late_grid", "release_grid"):
            grid = getattr(self, name)
            if len({f"{x:g}" for x in grid}) < len(grid):
                raise ParameterError(f"{name} must hold different values, to six digits, got {grid}")

    @property
    def flow_time(self) -> float:
        """t = step_size n_steps."""
        return self.step_size * self.n_steps

    @property
    def n_snr2(self) -> float:
        """x = n |mu|^2 / d."""
        return self.n_train * self.signal_norm**2 / self.dim

    def point(self, **changes) -> TokenSelectionParams:
        """The data at this point, some values replaced."""
        return TokenSelectionParams(**{**self.model_dump(include=set(TokenSelectionParams.model_fields)), **changes})

    def norm_at(self, n_snr2: float, dim: int) -> float:
        """The signal norm at which n |mu|^2 / d is `n_snr2`."""
        return math.sqrt(n_snr2 * dim / self.n_train)


# ---- what is read off a trained model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A batch of states; fields of the batch's shape, those of attention and selection with a last axis over ROLES.

    Attention is mass, all irrelevant tokens together. noisy_selected : share of flipped samples whose largest attention
    is on a token of that role; best_selected : share of flipped samples whose largest attention is on the token whose
    value suits their label best. What has no samples is nan. flow_discrepancy : of a gradient flow's two integrations.
    """

    train_accuracy: np.ndarray
    clean_train_accuracy: np.ndarray
    noisy_train_accuracy: np.ndarray
    train_loss: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    noisy_selected: np.ndarray
    best_selected: np.ndarray
    test_accuracy: np.ndarray
    test_loss: np.ndarray
    test_attention: np.ndarray
    flow_discrepancy: np.ndarray

    @classmethod
    def stack(cls, readings: Iterable[Reading], axis: int = 0) -> Reading:
        columns = zip(*([getattr(r, f.name) for f in fields(cls)] for r in readings), strict=True)
        return cls(*(np.stack(column, axis) for column in columns))

    def reshape(self, *shape: int) -> Reading:
        """The first axis split into `shape`."""
        arrays = (getattr(self, f.name) for f in fields(self))
        return Reading(*(x.reshape(*shape, *x.shape[1:]) for x in arrays))

    def __getitem__(self, index) -> Reading:
        return Reading(*(getattr(self, f.name)[index] for f in fields(self)))


def _mean_over(samples: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of `values` (..., n) or (..., n, 4) over the samples marked true in (..., n); nan where there are none."""
    extra = values.ndim - samples.ndim
    marked = samples.reshape(*samples.shape, *(1,) * extra)
    total, count = (marked * values).sum(axis=-1 - extra), marked.sum(axis=-1 - extra)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def read(training: TrainingSet, state: State, fine: bool = False, flow_discrepancy: float = 0.0) -> Reading:
    """The state on its training samples and on fresh ones; `fine` integrates over 2^13 points, else over 2^10."""
    out = selection.outputs(training, state)
    attention, f, labels, values = (as_numpy(x) for x in (out.attention, out.f, training.labels, training.values))
    noisy = as_numpy(training.noisy) > 0
    margin = labels * f
    selected = np.eye(attention.shape[-1])[attention.argmax(axis=-1)]
    best = attention.argmax(axis=-1) == (labels[..., None] * values).argmax(axis=-1)
    points = {"log2_points": 10, "n_randomisations": 8} if fine else {"log2_points": 8, "n_randomisations": 4}
    fresh = selection_population.test_quantities(selection_population.fresh_sample(training, state), **points)
    return Reading(
        (margin > 0).mean(axis=-1),
        _mean_over(~noisy, margin > 0),
        _mean_over(noisy, margin > 0),
        np.logaddexp(0.0, -margin).mean(axis=-1),
        _mean_over(~noisy, by_role(attention)),
        _mean_over(noisy, by_role(attention)),
        _mean_over(noisy, by_role(selected)),
        _mean_over(noisy, best),
        fresh.accuracy.value,
        fresh.loss.value,
        fresh.attention.value,
        np.full(fresh.accuracy.value.shape, flow_discrepancy),
    )


@dataclass(frozen=True)
class Job:
    """One training run. at : gradient steps, or flow times, after which it is read."""

    point: TokenSelectionParams
    rng: np.random.Generator
    at: tuple[float, ...]
    step_size: float = 0.0
    fine: bool = False


def _descend_one(job: Job) -> Reading:
    return _descend(selection.draw(job.point, job.rng), job)


def _descend(training: TrainingSet, job: Job) -> Reading:
    states = selection.gradient_descent(training, job.step_size, job.at)
    return Reading.stack([read(training, state, job.fine) for state in states], axis=len(training.labels.shape) - 1)


def _flow_one(job: Job) -> Reading:
    training = selection.draw(job.point, job.rng)
    p = job.point
    with flow.at_point(dim=p.dim, signal_norm=p.signal_norm, weak_ratio=p.weak_ratio):
        path = flow.gradient_flow(flow.token_selection(training), job.at)
        return Reading.stack([read(training, there.state, job.fine, there.discrepancy) for there in path])


def _jobs(params: Params, points: Sequence[TokenSelectionParams], n_runs: int, at, **options) -> list[Job]:
    at = tuple(np.asarray(at).tolist())
    return [Job(p, params.generator(run, **p.model_dump()), at, **options) for p in points for run in range(n_runs)]


def _together(jobs: list[Job], device: str) -> list[Reading]:
    """The runs in batches of equal shape and step size."""
    sets = [selection.draw(job.point, job.rng) for job in jobs]
    kinds = [(s.tokens.shape, s.outside.shape, job.step_size) for s, job in zip(sets, jobs, strict=True)]
    readings = {}
    for kind in set(kinds):
        alike = [i for i, other in enumerate(kinds) if other == kind]
        reading = _descend(TrainingSet.stack(sets[i] for i in alike).on(device), jobs[alike[0]])
        readings |= {i: reading[k] for k, i in enumerate(alike)}
    return [readings[i] for i in range(len(jobs))]


def _run(params: Params, jobs: list[Job]) -> list[Reading]:
    """Gradient descent: a process for every run on the CPU, batches on other devices."""
    return map_processes(_descend_one, jobs) if params.device == "cpu" else _together(jobs, params.device)


def descend(params: Params, points: Sequence[TokenSelectionParams], n_runs: int, steps, fine=False) -> Reading:
    """Gradient descent, (points, n_runs, steps)."""
    jobs = _jobs(params, points, n_runs, steps, step_size=params.step_size, fine=fine)
    return Reading.stack(_run(params, jobs)).reshape(len(points), n_runs)


def follow(params: Params, points: Sequence[TokenSelectionParams], n_runs: int, times) -> Reading:
    """Gradient flow, (points, n_runs, times); on the CPU whatever the device."""
    readings = map_processes(_flow_one, _jobs(params, points, n_runs, times))
    return Reading.stack(readings).reshape(len(points), n_runs)


def measure(params: Params) -> dict[str, Metric]:
    """Accuracy, loss and attention after the last step, at the given point."""
    at_end = descend(params, [params.point()], params.n_seeds, [params.n_steps], fine=True)[0][:, -1]
    return {
        "train_accuracy": fraction_metric(at_end.train_accuracy),
        "test_accuracy": fraction_metric(at_end.test_accuracy),
        "train_loss": seed_metric(at_end.train_loss, (0, np.inf)),
        "test_loss": seed_metric(at_end.test_loss, (0, np.inf)),
        "relevant_attention_clean": fraction_metric(at_end.clean_attention[:, RELEVANT]),
        "relevant_attention_noisy": fraction_metric(at_end.noisy_attention[:, RELEVANT]),
        "confusing_attention_noisy": fraction_metric(at_end.noisy_attention[:, CONFUSING]),
    }


def release_time(times: np.ndarray, attention: np.ndarray) -> float:
    """When attention falls below 1/2 after its maximum, interpolated; nan where it does not, or was never above."""
    peak = int(attention.argmax())
    below = np.flatnonzero(attention[peak:] < 0.5)
    if attention[peak] < 0.5 or not below.size:
        return math.nan
    k = peak + int(below[0])
    share = (attention[k - 1] - 0.5) / (attention[k - 1] - attention[k])
    return float(np.exp(np.log(times[k - 1]) + share * np.log(times[k] / times[k - 1])))


@dataclass(frozen=True)
class LimitJob:
    """A point of the orthogonal limit, and the times tau = t d / (3 n) at which it is read."""

    point: theory.LimitPoint
    taus: tuple[float, ...]


def limit_curves(job: LimitJob) -> np.ndarray:
    """(2, times): attention on the relevant token, of flipped training samples and of fresh ones."""
    with flow.at_point(n_snr2=job.point.n_snr2, weak_ratio=job.point.weak_ratio):
        states = list(theory.limit_flow(job.point, job.taus))
    noisy = [theory.limit_attention(job.point, s)[1, 0] for s in states]
    return np.array([noisy, [theory.limit_fresh_attention(job.point, s) for s in states]])


# ---- the three regimes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regimes:
    """Gradient descent in the three regimes, readings (regimes, n_seeds, steps), and flow from there on.

    samples : (regimes, 2, steps, T), attention of the first clean and the first flipped sample of the first seed.
    late : (regimes, few_seeds, LATE_TIMES).
    """

    steps: np.ndarray
    descent: Reading
    samples: np.ndarray
    late: Reading


def _sample_attention(job: Job) -> np.ndarray:
    training = selection.draw(job.point, job.rng)
    first = [np.flatnonzero(training.noisy == kind)[:1] for kind in (False, True)]
    rows = []
    for state in selection.gradient_descent(training, job.step_size, job.at):
        attention = selection.outputs(training, state).attention
        rows.append([attention[i[0]] if i.size else np.full(training.n_tokens, np.nan) for i in first])
    return np.moveaxis(np.array(rows), 0, 1)


def regimes(params: Params) -> Regimes:
    points = [params.point(dim=d, signal_norm=mu) for d, mu in REGIMES]
    steps = np.unique(np.round(np.geomspace(1, params.n_steps, 40)).astype(int))
    single = _jobs(params, points, 1, steps, step_size=params.step_size)
    return Regimes(
        steps,
        descend(params, points, params.n_seeds, steps),
        np.array(map_processes(_sample_attention, single)),
        follow(params, points, params.few_seeds, LATE_TIMES),
    )


# ---- attended outputs in the plane of the signals -------------------------------------------------------------------


@dataclass(frozen=True)
class Plane:
    """Attended outputs X^T s along mu_+ and mu_-, in units of |mu|, of one training set and of fresh samples.

    position : (n, 2); fresh_position : (n_fresh, 2); clean_labels, fresh_labels : +-1; noisy : (n,).
    """

    position: np.ndarray
    clean_labels: np.ndarray
    noisy: np.ndarray
    fresh_position: np.ndarray
    fresh_labels: np.ndarray
    train_accuracy: float
    test_accuracy: float


def attended_fresh(training: TrainingSet, state: State, n_fresh: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Positions (n_fresh, 2) and labels of fresh samples. A token's noise enters along mu_+, mu_- and, all the rest,
    through the logit."""
    norm, weak = float(training.signal_norm), float(training.weak_ratio)
    law = selection_population.fresh_sample(training, state)
    labels = np.where(np.arange(n_fresh) % 2 == 0, 1.0, -1.0)
    own = np.stack([labels > 0, labels < 0], axis=-1).astype(float)
    plane = rng.standard_normal((n_fresh, training.n_tokens, 2)) / norm
    plane[:, 0] += own
    plane[:, 1] += weak * own
    plane[:, 2] += weak * own[:, ::-1]
    rest = math.sqrt(max(float(law.spread) ** 2 - float((law.logits[:, 0] ** 2).sum()) / norm**2, 0.0))
    logits = plane @ law.logits[:, 0] + rest * rng.standard_normal((n_fresh, training.n_tokens))
    attention = np.exp(logits - logits.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    return (attention[..., None] * plane).sum(axis=1), labels


def _plane(job: Job, n_fresh: int = 400) -> Plane:
    training = selection.draw(job.point, job.rng)
    if job.step_size:
        (state,) = selection.gradient_descent(training, job.step_size, job.at)
    else:
        (state,) = (there.state for there in flow.gradient_flow(flow.token_selection(training), job.at))
    attention = selection.outputs(training, state).attention
    plane = training.tokens[:, :2].reshape(*attention.shape, 2) / job.point.signal_norm
    reading = read(training, state)
    return Plane(
        (attention[..., None] * plane).sum(axis=1),
        training.clean_labels,
        training.noisy,
        *attended_fresh(training, state, n_fresh, job.rng),
        float(reading.train_accuracy),
        float(reading.test_accuracy),
    )


def planes(params: Params) -> list[Plane]:
    """The first seed of the three regimes at the last step, and of the weak one far beyond."""
    points = [params.point(dim=d, signal_norm=mu) for d, mu in REGIMES]
    early = _jobs(params, points, 1, [params.n_steps], step_size=params.step_size)
    return map_processes(_plane, [*early, *_jobs(params, points[1:2], 1, LATE_TIMES[-1:])])


# ---- what flipped samples select ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selected:
    """Which tokens flipped samples look at most.

    over_norm : reading (norms, runs) after the last step at the point's dim; over_time : (runs, times) at the point;
    over_size : (weak ratios, sizes, runs) at x = 1 and t d / (3 n) = SELECTED_TAU, where size is rho_w |mu|;
    predicted : (weak ratios, sizes), the probability that the confusing token has the best value.
    """

    norms: np.ndarray
    over_norm: Reading
    times: np.ndarray
    over_time: Reading
    ratios: np.ndarray
    sizes: np.ndarray
    over_size: Reading
    predicted: np.ndarray


def selected(params: Params) -> Selected:
    runs = 2 * params.n_seeds
    norms = np.array(params.norm_grid)
    by_norm = [params.point(signal_norm=float(mu)) for mu in norms]
    times = np.geomspace(0.02, 1e6, 24)
    ratios, sizes = np.array(SELECTED_RATIOS), np.array(SELECTED_SIZES)
    norm_of = (sizes / ratios[:, None]).ravel()
    dims = np.maximum(np.rint(params.n_train * norm_of**2).astype(int), 3)
    by_size = [
        params.point(dim=int(d), signal_norm=float(mu), weak_ratio=float(w))
        for d, mu, w in zip(dims, norm_of, np.repeat(ratios, sizes.size), strict=True)
    ]
    steps = [SELECTED_TAU * 3 * p.n_train / (p.dim * SELECTED_STEPS) for p in by_size]
    jobs = [
        job
        for p, step in zip(by_size, steps, strict=True)
        for job in _jobs(params, [p], runs, [SELECTED_STEPS], step_size=step)
    ]
    predicted = [theory.best_value_shares(p.signal_norm, p.weak_ratio, p.n_tokens)[CONFUSING] for p in by_size]
    shape = (ratios.size, sizes.size)
    return Selected(
        norms,
        descend(params, by_norm, runs, [params.n_steps])[:, :, -1],
        times,
        follow(params, [params.point()], runs, times)[0],
        ratios,
        sizes,
        Reading.stack(_run(params, jobs))[:, -1].reshape(*shape, runs),
        np.reshape(predicted, shape),
    )


# ---- the heat map ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """After the last step over (d, |mu|): reading (dims, norms, few_seeds); boundaries (dims,) where the orthogonal
    limit has attention 1/2 on the relevant token, of flipped training samples and of fresh ones; high_train_loss : the
    middle of the two values that `theory.selected_train_loss` predicts for flipped labels unfitted and fitted."""

    dims: np.ndarray
    norms: np.ndarray
    n_snr2: np.ndarray
    reading: Reading
    noisy_boundary: np.ndarray
    fresh_boundary: np.ndarray
    high_train_loss: float


def heat_map(params: Params) -> HeatMap:
    index = np.rint(np.linspace(0, 38, params.map_points)).astype(int)
    dims, norms = MAP_DIMS[index], MAP_NORMS[index]
    points = [params.point(dim=int(d), signal_norm=float(mu)) for d in dims for mu in norms]
    reading = descend(params, points, params.few_seeds, [params.n_steps])[:, :, -1]
    x = np.geomspace(0.1, 1500.0, 24)
    taus = tuple(params.flow_time * dims / (3 * params.n_train))
    curves = np.array(map_processes(limit_curves, [LimitJob(_limit_point(params, one), taus) for one in x]))
    to_norm = np.sqrt(dims / params.n_train)
    return HeatMap(
        dims,
        norms,
        params.n_train * norms**2 / dims[:, None],
        reading.reshape(dims.size, norms.size),
        to_norm * np.sqrt([_last_rise(x, curves[:, 0, k]) for k in range(dims.size)]),
        to_norm * np.sqrt([_last_rise(x, curves[:, 1, k]) for k in range(dims.size)]),
        sum(theory.selected_train_loss(params.label_noise, params.weak_ratio, k) for k in (False, True)) / 2,
    )


def _limit_point(params: Params, n_snr2: float, **changes) -> theory.LimitPoint:
    at = params.point(**changes)
    flipped = flipped_count(at.n_train, at.label_noise) / at.n_train
    return theory.LimitPoint(float(n_snr2), at.n_tokens, flipped, at.weak_ratio)


def _last_rise(x: np.ndarray, y: np.ndarray) -> float:
    """The largest x at which y rises through 1/2, interpolated in log x; nan where it does not."""
    rises = np.flatnonzero((y[:-1] < 0.5) & (y[1:] >= 0.5))
    if not rises.size:
        return math.nan
    k = rises[-1]
    return float(x[k] * (x[k + 1] / x[k]) ** ((0.5 - y[k]) / (y[k + 1] - y[k])))


def unexplained(x: np.ndarray, y: np.ndarray, per_decade: int = 5, least: int = 3) -> float:
    """Share of the variance of y left within bins of log x; bins with fewer than `least` values are left out."""
    bins = np.floor(np.log10(x.ravel()) * per_decade)
    groups = [y.ravel()[bins == b] for b in np.unique(bins)]
    groups = [g for g in groups if g.size >= least]
    if not groups:
        return math.nan
    together = np.concatenate(groups)
    within = sum(((g - g.mean()) ** 2).sum() for g in groups)
    return float(within / ((together - together.mean()) ** 2).sum())


# ---- more widely, and later -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Late:
    """Gradient flow over x = n SNR^2 and d: norms (x, dims); reading (x, dims, few_seeds, times), at n_steps
    and at 1e12."""

    n_snr2: np.ndarray
    dims: np.ndarray
    norms: np.ndarray
    times: np.ndarray
    reading: Reading


def late(params: Params) -> Late:
    x, dims = np.array(params.late_grid), np.array(LATE_DIMS)
    times = np.array([params.flow_time, LATE_TIMES[1]])
    points = [
        params.point(dim=int(d), signal_norm=params.norm_at(float(one), int(d)))
        for one in params.late_grid
        for d in dims
    ]
    norms = np.array([p.signal_norm for p in points]).reshape(x.size, dims.size)
    return Late(x, dims, norms, times, follow(params, points, params.few_seeds, times).reshape(x.size, dims.size))


@dataclass(frozen=True)
class Release:
    """How long flipped samples stay on the relevant token: n = 10, T = 3, rho_w = 0, d = 50000 n.

    taus : t d / (3 n); attention : (x, few_seeds, taus), on the relevant token; time : (x, few_seeds), tau at which it
    falls below 1/2, nan where it does not; limit_n_snr2 : the same x and larger ones; limit : (limit x, taus) and
    limit_time : (limit x,), the same in the orthogonal limit.
    """

    n_snr2: np.ndarray
    n_tokens: int
    taus: np.ndarray
    attention: np.ndarray
    time: np.ndarray
    limit_n_snr2: np.ndarray
    limit: np.ndarray
    limit_time: np.ndarray

    @property
    def rate(self) -> np.ndarray:
        """(few_seeds,): slope of log time on x."""
        return np.array([_slope(self.n_snr2, column) for column in self.time.T])

    @property
    def limit_rate(self) -> float:
        """The same in the limit, over the same x."""
        return _slope(self.n_snr2, self.limit_time[: self.n_snr2.size])


def _slope(x: np.ndarray, times: np.ndarray) -> float:
    found = np.isfinite(times)
    return float(np.polyfit(x[found], np.log(times[found]), 1)[0]) if found.sum() > 1 else math.nan


def release(params: Params) -> Release:
    small = {"n_train": 10, "n_tokens": 3, "weak_ratio": 0.0, "dim": 500_000}
    x = np.unique(params.release_grid)
    limit_x = np.concatenate([x, x[-1] * np.array([1.5, 2.0, 2.5])])
    taus = np.geomspace(0.3, 1e6, 100)
    points = [params.point(**small, signal_norm=math.sqrt(one * small["dim"] / small["n_train"])) for one in x.tolist()]
    times = taus * 3 * small["n_train"] / small["dim"]
    attention = follow(params, points, params.few_seeds, times).noisy_attention[..., RELEVANT]
    jobs = [LimitJob(_limit_point(params, one, **small), tuple(taus)) for one in limit_x]
    limit = np.array(map_processes(limit_curves, jobs))[:, 0]
    time, limit_time = (np.apply_along_axis(partial(release_time, taus), -1, a) for a in (attention, limit))
    return Release(x, small["n_tokens"], taus, attention, time, limit_x, limit, limit_time)


# ---- another distribution of W_0 ------------------------------------------------------------------------------------


def initial_distributions(params: Params, dim: int = 600) -> np.ndarray:
    """(2, n_seeds, 3): test loss, attention on the relevant token of clean and of flipped samples after the last step,
    for W_0 uniform on +-1/sqrt(d) and Gaussian of the same variance 1/(3d); explicit tokens, the same for both."""
    point = params.point(dim=dim)
    jobs = [
        Job(point, params.generator(run, **point.model_dump(), part="W_0"), (params.n_steps,), params.step_size)
        for run in range(params.n_seeds)
    ]
    return np.moveaxis(np.array(map_processes(_initial_distributions, jobs)), 1, 0)


def _initial_distributions(job: Job) -> list[list[float]]:
    dim = job.point.dim
    data = draw_token_selection(job.point, job.rng)
    rows = []
    for draw in (
        job.rng.uniform(-1, 1, (dim, dim)) / math.sqrt(dim),
        job.rng.standard_normal((dim, dim)) / math.sqrt(3 * dim),
    ):
        training, _ = selection.from_data(data, draw, job.point.weak_ratio)
        end = _descend(training, job)[-1]
        rows.append([end.test_loss, end.clean_attention[RELEVANT], end.noisy_attention[RELEVANT]])
    return rows


# ---- one seed for train and test ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneSeed:
    """What the authors' way of drawing test data changes, by regime and seed, (regimes, n_seeds).

    accuracy_bias, loss_bias : reported minus exact, on a test set of 1000; flipped_copies : share of the clean-labelled
    copies of flipped training samples that are misclassified.
    """

    accuracy_bias: np.ndarray
    loss_bias: np.ndarray
    flipped_copies: np.ndarray


def one_seed(params: Params) -> OneSeed:
    points = [params.point(dim=d, signal_norm=mu) for d, mu in REGIMES]
    jobs = _jobs(params, points, params.n_seeds, [params.n_steps], step_size=params.step_size)
    found = np.array(map_processes(_one_seed, jobs)).reshape(len(points), params.n_seeds, 3)
    return OneSeed(*np.moveaxis(found, -1, 0))


def _one_seed(job: Job) -> tuple[float, float, float]:
    training = selection.draw(job.point, job.rng)
    (state,) = selection.gradient_descent(training, job.step_size, job.at)
    found = shared_seed.compare(training, state, max(1000, 2 * training.n_train))
    wrong = found.copies[training.noisy[training.clean_labels > 0]] <= 0
    return found.accuracy_bias, found.loss_bias, float(wrong.mean()) if wrong.size else math.nan


# ---- a transformer encoder ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """One-layer transformer encoders in the three regimes, rescaled to dims and norms.

    Arrays (variants, regimes, n_seeds), after the last step. noisy_accuracy : share of flipped labels fitted;
    relevant_attention : on fresh samples, of what goes to data tokens. trend_accuracy : (trend_dims, few_seeds), test
    accuracy of the full block in the benign regime, rescaled to several dimensions.
    """

    variants: list[str]
    dims: list[int]
    norms: list[float]
    train_accuracy: np.ndarray
    noisy_accuracy: np.ndarray
    test_accuracy: np.ndarray
    relevant_attention: np.ndarray
    trend_dims: list[int]
    trend_accuracy: np.ndarray


def encoders(params: Params, n_test: int = 1000) -> Encoder:
    """All variants of a seed share data, fresh samples and the weights that they have in common."""
    from benign_attention import encoder

    def rescaled(regime: tuple[int, float], dim: int):
        published = params.point(dim=regime[0], signal_norm=regime[1])
        return encoder.rescaled(published, params.step_size, min(regime[0], dim))

    def jobs(name: str, place, n_runs: int) -> list[encoder.EncoderJob]:
        point, step_size = place
        rngs = [params.generator(run, **point.model_dump(), part="encoder") for run in range(n_runs)]
        architecture, steps = encoder.variants(point.dim)[name], (params.encoder_steps,)
        return [encoder.EncoderJob(point, architecture, step_size, steps, rng, n_test, params.device) for rng in rngs]

    places, names = (
        [rescaled(regime, params.encoder_dim) for regime in REGIMES],
        list(encoder.variants(params.encoder_dim)),
    )
    trend = [rescaled(REGIMES[0], round(params.encoder_dim * factor)) for factor in ENCODER_TREND]
    grid = [job for name in names for place in places for job in jobs(name, place, params.n_seeds)]
    try:
        runs = encoder.train_all(grid + [job for place in trend for job in jobs(names[0], place, params.few_seeds)])
    except encoder.DivergenceError as error:
        raise ParameterError(f"step_size must be small enough to train, got {params.step_size:g}: {error}") from None
    runs, along = runs[: len(grid)], runs[len(grid) :]
    shape = (len(names), len(places), params.n_seeds)
    return Encoder(
        names,
        [point.dim for point, _ in places],
        [point.signal_norm for point, _ in places],
        *(
            np.reshape([getattr(r, k)[-1] for r in runs], shape)
            for k in ("train_accuracy", "noisy_accuracy", "test_accuracy")
        ),
        np.reshape([r.test_attention[-1, RELEVANT] for r in runs], shape),
        [point.dim for point, _ in trend],
        np.reshape([r.test_accuracy[-1] for r in along], (len(trend), params.few_seeds)),
    )


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the point, and the metrics of its claims."""

    regimes: Regimes
    planes: list[Plane]
    selected: Selected
    map: HeatMap
    late: Late
    release: Release
    initial: np.ndarray
    one_seed: OneSeed
    encoder: Encoder
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the point, and the metrics that the chapter's claims rest on."""
    parts = {
        "regimes": regimes(params),
        "planes": planes(params),
        "selected": selected(params),
        "map": heat_map(params),
        "late": late(params),
        "release": release(params),
        "initial": initial_distributions(params),
        "one_seed": one_seed(params),
        "encoder": encoders(params),
    }
    metrics = (
        _regime_metrics(parts["regimes"])
        | _selected_metrics(parts["selected"])
        | _map_metrics(parts["map"])
        | _late_metrics(parts["late"])
        | _flow_metrics(parts["regimes"], parts["late"])
        | _release_metrics(parts["release"])
        | _one_seed_metrics(parts["one_seed"])
        | _encoder_metrics(parts["encoder"])
    )
    return Explored(**parts, metrics=metrics)


ACCURACIES = ("train_accuracy", "clean_train_accuracy", "noisy_train_accuracy", "test_accuracy")


def _read_metrics(reading: Reading, where: str) -> dict[str, Metric]:
    """Accuracies and fresh attention of a reading (runs,), named after `where`."""
    shares = {name: getattr(reading, name) for name in ACCURACIES}
    shares["relevant_attention_fresh"] = reading.test_attention[:, RELEVANT]
    return {f"{name}_{where}": fraction_metric(values) for name, values in shares.items()}


def _regime_metrics(found: Regimes) -> dict[str, Metric]:
    metrics = {}
    for i, (dim, norm) in enumerate(REGIMES):
        metrics |= _read_metrics(found.descent[i][:, -1], f"d{dim}_mu{norm:g}")
        for k, time in enumerate(LATE_TIMES):
            metrics |= _read_metrics(found.late[i][:, k], f"d{dim}_mu{norm:g}_t{time:g}")
    return metrics


def _selected_metrics(found: Selected) -> dict[str, Metric]:
    shares = found.over_size.noisy_selected[..., CONFUSING]
    metrics = {
        "confusing_share_excess": seed_metric((shares - found.predicted[..., None]).mean(axis=(0, 1)), (-1, 1)),
        "best_selected_over_size": fraction_metric(found.over_size.best_selected.mean(axis=(0, 1))),
        f"best_selected_t{found.times[-1]:g}": fraction_metric(found.over_time.best_selected[:, -1]),
    }
    for k, size in enumerate(found.sizes):
        metrics[f"confusing_share_size{size:g}"] = fraction_metric(shares[:, k].mean(axis=0))
    for k, norm in enumerate(found.norms):
        for role, share in zip(ROLES, found.over_norm.noisy_selected[k].T, strict=True):
            metrics[f"{role}_share_mu{norm:g}"] = fraction_metric(share)
    return metrics


def _map_metrics(found: HeatMap) -> dict[str, Metric]:
    train, test = found.reading.train_loss, found.reading.test_loss
    metrics = {
        f"map_{name}_loss_{extreme}": seed_metric(getattr(loss, extreme)(axis=(0, 1)), (0, np.inf))
        for name, loss in (("train", train), ("test", test))
        for extreme in ("min", "max")
    }
    d, mu = found.dims[:, None], found.norms
    for name, loss, level, inside in (
        ("train", train, found.high_train_loss, (d < 1200) & (mu > 55)),
        ("test", test, HIGH_TEST_LOSS, (d > 0) & (mu < 20)),
    ):
        high = loss > level
        count = high.sum(axis=(0, 1))
        stray = (high & ~inside[..., None]).sum(axis=(0, 1))
        metrics[f"map_high_{name}_loss_elsewhere"] = fraction_metric(stray / np.where(count > 0, count, np.nan))
        rest = [unexplained(found.n_snr2, loss[..., run]) for run in range(loss.shape[-1])]
        metrics[f"map_{name}_loss_unexplained_by_x"] = fraction_metric(rest)
    for name in ("clean_train_accuracy", "noisy_train_accuracy", "test_accuracy"):
        metrics[f"{name}_d{found.dims[0]}_mu{found.norms[-1]:g}"] = fraction_metric(getattr(found.reading, name)[0, -1])
    return metrics


def _late_metrics(found: Late) -> dict[str, Metric]:
    metrics = {}
    for i, x in enumerate(found.n_snr2):
        for j, dim in enumerate(found.dims):
            metrics |= _read_metrics(found.reading[i, j][:, 0], f"x{x:g}_d{dim}")
            metrics |= _read_metrics(found.reading[i, j][:, 1], f"x{x:g}_d{dim}_t{found.times[1]:g}")
    return metrics


def _flow_metrics(regimes: Regimes, late: Late) -> dict[str, Metric]:
    worst = np.maximum(
        regimes.late.flow_discrepancy.max(axis=(0, 2)), late.reading.flow_discrepancy.max(axis=(0, 1, 3))
    )
    return {"flow_discrepancy": seed_metric(worst, (0, np.inf))}


def _release_metrics(found: Release) -> dict[str, Metric]:
    return {"release_rate_over_limit": seed_metric(found.rate / found.limit_rate)}


def _one_seed_metrics(found: OneSeed) -> dict[str, Metric]:
    metrics = {}
    for i, (dim, norm) in enumerate(REGIMES):
        where = f"d{dim}_mu{norm:g}"
        metrics[f"shared_seed_accuracy_bias_{where}"] = seed_metric(found.accuracy_bias[i], (-1, 1))
        metrics[f"shared_seed_loss_bias_{where}"] = seed_metric(found.loss_bias[i])
        metrics[f"shared_seed_copies_wrong_{where}"] = fraction_metric(found.flipped_copies[i])
    return metrics


def _encoder_metrics(found: Encoder) -> dict[str, Metric]:
    """At the last step; the gain is the full block's over the one whose query and key are not trained."""
    metrics = {}
    for i, where in enumerate(REGIME_NAMES):
        for v, variant in enumerate(found.variants):
            name = variant.replace(" ", "_")
            for kind in ("train_accuracy", "noisy_accuracy", "test_accuracy", "relevant_attention"):
                metrics[f"encoder_{kind}_{where}_{name}"] = fraction_metric(getattr(found, kind)[v, i])
        gain = found.test_accuracy[0, i] - found.test_accuracy[-1, i]
        metrics[f"encoder_selection_gain_{where}"] = seed_metric(gain, (-1, 1))
    for dim, accuracy in zip(found.trend_dims, found.trend_accuracy, strict=True):
        metrics[f"encoder_test_accuracy_benign_d{dim}"] = fraction_metric(accuracy)
    return metrics
