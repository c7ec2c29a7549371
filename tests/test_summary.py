"""Train and test quantities of a state."""

import numpy as np

from benign_attention import reduced
from benign_attention.reduced import State, TrainingSet
from benign_attention.summary import summarize


def test_a_case_worked_by_hand():
    """One clean, one noisy sample of class +1, one noise token each, all orthogonal; the weights are set by hand."""
    training = TrainingSet(np.eye(2), np.array([1.0, 1.0]), np.array([1.0, -1.0]))
    # p: signal logit log 3, noise logits 0 and log 9; v: signal value 1, noise values 0 and -2
    state = State(np.array([[np.log(3), 0.0], [1.0, 0.0]]), np.array([[0.0, np.log(9)], [0.0, -2.0]]))
    found = summarize(training, state, 1.0)
    assert np.isclose(found.clean_attention, 3 / 4)
    assert np.isclose(found.noisy_attention, 3 / 12)
    # f = 3/4 > 0 fits +1; f = 1/4 - 2 * 3/4 < 0 fits -1
    assert found.train_accuracy == 1.0
    assert found.noisy_train_accuracy == 1.0


def test_without_noisy_samples_their_quantities_are_nan():
    training = reduced.draw(6, 50, 2, 0.0, [np.random.default_rng(0)])
    found = summarize(training, reduced.zero_state(training), 1.0)
    assert np.isnan(found.noisy_attention).all()
    assert np.isnan(found.noisy_train_accuracy).all()
    assert found.clean_attention == 0.5
    assert np.allclose(found.test_accuracy, 0.5, rtol=0, atol=1e-14)


def test_fields_carry_the_batch_shape_of_a_grid():
    training = reduced.draw(6, 50, 3, 0.3, [np.random.default_rng(i) for i in range(2)]).with_axes(2)
    rho, beta = np.ones((4, 1)), np.full(3, 0.1)
    *_, state = reduced.gradient_descent(training, rho, beta, 2)
    found = summarize(training, state, rho)
    for name in found.__dataclass_fields__:
        assert getattr(found, name).shape == (2, 4, 3), name
