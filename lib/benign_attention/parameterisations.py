r"""Other parameterisations of the attention logits, in m + 2 dimensions instead of d.

Single-head attention with one prompt,

    f(X) = v^T X^T softmax(X A u),      A : (d, h),  u : (h,),

covers the ways to write the prompt: p itself (h = 1, A_0 = 0, u = 1 fixed), a matrix W with a fixed query (u fixed),
W and the query both trained, and W_K W_Q^T q with A = W_K and u = W_Q^T q, which moves with |q|^2 times its own
gradient. Self-attention averages over all tokens as queries,

    f(X) = 1/T sum_s v^T X^T softmax(X W_K W_Q^T x_s).

Gradients move A, v, W_Q and W_K only inside the span of the m noise tokens and the two signals, so training is exact on
coordinates in that span (an isometric copy of the tokens, `TokenSet`). Random initial weights also have a part outside
it, which never changes and which only fresh tokens see: it is drawn beside them (`outside`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from scipy.special import expit, log_softmax, softmax

from benign_attention import flow
from benign_attention.data import draw_labels
from benign_attention.gram import noise_rows
from benign_attention.parameters import ParameterError

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class TokenSet:
    """Training samples in coordinates of their own span.

    tokens : (n, T, r), the signal token first, coordinates along mu_1, mu_2 first; clean_labels, labels : (n,), ±1;
    outside : dimensions d - r orthogonal to the span.
    """

    tokens: np.ndarray
    clean_labels: np.ndarray
    labels: np.ndarray
    signal_norm: float
    outside: int

    @property
    def noisy(self) -> np.ndarray:
        """(n,), true where the label was flipped."""
        return self.labels != self.clean_labels

    @property
    def rank(self) -> int:
        return self.tokens.shape[-1]


def draw(
    n_train: int, dim: int, n_tokens: int, signal_norm: float, label_noise: float, rng: np.random.Generator
) -> TokenSet:
    """A training set of the single-head data model (Magen et al. 2025, Section 2); the cost does not depend on `dim`.

    The same generator gives the same noise tokens and labels at every `signal_norm`.
    """
    clean, labels = draw_labels(n_train, label_noise, rng)
    rows = noise_rows(n_train * (n_tokens - 1), dim - 2, rng)
    tokens = np.zeros((n_train, n_tokens, rows.shape[1] + 2))
    tokens[:, 1:, 2:] = rows.reshape(n_train, n_tokens - 1, -1)
    tokens[np.arange(n_train), 0, (clean < 0).astype(int)] = signal_norm
    return TokenSet(tokens, clean, labels, signal_norm, dim - tokens.shape[-1])


def gaussian_weights(training: TokenSet, width: int, sd: float, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Entries N(0, sd^2) of a (d, width) matrix: its rows in the span, (r, w), and the part outside, (q, w).

    For width > r the columns are rotated so that w = r of them carry all that the span sees.
    """
    inside = sd * noise_rows(training.rank, width, rng)
    return inside, sd * noise_rows(inside.shape[1], training.outside, rng).T


@dataclass(frozen=True)
class Outputs:
    """The model on samples. attention : (n, queries, T); values : (n, T); f : (n,)."""

    attention: np.ndarray
    values: np.ndarray
    f: np.ndarray

    @property
    def on_signal(self) -> np.ndarray:
        """Attention mass on the signal token, mean over queries, (n,)."""
        return self.attention[..., 0].mean(axis=1)


class Model(Protocol):
    """How logits arise from weights; `start` are the trained weights in the span, `outside` what fresh tokens see."""

    start: Weights
    outside: Weights

    def outputs(self, tokens: np.ndarray, weights: Weights) -> Outputs: ...

    def velocity(self, training: TokenSet, weights: Weights) -> Weights: ...

    def token_features(self, weights: Weights) -> np.ndarray: ...

    def fresh_outputs(self, features: np.ndarray) -> Outputs: ...


