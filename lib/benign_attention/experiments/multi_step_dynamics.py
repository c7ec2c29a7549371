"""Chapter multi_step_dynamics: a single attention head long after two steps, by gradient descent and by flow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from pydantic import Field

from benign_attention import flow, population, reduced, thresholds
from benign_attention.data import SingleHeadParams, from_natural_units
from benign_attention.experiments import multi_step_thresholds
from benign_attention.gram import noise_gram
from benign_attention.parallel import map_processes
from benign_attention.parameters import ChapterParams, FlipProbability, ParameterError, TokensCount
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.reduced import State, TrainingSet

LATE = 1000  # steps after two
SHARES_OF_THRESHOLD = (0.2, 0.5, 1.0, 1.5)  # c of the trajectories, in units of the long-time threshold
STRONG_C = 5.0
STRONG_STEPS = (1.0, 0.01)  # in units of the point's step
WINDOW_B = np.geomspace(0.02, 50.0, 26)
SIZES = (0.1, 0.2, 0.4, 0.8, 1.2)  # n of the (n, SNR) map, in units of the point's n
MAP_STEPS = (1.0, 0.1)
LOSS_SHARES = (0.4, 0.6, 0.8, 0.9)  # c of the loss times, in units of the long-time threshold
LOSS_D_OVER_N = (10, 100, 1_000, 10_000, 100_000)
SHEET = {"c": 1.3, "label_noise": 0.1, "sizes": (100, 200, 400), "times": (1e2, 1e4, 1e10)}  # of t d/n
MANY_NOISE = 0.1  # label noise of the runs with several tokens, so that small samples hold flipped labels
SHARE_TOKENS = (3, 5, 9)
SHARE_D_OVER_N = (20, 200, 2_000, 20_000)
FLIPS_OF_FEW = 0.125  # label noise over T: one sample in eight
TOKENS_D_OVER_N = (200, 2_000, 20_000)
MANY_TOKENS = 32  # compared with 2 over d/n, if the grid holds it; else its largest T
SCALES = (0.0, 0.01, 0.1, 1.0, 10.0)  # s sqrt(d) of random initial weights of variance s^2
FEW = 3  # seeds of what takes many or long runs
POOR = 0.9  # test accuracy below which it counts as poor
MOST_TOKENS = 128
LARGEST_GRAM = 2**27  # entries of all Gram matrices of a point: 1 GiB


class Params(ChapterParams, SingleHeadParams):
    """The figure configuration is the default: c = 2.12, b = 5."""

    n_steps: int = Field(10_000, ge=2, le=10**7, description="steps of gradient descent at the point")
    label_noise_grid: list[FlipProbability] = Field(
        [0.0, 0.1, 0.2, 0.3, 0.4], min_length=1, description="label noise of the thresholds"
    )
    tokens_grid: list[TokensCount] = Field(
        [2, 4, 8, 16, 32, 64], min_length=2, description="tokens per sample, from 2 upwards, of the sweep over T"
    )
    t_max: float = Field(1e20, ge=1.0, le=1e300, description="last time of the flow, step_size x steps")
    map_points: int = Field(9, ge=3, le=100, description="points on the axes of maps and curves")

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = (*ChapterParams.HOUSEKEEPING, "n_steps", "t_max", "map_points")

    def __init__(self, **values):
        super().__init__(**values)
        grid = self.tokens_grid
        if grid[0] != 2 or grid != sorted(set(grid)) or grid[-1] > MOST_TOKENS:
            raise ParameterError(f"tokens_grid must increase from 2 to at most {MOST_TOKENS}, got {grid}")
        if self.n_seeds * (self.n_train * self.n_noise) ** 2 > LARGEST_GRAM:
            raise ParameterError(
                "n_train, n_tokens and n_seeds must keep n_seeds (n_train (n_tokens - 1))^2 at or below "
                f"{LARGEST_GRAM}, got {self.n_train}, {self.n_tokens} and {self.n_seeds}"
            )

    @property
    def late(self) -> int:
        """Steps at which sweeps are read: `LATE`, or `n_steps` if that is less."""
        return min(LATE, self.n_steps)

    @property
    def d_over_n(self) -> float:
        return self.dim / self.n_train

    def point(self, n_train: int | None = None, d_over_n: float | None = None, **changes) -> SingleHeadParams:
        """The single-head point at another size; d/n is kept unless given."""
        n = n_train or self.n_train
        dim = max(round(n * (d_over_n or self.d_over_n)), 3)
        at = {k: getattr(self, k) for k in SingleHeadParams.model_fields}
        return SingleHeadParams(**{**at, "n_train": n, "dim": dim, **changes})


# ---- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training set, trained from zero or from random weights, read at `moments`.

    point : size, label noise and tokens; c, b : grids in natural units, which broadcast; b None: gradient flow of a
    single c, and moments are times t; else moments are steps. balanced: classes and flips exactly balanced. scale:
    s sqrt(d) of random initial weights.
    """

    point: SingleHeadParams
    rng: np.random.Generator
    moments: np.ndarray
    c: np.ndarray | float
    b: np.ndarray | float | None = None
    balanced: bool = False
    scale: float = 0.0
    device: str = "cpu"
    test_loss: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What a run shows; fields (moments, *grid), and (n_seeds, moments, *grid) for a batch; nan where undefined.

    train_accuracy, train_loss: on the given labels; noisy_train_accuracy: on flipped ones; test_accuracy: clean labels,
    expected over fresh data (for T > 2 by 4096 points, to about .002); clean_attention, noisy_attention: mean mass on
    the signal over clean and noisy training samples; largest_share: of the noise mass, held by the largest noise token,
    mean over noisy samples;
    p_signal, p_noise, v_signal, v_noise: lengths of the parts of p and v along the signals and orthogonal to them;
    test_loss: clean labels, where the run asks for it.
    """

    train_accuracy: np.ndarray
    noisy_train_accuracy: np.ndarray
    test_accuracy: np.ndarray
    train_loss: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    largest_share: np.ndarray
    p_signal: np.ndarray
    p_noise: np.ndarray
    v_signal: np.ndarray
    v_noise: np.ndarray
    test_loss: np.ndarray

    @classmethod
    def stack(cls, snapshots: list[Snapshot]) -> Snapshot:
        return cls(*(np.stack([getattr(s, f.name) for s in snapshots]) for f in fields(cls)))

    def at(self, *index) -> Snapshot:
        return Snapshot(*(getattr(self, f.name)[index] for f in fields(self)))


def balanced_set(point: SingleHeadParams, rng: np.random.Generator) -> TrainingSet:
    """A training set with classes of the same size and the same number of flips, round(n eta / 2), in both."""
    half = max(point.n_train // 2, 1)
    clean = np.repeat([1.0, -1.0], half)
    flipped = np.tile(np.arange(half) < round(half * point.label_noise), 2)
    gram = noise_gram(2 * half * point.n_noise, point.dim - 2, rng)
    return TrainingSet(gram, clean, np.where(flipped, -clean, clean))


def simulate(run: Run) -> Snapshot:
    """Train, and read off everything at the moments."""
    point, c, b = run.point, np.asarray(run.c), run.b
    if run.balanced:
        training = balanced_set(point, run.rng)
    else:
        batch = reduced.draw(point.n_train, point.dim, point.n_tokens, point.label_noise, [run.rng])
        training = TrainingSet(*(getattr(batch, f.name)[0] for f in fields(batch)))
    start, outside = None, 0.0
    if run.scale:
        one = TrainingSet(*(getattr(training, f.name)[None] for f in fields(training)))
        found = reduced.random_start(one, point.dim, run.scale / math.sqrt(point.dim), [run.rng])
        start, outside = State(found.state.signal[0], found.state.noise[0]), found.outside[0]
    rho, beta = from_natural_units(c, np.nan if b is None else b, training.n_train, point.dim)
    if b is None:
        system = flow.single_head(training, float(rho), start)
        with flow.at_point(n_train=point.n_train, dim=point.dim, signal_norm=float(rho), t_max=run.moments[-1]):
            states = [(seen.state.signal, seen.state.noise) for seen in flow.gradient_flow(system, run.moments)]
    else:
        states = list(_descent(training.on(run.device), rho, beta, run.moments, start))
    return snapshot(training, State(*(np.stack(x) for x in zip(*states, strict=True))), rho, outside, run.test_loss)


def _descent(training: TrainingSet, rho, beta, steps: np.ndarray, start: State | None) -> Iterator[tuple]:
    wanted = {int(t) for t in steps}
    for t, state in enumerate(reduced.gradient_descent(training, rho, beta, max(wanted), start), 1):
        if t in wanted:
            yield population.as_numpy(state.signal), population.as_numpy(state.noise)


def snapshot(training: TrainingSet, state: State, rho, outside=0.0, test_loss: bool = False) -> Snapshot:
    """Everything about the states of a batch on one training set; rho broadcasts against the batch axes."""
    out = reduced.outputs(training, state, rho)
    margin, noisy = training.labels * out.f, training.noisy
    logits = out.logits[..., 1:, :]
    share = np.exp(logits - logits.max(axis=-2, keepdims=True))
    share = share.max(axis=-2) / share.sum(axis=-2)
    law = population.fresh_token(training, state, rho, outside)
    loss = population.loss_of(law, training.n_noise, log2_points=9).value if test_loss else None
    of_signal = np.sqrt((state.signal**2).sum(axis=-1))
    return Snapshot(
        train_accuracy=(margin > 0).mean(axis=-1),
        noisy_train_accuracy=_mean_over(margin > 0, noisy),
        test_accuracy=population.accuracy_of(law, training.n_noise, log2_points=9).value,
        train_loss=np.logaddexp(0.0, -margin).mean(axis=-1),
        clean_attention=_mean_over(out.attention[..., 0, :], ~noisy),
        noisy_attention=_mean_over(out.attention[..., 0, :], noisy),
        largest_share=_mean_over(share if training.n_noise > 1 else np.full(share.shape, np.nan), noisy),
        p_signal=of_signal[..., 0],
        p_noise=law.sd_p,
        v_signal=of_signal[..., 1],
        v_noise=np.hypot(law.slope, law.sd_v),
        test_loss=loss if loss is not None else np.full(law.sd_p.shape, np.nan),
    )


def _mean_over(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return values[..., chosen].mean(axis=-1) if chosen.any() else np.full(values.shape[:-1], np.nan)


def _batches(runs: list[list[Run]]) -> list[Snapshot]:
    """Each inner list, the seeds of one condition, as one batch; all runs side by side."""
    found = iter(map_processes(simulate, [run for seeds in runs for run in seeds], batch=1))
    return [Snapshot.stack([next(found) for _ in seeds]) for seeds in runs]


def _seeds(params: Params, part: str, point: SingleHeadParams, at_most: int | None = None, **run) -> list[Run]:
    """One run a seed, of the first `at_most` seeds; runs of one part and size share their training sets."""
    where = {"n_train": point.n_train, "dim": point.dim, "n_tokens": point.n_tokens, "label_noise": point.label_noise}
    device = params.device if run.get("b") is not None else "cpu"
    seeds = range(min(params.n_seeds, at_most or params.n_seeds))
    return [Run(point, params.generator(i, part=part, **where), device=device, **run) for i in seeds]


def _steps(last: int, count: int = 30) -> np.ndarray:
    return np.unique(np.round(np.geomspace(1, last, count)).astype(int))


def _times(params: Params, unit: float) -> np.ndarray:
    """Times from `unit` / 10 to t_max, two a decade."""
    first = min(unit / 10, params.t_max / 10)
    return np.geomspace(first, params.t_max, math.ceil(2 * math.log10(params.t_max / first)) + 1)


# ---- the point ------------------------------------------------------------------------------------------------------


def measure(params: Params) -> dict[str, Metric]:
    """Accuracy and attention after `n_steps` steps at the point, and the long-time threshold for each label noise.

    `largest_noise_share_noisy` is undefined for T = 2, where the only noise token holds all of the noise mass.
    """
    runs = _seeds(params, "point", params.point(), moments=[params.n_steps], c=params.natural_c, b=params.natural_b)
    (found,) = _batches([runs])
    last = found.at(slice(None), -1)
    return {
        "train_accuracy": fraction_metric(last.train_accuracy),
        "test_accuracy": fraction_metric(last.test_accuracy),
        "clean_signal_attention": fraction_metric(last.clean_attention),
        "noisy_signal_attention": fraction_metric(last.noisy_attention),
        "largest_noise_share_noisy": fraction_metric(last.largest_share),
        **multi_step_thresholds.measure_thresholds(params),
    }


def long_time_threshold(params: Params, label_noise: float | None = None) -> float:
    """The small-step threshold of the orthogonal limit in c, from `thresholds.late_threshold`."""
    eta = params.label_noise if label_noise is None else label_noise
    with flow.at_point(label_noise=eta, n_tokens=params.n_tokens):
        found = float(thresholds.late_threshold(eta, params.n_tokens).middle)
    if math.isnan(found):
        raise ParameterError(
            f"label_noise and n_tokens must have a long-time threshold in the searched range, got {eta:g} and "
            f"{params.n_tokens} (sections = point runs without it)"
        )
    return found


# ---- over time ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectories:
    """Descent at the point's step and flow, for several c. steps : (steps,); times, step_times : t.

    descent : fields (n_seeds, steps, c); flow : (n_seeds, times, c). far : c = 0.3 at d = 12500 n, flow, fields
    (n_seeds, times).
    """

    c: np.ndarray
    steps: np.ndarray
    step_times: np.ndarray
    times: np.ndarray
    descent: Snapshot
    flow: Snapshot
    far: Snapshot


def trajectories(params: Params, threshold: float) -> Trajectories:
    c = threshold * np.array(SHARES_OF_THRESHOLD)
    steps, times, point = _steps(params.n_steps), _times(params, 1 / params.d_over_n), params.point()
    runs = [_seeds(params, "time", point, FEW, moments=steps, c=c, b=params.natural_b, test_loss=True)]
    runs += [_seeds(params, "time", point, FEW, moments=times, c=float(x), test_loss=True) for x in c]
    far = params.point(d_over_n=12_500)
    runs.append(_seeds(params, "far", far, FEW, moments=times, c=0.3))
    descent, *flows, distant = _batches(runs)
    together = Snapshot(*(np.stack([getattr(s, f.name) for s in flows], axis=-1) for f in fields(Snapshot)))
    return Trajectories(c, steps, params.step_size * steps, times, descent, together, distant)


@dataclass(frozen=True)
class DescentAgainstFlow:
    """Largest difference of a quantity of descent from the flow at one time. b : (b,); difference : (n_seeds, b)."""

    b: np.ndarray
    time: float
    difference: np.ndarray


def descent_against_flow(params: Params) -> DescentAgainstFlow:
    """Attention (clean, noisy) after b x steps = 20 at the point's c, for smaller and smaller steps."""
    n_steps = np.array([4, 16, 64, 256, 1024])
    time = 20.0 / params.d_over_n
    point = params.point()
    runs = [_seeds(params, "steps", point, moments=[time], c=params.natural_c)]
    runs += [_seeds(params, "steps", point, moments=[n], c=params.natural_c, b=20.0 / n) for n in n_steps]
    exact, *found = _batches(runs)
    names = ("clean_attention", "noisy_attention") if params.label_noise > 0 else ("clean_attention",)
    differences = [np.nanmax([np.abs(getattr(s, k) - getattr(exact, k))[:, 0] for k in names], axis=0) for s in found]
    return DescentAgainstFlow(20.0 / n_steps, time, np.stack(differences, axis=-1))


