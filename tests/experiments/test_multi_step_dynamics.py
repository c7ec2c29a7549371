"""Chapter multi_step_dynamics: runs against independent pipelines, derived laws, and the claims' controls."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from benign_attention import claims, explicit, population, reduced, thresholds
from benign_attention.data import draw_single_head, from_natural_units
from benign_attention.experiments import multi_step_dynamics as chapter
from benign_attention.experiments.multi_step_dynamics import Params, Run, simulate
from benign_attention.flow import gradient_flow
from benign_attention.parameters import ParameterError

SMALL = Params(
    n_train=30,
    dim=3000,
    signal_norm=25.0,
    step_size=0.05,
    label_noise=0.1,
    n_steps=60,
    label_noise_grid=[0.1],
    tokens_grid=[2, 8],
    t_max=1e4,
    map_points=3,
    n_seeds=2,
)


def generator(*key):
    return np.random.default_rng(list(key))


def last(found):
    return found.at(slice(None), -1)


# --- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [2, 4])
def test_a_snapshot_is_what_autograd_and_fresh_samples_show(n_tokens):
    """Sampled test accuracy within 5 standard errors (false alarm < 1e-6); everything else to rounding."""
    n, dim, rho, beta, steps = 16, 80, 4.0, 0.3, 40
    data = draw_single_head(n, dim, n_tokens, rho, 0.25, generator(n_tokens))
    training = reduced.from_data(data)
    *_, state = reduced.gradient_descent(training, rho, beta, steps)
    found = chapter.snapshot(training, state, rho, test_loss=True)
    model = explicit.SingleHeadAttention(dim)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    *_, _ = explicit.gradient_descent(model, tokens, labels, beta, steps)
    with torch.no_grad():
        attention, f = model.attention(tokens).numpy(), model(tokens).numpy()
    noisy, rows = data.labels != data.clean_labels, np.arange(n)
    on_signal = attention[rows, data.position]
    on_noise = np.where(np.arange(n_tokens) == data.position[:, None], 0.0, attention)
    p, v = model.p.detach().numpy(), model.v.detach().numpy()
    expected = {
        "train_accuracy": (f * data.labels > 0).mean(),
        "noisy_train_accuracy": (f * data.labels > 0)[noisy].mean(),
        "train_loss": np.log1p(np.exp(-f * data.labels)).mean(),
        "clean_attention": on_signal[~noisy].mean(),
        "noisy_attention": on_signal[noisy].mean(),
        "largest_share": (on_noise.max(axis=1) / on_noise.sum(axis=1))[noisy].mean() if n_tokens > 2 else np.nan,
        "p_signal": np.linalg.norm(p[:2]),
        "p_noise": np.linalg.norm(p[2:]),
        "v_signal": np.linalg.norm(v[:2]),
        "v_noise": np.linalg.norm(v[2:]),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)
    fresh = draw_single_head(40_000, dim, n_tokens, rho, 0.0, generator(9, n_tokens))
    with torch.no_grad():
        margin = model(torch.tensor(fresh.tokens)).numpy() * fresh.clean_labels
    right, loss = (margin > 0).mean(), np.logaddexp(0.0, -margin)
    assert 0.6 < right < 0.999
    assert right == pytest.approx(float(found.test_accuracy), abs=5 * math.sqrt(right * (1 - right) / 40_000) + 0.005)
    assert loss.mean() == pytest.approx(float(found.test_loss), abs=5 * loss.std() / 200 + 0.005)
    assert np.isnan(chapter.snapshot(training, state, rho).test_loss)


def test_small_steps_of_descent_reach_the_flow():
    point = SMALL.point()
    time = 10.0 / SMALL.d_over_n
    flow = simulate(Run(point, generator(1), np.array([time]), 2.0))
    descent = simulate(Run(point, generator(1), np.array([1000]), 2.0, 0.01))
    for name in ("clean_attention", "noisy_attention", "p_noise", "v_signal", "train_loss"):
        assert getattr(descent, name)[0] == pytest.approx(getattr(flow, name)[0], rel=2e-3)


def test_a_grid_is_its_single_runs():
    point, b = SMALL.point(), np.array([0.5, 5.0])
    together = simulate(Run(point, generator(2), np.array([2, 30]), np.array([1.0, 3.0])[:, None], b, scale=0.3))
    alone = simulate(Run(point, generator(2), np.array([30]), 3.0, 5.0, scale=0.3))
    assert together.test_accuracy.shape == (2, 2, 2)
    for name in ("test_accuracy", "clean_attention", "p_noise"):
        np.testing.assert_allclose(getattr(together, name)[1, 1, 1], getattr(alone, name)[0], rtol=1e-9)


def test_large_random_weights_show_on_fresh_data_before_training():
    """One tiny step from s sqrt(d) = 3 leaves fresh values with a standard deviation of 3, to the spread of |v_0|."""
    found = simulate(Run(SMALL.point(), generator(3), np.array([1]), 1.0, 1e-9, scale=3.0))
    assert found.v_noise[0] == pytest.approx(3.0, rel=5 / math.sqrt(2 * SMALL.dim))
    assert found.p_noise[0] == pytest.approx(3.0, rel=5 / math.sqrt(2 * SMALL.dim))


def test_balanced_sets_have_the_same_flips_in_both_classes():
    training = chapter.balanced_set(SMALL.point(40, label_noise=0.1), generator(4))
    for y in (1, -1):
        assert (training.clean_labels == y).sum() == 20
        assert training.noisy[training.clean_labels == y].sum() == 2


# --- late times ------------------------------------------------------------------------------------------------------


def test_time_below_a_level_is_interpolated_and_censored():
    times = np.array([1.0, 10.0, 100.0])
    values = np.array([[1.0, 0.95, 0.85], [0.8, 0.7, 0.6], [1.0, 1.0, 0.95]])
    found = chapter.log_time_below(times, values, 0.9)
    np.testing.assert_allclose(found, [math.log(10) * 1.5, -np.inf, np.inf])


def test_attention_on_the_signal_falls_as_derived_below_the_threshold():
    """e^Lambda = (1 + x) (ln t')^2 / 2 and P = -phi Lambda up to constants: increments between two late times."""
    c = 0.8
    x = c**2 / 2
    early, late = (point.state for point in gradient_flow(thresholds.limit_flow(c, 0.05), [1e50, 1e100]))
    growth = []
    for state in (early, late):
        attention = state.clean_attention[0]
        growth.append(
            (math.sqrt(2 * (1 / attention - 1) / (1 + x)), state.signal_logit[0], math.log(1 / attention - 1))
        )
    (root0, p0, gap0), (root1, p1, gap1) = growth
    assert root1 - root0 == pytest.approx(50 * math.log(10), rel=0.05)
    assert (p1 - p0) / (gap1 - gap0) == pytest.approx(-x / (1 + x), rel=0.05)


def test_the_loss_time_tends_to_the_derived_power():
    """The limit at d/n = 10^6 and 10^8, far beyond what the chapter measures."""
    c, ratios = 0.8, np.array([1e6, 1e8])
    times = np.geomspace(1.0, 1e200, 300)
    states = [point.state for point in gradient_flow(thresholds.limit_flow(c, 0.05), times)]
    accuracy = np.array([chapter.limit_test_accuracy(state, 0.05, ratios)[:, 0] for state in states])
    first, second = chapter.log_time_below(times, accuracy.T, chapter.POOR)
    assert math.log(second / first) / math.log(100) == pytest.approx(float(chapter.loss_exponent(c)), abs=0.02)


def test_the_limits_test_accuracy_is_that_of_a_large_training_set():
    c, ratio, time = 1.0, 1e5, 1e3
    (point,) = gradient_flow(thresholds.limit_flow(c, 0.1), [time])
    found = simulate(
        Run(SMALL.point(40, ratio, label_noise=0.1), generator(5), np.array([time / ratio]), c, balanced=True)
    )
    limit = chapter.limit_test_accuracy(point.state, 0.1, [ratio])[0, 0]
    assert found.test_accuracy[0] == pytest.approx(limit, abs=0.01)
    assert found.v_signal[0] * from_natural_units(c, 1, 40, int(40 * ratio))[0] == pytest.approx(
        math.sqrt(2) * point.state.signal_value[0], rel=0.02
    )


# --- the point -------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_issue():
    found = chapter.measure(SMALL)
    assert set(found) == {
        "train_accuracy",
        "test_accuracy",
        "clean_signal_attention",
        "noisy_signal_attention",
        "largest_noise_share_noisy",
        "threshold_c_eta0.1",
    }
    assert found["largest_noise_share_noisy"].value is None
    several = chapter.measure(SMALL.replace(n_tokens=3, n_steps=300))
    assert several["largest_noise_share_noisy"].value > 0.8


def test_more_seeds_steps_and_times_leave_the_runs_as_they_were():
    few = chapter.measure(SMALL)
    many = chapter.measure(SMALL.replace(n_seeds=3, t_max=2e4, map_points=5))
    assert many["test_accuracy"].per_seed[:2] == few["test_accuracy"].per_seed
    assert many["clean_signal_attention"].per_seed[:2] == few["clean_signal_attention"].per_seed


def test_the_paper_configuration_stays_benign_and_a_weak_signal_is_lost():
    base = {"label_noise_grid": [0.1], "n_steps": 1000, "n_seeds": 3, "t_max": 1e4}
    benign, weak = (chapter.measure(Params(**base, **change)) for change in ({}, {"signal_norm": 7.0}))
    assert benign["clean_signal_attention"].low > 0.9 and benign["test_accuracy"].low > 0.999
    assert weak["clean_signal_attention"].high < 0.1 and weak["train_accuracy"].low == 1


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        (claim, control.change)
        for claim in claims.load_claims("multi_step_dynamics")
        for control in claim.controls
        if claim.id == "SH-5a"
    ],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_longer_training_is_not_benign_where_it_should_not_be(claim, change):
    params = Params(**{"n_seeds": 3, "n_steps": 1000, "label_noise_grid": [0.1], "t_max": 1e4, **change})
    assert claim.verdict(chapter.measure(params)) not in ("supported", "not run")


