"""Chapter delayed_generalization: how long after fitting its training set a token-selection model generalises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field
from scipy.special import ndtr

from benign_attention import flow, reduced, selection, selection_population, selection_theory
from benign_attention.data import SingleHeadParams, TokenSelectionParams, flipped_count
from benign_attention.parallel import map_processes
from benign_attention.parameters import (
    ChapterParams,
    Dimension,
    FlipProbability,
    ParameterError,
    Ratio,
    SamplesCount,
    SignalStrength,
)
from benign_attention.records import Metric, fraction_metric, seed_metric

PER_DECADE = 6  # times of a trajectory
X_CLOCK = 1.0  # n SNR^2 at which the growth of the gap is measured
OFFICIAL_STEP, OFFICIAL_STEPS = 5e-3, 1000
REGIMES = ((2000, 20.0), (5000, 5.0), (1000, 100.0))  # (dim, signal_norm) of the paper's runs
X_DEPENDENCE = 0.2
N_TOKENS_GRID = (3, 8, 16)
LABEL_NOISE_GRID = (0.1, 0.2, 0.3, 0.4)
D_OVER_N_GRID = (1e2, 1e3, 1e4, 1e6)
X_SEARCH = 0.5
HEAD_NOISE = 0.5
HEAD_NOISE_GRID = (0.0, 0.1, 0.3, 0.5, 1.0)
INITIAL_SCALES = (1e-3, 1e-1, 10.0)
X_ACCURACY_GRID = (1.0, 0.5, 0.3, 0.2)


class Params(ChapterParams):
    """`n_snr2_grid` holds x = n |mu|^2 / d; the signal norm follows from it."""

    n_train: SamplesCount = Field(20, description="training samples")
    dim: Dimension = Field(100_000_000, description="token dimension d")
    n_tokens: int = Field(8, ge=3, description="tokens per sample, T")
    n_snr2_grid: list[SignalStrength] = Field([1.0, 0.5, 0.2, 0.1, 0.05], min_length=1, description="values of n SNR^2")
    label_noise: FlipProbability = Field(0.2, description="fraction of training labels that are flipped")
    weak_ratio: Ratio = Field(0.1, description="size of the weak and the confusing signal relative to |mu|")
    t_max: float = Field(1e60, ge=1.0, le=1e200, description="last time of the gradient flow")
    n_seeds: int = Field(5, ge=1, description="independent runs behind every interval")

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = (*ChapterParams.HOUSEKEEPING, "t_max")

    def __init__(self, **values):
        super().__init__(**values)
        if len({f"{x:g}" for x in self.n_snr2_grid}) < len(self.n_snr2_grid):
            raise ParameterError(f"n_snr2_grid must hold different values, to six digits, got {self.n_snr2_grid}")

    def point(self, n_snr2: float, **changes) -> TokenSelectionParams:
        """The token-selection point with x = `n_snr2`, some other values replaced."""
        names = ("n_train", "dim", "n_tokens", "label_noise", "weak_ratio")
        at = {**{k: getattr(self, k) for k in names}, **changes}
        return TokenSelectionParams(**at, signal_norm=math.sqrt(n_snr2 * at["dim"] / at["n_train"]))


# ---- one trajectory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One flow: where, from which randomness, how long, and what is unusual about it.

    head_noise: of `selection.draw`; initial_scale: factor on W_0; train_head: nu is trained too, from zero.
    """

    point: TokenSelectionParams
    rng: np.random.Generator
    t_max: float
    head_noise: float = 0.0
    initial_scale: float = 1.0
    train_head: bool = False