# ---- step sizes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMap:
    """Over (c, b) after 2 and `late` steps. descent : fields (n_seeds, 2, c, b); flow, at t_max : (n_seeds, c)."""

    n_train: int
    c: np.ndarray
    b: np.ndarray
    descent: Snapshot
    flow: Snapshot


def step_map(params: Params) -> StepMap:
    """Benign overfitting over a wide range of step sizes, short and long (Magen et al. 2025, Remark 5.1)."""
    point = params.point(min(params.n_train, 100))
    c, b = np.geomspace(0.5, 6.0, params.map_points), np.geomspace(0.02, 50.0, params.map_points)
    runs = [_seeds(params, "step map", point, FEW, moments=[2, params.late], c=c[:, None], b=b)]
    runs += [_seeds(params, "step map", point, FEW, moments=[params.t_max], c=float(x)) for x in c]
    descent, *flows = _batches(runs)
    late = Snapshot(*(np.stack([getattr(s, f.name)[:, 0] for s in flows], axis=-1) for f in fields(Snapshot)))
    return StepMap(point.n_train, c, b, descent, late)


@dataclass(frozen=True)
class Windows:
    """Steps b at which benign overfitting is complete, at the point's c, after 2 and `late` steps.

    inside : (n_seeds, 2, b): all labels fitted, test accuracy above .95, attention on the signal above 1/T + .02 on
    clean and below 1/T - .02 on noisy samples. log_width : (n_seeds, 2), in ln b.
    """

    b: np.ndarray
    found: Snapshot
    inside: np.ndarray

    @property
    def log_width(self) -> np.ndarray:
        return self.inside.sum(axis=-1) * math.log(self.b[1] / self.b[0])


