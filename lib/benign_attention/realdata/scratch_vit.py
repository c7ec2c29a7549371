"""A small vision transformer (ViT), trained here on clean images, where pretrained weights are not at hand.

Made of `transformers`' own ViT blocks, so that its last block is treated like that of any pretrained ViT. The class
token enters at the last block only: it then knows nothing of the image but what the last attention brings, and new
query and key weights there make a difference. A class token that passes through all blocks has read the image before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTLayer, ViTPatchEmbeddings

from benign_attention.devices import one_thread
from benign_attention.realdata import cache

WEIGHTS = "model.safetensors"
CODE = "1"


@dataclass(frozen=True)
class ScratchConfig:
    """Architecture and training; everything that decides what the weights are, besides the images and torch.

    patch_size : pixels; dim : d; class_token_block : number of the block at which the class token enters, from 0;
    shift : images are moved by up to so many pixels, anew each time; learning_rate : of AdamW, rising over the
    first tenth of the steps, then falling to 0 as a cosine.
    """

    patch_size: int = 4
    dim: int = 64
    n_blocks: int = 3
    n_heads: int = 4
    mlp_dim: int = 128
    class_token_block: int = 2
    n_steps: int = 1000
    batch_size: int = 50
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    shift: int = 2
    seed: int = 0


def quick(side: int) -> ScratchConfig:
    """One that is trained in a second or two, to try things out: 16 patches and half of all else."""
    return ScratchConfig(
        patch_size=side // 4, dim=32, n_blocks=2, n_heads=2, mlp_dim=64, class_token_block=1, n_steps=100, shift=1
    )


class ScratchViT(nn.Module):
    """Pixels (m, channels, side, side), as `prepared`, to class scores (m, n_classes)."""

    def __init__(self, config: ScratchConfig, side: int, n_channels: int, n_classes: int):
        super().__init__()
        vit = ViTConfig(
            hidden_size=config.dim,
            num_hidden_layers=config.n_blocks,
            num_attention_heads=config.n_heads,
            intermediate_size=config.mlp_dim,
            image_size=side,
            patch_size=config.patch_size,
            num_channels=n_channels,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        self.class_token_block = config.class_token_block
        self.register_buffer("brightest", torch.tensor(255.0))
        self.patches = ViTPatchEmbeddings(vit)
        self.positions = nn.Parameter(0.02 * torch.randn(1, self.patches.num_patches, config.dim))
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, config.dim))
        self.blocks = nn.ModuleList([ViTLayer(vit) for _ in range(config.n_blocks)])
        self.norm = nn.LayerNorm(config.dim, eps=vit.layer_norm_eps)
        self.classifier = nn.Linear(config.dim, n_classes)

    def prepared(self, images: np.ndarray) -> torch.Tensor:
        """Images (m, H, W, C) uint8 to (m, C, H, W) float32, from -1 to 1 at the brightest of the training images."""
        pixels = torch.from_numpy(np.array(images, np.float32)).permute(0, 3, 1, 2)
        return 2 * pixels.to(self.brightest.device) / self.brightest - 1

    def below(self, pixels: torch.Tensor) -> torch.Tensor:
        """What enters the last block: (m, 1 + patches, d), the class token first."""
        states = self.patches(pixels) + self.positions
        for number, block in enumerate(self.blocks):
            if number == self.class_token_block:
                states = torch.cat([self.class_token.expand(len(states), 1, -1), states], dim=1)
            if number < len(self.blocks) - 1:
                states = block(states)
        return states

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.norm(self.blocks[-1](self.below(pixels))[:, 0]))


def train(model: ScratchViT, images: np.ndarray, labels: np.ndarray, config: ScratchConfig) -> None:
    """Cross-entropy on the images (N, H, W, C) uint8 with labels (N,), in place.

    On one thread, so that the weights do not depend on how many cores there are.
    """
    with one_thread():
        _train(model, images, labels, config)


def _train(model: ScratchViT, images: np.ndarray, labels: np.ndarray, config: ScratchConfig) -> None:
    shuffled = torch.Generator().manual_seed(config.seed)
    pad, (n, height, width) = config.shift, images.shape[:3]
    model.brightest.fill_(int(images.max()))
    padded = model.prepared(np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0))))
    labels = torch.from_numpy(np.asarray(labels, np.int64))
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, weight_decay=config.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.n_steps + 1, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    coming = torch.empty(0, dtype=torch.int64)
    for _ in tqdm(range(config.n_steps), desc="training a small ViT", leave=False, delay=1, mininterval=1.0):
        if not len(coming):
            coming = torch.randperm(n, generator=shuffled)
        batch, coming = coming[: config.batch_size], coming[config.batch_size :]
        down, right = torch.randint(2 * pad + 1, (2, len(batch)), generator=shuffled).tolist()
        moved = [padded[i, :, y : y + height, x : x + width] for i, y, x in zip(batch, down, right, strict=True)]
        loss = cross_entropy(model(torch.stack(moved)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def trained(
    images: np.ndarray, labels: np.ndarray, n_classes: int, config: ScratchConfig | None = None
) -> tuple[ScratchViT, str]:
    """The network trained on these images, kept in the cache; and the SHA-256 of its weights' file.

    Its class token enters the last block as the same vector for every image: one query for all (prop-one-query).

    images : (N, side, side, channels) uint8; labels : (N,) in 0..n_classes-1. Images of less than 16 pixels a side are
    cut into patches of 2 x 2 and moved by a pixel at most, unless `config` says otherwise.
    """
    config = config or (ScratchConfig(patch_size=2, shift=1) if images.shape[1] < 16 else ScratchConfig())
    content = hashlib.sha256(json.dumps([CODE, asdict(config), images.shape, n_classes]).encode())
    content.update(np.ascontiguousarray(images).tobytes())
    content.update(np.asarray(labels, np.int64).tobytes())

    def fresh() -> ScratchViT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return ScratchViT(config, images.shape[1], images.shape[3], n_classes)

    def make(folder: Path) -> None:
        model = fresh()
        train(model, images, labels, config)
        save_file(model.state_dict(), folder / WEIGHTS)

    file = cache.kept(f"vit-small-scratch/{content.hexdigest()[:16]}", make) / WEIGHTS
    model = fresh()
    model.load_state_dict(load_file(file))
    return model.eval().requires_grad_(False), hashlib.sha256(file.read_bytes()).hexdigest()
