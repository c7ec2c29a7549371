"""Gradient descent with weight decay: against torch, the reduced engine and its own long run."""

import numpy as np
import pytest
import torch
from test_margin import drawn

from benign_attention import explicit, reduced
from benign_attention.data import draw_single_head
from benign_attention.margin_problem import coordinates_of, problem_of
from benign_attention.reduced import TrainingSet
from benign_attention.weight_decay import come_to_rest, gradient_descent, gradient_flow, objective


def test_gradient_descent_is_that_of_torch_with_its_own_weight_decay():
    data = draw_single_head(10, 50, 3, 3.0, 0.2, np.random.default_rng(0))
    training = reduced.from_data(data)
    problem = problem_of(training, 3.0)
    model = explicit.SingleHeadAttention(50)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.02)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    for _ in range(30):
        optimiser.zero_grad()
        explicit.logistic_loss(model(tokens), labels).backward()
        optimiser.step()
    p, v = gradient_descent(problem, 0.02, 0.3, 30)
    assert np.linalg.norm(p) == pytest.approx(model.p.norm().item(), rel=1e-10)
    assert np.linalg.norm(v) == pytest.approx(model.v.norm().item(), rel=1e-10)
    outputs = (problem.attention(p) * (problem.tokens @ v)).sum(axis=1)
    np.testing.assert_allclose(outputs, model(tokens).detach().numpy(), rtol=1e-9, atol=1e-12)


def test_without_decay_it_is_the_reduced_engine():
    training, problem = drawn(12, 300, 2.0, 0.2, 0, n_tokens=3)
    rho, beta = 2.0 * np.sqrt(300 / 12), 12 / 300
    batch = TrainingSet(training.gram[None], training.clean_labels[None], training.labels[None])
    *_, state = reduced.gradient_descent(batch, rho, beta, 20)
    here = gradient_descent(problem, 0.0, beta, 20)
    np.testing.assert_allclose(
        here, coordinates_of(problem, reduced.State(state.signal[0], state.noise[0])), atol=1e-12
    )


def test_gradient_is_the_slope_of_the_objective():
    _, problem = drawn(8, 100, 2.0, 0.2, 0)
    rng = np.random.default_rng(0)
    weights, d = problem.unit * rng.standard_normal((2, 2, problem.tokens.shape[-1]))
    _, gradient, _ = objective(problem, weights, 3.0)
    ahead, behind = (objective(problem, weights + h * d, 3.0)[0] for h in (1e-5, -1e-5))
    assert (ahead - behind) / 2e-5 == pytest.approx(np.sum(gradient * d), rel=1e-6)


@pytest.mark.parametrize("c", [1.0, 1.6, 2.5])
def test_rest_is_where_long_gradient_descent_goes(c):
    """The polish stays in the basin: descent ten times as long moves the weights towards the same point."""
    n, dim = 20, 1600
    _, problem = drawn(n, dim, c, 0.1, 0)
    decay, step = 1e-2 * dim / n, 5 * n / dim
    early = gradient_descent(problem, decay, step, 60)
    late = gradient_descent(problem, decay, step, 6000, early)
    rest = come_to_rest(problem, decay, early)
    assert rest.converged and rest.relative_gradient < 1e-6
    end = np.stack([rest.p, rest.v])
    assert np.linalg.norm(late - end) < 1e-6 * np.linalg.norm(end)
    assert np.linalg.norm(early - end) > 1e-3 * np.linalg.norm(end)


def test_flow_is_gradient_descent_with_small_steps():
    n, dim = 20, 1600
    _, problem = drawn(n, dim, 2.0, 0.1, 0)
    decay, unit_time = 1e-2 * dim / n, n / dim
    flowed = gradient_flow(problem, decay, 50 * unit_time)
    errors = [
        np.linalg.norm(gradient_descent(problem, decay, b * unit_time, int(50 / b)) - flowed) / np.linalg.norm(flowed)
        for b in (0.1, 0.05)
    ]
    assert errors[1] < 0.6 * errors[0] and errors[0] < 0.01


def test_a_point_that_is_not_at_rest_is_not_called_converged(monkeypatch):
    from benign_attention import weight_decay

    monkeypatch.setattr(weight_decay, "CONVERGED", 0.0)
    _, problem = drawn(8, 100, 2.0, 0.1, 0)
    assert not come_to_rest(problem, 1.0, 0.01 * np.ones((2, problem.tokens.shape[-1]))).converged
