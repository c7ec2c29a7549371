r"""Fine-tuning with label noise in the last attention layer, in two phases.

Phase 1 (`linear_head`, `pooled_head`): the backbone keeps its pretrained weights, and a classifier is trained on the
class vectors of clean samples. Phase 2 (`finetune`): the query and key of the last layer are drawn anew, and they alone
are trained, on other samples, part of whose labels have been replaced by another class. This is the real-world setting
of Sakamoto and Sato (2025). Cross-entropy over the classes throughout.

A `Run` is one training set under L label noises; its L models share samples, mini batches and all products with frozen
weights. Runs are independent: more runs change nothing, more label noises only the last bits of the models before them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm

from benign_attention import devices
from benign_attention.parameters import ParameterError
from benign_attention.realdata.last_layer import LastLayer, QueryKey, Tokens

OPTIMIZERS = ("adamw", "sgd", "gd")
MOMENTUM = 0.9
L2 = 1e-4
MAX_ITERATIONS = 5000
BAR_DELAY = 2.0  # seconds
POOLED_EPOCHS, POOLED_LEARNING_RATE = 200, 1e-3


@dataclass(frozen=True)
class Head:
    """Class logits from class vectors: `weight tanh(pooler v) + bias`, or `weight v + bias` without pooler.

    weight: (C, d); bias: (C,); pooler: matrix (d, d) and bias (d,).
    """

    weight: torch.Tensor
    bias: torch.Tensor
    pooler: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Logits (..., C) of class vectors (..., d)."""
        if self.pooler is not None:
            vectors = torch.tanh(linear(vectors, *self.pooler))
        return linear(vectors, self.weight, self.bias)

    def to(self, device: torch.device) -> Head:
        pooler = None if self.pooler is None else tuple(part.to(device) for part in self.pooler)
        return Head(self.weight.to(device), self.bias.to(device), pooler)