def windows(params: Params) -> Windows:
    runs = _seeds(params, "window", params.point(), FEW, moments=[2, params.late], c=params.natural_c, b=WINDOW_B)
    (found,) = _batches([runs])
    share, margin = 1 / params.n_tokens, 0.02
    inside = (found.train_accuracy == 1) & (found.test_accuracy > 0.95) & (found.clean_attention > share + margin)
    looks_away = ~(found.noisy_attention >= share - margin)  # also where there is no noisy sample
    return Windows(WINDOW_B, found, inside & looks_away)


@dataclass(frozen=True)
class StrongSignal:
    """c = 5 at several steps b, and by flow. descent : fields (n_seeds, steps, b); flow : (n_seeds, times)."""

    c: float
    b: np.ndarray
    steps: np.ndarray
    times: np.ndarray
    descent: Snapshot
    flow: Snapshot


def strong_signal(params: Params) -> StrongSignal:
    b, steps = params.natural_b * np.array(STRONG_STEPS), _steps(params.n_steps)
    times, point = _times(params, 1 / params.d_over_n), params.point()
    runs = [
        _seeds(params, "strong", point, moments=steps, c=STRONG_C, b=b),
        _seeds(params, "strong", point, moments=times, c=STRONG_C),
    ]
    return StrongSignal(STRONG_C, b, steps, times, *_batches(runs))


