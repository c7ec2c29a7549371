import json
import subprocess
import sys

import numpy as np
import pytest

from benign_attention.experiments import one_layer_images as chapter
from benign_attention.figures import one_layer_images as figures
from benign_attention.parameters import ParameterError
from benign_attention.realdata import binary, sources

SMALL = chapter.OneLayerParams(n_train_grid=[20, 40], n_steps=40, dim=16, n_seeds=2)


@pytest.fixture(scope="module")
def measured():
    return chapter.measure(SMALL)


@pytest.fixture(scope="module")
def found():
    return chapter.explore(SMALL)


def test_metrics_have_their_fixed_names(measured):
    for n in SMALL.n_train_grid:
        for name in ("train", "clean_train", "noisy_train", "test"):
            assert measured[f"{name}_accuracy_n{n}"].n_seeds == 2


def test_training_accuracy_is_the_mix_of_kept_and_flipped_labels(measured):
    for n in SMALL.n_train_grid:
        for run in range(2):
            share = chapter.draw(SMALL, run, n).flipped.mean()
            kept, flipped, train = (
                measured[f"{name}_accuracy_n{n}"].per_seed[run] for name in ("clean_train", "noisy_train", "train")
            )
            assert train == pytest.approx((1 - share) * kept + share * (flipped or 0))


