"""What the token-selection engine costs: a step, a run beside the authors' loop, huge d, late times, the heat map."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
from joblib import cpu_count
from scipy.linalg.blas import dgemv, dger
from threadpoolctl import threadpool_limits
from torch import nn

from benign_attention import flow, selection
from benign_attention.data import TokenSelectionParams, draw_token_selection
from benign_attention.parallel import map_processes
from benign_attention.selection_population import FreshSample, fresh_sample, test_quantities

POINT = TokenSelectionParams(n_train=20, dim=2000, n_tokens=8, signal_norm=20.0, weak_ratio=0.1, label_noise=0.2)
STEP_SIZE, N_STEPS, EVALUATE_EVERY, N_TEST = 5e-3, 1000, 10, 1000
DIMS = range(250, 5001, 125)
SIGNAL_NORMS = [5.0 + 2.5 * k for k in range(39)]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of `work`."""
    start = perf_counter()
    work()
    return perf_counter() - start


def spread_of(times: list[float], unit: float = 1.0, digits: int = 3) -> str:
    return f"median {unit * median(times):.{digits}f}, best {unit * min(times):.{digits}f}"


def drawn(seed: int = 0, **changes) -> selection.TrainingSet:
    return selection.draw(POINT.replace(**changes), np.random.default_rng(seed))


def trained(training: selection.TrainingSet, step_size: float = STEP_SIZE, n_steps: int = N_STEPS) -> selection.State:
    (state,) = selection.gradient_descent(training, step_size, [n_steps])
    return state


def a_step(rounds: int = 9) -> None:
    """A step beside the BLAS calls that it cannot do without, on matrices of the same shapes."""
    training = drawn()
    weights, tokens = (np.array(x, order="F") for x in (training.weights, training.tokens))
    query, pull = np.ones(weights.shape[0]), np.full(weights.shape[0], 1e-9)

    def bare() -> None:
        for _ in range(N_STEPS):
            logits = dgemv(1.0, tokens, dgemv(1.0, weights, query))
            dgemv(1.0, weights, dgemv(1.0, tokens, logits, trans=1), trans=1)
            dger(-1.0, pull, pull, a=weights, overwrite_a=True)

    times = [(seconds(bare), seconds(lambda: trained(training))) for _ in range(rounds)]
    floor, ours = zip(*times, strict=True)
    print(f"one step, n = {POINT.n_train}, T = {POINT.n_tokens}: matrices of rank r = {weights.shape[0]}, microseconds")
    print(f"  five bare BLAS calls   {spread_of(floor, 1e6 / N_STEPS, 1)} (expected floor: about 30)")
    print(f"  gradient_descent       {spread_of(ours, 1e6 / N_STEPS, 1)}")
    print(f"  drawing a training set {1e6 * min(seconds(drawn) for _ in range(rounds)):.0f}")


def our_run() -> tuple[np.ndarray, np.ndarray]:
    """A drawn set, 1000 steps, 100 evaluations: training loss and accuracy, exact test loss and accuracy."""
    training = drawn()
    on_train, laws = [], []
    for state in selection.gradient_descent(training, STEP_SIZE, range(EVALUATE_EVERY, N_STEPS + 1, EVALUATE_EVERY)):
        margins = training.labels * selection.outputs(training, state).f
        on_train.append((np.logaddexp(0.0, -margins).mean(), (margins > 0).mean()))
        laws.append(fresh_sample(training, state))
    on_test = test_quantities(FreshSample.stack(laws), log2_points=7, n_randomisations=4)
    return np.array(on_train), np.array([on_test.loss.error, on_test.accuracy.error])


