"""Chapter token_selection: the point's metrics, the predictions, and what its sweeps rest on."""

import math

import numpy as np
import pytest
import torch

from benign_attention import claims, explicit, selection, selection_population
from benign_attention import selection_theory as theory
from benign_attention.data import draw_token_selection
from benign_attention.devices import available
from benign_attention.experiments import token_selection as chapter
from benign_attention.experiments.token_selection import CONFUSING, RELEVANT, Params, measure
from benign_attention.parameters import ParameterError
from benign_attention.selection import TrainingSet

SMALL = Params(
    n_train=6,
    dim=400,
    n_steps=60,
    map_points=3,
    few_seeds=2,
    n_seeds=2,
    norm_grid=[5.0, 40.0],
    late_grid=[0.1],
    release_grid=[40.0, 100.0],
    encoder_dim=120,
    encoder_steps=5,
)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """On models this small a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_metrics_agree_with_autograd_on_explicit_tokens_and_sampled_test_data():
    """Two independent pipelines, 40 draws each: every metric within 4.5 standard errors (false alarm < 1e-4)."""
    point = {"n_train": 8, "dim": 60, "n_tokens": 4, "signal_norm": 4.0, "weak_ratio": 0.3, "label_noise": 0.25}
    found = measure(Params(**point, step_size=0.5, n_steps=25, n_seeds=40))
    setting = Params(**point).point()
    rows = []
    for i in range(40):
        rng = np.random.default_rng([7, i])
        data = draw_token_selection(setting, rng)
        fresh = draw_token_selection(setting.replace(n_train=2000, label_noise=0.0), rng)
        start = torch.tensor(rng.standard_normal((60, 60)) / math.sqrt(180))
        model = explicit.TokenSelectionAttention(torch.tensor(data.signals), start)
        tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
        *_, model = explicit.gradient_descent(model, tokens, labels, 0.5, 25)
        with torch.no_grad():
            attention = model.attention(tokens).numpy()
            margin = (model(tokens) * labels).numpy()
            fresh_margin = (model(torch.tensor(fresh.tokens)) * torch.tensor(fresh.labels)).numpy()
        noisy = data.labels != data.clean_labels
        rows.append(
            {
                "train_accuracy": (margin > 0).mean(),
                "test_accuracy": (fresh_margin > 0).mean(),
                "train_loss": np.logaddexp(0, -margin).mean(),
                "test_loss": np.logaddexp(0, -fresh_margin).mean(),
                "relevant_attention_clean": attention[~noisy, 0].mean(),
                "relevant_attention_noisy": attention[noisy, 0].mean(),
                "confusing_attention_noisy": attention[noisy, 2].mean(),
            }
        )
    assert set(found) == set(rows[0])
    for name, metric in found.items():
        theirs, ours = np.array([row[name] for row in rows]), np.array(metric.per_seed)
        spread = math.sqrt(theirs.var() / 40 + ours.var() / 40)
        assert abs(theirs.mean() - ours.mean()) < 4.5 * spread, name


def test_the_benign_regime_fits_labels_through_other_tokens_and_finds_the_signal():
    metrics = measure(Params())
    assert metrics["test_accuracy"].value > 0.999
    assert metrics["relevant_attention_clean"].value > 0.99
    assert metrics["relevant_attention_noisy"].value < 0.02
    assert metrics["test_loss"].value == pytest.approx(0.46, abs=0.02)


def test_more_seeds_leave_the_first_ones_as_they_were():
    few, many = measure(SMALL), measure(SMALL.replace(n_seeds=4))
    for name, metric in few.items():
        assert many[name].per_seed[:2] == metric.per_seed


def test_grids_do_not_touch_the_point():
    other = SMALL.replace(map_points=9, few_seeds=7, norm_grid=[1.0], encoder_dim=50, encoder_steps=9)
    assert measure(other) == measure(SMALL)


def test_without_flipped_labels_their_attention_is_undefined():
    metrics = measure(SMALL.replace(label_noise=0.0))
    assert metrics["relevant_attention_noisy"].value is None and metrics["confusing_attention_noisy"].value is None
    assert metrics["train_accuracy"].value == 1.0


@pytest.mark.parametrize("change", [{"dim": 3}, {"n_tokens": 3, "dim": 30}, {"n_train": 2}, {"signal_norm": 0.01}])
def test_low_dimension_and_small_samples_are_legitimate(change):
    assert 0 <= measure(SMALL.replace(**change))["test_accuracy"].value <= 1


# Predictions


def test_the_luckiest_token_is_that_of_drawn_values():
    """20000 draws: shares within .02, five standard errors (false alarm < 1e-5)."""
    rng = np.random.default_rng(0)
    for norm, weak, T in ((20.0, 0.1, 8), (3.0, 0.5, 4), (2.0, 0.0, 3)):
        values = rng.standard_normal((20_000, T)) / norm
        values[:, :3] += np.array([-1, -weak, weak]) / math.sqrt(2)
        best = np.eye(T)[values.argmax(axis=1)].mean(axis=0)
        found = theory.best_value_shares(norm, weak, T)
        assert found.sum() == pytest.approx(1, abs=1e-9)
        np.testing.assert_allclose(found, selection.by_role(best), atol=0.02)
        assert theory.unfittable_share(norm, weak, T) == pytest.approx((values < 0).all(axis=1).mean(), abs=0.02)


def test_the_luckiest_token_of_a_strong_signal_is_the_confusing_one():
    np.testing.assert_allclose(theory.best_value_shares(1e6, 0.1, 8), [0, 0, 1, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"release_grid": [100.0, 100.0]}, "release_grid must hold different values, to six digits, got"),
        ({"late_grid": [1e-15]}, r"late_grid\[0\] must be a number in \[0.001, 1000\], got 1e-15"),
        ({"encoder_dim": 8}, r"encoder_dim must be a whole number in \[9, 20000\], got 8"),
    ],
)
def test_grids_that_cannot_be_measured_are_refused_in_one_line(change, line):
    with pytest.raises(ParameterError, match=f"^{line}[^\n]*$"):
        SMALL.replace(**change)


def test_more_tokens_than_memory_holds_are_refused_in_one_line():
    with pytest.raises(ParameterError, match=r"^n_train times n_tokens must be at most 10000, got 10000004$"):
        measure(SMALL.replace(n_train=2, n_tokens=5_000_002))


def test_an_encoder_step_that_diverges_is_named_as_it_was_given():
    params = SMALL.replace(step_size=1e5, encoder_dim=9, encoder_steps=5)
    with pytest.raises(ParameterError, match=r"^step_size must be small enough to train, got 100000: the encoder"):
        chapter.encoders(params, n_test=10)


def test_the_worst_flow_of_every_seed_is_recorded():
    points = [SMALL.point(), SMALL.point(signal_norm=5.0)]
    readings = chapter.follow(SMALL, points, 2, [1.0, 1e6])
    rows = readings.flow_discrepancy
    assert rows.shape == (2, 2, 2)
    assert ((rows > 0) & (rows < 1e-3)).all()
    assert (chapter.descend(SMALL, points, 2, [1]).flow_discrepancy == 0).all()


@pytest.mark.parametrize("T", [4, 8])
def test_untrained_accuracy_is_that_of_uniform_attention(T):
    params = SMALL.replace(n_tokens=T, signal_norm=3.0, step_size=1e-12)
    assert measure(params)["test_accuracy"].value == pytest.approx(theory.untrained_accuracy(3.0, T), abs=1e-3)


@pytest.mark.parametrize(("factor", "turns"), [(0.7, False), (1.3, True)])
def test_flipped_samples_first_turn_to_the_relevant_token_above_the_threshold(factor, turns):
    params = SMALL.replace(n_train=20, weak_ratio=0.0, dim=10**8, step_size=1e-7, n_steps=2, label_noise=0.2)
    x = factor * theory.first_turn(params.n_tokens, params.label_noise, params.weak_ratio)
    attention = measure(params.replace(signal_norm=params.norm_at(x, params.dim)))["relevant_attention_noisy"]
    assert all((value > 1 / params.n_tokens) == turns for value in attention.per_seed)


def test_the_limit_lets_go_at_the_rate_of_the_closed_form():
    """Asymptotics: between x = 1500 and 2000 the slope of log time is within 6 % of c."""
    taus = np.geomspace(1e3, 1e13, 120)
    times = []
    for x in (1500.0, 2000.0):
        job = chapter.LimitJob(chapter._limit_point(Params(), x, n_tokens=3, weak_ratio=0.0), tuple(taus))
        times.append(chapter.release_time(taus, chapter.limit_curves(job)[0]))
    slope = math.log(times[1] / times[0]) / 500
    assert slope == pytest.approx(theory.waiting_rate(3, 0.2), rel=0.06)


def test_no_signal_holds_too_many_flipped_samples():
    largest = 1 / (1 + math.exp(math.sqrt(0.5)))
    assert theory.waiting_rate(8, largest + 1e-6) == 0
    assert 0 < theory.waiting_rate(8, largest - 1e-2) < theory.waiting_rate(8, 0.1) < math.inf
    assert theory.waiting_rate(8, 0.0) == math.inf


def test_plateaus_of_the_train_loss_are_reached():
    """Corner of the map: all samples on the relevant token; values' noise is 1 % there."""
    params = Params()
    corner = chapter.descend(params, [params.point(dim=250, signal_norm=100.0)], 2, [1000])[0][:, -1]
    np.testing.assert_allclose(
        corner.train_loss,
        theory.selected_train_loss(params.label_noise, params.weak_ratio, fitted=False),
        atol=4e-3,
    )
    assert (corner.noisy_train_accuracy == 0).all() and (corner.noisy_selected[:, RELEVANT] == 1).all()
    released = chapter.descend(params, [params.point(dim=5000, signal_norm=100.0)], 2, [1000])[0][:, -1]
    np.testing.assert_allclose(
        released.train_loss,
        theory.selected_train_loss(params.label_noise, params.weak_ratio, fitted=True),
        atol=4e-3,
    )
    assert (released.noisy_selected[:, CONFUSING] == 1).all()


