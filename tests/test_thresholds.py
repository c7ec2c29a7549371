"""The three points in c and the limit flow: against gradient descent with small steps, and in exact cases."""

from dataclasses import replace

import numpy as np
import pytest

from benign_attention import reduced, theory, thresholds
from benign_attention.data import from_natural_units
from benign_attention.flow import gradient_flow
from benign_attention.reduced import TrainingSet
from benign_attention.thresholds import (
    initial_gap_threshold,
    initial_logit_threshold,
    late_threshold,
    limit_flow,
)

ETA = np.array([0.05, 0.1, 0.2, 0.3, 0.4])


def after_two_small_steps(c, eta, n_tokens, pi):
    *_, state = theory.limit_gradient_descent(theory.LimitPoint(c, 1e-4, eta, n_tokens, pi), 2)
    return state


@pytest.mark.parametrize("pi", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("n_tokens", [2, 3, 8])
def test_signs_after_two_small_steps_turn_at_the_initial_points(n_tokens, pi):
    for point, quantity in (
        (initial_gap_threshold(ETA, n_tokens, pi), lambda s: s.signal_logit - s.clean_logit),
        (initial_logit_threshold(ETA, pi), lambda s: s.signal_logit),
    ):
        for factor in (0.999, 1.001):
            assert (
                np.sign(quantity(after_two_small_steps(factor * point, ETA, n_tokens, pi))) == np.sign(factor - 1)
            ).all()


@pytest.mark.parametrize("n_tokens", [2, 3, 8])
def test_the_flow_starts_the_way_two_small_steps_do(n_tokens):
    """At t' = 1e-3 the flow's gap has the sign of the formula."""
    for factor in (0.99, 1.01):
        c = factor * initial_gap_threshold(ETA, n_tokens)
        (point,) = gradient_flow(limit_flow(c, ETA, n_tokens, asymmetry=0.0), [1e-3], rtol=1e-10, atol=1e-13)
        gap = point.state.signal_logit - point.state.noise_logits[0, 0]
        assert (np.sign(gap) == np.sign(factor - 1)).all()


def test_without_label_noise_all_points_are_one_over_root_pi():
    """At c^2 pi = 1 signal and noise tokens of clean samples keep equal values for ever: nothing is selected."""
    for n_tokens in (2, 3, 8):
        for pi in (0.3, 0.5):
            expected = pytest.approx(1 / np.sqrt(pi), rel=2e-3)
            assert initial_gap_threshold(0.0, n_tokens, pi) == pytest.approx(1 / np.sqrt(pi), rel=1e-12)
            assert initial_logit_threshold(0.0, pi) == pytest.approx(1 / np.sqrt(pi), rel=1e-12)
            assert late_threshold(0.0, n_tokens, pi, asymmetry=0.0).middle == expected


def test_the_balanced_state_of_clean_samples_is_exact_in_the_flow():
    (point,) = gradient_flow(limit_flow(np.sqrt(2), 0.0, 3, asymmetry=0.0), [1e6])
    assert point.state.clean_attention[0] == pytest.approx(1 / 3, abs=1e-9)


def test_the_flow_is_the_limit_of_gradient_descent_with_small_steps():
    for n_tokens, c, eta in ((2, 1.5, 0.1), (2, 2.9, 0.3), (3, 1.8, 0.1)):
        errors = []
        for b in (0.02, 0.01):
            *_, slow = theory.limit_gradient_descent(theory.LimitPoint(c, b, eta, n_tokens), round(30 / b))
            (point,) = gradient_flow(limit_flow(c, eta, n_tokens, asymmetry=0.0), [30.0])
            ours = np.array([point.state.clean_attention[0], point.state.noisy_attention[0]])
            errors.append(np.abs(ours - [slow.clean_attention, slow.noisy_attention]).max())
        assert errors[1] < 1e-3
        assert errors[0] / errors[1] == pytest.approx(2.0, abs=0.2)


def test_uneven_noise_tokens_follow_gradient_descent_on_orthogonal_tokens():
    """Explicitly orthogonal tokens, the first noise token of every sample ahead: the engine, without theory."""
    n, n_tokens, c, eta, ahead = 20, 4, 1.7, 0.1, 0.05
    clean = np.repeat([1.0, -1.0], n // 2)
    labels = np.where(np.tile(np.arange(n // 2) < 1, 2), -clean, clean)
    dim = 10_000
    training = TrainingSet(dim * np.eye(n * (n_tokens - 1)), clean, labels)
    start = reduced.zero_state(training)
    start.noise[0, :n] = ahead / dim
    rho, step = (float(x) for x in from_natural_units(c, 0.005, n, dim))
    *_, state = reduced.gradient_descent(training, rho, step, 6000, start=start)
    attention = reduced.outputs(training, state, rho).attention
    (point,) = gradient_flow(limit_flow(c, eta, n_tokens, asymmetry=ahead), [30.0])
    ours = point.state.attention[:, :, 0]
    theirs = np.stack([attention[:, ~training.noisy].mean(axis=1), attention[:, training.noisy].mean(axis=1)])
    np.testing.assert_allclose(ours[:, :2], theirs[:, :2], atol=1e-3)
    np.testing.assert_allclose(ours[:, 2], theirs[:, 2:].sum(axis=1), atol=1e-3)


def test_one_noise_token_wins_from_a_small_lead():
    (early, late) = gradient_flow(limit_flow(1.0, 0.1, 8, asymmetry=1e-3), [1.0, 1e8])
    share = [p.state.attention[1, 1, 0] / p.state.attention[1, 1:, 0].sum() for p in (early, late)]
    assert share[0] == pytest.approx(1 / 7, abs=1e-3)
    assert share[1] > 0.95


def test_late_thresholds_of_two_and_three_tokens():
    """The values that an independent integration gave, to their two digits after the point."""
    eta = np.array([0.06, 0.1, 0.2, 0.3])
    np.testing.assert_allclose(late_threshold(eta).middle, [1.54, 1.64, 2.01, 2.83], atol=0.006)
    np.testing.assert_allclose(late_threshold(eta[1:], 3, asymmetry=0.0).middle, [1.66, 2.10, 3.05], atol=0.006)


def test_times_and_head_starts_broadcast():
    together = late_threshold(0.1, 8, t_max=[1e2, 1e6], asymmetry=[[0.01], [0.1]], tolerance=1e-3).middle
    for i, asymmetry in enumerate((0.01, 0.1)):
        for k, time in enumerate((1e2, 1e6)):
            alone = late_threshold(0.1, 8, t_max=time, asymmetry=asymmetry, tolerance=1e-3).middle
            assert together[i, k] == pytest.approx(float(alone), rel=2e-3)
    assert np.ptp(together, axis=0).min() > 0.01 and np.ptp(together, axis=1).min() > 0.01


def test_late_threshold_brackets_what_it_says():
    found = late_threshold(ETA, 3, 0.5, t_max=1e6, tolerance=1e-3)
    assert (found.high / found.low <= 1.001).all()
    for c, kept in ((found.low, False), (found.high, True)):
        (point,) = gradient_flow(limit_flow(c, ETA, 3), [1e6])
        assert ((point.state.clean_attention > 0.5) == kept).all()


def test_clean_attention_may_fall_first_and_win_in_the_end():
    """Between (iii) and (i), at label noise 0.3."""
    c = 0.95 * initial_gap_threshold(0.3)
    early, late = (p.state.clean_attention[0] for p in gradient_flow(limit_flow(c, 0.3), [1.0, 1e4]))
    assert early < 0.5 < late


@pytest.mark.parametrize("c", [1.2, 2.5])
def test_late_in_training_each_outcome_reinforces_itself(c):
    """From p.mu = 3 or -3 clean samples stay with what they look at, on either side of the threshold (1.64)."""
    system = limit_flow(c, 0.1)
    for ahead, value in ((3.0, 1.0), (-3.0, 0.0)):
        start = system.start.copy()
        start[:2] = ahead, value
        (point,) = gradient_flow(replace(system, start=start), [1e8])
        assert (point.state.clean_attention[0] > 0.99) == (ahead > 0)
        assert point.state.noisy_attention[0] < 0.01


def test_a_class_matters_only_through_its_share():
    shares = np.array([0.3, 0.5, 0.7])
    found = late_threshold(0.1, 2, shares, tolerance=1e-4).middle * np.sqrt(shares)
    np.testing.assert_allclose(found, found[0], rtol=3e-4)


def test_the_threshold_does_not_move_after_the_first_thousands():
    at = [late_threshold([0.1, 0.3], t_max=t, tolerance=1e-3).middle for t in (1e4, 1e14)]
    np.testing.assert_allclose(*at, rtol=2e-3)


def test_a_threshold_outside_the_searched_range_is_undefined():
    assert np.isnan(late_threshold(0.45, t_max=1e4).middle)
    assert np.isnan(late_threshold([0.1, 0.45], t_max=1e4).middle).tolist() == [False, True]


def test_brackets_stack_and_select():
    pair = thresholds.Bracket.stack([thresholds.Bracket(1.0, 4.0), thresholds.Bracket(np.nan, np.nan)])
    assert pair.middle[0] == 2.0
    assert np.isnan(pair.at(1).middle)
