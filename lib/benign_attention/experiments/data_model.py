"""Chapter `data_model`: the two data models, concentration of the Gram matrix, label noise, natural units."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.special import gammaln
from scipy.stats import ks_2samp, norm
from scipy.stats import t as student

from benign_attention import population, reduced, theory
from benign_attention.data import (
    SingleHeadParams,
    TokenSelectionParams,
    draw_labels,
    draw_single_head,
    draw_token_selection,
    from_natural_units,
)
from benign_attention.gram import noise_gram, noise_rows
from benign_attention.parameters import (
    ChapterParams,
    Dimension,
    FlipProbability,
    Positive,
    SamplesCount,
    TokensCount,
)
from benign_attention.records import Metric, fraction_metric, seed_metric

NATURAL_B = 5.0  # step size in natural units: the figure configuration
N_STEPS = 100
DIMS = np.unique(np.geomspace(10, 1e9, 17).round()).astype(int)
IMAGE_DIMS = (10, 1000)
MAXIMA_PER_SEED = 20
SAMPLER_ROWS, SAMPLER_DOF, SAMPLER_DRAWS = 12, 24, 4000
LABEL_DRAWS = 2000
FLIP_SIZES = np.array([2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100, 140, 200])
D_OVER_N = np.array([1, 3, 10, 30, 100, 300, 1000, 10_000, 100_000])


class Params(ChapterParams):
    """The figure configuration of the single-head setting is the default."""

    n_train: SamplesCount = Field(200, description="training samples")
    dim: Dimension = Field(40_000, description="token dimension d")
    n_tokens: TokensCount = Field(2, description="tokens per sample, T")
    signal_norm: Positive = Field(30.0, description="|mu|, the papers' rho")
    label_noise: FlipProbability = Field(0.05, description="probability that a training label is flipped")

    @property
    def setting(self) -> SingleHeadParams:
        """This point with the step size b = `NATURAL_B`."""
        own = {name: getattr(self, name) for name in ("n_train", "dim", "n_tokens", "signal_norm", "label_noise")}
        return SingleHeadParams(**own, step_size=NATURAL_B * self.n_train / self.dim)

    @property
    def n_rows(self) -> int:
        """Noise tokens of the training set, m = n (T - 1)."""
        return self.n_train * (self.n_tokens - 1)

    def draw(self, **point) -> reduced.TrainingSet:
        """One training set a seed, at this point with some values replaced."""
        there = self.replace(**point)
        rngs = [self.generator(run, **point) for run in range(self.n_seeds)]
        return reduced.draw(there.n_train, there.dim, there.n_tokens, there.label_noise, rngs)


def measure(params: Params) -> dict[str, Metric]:
    """The point's metrics.

    gram_offdiagonal_max: the largest |xi_i . xi_j| over all pairs i != j of the m = n (T - 1) noise tokens of the
    training set, over d; one value a seed. snr = |mu| / sqrt(d) and natural_c = snr sqrt(n) follow from the parameters.
    """
    gram = params.draw().gram
    return {
        "gram_offdiagonal_max": seed_metric(largest_inner_product(gram) / params.dim, (0.0, np.inf)),
        "snr": _exact(params.setting.snr, params.n_seeds),
        "natural_c": _exact(params.setting.natural_c, params.n_seeds),
    }


def _exact(value: float, n_seeds: int) -> Metric:
    return Metric(value, value, value, n_seeds, [value] * n_seeds, "exact: a function of the parameters")


def largest_inner_product(gram: np.ndarray) -> np.ndarray:
    """max over i != j of |G_ij|, for each matrix of `gram` (..., m, m)."""
    return np.abs(_without_diagonal(gram)).max(axis=(-1, -2))


def _without_diagonal(gram: np.ndarray) -> np.ndarray:
    return gram * (1.0 - np.eye(gram.shape[-1]))


# ---- what theory says about inner products ---------------------------------------------------------------------------


def expected_largest_normal(count: int) -> float:
    """Expected largest |z| of `count` independent standard normal z, by quadrature over its distribution function."""
    x = np.linspace(0.0, 40.0, 40_001)
    return float(np.trapezoid(-np.expm1(count * np.log1p(-2 * norm.sf(x[1:]))), x[1:])) + x[1]


def predicted_largest(n_rows: int, dim) -> np.ndarray:
    """Largest |xi_i . xi_j| / d if the n_rows (n_rows - 1) / 2 pairs were independent Gaussians of variance d - 2.

    Derived in chapter data_model, "How large the largest inner product is" (eq-largest).
    """
    return expected_largest_normal(n_rows * (n_rows - 1) // 2) * np.sqrt(np.asarray(dim) - 2) / dim


def predicted_cross_talk(n_rows: int, dim) -> np.ndarray:
    """Root mean square over d of the signed sum of one token's inner products with all others.

    Exact (prop-cross-talk).
    """
    return np.sqrt((n_rows - 1) * (np.asarray(dim) - 2)) / dim


def predicted_aligned(n_rows: int, dim) -> np.ndarray:
    """Mean over d of the sum of |inner products| of one token with all others. Exact."""
    dof = np.asarray(dim) - 2
    length = np.sqrt(2) * np.exp(gammaln((dof + 1) / 2) - gammaln(dof / 2))
    length = np.where(dof > 1e6, np.sqrt(dof), length)  # gammaln's difference cancels there; relative error 1/(4 dof)
    return (n_rows - 1) * np.sqrt(2 / np.pi) * length / dim


def wrong_sign_probability(n_rows: int, dim) -> np.ndarray:
    """Probability that after step 1 a noise token's value has the sign of the wrong label (prop-cross-talk). Exact.

    Given the token, its cross-talk is Gaussian; over its chi-distributed length that is a tail of Student's t.
    """
    dof = np.asarray(dim) - 2
    return student.sf(np.sqrt(dof / (n_rows - 1)), dof)


# ---- concentration of the Gram matrix --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Concentration:
    """Inner products of noise tokens over the dimension; everything (n_seeds, len(dims)) and relative to d.

    largest: largest single |inner product|; cross_talk: root mean square over tokens of the sum with training labels
    as signs; aligned: mean over tokens of the sum of absolute values; wrong_sign: share of noise tokens whose value
    after step 1 has the sign of the wrong label.
    """

    dims: np.ndarray
    n_rows: int
    largest: np.ndarray
    cross_talk: np.ndarray
    aligned: np.ndarray
    wrong_sign: np.ndarray


def concentration(params: Params) -> Concentration:
    columns = []
    for dim in DIMS.tolist():
        training = params.draw(dim=dim)
        _, step_size = from_natural_units(0.0, NATURAL_B, params.n_train, dim)
        state = next(reduced.gradient_descent(training, params.signal_norm, float(step_size), 1))
        values = reduced.outputs(training, state, params.signal_norm).values[:, 1:]
        own_label = (values * training.labels[:, None, :]).reshape(params.n_seeds, -1)
        relative = own_label / (NATURAL_B / (2 * params.n_tokens))
        own = np.diagonal(training.gram, axis1=-2, axis2=-1) / dim
        columns.append(
            (
                largest_inner_product(training.gram) / dim,
                np.sqrt(np.mean((relative - own) ** 2, axis=-1)),
                np.abs(_without_diagonal(training.gram)).sum(axis=-1).mean(axis=-1) / dim,
                np.mean(relative < 0, axis=-1),
            )
        )
    return Concentration(DIMS, params.n_rows, *np.moveaxis(np.array(columns), 0, -1))


def relative_maximum(params: Params) -> np.ndarray:
    """Largest inner product over its prediction, a mean over `MAXIMA_PER_SEED` Gram matrices; (n_seeds,)."""
    ratios = []
    for run in range(params.n_seeds):
        rng = params.generator(run, part="largest inner product")
        grams = (noise_gram(params.n_rows, params.dim - 2, rng) for _ in range(MAXIMA_PER_SEED))
        ratios.append(np.mean([largest_inner_product(gram) for gram in grams]) / params.dim)
    return np.array(ratios) / predicted_largest(params.n_rows, params.dim)


@dataclass(frozen=True)
class GramImage:
    """|G| / d of the first noise tokens of one draw, (at most 40, at most 40)."""

    dim: int
    entries: np.ndarray


def gram_images(params: Params) -> list[GramImage]:
    images = []
    for dim in sorted({*IMAGE_DIMS, params.dim}):
        rng = params.generator(0, dim=dim, part="image")
        images.append(GramImage(dim, np.abs(noise_gram(min(params.n_rows, 40), dim - 2, rng)) / dim))
    return images


# ---- sampling without tokens -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplerCheck:
    """log det of Gram matrices by sampler, (n_seeds, draws), and Kolmogorov-Smirnov distances from drawn tokens.

    The distances, (n_seeds,), are the largest over four statistics: log det, largest eigenvalue, largest inner product
    and last diagonal entry. `wrong` has one degree of freedom too few in every row.
    """

    drawn: np.ndarray
    bartlett: np.ndarray
    wrong: np.ndarray
    bartlett_distance: np.ndarray
    wrong_distance: np.ndarray


def _off_by_one(n_rows: int, dof: int, rng: np.random.Generator) -> np.ndarray:
    rows = noise_rows(n_rows, dof, rng)
    rows[np.diag_indices(n_rows)] = np.sqrt(rng.chisquare(dof - 1 - np.arange(n_rows)))
    return rows


def _statistics(rows: np.ndarray) -> np.ndarray:
    """(4, draws) of rows (draws, m, any)."""
    gram = rows @ rows.swapaxes(-1, -2)
    eigenvalues = np.linalg.eigvalsh(gram)
    return np.stack(
        [np.log(eigenvalues).sum(axis=-1), eigenvalues[:, -1], largest_inner_product(gram), gram[:, -1, -1]]
    )


def sampler_check(params: Params, n_draws: int = SAMPLER_DRAWS) -> SamplerCheck:
    """`noise_rows` against drawn tokens and against a sampler that is off by one, at a small fixed size."""
    size = (SAMPLER_ROWS, SAMPLER_DOF)
    samples = []
    for run in range(params.n_seeds):
        rng = params.generator(run, part="sampler")
        rows = (
            rng.standard_normal((n_draws, *size)),
            np.stack([noise_rows(*size, rng) for _ in range(n_draws)]),
            np.stack([_off_by_one(*size, rng) for _ in range(n_draws)]),
        )
        samples.append([_statistics(x) for x in rows])
    samples = np.array(samples)
    distances = [
        np.array([max(ks_2samp(*pair).statistic for pair in zip(run[0], run[k], strict=True)) for run in samples])
        for k in (1, 2)
    ]
    return SamplerCheck(*np.moveaxis(samples[:, :, 0], 1, 0), *distances)


def gram_seconds(n_rows: int, dims: list[int], repeats: int = 5) -> list[float]:
    """Least time to sample one Gram matrix at each dimension: provenance, not a metric."""
    rng, seconds = np.random.default_rng(0), []
    for dim in dims:
        best = np.inf
        for _ in range(repeats):
            start = time.perf_counter()
            noise_gram(n_rows, dim - 2, rng)
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    return seconds


# ---- label noise and positions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flips:
    """Numbers of flipped labels. counts: (n_seeds, draws) at the point; none: (n_seeds, len(sizes)), share of draws
    without a flip at each number of training samples."""

    counts: np.ndarray
    sizes: np.ndarray
    none: np.ndarray


def flips(params: Params) -> Flips:
    sizes = np.unique([*FLIP_SIZES, params.n_train])

    def counts(run: int, n: int) -> np.ndarray:
        rng = params.generator(run, n_train=n, part="flips")
        clean, labels = draw_labels(LABEL_DRAWS * n, params.label_noise, rng)
        return (clean != labels).reshape(LABEL_DRAWS, n).sum(axis=1)

    at_sizes = [[counts(run, int(n)) for n in sizes] for run in range(params.n_seeds)]
    place = int(np.flatnonzero(sizes == params.n_train)[0])
    return Flips(
        counts=np.array([run[place] for run in at_sizes]),
        sizes=sizes,
        none=np.array([[np.mean(at == 0) for at in run] for run in at_sizes]),
    )


@dataclass(frozen=True)
class PositionCheck:
    """Change of the outputs on fresh samples when the training samples' tokens are shuffled, relative; (n_seeds,)."""

    attention: np.ndarray
    linear: np.ndarray


