from dataclasses import replace

import numpy as np
import pytest

from benign_attention.parameters import ParameterError
from benign_attention.realdata import binary, sources


@pytest.fixture
def colours(monkeypatch):
    """A source `cifar10` of 60 small colour images, 6 of each class, whose pixels are their numbers."""
    images = np.arange(60 * 4 * 4 * 3).reshape(60, 4, 4, 3).astype(np.uint8)
    roles = np.arange(60).reshape(3, 20)
    data = sources.Dataset(sources.SOURCES["cifar10"], images, np.arange(60) % 10, *roles)
    monkeypatch.setattr(sources, "load", lambda name: {"cifar10": data}[name])
    binary.binary_task.cache_clear()
    yield data
    binary.binary_task.cache_clear()


def test_odd_even_uses_all_images():
    task, data = binary.binary_task("odd_even"), sources.load("mnist5k")
    assert task.pool_images.shape == (3000, 28, 28, 1) and task.test_images.shape == (2000, 28, 28, 1)
    assert np.array_equal(task.test_labels, np.where(data.labels[data.test] % 2, 1, -1))
    assert set(np.unique(task.pool_labels)) == {-1, 1}


def test_a_pair_uses_its_two_digits_and_the_second_is_positive():
    task, data = binary.binary_task("3-8"), sources.load("mnist5k")
    test = data.test[np.isin(data.labels[data.test], (3, 8))]
    assert len(task.pool_images) == binary.pool_size("3-8") == 600
    assert np.array_equal(task.test_labels, np.where(data.labels[test] == 8, 1, -1))
    assert np.array_equal(binary.binary_task("8-3").test_labels, -task.test_labels)
    assert binary.class_names("3-8") == {-1: "3", 1: "8"}


@pytest.mark.parametrize("source", ["mnist5k", "digits8"])
@pytest.mark.parametrize("task", ["odd_even", "4-9"])
def test_the_size_of_the_pool_is_known_without_the_data(source, task):
    assert len(binary.binary_task(task, source).pool_labels) == binary.pool_size(task, source)


def test_colour_images_keep_their_channels(colours):
    task = binary.binary_task("odd_even", "cifar10")
    assert task.pool_images.shape == (40, 4, 4, 3) and binary.pool_size("odd_even", "cifar10") == 40
    assert binary.pool_size("0-1", "cifar10") == len(binary.binary_task("0-1", "cifar10").pool_labels) == 8
    pool = np.r_[colours.pretraining, colours.noisy]
    pixels = colours.inputs[pool].astype(float)
    assert np.allclose(task.pool_images * pixels.std() + pixels.mean(), pixels, atol=1e-3)
    patches = binary.cut_into_patches(colours.inputs, 2)
    assert patches.shape == (60, 4, 12)
    assert np.array_equal(patches[7, 1].reshape(2, 2, 3), colours.inputs[7, 0:2, 2:4])


def test_classes_are_called_by_their_names():
    assert binary.class_names("3-5", "cifar10") == {-1: "cat", 1: "dog"}
    assert binary.class_names("odd_even") == {-1: "even", 1: "odd"}
    assert binary.class_names("odd_even", "pneumoniamnist") == {-1: "normal", 1: "pneumonia"}


def test_scaling_is_fixed_by_the_pool_alone():
    task = binary.binary_task("4-9")
    assert abs(task.pool_images.mean()) < 1e-5 and abs(task.pool_images.std() - 1) < 1e-5
    assert abs(task.test_images.mean()) > 1e-5


@pytest.mark.parametrize("task", ["", "odd", "3-3", "3-10", "a-b", "3 - 8", "-3-8", "3-8\n", "٣-٨"])
def test_what_is_no_task_is_refused_in_one_line(task):
    with pytest.raises(ParameterError, match=r"^task must be odd_even or two different digits such as 3-8") as error:
        binary.parse_task(task)
    assert "\n" not in str(error.value)


def test_a_class_that_the_source_does_not_have_is_refused():
    with pytest.raises(ParameterError, match=r"^task must be odd_even or two different classes below 2 such as 0-1"):
        binary.parse_task("0-2", "breastmnist")


@pytest.mark.parametrize("source", ["news4", "nowhere"])
def test_a_source_without_images_is_refused(source):
    with pytest.raises(ParameterError, match=f"^source must be one of mnist5k, digits8, .*, got '{source}'$"):
        binary.binary_task("0-1", source)


def test_patches_are_cut_row_by_row():
    image = np.arange(28 * 28).reshape(1, 28, 28, 1)
    patches = binary.cut_into_patches(image, 7)
    assert patches.shape == (1, 16, 49)
    assert np.array_equal(patches[0, 6].reshape(7, 7), image[0, 7:14, 14:21, 0])


@pytest.mark.parametrize("size", [0, 3, 29])
def test_a_patch_that_does_not_fit_is_refused(size):
    with pytest.raises(ParameterError, match=f"^patch_size must divide 28, got {size}$"):
        binary.cut_into_patches(np.zeros((1, 28, 28, 1)), size)


def test_nearest_agrees_with_all_distances():
    rng = np.random.default_rng(0)
    pool, images = rng.normal(size=(20, 8, 8, 3)), rng.normal(size=(7, 8, 8, 3))
    distances = ((images[:, None] - pool) ** 2).sum((2, 3, 4))
    assert np.array_equal(binary.nearest(pool, images), distances.argmin(1))


def test_image_snr_recovers_the_ratio_of_two_orthogonal_means():
    """In two classes with orthogonal means of norm 30 and unit noise in 784 dimensions the ratio is 30/28; the means of
    2000 samples each add noise of relative size below 1 %."""
    rng = np.random.default_rng(1)
    labels = np.repeat([-1.0, 1.0], 2000)
    pixels = rng.normal(size=(4000, 784))
    pixels[labels < 0, 0] += 30
    pixels[labels > 0, 1] += 30
    task = binary.BinaryTask(pixels.reshape(-1, 28, 28, 1), labels, pixels[:1], labels[:1])
    assert binary.image_snr(task) == pytest.approx(30 / 28, rel=0.01)
    assert binary.image_snr(replace(task, pool_labels=-labels)) == binary.image_snr(task)
