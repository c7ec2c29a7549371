"""The ledger: verdicts of all records, checked against the committed ones."""

import json

import numpy as np
import pytest
from scipy import stats

from benign_attention import ledger, paths
from benign_attention.claims import Claim, load_claims
from benign_attention.cli import main
from benign_attention.records import Metric, Record, seed_metric, write_json

METRIC = {"value": 1.0, "low": 0.9, "high": 1.1, "n_seeds": 1, "per_seed": [1.0], "kind": "95 % t interval over seeds"}


def claim(name="X-1", **changes) -> Claim:
    fields = {
        "id": name,
        "paper": "magen2025",
        "place": "nowhere",
        "says": "The error is small.",
        "why": "theory",
        "chapter": "two_step_gd",
        "figure": "fig-trajectory",
        "metric": "error",
        "supported": {"below": 0.1},
        "refuted": {"above": 0.2},
        "verdict": {"reader": "supported"},
    }
    return Claim(**{**fields, **changes})


def records(scale="reader", **metrics) -> dict[str, Record]:
    return {"two_step_gd": Record("two_step_gd", scale, {}, metrics)}


def test_the_committed_records_give_the_committed_verdicts():
    assert ledger.problems(ledger.entries("reader"), "reader") == []


def test_what_differs_from_the_committed_verdict_is_told():
    good, bad = seed_metric([0.01, 0.02, 0.03]), seed_metric([0.4, 0.41, 0.42])
    assert ledger.problems(ledger.from_records([claim()], records(error=good)), "reader") == []
    (line,) = ledger.problems(ledger.from_records([claim()], records(error=bad)), "reader")
    assert line == "X-1: refuted, committed is supported"
    (line,) = ledger.problems(ledger.from_records([claim()], {}), "reader")
    assert line == "X-1: no record of two_step_gd at scale reader"
    (line,) = ledger.problems(ledger.from_records([claim(verdict={})], records(error=good)), "reader")
    assert line == "X-1: no committed verdict at scale reader, found supported"


def test_a_claim_that_is_marked_not_run_needs_no_record_and_names_the_command():
    marked = claim(verdict={"reader": "not run"}, command="benign-attention run two_step_gd --scale paper")
    (entry,) = ledger.from_records([marked], {})
    assert ledger.problems([entry], "reader") == []
    assert entry.verdict.details[-1] == "to run it: benign-attention run two_step_gd --scale paper"
    measured = ledger.from_records([marked], records(error=seed_metric([0.01, 0.02])))
    assert ledger.problems(measured, "reader") != []


def test_smoke_scale_decides_nothing():
    (entry,) = ledger.from_records([claim()], records("smoke", error=seed_metric([0.01, 0.02, 0.03])))
    assert entry.verdict.outcome == "inconclusive" and entry.p_value is None
    (unmeasured,) = ledger.from_records([claim()], records("smoke"))
    assert unmeasured.verdict.outcome == "inconclusive"
    (needs_more,) = ledger.from_records([claim(command="with a network")], records("smoke"))
    assert needs_more.verdict.outcome == "not run"


def test_a_verdict_is_supported_exactly_when_its_p_value_is_below_five_per_cent():
    rng = np.random.default_rng(0)
    for _ in range(200):
        metric = seed_metric(rng.normal(0.0, 0.1, rng.integers(2, 8)))
        (entry,) = ledger.from_records([claim()], records(error=metric))
        values = np.array(metric.per_seed)
        p = stats.ttest_1samp(values, 0.1).pvalue if values.mean() < 0.1 else 1.0
        assert (entry.verdict.outcome == "supported") == (p < 0.05)
        if entry.p_value is not None:
            assert entry.p_value == pytest.approx(p)