# Readings


def test_attended_outputs_of_fresh_samples_have_the_exact_accuracy():
    """40000 samples: within 4.5 standard errors (false alarm < 1e-5), where accuracy is far from 0 and 1."""
    params = Params(signal_norm=4.0, dim=500)
    job = chapter._jobs(params, [params.point()], 1, [1000], step_size=params.step_size)[0]
    training = selection.draw(job.point, job.rng)
    (state,) = selection.gradient_descent(training, params.step_size, [1000])
    exact = selection_population.test_quantities(selection_population.fresh_sample(training, state))
    position, labels = chapter.attended_fresh(training, state, 40_000, np.random.default_rng(1))
    right = labels * (position[:, 0] - position[:, 1]) > 0
    assert 0.6 < exact.accuracy.value < 0.95
    assert abs(right.mean() - exact.accuracy.value) < 4.5 * right.std() / 200
    loss = np.logaddexp(0, -labels * (position[:, 0] - position[:, 1]) / math.sqrt(2))
    assert abs(loss.mean() - exact.loss.value) < 4.5 * loss.std() / 200


def test_samples_of_a_kind_are_averaged_apart():
    samples = np.array([[True, False, True], [False, False, False]])
    values = np.array([[1.0, 9.0, 3.0], [5.0, 5.0, 5.0]])
    np.testing.assert_array_equal(chapter._mean_over(samples, values), [2.0, np.nan])
    roles = np.stack([values, -values], axis=-1)
    np.testing.assert_array_equal(chapter._mean_over(samples, roles), [[2.0, -2.0], [np.nan, np.nan]])