def _outputs(logits: np.ndarray, values: np.ndarray) -> Outputs:
    """logits : (n, queries, T), values : (n, T)."""
    attention = softmax(logits, axis=-1)
    return Outputs(attention, values, (attention * values[:, None, :]).sum(axis=(1, 2)) / logits.shape[1])


def _gradients(labels: np.ndarray, out: Outputs) -> tuple[np.ndarray, np.ndarray]:
    """Minus the gradient of the mean logistic loss: in the logits, (n, queries, T), and in the values, (n, T).

    gamma_t - f is summed as sum_u s_u (gamma_t - gamma_u), which keeps its relative precision in saturation.
    """
    n, queries = out.attention.shape[:2]
    g = labels * expit(-labels * out.f) / (n * queries)
    differences = out.values[:, :, None] - out.values[:, None, :]
    centred = np.einsum("ntu,nqu->nqt", differences, out.attention)
    weighted = g[:, None, None] * out.attention
    return weighted * centred, weighted.sum(axis=1)


@dataclass(frozen=True)
class Prompt:
    """f(X) = v^T X^T softmax(X A u). Weights: A (r, h), u (h,), v (r,); outside: A (q, h), v (q,).

    rates: factors on the velocities of A, u and v; 0 keeps a weight fixed, |q|^2 is the rate of u = W_Q^T q.
    """

    start: Weights
    outside: Weights
    rates: tuple[float, float, float]

    def outputs(self, tokens: np.ndarray, weights: Weights) -> Outputs:
        prompt = weights["A"] @ weights["u"]
        return _outputs((tokens @ prompt)[:, None, :], tokens @ weights["v"])

    def velocity(self, training: TokenSet, weights: Weights) -> Weights:
        for_logits, for_values = _gradients(training.labels, self.outputs(training.tokens, weights))
        pull = np.einsum("nt,ntr->r", for_logits[:, 0], training.tokens)
        rate_A, rate_u, rate_v = self.rates
        return {
            "A": rate_A * np.outer(pull, weights["u"]),
            "u": rate_u * (pull @ weights["A"]),
            "v": rate_v * np.einsum("nt,ntr->r", for_values, training.tokens),
        }

    def token_features(self, weights: Weights) -> np.ndarray:
        """(rows, 2): a token's logit and value are its coordinates times these columns; rows outside come last."""
        prompt = np.concatenate([weights["A"], self.outside["A"]]) @ weights["u"]
        return np.stack([prompt, np.concatenate([weights["v"], self.outside["v"]])], axis=1)

    def fresh_outputs(self, features: np.ndarray) -> Outputs:
        return _outputs(features[:, None, :, 0], features[..., 1])


def prompt_model(
    training: TokenSet,
    A: tuple[np.ndarray, np.ndarray] | None = None,
    u: np.ndarray | float = 1.0,
    v: tuple[np.ndarray, np.ndarray] | None = None,
    rates: tuple[float, float, float] = (1.0, 0.0, 1.0),
) -> Prompt:
    """A `Prompt` from initial weights, each a pair (inside, outside); None is zero. The default trains p and v.

    With A zero and u fixed, A u is p up to the clock (prop-w-is-p).
    """
    u = np.atleast_1d(np.asarray(u, float))
    A = A or (np.zeros((training.rank, u.size)), np.zeros((0, u.size)))
    v = v or (np.zeros(training.rank), np.zeros(0))
    rows = max(len(A[1]), len(v[1]))
    pad = [np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]))]) for x in (A[1], v[1])]
    return Prompt({"A": A[0], "u": u, "v": v[0]}, {"A": pad[0], "v": pad[1]}, rates)