# ---- size and signal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeMap:
    """Over (n, SNR) at fixed d, after 2 and `late` steps at two fixed b. found : fields (n_seeds, 2, n, SNR, b)."""

    n_train: np.ndarray
    snr: np.ndarray
    b: np.ndarray
    dim: int
    found: Snapshot


def size_map(params: Params) -> SizeMap:
    sizes = np.unique([max(round(params.n_train * s), 2) for s in SIZES])
    middle = params.natural_c / math.sqrt(params.n_train)
    snr = np.geomspace(middle / 8, middle * 6, params.map_points)
    b = params.natural_b * np.array(MAP_STEPS)
    runs = [
        _seeds(
            params,
            "size map",
            params.point(int(n), params.dim / n),
            FEW,
            moments=[2, params.late],
            c=snr[:, None] * math.sqrt(n),
            b=b,
        )
        for n in sizes
    ]
    found = _batches(runs)
    together = Snapshot(*(np.stack([getattr(s, f.name) for s in found], axis=2) for f in fields(Snapshot)))
    return SizeMap(sizes, snr, b, params.dim, together)


# ---- how late generalisation is lost --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossTimes:
    """ln of the time at which test accuracy falls below `POOR`, flow; -inf from the start, inf not until t_max.

    c : (c,); d_over_n : (ratios,); log_time : (n_seeds, c, ratios), of t d/n; log_limit : (c, ratios), from the
    orthogonal limit; log_last : (ratios,), of t_max d/n. exponent : (n_seeds, c), growth of ln log_time with
    ln(d/n) between the last two ratios, nan where a time is censored; derived : (c,), what it tends to.
    """

    n_train: int
    c: np.ndarray
    d_over_n: np.ndarray
    log_time: np.ndarray
    log_limit: np.ndarray
    log_last: np.ndarray
    exponent: np.ndarray
    derived: np.ndarray


