"""Verdicts move when the physics moves: the code that makes a record, run on engines with one fault each.

`broken_engines.yml` says which claims must turn under which fault, and which must not.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml

from benign_attention import paths, population, reduced
from benign_attention.claims import judge, load_claims
from benign_attention.experiments import two_step_gd as chapter

TABLE = yaml.safe_load((paths.ROOT / "tests/broken_engines.yml").read_text(encoding="utf-8"))
CLAIMS = {claim.id: claim for claim in load_claims("two_step_gd")}


def p_noise_flipped(monkeypatch):
    """Row 0 of a state belongs to p, row 1 to v."""
    healthy = reduced.velocity
    signs = np.array([-1.0, 1.0])[:, None]
    monkeypatch.setattr(reduced, "velocity", lambda *a: replace(healthy(*a), noise=healthy(*a).noise * signs))


def p_frozen(monkeypatch):
    healthy = reduced.velocity
    only_v = np.array([0.0, 1.0])[:, None]

    def velocity(*arguments):
        ahead = healthy(*arguments)
        return reduced.State(ahead.signal * only_v, ahead.noise * only_v)

    monkeypatch.setattr(reduced, "velocity", velocity)


def labels_kept(monkeypatch):
    healthy = reduced.draw

    def draw(*arguments, **named):
        training = healthy(*arguments, **named)
        return replace(training, labels=training.clean_labels)

    monkeypatch.setattr(reduced, "draw", draw)


def shared_noise(monkeypatch):
    def test_accuracy(training, state, signal_norm, *_):
        right = reduced.outputs(training, state, signal_norm).f * training.clean_labels > 0
        return population.Estimate(right.mean(axis=-1), np.zeros(right.shape[:-1]))

    monkeypatch.setattr(population, "test_accuracy", test_accuracy)


def uniform_attention(monkeypatch):
    """On training and on fresh samples."""
    healthy, healthy_law = reduced.outputs, population.fresh_token

    def outputs(*arguments):
        out = healthy(*arguments)
        attention = np.full_like(out.attention, 1 / out.attention.shape[-2])
        return replace(out, attention=attention, f=(attention * out.values).sum(axis=-2))

    def fresh_token(training, state, *rest):
        blind = reduced.State(*(x * np.array([0.0, 1.0])[:, None] for x in (state.signal, state.noise)))
        return healthy_law(training, blind, *rest)

    monkeypatch.setattr(reduced, "outputs", outputs)
    monkeypatch.setattr(population, "fresh_token", fresh_token)


def step_times_100(monkeypatch):
    healthy = reduced.step
    monkeypatch.setattr(reduced, "step", lambda t, s, norm, size: healthy(t, s, norm, 100 * np.asarray(size)))


FAULTS = {
    fault.__name__: fault
    for fault in (p_noise_flipped, p_frozen, labels_kept, shared_noise, uniform_attention, step_times_100)
}


@contextmanager
def broken(name: str):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(chapter, "step_size_map", lambda params: None)  # no claim rests on the maps
        if name:
            FAULTS[name](monkeypatch)
        yield


@cache
def verdicts(fault: str = "") -> dict[str, str]:
    params = chapter.Params()
    with broken(fault):
        metrics = {**chapter.measure(params), **chapter.explore(params).metrics}
    return {name: judge(claim, metrics).outcome for name, claim in CLAIMS.items()}


def test_every_fault_has_its_row_and_every_row_names_claims():
    assert set(TABLE) == set(FAULTS)
    for row in TABLE.values():
        assert row["must_turn"] and row["must_not"]
        assert set(row["must_turn"]) | set(row["must_not"]) <= set(CLAIMS)
        assert not set(row["must_turn"]) & set(row["must_not"])


@pytest.mark.slow
def test_the_healthy_engine_gives_the_committed_verdicts():
    assert verdicts() == {name: claim.expected["reader"] for name, claim in CLAIMS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_verdicts_turn_where_the_fault_reaches_and_nowhere_else(fault):
    found, healthy = verdicts(fault), verdicts()
    turned = {name for name in CLAIMS if found[name] != healthy[name]}
    assert set(TABLE[fault]["must_turn"]) <= turned, found
    assert not set(TABLE[fault]["must_not"]) & turned, found
