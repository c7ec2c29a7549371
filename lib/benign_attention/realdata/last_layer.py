r"""The last encoder layer of a pretrained transformer, read at position 0, for many sets of query and key at once.

Only the query and key maps of this layer are trained; everything else, and every layer below, is frozen. So the
hidden states that enter it, `h_j` at the positions j = 0..T-1, are constants, and its output is needed at one of them:

    x_j = h_j (post-norm, BERT)  or  LN(h_j) (pre-norm, ViT)
    s_h = softmax_j( (W_Q,h x_0 + b_Q,h) . (W_K,h x_j + b_K,h) / sqrt(d/H) )       over the positions without padding
    a   = h_0 + W_O [head_1, ..., head_H] + b_O,   head_h = sum_j s_hj (W_V,h x_j + b_V,h)
    post-norm:  r = LN(a),  class vector LN(r + MLP(r));     pre-norm:  class vector LN(a + MLP(LN(a)))

**Folding.** Keys are never formed: a token enters its logit only through `x_j . p_h`, `p_h = W_K,h^T q_h / sqrt(d/H)`.
The key bias shifts all logits of a head alike and cancels; its gradient is zero, and so it is never moved. Values are
frozen, so they are computed once (`LastLayer.tokens`). A step then costs O(H d) a token instead of O(d^2), and no layer
below is run. Nothing is approximated: outputs and gradients equal those of the unmodified layer.

L sets of query and key on the same samples share every product with a frozen matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear

from benign_attention.parameters import ParameterError

if TYPE_CHECKING:
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.vit.modeling_vit import ViTLayer

AT_ONCE = 64


@dataclass(frozen=True)
class QueryKey:
    """L sets of query and key maps. query, key: (L, d, d), a row for each output; their biases: (L, d)."""

    query: torch.Tensor
    query_bias: torch.Tensor
    key: torch.Tensor
    key_bias: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QueryKey:
        return QueryKey(**{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def trained(self) -> list[torch.Tensor]:
        """What a gradient moves: everything but the key bias, which cancels in the softmax."""
        return [self.query, self.query_bias, self.key]


def draw(dim: int, generators: Sequence[np.random.Generator]) -> QueryKey:
    """One set for each generator, as `torch.nn.Linear` initialises itself: uniform on +-1/sqrt(dim). Float32.

    Drawn by NumPy, so that every device starts from the same numbers.
    """
    bound = dim**-0.5
    sets = [
        [torch.tensor(rng.uniform(-bound, bound, shape), dtype=torch.float32) for shape in [(dim, dim), (dim,)] * 2]
        for rng in generators
    ]
    return QueryKey(*(torch.stack(tensors) for tensors in zip(*sets, strict=True)))


@dataclass(frozen=True)
class Tokens:
    """What the layer needs of m samples. inputs: x (m, T, d); values: (m, H, T, d/H); residual: h_0 (m, d).

    mask: (m, T), False at padding; None if there is none.
    """

    inputs: torch.Tensor
    values: torch.Tensor
    residual: torch.Tensor
    mask: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | torch.Tensor) -> Tokens:
        """The samples `rows`; a slice copies nothing."""
        mask = None if self.mask is None else self.mask[rows]
        return Tokens(self.inputs[rows], self.values[rows], self.residual[rows], mask)


@dataclass(frozen=True)
class LastLayer:
    """The frozen weights of one encoder layer, and the query and key that it was pretrained with (one set).

    weights: value, output, mlp_in, mlp_out as (matrix, bias); norm1, norm2, and final_norm of a pre-norm model as
    (gain, bias, epsilon). Made by `from_bert` or `from_vit`.
    """

    n_heads: int
    pre_norm: bool
    activation: Callable[[torch.Tensor], torch.Tensor]
    weights: dict[str, tuple]
    pretrained: QueryKey

    @property
    def dim(self) -> int:
        return self.pretrained.query.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.pretrained.query.device

    def to(self, device: torch.device) -> LastLayer:
        def moved(part):
            return part.to(device) if isinstance(part, torch.Tensor) else part

        weights = {name: tuple(moved(part) for part in parts) for name, parts in self.weights.items()}
        return replace(self, weights=weights, pretrained=self.pretrained.map(moved))

    @torch.no_grad()
    def tokens(self, hidden: np.ndarray, mask: np.ndarray | None, samples: np.ndarray) -> Tokens:
        """Inputs and values of `samples` (m,), rows of the hidden states (N, T, d) below the layer and of mask (N, T).

        On the layer's device, with twice the memory of these hidden states; `hidden` may be memory-mapped. Position 0
        must not be padding.
        """
        if hidden.ndim != 3 or hidden.shape[2] != self.dim:
            raise ParameterError(f"hidden must be (samples, tokens, {self.dim}) for this layer, got {hidden.shape}")
        m, (n, n_tokens, dim) = len(samples), hidden.shape
        if m and not 0 <= np.min(samples) <= np.max(samples) < n:
            raise ParameterError(f"samples must be rows in 0..{n - 1}")
        if mask is not None:
            if np.shape(mask) != (n, n_tokens):
                raise ParameterError(f"mask must be {(n, n_tokens)}, got {np.shape(mask)}")
            mask = torch.tensor(np.asarray(mask)[samples], dtype=torch.bool, device=self.device)
            if not mask[:, 0].all():
                raise ParameterError("mask must be True at position 0, where the layer is read")
        like = self.pretrained.query
        inputs = like.new_empty(m, n_tokens, dim)
        values = like.new_empty(m, self.n_heads, n_tokens, dim // self.n_heads)
        residual = like.new_empty(m, dim)
        for start in range(0, m, AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            states = torch.from_numpy(hidden[np.asarray(samples[rows])]).to(self.device, like.dtype)
            residual[rows] = states[:, 0]
            inputs[rows] = _norm(states, self.weights["norm1"]) if self.pre_norm else states
            mapped = linear(inputs[rows], *self.weights["value"])
            values[rows] = mapped.view(-1, n_tokens, self.n_heads, dim // self.n_heads).transpose(1, 2)
        return Tokens(inputs, values, residual, mask)

    def attention(self, maps: QueryKey, tokens: Tokens) -> torch.Tensor:
        """Attention of position 0 under each of the L sets: (L, m, H, T); exactly 0 at padding."""
        return self._attention(maps, tokens).transpose(0, 1)

    def class_vectors(self, maps: QueryKey, tokens: Tokens) -> torch.Tensor:
        """Output of the layer at position 0 (after the final norm of a pre-norm model): (L, m, d)."""
        return self.outputs(maps, tokens)[0]

    def outputs(self, maps: QueryKey, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Class vectors (L, m, d) and the attention (L, m, H, T) behind them."""
        attention = self._attention(maps, tokens)
        m, n_sets, n_heads, n_tokens = attention.shape
        by_head = attention.transpose(1, 2).reshape(m * n_heads, n_sets, n_tokens)
        heads = torch.bmm(by_head, tokens.values.reshape(m * n_heads, n_tokens, -1))
        heads = heads.view(m, n_heads, n_sets, -1).transpose(1, 2).reshape(m * n_sets, self.dim)
        attended = linear(heads, *self.weights["output"])
        state = (attended.view(m, n_sets, -1) + tokens.residual[:, None]).view(m * n_sets, -1)
        state = self._mlp_and_norms(state)
        return state.view(m, n_sets, -1).transpose(0, 1), attention.transpose(0, 1)

    def _attention(self, maps: QueryKey, tokens: Tokens) -> torch.Tensor:
        m, n_tokens, dim = tokens.inputs.shape
        n_sets, n_heads, size = len(maps.query), self.n_heads, dim // self.n_heads
        query = linear(tokens.inputs[:, 0], maps.query.reshape(-1, dim), maps.query_bias.reshape(-1)) / size**0.5
        query = query.view(m, n_sets * n_heads, size).transpose(0, 1)
        p = torch.bmm(query, maps.key.reshape(n_sets * n_heads, size, dim))
        logits = torch.bmm(p.transpose(0, 1), tokens.inputs.transpose(1, 2))
        if tokens.mask is not None:
            logits = logits.masked_fill(~tokens.mask[:, None], -torch.inf)
        return torch.softmax(logits, dim=-1).view(m, n_sets, n_heads, n_tokens)

    def _mlp_and_norms(self, state: torch.Tensor) -> torch.Tensor:
        if self.pre_norm:
            state = state + self._mlp(_norm(state, self.weights["norm2"]))
            return _norm(state, self.weights["final_norm"])
        state = _norm(state, self.weights["norm1"])
        return _norm(state + self._mlp(state), self.weights["norm2"])

    def _mlp(self, state: torch.Tensor) -> torch.Tensor:
        return linear(self.activation(linear(state, *self.weights["mlp_in"])), *self.weights["mlp_out"])