class AuthorsLoop:
    """The authors' loop as their paper and code describe it, written anew: float32, W of size d x d in autograd.

    Sakamoto and Sato 2025: logits (x W) p, loss log(1 + exp(-y f)), plain SGD, W uniform on +-1/sqrt(d), p zero,
    and every 10 steps the loss and the accuracy on the 20 training and on 1000 test samples.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        training = draw_token_selection(POINT, rng)
        test = draw_token_selection(POINT.replace(n_train=N_TEST, label_noise=0.0), rng)
        self.sets = [
            (torch.tensor(x.tokens, dtype=torch.float32), torch.tensor(x.labels, dtype=torch.float32))
            for x in (training, test)
        ]
        direction = training.signals[0] - training.signals[1]
        direction /= np.linalg.norm(direction) * POINT.signal_norm
        self.nu = torch.tensor(direction, dtype=torch.float32)
        bound = 1.0 / math.sqrt(POINT.dim)
        self.W = nn.Parameter(torch.empty(POINT.dim, POINT.dim).uniform_(-bound, bound))
        self.p = nn.Parameter(torch.zeros(POINT.dim))
        self.optimizer = torch.optim.SGD([self.W, self.p], lr=STEP_SIZE)

    def outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        attention = torch.softmax((tokens @ self.W) @ self.p, dim=1)
        return (attention * (tokens @ self.nu)).sum(dim=1)

    def period(self) -> None:
        """Ten steps and one evaluation."""
        tokens, labels = self.sets[0]
        for _ in range(EVALUATE_EVERY):
            self.optimizer.zero_grad()
            torch.log(1 + torch.exp(-labels * self.outputs(tokens))).mean().backward()
            self.optimizer.step()
        with torch.no_grad():
            for tokens, labels in self.sets:
                margins = labels * self.outputs(tokens)
                torch.log(1 + torch.exp(-margins)).mean().item(), (margins > 0).float().mean().item()


def a_run_beside_the_authors_loop(rounds: int = 5) -> None:
    """In turn, one period of theirs (a hundredth of a run) and one whole run of ours; the ratio of each round."""
    authors = AuthorsLoop()
    authors.period()
    our_run()
    n_periods = N_STEPS // EVALUATE_EVERY
    times = [(n_periods * seconds(authors.period), seconds(our_run)) for _ in range(rounds)]
    theirs, ours = zip(*times, strict=True)
    ratios = sorted(a / b for a, b in times)
    errors = our_run()[1].max(axis=1)
    print(f"\n{N_STEPS} steps with {n_periods} evaluations, d = {POINT.dim}, |mu| = {POINT.signal_norm:g}, seconds")
    print(f"  authors' loop, float32 {spread_of(theirs, 1, 1)} (extrapolated: {n_periods} times one period)")
    print(f"  ours, float64          {spread_of(ours)} (target: at most 0.2), set drawn anew")
    print(f"  authors / ours         {median(ratios):.0f} ({ratios[0]:.0f} to {ratios[-1]:.0f} by round; target: 1000)")
    print(
        f"  standard error of a test loss at most {errors[0]:.1g}, of an accuracy {errors[1]:.1g}; "
        f"with {N_TEST} samples an accuracy of 0.9 has {math.sqrt(0.09 / N_TEST):.1g}"
    )


def by_dimension(rounds: int = 9) -> None:
    """At fixed n |mu|^2 / d and flow time; all dimensions in turn, so that a busy moment falls on all of them."""
    dims = [10**4, 10**5, 10**7, 10**9, 10**15]
    sets = {dim: drawn(dim=dim, signal_norm=POINT.signal_norm * math.sqrt(dim / POINT.dim)) for dim in dims}
    times = {dim: [] for dim in dims}
    for _ in range(rounds):
        for dim in dims:
            times[dim].append(seconds(lambda dim=dim: trained(sets[dim], STEP_SIZE * POINT.dim / dim)))
    print(f"\n{N_STEPS} steps by dimension, milliseconds, and the median over rounds of the ratio to d = 1e4")
    for dim in dims:
        ratio = median(a / b for a, b in zip(times[dim], times[dims[0]], strict=True))
        target = " (target: within 10 % of 1)" if dim == 10**9 else ""
        print(f"  d = {dim:<17.0e} {spread_of(times[dim], 1e3, 1)}, ratio {ratio:.3f}{target}")


def late_times(rounds: int = 3) -> None:
    print(f"\ngradient flow, n = {POINT.n_train}, T = {POINT.n_tokens}, seconds and evaluations by both integrations")
    for (dim, norm), last in product([(2000, 20.0), (5000, 5.0), (1000, 100.0)], [1e12, 1e60]):
        system = flow.token_selection(drawn(dim=dim, signal_norm=norm))
        times, points = [], []
        for _ in range(rounds):
            times.append(seconds(lambda: points.extend(flow.gradient_flow(system, [last]))))  # noqa: B023
        target = " (target: below 2)" if last == 1e12 else ""
        print(
            f"  d = {dim}, |mu| = {norm:<4g} to t = {last:.0e}: {spread_of(times, 1, 2)}, "
            f"{points[-1].evaluations} evaluations, discrepancy {points[-1].discrepancy:.1g}{target}"
        )


def losses(point: tuple[int, float]) -> tuple[float, float, float]:
    """Final train and test loss at one (d, |mu|), and the processor time that they took."""
    start = process_time()
    training = drawn(dim=point[0], signal_norm=point[1])
    state = trained(training)
    margins = training.labels * selection.outputs(training, state).f
    on_test = test_quantities(fresh_sample(training, state))
    return float(np.logaddexp(0.0, -margins).mean()), float(on_test.loss.value), process_time() - start


def heat_map() -> None:
    points = list(product(DIMS, SIGNAL_NORMS))
    map_processes(losses, points[:2])
    results = []
    wall = seconds(lambda: results.extend(map_processes(losses, points)))
    train, test, busy = np.array(results).T
    print(f"\nheat map of {len(DIMS)} x {len(SIGNAL_NORMS)} points, {N_STEPS} steps, one seed, {cpu_count()} cores")
    print(
        f"  {wall:.1f} seconds (target: below 60 on two cores); processor time {busy.sum():.1f}, "
        f"that is {busy.sum() / cpu_count():.1f} on each core if they have nothing else to do"
    )
    print(f"  train loss {train.min():.3f} to {train.max():.3f}, test loss {test.min():.3f} to {test.max():.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        a_step()
        a_run_beside_the_authors_loop()
        by_dimension()
        late_times()
    heat_map()