def test_a_claim_at_several_places_is_as_weak_as_its_weakest():
    there = {"metric": "far", "where": "far", "supported": {"below": 0.1}, "refuted": {"above": 0.2}}
    near, far = seed_metric([0.01, 0.011, 0.012]), seed_metric([0.05, 0.06, 0.07])
    (both,) = ledger.from_records([claim(also=[there])], records(error=near, far=far))
    (alone,) = ledger.from_records([claim()], records(error=far))
    assert both.verdict.outcome == "supported" and both.p_value == pytest.approx(alone.p_value)


def test_seeds_that_agree_and_brackets_have_no_p_value():
    same = seed_metric([0.0, 0.0, 0.0])
    bracket = Metric(0.01, 0.0, 0.02, 3, [0.0, 0.01, 0.02], "bracket over seeds")
    for metric in (same, bracket):
        (entry,) = ledger.from_records([claim()], records(error=metric))
        assert entry.verdict.outcome == "supported" and entry.p_value is None and entry.firm is None


def test_holm_is_the_textbook_procedure():
    assert ledger.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]  # against .05/3, -, .05/2, .05/4
    assert ledger.holm([None, 0.04]) == [None, True]
    assert ledger.holm([]) == []
    assert ledger.holm([0.001, float("nan"), 0.9]) == [True, None, False]


def test_holm_errs_in_no_more_than_five_per_cent_of_ledgers():
    """2000 ledgers of 20 true null hypotheses: the bound is .05; above .0675 only with probability 3e-4."""
    rng = np.random.default_rng(1)
    wrong = sum(any(ledger.holm(list(row))) for row in rng.random((2000, 20)))
    assert wrong / 2000 < 0.0675


def test_the_command_prints_every_claim_and_accepts_the_committed_records(capsys):
    assert main(["claims"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{one.id} " in printed for one in load_claims())


def test_the_command_fails_when_a_verdict_changes_or_a_record_is_missing(tmp_path, capsys):
    for file in (paths.RECORDS / "reader").glob("*.json"):
        data = json.loads(file.read_text(encoding="utf-8"))
        if file.stem == "two_step_gd":
            data["metrics"]["train_accuracy_step2"].update(value=0.5, low=0.4, high=0.6)
        if file.stem != "data_model":
            write_json(tmp_path / "reader" / file.name, data)
    assert main(["claims", "--records", str(tmp_path)]) == 1
    complaints = capsys.readouterr().err.splitlines()
    assert "SH-1a: refuted, committed is supported" in complaints
    assert "Q-DM-1: no record of data_model at scale reader" in complaints
    assert len(complaints) == 4


@pytest.mark.parametrize("arguments", [["--scale", "smoke"], ["--scale", "huge"], ["--records", "nowhere"]])
def test_the_command_refuses_what_it_cannot_judge(arguments, capsys):
    assert main(["claims", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: "{",
        lambda data: "",
        lambda data: "[]",
        lambda data: json.dumps({**data, "metrics": None}),
        lambda data: json.dumps({**data, "more": 1}),
        lambda data: json.dumps({**data, "chapter": "data_model"}),
        lambda data: json.dumps({**data, "scale": "paper"}),
        lambda data: json.dumps({**data, "metrics": {"error": {"value": 1}}}),
        lambda data: json.dumps({**data, "metrics": {**data["metrics"], "x": {**METRIC, "low": "much"}}}),
        lambda data: json.dumps({**data, "metrics": {**data["metrics"], "x": {**METRIC, "per_seed": [float("nan")]}}}),
    ],
)
def test_the_command_refuses_a_file_that_is_not_the_record_it_should_be(spoil, tmp_path, capsys):
    for file in (paths.RECORDS / "reader").glob("*.json"):
        text = file.read_text(encoding="utf-8")
        (tmp_path / "reader").mkdir(exist_ok=True)
        spoilt = spoil(json.loads(text)) if file.stem == "two_step_gd" else text
        (tmp_path / "reader" / file.name).write_text(spoilt, encoding="utf-8")
    assert main(["claims", "--records", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "two_step_gd.json must be a record of two_step_gd" in line
