"""Both parts as one chapter; part two on digits of 8 x 8 pixels and a ViT that is trained in a second."""

import numpy as np
import pytest

from benign_attention.claims import Claim, load_claims
from benign_attention.experiments import finetuning, one_layer_images
from benign_attention.experiments import real_images as chapter
from benign_attention.experiments.real_images import Params
from benign_attention.figures import real_images as figures
from benign_attention.parameters import ParameterError

SMALL = Params(
    n_train_grid=[20, 40],
    n_steps=3,
    dim=16,
    source="digits8",
    patch_size=4,
    backbone="vit-tiny-scratch",
    finetune_n_train_grid=[20, 60],
    label_noise_grid=[0.0, 0.3],
    n_epochs=6,
    n_pretrain=200,
    n_test=100,
    finetune_n_seeds=2,
    n_seeds=2,
)


@pytest.fixture(scope="module")
def measured(cache):
    return chapter.measure(SMALL)


@pytest.fixture(scope="module")
def found(cache):
    return chapter.explore(SMALL)


@pytest.fixture(scope="module")
def slow(cache):
    return chapter.measure(SMALL.replace(learning_rate=1e-9))


def test_each_part_measures_what_it_measures_alone(measured):
    alone = one_layer_images.measure(SMALL.one_layer()) | finetuning.measure(SMALL.finetune())
    assert {name: measured[name].per_seed for name in alone} == {name: m.per_seed for name, m in alone.items()}


def test_parts_do_not_depend_on_each_other_s_parameters():
    other = SMALL.replace(n_epochs=3, optimizer="gd", finetune_n_seeds=4, label_noise_grid=[0.0, 0.1])
    assert other.one_layer() == SMALL.one_layer()
    other = SMALL.replace(one_layer_optimizer="gd", n_seeds=4, label_noise=0.2, n_steps=7)
    assert other.finetune() == SMALL.finetune()
    assert other.one_layer().optimizer == "gd" and other.one_layer().n_seeds == 4
    assert SMALL.replace(finetune_n_seeds=7).finetune().n_seeds == 7


def test_part_one_has_the_defaults_of_its_own():
    assert Params().one_layer() == one_layer_images.OneLayerParams()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "news4"}, "source must be one of mnist5k, digits8, mnist, cifar10, pneumoniamnist, breastmnist"),
        ({"backbone": "minilm"}, "backbone minilm reads texts, but source mnist5k holds images"),
        ({"one_layer_optimizer": "adamw"}, "one_layer_optimizer must be one of adam, gd, got 'adamw'"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, gd, got 'adam'"),
        ({"n_heads": 5}, "n_heads must divide dim, got n_heads 5 and dim 48"),
        ({"patch_size": 5}, "patch_size must divide 28, got 5"),
        ({"n_train_grid": []}, "n_train_grid must be a non-empty list of whole numbers, got []"),
        ({"finetune_n_train_grid": [20, 1001]}, "finetune_n_train_grid must be at most 1000 for source mnist5k"),
        ({"label_noise_grid": [0.1, 0.2]}, "label_noise_grid must start with 0"),
        ({"batch_size": -1}, "batch_size must be a whole number of at least 0, got -1"),
        ({"finetune_n_seeds": 0}, "finetune_n_seeds must be a whole number of at least 1, got 0"),
    ],
)
def test_a_mistake_is_named_in_one_line_as_the_chapter_names_it(values, message):
    with pytest.raises(ParameterError) as error:
        Params(**values)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_claims_name_what_part_two_ran_on():
    big = "google/vit-base-patch16-224-in21k"
    assert [Params(source=source).ran for source in ("mnist5k", "mnist")] == ["mnist_scratch"] * 2
    assert SMALL.ran == "digits8_scratch"
    assert Params(source="cifar10", patch_size=8, backbone=big).ran == "cifar10_vit-base-patch16-224-in21k"


def test_every_metric_of_a_claim_is_there_under_its_name(measured, found):
    """Those about what a hub is needed for aside."""
    there = {
        name.replace("digits8", "mnist").replace("noise0.3", "noise0.1").removesuffix("_digits8")
        for name in measured | found.metrics
    } | {name.removesuffix("_digits8") for name in measured | found.metrics}
    wanted = {
        condition.metric
        for claim in load_claims("real_images")
        if not claim.command
        for condition in (claim, *claim.also)
    }
    assert wanted <= there


def test_what_claims_rest_on_is_taken_from_the_right_place(measured):
    def claimed(name: str):
        return measured[f"{name}_noise0.3_digits8_scratch"]

    assert claimed("noise_cost") == measured["noise_cost_n60_noise0.3"]
    assert claimed("test_accuracy") == measured["test_accuracy_n60_noise0.3"]
    rises = np.array([measured[f"attention_rise_n{n}_noise0.3"].per_seed for n in (20, 60)])
    assert claimed("lowest_attention_rise").per_seed == rises.min(0).tolist()


