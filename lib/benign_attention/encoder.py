r"""A one-layer transformer encoder on token-selection data, read at its class token and trained in all its weights.

The pre-norm block of the authors' driver for this experiment (Sakamoto and Sato 2025, appendix): a trained class token
x_0 = c stands before the T data tokens x_1 ... x_T; LN, LN', LN'' are layer norms with trained gain and shift:

    q = W_Q LN(c),    s = softmax_j(q . W_K LN(x_j) / sqrt(d)),    a = W_V sum_j s_j LN(x_j),          j = 0 ... T,
    r = a + c,    z = r + M_2 gelu(M_1 LN'(r) + m_1) + m_2,    f = w . LN''(z) + b.

Without skip connections r = a and z is the MLP alone; without MLP z = r; without layer norm every LN is the identity.

**Class token only.** One query is needed, the same for every sample, and it is applied to W_K^T q instead of keys;
values, being linear, are averaged before they are mapped. With LN(x) = g o x^ + h, x^ the normalised token, the gain g
goes to W_K^T q and to the average, and h shifts all logits alike, so data tokens are normalised once and a step
costs O(n T d + n d^2). Nothing is approximated: outputs and gradients are those of full attention over all tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from benign_attention.data import TokenSelectionData, TokenSelectionParams, draw_token_selection
from benign_attention.devices import resolve
from benign_attention.explicit import logistic_loss
from benign_attention.parallel import map_processes
from benign_attention.parameters import Dimension, ParameterError, Parameters
from benign_attention.selection import ROLES

Weights = dict[str, Tensor]
MAX_DIM = 20_000  # five matrices of 1.6 GB


class DivergenceError(ArithmeticError):
    """Gradient descent left the finite numbers; the message is one line."""


class Architecture(Parameters):
    """What the block consists of and what of it is trained; the defaults are those of the authors' driver."""

    layer_norm: bool = Field(True, description="layer norms before attention, before the MLP and before the read-out")
    mlp: bool = Field(True, description="two-layer GELU network after attention")
    skip: bool = Field(True, description="skip connections around attention and around the MLP")
    mlp_dim: Dimension = Field(2000, description="hidden units of the MLP")
    train_query_key: bool = Field(True, description="W_Q and W_K are trained; if not, only the class token is")


def variants(mlp_dim: int) -> dict[str, Architecture]:
    """The full block, the block without one of its parts at a time, and the full block that cannot learn to select."""
    full = Architecture(mlp_dim=mlp_dim)
    return {
        "full block": full,
        "without skip connections": full.replace(skip=False),
        "without MLP": full.replace(mlp=False),
        "without layer norm": full.replace(layer_norm=False),
        "query and key not trained": full.replace(train_query_key=False),
    }


def rescaled(params: TokenSelectionParams, step_size: float, dim: int) -> tuple[TokenSelectionParams, float]:
    """The point and step size at another `dim` with the same n SNR^2 = n |mu|^2 / d and the same step size times d.

    In the initialisation used here all gradients' squared norms grow like d, so step_size times dim is what a step
    does to the outputs. rho_w |mu| and d/n are *not* kept.
    """
    ratio = dim / params.dim
    return params.replace(dim=dim, signal_norm=params.signal_norm * ratio**0.5), step_size / ratio


