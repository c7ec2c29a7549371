"""Chapter two_step_gd: what two steps of gradient descent do to single-head attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import Field

from benign_attention import population, reduced, theory
from benign_attention.data import SingleHeadParams, draw_single_head, from_natural_units
from benign_attention.gram import noise_gram
from benign_attention.parameters import ChapterParams, FlipProbability
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.reduced import TrainingSet
from benign_attention.summary import Summary, summarize

LATE = 1000  # steps at which "late" is read
C_SWEEP = np.array([0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 2.5, 3.0, 4.0, 5.0])
D_OVER_N = np.array([2, 5, 20, 100, 500, 2_500, 12_500, 100_000, 1_000_000])


class Params(ChapterParams, SingleHeadParams):
    """The figure configuration is the default: c = 2.12, b = 5."""

    n_seeds: int = Field(10, ge=1, description="independent runs behind every interval")
    map_points: int = Field(21, ge=3, description="points on each axis of the (c, b) maps")
    map_label_noise: list[FlipProbability] = Field(
        [0.0, 0.05, 0.1, 0.2], min_length=1, description="label noise of the maps"
    )

    HOUSEKEEPING: ClassVar[tuple[str, ...]] = (*ChapterParams.HOUSEKEEPING, "map_points")


def _draw(params: Params, **point) -> TrainingSet:
    """One training set per seed at the point, some of its values replaced."""
    at = {**params.model_dump(include={"n_train", "dim", "n_tokens", "label_noise"}), **point}
    at = {k: at[k] for k in ("n_train", "dim", "n_tokens", "label_noise")}
    rngs = [params.generator(run, **point) for run in range(params.n_seeds)]
    return reduced.draw(**at, rngs=rngs).on(params.device)


def measure(params: Params) -> dict[str, Metric]:
    """Train and test accuracy after one and two steps, and attention after two, at the given point.

    `log10_test_error_step<t>` says how small an error is that the accuracy shows as 1. Together the metrics
    show the conclusions of Magen et al. 2025, Theorem 3.3 (thm-two-step).
    """
    training = _draw(params)
    rho = params.signal_norm
    states = list(reduced.gradient_descent(training, rho, params.step_size, 2))
    first, second = (summarize(training, state, rho) for state in states)
    log10_error = [population.log_test_error(training, state, rho).value / np.log(10) for state in states]
    return {
        "train_accuracy_step1": fraction_metric(first.train_accuracy),
        "train_accuracy_step2": fraction_metric(second.train_accuracy),
        "test_accuracy_step1": fraction_metric(first.test_accuracy),
        "test_accuracy_step2": fraction_metric(second.test_accuracy),
        "log10_test_error_step1": seed_metric(log10_error[0], (-np.inf, 0)),
        "log10_test_error_step2": seed_metric(log10_error[1], (-np.inf, 0)),
        "clean_signal_attention_step2": fraction_metric(second.clean_attention),
        "noisy_signal_attention_step2": fraction_metric(second.noisy_attention),
    }


# ---- the first step against its formulas ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstStep:
    """Largest deviations from the formula for v_1, and of p_1 from zero, one per seed."""

    v_deviation: np.ndarray
    p_deviation: np.ndarray


def first_step_by_autograd(params: Params, n_train: int = 40, dim: int = 400) -> FirstStep:
    """One step of autograd on explicit tokens, against prop-first-step.

    v_1 = beta/(2 n T) sum_i y_i sum_t x_it and p_1 = 0.
    """
    import torch

    from benign_attention import explicit

    deviations = []
    for run in range(params.n_seeds):
        rng = params.generator(run, n_train=n_train, dim=dim, part="first step")
        data = draw_single_head(n_train, dim, params.n_tokens, params.signal_norm, params.label_noise, rng)
        model = explicit.SingleHeadAttention(dim)
        tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
        next(explicit.gradient_descent(model, tokens, labels, params.step_size, 1))
        formula = params.step_size / (2 * n_train * params.n_tokens) * np.einsum("i,itd->d", data.labels, data.tokens)
        v, p = model.v.detach().numpy(), model.p.detach().numpy()
        deviations.append((np.abs(v - formula).max() / np.abs(formula).max(), np.abs(p).max()))
    return FirstStep(*np.array(deviations).T)


@dataclass(frozen=True)
class Margins:
    """y f of every training sample after steps 1 and 2, first seed, and the limit's four values.

    clean, noisy : (2, number of such samples); limit_clean, limit_noisy : (2,).
    """

    clean: np.ndarray
    noisy: np.ndarray
    limit_clean: np.ndarray
    limit_noisy: np.ndarray


def margins(params: Params) -> Margins:
    training = _draw(params)
    states = reduced.gradient_descent(training, params.signal_norm, params.step_size, 2)
    noisy = population.as_numpy(training.noisy)[0] > 0
    labels = population.as_numpy(training.labels)[0]
    f = [labels * population.as_numpy(reduced.outputs(training, s, params.signal_norm).f)[0] for s in states]
    limit = list(theory.limit_gradient_descent(theory.LimitPoint.of(params), 2))
    return Margins(
        np.array([x[~noisy] for x in f]),
        np.array([x[noisy] for x in f]),
        np.array([s.clean_margin for s in limit]),
        np.array([s.noisy_margin for s in limit]),
    )


@dataclass(frozen=True)
class ErrorAfterOneStep:
    """Test error after step 1 over c, for several d/n.

    measured, given_counts : (ratios, n_seeds, c); balanced : (ratios, c).
    """

    d_over_n: np.ndarray
    c: np.ndarray
    measured: np.ndarray
    given_counts: np.ndarray
    balanced: np.ndarray


def error_after_one_step(params: Params, ratios=(10, 100, 1000)) -> ErrorAfterOneStep:
    c = np.linspace(0.05, 1.5, 12)
    measured, given, balanced = [], [], []
    for ratio in ratios:
        dim = _dim(params, ratio)
        training = _draw(params, dim=dim)
        rho, beta = from_natural_units(c, params.natural_b, params.n_train, dim)
        state = next(reduced.gradient_descent(training.with_axes(1), rho, beta, 1))
        measured.append(np.exp(population.log_test_error(training.with_axes(1), state, rho).value))
        noisy, member = population.as_numpy(training.noisy), population.as_numpy(training.membership)
        excess = (member * (1 - 2 * noisy)[:, None, :]).sum(axis=-1) / params.n_train
        points = [params.replace(signal_norm=float(r), dim=dim) for r in rho]
        given.append(np.stack([theory.test_error_after_one_step(p, excess) for p in points], axis=-1))
        balanced.append([theory.test_error_after_one_step(p) for p in points])
    return ErrorAfterOneStep(np.array(ratios), c, *(np.array(x) for x in (measured, given, balanced)))


# ---- the second step against the closed form ------------------------------------------------------------------------


@dataclass(frozen=True)
class ClosedForm:
    """Deviation of step 2 from the orthogonal limit over d/n, balanced flips; (n_seeds, ratios) each.

    Attention: root mean square over samples of the difference; signal_logit: relative difference of p.mu, root mean
    square over the two classes.
    """

    d_over_n: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    signal_logit: np.ndarray
    slope: np.ndarray


def closed_form_deviation(params: Params) -> ClosedForm:
    """Per-sample distance from the closed form after two steps at the point's (c, b), for growing d/n.

    Labels are fixed to exactly balanced classes with the same number of flips in each, so that only the
    noise tokens' inner products deviate from the limit.
    """
    half = max(params.n_train // 2, 1)
    flips = round(half * params.label_noise)
    clean = np.repeat([1.0, -1.0], half)
    labels = np.where(np.tile(np.arange(half) < flips, 2), -clean, clean)
    noisy = labels != clean
    point = theory.LimitPoint(params.natural_c, params.natural_b, flips / half, params.n_tokens)
    limit = theory.two_step_closed_form(point)
    ratios = np.geomspace(10, 1e6, 11)
    rows = []
    for ratio in ratios:
        dim = _dim(params, ratio)
        rho, beta = (float(x) for x in from_natural_units(params.natural_c, params.natural_b, 2 * half, dim))
        rngs = [params.generator(run, dim=dim, part="closed form") for run in range(params.n_seeds)]
        gram = np.stack([noise_gram(2 * half * params.n_noise, dim - 2, rng) for rng in rngs])
        stack = np.ones((params.n_seeds, 1))
        training = TrainingSet(gram, stack * clean, stack * labels).on(params.device)
        *_, state = reduced.gradient_descent(training, rho, beta, 2)
        attention = population.as_numpy(reduced.outputs(training, state, rho).attention)[:, 0]
        logit = rho * population.as_numpy(state.signal)[:, 0]
        rows.append(
            (
                _rms(attention[:, ~noisy] - limit.clean_attention),
                _rms(attention[:, noisy] - limit.noisy_attention),
                _rms(logit / limit.signal_logit - 1),
            )
        )
    deviations = np.moveaxis(np.array(rows), 0, -1)
    slope = np.array([np.polyfit(np.log(ratios), np.log(row), 1)[0] for row in deviations[0]])
    return ClosedForm(ratios, *deviations, slope)


def _rms(values: np.ndarray) -> np.ndarray:
    return np.sqrt((values**2).mean(axis=-1)) if values.shape[-1] else np.full(values.shape[:-1], np.nan)


# ---- over time, step size, signal, dimension, tokens ----------------------------------------------------------------


def _stack(summaries: list[Summary], axis: int = -1) -> Summary:
    fields = Summary.__dataclass_fields__
    return Summary(*(np.stack([getattr(s, f) for s in summaries], axis=axis) for f in fields))


def _at_steps(training: TrainingSet, rho, beta, steps) -> list[Summary]:
    states = enumerate(reduced.gradient_descent(training, rho, beta, max(steps)), 1)
    return [summarize(training, state, rho) for t, state in states if t in steps]


@dataclass(frozen=True)
class Trajectory:
    """Summary over steps, fields (n_seeds, steps)."""

    steps: np.ndarray
    summary: Summary


def trajectory(params: Params) -> Trajectory:
    steps = np.unique(np.round(np.geomspace(1, LATE, 25)).astype(int))
    return Trajectory(steps, _stack(_at_steps(_draw(params), params.signal_norm, params.step_size, set(steps))))


@dataclass(frozen=True)
class StepSizeMap:
    """After two steps over (c, b). summary fields : (label noise, n_seeds, c, b); limit_* : (label noise, c, b)."""

    c: np.ndarray
    b: np.ndarray
    label_noise: np.ndarray
    summary: Summary
    limit_fitted: np.ndarray
    limit_clean_attention: np.ndarray
    limit_noisy_attention: np.ndarray


def step_size_map(params: Params) -> StepSizeMap:
    """Four quantities over the plane of natural units; the cells of one seed share its tokens."""
    c = np.geomspace(0.3, 6.0, params.map_points)
    b = np.geomspace(0.5, 50.0, params.map_points)
    eta = np.array(params.map_label_noise)
    rho, beta = from_natural_units(c[:, None], b, params.n_train, params.dim)
    summaries = []
    for noise in params.map_label_noise:
        training = _draw(params, label_noise=noise, part="map").with_axes(2)
        *_, state = reduced.gradient_descent(training, rho, beta, 2)
        summaries.append(summarize(training, state, rho))
    limit = theory.two_step_closed_form(theory.LimitPoint(c[:, None], b, eta[:, None, None], params.n_tokens))
    fitted = (limit.clean_margin > 0) & ((limit.noisy_margin > 0) | (eta[:, None, None] == 0))
    return StepSizeMap(c, b, eta, _stack(summaries, axis=0), fitted, limit.clean_attention, limit.noisy_attention)


@dataclass(frozen=True)
class Windows:
    """Step sizes b at which all labels are fitted after two steps and clean attention exceeds 1/T + margin.

    measured : (label noise, n_seeds, 2), limit : (label noise, 2): lower and upper end, nan where the window is empty.
    fitted, clean_attention : (label noise, n_seeds, b).
    """

    c: float
    margin: float
    b: np.ndarray
    label_noise: np.ndarray
    measured: np.ndarray
    limit: np.ndarray
    train_accuracy: np.ndarray
    clean_attention: np.ndarray

    @property
    def log_width(self) -> np.ndarray:
        """ln(upper / lower), 0 for an empty window; (label noise, n_seeds)."""
        return np.nan_to_num(np.log(self.measured[..., 1] / self.measured[..., 0]))


def _window(b: np.ndarray, inside: np.ndarray) -> np.ndarray:
    ends = np.array([b[np.argmax(inside, axis=-1)], b[::-1][np.argmax(inside[..., ::-1], axis=-1)]])
    return np.where(inside.any(axis=-1), ends, np.nan)


def windows(params: Params, c: float = 2.0, label_noise=(0.0, 0.05, 0.1, 0.2), margin: float = 0.02) -> Windows:
    """The window of step sizes at one c, for several label noises.

    Without a margin the upper end at label noise 0 would be rounding: there attention tends to 1/T from above.
    """
    b, selective = np.geomspace(0.1, 200.0, 150), 1 / params.n_tokens + margin
    rho, beta = from_natural_units(c, b, params.n_train, params.dim)
    eta = np.array(label_noise)
    measured, accuracy, attention = [], [], []
    for noise in label_noise:
        training = _draw(params, label_noise=noise, part="window").with_axes(1)
        *_, state = reduced.gradient_descent(training, rho, beta, 2)
        s = summarize(training, state, rho)
        inside = (s.train_accuracy == 1) & (s.clean_attention > selective)
        measured.append(np.moveaxis(_window(b, inside), 0, -1))
        accuracy.append(s.train_accuracy)
        attention.append(s.clean_attention)
    limit = theory.two_step_closed_form(theory.LimitPoint(c, b, eta[:, None], params.n_tokens))
    fitted = (limit.clean_margin > 0) & ((limit.noisy_margin > 0) | (eta[:, None] == 0))
    ends = np.moveaxis(_window(b, fitted & (limit.clean_attention > selective)), 0, -1)
    return Windows(c, margin, b, eta, np.array(measured), ends, np.array(accuracy), np.array(attention))


@dataclass(frozen=True)
class SignalSweep:
    """Over c, at fixed b and (constant_product) at fixed b c^2. Summary fields : (n_seeds, c)."""

    c: np.ndarray
    step2: Summary
    late: Summary
    constant_product: Summary
    head_share: np.ndarray
    limit_clean_attention: np.ndarray
    limit_constant_product: np.ndarray


def signal_sweep(params: Params) -> SignalSweep:
    """Attention and accuracy over signal strength after two steps and late; share of v along the signals after step 2.

    The question of Magen et al. 2025, Remark 3.4. The share is |signal part of v|^2 / |v|^2, (n_seeds, c).
    """
    b = params.natural_b
    training = _draw(params, part="signal").with_axes(1)
    rho, beta = from_natural_units(C_SWEEP, b, params.n_train, params.dim)
    step2, late = _at_steps(training, rho, beta, (2, LATE))
    *_, state = reduced.gradient_descent(training, rho, beta, 2)
    v_signal = (population.as_numpy(state.signal)[..., 1, :] ** 2).sum(axis=-1)
    law = population.fresh_token(training, state, rho)
    v_noise = law.slope**2 + law.sd_v**2
    product = b * (params.natural_c / C_SWEEP) ** 2
    rho, beta = from_natural_units(C_SWEEP, product, params.n_train, params.dim)
    (constant,) = _at_steps(training, rho, beta, (2,))
    eta, T = params.label_noise, params.n_tokens
    return SignalSweep(
        C_SWEEP,
        step2,
        late,
        constant,
        v_signal / (v_signal + v_noise),
        theory.two_step_closed_form(theory.LimitPoint(C_SWEEP, b, eta, T)).clean_attention,
        theory.two_step_closed_form(theory.LimitPoint(C_SWEEP, product, eta, T)).clean_attention,
    )


@dataclass(frozen=True)
class DimensionSweep:
    """Over d/n at fixed (c, b). Summary fields : (n_seeds, ratios); weak_* at c = 0.3."""

    d_over_n: np.ndarray
    step2: Summary
    late: Summary
    weak_step2: Summary
    weak_late: Summary


def _dim(params: Params, ratio: float) -> int:
    return max(round(ratio * params.n_train), 3)


def dimension_sweep(params: Params) -> DimensionSweep:
    """The point's (c, b), and a weak signal at the same b, from d = 2n far beyond n^2."""
    found = {"strong": [], "weak": []}
    for ratio in D_OVER_N:
        dim = _dim(params, ratio)
        training = _draw(params, dim=dim, part="dimension").with_axes(1)
        rho, beta = from_natural_units([params.natural_c, 0.3], params.natural_b, params.n_train, dim)
        early, late = _at_steps(training, rho, beta, (2, LATE))
        for k, name in enumerate(found):
            found[name].append(
                [Summary(*(getattr(s, f)[:, k] for f in Summary.__dataclass_fields__)) for s in (early, late)]
            )
    columns = [_stack(list(x)) for name in found for x in zip(*found[name], strict=True)]
    return DimensionSweep(D_OVER_N, *columns)


