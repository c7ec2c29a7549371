"""Gram matrices of Gaussian noise tokens, sampled without the tokens."""

from __future__ import annotations

import numpy as np


def noise_rows(n_rows: int, dof: int, rng: np.random.Generator) -> np.ndarray:
    """Rows with the same joint inner products as `n_rows` standard Gaussian vectors of dimension `dof`.

    Returns shape (n_rows, min(n_rows, dof)). For dof >= n_rows this is the lower-triangular Bartlett factor
    (Bartlett 1933; thm-bartlett): squared diagonal chi-squared with dof, dof - 1, ... degrees of freedom, standard
    normal below; the cost does not depend on `dof`. Otherwise the vectors themselves are drawn.
    """
    if dof < n_rows:
        return rng.standard_normal((n_rows, dof))
    rows = np.tril(rng.standard_normal((n_rows, n_rows)), -1)
    rows[np.diag_indices(n_rows)] = np.sqrt(rng.chisquare(dof - np.arange(n_rows)))
    return rows


def noise_gram(n_rows: int, dof: int, rng: np.random.Generator) -> np.ndarray:
    """Gram matrix of `n_rows` standard Gaussian vectors in `dof` dimensions: a Wishart draw, (n_rows, n_rows).

    Its law is that of drawn vectors (thm-bartlett), with the moments and the bound of thm-gram.
    """
    rows = noise_rows(n_rows, dof, rng)
    return rows @ rows.T
