"""Margins of token selections in the orthogonal limit."""

import itertools

import numpy as np
import pytest

from benign_attention.margin_limit import best_limit_margin, limit_margin, switch


@pytest.mark.parametrize(("fraction", "noise"), [([0.5, 0.5], [0.1, 0.1]), ([0.7, 0.3], [0.0, 0.25])])
def test_best_is_the_largest_of_the_four_selections(fraction, noise):
    c = np.linspace(0.3, 5, 40)
    margins = [limit_margin(c, fraction, noise, sees) for sees in itertools.product([False, True], repeat=2)]
    np.testing.assert_allclose(best_limit_margin(c, fraction, noise), np.max(margins, axis=0), rtol=1e-12)


def test_balanced_classes_have_the_closed_forms_of_the_text():
    c, eta = 2.0, 0.1
    assert limit_margin(c, [0.5, 0.5], [eta, eta], [True, True]) == pytest.approx((2 / c**2 + eta) ** -0.5)
    assert limit_margin(c, [0.5, 0.5], [eta, eta], [False, False]) == pytest.approx(1.0)
    assert switch(0.5, eta) == pytest.approx(np.sqrt(2 / (1 - eta)))
