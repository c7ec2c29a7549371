"""The assumption meter: factors against hand-computed values, and the borders on which they equal 1."""

from __future__ import annotations

import math

import pytest

from benign_attention import assumptions
from benign_attention.data import SingleHeadParams, TokenSelectionParams


def single_head(**changes) -> dict[str, assumptions.Hypothesis]:
    return {h.quantity: h for h in assumptions.single_head(SingleHeadParams(**changes))}


def token_selection(**changes) -> dict[str, assumptions.Hypothesis]:
    return {h.quantity: h for h in assumptions.token_selection(TokenSelectionParams(**changes))}


def test_factors_of_the_figure_configuration():
    meter = single_head()
    assert meter["d / n²"].factor == 1.0
    assert meter["c = SNR √n"].factor == pytest.approx(1.5 * math.sqrt(2))
    assert meter["1 / η"].factor == pytest.approx(20)
    assert meter["η n"].factor == pytest.approx(10)
    assert all(h.holds for h in meter.values() if h.factor is not None)


def test_each_hypothesis_fails_on_its_own():
    for change, quantity in (
        ({"dim": 39_999}, "d / n²"),
        ({"signal_norm": 14.0}, "c = SNR √n"),
        ({"label_noise": 0.004}, "η n"),
    ):
        assert [q for q, h in single_head(**change).items() if h.holds is False] == [quantity]


def test_without_label_noise_no_noisy_sample_is_expected_and_any_constant_bounds_it():
    meter = single_head(label_noise=0.0)
    assert meter["η n"].factor == 0 and meter["η n"].holds is False
    assert meter["1 / η"].factor == math.inf and meter["1 / η"].holds


@pytest.mark.parametrize("dim, norm, strength", [(2000, 20.0, 4.0), (5000, 5.0, 0.1), (1000, 100.0, 200.0)])
def test_the_two_regimes_of_token_selection_exclude_each_other(dim, norm, strength):
    meter = token_selection(n_train=20, dim=dim, signal_norm=norm)
    assert meter["n SNR²"].factor == pytest.approx(strength)
    assert meter["1 / (n SNR²)"].factor == pytest.approx(1 / strength)
    assert meter["n SNR²"].holds != meter["1 / (n SNR²)"].holds


def test_what_the_sources_do_not_quantify_has_no_factor():
    silent = [h for h in assumptions.token_selection(TokenSelectionParams()) if h.factor is None]
    assert {h.statement for h in silent} >= {"over-parameterization", "small learning rate"}
    assert all(h.holds is None and assumptions.verdict(h).startswith("no factor") for h in silent)


def test_every_hypothesis_names_its_source():
    both = [*assumptions.single_head(SingleHeadParams()), *assumptions.token_selection(TokenSelectionParams())]
    assert all(h.source and h.statement for h in both)


def test_signal_strength_is_the_square_of_natural_c():
    params = SingleHeadParams(n_train=70, dim=900, signal_norm=7.0)
    assert assumptions.signal_strength(70, 900, 7.0) == pytest.approx(params.natural_c**2)


def test_probability_of_no_flip():
    assert assumptions.no_flip_probability(3, 0.1) == pytest.approx(0.729)
    assert assumptions.no_flip_probability(10, 0.0) == 1.0


def test_the_table_has_a_column_for_each_point_and_escapes_its_text():
    points = {
        "small <d>": assumptions.single_head(SingleHeadParams(dim=400)),
        "large": assumptions.single_head(SingleHeadParams()),
    }
    html = assumptions.as_html(points, "caption")
    assert html.count("<tr>") == 1 + len(points["large"])
    assert "small &lt;d&gt;" in html and "small <d>" not in html
    assert "fails, factor 0.01" in html and "holds, factor 1" in html
