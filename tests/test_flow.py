"""Gradient flow against closed forms, gradient descent with ever smaller steps, and what the flow keeps constant."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit
from threadpoolctl import threadpool_limits

from benign_attention import reduced, selection
from benign_attention.data import TokenSelectionParams
from benign_attention.flow import FlowError, System, at_point, gradient_flow, single_head, token_selection, trained_head
from benign_attention.parameters import ParameterError

REGIMES = {"benign": (2000, 20.0), "benign after long training": (5000, 5.0), "not overfitting": (1000, 100.0)}


@pytest.fixture(autouse=True)
def one_thread():
    with threadpool_limits(1):
        yield


def drawn(dim=2000, signal_norm=20.0, seed=0, **point):
    params = TokenSelectionParams(dim=dim, signal_norm=signal_norm, **point)
    return selection.draw(params, np.random.default_rng(seed))


def small(signal_norm=6.0, seed=0):
    return drawn(300, signal_norm, seed, n_train=6, n_tokens=4)


def loss_of(training, state):
    return float(np.logaddexp(0, -training.labels * selection.outputs(training, state).f).mean())


def relative_difference(ours, reference):
    return np.abs(ours - reference).max() / np.abs(reference).max()


def scalar_system(rate, start, observe=lambda y: y):
    start = np.atleast_1d(np.asarray(start, float))
    return System(start, lambda y: np.atleast_1d(rate(y)), observe, np.ones(start.size), lambda y: y.copy())


# --- closed forms ------------------------------------------------------------------------------------------------


def attention_gap(start):
    """x' = 1 / (2 + 2 cosh x): one token against another of higher value; 2 x + 2 sinh x grows by exactly t."""
    return scalar_system(lambda y: expit(y) * expit(-y), start)


def exact_gap(start, time):
    def excess(x):
        # 2 x + 2 sinh x - start's - t, without the difference of large numbers of the same sign
        growth = 4 * math.cosh((x + start) / 2) * math.sinh((x - start) / 2)
        return 2 * (x - start) + growth - time

    return brentq(excess, start, max(10.0, abs(start)) + math.log1p(time) + 10, xtol=1e-13, rtol=1e-13)


TIMES = [0.0, 1e-3, 1.0, 50.0, 1e4, 1e8, 1e12, 1e30, 1e60, 1e120]


@pytest.mark.parametrize("start", [0.0, -3.0, 5.0])
def test_a_gap_that_grows_like_log_time_is_exact_to_1e120(start):
    for point in gradient_flow(attention_gap(start), TIMES):
        exact = exact_gap(start, point.time)
        assert point.state[0] == pytest.approx(exact, rel=1e-6, abs=1e-9)
        assert abs(point.state[0] - exact) / max(1.0, abs(exact)) < 2 * point.discrepancy + 1e-9
    assert point.evaluations < 4000


@pytest.mark.parametrize("start", [-15.0, -46.0, -100.0])
def test_a_late_and_sudden_switch_is_exact(start):
    """From x = -46 the gap waits until t = 2 sinh 46 = 1e20 and then changes sign within a few units of time."""
    turn = 2 * math.sinh(-start) - 2 * start
    times = [0.0, 1.0, *(turn * k for k in (0.1, 0.5, 0.9, 1.1, 2.0, 1e3, 1e20))]
    for point in gradient_flow(attention_gap(start), times):
        assert point.state[0] == pytest.approx(exact_gap(start, point.time), abs=1e-4)
    assert point.evaluations < 30_000


@pytest.mark.parametrize("unit", [1e-3, 1e10, 1e19])
def test_a_sudden_switch_is_exact_in_every_unit_of_time(unit):
    """As above at t = 1e20, beside a component that moves by one in `unit`, which sets the clock."""
    alone = attention_gap(-46.0)

    def rate(y):
        return np.array([alone.velocity(y[:1])[0], math.exp(-y[1]) / unit])

    turn = 2 * math.sinh(46) + 92
    for point in gradient_flow(scalar_system(rate, [-46.0, 0.0]), [unit, 0.9 * turn, 1.1 * turn, 2 * turn, 1e30]):
        assert point.state[0] == pytest.approx(exact_gap(-46.0, point.time), abs=1e-4)
        assert point.state[1] == pytest.approx(math.log1p(point.time / unit), rel=1e-5)


