"""Chapter delayed_generalization: delays, censoring, and what the search for late accuracy rests on."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benign_attention import claims, flow, selection
from benign_attention.experiments import delayed_generalization as chapter
from benign_attention.experiments.delayed_generalization import Params, measure
from benign_attention.parameters import ParameterError

SMALL = Params(n_train=8, n_tokens=4, n_snr2_grid=[1.0, 0.5], label_noise=0.25, t_max=1e8, n_seeds=2)


@pytest.fixture(scope="module")
def explored():
    return chapter.explore(SMALL)


def test_delays_are_those_of_the_orthogonal_limit(explored):
    for name, expected in zip(("log_delay_x1", "log_delay_x0.5"), explored.fit.limit_at_x.log_delay, strict=True):
        assert measure(SMALL)[name].value == pytest.approx(expected, rel=0.03)


def test_delay_of_the_paper_s_setting_at_two_values():
    found = measure(Params(n_snr2_grid=[1.0, 0.2], t_max=1e14, n_seeds=2))
    assert found["log_delay_x1"].value == pytest.approx(3.2265, abs=0.03)
    assert found["log_delay_x0.2"].value == pytest.approx(27.524, abs=0.2)
    assert found["gap_growth_exponent"].value == pytest.approx(1.0, abs=0.01)
    assert found["flow_discrepancy"].value < 1e-3


def test_what_is_not_reached_by_t_max_is_a_lower_bound():
    metric = measure(SMALL.replace(n_snr2_grid=[0.1], t_max=1e4))["log_delay_x0.1"]
    assert metric.value is None
    assert metric.per_seed == [None, None]
    assert metric.kind.startswith("lower bound: 2 of 2")
    assert 0 < metric.low < math.log(1e4 / (0.1 * chapter.natural_time(SMALL.point(0.1))))


def test_without_noisy_labels_there_is_no_time_of_fitting():
    metric = measure(SMALL.replace(label_noise=0.0, t_max=1.0))["log_delay_x1"]
    assert metric.value is None
    assert metric.low is None


def test_growing_the_grid_or_the_seeds_keeps_what_is_there():
    more = SMALL.replace(n_snr2_grid=[0.3, 1.0], n_seeds=3, t_max=1e4)
    fewer = SMALL.replace(n_snr2_grid=[1.0], t_max=1e4)
    assert measure(more)["log_delay_x1"].per_seed[:2] == measure(fewer)["log_delay_x1"].per_seed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_snr2_grid": [1.0, 1.0]}, "n_snr2_grid must hold different values"),
        ({"n_snr2_grid": []}, "n_snr2_grid must be a non-empty list"),
        ({"n_snr2_grid": [0.0]}, "n_snr2_grid[0] must be a number in [0.001, 1000]"),
        ({"t_max": math.inf}, "t_max"),
        ({"t_max": 0.5}, "t_max must be a number in [1, 1e+200]"),
        ({"n_tokens": 2}, "n_tokens must be a whole number of at least 3"),
        ({"signal_norm": 1.0}, "signal_norm is not a parameter"),
    ],
)
def test_bad_input_is_one_line_that_names_the_parameter(changes, message):
    with pytest.raises(ParameterError) as error:
        Params(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_crossings_are_found_between_times():
    time = np.exp(np.array([0.0, 1.0, 2.0, 3.0]))
    values = np.array([[-1.0, -0.5, 0.5, 2.0], [1.0, 2.0, 3.0, 4.0], [-1.0, -1.0, -1.0, -1.0]])
    found = chapter.log_crossing(time, values)
    assert found[0] == pytest.approx(1.5)
    assert np.isnan(found[1])
    assert np.isposinf(found[2])


def test_descent_converges_to_the_flow_with_the_step_size(explored):
    assert explored.metrics["descent_order"].value == pytest.approx(1.0, abs=0.15)


def test_a_trained_head_moves_as_descent_moves_it():
    """Euler steps of `selection.velocity` and `head_velocity` against the flow."""
    training = selection.draw(SMALL.point(1.0, dim=200), np.random.default_rng(3))
    end, n_steps = 0.3, 3000
    head, state = 0.0 * training.head, selection.initial_state(training)
    for _ in range(n_steps):
        here = replace(training, head=head)
        ahead = selection.velocity(here, state)
        head = head + end / n_steps * selection.head_velocity(here, state)
        state = selection.State(
            state.query + end / n_steps * ahead.query, state.weights + end / n_steps * ahead.weights
        )
    (point,) = flow.gradient_flow(flow.trained_head(training), [end])
    np.testing.assert_allclose(point.state[0].head, head, atol=2e-3 * np.abs(head).max())
    np.testing.assert_allclose(point.state[1].query, state.query, atol=2e-3 * np.abs(state.query).max())


def test_aligned_heads_are_right_from_the_start_and_noisy_ones_by_their_formula(explored):
    from scipy.stats import norm

    for setting in explored.search:
        kappa = float(setting.name.removeprefix("head noise ")) if "noise" in setting.name else 0.0
        if "noise" not in setting.name and setting.name != "aligned head":
            continue
        size = math.hypot(1 / SMALL.point(chapter.X_SEARCH).signal_norm, kappa)
        start = norm.cdf(1 / (math.sqrt(2 * SMALL.n_tokens) * size))
        assert setting.trajectories.test_accuracy[:, 0] == pytest.approx(start, abs=5e-3)


CONTROLLED = [c for c in claims.load_claims("delayed_generalization") if c.id in ("TS-2c", "TS-4a", "TS-5a")]
CONTROLS = [(c, control.change) for c in CONTROLLED for control in c.controls]


@pytest.mark.parametrize(("claim", "change"), CONTROLS, ids=lambda x: getattr(x, "id", str(x)))
def test_claims_fail_where_they_should(claim, change):
    params = Params(**{"n_snr2_grid": [0.5, 0.2, 0.1], "n_seeds": 3, "t_max": 1e25, **change})
    metrics = chapter.grid_metrics(chapter.trajectories(params), chapter.delay_fit(params))
    assert claim.verdict(metrics) not in ("supported", "not run")


@pytest.mark.parametrize("changes", [{"label_noise": 0.0}, {"weak_ratio": 0.0}, {"n_snr2_grid": [1000.0]}], ids=str)
def test_delays_that_are_all_undefined_still_draw(changes):
    from benign_attention.figures import delayed_generalization as figures

    figures.delay(chapter.delay_fit(SMALL.replace(**changes))).canvas.draw()