def initial_weights(architecture: Architecture, dim: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Torch's defaults: matrices and biases uniform on +-1/sqrt(inputs), gains 1; class token standard normal. Float32.

    Architectures that share a part share its numbers, given equal generators and sizes.
    """

    def uniform(*shape: int, inputs: int) -> np.ndarray:
        return (2 * rng.random(shape, dtype=np.float32) - 1) / np.float32(inputs**0.5)

    weights = {
        "class_token": rng.standard_normal(dim, dtype=np.float32),
        **{name: uniform(dim, dim, inputs=dim) for name in ("query", "key", "value")},
        "readout": uniform(dim, inputs=dim),
        "readout_bias": uniform(1, inputs=dim),
    }
    norms = ["attention", "readout"]
    if architecture.mlp:
        hidden = architecture.mlp_dim
        norms.append("mlp")
        weights |= {
            "mlp_in": uniform(hidden, dim, inputs=dim),
            "mlp_in_bias": uniform(hidden, inputs=dim),
            "mlp_out": uniform(dim, hidden, inputs=hidden),
            "mlp_out_bias": uniform(dim, inputs=hidden),
        }
    if architecture.layer_norm:
        for name in norms:
            weights |= {f"{name}_gain": np.ones(dim, np.float32), f"{name}_shift": np.zeros(dim, np.float32)}
    return weights


def normalised(architecture: Architecture, x: Tensor) -> Tensor:
    """x^, a layer norm without gain and shift, over the last axis; x itself in a block without layer norm."""
    return layer_norm(x, x.shape[-1:]) if architecture.layer_norm else x


def _norm(architecture: Architecture, weights: Weights, name: str, x: Tensor) -> Tensor:
    """One layer norm with its gain and shift; x itself in a block without layer norm."""
    return layer_norm(x, x.shape[-1:], *_affine(weights, name)) if architecture.layer_norm else x


def _affine(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}_gain"], weights[f"{name}_shift"]


def class_attention(architecture: Architecture, weights: Weights, tokens: Tensor) -> Tensor:
    """Attention of the class token: `normalised` tokens (n, T, d) to (n, T + 1); place 0 is the class token itself.

    One vector for all tokens, W_K^T q / sqrt(d), gives the logits (prop-class-token).
    """
    own = normalised(architecture, weights["class_token"])
    query = weights["query"] @ _norm(architecture, weights, "attention", weights["class_token"])
    key = query @ weights["key"] / len(query) ** 0.5
    if architecture.layer_norm:
        key = key * weights["attention_gain"]
    return torch.softmax(torch.cat([(own @ key).expand(len(tokens), 1), tokens @ key], dim=1), dim=1)


def read_out(architecture: Architecture, weights: Weights, tokens: Tensor, attention: Tensor) -> Tensor:
    """The network's output (n,) on `normalised` tokens (n, T, d) under the given attention (n, T + 1)."""
    own = normalised(architecture, weights["class_token"])
    average = torch.bmm(attention[:, None, 1:], tokens)[:, 0] + attention[:, :1] * own
    if architecture.layer_norm:
        gain, shift = _affine(weights, "attention")
        average = torch.addcmul(shift, gain, average)
    state = average @ weights["value"].T
    if architecture.skip:
        state = state + weights["class_token"]
    if architecture.mlp:
        inner = _norm(architecture, weights, "mlp", state)
        hidden = gelu(torch.addmm(weights["mlp_in_bias"], inner, weights["mlp_in"].T))
        mapped = torch.addmm(weights["mlp_out_bias"], hidden, weights["mlp_out"].T)
        state = state + mapped if architecture.skip else mapped
    return _norm(architecture, weights, "readout", state) @ weights["readout"] + weights["readout_bias"]


def outputs(architecture: Architecture, weights: Weights, tokens: Tensor) -> Tensor:
    """The network's output (n,) on `normalised` tokens (n, T, d); its sign is the predicted label."""
    return read_out(architecture, weights, tokens, class_attention(architecture, weights, tokens))


def gradient_step(
    architecture: Architecture, weights: Weights, tokens: Tensor, labels: Tensor, step_size: float
) -> None:
    """One step of gradient descent on the mean logistic loss; every trained weight, in place. labels : (n,), +-1."""
    fixed = () if architecture.train_query_key else ("query", "key")
    leaves = [weight.requires_grad_() for name, weight in weights.items() if name not in fixed]
    gradients = torch.autograd.grad(logistic_loss(outputs(architecture, weights, tokens), labels), leaves)
    with torch.no_grad():
        torch._foreach_add_(leaves, gradients, alpha=-step_size)


@dataclass(frozen=True)
class EncoderJob:
    """One network to train: the point, the block, gradient descent, and its randomness.

    steps : steps after which the network is looked at, increasing, 0 is the start; n_test : fresh samples with clean
    labels; rng : training data, fresh samples and weights are drawn from three children of a copy of it: jobs that
    differ in the architecture only share the data and all weights that they have in common.
    """

    params: TokenSelectionParams
    architecture: Architecture
    step_size: float
    steps: tuple[int, ...]
    rng: np.random.Generator
    n_test: int = 2000
    device: str = "cpu"

    def __post_init__(self):
        if not 0 < self.step_size < np.inf:
            raise ParameterError(f"step_size must be a number greater than 0, got {self.step_size!r}")
        rising = all(a < b for a, b in itertools.pairwise((-1, *self.steps)))
        if not self.steps or not rising or any(int(step) != step for step in self.steps):
            raise ParameterError(f"steps must be increasing whole numbers of at least 0, got {self.steps!r}")
        if self.n_test < 2:
            raise ParameterError(f"n_test must be a whole number of at least 2, got {self.n_test!r}")
        for name, size in (("dim", self.params.dim), ("mlp_dim", self.architecture.mlp_dim)):
            if size > MAX_DIM:
                raise ParameterError(f"{name} must be at most {MAX_DIM} for an encoder, got {size}")
        resolve(self.device)


@dataclass(frozen=True)
class EncoderRun:
    """A network after each of the steps S asked for.

    train_accuracy, train_loss : (S,), given labels; clean_accuracy, noisy_accuracy : (S,), share of kept and of flipped
    labels that are fitted; test_accuracy, test_loss : (S,), on fresh samples with clean labels.
    clean_attention, noisy_attention, test_attention : (S, 4), the class token's attention by role (`ROLES`), as a share
    of what it gives to data tokens, mean over samples; clean_self, noisy_self, test_self : (S,), the share of all its
    attention that it gives to itself.
    Numbers about flipped samples are nan where there are none.
    """

    steps: np.ndarray
    train_accuracy: np.ndarray
    train_loss: np.ndarray
    clean_accuracy: np.ndarray
    noisy_accuracy: np.ndarray
    test_accuracy: np.ndarray
    test_loss: np.ndarray
    clean_attention: np.ndarray
    noisy_attention: np.ndarray
    test_attention: np.ndarray
    clean_self: np.ndarray
    noisy_self: np.ndarray
    test_self: np.ndarray


@dataclass(frozen=True)
class _Samples:
    """Samples where the network lives, and what is known about them. tokens : `normalised`; flipped : (n,)."""

    tokens: Tensor
    labels: Tensor
    flipped: np.ndarray

    @classmethod
    def of(cls, data: TokenSelectionData, architecture: Architecture, device: torch.device) -> _Samples:
        tokens, labels = (torch.tensor(x, dtype=torch.float32, device=device) for x in (data.tokens, data.labels))
        return cls(normalised(architecture, tokens), labels, data.labels != data.clean_labels)


def train(job: EncoderJob) -> EncoderRun:
    """Gradient descent on all weights, in float32; the network after each of `job.steps`.

    Raises
    ------
    DivergenceError
        The step size is so large that the loss is no longer finite.
    """
    device, params, architecture = resolve(job.device), job.params, job.architecture
    rngs = copy.deepcopy(job.rng).spawn(3)
    fresh = params.replace(n_train=job.n_test, label_noise=0.0)
    seen, unseen = (
        _Samples.of(draw_token_selection(point, rng), architecture, device)
        for point, rng in zip((params, fresh), rngs, strict=False)
    )
    start = initial_weights(architecture, params.dim, rngs[2])
    weights = {name: torch.tensor(array, device=device) for name, array in start.items()}
    done, rows = 0, []
    for step in job.steps:
        for _ in range(done, step):
            gradient_step(architecture, weights, seen.tokens, seen.labels, job.step_size)
        done = step
        with torch.no_grad():
            loss = float(logistic_loss(outputs(architecture, weights, seen.tokens), seen.labels))
        if not np.isfinite(loss):
            size = f"{step} steps of size {job.step_size:g} at dim {params.dim}"
            raise DivergenceError(f"the encoder's loss is {loss} after {size} ({architecture})")
        rows.append(_observe(architecture, weights, seen, unseen))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return EncoderRun(np.array(job.steps), **columns)


@torch.no_grad()
def _observe(architecture: Architecture, weights: Weights, seen: _Samples, unseen: _Samples) -> dict[str, np.ndarray]:
    """One row of an `EncoderRun`."""
    loss, correct, by_role, own = {}, {}, {}, {}
    for name, samples in (("train", seen), ("test", unseen)):
        attention = class_attention(architecture, weights, samples.tokens)
        f = read_out(architecture, weights, samples.tokens, attention)
        loss[name] = float(logistic_loss(f, samples.labels))
        correct[name] = (f * samples.labels > 0).cpu().numpy()
        attention = attention.double().cpu().numpy()
        own[name], on_data = attention[:, 0], attention[:, 1:]
        total = on_data.sum(axis=1, keepdims=True)
        on_data = np.divide(on_data, total, out=np.full_like(on_data, np.nan), where=total > 0)
        last = len(ROLES) - 1
        by_role[name] = np.column_stack([on_data[:, :last], on_data[:, last:].sum(axis=1)])
    flipped = seen.flipped
    return {
        "train_accuracy": correct["train"].mean(),
        "train_loss": loss["train"],
        "clean_accuracy": _mean(correct["train"][~flipped]),
        "noisy_accuracy": _mean(correct["train"][flipped]),
        "test_accuracy": correct["test"].mean(),
        "test_loss": loss["test"],
        "clean_attention": _mean(by_role["train"][~flipped]),
        "noisy_attention": _mean(by_role["train"][flipped]),
        "test_attention": _mean(by_role["test"]),
        "clean_self": _mean(own["train"][~flipped]),
        "noisy_self": _mean(own["train"][flipped]),
        "test_self": _mean(own["test"]),
    }


def _mean(rows: np.ndarray) -> np.ndarray:
    """Mean over samples, nan where there is none."""
    return rows.mean(axis=0) if len(rows) else np.full(rows.shape[1:], np.nan)


def _train_on_one_thread(job: EncoderJob) -> EncoderRun:
    torch.set_num_threads(1)
    return train(job)


def train_all(jobs: Iterable[EncoderJob]) -> list[EncoderRun]:
    """`train` on every job, in order: one process a core where all run on the CPU, else one after the other."""
    jobs = list(jobs)
    if all(resolve(job.device).type == "cpu" for job in jobs):
        return map_processes(_train_on_one_thread, jobs, batch=1)
    return [train(job) for job in jobs]
