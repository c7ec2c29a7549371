"""Other ways to parameterise attention, on the data of single-head attention: does the verdict change?

The section has its own point: n = 40, d = n^2, T = 2. Runs of one seed share noise tokens and labels, whatever the
signal. Time is in natural units, tau = t d / n, in which a head follows its own noise token at a rate of order one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from benign_attention import flow, parameterisations
from benign_attention.data import from_natural_units
from benign_attention.parallel import map_processes
from benign_attention.parameterisations import (
    Model,
    Prompt,
    Result,
    TokenSet,
    evaluate,
    gaussian_weights,
    prompt_model,
    released,
    self_attention_model,
)
from benign_attention.parameters import ChapterParams
from benign_attention.records import Metric, fraction_metric, seed_metric
from benign_attention.selection_svm import token_selection_svm

N_TRAIN, DIM, N_TOKENS, LABEL_NOISE = 40, 1600, 2, 0.1
PLACES = {"below": 0.7, "near": 1.6, "above": 4.0}  # c; the small-step threshold of p and v is 1.64 at this label noise
RELEASE, END = 100.0, 1e6  # natural times: what was frozen is released, training ends
INNER, SMALL, SMALLER = 16, 0.1, 0.01  # inner dimension; initial sizes of keys and queries
N_FRESH = 4000
PROMPT_ONLY, ALL, HEAD_ONLY = (1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (0.0, 0.0, 1.0)

VARIANTS = {
    "p": "$p$ and $v$ (the paper's model)",
    "W_slow": r"$W$, query fixed, $\Vert q\Vert^2=0.1$",
    "W_fast": r"$W$, query fixed, $\Vert q\Vert^2=10$",
    "W_q": r"$W$ and $q$, $W_0=0$, $\Vert q_0\Vert=1$",
    "W0_q": "$W$ and $q$, $W_0$ random, $q_0=0$",
    "K_Q": "$W_K$, $W_Q$, small start",
    "K_Q_small": "$W_K$, $W_Q$, ten times smaller",
    "self_attention": "query, key and value matrices",
    "head_fixed": "$p$, head fixed on the signals",
    "random_head": "$p$, head fixed at random",
    "head_late": "$p$ first, then $p$ and $v$",
    "random_head_late": "the same, random first head",
    "attention_late": "$v$ first, then $p$ and $v$",
    "p_without_noise": r"$p$ and $v$, $\eta=0$",
    "self_attention_without_noise": r"query, key, value, $\eta=0$",
}
ALL_TRAINED = ("W_slow", "W_fast", "W_q", "W0_q", "K_Q", "K_Q_small", "self_attention")


def sample(params: ChapterParams, run: int, c: float, label_noise: float = LABEL_NOISE) -> TokenSet:
    """The training set of one run at signal strength `c`; tokens and labels do not depend on `c`."""
    rng = params.generator(run, part="parameterisations", label_noise=label_noise)
    rho = float(from_natural_units(c, 1.0, N_TRAIN, DIM)[0])
    return parameterisations.draw(N_TRAIN, DIM, N_TOKENS, rho, label_noise, rng)


def aligned_head(training: TokenSet) -> tuple[np.ndarray, np.ndarray]:
    """v with v.mu_1 = 1, v.mu_2 = -1 and no other part: (mu_1 - mu_2) / |mu|^2."""
    inside = np.zeros(training.rank)
    inside[:2] = 1 / training.signal_norm, -1 / training.signal_norm
    return inside, np.zeros(0)


def random_head(training: TokenSet, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """v with entries N(0, 1/d): values of noise tokens are of order one."""
    inside, outside = gaussian_weights(training, 1, DIM**-0.5, rng)
    return inside[:, 0], outside[:, 0]


def build(variant: str, training: TokenSet, rng: np.random.Generator) -> tuple[Model, tuple | None]:
    """The model of a variant, and the rates from time `RELEASE` on where they change."""
    if variant.startswith("self_attention"):
        return self_attention_model(training, INNER, SMALL * DIM**-0.5, rng), None
    late = ALL if variant.endswith("late") else None
    if variant in ("p", "p_without_noise"):
        return prompt_model(training), None
    if variant in ("W_slow", "W_fast"):
        return prompt_model(training, u=np.sqrt({"W_slow": 0.1, "W_fast": 10.0}[variant])), None
    if variant == "W_q":
        return prompt_model(training, rates=(1.0, 1.0, 1.0)), None
    if variant == "W0_q":
        start = gaussian_weights(training, DIM, (3 * DIM) ** -0.5, rng)
        return prompt_model(training, A=start, u=np.zeros(start[0].shape[1]), rates=(1.0, 1.0, 1.0)), None
    if variant in ("K_Q", "K_Q_small"):
        size = SMALL if variant == "K_Q" else SMALLER
        start = gaussian_weights(training, INNER, size * DIM**-0.5, rng)
        return prompt_model(training, A=start, u=size * rng.standard_normal(INNER), rates=(1.0, DIM, 1.0)), None
    if variant == "attention_late":
        return prompt_model(training, rates=HEAD_ONLY), late
    head = random_head(training, rng) if variant.startswith("random") else aligned_head(training)
    return prompt_model(training, v=head, rates=PROMPT_ONLY), late


@dataclass(frozen=True)
class _Job:
    params: ChapterParams
    variant: str
    run: int
    c: float
    label_noise: float = LABEL_NOISE


def _run(job: _Job) -> tuple[Result, Result]:
    """What the model does at times `RELEASE` and `END` of gradient flow."""
    noise = 0.0 if job.variant.endswith("without_noise") else job.label_noise
    training = sample(job.params, job.run, job.c, noise)
    rng = job.params.generator(job.run, part="weights", variant=job.variant, c=job.c, label_noise=noise)
    model, then = build(job.variant, training, rng)
    release, end = (tau * N_TRAIN / DIM for tau in (RELEASE, END))
    with flow.at_point(c=job.c, label_noise=noise, run=job.run):
        if then is None:
            early, late = parameterisations.train(model, training, [release, end])
        else:
            (early,) = parameterisations.train(model, training, [release])
            assert isinstance(model, Prompt)
            model = released(model, early, then)
            (late,) = parameterisations.train(model, training, [end - release])
    return tuple(evaluate(model, training, weights, N_FRESH, rng) for weights in (early, late))


@dataclass(frozen=True)
class Table:
    """Variants at three signal strengths; results[variant][place] : one pair per seed, at times RELEASE and END."""

    places: dict[str, float]
    results: dict[str, dict[str, list[tuple[Result, Result]]]]

    def values(self, variant: str, place: str, name: str, late: bool = True) -> np.ndarray:
        """A field of `Result` over seeds, (n_seeds,)."""
        return np.array([getattr(pair[late], name) for pair in self.results[variant][place]])

    def verdicts(self, variant: str, place: str) -> list[str]:
        return [pair[1].verdict for pair in self.results[variant][place]]

    def verdict(self, variant: str, place: str) -> str:
        """The word of most seeds with its share, as in `benign 4/5`; the word alone where all agree."""
        words = self.verdicts(variant, place)
        word, count = Counter(words).most_common(1)[0]
        return word if count == len(words) else f"{word} {count}/{len(words)}"

    def kept(self, variants, places, reference: str = "p") -> np.ndarray:
        """Share of (variant, place) with the verdict that the reference has on the same data, (n_seeds,)."""
        same = [
            np.array(self.verdicts(v, place)) == np.array(self.verdicts(reference, place))
            for v in variants
            for place in places
        ]
        return np.mean(same, axis=0)


def table(params: ChapterParams) -> Table:
    cells = [(v, place, run) for v in VARIANTS for place in PLACES for run in range(params.n_seeds)]
    found = map_processes(_run, [_Job(params, v, run, PLACES[place]) for v, place, run in cells])
    results = {v: {place: [] for place in PLACES} for v in VARIANTS}
    for (v, place, _), pair in zip(cells, found, strict=True):
        results[v][place].append(pair)
    return Table(PLACES, results)


HIGH_NOISE = 0.3


def late_attention(params: ChapterParams) -> dict[str, list[Result]]:
    """`p` and `attention_late` at label noise .3 and c = 4, at the end; one result per seed."""
    names = ("p", "attention_late")
    jobs = [_Job(params, v, run, PLACES["above"], HIGH_NOISE) for v in names for run in range(params.n_seeds)]
    found = [pair[1] for pair in map_processes(_run, jobs)]
    return {"p": found[: params.n_seeds], "attention_late": found[params.n_seeds :]}


# ---- W with a fixed query is p --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equivalence:
    """Largest deviation of an output from that of p and v, relative to the largest output, per seed, (n_seeds,).

    fixed_query: W alone, its step divided by |q|^2; trained_query: q trained as well.
    """

    fixed_query: np.ndarray
    trained_query: np.ndarray


def equivalence(params: ChapterParams, width: int = 30, natural_step: float = 0.5, n_steps: int = 200) -> Equivalence:
    """Gradient descent of p and v against W and v, W with `width` columns, q a Gaussian vector (prop-w-is-p)."""
    rows = []
    for run in range(params.n_seeds):
        training = sample(params, run, 2.0)
        q = params.generator(run, part="query").standard_normal(width)
        step = natural_step * N_TRAIN / DIM
        rate = 1.0 / (q @ q)
        models = [
            prompt_model(training),
            prompt_model(training, u=q, rates=(rate, 0.0, 1.0)),
            prompt_model(training, u=q, rates=(rate, rate, 1.0)),
        ]
        paths = [parameterisations.gradient_descent(model, training, step, n_steps) for model in models]
        f = np.array(
            [
                [m.outputs(training.tokens, w).f for m, w in zip(models, weights, strict=True)]
                for weights in zip(*paths, strict=True)
            ]
        )
        rows.append(np.abs(f[:, 1:] - f[:, :1]).max(axis=(0, 2)) / np.abs(f[:, 0]).max())
    return Equivalence(*np.array(rows).T)


# ---- head fixed: where p points (Tarzanagh et al. 2023) -------------------------------------------------------------


HEADS = ("aligned", "random")
DIRECTION_STEPS = 1000


@dataclass(frozen=True)
class Direction:
    """p along gradient descent with a fixed head; arrays are (n_seeds, steps) and per head.

    cosine_*: with the token-selection SVM of the optimal tokens; length_*: |p| times the SVM's margin, the lead in
    logits that the SVM's own direction would have at this length. wrong_cosine : (n_seeds,), of the last normalised
    step with the SVM that selects the signal in every sample.
    """

    steps: np.ndarray
    cosine_plain: dict[str, np.ndarray]
    cosine_normalised: dict[str, np.ndarray]
    length_plain: dict[str, np.ndarray]
    length_normalised: dict[str, np.ndarray]
    wrong_cosine: dict[str, np.ndarray]


def _direction(job: tuple[ChapterParams, str, int]) -> tuple[np.ndarray, float]:
    params, name, run = job
    training = sample(params, run, 2.0)
    rng = params.generator(run, part="head")
    head = (aligned_head(training) if name == "aligned" else random_head(training, rng))[0]
    best = parameterisations.optimal_tokens(training, head)
    svm, wrong = (token_selection_svm(training.tokens, s) for s in (best, np.zeros_like(best)))
    model = prompt_model(training, v=(head, np.zeros(0)), rates=PROMPT_ONLY)
    unit = (N_TRAIN / DIM) ** 0.5
    plain = parameterisations.gradient_descent(model, training, 10.0 * N_TRAIN / DIM, DIRECTION_STEPS)
    normalised = parameterisations.normalised_gradient_descent(training, head, 0.1 * unit, DIRECTION_STEPS)
    wanted = set(direction_steps())
    rows = []
    for step, (weights, p) in enumerate(zip(plain, normalised, strict=True), 1):
        if step in wanted:
            both = (weights["A"][:, 0], p)
            rows.append([cosine(x, svm.direction) for x in both] + [np.linalg.norm(x) * svm.margin for x in both])
    return np.array(rows).T, cosine(p, wrong.direction)


def direction_steps() -> np.ndarray:
    return np.unique(np.round(np.geomspace(1, DIRECTION_STEPS, 40)).astype(int))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def direction(params: ChapterParams) -> Direction:
    jobs = [(params, name, run) for name in HEADS for run in range(params.n_seeds)]
    curves, wrong = zip(*map_processes(_direction, jobs), strict=True)
    curves = np.array(curves).reshape(len(HEADS), params.n_seeds, 4, -1)
    wrong = np.array(wrong).reshape(len(HEADS), params.n_seeds)
    by_head = [dict(zip(HEADS, curves[:, :, k], strict=True)) for k in range(4)]
    return Direction(direction_steps(), *by_head, dict(zip(HEADS, wrong, strict=True)))


# ---- all of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exploration:
    """What the section shows, and the metrics of its claims."""

    table: Table
    late_attention: dict[str, list[Result]]
    equivalence: Equivalence
    direction: Direction
    metrics: dict[str, Metric]


def explore_parameterisations(params: ChapterParams) -> Exploration:
    """Everything; `params` gives seeds and generator, the point is the section's own."""
    parts = table(params), late_attention(params), equivalence(params), direction(params)
    return Exploration(*parts, _metrics(*parts))