def loss_exponent(c) -> np.ndarray:
    """ln t' of the loss of generalisation grows as (d/n)^(1 / (2 + 4 phi)), phi = x / (1 + x), x = c^2 / 2.

    Derived in chapter multi_step_dynamics, "How late generalisation is lost" (prop-loss-time), for c well below the
    threshold.
    """
    x = np.asarray(c) ** 2 / 2
    return 1 / (2 + 4 * x / (1 + x))


def log_time_below(times: np.ndarray, values: np.ndarray, level: float) -> np.ndarray:
    """ln of the first time at which `values`, (..., times), are below `level`, linear in ln t between two times.

    -inf where they are from the start, inf where they never are.
    """
    below = values < level
    first = np.maximum(below.argmax(axis=-1), 1)[..., None]
    v0, v1 = (np.take_along_axis(values, k, -1)[..., 0] for k in (first - 1, first))
    t0, t1 = (np.log(times)[k][..., 0] for k in (first - 1, first))
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = t0 + (t1 - t0) * (v0 - level) / (v0 - v1)
    return np.where(below.any(axis=-1), np.where(below[..., 0], -np.inf, crossing), np.inf)


def limit_test_accuracy(state: thresholds.ClassState, label_noise: float, d_over_n) -> np.ndarray:
    """Test accuracy of a state of the limit (T = 2) at finite d/n, (ratios, B).

    p holds a = l/d of each training token, so that a fresh token's logit has variance (n/d) E l^2 over samples; its
    value (n/d) E v^2. The two are uncorrelated, because values carry the sign of the label and logits do not.
    """
    weights = np.array([1 - label_noise, label_noise])[:, None]
    var_p, var_v = ((weights * x[:, 0] ** 2).sum(axis=0) for x in (state.noise_logits, state.noise_values))
    ratio = np.asarray(d_over_n, float)[:, None]
    shape = np.broadcast_shapes(ratio.shape, var_p.shape)
    signs = np.array([1.0, -1.0])
    law = population.FreshToken(
        np.broadcast_to(state.signal_logit[:, None], (*shape, 2)),
        np.broadcast_to(state.signal_value[:, None] * signs, (*shape, 2)),
        np.sqrt(var_p / ratio),
        np.zeros(shape),
        np.sqrt(var_v / ratio),
    )
    return population.accuracy_of(law, 1).value


