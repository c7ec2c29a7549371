r"""A one-layer transformer encoder that is read at its class token, trained by full-batch descent.

The network is a linear patch embedding, a class token, learned positions, one encoder block (post-norm, ReLU, no
dropout: the defaults of `torch.nn.TransformerEncoderLayer`) and a linear read-out of the class token:

    x_0 = c,  x_j = E patch_j + pos_j                                   tokens, j = 1..T, in R^d
    a   = W_O [head_1, ..., head_H] + b_O,   head_h = sum_j s_hj (W_V,h x_j + b_V,h)
    s_h = softmax_j( (W_Q,h c + b_Q,h) . W_K,h x_j / sqrt(d/H) )
    r   = LN(c + a),   r = LN(r + M_2 relu(M_1 r + m_1) + m_2),   f = w.r + b

**Folding.** One query is needed, the class token's, and it is the same for every image. So a token enters its
logit only through `x_j . p_h` with `p_h = W_K,h^T q_h / sqrt(d/H)`, and values, being linear, may be averaged
before they are mapped. With `x_j = E patch_j + pos_j` both act on pixels:

    logit_hj = patch_j . (E^T p_h) + pos_j . p_h
    a        = sum_h W_O,h W_V,h (E sum_j s_hj patch_j + sum_j s_hj pos_j) + W_O b_V + b_O

The products of weights on the right are formed once a step; after them a token costs O(H pixels) instead of O(d^2),
and an image O(d H (pixels + T)) before the MLP. A key bias shifts all logits alike and is left out. Nothing is
approximated: outputs and gradients equal those of `torch.nn.TransformerEncoderLayer`.

Without block norms, MLP and residual, `f = sum_h v_h^T X^T softmax(X p_h)` with `v_h = W_V,h^T W_O,h^T w`: a sum of H
single-head models (Magen et al. 2025, equation 3) whose vectors are products of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import layer_norm, softplus

from benign_attention.parameters import ParameterError

Weights = dict[str, torch.Tensor]
POSITION_SPREAD = 0.02
BIASES = ("query_bias", "value_bias", "output_bias", "norm1_bias")


@dataclass(frozen=True)
class Architecture:
    """dim: d; n_heads: H; mlp_width: hidden units, 0 for a block without MLP; n_patches: T; n_pixels: per patch."""

    dim: int
    n_heads: int
    mlp_width: int
    n_patches: int
    n_pixels: int

    def __post_init__(self):
        if self.dim % self.n_heads:
            raise ParameterError(f"n_heads must divide dim, got n_heads {self.n_heads} and dim {self.dim}")


def initial_weights(architecture: Architecture, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Gaussian matrices of variance 1/(inputs), token and positions of standard deviation 0.02, biases 0, gains 1.

    Drawn by NumPy, so that every device starts from the same numbers. Float32.
    """
    d, m = architecture.dim, architecture.mlp_width

    def normal(*shape: int, spread: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)

    def fill(value: float, *shape: int) -> np.ndarray:
        return np.full(shape, value, np.float32)

    weights = {
        "embedding": normal(d, architecture.n_pixels, spread=architecture.n_pixels**-0.5),
        "positions": normal(architecture.n_patches + 1, d, spread=POSITION_SPREAD),
        **{name: normal(d, d, spread=d**-0.5) for name in ("query", "key", "value", "output")},
        "readout": normal(d, spread=d**-0.5),
        "readout_bias": fill(0),
        "norm1_gain": fill(1, d),
        **{name: fill(0, d) for name in BIASES},
    }
    if m:
        weights |= {
            "mlp_in": normal(m, d, spread=d**-0.5),
            "mlp_in_bias": fill(0, m),
            "mlp_out": normal(d, m, spread=m**-0.5),
            "mlp_out_bias": fill(0, d),
            "norm2_gain": fill(1, d),
            "norm2_bias": fill(0, d),
        }
    return weights


def class_attention(weights: Weights, patches: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Attention of the class token: patches (n, T, pixels) to (n, H, T + 1); place 0 is the class token itself."""
    n, n_patches, n_pixels = patches.shape
    d = weights["query"].shape[0]
    head = d // n_heads
    query = (weights["query"] @ weights["positions"][0] + weights["query_bias"]).view(n_heads, 1, head)
    p = (query @ weights["key"].view(n_heads, head, d)).squeeze(1) / head**0.5
    from_pixels = (patches.reshape(n * n_patches, n_pixels) @ (p @ weights["embedding"]).T).view(n, n_patches, n_heads)
    from_pixels = torch.nn.functional.pad(from_pixels.transpose(1, 2), (1, 0))
    return torch.softmax(from_pixels + p @ weights["positions"].T, dim=-1)


def class_logits(weights: Weights, patches: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The network's output: patches (n, T, pixels) to (n,); its sign is the predicted label."""
    d = weights["query"].shape[0]
    attention = class_attention(weights, patches, n_heads)
    averages = torch.cat([torch.bmm(attention[:, :, 1:], patches), attention], dim=2).flatten(1)
    to_heads = torch.cat([weights["embedding"], weights["positions"].T], dim=1)
    values = weights["value"].view(n_heads, -1, d) @ to_heads
    folded = weights["output"].view(d, n_heads, -1).transpose(0, 1) @ values
    attended = averages @ folded.transpose(1, 2).reshape(-1, d) + weights["output"] @ weights["value_bias"]
    residual = weights["positions"][0] + attended + weights["output_bias"]
    state = layer_norm(residual, (d,), weights["norm1_gain"], weights["norm1_bias"])
    if "mlp_in" in weights:
        hidden = torch.relu(torch.addmm(weights["mlp_in_bias"], state, weights["mlp_in"].T))
        state = state + torch.addmm(weights["mlp_out_bias"], hidden, weights["mlp_out"].T)
        state = layer_norm(state, (d,), weights["norm2_gain"], weights["norm2_bias"])
    return state @ weights["readout"] + weights["readout_bias"]


def descend(
    weights: Weights,
    patches: torch.Tensor,
    labels: torch.Tensor,
    n_heads: int,
    n_steps: int,
    step_size: float,
    optimizer: str,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Full-batch descent on the mean logistic loss `log(1 + exp(-y f))`; every weight is trained, in place.

    Yields `(step, outputs)`: the outputs (n,) on the training images after `step` updates, for step = 0..n_steps;
    `weights` are those of that step until the iteration goes on. labels: (n,), each -1 or +1. `optimizer`: `adam`
    (PyTorch's defaults for everything but the step size) or `gd`.
    """
    leaves = [weight.requires_grad_() for weight in weights.values()]
    method = {"adam": torch.optim.Adam, "gd": torch.optim.SGD}[optimizer]
    fused = patches.device.type in ("cpu", "cuda")
    descent = method(leaves, lr=step_size, fused=fused)
    for step in range(n_steps):
        outputs = class_logits(weights, patches, n_heads)
        yield step, outputs.detach()
        descent.zero_grad()
        softplus(-labels * outputs).mean().backward()
        descent.step()
    with torch.no_grad():
        yield n_steps, class_logits(weights, patches, n_heads)
