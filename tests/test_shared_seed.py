import numpy as np
import pytest
import torch

from benign_attention import selection, shared_seed
from benign_attention.data import TokenSelectionData, TokenSelectionParams, signal_coordinates
from benign_attention.explicit import TokenSelectionAttention
from benign_attention.parameters import ParameterError

POINT = TokenSelectionParams(n_train=12, dim=300, n_tokens=5, signal_norm=3.0, weak_ratio=0.2, label_noise=0.2)


def as_the_scripts_draw(n: int, flips_per_class: int, seed: int) -> TokenSelectionData:
    """`n` samples from a generator of this seed: first half in class +1, the first few labels of a class flipped."""
    clean = np.where(np.arange(n) < n // 2, 1.0, -1.0)
    labels = clean.copy()
    for start in (0, n // 2):
        labels[start : start + flips_per_class] *= -1
    tokens = np.random.default_rng(seed).standard_normal((n, POINT.n_tokens, POINT.dim))
    tokens[..., :2] += signal_coordinates(POINT, clean)
    signals = POINT.signal_norm * np.eye(2, POINT.dim)
    return TokenSelectionData(signals, tokens, clean, labels)


def trained(seed: int, n_steps: int = 300):
    data = as_the_scripts_draw(POINT.n_train, 1, seed)
    start = np.random.default_rng([seed, 1]).standard_normal((POINT.dim, POINT.dim)) / np.sqrt(3 * POINT.dim)
    training, basis = selection.from_data(data, start, POINT.weak_ratio)
    (state,) = selection.gradient_descent(training, 0.1, [n_steps])
    model = TokenSelectionAttention(torch.tensor(data.signals), torch.tensor(start))
    query, moved = selection.vectors(training, state, basis)
    with torch.no_grad():
        model.p += torch.tensor(query)
        model.W += torch.tensor(moved)
    return data, training, state, model


@pytest.mark.parametrize("seed", [0, 1])
def test_contaminated_samples_are_the_first_of_a_test_set_drawn_from_the_same_seed(seed):
    """Outputs in reduced coordinates against the written-down model on tokens drawn anew from the same seed."""
    _, training, state, model = trained(seed)
    test = as_the_scripts_draw(1000, 0, seed)
    with torch.no_grad():
        first = model(torch.tensor(test.tokens[: POINT.n_train])).numpy()
    found = shared_seed.compare(training, state)
    np.testing.assert_allclose(found.contaminated, first, rtol=1e-9, atol=1e-12)


def test_copies_are_the_training_samples_of_class_plus():
    data, training, state, model = trained(2)
    with torch.no_grad():
        own = model(torch.tensor(data.tokens)).numpy()
    found = shared_seed.compare(training, state)
    np.testing.assert_allclose(found.copies, own[data.clean_labels > 0], rtol=1e-9, atol=1e-12)
    assert np.abs(found.transplants - own[data.clean_labels < 0]).min() > 1e-3


def test_bias_is_what_the_reported_numbers_differ_by():
    """Reported numbers with the independent samples drawn; 6 000 of them, 4 standard errors, false alarm 2e-4."""
    _, training, state, model = trained(3)
    n_test = 6000 + POINT.n_train
    with torch.no_grad():
        f = model(torch.tensor(as_the_scripts_draw(n_test, 0, 3).tokens)).numpy()
    label = np.where(np.arange(n_test) < n_test // 2, 1.0, -1.0)
    found = shared_seed.compare(training, state, n_test)
    for per_sample, exact, bias in (
        (f * label > 0, found.accuracy, found.accuracy_bias),
        (np.logaddexp(0, -f * label), found.loss, found.loss_bias),
    ):
        error = per_sample.std() / np.sqrt(n_test)
        assert abs(per_sample.mean() - exact - bias) < 4 * error
        contaminated = per_sample[: POINT.n_train]
        assert bias == pytest.approx(POINT.n_train / n_test * (contaminated.mean() - exact), rel=1e-9, abs=1e-12)


def test_the_training_set_is_left_as_it_was():
    _, training, state, _ = trained(4, n_steps=1)
    before = training.tokens.copy()
    shared_seed.compare(training, state)
    np.testing.assert_array_equal(training.tokens, before)


def test_a_test_set_too_small_to_hold_them_in_one_class_is_refused():
    _, training, state, _ = trained(5, n_steps=1)
    with pytest.raises(ParameterError, match=r"^n_test must be at least twice n_train, 24, .*got 23$"):
        shared_seed.compare(training, state, 23)