def test_another_process_measures_the_same(measured):
    code = (
        "import json; from benign_attention.experiments import one_layer_images as c; "
        f"found = c.measure(c.OneLayerParams(**{SMALL.model_dump()!r})); "
        "print(json.dumps({k: m.per_seed for k, m in found.items()}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == {name: metric.per_seed for name, metric in measured.items()}


def test_more_seeds_and_a_longer_grid_keep_what_was_there(measured):
    more = chapter.measure(SMALL.replace(n_seeds=3, n_train_grid=[20, 30, 40]))
    for n in SMALL.n_train_grid:
        assert more[f"test_accuracy_n{n}"].per_seed[:2] == measured[f"test_accuracy_n{n}"].per_seed


def test_the_number_of_threads_changes_no_number(measured, monkeypatch):
    monkeypatch.setattr(chapter.devices, "map_runs", lambda function, jobs, device: [function(job) for job in jobs])
    chapter._fit.cache_clear()
    alone = chapter.devices.torch.get_num_threads()
    chapter.devices.torch.set_num_threads(1)
    try:
        assert {k: m.per_seed for k, m in chapter.measure(SMALL).items()} == {
            k: m.per_seed for k, m in measured.items()
        }
    finally:
        chapter.devices.torch.set_num_threads(alone)


def test_without_flips_the_flipped_accuracy_is_undefined():
    clean = chapter.measure(SMALL.replace(label_noise=0.0))
    assert clean["noisy_train_accuracy_n40"].value is None
    assert clean["lowest_noisy_train_accuracy"].value is None
    assert clean["train_accuracy_n40"].per_seed == clean["clean_train_accuracy_n40"].per_seed


def test_a_single_n_has_no_gain():
    assert chapter.measure(SMALL.replace(n_train_grid=[20]))["test_gain"].value is None


def test_flips_are_independent_with_the_given_probability():
    """3000 flips of probability .3 in each of 10 runs: the share lies within .3 ± .0106 (four standard errors) but for
    one seed in 16 000; runs differ from each other."""
    params = chapter.OneLayerParams(label_noise=0.3)
    draws = [chapter.draw(params, run, 3000) for run in range(10)]
    assert abs(np.mean([d.flipped for d in draws]) - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 30000)
    counts = [d.flipped.sum() for d in draws]
    assert len(set(counts)) > 1
    assert sorted(draws[0].chosen) == list(range(3000))


def test_the_control_without_flips_has_the_same_images_and_start(found):
    for n in SMALL.n_train_grid:
        for one, other in zip(found.fits[n], found.clean_fits[n], strict=True):
            assert one.test[0] == other.test[0]
            assert not other.is_flipped.any()


def test_cost_is_the_paired_difference(found):
    expected = [w.test[-1] - f.test[-1] for f, w in zip(found.fits[40], found.clean_fits[40], strict=True)]
    assert found.metrics["noise_cost_n40"].per_seed == pytest.approx(expected)
    assert found.metrics["noise_cost"] == found.metrics["noise_cost_n40"]


def test_the_nearest_neighbour_pays_what_its_proposition_says():
    """Cost of flips for 1-NN against eta (1 - 2 eps_0). 40 draws of n = 200: the difference has a standard error of
    .0045 (measured between runs); four of them, one seed in 16 000."""
    params = chapter.OneLayerParams(n_train_grid=[200], label_noise=0.2)
    given, clean = np.array([chapter.nearest_accuracies(params, run, 200) for run in range(40)]).T
    assert np.mean(clean - given) == pytest.approx(0.2 * (2 * clean.mean() - 1), abs=0.018)


def test_attention_shift_is_zero_without_flips_and_at_most_one(found):
    same = chapter._attention_shifts(found.clean_fits[40], found.clean_fits[40])
    assert same["attention_shift_kept"].value == 0 and same["attention_shift_flipped"].value is None
    assert all(0 < x <= 1 for x in found.metrics["attention_shift_kept"].per_seed)


def test_the_contrast_task_keeps_to_its_own_pool():
    params = SMALL.replace(n_train_grid=[20, 100, 700])
    contrast = chapter._contrast_params(params)
    assert contrast.task == "0-1" and contrast.n_train_grid == [20, 600]
    back = chapter._contrast_params(params.replace(task="0-1", n_train_grid=[20, 600]))
    assert back.task == "odd_even" and back.n_train_grid == [20, 600]


def test_watched_steps_hold_the_ends_once():
    steps = chapter.watched_steps(500)
    assert steps[0] == 0 and steps[-1] == 500 and (np.diff(steps) > 0).all()
    assert chapter.watched_steps(1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "3-3"}, "task must be odd_even or two different digits such as 3-8, got '3-3'"),
        ({"task": "3-8", "n_train_grid": [50, 601]}, "n_train_grid[1] must be at most 600 for task 3-8, got 601"),
        ({"n_train_grid": [50, 3001]}, "n_train_grid[1] must be at most 3000 for task odd_even, got 3001"),
        ({"n_train_grid": [50, 50]}, "n_train_grid must increase, got [50, 50]"),
        ({"n_train_grid": []}, "n_train_grid must be a non-empty list of whole numbers, got []"),
        ({"n_train_grid": [1]}, "n_train_grid[0] must be a whole number in [2, 1e+09], got 1"),
        ({"n_heads": 5}, "n_heads must divide dim, got n_heads 5 and dim 48"),
        ({"patch_size": 5}, "patch_size must divide 28, got 5"),
        ({"source": "cifar10"}, "patch_size must divide 32, got 7"),
        ({"source": "digits8"}, "patch_size must divide 8, got 7"),
        (
            {"source": "news4"},
            "source must be one of mnist5k, digits8, mnist, cifar10, pneumoniamnist, breastmnist, got 'news4'",
        ),
        ({"optimizer": "sgd"}, "optimizer must be one of adam, gd, got 'sgd'"),
        ({"label_noise": 0.7}, "label_noise must be a number in [0, 0.5), got 0.7"),
        ({"mlp_ratio": -1}, "mlp_ratio must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(values, message):
    with pytest.raises(ParameterError) as error:
        chapter.OneLayerParams(**values)
    assert str(error.value) == message


def test_the_pool_is_as_large_as_the_parameters_believe():
    for task in ("odd_even", "0-1"):
        assert len(binary.binary_task(task).pool_images) == binary.pool_size(task)


def test_a_diverged_network_has_no_accuracy():
    metrics = chapter.measure(SMALL.replace(optimizer="gd", step_size=1e15, n_train_grid=[40], n_steps=3, n_seeds=1))
    assert metrics["test_accuracy_n40"].value is None and metrics["train_accuracy_n40"].value is None


def test_a_coloured_source_has_its_own_shape_and_names_its_metrics():
    """Nothing is fetched: parameters know the shapes."""
    params = chapter.OneLayerParams(source="cifar10", patch_size=8, n_heads=4, label_noise=0.05)
    assert params.architecture().n_patches == 16 and params.architecture().n_pixels == 8 * 8 * 3
    assert params.named("test_gain") == "test_gain_cifar10"
    assert [SMALL.replace(source=name).named("test_gain") for name in ("mnist5k", "mnist")] == ["test_gain"] * 2


def test_colour_images_go_through_the_whole_part(monkeypatch):
    """Random images of CIFAR-10's shape in its place."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(60, 32, 32, 3)).astype(np.float32)
    labels = np.where(rng.random(60) < 0.5, -1, 1).astype(np.float32)
    task = binary.BinaryTask(images[:40], labels[:40], images[40:], labels[40:])
    monkeypatch.setattr(binary, "binary_task", lambda task_name, source: task)
    params = SMALL.replace(source="cifar10", patch_size=8, n_train_grid=[20, 40], n_steps=5)
    measured, found = chapter.measure(params), chapter.explore(params)
    assert measured["test_gain_cifar10"].n_seeds == 2 and "test_gain" not in measured
    assert "noise_cost_cifar10" in found.metrics and "noise_cost" not in found.metrics
    figure = figures.images_and_attention(params, found)
    assert figure.axes[0].images[0].get_array().shape == (32, 32, 3)


def test_a_source_that_is_not_there_is_refused_before_anything_is_trained(monkeypatch):
    def unreachable(task, source):
        raise sources.SourceError(f"{source} cannot be had")

    monkeypatch.setattr(binary, "binary_task", unreachable)
    with pytest.raises(sources.SourceError, match=r"^cifar10 cannot be had$"):
        chapter.measure(chapter.OneLayerParams(source="cifar10", patch_size=8))


def test_sources_have_the_shapes_that_the_parameters_believe():
    for name in ("mnist5k", "digits8"):
        shape = sources.load(name).inputs.shape[1:]
        assert shape == (shape[0], *chapter.SIDE_AND_CHANNELS[name])


def test_more_noise_keeps_the_flips_of_less(found):
    few = chapter.draw(SMALL, 0, 40)
    assert (few.flipped == (few.luck < SMALL.label_noise)).all()
    low, high = chapter.fit(SMALL, 0, 40, (0.2, 0.45), False)
    assert high.is_flipped[low.is_flipped].all() and high.is_flipped.sum() > low.is_flipped.sum()
    assert low.steps.tolist() == [SMALL.n_steps]
