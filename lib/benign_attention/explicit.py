"""The two models as they are written down: torch modules on d-dimensional tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class SingleHeadAttention(nn.Module):
    """f(X) = v^T X^T softmax(X p), with p and v trained from zero (eq-model; Magen et al. 2025, equation 3)."""

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


class TokenSelectionAttention(nn.Module):
    """f(X) = nu^T X^T softmax(X W p), W and p trained, nu fixed (eq-ts-model; Sakamoto and Sato 2025, Section 3).

    signals : (2, dim), mu_+ and mu_-; the head is nu = (mu_+ - mu_-) / |mu_+ - mu_-| / |mu_+|. initial_weights :
    (dim, dim), W_0, the transpose of the paper's; p starts at zero.
    """

    def __init__(self, signals: Tensor, initial_weights: Tensor):
        super().__init__()
        difference = signals[0] - signals[1]
        self.register_buffer("nu", difference / difference.norm() / signals[0].norm())
        self.W = nn.Parameter(initial_weights.clone())
        self.p = nn.Parameter(torch.zeros_like(self.nu))

    def attention(self, tokens: Tensor) -> Tensor:
        """Softmax over tokens, (n, n_tokens), of `tokens` (n, n_tokens, dim)."""
        return torch.softmax(tokens @ (self.W @ self.p), dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs (n,) of `tokens` (n, n_tokens, dim)."""
        return ((tokens @ self.nu) * self.attention(tokens)).sum(dim=1)


def logistic_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean of log(1 + exp(-y f)); unlike torch's softplus exact at every margin."""
    return -nn.functional.logsigmoid(labels * outputs).mean()


def gradient_descent(model: Model, tokens: Tensor, labels: Tensor, step_size: float, n_steps: int) -> Iterator[Model]:
    """Full-batch gradient descent by autograd; yields the model after each step (the same object)."""
    parameters = list(model.parameters())
    for _ in range(n_steps):
        gradients = torch.autograd.grad(logistic_loss(model(tokens), labels), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= step_size * gradient
        yield model
