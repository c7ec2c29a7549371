"""Chapter max_margin: the solutions with the largest margin, and whether gradient descent finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.optimize import brentq

from benign_attention import flow, margin_limit, reduced, weight_decay
from benign_attention.gram import noise_gram
from benign_attention.margin import MaxMargin, max_margin
from benign_attention.margin_problem import MarginProblem, problem_of, selection_margin, state_of
from benign_attention.margin_starts import named_selection, starts
from benign_attention.min_norm import min_norm
from benign_attention.parallel import map_processes
from benign_attention.parameters import ChapterParams, Dimension, FlipProbability, Positive
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.reduced import TrainingSet
from benign_attention.selection_svm import token_selection_svm
from benign_attention.summary import Summary, summarize

C_SWEEP = np.array([0.5, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0])
LABEL_NOISE = np.array([0.0, 0.1, 0.2])
RADII = np.array([0.3, 0.8, 1.5, 3.0, 6.0, 10.0])  # times sqrt(n/d), in which logits move by about one
DECAYS = np.array([1e-2, 1e-5, 1e-8])  # times d/n
TIMES = np.array([1e2, 1e6, 1e10])  # times n/d
BETWEEN_C = 1.6  # at label noise 0.1 above c_MM = 1.49 and below 1.64, where long training selects the signal
SIZES = np.array([0.5, 1.0, 2.0, 4.0])  # times n_train
SETTLED = 3.0  # gradient descent with decay omega runs to time SETTLED / omega before its point of rest is computed


class Params(ChapterParams):
    """The default is c = 1.98, above c_MM = 1.49; the radius lets logits move by 6 and more."""

    n_train: Annotated[int, Field(ge=2, le=200)] = Field(40, description="training samples")
    dim: Dimension = Field(6400, description="token dimension d")
    signal_norm: Positive = Field(25.0, description="|mu|, the papers' rho")
    n_seeds: int = Field(6, ge=1, description="independent runs behind every interval")
    label_noise: FlipProbability = Field(0.1, description="probability that a training label is flipped")
    radius: Positive = Field(0.5, description="largest length R of p")
    weight_decay: Positive = Field(0.01, description="omega, of gradient descent with weight decay")
    n_starts: Annotated[int, Field(ge=1, le=100)] = Field(7, description="starts of the search, five of them named")

    @property
    def natural_c(self) -> float:
        """SNR sqrt(n)."""
        return self.signal_norm * np.sqrt(self.n_train / self.dim)

    @property
    def natural_radius(self) -> float:
        """R sqrt(d/n)."""
        return self.radius * np.sqrt(self.dim / self.n_train)

    @property
    def natural_decay(self) -> float:
        """omega n/d."""
        return self.weight_decay * self.n_train / self.dim


# ---- one training set -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One training set (no batch axes) at one signal strength, and the starts of the searches on it."""

    training: TrainingSet
    signal_norm: float
    n_starts: int
    start_seed: int

    @property
    def problem(self) -> MarginProblem:
        return problem_of(self.training, self.signal_norm)

    def starts(self, problem: MarginProblem) -> dict[str, np.ndarray]:
        return starts(problem, self.training.clean_labels, self.n_starts, np.random.default_rng(self.start_seed))

    def summary(self, problem: MarginProblem, p: np.ndarray, v: np.ndarray) -> Summary:
        """Of weights (p, v); all nan where there are none."""
        if not np.isfinite([*p, *v]).all():
            return Summary(*[np.float64(np.nan)] * 5)
        return summarize(self.training, state_of(problem, p, v), self.signal_norm)


def _one(stack: TrainingSet, i: int) -> TrainingSet:
    return TrainingSet(stack.gram[i], stack.clean_labels[i], stack.labels[i])


def _settings(params: Params, c: np.ndarray | None = None, **point) -> list[Setting]:
    """One setting per seed and c (default: the point's own), seeds first; those of a seed share tokens and labels."""
    n, dim = (point.get(k, getattr(params, k)) for k in ("n_train", "dim"))
    noise = point.get("label_noise", params.label_noise)
    norms = [params.signal_norm] if c is None else np.asarray(c) * np.sqrt(dim / n)
    found = []
    for run in range(params.n_seeds):
        rng = params.generator(run, **point)
        training = _one(reduced.draw(n, dim, 2, noise, [rng]), 0)
        seed = int(rng.integers(2**32))
        found += [Setting(training, float(norm), params.n_starts, seed) for norm in norms]
    return found