def linear_head(vectors: torch.Tensor, labels: np.ndarray, n_classes: int) -> Head:
    """Phase 1 of a ViT: multinomial logistic regression on class vectors (N, d), labels (N,) in 0..n_classes-1.

    Minimises mean cross-entropy + (L2 / 2) |weight|^2, L2 = 1e-4, by L-BFGS (scikit-learn) in float64.

    Raises
    ------
    RuntimeError
        If the minimum was not reached.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    _check_labels("labels", labels, n_classes)
    if len(np.unique(labels)) < n_classes:
        raise ParameterError(f"labels must contain each of the {n_classes} classes, got {np.unique(labels).tolist()}")
    rows = 2 if n_classes == 2 else 1  # two classes: scikit-learn's one row is the difference of our two
    regression = LogisticRegression(C=rows / (L2 * len(labels)), tol=1e-6, max_iter=MAX_ITERATIONS)
    with warnings.catch_warnings(), threadpool_limits(1):  # threads wait for each other at every one of many small sums
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            regression.fit(vectors.double().cpu().numpy(), labels)
        except ConvergenceWarning:
            raise RuntimeError(f"the linear head did not converge in {MAX_ITERATIONS} iterations of L-BFGS") from None
    weight, bias = regression.coef_, regression.intercept_
    if n_classes == 2:
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return Head(*(torch.tensor(part, dtype=vectors.dtype, device=vectors.device) for part in (weight, bias)))


def pooled_head(
    vectors: torch.Tensor,
    labels: np.ndarray,
    n_classes: int,
    pooler: tuple[torch.Tensor, torch.Tensor],
    n_epochs: int = POOLED_EPOCHS,
) -> Head:
    """Phase 1 of a BERT: the pretrained pooler (matrix (d, d), bias (d,)) and a classifier from 0 on, both trained.

    Full-batch AdamW without weight decay on class vectors (N, d); learning rate 1e-3, falling linearly to 0.
    """
    _check_labels("labels", labels, n_classes)
    targets = torch.as_tensor(labels, device=vectors.device)
    weight, bias = vectors.new_zeros(n_classes, vectors.shape[1]), vectors.new_zeros(n_classes)
    pooler = tuple(part.detach().clone().to(vectors) for part in pooler)
    leaves = [part.requires_grad_() for part in (weight, bias, *pooler)]
    steps = _Descent(leaves, "adamw", POOLED_LEARNING_RATE, n_epochs)
    for _ in range(n_epochs):
        cross_entropy(Head(weight, bias, pooler)(vectors), targets).backward()
        steps.step()
    return Head(weight.detach(), bias.detach(), tuple(part.detach() for part in pooler))


@torch.no_grad()
def class_vectors(layer: LastLayer, maps: QueryKey, tokens: Tokens) -> torch.Tensor:
    """`layer.class_vectors` (L, m, d) in chunks, without gradients: for as many samples as there are."""
    return torch.cat(
        [layer.class_vectors(maps, tokens[rows]) for rows in _chunks(len(tokens), len(maps.query), layer.device)], dim=1
    )


@dataclass(frozen=True)
class Run:
    """One training set under L label noises.

    samples: (n,) distinct rows of the hidden states; given: (L, n) labels trained on; flipped: (L, n), True where the
    given label is not the sample's; start: query and key to start from, L sets or one for all; order: seed of the mini
    batches, which all L models share.
    """

    samples: np.ndarray
    given: np.ndarray
    flipped: np.ndarray
    start: QueryKey
    order: int


@dataclass(frozen=True)
class Schedule:
    """How the models of phase 2 are trained.

    optimizer: `adamw` (no weight decay; the learning rate falls linearly to 0, the authors' schedule), `sgd` (momentum
    0.9) or `gd`, both at the constant learning rate of the theory. batch_size: 0 for the full batch. watched: epochs
    after which the models are evaluated, increasing; 0 is before training, the last one is its end.
    """

    optimizer: str
    learning_rate: float
    watched: tuple[int, ...]
    batch_size: int = 0

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise ParameterError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not 0 < self.learning_rate < np.inf:
            raise ParameterError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if self.batch_size < 0:
            raise ParameterError(f"batch_size must be 0 (full batch) or more, got {self.batch_size}")
        if not self.watched or min(self.watched) < 0 or list(self.watched) != sorted(set(self.watched)):
            raise ParameterError(f"watched must be increasing epochs from 0 on, got {list(self.watched)}")

    @property
    def n_epochs(self) -> int:
        return self.watched[-1]


def log_spaced(n_epochs: int, count: int) -> tuple[int, ...]:
    """0, n_epochs and up to `count` - 2 epochs between them, evenly spaced in their logarithm."""
    between = np.rint(np.geomspace(1, n_epochs, count - 1)).astype(int) if n_epochs else []
    return tuple(sorted({0, *map(int, between)}))


@dataclass(frozen=True)
class Watched:
    """L models at W epochs: arrays (L, W) but for epochs (W,). All nan for a model that has diverged.

    kept_fitted, flipped_fitted: fraction of the kept, of the flipped training labels that the model outputs (nan if
    there is none). max_attention: largest attention of position 0, mean over heads and training samples;
    test_max_attention: over test samples. Test labels are clean.
    """

    epochs: np.ndarray
    train_loss: np.ndarray
    train_accuracy: np.ndarray
    kept_fitted: np.ndarray
    flipped_fitted: np.ndarray
    max_attention: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray
    test_max_attention: np.ndarray


@dataclass(frozen=True)
class Trained:
    """What a run leaves. maps: the trained query and key, on the CPU; attention: (L, n, H, T), of position 0 at the end
    on the training samples, in the order of `Run.samples`.
    """

    history: Watched
    attention: np.ndarray
    maps: QueryKey


def finetune(
    layer: LastLayer,
    head: Head,
    hidden: np.ndarray,
    mask: np.ndarray | None,
    runs: Sequence[Run],
    schedule: Schedule,
    test_samples: np.ndarray,
    test_labels: np.ndarray,
    device: str = "auto",
    progress: bool = True,
) -> list[Trained]:
    """Phase 2: train query and key of `layer` under the frozen `head`, for every run.

    hidden: states below the layer, (N, T, d), may be memory-mapped: only the rows of runs and test are read, and held
    twice (states and values). mask: (N, T), False at padding, or None. test_samples, test_labels: (M,), rows of
    `hidden` and their clean labels. On the CPU runs go side by side, a thread each, longest first. A bar on stderr
    shows the progress of what takes longer than two seconds. Same input, same device: same output.

    Raises
    ------
    ParameterError
        For rows or labels out of range, arrays whose shapes do not match, or a device that is not there.
    """
    place = devices.resolve(device)
    layer, head = layer.to(place), head.to(place)
    _check_rows("test_samples", test_samples, len(hidden))
    _check_labels("test_labels", test_labels, len(head.bias))
    _check_shape("test_labels", test_labels, np.shape(test_samples))
    if mask is not None:
        _check_shape("mask", mask, hidden.shape[:2])
    if not runs:
        raise ParameterError("runs must hold at least one run")
    for run in runs:
        _check_run(run, len(hidden), len(head.bias))
    pool = np.unique(np.concatenate([run.samples for run in runs]))
    tokens = layer.tokens(hidden, mask, pool)
    test = layer.tokens(hidden, mask, test_samples)
    test_targets = torch.as_tensor(test_labels, device=place)[None]
    longest_first = sorted(range(len(runs)), key=lambda i: -runs[i].given.size)
    work = sum(run.given.size for run in runs) * schedule.n_epochs
    bar = tqdm(
        total=work,
        unit="sample",
        unit_scale=True,
        desc="fine-tuning",
        delay=BAR_DELAY,
        mininterval=1.0,
        disable=not progress,
        leave=False,
    )

    def train(i: int) -> Trained:
        run = runs[i]
        return _train(layer, head, tokens, np.searchsorted(pool, run.samples), run, schedule, test, test_targets, bar)

    with bar:
        trained = dict(zip(longest_first, devices.map_runs(train, longest_first, place), strict=True))
    return [trained[i] for i in range(len(runs))]


def _train(
    layer: LastLayer,
    head: Head,
    pool: Tokens,
    rows: np.ndarray,
    run: Run,
    schedule: Schedule,
    test: Tokens,
    test_labels: torch.Tensor,
    bar: tqdm,
) -> Trained:
    n_sets, n_train = run.given.shape
    ascending = np.argsort(rows)
    tokens = pool[_as_slice(rows[ascending])]
    labels = torch.as_tensor(run.given[:, ascending], device=layer.device)
    flipped = torch.as_tensor(run.flipped[:, ascending], device=layer.device)
    maps = run.start.map(lambda part: part.to(layer.pretrained.query).expand(n_sets, *part.shape[1:]).clone())
    leaves = [part.requires_grad_() for part in maps.trained()]
    rng = np.random.default_rng(run.order)
    batch_size = schedule.batch_size or n_train
    descent = _Descent(
        leaves, schedule.optimizer, schedule.learning_rate, schedule.n_epochs * -(-n_train // batch_size)
    )
    history = []
    for epoch in range(schedule.n_epochs + 1):
        if epoch in schedule.watched:
            history.append(_evaluated(layer, head, maps, (tokens, labels, flipped), (test, test_labels)))
        if epoch == schedule.n_epochs:
            break
        for batch, targets in _batches(tokens, labels, schedule.batch_size, rng):
            for chunk in _chunks(len(batch), n_sets, layer.device):
                logits = head(layer.class_vectors(maps, batch[chunk]))
                loss = cross_entropy(logits.flatten(0, 1), targets[:, chunk].flatten(), reduction="sum")
                (loss / len(batch)).backward()
            descent.step()
        bar.update(run.given.size)
    attention = np.empty((n_sets, n_train, layer.n_heads, tokens.inputs.shape[1]), np.float32)
    with torch.no_grad():
        for chunk in _chunks(n_train, n_sets, layer.device):
            attention[:, ascending[chunk]] = layer.attention(maps, tokens[chunk]).cpu()
    return Trained(
        Watched(np.array(schedule.watched), *np.stack(history, axis=-1)),
        attention,
        maps.map(lambda part: part.detach().cpu()),
    )


def _batches(
    tokens: Tokens, labels: torch.Tensor, batch_size: int, rng: np.random.Generator
) -> Iterator[tuple[Tokens, torch.Tensor]]:
    """One epoch: the whole set, or every sample once in batches of a random order; the last one may be smaller."""
    if not batch_size:
        yield tokens, labels
        return
    for batch in torch.as_tensor(rng.permutation(len(tokens)), device=labels.device).split(batch_size):
        yield tokens[batch], labels[:, batch]


class _Descent:
    """The optimisers of a schedule. A model's loss is a mean over samples, the loss of a batch of models their sum."""

    def __init__(self, leaves: list[torch.Tensor], optimizer: str, learning_rate: float, n_steps: int):
        fused = leaves[0].device.type in ("cpu", "cuda")
        if optimizer == "adamw":
            self.method = torch.optim.AdamW(leaves, lr=learning_rate, weight_decay=0.0, fused=fused)
        else:
            momentum = MOMENTUM if optimizer == "sgd" else 0.0
            self.method = torch.optim.SGD(leaves, lr=learning_rate, momentum=momentum, fused=fused)
        self.rates = np.full(n_steps, learning_rate)
        if optimizer == "adamw":
            self.rates *= 1 - np.arange(n_steps) / max(n_steps, 1)
        self.done = 0

    def step(self) -> None:
        self.method.param_groups[0]["lr"] = float(self.rates[self.done])
        self.method.step()
        self.method.zero_grad()
        self.done += 1


