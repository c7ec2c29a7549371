"""A verdict is decided by the whole interval, never by the point estimate alone."""

import pytest
from pydantic import ValidationError

from benign_attention.claims import Claim, judge
from benign_attention.records import Metric


def metric(low, high):
    value = None if low is None else (low + high) / 2
    return Metric(value, low, high, 5, [], "95 % t interval over seeds")


def claim(**changes):
    fields = {
        "id": "X-1",
        "paper": "magen2025",
        "place": "nowhere",
        "says": "The error is small.",
        "why": "theory",
        "chapter": "two_step_gd",
        "figure": "fig-trajectory",
        "metric": "error",
        "supported": {"below": 0.1},
        "refuted": {"above": 0.2},
    }
    return Claim(**{**fields, **changes})


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((0.01, 0.05), "supported"),
        ((0.25, 0.3), "refuted"),
        ((0.05, 0.15), "inconclusive"),
        ((0.12, 0.18), "inconclusive"),
        ((0.05, 0.3), "inconclusive"),
        ((None, None), "inconclusive"),
    ],
)
def test_the_whole_interval_decides(interval, outcome):
    assert judge(claim(), {"error": metric(*interval)}).outcome == outcome


def test_a_metric_that_was_not_measured_is_not_run():
    verdict = judge(claim(), {})
    assert verdict.outcome == "not run" and "error" in verdict.details[0]


def test_support_here_and_not_there_is_support_in_part_and_names_the_place():
    there = {"metric": "error_far", "where": "far away", "supported": {"below": 0.1}, "refuted": {"above": 0.2}}
    far = {"error": metric(0.01, 0.02), "error_far": metric(0.4, 0.5)}
    verdict = judge(claim(also=[there]), far)
    assert verdict.outcome == "supported in part" and verdict.details[1].startswith("far away: refuted")
    assert judge(claim(also=[there]), {**far, "error_far": metric(0.0, 0.01)}).outcome == "supported"
    assert judge(claim(also=[there]), {**far, "error": metric(0.4, 0.5)}).outcome == "refuted"


def test_a_misspelt_key_is_an_error():
    with pytest.raises(ValidationError):
        claim(refutted={"above": 1})
    with pytest.raises(ValidationError):
        claim(supported={"bellow": 1})


@pytest.mark.parametrize(
    ("supported", "refuted"),
    [({"below": 0.1}, {"above": 0.05}), ({"below": 0.1}, {"above": 2, "below": 1}), ({}, {"above": 1})],
)
def test_a_claim_that_could_not_come_out_either_way_is_an_error(supported, refuted):
    with pytest.raises(ValidationError, match="two regions that do not overlap"):
        claim(supported=supported, refuted=refuted)
