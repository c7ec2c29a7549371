"""What chapter data_model measures, against theory and at its extremes.

Statistical tests fix their seeds; with fresh seeds each would fail with probability below 1e-3.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.stats import chi2, norm

from benign_attention.experiments import data_model as chapter
from benign_attention.parameters import ParameterError
from benign_attention.records import scale_values


@pytest.fixture(scope="module")
def small() -> chapter.Params:
    return chapter.Params(n_train=30, dim=900, signal_norm=10.0, label_noise=0.1, n_seeds=3)


def test_measure_has_the_fixed_metrics_of_the_figure_configuration():
    metrics = chapter.measure(chapter.Params())
    assert set(metrics) == {"gram_offdiagonal_max", "snr", "natural_c"}
    assert metrics["snr"].value == 0.15
    assert metrics["natural_c"].value == pytest.approx(1.5 * math.sqrt(2))
    assert metrics["snr"].low == metrics["snr"].high == 0.15
    assert metrics["gram_offdiagonal_max"].value == pytest.approx(
        float(chapter.predicted_largest(200, 40_000)), rel=0.15
    )


def test_growing_the_number_of_seeds_keeps_the_first_ones(small):
    few, many = (chapter.measure(small.replace(n_seeds=n))["gram_offdiagonal_max"].per_seed for n in (2, 5))
    assert many[:2] == few


def test_the_concentration_curve_passes_through_the_point():
    params = chapter.Params(n_train=20, dim=1000, n_seeds=2)
    found = chapter.concentration(params)
    at_point = found.largest[:, found.dims.tolist().index(1000)]
    assert at_point.tolist() == chapter.measure(params)["gram_offdiagonal_max"].per_seed


def test_largest_inner_product_leaves_out_the_diagonal():
    gram = np.array([[[9.0, -3.0], [-3.0, 5.0]], [[1.0, 0.5], [0.5, 2.0]]])
    assert chapter.largest_inner_product(gram).tolist() == [3.0, 0.5]


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_expected_largest_normal(count):
    draws = np.abs(np.random.default_rng(0).standard_normal((4000, count))).max(axis=1)
    error = draws.std() / math.sqrt(len(draws))
    assert abs(chapter.expected_largest_normal(count) - draws.mean()) < 3.5 * error
    assert chapter.expected_largest_normal(count) < math.sqrt(2 * math.log(2 * count))


def test_expected_largest_of_one_normal_is_its_mean_absolute_value():
    assert chapter.expected_largest_normal(1) == pytest.approx(math.sqrt(2 / math.pi), abs=1e-6)


@pytest.mark.parametrize("n_rows, dim", [(30, 12), (200, 400)])
def test_wrong_sign_probability_is_the_normal_tail_averaged_over_lengths(n_rows, dim):
    squares = chi2.ppf((np.arange(20_000) + 0.5) / 20_000, dim - 2)
    averaged = norm.sf(np.sqrt(squares / (n_rows - 1))).mean()
    assert float(chapter.wrong_sign_probability(n_rows, dim)) == pytest.approx(averaged, rel=1e-3)


def test_concentration_follows_its_predictions(small):
    found = chapter.concentration(small.replace(n_seeds=60))
    rare = found.dims > 200  # a wrong sign hardly ever occurs there, and the standard error says nothing
    for values, predicted in (
        (found.cross_talk**2, chapter.predicted_cross_talk(found.n_rows, found.dims) ** 2),
        (found.aligned, chapter.predicted_aligned(found.n_rows, found.dims)),
        (found.wrong_sign[:, ~rare], chapter.wrong_sign_probability(found.n_rows, found.dims[~rare])),
    ):
        error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - predicted) < 4.5 * error)


def test_predicted_sum_of_absolute_values_has_no_step_where_its_formula_changes():
    below, above = chapter.predicted_aligned(50, np.array([1_000_001, 1_000_004]))
    assert above / below == pytest.approx(math.sqrt(1_000_001 / 1_000_004), rel=1e-6)


def test_the_sampler_check_tells_a_wrong_sampler_from_the_right_one(small):
    found = chapter.sampler_check(small, n_draws=1500)
    assert np.all(found.bartlett_distance < 0.08)
    assert np.all(found.wrong_distance > 0.15)


def test_shuffled_tokens_change_a_linear_model_and_not_attention(small):
    found = chapter.position_check(small)
    assert np.all(found.attention < 1e-12)
    assert np.all(found.linear > 0.1)


def test_natural_units_agree_at_large_dimension_and_not_at_small(small):
    found = chapter.natural_units(small.replace(dim=300_000, signal_norm=200.0))
    assert found.gap.max() < 0.02 < found.low_gap.min()
    assert found.of_samples[:, 0].min() > 10 * found.of_samples[:, -1].max()
    assert found.of_means.shape == found.of_samples.shape == (3, len(found.d_over_n))


def test_without_label_noise_nothing_is_said_about_noisy_samples(small):
    found = chapter.natural_units(small.replace(label_noise=0.0))
    assert np.isnan(found.limit.noisy).all() and np.isnan(found.same[0].noisy).all()
    assert np.isfinite(found.gap).all()


def test_flips_are_binomial(small):
    found = chapter.flips(small)
    assert found.counts.shape == (3, chapter.LABEL_DRAWS)
    assert found.counts.mean() == pytest.approx(3.0, abs=4 * math.sqrt(2.7 / found.counts.size))
    expected = 0.9**found.sizes
    assert np.all(np.abs(found.none.mean(axis=0) - expected) < 4 * np.sqrt(expected / (3 * chapter.LABEL_DRAWS)) + 1e-3)


def test_token_clouds_have_the_lengths_of_the_two_models(small):
    single_head, token_selection = chapter.token_clouds(small)
    signal, noise = single_head
    assert np.linalg.norm(signal.plane, axis=1) == pytest.approx(10.0) and not signal.rest.any()
    assert not noise.plane.any() and noise.rest.mean() == pytest.approx(math.sqrt(898), rel=0.02)
    assert [len(cloud.rest) for cloud in token_selection] == [20, 20, 20, 100]


@pytest.mark.parametrize(
    "values",
    [
        {"n_train": 100, "dim": 10},
        {"n_train": 2, "dim": 3, "n_seeds": 1},
        {"n_train": 20, "dim": 10**9, "n_seeds": 2},
        {"n_train": 20, "dim": 500, "n_tokens": 4, "label_noise": 0.0, "n_seeds": 2},
    ],
)
def test_extreme_points_run_without_a_word(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = chapter.Params(**{"n_seeds": 2, **values})
        metrics = chapter.measure(params) | chapter.explore(params).metrics
    for metric in metrics.values():
        assert metric.n_seeds == len(metric.per_seed) == params.n_seeds
        assert metric.value is not None and math.isfinite(metric.value)


def test_more_tokens_than_dimensions_are_measured_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = chapter.measure(chapter.Params(n_train=500, dim=10))
    assert metrics["gram_offdiagonal_max"].value > 1
    assert metrics["natural_c"].value == pytest.approx(30 * math.sqrt(50))


def test_figures_of_an_extreme_point_draw_without_a_word():
    from matplotlib import pyplot as plt

    from benign_attention.data import TokenSelectionParams
    from benign_attention.figures import data_model as figures

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = chapter.Params(n_train=30, dim=10, n_seeds=2, label_noise=0.0)
        found = chapter.explore(params)
        for figure in (
            figures.tokens(found.clouds),
            figures.gram_images(found.images),
            figures.concentration(found.concentration, params.n_train),
            figures.sampler(found.sampler),
            figures.flips(found.flips, params.n_train, params.label_noise),
            figures.natural_units(found.natural),
            figures.meter_planes(params, [TokenSelectionParams()]),
        ):
            figure.canvas.draw()
            plt.close(figure)


def test_parameters_refuse_a_bad_value_by_name():
    with pytest.raises(ParameterError, match=r"^label_noise must be a number in \[0, 0.5\)"):
        chapter.Params(label_noise=0.7)
    with pytest.raises(ParameterError, match=r"^dim must be a whole number in \[3, 1e\+15\]"):
        chapter.Params(dim=2)


@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_scale_files_hold_parameters_of_the_chapter(scale):
    params = chapter.Params(**scale_values("data_model", scale))
    assert params.setting.natural_c == pytest.approx(2.12, abs=0.01)
