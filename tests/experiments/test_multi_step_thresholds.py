"""The measured thresholds: exact counts, search, two engines, and the claims' controls."""

import math

import numpy as np
import pytest
import torch

from benign_attention import claims, explicit, flow, reduced, thresholds
from benign_attention.data import draw_single_head, from_natural_units
from benign_attention.experiments import multi_step_thresholds as chapter
from benign_attention.experiments.multi_step_thresholds import Params, Setting, bisect, measure_thresholds
from benign_attention.thresholds import Bracket

SMALL = Params(n_train=40, dim=40_000, label_noise_grid=[0.0, 0.1, 0.3], t_max=1e6, n_seeds=2)


@pytest.fixture(scope="module")
def explored():
    return chapter.explore_thresholds(SMALL.replace(n_seeds=1))


def test_counts_are_exact():
    setting = Setting.of(200, 4000, 2, 0.1, 0.3)
    training = setting.draw(np.random.default_rng(0))
    np.testing.assert_array_equal(training.membership.sum(axis=1), [60, 140])
    np.testing.assert_array_equal((training.membership * training.noisy).sum(axis=1), [6, 14])
    np.testing.assert_allclose(setting.label_noise, 0.1)
    np.testing.assert_allclose(setting.class_fraction, [0.3, 0.7])


@pytest.mark.parametrize("n_train", [2, 3, 5])
def test_clean_samples_are_the_majority_of_every_class(n_train):
    setting = Setting.of(n_train, 100, 2, 0.49, 0.3)
    assert setting.n_train == n_train
    assert all(0 <= 2 * k < n for k, n in zip(setting.n_flipped, setting.n_class, strict=True))


def test_bisection_looks_at_few_points_and_at_an_end_only_when_it_gets_there():
    asked = []

    def turns_at(k):
        return lambda i: asked.append(i) or i >= k

    assert bisect(turns_at(7), 0, 32, 9) == (6, 7)
    assert asked == [9, 8, 6, 7]
    for start in (-5, 0, 9, 32, 40):
        assert bisect(turns_at(7), 0, 32, start) == (6, 7)
        assert bisect(turns_at(1), 0, 32, start) == (0, 1)
        assert bisect(turns_at(0), 0, 32, start) is None
        assert bisect(turns_at(32), 0, 32, start) == (31, 32)
        assert bisect(turns_at(33), 0, 32, start) is None


def test_searches_bracket_the_change_and_report_it_by_class():
    """Run again at the ends of every bracket, with finer tolerances."""
    setting = Setting.of(40, 40_000, 2, 0.1, 0.3)
    found = chapter._search((setting, 1e6, np.random.default_rng(3), np.array([math.nan, 1.4])))
    training = setting.draw(np.random.default_rng(3))
    for k in (0, 1):
        assert found.high[k] / found.low[k] == pytest.approx(chapter.GRID_RATIO)
        for c, kept in ((found.low[k], False), (found.high[k], True)):
            rho = float(from_natural_units(c, 1.0, 40, 40_000)[0])
            (point,) = flow.gradient_flow(flow.single_head(training, rho), [1e6])
            clean = ~training.noisy & (training.clean_labels == (1.0, -1.0)[k])
            assert (reduced.outputs(training, point.state, rho).attention[0, clean].mean() > 0.5) == kept
    assert found.test_accuracy[0] < 0.9
    assert found.test_accuracy[1] > 0.99