def test_a_linear_system_is_exact():
    """y' = -A y for a symmetric A, against its eigenvectors."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((5, 5)))[0]
    rates, start = np.array([1e-6, 1e-3, 0.1, 1.0, 3.0]), rng.standard_normal(5)
    matrix = basis * rates @ basis.T
    system = scalar_system(lambda y: -matrix @ y, start)
    times = [0.01, 0.1, 1.0, 3.0, 10.0, 30.0]
    for point in gradient_flow(system, times):
        exact = basis @ (np.exp(-rates * point.time) * (basis.T @ start))
        np.testing.assert_allclose(point.state, exact, rtol=0, atol=2e-6)


def test_a_system_at_rest_stays_where_it_is():
    for point in gradient_flow(scalar_system(lambda y: 0 * y, [2.0, -1.0]), [0.0, 1.0, 1e60]):
        np.testing.assert_array_equal(point.state, [2.0, -1.0])
        assert point.discrepancy == 0


# --- the limit of small steps ------------------------------------------------------------------------------------


def extrapolated(run, n_steps):
    """Limit of gradient descent for steps -> 0 from n, 2 n and 4 n steps, and the three runs themselves."""
    one, two, four = (run(n_steps * k) for k in (1, 2, 4))
    return (one - 6 * two + 8 * four) / 3, (one, two, four)


def check_limit(run, n_steps, flow_value, tolerance):
    limit, runs = extrapolated(run, n_steps)
    assert relative_difference(flow_value, limit) < tolerance
    errors = [np.abs(x - flow_value).max() for x in runs]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("signal_norm", [1.0, 6.0, 20.0])
def test_token_selection_is_the_limit_of_gradient_descent_with_small_steps(signal_norm):
    """First order in the step, extrapolated away twice; to a time when attention is above 0.9 on some sample."""
    training, time = small(signal_norm), 30.0
    (point,) = gradient_flow(token_selection(training), [time])

    def run(n_steps):
        (state,) = selection.gradient_descent(training, time / n_steps, [n_steps])
        return np.concatenate([state.query, state.weights.ravel(), selection.outputs(training, state).logits.ravel()])

    reached = selection.outputs(training, point.state)
    value = np.concatenate([point.state.query, point.state.weights.ravel(), reached.logits.ravel()])
    assert reached.attention.max() > 0.9
    check_limit(run, 4000, value, 1e-6)


@pytest.mark.parametrize("n_tokens", [2, 3])
@pytest.mark.parametrize("signal_norm", [2.0, 8.0])
def test_single_head_is_the_limit_of_gradient_descent_with_small_steps(signal_norm, n_tokens):
    training = reduced.draw(8, 200, n_tokens, 0.2, [np.random.default_rng(1)])
    training = reduced.TrainingSet(training.gram[0], training.clean_labels[0], training.labels[0])
    time = 3.0
    (point,) = gradient_flow(single_head(training, signal_norm), [time])

    def run(n_steps):
        *_, state = reduced.gradient_descent(training, signal_norm, time / n_steps, n_steps)
        return np.concatenate([state.signal.ravel(), state.noise.ravel() * 100])

    value = np.concatenate([point.state.signal.ravel(), point.state.noise.ravel() * 100])
    assert np.abs(reduced.outputs(training, point.state, signal_norm).f).max() > 1
    check_limit(run, 2000, value, 1e-6)


def test_single_head_flow_from_random_weights_is_the_limit_of_gradient_descent():
    training = reduced.draw(8, 100, 3, 0.2, [np.random.default_rng(0)])
    start = reduced.random_start(training, 100, 0.1, [np.random.default_rng(1)]).state
    alone = reduced.TrainingSet(training.gram[0], training.clean_labels[0], training.labels[0])
    system = single_head(alone, 4.0, reduced.State(start.signal[0], start.noise[0]))
    (point,) = gradient_flow(system, [1.0])
    errors = []
    for n_steps in (400, 800):
        *_, state = reduced.gradient_descent(training, 4.0, 1.0 / n_steps, n_steps, start)
        errors.append(relative_difference(state.noise[0], point.state.noise))
    assert errors[1] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.1)


def test_a_trained_head_is_the_limit_of_gradient_descent_with_small_steps():
    """Plain Euler on all three of nu, p and W."""
    training, time = small(3.0), 10.0
    system = trained_head(training)
    (point,) = gradient_flow(system, [time])

    def run(n_steps):
        y = system.start.copy()
        for _ in range(n_steps):
            y = y + time / n_steps * system.velocity(y)
        here, state = system.unpack(y)
        return np.concatenate([here.head, state.query, selection.outputs(here, state).logits.ravel()])

    here, state = point.state
    out = selection.outputs(here, state)
    assert out.attention.max() > 0.5
    assert np.all(training.labels * out.f > 0)
    check_limit(run, 2000, np.concatenate([here.head, state.query, out.logits.ravel()]), 1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_published_steps_are_close_to_the_flow_at_t_100(seed):
    """20000 steps of 5e-3 at (2000, 20), where no sample is just changing its mind."""
    training = drawn(seed=seed)
    (point,) = gradient_flow(token_selection(training), [100.0])
    (state,) = selection.gradient_descent(training, 5e-3, [20_000])
    attention, reference = (selection.outputs(training, s).attention for s in (state, point.state))
    assert np.abs(attention - reference).max() < 1e-4
    assert loss_of(training, state) == pytest.approx(loss_of(training, point.state), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_gradients_are_large_the_published_steps_are_not_the_flow(seed):
    """At (1000, 100) steps of 5e-3 depart visibly from the flow by t = 5; ten times smaller ones ten times less."""
    training = drawn(1000, 100.0, seed=seed)
    (point,) = gradient_flow(token_selection(training), [5.0])
    logits = selection.outputs(training, point.state).logits
    found = []
    for n_steps in (1000, 10_000):
        (state,) = selection.gradient_descent(training, 5 / n_steps, [n_steps])
        found.append(relative_difference(selection.outputs(training, state).logits, logits))
    assert found[0] > 3e-3
    assert 5 < found[0] / found[1] < 20


# --- what the flow keeps ---------------------------------------------------------------------------------------------


EASY_AND_HARD = [*list(REGIMES)[:2], pytest.param("not overfitting", marks=pytest.mark.slow)]


@pytest.mark.parametrize("regime", EASY_AND_HARD)
def test_what_the_flow_conserves_stays_constant_to_1e60(regime):
    """V^T V - a a^T: with u = A^T c, (V^T V)' = -V^T u a^T - a u^T V = (a a^T)', as a' = -V^T u and V' = -u a^T.

    At (2000, 20) with seed 2 a sample changes tokens so late that the clock of the integration has to be set back.
    """
    training = drawn(*REGIMES[regime], seed=2)
    start = training.weights.T @ training.weights
    for point in gradient_flow(token_selection(training), [1.0, 1e4, 1e12, 1e60]):
        p, weights = point.state.query, point.state.weights
        now = weights.T @ weights - np.outer(p, p)
        assert relative_difference(now, start) < 1e-7
    assert p @ p > np.abs(start).max()


def test_gradient_descent_conserves_it_only_for_small_steps():
    training = small()
    start = training.weights.T @ training.weights
    drift = []
    for n_steps in (1000, 2000):
        (state,) = selection.gradient_descent(training, 30 / n_steps, [n_steps])
        now = state.weights.T @ state.weights - np.outer(state.query, state.query)
        drift.append(np.abs(now - start).max())
    assert drift[0] > 1e-5
    assert drift[0] / drift[1] == pytest.approx(2, rel=0.2)


def dissipated(system, speed_squared, first, last, n_panels):
    """Integral of |velocity|^2 dt between two times, Gauss-Legendre on panels of log t; and the two states."""
    x, w = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(math.log(first), math.log(last), n_panels + 1)
    nodes = ((edges[:-1] + edges[1:])[:, None] / 2 + np.diff(edges)[:, None] / 2 * x).ravel()
    weights = (np.diff(edges)[:, None] / 2 * w).ravel()
    times = np.concatenate([[first], np.exp(nodes), [last]])
    states = [point.state for point in gradient_flow(system, times)]
    total = sum(c * t * speed_squared(s) for c, t, s in zip(weights, times[1:-1], states[1:-1], strict=True))
    return total, states[0], states[-1]


@pytest.mark.parametrize("seed", [0, 2])
def test_the_loss_falls_by_the_square_of_the_gradient(seed):
    """dL/dt = -|grad|^2: unlike the conserved matrix this sees an error of the clock."""
    training = drawn(seed=seed)

    def speed_squared(state):
        ahead = selection.velocity(training, state)
        return ahead.query @ ahead.query + (ahead.weights**2).sum()

    total, before, after = dissipated(token_selection(training), speed_squared, 1e-3, 1e12, 150)
    fall = loss_of(training, before) - loss_of(training, after)
    assert fall > 0.1
    assert total == pytest.approx(fall, rel=1e-5)


def test_the_loss_of_a_single_head_falls_by_the_square_of_the_gradient():
    training = reduced.draw(10, 400, 2, 0.2, [np.random.default_rng(3)])
    training = reduced.TrainingSet(training.gram[0], training.clean_labels[0], training.labels[0])

    def speed_squared(state):
        ahead = reduced.velocity(training, state, 5.0)
        return (ahead.signal**2).sum() + np.einsum("ki,ij,kj->", ahead.noise, training.gram, ahead.noise)

    def loss(state):
        return np.logaddexp(0, -training.labels * reduced.outputs(training, state, 5.0).f).mean()

    total, before, after = dissipated(single_head(training, 5.0), speed_squared, 1e-4, 1e8, 150)
    assert loss(before) - loss(after) > 0.5
    assert total == pytest.approx(loss(before) - loss(after), rel=1e-5)


# --- long times ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", EASY_AND_HARD)
def test_to_1e60_all_is_finite_the_loss_falls_and_gaps_grow_like_log_time(regime):
    """From 1e30 on every sample has chosen: its gap to the next token grows by log 10 a decade, and a little more as
    p grows too."""
    training = drawn(*REGIMES[regime], seed=1)
    times = [10.0**k for k in range(-3, 61, 3)]
    points = list(gradient_flow(token_selection(training), times, rtol=1e-9, atol=1e-12))
    assert [p.time for p in points] == times
    losses = [loss_of(training, p.state) for p in points]
    assert np.all(np.diff(losses) <= 1e-12)
    assert losses[-1] < losses[0] - 0.05
    logits = np.array([np.sort(selection.outputs(training, p.state).logits, axis=-1) for p in points])
    assert np.all(np.isfinite(logits))
    gaps = logits[..., -1] - logits[..., -2]
    growth = np.diff(gaps[-11:], axis=0) / math.log(1e3)
    assert np.all(growth > 0.9)
    assert np.all(growth < 1.3)
    norms = [np.linalg.norm(p.state.query) for p in points]
    assert np.all(np.diff(norms[-11:]) > 0)


@pytest.mark.parametrize(("regime", "most"), [*zip(REGIMES, [3000, 8000, 8000], strict=True)])
def test_twelve_decades_need_few_evaluations(regime, most):
    """By both integrations together; some samples still change tokens late, which costs the most."""
    (point,) = gradient_flow(token_selection(drawn(*REGIMES[regime])), [1e12])
    assert point.evaluations < most
    assert point.discrepancy < 1e-4


@pytest.mark.parametrize("late_switch", [False, True])
def test_evaluations_are_counted_as_they_are(late_switch):
    system = attention_gap(-46.0) if late_switch else token_selection(small())
    calls = [0]

    def counted(y):
        calls[0] += 1
        return system.velocity(y)

    watched = System(system.start, counted, system.observe, system.scale, system.unpack)
    seen = 0
    for point in gradient_flow(watched, [1.0, 5.0, 1e6, 1e12, 2e20, 1e30]):
        assert seen < point.evaluations <= calls[0] <= point.evaluations + 4
        seen = point.evaluations


def test_the_discrepancy_bounds_the_error():
    training = small(20.0)
    times = [1.0, 1e3, 1e6, 1e12]
    system = token_selection(training)
    fine = gradient_flow(system, times, rtol=1e-10, atol=1e-13)
    for point, reference in zip(gradient_flow(system, times), fine, strict=True):
        ours, exact = (selection.outputs(training, x.state).logits for x in (point, reference))
        error = (np.abs(ours - exact) / np.maximum(1, np.abs(exact))).max()
        assert error < 2 * point.discrepancy + 1e-9
        assert reference.discrepancy < 1e-6


# --- times -----------------------------------------------------------------------------------------------------------


def test_time_zero_is_the_start():
    training = small()
    (point,) = gradient_flow(token_selection(training), [0.0])
    assert not np.any(point.state.query)
    np.testing.assert_array_equal(point.state.weights, training.weights)
    assert point.discrepancy == 0


def test_a_time_does_not_depend_on_which_others_are_asked_for():
    training = small(3.0, seed=1)
    system = token_selection(training)
    crowd = [0.0, 0.1, 1.0, 7.0, 1e3, 1e5, 1e6, 1e12, 1e40]
    together = {p.time: p for p in gradient_flow(system, crowd)}
    for time in (7.0, 1e6, 1e40):
        (alone,) = gradient_flow(system, [time])
        ours, reference = (selection.outputs(training, p.state).logits for p in (alone, together[time]))
        assert relative_difference(ours, reference) < 1e-6


def test_points_close_together_are_in_order():
    """Many points within one step of the solver: interpolation is monotone where the flow is."""
    times = np.geomspace(1e6, 1.001e6, 50)
    gaps = [point.state[0] for point in gradient_flow(attention_gap(0.0), times)]
    assert np.all(np.diff(gaps) > 0)


@pytest.mark.parametrize(
    "times",
    [[], [2.0, 1.0], [1.0, 1.0], [-1.0, 1.0], [math.nan], [1.0, math.nan, 3.0], [0.0, math.inf], [1e301], [-math.inf]],
    ids=str,
)
def test_bad_times_are_refused_in_one_line(times):
    with pytest.raises(ParameterError, match=r"^times must be increasing numbers in \[0, 1e\+300\]$"):
        next(gradient_flow(attention_gap(0.0), times))


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [0.0, 1e-14, 2.0, math.nan, -1.0])
def test_tolerances_that_hang_the_solver_are_refused_in_one_line(name, value):
    with pytest.raises(ParameterError, match=rf"^{name} must be a number in \[1e-13, 1\], got {value:g}$"):
        next(gradient_flow(attention_gap(0.0), [1.0], **{name: value}))


@pytest.mark.parametrize(("start", "scale"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, math.nan)])
def test_a_start_or_scale_that_hangs_the_solver_is_an_error(start, scale):
    system = System(np.array([start]), lambda y: y, lambda y: y, np.array([scale]), lambda y: y)
    with pytest.raises(FlowError, match=r"^gradient flow needs a finite start and scales greater than zero$"):
        next(gradient_flow(system, [1.0]))


# --- when it cannot be done ------------------------------------------------------------------------------------------


def failure(flow):
    with pytest.raises(FlowError) as caught:
        list(flow)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_tolerance_that_is_not_met_is_an_error_that_says_what_to_change():
    system = token_selection(drawn())
    message = failure(gradient_flow(system, [1.0, 1e6], tolerance=1e-9, rtol=1e-3, atol=1e-3))
    assert message.startswith("gradient flow at t = ")
    for part in ("tolerance = 1e-09", "lower rtol (now 0.001) or atol (now 0.001)"):
        assert part in message


def test_an_error_at_a_point_names_its_parameters():
    line = r"^dim, t_max must allow an accurate gradient flow, got dim = 3, t_max = 1e\+20: gradient "
    with pytest.raises(ParameterError, match=line), at_point(dim=3, t_max=1e20):
        list(gradient_flow(attention_gap(-3.0), [1e20], tolerance=1e-12, rtol=1e-4))


def test_points_before_the_failure_are_delivered():
    flow = gradient_flow(attention_gap(-3.0), [0.0, 1e3, 1e20], tolerance=1e-12, rtol=1e-4)
    assert next(flow).time == 0.0
    with pytest.raises(FlowError):
        list(flow)


def test_a_flow_that_blows_up_is_an_error():
    """y' = y^2 leaves every bound at t = 1."""
    with np.errstate(all="ignore"):
        message = failure(gradient_flow(scalar_system(lambda y: y**2, 1.0), [0.5, 2.0]))
    assert message.startswith("gradient flow")


