"""The section on parameterisations: what its table, its directions and its claims rest on."""

import numpy as np
import pytest

from benign_attention import claims, parameterisations
from benign_attention.experiments import parameterisations as section
from benign_attention.figures import parameterisations as figures
from benign_attention.parameters import ChapterParams

PARAMS = ChapterParams(n_seeds=2)


@pytest.fixture(scope="module")
def explored():
    return section.explore_parameterisations(PARAMS)


def test_runs_of_one_seed_share_tokens_and_labels_whatever_the_signal():
    weak, strong = (section.sample(PARAMS, 1, c) for c in (0.7, 4.0))
    np.testing.assert_array_equal(weak.tokens[:, 1:], strong.tokens[:, 1:])
    np.testing.assert_array_equal(weak.labels, strong.labels)
    assert strong.signal_norm == pytest.approx(4.0 * np.sqrt(40))


@pytest.mark.parametrize("variant", section.VARIANTS)
def test_every_variant_starts_with_what_its_title_says(variant):
    training = section.sample(PARAMS, 0, 2.0)
    model, then = section.build(variant, training, np.random.default_rng(0))
    ahead = model.velocity(training, model.start)
    stands_still = {name for name, v in ahead.items() if not v.any()}
    head_trained = not variant.startswith(("head", "random_head"))
    assert ("v" not in stands_still) == head_trained
    assert (then is not None) == variant.endswith("late")
    logits = training.tokens @ (model.start["A"] @ model.start["u"]) if "A" in model.start else np.zeros(1)
    assert np.abs(logits).max() < 0.5


def test_the_reference_is_harmful_below_and_benign_above_the_threshold(explored):
    assert explored.table.verdicts("p", "below") == ["harmful"] * 2
    assert explored.table.verdicts("p", "above") == ["benign"] * 2
    assert np.all(explored.table.kept(["p"], ["below", "near", "above"]) == 1)


def test_a_head_on_the_signals_fits_clean_labels_and_no_flipped_one(explored):
    for place in section.PLACES:
        assert np.all(explored.table.values("head_fixed", place, "flipped_accuracy") == 0)
        assert np.all(explored.table.values("head_fixed", place, "test_accuracy") == 1)


def test_head_first_fits_all_labels_on_the_mean_token_before_attention_is_released(explored):
    early = explored.table.values("attention_late", "above", "train_accuracy", late=False)
    assert np.all(early == 1)
    assert np.allclose(explored.table.values("attention_late", "above", "clean_attention", late=False), 0.5)


def test_both_clocks_lead_to_the_svm_and_normalised_steps_are_ahead(explored):
    found = explored.direction
    for head in section.HEADS:
        assert found.cosine_plain[head][:, -1].min() > 0.98
        assert (found.cosine_normalised[head][:, -1] > found.cosine_plain[head][:, -1]).all()
        assert (found.length_normalised[head][:, -1] > 5 * found.length_plain[head][:, -1]).all()


def test_more_seeds_leave_the_first_ones_as_they_were():
    job = section._Job(PARAMS, "K_Q", 1, 1.6)
    assert section._run(job) == section._run(section._Job(PARAMS.replace(n_seeds=7), "K_Q", 1, 1.6))


@pytest.mark.parametrize(
    ("decides", "contrast"),
    [
        ("par_w_fixed_query_log10_deviation", "par_w_and_query_log10_deviation"),
        ("par_svm_cosine_normalised_aligned", "par_wrong_svm_cosine_aligned"),
        ("par_test_accuracy_head_late_below", "par_test_accuracy_p_below"),
        (
            "par_test_accuracy_self_attention_without_noise_above",
            "par_test_accuracy_self_attention_without_noise_below",
        ),
    ],
)
def test_conditions_of_claims_tell_a_contrast_apart(explored, decides, contrast):
    """The same regions on the contrast's metric give the opposite verdict."""
    (claim,) = (c for c in claims.load_claims("baselines") if c.metric == decides)
    values = {name: np.mean(explored.metrics[name].per_seed) for name in (decides, contrast)}

    def inside(region, value):
        return region.above < value < region.below

    assert inside(claim.supported, values[decides]) != inside(claim.supported, values[contrast])


def test_one_seed_without_flipped_labels_is_legitimate():
    one = section.table(ChapterParams(n_seeds=1, seed=3))
    assert "–" in figures.verdict_table(one)
    assert figures.outcomes(one).axes
    metrics = section._metrics(
        one,
        {name: [one.results["p"]["above"][0][1]] for name in ("p", "attention_late")},
        section.equivalence(ChapterParams(n_seeds=1, seed=3)),
        section.direction(ChapterParams(n_seeds=1, seed=3)),
    )
    assert metrics["par_verdict_kept_away"].low is None


def test_fresh_accuracy_has_the_sampling_error_it_claims():
    """Two independent evaluations of one state differ by less than 5 standard errors (false alarm < 1e-6)."""
    training = section.sample(PARAMS, 0, 0.7)
    model, _ = section.build("p", training, np.random.default_rng(0))
    (weights,) = parameterisations.train(model, training, [2.5])
    one, other = (
        parameterisations.evaluate(model, training, weights, section.N_FRESH, np.random.default_rng(k)).test_accuracy
        for k in (1, 2)
    )
    assert abs(one - other) < 5 * np.sqrt(2) * 0.5 / np.sqrt(section.N_FRESH)
    assert one != other
