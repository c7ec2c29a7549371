"""Exact test quantities of token selection against fresh samples, closed forms and independent integration."""

import math
from dataclasses import dataclass, fields

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermegauss
from numpy.polynomial.legendre import leggauss
from scipy.special import ndtr

from benign_attention import devices, explicit, selection
from benign_attention.data import TokenSelectionParams, draw_token_selection
from benign_attention.selection_population import FreshSample, fresh_sample, test_quantities


@dataclass(frozen=True)
class Law:
    """Fresh samples in words of vectors: q, nu, |mu|, T and rho_w; the signals lie along the first two axes."""

    q: np.ndarray
    nu: np.ndarray
    signal_norm: float
    n_tokens: int
    weak_ratio: float

    @property
    def fresh(self):
        """A reduced state with this very law: W = I, a = q and nothing outside."""
        identity, label = np.eye(len(self.q)), np.ones(1)
        scalars = np.asarray(self.signal_norm), np.asarray(self.weak_ratio)
        tokens = np.zeros((self.n_tokens, len(self.q)))
        training = selection.TrainingSet(tokens, self.nu, identity, identity[:0], label, label, *scalars)
        return fresh_sample(training, selection.State(self.q, identity))

    @property
    def projections(self):
        """|q|, the component of nu along q, and the size of the rest."""
        size = np.linalg.norm(self.q)
        along = self.nu @ (self.q / size)
        return size, along, math.sqrt(max(self.nu @ self.nu - along**2, 0.0))

    def means(self, y):
        """Logits q.x and values y nu.x of a class without noise, each (T,)."""
        own, other = self.signal_norm * np.eye(len(self.q))[:2][::y]
        tokens = np.zeros((self.n_tokens, len(self.q)))
        tokens[:3] = own, self.weak_ratio * own, self.weak_ratio * other
        return tokens @ self.q, y * tokens @ self.nu


def aligned(signal_norm, q, n_tokens, weak_ratio=0.1):
    """A head along mu_+ - mu_-, of size 1 / |mu|."""
    nu = np.zeros(len(q))
    nu[:2] = np.array([1, -1]) / (math.sqrt(2) * signal_norm)
    return Law(np.asarray(q, float), nu, signal_norm, n_tokens, weak_ratio)


def of_state(training, state):
    """The law of a reduced state in r + q dimensions, whatever the dimension that it stands for."""
    inside, outside = state.weights @ state.query, training.outside @ state.query
    nu = np.concatenate([training.head, np.zeros(outside.size)])
    scalars = float(training.signal_norm), training.n_tokens, float(training.weak_ratio)
    return Law(np.concatenate([inside, outside]), nu, *scalars)


def numbers(quantities):
    """Accuracy, loss and attention by role with their errors, (..., 6) each."""
    parts = (quantities.accuracy, quantities.loss)
    return tuple(
        np.concatenate(
            [*(np.asarray(getattr(x, k))[..., None] for x in parts), getattr(quantities.attention, k)], axis=-1
        )
        for k in ("value", "error")
    )


NAMES = ("accuracy", "loss", "relevant", "weak", "confusing", "irrelevant")


def by_role(attention, axis=-1):
    attention = np.moveaxis(attention, axis, 0)
    return np.stack([*attention[:3], attention[3:].sum(axis=0)])


# --- against fresh samples drawn as tokens -------------------------------------------------------------------


def check_against(law_numbers, sums, n_samples, sigmas):
    means = sums[:, 0] / n_samples
    errors = np.sqrt(np.maximum(sums[:, 1] / n_samples - means**2, 0) / n_samples)
    for name, value, error, mean, se in zip(NAMES, *law_numbers, means, errors, strict=True):
        # a frequency that the sample missed altogether is known to 1 / n_samples
        assert abs(mean - value) < sigmas * math.hypot(error, se) + 1 / n_samples, (name, mean, value, error, se)