PARTS = {
    "SH-4d": "trajectories",
    "SH-5b": "windows",
    "Q-SH-5": "strong",
    "Q-SH-4a": "loss",
    "SH-10": "shares",
    "SH-14": "token_counts",
    "Q-SH-15": "initial_weights",
}
SMALLER = {"n_steps": 1000, "t_max": 1e6, "tokens_grid": [2, 32]}


@pytest.fixture(scope="module")
def small_parts():
    explored = chapter.explore(SMALL)
    names = {f.name for f in fields(explored)} - {"metrics", "threshold", "thresholds"}
    return {name: getattr(explored, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_claims_about_late_times_fail_where_they_should(name, small_parts):
    (claim,) = [c for c in claims.load_claims("multi_step_dynamics") if c.id == name]
    measure = {
        "trajectories": lambda p: chapter.trajectories(p, chapter.long_time_threshold(p)),
        "windows": chapter.windows,
        "strong": chapter.strong_signal,
        "loss": lambda p: chapter.loss_times(p, chapter.long_time_threshold(p)),
        "shares": chapter.shares,
        "token_counts": chapter.token_counts,
        "initial_weights": chapter.initial_weights,
    }[PARTS[name]]

    def verdict(**change):
        params = Params(**{**SMALLER, **({"t_max": 1e20} if name == "Q-SH-4a" else {}), **change})
        return claim.verdict(chapter._claim_metrics(params, **{**small_parts, PARTS[name]: measure(params)}))

    assert verdict() == "supported"
    assert claim.controls
    for control in claim.controls:
        assert verdict(**control.change) not in ("supported", "not run")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n_train": 10**5}, "n_train"),
        ({"tokens_grid": [2]}, "tokens_grid"),
        ({"tokens_grid": [3, 4]}, "tokens_grid"),
        ({"tokens_grid": [2, 4, 4]}, "tokens_grid"),
        ({"tokens_grid": [2, 256]}, "tokens_grid"),
        ({"n_tokens": 10**6}, "n_tokens"),
        ({"n_steps": 1}, "n_steps"),
        ({"t_max": 1e301}, "t_max"),
        ({"label_noise_grid": []}, "label_noise_grid"),
        ({"label_noise_grid": [0.5]}, "label_noise_grid"),
        ({"map_points": 2}, "map_points"),
    ],
)
def test_impossible_points_are_refused_by_name(change, name):
    with pytest.raises(ParameterError, match=name):
        SMALL.replace(**change)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"label_noise": 0.0}, {"n_tokens": 3}, {"n_train": 4, "dim": 12}])