@dataclass(frozen=True)
class TokenSweep:
    """Over b for several T, at one c. Summary fields : (T, n_seeds, b); limit_* : (T, b)."""

    n_tokens: np.ndarray
    c: float
    b: np.ndarray
    summary: Summary
    limit_clean_attention: np.ndarray
    limit_noisy_attention: np.ndarray


def token_sweep(params: Params, n_tokens=(2, 3, 5), c: float = 3.0) -> TokenSweep:
    """Attention and fit after two steps for more noise tokens, d/n as at the point."""
    b = np.geomspace(0.5, 50.0, params.map_points)
    rho, beta = from_natural_units(c, b, params.n_train, params.dim)
    summaries, clean, noisy = [], [], []
    for T in n_tokens:
        training = _draw(params, n_tokens=T, part="tokens").with_axes(1)
        *_, state = reduced.gradient_descent(training, rho, beta, 2)
        summaries.append(summarize(training, state, rho))
        limit = theory.two_step_closed_form(theory.LimitPoint(c, b, params.label_noise, T))
        clean.append(limit.clean_attention)
        noisy.append(limit.noisy_attention)
    return TokenSweep(np.array(n_tokens), c, b, _stack(summaries, axis=0), np.array(clean), np.array(noisy))


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """All that the chapter's figures show beyond the point, and the metrics of its claims."""

    first_step: FirstStep
    margins: Margins
    error_after_one_step: ErrorAfterOneStep
    closed_form: ClosedForm
    trajectory: Trajectory
    map: StepSizeMap
    windows: Windows
    clear_windows: Windows
    strong_window: Windows
    signal: SignalSweep
    dimension: DimensionSweep
    tokens: TokenSweep
    metrics: dict[str, Metric]


