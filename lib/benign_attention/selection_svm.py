"""Which direction of p selects given tokens: the token-selection SVM of Tarzanagh et al. 2023."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benign_attention.hard_margin import hard_margin
from benign_attention.parameters import ParameterError


@dataclass(frozen=True)
class TokenSelection:
    """Solution of a token-selection SVM; numbers are nan unless `status` is "optimal".

    direction : (r,), p; margin : 1 / |p|, the smallest lead in logits of the selected tokens under p / |p|;
    kkt_residual, duality_gap, status : as in `hard_margin.HardMargin`.
    """

    direction: np.ndarray
    margin: float
    kkt_residual: float
    duality_gap: float
    status: str


def token_selection_svm(tokens: np.ndarray, selected: np.ndarray) -> TokenSelection:
    """The shortest p whose logits put the selected token of every sample ahead by one (eq-token-svm).

    min |p|^2 subject to (x_{i, selected_i} - x_{i, t}).p >= 1 for every sample i and token t other than selected_i
    (Tarzanagh et al. 2023, *Max-margin token selection in attention mechanism*). tokens : (n, T, r), T >= 2;
    selected : (n,) indices in [0, T).

    Raises
    ------
    ParameterError
        One of the two has a wrong shape or values.
    """
    tokens, selected = np.asarray(tokens, float), np.asarray(selected)
    if tokens.ndim != 3 or tokens.shape[1] < 2:
        raise ParameterError(f"tokens must have shape (n, T, r) with T >= 2, got {tokens.shape}")
    n, n_tokens, r = tokens.shape
    whole = np.issubdtype(selected.dtype, np.integer)
    if selected.shape != (n,) or not whole or not ((selected >= 0) & (selected < n_tokens)).all():
        raise ParameterError(f"selected must hold one whole number in [0, {n_tokens}) for each of the {n} samples")
    differences = tokens[np.arange(n), selected][:, None] - tokens
    others = np.arange(n_tokens) != selected[:, None]
    found = hard_margin(differences[others].reshape(-1, r))
    return TokenSelection(found.direction, found.margin, found.kkt_residual, found.duality_gap, found.status)