def _slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least-squares slope of y, (..., len(x)), on x over finite values; nan with fewer than two."""
    rows = y.reshape(-1, len(x))
    fits = [np.polyfit(x[ok], row[ok], 1)[0] if (ok := np.isfinite(row)).sum() > 1 else np.nan for row in rows]
    return np.array(fits).reshape(y.shape[:-1])


def loss_times(params: Params, threshold: float) -> LossTimes:
    """Balanced classes and flips, two tokens, so that only noise tokens and size differ from the limit."""
    n, eta = min(params.n_train, 100), params.label_noise
    c, ratios = threshold * np.array(LOSS_SHARES), np.array(LOSS_D_OVER_N[: params.map_points])
    runs, last = [], []
    for x in c:
        for ratio in ratios:
            times = _times(params, 1 / ratio)
            runs.append(
                _seeds(
                    params,
                    "loss",
                    params.point(n, ratio, n_tokens=2),
                    FEW,
                    moments=times,
                    c=float(x),
                    balanced=True,
                )
            )
            last.append((times, math.log(params.t_max * ratio)))
    found = _batches(runs)
    rows = [
        log_time_below(t[0] * r, s.test_accuracy, POOR)
        for t, r, s in zip(last, np.tile(ratios, c.size), found, strict=True)
    ]
    log_time = np.moveaxis(np.array(rows).reshape(c.size, ratios.size, -1), -1, 0)
    times = _times(params, 1.0)
    half = max(n // 2, 1)
    share = round(half * eta) / half
    with flow.at_point(label_noise=eta, t_max=params.t_max):
        system = thresholds.limit_flow(c, share)
        accuracy = [limit_test_accuracy(s.state, share, ratios) for s in flow.gradient_flow(system, times)]
    log_limit = log_time_below(times, np.moveaxis(np.array(accuracy), 0, -1), POOR).T
    log_last = np.log(params.t_max * ratios)
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = np.log(log_time[..., -1] / log_time[..., -2]) / math.log(ratios[-1] / ratios[-2])
    exponent = np.where(np.isfinite(growth), growth, np.nan)
    return LossTimes(n, c, ratios, log_time, log_limit, log_last, exponent, loss_exponent(c))


def sheet_point(params: Params) -> np.ndarray:
    """Test accuracy at c = 1.3, eta = .1, d = 10 n^2 and given t d/n, (n_seeds, sizes, times), by flow."""
    runs = [
        _seeds(
            params,
            "sheet",
            params.point(n, 10 * n, label_noise=SHEET["label_noise"], n_tokens=2),
            FEW,
            moments=np.array(SHEET["times"]) / (10 * n),
            c=SHEET["c"],
            balanced=True,
        )
        for n in SHEET["sizes"]
    ]
    return np.stack([s.test_accuracy for s in _batches(runs)], axis=1)


# ---- several noise tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """The largest noise token's share of the noise mass in noisy samples, by number of tokens.

    descent : fields (T, n_seeds, steps), at the point's b; flow : fields (T, n_seeds, times). At T = 3, over d/n:
    log_win : (n_seeds, ratios), ln of the t d/n at which the mean share is half-way from 1/2 to 1; slope : (n_seeds,),
    on ln(d/n). n_train, c : of all runs.
    """

    n_train: int
    c: float
    n_tokens: np.ndarray
    steps: np.ndarray
    step_times: np.ndarray
    times: np.ndarray
    descent: Snapshot
    flow: Snapshot
    d_over_n: np.ndarray
    log_win: np.ndarray
    slope: np.ndarray


def shares(params: Params) -> Shares:
    """Balanced classes and flips at label noise .1 and the point's c; smaller samples than the point's."""
    n, c = min(params.n_train, 60), params.natural_c
    steps, times = _steps(params.late), _times(params, 1 / params.d_over_n)
    points = [params.point(n, n_tokens=T, label_noise=MANY_NOISE) for T in SHARE_TOKENS]
    ratios = np.array(SHARE_D_OVER_N[: params.map_points])
    clocks = [np.geomspace(1.0, 1e4, 33) / ratio for ratio in ratios]
    runs = [_seeds(params, "share", p, FEW, moments=steps, c=c, b=params.natural_b, balanced=True) for p in points]
    runs += [_seeds(params, "share", p, FEW, moments=times, c=c, balanced=True) for p in points]
    for ratio, clock in zip(ratios, clocks, strict=True):
        at = params.point(n, ratio, n_tokens=3, label_noise=MANY_NOISE)
        runs.append(_seeds(params, "share", at, moments=clock, c=c, balanced=True))
    found = _batches(runs)
    k = len(points)
    rows = [
        log_time_below(clock * ratio, -s.largest_share, -0.75)
        for clock, ratio, s in zip(clocks, ratios, found[2 * k :], strict=True)
    ]
    log_win = np.stack(rows, axis=-1)
    return Shares(
        n,
        c,
        np.array(SHARE_TOKENS),
        steps,
        steps * params.natural_b / params.d_over_n,
        times,
        Snapshot.stack(found[:k]),
        Snapshot.stack(found[k : 2 * k]),
        ratios,
        log_win,
        _slope(np.log(ratios), log_win),
    )


@dataclass(frozen=True)
class TokenCounts:
    """Over T at fixed SNR: after 2 and `late` steps with b fixed and with b proportional to T, and by flow at t = 10^4.

    fixed, scaled : fields (T, n_seeds, 2); flow : fields (T, n_seeds). threshold : (2,), long-time threshold of the
    limit for the first and the last T. Over d/n, with b fixed, after `late` steps: few, many : fields (ratios,
    n_seeds), for T = 2 and `many_tokens`.
    """

    n_train: int
    c: float
    n_tokens: np.ndarray
    fixed: Snapshot
    scaled: Snapshot
    flow: Snapshot
    threshold: np.ndarray
    d_over_n: np.ndarray
    few: Snapshot
    many: Snapshot
    many_tokens: int


def token_counts(params: Params) -> TokenCounts:
    """Balanced classes and one flip in eight, so that T is all that changes."""
    n, c = max(min(params.n_train, 16), 2), params.natural_c

    def batch(T: int, ratio: float | None = None, scales=(1.0,), flow: bool = False) -> list[Run]:
        point = params.point(n, ratio, n_tokens=T, label_noise=FLIPS_OF_FEW)
        b = None if flow else params.natural_b * np.array(scales)
        moments = [min(params.t_max, 1e4)] if flow else [2, params.late]
        return _seeds(params, "tokens", point, FEW, moments=moments, c=c, b=b, balanced=True)

    tokens = params.tokens_grid
    many_tokens = MANY_TOKENS if MANY_TOKENS in tokens else tokens[-1]
    runs = [batch(T, scales=(1.0, T / 2)) for T in tokens]
    runs += [batch(T, flow=True) for T in tokens]
    runs += [batch(T, ratio) for T in (2, many_tokens) for ratio in TOKENS_D_OVER_N]
    found = iter(_batches(runs))

    def take(count: int, moment=slice(None)) -> Snapshot:
        return Snapshot.stack([next(found).at(slice(None), moment) for _ in range(count)])

    k, ratios = len(tokens), np.array(TOKENS_D_OVER_N)
    by_descent, by_flow = take(k), take(k, 0)
    few, many = (take(ratios.size, -1).at(..., 0) for _ in range(2))
    fixed, scaled = (by_descent.at(..., b) for b in range(2))
    share = round(n // 2 * FLIPS_OF_FEW) / (n // 2)
    limits = np.array([float(thresholds.late_threshold(share, T).middle) for T in (2, tokens[-1])])
    return TokenCounts(n, c, np.array(tokens), fixed, scaled, by_flow, limits, ratios, few, many, many_tokens)


# ---- random initial weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of variance s^2, by s sqrt(d), at the point. descent : fields (scales, n_seeds, steps)."""

    scales: np.ndarray
    steps: np.ndarray
    descent: Snapshot