def test_autograd_with_small_steps_on_explicit_tokens_keeps_and_loses_where_the_limit_says():
    """d/n = 50, steps of b = 0.5 to t' = 200, 20 % below and above the limit's threshold (1.64)."""
    n, dim = 20, 1000
    noise = draw_single_head(n, dim, 2, 1.0, 0.0, np.random.default_rng(1)).noise[:, 0]
    clean = np.repeat([1.0, -1.0], n // 2)
    labels = np.where(np.tile(np.arange(n // 2) < 1, 2), -clean, clean)
    threshold = float(thresholds.late_threshold(0.1, t_max=200.0).middle)
    for factor, kept in ((0.8, False), (1.2, True)):
        rho, step = (float(x) for x in from_natural_units(factor * threshold, 0.5, n, dim))
        signal = np.zeros((n, dim))
        signal[np.arange(n), (clean < 0).astype(int)] = rho
        model, x = explicit.SingleHeadAttention(dim), torch.tensor(np.stack([signal, noise], axis=1))
        for _ in explicit.gradient_descent(model, x, torch.tensor(labels), step, 400):
            pass
        with torch.no_grad():
            attention = model.attention(x).numpy()[:, 0]
        assert (attention[labels == clean].mean() > 0.5) == kept


def test_each_label_noise_has_its_bracket_and_growing_the_grid_changes_none():
    metrics = measure_thresholds(SMALL)
    assert list(metrics) == ["threshold_c_eta0", "threshold_c_eta0.1", "threshold_c_eta0.3"]
    for metric in metrics.values():
        assert metric.low < metric.value < metric.high
        assert metric.kind.startswith("bracket")
    more = measure_thresholds(SMALL.replace(label_noise_grid=[0.3, 0.2, 0.1]))
    assert more["threshold_c_eta0.3"] == metrics["threshold_c_eta0.3"]


def test_without_label_noise_the_threshold_is_root_two():
    metric = measure_thresholds(SMALL)["threshold_c_eta0"]
    assert metric.low / 1.03 < math.sqrt(2) < metric.high * 1.03


def test_a_threshold_outside_the_searched_range_is_null():
    metric = measure_thresholds(SMALL.replace(label_noise_grid=[0.45], n_seeds=1))["threshold_c_eta0.45"]
    assert metric.value is None
    assert metric.low is None
    assert metric.kind.startswith("undefined")


@pytest.mark.parametrize(
    "change", [{"n_train": 2, "dim": 3}, {"n_train": 3}, {"dim": 20}, {"label_noise_grid": [0.499]}, {"t_max": 1e200}]
)
def test_extreme_points_end_in_metrics(change):
    for metric in measure_thresholds(SMALL.replace(**{"label_noise_grid": [0.2], "n_seeds": 1, **change})).values():
        assert metric.value is None or metric.low < metric.value < metric.high


def test_measured_points_agree_with_the_limit(explored):
    """Three tokens' cross-talk at d/n = 1000 is 4 %, the grid's step 2 %."""
    for name in ("late", "initial_gap", "initial_logit"):
        for T in (2, 3):
            metric = explored.metrics[f"{name}_threshold_over_limit_T{T}"]
            assert 0.9 < metric.low < metric.high < 1.1


def test_the_smaller_class_needs_the_stronger_signal(explored):
    metric = explored.metrics["class_threshold_ratio"]
    assert metric.low / 1.03 < math.sqrt(0.7 / 0.3) < metric.high * 1.03


def test_growth_is_that_of_the_slowest_step():
    late = Bracket(np.array([1.0, 2.0, 2.2]), np.array([1.1, 2.1, 2.4]))
    metric = chapter.smallest_growth(late, 3)
    assert metric.low == pytest.approx(2.2 / 2.1)
    assert metric.high == pytest.approx(2.4 / 2.0)
    assert chapter.smallest_growth(Bracket(late.low[:1], late.high[:1]), 3).value is None


def test_without_the_compared_label_noise_ratios_are_undefined():
    found = chapter.balanced(SMALL.replace(label_noise_grid=[0.2], n_seeds=1))
    assert np.isnan(found.late_at(0.3).low)
    assert found.late_at(0.2).low > 1


CONTROLS = [
    (claim, control.change)
    for claim in claims.load_claims("multi_step_dynamics")
    for control in claim.controls
    if claim.id in ("SH-8a", "Q-SH-8a", "Q-SH-8b", "Q-SH-8d")
]


def of_two_tokens(**change):
    params = Params(**{"n_seeds": 2, "label_noise_grid": [0.1, 0.3], **change})
    return chapter._claim_metrics({2: chapter.balanced(params)}, chapter.unbalanced(params))


@pytest.fixture(scope="module")
def at_the_point():
    return of_two_tokens()


@pytest.mark.parametrize(("claim", "change"), CONTROLS, ids=lambda x: getattr(x, "id", str(x)))
def test_claims_on_thresholds_fail_where_they_should(claim, change, at_the_point):
    assert claim.verdict(at_the_point) == "supported"
    assert claim.verdict(of_two_tokens(**change)) not in ("supported", "not run")


def test_where_the_search_starts_does_not_matter():
    setting = Setting.of(40, 8000, 2, 0.1)
    found = [
        chapter._search((setting, 1e6, np.random.default_rng(4), np.full(2, c))) for c in (math.nan, 1.2, 1.6, 9.0)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other.high, found[0].high)
        np.testing.assert_array_equal(other.test_accuracy, found[0].test_accuracy)


def test_figures_draw_all_of_it(explored):
    from benign_attention.figures import multi_step_thresholds as figures

    assert len(figures.against_label_noise(explored).axes) == 3
    assert len(figures.by_class(explored).axes) == 2