def test_release_is_the_last_fall_below_one_half():
    times = np.array([1.0, 10.0, 100.0, 1000.0])
    assert chapter.release_time(times, np.array([0.2, 0.9, 0.6, 0.4])) == pytest.approx(100 * 10**0.5)
    assert math.isnan(chapter.release_time(times, np.array([0.2, 0.4, 0.3, 0.1])))
    assert math.isnan(chapter.release_time(times, np.array([0.2, 0.9, 0.9, 0.8])))
    assert math.isnan(chapter.release_time(times, np.full(4, np.nan)))


def test_what_x_explains_is_not_left():
    rng = np.random.default_rng(0)
    x = 10 ** rng.uniform(0, 3, 400)
    assert chapter.unexplained(x, np.log(x)) < 0.02
    assert chapter.unexplained(x, rng.standard_normal(400)) > 0.9
    assert math.isnan(chapter.unexplained(np.array([1.0, 10.0]), np.array([1.0, 2.0])))


def test_boundaries_are_where_attention_rises_through_one_half():
    x = np.array([1.0, 10.0, 100.0])
    assert chapter._last_rise(x, np.array([0.1, 0.4, 0.6])) == pytest.approx(10**1.5)
    assert math.isnan(chapter._last_rise(x, np.array([0.1, 0.2, 0.3])))


