"""Verdicts move when the physics moves: the code that makes a record, run on engines with one fault each.

`broken_engines.yml` says which claims must turn under which fault, and which must not.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml
from scipy.special import softmax

from benign_attention import paths, population, reduced, selection, selection_population
from benign_attention.claims import Claim, judge, load_claims
from benign_attention.experiments import delayed_generalization, token_selection, two_step_gd
from benign_attention.parallel import map_processes
from benign_attention.population import Estimate
from benign_attention.records import Metric
from benign_attention.selection_population import FreshSample, TestQuantities

TABLE = yaml.safe_load((paths.ROOT / "tests/broken_engines.yml").read_text(encoding="utf-8"))


# ---- the faults ------------------------------------------------------------------------------------------------------


def p_noise_flipped(monkeypatch):
    """Row 0 of a state of `reduced` belongs to p, row 1 to v; coordinates 0 and 1 of `selection` are the signals."""
    healthy, healthy_pull = reduced.velocity, selection._pull
    signs = np.array([-1.0, 1.0])[:, None]
    monkeypatch.setattr(reduced, "velocity", lambda *a: replace(healthy(*a), noise=healthy(*a).noise * signs))

    def pull(training, state):
        found = healthy_pull(training, state)
        return np.where(np.arange(found.shape[-1]) < 2, found, -found)

    monkeypatch.setattr(selection, "_pull", pull)


def p_frozen(monkeypatch):
    """In token selection W starts to move only when p has moved."""
    healthy, healthy_pull = reduced.velocity, selection._pull
    only_v = np.array([0.0, 1.0])[:, None]

    def velocity(*arguments):
        ahead = healthy(*arguments)
        return reduced.State(ahead.signal * only_v, ahead.noise * only_v)

    monkeypatch.setattr(reduced, "velocity", velocity)
    monkeypatch.setattr(selection, "_pull", lambda *a: 0.0 * healthy_pull(*a))


def labels_kept(monkeypatch):
    for engine in (reduced, selection):

        def draw(*arguments, healthy=engine.draw, **named):
            training = healthy(*arguments, **named)
            return replace(training, labels=training.clean_labels)

        monkeypatch.setattr(engine, "draw", draw)


def shared_noise(monkeypatch):
    """Fresh samples are the training samples, with their true labels."""

    def test_accuracy(training, state, signal_norm, *_):
        right = reduced.outputs(training, state, signal_norm).f * training.clean_labels > 0
        return Estimate(right.mean(axis=-1), np.zeros(right.shape[:-1]))

    def fresh_sample(training, state):
        logits, values = selection.outputs(training, state).logits, training.clean_labels[..., None] * training.values
        return FreshSample(logits, values, *np.zeros((3, *logits.shape[:-2])))

    def test_quantities(law, **_):
        attention = softmax(law.logits, axis=-1)
        margin = (attention * law.values).sum(axis=-1)
        attention = selection.by_role(attention).mean(axis=-2)
        means = ((margin > 0).mean(axis=-1), np.logaddexp(0.0, -margin).mean(axis=-1), attention)
        return TestQuantities(*(Estimate(mean, 0.0 * mean) for mean in means))

    monkeypatch.setattr(population, "test_accuracy", test_accuracy)
    monkeypatch.setattr(selection_population, "fresh_sample", fresh_sample)
    monkeypatch.setattr(selection_population, "test_quantities", test_quantities)


def uniform_attention(monkeypatch):
    """On training and on fresh samples; in token selection without a derivative either, else p grows without end."""
    healthy, healthy_law = reduced.outputs, population.fresh_token
    healthy_selection, healthy_sample = selection.outputs, selection_population.fresh_sample

    def outputs(*arguments):
        out = healthy(*arguments)
        attention = np.full_like(out.attention, 1 / out.attention.shape[-2])
        return replace(out, attention=attention, f=(attention * out.values).sum(axis=-2))

    def fresh_token(training, state, *rest):
        blind = reduced.State(*(x * np.array([0.0, 1.0])[:, None] for x in (state.signal, state.noise)))
        return healthy_law(training, blind, *rest)

    def outputs_of_selection(training, state):
        out = healthy_selection(training, state)
        attention = np.full_like(out.attention, 1 / training.n_tokens)
        return replace(out, attention=attention, f=training.values.mean(axis=-1))

    def fresh_sample(training, state):
        return healthy_sample(training, replace(state, query=0.0 * state.query))

    monkeypatch.setattr(reduced, "outputs", outputs)
    monkeypatch.setattr(population, "fresh_token", fresh_token)
    monkeypatch.setattr(selection, "outputs", outputs_of_selection)
    monkeypatch.setattr(selection, "logit_gradient", lambda training, out: np.zeros(training.tokens.shape[:-1]))
    monkeypatch.setattr(selection_population, "fresh_sample", fresh_sample)


def step_times_100(monkeypatch):
    healthy, healthy_descent = reduced.step, selection.gradient_descent
    monkeypatch.setattr(reduced, "step", lambda t, s, norm, size: healthy(t, s, norm, 100 * np.asarray(size)))
    monkeypatch.setattr(selection, "gradient_descent", lambda t, size, steps: healthy_descent(t, 100 * size, steps))


FAULTS = {
    fault.__name__: fault
    for fault in (p_noise_flipped, p_frozen, labels_kept, shared_noise, uniform_attention, step_times_100)
}


@contextmanager
def broken(name: str):
    """The engine with this fault in this process; what no claim rests on is left out."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(two_step_gd, "step_size_map", lambda params: None)
        monkeypatch.setattr(delayed_generalization, "limit_delays", lambda *_: None)
        for chapter in (token_selection, delayed_generalization):
            monkeypatch.setattr(chapter, "map_processes", lambda function, jobs: [function(job) for job in jobs])
        if name:
            FAULTS[name](monkeypatch)
        delayed_generalization._trajectories.cache_clear()
        yield
        delayed_generalization._trajectories.cache_clear()