def sums_over(margins, attention):
    roles = by_role(attention)
    return np.array([[x.sum(), (x**2).sum()] for x in ((margins > 0).astype(float), np.logaddexp(0, -margins), *roles)])


def check_fresh_samples(params, step_size, n_steps, n_samples):
    """Every quantity within 4 standard errors of fresh samples in `dim` dimensions, seen by the written-down model."""
    rng = np.random.default_rng([params.dim, n_steps])
    data = draw_token_selection(params, rng)
    initial = rng.standard_normal((params.dim, params.dim)) / math.sqrt(3 * params.dim)
    training, basis = selection.from_data(data, initial, params.weak_ratio)
    (state,) = selection.gradient_descent(training, step_size, [n_steps])
    model = explicit.TokenSelectionAttention(torch.tensor(data.signals), torch.tensor(initial))
    p, change = selection.vectors(training, state, basis)
    with torch.no_grad():
        model.p.copy_(torch.tensor(p))
        model.W += torch.tensor(change)
    sums = np.zeros((6, 2))
    for _ in range(n_samples // 20_000):
        fresh = draw_token_selection(params.replace(n_train=20_000, label_noise=0.0), rng)
        tokens = torch.tensor(fresh.tokens)
        with torch.no_grad():
            margins = fresh.labels * model(tokens).numpy()
            sums += sums_over(margins, model.attention(tokens).numpy())
    check_against(numbers(test_quantities(fresh_sample(training, state))), sums, n_samples, 4)


FRESH = {
    "before training": (TokenSelectionParams(n_train=6, dim=30, n_tokens=4, signal_norm=1.0), 0.1, 0),
    "early": (TokenSelectionParams(n_train=6, dim=60, n_tokens=5, signal_norm=4.0), 0.2, 20),
    "attentive": (TokenSelectionParams(n_train=6, dim=60, n_tokens=5, signal_norm=4.0), 0.5, 400),
    "weak signal": (TokenSelectionParams(n_train=8, dim=50, n_tokens=4, signal_norm=0.8), 0.1, 100),
    "strong signal": (TokenSelectionParams(n_train=8, dim=40, n_tokens=3, signal_norm=20.0, weak_ratio=0.5), 0.1, 200),
    "fewer dimensions than tokens": (TokenSelectionParams(n_train=9, dim=12, n_tokens=8, signal_norm=1.5), 0.3, 300),
}


@pytest.mark.parametrize("case", FRESH)
def test_quantities_agree_with_fresh_samples(case):
    """4e4 samples, 36 comparisons at 4 standard errors: false alarm 0.3 % before the seeds were fixed."""
    check_fresh_samples(*FRESH[case], 40_000)


@pytest.mark.slow
@pytest.mark.parametrize("case", FRESH)
def test_quantities_agree_with_a_million_fresh_samples(case):
    """False alarm as above."""
    check_fresh_samples(*FRESH[case], 1_000_000)


@pytest.mark.parametrize("head_noise", [0.0, 0.5])
@pytest.mark.parametrize("dim", [40, 500, 10**12])
def test_drawn_states_agree_with_fresh_samples_of_their_own_law(dim, head_noise):
    """Where no d-dimensional sample fits: q and nu in r + q coordinates, 1e5 samples of T tokens, 4 standard errors.

    36 comparisons: false alarm 0.3 %.
    """
    params = TokenSelectionParams(n_train=10, dim=dim, n_tokens=5, signal_norm=math.sqrt(0.1 * dim))
    rng = np.random.default_rng([dim % 997, int(10 * head_noise)])
    training = selection.draw(params, rng, head_noise)
    (state,) = selection.gradient_descent(training, 10 / dim, [300])
    law = of_state(training, state)
    size, along, across = law.projections
    sums = np.zeros((6, 2))
    for y in (1, -1):
        logits, values = law.means(y)
        z, other = rng.standard_normal((2, 50_000, 5))
        attention = np.exp(logits + size * z)
        attention /= attention.sum(axis=1, keepdims=True)
        sums += sums_over((attention * (values + y * along * z + across * other)).sum(axis=1), attention)
    check_against(numbers(test_quantities(fresh_sample(training, state))), sums, 100_000, 4)


# --- independent integration -----------------------------------------------------------------------------------


def gauss_hermite(law, n_nodes=64):
    """Accuracy, loss and attention by role for T = 3: tensor Gauss-Hermite over three logits, loss on a fourth axis."""
    x, w = hermegauss(n_nodes)
    w = w / w.sum()
    z = np.stack(np.meshgrid(x, x, x, indexing="ij"))
    weight = np.einsum("i,j,k->ijk", w, w, w)
    size, along, across = law.projections
    nodes, node_weights = hermegauss(24)
    node_weights = node_weights / node_weights.sum()
    total = np.zeros(6)
    for y in (1, -1):
        logits, values = (v[:, None, None, None] for v in law.means(y))
        s = np.exp(logits + size * z)
        s /= s.sum(axis=0)
        mean = (s * (values + y * along * z)).sum(axis=0)
        spread = across * np.sqrt((s**2).sum(axis=0))
        loss = sum(c * np.logaddexp(0, -(mean + spread * node)) for node, c in zip(nodes, node_weights, strict=True))
        each = np.stack([ndtr(mean / spread), loss, *s, np.zeros_like(loss)])
        total += (each * weight).sum(axis=(1, 2, 3)) / 2
    return total


T3_LAWS = {
    "moderate": aligned(3.0, [0.4, -0.3, 0.5, 0.2], 3),
    "one class preferred": aligned(2.0, [0.8, 0.5, 0.1, -0.6], 3, weak_ratio=0.4),
    "attentive": aligned(5.0, [1.0, 0.9, 0.2, 0.1], 3),
    "weak signal": aligned(0.7, [0.2, 0.3, 0.6, 0.0], 3),
    "wrong way": aligned(2.0, [-0.5, -0.6, 0.3, 0.3], 3),
    "head not aligned": Law(np.array([0.4, 0.3, 0.5, 0.2]), np.array([0.2, -0.1, 0.5, -0.3]), 3.0, 3, 0.1),
}


@pytest.mark.parametrize("name", T3_LAWS)
def test_quantities_agree_with_tensor_gauss_hermite(name):
    """With 8 x 2^13 points: within 6 standard errors, and these below 3e-5."""
    law = T3_LAWS[name]
    exact = gauss_hermite(law)
    np.testing.assert_allclose(exact, gauss_hermite(law, 48), rtol=0, atol=2e-7)
    value, error = numbers(test_quantities(law.fresh, log2_points=13))
    assert np.all(error < 3e-5)
    assert np.all(np.abs(value - exact) < 6 * error + 2e-7), (value - exact, error)


def test_a_trained_state_agrees_with_tensor_gauss_hermite():
    """Six comparisons for each of 3 states, within 6 standard errors of at most 1e-4."""
    params = TokenSelectionParams(n_train=10, dim=400, n_tokens=3, signal_norm=4.0)
    training = selection.draw(params, np.random.default_rng(0))
    states = list(selection.gradient_descent(training, 0.1, [3, 20, 100]))
    for state in states:
        law = of_state(training, state)
        exact = gauss_hermite(law, 96)
        np.testing.assert_allclose(exact, gauss_hermite(law, 80), rtol=0, atol=1e-6)
        value, error = numbers(test_quantities(fresh_sample(training, state), log2_points=12))
        assert np.all(error < 1e-4)
        assert np.all(np.abs(value - exact) < 6 * error + 1e-6), (value - exact, error)
    assert 0.4 < exact[2] < 1


@pytest.mark.parametrize("log2_points", [4, 8])
@pytest.mark.parametrize("name", ["moderate", "weak signal", "head not aligned"])
def test_standard_errors_are_honest(name, log2_points):
    """Over 200 randomisations, deviations from the exact values have the spread of Student's t on 7 degrees of freedom.

    Its mean square is 7/5, here with a standard error of about 0.2; [0.9, 2.4] leaves room for a law not quite normal.
    """
    law = T3_LAWS[name]
    assert_honest(law, gauss_hermite(law)[:5], log2_points)


def assert_honest(law, exact, log2_points):
    found = [numbers(test_quantities(law.fresh, seed, log2_points)) for seed in range(200)]
    value, error = (np.array(x)[:, : len(exact)] for x in zip(*found, strict=True))
    deviations = (value - exact) / error
    square = (deviations**2).mean(axis=0)
    assert np.all(square > 0.9), square
    assert np.all(square < 2.4), square
    assert np.all(np.abs(deviations.mean(axis=0)) < 5 * math.sqrt(1.4 / 200))


def test_logits_that_are_not_numbers_give_no_accuracy():
    law = FreshSample(np.full((2, 4), math.nan), np.ones((2, 4)), np.array(1.0), np.array(0.0), np.array(0.0))
    assert np.isnan(test_quantities(law).accuracy.value)


def test_errors_fall_with_more_points_faster_than_monte_carlo():
    law = T3_LAWS["moderate"]
    errors = [
        np.mean([numbers(test_quantities(law.fresh, seed, k))[1][:5] for seed in range(10)], axis=0) for k in (6, 12)
    ]
    assert np.all(errors[1] < errors[0] / 20)


# --- extremes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [3, 8])
@pytest.mark.parametrize("signal_norm", [1e-3, 0.3, 1.0, 3.0, 5.0, 20.0])
def test_before_training_the_head_alone_decides(signal_norm, n_tokens):
    """y f ~ N(1/(sqrt(2) T), 1/(|mu|^2 T)): the weak and the confusing token cancel. Exact, and the error says so."""
    params = TokenSelectionParams(n_train=4, dim=50, n_tokens=n_tokens, signal_norm=signal_norm)
    training = selection.draw(params, np.random.default_rng(0))
    quantities = test_quantities(fresh_sample(training, selection.initial_state(training)))
    assert quantities.accuracy.value == pytest.approx(ndtr(signal_norm / math.sqrt(2 * n_tokens)), rel=1e-12)
    with mpmath.workdps(30):
        mean = 1 / (mpmath.sqrt(2) * n_tokens)
        sd = 1 / (mpmath.mpf(signal_norm) * mpmath.sqrt(n_tokens))
        loss = mpmath.quad(
            lambda z: mpmath.log1p(mpmath.exp(-mean - sd * z)) * mpmath.npdf(z), [-12, -6, -mean / sd, 3, 6, 12]
        )
    assert quantities.loss.value == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(quantities.attention.value, by_role(np.full(n_tokens, 1 / n_tokens)), rtol=1e-13)
    assert max(quantities.accuracy.error, quantities.loss.error, quantities.attention.error.max()) < 1e-12


def winner_takes_all(law):
    """Accuracy, loss and attention by role as |q| -> infinity: attention is one on the largest logit.

    Integrals over the noise of the winner, split where another token's normal distribution function turns.
    """
    x, w = leggauss(60)
    size, along, across = law.projections
    nodes, node_weights = hermegauss(40)
    edges = np.linspace(-9, 9, 61)
    z = (edges[:-1, None] + (edges[1] - edges[0]) * (1 + x) / 2).ravel()
    weight = np.tile(w, 60) * (edges[1] - edges[0]) / 2 * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    total = np.zeros(6)
    for y in (1, -1):
        logits, values = law.means(y)
        for t in range(law.n_tokens):
            gaps = np.delete(logits[t] - logits, t) / size
            wins = weight * ndtr(z + gaps[:, None]).prod(axis=0)
            mean = values[t] + y * along * z
            right = ndtr(mean / across)
            loss = sum(c * np.logaddexp(0, -mean - across * node) for node, c in zip(nodes, node_weights, strict=True))
            loss /= node_weights.sum()
            total += np.array([(wins * right).sum(), (wins * loss).sum(), *(wins.sum() * np.eye(4)[min(t, 3)])]) / 2
    return total


@pytest.mark.parametrize("size", [1e6, 1e60, 1e150])
@pytest.mark.parametrize("n_tokens", [3, 8])
def test_a_huge_query_selects_one_token(n_tokens, size):
    """Where q points matters, its size does not; 8 x 2^12 points, within 6 standard errors of at most 2e-3."""
    law = aligned(4.0, np.array([0.4, 0.3, 0.6, 0.5]) * size, n_tokens)
    exact = winner_takes_all(law)
    assert exact[2:].sum() == pytest.approx(1, rel=1e-10)
    with np.errstate(all="raise", under="ignore"):
        value, error = numbers(test_quantities(law.fresh, log2_points=12))
    assert np.all(error < 2e-3)
    assert np.all(np.abs(value - exact) < 6 * error + 1e-7), (value - exact, error)
    assert 0.3 < exact[2] < 0.95


def test_standard_errors_are_honest_where_attention_jumps():
    law = aligned(4.0, np.array([0.4, 0.3, 0.6, 0.5]) * 1e9, 8)
    assert_honest(law, winner_takes_all(law), 6)


def test_a_head_along_the_query_leaves_nothing_to_chance():
    """nu parallel to q: given the logits the output is certain. 2e5 samples of each class, 4 standard errors."""
    law = aligned(2.0, [1.5, -1.5, 0.0], 4)
    assert law.fresh.rest == pytest.approx(0, abs=1e-8)
    value, error = numbers(test_quantities(law.fresh, log2_points=12))
    rng = np.random.default_rng(0)
    size, along, _ = law.projections
    sums = np.zeros((6, 2))
    for y in (1, -1):
        logits, values = law.means(y)
        z = rng.standard_normal((200_000, 4))
        attention = np.exp(logits + size * z)
        attention /= attention.sum(axis=1, keepdims=True)
        sums += sums_over((attention * (values + y * along * z)).sum(axis=1), attention)
    check_against((value, error), sums, 400_000, 4)
    assert value[0] < 0.99


@given(
    size=st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 1e3, 1e8]),
    signal_norm=st.sampled_from([1e-15, 1e-3, 1.0, 1e3, 1e15]),
    n_tokens=st.integers(3, 9),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=80)