def test_a_velocity_that_is_not_a_number_is_an_error():
    calls = itertools.count()

    def rate(y):
        if next(calls) > 500_000:
            raise RuntimeError("the solver does not give up")
        return np.where(y < 0.5, 1.0, math.nan)

    with np.errstate(all="ignore"):
        message = failure(gradient_flow(scalar_system(rate, 0.0), [0.1, 2.0]))
    assert message.startswith("gradient flow")


def test_a_loose_solver_is_caught_rather_than_believed():
    """rtol = 1e-3 goes wrong somewhere on the way to 1e12; the discrepancy says by how much."""
    system = token_selection(small(3.0))
    worst = 0.0
    exact = gradient_flow(system, [10.0**k for k in range(0, 13, 2)])
    loose = gradient_flow(system, [10.0**k for k in range(0, 13, 2)], tolerance=math.inf, rtol=1e-3, atol=1e-6)
    for reference, point in zip(exact, loose, strict=True):
        a, b = system.observe(pack(point.state)), system.observe(pack(reference.state))
        error = (np.abs(a - b) / np.maximum(1, np.abs(b))).max()
        worst = max(worst, error)
        assert error < 10 * point.discrepancy + 1e-7
    assert worst > 1e-4


def pack(state):
    return np.concatenate([state.query, state.weights.ravel()])


def test_two_flows_side_by_side_do_not_disturb_each_other():
    one, two = (token_selection(small(seed=seed)) for seed in (0, 1))
    times = [1.0, 100.0]
    alone = [[p.state.query for p in gradient_flow(system, times)] for system in (one, two)]
    together = zip(gradient_flow(one, times), gradient_flow(two, times), strict=True)
    for k, (p, q) in enumerate(together):
        np.testing.assert_array_equal(p.state.query, alone[0][k])
        np.testing.assert_array_equal(q.state.query, alone[1][k])