def position_check(params: Params, n: int = 20, dim: int = 100, n_tokens: int = 4, n_steps: int = 20) -> PositionCheck:
    """Single-head attention, and logistic regression on concatenated tokens, trained twice on the same samples
    (prop-permutation).
    """
    rho, step_size = (float(x) for x in from_natural_units(2.0, NATURAL_B, n, dim))
    changes = []
    for run in range(params.n_seeds):
        rng = params.generator(run, n_train=n, dim=dim, n_tokens=n_tokens, part="positions")
        train, fresh = (draw_single_head(n, dim, n_tokens, rho, params.label_noise, rng) for _ in range(2))
        shuffled = rng.permuted(np.tile(np.arange(n_tokens), (n, 1)), axis=1)[..., None]
        versions = (train.tokens, np.take_along_axis(train.tokens, shuffled, axis=1))
        changes.append(
            [
                _relative_change(*(model(x, train.labels, fresh.tokens, step_size, n_steps) for x in versions))
                for model in (_attention_outputs, _linear_outputs)
            ]
        )
    return PositionCheck(*np.array(changes).T)


def _relative_change(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(np.mean((second - first) ** 2) / np.mean(first**2)))


def _attention_outputs(tokens, labels, fresh, step_size: float, n_steps: int) -> np.ndarray:
    import torch

    from benign_attention import explicit

    model = explicit.SingleHeadAttention(tokens.shape[-1])
    *_, model = explicit.gradient_descent(model, torch.tensor(tokens), torch.tensor(labels), step_size, n_steps)
    with torch.no_grad():
        return model(torch.tensor(fresh)).numpy()


