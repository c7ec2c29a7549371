"""The small ViT trained here: made of transformers' blocks, deterministic, kept, and not vacuous."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benign_attention.realdata import cache, scratch_vit
from benign_attention.realdata.last_layer import from_vit
from benign_attention.realdata.scratch_vit import WEIGHTS, ScratchConfig, trained

TINY = ScratchConfig(dim=16, n_blocks=2, n_heads=2, mlp_dim=16, class_token_block=1, n_steps=4, batch_size=20)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


def stripes(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy 8 x 8 images with one bright row (class 0), column (class 1) or neither (class 2), anywhere."""
    rng = np.random.default_rng(seed)
    labels, places = np.arange(n) % 3, rng.integers(0, 8, n)
    images = rng.integers(0, 100, (n, 8, 8, 1), np.uint8)
    for image, label, place in zip(images, labels, places, strict=True):
        if label == 0:
            image[place] += 120
        elif label == 1:
            image[:, place] += 120
    return images, labels


IMAGES, LABELS = stripes(60)


def test_the_class_token_meets_the_image_in_the_last_block_only():
    model, _ = trained(IMAGES, LABELS, 3, TINY)
    states = model.below(model.prepared(IMAGES[:5]))
    assert states.shape == (5, 1 + 4, 16)
    assert torch.equal(states[:, 0], model.class_token[0].expand(5, -1))
    early, _ = trained(IMAGES, LABELS, 3, replace(TINY, class_token_block=0))
    assert early.below(early.prepared(IMAGES[:5]))[:, 0].std(0).max() > 0


def test_its_last_block_is_read_like_that_of_a_pretrained_vit():
    model, _ = trained(IMAGES, LABELS, 3, TINY)
    pixels = model.prepared(IMAGES)
    layer = from_vit(model.blocks[-1], model.norm)
    tokens = layer.tokens(model.below(pixels).numpy(), None, np.arange(len(IMAGES)))
    scores = model.classifier(layer.class_vectors(layer.pretrained, tokens)[0])
    torch.testing.assert_close(scores, model(pixels), atol=1e-5, rtol=0)


def test_training_is_repeatable_and_leaves_torch_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, digest = trained(IMAGES, LABELS, 3, TINY)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    for entry in (cache.folder() / "vit-small-scratch").iterdir():
        (entry / WEIGHTS).unlink()
    with pytest.warns(UserWarning, match="made again"):
        second, again = trained(IMAGES, LABELS, 3, TINY)
    assert digest == again
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_training_happens_once_for_the_same_images_labels_and_settings(monkeypatch):
    calls = []
    train = scratch_vit.train
    monkeypatch.setattr(scratch_vit, "train", lambda *arguments: calls.append(train(*arguments)))
    for _ in range(2):
        trained(IMAGES, LABELS, 3, TINY)
    assert len(calls) == 1
    trained(IMAGES[:30], LABELS[:30], 3, TINY)
    trained(IMAGES, (LABELS + 1) % 3, 3, TINY)
    trained(IMAGES, LABELS, 3, replace(TINY, seed=1))
    assert len(calls) == 4


def test_it_learns():
    model, _ = trained(*stripes(300), 3, replace(TINY, n_steps=300, learning_rate=1e-2))
    images, labels = stripes(300, seed=1)
    with torch.no_grad():
        assert (model(model.prepared(images)).argmax(1).numpy() == labels).mean() > 0.9


def test_pixels_lie_between_minus_1_and_1_whatever_their_range():
    dark = IMAGES // 16
    model, _ = trained(dark, LABELS, 3, TINY)
    pixels = model.prepared(dark)
    assert pixels.shape == (60, 1, 8, 8)
    assert float(pixels.min()) == -1 and float(pixels.max()) == 1


def test_small_images_are_cut_into_smaller_patches(monkeypatch):
    monkeypatch.setattr(scratch_vit, "train", lambda *arguments: None)
    assert trained(IMAGES, LABELS, 3)[0].patches.num_patches == 16
    assert trained(IMAGES.repeat(4, 1).repeat(4, 2), LABELS, 3)[0].patches.num_patches == 64