def explore(params: Params) -> Explored:
    """Everything around the point, and the metrics that the chapter's claims rest on."""
    parts = {
        "first_step": first_step_by_autograd(params),
        "margins": margins(params),
        "error_after_one_step": error_after_one_step(params),
        "closed_form": closed_form_deviation(params),
        "trajectory": trajectory(params),
        "map": step_size_map(params),
        "windows": windows(params),
        "clear_windows": windows(params, margin=0.05),
        "strong_window": windows(params, c=3.0, label_noise=(0.05,)),
        "signal": signal_sweep(params),
        "dimension": dimension_sweep(params),
        "tokens": token_sweep(params),
    }
    return Explored(**parts, metrics=_claim_metrics(**parts))


def _best_attention(train_accuracy: np.ndarray, clean_attention: np.ndarray) -> np.ndarray:
    """Largest clean attention over step sizes that fit every label, per seed; nan where none does."""
    best = np.where(train_accuracy == 1, clean_attention, -np.inf).max(axis=-1)
    return np.where(np.isfinite(best), best, np.nan)


def _claim_metrics(
    closed_form, trajectory, windows, clear_windows, strong_window, signal, dimension, tokens, **_
) -> dict[str, Metric]:
    at_c = {c: k for k, c in enumerate(signal.c)}
    at_d = {ratio: k for k, ratio in enumerate(dimension.d_over_n)}
    step2, late, weak = signal.step2, signal.late, at_c[0.3]
    product = signal.constant_product.clean_attention
    best = dict(
        zip(windows.label_noise, map(_best_attention, windows.train_accuracy, windows.clean_attention), strict=True)
    )
    strong = _best_attention(strong_window.train_accuracy[0], strong_window.clean_attention[0])
    widths = dict(zip(clear_windows.label_noise, clear_windows.log_width, strict=True))
    metrics = {
        "closed_form_deviation_slope": seed_metric(closed_form.slope),
        "train_accuracy_late": fraction_metric(trajectory.summary.train_accuracy[:, -1]),
        "test_accuracy_late": fraction_metric(trajectory.summary.test_accuracy[:, -1]),
        "head_share_c5_minus_c1": seed_metric(signal.head_share[:, at_c[5.0]] - signal.head_share[:, at_c[1.0]]),
        "clean_attention_c2_minus_c3": seed_metric(
            step2.clean_attention[:, at_c[2.0]] - step2.clean_attention[:, at_c[3.0]]
        ),
        "best_clean_attention_c2_minus_c3": seed_metric(best[0.05] - strong),
        "clean_attention_c1_minus_c2": seed_metric(
            step2.clean_attention[:, at_c[1.0]] - step2.clean_attention[:, at_c[2.0]]
        ),
        "clean_attention_product_c1.4_minus_c2.5": seed_metric(product[:, at_c[1.4]] - product[:, at_c[2.5]]),
        "train_accuracy_step2_c0.3": fraction_metric(step2.train_accuracy[:, weak]),
        "clean_signal_attention_step2_c0.3": fraction_metric(step2.clean_attention[:, weak]),
        "noisy_signal_attention_step2_c0.3": fraction_metric(step2.noisy_attention[:, weak]),
        "test_accuracy_step2_c0.3": fraction_metric(step2.test_accuracy[:, weak]),
        "test_accuracy_late_c0.3": fraction_metric(late.test_accuracy[:, weak]),
        "test_accuracy_step2_c5": fraction_metric(step2.test_accuracy[:, at_c[5.0]]),
        "window_log_width_gain_without_noise": seed_metric(widths[0.0] - widths[0.05]),
    }
    for eta in windows.label_noise:
        metrics[f"best_clean_attention_eta{eta:g}"] = fraction_metric(best[eta])
        metrics[f"window_log_width_eta{eta:g}"] = seed_metric(widths[eta], (0, np.inf))
    for T, accuracy, attention in zip(
        tokens.n_tokens, tokens.summary.train_accuracy, tokens.summary.clean_attention, strict=True
    ):
        metrics[f"best_clean_attention_T{T}"] = fraction_metric(_best_attention(accuracy, attention))
    for ratio in (2, 12_500):
        k = at_d[ratio]
        metrics[f"train_accuracy_step2_d{ratio}n"] = fraction_metric(dimension.step2.train_accuracy[:, k])
        metrics[f"test_accuracy_step2_d{ratio}n"] = fraction_metric(dimension.step2.test_accuracy[:, k])
        metrics[f"test_accuracy_late_d{ratio}n"] = fraction_metric(dimension.late.test_accuracy[:, k])
        metrics[f"test_accuracy_step2_c0.3_d{ratio}n"] = fraction_metric(dimension.weak_step2.test_accuracy[:, k])
        metrics[f"test_accuracy_late_c0.3_d{ratio}n"] = fraction_metric(dimension.weak_late.test_accuracy[:, k])
    return metrics