def test_exploration_runs_at_any_point(change):
    found = chapter.explore(SMALL.replace(**change)).metrics
    assert 0 <= found["test_accuracy_flow_share0.5"].value <= 1


def test_torch_gives_the_numbers_of_numpy(monkeypatch):
    run = Run(SMALL.point(), generator(6), np.array([2, 50]), np.array([1.0, 2.0]), 5.0)
    expected = simulate(run)
    monkeypatch.setattr(reduced.TrainingSet, "on", lambda self, _: self.to("cpu"))
    found = simulate(Run(SMALL.point(), generator(6), np.array([2, 50]), np.array([1.0, 2.0]), 5.0))
    np.testing.assert_allclose(found.test_accuracy, expected.test_accuracy, rtol=1e-8)
    np.testing.assert_allclose(found.clean_attention, expected.clean_attention, rtol=1e-8)


def test_long_time_threshold_is_the_boundary_of_the_flow():
    threshold = chapter.long_time_threshold(SMALL)
    for factor, kept in ((0.85, False), (1.15, True)):
        run = Run(SMALL.point(60, 500), generator(7), np.array([1e6]), factor * threshold, balanced=True)
        assert (simulate(run).clean_attention[0] > 0.5) == kept


def test_population_accuracy_at_few_points_agrees_with_many():
    training = reduced.draw(10, 300, 4, 0.2, [generator(8)])
    *_, state = reduced.gradient_descent(training, 4.0, 0.5, 20)
    law = population.fresh_token(training, state, 4.0)
    few, many = (population.accuracy_of(law, 3, log2_points=k) for k in (9, 12))
    assert few.value[0] == pytest.approx(many.value[0], abs=0.005)
