"""Chapter baselines: the point's metrics, brackets of sample sizes, and what the claims rest on."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from benign_attention import claims
from benign_attention.baselines import MODELS
from benign_attention.devices import available
from benign_attention.experiments import baselines
from benign_attention.experiments.baselines import VARIANTS, Params, measure
from benign_attention.parameters import ParameterError

SMALL = Params(
    n_train=20, dim=400, signal_norm=8.0, snr_grid=[0.3, 0.5], n_train_grid=[6, 12, 24], n_seeds=2, label_noise=0.1
)


@pytest.fixture(scope="module")
def explored():
    """Without the section on parameterisations, which has its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        section = SimpleNamespace(metrics={"par_marker": "merged"})
        patch.setattr(baselines.parameterisations, "explore_parameterisations", lambda _: section)
        return baselines.explore(SMALL)


def test_every_model_has_a_train_and_a_test_accuracy():
    metrics = measure(SMALL)
    assert set(metrics) == {f"{part}_accuracy_{name}" for part in ("train", "test") for name in MODELS}
    assert all(metrics[f"train_accuracy_{name}"].value == 1 for name in MODELS)


def test_more_seeds_leave_the_first_ones_as_they_were():
    few, many = measure(SMALL), measure(SMALL.replace(n_seeds=3))
    for name, metric in few.items():
        assert many[name].per_seed[:2] == metric.per_seed


def test_grids_do_not_touch_the_point():
    assert measure(SMALL.replace(snr_grid=[0.1, 0.2, 0.3], n_train_grid=[5, 7])) == measure(SMALL)


def test_all_models_of_a_run_have_the_same_training_labels():
    """Before anything is learnt from inputs, one step of the mean token and of attention fit the same samples."""
    jobs = [baselines._Job(SMALL, name, SMALL.point(), 1, n_steps=1) for name in ("linear_mean", "attention")]
    mean, attention = (job.search().stopped for job in jobs)
    assert mean.train_accuracy == attention.train_accuracy
    assert mean.test_accuracy == pytest.approx(attention.test_accuracy, abs=1e-3)


def test_brackets_are_where_success_begins(monkeypatch):
    needed = {"stopped": 12, "fitted": 13, "last": 100}

    class FakeJob:
        def __init__(self, params, name, point, run, fixed):
            self.n = point.n_train

        def search(self):
            return self.n

    monkeypatch.setattr(baselines, "_Job", FakeJob)
    monkeypatch.setattr(baselines, "_succeeds", lambda n, criterion: n >= needed[criterion])
    assert baselines._bisect((SMALL, ("mlp", False), 0.3, 0)) == [(6, 12), (12, 24), (24, math.inf)]
    needed.update(dict.fromkeys(needed, 1))
    assert baselines._bisect((SMALL, ("mlp", False), 0.3, 0)) == [(0, 6)] * 3


def test_slopes_and_ratios_leave_out_what_is_not_known():
    snr = np.array([0.1, 0.2, 0.4])
    sizes = np.stack([3 * snr**-2.0, [np.nan, 1.0, 2.0]], axis=1)
    assert baselines.slope(snr, sizes) == pytest.approx([-2, np.nan], nan_ok=True)
    ratio = baselines.log_ratio(2 * sizes, sizes)
    assert ratio == pytest.approx([math.log(2)] * 2)
    assert np.isnan(baselines.log_ratio(sizes * np.nan, sizes)).all()


def test_a_model_that_fails_at_the_largest_size_counts_with_that_size():
    ends = {c: np.full((len(VARIANTS), 1, 1), np.nan) for c in baselines.CRITERIA}
    lower, upper = ({c: np.full_like(x, v) for c, x in ends.items()} for v in (24.0, np.inf))
    found = baselines.SampleSize(np.array([0.1]), lower, upper, np.full((len(VARIANTS), 1), np.nan))
    assert np.isnan(found.middle("fitted", VARIANTS[0])).all()
    assert found.at_least("fitted", VARIANTS[0]) == [[24.0]]


