"""Every claim that holds has a negative control, and no longer holds there."""

import json

import pytest

from benign_attention.claims import judge, load_claims
from benign_attention.experiments import load

HELD = ("supported", "supported in part")
CHANGES = {
    (claim.chapter, json.dumps(control.change)): control.change for claim in load_claims() for control in claim.controls
}


def test_claims_that_hold_have_a_control_or_say_why_not():
    for claim in load_claims():
        if claim.expected.get("reader") in HELD:
            assert bool(claim.controls) != bool(claim.no_control), claim.id


@pytest.mark.controls
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("chapter", "change"), CHANGES, ids=str)
def test_claims_fail_where_they_should(chapter, change, monkeypatch):
    """The whole chapter is measured, as the reader's record is: no committed verdict survives its control."""
    module, change = load(chapter), CHANGES[chapter, change]
    params = module.Params(**change)
    metrics = {**module.measure(params), **module.explore(params).metrics}
    named = [c for c in load_claims(chapter) if change in [control.change for control in c.controls]]
    for claim in named:
        outcome = judge(claim, metrics).outcome
        assert outcome not in ("supported", "not run"), claim.id
        assert outcome != claim.expected["reader"] or outcome not in HELD, claim.id
