"""Tiny random models of `transformers`, unmodified, and what their last layer gets on a few samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from benign_attention.realdata import last_layer
from benign_attention.realdata.last_layer import LastLayer, QueryKey

DIM, HEADS, CLASSES, SAMPLES = 24, 3, 3, 12
SIZES = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 40}


@dataclass
class Tiny:
    """query, key: the modules of the last layer; hidden: (N, T, d) below it; mask: (N, T) or None."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    query: nn.Linear
    key: nn.Linear
    last: LastLayer
    hidden: np.ndarray
    mask: np.ndarray | None

    def forward(self, **options):
        return self.model(**self.inputs, **options)

    def put(self, maps: QueryKey, which: int = 0) -> list[nn.Parameter]:
        """Set query and key, freeze all the rest; the parameters in the order of `QueryKey`."""
        self.model.requires_grad_(False)
        parameters = [self.query.weight, self.query.bias, self.key.weight, self.key.bias]
        with torch.no_grad():
            for parameter, value in zip(parameters, vars(maps).values(), strict=True):
                parameter.copy_(value[which])
        return [parameter.requires_grad_() for parameter in parameters]


def tiny(kind: str, dtype: torch.dtype = torch.float32) -> Tiny:
    """`bert` (post-norm, padded sentences) or `vit` (pre-norm), every bias and gain moved from its initial value.

    In float32 with eager attention, which can be asked for; in float64 with sdpa, as ViT's eager softmax is in float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return _tiny(kind, dtype)


def _tiny(kind: str, dtype: torch.dtype) -> Tiny:
    attention = {"attn_implementation": "eager" if dtype == torch.float32 else "sdpa"}
    if kind == "bert":
        config = BertConfig(vocab_size=50, max_position_embeddings=16, **attention, **SIZES)
        model = BertModel(config)
        mask = torch.arange(9) < torch.randint(2, 10, (SAMPLES, 1))
        words = torch.randint(1, 50, (SAMPLES, 9))
        inputs = {"input_ids": words, "attention_mask": mask.long()}
    else:
        config = ViTConfig(image_size=12, patch_size=4, num_channels=1, **attention, **SIZES)
        model, mask = ViTModel(config, add_pooling_layer=False), None
        inputs = {"pixel_values": torch.randn(SAMPLES, 1, 12, 12, dtype=dtype)}
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=dtype))
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-2].numpy()
    if kind == "bert":
        layer = model.encoder.layer[-1]
        last, query, key = last_layer.from_bert(layer), layer.attention.self.query, layer.attention.self.key
    else:
        layer = model.layers[-1]
        last = last_layer.from_vit(layer, model.layernorm)
        query, key = layer.attention.q_proj, layer.attention.k_proj
    return Tiny(model, inputs, query, key, last, hidden, None if mask is None else mask.numpy())


def some_maps(n_sets: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> QueryKey:
    """Sets of query and key drawn as for training, but larger, so that attention is far from uniform."""
    maps = last_layer.draw(DIM, [np.random.default_rng(seed) for seed in range(n_sets)])
    return maps.map(lambda part: (spread * part).to(dtype))