def _linear_outputs(tokens, labels, fresh, step_size: float, n_steps: int) -> np.ndarray:
    x = tokens.reshape(len(tokens), -1)
    weights = np.zeros(x.shape[1])
    for _ in range(n_steps):
        weights += step_size / len(x) * ((labels / (1 + np.exp(labels * (x @ weights)))) @ x)
    return fresh.reshape(len(fresh), -1) @ weights


# ---- natural units ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectory:
    """Mean attention on the signal over clean and over noisy training samples, (n_seeds, N_STEPS); nan without such."""

    name: str
    clean: np.ndarray
    noisy: np.ndarray


@dataclass(frozen=True)
class NaturalUnits:
    """Training at one (c, b, label noise, T) and different sizes.

    same: d/n as at the point or larger; low: d = 2 n; limit: d/n to infinity. Over `d_over_n` at the point's n, each
    (n_seeds, len(d_over_n)): of_means, largest distance over steps from the limit of the two means; of_samples, largest
    root mean square distance over steps of single samples' attention.
    """

    steps: np.ndarray
    same: list[Trajectory]
    low: Trajectory
    limit: Trajectory
    d_over_n: np.ndarray
    of_means: np.ndarray
    of_samples: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """Largest difference in mean attention between any two of `same`, over steps, clean and noisy; (n_seeds,)."""
        return np.max([_gap(a, b) for k, a in enumerate(self.same) for b in self.same[:k]], axis=0)

    @property
    def low_gap(self) -> np.ndarray:
        """The same between d = 2 n and the limit."""
        return _gap(self.low, self.limit)