def test_predicted_sample_sizes_have_their_slopes():
    at = {
        variant: np.array([baselines.predicted_sample_size(SMALL, *variant, snr) for snr in (0.1, 0.2)])
        for variant in VARIANTS
    }
    slopes = {variant: np.log2(x[1] / x[0]) for variant, x in at.items()}
    assert slopes["linear_mean", False] == pytest.approx(-4)
    assert slopes["cnn_relu2", False] == pytest.approx(-2)
    assert slopes["cnn_relu3", False] == pytest.approx(-3)
    assert np.isnan(slopes["attention", False])
    assert at["linear_concat", False] / at["linear_mean", False] == pytest.approx([2, 2])
    assert at["linear_concat", True] == pytest.approx(at["linear_mean", False])


def test_the_metrics_of_every_claim_are_there(explored):
    found = {**measure(SMALL), **explored.metrics}
    assert found["par_marker"] == "merged"
    for claim in claims.load_claims("baselines"):
        names = {claim.metric, *(there.metric for there in claim.also)}
        assert {name for name in names if not name.startswith("par_")} <= set(found), claim.id


def test_a_fixed_step_loses_a_strong_signal_and_a_searched_one_does_not(explored):
    assert explored.metrics["test_accuracy_strongest_attention"].value > 0.95
    assert explored.metrics["test_accuracy_strongest_attention_fixed_step"].value < 0.9


def test_a_device_is_used_or_refused_by_name():
    missing = [name for name in ("cuda", "mps") if name not in available()]
    for name in missing:
        with pytest.raises(ParameterError, match="device must be one of"):
            measure(SMALL.replace(device=name))
    if "cuda" not in available() and "mps" not in available():
        found, expected = measure(SMALL.replace(device="auto")), measure(SMALL)
        assert {k: m.value for k, m in found.items()} == pytest.approx(
            {k: m.value for k, m in expected.items()}, abs=0.01
        )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"n_train": 1500, "n_tokens": 4}, "n_train must be at most 625 with 4 tokens per sample, got 1500"),
        ({"n_train_grid": [8, 6]}, "n_train_grid must increase from at least 2 to at most 1250"),
        ({"n_train_grid": [8, 3000]}, "n_train_grid must increase from at least 2 to at most 1250"),
        ({"snr_grid": [0.1, 0.1]}, "snr_grid must hold different values"),
        ({"n_tokens": 1}, "n_tokens must be"),
        ({"dim": 2}, "dim must be"),
    ],
)
def test_bad_values_are_refused_by_name(change, line):
    with pytest.raises(ParameterError, match=line.replace("(", r"\(")):
        SMALL.replace(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 3},
        {"n_train": 2, "n_seeds": 1},
        {"label_noise": 0.0},
        {"dim": 10**15, "signal_norm": 1e-15},
        {"signal_norm": 1e15},
        {"n_tokens": 8, "n_train_grid": [2, 3]},
    ],
)
@pytest.mark.filterwarnings("error")
def test_extreme_points_are_legitimate(change):
    params = SMALL.replace(**change)
    assert all(0 <= m.value <= 1 for m in measure(params).values())


@pytest.mark.parametrize("change", [{"label_noise": 0.45}, {"dim": 60, "snr_grid": [0.2, 0.21]}], ids=str)
def test_claims_fail_where_they_should(change, monkeypatch):
    named = [c for c in claims.load_claims("baselines") if change in [control.change for control in c.controls]]
    assert named
    params = Params(**{"n_seeds": 3 if "dim" in change else 2, "n_train": 50, **change})
    if "dim" in change:  # a claim about sample sizes: only those, of the models that it names
        names = [(name, False) for name in ("attention", "cnn_relu2", "linear_concat")]
        monkeypatch.setattr(baselines, "VARIANTS", (*names, ("linear_concat", True)))
        monkeypatch.setattr(baselines, "STRONG_STEPS", 2)
        size = baselines.sample_size(params)
    else:
        size = baselines.sample_size(params.replace(n_train_grid=[2, 3], snr_grid=[0.1, 0.2]))
    metrics = baselines._claim_metrics(size=size, strong=baselines.strong(params), regimes=baselines.regimes(params))
    for claim in named:
        assert claim.verdict(metrics) not in ("supported", "not run"), claim.id


def test_every_control_is_tested():
    tested = [{"label_noise": 0.45}, {"dim": 60, "snr_grid": [0.2, 0.21]}]
    own = [c for c in claims.load_claims("baselines") if not c.metric.startswith("par_")]
    assert all(control.change in tested for c in own for control in c.controls)
