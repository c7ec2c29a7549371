"""Chapter max_margin: the point's metrics, its claims' controls, and what its comparisons rest on."""

import numpy as np
import pytest

from benign_attention import claims, weight_decay
from benign_attention.devices import available
from benign_attention.experiments import max_margin
from benign_attention.experiments.max_margin import Params, measure
from benign_attention.parameters import ParameterError

SMALL = Params(n_train=10, dim=400, signal_norm=16.0, n_seeds=2, n_starts=5)
METRICS = {
    "margin",
    "test_accuracy",
    "clean_signal_attention",
    "noisy_signal_attention",
    "gd_cosine_p",
    "gd_cosine_v",
    "gd_margin_ratio",
}


def test_a_strong_signal_is_selected_and_found_by_gradient_descent():
    metrics = measure(Params(n_train=20, dim=1600, signal_norm=27.0, label_noise=0.1, n_seeds=3))
    assert set(metrics) == METRICS
    assert min(metrics["test_accuracy"].per_seed) > 0.99
    assert metrics["clean_signal_attention"].value > 0.95
    assert metrics["gd_cosine_p"].value > 0.98 and metrics["gd_margin_ratio"].high <= 1


def test_a_weak_signal_is_not_selected():
    metrics = measure(Params(signal_norm=10.0, n_seeds=2))
    assert metrics["test_accuracy"].value < 0.55
    assert metrics["clean_signal_attention"].value < 0.05


def test_more_seeds_leave_the_first_ones_as_they_were():
    few, many = measure(SMALL), measure(SMALL.replace(n_seeds=3))
    for name, metric in few.items():
        np.testing.assert_allclose(
            np.array(many[name].per_seed[:2], dtype=float), np.array(metric.per_seed, dtype=float), rtol=1e-9
        )


def test_an_unconverged_search_is_no_number(monkeypatch):
    from benign_attention import margin

    monkeypatch.setattr(margin, "STATIONARY", -1.0)
    (setting,) = max_margin._settings(SMALL.replace(n_seeds=1))
    found = max_margin._solve((setting, SMALL.radius))
    assert not found.found.converged
    assert np.isnan([found.found.margin, found.summary.test_accuracy, found.summary.clean_attention]).all()


def test_descent_that_is_not_at_rest_is_not_compared(monkeypatch):
    monkeypatch.setattr(weight_decay, "CONVERGED", 0.0)
    (setting,) = max_margin._settings(SMALL.replace(n_seeds=1))
    found = max_margin._decayed((setting, SMALL.weight_decay))
    assert found.status == "gradient descent is not at rest"
    assert np.isnan([found.cosine_p, found.cosine_v, found.margin_ratio]).all()


def test_flow_that_fails_is_reported(monkeypatch):
    def fail(*_):
        raise max_margin.flow.FlowError("uncertain")

    monkeypatch.setattr(weight_decay, "gradient_flow", fail)
    (setting,) = max_margin._settings(SMALL.replace(n_seeds=1))
    found = max_margin._decayed((setting, SMALL.weight_decay))
    assert found.status == "uncertain" and np.isnan(found.margin_ratio)


def test_between_the_thresholds_descent_rests_at_a_worse_local_minimum():
    """n = 40, d = 4 n^2, label noise 0.1, c = 1.6, balanced: below the margin and above the objective of the best."""
    params = Params(n_seeds=1)
    (setting,) = max_margin._balanced(params, 1.6, 0.1, params.dim, "between")
    found = max_margin._decayed((setting, 1e-5 * params.dim / params.n_train))
    assert found.status == "converged" and found.relative_gradient < 1e-6
    assert found.margin_ratio < 0.985 and found.cosine_p < 0.5
    rows = np.array(max_margin._rests(setting))
    assert rows[0, 0] > 1.005 * rows[-1, 0]
    assert rows[0, 2] < 0.85 and rows[-1, 2] > 0.95


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dim": 5},
        {"n_train": 2, "dim": 30},
        {"label_noise": 0.0},
        {"n_seeds": 1, "n_starts": 1},
        {"radius": 1e6},
        {"radius": 1e-6},
        {"weight_decay": 1e6},
        {"weight_decay": 1e-12},
        {"signal_norm": 1e-6},
        {"signal_norm": 1e6},
    ],
    ids=str,
)
def test_the_point_can_be_measured_anywhere(change):
    metrics = measure(SMALL.replace(**change))
    assert set(metrics) == METRICS
    for name in METRICS - {"margin"}:
        assert metrics[name].value is None or -1 <= metrics[name].value <= 1 + 1e-9, name


@pytest.mark.parametrize("name", ["n_train", "n_starts", "radius", "weight_decay", "label_noise"])
def test_bad_parameters_are_named(name):
    with pytest.raises(ParameterError, match=rf"^{name} must be"):
        Params(**{name: -1 if name.startswith("n_") else -1.0})


POINT = [c for c in claims.load_claims("max_margin") if c.id in ("SH-6a", "SH-7a")]


@pytest.mark.parametrize(
    ("claim", "change"),
    [(c, control.change) for c in POINT for control in c.controls],
    ids=lambda x: getattr(x, "id", str(x)),
)
def test_claims_fail_where_they_should(claim, change):
    assert claim.verdict(measure(Params(**change))) not in ("supported", "not run")


def test_a_device_that_is_not_there_is_refused():
    absent = next(name for name in ("mps", "cuda") if name not in available())
    with pytest.raises(ParameterError, match=rf"^device must be one of .*: {absent} is not available here$"):
        measure(SMALL.replace(device=absent))