def _gap(a: Trajectory, b: Trajectory) -> np.ndarray:
    differences = np.concatenate([np.abs(a.clean - b.clean), np.abs(a.noisy - b.noisy)], axis=-1)
    return np.nan_to_num(differences).max(axis=-1)


def natural_units(params: Params) -> NaturalUnits:
    """Train at the point's c and at b = `NATURAL_B` with different n and d (prop-natural-units).

    All sizes of one seed have the same labels (twice over where n is doubled), so that the shares of classes and of
    flips agree and the noise tokens alone differ.
    """
    n, d = params.n_train, params.dim
    labels = [draw_labels(n, params.label_noise, params.generator(r, part="labels")) for r in range(params.n_seeds)]
    clean, given = (np.stack(x) for x in zip(*labels, strict=True))

    def trajectory(name: str, attention: np.ndarray) -> Trajectory:
        flipped = np.tile(clean != given, attention.shape[-1] // n)[:, None, :]
        return Trajectory(name, _mean_over(attention, ~flipped), _mean_over(attention, flipped))

    in_limit = _limit_attention(params, clean, given)
    limit = trajectory("d/n → ∞", in_limit)
    by_ratio = [_attention(params, clean, given, max(round(ratio * n), 3)) for ratio in D_OVER_N]
    return NaturalUnits(
        np.arange(1, N_STEPS + 1),
        same=[
            trajectory("n, d", _attention(params, clean, given, d)),
            trajectory("n, 100 d", _attention(params, clean, given, 100 * d)),
            trajectory("2n, 2d", _attention(params, np.tile(clean, 2), np.tile(given, 2), 2 * d)),
        ],
        low=trajectory("n, d = 2n", _attention(params, clean, given, max(2 * n, 3))),
        limit=limit,
        d_over_n=D_OVER_N,
        of_means=np.stack([_gap(trajectory("", attention), limit) for attention in by_ratio], axis=1),
        of_samples=np.stack(
            [np.sqrt(np.mean((attention - in_limit) ** 2, axis=-1)).max(axis=-1) for attention in by_ratio], axis=1
        ),
    )


def _attention(params: Params, clean: np.ndarray, given: np.ndarray, dim: int) -> np.ndarray:
    """Attention on the signal of every training sample after every step, (n_seeds, N_STEPS, n)."""
    n = clean.shape[-1]
    rho, step_size = (float(x) for x in from_natural_units(params.setting.natural_c, NATURAL_B, n, dim))
    rngs = (params.generator(run, n_train=n, dim=dim, part="natural units") for run in range(params.n_seeds))
    grams = np.stack([noise_gram(n * (params.n_tokens - 1), dim - 2, rng) for rng in rngs])
    training = reduced.TrainingSet(grams, clean, given).on(params.device)
    on_signal = [
        population.as_numpy(reduced.outputs(training, state, rho).attention)[:, 0]
        for state in reduced.gradient_descent(training, rho, step_size, N_STEPS)
    ]
    return np.stack(on_signal, axis=1)


def _limit_attention(params: Params, clean: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The same in the orthogonal limit, with each seed's own classes and flips."""
    classes, flipped = np.stack([clean > 0, clean < 0], axis=1), clean != given
    in_class, noisy = classes.sum(axis=-1), (classes & flipped[:, None, :]).sum(axis=-1)
    point = theory.LimitPoint(
        params.setting.natural_c,
        NATURAL_B,
        noisy / np.maximum(in_class, 1),
        params.n_tokens,
        in_class / params.n_train,
    )
    rows = np.arange(params.n_seeds)[:, None]
    own_class = (clean < 0).astype(int)
    by_step = [
        np.where(flipped, state.noisy_attention[rows, own_class], state.clean_attention[rows, own_class])
        for state in theory.limit_gradient_descent(point, N_STEPS)
    ]
    return np.stack(by_step, axis=1)


def _mean_over(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted mean over the last axis, nan where all weights are zero."""
    weights = np.broadcast_to(weights, values.shape)
    total = weights.sum(axis=-1)
    return np.where(total > 0, (values * weights).sum(axis=-1) / np.maximum(total, 1), np.nan)


# ---- what tokens look like -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenCloud:
    """Tokens of one kind. plane: (N, 2), components along mu_1 and mu_2; rest: (N,), length of all other components."""

    name: str
    plane: np.ndarray
    rest: np.ndarray


def token_clouds(params: Params) -> tuple[list[TokenCloud], list[TokenCloud]]:
    """Tokens of one training set of either model: this point, and the token-selection model at its defaults."""
    training = params.replace(n_seeds=1).draw()
    positive = np.stack([training.clean_labels[0] > 0, training.clean_labels[0] < 0], axis=-1)
    lengths = np.sqrt(np.diagonal(training.gram[0]))
    single_head = [
        TokenCloud("signal", params.signal_norm * positive, np.zeros(len(positive))),
        TokenCloud("noise", np.zeros((len(lengths), 2)), lengths),
    ]
    tokens = draw_token_selection(TokenSelectionParams(), params.generator(0, part="token selection")).tokens
    kinds = {
        "relevant": slice(0, 1),
        "weakly relevant": slice(1, 2),
        "confusing": slice(2, 3),
        "irrelevant": slice(3, None),
    }
    token_selection = [
        TokenCloud(name, chosen[..., :2].reshape(-1, 2), np.linalg.norm(chosen[..., 2:], axis=-1).ravel())
        for name, chosen in ((name, tokens[:, kind]) for name, kind in kinds.items())
    ]
    return single_head, token_selection


# ---- all of it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exploration:
    """Arrays behind the chapter's figures, and the metrics behind its claims."""

    clouds: tuple[list[TokenCloud], list[TokenCloud]]
    images: list[GramImage]
    concentration: Concentration
    sampler: SamplerCheck
    flips: Flips
    positions: PositionCheck
    natural: NaturalUnits
    metrics: dict[str, Metric]


def explore(params: Params) -> Exploration:
    """Concentration over d, the sampler against tokens, flips, positions and natural units.

    Metrics: gram_max_ratio, largest inner product over its prediction (mean over 20 Gram matrices a seed), and
    gram_max_deviation, its distance from 1; sampler_distance, wrong_sampler_distance; position_change_attention,
    position_change_linear; natural_units_gap, natural_units_gap_low_dim; no_flip_share.
    """
    maximum, sampler, positions, natural = (
        relative_maximum(params),
        sampler_check(params),
        position_check(params),
        natural_units(params),
    )
    flipped = flips(params)
    metrics = {
        "gram_max_ratio": seed_metric(maximum, (0.0, np.inf)),
        "gram_max_deviation": seed_metric(np.abs(maximum - 1), (0.0, np.inf)),
        "sampler_distance": fraction_metric(sampler.bartlett_distance),
        "wrong_sampler_distance": fraction_metric(sampler.wrong_distance),
        "position_change_attention": seed_metric(positions.attention, (0.0, np.inf)),
        "position_change_linear": seed_metric(positions.linear, (0.0, np.inf)),
        "natural_units_gap": fraction_metric(natural.gap),
        "natural_units_gap_low_dim": fraction_metric(natural.low_gap),
        "no_flip_share": fraction_metric(np.mean(flipped.counts == 0, axis=1)),
    }
    return Exploration(
        clouds=token_clouds(params),
        images=gram_images(params),
        concentration=concentration(params),
        sampler=sampler,
        flips=flipped,
        positions=positions,
        natural=natural,
        metrics=metrics,
    )