def test_quantities_are_possible_values_without_warnings(size, signal_norm, n_tokens, seed):
    rng = np.random.default_rng(seed)
    params = TokenSelectionParams(n_train=3, dim=200, n_tokens=n_tokens, signal_norm=signal_norm)
    training = selection.draw(params, rng)
    state = selection.State(size * rng.standard_normal(training.head.size), training.weights)
    with np.errstate(all="raise", under="ignore"):
        quantities = test_quantities(fresh_sample(training, state), log2_points=5)
    value, error = numbers(quantities)
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(error))
    assert np.all(error >= 0)
    assert np.all(value >= 0)
    assert value[0] <= 1
    assert value[2:].sum() == pytest.approx(1, rel=1e-12)
    if n_tokens == 3:
        assert value[5] == 0


# --- batches and devices ---------------------------------------------------------------------------------------


def sets_and_states():
    sets = [
        selection.draw(
            TokenSelectionParams(n_train=5, dim=300, n_tokens=4, signal_norm=3.0 + k, weak_ratio=0.1 + 0.1 * k),
            np.random.default_rng(k),
            0.2 * k,
        )
        for k in (1, 2, 3)
    ]
    return sets, [list(selection.gradient_descent(x, 0.1, [0, 5, 50])) for x in sets]


def test_a_batch_is_its_single_states():
    sets, states = sets_and_states()
    laws = [FreshSample.stack(fresh_sample(x, s) for s in each) for x, each in zip(sets, states, strict=True)]
    assert laws[0].logits.shape == (3, 2, 4)
    together = test_quantities(FreshSample.stack(laws, axis=0))
    batch = selection.TrainingSet.stack(sets)
    assert together.accuracy.value.shape == (3, 3)
    assert together.attention.error.shape == (3, 3, 4)
    for t, state in enumerate(selection.gradient_descent(batch, 0.1, [0, 5, 50])):
        law = fresh_sample(batch, state)
        for k in range(3):
            alone = fresh_sample(sets[k], states[k][t])
            for field in fields(FreshSample):
                expected = getattr(alone, field.name)
                np.testing.assert_allclose(getattr(law, field.name)[k], expected, rtol=1e-9, atol=1e-12)
            values, errors = numbers(test_quantities(alone))
            np.testing.assert_array_equal(numbers(together)[0][k, t], values)
            np.testing.assert_array_equal(numbers(together)[1][k, t], errors)