@dataclass(frozen=True)
class Trajectory:
    """What a flow does over time; fields (times), and for a batch (..., times).

    time : t. train_margin: smallest y f; train_accuracy, train_attention (mean mass of clean samples on the relevant
    token); test_attention, test_accuracy, test_loss: expectations over fresh data; gap: mean over clean samples of
    Lambda, with attention 1 / (1 + (T - 1) e^-Lambda) on the relevant token; log_clock, log_clock_paper: mean of log g
    with T - 1 and with T; query_norm2: |p|^2; discrepancy: of the flow.
    """

    time: np.ndarray
    train_margin: np.ndarray
    train_accuracy: np.ndarray
    train_attention: np.ndarray
    test_attention: np.ndarray
    test_accuracy: np.ndarray
    test_loss: np.ndarray
    gap: np.ndarray
    log_clock: np.ndarray
    log_clock_paper: np.ndarray
    query_norm2: np.ndarray
    discrepancy: np.ndarray

    @classmethod
    def stack(cls, trajectories: list[Trajectory]) -> Trajectory:
        return cls(*(np.stack([getattr(t, f.name) for t in trajectories]) for f in fields(cls)))

    @property
    def log_fit(self) -> np.ndarray:
        """Logarithm of the first time at which every label is fitted; nan if fitted from the start, inf if never."""
        return log_crossing(self.time, self.train_margin)

    @property
    def log_generalisation(self) -> np.ndarray:
        """Logarithm of the first time at which fresh samples give half their attention to the relevant token."""
        return log_crossing(self.time, _logit(self.test_attention))

    @property
    def log_delay(self) -> np.ndarray:
        """log(t_gen / t_fit); inf if fresh samples never select, nan if labels are fitted from the start or never."""
        fit = self.log_fit
        return np.where(np.isfinite(fit), self.log_generalisation - np.where(np.isfinite(fit), fit, 0.0), np.nan)


def _logit(probability: np.ndarray) -> np.ndarray:
    p = np.clip(probability, 1e-300, 1 - 1e-16)
    return np.log(p) - np.log1p(-p)