@torch.no_grad()
def _evaluated(
    layer: LastLayer,
    head: Head,
    maps: QueryKey,
    train: tuple[Tokens, torch.Tensor, torch.Tensor],
    test: tuple[Tokens, torch.Tensor],
) -> np.ndarray:
    """The arrays of `Watched` at one epoch: (8, L), nan for models whose loss is not finite."""
    tokens, labels, flipped = train
    loss, right, largest = _by_sample(layer, head, maps, tokens, labels)
    test_loss, test_right, test_largest = _by_sample(layer, head, maps, test[0], test[1].expand(len(labels), -1))
    columns = [
        loss.mean(1),
        right.mean(1),
        (right * ~flipped).sum(1) / (~flipped).sum(1),
        (right * flipped).sum(1) / flipped.sum(1),
        largest.mean(1),
        test_loss.mean(1),
        test_right.mean(1),
        test_largest.mean(1),
    ]
    return torch.where(loss.mean(1).isfinite(), torch.stack(columns), torch.nan).cpu().numpy()


def _by_sample(
    layer: LastLayer, head: Head, maps: QueryKey, tokens: Tokens, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Loss, 1 where the label is fitted, and largest attention averaged over heads, each (L, m)."""
    found = []
    for rows in _chunks(len(tokens), len(labels), layer.device):
        vectors, attention = layer.outputs(maps, tokens[rows])
        logits = head(vectors)
        targets = labels[:, rows]
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        right = (logits.argmax(-1) == targets).to(losses.dtype)
        found.append((losses, right, attention.amax(-1).mean(-1)))
    return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))


def _as_slice(rows: np.ndarray) -> slice | torch.Tensor:
    """Increasing rows as a slice if none is left out, so that they need not be copied."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else torch.as_tensor(rows)


def _chunks(n_samples: int, n_sets: int, device: torch.device) -> list[slice]:
    """Even blocks of samples: enough rows for fast products with frozen weights, few enough to stay in the cache."""
    size = max(32, (384 if device.type == "cpu" else 8192) // n_sets)
    edges = np.linspace(0, n_samples, -(-n_samples // size) + 1).astype(int)
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _check_run(run: Run, n_samples: int, n_classes: int) -> None:
    _check_rows("samples", run.samples, n_samples)
    if len(np.unique(run.samples)) < len(run.samples):
        raise ParameterError("samples of a run must be distinct")
    shape = np.shape(run.given)
    if len(shape) != 2 or shape[1] != len(run.samples) or np.shape(run.flipped) != shape:
        raise ParameterError(
            f"given and flipped must be (label noises, {len(run.samples)}), got {shape} and {np.shape(run.flipped)}"
        )
    if len(run.start.query) not in (1, shape[0]):
        raise ParameterError(f"start must hold one set or {shape[0]}, got {len(run.start.query)}")
    _check_labels("given", run.given, n_classes)


def _check_shape(name: str, array: np.ndarray, expected: tuple[int, ...]) -> None:
    if np.shape(array) != tuple(expected):
        raise ParameterError(f"{name} must have the shape {tuple(expected)}, got {np.shape(array)}")


def _check_rows(name: str, rows: np.ndarray, n_samples: int) -> None:
    whole = np.issubdtype(np.asarray(rows).dtype, np.integer)
    if np.size(rows) == 0 or not whole or np.min(rows) < 0 or np.max(rows) >= n_samples:
        raise ParameterError(f"{name} must be at least one row in 0..{n_samples - 1}")


def _check_labels(name: str, labels: np.ndarray, n_classes: int) -> None:
    whole = np.issubdtype(np.asarray(labels).dtype, np.integer)
    if np.size(labels) == 0 or not whole or np.min(labels) < 0 or np.max(labels) >= n_classes:
        raise ParameterError(f"{name} must be classes in 0..{n_classes - 1}")