def test_claims_with_controls_are_not_supported_there(slow):
    """Nothing is learnt at a learning rate of 1e-9, so neither accuracy nor attention can grow."""
    controlled = {c.id: c for c in load_claims("real_images") if c.id in ("TS-8b", "TS-10b")}
    for claim in controlled.values():
        assert [c.change for c in claim.controls] == [{"learning_rate": 1e-9}]
        here = claim.metric.replace("noise0.1_mnist", "noise0.3_digits8")
        moved = Claim(**{**claim.model_dump(by_alias=True), "metric": here, "also": []})
        assert moved.verdict(slow) != "supported"
    assert abs(slow["attention_rise_n60_noise0.3"].value) < 1e-4
    assert slow["noise_cost_n60_noise0.3"].per_seed == [0.0, 0.0]


def test_one_query_serves_all_images(found):
    """prop-one-query: the class token below the last layer is the same for all, and attention is S(X p_h), with p_h
    from one image's class token."""
    study, layer = found.study, found.study.backbone.last
    states = study.hidden.hidden
    assert (states[:, 0] == states[0, 0]).all() and np.ptp(states[:, 1].astype(float), axis=0).max() > 0
    run, trained = study.runs[60][0], study.trained[60][0]
    tokens = layer.tokens(states, study.hidden.mask, run.samples)
    query, bias, key, _ = (
        part[1].numpy()
        for part in (trained.maps.query, trained.maps.query_bias, trained.maps.key, trained.maps.key_bias)
    )
    x, size = tokens.inputs.numpy(), layer.dim // layer.n_heads
    for head in range(layer.n_heads):
        rows = slice(head * size, (head + 1) * size)
        p = key[rows].T @ (query[rows] @ x[0, 0] + bias[rows]) / np.sqrt(size)
        expected = np.exp(x @ p) / np.exp(x @ p).sum(1, keepdims=True)
        np.testing.assert_allclose(trained.attention[1, :, head], expected, atol=1e-5)


def test_fitted_shares_are_those_of_the_history(found):
    n = found.study.params.sweep_n
    for run, (seen, drawn) in enumerate(zip(found.memorised, found.study.runs[n], strict=True)):
        share = found.study.history("flipped_fitted", n)[run, 1, -1]
        assert seen.fitted[1][drawn.flipped[1]].mean() == pytest.approx(share)
        np.testing.assert_allclose(seen.attention.sum(-1), 1, atol=1e-5)


def test_attention_that_did_not_move_is_a_change_of_zero(found):
    seen = found.memorised[0]
    same = chapter.Memorised(seen.fitted, np.repeat(seen.attention[:1], 2, 0), seen.dark)
    flipped = np.arange(seen.fitted.shape[1]) % 2 == 0
    moved, changed, _ = chapter._means(chapter.Memorised(np.ones_like(seen.fitted), same.attention, same.dark), flipped)
    assert moved == [0, 0] and changed == [0, 0]
    none = chapter._means(same, np.zeros_like(flipped))
    assert all(np.isnan(pair[0]) and np.isfinite(pair[1]) for pair in none)


def test_dark_patches_hold_no_bright_pixel():
    images = np.zeros((2, 4, 6, 1), np.uint8)
    images[0, 3, 5], images[1, 0, 0], images[1, 0, 3] = 200, 20, 21
    dark = chapter.dark_patches(images, (2, 3))
    assert dark.tolist() == [[True] * 5 + [False], [True, False] + [True] * 4]
    assert chapter.dark_patches(images, (4, 4)).shape == (2, 16)


def test_other_learning_rates_and_longer_training_share_samples_and_start(found):
    n, rate = found.study.params.sweep_n, SMALL.learning_rate
    assert list(found.rates) == [rate / 3, rate, 3 * rate]
    assert found.longer.epochs[-1] == chapter.LONGER * SMALL.n_epochs
    for study in (*found.rates.values(), found.longer, found.sweep):
        start = [study.history("train_loss", n)[run, 0, 0] for run in range(2)]
        assert start == pytest.approx([found.study.history("train_loss", n)[run, 0, 0] for run in range(2)], rel=1e-5)


def test_the_patches_that_are_outlined_lie_on_the_image(found):
    figure = figures.attention_on_images(found)
    for ax in figure.axes[: len(figure.axes) // 3]:
        for outline in ax.patches:
            assert outline.get_width() == outline.get_height() == 2
            assert -0.5 <= outline.get_x() <= 5.5 and -0.5 <= outline.get_y() <= 5.5


def test_without_memorised_samples_the_figure_shows_kept_ones(found):
    nothing = [chapter.Memorised(np.zeros_like(s.fitted), s.attention, s.dark) for s in found.memorised]
    figure = figures.attention_on_images(chapter.Exploration(**{**vars(found), "memorised": nothing}))
    titles = [ax.get_title() for ax in figure.axes[:3]]
    assert all(title.endswith("kept") for title in titles) and len(figure.axes) == 3 * 3 + 1
