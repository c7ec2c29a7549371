"""Tiny random models in the hub's format, and fixtures that offer them without a network."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from benign_attention.realdata.backbones import BACKBONES, WEIGHTS
from benign_attention.realdata.sources import SOURCES, Dataset

REVISION = "0" * 40
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "bank", "##er", "oil", "price", "ris", "##es", "in", "the", "gulf"]
NONE = np.array([], int)


def texts(*inputs: str) -> Dataset:
    return Dataset(SOURCES["news4"], np.array(inputs, object), np.zeros(len(inputs), int), NONE, NONE, NONE)


def images(inputs: np.ndarray) -> Dataset:
    return Dataset(SOURCES["mnist5k"], inputs, np.zeros(len(inputs), int), NONE, NONE, NONE)


TEXTS = texts("the banker in the gulf", "oil", "oil price rises", "unheard words", "")
IMAGES = images(np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8))


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_padding(length=16)
    return made


def into_hub_cache(folder: Path, cache: Path, repository: str) -> Path:
    """`folder` in the hub's format: files called by their hash, and a snapshot of links to them."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / REVISION
    for part in (home / "blobs", snapshot, home / "refs"):
        part.mkdir(parents=True)
    (home / "refs" / "main").write_text(REVISION)
    for file in folder.iterdir():
        content = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob = home / "blobs" / (hashlib.sha256(content).hexdigest() if file.name == WEIGHTS else git)
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture(scope="module", name="hub_copies")
def make_hub_copies(tmp_path_factory) -> Path:
    """Tiny random models under the names of the hub's backbones."""
    cache = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    bert = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, initializer_range=0.3, **sizes))
    vit = ViTModel(ViTConfig(image_size=32, patch_size=8, initializer_range=0.3, **sizes))
    for name, model in (("bert-base-uncased", bert), ("google/vit-base-patch16-224-in21k", vit)):
        folder = tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        tokenizer().save(str(folder / "tokenizer.json"))
        into_hub_cache(folder, cache, BACKBONES[name].repository)
    return cache


@pytest.fixture(autouse=True, name="offline")
def go_offline(monkeypatch, tmp_path):
    """No network, an empty cache, and the hub's cache empty as well."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("BENIGN_ATTENTION_CACHE", str(tmp_path / "cache"))


@pytest.fixture(name="hub")
def fill_hub(offline, monkeypatch, hub_copies, tmp_path) -> Path:
    """A copy of the tiny models that a test may break."""
    shutil.copytree(hub_copies, tmp_path / "hub", symlinks=True)
    return tmp_path / "hub"
