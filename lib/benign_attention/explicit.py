"""The single-head model as it is written down: a torch module on d-dimensional tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class SingleHeadAttention(nn.Module):
    """f(X) = v^T X^T softmax(X p), with p and v trained from zero (Magen et al. 2025, eq. 3)."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(dim, dtype=dtype, device=device))
        self.v = nn.Parameter(torch.zeros(dim, dtype=dtype, device=device))

    def attention(self, tokens: Tensor) -> Tensor:
        """Softmax over tokens, (n, n_tokens), of `tokens` (n, n_tokens, dim)."""
        return torch.softmax(tokens @ self.p, dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs (n,) of `tokens` (n, n_tokens, dim)."""
        return ((tokens @ self.v) * self.attention(tokens)).sum(dim=1)


def logistic_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean of log(1 + exp(-y f)); unlike torch's softplus exact at every margin."""
    return -nn.functional.logsigmoid(labels * outputs).mean()


def gradient_descent(
    model: SingleHeadAttention, tokens: Tensor, labels: Tensor, step_size: float, n_steps: int
) -> Iterator[SingleHeadAttention]:
    """Full-batch gradient descent by autograd; yields the model after each step (the same object)."""
    for _ in range(n_steps):
        gradients = torch.autograd.grad(logistic_loss(model(tokens), labels), [model.p, model.v])
        with torch.no_grad():
            for parameter, gradient in zip([model.p, model.v], gradients, strict=True):
                parameter -= step_size * gradient
        yield model