def _balanced(params: Params, c: float, label_noise: float, dim: int, part: str) -> list[Setting]:
    """As `_settings`, with equal classes and the same number of flips in each."""
    half = max(params.n_train // 2, 1)
    clean = np.repeat([1.0, -1.0], half)
    labels = np.where(np.tile(np.arange(half) < round(half * label_noise), 2), -clean, clean)
    found = []
    for run in range(params.n_seeds):
        rng = params.generator(run, dim=dim, label_noise=label_noise, part=part)
        training = TrainingSet(noise_gram(2 * half, dim - 2, rng), clean, labels)
        seed = int(rng.integers(2**32))
        found.append(Setting(training, c * np.sqrt(dim / (2 * half)), params.n_starts, seed))
    return found


@dataclass(frozen=True)
class Solution:
    """A max-margin solution and what it does; margins are the inner products themselves, |v| <= 1."""

    found: MaxMargin
    summary: Summary


def _solve(job: tuple[Setting, float]) -> Solution:
    setting, radius = job
    problem = setting.problem
    found = max_margin(problem, radius, setting.starts(problem))
    usable = found.p if found.converged else np.full_like(found.p, np.nan)
    return Solution(found, setting.summary(problem, usable, found.v))


@dataclass(frozen=True)
class Compared:
    """Weights that gradient descent reached, against the best margin with |p| no longer than theirs.

    cosine_p, cosine_v, margin_ratio : nan unless the descent is at rest (where that is asked) and the best solution
    converged; status : "converged", or what is not; best_test_accuracy : of that solution.
    """

    summary: Summary
    margin: float
    cosine_p: float
    cosine_v: float
    margin_ratio: float
    best_test_accuracy: float
    relative_gradient: float
    status: str


def _compare(setting, problem, p, v, status="converged", relative_gradient=np.nan) -> Compared:
    radius, length = float(np.linalg.norm(p)), float(np.linalg.norm(v))
    margin = problem.margin(p, v) / length if length > 0 else np.nan
    best = None
    if status == "converged" and radius > 0 and length > 0:
        best = max_margin(problem, radius, {**setting.starts(problem), "gradient descent": p})
        status = best.status
    fine = best is not None and best.converged
    return Compared(
        summary=setting.summary(problem, p, v),
        margin=margin,
        cosine_p=float(p @ best.p / radius / np.linalg.norm(best.p)) if fine else np.nan,
        cosine_v=float(v @ best.v / length) if fine else np.nan,
        margin_ratio=margin / best.margin if fine else np.nan,
        best_test_accuracy=float(setting.summary(problem, best.p, best.v).test_accuracy) if fine else np.nan,
        relative_gradient=relative_gradient,
        status=status,
    )


def _decayed(job: tuple[Setting, float]) -> Compared:
    """Gradient descent from zero with small steps and weight decay, polished to rest, against the best solution."""
    setting, decay = job
    problem = setting.problem
    try:
        weights = weight_decay.gradient_flow(problem, decay, SETTLED / decay)
    except flow.FlowError as error:
        nothing = np.full(problem.tokens.shape[-1], np.nan)
        return _compare(setting, problem, nothing, nothing, str(error))
    rest = weight_decay.come_to_rest(problem, decay, weights)
    status = "converged" if rest.converged else "gradient descent is not at rest"
    return _compare(setting, problem, rest.p, rest.v, status, rest.relative_gradient)


def _seeds(results: list, field: str) -> np.ndarray:
    """One field of the results or of their summaries, (n_seeds,)."""
    return np.array([getattr(r, field) if hasattr(r, field) else getattr(r.summary, field) for r in results])


def measure(params: Params) -> dict[str, Metric]:
    """The best solution found at the point, and gradient descent with weight decay against the best within its own |p|.

    `margin` is min_i y_i f with |v| <= 1, |p| <= radius, in the tokens' own units; a search that did not converge
    counts as no number.
    """
    if params.device != "cpu":
        from benign_attention.devices import resolve

        resolve(params.device)
    settings = _settings(params)
    best = map_processes(_solve, [(s, params.radius) for s in settings])
    decayed = map_processes(_decayed, [(s, params.weight_decay) for s in settings])
    return {
        "margin": seed_metric([s.found.margin for s in best], (0, np.inf)),
        "test_accuracy": fraction_metric(_seeds(best, "test_accuracy")),
        "clean_signal_attention": fraction_metric(_seeds(best, "clean_attention")),
        "noisy_signal_attention": fraction_metric(_seeds(best, "noisy_attention")),
        "gd_cosine_p": seed_metric(_seeds(decayed, "cosine_p"), (-1, 1)),
        "gd_cosine_v": seed_metric(_seeds(decayed, "cosine_v"), (-1, 1)),
        "gd_margin_ratio": seed_metric(_seeds(decayed, "margin_ratio"), (-np.inf, 1)),
    }


# ---- signal strength and label noise --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The best solution over c for several label noises, at the point's radius.

    margin (over sqrt(d/n)), test_accuracy, clean_attention, noisy_attention : (label noise, n_seeds, c); switch :
    (label noise,), c_MM; solutions : all of them, in that order.
    """

    label_noise: np.ndarray
    c: np.ndarray
    margin: np.ndarray
    test_accuracy: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    switch: np.ndarray
    solutions: list[Solution]


def sweep(params: Params) -> Sweep:
    """Margin, test accuracy and attention of the best solution; the points of one seed share tokens and labels."""
    jobs = [
        (s, params.radius)
        for noise in LABEL_NOISE
        for s in _settings(params, C_SWEEP, label_noise=float(noise), part="sweep")
    ]
    solutions = map_processes(_solve, jobs)
    shape = (len(LABEL_NOISE), params.n_seeds, len(C_SWEEP))
    margin = np.array([s.found.margin for s in solutions]) * np.sqrt(params.n_train / params.dim)
    fields = [
        np.array([getattr(s.summary, name) for s in solutions]).reshape(shape)
        for name in ("test_accuracy", "clean_attention", "noisy_attention")
    ]
    return Sweep(
        LABEL_NOISE,
        C_SWEEP,
        margin.reshape(shape),
        *fields,
        margin_limit.switch(0.5, LABEL_NOISE),
        solutions,
    )


@dataclass(frozen=True)
class Thresholds:
    """c at which selecting the signal on all clean samples and on none have equal margins, R to infinity.

    by_size : (n_seeds, sizes) at the point's label noise and d = 4 n^2; by_noise : (n_seeds, label noises) at its n, d.
    """

    sizes: np.ndarray
    by_size: np.ndarray
    label_noise: np.ndarray
    by_noise: np.ndarray


def _equal_margins(training: TrainingSet, dim: int) -> float:
    """nan where no c in [0.3, 10] makes the two selections equal."""

    def lead(log_c):
        problem = problem_of(training, np.exp(log_c) * np.sqrt(dim / training.n_train))
        margins = [
            selection_margin(problem, named_selection(name, training.clean_labels, training.labels))
            for name in ("signal", "noise")
        ]
        return margins[0] - margins[1]

    low, high = np.log(0.3), np.log(10.0)
    return float(np.exp(brentq(lead, low, high, xtol=1e-6))) if lead(low) < 0 < lead(high) else np.nan


def _threshold(job: tuple[TrainingSet, int]) -> float:
    return _equal_margins(*job)


def thresholds(params: Params) -> Thresholds:
    noises = np.array([0.0, 0.1, 0.2, 0.3])
    jobs = []
    sizes = np.maximum(SIZES * params.n_train, 4).astype(int)
    for n in sizes.tolist():
        jobs += [(s.training, 4 * n**2) for s in _settings(params, n_train=n, dim=4 * n**2, part="threshold")]
    for noise in noises:
        jobs += [(s.training, params.dim) for s in _settings(params, label_noise=float(noise), part="threshold")]
    found = np.array(map_processes(_threshold, jobs)).reshape(-1, params.n_seeds).T
    return Thresholds(sizes, found[:, : len(SIZES)], noises, found[:, len(SIZES) :])


# ---- radius, and the shortest solutions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RadiusSweep:
    """The best solution over R sqrt(d/n), at the point; (n_seeds, radii) each.

    margin over sqrt(d/n); hard_margin, that of its hard selection (R to infinity); cosine of p with the token-selection
    SVM of that selection; attention on the selected token.
    """

    radius: np.ndarray
    margin: np.ndarray
    hard_margin: np.ndarray
    cosine: np.ndarray
    attention: np.ndarray


def _against_svm(job: tuple[Setting, float]) -> tuple[float, ...]:
    setting, radius = job
    problem = setting.problem
    found = max_margin(problem, radius, setting.starts(problem))
    if not found.converged:
        return (np.nan,) * 4
    selected = (problem.tokens @ found.p).argmax(axis=1)
    svm = token_selection_svm(problem.tokens, selected)
    cosine = (
        float(found.p @ svm.direction * svm.margin / np.linalg.norm(found.p)) if svm.status == "optimal" else np.nan
    )
    scale = np.sqrt(len(selected) / np.sum(problem.tokens[:, 1] ** 2, axis=-1).mean())
    attention = problem.attention(found.p).max(axis=1).mean()
    return found.margin * scale, selection_margin(problem, selected) * scale, cosine, float(attention)


def radius_sweep(params: Params) -> RadiusSweep:
    unit = np.sqrt(params.n_train / params.dim)
    jobs = [(s, float(r * unit)) for s in _settings(params, part="radius") for r in RADII]
    found = np.array(map_processes(_against_svm, jobs)).reshape(params.n_seeds, len(RADII), 4)
    return RadiusSweep(RADII, *np.moveaxis(found, -1, 0))


@dataclass(frozen=True)
class Shortest:
    """The min-norm solution over c, for several targets of the margin; fields (targets, n_seeds, c).

    length_p : |p| sqrt(d/n); agreeing : share of the starts that end at the shortest length, to 1e-4.
    """

    targets: tuple[float, ...]
    c: np.ndarray
    length_p: np.ndarray
    test_accuracy: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    agreeing: np.ndarray


def _shortest(job: tuple[Setting, float]) -> tuple[float, ...]:
    setting, target = job
    problem = setting.problem
    found = min_norm(problem, setting.starts(problem), target)
    if found.status != "converged":
        return (np.nan,) * 5
    what = setting.summary(problem, found.p, found.v)
    norms = np.array(list(found.norms.values()))
    return (
        float(np.linalg.norm(found.p)),
        float(what.test_accuracy),
        float(what.clean_attention),
        float(what.noisy_attention),
        float(np.mean(norms <= np.nanmin(norms) * (1 + 1e-4))),
    )


def shortest(params: Params, targets=(1.0, 10.0)) -> Shortest:
    jobs = [(s, target) for target in targets for s in _settings(params, C_SWEEP, part="shortest")]
    found = np.array(map_processes(_shortest, jobs)).reshape(len(targets), params.n_seeds, len(C_SWEEP), 5)
    found[..., 0] *= np.sqrt(params.dim / params.n_train)
    return Shortest(targets, C_SWEEP, *np.moveaxis(found, -1, 0))


# ---- gradient descent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Descents:
    """Gradient descent against the best solution within its own |p|, over weight decay or time.

    axis : omega n/d (decreasing) or t d/n; results : n_seeds lists of one `Compared` for each value of the axis.
    """

    name: str
    axis: np.ndarray
    results: list[list[Compared]]

    def field(self, name: str) -> np.ndarray:
        """(n_seeds, axis)."""
        return np.array(
            [[getattr(r, name) if hasattr(r, name) else getattr(r.summary, name) for r in row] for row in self.results]
        )


def _rows(found: list, width: int) -> list[list]:
    return [found[i : i + width] for i in range(0, len(found), width)]


def _late(setting: Setting) -> list[Compared]:
    """The flow without decay at the late times; a flow that is not accurate enough counts as not converged."""
    problem = setting.problem
    unit = setting.training.n_train / np.diagonal(setting.training.gram).mean()
    found = []
    try:
        for weights in weight_decay.flow_states(problem, 0.0, TIMES * unit):
            found.append(_compare(setting, problem, *weights))
    except flow.FlowError as error:
        nothing = np.full(problem.tokens.shape[-1], np.nan)
        found += [_compare(setting, problem, nothing, nothing, str(error))] * (len(TIMES) - len(found))
    return found


def descents(settings: list[Setting], name: str, dim: int) -> tuple[Descents, Descents]:
    """With weight decay tending to zero, and without any at late times."""
    decays = [float(w * dim / settings[0].training.n_train) for w in DECAYS]
    decayed = map_processes(_decayed, [(s, decay) for s in settings for decay in decays])
    late = map_processes(_late, settings)
    return Descents(name, DECAYS, _rows(decayed, len(DECAYS))), Descents(name, TIMES, late)


STARTS_OF_DESCENT = (
    "from zero, small steps",
    "from zero, b = 1",
    "from zero, b = 5",
    "small random start, b = 5",
    "large random start, b = 5",
    "from the min-norm solution",
)


@dataclass(frozen=True)
class Rests:
    """Points of rest at omega n/d = 1e-3 from the starts of `STARTS_OF_DESCENT`; (n_seeds, starts) each.

    objective : its value; clean_attention, test_accuracy : nan where the descent is not at rest, and so is objective.
    """

    name: str
    objective: np.ndarray
    clean_attention: np.ndarray
    test_accuracy: np.ndarray


def _rests(setting: Setting) -> list[tuple[float, ...]]:
    """From each start: objective, clean attention and test accuracy at rest.

    Random starts have Gaussian entries, such that tokens see logits and values of about 0.1 or 2; the min-norm solution
    is that for margins log(1000) + 1, near which the minimum of the objective should lie.
    """
    problem = setting.problem
    unit_time = setting.training.n_train / float(np.diagonal(setting.training.gram).mean())
    decay = 1e-3 / unit_time
    steps = SETTLED * 1e3
    rng = np.random.default_rng(setting.start_seed + 1)
    noise = rng.standard_normal((2, problem.tokens.shape[-1])) / np.sqrt(np.sum(problem.tokens**2, axis=-1).mean())
    best = min_norm(problem, setting.starts(problem), float(np.log(1e3) + 1))

    def descend(b, start=None):
        return weight_decay.gradient_descent(problem, decay, b * unit_time, int(steps / b), start)

    ends = [
        weight_decay.gradient_flow(problem, decay, SETTLED / decay),
        descend(1.0),
        descend(5.0),
        descend(5.0, 0.1 * noise),
        descend(5.0, 2.0 * noise),
        np.stack([best.p, best.v]),
    ]
    found = []
    for end in ends:
        rest = weight_decay.come_to_rest(problem, decay, end) if np.isfinite(end).all() else None
        if rest is None or not rest.converged:
            found.append((np.nan,) * 3)
            continue
        value = weight_decay.objective(problem, np.stack([rest.p, rest.v]), decay)[0]
        what = setting.summary(problem, rest.p, rest.v)
        found.append((value, float(what.clean_attention), float(what.test_accuracy)))
    return found


def rests(settings: list[Setting], name: str) -> Rests:
    return Rests(name, *np.moveaxis(np.array(map_processes(_rests, settings)), -1, 0))


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the point, and the metrics of its claims.

    decayed, late, rests : at the point, and at c = BETWEEN_C with balanced classes and flips.
    """

    sweep: Sweep
    thresholds: Thresholds
    radius: RadiusSweep
    shortest: Shortest
    decayed: tuple[Descents, Descents]
    late: tuple[Descents, Descents]
    rests: tuple[Rests, Rests]
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the point, and the metrics that the chapter's claims rest on."""
    own = _settings(params, part="descent")
    between = _balanced(params, BETWEEN_C, 0.1, params.dim, "between")
    pairs = [descents(own, "point", params.dim), descents(between, "between", params.dim)]
    parts = {
        "sweep": sweep(params),
        "thresholds": thresholds(params),
        "radius": radius_sweep(params),
        "shortest": shortest(params),
        "decayed": tuple(p[0] for p in pairs),
        "late": tuple(p[1] for p in pairs),
        "rests": (rests(own, "point"), rests(between, "between")),
    }
    return Explored(**parts, metrics=_claim_metrics(**parts))


def _claim_metrics(sweep, thresholds, radius, shortest, decayed, late, rests) -> dict[str, Metric]:
    metrics = {**_certificates(sweep)}
    for k, noise in enumerate(sweep.label_noise):
        for j, c in enumerate(sweep.c):
            for name in ("test_accuracy", "clean_attention", "noisy_attention"):
                metrics[f"{name}_c{c:g}_eta{noise:g}"] = fraction_metric(getattr(sweep, name)[k, :, j])
    for k, target in enumerate(shortest.targets):
        for j, c in enumerate(shortest.c):
            metrics[f"min_norm_test_accuracy_M{target:g}_c{c:g}"] = fraction_metric(shortest.test_accuracy[k, :, j])
            metrics[f"min_norm_clean_attention_M{target:g}_c{c:g}"] = fraction_metric(shortest.clean_attention[k, :, j])
            metrics[f"min_norm_agreeing_starts_M{target:g}_c{c:g}"] = fraction_metric(shortest.agreeing[k, :, j])
    snr = np.log(thresholds.by_size / np.sqrt(thresholds.sizes))
    log_n = np.log(thresholds.sizes) - np.log(thresholds.sizes).mean()
    metrics["threshold_snr_exponent"] = seed_metric(snr @ log_n / (log_n @ log_n))
    for j, noise in enumerate(thresholds.label_noise):
        metrics[f"threshold_c_eta{noise:g}"] = seed_metric(thresholds.by_noise[:, j], (0, np.inf))
    metrics["threshold_growth_eta0.3"] = seed_metric(thresholds.by_noise[:, -1] / thresholds.by_noise[:, 0])
    for j in (0, -1):
        metrics[f"svm_cosine_R{radius.radius[j]:g}"] = seed_metric(radius.cosine[:, j], (-1, 1))
    for place in (*decayed, *late):
        kind = "gd" if place.axis[0] < 1 else "flow"
        worst = np.nanmax(place.field("relative_gradient"), axis=1) if kind == "gd" else None
        if worst is not None:
            metrics[f"gd_relative_gradient_{place.name}"] = seed_metric(worst, (0, np.inf))
        for j, x in enumerate(place.axis):
            where = f"{place.name}_{'w' if kind == 'gd' else 't'}{x:g}"
            for name in ("cosine_p", "cosine_v"):
                metrics[f"{kind}_{name}_{where}"] = seed_metric(place.field(name)[:, j], (-1, 1))
            metrics[f"{kind}_margin_ratio_{where}"] = seed_metric(place.field("margin_ratio")[:, j], (-np.inf, 1))
            metrics[f"{kind}_test_accuracy_{where}"] = fraction_metric(place.field("test_accuracy")[:, j])
            metrics[f"{kind}_best_test_accuracy_{where}"] = fraction_metric(place.field("best_test_accuracy")[:, j])
    for place in rests:
        least = np.fmin.reduce(place.objective, axis=1)
        metrics[f"gd_excess_objective_{place.name}"] = seed_metric(place.objective[:, 0] / least - 1, (0, np.inf))
        spread = np.fmax.reduce(place.objective[:, :5], axis=1) / np.fmin.reduce(place.objective[:, :5], axis=1) - 1
        metrics[f"gd_spread_over_starts_{place.name}"] = seed_metric(spread, (0, np.inf))
    return metrics


def _certificates(sweep: Sweep) -> dict[str, Metric]:
    """How far the sweep's searches can be trusted; the worst over c and label noise, per seed."""
    shape = (len(sweep.label_noise), -1, len(sweep.c))

    def worst(values) -> np.ndarray:
        return np.fmax.reduce(np.fmax.reduce(np.array(values, float).reshape(shape), axis=2), axis=0)

    found = [s.found for s in sweep.solutions]
    converged = np.array([f.converged for f in found]).reshape(shape).mean(axis=(0, 2))
    behind = [np.mean([m < 0.99 * max(f.margins.values()) for m in f.margins.values()]) for f in found]
    return {
        "share_converged": fraction_metric(converged),
        "largest_kkt_residual": seed_metric(worst([f.head.kkt_residual for f in found]), (0, np.inf)),
        "largest_duality_gap": seed_metric(worst([f.head.duality_gap for f in found]), (0, np.inf)),
        "largest_promised_gain": seed_metric(worst([f.promised_gain for f in found]), (0, np.inf)),
        "largest_polish_difference": seed_metric(
            worst([abs(f.polished / max(f.margins.values()) - 1) for f in found]), (0, np.inf)
        ),
        "share_of_starts_behind": fraction_metric(np.array(behind).reshape(shape).mean(axis=(0, 2))),
    }