@pytest.mark.parametrize("axis", [-1, 0])
def test_stacking_along_an_axis_puts_states_there(axis):
    sets, states = sets_and_states()
    laws = [FreshSample.stack(fresh_sample(x, s) for s in each) for x, each in zip(sets, states, strict=True)]
    stacked = FreshSample.stack(laws, axis=axis)
    assert stacked.spread.shape == (3, 3)
    for k, law in enumerate(laws):
        for field in fields(FreshSample):
            index = (k,) if axis == 0 else (slice(None), k)
            np.testing.assert_array_equal(getattr(stacked, field.name)[index], getattr(law, field.name))


@pytest.mark.parametrize("name", devices.available())
def test_states_on_every_device_have_the_same_law(name):
    sets, _ = sets_and_states()
    batch = selection.TrainingSet.stack(sets)
    laws = []
    for training in (batch, batch.to(name)):
        (state,) = selection.gradient_descent(training, 0.1, [20])
        laws.append(fresh_sample(training, state))
    for field in fields(FreshSample):
        here, there = (getattr(law, field.name) for law in laws)
        assert isinstance(there, np.ndarray)
        np.testing.assert_allclose(there, here, rtol=1e-3 if name == "mps" else 1e-9, atol=1e-12)


def test_the_randomisation_is_set_by_its_seed_and_shared_by_states():
    law = T3_LAWS["moderate"].fresh
    once, again, other = (numbers(test_quantities(law, seed, 6))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert np.all(once[:5] != other[:5])
    both = numbers(test_quantities(FreshSample.stack([law, law]), 1, 6))[0]
    np.testing.assert_array_equal(both, np.stack([once, once]))


def test_the_helper_laws_are_what_they_say():
    """The tests' own reference: means and covariance of (q.x, nu.x) of explicit tokens, within 5 standard errors."""
    law = T3_LAWS["head not aligned"]
    params = TokenSelectionParams(n_train=40_000, dim=4, n_tokens=3, signal_norm=3.0, label_noise=0.0)
    data = draw_token_selection(params, np.random.default_rng(0))
    for y in (1, -1):
        tokens = data.tokens[data.labels == y]
        logits, values = tokens @ law.q, y * tokens @ law.nu
        expected_logits, expected_values = law.means(y)
        error = 5 / math.sqrt(20_000)
        assert np.all(np.abs(logits.mean(axis=0) - expected_logits) < error * np.linalg.norm(law.q))
        assert np.all(np.abs(values.mean(axis=0) - expected_values) < error * np.linalg.norm(law.nu))
        size, along, across = law.projections
        covariance = np.cov(logits[:, 0], y * values[:, 0])
        expected = np.array([[size**2, size * along], [size * along, along**2 + across**2]])
        assert np.all(np.abs(covariance - expected) < 2 * error * np.abs(expected).max())
