"""What a gradient step costs on one thread: on coefficients (`reduced`) against on tokens (`explicit`)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benign_attention import explicit, reduced
from benign_attention.data import SingleHeadParams, draw_single_head

FIGURE = SingleHeadParams(n_train=200, dim=40_000, n_tokens=2, signal_norm=30.0, label_noise=0.05, step_size=0.025)
N_SEEDS = 5


def milliseconds(work: Callable[[], None], repeats: int) -> float:
    """Wall time of `work` in ms, the mean of `repeats` calls in a row."""
    start = perf_counter()
    for _ in range(repeats):
        work()
    return 1e3 * (perf_counter() - start) / repeats


def draw(dim: int, n_seeds: int) -> reduced.TrainingSet:
    p = FIGURE
    return reduced.draw(p.n_train, dim, p.n_tokens, p.label_noise, [np.random.default_rng(i) for i in range(n_seeds)])


def reduced_steps(training: reduced.TrainingSet) -> Callable[[], None]:
    """One more step of an endless descent at each call."""
    steps = reduced.gradient_descent(training, FIGURE.signal_norm, FIGURE.step_size, 10**9)
    return lambda: next(steps) and None


def explicit_steps() -> Callable[[], None]:
    p = FIGURE
    data = draw_single_head(p.n_train, p.dim, p.n_tokens, p.signal_norm, p.label_noise, np.random.default_rng(0))
    model = explicit.SingleHeadAttention(p.dim)
    steps = explicit.gradient_descent(model, torch.tensor(data.tokens), torch.tensor(data.labels), p.step_size, 10**9)
    return lambda: next(steps) and None


def by_dimension(rounds: int = 9) -> None:
    """Rounds over all dimensions in turn, so that a busy moment of the machine does not fall on one of them."""
    dims = [10**k for k in range(3, 10)]
    drawing, single, batched = {}, {}, {}
    for dim in dims:
        drawing[dim] = milliseconds(lambda dim=dim: draw(dim, 1), 3)
        batch = draw(dim, N_SEEDS)
        single[dim] = reduced_steps(reduced.TrainingSet(batch.gram[0], batch.clean_labels[0], batch.labels[0]))
        batched[dim] = reduced_steps(batch)
    times = {dim: [] for dim in dims}
    for _ in range(rounds):
        for dim in dims:
            times[dim].append((milliseconds(single[dim], 200), milliseconds(batched[dim], 50)))
    print(f"reduced, n = {FIGURE.n_train}, T = {FIGURE.n_tokens}: median of {rounds} rounds")
    print(f"{'dim':>12} {'draw, ms':>10} {'step, ms':>10} {f'step of {N_SEEDS} seeds, ms':>22}")
    for dim in dims:
        one, many = (median(t) for t in zip(*times[dim], strict=True))
        print(f"{dim:>12} {drawing[dim]:>10.2f} {one:>10.4f} {many:>22.4f}")


def side_by_side(rounds: int = 9) -> None:
    """Explicit and reduced in turn; the ratio of each round, then the median."""
    batch = draw(FIGURE.dim, 1)
    on_coefficients = reduced_steps(reduced.TrainingSet(batch.gram[0], batch.clean_labels[0], batch.labels[0]))
    on_tokens = explicit_steps()
    milliseconds(on_tokens, 1)
    times = [(milliseconds(on_tokens, 2), milliseconds(on_coefficients, 200)) for _ in range(rounds)]
    (slow, least_slow), (fast, fastest) = ((median(t), min(t)) for t in zip(*times, strict=True))
    ratios = sorted(a / b for a, b in times)
    print(f"\nside by side, n = {FIGURE.n_train}, dim = {FIGURE.dim}, T = {FIGURE.n_tokens}, float64")
    print(f"explicit step: median {slow:.1f} ms, best {least_slow:.1f} ms")
    print(f"reduced step: median {fast:.4f} ms, best {fastest:.4f} ms (target: at most 0.1 ms)")
    print(
        f"explicit / reduced: {median(ratios):.0f} ({ratios[0]:.0f} to {ratios[-1]:.0f} by round; target: at least 200)"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        by_dimension()
        side_by_side()