# ---- what is measured on them ----------------------------------------------------------------------------------------


def measure_two_steps():
    params = two_step_gd.Params()
    return two_step_gd.measure(params) | two_step_gd.explore(params).metrics


def measure_selection():
    """The points that claims rest on, by the chapter's names, at reader scale."""
    params = token_selection.Params()
    metrics = {}
    for dim, norm in ((250, 100.0), (1000, 100.0), (5000, 5.0)):
        found = token_selection.descend(params, [params.point(dim=dim, signal_norm=norm)], params.n_seeds, [1000])
        metrics |= token_selection._read_metrics(found[0, :, 0], f"d{dim}_mu{norm:g}")
    for dim, norm, times, names in (
        (1000, 100.0, [1e12], ["d1000_mu100_t1e+12"]),
        (5000, 5.0, [1e12, 1e30], ["d5000_mu5_t1e+12", "d5000_mu5_t1e+30"]),
        (500, 50.0, [1e12], ["x100_d500_t1e+12"]),
        (500_000, 50.0, [params.flow_time, 1e12], ["x0.1_d500000", "x0.1_d500000_t1e+12"]),
    ):
        found = token_selection.follow(params, [params.point(dim=dim, signal_norm=norm)], params.few_seeds, times)
        for k, name in enumerate(names):
            metrics |= token_selection._read_metrics(found[0, :, k], name)
    one_norm = params.replace(norm_grid=[20.0])  # no claim rests on the others
    return metrics | token_selection._selected_metrics(token_selection.selected(one_norm))


def measure_delay():
    """Fewer values of n SNR^2, three seeds, a shorter flow."""
    params = delayed_generalization.Params(n_seeds=3, n_snr2_grid=[0.5, 0.1], t_max=1e26)
    found = delayed_generalization.trajectories(params)
    return delayed_generalization.grid_metrics(found, delayed_generalization.delay_fit(params))


def measure(fault: str) -> dict[str, Metric]:
    with broken(fault):
        return measure_two_steps() | measure_selection() | measure_delay()


@cache
def measured() -> dict[str, dict[str, Metric]]:
    """By fault; each breaks the engine in a worker process only."""
    names = ["", *FAULTS]
    return dict(zip(names, map_processes(measure, names, batch=1), strict=True))


@cache
def claims() -> tuple[Claim, ...]:
    """Those whose own condition is measured here, less conditions elsewhere that are not."""
    known = measured()[""]
    found = [claim for claim in load_claims() if claim.metric in known]
    return tuple(c.model_copy(update={"also": [there for there in c.also if there.metric in known]}) for c in found)


def verdicts(fault: str = "") -> dict[str, str]:
    return {claim.id: judge(claim, measured()[fault]).outcome for claim in claims()}


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_fault_has_its_row():
    assert set(TABLE) == set(FAULTS)
    known = {claim.id for claim in load_claims()}
    for row in TABLE.values():
        assert row["must_turn"] and row["must_not"]
        assert set(row["must_turn"]) | set(row["must_not"]) <= known
        assert not set(row["must_turn"]) & set(row["must_not"])


@pytest.mark.slow
def test_the_healthy_engine_gives_the_committed_verdicts():
    assert verdicts() == {claim.id: claim.expected["reader"] for claim in claims()}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_verdicts_turn_where_the_fault_reaches_and_nowhere_else(fault):
    found, healthy = verdicts(fault), verdicts()
    turned = {name for name in found if found[name] != healthy[name]}
    must_turn, must_not = set(TABLE[fault]["must_turn"]), set(TABLE[fault]["must_not"])
    assert must_turn | must_not <= set(found)
    assert must_turn <= turned, found
    assert not must_not & turned, found
