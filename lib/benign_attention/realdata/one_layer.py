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

Several networks are trained side by side on the same images, so that every pass over the pixels serves all of them.

Without block norms, MLP and residual, `f = sum_h v_h^T X^T softmax(X p_h)` with `v_h = W_V,h^T W_O,h^T w`: a sum of H
single-head models (Magen et al. 2025, equation 3) whose vectors are products of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benign_attention.parameters import ParameterError

Weights = dict[str, torch.Tensor]
POSITION_SPREAD = 0.02
LAYER_NORM_EPS = 1e-5
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


@dataclass(frozen=True)
class _Fold:
    """The weights of one network, multiplied together as far as no image is involved.

    tokens: (d, P) embedding and transposed positions side by side, P = pixels + T + 1; query: (H, d/H); p: (H, d);
    probes: (H, P), p_h in pixels and places; values: (H, d/H, P); maps: (H P, d), from the averages of a head's
    pixels and its attention to the residual stream; constant: (d,), what every image adds to it.
    """

    tokens: torch.Tensor
    query: torch.Tensor
    p: torch.Tensor
    probes: torch.Tensor
    values: torch.Tensor
    maps: torch.Tensor
    constant: torch.Tensor


def _fold(w: Weights, n_heads: int) -> _Fold:
    d = len(w["query"])
    tokens = torch.cat([w["embedding"], w["positions"].T], dim=1)
    query = torch.addmv(w["query_bias"], w["query"], w["positions"][0]).view(n_heads, -1)
    keys = w["key"].view(n_heads, -1, d)
    p = torch.bmm(query[:, None], keys).squeeze(1) / query.shape[1] ** 0.5
    values = (w["value"] @ tokens).view(n_heads, -1, tokens.shape[1])
    maps = torch.bmm(values.transpose(1, 2), _by_head(w["output"], n_heads)).view(-1, d)
    constant = torch.addmv(w["positions"][0] + w["output_bias"], w["output"], w["value_bias"])
    return _Fold(tokens, query, p, p @ tokens, values, maps, constant)


def _by_head(output: torch.Tensor, n_heads: int) -> torch.Tensor:
    """(d, d) to (H, d/H, d): W_O,h transposed."""
    return output.view(len(output), n_heads, -1).permute(1, 2, 0)


def _attend(folds: list[_Fold], patches: torch.Tensor) -> torch.Tensor:
    """Attention (n, K H, T + 1) of all heads of K networks, which read every image together."""
    n, n_patches, n_pixels = patches.shape
    probes = torch.cat([fold.probes for fold in folds])
    logits = probes[:, n_pixels:].expand(n, -1, -1).clone()
    by_pixels = probes[:, :n_pixels] @ patches.view(n * n_patches, n_pixels).T
    logits[:, :, 1:] += by_pixels.view(-1, n, n_patches).transpose(0, 1)
    return torch.softmax(logits, dim=-1)