def from_bert(layer: BertLayer) -> LastLayer:
    """From an encoder layer of `transformers.BertModel`, whose weights are copied; its dropout is left out."""
    attention = layer.attention.self
    return LastLayer(
        n_heads=attention.num_attention_heads,
        pre_norm=False,
        activation=layer.intermediate.intermediate_act_fn,
        weights={
            "value": _copied(attention.value),
            "output": _copied(layer.attention.output.dense),
            "norm1": _copied(layer.attention.output.LayerNorm),
            "mlp_in": _copied(layer.intermediate.dense),
            "mlp_out": _copied(layer.output.dense),
            "norm2": _copied(layer.output.LayerNorm),
        },
        pretrained=_query_key(attention.query, attention.key),
    )


def from_vit(layer: ViTLayer, final_norm: torch.nn.LayerNorm) -> LastLayer:
    """From an encoder layer of `transformers.ViTModel` (with `qkv_bias`) and the norm that follows the last one."""
    attention = layer.attention
    return LastLayer(
        n_heads=attention.num_attention_heads,
        pre_norm=True,
        activation=layer.mlp.activation_fn,
        weights={
            "value": _copied(attention.v_proj),
            "output": _copied(attention.o_proj),
            "norm1": _copied(layer.layernorm_before),
            "mlp_in": _copied(layer.mlp.fc1),
            "mlp_out": _copied(layer.mlp.fc2),
            "norm2": _copied(layer.layernorm_after),
            "final_norm": _copied(final_norm),
        },
        pretrained=_query_key(attention.q_proj, attention.k_proj),
    )


def _copied(module: torch.nn.Linear | torch.nn.LayerNorm) -> tuple:
    copies = (module.weight.detach().clone(), module.bias.detach().clone())
    return (*copies, module.eps) if isinstance(module, torch.nn.LayerNorm) else copies


def _query_key(query: torch.nn.Linear, key: torch.nn.Linear) -> QueryKey:
    return QueryKey(*(part[None] for part in (*_copied(query), *_copied(key))))


def _norm(states: torch.Tensor, parts: tuple) -> torch.Tensor:
    gain, bias, epsilon = parts
    return layer_norm(states, gain.shape, gain, bias, epsilon)