def initial_weights(params: Params) -> InitialWeights:
    """The runs of one seed share training set and, up to the scale, initial weights."""
    steps, point = _steps(params.late), params.point()
    c, b = params.natural_c, params.natural_b
    found = _batches([_seeds(params, "start", point, FEW, moments=steps, c=c, b=b, scale=s) for s in SCALES])
    return InitialWeights(np.array(SCALES), steps, Snapshot.stack(found))


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the point, and the metrics of its claims."""

    threshold: float
    thresholds: multi_step_thresholds.Thresholds
    trajectories: Trajectories
    descent_against_flow: DescentAgainstFlow
    step_map: StepMap
    windows: Windows
    strong: StrongSignal
    size_map: SizeMap
    loss: LossTimes
    sheet: np.ndarray
    shares: Shares
    token_counts: TokenCounts
    initial_weights: InitialWeights
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the point, and the metrics that the chapter's claims rest on."""
    threshold = long_time_threshold(params)
    parts = {
        "trajectories": trajectories(params, threshold),
        "descent_against_flow": descent_against_flow(params),
        "step_map": step_map(params),
        "windows": windows(params),
        "strong": strong_signal(params),
        "size_map": size_map(params),
        "loss": loss_times(params, threshold if params.n_tokens == 2 else _threshold_of_two_tokens(params)),
        "sheet": sheet_point(params),
        "shares": shares(params),
        "token_counts": token_counts(params),
        "initial_weights": initial_weights(params),
    }
    found = multi_step_thresholds.explore_thresholds(params)
    return Explored(threshold, found, **parts, metrics={**found.metrics, **_claim_metrics(params, **parts)})


def _threshold_of_two_tokens(params: Params) -> float:
    return long_time_threshold(params.replace(n_tokens=2))


