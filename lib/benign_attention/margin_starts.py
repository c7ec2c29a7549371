"""Where searches for a max-margin solution start: directions of p that select tokens, and random ones."""

from __future__ import annotations

import numpy as np

from benign_attention.margin import LEAD
from benign_attention.margin_problem import MarginProblem, selecting

NAMED = ("signal", "noise", "class +1", "class -1", "uniform")


def named_selection(name: str, clean_labels: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Selected tokens (n,), 0 the signal and 1 a noise token.

    Noisy samples never see the signal; of the clean ones all do ("signal"), none does ("noise"), or those of one class
    do ("class +1", "class -1").
    """
    sees = {"signal": True, "noise": False, "class +1": clean_labels > 0, "class -1": clean_labels < 0}[name]
    return np.where((clean_labels == labels) & sees, 0, 1)


def starts(
    problem: MarginProblem, clean_labels: np.ndarray, n_starts: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The first `n_starts` of: the five of `NAMED`, then in turn random selections and directions; p (r,) each."""
    found = {}
    for k in range(n_starts):
        if k < len(NAMED):
            name = NAMED[k]
            found[name] = (
                np.zeros(problem.tokens.shape[-1])
                if name == "uniform"
                else selecting(problem, named_selection(name, clean_labels, problem.labels), LEAD)
            )
        elif k % 2:
            shape = problem.tokens.shape[:2]
            found[f"random selection {k}"] = selecting(problem, rng.integers(shape[1], size=shape[0]), LEAD)
        else:
            direction = rng.standard_normal(problem.tokens.shape[-1])
            found[f"random direction {k}"] = LEAD * problem.unit * direction / np.linalg.norm(direction)
    return found