@dataclass(frozen=True)
class SelfAttention:
    """f(X) = 1/T sum_s v^T X^T softmax(X W_K W_Q^T x_s) (eq-self-attention).

    Weights: Q, K (r, h), v (r,); the same outside.
    The value matrix enters through v = W_V w_O with w_O fixed, |w_O| = 1: training W_V moves v as if it were trained
    itself (the setting of Jiang et al. 2024, with logits not divided by sqrt(h)).
    """

    start: Weights
    outside: Weights

    def outputs(self, tokens: np.ndarray, weights: Weights) -> Outputs:
        return self._from(tokens @ weights["Q"], tokens @ weights["K"], tokens @ weights["v"])

    @staticmethod
    def _from(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Outputs:
        return _outputs(queries @ keys.swapaxes(1, 2), values)

    def velocity(self, training: TokenSet, weights: Weights) -> Weights:
        tokens = training.tokens
        for_logits, for_values = _gradients(training.labels, self.outputs(tokens, weights))
        flat = tokens.reshape(-1, training.rank)
        product = flat.T @ (for_logits @ tokens).reshape(-1, training.rank)
        return {
            "Q": product @ weights["K"],
            "K": product.T @ weights["Q"],
            "v": np.einsum("nt,ntr->r", for_values, tokens),
        }

    def token_features(self, weights: Weights) -> np.ndarray:
        """(rows, 2 h + 1): query, key and value of a token."""
        whole = [np.concatenate([weights[k], self.outside[k]]) for k in ("Q", "K", "v")]
        return np.column_stack(whole)

    def fresh_outputs(self, features: np.ndarray) -> Outputs:
        h = (features.shape[-1] - 1) // 2
        return self._from(features[..., :h], features[..., h : 2 * h], features[..., -1])


def self_attention_model(training: TokenSet, width: int, sd: float, rng: np.random.Generator) -> SelfAttention:
    """Query, key and value weights with entries N(0, sd^2); `width` columns of W_Q and W_K."""
    names = {"Q": width, "K": width, "v": 1}
    total = sum(names.values())
    inside = sd * rng.standard_normal((training.rank, total))
    outside = sd * noise_rows(total, training.outside, rng).T
    cuts = np.cumsum(list(names.values()))[:-1]
    parts = [dict(zip(names, np.split(x, cuts, axis=1), strict=True)) for x in (inside, outside)]
    for part in parts:
        part["v"] = part["v"][:, 0]
    return SelfAttention(*parts)


# ---- training -------------------------------------------------------------------------------------------------------


def gradient_descent(model: Model, training: TokenSet, step_size: float, n_steps: int) -> Iterator[Weights]:
    """Yields the weights after steps 1, ..., n_steps on the mean logistic loss."""
    weights = model.start
    for _ in range(n_steps):
        ahead = model.velocity(training, weights)
        weights = {name: weights[name] + step_size * ahead[name] for name in weights}
        yield weights


def system(model: Model, training: TokenSet) -> flow.System:
    """The gradient flow of a model; the observables are its attention (all queries) and values."""
    shapes = {name: w.shape for name, w in model.start.items()}
    cuts = np.cumsum([w.size for w in model.start.values()])[:-1]

    def unpack(y: np.ndarray) -> Weights:
        return {n: x.reshape(s) for (n, s), x in zip(shapes.items(), np.split(y, cuts), strict=True)}

    def pack(weights: Weights) -> np.ndarray:
        return np.concatenate([weights[name].ravel() for name in shapes])

    def observe(y: np.ndarray) -> np.ndarray:
        out = model.outputs(training.tokens, unpack(y))
        return np.concatenate([out.attention.ravel(), out.values.ravel()])

    of_token = 1.0 / np.linalg.norm(training.tokens, axis=-1).max()
    scale = np.concatenate([np.full(w.size, 1.0 if n == "u" else of_token) for n, w in model.start.items()])
    return flow.System(pack(model.start), lambda y: pack(model.velocity(training, unpack(y))), observe, scale, unpack)


def train(model: Model, training: TokenSet, times, tolerance: float = 1e-3) -> list[Weights]:
    """The weights at each of `times` (flow time, increasing) of gradient flow; raises `flow.FlowError`."""
    path = flow.gradient_flow(system(model, training), times, tolerance, rtol=1e-6, atol=1e-9)
    return [point.state for point in path]


def released(model: Prompt, weights: Weights, rates: tuple[float, float, float]) -> Prompt:
    """The same model going on from `weights` with other rates: what was frozen is trained from now on."""
    return replace(model, start=weights, rates=rates)


# ---- what a trained model does --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """train_accuracy: given labels; flipped_accuracy: flipped samples alone (nan if none); test_accuracy: clean labels;
    clean_attention, noisy_attention: mean mass on the signal token (nan where there is no such sample)."""

    train_accuracy: float
    flipped_accuracy: float
    test_accuracy: float
    clean_attention: float
    noisy_attention: float

    @property
    def verdict(self) -> str:
        """benign: all labels fitted, clean test accuracy above .95; harmful: all fitted, below .75; not overfitting:
        some label not fitted, test above .95; else mixed."""
        if self.test_accuracy > 0.95:
            return "benign" if self.train_accuracy == 1 else "not overfitting"
        return "harmful" if self.train_accuracy == 1 and self.test_accuracy < 0.75 else "mixed"


def evaluate(model: Model, training: TokenSet, weights: Weights, n_fresh: int, rng: np.random.Generator) -> Result:
    """Training quantities, and accuracy on `n_fresh` fresh samples (standard error at most 1/(2 sqrt(n_fresh)))."""
    out = model.outputs(training.tokens, weights)
    fitted = out.f * training.labels > 0
    labels, features = fresh_features(model, training, weights, n_fresh, rng)
    right = np.sign(model.fresh_outputs(features).f) * labels
    noisy = training.noisy

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if values.size else float("nan")

    return Result(
        mean(fitted),
        mean(fitted[noisy]),
        mean((1 + right) / 2),
        mean(out.on_signal[~noisy]),
        mean(out.on_signal[noisy]),
    )


def fresh_features(
    model: Model, training: TokenSet, weights: Weights, n_fresh: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Labels (N,) and token features (N, T, k) of fresh samples, signal token first, drawn from their exact law."""
    columns = model.token_features(weights)
    factor = np.linalg.qr(columns[2:], mode="r")
    labels = rng.choice([-1.0, 1.0], n_fresh)
    noise = rng.standard_normal((n_fresh, training.tokens.shape[1] - 1, len(factor))) @ factor
    signal = training.signal_norm * columns[(labels < 0).astype(int)]
    return labels, np.concatenate([signal[:, None, :], noise], axis=1)


# ---- the prompt alone, head fixed (Tarzanagh et al. 2023) -----------------------------------------------------------


def optimal_tokens(training: TokenSet, head: np.ndarray) -> np.ndarray:
    """Index of the token with the largest y v.x of each sample, (n,) (Tarzanagh et al. 2023)."""
    return (training.labels[:, None] * (training.tokens @ head)).argmax(axis=1)


def normalised_gradient_descent(
    training: TokenSet, head: np.ndarray, step_size: float, n_steps: int
) -> Iterator[np.ndarray]:
    """p after steps 1, ..., n_steps of p <- p - step_size grad / |grad| from zero, head fixed.

    The gradient falls below the smallest float; only its direction is needed, so its size is taken out in logarithms.
    """
    values = training.tokens @ head
    differences = values[:, :, None] - values[:, None, :]
    p = np.zeros(training.rank)
    for _ in range(n_steps):
        log_s = log_softmax(training.tokens @ p, axis=1)
        log_pairs = log_s[:, :, None] + log_s[:, None, :]
        informative = log_pairs[differences != 0]
        if informative.size == 0:
            raise ParameterError("head must give two tokens of a sample different values")
        g = training.labels * expit(-training.labels * (np.exp(log_s) * values).sum(axis=1))
        pairs = np.exp(np.minimum(log_pairs - informative.max(), 0.0)) * differences
        pull = np.einsum("n,ntu,ntr->r", g, pairs, training.tokens)
        p = p + step_size * pull / np.linalg.norm(pull)
        yield p