def _claim_metrics(
    params: Params,
    trajectories: Trajectories,
    descent_against_flow: DescentAgainstFlow,
    windows: Windows,
    strong: StrongSignal,
    loss: LossTimes,
    sheet: np.ndarray,
    shares: Shares,
    token_counts: TokenCounts,
    initial_weights: InitialWeights,
    **_,
) -> dict[str, Metric]:
    metrics = {}
    for k, share in enumerate(SHARES_OF_THRESHOLD):
        for name, found in (("steps", trajectories.descent), ("flow", trajectories.flow)):
            last = found.at(slice(None), -1, k)
            metrics[f"test_accuracy_{name}_share{share:g}"] = fraction_metric(last.test_accuracy)
            metrics[f"train_accuracy_{name}_share{share:g}"] = fraction_metric(last.train_accuracy)
            metrics[f"clean_attention_{name}_share{share:g}"] = fraction_metric(last.clean_attention)
            metrics[f"noisy_attention_{name}_share{share:g}"] = fraction_metric(last.noisy_attention)
    metrics["test_accuracy_flow_c0.3_d12500n"] = fraction_metric(trajectories.far.test_accuracy[:, -1])
    order = _slope(np.log(descent_against_flow.b[1:]), np.log(descent_against_flow.difference[:, 1:]))
    metrics["descent_order"] = seed_metric(order)
    metrics["descent_difference"] = seed_metric(descent_against_flow.difference[:, -1], (0, np.inf))
    two, late = windows.log_width.T
    metrics["window_log_width_step2"] = seed_metric(two, (0, np.inf))
    metrics["window_log_width_late"] = seed_metric(late, (0, np.inf))
    metrics["window_gain"] = seed_metric(late - two)
    for k, size in enumerate(STRONG_STEPS):
        last = strong.descent.at(slice(None), -1, k)
        metrics[f"test_accuracy_c5_step{size:g}"] = fraction_metric(last.test_accuracy)
        metrics[f"train_accuracy_c5_step{size:g}"] = fraction_metric(last.train_accuracy)
        metrics[f"clean_attention_c5_step{size:g}"] = fraction_metric(last.clean_attention)
    metrics["test_accuracy_c5_flow"] = fraction_metric(strong.flow.test_accuracy[:, -1])
    many = loss.d_over_n >= 1000
    with np.errstate(invalid="ignore"):
        decades = np.abs(loss.log_time - loss.log_limit)[:, :, many].reshape(len(loss.log_time), -1) / math.log(10)
    metrics["loss_time_off_limit"] = seed_metric(decades.mean(axis=-1), (0, np.inf))
    for k, share in enumerate(LOSS_SHARES):
        metrics[f"loss_exponent_share{share:g}"] = seed_metric(loss.exponent[:, k])
    metrics["loss_exponent_deviation"] = seed_metric(np.abs(loss.exponent - loss.derived).max(axis=-1), (0, np.inf))
    for n, of_size in zip(SHEET["sizes"], np.moveaxis(sheet, 1, 0), strict=True):
        for t, accuracy in zip(SHEET["times"], of_size.T, strict=True):
            metrics[f"test_accuracy_n{n}_time{t:g}"] = fraction_metric(accuracy)
    for T, descent, by_flow in zip(
        shares.n_tokens, shares.descent.largest_share, shares.flow.largest_share, strict=True
    ):
        metrics[f"largest_share_steps_T{T}"] = fraction_metric(descent[:, -1])
        metrics[f"largest_share_flow_T{T}"] = fraction_metric(by_flow[:, -1])
    metrics["win_time_slope"] = seed_metric(shares.slope)
    series = {
        "fixed": token_counts.fixed.at(slice(None), slice(None), -1),
        "scaled": token_counts.scaled.at(slice(None), slice(None), -1),
        "flow": token_counts.flow,
    }
    for name, found in series.items():
        attention = found.clean_attention
        metrics[f"noise_mass_gain_{name}"] = seed_metric(attention[0] - attention[-1], (-1, 1))
        metrics[f"test_accuracy_loss_{name}"] = seed_metric(found.test_accuracy[0] - found.test_accuracy[-1], (-1, 1))
        for T, accuracy, of_clean in zip(token_counts.n_tokens, found.test_accuracy, attention, strict=True):
            metrics[f"test_accuracy_{name}_T{T}"] = fraction_metric(accuracy)
            metrics[f"clean_attention_{name}_T{T}"] = fraction_metric(of_clean)
    gains = token_counts.few.clean_attention - token_counts.many.clean_attention
    for ratio, gain in zip(TOKENS_D_OVER_N, gains, strict=True):
        metrics[f"noise_mass_gain_T{token_counts.many_tokens}_d{ratio}n"] = seed_metric(gain, (-1, 1))
    zero = initial_weights.descent.at(0)
    for scale, accuracy in zip(SCALES, initial_weights.descent.test_accuracy, strict=True):
        metrics[f"test_accuracy_start{scale:g}"] = fraction_metric(accuracy[:, -1])
    for k, scale in enumerate(SCALES[1:], 1):
        there = initial_weights.descent.at(k)
        gap = np.abs(there.clean_attention - zero.clean_attention)[:, -1]
        metrics[f"clean_attention_gap_start{scale:g}"] = fraction_metric(gap)
    return metrics
