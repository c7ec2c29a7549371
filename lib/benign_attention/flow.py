r"""Gradient flow to times that no number of steps reaches.

The flow dy/dt = F(y), y(0) = y_0, is integrated in tau = log(1 + t/u): it starts at t = 0 and is logarithmic after
t = u, the time in which outputs first move by one. In tau the flow is not stiff (rates decay as 1/t), so an explicit
Runge-Kutta method of SciPy needs a few hundred evaluations for twelve decades, and t = 1e60 is as near as it sounds.

Every integration is run twice, side by side, the second time with tolerances ten times smaller. What the model does
on its training tokens is compared at every requested time; the flow stops with an error when the two differ by more
than allowed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.integrate import DOP853

from benign_attention import reduced, selection
from benign_attention.parameters import ParameterError

_MAX_EVALUATIONS = 100_000  # of the velocity on one clock; a hundred decades take a few thousand


class FlowError(ArithmeticError):
    """The flow could not be integrated as accurately as asked; the message is one line."""


@contextlib.contextmanager
def at_point(**values: float) -> Iterator[None]:
    """Turns a `FlowError` of the block into a `ParameterError` that names the values of this point."""
    try:
        yield
    except FlowError as error:
        point = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        raise ParameterError(
            f"{', '.join(values)} must allow an accurate gradient flow, got {point}: {error}"
        ) from None


@dataclass(frozen=True)
class System:
    """An initial value problem and its observables.

    start : (N,), y_0; velocity(y) : (N,), dy/dt; observe(y): what two integrations are compared by; scale : (N,), sizes
    against which absolute tolerances count; unpack(y): the state that y stands for.
    """

    start: np.ndarray
    velocity: Callable[[np.ndarray], np.ndarray]
    observe: Callable[[np.ndarray], np.ndarray]
    scale: np.ndarray
    unpack: Callable[[np.ndarray], Any]

    @property
    def time_unit(self) -> float:
        """The time in which the fastest observable would move by one at its first speed; 1 if none moves."""
        speed = np.abs(self.observe(self.start + self.velocity(self.start)) - self.observe(self.start)).max()
        return 1.0 / float(speed) if speed > 0 else 1.0


def token_selection(training: selection.TrainingSet) -> System:
    """The flow of one token-selection model (Sakamoto and Sato 2025); the observables are its logits."""
    rank = training.weights.shape[-1]

    def unpack(y: np.ndarray) -> selection.State:
        return selection.State(y[:rank], y[rank:].reshape(rank, rank))

    def pack(state: selection.State) -> np.ndarray:
        return np.concatenate([state.query, state.weights.ravel()])

    keys = training.tokens @ training.weights
    of_query = 1.0 / np.sqrt((keys**2).sum(axis=1).max())
    of_weights = np.sqrt((training.weights**2).mean())
    return System(
        start=pack(selection.initial_state(training)),
        velocity=lambda y: pack(selection.velocity(training, unpack(y))),
        observe=lambda y: selection.outputs(training, unpack(y)).logits.ravel(),
        scale=np.repeat([of_query, of_weights], [rank, rank * rank]),
        unpack=unpack,
    )


def trained_head(training: selection.TrainingSet) -> System:
    """The flow of one token-selection model whose head nu is trained as well, from zero.

    States are pairs: the training set with the head of that time, and the state. The observables are logits and values.
    """
    inner = token_selection(training)
    rank = training.head.size

    def unpack(y: np.ndarray) -> tuple[selection.TrainingSet, selection.State]:
        return replace(training, head=y[:rank]), inner.unpack(y[rank:])

    def velocity(y: np.ndarray) -> np.ndarray:
        here, state = unpack(y)
        weights = selection.velocity(here, state)
        return np.concatenate([selection.head_velocity(here, state), weights.query, weights.weights.ravel()])

    def observe(y: np.ndarray) -> np.ndarray:
        here, state = unpack(y)
        return np.concatenate([selection.outputs(here, state).logits.ravel(), here.values.ravel()])

    of_head = 1.0 / np.sqrt((training.tokens**2).sum(axis=1).max())
    start = np.concatenate([np.zeros(rank), inner.start])
    return System(start, velocity, observe, np.concatenate([np.full(rank, of_head), inner.scale]), unpack)


def single_head(training: reduced.TrainingSet, signal_norm: float, start: reduced.State | None = None) -> System:
    """The flow of one single-head model (Magen et al. 2025) from `start` (default: zero).

    The observables are its logits and values.
    """
    n_rows = training.gram.shape[-1]

    def unpack(y: np.ndarray) -> reduced.State:
        return reduced.State(y[:4].reshape(2, 2), y[4:].reshape(2, n_rows))

    def pack(state: reduced.State) -> np.ndarray:
        return np.concatenate([state.signal.ravel(), state.noise.ravel()])

    def observe(y: np.ndarray) -> np.ndarray:
        out = reduced.outputs(training, unpack(y), signal_norm)
        return np.concatenate([out.logits.ravel(), out.values.ravel()])

    sizes = [1.0 / signal_norm, 1.0 / training.gram.diagonal().max()]
    return System(
        start=pack(reduced.zero_state(training) if start is None else start),
        velocity=lambda y: pack(reduced.velocity(training, unpack(y), signal_norm)),
        observe=observe,
        scale=np.repeat(sizes, [4, 2 * n_rows]),
        unpack=unpack,
    )


@dataclass(frozen=True)
class FlowPoint:
    """The flow at one time. discrepancy: largest difference of an observable between the two integrations, relative to
    the larger of one and its size; evaluations: of the velocity so far, by both."""

    time: float
    state: Any
    discrepancy: float
    evaluations: int


def gradient_flow(
    system: System, times: Iterable[float], tolerance: float = 1e-3, rtol: float = 1e-8, atol: float = 1e-11
) -> Iterator[FlowPoint]:
    """Yields the flow at each of `times` (t >= 0, increasing), from the finer of two integrations.

    Raises
    ------
    ParameterError
        `times` are not increasing and in [0, 1e300].
    FlowError
        The two integrations differ by more than `tolerance`, or the solver gives up.
    """
    times = [float(t) for t in times]
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 1e-13 <= value <= 1:
            raise ParameterError(f"{name} must be a number in [1e-13, 1], got {value:g}")
    if not (np.isfinite(system.start).all() and (system.scale > 0).all() and np.isfinite(system.scale).all()):
        raise FlowError("gradient flow needs a finite start and scales greater than zero")
    in_range = all(0 <= t <= 1e300 for t in times)
    if not times or not in_range or any(b <= a for a, b in itertools.pairwise(times)):
        raise ParameterError("times must be increasing numbers in [0, 1e+300]")
    paths = [_Path(system, times[-1], rtol / k, atol / k) for k in (1, 10)]
    for time in times:
        coarse, fine = (path.at(time) for path in paths)
        seen = system.observe(fine)
        discrepancy = float((np.abs(system.observe(coarse) - seen) / np.maximum(1.0, np.abs(seen))).max())
        if not discrepancy <= tolerance:
            raise FlowError(
                f"gradient flow at t = {time:.3g} is uncertain by {discrepancy:.2g}, more than "
                f"tolerance = {tolerance:g}: lower rtol (now {rtol:g}) or atol (now {atol:g})"
            )
        yield FlowPoint(time, system.unpack(fine), discrepancy, sum(path.evaluations for path in paths))


class _Path:
    """One integration, advanced as far as it is asked for.

    A sample whose second-best token has the better value switches to it in a time that has nothing to do with t, too
    short for any step in log t when t is large. The flow does not depend on t, so the clock is then set back: from
    there on tau counts from the time `origin`.
    """

    def __init__(self, system: System, last: float, rtol: float, atol: float):
        self.system, self.unit, self.last = system, system.time_unit, last
        self.options = {"rtol": rtol, "atol": atol * system.scale}
        self.earlier_evaluations = 0
        self._set_clock(0.0, system.start)

    @property
    def evaluations(self) -> int:
        return self.earlier_evaluations + self.solver.nfev

    def _set_clock(self, origin: float, state: np.ndarray) -> None:
        def velocity(tau, y):
            return self.unit * math.exp(tau) * self.system.velocity(y)

        self.origin, self._dense = origin, None
        self.solver = DOP853(velocity, 0.0, state, max(self._tau(self.last), 1e-12), **self.options)

    def _tau(self, time: float) -> float:
        return math.log1p((time - self.origin) / self.unit)

    def at(self, time: float) -> np.ndarray:
        while self.solver.t < self._tau(time):
            before = self.solver.t
            message = self.solver.step()
            self._dense = None
            if self.solver.nfev > _MAX_EVALUATIONS:
                raise FlowError(f"gradient flow makes no progress after t = {self.origin:.6g}: too many evaluations")
            if self.solver.status == "failed":
                if before == 0.0:
                    raise FlowError(f"gradient flow stopped at t = {self.origin:.6g}: {message}")
                self.earlier_evaluations += self.solver.nfev
                self._set_clock(self.origin + self.unit * math.expm1(before), self.solver.y)
        if self._tau(time) == self.solver.t:
            return self.solver.y
        if self._dense is None:
            self._dense = self.solver.dense_output()
        return self._dense(self._tau(time))
