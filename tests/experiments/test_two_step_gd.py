"""Chapter two_step_gd: the point's metrics, and what its sweeps rest on."""

import numpy as np
import pytest
import torch

from benign_attention import claims, explicit
from benign_attention.data import draw_single_head
from benign_attention.devices import available
from benign_attention.experiments import two_step_gd
from benign_attention.experiments.two_step_gd import Params, measure
from benign_attention.reduced import TrainingSet

SMALL = Params(n_train=40, dim=8000, label_noise=0.1, n_seeds=3, map_points=5)


@pytest.fixture(scope="module")
def explored():
    return two_step_gd.explore(SMALL)


def test_the_figure_configuration_overfits_benignly_in_two_steps():
    metrics = measure(Params())
    assert metrics["train_accuracy_step1"].value < 0.98
    assert metrics["train_accuracy_step2"].per_seed == [1.0] * 10
    assert min(metrics["test_accuracy_step2"].per_seed) > 1 - 1e-12
    assert metrics["clean_signal_attention_step2"].value == pytest.approx(0.58, abs=0.05)
    assert metrics["noisy_signal_attention_step2"].value == pytest.approx(0.047, abs=0.01)


def test_metrics_agree_with_autograd_on_explicit_tokens_and_sampled_test_data():
    """Two independent pipelines, 40 draws each: every metric within 4.5 standard errors (false alarm < 1e-4)."""
    params = Params(n_train=20, dim=60, n_tokens=3, signal_norm=2.5, label_noise=0.2, step_size=1.5, n_seeds=40)
    found = measure(params)
    rows = []
    for i in range(40):
        rng = np.random.default_rng([7, i])
        data = draw_single_head(20, 60, 3, 2.5, 0.2, rng)
        fresh = draw_single_head(4000, 60, 3, 2.5, 0.0, rng)
        tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
        model, row = explicit.SingleHeadAttention(60), {}
        for t, _ in enumerate(explicit.gradient_descent(model, tokens, labels, 1.5, 2), 1):
            with torch.no_grad():
                row[f"train_accuracy_step{t}"] = (model(tokens) * labels > 0).double().mean().item()
                right = model(torch.tensor(fresh.tokens)) * torch.tensor(fresh.clean_labels) > 0
                row[f"test_accuracy_step{t}"] = right.double().mean().item()
        with torch.no_grad():
            on_signal = model.attention(tokens).numpy()[np.arange(20), data.position]
        noisy = data.labels != data.clean_labels
        row["clean_signal_attention_step2"] = on_signal[~noisy].mean()
        row["noisy_signal_attention_step2"] = on_signal[noisy].mean() if noisy.any() else np.nan
        rows.append(row)
    assert set(found) - set(rows[0]) == {"log10_test_error_step1", "log10_test_error_step2"}
    for name in rows[0]:
        metric = found[name]
        theirs = np.array([row[name] for row in rows])
        ours = np.array([np.nan if x is None else x for x in metric.per_seed])
        spread = np.sqrt(np.nanvar(theirs) / 40 + np.nanvar(ours) / 40)
        assert abs(np.nanmean(theirs) - np.nanmean(ours)) < 4.5 * spread + 1e-12, name


def test_more_seeds_leave_the_first_ones_as_they_were():
    few, many = measure(SMALL), measure(SMALL.replace(n_seeds=6))
    for name, metric in few.items():
        assert many[name].per_seed[:3] == metric.per_seed


def test_the_maps_resolution_does_not_touch_the_point():
    assert measure(SMALL.replace(map_points=9)) == measure(SMALL)


def test_without_noisy_samples_their_attention_is_undefined():
    metrics = measure(SMALL.replace(label_noise=0.0))
    assert metrics["noisy_signal_attention_step2"].value is None
    assert metrics["train_accuracy_step2"].value == 1.0


@pytest.mark.parametrize(
    "change", [{"n_train": 100, "dim": 10}, {"dim": 3}, {"n_tokens": 5, "dim": 30}, {"n_train": 3}]
)
def test_low_dimension_and_small_samples_are_legitimate(change):
    metrics = measure(SMALL.replace(**change))
    assert 0 <= metrics["test_accuracy_step2"].value <= 1


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dim": 10, "signal_norm": 1.0},
        {"n_train": 2},
        {"n_tokens": 3, "n_train": 10},
        {"label_noise": 0.0},
        {"n_seeds": 1},
    ],
)
def test_exploration_runs_at_any_point(change):
    metrics = two_step_gd.explore(SMALL.replace(**change, map_points=3, map_label_noise=[0.0, 0.3])).metrics
    assert metrics["test_accuracy_step2_d2n"].value is not None


def test_the_first_step_is_its_formula():
    first_step = two_step_gd.first_step_by_autograd(SMALL)
    assert first_step.v_deviation.max() < 1e-12
    assert first_step.p_deviation.max() == 0


def test_deviation_from_the_closed_form_falls_with_slope_one_half(explored):
    assert explored.metrics["closed_form_deviation_slope"].value == pytest.approx(-0.5, abs=0.06)


def test_window_of_the_limit_at_c_2():
    """Theory alone: 2.1 to 7.0 at 0.05, and empty at 0.2; the grid has steps of 5 %."""
    found = two_step_gd.windows(Params(n_train=4, dim=40, n_seeds=1), margin=0.0)
    at = dict(zip(found.label_noise, found.limit, strict=True))
    assert at[0.05] == pytest.approx([2.1, 7.0], rel=0.06)
    assert np.isnan(at[0.2]).all()


def test_map_cells_are_separate_runs(explored):
    """The map shares tokens between cells; each cell must still be its own run of gradient descent."""
    found = explored.map
    c, b = found.c[1], found.b[3]
    rho, beta = two_step_gd.from_natural_units(c, b, SMALL.n_train, SMALL.dim)
    training = two_step_gd._draw(SMALL, label_noise=0.1, part="map")
    *_, state = two_step_gd.reduced.gradient_descent(training, float(rho), float(beta), 2)
    alone = two_step_gd.summarize(training, state, float(rho))
    row = list(found.label_noise).index(0.1)
    np.testing.assert_allclose(found.summary.clean_attention[row][:, 1, 3], alone.clean_attention, rtol=1e-12)
    np.testing.assert_allclose(found.summary.test_accuracy[row][:, 1, 3], alone.test_accuracy, rtol=1e-9)


POINT = [c for c in claims.load_claims("two_step_gd") if c.id in ("SH-1a", "SH-1b", "SH-2a", "SH-2b")]


@pytest.mark.parametrize(
    ("claim", "change"),
    [(c, control.change) for c in POINT for control in c.controls],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_claims_fail_where_they_should(claim, change):
    metrics = measure(Params(**change))
    assert claim.verdict(metrics) not in ("supported", "not run")


@pytest.mark.parametrize("name", available())
def test_torch_on_every_device_gives_the_numbers_of_numpy(name, monkeypatch):
    def numbers():
        shape = two_step_gd.step_size_map(SMALL.replace(map_points=3, map_label_noise=[0.1])).summary
        values = [metric.value for metric in measure(SMALL).values()] + [shape.clean_attention, shape.test_accuracy]
        return np.concatenate([np.ravel(x) for x in values])

    expected = numbers()
    monkeypatch.setattr(TrainingSet, "on", lambda self, _: self.to(name))
    np.testing.assert_allclose(numbers(), expected, rtol=1e-2 if name == "mps" else 1e-8)
