"""Shipped texts and weights, few samples and tokens."""

import numpy as np
import pytest

from benign_attention.claims import load_claims
from benign_attention.experiments import real_text
from benign_attention.experiments.real_text import Params
from benign_attention.figures import finetuning as figures
from benign_attention.figures import real_text as text_figures
from benign_attention.parameters import ParameterError

SMALL = Params(
    finetune_n_train_grid=[16, 32],
    label_noise_grid=[0.0, 0.3],
    n_epochs=2,
    n_pretrain=80,
    n_test=40,
    max_tokens=8,
    n_seeds=2,
)


@pytest.fixture(scope="module")
def found(cache):
    return real_text.explore(SMALL)


def test_flipped_labels_are_memorised_when_training_is_long_and_not_when_it_is_slow():
    long = real_text.measure(SMALL.replace(n_epochs=40, learning_rate=3e-3))
    assert long["lowest_noisy_train_accuracy_noise0.3"].value > 0.9 and long["highest_train_loss_noise0.3"].value < 0.1
    assert long["attention_rise_n32_noise0.3"].value > 0.05
    controls = {tuple(c.change.items()) for claim in load_claims("real_text") for c in claim.controls}
    assert controls == {(("learning_rate", 1e-6),)}
    slow = real_text.measure(SMALL.replace(learning_rate=1e-6))
    assert slow["lowest_noisy_train_accuracy_noise0.3"].value < 0.5 and slow["highest_train_loss_noise0.3"].value > 0.5
    assert abs(slow["attention_rise_n32_noise0.3"].value) < 0.001
    assert abs(slow["noise_cost_n32_noise0.3"].value) < 0.02 and abs(slow["test_change_noise0.3"].value) < 0.1


def test_what_the_second_set_of_texts_refuses_is_said_at_once():
    with pytest.raises(ParameterError, match=r"label_noise_grid must stay below 0.75.*second set of texts, news4"):
        Params(source="r8", label_noise_grid=[0.0, 0.8])
    assert Params(source="r8", label_noise_grid=[0.0, 0.8], sections="point").source == "r8"
    with pytest.raises(ParameterError, match="learning_rate must be at most 1e\\+14, got 5e\\+14"):
        Params(learning_rate=5e14)


@pytest.mark.parametrize(("n_train", "noise"), [(16, 0.001), (2, 0.74)])
def test_training_sets_without_kept_or_without_flipped_labels_are_shown(n_train, noise):
    few = SMALL.replace(finetune_n_train_grid=[n_train], label_noise_grid=[0.0, noise], n_epochs=1)
    found = real_text.explore(few)
    assert (found.flipped is None) == (noise < 0.1) and (found.kept is None or noise < 0.1)
    for figure in (figures.over_n(found.main), text_figures.words(found)):
        figure.canvas.draw()


def test_the_change_over_n_also_goes_by_the_name_of_what_was_run():
    metrics = real_text.measure(SMALL)
    assert metrics["test_change_noise0.3_news4_minilm"] == metrics["test_change_noise0.3"]


def test_studies_differ_in_what_their_names_say(found):
    assert found.other.params.source == "r8" and found.main.params.source == "news4"
    assert found.reading.params.special_tokens is False
    assert list(found.rates) == [5e-5, 3e-3]
    run, same = found.main.runs[32][0], found.reading.runs[32][0]
    texts = found.main.rows[run.samples]
    np.testing.assert_array_equal(texts, found.reading.rows[same.samples])
    np.testing.assert_array_equal(run.given, same.given)


def test_explanations_compare_run_by_run(found):
    first, cls = (np.array(found.metrics[f"{name}_noise_cost"].per_seed) for name in ("first_word", "cls"))
    np.testing.assert_allclose(found.metrics["extra_cost_first_word"].per_seed, first - cls)
    own, other = (real_text.noise_costs(study, 32) for study in (found.main, found.other))
    low_first = found.metrics["snr"].value < found.metrics["other_snr"].value
    np.testing.assert_allclose(
        found.metrics["extra_cost_at_low_snr"].per_seed, own - other if low_first else other - own
    )


def test_attention_is_shown_on_the_words_of_the_sentence(found):
    for text in (found.kept, found.flipped):
        assert text.words[0] == "[CLS]" and len(text.words) == len(text.before) == len(text.after) <= 8
        assert text.before.sum() == pytest.approx(1, abs=1e-4) and text.after.sum() == pytest.approx(1, abs=1e-4)
    assert found.kept.label == found.kept.given and found.flipped.label != found.flipped.given


def test_without_special_tokens_position_0_is_a_word(found):
    words = found.reading.backbone.words("attention is trained")
    assert words == ["attention", "is", "trained"]
    assert found.main.backbone.words("attention is trained") == ["[CLS]", *words, "[SEP]"]
