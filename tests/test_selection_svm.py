"""Token-selection SVM: known answers and refusals."""

import numpy as np
import pytest

from benign_attention.parameters import ParameterError
from benign_attention.selection_svm import token_selection_svm


def test_one_sample_separates_along_the_difference_of_its_tokens():
    tokens = np.array([[[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]])
    found = token_selection_svm(tokens, np.array([0]))
    np.testing.assert_allclose(found.direction, np.array([3.0, -4.0, 0.0]) / 25, atol=1e-9)
    assert found.margin == pytest.approx(5.0)


def test_orthogonal_samples_add_up():
    """Samples in orthogonal spaces: 1 / margin^2 is the sum over samples of 1 / distance^2."""
    tokens = np.zeros((3, 2, 6))
    lengths = np.array([1.0, 2.0, 3.0])
    for i, length in enumerate(lengths):
        tokens[i, 1, 2 * i] = length
    found = token_selection_svm(tokens, np.array([1, 1, 1]))
    assert found.margin == pytest.approx((lengths**-2.0).sum() ** -0.5, rel=1e-8)
    assert found.duality_gap < 1e-8 and found.kkt_residual < 1e-8


@pytest.mark.parametrize("shape", [(4, 2, 30), (3, 5, 10)])
def test_every_selected_token_leads_by_one_and_nothing_shorter_does(shape):
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal(shape)
    selected = rng.integers(shape[1], size=shape[0])
    p = token_selection_svm(tokens, selected).direction

    def lead(q):
        logits = tokens @ q
        rows = np.arange(len(logits))
        rest = np.where(np.arange(shape[1]) == selected[:, None], -np.inf, logits)
        return (logits[rows, selected] - rest.max(axis=1)).min()

    assert lead(p) == pytest.approx(1.0, abs=1e-7)
    for _ in range(100):
        q = p + 0.05 * np.linalg.norm(p) * rng.standard_normal(shape[2])
        assert lead(q * np.linalg.norm(p) / np.linalg.norm(q)) < 1.0


def test_a_token_between_two_others_cannot_be_selected():
    tokens = np.array([[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]])
    found = token_selection_svm(tokens, np.array([1]))
    assert found.status == "infeasible" and np.isnan(found.margin)


@pytest.mark.parametrize(
    ("tokens", "selected", "name"),
    [
        (np.zeros((3, 2)), np.zeros(3, int), "tokens"),
        (np.zeros((3, 1, 2)), np.zeros(3, int), "tokens"),
        (np.ones((3, 2, 2)), np.array([0, 1, 2]), "selected"),
        (np.ones((3, 2, 2)), np.array([0, 1]), "selected"),
        (np.ones((3, 2, 2)), np.array([0.0, 1.0, 0.0]), "selected"),
        (np.ones((3, 2, 2)), np.array([0, 1, 0]), "rows"),
    ],
)
def test_bad_input_is_refused_by_name(tokens, selected, name):
    with pytest.raises(ParameterError, match=rf"^{name} must"):
        token_selection_svm(tokens, selected)
