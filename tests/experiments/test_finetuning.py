"""Both phases on shipped texts and weights, a few samples and tokens; what needs no model uses none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benign_attention.experiments import finetuning
from benign_attention.experiments.finetuning import FinetuneParams
from benign_attention.experiments.real_text import Params
from benign_attention.parameters import ParameterError
from benign_attention.realdata import sources
from benign_attention.realdata.catalogue import NOISY
from benign_attention.records import seed_metric

TINY = Params(
    finetune_n_train_grid=[16, 32],
    label_noise_grid=[0.0, 0.3],
    n_epochs=1,
    n_pretrain=60,
    n_test=40,
    max_tokens=8,
    n_seeds=2,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": "mnist6k"}, "source must be one of mnist5k, digits8, mnist, cifar10, [a-z, ]*, got 'mnist6k'$"),
        ({"backbone": "gpt"}, "backbone must be one of vit-[^,]*, vit-[^,]*, google/vit[^,]*, got 'gpt'$"),
        ({"backbone": "minilm"}, "backbone minilm reads texts, but source mnist5k holds images"),
        ({"finetune_n_train_grid": [200, 20]}, "finetune_n_train_grid must increase"),
        ({"finetune_n_train_grid": [1001]}, "finetune_n_train_grid must be at most 1000 for source mnist5k"),
        ({"label_noise_grid": [0.1, 0.2]}, "label_noise_grid must start with 0"),
        ({"label_noise_grid": [0.0, 0.1, 0.10000001]}, "label_noise_grid must differ in the first six digits"),
        ({"label_noise_grid": [0.0]}, "label_noise_grid must be a list of at least 2 numbers"),
        ({"label_noise_grid": [0.0, 0.9]}, "label_noise_grid must stay below 0.9"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, gd"),
    ],
)
def test_a_mistake_is_named_in_one_line(change, named):
    with pytest.raises(ParameterError, match=named) as found:
        FinetuneParams(**change)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", NOISY)
def test_the_largest_n_is_known_without_loading_the_data(name):
    assert len(sources.load(name).noisy) == NOISY[name]


def test_too_few_clean_images_name_the_parameter():
    few = FinetuneParams(
        source="digits8", backbone="vit-tiny-scratch", finetune_n_train_grid=[20], n_pretrain=10, n_test=40
    )
    with pytest.raises(ParameterError, match="n_pretrain must be large enough for clean samples of all 10 classes"):
        finetuning.study(few)


def test_no_network_source_is_loaded_before_it_is_needed(monkeypatch):
    monkeypatch.setattr(sources, "load", lambda name: pytest.fail(f"{name} was loaded"))
    assert Params(source="ag_news", backbone="bert-base-uncased", finetune_n_train_grid=[10**5]).source == "ag_news"


def test_label_noises_share_all_but_the_labels_and_flips_are_nested():
    dataset = sources.load("news4")
    three = TINY.replace(label_noise_grid=[0.0, 0.1, 0.3])
    run = finetuning.draw(three, dataset, 0, 200, 4)
    assert not run.flipped[0].any()
    assert not (run.flipped[1] & ~run.flipped[2]).any() and run.flipped[2].sum() > run.flipped[1].sum() > 0
    np.testing.assert_array_equal(run.given != dataset.labels[run.samples], run.flipped)
    both = run.flipped[1]
    np.testing.assert_array_equal(run.given[1][both], run.given[2][both])
    assert set(run.samples) <= set(dataset.noisy)


def test_a_draw_depends_on_run_seed_source_and_n_and_on_nothing_else():
    dataset = sources.load("news4")

    def drawn(params=TINY, run=0, n=100):
        one = finetuning.draw(params, dataset, run, n, 4)
        return one.samples, one.order, one.start.key

    samples, order, key = drawn()
    same = TINY.replace(learning_rate=0.1, special_tokens=False, label_noise_grid=[0.0, 0.2], n_seeds=5)
    again = drawn(same)
    np.testing.assert_array_equal(again[0], samples)
    assert again[1] == order and torch.equal(again[2], key)
    for other in (drawn(run=1), drawn(TINY.replace(seed=1)), drawn(n=101)):
        assert other[1] != order and not torch.equal(other[2], key)


def test_metrics_are_those_of_the_trained_maps():
    metrics, found = finetuning.measure(TINY), finetuning.study(TINY)
    tokens = found.backbone.last.tokens(found.hidden.hidden, found.hidden.mask, found.test)
    labels = found.dataset.labels[found.rows[found.test]]
    with torch.no_grad():
        accuracy = [
            (found.head(found.backbone.last.class_vectors(one.maps, tokens)).argmax(-1).numpy() == labels).mean(1)
            for one in found.trained[32]
        ]
    clean, noisy = np.array(accuracy).T
    np.testing.assert_allclose(metrics["test_accuracy_n32_noise0.3"].per_seed, noisy, atol=1e-6)
    np.testing.assert_allclose(metrics["noise_cost_n32_noise0.3"].per_seed, clean - noisy, atol=1e-6)
    smaller = np.array(metrics["test_accuracy_n16_noise0.3"].per_seed)
    np.testing.assert_allclose(metrics["test_change_noise0.3"].per_seed, noisy - smaller, atol=1e-6)
    assert metrics["noisy_train_accuracy_n16_noise0"].value is None


def test_no_sample_is_in_two_parts():
    found = finetuning.study(TINY)
    trained_on = found.rows[np.concatenate([run.samples for runs in found.runs.values() for run in runs])]
    assert not set(trained_on) & set(found.rows[found.test])
    assert not set(found.rows) & set(found.dataset.pretraining)


@pytest.mark.parametrize(
    ("fitted", "cost", "said"),
    [
        ([0.5, 0.5], [0.1, 0.1], "not fitted"),
        ([1.0, 1.0], [0.1, 0.1], "harmful"),
        ([1.0, 1.0], [0.0, 0.0], "benign"),
        ([1.0, 1.0], [0.1, 0.0], "open"),
        ([1.0, 0.7], [0.1, 0.1], "open"),
        ([np.nan, np.nan], [0.1, 0.1], "open"),
    ],
)
def test_benign_and_harmful_presuppose_that_flipped_labels_are_fitted(fitted, cost, said):
    metrics = {
        "noisy_train_accuracy_n20_noise0.1": seed_metric(fitted, (0, 1)),
        "noise_cost_n20_noise0.1": seed_metric(cost, (-1, 1)),
    }
    assert finetuning.outcome(metrics, 20, 0.1) == said


def fake_study(signal: float) -> SimpleNamespace:
    """300 samples of 40 tokens, two classes at +-signal along one of 50 axes, unit noise along all."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=300)
    hidden = rng.normal(size=(300, 41, 50))
    hidden[..., 0] += signal * (2 * labels - 1)[:, None]
    states = SimpleNamespace(hidden=hidden, mask=np.ones((300, 41), bool))
    return SimpleNamespace(
        runs={300: [SimpleNamespace(samples=np.arange(300))]},
        rows=np.arange(300),
        dataset=SimpleNamespace(labels=labels),
        hidden=states,
    )


@pytest.mark.parametrize("signal", [0.0, 0.5, 2.0])
def test_token_snr_is_signal_over_noise_of_a_token(signal):
    # fixed seed; without signal what is left is chance, a few times 1 / sqrt(300 * 40)
    assert finetuning.token_snr(fake_study(signal)) == pytest.approx(signal / np.sqrt(50), abs=0.01)


def test_attention_shifts_are_total_variations():
    uniform, spike = np.full((1, 4), 0.25), np.array([[1.0, 0, 0, 0]])
    trained = SimpleNamespace(attention=np.array([[uniform, uniform], [spike, uniform]]))
    run = SimpleNamespace(flipped=np.array([[False, False], [True, False]]))
    params = SimpleNamespace(finetune_n_train_grid=[2])
    found = SimpleNamespace(params=params, runs={2: [run, run]}, trained={2: [trained, trained]})
    shifts = finetuning.attention_shifts(found)
    assert shifts["attention_shift_flipped"].value == pytest.approx(0.75)
    assert shifts["attention_shift_kept"].value == pytest.approx(0.0)
    assert shifts["attention_shift_difference"].value == pytest.approx(0.75)
