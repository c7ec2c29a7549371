"""Parameterisations of attention: gradients, equivalences, the reduction and the direction of p."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benign_attention import explicit, flow, parameterisations, population, reduced
from benign_attention.data import draw_single_head
from benign_attention.parameterisations import TokenSet, gaussian_weights, prompt_model, self_attention_model
from benign_attention.parameters import ParameterError
from benign_attention.selection_svm import token_selection_svm


def small(seed=0, n=6, dim=30, n_tokens=3, signal_norm=4.0, label_noise=0.3) -> TokenSet:
    return parameterisations.draw(n, dim, n_tokens, signal_norm, label_noise, np.random.default_rng(seed))


def in_coordinates(n=6, dim=30, n_tokens=3, signal_norm=4.0, seed=3):
    """Explicit tokens, signal first, the same in coordinates of their span, and the basis (dim, r)."""
    data = draw_single_head(n, dim, n_tokens, signal_norm, 0.3, np.random.default_rng(seed))
    signal = data.signals[(data.clean_labels < 0).astype(int)]
    tokens = np.concatenate([signal[:, None], data.noise], axis=1)
    basis, factor = np.linalg.qr(np.concatenate([np.eye(2, dim), data.noise.reshape(-1, dim)]).T)
    basis *= np.where(np.arange(factor.shape[0]) < 2, np.sign(np.diag(factor)), 1.0)
    training = TokenSet(tokens @ basis, data.clean_labels, data.labels, signal_norm, dim - basis.shape[1])
    return tokens, training, basis


def descend(loss, weights, step_size, n_steps, rates):
    """Autograd on explicit matrices."""
    weights = [torch.tensor(w, requires_grad=True) for w in weights]
    for _ in range(n_steps):
        gradients = torch.autograd.grad(loss(*weights), weights)
        with torch.no_grad():
            for w, g, rate in zip(weights, gradients, rates, strict=True):
                w -= step_size * rate * g
    return [w.detach().numpy() for w in weights]


@pytest.mark.parametrize("rates", [(1.0, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.5, 2.0, 1.0)])
def test_prompts_train_as_autograd_does_in_d_dimensions(rates):
    tokens, training, basis = in_coordinates()
    rng = np.random.default_rng(1)
    A, u, v = 0.1 * rng.standard_normal((30, 4)), rng.standard_normal(4), 0.1 * rng.standard_normal(30)
    X, y = torch.tensor(tokens), torch.tensor(training.labels)

    def loss(A, u, v):
        return explicit.logistic_loss(((X @ v) * torch.softmax(X @ (A @ u), dim=1)).sum(dim=1), y)

    A_end, u_end, v_end = descend(loss, (A, u, v), 0.3, 25, rates)
    model = prompt_model(training, A=(basis.T @ A, np.zeros((0, 4))), u=u, v=(basis.T @ v, np.zeros(0)), rates=rates)
    *_, weights = parameterisations.gradient_descent(model, training, 0.3, 25)
    np.testing.assert_allclose(basis @ weights["A"], basis @ basis.T @ A_end, atol=1e-12)
    np.testing.assert_allclose(weights["u"], u_end, atol=1e-12)
    np.testing.assert_allclose(basis @ weights["v"], basis @ basis.T @ v_end, atol=1e-12)
    assert np.abs(weights["A"] - model.start["A"]).max() > 1e-2


def test_self_attention_trains_as_autograd_does_with_a_value_matrix():
    """Explicit W_V and a fixed output vector of length one, against v = W_V w_O."""
    tokens, training, basis = in_coordinates()
    rng = np.random.default_rng(2)
    Q, K, V = (0.1 * rng.standard_normal((30, 4)) for _ in range(3))
    w_o = rng.standard_normal(4)
    w_o /= np.linalg.norm(w_o)
    X, y, output = torch.tensor(tokens), torch.tensor(training.labels), torch.tensor(w_o)

    def loss(Q, K, V):
        attention = torch.softmax((X @ Q) @ (X @ K).transpose(1, 2), dim=2)
        return explicit.logistic_loss((attention @ X @ V @ output).mean(dim=1), y)

    Q_end, K_end, V_end = descend(loss, (Q, K, V), 0.3, 25, (1, 1, 1))
    start = {"Q": basis.T @ Q, "K": basis.T @ K, "v": basis.T @ V @ w_o}
    none = {"Q": np.zeros((0, 4)), "K": np.zeros((0, 4)), "v": np.zeros(0)}
    *_, weights = parameterisations.gradient_descent(parameterisations.SelfAttention(start, none), training, 0.3, 25)
    for name, end in (("Q", Q_end), ("K", K_end), ("v", V_end @ w_o)):
        np.testing.assert_allclose(weights[name], basis.T @ end, atol=1e-12)
        assert np.abs(weights[name] - start[name]).max() > 1e-3


def test_the_default_prompt_is_the_reduced_engine_and_its_exact_test_accuracy():
    """Flow to t d/n = 100 by both engines; 20000 fresh samples, within 4.5 standard errors (false alarm < 1e-5)."""
    n, dim, rho = 20, 100, 2.5
    training = parameterisations.draw(n, dim, 2, rho, 0.2, np.random.default_rng(5))
    rows = training.tokens[:, 1, 2:]
    same = reduced.TrainingSet(rows @ rows.T, training.clean_labels, training.labels)
    (theirs,) = flow.gradient_flow(flow.single_head(same, rho), [20.0])
    model = prompt_model(training)
    (weights,) = parameterisations.train(model, training, [20.0])
    out, expected = model.outputs(training.tokens, weights), reduced.outputs(same, theirs.state, rho)
    np.testing.assert_allclose(out.attention[:, 0], expected.attention.T, atol=1e-6)
    np.testing.assert_allclose(out.f, expected.f, rtol=1e-6)
    found = parameterisations.evaluate(model, training, weights, 20_000, np.random.default_rng(0))
    exact = population.test_accuracy(same, theirs.state, rho).value
    assert 0.5 < exact < 0.99
    assert abs(found.test_accuracy - exact) < 4.5 * np.sqrt(exact * (1 - exact) / 20_000)


def test_fresh_features_have_the_law_of_explicit_tokens():
    """First weights drawn in the span and outside it, against a (d, h) matrix: second moments of features, 300 draws
    each, within 5 standard errors (false alarm < 1e-5)."""
    training, rng, width, sd = small(), np.random.default_rng(0), 4, 0.5
    drawn, explicit_moments = [], []
    for _ in range(300):
        model = self_attention_model(training, width, sd, rng)
        _, features = parameterisations.fresh_features(model, training, model.start, 1, rng)
        drawn.append(features[0, 1])
        explicit_moments.append(rng.standard_normal(28) @ (sd * rng.standard_normal((28, 2 * width + 1))))
    a, b = ((np.array(x) ** 2).mean(axis=1) for x in (drawn, explicit_moments))
    assert abs(a.mean() - b.mean()) < 5 * np.sqrt(a.var() / 300 + b.var() / 300)


def test_wide_first_weights_keep_the_kernel_of_their_rows():
    """A (d, 400) matrix is drawn with r columns; its rows keep squared length 400 sd^2 to 5 standard errors."""
    training = small()
    inside, outside = gaussian_weights(training, 400, 0.1, np.random.default_rng(0))
    assert inside.shape == (training.rank, training.rank)
    assert outside.shape[1] == training.rank
    lengths = (inside**2).sum(axis=1)
    assert abs(lengths.mean() - 4.0) < 5 * 4.0 * np.sqrt(2 / 400 / training.rank)


def test_a_matrix_with_a_fixed_query_is_the_prompt_itself():
    training = small()
    q = np.random.default_rng(4).standard_normal(7)
    plain = parameterisations.gradient_descent(prompt_model(training, rates=(q @ q, 0, 1)), training, 0.2, 60)
    matrix = parameterisations.gradient_descent(prompt_model(training, u=q), training, 0.2, 60)
    for one, other in zip(plain, matrix, strict=True):
        np.testing.assert_allclose(other["A"] @ q, one["A"][:, 0], rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(other["v"], one["v"], rtol=1e-9, atol=1e-13)


def test_flow_of_matrix_and_query_conserves_their_balance():
    """A^T A - u u^T is constant along the flow when both have the same rate: why |q|^2 grows with |p|."""
    training = small()
    model = prompt_model(training, u=np.array([0.6, -0.3]), rates=(1, 1, 1))
    weights = parameterisations.train(model, training, [1e3])[0]
    balance = weights["A"].T @ weights["A"] - np.outer(weights["u"], weights["u"])
    np.testing.assert_allclose(balance, -np.outer(model.start["u"], model.start["u"]), atol=1e-6)
    assert weights["u"] @ weights["u"] > 2 * (model.start["u"] @ model.start["u"])


def test_a_frozen_weight_stays_and_moves_when_released():
    training = small()
    head = np.ones(training.rank)
    model = prompt_model(training, v=(head, np.zeros(0)), rates=(1, 0, 0))
    frozen = parameterisations.train(model, training, [5.0])[0]
    np.testing.assert_array_equal(frozen["v"], head)
    assert np.abs(frozen["A"]).max() > 1e-3
    after = parameterisations.train(parameterisations.released(model, frozen, (1, 0, 1)), training, [5.0])[0]
    assert np.abs(after["v"] - head).max() > 1e-3


@pytest.mark.parametrize("head_seed", [0, 1])
def test_normalised_descent_points_where_the_selection_svm_does(head_seed):
    training = small(n=8, dim=60)
    head = np.random.default_rng(head_seed).standard_normal(training.rank)
    best = parameterisations.optimal_tokens(training, head)
    *_, p = parameterisations.normalised_gradient_descent(training, head, 0.05, 4000)
    svm, other = (token_selection_svm(training.tokens, s).direction for s in (best, (best + 1) % 3))
    cosine, wrong = (p @ x / np.linalg.norm(p) / np.linalg.norm(x) for x in (svm, other))
    assert cosine > 0.99
    assert wrong < 0.9


def test_normalised_descent_takes_the_direction_of_the_gradient_and_survives_its_underflow():
    training = small(n=4, dim=40)
    head = np.random.default_rng(0).standard_normal(training.rank)
    model = prompt_model(training, v=(head, np.zeros(0)), rates=(1, 0, 0))
    pull = model.velocity(training, model.start)["A"][:, 0]
    first = next(parameterisations.normalised_gradient_descent(training, head, 0.5, 1))
    np.testing.assert_allclose(first, 0.5 * pull / np.linalg.norm(pull), rtol=1e-12)
    *_, before, last = parameterisations.normalised_gradient_descent(training, head, 50.0, 2000)
    assert np.linalg.norm(last) > 1e4
    assert np.linalg.norm(last - before) == pytest.approx(50.0)
    at_last = replace(model, start={**model.start, "A": last[:, None]})
    assert np.abs(at_last.velocity(training, at_last.start)["A"]).max() == 0.0


def test_a_head_that_ranks_no_tokens_is_refused():
    training = small()
    with pytest.raises(ParameterError, match=r"^head must give two tokens"):
        next(parameterisations.normalised_gradient_descent(training, np.zeros(training.rank), 0.1, 1))


def test_verdicts_follow_their_criteria():
    def word(train, test):
        return parameterisations.Result(train, train, test, 0.5, 0.5).verdict

    assert [word(1.0, 0.99), word(1.0, 0.6), word(0.9, 0.99), word(1.0, 0.9), word(0.9, 0.6)] == [
        "benign",
        "harmful",
        "not overfitting",
        "mixed",
        "mixed",
    ]


@pytest.mark.parametrize("dim", [3, 9, 200])
def test_any_dimension_can_be_drawn_and_trained(dim):
    training = small(n=4, dim=dim)
    rng = np.random.default_rng(0)
    models = [
        prompt_model(training),
        self_attention_model(training, 5, 0.1, rng),
        prompt_model(training, A=gaussian_weights(training, 6, 0.1, rng), u=0.1 * np.ones(min(6, training.rank))),
    ]
    for model in models:
        (weights,) = parameterisations.train(model, training, [1.0])
        assert 0 <= parameterisations.evaluate(model, training, weights, 200, rng).test_accuracy <= 1
