"""Cached features: what the backbone computes, in the order asked for, computed once, remade when altered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import IMAGES, TEXTS, fill_hub, go_offline, make_hub_copies  # noqa: F401

from benign_attention.parameters import ParameterError
from benign_attention.realdata import cache, features
from benign_attention.realdata.backbones import Backbone, load, whole

ORDER = np.array([2, 0, 4, 3])


@pytest.fixture
def bert(hub) -> Backbone:
    return load("bert-base-uncased", TEXTS, max_tokens=8)


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """How many samples a backbone was asked for, each time."""
    asked, hidden = [], Backbone.hidden
    monkeypatch.setattr(Backbone, "hidden", lambda self, inputs: asked.append(len(inputs)) or hidden(self, inputs))
    return asked


def expected(samples: np.ndarray) -> np.ndarray:
    model, tokenizer = whole("bert-base-uncased"), load("bert-base-uncased", TEXTS, max_tokens=8)
    numbers = tokenizer.token_numbers(TEXTS.inputs[samples])
    return np.stack([model(input_ids=torch.tensor([own])).last_hidden_state[0, 0].numpy() for own in numbers])


def test_class_vectors_are_those_of_the_unmodified_model_in_the_order_asked_for(bert):
    vectors = features.class_vectors(bert, TEXTS, ORDER)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected(ORDER), atol=1e-5, rtol=0)


def test_hidden_states_and_the_last_layer_give_the_unmodified_model(bert, monkeypatch):
    monkeypatch.setattr(features, "STORED", np.float32)
    states = features.hidden_states(bert, TEXTS, ORDER)
    assert isinstance(states.hidden, np.memmap) and states.hidden.shape == (4, 8, 16)
    assert list(states.mask.sum(1)) == [6, 8, 2, 4]
    assert not states.hidden[~states.mask].any()
    vectors = bert.last.class_vectors(bert.last.pretrained, bert.last.tokens(states.hidden, states.mask, np.arange(4)))[
        0
    ]
    np.testing.assert_allclose(vectors.numpy(), expected(ORDER), atol=1e-5, rtol=0)


def test_half_precision_on_disk_moves_class_vectors_by_less_than_a_thousandth(bert):
    """Rounding to 11 bits moves a number by at most 2^-11 = 5e-4 of it, and class vectors have size 1."""
    states = features.hidden_states(bert, TEXTS, ORDER)
    assert states.hidden.dtype == np.float16
    vectors = bert.last.class_vectors(bert.last.pretrained, bert.last.tokens(states.hidden, states.mask, np.arange(4)))[
        0
    ]
    error = vectors.numpy() - expected(ORDER)
    assert 0 < np.sqrt((error**2).mean()) < 1e-3


def test_images_have_a_token_for_each_patch_and_no_padding(hub):
    backbone = load("google/vit-base-patch16-224-in21k", IMAGES)
    states = features.hidden_states(backbone, IMAGES, np.arange(3))
    assert states.hidden.shape == (3, 17, 16) and states.mask.all()


def test_features_are_computed_once_for_the_same_samples(bert, reads):
    for _ in range(2):
        features.hidden_states(bert, TEXTS, ORDER)
        features.class_vectors(bert, TEXTS, ORDER)
    assert reads == [4, 4]
    features.hidden_states(bert, TEXTS, ORDER[::-1])
    features.hidden_states(load("bert-base-uncased", TEXTS, max_tokens=4), TEXTS, ORDER)
    assert len(reads) == 4


def test_altered_features_are_computed_again(bert, reads):
    before = np.array(features.hidden_states(bert, TEXTS, ORDER).hidden)
    (file,) = cache.folder().glob("features/*/hidden.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="altered or truncated"):
        after = features.hidden_states(bert, TEXTS, ORDER).hidden
    assert np.array_equal(before, after) and reads == [4, 4]


@pytest.mark.parametrize("rows", [[], [-1], [10**6], [0.5], [[0]]], ids=str)
def test_rows_that_the_data_set_does_not_have_are_refused(bert, reads, rows):
    for function in (features.hidden_states, features.class_vectors):
        with pytest.raises(ParameterError, match=r"^samples must be at least one row in 0\.\.\d+ of "):
            function(bert, TEXTS, np.array(rows))
    assert reads == [] and not list(cache.folder().glob("features/*"))