def _metrics(found: Table, late: dict, same: Equivalence, pointing: Direction) -> dict[str, Metric]:
    metrics = {
        "par_w_fixed_query_log10_deviation": seed_metric(np.log10(np.maximum(same.fixed_query, 1e-17))),
        "par_w_and_query_log10_deviation": seed_metric(np.log10(same.trained_query)),
        "par_verdict_kept_away": fraction_metric(found.kept(ALL_TRAINED, ("below", "above"))),
        "par_verdict_kept_near": fraction_metric(found.kept(ALL_TRAINED, ("near",))),
        "par_flipped_fitted_head_fixed": fraction_metric(
            np.max([found.values("head_fixed", p, "flipped_accuracy") for p in PLACES], axis=0)
        ),
    }
    for variant in VARIANTS:
        for place in PLACES:
            metrics[f"par_test_accuracy_{variant}_{place}"] = fraction_metric(
                found.values(variant, place, "test_accuracy")
            )
    accuracy = {name: np.array([r.test_accuracy for r in results]) for name, results in late.items()}
    metrics["par_test_accuracy_p_high_noise"] = fraction_metric(accuracy["p"])
    metrics["par_late_attention_loss_high_noise"] = seed_metric(accuracy["p"] - accuracy["attention_late"], (-1, 1))
    for head in HEADS:
        metrics[f"par_svm_cosine_normalised_{head}"] = seed_metric(pointing.cosine_normalised[head][:, -1], (-1, 1))
        metrics[f"par_svm_cosine_plain_{head}"] = seed_metric(pointing.cosine_plain[head][:, -1], (-1, 1))
        metrics[f"par_wrong_svm_cosine_{head}"] = seed_metric(pointing.wrong_cosine[head], (-1, 1))
    return metrics