def log_crossing(time: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Logarithm of the first time at which `value`, (..., times), is positive, linear in log t between two times.

    nan where it is positive from the start, inf where it never is.
    """
    positive = value > 0
    first = positive.argmax(axis=-1)[..., None]
    before = np.maximum(first - 1, 0)
    log_time = np.broadcast_to(np.log(time), value.shape)
    (t0, t1), (v0, v1) = ([np.take_along_axis(x, k, -1)[..., 0] for k in (before, first)] for x in (log_time, value))
    with np.errstate(invalid="ignore", divide="ignore"):
        crossing = t0 - v0 * (t1 - t0) / (v1 - v0)
    return np.where(positive.any(axis=-1), np.where(first[..., 0] > 0, crossing, np.nan), np.inf)


def natural_time(point: TokenSelectionParams) -> float:
    """3 n / d, the unit of t in which training logits move by one at first."""
    return 3.0 * point.n_train / point.dim


def times_until(t_max: float, unit: float) -> np.ndarray:
    """Times from a tenth of `unit` to `t_max`, `PER_DECADE` a decade."""
    start = min(0.1 * unit, 1e-3 * t_max)
    return np.geomspace(start, t_max, math.ceil(PER_DECADE * math.log10(t_max / start)) + 1)


def trajectory(job: Job) -> Trajectory:
    """The flow of one job, with its test quantities."""
    training = selection.draw(job.point, job.rng, job.head_noise)
    if job.initial_scale != 1.0:
        scale = job.initial_scale
        training = replace(training, weights=scale * training.weights, outside=scale * training.outside)
    system = flow.trained_head(training) if job.train_head else flow.token_selection(training)
    clean, labels = ~training.noisy, training.labels
    rows, laws = [], []
    times = times_until(job.t_max, natural_time(job.point))
    for seen in _named_flow(job, system, times):
        here, state = seen.state if job.train_head else (training, seen.state)
        out = selection.outputs(here, state)
        others = np.logaddexp.reduce(out.logits[:, 1:], axis=1)
        gap = (out.logits[:, 0] - others)[clean] + math.log(training.n_tokens - 1)
        clocks = (_log_clock(gap, n).mean() for n in (training.n_tokens - 1, training.n_tokens))
        margin = labels * out.f
        laws.append(selection_population.fresh_sample(here, state))
        attention = out.attention[clean, 0].mean()
        query = state.query @ state.query
        rows.append((margin.min(), (margin > 0).mean(), attention, gap.mean(), *clocks, query, seen.discrepancy))
    law = selection_population.FreshSample.stack(laws)
    test = selection_population.test_quantities(law, log2_points=6, n_randomisations=4)
    margin, accuracy, attention, gap, clock, paper_clock, query, discrepancy = np.array(rows).T
    fresh = (test.attention.value[:, 0], test.accuracy.value, test.loss.value)
    return Trajectory(times, margin, accuracy, attention, *fresh, gap, clock, paper_clock, query, discrepancy)


def _named_flow(job: Job, system: flow.System, times: np.ndarray) -> Iterator[flow.FlowPoint]:
    p = job.point
    x = p.n_train * p.signal_norm**2 / p.dim
    with flow.at_point(dim=p.dim, n_snr2_grid=x, weak_ratio=p.weak_ratio, t_max=job.t_max):
        yield from flow.gradient_flow(system, times)


def _log_clock(gap: np.ndarray, n_others: float) -> np.ndarray:
    """log of g(Lambda) - g(0), which starts at zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(selection_theory.gap_clock(gap, n_others) - selection_theory.gap_clock(0.0, n_others))


def _run(jobs: list[Job]) -> list[Trajectory]:
    return map_processes(trajectory, jobs)


# ---- the delay ------------------------------------------------------------------------------------------------------


def _jobs(params: Params, n_snr2: float, n_seeds: int | None = None, t_max: float | None = None, **kind) -> list[Job]:
    changes = {k: v for k, v in kind.items() if k in TokenSelectionParams.model_fields}
    unusual = {k: v for k, v in kind.items() if k not in changes}
    point = params.point(n_snr2, **changes)
    rngs = [params.generator(run, n_snr2=n_snr2, **kind) for run in range(n_seeds or params.n_seeds)]
    return [Job(point, rng, t_max or params.t_max, **unusual) for rng in rngs]


def trajectories(params: Params) -> dict[float, Trajectory]:
    """The flows of every seed, (n_seeds, times), by n SNR^2: those of the grid, and x = 1 for the gap's growth."""
    return _trajectories(params.replace(record_path="", sections="all").model_dump_json())


@lru_cache(maxsize=2)
def _trajectories(text: str) -> dict[float, Trajectory]:
    params = Params.model_validate_json(text)
    grid = list(dict.fromkeys([*params.n_snr2_grid, X_CLOCK]))
    jobs = [job for x in grid for job in _jobs(params, x)]
    found = iter(_run(jobs))
    return {x: Trajectory.stack([next(found) for _ in range(params.n_seeds)]) for x in grid}


def delay_metric(log_delay: np.ndarray, log_lower_bound: np.ndarray) -> Metric:
    """Mean delay over seeds; where a seed did not get there by t_max the mean is only bounded from below."""
    censored = np.isposinf(log_delay)
    if not censored.any():
        return seed_metric(log_delay)
    bound = float(np.where(censored, log_lower_bound, log_delay).mean())
    per_seed = [None if not math.isfinite(x) else float(x) for x in log_delay]
    kind = f"lower bound: {censored.sum()} of {censored.size} seeds not reached by t_max"
    return Metric(None, bound if math.isfinite(bound) else None, None, log_delay.size, per_seed, kind)


def growth_exponent(found: Trajectory, decades: tuple[float, float] = (2.0, 6.0), paper: bool = False) -> np.ndarray:
    """Slope of log g on log t from t_fit 10^decades[0] to t_fit 10^decades[1], one per seed; nan if out of range."""
    clocks = found.log_clock_paper if paper else found.log_clock
    slopes = []
    for time, clock, log_fit in zip(found.time, clocks, found.log_fit, strict=True):
        decade = (np.log(time) - log_fit) / math.log(10)
        chosen = (decade >= decades[0]) & (decade <= decades[1]) & np.isfinite(clock)
        covered = decade[-1] >= decades[1] and chosen.sum() > 2
        slopes.append(np.polyfit(np.log(time[chosen]), clock[chosen], 1)[0] if covered else np.nan)
    return np.array(slopes)


def measure(params: Params) -> dict[str, Metric]:
    """`log_delay_x<value>`: log(t_gen / t_fit) by n SNR^2; `gap_growth_exponent`: slope of log g(Lambda) on log t.

    t_fit: every training label fitted; t_gen: mean attention mass of fresh samples on their relevant token above 1/2.
    The slope is over the last four decades before t_fit 10^6, at n SNR^2 = 1.
    """
    if params.device != "cpu":
        from benign_attention.devices import resolve

        resolve(params.device)
    found = trajectories(params)
    metrics = {
        f"log_delay_x{x:g}": delay_metric(found[x].log_delay, math.log(params.t_max) - found[x].log_fit)
        for x in params.n_snr2_grid
    }
    metrics["gap_growth_exponent"] = seed_metric(growth_exponent(found[X_CLOCK]))
    metrics["flow_discrepancy"] = seed_metric(
        np.max([t.discrepancy.max(axis=-1) for t in found.values()], axis=0), (0, np.inf)
    )
    return metrics


# ---- against the orthogonal limit -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LimitCurve:
    """The orthogonal limit: log t_fit and log t_gen in units of 3 n / d, one for each point."""

    log_fit: np.ndarray
    log_generalisation: np.ndarray

    @property
    def log_delay(self) -> np.ndarray:
        return self.log_generalisation - self.log_fit


def limit_delays(points: list[selection_theory.LimitPoint], tau_max: float) -> LimitCurve:
    """t_fit (noisy samples cross zero margin) and t_gen of the limit, nan where later than `tau_max`."""
    taus = times_until(tau_max, 1.0)
    found = []
    for point in points:
        with flow.at_point(n_snr2_grid=point.n_snr2, weak_ratio=point.weak_ratio, t_max=tau_max):
            states = list(selection_theory.limit_flow(point, taus))
        margin = np.array([selection_theory.limit_margins(point, s)[1] for s in states])
        attention = np.array([selection_theory.limit_fresh_attention(point, s) for s in states])
        found.append((log_crossing(taus, margin), log_crossing(taus, _logit(attention))))
    return LimitCurve(*np.where(np.isfinite(found), found, np.nan).T)


def _limit_point(params: Params, n_snr2: float, **changes) -> selection_theory.LimitPoint:
    at = {k: changes.get(k, getattr(params, k)) for k in ("n_tokens", "label_noise", "weak_ratio")}
    at["label_noise"] = flipped_count(params.n_train, at["label_noise"]) / params.n_train
    return selection_theory.LimitPoint(n_snr2, **at)


@dataclass(frozen=True)
class DelayFit:
    """log delay = slope / x + intercept. x : (points,); log_delay : (n_seeds, points), inf where not reached.

    slope, intercept : (n_seeds,), nan with fewer than two delays; derived_slope; limit : the limit at `x_fine`.
    """

    x: np.ndarray
    log_delay: np.ndarray
    slope: np.ndarray
    intercept: np.ndarray
    derived_slope: float
    x_fine: np.ndarray
    limit: LimitCurve
    limit_at_x: LimitCurve


def delay_fit(params: Params) -> DelayFit:
    found = trajectories(params)
    x = np.sort(np.array(params.n_snr2_grid))[::-1]
    delays = np.stack([found[value].log_delay for value in x], axis=1)
    lines = []
    for row in delays:
        ok = np.isfinite(row) & (x <= 0.5)
        lines.append(np.polyfit(1 / x[ok], row[ok], 1) if ok.sum() > 1 else (np.nan, np.nan))
    slope, intercept = np.array(lines).T
    tau_max, limit = params.t_max / natural_time(params.point(1.0)), _limit_point(params, 1.0)
    fine = np.geomspace(max(x.max(), 1.0), min(x.min(), 0.05), 13)
    return DelayFit(
        x,
        delays,
        slope,
        intercept,
        selection_theory.delay_slope(limit.n_tokens, limit.label_noise, limit.weak_ratio),
        fine,
        limit_delays([_limit_point(params, v) for v in fine], tau_max),
        limit_delays([_limit_point(params, v) for v in x], tau_max),
    )


@dataclass(frozen=True)
class Dependence:
    """log(t_gen / t_fit) at one x over one parameter. values : (points,); log_delay : (n_seeds, points); limit :
    (points,), nan where there is none."""

    name: str
    values: np.ndarray
    log_delay: np.ndarray
    limit: np.ndarray


def dependences(params: Params) -> list[Dependence]:
    """On T, on eta and on d/n, at x = `X_DEPENDENCE`."""
    n_seeds = min(params.n_seeds, 3)
    grids = {
        "n_tokens": N_TOKENS_GRID,
        "label_noise": LABEL_NOISE_GRID,
        "dim": [max(round(ratio * params.n_train), 3) for ratio in D_OVER_N_GRID],
    }
    t_max = min(params.t_max, 1e22)
    jobs = [
        job
        for name, values in grids.items()
        for value in values
        for job in _jobs(params, X_DEPENDENCE, n_seeds, t_max, **{name: value})
    ]
    found = iter(_run(jobs))
    results = []
    for name, values in grids.items():
        delays = np.array([[next(found).log_delay for _ in range(n_seeds)] for _ in values]).T
        points = [_limit_point(params, X_DEPENDENCE, **({} if name == "dim" else {name: v})) for v in values]
        limit = limit_delays(points[:1] if name == "dim" else points, t_max / natural_time(params.point(1.0))).log_delay
        results.append(Dependence(name, np.array(values, float), delays, np.broadcast_to(limit, len(values))))
    return results


# ---- the clock, and what bends it -----------------------------------------------------------------------------------


def clock_of_official_run(params: Params) -> Trajectory:
    """The flow of the paper's benign point, d = 2000 and |mu| = 20, where |p|^2 outgrows the initial kernel."""
    dim, norm = REGIMES[0]
    x = params.n_train * norm**2 / dim
    return Trajectory.stack(_run(_jobs(params, x, t_max=1e8, dim=dim)))


# ---- gradient descent against the flow ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DescentAgainstFlow:
    """Largest difference of a training logit at the same t. names : (cases,); step_ratio : (steps,), in units of the
    official step; difference : (cases, n_seeds, steps)."""

    names: tuple[str, ...]
    step_ratio: np.ndarray
    difference: np.ndarray


STEP_RATIOS = (4, 2, 1, 0.5, 0.25)


def _selection_difference(job: tuple[TokenSelectionParams, np.random.Generator]) -> list[float]:
    training = selection.draw(*job)
    t = OFFICIAL_STEP * OFFICIAL_STEPS
    (end,) = flow.gradient_flow(flow.token_selection(training), [t])
    reference = selection.outputs(training, end.state).logits
    found = []
    for ratio in STEP_RATIOS:
        (state,) = selection.gradient_descent(training, ratio * OFFICIAL_STEP, [round(OFFICIAL_STEPS / ratio)])
        found.append(np.abs(selection.outputs(training, state).logits - reference).max())
    return found


def _single_head_difference(job: tuple[SingleHeadParams, np.random.Generator]) -> list[float]:
    p, rng = job
    batch = reduced.draw(p.n_train, p.dim, p.n_tokens, p.label_noise, [rng])
    training = reduced.TrainingSet(batch.gram[0], batch.clean_labels[0], batch.labels[0])
    n_steps = 100
    (end,) = flow.gradient_flow(flow.single_head(training, p.signal_norm), [p.step_size * n_steps])
    reference = reduced.outputs(training, end.state, p.signal_norm).logits
    found = []
    for ratio in STEP_RATIOS:
        *_, state = reduced.gradient_descent(training, p.signal_norm, ratio * p.step_size, round(n_steps / ratio))
        found.append(np.abs(reduced.outputs(training, state, p.signal_norm).logits - reference).max())
    return found


def descent_against_flow(params: Params) -> DescentAgainstFlow:
    """At t = 5 for the paper's three points, and at 100 steps of the single-head model's figure configuration."""
    n_seeds = min(params.n_seeds, 3)
    points = [TokenSelectionParams(dim=dim, signal_norm=norm) for dim, norm in REGIMES]
    jobs = [
        (p, params.generator(run, dim=p.dim, signal_norm=p.signal_norm, part="descent"))
        for p in points
        for run in range(n_seeds)
    ]
    of_selection = map_processes(_selection_difference, jobs)
    head = SingleHeadParams()
    of_head = [_single_head_difference((head, params.generator(k, part="single head"))) for k in range(n_seeds)]
    names = (*(f"d = {p.dim}, |μ| = {p.signal_norm:g}" for p in points), "single head")
    return DescentAgainstFlow(
        names, np.array(STEP_RATIOS), np.array(of_selection + of_head).reshape(len(names), n_seeds, -1)
    )


# ---- is accuracy ever delayed? --------------------------------------------------------------------------------------


def aligned_accuracy(head_norm: float, n_attended: int) -> float:
    """Test accuracy when attention is uniform over n_attended tokens, the relevant one among them, and weak signals
    cancel or are left out: Phi(1 / (sqrt(2 n_attended) |nu|))."""
    return float(ndtr(1.0 / (math.sqrt(2.0 * n_attended) * head_norm)))


@dataclass(frozen=True)
class Setting:
    """One setting of the search. trajectories : (n_seeds, times); half_way : the accuracy between that of uniform
    attention and that of the relevant token alone, nan where the head moves."""

    name: str
    trajectories: Trajectory
    half_way: float

    @property
    def accuracy_at_fit(self) -> np.ndarray:
        """Test accuracy when every training label is fitted, (n_seeds,); nan if that is from the start or never."""
        t = self.trajectories
        found = [
            np.interp(fit, np.log(time), accuracy) if np.isfinite(fit) else np.nan
            for fit, time, accuracy in zip(t.log_fit, t.time, t.test_accuracy, strict=True)
        ]
        return np.array(found)

    @property
    def accuracy_at_end(self) -> np.ndarray:
        return self.trajectories.test_accuracy[:, -1]

    @property
    def gain(self) -> np.ndarray:
        """Test accuracy at the end less that at the fit."""
        return self.accuracy_at_end - self.accuracy_at_fit

    @property
    def log_accuracy_delay(self) -> np.ndarray:
        """log of the ratio of the time when test accuracy is half-way to that of the fit; inf if it never is, nan if it
        is from the start."""
        t = self.trajectories
        fit = np.where(np.isfinite(t.log_fit), t.log_fit, np.nan)
        return log_crossing(t.time, t.test_accuracy - self.half_way) - fit


def _setting(params: Params, name: str, found: list[Trajectory], n_snr2: float, **kind) -> Setting:
    head = math.hypot(1.0 / params.point(n_snr2).signal_norm, kind.get("head_noise", 0.0))
    half_way = (aligned_accuracy(head, params.n_tokens) + aligned_accuracy(head, 1)) / 2
    return Setting(name, Trajectory.stack(found), math.nan if kind.get("train_head") else half_way)


def accuracy_search(params: Params) -> list[Setting]:
    """Heads that are not aligned, other sizes of W_0, a head trained from zero, at x = `X_SEARCH`."""
    n_seeds, t_max = min(params.n_seeds, 3), min(params.t_max, 1e25)
    kinds = {
        **{f"head noise {k:g}" if k else "aligned head": {"head_noise": k} for k in HEAD_NOISE_GRID},
        **{f"W₀ times {s:g}": {"initial_scale": s} for s in INITIAL_SCALES},
        "head trained from zero": {"train_head": True},
    }
    found = iter(_run([job for kind in kinds.values() for job in _jobs(params, X_SEARCH, n_seeds, t_max, **kind)]))
    return [
        _setting(params, name, [next(found) for _ in range(n_seeds)], X_SEARCH, **kind) for name, kind in kinds.items()
    ]


def accuracy_delays(params: Params) -> dict[float, Setting]:
    """The unaligned head over n SNR^2; the points of one seed share its noise, so that its slope means something."""
    jobs = [
        Job(params.point(x), params.generator(run, part="accuracy delay"), params.t_max, head_noise=HEAD_NOISE)
        for x in X_ACCURACY_GRID
        for run in range(params.n_seeds)
    ]
    found = iter(_run(jobs))
    return {
        x: _setting(params, f"x = {x:g}", [next(found) for _ in range(params.n_seeds)], x, head_noise=HEAD_NOISE)
        for x in X_ACCURACY_GRID
    }


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the grid, and the metrics of its claims."""

    trajectories: dict[float, Trajectory]
    fit: DelayFit
    dependences: list[Dependence]
    official_clock: Trajectory
    descent: DescentAgainstFlow
    search: list[Setting]
    accuracy: dict[float, Setting]
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the delay, and the metrics that the chapter's claims rest on."""
    parts = {
        "trajectories": trajectories(params),
        "fit": delay_fit(params),
        "dependences": dependences(params),
        "official_clock": clock_of_official_run(params),
        "descent": descent_against_flow(params),
        "search": accuracy_search(params),
        "accuracy": accuracy_delays(params),
    }
    metrics = grid_metrics(parts["trajectories"], parts["fit"]) | _claim_metrics(**parts)
    return Explored(**parts, metrics=metrics)


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slope of each row of y over x, finite values only; nan with fewer than three."""
    rows = ((row, np.isfinite(row)) for row in y)
    return np.array([np.polyfit(x[ok], row[ok], 1)[0] if ok.sum() > 2 else np.nan for row, ok in rows])


def grid_metrics(trajectories: dict[float, Trajectory], fit: DelayFit) -> dict[str, Metric]:
    """The metrics of claims that rest on the runs of the grid alone."""
    metrics = {
        "delay_slope": seed_metric(fit.slope),
        "delay_slope_over_derived": seed_metric(fit.slope / fit.derived_slope),
        "gap_growth_exponent_paper_form": seed_metric(growth_exponent(trajectories[X_CLOCK], paper=True)),
    }
    for x, found in trajectories.items():
        setting = Setting("", found, math.nan)
        metrics[f"train_accuracy_end_x{x:g}"] = fraction_metric(found.train_accuracy[:, -1])
        metrics[f"test_accuracy_end_x{x:g}"] = fraction_metric(setting.accuracy_at_end)
        metrics[f"accuracy_gain_x{x:g}"] = seed_metric(setting.gain, (-1, 1))
        metrics[f"test_attention_end_x{x:g}"] = fraction_metric(found.test_attention[:, -1])
    return metrics


def _claim_metrics(dependences, official_clock, descent, search, accuracy, **_) -> dict[str, Metric]:
    by_name = {d.name: d for d in dependences}
    settings = {s.name: s for s in search}
    delays = np.stack([s.log_accuracy_delay for s in accuracy.values()], axis=1)
    official = descent.step_ratio == 1
    orders = np.array([_slopes(np.log(descent.step_ratio), np.log(rows)) for rows in descent.difference])
    metrics = {
        "gap_growth_exponent_d2000": seed_metric(growth_exponent(official_clock)),
        "gap_growth_exponent_d2000_early": seed_metric(growth_exponent(official_clock, (0.0, 2.0))),
        "accuracy_gain_head_noise": seed_metric(settings[f"head noise {HEAD_NOISE:g}"].gain, (-1, 1)),
        "accuracy_gain_aligned": seed_metric(settings["aligned head"].gain, (-1, 1)),
        "accuracy_delay_slope": seed_metric(_slopes(1 / np.array(list(accuracy)), delays)),
        "descent_difference": seed_metric(descent.difference[:-1, :, official].max(axis=(0, 2)), (0, np.inf)),
        "descent_order": seed_metric(orders[:-1].mean(axis=0)),
    }
    for name, short in (("n_tokens", "T"), ("label_noise", "eta")):
        d = by_name[name]
        for value, column, limit in zip(d.values, d.log_delay.T, d.limit, strict=True):
            metrics[f"delay_over_limit_{short}{value:g}"] = seed_metric(
                np.where(np.isfinite(column), column, np.nan) / limit
            )
    d = by_name["dim"]
    for dim, column in zip(d.values, d.log_delay.T, strict=True):
        metrics[f"fraction_generalised_d{dim:g}"] = fraction_metric(np.isfinite(column))
    return metrics