@pytest.mark.parametrize("name", [None, *available()])
def test_batches_on_every_device_give_the_numbers_of_single_runs(name, monkeypatch):
    """One of the points has fewer dimensions than tokens, so that the runs fall into batches of different shape."""
    points = [SMALL.point(), SMALL.point(dim=40), SMALL.point(signal_norm=3.0)]
    jobs = chapter._jobs(SMALL, points, 2, [5, 60], step_size=0.05)
    one_by_one = [chapter._descend_one(job) for job in jobs]
    if name:
        monkeypatch.setattr(TrainingSet, "on", lambda self, _: self.to(name))
    jobs = chapter._jobs(SMALL, points, 2, [5, 60], step_size=0.05)
    for alone, together in zip(one_by_one, chapter._together(jobs, "cpu"), strict=True):
        for field in ("train_loss", "clean_attention", "noisy_selected", "test_loss", "test_attention"):
            expected, found = getattr(alone, field), getattr(together, field)
            np.testing.assert_allclose(found, expected, rtol=1e-2 if name == "mps" else 1e-8, atol=1e-12)


# All of it


@pytest.mark.parametrize(
    "change",
    [{}, {"label_noise": 0.0, "n_seeds": 1, "few_seeds": 1}, {"n_tokens": 3, "n_train": 2, "dim": 20}],
)
def test_exploration_runs_at_any_point(change):
    explored = chapter.explore(SMALL.replace(**change))
    assert explored.metrics["test_accuracy_d2000_mu20"].value is not None
    assert explored.metrics["encoder_train_accuracy_benign_full_block"].value is not None
    names = {name for c in claims.load_claims("token_selection") for name in (c.metric, *(a.metric for a in c.also))}
    assert names - set(explored.metrics) <= {name for name in names if "_x100_" in name}


PARTS = {
    "map_": (chapter.heat_map, chapter._map_metrics, {"map_points": 4, "few_seeds": 2}),
    "train_accuracy_x": (chapter.late, chapter._late_metrics, {"late_grid": [0.1], "few_seeds": 2}),
}
CONTROLLED = [c for c in claims.load_claims("token_selection") if c.id in ("TS-2a", "TS-6a", "TS-6b", "Q-TS-6")]
CONTROLS = [(c, control.change) for c in CONTROLLED for control in c.controls]


@pytest.mark.parametrize(("claim", "change"), CONTROLS, ids=lambda x: getattr(x, "id", str(x)))
def test_claims_fail_where_they_should(claim, change):
    (part,) = [PARTS[prefix] for prefix in PARTS if claim.metric.startswith(prefix)]
    explore, metrics, small = part
    assert claim.verdict(metrics(explore(Params(**change, **small)))) not in ("supported", "not run")