def class_attention(networks: list[Weights], patches: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Attention of the class token: patches (n, T, pixels) to (K, n, H, T + 1); place 0 is the class token itself."""
    attention = _attend([_fold(w, n_heads) for w in networks], patches)
    return attention.view(len(patches), len(networks), n_heads, -1).transpose(0, 1)


def class_logits(networks: list[Weights], patches: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The networks' outputs: patches (n, T, pixels) to (K, n); their signs are the predicted labels."""
    return _Pass(networks, patches, n_heads).outputs


class _Pass:
    """One forward pass of K networks over the same images, and the backward pass that belongs to it."""

    def __init__(self, networks: list[Weights], patches: torch.Tensor, n_heads: int):
        self.networks, self.patches, self.n_heads = networks, patches, n_heads
        self.folds = [_fold(w, n_heads) for w in networks]
        self.attention = _attend(self.folds, patches)
        averages = torch.cat([torch.bmm(self.attention[:, :, 1:], patches), self.attention], dim=2)
        self.averages = averages.view(len(patches), len(networks), -1).unbind(1)
        self.states = [self._read(*each) for each in zip(networks, self.folds, self.averages, strict=True)]
        self.outputs = torch.stack([state["outputs"] for state in self.states])

    def _read(self, w: Weights, fold: _Fold, averages: torch.Tensor) -> dict[str, torch.Tensor]:
        """From the averages (n, H P) to the outputs (n,), with what the backward pass needs."""
        state = {"residual1": torch.addmm(fold.constant, averages, fold.maps)}
        normed = state["normed1"] = _normalise(state, w, 1)
        if "mlp_in" in w:
            state["hidden"] = torch.addmm(w["mlp_in_bias"], normed, w["mlp_in"].T).relu_()
            state["residual2"] = torch.addmm(w["mlp_out_bias"], state["hidden"], w["mlp_out"].T).add_(normed)
            normed = state["normed2"] = _normalise(state, w, 2)
        state["outputs"] = torch.addmv(w["readout_bias"], normed, w["readout"])
        return state

    def gradients(self, by_outputs: torch.Tensor) -> list[Weights]:
        """Gradients of all weights, given those of the outputs (K, n)."""
        n, n_patches, n_pixels = self.patches.shape
        found, by_attention = [], torch.empty_like(self.attention)
        for k, (w, state) in enumerate(zip(self.networks, self.states, strict=True)):
            gradients, by_residual = _backward_read(w, state, by_outputs[k])
            by_averages = (by_residual @ self.folds[k].maps.T).view(n, self.n_heads, -1)
            heads = slice(k * self.n_heads, (k + 1) * self.n_heads)
            by_attention[:, heads] = by_averages[:, :, n_pixels:]
            by_attention[:, heads, 1:] += torch.bmm(by_averages[:, :, :n_pixels], self.patches.transpose(1, 2))
            gradients["maps"] = self.averages[k].T @ by_residual
            gradients["constant"] = by_residual.sum(0)
            found.append(gradients)
        by_logits = torch._softmax_backward_data(by_attention, self.attention, -1, self.attention.dtype)
        by_pixels = by_logits[:, :, 1:].transpose(0, 1).reshape(-1, n * n_patches)
        by_probes = torch.cat([by_pixels @ self.patches.view(n * n_patches, n_pixels), by_logits.sum(0)], dim=1)
        for w, fold, gradients, by_probe in zip(
            self.networks, self.folds, found, by_probes.split(self.n_heads), strict=True
        ):
            gradients |= _backward_fold(w, fold, by_probe, gradients.pop("maps"), gradients.pop("constant"))
        return found


def _normalise(state: dict[str, torch.Tensor], w: Weights, place: int) -> torch.Tensor:
    x = state[f"residual{place}"]
    normed, *state[f"moments{place}"] = torch.native_layer_norm(
        x, x.shape[1:], w[f"norm{place}_gain"], w[f"norm{place}_bias"], LAYER_NORM_EPS
    )
    return normed


def _backward_normalise(
    w: Weights, state: dict[str, torch.Tensor], place: int, by_normed: torch.Tensor
) -> tuple[Weights, torch.Tensor]:
    x, gain, bias = state[f"residual{place}"], w[f"norm{place}_gain"], w[f"norm{place}_bias"]
    by_x, by_gain, by_bias = torch.ops.aten.native_layer_norm_backward(
        by_normed, x, x.shape[1:], *state[f"moments{place}"], gain, bias, [True] * 3
    )
    return {f"norm{place}_gain": by_gain, f"norm{place}_bias": by_bias}, by_x


def _backward_read(
    w: Weights, state: dict[str, torch.Tensor], by_outputs: torch.Tensor
) -> tuple[Weights, torch.Tensor]:
    """Gradients from the read-out down to the first residual, and with respect to it (n, d)."""
    has_mlp = "mlp_in" in w
    last = state["normed2" if has_mlp else "normed1"]
    gradients = {"readout": last.T @ by_outputs, "readout_bias": by_outputs.sum()}
    by_normed = torch.outer(by_outputs, w["readout"])
    if has_mlp:
        of_norm, by_residual = _backward_normalise(w, state, 2, by_normed)
        by_hidden = torch.ops.aten.threshold_backward(by_residual @ w["mlp_out"], state["hidden"], 0)
        gradients |= of_norm | {
            "mlp_out": by_residual.T @ state["hidden"],
            "mlp_out_bias": by_residual.sum(0),
            "mlp_in": by_hidden.T @ state["normed1"],
            "mlp_in_bias": by_hidden.sum(0),
        }
        by_normed = torch.addmm(by_residual, by_hidden, w["mlp_in"])
    of_norm, by_residual = _backward_normalise(w, state, 1, by_normed)
    return gradients | of_norm, by_residual


def _backward_fold(
    w: Weights, fold: _Fold, by_probes: torch.Tensor, by_maps: torch.Tensor, by_constant: torch.Tensor
) -> Weights:
    """Gradients of the weights that `_fold` multiplies. by_probes: (H, P); by_maps: (H P, d); by_constant: (d,)."""
    d, n_heads = len(w["query"]), len(fold.p)
    n_pixels = w["embedding"].shape[1]
    by_maps = by_maps.view(n_heads, -1, d).transpose(1, 2)
    by_values = torch.bmm(_by_head(w["output"], n_heads), by_maps).view(d, -1)
    by_output = torch.bmm(by_maps, fold.values.transpose(1, 2)).transpose(0, 1).reshape(d, d)
    by_p = by_probes @ fold.tokens.T / fold.query.shape[1] ** 0.5
    by_query = torch.bmm(w["key"].view(n_heads, -1, d), by_p[:, :, None]).view(d)
    by_tokens = torch.addmm(w["value"].T @ by_values, fold.p.T, by_probes)
    by_positions = by_tokens[:, n_pixels:].T.contiguous()
    by_positions[0] += by_constant + w["query"].T @ by_query
    return {
        "embedding": by_tokens[:, :n_pixels],
        "positions": by_positions,
        "query": torch.outer(by_query, w["positions"][0]),
        "query_bias": by_query,
        "key": (fold.query[:, :, None] * by_p[:, None]).view(d, d),
        "value": by_values @ fold.tokens.T,
        "value_bias": w["output"].T @ by_constant,
        "output": torch.addr(by_output, by_constant, w["value_bias"]),
        "output_bias": by_constant,
    }


def loss_gradients(
    networks: list[Weights], patches: torch.Tensor, labels: torch.Tensor, n_heads: int
) -> tuple[torch.Tensor, list[Weights]]:
    """Outputs (K, n), and every network's gradient of its mean logistic loss `log(1 + exp(-y f))`.

    labels: (K, n), each -1 or +1. Written out by hand, since most of the time goes into products of matrices that
    automatic differentiation cannot share between networks.
    """
    with torch.no_grad():
        forward = _Pass(networks, patches, n_heads)
        return forward.outputs, forward.gradients(-labels * torch.sigmoid(-labels * forward.outputs) / len(patches))


def descend(
    networks: list[Weights],
    patches: torch.Tensor,
    labels: torch.Tensor,
    n_heads: int,
    n_steps: int,
    step_size: float,
    optimizer: str,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Full-batch descent of K networks on the same images, each on its own labels; every weight is trained, in place.

    Yields `(step, outputs)`: the outputs (K, n) on the training images after `step` updates, for step = 0..n_steps;
    `networks` hold the weights of that step until the iteration goes on. Networks do not influence each other.
    labels: (K, n), each -1 or +1. `optimizer`: `adam` (PyTorch's defaults for everything but the step size) or `gd`.
    """
    flat = torch.cat([weight.reshape(-1) for w in networks for weight in w.values()]).requires_grad_()
    flat.grad = torch.empty_like(flat)
    sizes = [weight.numel() for w in networks for weight in w.values()]
    values, slots = (iter(vector.split(sizes)) for vector in (flat.detach(), flat.grad))
    for w in networks:
        w.update({name: next(values).view(weight.shape) for name, weight in w.items()})
    of_gradients = [{name: next(slots).view(weight.shape) for name, weight in w.items()} for w in networks]
    method = {"adam": torch.optim.Adam, "gd": torch.optim.SGD}[optimizer]
    descent = method([flat], lr=step_size, fused=patches.device.type in ("cpu", "cuda"))
    for step in range(n_steps):
        outputs, gradients = loss_gradients(networks, patches, labels, n_heads)
        yield step, outputs
        for places, gradient in zip(of_gradients, gradients, strict=True):
            for name, place in places.items():
                place.copy_(gradient[name])
        descent.step()
    yield n_steps, class_logits(networks, patches, n_heads)
